//! Authentication and authorization of requests (node-and-api.md §7).
//!
//! Without TLS, clients are not authenticated: the kubelet API listens on loopback, serves what every local user may read and
//! refuses all ways into containers. With TLS, a client is the user named by its certificate, if an authority in
//! `authentication.x509.clientCAFile` has signed it, or the user that the API server knows for its bearer token. A client without
//! credentials is `system:anonymous` if anonymous requests are allowed; a client with wrong credentials never is.
//!
//! The API server also authorizes requests, except in the mode `AlwaysAllow`, which allows everything to every authenticated
//! user. The reviews go through pod-config ([`reviews`]): this service has no credentials for the API server.
//!
//! The TLS handshake requests a certificate and accepts any whose key the client has. Each request verifies the certificate with
//! the current authorities. So a client with a wrong certificate gets 401 and not a failed handshake, and the removal of an
//! authority takes effect on open connections at once.

mod attributes;
mod bearer;
pub(crate) mod certificates;
mod reviews;
mod token_metrics;
mod ttl_cache;
mod user;

use std::fmt::Display;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use keelson_config::ApiTls;
use keelson_service_kit::Context;
use rustls::pki_types::CertificateDer;

use crate::connection_limits::{ConnectionSlot, too_many_connections};
use crate::refusal_log::Sanitized;
use crate::serving::Serving;
use crate::unauthorized_slots::SourceAddress;
use attributes::{RESOURCE, subresources, verb};
use certificates::NO_NAME;
use reviews::{AccessAttributes, Reviews, TokenReview};

pub use user::User;

/// The certificates that a client sent in the TLS handshake, its own first; empty if it sent none.
#[derive(Debug, Clone, Default)]
pub(crate) struct ClientCertificates(pub(crate) Arc<[CertificateDer<'static>]>);

/// How one listener treats its clients.
#[derive(Debug, Clone)]
pub enum Access {
    /// HTTP: clients are not authenticated.
    Unauthenticated,
    /// TLS: clients are authenticated and authorized.
    Authenticated(Arc<Rules>),
}

/// How a listener with TLS authenticates and authorizes requests.
#[derive(Debug)]
pub struct Rules {
    /// Verifies client certificates.
    serving: Serving,
    /// Whether bearer tokens are accepted.
    accept_tokens: bool,
    /// Whether clients without credentials are accepted as anonymous.
    allow_anonymous: bool,
    /// Whether the API server authorizes requests; otherwise all are allowed.
    review_access: bool,
    /// Whether all paths into containers require `create`.
    strict_verbs: bool,
    reviews: Reviews,
}

/// Why a client could not be authenticated.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
struct AuthenticationError(String);

impl Access {
    /// The access rules of the kubelet API; without TLS clients are not authenticated.
    pub fn new(ctx: &Context, serving: Option<&Serving>, tls: Option<&ApiTls>) -> Self {
        match (serving, tls) {
            (Some(serving), Some(tls)) => Self::Authenticated(Arc::new(Rules {
                serving: serving.clone(),
                accept_tokens: tls.tokens,
                allow_anonymous: tls.anonymous,
                review_access: tls.reviews,
                strict_verbs: ctx.config.api.strict_verbs,
                reviews: Reviews::new(ctx, tls),
            })),
            _ => Self::Unauthenticated,
        }
    }
}

impl Rules {
    /// The user of a request: the first that the certificate or a token authenticates, otherwise the anonymous one.
    async fn authenticate(
        &self,
        certificates: &ClientCertificates,
        headers: &HeaderMap,
        source: Option<SourceAddress>,
    ) -> Result<Arc<User>, AuthenticationError> {
        let mut error = None;
        if let Some((leaf, intermediates)) = certificates.0.split_first() {
            let verified = self.serving.verify_client(leaf, intermediates);
            match verified.and_then(|()| User::from_certificate(leaf).ok_or(NO_NAME)) {
                Ok(user) => return Ok(Arc::new(user)),
                Err(refusal) => {
                    self.serving.refused_certificates.count(refusal);
                    error = Some(format!("client certificate refused: {}", refusal.text));
                }
            }
        }
        let tokens = if self.accept_tokens { bearer::tokens(headers) } else { Vec::new() };
        for token in tokens {
            let token_error = match token {
                Ok(token) => match self.reviews.review_token(token, source).await {
                    Ok(TokenReview::Authenticated(user)) => return Ok(user),
                    Ok(TokenReview::Rejected(error)) if error.is_empty() => {
                        "the API server rejected the token".to_owned()
                    }
                    Ok(TokenReview::Rejected(error)) => format!("the API server rejected the token: {error}"),
                    Err(status) => format!("the token could not be reviewed: {}", status.message()),
                },
                Err(error) => error.to_owned(),
            };
            error = Some(token_error);
        }
        match error {
            // A client with wrong credentials is never anonymous.
            Some(error) => Err(AuthenticationError(error)),
            None if self.allow_anonymous => Ok(Arc::new(User::anonymous())),
            None => Err(AuthenticationError("the request has neither a certificate nor a token".to_owned())),
        }
    }

    /// Authorizes a request; the error is the response for a user without access.
    #[allow(clippy::result_large_err, reason = "`Ok` is the usual case")]
    async fn authorize(
        &self,
        user: &User,
        verb: &str,
        path: &str,
        source: Option<SourceAddress>,
    ) -> Result<(), Response> {
        if !self.review_access {
            return Ok(());
        }
        let tried = subresources(path);
        let name = &user.name;
        for subresource in tried {
            match self.reviews.review_access(user, AccessAttributes { verb, subresource, path }).await {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(status) => {
                    let error = status.message().escape_debug();
                    self.log_refusal(500, source, path, Some(name), error);
                    return Err(authorization_error_response(name, verb, subresource));
                }
            }
        }
        let error = format!("the API server does not allow {verb} on {RESOURCE}/{}", tried.join(" or "));
        self.log_refusal(403, source, path, Some(name), &error);
        Err(forbidden_response(name, verb, tried))
    }

    /// Counts a refused request, and logs it while its source address and all addresses together have log lines left. `error`
    /// must not contain control characters: it may quote what a client has sent.
    fn log_refusal(
        &self,
        code: u16,
        source: Option<SourceAddress>,
        path: &str,
        user: Option<&str>,
        error: impl Display,
    ) {
        let Some(suppressed) = self.serving.refusal_log.count(source, code) else { return };
        let source = source.map(|source| source.to_string());
        let user = user.map(|user| tracing::field::display(Sanitized(user)));
        let (event, path) = ("request_refused", Sanitized(path));
        if code == 500 {
            tracing::warn!(event, code, %path, user, %error, source, suppressed, "could not authorize a request");
        } else {
            tracing::info!(event, code, %path, user, %error, source, suppressed, "refused a request");
        }
    }
}

/// Middleware that lets authorized requests through, with their [`User`] as an extension.
pub(crate) async fn guard(State(access): State<Access>, mut request: Request, next: Next) -> Response {
    let Access::Authenticated(rules) = &access else { return next.run(request).await };
    let certificates = request.extensions_mut().remove::<ClientCertificates>().unwrap_or_default();
    // Removed, so that no handler keeps the slot for longer than the connection lasts.
    let slot = request.extensions_mut().remove::<Arc<ConnectionSlot>>();
    let source = slot.as_ref().map(|slot| slot.source());
    let path = request.uri().path();
    let verb = verb(request.method(), path, rules.strict_verbs);
    let user = match rules.authenticate(&certificates, request.headers(), source).await {
        Ok(user) => user,
        Err(AuthenticationError(error)) => {
            rules.log_refusal(401, source, path, None, Sanitized(&error));
            return unauthorized_response();
        }
    };
    if let Err(response) = rules.authorize(&user, verb, path, source).await {
        return response;
    }
    if let Some(Err(error)) = slot.map(|slot| slot.authorize(Some(&user.name))) {
        return too_many_connections(&error);
    }
    bearer::strip(request.headers_mut());
    request.extensions_mut().insert(Arc::unwrap_or_clone(user));
    next.run(request).await
}

/// The 401 for a client that is not authenticated.
pub(crate) fn unauthorized_response() -> Response {
    (StatusCode::UNAUTHORIZED, "Unauthorized").into_response()
}

/// The 403 for a user without access.
fn forbidden_response(user: &str, verb: &str, tried: &[&str]) -> Response {
    let tried = tried.join(" ");
    let text = format!("Forbidden (user={user}, verb={verb}, resource={RESOURCE}, subresource(s)=[{tried}])");
    (StatusCode::FORBIDDEN, text).into_response()
}

/// The 500 for a request that could not be reviewed.
fn authorization_error_response(user: &str, verb: &str, subresource: &str) -> Response {
    let text = format!(
        "Authorization error (user={user}, verb={verb}, resource={RESOURCE}, subresource={subresource})"
    );
    (StatusCode::INTERNAL_SERVER_ERROR, text).into_response()
}
