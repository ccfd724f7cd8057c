//! `/containerLogs`: the log of a container.

use axum::body::Body;
use axum::extract::{Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::{TryStreamExt as _, stream};
use jiff::Timestamp;
use keelson_config::ServiceName;
use keelson_proto::keelson::runtime::v1::ReadLogsRequest;
use keelson_proto::keelson::runtime::v1::runtime_client::RuntimeClient;
use keelson_service_kit::now_unix_nanos;

use crate::App;
use crate::api_error::ApiError;
use crate::log_target::{Instance, LogTargetError, choose_instance};
use crate::pods::find;

/// The options of a log request, as a v1 PodLogOptions in the query.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LogOptions {
    /// Keep streaming until the container ends.
    pub follow: bool,
    /// The log of the last terminated instance.
    pub previous: bool,
    /// Put a timestamp before each line.
    pub timestamps: bool,
    /// At most this many lines, from the end.
    pub tail_lines: Option<i64>,
    /// At most this many bytes.
    pub limit_bytes: Option<i64>,
    /// Only lines of the last seconds.
    pub since_seconds: Option<i64>,
    /// Only lines written after this time.
    pub since_time: Option<Timestamp>,
}

/// Why a query is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum QueryError {
    /// A value has the wrong type.
    #[error(r#"{{"message": "Unable to decode query."}}"#)]
    Undecodable,
    /// A value is out of range, or two options exclude each other.
    #[error(r#"{{"message": "Invalid request."}}"#)]
    Invalid,
}

impl LogOptions {
    /// Parses a query. The first value of a repeated key counts, unknown keys are ignored, and the older `tail`
    /// (a number or `all`) takes precedence over `tailLines`.
    ///
    /// # Errors
    /// See [`QueryError`]. `stream` needs a disabled feature gate and is refused.
    pub fn parse(pairs: &[(String, String)]) -> Result<Self, QueryError> {
        let first = |key: &str| pairs.iter().find(|(k, _)| k == key).map(|(_, value)| value.as_str());
        let flag = |key| first(key).is_some_and(|v| v != "0" && !v.eq_ignore_ascii_case("false"));
        let number = |value: Option<&str>| {
            value.map(|v| v.parse::<i64>().map_err(|_| QueryError::Undecodable)).transpose()
        };
        let tail_lines = match first("tail").filter(|tail| !tail.is_empty()) {
            Some("all") => None,
            Some(lines) => Some(lines),
            None => first("tailLines"),
        };
        let since_time = first("sinceTime").filter(|text| !text.is_empty() && *text != "null");
        let options = Self {
            follow: flag("follow"),
            previous: flag("previous"),
            timestamps: flag("timestamps"),
            tail_lines: number(tail_lines)?,
            limit_bytes: number(first("limitBytes"))?,
            since_seconds: number(first("sinceSeconds"))?,
            since_time: since_time
                .map(|text| text.parse().map_err(|_| QueryError::Undecodable))
                .transpose()?,
        };
        let valid = options.tail_lines.is_none_or(|n| n >= 0)
            && options.limit_bytes.is_none_or(|n| n >= 1)
            && options.since_seconds.is_none_or(|n| n >= 1)
            && !(options.since_seconds.is_some() && options.since_time.is_some())
            && first("stream").is_none();
        if valid { Ok(options) } else { Err(QueryError::Invalid) }
    }

    /// The time of the oldest requested line, in nanoseconds since 1970; 0 without a bound.
    fn since_unix_nanos(&self, now: i64) -> i64 {
        let nanos = |time: Timestamp| i64::try_from(time.as_nanosecond()).unwrap_or(0);
        let ago = |seconds: i64| now.saturating_sub(seconds.saturating_mul(1_000_000_000)).max(0);
        self.since_time.map(nanos).or_else(|| self.since_seconds.map(ago)).unwrap_or(0)
    }
}

impl From<QueryError> for ApiError {
    fn from(error: QueryError) -> Self {
        let status = match error {
            QueryError::Undecodable => StatusCode::BAD_REQUEST,
            QueryError::Invalid => StatusCode::UNPROCESSABLE_ENTITY,
        };
        Self::new(status, error.to_string())
    }
}

impl From<LogTargetError> for ApiError {
    fn from(error: LogTargetError) -> Self {
        let status = match error {
            LogTargetError::NotInSpec { .. } => StatusCode::NOT_FOUND,
            LogTargetError::NotAPod { .. } => StatusCode::INTERNAL_SERVER_ERROR,
            LogTargetError::NoStatus { .. }
            | LogTargetError::NoPrevious { .. }
            | LogTargetError::Terminated { .. }
            | LogTargetError::Waiting { .. }
            | LogTargetError::NoState { .. } => StatusCode::BAD_REQUEST,
        };
        Self::new(status, error.to_string())
    }
}

/// `GET /containerLogs/{namespace}/{pod}/{container}`. The bytes of runtime-shim are forwarded as they arrive; when the client
/// disconnects, the stream from runtime-shim is cancelled.
pub(crate) async fn read(
    State(app): State<App>,
    Path((namespace, pod, container)): Path<(String, String, String)>,
    Query(query): Query<Vec<(String, String)>>,
) -> Result<Response, ApiError> {
    let options = LogOptions::parse(&query)?;
    let not_found = || ApiError::new(StatusCode::NOT_FOUND, format!("pod {pod:?} does not exist"));
    let document = find(&app, &namespace, &pod).await?.ok_or_else(not_found)?;
    let instance = choose_instance(&document.pod_json, &pod, &container, options.previous)?;
    let peer = app.peer(ServiceName::RuntimeShim);
    let request = ReadLogsRequest {
        pod_uid: document.uid,
        container,
        follow: options.follow,
        previous: instance == Instance::BeforeNewest,
        timestamps: options.timestamps,
        tail_lines: options.tail_lines,
        limit_bytes: options.limit_bytes,
        since_unix_nanos: options.since_unix_nanos(now_unix_nanos()),
    };
    let lines = RuntimeClient::new(peer.channel())
        .read_logs(request)
        .await
        .map_err(|status| ApiError::from_peer("runtime-shim", &status))?
        .into_inner();
    let bytes = stream::try_unfold(lines, async |mut lines| {
        let next = lines.message().await?;
        Ok::<_, tonic::Status>(next.map(|message| (Bytes::from(message.data), lines)))
    });
    let body = Body::from_stream(bytes.inspect_err(|status| {
        tracing::warn!(error = status.message(), "a log stream broke");
    }));
    Ok(([(header::CONTENT_TYPE, "text/plain")], body).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(query: &str) -> Result<LogOptions, QueryError> {
        let pair =
            |p: &str| p.split_once('=').map_or((p.to_owned(), String::new()), |(k, v)| (k.into(), v.into()));
        LogOptions::parse(&query.split('&').filter(|p| !p.is_empty()).map(pair).collect::<Vec<_>>())
    }

    #[test]
    fn log_options_are_parsed_as_by_the_kubelet() {
        let none = LogOptions::default();
        let all = LogOptions { follow: true, previous: true, timestamps: true, ..none.clone() };
        let tail = |n| LogOptions { tail_lines: Some(n), ..none.clone() };
        for (query, options) in [
            ("", none.clone()),
            ("follow=true&previous=1&timestamps", all),
            ("follow=false&previous=0&timestamps=False&other=x", none.clone()),
            ("tailLines=5", tail(5)),
            ("tailLines=0", tail(0)),
            ("tail=7&tailLines=5", tail(7)),
            ("tail=all&tailLines=5", none.clone()),
            ("tail=&tailLines=5", tail(5)),
            (
                "limitBytes=9&sinceSeconds=3",
                LogOptions { limit_bytes: Some(9), since_seconds: Some(3), ..none.clone() },
            ),
            ("sinceTime=", none.clone()),
            (
                "sinceTime=2026-01-01T00:00:00Z",
                LogOptions { since_time: Some("2026-01-01T00:00:00Z".parse().unwrap()), ..none.clone() },
            ),
        ] {
            assert_eq!(parse(query), Ok(options), "{query}");
        }
    }

    #[test]
    fn undecodable_and_invalid_log_options_are_different_errors() {
        for query in ["tailLines=x", "tail=x", "limitBytes=", "sinceSeconds=1.5", "sinceTime=yesterday"] {
            assert_eq!(parse(query), Err(QueryError::Undecodable), "{query}");
        }
        for query in [
            "tailLines=-1",
            "limitBytes=0",
            "sinceSeconds=0",
            "sinceSeconds=1&sinceTime=2026-01-01T00:00:00Z",
            "stream=Stdout",
        ] {
            assert_eq!(parse(query), Err(QueryError::Invalid), "{query}");
        }
        assert_eq!(QueryError::Undecodable.to_string(), r#"{"message": "Unable to decode query."}"#);
    }

    #[test]
    fn since_seconds_and_since_time_become_a_timestamp() {
        let now = 100_000_000_000;
        assert_eq!(parse("").unwrap().since_unix_nanos(now), 0);
        assert_eq!(parse("sinceSeconds=40").unwrap().since_unix_nanos(now), 60_000_000_000);
        assert_eq!(parse("sinceSeconds=9223372036854775807").unwrap().since_unix_nanos(now), 0);
        assert_eq!(parse("sinceTime=1970-01-01T00:00:01Z").unwrap().since_unix_nanos(now), 1_000_000_000);
    }
}
