//! What a request for streams says in its query.

use serde::Deserialize;

/// Which streams are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StreamOptions {
    pub(super) stdin: bool,
    pub(super) stdout: bool,
    pub(super) stderr: bool,
    pub(super) tty: bool,
}

/// A query that asks for nothing that could be given.
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
    /// Reads `input`, `output`, `error` and `tty`; only `1` is yes. A terminal has no error stream of its own.
    pub(super) fn parse(pairs: &[(String, String)]) -> Result<Self, OptionsError> {
        let yes = |key: &str| pairs.iter().find(|(k, _)| k == key).is_some_and(|(_, value)| value == "1");
        let tty = yes("tty");
        let asked = Self { stdin: yes("input"), stdout: yes("output"), stderr: yes("error") && !tty, tty };
        if asked.stdin || asked.stdout || asked.stderr { Ok(asked) } else { Err(OptionsError::NoStream) }
    }
}

/// Of a container that runs it is its spec that says whether it has a terminal.
pub(super) fn attach_options(asked: StreamOptions, pod_json: &[u8], container: &str) -> StreamOptions {
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Document {
        spec: Spec,
    }
    #[derive(Default, Deserialize)]
    #[serde(default, rename_all = "camelCase")]
    struct Spec {
        containers: Option<Vec<Container>>,
        init_containers: Option<Vec<Container>>,
        ephemeral_containers: Option<Vec<Container>>,
    }
    #[derive(Deserialize)]
    struct Container {
        name: String,
        #[serde(default)]
        tty: bool,
    }
    let document: Document = serde_json::from_slice(pod_json).unwrap_or_default();
    let lists = [document.spec.containers, document.spec.init_containers, document.spec.ephemeral_containers];
    let found = lists.into_iter().flatten().flatten().find(|known| known.name == container);
    let tty = found.map_or(asked.tty, |found| found.tty);
    StreamOptions { tty, stderr: asked.stderr && !tty, ..asked }
}

/// The ports of a port-forward: over WebSocket they have to be in the query, with commas or repeated; with SPDY they are
/// named later.
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
    fn streams_are_those_with_a_one_and_a_terminal_has_one_output() {
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
    fn whether_a_container_that_runs_has_a_terminal_its_spec_says() {
        let pod = br#"{"spec":{"containers":[{"name":"a","tty":true},{"name":"b"}],"initContainers":[{"name":"c","tty":true}]}}"#;
        for (asked, container, expected) in
            [("oe", "a", "ot"), ("oet", "b", "oe"), ("io", "c", "iot"), ("oet", "d", "ot"), ("oe", "d", "oe")]
        {
            assert_eq!(
                attach_options(streams(asked), pod, container),
                streams(expected),
                "{asked} {container}"
            );
        }
    }

    #[test]
    fn ports_are_needed_over_websocket_alone() {
        assert_eq!(ports(&pairs("port=80,443&port=9000"), true), Ok(vec![80, 443, 9000]));
        assert_eq!(ports(&[], false), Ok(vec![]));
        assert_eq!(ports(&[], true), Err(OptionsError::NoPort));
        for odd in ["0", "65536", "http", ""] {
            assert_eq!(ports(&pairs(&format!("port={odd}")), true), Err(OptionsError::BadPort(odd.into())));
        }
    }
}
