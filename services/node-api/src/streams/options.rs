//! The query parameters of a stream request.

use std::borrow::Cow;

use serde::Deserialize;

/// The requested streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StreamOptions {
    pub(super) stdin: bool,
    pub(super) stdout: bool,
    pub(super) stderr: bool,
    pub(super) tty: bool,
}

/// Why a query is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum OptionsError {
    #[error("you must specify at least 1 of stdin, stdout, stderr")]
    NoStream,
    #[error("query parameter \"port\" is required")]
    NoPort,
    #[error("unable to parse {0:?} as a port")]
    BadPort(String),
}

impl StreamOptions {
    /// Parses `input`, `output`, `error` and `tty`; only the value `1` enables one. A terminal has no separate stderr.
    pub(super) fn parse(pairs: &[(String, String)]) -> Result<Self, OptionsError> {
        let is_set = |key: &str| pairs.iter().find(|(k, _)| k == key).is_some_and(|(_, value)| value == "1");
        let tty = is_set("tty");
        let options =
            Self { stdin: is_set("input"), stdout: is_set("output"), stderr: is_set("error") && !tty, tty };
        if options.stdin || options.stdout || options.stderr {
            Ok(options)
        } else {
            Err(OptionsError::NoStream)
        }
    }
}

/// The streams of an attach request. The spec of the container decides whether there is a terminal.
pub(super) fn attach_options(requested: StreamOptions, pod_json: &[u8], container: &str) -> StreamOptions {
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Document<'a> {
        #[serde(borrow)]
        spec: Spec<'a>,
    }
    #[derive(Default, Deserialize)]
    #[serde(default, rename_all = "camelCase")]
    struct Spec<'a> {
        #[serde(borrow)]
        containers: Option<Vec<Container<'a>>>,
        #[serde(borrow)]
        init_containers: Option<Vec<Container<'a>>>,
        #[serde(borrow)]
        ephemeral_containers: Option<Vec<Container<'a>>>,
    }
    #[derive(Deserialize)]
    struct Container<'a> {
        #[serde(borrow)]
        name: Cow<'a, str>,
        #[serde(default)]
        tty: bool,
    }
    let document: Document<'_> = serde_json::from_slice(pod_json).unwrap_or_default();
    let lists = [document.spec.containers, document.spec.init_containers, document.spec.ephemeral_containers];
    let found = lists.into_iter().flatten().flatten().find(|known| known.name == container);
    let tty = found.map_or(requested.tty, |found| found.tty);
    StreamOptions { tty, stderr: requested.stderr && !tty, ..requested }
}

/// The ports of a port-forward. A WebSocket request has to name them in the query, separated by commas or repeated; SPDY names
/// them later.
pub(super) fn ports(pairs: &[(String, String)], is_websocket: bool) -> Result<Vec<i32>, OptionsError> {
    let named = pairs.iter().filter(|(key, _)| key == "port").flat_map(|(_, value)| value.split(','));
    let ports = named
        .map(|text| match text.parse::<u16>() {
            Ok(port) if port > 0 => Ok(i32::from(port)),
            _ => Err(OptionsError::BadPort(text.to_owned())),
        })
        .collect::<Result<Vec<_>, _>>()?;
    if is_websocket && ports.is_empty() { Err(OptionsError::NoPort) } else { Ok(ports) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(query: &str) -> Vec<(String, String)> {
        let parts = query.split('&').filter(|part| !part.is_empty());
        parts
            .map(|part| part.split_once('=').unwrap_or((part, "")))
            .map(|(k, v)| (k.into(), v.into()))
            .collect()
    }

    fn streams(text: &str) -> StreamOptions {
        let has = |c| text.contains(c);
        StreamOptions { stdin: has('i'), stdout: has('o'), stderr: has('e'), tty: has('t') }
    }

    #[test]
    fn stream_options_require_the_value_1_and_tty_disables_stderr() {
        for (query, expected) in [
            ("input=1&output=1&error=1", "ioe"),
            ("output=1", "o"),
            ("input=1&output=1&error=1&tty=1", "iot"),
            ("output=1&error=true&tty=0", "o"),
        ] {
            assert_eq!(StreamOptions::parse(&pairs(query)), Ok(streams(expected)), "{query}");
        }
        for query in ["", "input=0&output=true", "tty=1&error=1"] {
            assert_eq!(StreamOptions::parse(&pairs(query)), Err(OptionsError::NoStream), "{query}");
        }
    }

    #[test]
    fn attach_takes_tty_from_the_container_spec() {
        let pod = br#"{"spec":{"containers":[{"name":"a","tty":true},{"name":"b"}],"initContainers":[{"name":"c","tty":true}]}}"#;
        for (requested, container, expected) in
            [("oe", "a", "ot"), ("oet", "b", "oe"), ("io", "c", "iot"), ("oet", "d", "ot"), ("oe", "d", "oe")]
        {
            assert_eq!(
                attach_options(streams(requested), pod, container),
                streams(expected),
                "{requested} {container}"
            );
        }
    }

    #[test]
    fn port_forward_requires_ports_only_over_websocket() {
        assert_eq!(ports(&pairs("port=80,443&port=9000"), true), Ok(vec![80, 443, 9000]));
        assert_eq!(ports(&[], false), Ok(vec![]));
        assert_eq!(ports(&[], true), Err(OptionsError::NoPort));
        for invalid in ["0", "65536", "http", ""] {
            assert_eq!(
                ports(&pairs(&format!("port={invalid}")), true),
                Err(OptionsError::BadPort(invalid.into()))
            );
        }
    }
}
