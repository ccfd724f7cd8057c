//! Errors of etcd.

use std::error::Error as _;
use std::path::PathBuf;

use tonic::{Code, Status};

/// An error of a call to etcd.
#[derive(Debug, thiserror::Error)]
pub enum EtcdError {
    /// No member answered in time; the call may be retried.
    #[error("etcd at {endpoints} does not answer: {message}")]
    Unreachable {
        /// The members.
        endpoints: String,
        /// The error of the last member.
        message: String,
    },
    /// etcd refused the call; a retry would be refused, too.
    #[error("etcd refuses {what}: {message}")]
    Refused {
        /// The refused call.
        what: String,
        /// The message of etcd.
        message: String,
    },
    /// The write exceeds the maximum size of a request (`--max-request-bytes`, 1.5 MiB by default).
    #[error("etcd refuses {what}: {message}")]
    TooLarge {
        /// The refused call.
        what: String,
        /// The message of etcd.
        message: String,
    },
    /// A credential file cannot be used.
    #[error("cannot use {} that {field} names: {message}", path.display())]
    Credential {
        /// The setting of an [`keelson_config::Etcd`], as a KeelsonConfiguration writes it.
        field: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        message: String,
    },
    /// A required setting is missing.
    #[error("{field} is not given: {message}")]
    Missing {
        /// The setting of an [`keelson_config::Etcd`], as a KeelsonConfiguration writes it.
        field: &'static str,
        /// Why it is needed.
        message: String,
    },
    /// An endpoint is invalid.
    #[error("{endpoint:?} is not an etcd endpoint: it {}", keelson_config::EtcdEndpoint::RULE)]
    Endpoint {
        /// The endpoint.
        endpoint: String,
    },
}

impl EtcdError {
    /// Whether a later retry may succeed.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Unreachable { .. })
    }
}

/// Whether a retry on another member, or later, may succeed.
pub(crate) fn is_transient(error: &etcd_client::Error) -> bool {
    match error {
        etcd_client::Error::GRpcStatus(status) => matches!(
            status.code(),
            Code::Unavailable
                | Code::DeadlineExceeded
                | Code::Cancelled
                | Code::Unknown
                | Code::Internal
                | Code::Aborted
                | Code::ResourceExhausted
        ),
        etcd_client::Error::TransportError(_)
        | etcd_client::Error::IoError(_)
        | etcd_client::Error::WatchError(_)
        | etcd_client::Error::LeaseKeepAliveError(_)
        | etcd_client::Error::EndpointError(_)
        | etcd_client::Error::Internal(_) => true,
        _ => false,
    }
}

/// The request exceeds the limit of etcd, or that of its gRPC server (half a MiB more).
fn is_too_large(error: &etcd_client::Error) -> bool {
    matches!(error, etcd_client::Error::GRpcStatus(status) if match status.code() {
        Code::InvalidArgument => status.message().contains("request is too large"),
        Code::ResourceExhausted => status.message().contains("larger than max"),
        _ => false,
    })
}

/// The auth token of the connection has expired, or users and roles have changed since it was issued: etcd rejects older tokens
/// that carry an auth revision (`--auth-token jwt`).
pub(crate) fn is_stale_token(error: &etcd_client::Error) -> bool {
    matches!(error, etcd_client::Error::GRpcStatus(status) if match status.code() {
        Code::Unauthenticated => true,
        // The latter when the client renews its token with an outdated password.
        Code::InvalidArgument => ["revision of auth store is old", "authentication failed"]
            .iter()
            .any(|words| status.message().contains(words)),
        _ => false,
    })
}

/// Permission denied. The credential files may have changed since the connection was made.
pub(crate) fn is_denied(error: &etcd_client::Error) -> bool {
    matches!(error, etcd_client::Error::GRpcStatus(status) if status.code() == Code::PermissionDenied)
}

/// Converts an error of the client library.
pub(crate) fn failed(endpoints: &[String], what: &str, error: etcd_client::Error) -> EtcdError {
    let transient = is_transient(&error);
    let message = match &error {
        etcd_client::Error::GRpcStatus(status) => message_with_causes(status),
        other => other.to_string(),
    };
    if is_too_large(&error) {
        EtcdError::TooLarge { what: what.to_owned(), message }
    } else if transient {
        EtcdError::Unreachable { endpoints: endpoints.join(", "), message }
    } else {
        EtcdError::Refused { what: what.to_owned(), message }
    }
}

/// The message with its causes.
fn message_with_causes(status: &Status) -> String {
    let mut text = status.message().to_owned();
    let mut source = status.source();
    while let Some(cause) = source {
        let more = cause.to_string();
        if !text.contains(&more) {
            text = if text.is_empty() { more } else { format!("{text}: {more}") };
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_retryable_errors_are_transient() {
        let of = |status: Status| etcd_client::Error::GRpcStatus(status);
        assert!(is_transient(&of(Status::unavailable("etcdserver: no leader"))));
        assert!(is_transient(&of(Status::resource_exhausted("etcdserver: mvcc: database space exceeded"))));
        for refused in [
            Status::permission_denied("etcdserver: permission denied"),
            Status::invalid_argument("etcdserver: request is too large"),
            Status::resource_exhausted("grpc: received message larger than max (3145766 vs. 2097152)"),
            Status::unauthenticated("etcdserver: invalid auth token"),
        ] {
            let error = failed(&["http://h:1".into()], "to write /a", of(refused.clone()));
            assert_eq!(error.to_string(), format!("etcd refuses to write /a: {}", refused.message()));
            assert_eq!(
                matches!(error, EtcdError::TooLarge { .. }),
                refused.message().contains("larg"),
                "{error}"
            );
        }
    }
}
