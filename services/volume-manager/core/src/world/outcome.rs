//! What an error of a set-up means for the state of a volume (volumes.md §3.12), and the steps of a mount (§3.9).

use std::fmt;

/// Whether something of a set-up that failed may exist or still happen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum FailureClass {
    /// Nothing is left in progress. Every error that is not classified.
    #[default]
    Final,
    /// It may be in progress still, or done.
    Uncertain,
    /// It was not started; the next attempt may succeed.
    Transient,
}

/// The state of the device that all pods of a volume share.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DeviceState {
    /// Not mounted.
    #[default]
    NotMounted,
    /// Mounted at the volume's global path.
    GloballyMounted,
    /// Mounted or not: it must be mounted before it is used, and unmounted before it is given up.
    Uncertain,
}

/// The state of a volume for a pod that has (possibly) mounted it. A pod without a state has not mounted it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PodState {
    /// The pod's containers can use it.
    Mounted,
    /// Mounted or not: it must be set up before it is used, and torn down before it is given up.
    Uncertain,
}

/// The state of a volume for a pod after a set-up that failed (volumes.md §3.12).
///
/// `owes_teardown`: an earlier set-up has succeeded, or the volume was found at startup, and no teardown has succeeded
/// since. A final error says only that this attempt has left nothing, so the volume stays uncertain then.
///
/// Parity: kubelet 1.36 asks only whether the volume was found at startup. A volume that is set up again after a failed
/// teardown is then forgotten with the first final error, and its mount stays for ever.
pub const fn pod_after_failure(
    before: Option<PodState>,
    class: FailureClass,
    owes_teardown: bool,
) -> Option<PodState> {
    match (before, class) {
        (Some(PodState::Mounted), _) => Some(PodState::Mounted),
        (None, FailureClass::Final | FailureClass::Transient) => None,
        (Some(PodState::Uncertain), FailureClass::Final) if !owes_teardown => None,
        (Some(PodState::Uncertain), FailureClass::Final | FailureClass::Transient)
        | (_, FailureClass::Uncertain) => Some(PodState::Uncertain),
    }
}

/// The state of the shared device after a mount that failed: the same table as [`pod_after_failure`].
pub const fn device_after_failure(
    before: DeviceState,
    class: FailureClass,
    owes_unmount: bool,
) -> DeviceState {
    match (before, class) {
        (DeviceState::GloballyMounted, _) => DeviceState::GloballyMounted,
        (DeviceState::NotMounted, FailureClass::Final | FailureClass::Transient) => DeviceState::NotMounted,
        (DeviceState::Uncertain, FailureClass::Final) if !owes_unmount => DeviceState::NotMounted,
        (DeviceState::Uncertain, FailureClass::Final | FailureClass::Transient)
        | (_, FailureClass::Uncertain) => DeviceState::Uncertain,
    }
}

/// The steps of the mount of a filesystem volume, in their order (volumes.md §3.9). The checks before
/// [`MountStep::WaitForAttach`] are made before each attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum MountStep {
    /// Find the one plugin of the volume.
    FindPlugin,
    /// Compare the PersistentVolume's node affinity with the node's labels.
    NodeAffinity,
    /// Check the volume's own fields.
    NewMounter,
    /// Check that the plugin supports mount options, if the PersistentVolume has some.
    MountOptions,
    /// Check that no other pod uses a ReadWriteOncePod volume.
    AccessMode,
    /// Learn the device's path.
    WaitForAttach,
    /// Mount the shared device.
    MountDevice,
    /// Set the volume up for the pod.
    SetUp,
    /// Map the device for the pod: volumes of the mode `Block` only.
    MapDevice,
    /// Grow the volume if its claim is smaller than the PersistentVolume.
    Expansion,
}

impl MountStep {
    /// Every step, in the order in which they are taken.
    pub const ALL: [Self; 10] = [
        Self::FindPlugin,
        Self::NodeAffinity,
        Self::NewMounter,
        Self::MountOptions,
        Self::AccessMode,
        Self::WaitForAttach,
        Self::MountDevice,
        Self::SetUp,
        Self::MapDevice,
        Self::Expansion,
    ];

    /// The text of the event `FailedMount` for the volume with this inner name.
    pub fn failure(self, inner_name: &str, cause: &str) -> String {
        format!("MountVolume.{self} for volume \"{inner_name}\" : {cause}")
    }

    /// Reason and text of the event for a volume of the mode `Block` (volumes.md §3.10).
    pub fn map_failure(self, inner_name: &str, cause: &str) -> (&'static str, String) {
        let (reason, what) = match self {
            Self::FindPlugin => ("FailedMapVolume", "FindMapperPluginBySpec failed"),
            Self::NodeAffinity => ("FailedMount", "NodeAffinity check failed"),
            Self::NewMounter | Self::MountOptions => {
                ("FailedMapVolume", "BlockVolumeMapper initialization failed")
            }
            Self::WaitForAttach => ("FailedMapVolume", "WaitForAttach failed"),
            Self::MountDevice => ("FailedMapVolume", "SetUpDevice failed"),
            Self::AccessMode | Self::SetUp => ("FailedMapVolume", "MapPodDevice failed"),
            Self::MapDevice => ("FailedMapVolume", "MapBlockVolume failed"),
            Self::Expansion => ("FailedMapVolume", "MarkVolumeAsMounted failed while expanding volume"),
        };
        (reason, format!("MapVolume.{what} for volume \"{inner_name}\" : {cause}"))
    }
}

/// The texts of the two events `SuccessfulMountVolume` of a volume of the mode `Block` (volumes.md §3.10). `global_map_path`
/// has a bind mount of the device per pod, `pod_map_path` the link of the pod.
pub fn mapped_texts(inner_name: &str, global_map_path: &str, pod_map_path: &str) -> [String; 2] {
    let text = |what: &str, path: &str| {
        format!("MapVolume.MapPodDevice succeeded for volume {inner_name:?} {what} {path:?}")
    };
    [text("globalMapPath", global_map_path), text("volumeMapPath", pod_map_path)]
}

/// What has failed, as the kubelet writes it.
impl fmt::Display for MountStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::FindPlugin => "FindPluginBySpec failed",
            Self::NodeAffinity => "NodeAffinity check failed",
            Self::NewMounter => "NewMounter initialization failed",
            Self::MountOptions => "MountOptionSupport check failed",
            Self::WaitForAttach => "WaitForAttach failed",
            Self::MountDevice => "MountDevice failed",
            Self::AccessMode | Self::SetUp | Self::MapDevice => "SetUp failed",
            Self::Expansion => "Setup failed while expanding volume",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_set_up_changes_the_pods_state_by_the_table() {
        use FailureClass::{Final, Transient, Uncertain};
        use PodState::{Mounted, Uncertain as Unsure};
        for (before, class, owes, after) in [
            (None, Final, false, None),
            (None, Uncertain, false, Some(Unsure)),
            (None, Transient, false, None),
            (Some(Unsure), Final, false, None),
            (Some(Unsure), Final, true, Some(Unsure)),
            (Some(Unsure), Uncertain, false, Some(Unsure)),
            (Some(Unsure), Uncertain, true, Some(Unsure)),
            (Some(Unsure), Transient, false, Some(Unsure)),
            (Some(Unsure), Transient, true, Some(Unsure)),
            (Some(Mounted), Final, true, Some(Mounted)),
            (Some(Mounted), Uncertain, true, Some(Mounted)),
            (Some(Mounted), Transient, true, Some(Mounted)),
        ] {
            assert_eq!(pod_after_failure(before, class, owes), after, "{before:?} {class:?} {owes}");
        }
    }

    #[test]
    fn a_failed_device_mount_changes_the_devices_state_by_the_table() {
        use DeviceState::{GloballyMounted, NotMounted, Uncertain as Unsure};
        use FailureClass::{Final, Transient, Uncertain};
        for (before, class, owes, after) in [
            (NotMounted, Final, false, NotMounted),
            (NotMounted, Uncertain, false, Unsure),
            (NotMounted, Transient, false, NotMounted),
            (Unsure, Final, false, NotMounted),
            (Unsure, Final, true, Unsure),
            (Unsure, Uncertain, false, Unsure),
            (Unsure, Transient, false, Unsure),
            (Unsure, Transient, true, Unsure),
            (GloballyMounted, Final, true, GloballyMounted),
            (GloballyMounted, Uncertain, true, GloballyMounted),
            (GloballyMounted, Transient, true, GloballyMounted),
        ] {
            assert_eq!(device_after_failure(before, class, owes), after, "{before:?} {class:?} {owes}");
        }
    }

    #[test]
    fn an_error_without_a_class_is_final() {
        assert_eq!(FailureClass::default(), FailureClass::Final);
    }

    #[test]
    fn the_steps_of_a_mount_are_in_order_and_named_in_the_event() {
        assert!(MountStep::ALL.is_sorted());
        assert_eq!(
            MountStep::SetUp.failure("data", "exit status 32"),
            "MountVolume.SetUp failed for volume \"data\" : exit status 32"
        );
        for (step, name) in [
            (MountStep::NodeAffinity, "MountVolume.NodeAffinity check failed"),
            (MountStep::NewMounter, "MountVolume.NewMounter initialization failed"),
            (MountStep::MountDevice, "MountVolume.MountDevice failed for volume"),
            (MountStep::AccessMode, "MountVolume.SetUp failed for volume"),
            (MountStep::Expansion, "MountVolume.Setup failed while expanding volume for volume \"v\" : c"),
        ] {
            assert!(step.failure("v", "c").starts_with(name), "{step}");
        }
    }

    #[test]
    fn the_steps_of_a_map_are_named_in_its_events() {
        for step in MountStep::ALL {
            let (reason, text) = step.map_failure("disk", "no");
            let expected = if step == MountStep::NodeAffinity { "FailedMount" } else { "FailedMapVolume" };
            assert_eq!(reason, expected, "{text}");
            assert!(text.starts_with("MapVolume.") && text.ends_with(" for volume \"disk\" : no"), "{text}");
        }
        let (_, text) = MountStep::MountDevice.map_failure("disk", "no");
        assert_eq!(text, "MapVolume.SetUpDevice failed for volume \"disk\" : no");
        assert_eq!(
            mapped_texts("disk", "/plugins/disk", "/pods/u"),
            [
                "MapVolume.MapPodDevice succeeded for volume \"disk\" globalMapPath \"/plugins/disk\"",
                "MapVolume.MapPodDevice succeeded for volume \"disk\" volumeMapPath \"/pods/u\"",
            ]
        );
    }
}
