//! Compression of metrics on request (node-and-api.md §8.2).

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

/// Compresses the responses of the methods that `router` has so far, if the client prefers it. The responses must be complete in
/// memory.
pub(crate) fn on_request(router: MethodRouter<App>) -> MethodRouter<App> {
    router.route_layer(from_fn(compress_response))
}

async fn compress_response(request: Request, next: Next) -> Response {
    let is_requested = is_requested(request.headers());
    let response = next.run(request).await;
    if !is_requested || response.status() != StatusCode::OK {
        return response;
    }
    let (mut parts, body) = response.into_parts();
    // The text is dropped before the first byte is sent: a slow client holds only a tenth of it.
    let compressed = match to_bytes(body, usize::MAX).await {
        Ok(text) => compress(&text),
        Err(error) => Err(io::Error::other(error)),
    };
    match compressed {
        Ok(compressed) => {
            parts.headers.remove(header::CONTENT_LENGTH);
            parts.headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
            Response::from_parts(parts, Body::from(compressed))
        }
        Err(error) => {
            tracing::warn!(%error, "cannot compress metrics");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

/// Lines of metrics are so similar that the fastest level compresses them to about a tenth.
fn compress(text: &[u8]) -> io::Result<Vec<u8>> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(text)?;
    encoder.finish()
}

/// Whether `Accept-Encoding` prefers gzip. With equal weights, and for `*`, the text is not compressed.
fn is_requested(headers: &HeaderMap) -> bool {
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
    fn gzip_is_used_when_accept_encoding_prefers_it() {
        for (values, expected) in [
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
            assert_eq!(is_requested(&headers), expected, "{values:?}");
        }
    }
}
