//! How the cgroups of pods are named (runtime-and-resources.md §8.1).

use std::fmt;

/// A pod's class of service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Qos {
    /// Requests equal limits for every container.
    Guaranteed,
    /// Something is requested or limited.
    Burstable,
    /// Nothing is.
    BestEffort,
}

impl Qos {
    /// Every class.
    pub const ALL: [Self; 3] = [Self::Guaranteed, Self::Burstable, Self::BestEffort];

    /// The class that `status.qosClass` names.
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "Guaranteed" => Some(Self::Guaranteed),
            "Burstable" => Some(Self::Burstable),
            "BestEffort" => Some(Self::BestEffort),
            _ => None,
        }
    }

    /// The cgroup of the class below the root of all pods; a guaranteed pod lies there itself.
    const fn component(self) -> Option<&'static str> {
        match self {
            Self::Guaranteed => None,
            Self::Burstable => Some("burstable"),
            Self::BestEffort => Some("besteffort"),
        }
    }
}

/// A `cgroupRoot` that names no cgroup.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cgroup root {text:?} must be a path without empty parts, \".\" and \"..\"; \"/\" is none")]
pub struct LayoutError {
    text: String,
}

/// A cgroup by its components from the top of the tree.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CgroupPath(Vec<String>);

impl CgroupPath {
    /// The components.
    pub fn components(&self) -> &[String] {
        &self.0
    }

    fn child(&self, name: impl Into<String>) -> Self {
        let mut components = self.0.clone();
        components.push(name.into());
        Self(components)
    }

    /// Every cgroup on the way from the top, which is left out, to this one.
    pub fn lineage(&self) -> impl Iterator<Item = Self> {
        (1..=self.0.len()).map(|n| Self(self.0[..n].to_vec()))
    }

    /// The slice of the systemd driver: components with `_` for `-`, joined by `-`.
    pub fn systemd_slice(&self) -> String {
        if self.0.is_empty() {
            return "-.slice".to_owned();
        }
        let parts: Vec<String> = self.0.iter().map(|part| part.replace('-', "_")).collect();
        format!("{}.slice", parts.join("-"))
    }

    /// The expanded path of the systemd driver: each slice lies in the slices that its name begins with.
    pub fn systemd_path(&self) -> String {
        let slices: Vec<String> = self.lineage().map(|path| path.systemd_slice()).collect();
        format!("/{}", slices.join("/"))
    }
}

impl fmt::Display for CgroupPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "/{}", self.0.join("/"))
    }
}

/// Where the cgroups of all pods lie.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    pods: CgroupPath,
}

impl Layout {
    /// The layout below `cgroup_root` (`cgroupRoot` of the configuration).
    pub fn new(cgroup_root: &str) -> Result<Self, LayoutError> {
        let inner = cgroup_root.strip_prefix('/').unwrap_or(cgroup_root);
        let inner = inner.strip_suffix('/').unwrap_or(inner);
        let parts: Vec<String> =
            if inner.is_empty() { Vec::new() } else { inner.split('/').map(ToOwned::to_owned).collect() };
        if parts.iter().any(|part| part.is_empty() || part == "." || part == ".." || part.contains('\0')) {
            return Err(LayoutError { text: cgroup_root.to_owned() });
        }
        Ok(Self { pods: CgroupPath(parts).child("kubepods") })
    }

    /// The root of all pods.
    pub fn pods(&self) -> &CgroupPath {
        &self.pods
    }

    /// The cgroup of a class; for guaranteed pods the root of all pods.
    pub fn class(&self, qos: Qos) -> CgroupPath {
        qos.component().map_or_else(|| self.pods.clone(), |name| self.pods.child(name))
    }

    /// The cgroup of a pod.
    pub fn pod(&self, qos: Qos, uid: &str) -> CgroupPath {
        self.class(qos).child(format!("pod{uid}"))
    }
}

/// The UID of the pod whose cgroup has this name.
pub fn pod_uid(name: &str) -> Option<&str> {
    name.strip_prefix("pod").filter(|uid| !uid.is_empty())
}

/// Whether a UID can be part of a cgroup's name.
pub fn is_usable_uid(uid: &str) -> bool {
    !uid.is_empty() && uid.len() <= 200 && !uid.bytes().any(|b| b == b'/' || b == 0 || b == b'\n')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn pods_lie_where_their_class_says() {
        let layout = Layout::new("/").unwrap();
        assert_eq!(layout.pod(Qos::Guaranteed, "u").to_string(), "/kubepods/podu");
        assert_eq!(layout.pod(Qos::Burstable, "u").to_string(), "/kubepods/burstable/podu");
        assert_eq!(layout.pod(Qos::BestEffort, "u").to_string(), "/kubepods/besteffort/podu");
    }

    #[test]
    fn a_cgroup_root_is_a_prefix() {
        for root in ["/keelson/test", "keelson/test", "/keelson/test/"] {
            let layout = Layout::new(root).unwrap();
            assert_eq!(layout.class(Qos::Burstable).to_string(), "/keelson/test/kubepods/burstable");
        }
        for root in ["/a//b", "/../b", "/a/./b"] {
            assert!(Layout::new(root).is_err(), "{root}");
        }
    }

    #[test]
    fn the_systemd_driver_names_slices() {
        let layout = Layout::new("/").unwrap();
        let pod = layout.pod(Qos::Burstable, "12-34");
        assert_eq!(pod.systemd_slice(), "kubepods-burstable-pod12_34.slice");
        assert_eq!(
            pod.systemd_path(),
            "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod12_34.slice"
        );
        let layout = Layout::new("/my-root").unwrap();
        assert_eq!(
            layout.pod(Qos::Guaranteed, "u").systemd_path(),
            "/my_root.slice/my_root-kubepods.slice/my_root-kubepods-podu.slice"
        );
    }

    #[test]
    fn only_a_pods_cgroup_has_a_uid() {
        assert_eq!(pod_uid("podabc"), Some("abc"));
        for name in ["pod", "burstable", "cpu.shares"] {
            assert_eq!(pod_uid(name), None, "{name}");
        }
    }

    #[test]
    fn classes_are_read_by_their_names() {
        for (text, qos) in [
            ("Guaranteed", Some(Qos::Guaranteed)),
            ("Burstable", Some(Qos::Burstable)),
            ("BestEffort", Some(Qos::BestEffort)),
            ("burstable", None),
            ("", None),
        ] {
            assert_eq!(Qos::parse(text), qos, "{text:?}");
        }
    }

    #[test]
    fn a_uid_is_one_part_of_a_path_and_one_line() {
        for (uid, usable) in [
            ("12-34", true),
            (&"u".repeat(200), true),
            (&"u".repeat(201), false),
            ("", false),
            ("a/b", false),
            ("a\0b", false),
            ("a\nb", false),
        ] {
            assert_eq!(is_usable_uid(uid), usable, "{uid:?}");
        }
    }

    proptest! {
        #[test]
        fn the_uid_of_a_pods_cgroup_is_read_back(uid in "[a-z0-9-]{1,40}", qos in prop::sample::select(Qos::ALL.to_vec())) {
            let path = Layout::new("/x").unwrap().pod(qos, &uid);
            let name = path.components().last().unwrap();
            prop_assert_eq!(pod_uid(name), Some(uid.as_str()));
            prop_assert_eq!(path.systemd_slice().matches('-').count() + 1, path.components().len());
        }
    }
}
