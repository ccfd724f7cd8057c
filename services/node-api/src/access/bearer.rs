//! The bearer tokens of a request (node-and-api.md §7): in `Authorization`, and of a browser's WebSocket, which cannot set
//! that, among the subprotocols.

use axum::http::{HeaderMap, HeaderValue, header};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

/// What a subprotocol begins with that is a token.
const SUBPROTOCOL: &str = "base64url.bearer.authorization.k8s.io.";

/// The tokens in the order in which they are tried; an error for what was meant as one and is none.
pub(crate) fn tokens(headers: &HeaderMap) -> Vec<Result<String, &'static str>> {
    of_authorization(headers).into_iter().chain(of_websocket(headers)).collect()
}

/// Takes out what was shown: it is for this node alone.
pub(crate) fn strip(headers: &mut HeaderMap) {
    headers.remove(header::AUTHORIZATION);
    let names = subprotocols(headers);
    if !names.iter().any(|name| name.starts_with(SUBPROTOCOL)) {
        return;
    }
    let others: Vec<&str> =
        names.iter().map(String::as_str).filter(|name| !name.starts_with(SUBPROTOCOL)).collect();
    let others = HeaderValue::from_str(&others.join(", ")).ok().filter(|others| !others.is_empty());
    headers.remove(header::SEC_WEBSOCKET_PROTOCOL);
    headers.extend(others.map(|others| (header::SEC_WEBSOCKET_PROTOCOL, others)));
}

fn of_authorization(headers: &HeaderMap) -> Option<Result<String, &'static str>> {
    let Ok(text) = headers.get(header::AUTHORIZATION)?.to_str() else {
        return Some(Err("the header Authorization is no text"));
    };
    let (scheme, rest) = text.trim().split_once(' ')?;
    let token = rest.split(' ').next().filter(|token| !token.is_empty())?;
    scheme.eq_ignore_ascii_case("bearer").then(|| Ok(token.to_owned()))
}

fn of_websocket(headers: &HeaderMap) -> Option<Result<String, &'static str>> {
    let is = |name, word: &str| {
        let values = headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
        values.flat_map(|value| value.split(',')).any(|value| value.trim().eq_ignore_ascii_case(word))
    };
    if !is(header::UPGRADE, "websocket") || !is(header::CONNECTION, "upgrade") {
        return None;
    }
    let names = subprotocols(headers);
    let mut tokens = names.iter().filter_map(|name| name.strip_prefix(SUBPROTOCOL));
    let token = tokens.next().filter(|token| !token.is_empty())?;
    if tokens.next().is_some() {
        return Some(Err("more than one subprotocol is a token"));
    }
    if names.len() == 1 {
        return Some(Err("the token is the only subprotocol, so there is none to be spoken"));
    }
    let decoded = URL_SAFE_NO_PAD.decode(token).ok().and_then(|bytes| String::from_utf8(bytes).ok());
    Some(decoded.ok_or("the token of the subprotocol is not base64url of text"))
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

    /// `base64url.bearer.authorization.k8s.io.` and the token `a.b?`.
    const SHOWN: &str = "base64url.bearer.authorization.k8s.io.YS5iPw";

    #[test]
    fn a_token_is_what_follows_the_word_bearer() {
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
        let mut odd = HeaderMap::new();
        odd.insert("authorization", HeaderValue::from_bytes(b"Bearer \xff").unwrap());
        assert!(tokens(&odd)[0].is_err());
    }

    #[test]
    fn a_websocket_shows_its_token_beside_another_subprotocol() {
        let of = |protocols: &str| {
            tokens(&headers(&[
                ("connection", "keep-alive, Upgrade"),
                ("upgrade", "WebSocket"),
                ("sec-websocket-protocol", protocols),
            ]))
        };
        let found = of(&format!("v5.channel.k8s.io, {SHOWN}"));
        assert_eq!(found, [Ok("a.b?".to_owned())]);
        assert!(of("v5.channel.k8s.io").is_empty());
        assert!(
            of("base64url.bearer.authorization.k8s.io., v4").is_empty(),
            "without a token nothing is shown"
        );
        for wrong in [
            SHOWN.to_owned(),
            format!("{SHOWN},{SHOWN},v4"),
            "base64url.bearer.authorization.k8s.io.?,v4".to_owned(),
            "base64url.bearer.authorization.k8s.io._w,v4".to_owned(),
        ] {
            assert!(matches!(of(&wrong)[..], [Err(_)]), "{wrong}");
        }
        let no_websocket = headers(&[("sec-websocket-protocol", &format!("v4, {SHOWN}"))]);
        assert!(tokens(&no_websocket).is_empty());
    }

    #[test]
    fn what_was_shown_goes_no_further() {
        let protocols = format!("v5.channel.k8s.io,{SHOWN}, v4.channel.k8s.io");
        let mut shown =
            headers(&[("authorization", "Bearer x"), ("sec-websocket-protocol", &protocols), ("host", "n")]);
        strip(&mut shown);
        assert_eq!(
            shown,
            headers(&[("sec-websocket-protocol", "v5.channel.k8s.io, v4.channel.k8s.io"), ("host", "n")])
        );
        let mut without = headers(&[("sec-websocket-protocol", "a,b")]);
        strip(&mut without);
        assert_eq!(without["sec-websocket-protocol"], "a,b", "left as it is");
    }
}
