//! Why a pod could not be synced.

use tonic::Status;

/// Why a turn of a pod's worker failed.
#[derive(Debug, Clone)]
pub struct SyncError {
    /// For people.
    pub message: String,
    /// When to retry, unix nanoseconds; `None`: soon, with back-off.
    pub retry_unix_nanos: Option<i64>,
    /// Another service, or the runtime behind it, does not answer. The pod is not at fault, and the retry comes sooner.
    pub peer_unavailable: bool,
    /// The pod does not fit on this node and is rejected for this reason.
    pub rejection: Option<&'static str>,
}

impl SyncError {
    /// An error of the pod or of something that the pod needs.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), retry_unix_nanos: None, peer_unavailable: false, rejection: None }
    }

    /// A service that the pod has to wait for.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self { peer_unavailable: true, ..Self::new(message) }
    }

    /// A failed call. Its code says whether the peer is unavailable or has refused.
    pub fn from_status(what: &str, status: &Status) -> Self {
        Self {
            message: format!("{what}: {}", status.message()),
            retry_unix_nanos: None,
            peer_unavailable: keelson_service_kit::status::is_cut(status),
            rejection: None,
        }
    }
}
