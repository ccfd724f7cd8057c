//! The URL of static pod manifests and its request headers (node-and-api.md §2.1, §2.5).

use std::time::Duration;

use keelson_config::UrlHeaders;
use keelson_kube_model::base64;
use serde_json::Value;

use crate::document::Sourced;
use crate::durations::millis;
use crate::outcome::Outcome;
use crate::reader::Reader;

const HEADERS: &str = "staticPodURLHeader";
const RULE: &str =
    "this must be http:// or https:// with a host, such as https://manifests.example/nodes/edge-1.yaml";

/// The fields; `None` where the file does not set them.
#[derive(Debug)]
pub(super) struct ManifestUrl {
    url: Option<Sourced<String>>,
    headers: Option<Sourced<UrlHeaders>>,
    check: Option<Sourced<Duration>>,
}

impl ManifestUrl {
    /// Reads `staticPodURL`, `staticPodURLHeader` and `httpCheckFrequency`.
    pub(super) fn read(reader: &mut Reader<'_>) -> Self {
        Self {
            url: reader.text_field("staticPodURL"),
            headers: headers(reader),
            check: reader.duration_field("httpCheckFrequency"),
        }
    }

    /// Checks and applies the URL. Its user and password become a header, as in the kubelet's requests, so that the resolved
    /// configuration has the URL without them.
    pub(super) fn resolve(self, out: &mut Outcome<'_>) {
        let Self { url, headers, check } = self;
        out.set_field(check, |c, v| c.sources.http_check_ms = millis(v));
        let Some(url) = url else { return };
        let Some((bare, user)) = split_user(&url.value) else {
            // The part before an @ may be a password.
            let shown = url.map(|text| if text.contains('@') { "<masked>".to_owned() } else { text });
            out.refuse(&shown, RULE);
            return;
        };
        out.set_field(Some(url.map(|_| bare)), |c, v| c.sources.static_pod_url = Some(v));
        let mut headers = headers.map(|headers| headers.value).unwrap_or_default();
        let is_authorization = |(name, _): &(String, String)| name.eq_ignore_ascii_case("authorization");
        if let Some(user) = user.filter(|_| !headers.0.iter().any(is_authorization)) {
            headers.0.push(("Authorization".to_owned(), format!("Basic {}", base64::encode(&user))));
        }
        out.config.sources.static_pod_url_headers = headers;
    }
}

/// The URL without user, password and fragment, and `user:password` if it has them; `None` for a URL that violates [`RULE`].
fn split_user(url: &str) -> Option<(String, Option<Vec<u8>>)> {
    let (scheme, rest) = url.split_once("://")?;
    let scheme = scheme.to_ascii_lowercase();
    let rest = rest.split('#').next().unwrap_or_default();
    let end = rest.find(['/', '?']).unwrap_or(rest.len());
    let (authority, path) = rest.split_at(end);
    let (user, host) = match authority.rsplit_once('@') {
        Some((user, host)) => (Some(user), host),
        None => (None, authority),
    };
    let good = ["http", "https"].contains(&scheme.as_str())
        && !host.is_empty()
        && !host.starts_with(':')
        && rest.bytes().all(|b| b.is_ascii_graphic());
    let user = match user {
        None | Some("") => None,
        Some(user) => {
            Some(percent_decoded(&if user.contains(':') { user.to_owned() } else { format!("{user}:") })?)
        }
    };
    good.then(|| (format!("{scheme}://{host}{path}"), user))
}

/// Decodes percent escapes; `None` for a `%` without two digits.
fn percent_decoded(text: &str) -> Option<Vec<u8>> {
    let mut bytes = text.bytes();
    let mut plain = Vec::new();
    while let Some(byte) = bytes.next() {
        if byte == b'%' {
            let digits = [bytes.next()?, bytes.next()?];
            let digits =
                std::str::from_utf8(&digits).ok().filter(|d| d.bytes().all(|b| b.is_ascii_hexdigit()))?;
            plain.push(u8::from_str_radix(digits, 16).ok()?);
        } else {
            plain.push(byte);
        }
    }
    Some(plain)
}

/// `staticPodURLHeader`: a list of values for each name. Error messages never contain a value.
fn headers(reader: &mut Reader<'_>) -> Option<Sourced<UrlHeaders>> {
    let masked = Value::from("<masked>");
    let Some(object) = reader.peek(HEADERS)?.as_object() else {
        reader.report(HEADERS, &masked, "this must be a map of lists of strings".to_owned());
        return None;
    };
    let _ = reader.object(HEADERS);
    let mut headers = Vec::new();
    for (name, values) in object.iter().filter(|(_, values)| !values.is_null()) {
        let field = format!("{HEADERS}.{name}");
        let texts = values.as_array().map(|list| list.iter().map(Value::as_str).collect::<Vec<_>>());
        let texts = texts.and_then(|list| list.into_iter().collect::<Option<Vec<_>>>());
        let remedy = match &texts {
            _ if !is_token(name) => "this is not a valid HTTP header name",
            None => "this must be a list of strings",
            Some(list) if !list.iter().all(|text| is_value(text)) => {
                "a header value must not have control characters"
            }
            Some(_) => "",
        };
        if !remedy.is_empty() {
            reader.report(&field, &masked, remedy.to_owned());
        }
        headers.extend(texts.into_iter().flatten().map(|value| (name.clone(), value.to_owned())));
    }
    Some(Sourced { value: UrlHeaders(headers), origin: reader.origin(HEADERS), field: HEADERS.to_owned() })
}

/// RFC 9110, 5.6.2.
fn is_token(name: &str) -> bool {
    let is_part = |b: u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b);
    !name.is_empty() && name.bytes().all(is_part)
}

/// RFC 9110, 5.5.
fn is_value(text: &str) -> bool {
    text.bytes().all(|b| b == b'\t' || (b >= b' ' && b != 0x7f))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::inputs::Flags;
    use crate::outcome::WITHOUT_EFFECT;
    use crate::resolve::Resolved;
    use crate::testing::{assert_refused, errors_of, host, kubelet, run};

    fn with(fields: Value) -> Resolved {
        run(&Flags::default(), Some(&kubelet(fields)), None, &host()).unwrap()
    }

    fn header(resolved: &Resolved) -> Vec<(&str, &str)> {
        let headers = &resolved.config.sources.static_pod_url_headers;
        headers.0.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect()
    }

    #[test]
    fn manifest_url_check_frequency_and_headers_are_applied() {
        let resolved = with(json!({
            "staticPodURL": "https://h:8443/a?b=c", "httpCheckFrequency": "1m",
            "staticPodURLHeader": {"X-A": ["1", "2"], "X-B": null},
        }));
        let sources = &resolved.config.sources;
        assert_eq!(sources.static_pod_url.as_deref(), Some("https://h:8443/a?b=c"));
        assert_eq!(sources.http_check_ms, 60_000);
        assert_eq!(header(&resolved), [("X-A", "1"), ("X-A", "2")]);
        assert!(resolved.notes.iter().all(|note| note.event != Some(WITHOUT_EFFECT)), "{:?}", resolved.notes);
        let text = serde_json::to_string(&sources).unwrap();
        assert!(!text.contains("X-A"), "{text}");
        let plain = with(json!({"httpCheckFrequency": "0s", "staticPodURLHeader": {"X-A": ["1"]}}));
        assert_eq!(plain.config.sources, keelson_config::Config::default().sources, "zero means the default");
    }

    #[test]
    fn a_user_in_the_manifest_url_becomes_a_hidden_header() {
        let resolved = with(json!({"staticPodURL": "HTTP://me:p%40ss@h/#x"}));
        assert_eq!(header(&resolved), [("Authorization", "Basic bWU6cEBzcw==")]);
        assert_eq!(resolved.config.sources.static_pod_url.as_deref(), Some("http://h/"));
        assert_eq!(resolved.kubelet_configuration["staticPodURL"], "http://h/");
        let own = with(json!({
            "staticPodURL": "http://me@h", "staticPodURLHeader": {"authorization": ["mine"]},
        }));
        assert_eq!(
            header(&own),
            [("authorization", "mine")],
            "the configured header wins, as in the kubelet"
        );
        let lone = with(json!({"staticPodURL": "http://me@h"}));
        assert_eq!(header(&lone), [("Authorization", "Basic bWU6")]);
    }

    #[test]
    fn invalid_manifest_urls_and_headers_are_refused_without_secrets() {
        for wrong in ["h/a", "ftp://h", "http://", "http:///a", "http://:80/", "http://h/a b", "http://a%4@h"]
        {
            let errors = errors_of(json!({"staticPodURL": wrong}));
            assert!(errors.len() == 1 && errors[0].contains(RULE), "{wrong}: {errors:?}");
        }
        let errors = errors_of(json!({
            "staticPodURL": "ftp://me:hidden-word@h",
            "staticPodURLHeader": {"a b": ["hidden-word"], "c": "hidden-word", "d": ["hidden-word\n"]},
        }));
        assert_eq!(errors.len(), 4, "{errors:?}");
        assert!(errors.iter().all(|error| !error.contains("hidden-word")), "{errors:?}");
        for (field, words) in
            [("a b", "not a valid HTTP header name"), ("c", "list of strings"), ("d", "control characters")]
        {
            let names_field = |error: &&String| error.contains(&format!("{HEADERS}.{field} = \"<masked>\""));
            let error = errors.iter().find(names_field).unwrap_or_else(|| panic!("{field}: {errors:?}"));
            assert!(error.contains(words), "{error}");
        }
        let whole = errors_of(json!({"staticPodURLHeader": "hidden-word"}));
        assert!(whole.iter().all(|error| !error.contains("hidden-word")), "{whole:?}");
    }

    #[test]
    fn invalid_check_frequencies_are_refused_with_a_remedy() {
        assert_refused(&[(
            json!({"httpCheckFrequency": "often"}),
            "httpCheckFrequency = \"often\"",
            "not a duration",
        )]);
    }
}
