//! gRPC errors with a machine-readable reason: `ErrorInfo { reason, domain: "keelson" }`.

use std::collections::HashMap;

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

/// The domain of every `ErrorInfo` of ours.
pub const DOMAIN: &str = "keelson";

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

/// Whether the call may not have reached the callee or its answer was lost: the outcome is unknown.
pub fn is_cut(status: &Status) -> bool {
    matches!(status.code(), Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled | Code::Unknown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_survives_the_status() {
        let status = error(Code::NotFound, "POD_UNKNOWN", "no pod default/web");
        assert_eq!(reason(&status).as_deref(), Some("POD_UNKNOWN"));
    }
}
