//! `/logs/`: files below `/var/log` of the node, and the logs of its services (node-and-api.md §8.8).
//!
//! runtime-shim reads them: this service may not. It answers authenticated users only, since over plain HTTP every local process
//! could read files that only root may read.

mod page;
mod query;

use std::io::Write as _;

use axum::Router;
use axum::body::Body;
use axum::extract::{Query, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use futures_util::stream::{self, BoxStream};
use futures_util::{StreamExt as _, TryStreamExt as _};
use jiff::Timestamp;
use keelson_config::{ApiHandlers, ServiceName};
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_proto::keelson::runtime::v1::runtime_client::RuntimeClient;
use pb::read_node_logs_request::What;
use pb::read_node_logs_response::Item;
use tonic::{Code, Status, Streaming};

use crate::App;
use crate::api_error::ApiError;
use crate::streams::{MaybeUser, authenticated};
use page::{LISTING_BEGIN, LISTING_END, Requested, decode_path, listing, media_type, parse_range};
use query::{NodeLogQuery, Selected, file_error};

type QueryPairs = Query<Vec<(String, String)>>;
type Pieces = BoxStream<'static, Result<Bytes, Status>>;

/// The paths, unless they are disabled.
pub(crate) fn router(handlers: ApiHandlers) -> Router<App> {
    if !handlers.system_log {
        return Router::new();
    }
    let answer = move |State(app): State<App>,
                       user: MaybeUser,
                       Query(pairs): QueryPairs,
                       request: Request| async move {
        authenticated(user, &request)?;
        let pairs = if handlers.system_log_query { pairs } else { Vec::new() };
        let (head, _) = request.into_parts();
        respond(&app, &pairs, head.uri.path(), &head.headers).await
    };
    Router::new().route("/logs", get(answer)).route("/logs/", get(answer)).route("/logs/{*path}", get(answer))
}

async fn respond(
    app: &App,
    pairs: &[(String, String)],
    path: &str,
    headers: &HeaderMap,
) -> Result<Response, Response> {
    let Some(raw) = path.strip_prefix("/logs/") else { return Ok(redirect("logs/")) };
    let bad_request = |text: String| ApiError::new(StatusCode::BAD_REQUEST, text + "\n").into_response();
    let not_acceptable =
        |text: String| ApiError::new(StatusCode::NOT_ACCEPTABLE, text + "\n").into_response();
    let Some(query) = NodeLogQuery::parse(pairs).map_err(bad_request)? else {
        let path = decode_path(raw).ok_or_else(|| bad_request("invalid URL path".to_owned()))?;
        return serve_path(app, path, Some(raw), headers).await.map_err(|error| error.into_plain());
    };
    if !raw.is_empty() {
        return Err(not_acceptable("path not allowed in query mode".to_owned()));
    }
    match query.validated().map_err(not_acceptable)? {
        Selected::Services(query) => serve_query(app, query, headers).await,
        Selected::File(file) => {
            let path = file.trim_start_matches('/').as_bytes().to_vec();
            let served = serve_path(app, path, None, headers).await;
            served.map_err(|error| match error {
                PathError::NotFound => not_acceptable(file_error(&file, "no such file or directory")),
                PathError::Refused => not_acceptable(file_error(&file, "it is not served")),
                other => other.into_plain(),
            })
        }
    }
}

fn redirect(location: &str) -> Response {
    (StatusCode::MOVED_PERMANENTLY, [(header::LOCATION, location)]).into_response()
}

/// Why a path has no content.
enum PathError {
    NotFound,
    Refused,
    /// The range is invalid or outside of the file.
    Range,
    Failed(ApiError),
}

impl PathError {
    /// The error with the texts of a Go file server.
    fn into_plain(self) -> Response {
        let plain = |status: StatusCode, text: &'static str| (status, text).into_response();
        match self {
            Self::NotFound => plain(StatusCode::NOT_FOUND, "404 page not found\n"),
            Self::Refused => plain(StatusCode::FORBIDDEN, "403 Forbidden\n"),
            Self::Range => plain(StatusCode::RANGE_NOT_SATISFIABLE, "invalid range: failed to overlap\n"),
            Self::Failed(error) => error.into_response(),
        }
    }

    fn from_status(status: &Status) -> Self {
        match status.code() {
            Code::NotFound => Self::NotFound,
            Code::PermissionDenied => Self::Refused,
            Code::OutOfRange => Self::Range,
            _ => Self::Failed(ApiError::from_peer("runtime-shim", status)),
        }
    }
}

/// Asks runtime-shim: the first message, and those after it.
async fn open(
    app: &App,
    what: What,
    range: Option<pb::ByteRange>,
) -> Result<(Option<Item>, Streaming<pb::ReadNodeLogsResponse>), Status> {
    let request = pb::ReadNodeLogsRequest { what: Some(what), range };
    let peer = app.peer(ServiceName::RuntimeShim);
    let mut messages = RuntimeClient::new(peer.channel()).read_node_logs(request).await?.into_inner();
    let first = messages.message().await?.and_then(|message| message.item);
    Ok((first, messages))
}

/// Serves a file, or the listing of a folder. `raw` is the path in the URL, which ends with a slash for a folder.
async fn serve_path(
    app: &App,
    path: Vec<u8>,
    raw: Option<&str>,
    headers: &HeaderMap,
) -> Result<Response, PathError> {
    // With `If-Range` the client wants a part only of the file that it knows; this service answers with all of it.
    let wants_part = !headers.contains_key(header::IF_RANGE);
    let requested = headers.get(header::RANGE).filter(|_| wants_part);
    let range = match parse_range(requested.map(|value| value.to_str().unwrap_or_default())) {
        Requested::Whole => None,
        Requested::Part(range) => Some(range),
        Requested::Invalid => return Err(PathError::Range),
    };
    let (first, messages) =
        open(app, What::Path(path), range).await.map_err(|status| PathError::from_status(&status))?;
    match first {
        Some(Item::Folder(folder)) => match raw.filter(|raw| !raw.is_empty() && !raw.ends_with('/')) {
            Some(raw) => {
                let name = raw.rsplit('/').next().unwrap_or_default();
                Ok(redirect(&format!("./{name}/")))
            }
            None => Ok(serve_folder(folder, messages)),
        },
        Some(Item::File(_)) if raw.is_some_and(|raw| raw.ends_with('/')) => Err(PathError::NotFound),
        Some(Item::File(file)) => serve_file(&file, range.is_some(), headers, messages).await,
        Some(Item::Data(_)) | None => {
            let text = "runtime-shim: the answer does not begin with a file or folder";
            Err(PathError::Failed(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, text)))
        }
    }
}

fn serve_folder(first: pb::NodeLogFolder, messages: Streaming<pb::ReadNodeLogsResponse>) -> Response {
    let pages = messages.map_ok(|message| match message.item {
        Some(Item::Folder(folder)) => Bytes::from(listing(&folder.entries)),
        _ => Bytes::new(),
    });
    let begin = Bytes::from(LISTING_BEGIN.to_owned() + &listing(&first.entries));
    let end = stream::iter([Ok(Bytes::from_static(LISTING_END.as_bytes()))]);
    let body = Body::from_stream(logged(stream::iter([Ok(begin)]).chain(pages).chain(end).boxed()));
    ([(header::CONTENT_TYPE, "text/html; charset=utf-8"), NOSNIFF], body).into_response()
}

const NOSNIFF: (header::HeaderName, &str) = (header::X_CONTENT_TYPE_OPTIONS, "nosniff");

async fn serve_file(
    file: &pb::NodeLogFile,
    is_part: bool,
    headers: &HeaderMap,
    mut messages: Streaming<pb::ReadNodeLogsResponse>,
) -> Result<Response, PathError> {
    let modified = http_date(file.modified_unix_seconds);
    let is_known = |value: &HeaderValue| modified.as_deref().is_some_and(|modified| value == modified);
    if headers.get(header::IF_MODIFIED_SINCE).is_some_and(is_known) {
        return Ok(StatusCode::NOT_MODIFIED.into_response());
    }
    let begin = messages.message().await.map_err(|status| PathError::from_status(&status))?;
    let begin = begin.map(data_of).unwrap_or_default();
    let media_type = media_type(&begin);
    let rest = messages.map_ok(data_of);
    let body = Body::from_stream(logged(stream::iter([Ok(begin)]).chain(rest).boxed()));
    let mut response =
        ([(header::CONTENT_TYPE, media_type), NOSNIFF, (header::ACCEPT_RANGES, "bytes")], body)
            .into_response();
    let fields = response.headers_mut();
    fields.insert(header::CONTENT_LENGTH, file.length.into());
    if let Some(modified) = modified.and_then(|text| HeaderValue::from_str(&text).ok()) {
        fields.insert(header::LAST_MODIFIED, modified);
    }
    // A Go file server ignores the range of an empty file.
    if is_part && file.size_bytes > 0 {
        let end = (file.offset + file.length).saturating_sub(1);
        let range = format!("bytes {}-{end}/{}", file.offset, file.size_bytes);
        if let Ok(range) = HeaderValue::from_str(&range) {
            fields.insert(header::CONTENT_RANGE, range);
        }
        *response.status_mut() = StatusCode::PARTIAL_CONTENT;
    }
    Ok(response)
}

/// A time as HTTP has it (RFC 9110 §5.6.7).
fn http_date(unix_seconds: i64) -> Option<String> {
    let time = Timestamp::from_second(unix_seconds).ok()?;
    Some(time.strftime("%a, %d %b %Y %H:%M:%S GMT").to_string())
}

fn data_of(message: pb::ReadNodeLogsResponse) -> Bytes {
    match message.item {
        Some(Item::Data(data)) => data.into(),
        Some(Item::File(_) | Item::Folder(_)) | None => Bytes::new(),
    }
}

fn logged(pieces: Pieces) -> Pieces {
    let log =
        |status: &Status| tracing::warn!(error = status.message(), "a stream of a log of the node broke");
    pieces.inspect_err(log).boxed()
}

/// Serves the logs of services as text. Compressed if the client accepts exactly gzip.
async fn serve_query(app: &App, query: pb::NodeLogQuery, headers: &HeaderMap) -> Result<Response, Response> {
    let (first, messages) = open(app, What::Query(query), None)
        .await
        .map_err(|status| ApiError::from_peer("runtime-shim", &status).into_response())?;
    let first = first.map(|item| data_of(pb::ReadNodeLogsResponse { item: Some(item) }));
    let pieces = logged(stream::iter(first.map(Ok)).chain(messages.map_ok(data_of)).boxed());
    let text = [(header::CONTENT_TYPE, "text/plain;charset=UTF-8"), NOSNIFF];
    if headers.get(header::ACCEPT_ENCODING).is_some_and(|value| value == "gzip") {
        let body = Body::from_stream(compressed(pieces));
        return Ok((text, [(header::CONTENT_ENCODING, "gzip")], body).into_response());
    }
    Ok((text, Body::from_stream(pieces)).into_response())
}

/// Compresses the pieces of a stream as they arrive.
fn compressed(pieces: Pieces) -> Pieces {
    let encoder = GzEncoder::new(Vec::new(), Compression::fast());
    let next = async |(mut pieces, encoder): (Pieces, Option<GzEncoder<Vec<u8>>>)| {
        let Some(mut encoder) = encoder else { return Ok(None) };
        // Writing to memory does not fail.
        let internal = |error: std::io::Error| Status::internal(error.to_string());
        match pieces.try_next().await? {
            Some(piece) => {
                encoder.write_all(&piece).map_err(internal)?;
                let ready = std::mem::take(encoder.get_mut());
                Ok(Some((Bytes::from(ready), (pieces, Some(encoder)))))
            }
            None => {
                let end = encoder.finish().map_err(internal)?;
                Ok(Some((Bytes::from(end), (pieces, None))))
            }
        }
    };
    stream::try_unfold((pieces, Some(encoder)), next).boxed()
}
