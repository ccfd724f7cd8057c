//! What the API server says of who asks, through pod-config, and for how long that is remembered (node-and-api.md §7).
//!
//! While nobody answers, what is remembered goes on until its time is over; everything else is an error, within [`DEADLINE`].

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use keelson_config::{ApiTls, ServiceName};
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_proto::keelson::pod_config::v1::pod_config_client::PodConfigClient;
use keelson_service_kit::{Context, Holder, HolderKind, Peer, SharedPlace, Shares};
use pb::review_token_response::Result as Told;
use sha2::{Digest as _, Sha256};
use tokio::time::Instant;
use tonic::{Request, Status};

use super::User;
use super::attributes::RESOURCE;
use super::kept::{Kept, Key};
use super::token_metrics::TokenMetrics;
use crate::strangers::Source;

/// How long an answer may take; pod-config asks the server several times in it.
const DEADLINE: Duration = Duration::from_secs(10);
/// How many answers of each kind are remembered. Wrong tokens have their own, so that who makes them up forgets nobody else's.
const MOST: usize = 1024;
/// Questions that wait for their answers at the same time. Addresses and users have shares of them: whoever makes up tokens keeps
/// nobody else's from being looked at.
const AT_ONCE: usize = 64;
/// What is asked with more bytes than that is not remembered.
const LONGEST: usize = 10_000;

/// Whose token it is.
#[derive(Debug)]
pub(super) enum Whose {
    /// Somebody's.
    Of(Arc<User>),
    /// Nobody's; why, when the server says so.
    Nobody(String),
}

/// What is asked: a part of this node, and what is done with it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked<'a> {
    pub(super) verb: &'a str,
    pub(super) subresource: &'a str,
    /// The path that it was asked by; it counts for the length alone.
    pub(super) path: &'a str,
}

/// Asks, and remembers.
#[derive(Debug)]
pub(super) struct Reviews {
    pod_config: Peer,
    node: String,
    known: Mutex<Known>,
    asked: Arc<Shares>,
    metrics: TokenMetrics,
}

#[derive(Debug)]
struct Known {
    tokens: Kept<Arc<User>>,
    wrong_tokens: Kept<()>,
    allowed: Kept<()>,
    denied: Kept<()>,
}

impl Reviews {
    pub(super) fn new(ctx: &Context, tls: &ApiTls) -> Self {
        let lasts = Duration::from_millis;
        let known = Known {
            tokens: Kept::new(lasts(tls.token_cache_ms), MOST),
            wrong_tokens: Kept::new(lasts(tls.token_cache_ms), MOST),
            allowed: Kept::new(lasts(tls.allowed_cache_ms), MOST),
            denied: Kept::new(lasts(tls.denied_cache_ms), MOST),
        };
        Self {
            pod_config: ctx.peer(ServiceName::PodConfig),
            node: ctx.config.node_name.clone(),
            known: Mutex::new(known),
            asked: Shares::new(AT_ONCE),
            metrics: TokenMetrics::registered(&ctx.metrics),
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn client(&self) -> PodConfigClient<keelson_service_kit::PeerChannel> {
        PodConfigClient::new(self.pod_config.channel())
    }

    /// Whose token it is that somebody at `source` shows. What the server had trouble with is not remembered.
    ///
    /// # Errors
    /// Nobody answers, or the source has its share of questions that wait for their answers.
    pub(super) async fn token(&self, token: String, source: Option<Source>) -> Result<Whose, Status> {
        let key = digest([token.as_str()]);
        let now = Instant::now();
        let remembered = self.remembered(&key, now);
        let was_remembered = remembered.is_some();
        let whose = match remembered {
            Some(whose) => Ok(whose),
            None => {
                let source = source.map(|source| Holder::new(HolderKind::Address, source.to_string()));
                let _place = self.place(source.into_iter().collect())?;
                self.fetch(key, token).await
            }
        };
        self.metrics.known(was_remembered, now);
        whose
    }

    fn place(&self, who: Vec<Holder>) -> Result<SharedPlace, Status> {
        self.asked.take(who).map_err(|why| {
            Status::resource_exhausted(format!("too many questions to the API server are open: {why}"))
        })
    }

    fn remembered(&self, key: &Key, now: Instant) -> Option<Whose> {
        let known = self.known();
        let wrong = || known.wrong_tokens.get(key, now).map(|()| Whose::Nobody(String::new()));
        known.tokens.get(key, now).map(Whose::Of).or_else(wrong)
    }

    async fn fetch(&self, key: Key, token: String) -> Result<Whose, Status> {
        let mut fetch = self.metrics.fetch();
        let answer = self.client().review_token(within(pb::ReviewTokenRequest { token })).await?.into_inner();
        if !matches!(&answer.result, Some(Told::Rejected(trouble)) if !trouble.is_empty()) {
            fetch.answered();
        }
        match answer.result {
            Some(Told::User(user)) if !user.name.is_empty() => {
                let user = Arc::new(User::from(user).authenticated());
                self.known().tokens.put(key, Arc::clone(&user), Instant::now());
                Ok(Whose::Of(user))
            }
            Some(Told::Rejected(trouble)) if !trouble.is_empty() => Ok(Whose::Nobody(trouble)),
            Some(Told::User(_) | Told::Rejected(_)) | None => {
                self.known().wrong_tokens.put(key, (), Instant::now());
                Ok(Whose::Nobody(String::new()))
            }
        }
    }

    /// Whether a user may do something with a part of this node.
    ///
    /// # Errors
    /// Nobody answers.
    pub(super) async fn may(&self, user: &User, asked: Asked<'_>) -> Result<bool, Status> {
        let Asked { verb, subresource, path } = asked;
        let length = verb.len() + RESOURCE.len() + subresource.len() + self.node.len() + path.len();
        let key = user.digest(&[verb, subresource]);
        let now = Instant::now();
        if length <= LONGEST {
            let known = self.known();
            if known.allowed.get(&key, now).is_some() {
                return Ok(true);
            }
            if known.denied.get(&key, now).is_some() {
                return Ok(false);
            }
        }
        let question = pb::ReviewAccessRequest {
            user: Some(user.clone().into()),
            verb: verb.to_owned(),
            resource: RESOURCE.to_owned(),
            subresource: subresource.to_owned(),
            name: self.node.clone(),
        };
        let _place = self.place(vec![Holder::new(HolderKind::User, user.name.as_str())])?;
        let answer = self.client().review_access(within(question)).await?.into_inner();
        if !answer.allowed {
            tracing::debug!(
                user = user.name,
                verb,
                subresource,
                reason = answer.reason,
                "denied by a review"
            );
        }
        if length <= LONGEST {
            let mut known = self.known();
            let kept = if answer.allowed { &mut known.allowed } else { &mut known.denied };
            kept.put(key, (), Instant::now());
        }
        Ok(answer.allowed)
    }
}

fn within<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(DEADLINE);
    request
}

/// A digest of texts, each with its length before it, so that no two lists of texts are the same bytes.
pub(super) fn digest<'a>(texts: impl IntoIterator<Item = &'a str>) -> Key {
    let mut whole = Sha256::new();
    for text in texts {
        whole.update((text.len() as u64).to_be_bytes());
        whole.update(text);
    }
    whole.finalize().into()
}
