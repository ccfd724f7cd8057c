//! The flags as node-api's `/flagz` shows them (node-and-api.md §8.11).

use std::collections::BTreeMap;

use keelson_config::Config;

use crate::resolve::Flags;

/// Stands in the place of a value that nobody is to see.
const CLASSIFIED: &str = "CLASSIFIED";
/// Flags of a kubelet whose values are secrets: a header may carry the token for a source of pods.
const SECRET: &[&str] = &["manifest-url-header"];

/// All flags by name, without the dashes: those that take part in the resolution, as they were given or else with their
/// defaults, and `others`.
///
/// Files change nothing of it: what is in force `/configz` shows.
pub fn shown_flags(
    flags: &Flags,
    others: impl IntoIterator<Item = (&'static str, String)>,
) -> BTreeMap<&'static str, String> {
    let Config { paths, runtime, logging, container_collection, .. } = Config::default();
    let path = |path: std::path::PathBuf| path.display().to_string();
    let given = |value: &Option<String>, default: String| value.clone().unwrap_or(default);
    let number = |value: Option<i32>, default: i32| value.unwrap_or(default).to_string();
    let resolved = [
        ("root-dir", given(&flags.root_dir, path(paths.root_dir))),
        ("hostname-override", given(&flags.hostname_override, String::new())),
        ("pod-manifest-path", given(&flags.pod_manifest_path, String::new())),
        ("container-runtime-endpoint", given(&flags.container_runtime_endpoint, runtime.endpoint)),
        ("node-labels", flags.node_labels.join(",")),
        ("run-dir", given(&flags.run_dir, path(paths.run_dir))),
        ("state-dir", given(&flags.state_dir, path(paths.state_dir))),
        ("log-level", given(&flags.log_level, logging.level)),
        ("log-format", given(&flags.log_format, logging.format)),
        (
            "minimum-container-ttl-duration",
            given(&flags.minimum_container_ttl, format!("{}s", container_collection.minimum_age_ms / 1000)),
        ),
        (
            "maximum-dead-containers-per-container",
            number(flags.max_dead_per_container, container_collection.max_per_container),
        ),
        ("maximum-dead-containers", number(flags.max_dead_containers, container_collection.max_total)),
        ("runtime-cgroups", given(&flags.runtime_cgroups, String::new())),
    ];
    resolved.into_iter().chain(others).map(classified).collect()
}

/// Who may see the flags may not see every value.
fn classified((name, value): (&'static str, String)) -> (&'static str, String) {
    if SECRET.contains(&name) && !value.is_empty() { (name, CLASSIFIED.to_owned()) } else { (name, value) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_is_shown_as_it_was_given_or_with_its_default() {
        let flags = Flags {
            root_dir: Some("/r".into()),
            node_labels: vec!["a=1,b=2".into(), "c=3".into()],
            minimum_container_ttl: Some("1m30s".into()),
            max_dead_per_container: Some(-1),
            ..Flags::default()
        };
        let shown = shown_flags(&flags, [("config", "/etc/k.yaml".to_owned())]);
        let expected = [
            ("config", "/etc/k.yaml"),
            ("container-runtime-endpoint", "unix:///run/containerd/containerd.sock"),
            ("hostname-override", ""),
            ("log-format", "text"),
            ("log-level", "info"),
            ("maximum-dead-containers", "-1"),
            ("maximum-dead-containers-per-container", "-1"),
            ("minimum-container-ttl-duration", "1m30s"),
            ("node-labels", "a=1,b=2,c=3"),
            ("pod-manifest-path", ""),
            ("root-dir", "/r"),
            ("run-dir", "/run/keelson"),
            ("runtime-cgroups", ""),
            ("state-dir", "/var/lib/keelson"),
        ];
        let shown: Vec<(&str, &str)> = shown.iter().map(|(name, value)| (*name, value.as_str())).collect();
        assert_eq!(shown, expected);
        let unset = shown_flags(&Flags::default(), []);
        assert_eq!(unset["root-dir"], "/var/lib/kubelet");
        assert_eq!((&*unset["minimum-container-ttl-duration"], &*unset["node-labels"]), ("0s", ""));
        assert_eq!(unset["maximum-dead-containers-per-container"], "1");
    }

    #[test]
    fn what_is_secret_is_classified() {
        let shown = |value: &str| {
            let header = ("manifest-url-header", value.to_owned());
            shown_flags(&Flags::default(), [header])["manifest-url-header"].clone()
        };
        assert_eq!(shown("Authorization:Bearer abc"), "CLASSIFIED");
        assert_eq!(shown(""), "", "nothing is no secret");
    }
}
