//! The global folders of iscsi disks (volumes.md §2, §3.16, §10.4).

use crate::global_folder::Tree;
use crate::iscsi::disk::{Disk, TARGET_TYPES, name_of};
use crate::iscsi::portal;

/// The plugin's folder, relative to the agent's root folder.
const ROOT: &str = "plugins/kubernetes.io/iscsi/";
/// The folder of block maps in the plugin's folder.
const BLOCK: &str = "volumeDevices/";
/// What the name of an interface's folder begins with.
const INTERFACE: &str = "iface-";

/// Why a folder does not name a disk.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FolderError {
    /// The path is not one of a disk.
    #[error("{path} is not the global folder of an iscsi disk: {problem}")]
    NotADisk {
        /// The path.
        path: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// None of the mounts is the device mount.
    #[error(
        "iscsi volume {volume}: none of the {count} other mounts of its device is a global mount of the plugin"
    )]
    NoGlobalMount {
        /// The volume's inner name.
        volume: String,
        /// How many mounts there are.
        count: usize,
    },
}

/// The global folder of a disk.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct GlobalFolder {
    /// Its tree.
    pub tree: Tree,
    /// The interface of the disk's sessions.
    pub interface: String,
    /// The first portal.
    pub portal: String,
    /// The target's name.
    pub iqn: String,
    /// The number of the disk at the target.
    pub lun: u8,
}

impl GlobalFolder {
    /// The folder of `disk`.
    pub fn of(disk: &Disk, tree: Tree) -> Self {
        Self {
            tree,
            interface: disk.interface(),
            portal: disk.first_portal().to_owned(),
            iqn: disk.iqn().to_owned(),
            lun: disk.lun(),
        }
    }

    /// The name of the interface's folder.
    pub fn interface_folder(&self) -> String {
        format!("{INTERFACE}{}", self.interface)
    }

    /// The name of the folder in the interface's folder.
    pub fn name(&self) -> String {
        format!("{}-{}-lun-{}", self.portal, self.iqn, self.lun)
    }

    /// The path, relative to the agent's root folder.
    pub fn path(&self) -> String {
        let block = match self.tree {
            Tree::Mounts => "",
            Tree::BlockMaps => BLOCK,
        };
        format!("{ROOT}{block}{}/{}", self.interface_folder(), self.name())
    }

    /// Reads a path back. What precedes the plugin's folder does not matter, because a mount is visible through other
    /// prefixes, too.
    ///
    /// Parity: the kubelet ends the portal at the first `-`, and so misreads a host name that contains one.
    pub fn parse(path: &str) -> Result<Self, FolderError> {
        let refuse = |problem| FolderError::NotADisk { path: path.to_owned(), problem };
        let inside = path
            .rmatch_indices(ROOT)
            .find(|(start, _)| *start == 0 || path[..*start].ends_with('/'))
            .map(|(start, _)| &path[start + ROOT.len()..])
            .ok_or_else(|| refuse("it is not in the plugin's folder"))?;
        let (tree, inside) = match inside.strip_prefix(BLOCK) {
            Some(inside) => (Tree::BlockMaps, inside),
            None => (Tree::Mounts, inside),
        };
        let (folder, name) =
            inside.split_once('/').ok_or_else(|| refuse("it is not in an interface's folder"))?;
        let interface = folder
            .strip_prefix(INTERFACE)
            .filter(|interface| !interface.is_empty())
            .ok_or_else(|| refuse("it is not in an interface's folder"))?;
        let (portal, iqn, lun) = parse_name(name).map_err(refuse)?;
        Ok(Self {
            tree,
            interface: interface.to_owned(),
            portal: portal.to_owned(),
            iqn: iqn.to_owned(),
            lun,
        })
    }

    /// The unique volume names that the volume in this folder may have in the API, where its portal may be written
    /// without the default port.
    ///
    /// Parity: the kubelet reconstructs the name with the port alone.
    pub fn unique_names(&self) -> Vec<String> {
        let lun = self.lun.to_string();
        portal::api_spellings(&self.portal).iter().map(|portal| name_of(portal, &self.iqn, &lun)).collect()
    }
}

/// The device mount among the mount references of a pod's mount of `volume`.
pub fn global_mount(volume: &str, references: &[&str]) -> Result<GlobalFolder, FolderError> {
    references
        .iter()
        .filter_map(|path| GlobalFolder::parse(path).ok())
        .find(|folder| folder.tree == Tree::Mounts)
        .ok_or_else(|| FolderError::NoGlobalMount { volume: volume.to_owned(), count: references.len() })
}

/// The portal, target and LUN in a folder's name.
pub(super) fn parse_name(name: &str) -> Result<(&str, &str, u8), &'static str> {
    if name.contains('/') {
        return Err("its name contains a slash");
    }
    let (target, lun) = name.rsplit_once("-lun-").ok_or("its name has no LUN")?;
    let number: u8 = lun.parse().map_err(|_| "its LUN is not between 0 and 255")?;
    if number.to_string() != lun {
        return Err("its LUN is not written as a plain number");
    }
    let (portal, iqn) = split_target(target).ok_or("its name has no portal or no target")?;
    Ok((portal, iqn, number))
}

/// Splits `<portal>-<iqn>`. Either part may contain what separates them; a portal that ends with a port decides.
fn split_target(text: &str) -> Option<(&str, &str)> {
    let splits: Vec<(&str, &str)> = text
        .match_indices('-')
        .map(|(at, _)| (&text[..at], &text[at + 1..]))
        .filter(|(portal, iqn)| {
            !portal.is_empty()
                && TARGET_TYPES.iter().any(|kind| iqn.len() > kind.len() && iqn.starts_with(kind))
        })
        .collect();
    splits.iter().find(|(portal, _)| ends_with_port(portal)).or_else(|| splits.first()).copied()
}

/// Whether a portal is a host or an IPv6 address in brackets, and a port.
fn ends_with_port(portal: &str) -> bool {
    portal.rsplit_once(':').is_some_and(|(host, port)| {
        let is_host = !host.contains(':') || (host.starts_with('[') && host.ends_with(']'));
        is_host && !port.is_empty() && port.bytes().all(|digit| digit.is_ascii_digit())
    })
}

#[cfg(test)]
mod tests {
    use keelson_testkit::Reached;
    use proptest::prelude::*;

    use super::*;
    use crate::sources::IscsiSource;

    const IQN: &str = "iqn.2001-04.com.example:storage.disk1";

    fn folder(tree: Tree, interface: &str, portal: &str, iqn: &str, lun: u8) -> GlobalFolder {
        GlobalFolder { tree, interface: interface.into(), portal: portal.into(), iqn: iqn.into(), lun }
    }

    #[test]
    fn global_folders_have_the_kubelets_names() {
        let source = IscsiSource {
            target_portal: "192.168.0.10".into(),
            iqn: IQN.into(),
            lun: 7,
            ..IscsiSource::default()
        };
        let disk = Disk::new("pv", &source).unwrap();
        let name = "iface-default/192.168.0.10:3260-iqn.2001-04.com.example:storage.disk1-lun-7";
        let path = GlobalFolder::of(&disk, Tree::Mounts).path();
        assert_eq!(path, format!("plugins/kubernetes.io/iscsi/{name}"));
        assert_eq!(path, format!("{ROOT}{}/{}", disk.interface_folder(), disk.folder()));
        let path = GlobalFolder::of(&disk, Tree::BlockMaps).path();
        assert_eq!(path, format!("plugins/kubernetes.io/iscsi/volumeDevices/{name}"));
    }

    #[test]
    fn a_path_is_read_back_through_every_prefix() {
        let expected = folder(Tree::Mounts, "default", "10.0.0.1:3260", IQN, 1);
        for prefix in ["", "/var/lib/kubelet/", "/host/plugins/kubernetes.io/iscsi/x/", "/"] {
            assert_eq!(GlobalFolder::parse(&format!("{prefix}{}", expected.path())), Ok(expected.clone()));
        }
    }

    #[test]
    fn a_dash_or_a_target_type_in_a_host_name_does_not_end_the_portal() {
        for portal in
            ["san-1.example.com:3260", "san-iqn.example.com:860", "[fd00::1]:3260", "fd00::1", "fd00::ab"]
        {
            for iqn in
                [IQN, "eui.02004567A425678D", "iqn.2001-04.com.example:a-lun-3", "iqn.2001-04.a:b:1-iqn.x"]
            {
                let expected = folder(Tree::BlockMaps, "10.0.0.1:3260:pv", portal, iqn, 255);
                assert_eq!(GlobalFolder::parse(&expected.path()), Ok(expected));
            }
        }
    }

    #[test]
    fn a_path_that_names_no_disk_is_refused_with_the_reason() {
        for (path, problem) in [
            ("", "not in the plugin's folder"),
            ("/var/lib/kubelet/plugins/kubernetes.io/fc/x-lun-1", "not in the plugin's folder"),
            ("/xplugins/kubernetes.io/iscsi/iface-a/b-iqn.c-lun-1", "not in the plugin's folder"),
            ("plugins/kubernetes.io/iscsi/iface-a", "not in an interface's folder"),
            ("plugins/kubernetes.io/iscsi/a/b-iqn.c-lun-1", "not in an interface's folder"),
            ("plugins/kubernetes.io/iscsi/iface-/b-iqn.c-lun-1", "not in an interface's folder"),
            ("plugins/kubernetes.io/iscsi/iface-a/b-iqn.c-lun-1/uid", "contains a slash"),
            ("plugins/kubernetes.io/iscsi/iface-a/b-iqn.c", "has no LUN"),
            ("plugins/kubernetes.io/iscsi/iface-a/b-iqn.c-lun-256", "LUN is not between 0 and 255"),
            ("plugins/kubernetes.io/iscsi/iface-a/b-iqn.c-lun-x", "LUN is not between 0 and 255"),
            ("plugins/kubernetes.io/iscsi/iface-a/b-iqn.c-lun-01", "LUN is not written as a plain number"),
            ("plugins/kubernetes.io/iscsi/iface-a/b-iqn.c-lun-+1", "LUN is not written as a plain number"),
            ("plugins/kubernetes.io/iscsi/iface-a/b-c-lun-1", "no portal or no target"),
            ("plugins/kubernetes.io/iscsi/iface-a/-iqn.c-lun-1", "no portal or no target"),
            ("plugins/kubernetes.io/iscsi/iface-a/b-iqn.-lun-1", "no portal or no target"),
        ] {
            let text = GlobalFolder::parse(path).unwrap_err().to_string();
            assert!(text.contains(problem) && text.starts_with(path), "{path}: {text}");
        }
    }

    #[test]
    fn only_a_device_mount_is_the_global_mount_of_a_pods_mount() {
        let mounts = folder(Tree::Mounts, "default", "10.0.0.1:3260", IQN, 1);
        let block = folder(Tree::BlockMaps, "default", "10.0.0.1:3260", IQN, 1).path();
        let path = format!("/var/lib/kubelet/{}", mounts.path());
        assert_eq!(global_mount("v", &["/mnt", &block, &path]), Ok(mounts));
        let text = global_mount("v", &["/mnt", &block]).unwrap_err().to_string();
        assert!(text.contains("iscsi volume v: none of the 2 other mounts"), "{text}");
    }

    #[test]
    fn a_folder_has_the_unique_names_of_both_spellings_of_its_portal() {
        let names = folder(Tree::Mounts, "default", "10.0.0.1:3260", IQN, 1).unique_names();
        let expected = ["10.0.0.1:3260", "10.0.0.1"].map(|p| format!("kubernetes.io/iscsi/{p}:{IQN}:1"));
        assert_eq!(names, expected);
        assert_eq!(folder(Tree::Mounts, "default", "10.0.0.1:1", IQN, 1).unique_names().len(), 1);
    }

    #[test]
    fn every_disk_is_found_again_from_its_folder() {
        let reached = &Reached::default();
        let portal = "([a-z0-9-]{1,8}\\.){0,2}[a-z0-9-]{1,8}(:[0-9]{1,5})?";
        let iqn = "(iqn|eui|naa)\\.[a-z0-9.:-]{1,24}";
        proptest!(ProptestConfig::with_cases(1024), |(
            portal in portal, iqn in iqn, lun in any::<u8>(), initiator in any::<bool>(), block in any::<bool>(),
        )| {
            let source = IscsiSource {
                target_portal: portal.clone(),
                iqn,
                lun: i64::from(lun),
                initiator_name: if initiator { "iqn.me".into() } else { String::new() },
                ..IscsiSource::default()
            };
            let disk = Disk::new("pv", &source).expect("safe names");
            let tree = if block { Tree::BlockMaps } else { Tree::Mounts };
            let folder = GlobalFolder::of(&disk, tree);
            prop_assert_eq!(GlobalFolder::parse(&folder.path()), Ok(folder.clone()));
            let is_default = portal.ends_with(":3260") || !portal.contains(':');
            prop_assert_eq!(folder.unique_names().len(), if is_default { 2 } else { 1 });
            prop_assert!(folder.unique_names().contains(&crate::iscsi::disk::unique_name(&source)));
            reached.case([
                ("a portal with a dash", portal.contains('-')),
                ("a portal without a port", !portal.contains(':')),
                ("a portal with a port", portal.contains(':')),
                ("a target with a dash", disk.iqn().contains('-')),
                ("an interface of its own", initiator),
                ("block maps", block),
                ("a mount", !block),
            ]);
        });
        // The rarest: "a portal with a dash", in one case of 5.
        reached.assert_each();
    }
}
