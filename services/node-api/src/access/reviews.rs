//! Token and access reviews by the API server, sent through pod-config and cached (node-and-api.md §7).
//!
//! While pod-config or the API server is down, cached reviews stay in effect until they expire; everything else is an error,
//! within [`DEADLINE`].

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use keelson_config::{ApiTls, ServiceName};
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_proto::keelson::pod_config::v1::pod_config_client::PodConfigClient;
use keelson_service_kit::{Context, Holder, HolderKind, Peer, SharedPlace, Shares};
use pb::review_token_response::Result as ReviewResult;
use sha2::{Digest as _, Sha256};
use tokio::time::Instant;
use tonic::{Request, Status};

use super::User;
use super::attributes::RESOURCE;
use super::token_metrics::TokenMetrics;
use super::ttl_cache::{Key, TtlCache};
use crate::unauthorized_slots::SourceAddress;

/// How long a review may take; pod-config retries the API server within this time.
const DEADLINE: Duration = Duration::from_secs(10);
/// The entries of each cache. Rejected tokens have a cache of their own, so that made-up tokens do not evict valid ones.
const CACHE_CAPACITY: usize = 1024;
/// Reviews in progress at the same time. Addresses and users have shares of them, so that made-up tokens do not block the
/// reviews of others.
const MAX_IN_FLIGHT: usize = 64;
/// Access reviews with longer attributes, in bytes, are not cached.
const MAX_CACHED_BYTES: usize = 10_000;

/// The result of a token review.
#[derive(Debug)]
pub(super) enum TokenReview {
    Authenticated(Arc<User>),
    /// With the error of the API server; empty if it gave none.
    Rejected(String),
}

/// The attributes of a request to a part of this node.
#[derive(Debug, Clone, Copy)]
pub(super) struct AccessAttributes<'a> {
    pub(super) verb: &'a str,
    pub(super) subresource: &'a str,
    /// The path of the request; only its length matters here.
    pub(super) path: &'a str,
}

/// Sends reviews and caches their results.
#[derive(Debug)]
pub(super) struct Reviews {
    pod_config: Peer,
    node: String,
    caches: Mutex<Caches>,
    in_flight: Arc<Shares>,
    metrics: TokenMetrics,
}

#[derive(Debug)]
struct Caches {
    tokens: TtlCache<Arc<User>>,
    rejected_tokens: TtlCache<()>,
    allowed: TtlCache<()>,
    denied: TtlCache<()>,
}

impl Reviews {
    pub(super) fn new(ctx: &Context, tls: &ApiTls) -> Self {
        let ttl = Duration::from_millis;
        let caches = Caches {
            tokens: TtlCache::new(ttl(tls.token_cache_ms), CACHE_CAPACITY),
            rejected_tokens: TtlCache::new(ttl(tls.token_cache_ms), CACHE_CAPACITY),
            allowed: TtlCache::new(ttl(tls.allowed_cache_ms), CACHE_CAPACITY),
            denied: TtlCache::new(ttl(tls.denied_cache_ms), CACHE_CAPACITY),
        };
        Self {
            pod_config: ctx.peer(ServiceName::PodConfig),
            node: ctx.config.node_name.clone(),
            caches: Mutex::new(caches),
            in_flight: Shares::new(MAX_IN_FLIGHT),
            metrics: TokenMetrics::register(&ctx.metrics),
        }
    }

    fn caches(&self) -> MutexGuard<'_, Caches> {
        self.caches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn client(&self) -> PodConfigClient<keelson_service_kit::PeerChannel> {
        PodConfigClient::new(self.pod_config.channel())
    }

    /// Authenticates a token that a client at `source` sent. Rejections with an error of the API server are not cached.
    ///
    /// # Errors
    /// pod-config or the API server does not answer, or the source address has its share of reviews in progress.
    pub(super) async fn review_token(
        &self,
        token: String,
        source: Option<SourceAddress>,
    ) -> Result<TokenReview, Status> {
        let key = digest([token.as_str()]);
        let now = Instant::now();
        let cached = self.cached_token(&key, now);
        let was_cached = cached.is_some();
        let review = match cached {
            Some(review) => Ok(review),
            None => {
                let source = source.map(|source| Holder::new(HolderKind::Address, source.to_string()));
                let _slot = self.acquire_slot(source.into_iter().collect())?;
                self.fetch_token(key, token).await
            }
        };
        self.metrics.count(was_cached, now);
        review
    }

    fn acquire_slot(&self, holders: Vec<Holder>) -> Result<SharedPlace, Status> {
        self.in_flight.take(holders).map_err(|error| {
            Status::resource_exhausted(format!("too many reviews by the API server are in progress: {error}"))
        })
    }

    fn cached_token(&self, key: &Key, now: Instant) -> Option<TokenReview> {
        let caches = self.caches();
        let rejected = || caches.rejected_tokens.get(key, now).map(|()| TokenReview::Rejected(String::new()));
        caches.tokens.get(key, now).map(TokenReview::Authenticated).or_else(rejected)
    }

    async fn fetch_token(&self, key: Key, token: String) -> Result<TokenReview, Status> {
        let mut fetch = self.metrics.fetch();
        let request = with_deadline(pb::ReviewTokenRequest { token });
        let response = self.client().review_token(request).await?.into_inner();
        if !matches!(&response.result, Some(ReviewResult::Rejected(error)) if !error.is_empty()) {
            fetch.set_answered();
        }
        match response.result {
            Some(ReviewResult::User(user)) if !user.name.is_empty() => {
                let user = Arc::new(User::from(user).authenticated());
                self.caches().tokens.insert(key, Arc::clone(&user), Instant::now());
                Ok(TokenReview::Authenticated(user))
            }
            Some(ReviewResult::Rejected(error)) if !error.is_empty() => Ok(TokenReview::Rejected(error)),
            Some(ReviewResult::User(_) | ReviewResult::Rejected(_)) | None => {
                self.caches().rejected_tokens.insert(key, (), Instant::now());
                Ok(TokenReview::Rejected(String::new()))
            }
        }
    }

    /// Whether the user has access to a part of this node.
    ///
    /// # Errors
    /// pod-config or the API server does not answer, or the user has its share of reviews in progress.
    pub(super) async fn review_access(
        &self,
        user: &User,
        attributes: AccessAttributes<'_>,
    ) -> Result<bool, Status> {
        let AccessAttributes { verb, subresource, path } = attributes;
        let length = verb.len() + RESOURCE.len() + subresource.len() + self.node.len() + path.len();
        let key = user.digest(&[verb, subresource]);
        let now = Instant::now();
        if length <= MAX_CACHED_BYTES {
            let caches = self.caches();
            if caches.allowed.get(&key, now).is_some() {
                return Ok(true);
            }
            if caches.denied.get(&key, now).is_some() {
                return Ok(false);
            }
        }
        let request = pb::ReviewAccessRequest {
            user: Some(user.clone().into()),
            verb: verb.to_owned(),
            resource: RESOURCE.to_owned(),
            subresource: subresource.to_owned(),
            name: self.node.clone(),
        };
        let _slot = self.acquire_slot(vec![Holder::new(HolderKind::User, user.name.as_str())])?;
        let response = self.client().review_access(with_deadline(request)).await?.into_inner();
        if !response.allowed {
            tracing::debug!(
                user = user.name,
                verb,
                subresource,
                reason = response.reason,
                "an access review denied a request"
            );
        }
        if length <= MAX_CACHED_BYTES {
            let mut caches = self.caches();
            let cache = if response.allowed { &mut caches.allowed } else { &mut caches.denied };
            cache.insert(key, (), Instant::now());
        }
        Ok(response.allowed)
    }
}

fn with_deadline<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(DEADLINE);
    request
}

/// A digest of texts, each preceded by its length, so that different lists never have the same input.
pub(super) fn digest<'a>(texts: impl IntoIterator<Item = &'a str>) -> Key {
    let mut hash = Sha256::new();
    for text in texts {
        hash.update((text.len() as u64).to_be_bytes());
        hash.update(text);
    }
    hash.finalize().into()
}
