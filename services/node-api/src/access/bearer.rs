//! The bearer tokens of a request (node-and-api.md §7): in `Authorization`, or among the subprotocols of a WebSocket, since
//! browsers cannot set that header for one.

use axum::http::{HeaderMap, HeaderValue, header};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

/// The prefix of a subprotocol that contains a token.
const SUBPROTOCOL_PREFIX: &str = "base64url.bearer.authorization.k8s.io.";

/// The tokens in the order in which they are tried; an error for each malformed one.
pub(crate) fn tokens(headers: &HeaderMap) -> Vec<Result<String, &'static str>> {
    token_of_header(headers).into_iter().chain(token_of_subprotocol(headers)).collect()
}

/// Removes the tokens: they are credentials for this node alone.
pub(crate) fn strip(headers: &mut HeaderMap) {
    headers.remove(header::AUTHORIZATION);
    let names = subprotocols(headers);
    if !names.iter().any(|name| name.starts_with(SUBPROTOCOL_PREFIX)) {
        return;
    }
    let others: Vec<&str> =
        names.iter().map(String::as_str).filter(|name| !name.starts_with(SUBPROTOCOL_PREFIX)).collect();
    let others = HeaderValue::from_str(&others.join(", ")).ok().filter(|others| !others.is_empty());
    headers.remove(header::SEC_WEBSOCKET_PROTOCOL);
    headers.extend(others.map(|others| (header::SEC_WEBSOCKET_PROTOCOL, others)));
}

fn token_of_header(headers: &HeaderMap) -> Option<Result<String, &'static str>> {
    let Ok(text) = headers.get(header::AUTHORIZATION)?.to_str() else {
        return Some(Err("the Authorization header is not text"));
    };
    let (scheme, rest) = text.trim().split_once(' ')?;
    let token = rest.split(' ').next().filter(|token| !token.is_empty())?;
    scheme.eq_ignore_ascii_case("bearer").then(|| Ok(token.to_owned()))
}

fn token_of_subprotocol(headers: &HeaderMap) -> Option<Result<String, &'static str>> {
    let has = |name, word: &str| {
        let values = headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
        values.flat_map(|value| value.split(',')).any(|value| value.trim().eq_ignore_ascii_case(word))
    };
    if !has(header::UPGRADE, "websocket") || !has(header::CONNECTION, "upgrade") {
        return None;
    }
    let names = subprotocols(headers);
    let mut tokens = names.iter().filter_map(|name| name.strip_prefix(SUBPROTOCOL_PREFIX));
    let token = tokens.next().filter(|token| !token.is_empty())?;
    if tokens.next().is_some() {
        return Some(Err("more than one subprotocol contains a token"));
    }
    if names.len() == 1 {
        return Some(Err("the subprotocol with the token is the only one; there has to be another one"));
    }
    let decoded = URL_SAFE_NO_PAD.decode(token).ok().and_then(|bytes| String::from_utf8(bytes).ok());
    Some(decoded.ok_or("the token in the subprotocol is not base64url-encoded text"))
}

fn subprotocols(headers: &HeaderMap) -> Vec<String> {
    let values =
        headers.get_all(header::SEC_WEBSOCKET_PROTOCOL).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(|name| name.trim().to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
    }

    /// `base64url.bearer.authorization.k8s.io.` and the encoded token `a.b?`.
    const TOKEN_PROTOCOL: &str = "base64url.bearer.authorization.k8s.io.YS5iPw";

    #[test]
    fn bearer_token_is_read_from_the_authorization_header() {
        for (value, expected) in [
            ("Bearer abc", Some("abc")),
            ("bearer abc", Some("abc")),
            ("  BEARER abc def", Some("abc")),
            ("Bearer", None),
            ("Bearer ", None),
            ("Bearer  abc", None),
            ("Basic abc", None),
            ("abc", None),
        ] {
            let found = tokens(&headers(&[("authorization", value)]));
            assert_eq!(
                found,
                expected.map(|token| Ok(token.to_owned())).into_iter().collect::<Vec<_>>(),
                "{value}"
            );
        }
        assert!(tokens(&HeaderMap::new()).is_empty());
        let mut not_text = HeaderMap::new();
        not_text.insert("authorization", HeaderValue::from_bytes(b"Bearer \xff").unwrap());
        assert!(tokens(&not_text)[0].is_err());
    }

    #[test]
    fn bearer_token_of_a_websocket_is_a_subprotocol_besides_another() {
        let tokens_of = |protocols: &str| {
            tokens(&headers(&[
                ("connection", "keep-alive, Upgrade"),
                ("upgrade", "WebSocket"),
                ("sec-websocket-protocol", protocols),
            ]))
        };
        let found = tokens_of(&format!("v5.channel.k8s.io, {TOKEN_PROTOCOL}"));
        assert_eq!(found, [Ok("a.b?".to_owned())]);
        assert!(tokens_of("v5.channel.k8s.io").is_empty());
        assert!(tokens_of("base64url.bearer.authorization.k8s.io., v4").is_empty(), "an empty token is none");
        for wrong in [
            TOKEN_PROTOCOL.to_owned(),
            format!("{TOKEN_PROTOCOL},{TOKEN_PROTOCOL},v4"),
            "base64url.bearer.authorization.k8s.io.?,v4".to_owned(),
            "base64url.bearer.authorization.k8s.io._w,v4".to_owned(),
        ] {
            assert!(matches!(tokens_of(&wrong)[..], [Err(_)]), "{wrong}");
        }
        let no_websocket = headers(&[("sec-websocket-protocol", &format!("v4, {TOKEN_PROTOCOL}"))]);
        assert!(tokens(&no_websocket).is_empty());
    }

    #[test]
    fn credentials_are_stripped_from_forwarded_requests() {
        let protocols = format!("v5.channel.k8s.io,{TOKEN_PROTOCOL}, v4.channel.k8s.io");
        let mut request =
            headers(&[("authorization", "Bearer x"), ("sec-websocket-protocol", &protocols), ("host", "n")]);
        strip(&mut request);
        assert_eq!(
            request,
            headers(&[("sec-websocket-protocol", "v5.channel.k8s.io, v4.channel.k8s.io"), ("host", "n")])
        );
        let mut without = headers(&[("sec-websocket-protocol", "a,b")]);
        strip(&mut without);
        assert_eq!(without["sec-websocket-protocol"], "a,b", "it is unchanged");
    }
}
