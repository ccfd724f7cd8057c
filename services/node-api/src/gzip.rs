//! Compression of metrics for who asks for it (node-and-api.md §8.2).

use std::io::{self, Write as _};

use axum::body::{Body, to_bytes};
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::MethodRouter;
use flate2::Compression;
use flate2::write::GzEncoder;

use crate::App;
use crate::zpages::thousandths;

/// The methods that `router` has so far, with answers that are compressed on request. The answers must be whole in
/// memory.
pub(crate) fn on_request(router: MethodRouter<App>) -> MethodRouter<App> {
    router.route_layer(from_fn(answer))
}

async fn answer(request: Request, next: Next) -> Response {
    let wanted = is_wanted(request.headers());
    let response = next.run(request).await;
    if !wanted || response.status() != StatusCode::OK {
        return response;
    }
    let (mut parts, body) = response.into_parts();
    // The text is dropped before the first byte goes out: what a slow client holds is a tenth of it.
    let packed = match to_bytes(body, usize::MAX).await {
        Ok(text) => pack(&text),
        Err(error) => Err(io::Error::other(error)),
    };
    match packed {
        Ok(packed) => {
            parts.headers.remove(header::CONTENT_LENGTH);
            parts.headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
            Response::from_parts(parts, Body::from(packed))
        }
        Err(error) => {
            tracing::warn!(%error, "cannot compress metrics");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

/// Lines of metrics are so much alike that the fastest level leaves about a tenth of them.
fn pack(text: &[u8]) -> io::Result<Vec<u8>> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(text)?;
    encoder.finish()
}

/// Whether `Accept-Encoding` prefers gzip. Between equals the plain text wins, as for `*`.
fn is_wanted(headers: &HeaderMap) -> bool {
    let (mut gzip, mut plain) = (0, 0);
    for value in headers.get_all(header::ACCEPT_ENCODING).iter().filter_map(|value| value.to_str().ok()) {
        for coding in value.split(',') {
            let (name, parameters) = coding.split_once(';').unwrap_or((coding, ""));
            let weight = parameters.trim().strip_prefix("q=").map_or(1000, thousandths);
            match name.trim().to_ascii_lowercase().as_str() {
                "gzip" => gzip = weight,
                "identity" | "*" => plain = plain.max(weight),
                _ => {}
            }
        }
    }
    gzip > plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gzip_is_for_who_prefers_it() {
        for (values, wanted) in [
            (vec![], false),
            (vec![""], false),
            (vec!["gzip"], true),
            (vec!["GZIP"], true),
            (vec!["deflate, gzip;q=1.0, *;q=0.5"], true),
            (vec!["deflate", "br, gzip"], true),
            (vec!["gzip;q=0.2, identity;q=0.1"], true),
            (vec!["gzip;q=0.1, identity;q=0.2"], false),
            (vec!["gzip, identity"], false),
            (vec!["gzip;q=0"], false),
            (vec!["gzip; q=0.000"], false),
            (vec!["*"], false),
            (vec!["br, zstd, deflate"], false),
            (vec!["gzipped"], false),
        ] {
            let mut headers = HeaderMap::new();
            for value in &values {
                headers.append(header::ACCEPT_ENCODING, value.parse().unwrap());
            }
            assert_eq!(is_wanted(&headers), wanted, "{values:?}");
        }
    }
}
