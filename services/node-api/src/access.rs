//! Who asks, and whether they may (node-and-api.md §7).
//!
//! Without TLS nobody is known: the kubelet API listens on loopback, shows what every local user may see and lets nobody into
//! a container. With it, whoever shows a certificate that the authorities of clients stand behind, where there are any, is the
//! user that it names, and whoever shows a bearer token is whom the API server knows it of. Who shows neither is nobody, unless
//! anonymous requests are let in; who shows what is worth nothing is nobody in any case.
//!
//! What somebody may do the API server is asked too, unless everybody who is known may do everything (`AlwaysAllow`). The
//! questions go through pod-config ([`reviews`]): this service has no credentials for that server.
//!
//! The handshake asks for a certificate and takes any whose key the client has; what it is worth is decided for each request,
//! with the authorities as they are then. So a client with a wrong one reads 401 and no broken handshake, and an authority
//! that is taken away counts at once on connections that stand.

mod attributes;
mod bearer;
pub(crate) mod certificates;
mod kept;
mod reviews;
mod token_metrics;
mod user;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use keelson_config::ApiTls;
use keelson_service_kit::Context;
use rustls::pki_types::CertificateDer;

use crate::places::{Place, no_place};
use crate::refusals::Cut;
use crate::serving::Serving;
use crate::strangers::Source;
use attributes::{RESOURCE, subresources, verb};
use certificates::NO_NAME;
use reviews::{Asked, Reviews, Whose};

pub use user::User;

/// What a client has shown at the handshake; empty: nothing.
#[derive(Debug, Clone, Default)]
pub(crate) struct Shown(pub(crate) Arc<[CertificateDer<'static>]>);

/// The rules of one listener.
#[derive(Debug, Clone)]
pub enum Access {
    /// HTTP: nobody is asked who they are.
    Unasked,
    /// TLS.
    Asked(Arc<Rules>),
}

/// Who is known on a listener with TLS, and what they may do.
#[derive(Debug)]
pub struct Rules {
    /// What certificates are checked against.
    serving: Serving,
    /// Whether tokens are looked at.
    tokens: bool,
    /// Whether who shows nothing is let in.
    anonymous: bool,
    /// Whether not everybody who is known may do everything.
    reviewed: bool,
    /// Whether it takes `create` to get into a container, whatever the method.
    strict_verbs: bool,
    reviews: Reviews,
}

/// Why somebody is nobody.
#[derive(Debug, PartialEq, Eq)]
struct Nobody(String);

impl Access {
    /// The rules of the kubelet API; without TLS nobody is asked.
    pub fn of(ctx: &Context, serving: Option<&Serving>, tls: Option<&ApiTls>) -> Self {
        match (serving, tls) {
            (Some(serving), Some(tls)) => Self::Asked(Arc::new(Rules {
                serving: serving.clone(),
                tokens: tls.tokens,
                anonymous: tls.anonymous,
                reviewed: tls.reviews,
                strict_verbs: ctx.config.api.strict_verbs,
                reviews: Reviews::new(ctx, tls),
            })),
            _ => Self::Unasked,
        }
    }
}

impl Rules {
    /// Who asks: the first that is recognised of certificate, tokens and nobody at all.
    async fn who(
        &self,
        shown: &Shown,
        headers: &HeaderMap,
        source: Option<Source>,
    ) -> Result<Arc<User>, Nobody> {
        let mut wrong = None;
        if let Some((own, between)) = shown.0.split_first() {
            let checked = self.serving.check_client(own, between);
            match checked.and_then(|()| User::of_certificate(own).ok_or(NO_NAME)) {
                Ok(user) => return Ok(Arc::new(user)),
                Err(refusal) => {
                    self.serving.refused.count(refusal);
                    wrong = Some(format!("the client's certificate: {}", refusal.text));
                }
            }
        }
        let tokens = if self.tokens { bearer::tokens(headers) } else { Vec::new() };
        for token in tokens {
            let trouble = match token {
                Ok(token) => match self.reviews.token(token, source).await {
                    Ok(Whose::Of(user)) => return Ok(user),
                    Ok(Whose::Nobody(why)) if why.is_empty() => "the token is nobody's".to_owned(),
                    Ok(Whose::Nobody(why)) => format!("the token is nobody's: {why}"),
                    Err(status) => format!("nobody can say whose token it is: {}", status.message()),
                },
                Err(why) => why.to_owned(),
            };
            wrong = Some(trouble);
        }
        match wrong {
            // What is worth nothing is not made anonymous.
            Some(why) => Err(Nobody(why)),
            None if self.anonymous => Ok(Arc::new(User::anonymous())),
            None => Err(Nobody("neither certificate nor token was shown".to_owned())),
        }
    }

    /// Whether they may; an answer to whoever may not.
    #[allow(clippy::result_large_err, reason = "the other way is the usual one")]
    async fn may(&self, user: &User, verb: &str, path: &str, source: Option<Source>) -> Result<(), Response> {
        if !self.reviewed {
            return Ok(());
        }
        let tried = subresources(path);
        let name = &user.name;
        for subresource in tried {
            match self.reviews.may(user, Asked { verb, subresource, path }).await {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(status) => {
                    let error = status.message();
                    if let Some(left_out) = self.serving.refusals.count(source, 500) {
                        tracing::warn!(
                            path = %Cut(path),
                            user = %Cut(name),
                            error,
                            source = source.map(|source| source.to_string()),
                            left_out,
                            "refused a request: nobody can say whether it may"
                        );
                    }
                    return Err(unsure(name, verb, subresource));
                }
            }
        }
        if let Some(left_out) = self.serving.refusals.count(source, 403) {
            tracing::info!(
                path = %Cut(path),
                user = %Cut(name),
                verb,
                source = source.map(|source| source.to_string()),
                left_out,
                "refused a request: it may not"
            );
        }
        Err(forbidden(name, verb, tried))
    }
}

/// Lets through who may, and tells the handlers who it is.
pub(crate) async fn guard(State(access): State<Access>, mut request: Request, next: Next) -> Response {
    let Access::Asked(rules) = &access else { return next.run(request).await };
    let shown = request.extensions_mut().remove::<Shown>().unwrap_or_default();
    // Taken out, so that no handler keeps it for longer than there is the connection.
    let place = request.extensions_mut().remove::<Arc<Place>>();
    let source = place.as_ref().map(|place| place.source());
    let path = request.uri().path();
    let verb = verb(request.method(), path, rules.strict_verbs);
    let user = match rules.who(&shown, request.headers(), source).await {
        Ok(user) => user,
        Err(Nobody(why)) => {
            if let Some(left_out) = rules.serving.refusals.count(source, 401) {
                tracing::info!(
                    path = %Cut(path),
                    why = %Cut(&why),
                    source = source.map(|source| source.to_string()),
                    left_out,
                    "refused a request: nobody known has sent it"
                );
            }
            return unauthorized();
        }
    };
    if let Err(refused) = rules.may(&user, verb, path, source).await {
        return refused;
    }
    if let Some(Err(why)) = place.map(|place| place.settle(Some(&user.name))) {
        return no_place(&why);
    }
    bearer::strip(request.headers_mut());
    request.extensions_mut().insert(Arc::unwrap_or_clone(user));
    next.run(request).await
}

/// The answer to nobody.
pub(crate) fn unauthorized() -> Response {
    (StatusCode::UNAUTHORIZED, "Unauthorized").into_response()
}

/// The answer to somebody who may not.
fn forbidden(user: &str, verb: &str, tried: &[&str]) -> Response {
    let tried = tried.join(" ");
    let text = format!("Forbidden (user={user}, verb={verb}, resource={RESOURCE}, subresource(s)=[{tried}])");
    (StatusCode::FORBIDDEN, text).into_response()
}

/// The answer when nobody can say whether somebody may.
fn unsure(user: &str, verb: &str, subresource: &str) -> Response {
    let text = format!(
        "Authorization error (user={user}, verb={verb}, resource={RESOURCE}, subresource={subresource})"
    );
    (StatusCode::INTERNAL_SERVER_ERROR, text).into_response()
}
