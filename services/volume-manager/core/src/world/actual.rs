//! What is attached, mounted and set up on the node (volumes.md §3.5), and what was found at startup (§3.16).

use std::collections::{BTreeMap, BTreeSet};

use crate::operations::{PodUid, VolumeName};
use crate::world::action::{Action, Learned};
use crate::world::desired::{DesiredWorld, MountLabel};
use crate::world::outcome::{DeviceState, FailureClass, PodState, device_after_failure, pod_after_failure};

#[cfg(test)]
mod tests;

/// Whether a volume is one that is attached to nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attachability {
    /// It is, and it is attached to this node.
    True,
    /// It is not, or the node's status does not list it.
    False,
    /// It was found at startup, and the node's status was not read since.
    Uncertain,
}

/// A volume that is attached or needs no attachment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ActualVolume {
    /// Whether it is attached.
    pub attachability: Attachability,
    /// The path of the attached device, as the node's status has it.
    pub device_path: Option<String>,
    /// Where the shared device is mounted, or would be.
    pub device_mount_path: Option<String>,
    /// The state of the shared device.
    pub device: DeviceState,
    /// A mount of the device that has succeeded, or was found at startup, was not undone yet.
    pub owes_unmount: bool,
    /// The current size in bytes; never 0.
    pub size: Option<u64>,
    /// The driver cannot grow the volume while it is in use. It is not asked again before the next mount.
    pub is_expansion_refused: bool,
    /// Someone else has to act before the volume can grow. It is asked for again with the next sync of a pod.
    pub is_expansion_postponed: bool,
    /// The last expansion of the volume has ended with an error after which nothing is in progress.
    pub had_final_expansion_error: bool,
    /// The SELinux label with which it is mounted. `None`: nothing is mounted, or the label is unknown.
    pub label: Option<MountLabel>,
    /// The pods that have, or may have, mounted it.
    pub pods: BTreeMap<PodUid, ActualPod>,
}

/// A pod that has, or may have, mounted a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ActualPod {
    /// Whether it has.
    pub state: PodState,
    /// The volume is to be set up again.
    pub needs_remount: bool,
    /// A set-up that has succeeded, or was found at startup, was not undone yet.
    pub owes_teardown: bool,
}

/// A volume of a pod that was found on disk at startup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundVolume {
    /// The volume.
    pub volume: VolumeName,
    /// The pod.
    pub pod: PodUid,
    /// Its plugin mounts a device for all pods.
    pub has_device: bool,
    /// Where that device would be mounted.
    pub device_mount_path: Option<String>,
    /// The SELinux label of the mount, if it is known.
    pub label: Option<MountLabel>,
}

/// The state of a volume for a pod that wants it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Lookup {
    /// The volume is not recorded as attached.
    NotAttached,
    /// It is mounted with another SELinux label.
    LabelDiffers {
        /// The label of the mount.
        mounted: MountLabel,
    },
    /// It may be mounted. It is mounted again before it is used.
    Uncertain,
    /// It is mounted and is to be set up again.
    RemountRequired,
    /// It is mounted and smaller than desired.
    ExpansionRequired,
    /// It is mounted.
    Mounted,
    /// It is not mounted for this pod.
    NotMounted,
}

/// How far the volumes found at startup are known.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
enum Progress {
    /// The disk is still being read.
    #[default]
    Reading,
    /// These volumes need data of the node's status.
    AwaitingNodeStatus(BTreeSet<VolumeName>),
    /// Everything is known.
    Synced,
}

/// The actual volumes of the node. The default value is that of a service that has not read the disk yet.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ActualWorld {
    volumes: BTreeMap<VolumeName, ActualVolume>,
    /// Found at startup, and neither set up nor torn down since.
    reconstructed: BTreeSet<(VolumeName, PodUid)>,
    progress: Progress,
}

impl ActualVolume {
    fn new(attachability: Attachability) -> Self {
        Self {
            attachability,
            device_path: None,
            device_mount_path: None,
            device: DeviceState::NotMounted,
            owes_unmount: false,
            size: None,
            is_expansion_refused: false,
            is_expansion_postponed: false,
            had_final_expansion_error: false,
            label: None,
            pods: BTreeMap::new(),
        }
    }

    /// Nothing of the volume is mounted, for certain.
    pub fn is_unmounted(&self) -> bool {
        self.pods.is_empty() && self.device == DeviceState::NotMounted
    }

    /// Whether an expansion may be tried now.
    const fn may_expand(&self) -> bool {
        !self.is_expansion_refused && !self.is_expansion_postponed
    }

    /// Whether a mount with the label would differ from the present one.
    pub fn differs_from(&self, label: &MountLabel) -> bool {
        self.label.as_ref().is_some_and(|mounted| !mounted.is_same(label))
    }

    /// Drops what is known of the mounts, once nothing is mounted.
    fn release(&mut self) {
        if self.is_unmounted() {
            self.label = None;
            self.is_expansion_refused = false;
            self.is_expansion_postponed = false;
        }
    }

    /// Records the label of a mount that may exist, or drops it when none can.
    fn note_label(&mut self, label: &MountLabel) {
        if self.is_unmounted() {
            self.release();
        } else if self.label.is_none() {
            self.label = Some(label.clone());
        }
    }

    fn learn(&mut self, learned: Learned) {
        self.device_path = learned.device_path.or_else(|| self.device_path.take());
        self.device_mount_path = learned.device_mount_path.or_else(|| self.device_mount_path.take());
        self.size = learned.size.filter(|size| *size > 0).or(self.size);
        self.is_expansion_refused |= learned.is_expansion_refused;
        if let Some(is_final) = learned.had_final_expansion_error {
            self.had_final_expansion_error = is_final;
        }
    }
}

/// What happens at startup.
impl ActualWorld {
    /// Records a volume that was found on disk: everything of it is uncertain.
    pub fn add_found(&mut self, found: FoundVolume) {
        let FoundVolume { volume, pod, has_device, device_mount_path, label } = found;
        let entry =
            self.volumes.entry(volume.clone()).or_insert_with(|| ActualVolume::new(Attachability::Uncertain));
        if has_device {
            entry.device = DeviceState::Uncertain;
            entry.owes_unmount = true;
        }
        entry.device_mount_path = entry.device_mount_path.take().or(device_mount_path);
        entry.label = entry.label.take().or(label);
        let state = ActualPod { state: PodState::Uncertain, needs_remount: false, owes_teardown: true };
        entry.pods.insert(pod.clone(), state);
        self.reconstructed.insert((volume, pod));
    }

    /// Records a device that was found on disk, also one that no pod has: it may be mounted.
    /// `label`: the SELinux label of the mount, if it is known.
    pub fn add_found_device(
        &mut self,
        volume: VolumeName,
        device_mount_path: String,
        label: Option<MountLabel>,
    ) {
        let entry = self.volumes.entry(volume).or_insert_with(|| ActualVolume::new(Attachability::Uncertain));
        entry.device = DeviceState::Uncertain;
        entry.owes_unmount = true;
        entry.device_mount_path.get_or_insert(device_mount_path);
        entry.label = entry.label.take().or(label);
    }

    /// The disk was read completely.
    pub fn finish_reading(&mut self) {
        if self.progress == Progress::Reading {
            let awaiting: BTreeSet<_> = self.volumes.keys().cloned().collect();
            self.progress =
                if awaiting.is_empty() { Progress::Synced } else { Progress::AwaitingNodeStatus(awaiting) };
        }
    }

    /// Whether the disk was read completely. Nothing is planned before.
    pub fn has_read_disk(&self) -> bool {
        self.progress != Progress::Reading
    }

    /// Whether the node's status has to be read.
    pub const fn awaits_node_status(&self) -> bool {
        matches!(self.progress, Progress::AwaitingNodeStatus(_))
    }

    /// Applies `status.volumesAttached` of the node, device paths by volume, to the volumes that wait for it.
    pub fn apply_node_status(&mut self, attached: &BTreeMap<VolumeName, String>) {
        let Progress::AwaitingNodeStatus(awaiting) = &self.progress else { return };
        for name in awaiting {
            let Some(volume) = self.volumes.get_mut(name) else { continue };
            if volume.attachability == Attachability::Uncertain {
                let path = attached.get(name);
                volume.attachability =
                    if path.is_some() { Attachability::True } else { Attachability::False };
                volume.device_path = path.filter(|path| !path.is_empty()).cloned();
            }
        }
        self.progress = Progress::Synced;
    }

    /// Stops waiting for the node's status: there is no API server to read it from.
    pub fn skip_node_status(&mut self) {
        if self.awaits_node_status() {
            self.progress = Progress::Synced;
        }
    }

    /// Whether everything found at startup is known. Only then may `volumesInUse` be reported.
    pub fn is_synced(&self) -> bool {
        self.progress == Progress::Synced
    }
}

/// What is known.
impl ActualWorld {
    /// The volumes with their names, sorted.
    pub fn volumes(&self) -> impl Iterator<Item = (&VolumeName, &ActualVolume)> {
        self.volumes.iter()
    }

    /// A volume.
    pub fn volume(&self, name: &VolumeName) -> Option<&ActualVolume> {
        self.volumes.get(name)
    }

    /// Whether the volume of the pod was found at startup, and neither set up nor torn down since.
    pub fn is_reconstructed(&self, volume: &VolumeName, pod: &PodUid) -> bool {
        self.reconstructed.contains(&(volume.clone(), pod.clone()))
    }

    /// Whether the pod has, or may have, a volume mounted.
    pub fn may_have_mounts(&self, pod: &PodUid) -> bool {
        self.volumes.values().any(|volume| volume.pods.contains_key(pod))
    }

    /// The state of a volume for a pod that wants it with a label and a size in bytes. Sizes count only if both are
    /// known.
    pub fn lookup(&self, name: &VolumeName, pod: &PodUid, label: &MountLabel, size: Option<u64>) -> Lookup {
        let Some(volume) = self.volumes.get(name) else { return Lookup::NotAttached };
        if let Some(mounted) = volume.label.as_ref().filter(|mounted| !mounted.is_same(label)) {
            return Lookup::LabelDiffers { mounted: mounted.clone() };
        }
        let Some(state) = volume.pods.get(pod) else { return Lookup::NotMounted };
        let is_too_small = size.zip(volume.size).is_some_and(|(desired, actual)| desired > actual);
        match state.state {
            PodState::Uncertain => Lookup::Uncertain,
            PodState::Mounted if state.needs_remount => Lookup::RemountRequired,
            PodState::Mounted if is_too_small && volume.may_expand() => Lookup::ExpansionRequired,
            PodState::Mounted => Lookup::Mounted,
        }
    }
}

/// What happens while the service runs.
impl ActualWorld {
    /// Marks the mounted volumes of a pod that are set up with each of its syncs (volumes.md §3.3).
    pub fn require_remounts(&mut self, desired: &DesiredWorld, pod: &PodUid) {
        for (name, volume) in &mut self.volumes {
            let is_wanted = desired.pod(name, pod).is_some_and(|desired| desired.is_set_up_each_sync);
            if let Some(actual) = volume.pods.get_mut(pod).filter(|_| is_wanted) {
                actual.needs_remount = actual.state == PodState::Mounted;
            }
        }
    }

    /// Records the current size of a volume in bytes, if none is known.
    pub fn initialise_size(&mut self, volume: &VolumeName, size: u64) {
        if let Some(volume) = self.volumes.get_mut(volume) {
            volume.size = volume.size.or(Some(size).filter(|size| *size > 0));
        }
    }

    /// Records a sync of a pod that uses the volume: an expansion that was postponed is tried again.
    pub fn reconsider_expansion(&mut self, volume: &VolumeName) {
        self.with(volume, |volume| volume.is_expansion_postponed = false);
    }

    /// Records an expansion that failed, at a mount or online. `is_final`: nothing of it is in progress.
    pub fn record_expansion_error(&mut self, volume: &VolumeName, is_final: bool) {
        self.with(volume, |volume| volume.had_final_expansion_error = is_final);
    }

    /// Records that an action starts. What is being undone is no longer certain.
    pub fn record_start(&mut self, action: &Action) {
        match action {
            Action::TearDown { volume, pod } => self.make_pod_uncertain(volume, pod),
            Action::UnmountDevice { volume } => self.make_device_uncertain(volume),
            Action::MarkAttached { .. }
            | Action::VerifyAttached { .. }
            | Action::Attach { .. }
            | Action::MountDevice { .. }
            | Action::SetUp { .. }
            | Action::Resize { .. }
            | Action::Forget { .. }
            | Action::Detach { .. } => {}
        }
    }

    /// Records an action that succeeded.
    pub fn record_success(&mut self, action: &Action, learned: Learned) {
        match action {
            Action::MarkAttached { volume } => self.attach(volume, Attachability::False, learned),
            Action::VerifyAttached { volume, .. } | Action::Attach { volume, .. } => {
                self.attach(volume, Attachability::True, learned);
            }
            Action::MountDevice { volume, label, .. } => self.with(volume, |volume| {
                volume.device = DeviceState::GloballyMounted;
                volume.owes_unmount = true;
                volume.label = Some(label.clone());
                volume.learn(learned);
            }),
            Action::SetUp { volume, pod, label, .. } => {
                self.reconstructed.remove(&(volume.clone(), pod.clone()));
                self.with(volume, |volume| {
                    let state =
                        ActualPod { state: PodState::Mounted, needs_remount: false, owes_teardown: true };
                    volume.pods.insert(pod.clone(), state);
                    volume.label = Some(label.clone());
                    volume.learn(learned);
                });
            }
            Action::Resize { volume, size, .. } => self.with(volume, |volume| {
                volume.learn(learned);
                // As long as the volume is smaller, someone else has to act first.
                volume.is_expansion_postponed = volume.size.is_none_or(|reached| reached < *size);
            }),
            Action::TearDown { volume, pod } => {
                self.reconstructed.remove(&(volume.clone(), pod.clone()));
                self.with(volume, |volume| {
                    volume.pods.remove(pod);
                    volume.release();
                });
            }
            Action::UnmountDevice { volume } => self.with(volume, |volume| {
                volume.device = DeviceState::NotMounted;
                volume.owes_unmount = false;
                volume.release();
            }),
            Action::Forget { volume } | Action::Detach { volume } => {
                if self.volumes.get(volume).is_some_and(ActualVolume::is_unmounted) {
                    self.volumes.remove(volume);
                }
            }
        }
    }

    /// Records an action that failed (volumes.md §3.11, §3.12).
    pub fn record_failure(&mut self, action: &Action, class: FailureClass) {
        match action {
            Action::MountDevice { volume, label, .. } => self.with(volume, |volume| {
                volume.device = device_after_failure(volume.device, class, volume.owes_unmount);
                volume.note_label(label);
            }),
            Action::SetUp { volume, pod, label, .. } => {
                self.with(volume, |volume| {
                    let before = volume.pods.remove(pod);
                    let owes_teardown = before.is_some_and(|pod| pod.owes_teardown);
                    let needs_remount = before.is_some_and(|pod| pod.needs_remount);
                    if let Some(state) = pod_after_failure(before.map(|pod| pod.state), class, owes_teardown)
                    {
                        volume.pods.insert(pod.clone(), ActualPod { state, needs_remount, owes_teardown });
                    }
                    volume.note_label(label);
                });
            }
            Action::TearDown { volume, pod } => self.make_pod_uncertain(volume, pod),
            Action::UnmountDevice { volume } => self.make_device_uncertain(volume),
            Action::MarkAttached { .. }
            | Action::VerifyAttached { .. }
            | Action::Attach { .. }
            | Action::Resize { .. }
            | Action::Forget { .. }
            | Action::Detach { .. } => {}
        }
    }

    fn with(&mut self, volume: &VolumeName, change: impl FnOnce(&mut ActualVolume)) {
        if let Some(volume) = self.volumes.get_mut(volume) {
            change(volume);
        }
    }

    fn attach(&mut self, volume: &VolumeName, attachability: Attachability, learned: Learned) {
        let entry = self.volumes.entry(volume.clone()).or_insert_with(|| ActualVolume::new(attachability));
        entry.attachability = attachability;
        entry.learn(learned);
    }

    fn make_pod_uncertain(&mut self, volume: &VolumeName, pod: &PodUid) {
        self.with(volume, |volume| {
            if let Some(pod) = volume.pods.get_mut(pod) {
                pod.state = PodState::Uncertain;
                pod.needs_remount = false;
            }
        });
    }

    fn make_device_uncertain(&mut self, volume: &VolumeName) {
        self.with(volume, |volume| {
            if volume.device == DeviceState::GloballyMounted {
                volume.device = DeviceState::Uncertain;
            }
        });
    }
}
