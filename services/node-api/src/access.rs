//! Who asks, and whether they may (node-and-api.md §7).
//!
//! Without TLS nobody is known: the kubelet API listens on loopback, shows what every local user may see and lets nobody into
//! a container. With it, whoever shows a certificate that the authorities of clients stand behind is the user that it names,
//! and may do everything; whoever does not is nobody, unless anonymous requests are let in.
//!
//! The handshake asks for a certificate and takes any whose key the client has; what it is worth is decided for each request,
//! with the authorities as they are then. So a client with a wrong one reads 401 and no broken handshake, and an authority
//! that is taken away counts at once on connections that stand.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use keelson_config::ApiTls;
use rustls::pki_types::CertificateDer;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::serving::Serving;

/// The group whose members may do everything in a cluster.
const MASTERS: &str = "system:masters";

/// Whoever asks, as Kubernetes names them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// The common name of the certificate.
    pub name: String,
    /// Its organisations, and `system:authenticated`.
    pub groups: Vec<String>,
}

/// What a client has shown at the handshake; empty: nothing.
#[derive(Debug, Clone, Default)]
pub(crate) struct Shown(pub(crate) Arc<[CertificateDer<'static>]>);

/// The rules of one listener.
#[derive(Debug, Clone)]
pub enum Access {
    /// HTTP: nobody is asked who they are.
    Unasked,
    /// TLS.
    Certificates {
        /// What certificates are checked against.
        serving: Serving,
        /// Whether who shows none is let in.
        anonymous: bool,
        /// Whether not everybody who is known may do everything. Until the API server is asked, who may is its own
        /// administrators alone.
        reviews: bool,
    },
}

impl Access {
    /// The rules of the kubelet API; without TLS nobody is asked.
    pub fn of(serving: Option<&Serving>, tls: Option<&ApiTls>) -> Self {
        match (serving, tls) {
            (Some(serving), Some(tls)) => Self::Certificates {
                serving: serving.clone(),
                anonymous: tls.anonymous,
                reviews: tls.reviews,
            },
            _ => Self::Unasked,
        }
    }

    /// Who asks; `None`: nobody that is let in.
    fn who(&self, shown: &[CertificateDer<'_>]) -> Option<User> {
        let Self::Certificates { serving, anonymous, .. } = self else { return None };
        match shown.split_first() {
            Some((own, between)) if serving.stands_behind(own, between) => user_of(own),
            // A certificate that is worth nothing is not made anonymous.
            Some(_) => None,
            None => anonymous.then(anonymous_user),
        }
    }
}

impl Access {
    /// Whether somebody who is known may ask at all.
    fn may(&self, user: &User) -> bool {
        let reviewed = matches!(self, Self::Certificates { reviews: true, .. });
        !reviewed || user.groups.iter().any(|group| group == MASTERS)
    }
}

fn anonymous_user() -> User {
    User { name: "system:anonymous".to_owned(), groups: vec!["system:unauthenticated".to_owned()] }
}

/// The user that a certificate names; none without a common name.
fn user_of(certificate: &CertificateDer<'_>) -> Option<User> {
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    let subject = certificate.subject();
    let name = subject.iter_common_name().next()?.as_str().ok()?.to_owned();
    let mut groups: Vec<String> =
        subject.iter_organization().filter_map(|o| o.as_str().ok()).map(ToOwned::to_owned).collect();
    groups.push("system:authenticated".to_owned());
    (!name.is_empty()).then_some(User { name, groups })
}

/// Lets through who may, and tells the handlers who it is.
pub(crate) async fn guard(State(access): State<Access>, mut request: Request, next: Next) -> Response {
    if matches!(access, Access::Unasked) {
        return next.run(request).await;
    }
    let shown = request.extensions_mut().remove::<Shown>().unwrap_or_default();
    match access.who(&shown.0) {
        Some(user) if !access.may(&user) => {
            tracing::info!(path = request.uri().path(), user = user.name, "refused a request: it may not");
            (StatusCode::FORBIDDEN, format!("Forbidden (user={})", user.name)).into_response()
        }
        Some(user) => {
            request.extensions_mut().insert(user);
            next.run(request).await
        }
        None => {
            tracing::info!(
                path = request.uri().path(),
                with_certificate = !shown.0.is_empty(),
                "refused a request: nobody known has sent it"
            );
            unauthorized()
        }
    }
}

/// The answer to nobody.
pub(crate) fn unauthorized() -> Response {
    (StatusCode::UNAUTHORIZED, "Unauthorized").into_response()
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DnType, KeyPair};

    use super::*;

    fn named(parts: &[(DnType, &str)]) -> CertificateDer<'static> {
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        for (kind, value) in parts {
            params.distinguished_name.push(kind.clone(), *value);
        }
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().clone()
    }

    #[test]
    fn the_common_name_is_the_user_and_organisations_are_groups() {
        let certificate = named(&[(DnType::OrganizationName, "operators"), (DnType::CommonName, "jane")]);
        let groups = vec!["operators".to_owned(), "system:authenticated".to_owned()];
        assert_eq!(user_of(&certificate), Some(User { name: "jane".into(), groups }));
        assert_eq!(user_of(&named(&[(DnType::OrganizationName, "operators")])), None);
        assert_eq!(user_of(&named(&[(DnType::CommonName, "")])), None);
        assert_eq!(user_of(&CertificateDer::from(vec![1, 2, 3])), None);
    }
}
