//! `/containerLogs`: what a container has written.

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
use crate::failure::Failure;
use crate::log_target::{Instance, NoLog, choose};
use crate::pods::find;

/// The options of a log request, as a v1 PodLogOptions in the query.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LogOptions {
    /// Goes on until the container ends.
    pub follow: bool,
    /// The last instance that ended.
    pub previous: bool,
    /// A time before each line.
    pub timestamps: bool,
    /// Only so many lines, from the end.
    pub tail_lines: Option<i64>,
    /// Only so many bytes.
    pub limit_bytes: Option<i64>,
    /// Only what is that young.
    pub since_seconds: Option<i64>,
    /// Only what was written after.
    pub since_time: Option<Timestamp>,
}

/// A query that asks for nothing we could give.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum QueryError {
    /// A value is of the wrong kind.
    #[error(r#"{{"message": "Unable to decode query."}}"#)]
    Undecodable,
    /// The values make no sense.
    #[error(r#"{{"message": "Invalid request."}}"#)]
    Invalid,
}

impl LogOptions {
    /// Reads a query; of a repeated key the first value counts, unknown keys are ignored, and the older `tail`
    /// (a number or `all`) goes before `tailLines`.
    ///
    /// # Errors
    /// See [`QueryError`]. `stream` needs a feature that is off, and is refused.
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

    /// The oldest line that is wanted, as nanoseconds since 1970; 0 without a bound.
    fn since_unix_nanos(&self, now: i64) -> i64 {
        let nanos = |time: Timestamp| i64::try_from(time.as_nanosecond()).unwrap_or(0);
        let ago = |seconds: i64| now.saturating_sub(seconds.saturating_mul(1_000_000_000)).max(0);
        self.since_time.map(nanos).or_else(|| self.since_seconds.map(ago)).unwrap_or(0)
    }
}

impl From<QueryError> for Failure {
    fn from(error: QueryError) -> Self {
        let status = match error {
            QueryError::Undecodable => StatusCode::BAD_REQUEST,
            QueryError::Invalid => StatusCode::UNPROCESSABLE_ENTITY,
        };
        Self::new(status, error.to_string())
    }
}

impl From<NoLog> for Failure {
    fn from(error: NoLog) -> Self {
        let status = match error {
            NoLog::NotInSpec { .. } => StatusCode::NOT_FOUND,
            NoLog::NotAPod { .. } => StatusCode::INTERNAL_SERVER_ERROR,
            NoLog::NoStatus { .. }
            | NoLog::NoPrevious { .. }
            | NoLog::Terminated { .. }
            | NoLog::Waiting { .. }
            | NoLog::NoState { .. } => StatusCode::BAD_REQUEST,
        };
        Self::new(status, error.to_string())
    }
}

/// `GET /containerLogs/{namespace}/{pod}/{container}`. The bytes pass through as runtime-shim sends them; a
/// client that goes away ends the stream there.
pub(crate) async fn read(
    State(app): State<App>,
    Path((namespace, pod, container)): Path<(String, String, String)>,
    Query(query): Query<Vec<(String, String)>>,
) -> Result<Response, Failure> {
    let options = LogOptions::parse(&query)?;
    let missing = || Failure::new(StatusCode::NOT_FOUND, format!("pod {pod:?} does not exist"));
    let document = find(&app, &namespace, &pod).await?.ok_or_else(missing)?;
    let instance = choose(&document.pod_json, &pod, &container, options.previous)?;
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
        .map_err(|status| Failure::of_peer("runtime-shim", &status))?
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
    fn options_are_read_as_the_kubelet_reads_them() {
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
    fn what_cannot_be_decoded_and_what_makes_no_sense_differ() {
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
    fn since_is_a_moment_whatever_it_was_given_as() {
        let now = 100_000_000_000;
        assert_eq!(parse("").unwrap().since_unix_nanos(now), 0);
        assert_eq!(parse("sinceSeconds=40").unwrap().since_unix_nanos(now), 60_000_000_000);
        assert_eq!(parse("sinceSeconds=9223372036854775807").unwrap().since_unix_nanos(now), 0);
        assert_eq!(parse("sinceTime=1970-01-01T00:00:01Z").unwrap().since_unix_nanos(now), 1_000_000_000);
    }
}
