//! Names of plugins and volumes on disk, and which paths are safe (volumes.md §1, §2).

use std::path::{Component, Path, PathBuf};

/// The plugin of emptyDir volumes, escaped.
pub const EMPTY_DIR: &str = "kubernetes.io~empty-dir";

/// The longest name of a file or folder, in bytes.
pub const MAX_COMPONENT: usize = 255;

/// Plugins whose volumes are built on an internal emptyDir, whose marker has the prefix `wrapped_`.
const WRAPPING: &[&str] = &[
    "kubernetes.io~configmap",
    "kubernetes.io~secret",
    "kubernetes.io~downward-api",
    "kubernetes.io~projected",
    "kubernetes.io~git-repo",
];

/// Escapes `vendor/name` for use as a path component.
pub fn escape(plugin: &str) -> String {
    plugin.replace('/', "~")
}

/// The inverse of [`escape`].
pub fn unescape(escaped: &str) -> String {
    escaped.replace('~', "/")
}

/// Whether `name` is a single path component that cannot lead out of its folder.
pub fn is_path_component(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= MAX_COMPONENT
        && name != "."
        && name != ".."
        && !name.bytes().any(|b| b == b'/' || b == 0)
}

/// The components of a path inside a volume; an empty list for the volume's root. `None` if the path is absolute,
/// contains `..` or a zero byte (volumes.md §8.3).
pub fn relative_components(path: &str) -> Option<Vec<&str>> {
    if path.starts_with('/') || path.contains('\0') {
        return None;
    }
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
    (!parts.contains(&"..")).then_some(parts)
}

/// Whether a path is absolute and written without `.`, `..`, doubled or trailing slashes.
pub fn is_canonical(path: &Path) -> bool {
    let rebuilt: PathBuf = path.components().collect();
    path.is_absolute()
        && !path.components().any(|c| matches!(c, Component::ParentDir | Component::CurDir))
        && rebuilt.as_os_str() == path.as_os_str()
}

/// The place of a volume below `volumes/` of its pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VolumeKey {
    /// The plugin, escaped.
    pub plugin: String,
    /// The name of the volume's folder.
    pub name: String,
}

impl VolumeKey {
    /// An emptyDir.
    pub fn empty_dir(name: &str) -> Self {
        Self { plugin: EMPTY_DIR.to_owned(), name: name.to_owned() }
    }

    /// The name of the volume's readiness marker below `plugins/kubernetes.io~empty-dir/`. `None` for a volume that
    /// is not built on an emptyDir; this version cannot tear such a volume down.
    pub fn marker(&self) -> Option<String> {
        if self.plugin == EMPTY_DIR {
            Some(self.name.clone())
        } else if WRAPPING.contains(&self.plugin.as_str()) {
            Some(format!("wrapped_{}", self.name))
        } else {
            None
        }
    }

    /// Whether this version can neither set up nor tear down volumes of the plugin.
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
    fn a_path_component_is_neither_empty_nor_dots_nor_contains_a_slash() {
        for bad in ["", ".", "..", "a/b", "/", "a\0b"] {
            assert!(!is_path_component(bad), "{bad:?}");
        }
        assert!(is_path_component("..data"));
        assert!(!is_path_component(&"x".repeat(256)));
    }

    #[test]
    fn relative_components_reject_paths_that_leave_the_volume() {
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
            assert_eq!(relative_components(path), parts, "{path:?}");
        }
    }

    #[test]
    fn only_a_plain_absolute_path_is_canonical() {
        for (path, good) in [
            ("/var/lib/kubelet", true),
            ("/", true),
            ("var/lib", false),
            ("/var/../lib", false),
            ("/var/./lib", false),
            ("/var//lib", false),
            ("/var/lib/", false),
        ] {
            assert_eq!(is_canonical(Path::new(path)), good, "{path}");
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
            prop_assert!(is_path_component(&escape(&plugin)));
            prop_assert_eq!(unescape(&escape(&plugin)), plugin);
            reached.case([("a vendor with a dot", vendor.contains('.')), ("one without", !vendor.contains('.'))]);
        });
        // The rarest: "one without", in one case of 11.
        reached.assert_each();
    }
}
