//! What a client is told when a neighbour does not deliver.

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use tonic::{Code, Status};

/// An answer that is not the one that was asked for.
#[derive(Debug)]
pub(crate) struct Failure {
    status: StatusCode,
    text: String,
}

impl Failure {
    pub(crate) fn new(status: StatusCode, text: impl Into<String>) -> Self {
        Self { status, text: text.into() }
    }

    /// A neighbour's error. Its own words name it when it is away; `service` is put before everything else.
    pub(crate) fn of_peer(service: &str, error: &Status) -> Self {
        let text = error.message();
        match error.code() {
            Code::Unavailable | Code::DeadlineExceeded | Code::ResourceExhausted | Code::Cancelled => {
                let named = text.contains(service);
                let text = if named { text.to_owned() } else { format!("{service}: {text}") };
                Self::new(StatusCode::SERVICE_UNAVAILABLE, text)
            }
            Code::NotFound | Code::InvalidArgument | Code::FailedPrecondition | Code::OutOfRange => {
                Self::new(StatusCode::BAD_REQUEST, text)
            }
            Code::Unimplemented => Self::new(StatusCode::NOT_IMPLEMENTED, format!("{service}: {text}")),
            Code::Ok
            | Code::Unknown
            | Code::AlreadyExists
            | Code::PermissionDenied
            | Code::Aborted
            | Code::Internal
            | Code::DataLoss
            | Code::Unauthenticated => {
                Self::new(StatusCode::INTERNAL_SERVER_ERROR, format!("{service}: {text}"))
            }
        }
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        (self.status, self.text).into_response()
    }
}
