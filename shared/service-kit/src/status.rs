//! gRPC errors with a machine-readable reason: `ErrorInfo { reason, domain: "keelson" }`.

use std::collections::HashMap;

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

/// The domain of every `ErrorInfo` of ours.
pub const DOMAIN: &str = "keelson";
/// Reason of the errors that our own clients make when a peer cannot be reached or is lost during a call.
pub const PEER_UNAVAILABLE: &str = "PEER_UNAVAILABLE";
/// Reason of the errors that our own clients make when a peer does not answer in time.
pub const PEER_SILENT: &str = "PEER_SILENT";

/// A status whose `message` names the thing that is wrong, with an upper-snake-case `reason` for programs.
pub fn error(code: Code, reason: &str, message: impl Into<String>) -> Status {
    Status::with_error_details(
        code,
        message.into(),
        ErrorDetails::with_error_info(reason, DOMAIN, HashMap::new()),
    )
}

/// The `reason` of a status that [`error`] made.
pub fn reason(status: &Status) -> Option<String> {
    status.get_details_error_info().map(|info| info.reason)
}

/// One line of an error and all its sources, for logs and statuses.
pub fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

/// Whether the callee has not answered at all: the status was made by a client of ours (here or in a service that relays
/// calls) for a peer that it could not reach, lost, or waited for until the timeout.
pub fn is_unanswered(status: &Status) -> bool {
    // A status that came over the wire has no source; one that the client has made of a broken connection has.
    std::error::Error::source(status).is_some()
        || reason(status).is_some_and(|reason| reason == PEER_UNAVAILABLE || reason == PEER_SILENT)
}

/// Whether the call may not have reached the callee or its answer was lost: the outcome is unknown
/// (architecture §4, "Calls that were cut").
///
/// UNKNOWN from a callee does not count: container runtimes return most errors with this code.
pub fn is_cut(status: &Status) -> bool {
    matches!(status.code(), Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled)
        || is_unanswered(status)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_survives_the_status() {
        let status = error(Code::NotFound, "POD_UNKNOWN", "no pod default/web");
        assert_eq!(reason(&status).as_deref(), Some("POD_UNKNOWN"));
    }

    /// A status as it is received over the wire.
    fn received(status: Status) -> Status {
        Status::from_header_map(status.into_http::<()>().headers()).unwrap()
    }

    #[test]
    fn an_error_answered_by_the_callee_is_not_a_cut() {
        for code in [Code::Unknown, Code::Internal, Code::FailedPrecondition, Code::NotFound] {
            let status = received(Status::new(code, "failed to mount"));
            assert!(!is_cut(&status) && !is_unanswered(&status), "{code:?}");
        }
        let hint = received(error(Code::FailedPrecondition, "WRITE", "cannot write"));
        assert!(!is_cut(&hint));
    }

    #[test]
    fn a_lost_connection_is_a_cut_with_any_code_and_also_when_relayed() {
        let broken = Status::from_error(Box::new(std::io::Error::other("connection reset")));
        assert_eq!(broken.code(), Code::Unknown);
        assert!(is_cut(&broken) && is_unanswered(&broken));
        for reason in [PEER_UNAVAILABLE, PEER_SILENT] {
            let passed_on =
                received(error(Code::Unavailable, reason, "the container runtime is not reachable"));
            assert!(is_cut(&passed_on) && is_unanswered(&passed_on), "{reason}");
        }
    }

    #[tokio::test]
    async fn client_errors_for_absent_or_silent_peers_count_as_unanswered() {
        use keelson_proto::keelson::pod_sync::v1 as sync;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("peer.sock");
        let mut client = sync::pod_sync_client::PodSyncClient::new(crate::connect_unix("the peer", &path));
        for listens in [false, true] {
            let _listener = listens.then(|| tokio::net::UnixListener::bind(&path).unwrap());
            let status = client.retry_pod(sync::RetryPodRequest::default()).await.unwrap_err();
            assert!(is_unanswered(&status) && is_cut(&status), "{status:?}");
        }
    }

    #[test]
    fn an_answer_with_unknown_outcome_is_a_cut_although_answered() {
        for code in [Code::Unavailable, Code::DeadlineExceeded, Code::Cancelled] {
            let status = received(Status::new(code, "context deadline exceeded"));
            assert!(is_cut(&status) && !is_unanswered(&status), "{code:?}");
        }
    }
}
