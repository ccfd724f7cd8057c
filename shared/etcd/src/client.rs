//! Calls to etcd.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{Client, GetOptions, Txn, TxnOp, TxnOpResponse, WatchOptions, WatchStream};
use keelson_config::Etcd as Settings;
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout, timeout_at};
use tonic::Code;

use crate::connect;
use crate::error::{EtcdError, failed, is_denied, is_stale_token, is_transient};
use crate::keys::Range;
use crate::operations::{Entry, Expect, Listing, Operation, Written, compare, made_before};

/// How long one member may take for a call.
pub(crate) const ATTEMPT: Duration = Duration::from_secs(3);
/// How long all members together may take.
const DEADLINE: Duration = Duration::from_secs(10);
/// The longest duration of a call: the last attempt may start just before the deadline.
pub const CALL_ENDS_WITHIN: Duration = DEADLINE.saturating_add(ATTEMPT);
/// The pause before a call is retried on the next member.
const PAUSE: Duration = Duration::from_millis(50);
/// Keys of one page. One value may have 1.5 MiB (`--max-request-bytes`).
const PAGE: i64 = 32;
/// The largest answer.
const MAX_ANSWER: usize = 64 << 20;

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
    /// Numbers the connections: a failed connection is dropped once, even if several calls fail on it.
    generation: u64,
    /// The member to connect to: an index into the endpoints, modulo their number.
    member: usize,
}

impl fmt::Debug for Etcd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Etcd").field("endpoints", &self.0.settings.endpoints).finish_non_exhaustive()
    }
}

impl Etcd {
    /// A cluster. Connects with the first call, to a random member.
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

    /// Drops a connection. The next one goes to the next member and reads the credential files again.
    pub(crate) async fn give_up(&self, generation: u64) {
        let mut state = self.0.state.lock().await;
        if state.generation == generation && state.client.take().is_some() {
            state.member += 1;
        }
    }

    /// Converts the error of a stream.
    pub(crate) fn failed(&self, what: &str, error: etcd_client::Error) -> EtcdError {
        failed(&self.0.settings.endpoints, what, error)
    }

    fn late(&self) -> EtcdError {
        let message = format!("no answer within {} s", ATTEMPT.as_secs());
        EtcdError::Unreachable { endpoints: self.endpoints(), message }
    }

    /// Makes an idempotent call on one member after the other until one answers. Returns also whether an earlier attempt
    /// may have been executed.
    async fn call<T, F>(&self, what: &str, make: impl Fn(Client) -> F) -> Result<(T, bool), EtcdError>
    where
        F: Future<Output = Result<T, etcd_client::Error>>,
    {
        let end = Instant::now() + DEADLINE;
        let (mut is_retry, mut was_stale) = (false, false);
        loop {
            let failure = match self.client().await {
                Err(error) => error,
                Ok((client, generation)) => match timeout(ATTEMPT, make(client)).await {
                    Ok(Ok(answer)) => return Ok((answer, is_retry)),
                    Ok(Err(error)) => {
                        is_retry = true;
                        let stale = is_stale_token(&error);
                        if stale || is_denied(&error) || is_transient(&error) {
                            self.give_up(generation).await;
                        }
                        // The next connection gets a fresh token; retrying more than once does not help.
                        if stale && !was_stale {
                            was_stale = true;
                            continue;
                        }
                        failed(&self.0.settings.endpoints, what, error)
                    }
                    Err(_) => {
                        is_retry = true;
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

    /// Lists `range` at one revision.
    ///
    /// # Errors
    /// No member answers in time, or the user is not allowed to read it.
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

    /// Lists the keys of `range` without their values.
    ///
    /// # Errors
    /// No member answers in time, or the user is not allowed to read them.
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

    /// The revision of the store by a linearizable read.
    ///
    /// # Errors
    /// No member answers in time, or the user is not allowed to read `range`.
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

    /// Reads one key; `None` if it does not exist.
    ///
    /// # Errors
    /// No member answers in time, or the user is not allowed to read it.
    pub async fn get(&self, key: &str) -> Result<Option<Entry>, EtcdError> {
        let what = format!("to read {key}");
        let (answer, _) = self
            .call(&what, |client| async move {
                client.kv_client().max_decoding_message_size(MAX_ANSWER).get(key, None).await
            })
            .await?;
        Ok(answer.kvs().first().map(Entry::from))
    }

    /// Makes all `operations` in one transaction if every precondition holds, else none of them.
    ///
    /// An attempt whose answer is lost may have been executed. The write is retried, and a retry that finds its own values
    /// counts as done: so values that two writers may write at the same time must differ by writer. If another write
    /// followed the lost attempt, the result is a [`Written::Conflict`], and only the value shows whether the attempt was
    /// executed. The same holds after an error.
    ///
    /// # Errors
    /// No member answers in time, and the write may or may not have been made; or etcd refuses it.
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
        let (answer, is_retry) = self
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
        // An earlier attempt may have been executed although its answer was lost.
        match made_before(expected, operations, &found).filter(|_| is_retry) {
            Some(revision) => Ok(Written::Done(revision)),
            None => Ok(Written::Conflict(found)),
        }
    }

    /// Grants a lease that expires after `seconds` without [`Etcd::keep_alive`].
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

    /// Renews a lease. False when it has expired.
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

    /// Revokes a lease and deletes its keys. An expired lease is no error.
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

    /// Opens a watch of `range` from `revision` on. Returns also the generation of its connection.
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
