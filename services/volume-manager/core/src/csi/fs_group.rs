//! Who applies fsGroup to a CSI volume (volumes.md §11.6).

use super::CsiDriver;

/// `fsGroupPolicy` of a CSIDriver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FsGroupPolicy {
    /// `None`: nobody changes the files.
    None,
    /// `File`: the agent always does.
    File,
    /// `ReadWriteOnceWithFSType`: the agent does if only one node writes and the filesystem's type is known.
    ReadWriteOnceWithFsType,
}

impl FsGroupPolicy {
    /// The policy of a driver; without a CSIDriver, or if it sets none, [`FsGroupPolicy::ReadWriteOnceWithFsType`].
    pub fn of(driver: Option<&CsiDriver>) -> Result<Self, UnknownFsGroupPolicy> {
        let Some(driver) = driver else { return Ok(Self::ReadWriteOnceWithFsType) };
        match driver.spec.fs_group_policy.as_deref() {
            None | Some("ReadWriteOnceWithFSType") => Ok(Self::ReadWriteOnceWithFsType),
            Some("File") => Ok(Self::File),
            Some("None") => Ok(Self::None),
            Some(other) => {
                Err(UnknownFsGroupPolicy { driver: driver.metadata.name.clone(), policy: other.to_owned() })
            }
        }
    }
}

/// A CSIDriver has a policy that the API does not know.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the CSIDriver {driver} has the unknown fsGroupPolicy {policy:?}; set it to None, File or ReadWriteOnceWithFSType"
)]
pub struct UnknownFsGroupPolicy {
    /// The driver.
    pub driver: String,
    /// The policy as written.
    pub policy: String,
}

/// A filesystem volume that is being published to a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PublishedVolume<'a> {
    /// `fsType` of the volume's CSI source; empty if it sets none.
    pub fs_type: &'a str,
    /// The pod gets it read-only.
    pub read_only: bool,
    /// `accessModes` of the PersistentVolume; `None` for an inline volume.
    pub access_modes: Option<&'a [String]>,
}

/// Who applies fsGroup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FsGroupAction {
    /// Nobody.
    Skip(SkipReason),
    /// The driver does: pass this gid in the volume capability.
    Delegate(u32),
    /// The agent does, after the volume was published: change the ownership of its files to this gid.
    Walk(u32),
}

/// Why nobody applies fsGroup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SkipReason {
    /// The pod has no fsGroup.
    NotRequested,
    /// The driver's policy is `None`.
    PolicyNone,
    /// The volume is read-only.
    ReadOnly,
    /// The policy needs a filesystem type, and the volume has none.
    NoFsType,
    /// The policy needs ReadWriteOnce or ReadWriteOncePod among the access modes.
    SharedByNodes,
}

/// Decides who applies fsGroup. `mount_group` is the driver's capability VOLUME_MOUNT_GROUP: such a driver always does
/// it itself, whatever the policy says.
pub fn fs_group_action(
    fs_group: Option<u32>,
    mount_group: bool,
    driver: Option<&CsiDriver>,
    volume: PublishedVolume<'_>,
) -> Result<FsGroupAction, UnknownFsGroupPolicy> {
    let Some(gid) = fs_group else { return Ok(FsGroupAction::Skip(SkipReason::NotRequested)) };
    if mount_group {
        return Ok(FsGroupAction::Delegate(gid));
    }
    let policy = FsGroupPolicy::of(driver)?;
    Ok(match skip_reason(policy, volume) {
        Some(reason) => FsGroupAction::Skip(reason),
        None => FsGroupAction::Walk(gid),
    })
}

fn skip_reason(policy: FsGroupPolicy, volume: PublishedVolume<'_>) -> Option<SkipReason> {
    let has_single_writer = volume.access_modes.is_none_or(|modes| {
        modes.iter().any(|mode| matches!(mode.as_str(), "ReadWriteOnce" | "ReadWriteOncePod"))
    });
    match policy {
        FsGroupPolicy::None => Some(SkipReason::PolicyNone),
        _ if volume.read_only => Some(SkipReason::ReadOnly),
        FsGroupPolicy::File => None,
        FsGroupPolicy::ReadWriteOnceWithFsType if volume.fs_type.is_empty() => Some(SkipReason::NoFsType),
        FsGroupPolicy::ReadWriteOnceWithFsType if !has_single_writer => Some(SkipReason::SharedByNodes),
        FsGroupPolicy::ReadWriteOnceWithFsType => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const GID: u32 = 2000;

    fn driver(policy: Option<&str>) -> CsiDriver {
        let object = json!({"metadata": {"name": "d.io"}, "spec": {"fsGroupPolicy": policy}});
        serde_json::from_value(object).unwrap()
    }

    fn decide(policy: Option<&str>, volume: PublishedVolume<'_>) -> FsGroupAction {
        fs_group_action(Some(GID), false, Some(&driver(policy)), volume).unwrap()
    }

    fn modes(modes: &[&str]) -> Vec<String> {
        modes.iter().map(|mode| (*mode).to_owned()).collect()
    }

    #[test]
    fn the_policy_type_and_access_modes_decide_whether_the_agent_walks() {
        use SkipReason::{NoFsType, PolicyNone, ReadOnly, SharedByNodes};
        let (once, pod, many) = (
            modes(&["ReadWriteOnce"]),
            modes(&["ReadOnlyMany", "ReadWriteOncePod"]),
            modes(&["ReadWriteMany"]),
        );
        let none = modes(&[]);
        let typed = "ReadWriteOnceWithFSType";
        for (policy, fs_type, read_only, access_modes, skipped) in [
            ("None", "ext4", false, Some(&once), Some(PolicyNone)),
            ("None", "ext4", true, Some(&once), Some(PolicyNone)),
            ("File", "ext4", false, Some(&once), None),
            ("File", "", false, Some(&many), None),
            ("File", "", false, None, None),
            ("File", "ext4", true, Some(&once), Some(ReadOnly)),
            (typed, "ext4", false, Some(&once), None),
            (typed, "ext4", false, Some(&pod), None),
            (typed, "ext4", false, Some(&many), Some(SharedByNodes)),
            (typed, "ext4", false, Some(&none), Some(SharedByNodes)),
            (typed, "", false, Some(&once), Some(NoFsType)),
            (typed, "ext4", true, Some(&once), Some(ReadOnly)),
            (typed, "ext4", false, None, None),
            (typed, "", false, None, Some(NoFsType)),
            (typed, "ext4", true, None, Some(ReadOnly)),
        ] {
            let volume =
                PublishedVolume { fs_type, read_only, access_modes: access_modes.map(Vec::as_slice) };
            let expected = skipped.map_or(FsGroupAction::Walk(GID), FsGroupAction::Skip);
            assert_eq!(decide(Some(policy), volume), expected, "{policy} {volume:?}");
        }
    }

    #[test]
    fn without_a_csi_driver_or_policy_the_default_policy_counts() {
        assert_eq!(FsGroupPolicy::of(None), Ok(FsGroupPolicy::ReadWriteOnceWithFsType));
        assert_eq!(FsGroupPolicy::of(Some(&driver(None))), Ok(FsGroupPolicy::ReadWriteOnceWithFsType));
        let once = modes(&["ReadWriteOnce"]);
        let volume = PublishedVolume { fs_type: "", read_only: false, access_modes: Some(&once) };
        let result = fs_group_action(Some(GID), false, None, volume);
        assert_eq!(result, Ok(FsGroupAction::Skip(SkipReason::NoFsType)));
    }

    #[test]
    fn a_driver_with_mount_group_gets_the_gid_whatever_the_policy_says() {
        for policy in [Some("None"), Some("File"), None, Some("Sometimes")] {
            for read_only in [false, true] {
                let volume = PublishedVolume { fs_type: "", read_only, access_modes: Some(&[]) };
                let result = fs_group_action(Some(GID), true, Some(&driver(policy)), volume);
                assert_eq!(result, Ok(FsGroupAction::Delegate(GID)), "{policy:?}");
            }
        }
    }

    #[test]
    fn a_pod_without_fs_group_changes_nothing() {
        let volume = PublishedVolume { fs_type: "ext4", read_only: false, access_modes: None };
        for mount_group in [false, true] {
            let result = fs_group_action(None, mount_group, Some(&driver(Some("File"))), volume);
            assert_eq!(result, Ok(FsGroupAction::Skip(SkipReason::NotRequested)));
        }
        let root = fs_group_action(Some(0), false, Some(&driver(Some("File"))), volume);
        assert_eq!(root, Ok(FsGroupAction::Walk(0)));
    }

    #[test]
    fn an_unknown_policy_is_an_error_that_names_driver_and_policy() {
        let volume = PublishedVolume { fs_type: "ext4", read_only: false, access_modes: None };
        for policy in ["", "file", "Sometimes"] {
            let error = fs_group_action(Some(GID), false, Some(&driver(Some(policy))), volume).unwrap_err();
            let text = error.to_string();
            assert!(text.contains("CSIDriver d.io") && text.contains(&format!("{policy:?}")), "{text}");
        }
    }
}
