//! Errors of calls to the API server.

use std::path::PathBuf;

use http::StatusCode;
use kube::Error;
use kube::core::Status;

use crate::refusal::Refusal;

/// An error of a call to the API server.
#[derive(Debug, thiserror::Error)]
pub enum KubeError {
    /// The kubeconfig is invalid.
    #[error("invalid kubeconfig: {}: {message}", path.display())]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// The cause.
        message: String,
    },
    /// The kubeconfig does not exist yet; another component will write it.
    #[error("the API server cannot be called yet: {what}")]
    Awaited {
        /// What the service waits for.
        what: &'static str,
    },
    /// The server does not answer, or its answer is invalid.
    #[error("the API server {server} does not answer {what}: {message}")]
    Unreachable {
        /// Its address.
        server: String,
        /// The request.
        what: String,
        /// The cause, for people.
        message: String,
        /// Seconds to wait before a retry, if a proxy answered with `Retry-After`; 0: not given.
        retry_after: u32,
    },
    /// The server refuses the request.
    #[error("the API server {server} refuses {what}: {} ({code} {reason})", message_or_default(.message))]
    Refused {
        /// Its address.
        server: String,
        /// The request.
        what: String,
        /// HTTP status.
        code: u16,
        /// `Forbidden`, `Conflict`…
        reason: String,
        /// The server's message.
        message: String,
        /// Seconds to wait before a retry (`Retry-After`); 0: not given.
        retry_after: u32,
    },
}

fn message_or_default(message: &str) -> &str {
    if message.is_empty() { "no message" } else { message }
}

impl KubeError {
    /// The HTTP status of a refusal.
    pub fn code(&self) -> Option<u16> {
        match self {
            Self::Refused { code, .. } => Some(*code),
            _ => None,
        }
    }

    /// Seconds to wait before a retry (`Retry-After`); 0: not given.
    pub fn retry_after(&self) -> u32 {
        match self {
            Self::Refused { retry_after, .. } | Self::Unreachable { retry_after, .. } => *retry_after,
            Self::Kubeconfig { .. } | Self::Awaited { .. } => 0,
        }
    }

    /// No request was sent, as there is no kubeconfig yet; that may change at any moment.
    pub fn is_awaited(&self) -> bool {
        matches!(self, Self::Awaited { .. })
    }

    /// There is no answer, or it does not come from an API server.
    pub(crate) fn is_unanswered(&self) -> bool {
        matches!(self, Self::Unreachable { .. })
    }

    /// The API server itself reports that the object does not exist (404 `NotFound`).
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Refused { code: 404, reason, .. } if reason == "NotFound")
    }

    /// The Node authorizer finds no relationship between this node and the object. With `AuthorizeNodeWithSelectors` (on since
    /// Kubernetes 1.32) that is what a node gets for a pod that does not exist and for one that is bound elsewhere, instead of a
    /// 404. Right after an object was bound it may also mean that the authorizer has not seen it yet. There is no structured
    /// form of this reason (`status.reason` is `Forbidden` for every 403), so its text is matched, only here.
    pub fn is_unrelated(&self) -> bool {
        const UNRELATED: &str = "no relationship found between node";
        matches!(self, Self::Refused { code: 403, message, .. } if message.contains(UNRELATED))
    }

    /// NodeRestriction refuses a write to a pod that is bound to another node. As with [`Self::is_unrelated`], only the message
    /// text identifies it (docs/node-requests.md).
    pub fn is_of_another_node(&self) -> bool {
        const BOUND_ELSEWHERE: &str = "pods with spec.nodeName set to itself";
        matches!(self, Self::Refused { code: 403, message, .. } if message.contains(BOUND_ELSEWHERE))
    }

    /// A retry may succeed: there was no answer, or the server is overloaded or failing (429, 5xx).
    pub fn is_retryable(&self) -> bool {
        self.code().is_none_or(|code| code == 429 || code >= 500)
    }

    /// Another writer was faster, or the object already exists (409).
    pub fn is_conflict(&self) -> bool {
        self.code() == Some(409)
    }

    /// The requested resource version has expired or is not reached yet: the range must be listed again (410, or 504 with that
    /// cause).
    pub(crate) fn needs_list(&self) -> bool {
        match self {
            Self::Refused { code, message, .. } => {
                *code == 410 || (*code == 504 && message.contains("Too large resource version"))
            }
            _ => false,
        }
    }

    /// A refusal with an API server's `Status`.
    pub(crate) fn refused(server: &str, what: &str, status: Status) -> Self {
        let retry_after = status.details.map_or(0, |details| details.retry_after_seconds);
        let Status { code, reason, message, .. } = status;
        Self::Refused { server: server.to_owned(), what: what.to_owned(), code, reason, message, retry_after }
    }

    pub(crate) fn unreachable(server: &str, what: &str, message: impl Into<String>) -> Self {
        let message = message.into();
        Self::Unreachable { server: server.to_owned(), what: what.to_owned(), message, retry_after: 0 }
    }

    /// An answer with an error status. Without a `Status` object it may come from a proxy, whose 404, 5xx or redirect says
    /// nothing about an object.
    fn answered(server: &str, what: &str, refusal: &Refusal) -> Self {
        let Refusal { code, status, excerpt, retry_after } = refusal;
        let (server, what, retry_after) = (server.to_owned(), what.to_owned(), *retry_after);
        if let Some(status) = status.clone() {
            let (reason, message) = (status.reason, status.message);
            let code = if status.code == 0 { code.as_u16() } else { status.code };
            return Self::Refused { server, what, code, reason, message, retry_after };
        }
        if *code == StatusCode::NOT_FOUND || !code.is_client_error() {
            let detail = if excerpt.is_empty() { String::new() } else { format!(": {excerpt:?}") };
            let message = format!(
                "{code} is no word of a Kubernetes API server; something answers in its place{detail}"
            );
            return Self::Unreachable { server, what, message, retry_after };
        }
        let reason = code.canonical_reason().unwrap_or_default().replace(' ', "");
        Self::Refused { server, what, code: code.as_u16(), reason, message: excerpt.clone(), retry_after }
    }

    pub(crate) fn of(server: &str, what: &str, error: Error) -> Self {
        match error {
            Error::Api(status) => Self::refused(server, what, *status),
            Error::Service(cause) => match cause.downcast_ref() {
                Some(refusal) => Self::answered(server, what, refusal),
                None => Self::unreachable(server, what, causes(cause.as_ref())),
            },
            Error::SerdeError(error) => {
                Self::unreachable(server, what, format!("the answer is no Kubernetes object: {error}"))
            }
            other => Self::unreachable(server, what, causes(&other)),
        }
    }
}

/// An error with its causes, without repetitions.
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let words = cause.to_string();
        if !text.contains(&words) {
            text = format!("{text}: {words}");
        }
        next = cause.source();
    }
    // The library's name for its own layer carries no information.
    text.trim_start_matches("ServiceError: ").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusal_message_names_the_request_and_the_server_message() {
        let status =
            Status { code: 403, reason: "Forbidden".into(), message: "no".into(), ..Status::default() };
        let error = KubeError::refused("https://a:6443", "pods", status);
        assert_eq!(error.to_string(), "the API server https://a:6443 refuses pods: no (403 Forbidden)");
        assert!(!error.is_not_found() && !error.needs_list());
    }

    #[test]
    fn missing_relationship_is_distinguished_from_missing_permission() {
        let refused = |code: u16, message: &str| {
            let status =
                Status { code, reason: "Forbidden".into(), message: message.into(), ..Status::default() };
            KubeError::refused("s", "pods", status)
        };
        let forbidden = r#"pods "web" is forbidden: User "system:node:n1" cannot get resource "pods" in API group "" in the namespace "default""#;
        let unrelated = format!("{forbidden}: no relationship found between node 'n1' and this object");
        assert!(refused(403, &unrelated).is_unrelated());
        assert!(!refused(403, forbidden).is_unrelated());
        assert!(!refused(404, &unrelated).is_unrelated());
    }

    #[test]
    fn pod_of_another_node_is_distinguished_from_missing_permission() {
        for (code, message, expected) in [
            (403, "node \"n1\" can only update pod status for pods with spec.nodeName set to itself", true),
            (403, "node \"n1\" can only delete pods with spec.nodeName set to itself", true),
            (403, "User \"system:node:n1\" cannot patch resource \"pods/status\"", false),
            (422, "pods with spec.nodeName set to itself", false),
        ] {
            let status =
                Status { code, reason: "Forbidden".into(), message: message.into(), ..Status::default() };
            assert_eq!(
                KubeError::refused("s", "w", status).is_of_another_node(),
                expected,
                "{code} {message}"
            );
        }
    }

    #[test]
    fn expired_and_too_large_resource_versions_need_a_list() {
        for (code, message, expected) in [
            (410, "too old resource version", true),
            (504, "Timeout: Too large resource version: 9, current: 3", true),
            (504, "gateway timeout", false),
            (500, "", false),
        ] {
            let status = Status { code, message: message.into(), ..Status::default() };
            assert_eq!(KubeError::refused("s", "w", status).needs_list(), expected, "{code} {message}");
        }
    }
}
