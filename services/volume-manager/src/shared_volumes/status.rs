//! The status of a pod's volumes, as the task publishes it.

use std::collections::BTreeMap;

use keelson_volume_manager_core::claims::{self, VolumeMode};
use keelson_volume_manager_core::measurement::{MeasureSpec, Method};
use keelson_volume_manager_core::operations::{PodUid, VolumeName};
use keelson_volume_manager_core::selinux::{Managed, wants_relabel};
use keelson_volume_manager_core::world::{ActualWorld, DesiredWorld, Lookup, WaitReason, WorldPlan};

use super::records::{Placed, PodVolume, Records, ResolvedSpec};
use crate::plugins::PluginError;
use crate::view::{MountedVolume, VolumeWait};

/// The plugins' volumes of one pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PodStatus {
    /// The mounted ones, by `spec.volumes[].name`.
    pub(crate) mounted: BTreeMap<String, MountedVolume>,
    /// The others, by name, that are known.
    pub(crate) waits: BTreeMap<String, PodWait>,
    /// The unique names of those that are not attached.
    pub(crate) unattached: Vec<VolumeName>,
    /// Something of the pod is, or may be, mounted, or is wanted.
    pub(crate) may_have_mounts: bool,
    /// What holds up the teardown.
    pub(crate) teardown: String,
}

/// Why a volume is not mounted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PodWait {
    /// For people.
    pub(crate) wait: VolumeWait,
    /// Something has failed.
    pub(crate) is_error: bool,
    /// When it is retried, in unix nanoseconds; 0: it is not known.
    pub(crate) next_try_unix_nanos: i64,
}

/// Why volumes of pods do not advance.
type Waits<'a> = BTreeMap<(&'a VolumeName, &'a PodUid), &'a WaitReason>;

/// The clock of the task: milliseconds since its start.
#[derive(Debug, Clone, Copy)]
pub(super) struct Clock {
    /// Its start, in unix nanoseconds.
    pub(super) started_unix_nanos: i64,
}

impl Clock {
    fn unix_nanos(self, millis: u64) -> i64 {
        let nanos = i64::try_from(millis.saturating_mul(1_000_000)).unwrap_or(i64::MAX);
        self.started_unix_nanos.saturating_add(nanos)
    }
}

/// The status of every pod that has or wants volumes.
pub(super) fn statuses(
    desired: &DesiredWorld,
    actual: &ActualWorld,
    records: &Records,
    plan: &WorldPlan,
    clock: Clock,
) -> BTreeMap<PodUid, PodStatus> {
    let mut pods: BTreeMap<PodUid, PodStatus> = BTreeMap::new();
    let wanted_waits: Waits<'_> = plan
        .waits
        .iter()
        .filter(|wait| wait.is_wanted)
        .filter_map(|wait| Some(((&wait.volume, wait.pod.as_ref()?), &wait.reason)))
        .collect();
    for (key, resolved) in &records.specs {
        let (volume, pod) = key;
        let status = pods.entry(pod.clone()).or_default();
        status.may_have_mounts = true;
        let Some(wanted) = desired.volume(volume) else { continue };
        let names = wanted.pods.get(pod).into_iter().flat_map(|pod| &pod.outer_names);
        // A volume that is set up again, or grows, can be used meanwhile.
        let is_mounted = matches!(
            actual.lookup(volume, pod, &wanted.label, wanted.size),
            Lookup::Mounted | Lookup::RemountRequired | Lookup::ExpansionRequired
        );
        let placed = records.placed.get(key).filter(|_| is_mounted);
        for name in names {
            let read_only = records.is_read_only(key, name);
            match placed.and_then(|placed| mounted(resolved, placed, name, read_only)) {
                Some(shown) => drop(status.mounted.insert(name.clone(), shown)),
                None => {
                    if matches!(wanted_waits.get(&(volume, pod)), Some(WaitReason::NotAttached)) {
                        status.unattached.push(volume.clone());
                    }
                    status.waits.insert(name.clone(), wait(key, name, records, &wanted_waits, clock));
                }
            }
        }
    }
    for (((_, pod), name), refused) in &records.refused {
        let PluginError { owner, message, .. } = refused.error.clone();
        let wait = VolumeWait { volume: name.clone(), message, owner };
        let status = pods.entry(pod.clone()).or_default();
        status.may_have_mounts = true;
        status.waits.insert(name.clone(), PodWait { wait, is_error: true, next_try_unix_nanos: 0 });
    }
    for (_, pod) in records.placed.keys() {
        pods.entry(pod.clone()).or_default().may_have_mounts = true;
    }
    for wait in plan.waits.iter().filter(|wait| !wait.is_wanted) {
        if let Some(status) = wait.pod.as_ref().and_then(|pod| pods.get_mut(pod)) {
            status.teardown = wait.to_string();
        }
    }
    pods
}

/// A volume under the name that its pod has for it; `None` if it was not set up since the start of the service.
fn mounted(resolved: &ResolvedSpec, placed: &Placed, name: &str, read_only: bool) -> Option<MountedVolume> {
    let host_path = placed.host_path.as_ref()?.to_string_lossy().into_owned();
    let (spec, labels) = (&resolved.spec, &resolved.labels.labels);
    let is_block_device = spec.mode == VolumeMode::Block;
    let has_statistics =
        !matches!(spec.field.as_str(), "csi" | "hostPath" | "fc" | "flexVolume") && !is_block_device;
    let method = if has_statistics { Method::FileSystem } else { Method::None };
    let (has_file_labels, mounted) = (placed.has_file_labels, labels.mounted.as_ref());
    Some(MountedVolume {
        name: name.to_owned(),
        host_path,
        read_only,
        selinux_relabel: wants_relabel(Managed::UnlessReadOnly, read_only, has_file_labels, mounted),
        inner_name: spec.inner_name.clone(),
        plugin: resolved.plugin.plugin_name(spec),
        claim: spec.claim.clone().unwrap_or_default(),
        persistent_volume: spec.persistent.as_ref().map(|v| v.metadata.name.clone()).unwrap_or_default(),
        is_block_device,
        supplemental_group: spec.persistent.as_deref().and_then(|v| claims::extra_gid(v, &[])),
        is_empty_dir: false,
        measure: MeasureSpec { method, ..MeasureSpec::default() },
    })
}

/// Why a volume of a pod is not mounted.
fn wait(key: &PodVolume, name: &str, records: &Records, waits: &Waits<'_>, clock: Clock) -> PodWait {
    let found = waits.get(&(&key.0, &key.1)).copied();
    let error = records.errors.get(key);
    let owner = match (found, error) {
        (Some(WaitReason::BackOff { .. }) | None, Some(error)) => error.owner.clone(),
        (Some(reason), _) => reason.owner(),
        (None, None) => keelson_volume_manager_core::wait_owner::WaitOwner::VolumeManager,
    };
    let message = match (found, error) {
        (Some(WaitReason::BackOff { .. }) | None, Some(error)) => error.message.clone(),
        (Some(reason @ WaitReason::Busy { .. }), _) => {
            let origin = records.specs.get(key).map(|resolved| resolved.spec.origin());
            format!("{reason}: it waits for {}", origin.unwrap_or_default())
        }
        (Some(reason), _) => reason.to_string(),
        (None, None) => "the set-up has not started".to_owned(),
    };
    let next_try_unix_nanos = match found {
        Some(WaitReason::BackOff { until, .. }) => clock.unix_nanos(*until),
        _ => 0,
    };
    let is_error =
        found.is_some_and(|reason| reason.is_error() || matches!(reason, WaitReason::BackOff { .. }));
    PodWait {
        wait: VolumeWait { volume: name.to_owned(), message, owner },
        is_error: is_error || error.is_some(),
        next_try_unix_nanos,
    }
}
