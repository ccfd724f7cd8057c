//! Error responses of the kubelet API.

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use tonic::{Code, Status};

/// An error as the client gets it: a status code and a text body.
#[derive(Debug)]
pub(crate) struct ApiError {
    status: StatusCode,
    text: String,
}

impl ApiError {
    pub(crate) fn new(status: StatusCode, text: impl Into<String>) -> Self {
        Self { status, text: text.into() }
    }

    /// Maps an error of another service. The text names `service`, unless a connection error already does.
    pub(crate) fn from_peer(service: &str, error: &Status) -> Self {
        let text = error.message();
        match error.code() {
            Code::Unavailable | Code::DeadlineExceeded | Code::ResourceExhausted | Code::Cancelled => {
                let is_named = text.contains(service);
                let text = if is_named { text.to_owned() } else { format!("{service}: {text}") };
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

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        (self.status, self.text).into_response()
    }
}
