//! Calls that break off instead of being answered.

use axum::body::Body;
use axum::middleware::map_response;
use axum::response::Response;
use tonic::metadata::MetadataValue;
use tonic::service::Routes;
use tonic::{Code, Status};

/// The header that marks a response to break off. It never reaches the caller.
const MARK: &str = "keelson-fake-cut-off";

/// An answer that breaks a call off, as a process that dies does: its stream breaks, and the caller gets no status. Works with
/// [`FakeServer`](super::FakeServer) alone. A client of our own services repeats such a call if its method is repeatable,
/// so only a standing answer reaches the caller.
pub fn cut_off() -> Status {
    let mut status =
        Status::new(Code::Internal, "the fake is not served by FakeServer, which breaks calls off");
    status.metadata_mut().insert(MARK, MetadataValue::from_static("1"));
    status
}

/// Breaks off the calls that were answered with [`cut_off`].
pub(super) fn break_marked(routes: Routes) -> Routes {
    routes.into_axum_router().layer(map_response(break_if_marked)).into()
}

async fn break_if_marked(response: Response) -> Response {
    if !response.headers().contains_key(MARK) {
        return response;
    }
    let broken = tokio_stream::once(Err::<Vec<u8>, _>(std::io::Error::other("the fake has died")));
    let mut head = Response::new(Body::from_stream(broken));
    let content_type = axum::http::HeaderValue::from_static("application/grpc");
    head.headers_mut().insert(axum::http::header::CONTENT_TYPE, content_type);
    head
}
