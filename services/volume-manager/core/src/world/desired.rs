//! Which pods want which volumes (volumes.md §3.3).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::mount_options;
use crate::operations::{PodUid, VolumeName};
use crate::selinux::{FileLabel, is_same_label};

/// What has to be done once for all pods before a volume is set up for one (volumes.md §1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// Nothing: the volume belongs to one pod.
    PerPod,
    /// A device is mounted.
    Device,
    /// A device is attached and mounted.
    AttachableDevice,
}

impl Shape {
    /// The volume is attached to the node before it is mounted.
    pub const fn is_attachable(self) -> bool {
        matches!(self, Self::AttachableDevice)
    }

    /// A device is mounted for all pods.
    pub const fn has_device(self) -> bool {
        matches!(self, Self::Device | Self::AttachableDevice)
    }
}

/// The SELinux label with which a volume is mounted (volumes.md §6).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum MountLabel {
    /// Without the mount option `context`.
    #[default]
    Unlabelled,
    /// With this value of the mount option `context`.
    Context(String),
}

impl MountLabel {
    /// The label of a mount with these options, as mountinfo has them (volumes.md §3.16). `None`: its `context` is not a label.
    pub fn of_options(options: &str) -> Option<Self> {
        let context =
            mount_options::split(options).into_iter().find_map(|option| option.strip_prefix("context="));
        let Some(context) = context else { return Some(Self::Unlabelled) };
        let label = FileLabel::parse(context.trim_matches('"')).ok()?;
        Some(Self::Context(label.as_str().to_owned()))
    }

    /// Whether it is the same label, also if its categories are written in another way: the kernel shows `s0:c2,c1` as
    /// `s0:c1,c2`.
    pub fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Context(one), Self::Context(other)) => is_same_label(one, other),
            (Self::Unlabelled, Self::Unlabelled) => true,
            (Self::Context(_), Self::Unlabelled) | (Self::Unlabelled, Self::Context(_)) => false,
        }
    }
}

impl fmt::Display for MountLabel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unlabelled => f.write_str("no SELinux label"),
            Self::Context(label) => write!(f, "the SELinux label {label}"),
        }
    }
}

/// A volume that a pod wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WantedVolume {
    /// The volume.
    pub volume: VolumeName,
    /// The pod.
    pub pod: PodUid,
    /// `spec.volumes[].name` of the pod.
    pub outer_name: String,
    /// The name of the volume's directory.
    pub inner_name: String,
    /// What is done once for all pods.
    pub shape: Shape,
    /// At most one pod may use it: its only access mode is `ReadWriteOncePod`.
    pub is_single_pod: bool,
    /// The SELinux label of its mount.
    pub label: MountLabel,
    /// The label that its containers share, also if it is not mounted with it.
    pub wanted_label: Option<FileLabel>,
    /// The group of the PersistentVolume's annotation `pv.beta.kubernetes.io/gid`.
    pub gid: Option<i64>,
    /// The quota of a local volume, in bytes.
    pub size_limit: Option<u64>,
    /// The size of the PersistentVolume in bytes. `None` leaves the recorded one: the pod only reads the claim, or there
    /// is no PersistentVolume.
    pub size: Option<u64>,
    /// The plugin sets the volume up again with each sync of the pod.
    pub is_set_up_each_sync: bool,
    /// When it was requested, in milliseconds.
    pub requested_at: u64,
}

impl WantedVolume {
    /// An inline volume, whose directory has the volume's name in the pod: without a label, sizes and a group, and set up
    /// once.
    pub fn inline(volume: VolumeName, pod: PodUid, name: &str, shape: Shape) -> Self {
        Self {
            volume,
            pod,
            outer_name: name.to_owned(),
            inner_name: name.to_owned(),
            shape,
            is_single_pod: false,
            label: MountLabel::Unlabelled,
            wanted_label: None,
            gid: None,
            size_limit: None,
            size: None,
            is_set_up_each_sync: false,
            requested_at: 0,
        }
    }
}

/// A desired volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DesiredVolume {
    /// What is done once for all pods.
    pub shape: Shape,
    /// At most one pod may use it.
    pub is_single_pod: bool,
    /// The API object of this node has listed it in `volumesInUse` since it is desired.
    pub is_reported_in_use: bool,
    /// The SELinux label of its mount.
    pub label: MountLabel,
    /// The label that the containers of the first pod share, also if it is not mounted with it.
    pub wanted_label: Option<FileLabel>,
    /// As in [`WantedVolume::gid`].
    pub gid: Option<i64>,
    /// As in [`WantedVolume::size_limit`].
    pub size_limit: Option<u64>,
    /// The size of the PersistentVolume in bytes.
    pub size: Option<u64>,
    /// The pods that want it; never empty.
    pub pods: BTreeMap<PodUid, DesiredPod>,
}

/// A pod that wants a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DesiredPod {
    /// The names that the pod has for the volume; never empty.
    pub outer_names: BTreeSet<String>,
    /// The name of the volume's directory.
    pub inner_name: String,
    /// The plugin sets the volume up again with each sync of the pod.
    pub is_set_up_each_sync: bool,
    /// The volume may grow through the mount of this pod: at least one of its names for it allows writing.
    pub can_expand: bool,
    /// When it was requested, in milliseconds.
    pub requested_at: u64,
}

/// A volume cannot be mounted with two SELinux labels.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "volume {outer_name:?} of pod {pod} needs {wanted}, but it is in use on this node with {in_use}; give both pods \
     the same seLinuxOptions, or end the pods that use it"
)]
pub struct LabelConflict {
    /// The pod's name for the volume.
    pub outer_name: String,
    /// The pod.
    pub pod: PodUid,
    /// The label that the pod needs.
    pub wanted: MountLabel,
    /// The label that others have asked for.
    pub in_use: MountLabel,
}

/// The desired volumes of all pods of the node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DesiredWorld(BTreeMap<VolumeName, DesiredVolume>);

impl DesiredWorld {
    /// Adds a volume of a pod, or updates it. The time of the request stays, unless the plugin sets the volume up with
    /// each sync. A volume that another label is desired for is left as it is, and a pod that has it already keeps its label.
    pub fn add(&mut self, wanted: WantedVolume) -> Result<(), LabelConflict> {
        let is_new = !self.has(&wanted.volume, &wanted.pod, &wanted.outer_name);
        let existing = self.0.get(&wanted.volume).map(|volume| &volume.label);
        if let Some(in_use) = existing.filter(|label| is_new && **label != wanted.label) {
            let in_use = in_use.clone();
            let WantedVolume { outer_name, pod, label, .. } = wanted;
            return Err(LabelConflict { outer_name, pod, wanted: label, in_use });
        }
        let volume = self.0.entry(wanted.volume).or_insert_with(|| DesiredVolume {
            shape: wanted.shape,
            is_single_pod: wanted.is_single_pod,
            is_reported_in_use: false,
            label: wanted.label,
            wanted_label: wanted.wanted_label,
            gid: None,
            size_limit: None,
            size: None,
            pods: BTreeMap::new(),
        });
        volume.shape = wanted.shape;
        volume.is_single_pod = wanted.is_single_pod;
        volume.gid = wanted.gid;
        volume.size_limit = wanted.size_limit;
        volume.size = wanted.size.or(volume.size);
        let pod = volume.pods.entry(wanted.pod).or_insert_with(|| DesiredPod {
            outer_names: BTreeSet::new(),
            inner_name: String::new(),
            is_set_up_each_sync: false,
            can_expand: false,
            requested_at: wanted.requested_at,
        });
        pod.can_expand |= wanted.size.is_some();
        pod.outer_names.insert(wanted.outer_name);
        pod.inner_name = wanted.inner_name;
        pod.is_set_up_each_sync = wanted.is_set_up_each_sync;
        if wanted.is_set_up_each_sync {
            pod.requested_at = wanted.requested_at;
        }
        Ok(())
    }

    /// Removes a volume of a pod.
    pub fn remove(&mut self, volume: &VolumeName, pod: &PodUid) {
        if let Some(desired) = self.0.get_mut(volume) {
            desired.pods.remove(pod);
        }
        self.0.retain(|_, desired| !desired.pods.is_empty());
    }

    /// Removes every volume of a pod.
    pub fn remove_pod(&mut self, pod: &PodUid) {
        self.0.retain(|_, desired| {
            desired.pods.remove(pod);
            !desired.pods.is_empty()
        });
    }

    /// Records that the driver of a volume does not need attachment any more.
    pub fn mark_not_attachable(&mut self, volume: &VolumeName) {
        if let Some(desired) = self.0.get_mut(volume)
            && desired.shape == Shape::AttachableDevice
        {
            desired.shape = Shape::Device;
        }
    }

    /// Records the `volumesInUse` that the API object of this node has (volumes.md §3.15).
    pub fn mark_reported(&mut self, in_use: &BTreeSet<VolumeName>) {
        for (name, volume) in &mut self.0 {
            volume.is_reported_in_use = in_use.contains(name);
        }
    }

    /// The volumes with their names, sorted.
    pub fn volumes(&self) -> impl Iterator<Item = (&VolumeName, &DesiredVolume)> {
        self.0.iter()
    }

    /// A desired volume.
    pub fn volume(&self, name: &VolumeName) -> Option<&DesiredVolume> {
        self.0.get(name)
    }

    /// Whether a pod has the volume under this name.
    pub fn has(&self, volume: &VolumeName, pod: &PodUid, outer_name: &str) -> bool {
        self.pod(volume, pod).is_some_and(|pod| pod.outer_names.contains(outer_name))
    }

    /// A volume of a pod.
    pub fn pod(&self, volume: &VolumeName, pod: &PodUid) -> Option<&DesiredPod> {
        self.0.get(volume)?.pods.get(pod)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(pod: &str, outer_name: &str) -> WantedVolume {
        let inline = WantedVolume::inline("v".into(), pod.into(), outer_name, Shape::AttachableDevice);
        WantedVolume { inner_name: "pv".into(), requested_at: 1, ..inline }
    }

    fn labelled(pod: &str, label: &str) -> WantedVolume {
        WantedVolume { label: MountLabel::Context(label.into()), ..wanted(pod, "data") }
    }

    #[test]
    fn an_attachable_volume_has_a_device() {
        for (shape, is_attachable, has_device) in [
            (Shape::PerPod, false, false),
            (Shape::Device, false, true),
            (Shape::AttachableDevice, true, true),
        ] {
            assert_eq!((shape.is_attachable(), shape.has_device()), (is_attachable, has_device));
        }
    }

    #[test]
    fn two_names_of_a_pod_for_one_volume_are_one_entry() {
        let mut world = DesiredWorld::default();
        world.add(wanted("a", "x")).unwrap();
        world.add(wanted("a", "y")).unwrap();
        assert_eq!(world.volumes().count(), 1);
        assert_eq!(world.pod(&"v".into(), &"a".into()).unwrap().outer_names.len(), 2);
        assert_eq!(world.pod(&"v".into(), &"a".into()).unwrap().inner_name, "pv");
    }

    #[test]
    fn a_volume_leaves_with_its_last_pod() {
        let mut world = DesiredWorld::default();
        for pod in ["a", "b", "c"] {
            world.add(wanted(pod, "x")).unwrap();
        }
        world.remove(&"v".into(), &"a".into());
        world.remove(&"w".into(), &"b".into());
        world.remove_pod(&"b".into());
        assert_eq!(world.volume(&"v".into()).unwrap().pods.len(), 1);
        world.remove_pod(&"c".into());
        assert_eq!(world, DesiredWorld::default());
    }

    #[test]
    fn a_second_label_is_refused_until_the_volume_is_free() {
        let mut world = DesiredWorld::default();
        world.add(labelled("a", "s0:c1")).unwrap();
        let before = world.clone();
        let error = world.add(labelled("b", "s0:c2")).unwrap_err().to_string();
        for part in ["\"data\"", "pod b", "s0:c1", "s0:c2", "seLinuxOptions"] {
            assert!(error.contains(part), "{error}");
        }
        assert!(world.add(wanted("b", "data")).unwrap_err().to_string().contains("no SELinux label"));
        assert_eq!(world, before);
        world.add(labelled("b", "s0:c1")).unwrap();
        world.remove_pod(&"a".into());
        world.remove_pod(&"b".into());
        assert_eq!(world.add(labelled("b", "s0:c2")), Ok(()));
    }

    #[test]
    fn a_pod_that_has_a_volume_keeps_its_label() {
        let mut world = DesiredWorld::default();
        world.add(labelled("a", "s0:c1")).unwrap();
        world.add(labelled("a", "s0:c2")).unwrap();
        world.add(wanted("a", "data")).unwrap();
        assert_eq!(world.volume(&"v".into()).unwrap().label, MountLabel::Context("s0:c1".into()));
        let second_name = WantedVolume { outer_name: "more".into(), ..labelled("a", "s0:c2") };
        assert!(world.add(second_name).is_err());
    }

    #[test]
    fn the_time_of_a_request_is_reset_only_for_volumes_set_up_each_sync() {
        for (is_set_up_each_sync, time) in [(false, 1), (true, 9)] {
            let mut world = DesiredWorld::default();
            world.add(WantedVolume { is_set_up_each_sync, ..wanted("a", "x") }).unwrap();
            let again = WantedVolume { is_set_up_each_sync, requested_at: 9, ..wanted("a", "x") };
            world.add(again).unwrap();
            assert_eq!(world.pod(&"v".into(), &"a".into()).unwrap().requested_at, time);
        }
    }

    #[test]
    fn a_pod_that_only_reads_the_claim_does_not_change_the_size() {
        let mut world = DesiredWorld::default();
        for (size, after) in [(None, None), (Some(5), Some(5)), (None, Some(5)), (Some(8), Some(8))] {
            world.add(WantedVolume { size, ..wanted("a", "x") }).unwrap();
            assert_eq!(world.volume(&"v".into()).unwrap().size, after);
        }
    }

    #[test]
    fn reported_in_use_follows_the_last_list_and_is_lost_with_the_volume() {
        let mut world = DesiredWorld::default();
        let is_reported = |world: &DesiredWorld| world.volume(&"v".into()).unwrap().is_reported_in_use;
        world.add(wanted("a", "x")).unwrap();
        assert!(!is_reported(&world));
        world.mark_reported(&["v".into(), "w".into()].into());
        world.add(wanted("b", "x")).unwrap();
        assert!(is_reported(&world));
        world.mark_reported(&["w".into()].into());
        assert!(!is_reported(&world));
        world.mark_reported(&["v".into()].into());
        world.remove_pod(&"a".into());
        world.remove_pod(&"b".into());
        world.add(wanted("a", "x")).unwrap();
        assert!(!is_reported(&world));
    }

    #[test]
    fn only_an_attachable_volume_can_stop_being_attachable() {
        for (shape, after) in [(Shape::AttachableDevice, Shape::Device), (Shape::PerPod, Shape::PerPod)] {
            let mut world = DesiredWorld::default();
            world.add(WantedVolume { shape, ..wanted("a", "x") }).unwrap();
            world.mark_not_attachable(&"v".into());
            world.mark_not_attachable(&"unknown".into());
            assert_eq!(world.volume(&"v".into()).unwrap().shape, after);
        }
    }
}
