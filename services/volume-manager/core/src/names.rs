//! Names on disk (volumes.md §1, §2).

/// The plugin of emptyDir volumes, escaped.
pub const EMPTY_DIR: &str = "kubernetes.io~empty-dir";

/// Plugins whose content lies on an internal emptyDir: its marker carries the prefix `wrapped_`.
const WRAPPING: &[&str] = &[
    "kubernetes.io~configmap",
    "kubernetes.io~secret",
    "kubernetes.io~downward-api",
    "kubernetes.io~projected",
    "kubernetes.io~git-repo",
];

/// `vendor/name` as it stands in a path.
pub fn escape(plugin: &str) -> String {
    plugin.replace('/', "~")
}

/// The inverse of [`escape`].
pub fn unescape(escaped: &str) -> String {
    escaped.replace('~', "/")
}

/// Whether `name` names one entry of a folder and nothing else: it cannot lead out of it.
pub fn is_one_component(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= 255
        && name != "."
        && name != ".."
        && !name.bytes().any(|b| b == b'/' || b == 0)
}

/// The components of a path in a volume, none for its root; nothing for a path that is absolute, leads upwards or
/// is no path at all (volumes.md §8.3).
pub fn inside(path: &str) -> Option<Vec<&str>> {
    if path.starts_with('/') || path.contains('\0') {
        return None;
    }
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
    (!parts.contains(&"..")).then_some(parts)
}

/// Where a volume lies below `volumes/` of its pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VolumeKey {
    /// The plugin, escaped.
    pub plugin: String,
    /// The inner name.
    pub name: String,
}

impl VolumeKey {
    /// An emptyDir.
    pub fn empty_dir(name: &str) -> Self {
        Self { plugin: EMPTY_DIR.to_owned(), name: name.to_owned() }
    }

    /// The name of its readiness marker below `plugins/kubernetes.io~empty-dir/` when this version can tear
    /// the volume down, which is when an emptyDir is below it.
    pub fn marker(&self) -> Option<String> {
        if self.plugin == EMPTY_DIR {
            Some(self.name.clone())
        } else if WRAPPING.contains(&self.plugin.as_str()) {
            Some(format!("wrapped_{}", self.name))
        } else {
            None
        }
    }

    /// Its plugin is none that this version can set up or tear down.
    pub fn is_foreign(&self) -> bool {
        self.marker().is_none()
    }
}

#[cfg(test)]
mod tests {
    use keelson_testkit::Reached;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_slash_of_a_plugin_name_becomes_a_tilde() {
        assert_eq!(escape("kubernetes.io/empty-dir"), EMPTY_DIR);
        assert_eq!(unescape(EMPTY_DIR), "kubernetes.io/empty-dir");
    }

    #[test]
    fn a_name_that_leads_elsewhere_is_no_component() {
        for bad in ["", ".", "..", "a/b", "/", "a\0b"] {
            assert!(!is_one_component(bad), "{bad:?}");
        }
        assert!(is_one_component("..data"));
        assert!(!is_one_component(&"x".repeat(256)));
    }

    #[test]
    fn a_path_in_a_volume_stays_in_it() {
        for (path, parts) in [
            ("", Some(vec![])),
            (".", Some(vec![])),
            ("a/./b//c/", Some(vec!["a", "b", "c"])),
            ("a..b/...", Some(vec!["a..b", "..."])),
            ("..", None),
            ("a/../b", None),
            ("/a", None),
            ("a\0b", None),
        ] {
            assert_eq!(inside(path), parts, "{path:?}");
        }
    }

    #[test]
    fn the_marker_of_a_wrapped_volume_has_a_prefix_and_a_foreign_plugin_has_none() {
        let key = |plugin: &str| VolumeKey { plugin: plugin.into(), name: "v".into() };
        assert_eq!(key(EMPTY_DIR).marker().as_deref(), Some("v"));
        assert_eq!(key("kubernetes.io~secret").marker().as_deref(), Some("wrapped_v"));
        assert_eq!(key("kubernetes.io~csi").marker(), None);
        assert!(key("kubernetes.io~csi").is_foreign());
        assert!(!key(EMPTY_DIR).is_foreign() && !key("kubernetes.io~secret").is_foreign());
    }

    #[test]
    fn escaping_is_undone_by_unescaping() {
        let reached = &Reached::default();
        proptest!(ProptestConfig::with_cases(512), |(vendor in "[a-z.]{1,12}", name in "[a-z-]{1,12}")| {
            let plugin = format!("{vendor}/{name}");
            prop_assert!(is_one_component(&escape(&plugin)));
            prop_assert_eq!(unescape(&escape(&plugin)), plugin);
            reached.case([("a vendor with a dot", vendor.contains('.')), ("one without", !vendor.contains('.'))]);
        });
        // The rarest: "one without", in one case of 11.
        reached.assert_each();
    }
}
