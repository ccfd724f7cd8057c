//! The flags as node-api's `/flagz` shows them (node-and-api.md §8.11).

use std::collections::BTreeMap;

use keelson_config::{KubeletField, kubelet_fields};
use serde_json::{Map, Value};

use crate::flags::{CommandLine, flags};

/// The replacement of secret values.
const CLASSIFIED: &str = "CLASSIFIED";
/// The flag without a field that has a secret value.
const STORAGE_PASSWORD: &str = "storage-driver-password";

/// All flags by name, without the dashes, with the given value or else the default.
///
/// Values of files are not included; `/configz` shows those in force.
pub fn shown_flags(line: &CommandLine) -> BTreeMap<&'static str, String> {
    let shown = |name: &str, given: Option<&str>, default: String| match given {
        Some(text) if is_secret(name) && !text.is_empty() => CLASSIFIED.to_owned(),
        Some(text) => text.to_owned(),
        None => default,
    };
    flags()
        .iter()
        .map(|flag| (flag.name, shown(flag.name, line.given(flag.name), flag.shown_default())))
        .collect()
}

/// Whether a flag has a secret value: a header, for example, may carry the token for a source of pods.
fn is_secret(name: &str) -> bool {
    let sets_secret = |field: &KubeletField| field.secret && field.flag.is_some_and(|flag| flag.name == name);
    name == STORAGE_PASSWORD || kubelet_fields().iter().any(sets_secret)
}

/// A line per flag, sorted by name, for the log; empty below verbosity 1 (§1.1).
pub fn flag_lines(line: &CommandLine, verbosity: i64) -> Vec<String> {
    if verbosity < 1 {
        return Vec::new();
    }
    shown_flags(line).iter().map(|(name, value)| format!("FLAG: --{name}={value:?}")).collect()
}

/// The KubeletConfiguration in force as a log line, from verbosity 5 on; its secrets are masked already.
pub fn configuration_line(whole: &Map<String, Value>, verbosity: i64) -> Option<String> {
    let text = || serde_json::to_string(whole).ok().map(|text| format!("KubeletConfiguration: {text}"));
    (verbosity >= 5).then(text).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flags::parse;

    fn shown(arguments: &[&str]) -> BTreeMap<&'static str, String> {
        let arguments: Vec<String> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        shown_flags(&parse(&arguments, "/srv").unwrap())
    }

    #[test]
    fn flagz_shows_the_given_value_or_the_default() {
        let all = shown(&[
            "--root-dir=/r",
            "--config=/etc/k.yaml",
            "--node-labels",
            "a=1,b=2",
            "--node-labels=c=3",
            "--minimum-container-ttl-duration=1m30s",
            "--maximum-dead-containers-per-container=-1",
            "--resolve-only",
        ]);
        for (name, value) in [
            ("config", "/etc/k.yaml"),
            ("container-runtime-endpoint", "unix:///run/containerd/containerd.sock"),
            ("enforce-node-allocatable", "pods"),
            (
                "eviction-hard",
                "imagefs.available<15%,imagefs.inodesFree<5%,memory.available<100Mi,nodefs.available<10%,nodefs.inodesFree<5%",
            ),
            ("hostname-override", ""),
            ("max-pods", "110"),
            ("maximum-dead-containers", "-1"),
            ("maximum-dead-containers-per-container", "-1"),
            ("minimum-container-ttl-duration", "1m30s"),
            ("node-labels", "a=1,b=2,c=3"),
            ("prepare-host", "false"),
            ("resolve-only", "true"),
            ("root-dir", "/r"),
            ("run-dir", "/run/keelson"),
        ] {
            assert_eq!(all[name], value, "{name}");
        }
        assert_eq!(all.len(), flags().len());
    }

    #[test]
    fn flags_are_logged_from_verbosity_1_on() {
        let arguments =
            ["--max-pods=7", "--provider-id=a\"b", "--manifest-url-header=Authorization:Bearer abc"];
        let line = parse(&arguments.map(ToOwned::to_owned), "/srv").unwrap();
        assert!(flag_lines(&line, 0).is_empty());
        let lines = flag_lines(&line, 1);
        assert_eq!(lines.len(), flags().len());
        let names: Vec<&str> = lines.iter().map(|line| line.split('=').next().unwrap()).collect();
        assert!(names.is_sorted(), "{names:?}");
        for expected in [
            "FLAG: --address=\"0.0.0.0\"",
            "FLAG: --max-pods=\"7\"",
            "FLAG: --provider-id=\"a\\\"b\"",
            "FLAG: --manifest-url-header=\"CLASSIFIED\"",
        ] {
            assert!(lines.iter().any(|line| line == expected), "{expected}");
        }
    }

    #[test]
    fn the_configuration_is_logged_from_verbosity_5_on_without_secrets() {
        use crate::inputs::Flags;
        use crate::testing::{host, kubelet, run};

        let file = kubelet(
            serde_json::json!({"maxPods": 7, "staticPodURLHeader": {"Authorization": ["Bearer abc"]}}),
        );
        let whole = run(&Flags::default(), Some(&file), None, &host()).unwrap().kubelet_configuration;
        assert_eq!(configuration_line(&whole, 4), None);
        let line = configuration_line(&whole, 5).unwrap();
        assert!(line.contains(r#""maxPods":7"#) && line.contains("<masked>"), "{line}");
        assert!(!line.contains("abc"), "{line}");
    }

    #[test]
    fn secret_flags_are_shown_as_classified() {
        assert_eq!(
            shown(&["--manifest-url-header=Authorization:Bearer abc"])["manifest-url-header"],
            "CLASSIFIED"
        );
        assert_eq!(shown(&[])["manifest-url-header"], "", "an empty value is not classified");
    }
}
