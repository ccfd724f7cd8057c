//! Calls to etcd.

use std::error::Error as _;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{
    Client, Compare, CompareOp, GetOptions, KeyValue, PutOptions, Txn, TxnOp, TxnOpResponse, WatchOptions,
    WatchStream,
};
use keelson_config::Etcd as Settings;
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout, timeout_at};
use tonic::{Code, Status};

use crate::connect;
use crate::error::EtcdError;
use crate::keys::Range;

/// How long one member may take for a call.
pub(crate) const ATTEMPT: Duration = Duration::from_secs(3);
/// How long all members together may take.
const DEADLINE: Duration = Duration::from_secs(10);
/// When a call has ended at the latest: the last member may be asked just before the deadline.
pub const CALL_ENDS_WITHIN: Duration = DEADLINE.saturating_add(ATTEMPT);
/// Before the same call goes to the next member.
const PAUSE: Duration = Duration::from_millis(50);
/// Keys of one page. One value may have 1.5 MiB (`--max-request-bytes`).
const PAGE: i64 = 32;
/// The largest answer.
const MAX_ANSWER: usize = 64 << 20;

/// A key and what stands there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The key.
    pub key: String,
    /// The value.
    pub value: Vec<u8>,
    /// The revision that made the key; another one when it was deleted in between.
    pub create_revision: i64,
    /// The revision of its last change.
    pub mod_revision: i64,
    /// The lease that it ends with; 0: none.
    pub lease: i64,
}

impl From<&KeyValue> for Entry {
    fn from(kv: &KeyValue) -> Self {
        Self {
            key: String::from_utf8_lossy(kv.key()).into_owned(),
            value: kv.value().to_vec(),
            create_revision: kv.create_revision(),
            mod_revision: kv.mod_revision(),
            lease: kv.lease(),
        }
    }
}

/// A range at one revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listing {
    /// In the order of their keys.
    pub entries: Vec<Entry>,
    /// The revision of the store.
    pub revision: i64,
    /// The id of the cluster, which a restored one changes where it is given new members or another token.
    pub cluster: u64,
}

/// What a key must be for a write to be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expect {
    /// There is no such key.
    Absent,
    /// Its last change was this one.
    Revision(i64),
    /// It ends with this lease.
    Lease(i64),
}

/// A part of a write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operation {
    /// Sets a key.
    Put {
        /// The key.
        key: String,
        /// Its value.
        value: Vec<u8>,
        /// The lease that it ends with; 0: none.
        lease: i64,
    },
    /// Removes a key.
    Delete {
        /// The key.
        key: String,
    },
}

/// What became of a write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Written {
    /// It was made, and this is its revision.
    Done(i64),
    /// A key was not as expected. The keys that were asked about as they are, `None` for one that is not there.
    Conflict(Vec<Option<Entry>>),
}

/// A connection to an etcd cluster. Cheap to clone.
#[derive(Clone)]
pub struct Etcd(Arc<Inner>);

struct Inner {
    settings: Settings,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    client: Option<Client>,
    /// Which connection it is: one that failed is given up once, however many calls were on it.
    generation: u64,
    /// The member to connect to, counted over the endpoints.
    member: usize,
}

impl fmt::Debug for Etcd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Etcd").field("endpoints", &self.0.settings.endpoints).finish_non_exhaustive()
    }
}

impl Etcd {
    /// A cluster; nothing is connected before the first call, and which member is the first is left to chance.
    pub fn new(settings: Settings) -> Self {
        let member = fastrand::usize(..settings.endpoints.len().max(1));
        Self(Arc::new(Inner { settings, state: Mutex::new(State { member, ..State::default() }) }))
    }

    /// The members, for messages.
    pub fn endpoints(&self) -> String {
        self.0.settings.endpoints.join(", ")
    }

    /// The connection as it is, or a new one.
    async fn client(&self) -> Result<(Client, u64), EtcdError> {
        let mut state = self.0.state.lock().await;
        if let Some(client) = &state.client {
            return Ok((client.clone(), state.generation));
        }
        let endpoints = &self.0.settings.endpoints;
        let none = || EtcdError::Endpoint { endpoint: String::new() };
        let endpoint = endpoints.get(state.member % endpoints.len().max(1)).ok_or_else(none)?;
        let made = timeout(ATTEMPT, connect::client(&self.0.settings, endpoint)).await;
        let made = made.unwrap_or_else(|_| Err(self.late()));
        state.generation += 1;
        match made {
            Ok(client) => {
                state.client = Some(client.clone());
                Ok((client, state.generation))
            }
            Err(error) => {
                state.member += 1;
                Err(error)
            }
        }
    }

    /// Gives a connection up; the next one goes to the next member and reads the files anew.
    pub(crate) async fn give_up(&self, generation: u64) {
        let mut state = self.0.state.lock().await;
        if state.generation == generation && state.client.take().is_some() {
            state.member += 1;
        }
    }

    /// `error` of a stream in our words.
    pub(crate) fn failed(&self, what: &str, error: etcd_client::Error) -> EtcdError {
        failed(&self.0.settings.endpoints, what, error)
    }

    fn late(&self) -> EtcdError {
        let message = format!("no answer within {} s", ATTEMPT.as_secs());
        EtcdError::Unreachable { endpoints: self.endpoints(), message }
    }

    /// Makes a call that may be made twice, with one member after the other until one answers. The call is told whether
    /// it may have been made before.
    async fn call<T, F>(&self, what: &str, make: impl Fn(Client) -> F) -> Result<(T, bool), EtcdError>
    where
        F: Future<Output = Result<T, etcd_client::Error>>,
    {
        let end = Instant::now() + DEADLINE;
        let (mut again, mut was_stale) = (false, false);
        loop {
            let failure = match self.client().await {
                Err(error) => error,
                Ok((client, generation)) => match timeout(ATTEMPT, make(client)).await {
                    Ok(Ok(answer)) => return Ok((answer, again)),
                    Ok(Err(error)) => {
                        again = true;
                        let stale = is_stale_token(&error);
                        if stale || is_denied(&error) || is_transient(&error) {
                            self.give_up(generation).await;
                        }
                        // The next connection gets a token of now; a second one does no more than that.
                        if stale && !was_stale {
                            was_stale = true;
                            continue;
                        }
                        failed(&self.0.settings.endpoints, what, error)
                    }
                    Err(_) => {
                        again = true;
                        self.give_up(generation).await;
                        self.late()
                    }
                },
            };
            let pause = PAUSE.mul_f32(0.5 + fastrand::f32());
            if !failure.is_transient() || Instant::now() + pause >= end {
                return Err(failure);
            }
            tokio::time::sleep(pause).await;
        }
    }

    /// The keys of `range` at one revision.
    ///
    /// # Errors
    /// No member answers in time, or the user may not read it.
    pub async fn list(&self, range: &Range) -> Result<Listing, EtcdError> {
        let what = format!("to list {}", range.start);
        let mut listing = Listing { entries: Vec::new(), revision: 0, cluster: 0 };
        let mut start = range.start.clone().into_bytes();
        loop {
            let options = GetOptions::new()
                .with_range(range.end.clone())
                .with_limit(PAGE)
                .with_revision(listing.revision);
            let (answer, _) = self
                .call(&what, |client| {
                    let (start, options) = (start.clone(), options.clone());
                    async move {
                        client
                            .kv_client()
                            .max_decoding_message_size(MAX_ANSWER)
                            .get(start, Some(options))
                            .await
                    }
                })
                .await?;
            if listing.revision == 0
                && let Some(header) = answer.header()
            {
                (listing.revision, listing.cluster) = (header.revision(), header.cluster_id());
            }
            let Some(last) = answer.kvs().last() else { return Ok(listing) };
            start = last.key().to_vec();
            start.push(0);
            listing.entries.extend(answer.kvs().iter().map(Entry::from));
            if !answer.more() {
                return Ok(listing);
            }
        }
    }

    /// The keys of `range` alone, without their values.
    ///
    /// # Errors
    /// No member answers in time, or the user may not read them.
    pub async fn keys(&self, range: &Range) -> Result<Vec<String>, EtcdError> {
        let what = format!("to list {}", range.start);
        let (answer, _) = self
            .call(&what, |client| {
                let options = GetOptions::new().with_range(range.end.clone()).with_keys_only();
                let start = range.start.clone();
                async move {
                    client.kv_client().max_decoding_message_size(MAX_ANSWER).get(start, Some(options)).await
                }
            })
            .await?;
        Ok(answer.kvs().iter().map(|kv| String::from_utf8_lossy(kv.key()).into_owned()).collect())
    }

    /// The revision of the store, as all members together know it.
    ///
    /// # Errors
    /// No member answers in time, or the user may not read `range`.
    pub(crate) async fn revision(&self, range: &Range) -> Result<i64, EtcdError> {
        let what = format!("to read {}", range.start);
        let (answer, _) = self
            .call(&what, |client| {
                let options = GetOptions::new().with_range(range.end.clone()).with_count_only();
                let start = range.start.clone();
                async move { client.kv_client().get(start, Some(options)).await }
            })
            .await?;
        Ok(answer.header().map_or(0, |header| header.revision()))
    }

    /// One key as it is.
    ///
    /// # Errors
    /// No member answers in time, or the user may not read it.
    pub async fn get(&self, key: &str) -> Result<Option<Entry>, EtcdError> {
        let what = format!("to read {key}");
        let (answer, _) = self
            .call(&what, |client| async move {
                client.kv_client().max_decoding_message_size(MAX_ANSWER).get(key, None).await
            })
            .await?;
        Ok(answer.kvs().first().map(Entry::from))
    }

    /// Makes all `operations` at once when every key is as expected, else none of them.
    ///
    /// A try whose answer is lost may have been made. It is made again, and one that finds its own values there counts as
    /// made: values that two writers may write at once must differ by who writes them. When another write has come
    /// after it, that is a [`Written::Conflict`] all the same, and only what stands in the value tells whether ours was
    /// made before. The same holds after an error.
    ///
    /// # Errors
    /// No member answers in time: it may have been made or not. Or etcd refuses it.
    pub async fn write(
        &self,
        expected: &[(String, Expect)],
        operations: &[Operation],
    ) -> Result<Written, EtcdError> {
        let what = operations.first().map_or_else(|| "a write".to_owned(), |operation| operation.what());
        let transaction = Txn::new()
            .when(expected.iter().map(|(key, expect)| compare(key, *expect)).collect::<Vec<_>>())
            .and_then(operations.iter().map(Operation::op).collect::<Vec<_>>())
            .or_else(expected.iter().map(|(key, _)| TxnOp::get(key.as_str(), None)).collect::<Vec<_>>());
        let (answer, again) = self
            .call(&what, |client| {
                let transaction = transaction.clone();
                async move { client.kv_client().max_decoding_message_size(MAX_ANSWER).txn(transaction).await }
            })
            .await?;
        if answer.succeeded() {
            return Ok(Written::Done(answer.header().map_or(0, |header| header.revision())));
        }
        let found = |response| match response {
            TxnOpResponse::Get(found) => found.kvs().first().map(Entry::from),
            _ => None,
        };
        let found: Vec<Option<Entry>> = answer.op_responses().into_iter().map(found).collect();
        // An earlier try may have been made although its answer was lost.
        match made_before(expected, operations, &found).filter(|_| again) {
            Some(revision) => Ok(Written::Done(revision)),
            None => Ok(Written::Conflict(found)),
        }
    }

    /// A lease that ends after so many seconds without [`Etcd::keep_alive`].
    ///
    /// # Errors
    /// No member answers in time.
    pub async fn grant(&self, seconds: u32) -> Result<i64, EtcdError> {
        let (answer, _) =
            self.call("a lease", |client| async move {
                client.lease_client().grant(i64::from(seconds), None).await
            })
            .await?;
        Ok(answer.id())
    }

    /// Lets a lease begin anew. False when it has ended.
    ///
    /// # Errors
    /// No member answers in time.
    pub async fn keep_alive(&self, lease: i64) -> Result<bool, EtcdError> {
        let (alive, _) = self
            .call("to renew a lease", |client| async move {
                match client.lease_client().keep_alive(lease).await {
                    Ok(_) => Ok(true),
                    Err(etcd_client::Error::LeaseKeepAliveError(_)) => Ok(false),
                    Err(error) => Err(error),
                }
            })
            .await?;
        Ok(alive)
    }

    /// Ends a lease, and with it its keys. One that has ended already is no error.
    ///
    /// # Errors
    /// No member answers in time.
    pub async fn revoke(&self, lease: i64) -> Result<(), EtcdError> {
        let revoked = self
            .call("to end a lease", |client| async move {
                match client.lease_client().revoke(lease).await {
                    Ok(_) => Ok(()),
                    Err(etcd_client::Error::GRpcStatus(status)) if status.code() == Code::NotFound => Ok(()),
                    Err(error) => Err(error),
                }
            })
            .await;
        revoked.map(|((), _)| ())
    }

    /// A watch of `range` from `revision` on, and on which connection it is.
    pub(crate) async fn watch(&self, range: &Range, revision: i64) -> Result<(WatchStream, u64), EtcdError> {
        let (client, generation) = self.client().await?;
        let options = WatchOptions::new()
            .with_range(range.end.clone())
            .with_start_revision(revision)
            .with_progress_notify()
            .with_fragment();
        let mut watches = client.watch_client().max_decoding_message_size(MAX_ANSWER);
        let open = watches.watch(range.start.clone(), Some(options));
        let result = match timeout_at(Instant::now() + ATTEMPT, open).await {
            Ok(Ok(stream)) => return Ok((stream, generation)),
            Ok(Err(error)) => failed(&self.0.settings.endpoints, "a watch", error),
            Err(_) => self.late(),
        };
        self.give_up(generation).await;
        Err(result)
    }
}

impl Operation {
    fn key(&self) -> &str {
        match self {
            Self::Put { key, .. } | Self::Delete { key } => key,
        }
    }

    fn what(&self) -> String {
        match self {
            Self::Put { key, .. } => format!("to write {key}"),
            Self::Delete { key } => format!("to remove {key}"),
        }
    }

    fn op(&self) -> TxnOp {
        match self {
            Self::Put { key, value, lease } => {
                TxnOp::put(key.as_str(), value.clone(), Some(PutOptions::new().with_lease(*lease)))
            }
            Self::Delete { key } => TxnOp::delete(key.as_str(), None),
        }
    }
}

fn compare(key: &str, expect: Expect) -> Compare {
    match expect {
        Expect::Absent => Compare::version(key, CompareOp::Equal, 0),
        Expect::Revision(revision) => Compare::mod_revision(key, CompareOp::Equal, revision),
        Expect::Lease(lease) => Compare::lease(key, CompareOp::Equal, lease),
    }
}

/// The revision that an earlier try of a write has made, when every key that it writes is among those that were looked
/// at, and is as the write leaves it.
fn made_before(
    expected: &[(String, Expect)],
    operations: &[Operation],
    found: &[Option<Entry>],
) -> Option<i64> {
    let mut revision = 0;
    for operation in operations {
        let at = expected.iter().position(|(key, _)| key == operation.key())?;
        match (operation, found.get(at)?) {
            (Operation::Put { value, .. }, Some(entry)) if entry.value == *value => {
                revision = revision.max(entry.mod_revision);
            }
            (Operation::Delete { .. }, None) => {}
            _ => return None,
        }
    }
    Some(revision)
}

/// Whether the next member, or the same one later, may answer.
fn is_transient(error: &etcd_client::Error) -> bool {
    match error {
        etcd_client::Error::GRpcStatus(status) => matches!(
            status.code(),
            Code::Unavailable
                | Code::DeadlineExceeded
                | Code::Cancelled
                | Code::Unknown
                | Code::Internal
                | Code::Aborted
                | Code::ResourceExhausted
        ),
        etcd_client::Error::TransportError(_)
        | etcd_client::Error::IoError(_)
        | etcd_client::Error::WatchError(_)
        | etcd_client::Error::LeaseKeepAliveError(_)
        | etcd_client::Error::EndpointError(_)
        | etcd_client::Error::Internal(_) => true,
        _ => false,
    }
}

/// More than a member takes, or more than its server of gRPC reads (which is half a MiB more).
fn is_too_large(error: &etcd_client::Error) -> bool {
    matches!(error, etcd_client::Error::GRpcStatus(status) if match status.code() {
        Code::InvalidArgument => status.message().contains("request is too large"),
        Code::ResourceExhausted => status.message().contains("larger than max"),
        _ => false,
    })
}

/// The token that the connection was made with has ended, or users and roles have changed since: with tokens that say of which
/// state of them they are (`--auth-token jwt`) etcd takes none of before.
fn is_stale_token(error: &etcd_client::Error) -> bool {
    matches!(error, etcd_client::Error::GRpcStatus(status) if match status.code() {
        Code::Unauthenticated => true,
        // The latter when the client asks for a new token with the password that it was made with.
        Code::InvalidArgument => ["revision of auth store is old", "authentication failed"]
            .iter()
            .any(|words| status.message().contains(words)),
        _ => false,
    })
}

/// The user may not do it; files that say who we are may have changed since the connection was made.
fn is_denied(error: &etcd_client::Error) -> bool {
    matches!(error, etcd_client::Error::GRpcStatus(status) if status.code() == Code::PermissionDenied)
}

/// `error` in our words.
pub(crate) fn failed(endpoints: &[String], what: &str, error: etcd_client::Error) -> EtcdError {
    let transient = is_transient(&error);
    let message = match &error {
        etcd_client::Error::GRpcStatus(status) => words(status),
        other => other.to_string(),
    };
    if is_too_large(&error) {
        EtcdError::TooLarge { what: what.to_owned(), message }
    } else if transient {
        EtcdError::Unreachable { endpoints: endpoints.join(", "), message }
    } else {
        EtcdError::Refused { what: what.to_owned(), message }
    }
}

/// The message with its causes.
fn words(status: &Status) -> String {
    let mut text = status.message().to_owned();
    let mut source = status.source();
    while let Some(cause) = source {
        let more = cause.to_string();
        if !text.contains(&more) {
            text = if text.is_empty() { more } else { format!("{text}: {more}") };
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(key: &str, value: &str, revision: i64) -> Option<Entry> {
        Some(Entry {
            key: key.into(),
            value: value.into(),
            create_revision: 1,
            mod_revision: revision,
            lease: 0,
        })
    }

    #[test]
    fn a_write_was_made_before_when_all_its_keys_are_as_it_leaves_them() {
        let put = |key: &str, value: &str| Operation::Put { key: key.into(), value: value.into(), lease: 0 };
        let delete = |key: &str| Operation::Delete { key: key.into() };
        let expected = [("a".to_owned(), Expect::Revision(3)), ("b".to_owned(), Expect::Absent)];
        for (operations, found, made) in [
            (vec![put("a", "x")], [entry("a", "x", 7), None], Some(7)),
            (vec![put("a", "x")], [entry("a", "y", 7), None], None),
            (vec![put("a", "x")], [None, None], None),
            (vec![put("a", "x"), put("b", "z")], [entry("a", "x", 7), entry("b", "z", 7)], Some(7)),
            (vec![put("a", "x"), put("b", "z")], [entry("a", "x", 7), None], None),
            (vec![delete("a")], [None, None], Some(0)),
            (vec![delete("a")], [entry("a", "x", 7), None], None),
            // Nobody looked at it.
            (vec![put("c", "x")], [entry("a", "x", 7), None], None),
        ] {
            assert_eq!(made_before(&expected, &operations, &found), made, "{operations:?} {found:?}");
        }
    }

    #[test]
    fn only_what_another_try_may_mend_is_transient() {
        let of = |status: Status| etcd_client::Error::GRpcStatus(status);
        assert!(is_transient(&of(Status::unavailable("etcdserver: no leader"))));
        assert!(is_transient(&of(Status::resource_exhausted("etcdserver: mvcc: database space exceeded"))));
        for refused in [
            Status::permission_denied("etcdserver: permission denied"),
            Status::invalid_argument("etcdserver: request is too large"),
            Status::resource_exhausted("grpc: received message larger than max (3145766 vs. 2097152)"),
            Status::unauthenticated("etcdserver: invalid auth token"),
        ] {
            let error = failed(&["http://h:1".into()], "to write /a", of(refused.clone()));
            assert_eq!(error.to_string(), format!("etcd refuses to write /a: {}", refused.message()));
            assert_eq!(
                matches!(error, EtcdError::TooLarge { .. }),
                refused.message().contains("larg"),
                "{error}"
            );
        }
    }
}
