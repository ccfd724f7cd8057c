//! The service account tokens in a pod's volumes: requested through pod-config and renewed before they expire.
//!
//! If a token cannot be renewed, the old one stays in use until it expires. After a restart of this service a token is
//! read back from its file in the volume, which is on tmpfs. It is stored nowhere else.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_proto::keelson::pod_config::v1::pod_config_client::PodConfigClient;
use keelson_service_kit::status::is_cut;
use keelson_service_kit::{Backoff, Fairness, Peer, Turns, now_unix_nanos};
use keelson_volume_manager_core::desire::{PodDesire, PodRef, Volume, Want};
use keelson_volume_manager_core::payload::{FileSource, clean_path};
use keelson_volume_manager_core::token::{JITTER_SECONDS, TokenLookup, TokenName, Validity};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use tonic::{Request, Response, Status};

/// The timeout of a call: a little longer than pod-config waits for the API server.
const CALL_TIMEOUT: Duration = Duration::from_secs(35);
/// The back-off after a failed request for a token.
const RETRY: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
/// The longest sleep before the machine's clock is read again, since that clock may jump.
const MAX_SLEEP: Duration = Duration::from_secs(300);
/// The shortest time from a new token to its renewal, in case the API server's clock differs from ours.
const MIN_RENEWAL_INTERVAL: Duration = Duration::from_secs(60);
/// A file with more bytes is not a token.
const MAX_TOKEN_BYTES: u64 = 64 << 10;

/// The limit of concurrent requests, so that the tokens of a full node do not occupy pod-config.
const MAX_CONCURRENT: usize = 16;
/// The pod with the fewest running requests comes first, so that a pod with hundreds of tokens does not delay others.
const FAIRNESS: Fairness = Fairness { patience: Duration::from_secs(2), kept: CALL_TIMEOUT };

/// Requests tokens from pod-config. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct TokenClient {
    pod_config: Peer,
    turns: Arc<Turns>,
}

impl TokenClient {
    pub(crate) fn new(pod_config: Peer) -> Self {
        Self { pod_config, turns: Turns::new(MAX_CONCURRENT, FAIRNESS) }
    }

    pub(crate) async fn create_token(
        &self,
        message: pb::CreateTokenRequest,
    ) -> Result<pb::CreateTokenResponse, Status> {
        let turn = self.turns.take(&message.pod_uid.as_str().into()).await;
        let mut request = Request::new(message);
        request.set_timeout(CALL_TIMEOUT);
        let mut client = PodConfigClient::new(self.pod_config.channel());
        turn.work(client.create_token(request)).await.map(Response::into_inner)
    }
}

/// The tokens of one pod. Dropping it ends their renewal.
#[derive(Debug)]
pub(crate) struct PodTokens {
    client: TokenClient,
    cache: Arc<TokenCache>,
    changes: watch::Receiver<()>,
    /// The task that renews each token.
    renewals: BTreeMap<TokenName, AbortHandle>,
    tasks: JoinSet<()>,
}

#[derive(Debug)]
struct TokenCache {
    tokens: Mutex<BTreeMap<TokenName, CachedToken>>,
    changed: watch::Sender<()>,
}

#[derive(Debug, Clone)]
struct CachedToken {
    lookup: TokenLookup,
    validity: Option<Validity>,
}

impl TokenCache {
    fn tokens(&self) -> MutexGuard<'_, BTreeMap<TokenName, CachedToken>> {
        self.tokens.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores what is known about a token, and notifies of a change.
    fn set(&self, name: &TokenName, lookup: TokenLookup, validity: Option<Validity>) {
        let old = self.tokens().insert(name.clone(), CachedToken { lookup: lookup.clone(), validity });
        if old.is_none_or(|old| old.lookup != lookup) {
            self.changed.send_replace(());
        }
    }

    /// Stores a failed request, unless the old token is still valid.
    fn set_unless_valid(&self, name: &TokenName, lookup: TokenLookup) {
        let is_valid = |token: &CachedToken| {
            matches!(token.lookup, TokenLookup::Present(_))
                && token.validity.is_some_and(|validity| validity.is_valid(now()))
        };
        if !self.tokens().get(name).is_some_and(is_valid) {
            self.set(name, lookup, None);
        }
    }
}

/// Seconds since 1970.
fn now() -> i64 {
    now_unix_nanos().div_euclid(1_000_000_000)
}

impl PodTokens {
    /// Creates the token set of a pod, empty at first.
    pub(crate) fn new(client: TokenClient) -> Self {
        let changed = watch::Sender::new(());
        let changes = changed.subscribe();
        let cache = Arc::new(TokenCache { tokens: Mutex::default(), changed });
        Self { client, cache, changes, renewals: BTreeMap::new(), tasks: JoinSet::new() }
    }

    /// Replaces the set of tokens with those in `desire`. `folder` is the pod's folder.
    pub(crate) fn set(&mut self, desire: &PodDesire, folder: &Path) {
        let desired = desired_tokens(desire, folder);
        let cache = &self.cache;
        self.renewals.retain(|name, renewal_task| {
            let is_desired = desired.contains_key(name);
            if !is_desired {
                renewal_task.abort();
                cache.tokens().remove(name);
            }
            is_desired
        });
        for (name, file) in desired {
            if !self.renewals.contains_key(&name) {
                let renewal_task = Renewal {
                    client: self.client.clone(),
                    pod: desire.header.pod.clone(),
                    name: name.clone(),
                    file,
                    cache: Arc::clone(&self.cache),
                };
                self.renewals.insert(name, self.tasks.spawn(renewal_task.run()));
            }
        }
    }

    /// Returns a function that looks up tokens and may outlive `self`.
    pub(crate) fn lookup(&self) -> impl Fn(&TokenName) -> TokenLookup + Send + use<> {
        let cache = Arc::clone(&self.cache);
        move |name| {
            let known = cache.tokens().get(name).map(|token| token.lookup.clone());
            known.unwrap_or_else(|| TokenLookup::Pending(format!("pod-config to create a {name}")))
        }
    }

    /// Whether a token has changed since the last call.
    pub(crate) fn has_changed(&mut self) -> bool {
        let changed = self.changes.has_changed().unwrap_or(false);
        self.changes.mark_unchanged();
        changed
    }

    /// Waits until [`Self::has_changed`] is true. Cancel-safe: it does not mark the change as seen.
    pub(crate) async fn changed(&self) -> bool {
        let mut changes = self.changes.clone();
        // The sender lives as long as `self`.
        changes.changed().await.is_ok()
    }
}

/// The tokens that a desire names, each with the file where an earlier run of this service may have stored it.
fn desired_tokens(desire: &PodDesire, folder: &Path) -> BTreeMap<TokenName, PathBuf> {
    let mut desired = BTreeMap::new();
    if matches!(desire.header.want, Want::Unmount | Want::Forget) {
        return desired;
    }
    for volume in &desire.volumes {
        let Some((files, key)) = volume.files().zip(volume.key()) else { continue };
        let data = folder.join("volumes").join(key.plugin).join(key.name).join("..data");
        for source in &files.sources {
            if let FileSource::Token(token) = source
                && let Ok(path) = clean_path(&token.path)
            {
                desired.entry(token.name.clone()).or_insert_with(|| data.join(path));
            }
        }
    }
    desired
}

/// The names of the tokens in a volume.
pub(crate) fn token_names(volume: &Volume) -> BTreeSet<&TokenName> {
    let sources = volume.files().into_iter().flat_map(|files| &files.sources);
    sources
        .filter_map(|source| if let FileSource::Token(token) = source { Some(&token.name) } else { None })
        .collect()
}

/// The task that requests and renews one token.
struct Renewal {
    client: TokenClient,
    pod: PodRef,
    name: TokenName,
    file: PathBuf,
    cache: Arc<TokenCache>,
}

impl Renewal {
    async fn run(self) {
        let (file, name) = (self.file.clone(), self.name.clone());
        let stored = tokio::task::spawn_blocking(move || read_stored_token(&file, &name)).await;
        let mut due = now();
        if let Ok(Some((text, validity))) = stored
            && validity.is_valid(now())
        {
            due = renewal_time(validity);
            self.cache.set(&self.name, TokenLookup::Present(text), Some(validity));
        }
        let mut retry = RETRY;
        loop {
            self.sleep_until(due).await;
            // On the heap, so that a sleeping task, as nearly all are, is small.
            let pause = match Box::pin(self.request_token()).await {
                Ok(validity) => {
                    retry.reset();
                    due = renewal_time(validity);
                    MIN_RENEWAL_INTERVAL
                }
                Err(()) => {
                    due = now();
                    retry.next_delay()
                }
            };
            tokio::time::sleep(pause).await;
        }
    }

    /// Sleeps until `due`, in seconds since 1970.
    async fn sleep_until(&self, due: i64) {
        while let Ok(left @ 1..) = u64::try_from(due.saturating_sub(now())) {
            tokio::time::sleep(Duration::from_secs(left).min(MAX_SLEEP)).await;
        }
    }

    async fn request_token(&self) -> Result<Validity, ()> {
        let TokenName { service_account, audience, expiration_seconds } = self.name.clone();
        let message = pb::CreateTokenRequest {
            namespace: self.pod.namespace.clone(),
            service_account,
            pod_name: self.pod.name.clone(),
            pod_uid: self.pod.uid.clone(),
            audiences: Some(audience).filter(|audience| !audience.is_empty()).into_iter().collect(),
            expiration_seconds,
        };
        match self.client.create_token(message).await {
            Ok(response) => {
                let validity =
                    Validity::from_expiry(response.expires_unix_seconds, response.lifetime_seconds);
                let text = response.token.into_bytes().into();
                self.cache.set(&self.name, TokenLookup::Present(text), Some(validity));
                Ok(validity)
            }
            Err(status) => {
                let PodRef { uid, namespace, name } = &self.pod;
                let error = status.message();
                tracing::warn!(uid, namespace, pod = name, token = %self.name, error, "cannot create the token; will retry");
                let lookup = if is_cut(&status) {
                    TokenLookup::Pending(format!("pod-config to create a {}: {error}", self.name))
                } else {
                    TokenLookup::Refused(error.to_owned())
                };
                self.cache.set_unless_valid(&self.name, lookup);
                Err(())
            }
        }
    }
}

fn renewal_time(validity: Validity) -> i64 {
    validity.renew_at(fastrand::i64(0..=JITTER_SECONDS))
}

/// Reads the token that an earlier run of this service has stored in a file. Blocks.
fn read_stored_token(file: &Path, name: &TokenName) -> Option<(Arc<[u8]>, Validity)> {
    let meta = std::fs::symlink_metadata(file).ok()?;
    if !meta.is_file() || meta.len() > MAX_TOKEN_BYTES {
        return None;
    }
    let text = std::fs::read(file).ok()?;
    let validity = validity_of(&text, name.expiration_seconds)?;
    Some((text.into(), validity))
}

/// The validity of a token according to its claims (JWT, RFC 7519 §4.1), cut to the `requested_lifetime` in seconds, so that
/// a longer-lived token is renewed as often.
fn validity_of(token: &[u8], requested_lifetime: i64) -> Option<Validity> {
    let claims = token.split(|byte| *byte == b'.').nth(1)?;
    let claims: serde_json::Value = serde_json::from_slice(&URL_SAFE_NO_PAD.decode(claims).ok()?).ok()?;
    let (issued, expires) = (claims["iat"].as_i64()?, claims["exp"].as_i64()?);
    Some(Validity { issued, expires: expires.min(issued.saturating_add(requested_lifetime)) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn jwt(claims: &str) -> Vec<u8> {
        format!("e30.{}.c2ln", URL_SAFE_NO_PAD.encode(claims)).into_bytes()
    }

    #[test]
    fn token_validity_is_read_from_the_jwt_claims() {
        let of = |claims: &str| validity_of(&jwt(claims), 600).map(|v| (v.issued, v.expires));
        assert_eq!(of(r#"{"iat": 100, "exp": 400}"#), Some((100, 400)));
        assert_eq!(of(r#"{"iat": 100, "exp": 40000}"#), Some((100, 700)), "issued for longer than requested");
        for claims in [r#"{"iat": 100}"#, r#"{"exp": 100}"#, "[]", "no json"] {
            assert_eq!(of(claims), None, "{claims}");
        }
        for token in ["", "a", "a.b", "a.%.c"] {
            assert_eq!(validity_of(token.as_bytes(), 600), None, "{token}");
        }
    }

    #[test]
    fn a_failed_renewal_keeps_the_old_token_while_it_is_valid() {
        let cache = TokenCache { tokens: Mutex::default(), changed: watch::Sender::new(()) };
        let name =
            TokenName { service_account: "a".into(), audience: String::new(), expiration_seconds: 600 };
        let lookup = || cache.tokens()[&name].lookup.clone();
        let present = TokenLookup::Present(Arc::from(b"x".as_slice()));
        let unavailable = || TokenLookup::Pending("unavailable".to_owned());
        cache.set_unless_valid(&name, unavailable());
        assert_eq!(lookup(), unavailable());
        cache.set(&name, present.clone(), Some(Validity::from_expiry(now() + 100, 600)));
        cache.set_unless_valid(&name, unavailable());
        assert_eq!(lookup(), present);
        cache.set(&name, present, Some(Validity::from_expiry(now(), 600)));
        cache.set_unless_valid(&name, TokenLookup::Refused("no".to_owned()));
        assert_eq!(lookup(), TokenLookup::Refused("no".to_owned()));
    }
}
