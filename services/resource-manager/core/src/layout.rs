//! The names and paths of pod cgroups (runtime-and-resources.md §8.1).

use std::fmt;

/// A pod's QoS class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Qos {
    /// The sums of the requests equal those of the limits, and no container is without them.
    Guaranteed,
    /// At least one request or limit is set.
    Burstable,
    /// No request or limit is set.
    BestEffort,
}

impl Qos {
    /// Every class.
    pub const ALL: [Self; 3] = [Self::Guaranteed, Self::Burstable, Self::BestEffort];

    /// Parses `status.qosClass`.
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "Guaranteed" => Some(Self::Guaranteed),
            "Burstable" => Some(Self::Burstable),
            "BestEffort" => Some(Self::BestEffort),
            _ => None,
        }
    }

    /// The name of the class's cgroup in `kubepods`; guaranteed pods are directly in `kubepods`.
    const fn component(self) -> Option<&'static str> {
        match self {
            Self::Guaranteed => None,
            Self::Burstable => Some("burstable"),
            Self::BestEffort => Some("besteffort"),
        }
    }
}

/// The cgroup driver: who creates the cgroups, and how they are named.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Driver {
    /// The agent creates directories.
    Cgroupfs,
    /// systemd creates slices.
    Systemd,
}

impl Driver {
    /// Parses `cgroupDriver`.
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "cgroupfs" => Some(Self::Cgroupfs),
            "systemd" => Some(Self::Systemd),
            _ => None,
        }
    }

    /// Its name in the configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cgroupfs => "cgroupfs",
            Self::Systemd => "systemd",
        }
    }
}

/// An invalid `cgroupRoot`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// Not a valid path.
    #[error("cgroup root {0:?} must be a path without empty parts, \".\" and \"..\"; \"/\" means no root")]
    Path(String),
    /// The name cannot be part of a slice name and be parsed back.
    #[error(
        "cgroup root {0:?} must consist of letters, digits, \"-\", \":\" and \".\" with the systemd driver, which writes \
         \"_\" for \"-\"; choose another name or the cgroupfs driver"
    )]
    Slice(String),
}

/// The path of a cgroup: its components from the root of the tree, as its driver names them.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CgroupPath(Vec<String>);

impl CgroupPath {
    /// The components.
    pub fn components(&self) -> &[String] {
        &self.0
    }

    /// The last component; with the systemd driver a slice. Empty for the root.
    pub fn name(&self) -> &str {
        self.0.last().map_or("", String::as_str)
    }

    /// Whether it is a systemd slice.
    pub fn is_slice(&self) -> bool {
        self.name().ends_with(SLICE)
    }

    /// Every cgroup from below the root to this one, parents first.
    pub fn lineage(&self) -> impl Iterator<Item = Self> {
        (1..=self.0.len()).map(|n| Self(self.0[..n].to_vec()))
    }

    fn child(&self, driver: Driver, name: &str) -> Self {
        let name = match driver {
            Driver::Cgroupfs => name.to_owned(),
            Driver::Systemd => format!("{}{}{SLICE}", self.prefix(), escaped(name)),
        };
        Self(self.0.iter().cloned().chain([name]).collect())
    }

    /// The path of the slice of this name, with its parent slices that are not in this path yet.
    fn unit(&self, slice: &str) -> Self {
        let above = slice.match_indices('-').map(|(at, _)| format!("{}{SLICE}", &slice[..at]));
        let missing = above.filter(|name| !self.0.contains(name)).chain([slice.to_owned()]);
        Self(self.0.iter().cloned().chain(missing).collect())
    }

    /// The prefix of the names of slices in this one: systemd derives a slice's parents from its name.
    fn prefix(&self) -> String {
        let stem = self.name().strip_suffix(SLICE).unwrap_or_default();
        if stem.is_empty() { String::new() } else { format!("{stem}-") }
    }
}

impl fmt::Display for CgroupPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "/{}", self.0.join("/"))
    }
}

const SLICE: &str = ".slice";

/// Escapes a name as one part of a slice name: `-` becomes `_`, and characters that unit names may not have, and `_` itself,
/// become `\xNN` (systemd.unit(5)), so that each name can be parsed back.
fn escaped(name: &str) -> String {
    use std::fmt::Write as _;
    let mut text = String::with_capacity(name.len());
    for byte in name.bytes() {
        match byte {
            b'-' => text.push('_'),
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b':' | b'.' => text.push(char::from(byte)),
            other => {
                let _ = write!(text, "\\x{other:02x}");
            }
        }
    }
    text
}

/// Reverses [`escaped`]; none when `text` is not an escaped name.
fn unescaped(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        match first {
            b'_' => bytes.push(b'-'),
            b'-' => return None,
            b'\\' => {
                let digits = std::str::from_utf8(rest.get(1..3).filter(|_| rest[0] == b'x')?).ok()?;
                bytes.push(u8::from_str_radix(digits, 16).ok()?);
                rest = &rest[3..];
            }
            other => bytes.push(*other),
        }
    }
    String::from_utf8(bytes).ok()
}

/// The layout of the cgroups of all pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    driver: Driver,
    pods: CgroupPath,
}

impl Layout {
    /// The layout below `cgroup_root` (`cgroupRoot` of the configuration).
    ///
    /// # Errors
    /// [`LayoutError`] names what is wrong with the root.
    pub fn new(driver: Driver, cgroup_root: &str) -> Result<Self, LayoutError> {
        let inner = cgroup_root.strip_prefix('/').unwrap_or(cgroup_root);
        let inner = inner.strip_suffix('/').unwrap_or(inner);
        let mut path = CgroupPath(Vec::new());
        for part in inner.split('/').filter(|_| !inner.is_empty()) {
            if part.is_empty() || part == "." || part == ".." || part.contains('\0') {
                return Err(LayoutError::Path(cgroup_root.to_owned()));
            }
            // `/my.slice` is systemd's own name for it.
            let part =
                if driver == Driver::Systemd { part.strip_suffix(SLICE).unwrap_or(part) } else { part };
            if driver == Driver::Systemd && (part.is_empty() || escaped(part).contains('\\')) {
                return Err(LayoutError::Slice(cgroup_root.to_owned()));
            }
            path = path.child(driver, part);
        }
        Ok(Self { driver, pods: path.child(driver, "kubepods") })
    }

    /// The driver that names the cgroups.
    pub const fn driver(&self) -> Driver {
        self.driver
    }

    /// The `kubepods` cgroup.
    pub fn pods(&self) -> &CgroupPath {
        &self.pods
    }

    /// The cgroup of a QoS class; for guaranteed pods `kubepods`.
    pub fn class(&self, qos: Qos) -> CgroupPath {
        qos.component().map_or_else(|| self.pods.clone(), |name| self.pods.child(self.driver, name))
    }

    /// The cgroup of a pod.
    pub fn pod(&self, qos: Qos, uid: &str) -> CgroupPath {
        self.class(qos).child(self.driver, &format!("pod{uid}"))
    }

    /// The UID of the pod from the name of its cgroup in that of this class.
    pub fn pod_uid(&self, qos: Qos, name: &str) -> Option<String> {
        let name = match self.driver {
            Driver::Cgroupfs => name.to_owned(),
            Driver::Systemd => {
                let prefix = self.class(qos).prefix();
                unescaped(name.strip_prefix(prefix.as_str())?.strip_suffix(SLICE)?)?
            }
        };
        name.strip_prefix("pod").filter(|uid| !uid.is_empty()).map(ToOwned::to_owned)
    }

    /// The possible cgroup paths of a container or sandbox in the pod cgroup `pod`: of containerd, then of CRI-O.
    pub fn containers(&self, pod: &str, id: &str) -> [String; 2] {
        match self.driver {
            Driver::Cgroupfs => [format!("{pod}/{id}"), format!("{pod}/crio-{id}")],
            Driver::Systemd => [format!("{pod}/cri-containerd-{id}.scope"), format!("{pod}/crio-{id}.scope")],
        }
    }

    /// The path of a reserved cgroup (`kubeReservedCgroup`) from the root of the tree. With the systemd driver a part that ends
    /// with `.slice`, `.scope` or `.service` is kept as it is, and a slice is in the parent slices of its name. None for the
    /// root itself.
    pub fn reserved(&self, name: &str) -> Option<CgroupPath> {
        let parts = name.split('/').filter(|part| !part.is_empty());
        let path = parts.fold(CgroupPath(Vec::new()), |path, part| match self.driver {
            Driver::Systemd if part.ends_with(SLICE) => path.unit(part),
            Driver::Systemd if part.ends_with(".scope") || part.ends_with(".service") => {
                path.child(Driver::Cgroupfs, part)
            }
            driver => path.child(driver, part),
        });
        (!path.0.is_empty()).then_some(path)
    }
}

/// Whether a UID can be part of a cgroup name.
pub fn is_usable_uid(uid: &str) -> bool {
    !uid.is_empty() && uid.len() <= 200 && !uid.bytes().any(|b| b == b'/' || b == 0 || b == b'\n')
}

#[cfg(test)]
mod tests {
    use keelson_testkit::Reached;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn pod_cgroup_paths_follow_the_qos_class() {
        let layout = Layout::new(Driver::Cgroupfs, "/").unwrap();
        assert_eq!(layout.pod(Qos::Guaranteed, "u").to_string(), "/kubepods/podu");
        assert_eq!(layout.pod(Qos::Burstable, "u").to_string(), "/kubepods/burstable/podu");
        assert_eq!(layout.pod(Qos::BestEffort, "u").to_string(), "/kubepods/besteffort/podu");
    }

    #[test]
    fn a_cgroup_root_is_a_prefix() {
        for root in ["/keelson/test", "keelson/test", "/keelson/test/"] {
            let layout = Layout::new(Driver::Cgroupfs, root).unwrap();
            assert_eq!(layout.class(Qos::Burstable).to_string(), "/keelson/test/kubepods/burstable");
        }
        for root in ["/a//b", "/../b", "/a/./b"] {
            assert!(Layout::new(Driver::Cgroupfs, root).is_err(), "{root}");
        }
    }

    fn slices(root: &str) -> Layout {
        Layout::new(Driver::Systemd, root).unwrap()
    }

    #[test]
    fn the_systemd_driver_names_slices() {
        for (root, qos, path) in [
            ("/", Qos::Guaranteed, "/kubepods.slice/kubepods-pod12_34.slice"),
            (
                "/",
                Qos::Burstable,
                "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod12_34.slice",
            ),
            (
                "/",
                Qos::BestEffort,
                "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod12_34.slice",
            ),
            (
                "/my-root",
                Qos::Guaranteed,
                "/my_root.slice/my_root-kubepods.slice/my_root-kubepods-pod12_34.slice",
            ),
            (
                "/a.slice/b",
                Qos::Guaranteed,
                "/a.slice/a-b.slice/a-b-kubepods.slice/a-b-kubepods-pod12_34.slice",
            ),
        ] {
            assert_eq!(slices(root).pod(qos, "12-34").to_string(), path, "{root}");
        }
        for root in ["/a_b", "/.slice", "/a b"] {
            assert_eq!(Layout::new(Driver::Systemd, root), Err(LayoutError::Slice(root.into())));
        }
        assert_eq!(Layout::new(Driver::Systemd, "/a/../b"), Err(LayoutError::Path("/a/../b".into())));
    }

    #[test]
    fn systemd_slices_are_recognised_by_name() {
        assert!(slices("/").pod(Qos::Guaranteed, "12-34").is_slice());
        assert!(!Layout::new(Driver::Cgroupfs, "/").unwrap().pod(Qos::Guaranteed, "12-34").is_slice());
    }

    #[test]
    fn the_lineage_of_a_cgroup_starts_below_the_root_and_ends_with_itself() {
        let lineage: Vec<String> = Layout::new(Driver::Cgroupfs, "/")
            .unwrap()
            .pod(Qos::Burstable, "u")
            .lineage()
            .map(|c| c.to_string())
            .collect();
        assert_eq!(lineage, ["/kubepods", "/kubepods/burstable", "/kubepods/burstable/podu"]);
    }

    #[test]
    fn only_pod_cgroups_have_a_uid() {
        let cgroupfs = Layout::new(Driver::Cgroupfs, "/").unwrap();
        assert_eq!(cgroupfs.pod_uid(Qos::Guaranteed, "podabc").as_deref(), Some("abc"));
        for name in ["pod", "burstable", "cpu.shares"] {
            assert_eq!(cgroupfs.pod_uid(Qos::Guaranteed, name), None, "{name}");
        }
        for (qos, name, uid) in [
            (Qos::Guaranteed, "kubepods-pod1_2.slice", Some("1-2")),
            (Qos::Guaranteed, "kubepods-poda\\x5fb.slice", Some("a_b")),
            (Qos::Guaranteed, "kubepods-burstable.slice", None),
            (Qos::Guaranteed, "kubepods-pod.slice", None),
            (Qos::Guaranteed, "kubepods-poda-b.slice", None),
            (Qos::Guaranteed, "kubepods-poda\\x5.slice", None),
            (Qos::Guaranteed, "kubepods-poda\\y5f.slice", None),
            (Qos::Guaranteed, "kubepods-poda", None),
            (Qos::Burstable, "kubepods-poda.slice", None),
            (Qos::Burstable, "kubepods-burstable-poda.slice", Some("a")),
        ] {
            assert_eq!(slices("/").pod_uid(qos, name).as_deref(), uid, "{name}");
        }
    }

    #[test]
    fn reserved_cgroup_paths_follow_the_driver_or_the_unit_name() {
        let cgroupfs = Layout::new(Driver::Cgroupfs, "/").unwrap();
        let text = |layout: &Layout, name: &str| layout.reserved(name).map(|path| path.to_string());
        assert_eq!(text(&cgroupfs, "/kube-reserved/x.slice").as_deref(), Some("/kube-reserved/x.slice"));
        assert_eq!((text(&cgroupfs, "/"), text(&slices("/"), "//")), (None, None));
        for (name, path) in [
            ("/kube-reserved", "/kube_reserved.slice"),
            ("/a/b", "/a.slice/a-b.slice"),
            ("/system.slice", "/system.slice"),
            ("/kube-reserved.slice", "/kube.slice/kube-reserved.slice"),
            ("/kube.slice/kube-a-b.slice", "/kube.slice/kube-a.slice/kube-a-b.slice"),
            ("/system.slice/containerd.service", "/system.slice/containerd.service"),
        ] {
            assert_eq!(text(&slices("/"), name).as_deref(), Some(path), "{name}");
        }
    }

    #[test]
    fn container_cgroup_paths_follow_the_runtime() {
        let cgroupfs = Layout::new(Driver::Cgroupfs, "/").unwrap();
        assert_eq!(cgroupfs.containers("/p", "12"), ["/p/12", "/p/crio-12"]);
        let expected = ["/p.slice/cri-containerd-12.scope", "/p.slice/crio-12.scope"];
        assert_eq!(slices("/").containers("/p.slice", "12"), expected);
    }

    #[test]
    fn cgroup_drivers_are_parsed_by_name() {
        for (text, driver) in
            [("cgroupfs", Some(Driver::Cgroupfs)), ("systemd", Some(Driver::Systemd)), ("", None)]
        {
            assert_eq!(Driver::parse(text), driver, "{text:?}");
            assert!(driver.is_none_or(|driver| driver.name() == text), "{text:?}");
        }
    }

    #[test]
    fn qos_classes_are_parsed_by_name() {
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
    fn usable_uids_are_one_path_component_on_one_line() {
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

    #[test]
    fn pod_uids_round_trip_through_cgroup_names() {
        let reached = &Reached::default();
        let qos = prop::sample::select(Qos::ALL.to_vec());
        let driver = prop::sample::select(vec![Driver::Cgroupfs, Driver::Systemd]);
        let uid = prop_oneof!["[a-z0-9_.é ^-]{1,40}", "[a-f0-9-]{1,36}"];
        proptest!(ProptestConfig::with_cases(512), |(uid in uid, qos in qos, driver in driver)| {
            let layout = Layout::new(driver, "/x").unwrap();
            let path = layout.pod(qos, &uid);
            prop_assert_eq!(layout.pod_uid(qos, path.name()), Some(uid.clone()));
            if driver == Driver::Systemd {
                prop_assert_eq!(path.name().matches('-').count() + 1, path.components().len());
            }
            let slices = driver == Driver::Systemd;
            reached.case([
                ("guaranteed", qos == Qos::Guaranteed),
                ("burstable", qos == Qos::Burstable),
                ("best-effort", qos == Qos::BestEffort),
                ("a directory", !slices),
                ("a slice with an escape", slices && path.name().contains('\\')),
                ("a slice without", slices && !path.name().contains('\\')),
            ]);
        });
        // The rarest: "a slice with an escape", in one case of 4.
        reached.assert_each();
    }
}
