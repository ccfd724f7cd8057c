//! The tokens of service accounts that a pod's volumes hold: each is had from pod-config, and made anew before it ends.
//!
//! A token goes on while nobody can make another, for as long as it is good; after a restart of this service too, as it is
//! read from the volume that it lies in, which is memory. It is kept nowhere else.

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
use keelson_volume_manager_core::payload::{FileSource, clean};
use keelson_volume_manager_core::token::{JITTER_SECONDS, TokenLookup, TokenName, Validity};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use tonic::{Request, Response, Status};

/// How long a call may take: as long as pod-config waits for the API server, and a little.
const CALL: Duration = Duration::from_secs(35);
/// When a token that could not be had is asked for again.
const RETRY: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
/// The clock of the machine may jump, so nothing is waited for longer than this without a look at it.
const LOOK: Duration = Duration::from_secs(300);
/// A server whose clock is another one is not asked more often.
const PAUSE: Duration = Duration::from_secs(60);
/// A longer file is no token.
const MAX_BYTES: u64 = 64 << 10;

/// So many tokens are asked for at a time, so that those of a full node leave pod-config room for others.
const AT_A_TIME: usize = 16;
/// The pod with the fewest comes first, so that one with hundreds of tokens keeps nobody waiting.
const FAIRNESS: Fairness = Fairness { patience: Duration::from_secs(2), kept: CALL };

/// Who has tokens made. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Maker {
    pod_config: Peer,
    turns: Arc<Turns>,
}

impl Maker {
    pub(crate) fn new(pod_config: Peer) -> Self {
        Self { pod_config, turns: Turns::new(AT_A_TIME, FAIRNESS) }
    }

    async fn make(&self, message: pb::CreateTokenRequest) -> Result<pb::CreateTokenResponse, Status> {
        let turn = self.turns.take(&message.pod_uid.as_str().into()).await;
        let mut request = Request::new(message);
        request.set_timeout(CALL);
        let mut client = PodConfigClient::new(self.pod_config.channel());
        turn.work(client.create_token(request)).await.map(Response::into_inner)
    }
}

/// The tokens of one pod; dropped, nobody keeps them fresh.
#[derive(Debug)]
pub(crate) struct PodTokens {
    maker: Maker,
    found: Arc<Found>,
    changes: watch::Receiver<()>,
    /// Who keeps each token fresh.
    keepers: BTreeMap<TokenName, AbortHandle>,
    tasks: JoinSet<()>,
}

#[derive(Debug)]
struct Found {
    tokens: Mutex<BTreeMap<TokenName, Token>>,
    changed: watch::Sender<()>,
}

#[derive(Debug, Clone)]
struct Token {
    found: TokenLookup,
    validity: Option<Validity>,
}

impl Found {
    fn tokens(&self) -> MutexGuard<'_, BTreeMap<TokenName, Token>> {
        self.tokens.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes what is known of a token now.
    fn set(&self, name: &TokenName, found: TokenLookup, validity: Option<Validity>) {
        let old = self.tokens().insert(name.clone(), Token { found: found.clone(), validity });
        if old.is_none_or(|old| old.found != found) {
            self.changed.send_replace(());
        }
    }

    /// A token cannot be had: the one before goes on while it is good.
    fn fail(&self, name: &TokenName, found: TokenLookup) {
        let is_good = |token: &Token| {
            matches!(token.found, TokenLookup::Present(_))
                && token.validity.is_some_and(|validity| validity.is_valid(now()))
        };
        if !self.tokens().get(name).is_some_and(is_good) {
            self.set(name, found, None);
        }
    }
}

/// Seconds since 1970.
fn now() -> i64 {
    now_unix_nanos().div_euclid(1_000_000_000)
}

impl PodTokens {
    /// Of a pod that wants none yet.
    pub(crate) fn new(maker: Maker) -> Self {
        let changed = watch::Sender::new(());
        let changes = changed.subscribe();
        let found = Arc::new(Found { tokens: Mutex::default(), changed });
        Self { maker, found, changes, keepers: BTreeMap::new(), tasks: JoinSet::new() }
    }

    /// What a desire wants, and nothing else from now on. `folder` is the pod's.
    pub(crate) fn set(&mut self, desire: &PodDesire, folder: &Path) {
        let wanted = wanted(desire, folder);
        let found = &self.found;
        self.keepers.retain(|name, keeper| {
            let is_wanted = wanted.contains_key(name);
            if !is_wanted {
                keeper.abort();
                found.tokens().remove(name);
            }
            is_wanted
        });
        for (name, file) in wanted {
            if !self.keepers.contains_key(&name) {
                let keeper = Keeper {
                    maker: self.maker.clone(),
                    pod: desire.pod.clone(),
                    name: name.clone(),
                    file,
                    found: Arc::clone(&self.found),
                };
                self.keepers.insert(name, self.tasks.spawn(keeper.run()));
            }
        }
    }

    /// What is known of a token, for as long as the caller likes.
    pub(crate) fn look(&self) -> impl Fn(&TokenName) -> TokenLookup + Send + use<> {
        let found = Arc::clone(&self.found);
        move |name| {
            let known = found.tokens().get(name).map(|token| token.found.clone());
            known.unwrap_or_else(|| TokenLookup::Waits(format!("pod-config to have a {name} made")))
        }
    }

    /// Whether a token has changed since this was asked last.
    pub(crate) fn has_changed(&mut self) -> bool {
        let changed = self.changes.has_changed().unwrap_or(false);
        self.changes.mark_unchanged();
        changed
    }

    /// Waits until [`Self::has_changed`]. Cancel-safe; it takes nothing away.
    pub(crate) async fn changed(&self) -> bool {
        let mut changes = self.changes.clone();
        // The sender lives as long as this.
        changes.changed().await.is_ok()
    }
}

/// The tokens that a desire names, each with a file in which an earlier run of this service has put it.
fn wanted(desire: &PodDesire, folder: &Path) -> BTreeMap<TokenName, PathBuf> {
    let mut wanted = BTreeMap::new();
    if matches!(desire.want, Want::Unmount | Want::Forget) {
        return wanted;
    }
    for volume in &desire.volumes {
        let Some((files, key)) = volume.files().zip(volume.key()) else { continue };
        let data = folder.join("volumes").join(key.plugin).join(key.name).join("..data");
        for source in &files.sources {
            if let FileSource::Token(token) = source
                && let Ok(path) = clean(&token.path)
            {
                wanted.entry(token.name.clone()).or_insert_with(|| data.join(path));
            }
        }
    }
    wanted
}

/// The names of the tokens of a volume.
pub(crate) fn names(volume: &Volume) -> BTreeSet<&TokenName> {
    let sources = volume.files().into_iter().flat_map(|files| &files.sources);
    sources
        .filter_map(|source| if let FileSource::Token(token) = source { Some(&token.name) } else { None })
        .collect()
}

/// Keeps one token fresh.
struct Keeper {
    maker: Maker,
    pod: PodRef,
    name: TokenName,
    file: PathBuf,
    found: Arc<Found>,
}

impl Keeper {
    async fn run(self) {
        let (file, name) = (self.file.clone(), self.name.clone());
        let read = tokio::task::spawn_blocking(move || adopt(&file, &name)).await;
        let mut due = now();
        if let Ok(Some((text, validity))) = read
            && validity.is_valid(now())
        {
            due = renewal(validity);
            self.found.set(&self.name, TokenLookup::Present(text), Some(validity));
        }
        let mut retry = RETRY;
        loop {
            self.until(due).await;
            // On the heap, so that a keeper that waits, as nearly all do, is small.
            let pause = match Box::pin(self.ask()).await {
                Ok(validity) => {
                    retry.reset();
                    due = renewal(validity);
                    PAUSE
                }
                Err(()) => {
                    due = now();
                    retry.next_delay()
                }
            };
            tokio::time::sleep(pause).await;
        }
    }

    /// Waits for a moment.
    async fn until(&self, due: i64) {
        while let Ok(left @ 1..) = u64::try_from(due.saturating_sub(now())) {
            tokio::time::sleep(Duration::from_secs(left).min(LOOK)).await;
        }
    }

    async fn ask(&self) -> Result<Validity, ()> {
        let TokenName { service_account, audience, expiration_seconds } = self.name.clone();
        let message = pb::CreateTokenRequest {
            namespace: self.pod.namespace.clone(),
            service_account,
            pod_name: self.pod.name.clone(),
            pod_uid: self.pod.uid.clone(),
            audiences: Some(audience).filter(|audience| !audience.is_empty()).into_iter().collect(),
            expiration_seconds,
        };
        match self.maker.make(message).await {
            Ok(made) => {
                let validity = Validity::ending(made.expires_unix_seconds, made.lifetime_seconds);
                let text = made.token.into_bytes().into();
                self.found.set(&self.name, TokenLookup::Present(text), Some(validity));
                Ok(validity)
            }
            Err(status) => {
                let PodRef { uid, namespace, name } = &self.pod;
                let error = status.message();
                tracing::warn!(uid, namespace, pod = name, token = %self.name, error, "cannot be had; will be asked for again");
                let found = if is_cut(&status) {
                    TokenLookup::Waits(format!("pod-config to have a {} made: {error}", self.name))
                } else {
                    TokenLookup::Refused(error.to_owned())
                };
                self.found.fail(&self.name, found);
                Err(())
            }
        }
    }
}

fn renewal(validity: Validity) -> i64 {
    validity.renew_at(fastrand::i64(0..=JITTER_SECONDS))
}

/// The token that an earlier run of this service has put into a file. Blocks.
fn adopt(file: &Path, name: &TokenName) -> Option<(Arc<[u8]>, Validity)> {
    let meta = std::fs::symlink_metadata(file).ok()?;
    if !meta.is_file() || meta.len() > MAX_BYTES {
        return None;
    }
    let text = std::fs::read(file).ok()?;
    let validity = validity_of(&text, name.expiration_seconds)?;
    Some((text.into(), validity))
}

/// When a token (a JWT, RFC 7519 §4.1) began and ends by its own words. One that was made for longer than was wanted counts
/// as what was wanted, so that it is made anew as often.
fn validity_of(token: &[u8], wanted: i64) -> Option<Validity> {
    let claims = token.split(|byte| *byte == b'.').nth(1)?;
    let claims: serde_json::Value = serde_json::from_slice(&URL_SAFE_NO_PAD.decode(claims).ok()?).ok()?;
    let (issued, expires) = (claims["iat"].as_i64()?, claims["exp"].as_i64()?);
    Some(Validity { issued, expires: expires.min(issued.saturating_add(wanted)) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn jwt(claims: &str) -> Vec<u8> {
        format!("e30.{}.c2ln", URL_SAFE_NO_PAD.encode(claims)).into_bytes()
    }

    #[test]
    fn a_token_says_itself_how_long_it_is_good() {
        let of = |claims: &str| validity_of(&jwt(claims), 600).map(|v| (v.issued, v.expires));
        assert_eq!(of(r#"{"iat": 100, "exp": 400}"#), Some((100, 400)));
        assert_eq!(of(r#"{"iat": 100, "exp": 40000}"#), Some((100, 700)), "made for longer than was wanted");
        for claims in [r#"{"iat": 100}"#, r#"{"exp": 100}"#, "[]", "no json"] {
            assert_eq!(of(claims), None, "{claims}");
        }
        for token in ["", "a", "a.b", "a.%.c"] {
            assert_eq!(validity_of(token.as_bytes(), 600), None, "{token}");
        }
    }

    #[test]
    fn the_token_before_goes_on_while_it_is_good() {
        let found = Found { tokens: Mutex::default(), changed: watch::Sender::new(()) };
        let name =
            TokenName { service_account: "a".into(), audience: String::new(), expiration_seconds: 600 };
        let look = || found.tokens()[&name].found.clone();
        let present = TokenLookup::Present(Arc::from(b"x".as_slice()));
        let away = || TokenLookup::Waits("away".to_owned());
        found.fail(&name, away());
        assert_eq!(look(), away());
        found.set(&name, present.clone(), Some(Validity::ending(now() + 100, 600)));
        found.fail(&name, away());
        assert_eq!(look(), present);
        found.set(&name, present, Some(Validity::ending(now(), 600)));
        found.fail(&name, TokenLookup::Refused("no".to_owned()));
        assert_eq!(look(), TokenLookup::Refused("no".to_owned()));
    }
}
