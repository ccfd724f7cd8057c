//! Where the files of CSI volumes are, and how volumes and attachments are named (volumes.md §1, §2, §11.4, §11.6).
//!
//! Every path is relative to the agent's root folder and never leads out of the folder that it is for: a driver's name
//! is checked by [`DriverName`], the names of pods and volumes are single path components, and a volume handle, which
//! may contain anything, is only ever part of a hash. The inner name of a volume may contain slashes if it was made from
//! a legacy inline source (volumes.md §12); on disk each is a tilde.

use std::fmt;
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

use crate::names::{escape, is_path_component};

/// The plugin of CSI volumes.
pub const PLUGIN: &str = "kubernetes.io/csi";
/// The same, escaped for use below a pod's folder.
pub const ESCAPED_PLUGIN: &str = "kubernetes.io~csi";
/// The file that says which driver and volume a folder belongs to.
pub const DATA_FILE: &str = "vol_data.json";

/// The folder of the plugin's own files.
const PLUGIN_FOLDER: &str = "plugins/kubernetes.io/csi";
/// The folder of block volumes, next to those of the drivers.
const BLOCK_FOLDER: &str = "volumeDevices";
/// Folders that all block volumes share, next to those of the volumes.
const SHARED_BLOCK_FOLDERS: [&str; 2] = ["staging", "publish"];
/// The longest name of a driver, in bytes.
const MAX_DRIVER_NAME: usize = 63;

/// Why a name cannot be part of a path.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// The API would refuse the driver's name, too.
    #[error(
        "invalid CSI driver name {name:?}: it must be a domain name of at most 63 characters (letters, digits, '-' \
         and '.'), such as csi.example.com"
    )]
    Driver {
        /// The name.
        name: String,
    },
    /// A driver of that name would share the folder of all block volumes.
    #[error(
        "invalid CSI driver name {name:?}: the agent keeps block volumes in a folder of that name; rename the driver"
    )]
    ReservedDriver {
        /// The name.
        name: String,
    },
    /// The name is empty, too long, or more than one path component.
    #[error("invalid {what} {name:?}: it must be a file name of at most 255 bytes")]
    Component {
        /// What has the name.
        what: &'static str,
        /// The name.
        name: String,
    },
    /// A block volume of that name would share the folder of other block volumes.
    #[error(
        "a block volume cannot be called {name:?}: the agent keeps a folder of that name for all block volumes; \
         create the PersistentVolume under another name"
    )]
    ReservedBlockVolume {
        /// The name.
        name: String,
    },
    /// A volume needs a handle.
    #[error("the volume handle is empty: set spec.csi.volumeHandle of the PersistentVolume")]
    EmptyHandle,
}

/// The name of a CSI driver: letters, digits, `-` and `.`, of which each part between dots begins and ends with a letter
/// or digit. So it is a safe path component, does not begin with a dot, and contains neither `/`, `:` nor `^`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DriverName(String);

impl DriverName {
    /// Checks a name as the API does for `spec.csi.driver`.
    pub fn parse(name: &str) -> Result<Self, NameError> {
        let is_label = |label: &str| {
            let bytes = label.as_bytes();
            let ends = [bytes.first(), bytes.last()];
            ends.iter().all(|end| end.is_some_and(u8::is_ascii_alphanumeric))
                && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b'-')
        };
        if name.len() > MAX_DRIVER_NAME || !name.split('.').all(is_label) {
            return Err(NameError::Driver { name: name.to_owned() });
        }
        if name == BLOCK_FOLDER {
            return Err(NameError::ReservedDriver { name: name.to_owned() });
        }
        Ok(Self(name.to_owned()))
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for DriverName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The unique name of a persistent volume (volumes.md §1): one for all pods of the node.
pub fn unique_volume_name(driver: &DriverName, handle: &str) -> String {
    format!("{PLUGIN}/{driver}^{handle}")
}

/// Whether a volume with this unique name may be one of the driver. The name of an inline volume does not say which driver it
/// has.
pub fn may_be_of_driver(volume: &str, driver: &DriverName) -> bool {
    let Some(rest) = volume.strip_prefix(PLUGIN).and_then(|rest| rest.strip_prefix('/')) else {
        return false;
    };
    rest.split_once('^').is_none_or(|(name, _)| name == driver.as_str())
}

/// The name of the VolumeAttachment of a volume on a node (volumes.md §11.4).
pub fn attachment_name(handle: &str, driver: &DriverName, node: &str) -> String {
    format!("csi-{}", sha256_hex(&[handle, driver.as_str(), node]))
}

/// The volume id that a driver gets for an inline volume (volumes.md §11.6). `volume` is `spec.volumes[].name`.
pub fn inline_volume_id(pod_uid: &str, volume: &str) -> String {
    format!("csi-{}", sha256_hex(&[pod_uid, volume]))
}

/// SHA-256 of the concatenated parts, in lower-case hexadecimal digits.
fn sha256_hex(parts: &[&str]) -> String {
    format!("{:x}", Sha256::digest(parts.concat()))
}

/// The paths of a volume that is staged once for all pods of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StagePaths {
    /// The volume's folder, mode 0750.
    pub folder: PathBuf,
    /// Its [`DATA_FILE`].
    pub data_file: PathBuf,
    /// `staging_target_path` of the driver, mode 0750.
    pub staging: PathBuf,
}

/// The paths of a persistent filesystem volume with any handle that is not empty.
pub fn stage_paths(driver: &DriverName, handle: &str) -> Result<StagePaths, NameError> {
    if handle.is_empty() {
        return Err(NameError::EmptyHandle);
    }
    let folder = Path::new(PLUGIN_FOLDER).join(driver.as_str()).join(sha256_hex(&[handle]));
    Ok(StagePaths { data_file: folder.join(DATA_FILE), staging: folder.join("globalmount"), folder })
}

/// Whether a name is that of a folder of [`stage_paths`]: a SHA-256 in lower-case hexadecimal digits.
pub fn is_stage_folder(name: &str) -> bool {
    name.len() == 64 && name.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// The paths of a filesystem volume in a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublishPaths {
    /// The volume's folder, mode 0750.
    pub folder: PathBuf,
    /// Its [`DATA_FILE`].
    pub data_file: PathBuf,
    /// `target_path` of the driver, which creates it.
    pub target: PathBuf,
}

/// The paths of the volume with this inner name in a pod.
pub fn publish_paths(pod_uid: &str, inner_name: &str) -> Result<PublishPaths, NameError> {
    let folder = Path::new("pods")
        .join(pod_component(pod_uid)?)
        .join("volumes")
        .join(ESCAPED_PLUGIN)
        .join(volume_component(inner_name)?);
    Ok(PublishPaths { data_file: folder.join(DATA_FILE), target: folder.join("mount"), folder })
}

/// The paths of a block volume that its pods share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockPaths {
    /// The volume's folder.
    pub folder: PathBuf,
    /// The folder of the data file, mode 0750.
    pub data_folder: PathBuf,
    /// Its [`DATA_FILE`].
    pub data_file: PathBuf,
    /// The global map path: one bind mount of the device for each pod.
    pub device_folder: PathBuf,
    /// `staging_target_path` of the driver.
    pub staging: PathBuf,
    /// The parent of each pod's `target_path`.
    pub publish_folder: PathBuf,
}

/// The paths of the block volume with this inner name.
pub fn block_paths(inner_name: &str) -> Result<BlockPaths, NameError> {
    let name = volume_component(inner_name)?;
    if SHARED_BLOCK_FOLDERS.contains(&name.as_str()) {
        return Err(NameError::ReservedBlockVolume { name });
    }
    let base = Path::new(PLUGIN_FOLDER).join(BLOCK_FOLDER);
    let folder = base.join(&name);
    let data_folder = folder.join("data");
    Ok(BlockPaths {
        data_file: data_folder.join(DATA_FILE),
        data_folder,
        device_folder: folder.join("dev"),
        staging: base.join("staging").join(&name),
        publish_folder: base.join("publish").join(name),
        folder,
    })
}

/// The paths of a block volume for one pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodBlockPaths {
    /// The bind mount of the device, which keeps it from being replaced.
    pub device: PathBuf,
    /// `target_path` of the driver: a file, which the driver creates.
    pub publish: PathBuf,
    /// The symlink to the device that containers get.
    pub link: PathBuf,
}

/// The paths of the block volume with this inner name for a pod.
pub fn pod_block_paths(inner_name: &str, pod_uid: &str) -> Result<PodBlockPaths, NameError> {
    let shared = block_paths(inner_name)?;
    let pod = pod_component(pod_uid)?;
    let link = Path::new("pods")
        .join(pod)
        .join("volumeDevices")
        .join(ESCAPED_PLUGIN)
        .join(volume_component(inner_name)?);
    Ok(PodBlockPaths {
        device: shared.device_folder.join(pod),
        publish: shared.publish_folder.join(pod),
        link,
    })
}

fn pod_component(uid: &str) -> Result<&str, NameError> {
    component("pod UID", uid)
}

fn volume_component(name: &str) -> Result<String, NameError> {
    let escaped = escape(name);
    component("volume name", &escaped)?;
    Ok(escaped)
}

fn component<'a>(what: &'static str, name: &'a str) -> Result<&'a str, NameError> {
    if is_path_component(name) { Ok(name) } else { Err(NameError::Component { what, name: name.to_owned() }) }
}

#[cfg(test)]
mod tests {
    use keelson_testkit::Reached;
    use proptest::prelude::*;

    use super::*;

    /// SHA-256 of `h`, by sha256sum(1).
    const HASH_OF_H: &str = "aaa9402664f1a41f40ebbc52c9993eb66aeb366602958fdfaa283b71e64db123";

    fn driver(name: &str) -> DriverName {
        DriverName::parse(name).unwrap()
    }

    #[test]
    fn a_driver_name_is_a_domain_name_of_at_most_63_characters() {
        let longest = "d".repeat(63);
        for good in ["d", "csi.example.com", "EBS.csi.aws.com", "a-b.c-d", "0.9", longest.as_str()] {
            assert_eq!(driver(good).as_str(), good);
        }
        let too_long = "d".repeat(64);
        let bad = [
            "",
            ".",
            "..",
            ".d",
            "d.",
            "a..b",
            "-d",
            "d-",
            "a.-b",
            "a-.b",
            "a/b",
            "/",
            "a:b",
            "a^b",
            "a~b",
            "a b",
            "a_b",
            "a\0b",
            "a\nb",
            "ä",
            "a\u{212a}b",
        ];
        for name in bad.into_iter().chain([too_long.as_str()]) {
            let error = DriverName::parse(name).unwrap_err();
            assert_eq!(error, NameError::Driver { name: name.to_owned() });
            assert!(error.to_string().contains(&format!("{name:?}")), "{error}");
        }
        assert!(matches!(DriverName::parse("volumeDevices"), Err(NameError::ReservedDriver { .. })));
    }

    #[test]
    fn a_staged_volume_is_found_by_driver_and_hash_of_its_handle() {
        let paths = stage_paths(&driver("csi.example.com"), "h").unwrap();
        let folder = format!("plugins/kubernetes.io/csi/csi.example.com/{HASH_OF_H}");
        assert_eq!(paths.folder, Path::new(&folder));
        assert_eq!(paths.data_file, Path::new(&folder).join("vol_data.json"));
        assert_eq!(paths.staging, Path::new(&folder).join("globalmount"));
        assert_eq!(stage_paths(&driver("d"), ""), Err(NameError::EmptyHandle));
        assert!(is_stage_folder(HASH_OF_H));
        for other in ["", "pv-1", &HASH_OF_H[1..], &HASH_OF_H.to_uppercase(), &format!("{HASH_OF_H}0")] {
            assert!(!is_stage_folder(other), "{other}");
        }
    }

    #[test]
    fn a_published_volume_is_below_its_pod_under_its_inner_name() {
        let paths = publish_paths("uid-1", "pv-1").unwrap();
        let folder = Path::new("pods/uid-1/volumes/kubernetes.io~csi/pv-1");
        assert_eq!(paths.folder, folder);
        assert_eq!(paths.data_file, folder.join("vol_data.json"));
        assert_eq!(paths.target, folder.join("mount"));
    }

    #[test]
    fn a_block_volume_has_the_folders_of_the_kubelet() {
        let base = Path::new("plugins/kubernetes.io/csi/volumeDevices");
        let paths = block_paths("pv-1").unwrap();
        assert_eq!(paths.folder, base.join("pv-1"));
        assert_eq!(paths.data_folder, base.join("pv-1/data"));
        assert_eq!(paths.data_file, base.join("pv-1/data/vol_data.json"));
        assert_eq!(paths.device_folder, base.join("pv-1/dev"));
        assert_eq!(paths.staging, base.join("staging/pv-1"));
        assert_eq!(paths.publish_folder, base.join("publish/pv-1"));
        let pod = pod_block_paths("pv-1", "uid-1").unwrap();
        assert_eq!(pod.device, base.join("pv-1/dev/uid-1"));
        assert_eq!(pod.publish, base.join("publish/pv-1/uid-1"));
        assert_eq!(pod.link, Path::new("pods/uid-1/volumeDevices/kubernetes.io~csi/pv-1"));
    }

    #[test]
    fn a_block_volume_cannot_take_a_folder_that_all_share() {
        for name in ["staging", "publish"] {
            let error = block_paths(name).unwrap_err();
            assert_eq!(error, NameError::ReservedBlockVolume { name: name.to_owned() });
            assert_eq!(pod_block_paths(name, "u").unwrap_err(), error);
            assert!(publish_paths("u", name).is_ok());
        }
        assert!(block_paths("data").is_ok());
    }

    #[test]
    fn a_slash_in_the_name_of_a_volume_is_a_tilde_on_disk() {
        for (name, on_disk) in [
            ("pd.csi-projects/p/zones/z", "pd.csi-projects~p~zones~z"),
            ("../../etc", "..~..~etc"),
            ("/etc", "~etc"),
            ("/", "~"),
        ] {
            let folder = publish_paths("u", name).unwrap().folder;
            assert_eq!(folder, Path::new("pods/u/volumes/kubernetes.io~csi").join(on_disk));
            let block = block_paths(name).unwrap();
            assert!(block.folder.ends_with(Path::new("volumeDevices").join(on_disk)), "{block:?}");
            assert!(block.staging.ends_with(Path::new("staging").join(on_disk)), "{block:?}");
            let link = pod_block_paths(name, "u").unwrap().link;
            assert_eq!(link, Path::new("pods/u/volumeDevices/kubernetes.io~csi").join(on_disk));
        }
    }

    #[test]
    fn names_that_are_no_single_path_component_are_refused() {
        let too_long = "x".repeat(256);
        let refused = |what| move |name: &str| Err(NameError::Component { what, name: name.to_owned() });
        let (pod, volume) = (refused("pod UID"), refused("volume name"));
        for bad in ["", ".", "..", "a\0b", too_long.as_str()] {
            assert_eq!(publish_paths("u", bad).map(|_| ()), volume(bad));
            assert_eq!(block_paths(bad).map(|_| ()), volume(bad));
            assert_eq!(pod_block_paths(bad, "u").map(|_| ()), volume(bad));
        }
        for bad in ["", ".", "..", "a\0b", "a/b", "/etc", "../u", too_long.as_str()] {
            assert_eq!(publish_paths(bad, "v").map(|_| ()), pod(bad));
            assert_eq!(pod_block_paths("v", bad).map(|_| ()), pod(bad));
        }
        assert!(publish_paths("u", &too_long[1..]).is_ok());
    }

    #[test]
    fn attachments_and_inline_volumes_are_named_by_the_kubelets_hashes() {
        // printf %s handlecsi.example.comnode-1 | sha256sum
        let attachment = "csi-b31aaefd63d243dc8d2e9ebd87637fc0e40493f1c517ae9f7441e248e0af573f";
        assert_eq!(attachment_name("handle", &driver("csi.example.com"), "node-1"), attachment);
        // printf %s 11111111-2222-3333-4444-555555555555scratch | sha256sum
        let id = "csi-a46bec53679aafe7e6bc42077f33be9e5c533643ed1224b3bfbf2dd627bbf53c";
        assert_eq!(inline_volume_id("11111111-2222-3333-4444-555555555555", "scratch"), id);
    }

    #[test]
    fn the_unique_name_joins_driver_and_handle_by_a_caret() {
        let name = unique_volume_name(&driver("csi.example.com"), "projects/p/disks/d");
        assert_eq!(name, "kubernetes.io/csi/csi.example.com^projects/p/disks/d");
    }

    #[test]
    fn no_handle_leads_out_of_the_drivers_folder_and_no_two_share_one() {
        let reached = &Reached::default();
        let handle = || {
            prop_oneof![
                2 => "[a-z]{1,8}",
                1 => "(\\.\\./){1,4}etc",
                1 => "/[a-z/]{0,8}",
                1 => "[a-z]{0,3}\0[a-z]{0,3}",
                1 => "\\PC{1,300}",
            ]
        };
        let driver = driver("d.io");
        proptest!(ProptestConfig::with_cases(512), |(a in handle(), b in handle())| {
            let (first, second) = (stage_paths(&driver, &a).unwrap(), stage_paths(&driver, &b).unwrap());
            prop_assert_eq!(first == second, a == b);
            for (handle, paths) in [(&a, first), (&b, second)] {
                let base = Path::new("plugins/kubernetes.io/csi/d.io");
                let rest = paths.folder.strip_prefix(base).unwrap().to_str().unwrap().to_owned();
                prop_assert!(rest.len() == 64 && rest.bytes().all(|byte| byte.is_ascii_hexdigit()), "{rest}");
                reached.case([
                    ("a slash", handle.contains('/')),
                    ("a way up", handle.contains("../")),
                    ("a zero byte", handle.contains('\0')),
                    ("longer than a file name", handle.len() > 255),
                ]);
            }
        });
        // The rarest: "longer than a file name", in about one handle of 10.
        reached.assert_each();
    }

    #[test]
    fn every_accepted_driver_name_is_a_safe_path_component() {
        let reached = &Reached::default();
        let name = prop_oneof!["[a-zA-Z0-9./:^~-]{0,8}", "[a-z]{1,4}(\\.[a-z0-9-]{0,4}){0,2}"];
        proptest!(ProptestConfig::with_cases(1024), |(name in name)| {
            let parsed = DriverName::parse(&name);
            if parsed.is_ok() {
                prop_assert!(is_path_component(&name) && !name.starts_with('.'));
                prop_assert!(!name.contains(['/', ':', '^', '~']) && !name.contains(".."));
            }
            reached.case([
                ("accepted with a dot", parsed.is_ok() && name.contains('.')),
                ("refused", parsed.is_err()),
            ]);
        });
        // The rarest: "accepted with a dot", in about one case of 25.
        reached.assert_each();
    }

    #[test]
    fn the_driver_of_a_volume_is_in_its_name_unless_it_is_an_inline_one() {
        let driver = DriverName::parse("d.io").unwrap();
        for (volume, expected) in [
            ("kubernetes.io/csi/d.io^handle", true),
            ("kubernetes.io/csi/d.io^a^b", true),
            ("kubernetes.io/csi/other^d.io", false),
            ("kubernetes.io/csi/u1-data", true),
            ("kubernetes.io/nfs/u1-data", false),
            ("kubernetes.io/csi2/d.io^handle", false),
        ] {
            assert_eq!(may_be_of_driver(volume, &driver), expected, "{volume}");
        }
    }
}
