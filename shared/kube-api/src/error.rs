//! What can go wrong between a node and its API server.

use std::path::PathBuf;

use http::StatusCode;
use kube::Error;
use kube::core::Status;

use crate::refusal::Refusal;

/// Why a call has no answer.
#[derive(Debug, thiserror::Error)]
pub enum KubeError {
    /// The kubeconfig does not do.
    #[error("invalid kubeconfig: {}: {message}", path.display())]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },
    /// The kubeconfig is not there yet, and somebody sees to it.
    #[error("the API server cannot be asked yet: {what}")]
    Awaited {
        /// What is waited for.
        what: &'static str,
    },
    /// The server does not answer, or not what it should.
    #[error("the API server {server} does not answer {what}: {message}")]
    Unreachable {
        /// Its address.
        server: String,
        /// What was asked.
        what: String,
        /// The cause, for people.
        message: String,
        /// Seconds that whoever answered in its place wants to be left alone (`Retry-After`); 0: it has not said.
        retry_after: u32,
    },
    /// The server refuses.
    #[error("the API server {server} refuses {what}: {} ({code} {reason})", told(.message))]
    Refused {
        /// Its address.
        server: String,
        /// What was asked.
        what: String,
        /// HTTP status.
        code: u16,
        /// `Forbidden`, `Conflict`…
        reason: String,
        /// In its words.
        message: String,
        /// Seconds that it wants to be left alone (`Retry-After`); 0: it has not said.
        retry_after: u32,
    },
}

fn told(message: &str) -> &str {
    if message.is_empty() { "without a word" } else { message }
}

impl KubeError {
    /// The HTTP status of a refusal.
    pub fn code(&self) -> Option<u16> {
        match self {
            Self::Refused { code, .. } => Some(*code),
            _ => None,
        }
    }

    /// Seconds that the server wants to be left alone; 0: it has not said.
    pub fn retry_after(&self) -> u32 {
        match self {
            Self::Refused { retry_after, .. } | Self::Unreachable { retry_after, .. } => *retry_after,
            Self::Kubeconfig { .. } | Self::Awaited { .. } => 0,
        }
    }

    /// Nothing was asked, as there is nothing to ask with yet; that may change at any moment.
    pub fn is_awaited(&self) -> bool {
        matches!(self, Self::Awaited { .. })
    }

    /// Nobody has answered, or nothing that an API server says.
    pub(crate) fn is_unanswered(&self) -> bool {
        matches!(self, Self::Unreachable { .. })
    }

    /// The API server itself says that the object is not there (404 `NotFound`).
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Refused { code: 404, reason, .. } if reason == "NotFound")
    }

    /// The Node authorizer finds no relationship between this node and the object. With `AuthorizeNodeWithSelectors` (on since
    /// Kubernetes 1.32) that is what a node gets for a pod that does not exist and for one that is bound elsewhere, instead of a
    /// 404. Right after an object was bound it may also mean that the authorizer has not seen it yet. There is no structured
    /// form of this reason (`status.reason` is `Forbidden` for every 403), so its text is matched, here alone.
    pub fn is_unrelated(&self) -> bool {
        const UNRELATED: &str = "no relationship found between node";
        matches!(self, Self::Refused { code: 403, message, .. } if message.contains(UNRELATED))
    }

    /// NodeRestriction refuses a write to a pod that is bound to another node. As with [`Self::is_unrelated`] only the text says
    /// so (docs/node-requests.md).
    pub fn is_of_another_node(&self) -> bool {
        const BOUND_ELSEWHERE: &str = "pods with spec.nodeName set to itself";
        matches!(self, Self::Refused { code: 403, message, .. } if message.contains(BOUND_ELSEWHERE))
    }

    /// The same call may go well at another time: nobody has answered, or the server has too much to do or is in trouble.
    pub fn may_pass(&self) -> bool {
        self.code().is_none_or(|code| code == 429 || code >= 500)
    }

    /// Somebody else was faster, or the object is there already (409).
    pub fn is_conflict(&self) -> bool {
        self.code() == Some(409)
    }

    /// The version that was asked from is forgotten, or not reached yet: all has to be read again (410, or 504 with that cause).
    pub(crate) fn wants_a_list(&self) -> bool {
        match self {
            Self::Refused { code, message, .. } => {
                *code == 410 || (*code == 504 && message.contains("Too large resource version"))
            }
            _ => false,
        }
    }

    /// A refusal in an API server's words.
    pub(crate) fn refused(server: &str, what: &str, status: Status) -> Self {
        let retry_after = status.details.map_or(0, |details| details.retry_after_seconds);
        let Status { code, reason, message, .. } = status;
        Self::Refused { server: server.to_owned(), what: what.to_owned(), code, reason, message, retry_after }
    }

    pub(crate) fn unreachable(server: &str, what: &str, message: impl Into<String>) -> Self {
        let message = message.into();
        Self::Unreachable { server: server.to_owned(), what: what.to_owned(), message, retry_after: 0 }
    }

    /// An answer that is no success. What is no `Status` may be of a proxy: that there is no page, that it finds no server or
    /// that one is to go elsewhere says nothing of an object.
    fn answered(server: &str, what: &str, refusal: &Refusal) -> Self {
        let Refusal { code, status, words, retry_after } = refusal;
        let (server, what, retry_after) = (server.to_owned(), what.to_owned(), *retry_after);
        if let Some(status) = status.clone() {
            let (reason, message) = (status.reason, status.message);
            let code = if status.code == 0 { code.as_u16() } else { status.code };
            return Self::Refused { server, what, code, reason, message, retry_after };
        }
        if *code == StatusCode::NOT_FOUND || !code.is_client_error() {
            let said = if words.is_empty() { String::new() } else { format!(": {words:?}") };
            let message =
                format!("{code} is no word of a Kubernetes API server; something answers in its place{said}");
            return Self::Unreachable { server, what, message, retry_after };
        }
        let reason = code.canonical_reason().unwrap_or_default().replace(' ', "");
        Self::Refused { server, what, code: code.as_u16(), reason, message: words.clone(), retry_after }
    }

    pub(crate) fn of(server: &str, what: &str, error: Error) -> Self {
        match error {
            Error::Api(status) => Self::refused(server, what, *status),
            Error::Service(cause) => match cause.downcast_ref() {
                Some(refusal) => Self::answered(server, what, refusal),
                None => Self::unreachable(server, what, causes(cause.as_ref())),
            },
            Error::SerdeError(error) => {
                Self::unreachable(server, what, format!("what it says is no Kubernetes object: {error}"))
            }
            other => Self::unreachable(server, what, causes(&other)),
        }
    }
}

/// An error with its causes, each said once.
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
    // The library's name of a layer of its own says nothing to anybody.
    text.trim_start_matches("ServiceError: ").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_server_says_is_told_with_what_was_asked() {
        let status =
            Status { code: 403, reason: "Forbidden".into(), message: "no".into(), ..Status::default() };
        let error = KubeError::refused("https://a:6443", "pods", status);
        assert_eq!(error.to_string(), "the API server https://a:6443 refuses pods: no (403 Forbidden)");
        assert!(!error.is_not_found() && !error.wants_a_list());
    }

    #[test]
    fn a_missing_relationship_is_told_from_a_missing_permission() {
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
    fn a_pod_of_another_node_is_told_from_a_missing_permission() {
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
    fn a_forgotten_version_and_one_that_is_not_reached_want_a_list() {
        for (code, message, expected) in [
            (410, "too old resource version", true),
            (504, "Timeout: Too large resource version: 9, current: 3", true),
            (504, "gateway timeout", false),
            (500, "", false),
        ] {
            let status = Status { code, message: message.into(), ..Status::default() };
            assert_eq!(KubeError::refused("s", "w", status).wants_a_list(), expected, "{code} {message}");
        }
    }
}
