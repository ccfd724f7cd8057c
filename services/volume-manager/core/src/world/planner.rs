//! Decides the next actions on the volumes of the node (volumes.md §3.6).

use std::collections::{BTreeMap, BTreeSet};

use crate::operations::{OperationKey, OperationKind, Operations, PodUid, Refusal, VolumeName};
use crate::world::action::Action;
use crate::world::actual::{ActualVolume, ActualWorld, Attachability, Lookup};
use crate::world::desired::{DesiredPod, DesiredVolume, DesiredWorld};
use crate::world::outcome::DeviceState;

#[cfg(test)]
mod tests;
mod wait;

pub use wait::{Wait, WaitReason};

/// Who attaches volumes (volumes.md §3.8).
#[derive(Debug, Clone, Copy)]
pub enum AttachedBy<'a> {
    /// The controller; `enableControllerAttachDetach` is true.
    Controller {
        /// `status.volumesAttached` of the node, as it was last read.
        attached: &'a BTreeSet<VolumeName>,
    },
    /// This agent.
    Agent,
}

/// Everything that a plan depends on.
#[derive(Debug, Clone, Copy)]
pub struct Situation<'a> {
    /// What is desired.
    pub desired: &'a DesiredWorld,
    /// What exists.
    pub actual: &'a ActualWorld,
    /// What runs or backs off.
    pub operations: &'a Operations,
    /// Every source of pods is ready, and `desired` has the volumes of all their pods.
    pub is_populated: bool,
    /// Who attaches volumes.
    pub attached_by: AttachedBy<'a>,
    /// The present moment in milliseconds.
    pub now: u64,
}

/// What to do next.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WorldPlan {
    /// What to start now. The keys of any two of them do not match.
    pub actions: Vec<Action>,
    /// What does not advance now, and why. A volume that is being worked on is in here, too.
    pub waits: Vec<Wait>,
    /// When an operation that backs off may be retried, in milliseconds.
    pub wake_at: Option<u64>,
}

impl WorldPlan {
    /// Adds that volumes wait for these actions of the plan, which were started since. So the caller need not plan again
    /// to know what its volumes wait for.
    pub fn note_started<'a>(
        &mut self,
        desired: &DesiredWorld,
        started: impl IntoIterator<Item = &'a Action>,
    ) {
        for action in started {
            let Some(kind) = action.kind() else { continue };
            let (volume, pod) = (action.volume().clone(), action.pod().cloned());
            let is_wanted = kind.is_for_pods();
            let wish = pod.as_ref().filter(|_| is_wanted).and_then(|pod| desired.pod(&volume, pod));
            let names = wish.into_iter().flat_map(|wish| &wish.outer_names).cloned().collect();
            self.waits.push(Wait { volume, names, pod, is_wanted, reason: WaitReason::Busy { kind } });
        }
    }
}

/// Decides the next actions: unmount what nobody wants, then attach, mount and grow what is desired, then unmount and
/// forget devices without pods.
///
/// Level-triggered: depends only on the arguments, so a restarted service reaches the same decision. Nothing is planned
/// before the disk was read, and nothing is unmounted before the desired volumes are complete and the node's status was
/// read. An action that its key or its back-off forbids is left out.
///
/// Parity: kubelet 1.36 decides the same, except:
/// - a volume of a desired pod that was found at startup with another SELinux label stays until the pod ends;
/// - a desired attachable volume that the node's status does not list is verified before it is mounted for a pod;
/// - pods that share a volume take turns, so that one that fails does not keep the others waiting for ever.
pub fn plan_world(situation: &Situation<'_>) -> WorldPlan {
    if !situation.actual.has_read_disk() {
        return WorldPlan::default();
    }
    let mut planner = Planner { situation, plan: WorldPlan::default(), claimed: BTreeMap::new() };
    planner.tear_down();
    for (name, volume) in situation.desired.volumes() {
        for (pod, wish) in pods_in_turn(volume, situation.operations.failed_for(name)) {
            planner.mount(&Target { name, volume, pod, wish });
        }
    }
    planner.unmount_devices();
    planner.plan
}

/// The pods of a volume, beginning after the one for which the last operation has failed.
fn pods_in_turn<'a>(
    volume: &'a DesiredVolume,
    failed: Option<&PodUid>,
) -> impl Iterator<Item = (&'a PodUid, &'a DesiredPod)> {
    let is_later = |pod: &PodUid| failed.is_none_or(|failed| pod > failed);
    let (later, earlier): (Vec<_>, Vec<_>) = volume.pods.iter().partition(|(pod, _)| is_later(pod));
    later.into_iter().chain(earlier)
}

/// Whether the volume must stay with the pod: the pod wants it with this label, or may be using what was found at
/// startup.
fn is_kept(situation: &Situation<'_>, name: &VolumeName, volume: &ActualVolume, pod: &PodUid) -> bool {
    let desired = situation.desired.volume(name).filter(|desired| desired.pods.contains_key(pod));
    desired.is_some_and(|desired| {
        !volume.differs_from(&desired.label) || situation.actual.is_reconstructed(name, pod)
    })
}

/// A volume that a pod wants.
struct Target<'a> {
    name: &'a VolumeName,
    volume: &'a DesiredVolume,
    pod: &'a PodUid,
    wish: &'a DesiredPod,
}

struct Planner<'a> {
    situation: &'a Situation<'a>,
    plan: WorldPlan,
    /// The keys of the actions in the plan, by volume.
    claimed: BTreeMap<VolumeName, Vec<(OperationKey, Option<OperationKind>)>>,
}

impl Planner<'_> {
    /// First step: volumes that their pods do not want any more.
    fn tear_down(&mut self) {
        let situation = self.situation;
        for (name, volume) in situation.actual.volumes() {
            for pod in volume.pods.keys().filter(|pod| !is_kept(situation, name, volume, pod)) {
                if let Some(reason) = self.unmount_gate() {
                    self.wait_for_unmount(name, Some(pod), reason);
                } else {
                    self.propose(Action::TearDown { volume: name.clone(), pod: pod.clone() }, None);
                }
            }
        }
    }

    /// Second step: a volume that a pod wants.
    fn mount(&mut self, target: &Target<'_>) {
        let Target { name, volume, pod, .. } = *target;
        match self.situation.actual.lookup(name, pod, &volume.label, volume.size) {
            Lookup::Mounted => {}
            Lookup::NotAttached => self.attach(target),
            Lookup::LabelDiffers { mounted } => {
                let wanted = volume.label.clone();
                self.wait(target, WaitReason::OtherLabel { mounted, wanted });
            }
            Lookup::Uncertain | Lookup::NotMounted => self.set_up(target, false),
            Lookup::RemountRequired => self.set_up(target, true),
            Lookup::ExpansionRequired => {
                if let Some(size) = volume.size.filter(|_| target.wish.can_expand) {
                    let action = Action::Resize { volume: name.clone(), pod: pod.clone(), size };
                    self.propose(action, Some(target));
                }
            }
        }
    }

    fn attach(&mut self, target: &Target<'_>) {
        let (volume, pod) = (target.name.clone(), target.pod.clone());
        if !target.volume.shape.is_attachable() {
            return self.propose(Action::MarkAttached { volume }, Some(target));
        }
        match self.situation.attached_by {
            AttachedBy::Agent => self.propose(Action::Attach { volume, pod }, Some(target)),
            AttachedBy::Controller { .. } if !target.volume.is_reported_in_use => {
                self.wait(target, WaitReason::NotReportedInUse);
            }
            AttachedBy::Controller { attached } if !attached.contains(target.name) => {
                self.wait(target, WaitReason::NotAttached);
            }
            AttachedBy::Controller { .. } => {
                self.propose(Action::VerifyAttached { volume, pod }, Some(target));
            }
        }
    }

    /// A volume that is attached, as far as is known, and to be set up, or set up again.
    fn set_up(&mut self, target: &Target<'_>, is_remount: bool) {
        let Target { name, volume: desired, pod, .. } = *target;
        let Some(actual) = self.situation.actual.volume(name) else { return };
        // The agent attaches again what it has found at startup, because a reboot has detached it.
        let is_ours = matches!(self.situation.attached_by, AttachedBy::Agent);
        let may_be_detached = match actual.attachability {
            Attachability::True => false,
            Attachability::False => true,
            Attachability::Uncertain => is_ours,
        };
        if !is_remount && desired.shape.is_attachable() && may_be_detached {
            return self.attach(target);
        }
        if let Some(other) = actual.pods.keys().find(|other| desired.is_single_pod && *other != pod) {
            return self.wait(target, WaitReason::UsedByAnotherPod { other: other.clone() });
        }
        let (volume, pod, label) = (name.clone(), pod.clone(), desired.label.clone());
        if desired.shape.has_device() && actual.device != DeviceState::GloballyMounted {
            return self.propose(Action::MountDevice { volume, pod, label }, Some(target));
        }
        let is_reconstructed = self.situation.actual.is_reconstructed(&volume, &pod);
        let is_serialised = desired.shape.has_device();
        let action = Action::SetUp { volume, pod, label, is_remount, is_reconstructed, is_serialised };
        self.propose(action, Some(target));
    }

    /// Third step: devices and attachments without pods.
    fn unmount_devices(&mut self) {
        for (name, volume) in self.situation.actual.volumes().filter(|(_, volume)| volume.pods.is_empty()) {
            let desired = self.situation.desired.volume(name);
            if desired.is_some_and(|desired| !volume.differs_from(&desired.label)) {
                continue;
            }
            if let Some(reason) = self.unmount_gate() {
                self.wait_for_unmount(name, None, reason);
                continue;
            }
            let volume_name = name.clone();
            let is_ours = matches!(self.situation.attached_by, AttachedBy::Agent);
            let action = match (volume.device, volume.attachability) {
                (DeviceState::GloballyMounted | DeviceState::Uncertain, _) => {
                    Action::UnmountDevice { volume: volume_name }
                }
                // What was found at startup may be attached; a repeated detach does nothing.
                (DeviceState::NotMounted, Attachability::True | Attachability::Uncertain) if is_ours => {
                    Action::Detach { volume: volume_name }
                }
                // Without an API server nobody can say whether an uncertain one is attached.
                (
                    DeviceState::NotMounted,
                    Attachability::True | Attachability::False | Attachability::Uncertain,
                ) => Action::Forget { volume: volume_name },
            };
            self.propose(action, None);
        }
    }

    /// Why nothing may be unmounted yet.
    fn unmount_gate(&self) -> Option<WaitReason> {
        if !self.situation.is_populated {
            Some(WaitReason::SourcesNotReady)
        } else if !self.situation.actual.is_synced() {
            Some(WaitReason::NodeStatusNotRead)
        } else {
            None
        }
    }

    /// Puts an action into the plan, or says why it does not start now.
    fn propose(&mut self, action: Action, target: Option<&Target<'_>>) {
        let key = action.key();
        let claims = self.claimed.get(action.volume()).into_iter().flatten();
        let claim = claims.filter(|(other, _)| other.matches(&key)).map(|(_, kind)| *kind).next();
        let reason = match claim {
            // The planned action has no operation: it is done at once, and the volume is planned again.
            Some(None) => return,
            Some(Some(kind)) => WaitReason::Busy { kind },
            None => match self.refusal(&action) {
                Some(refusal) => self.reason_of(refusal),
                None => {
                    let claims = self.claimed.entry(action.volume().clone()).or_default();
                    claims.push((key, action.kind()));
                    return self.plan.actions.push(action);
                }
            },
        };
        match target {
            Some(target) => self.wait(target, reason),
            None => self.wait_for_unmount(action.volume(), action.pod(), reason),
        }
    }

    /// Why an action must not start now.
    fn refusal(&self, action: &Action) -> Option<Refusal> {
        let (key, operations) = (action.key(), self.situation.operations);
        match action.kind() {
            Some(kind) => operations.refusal(&key, kind, self.situation.now),
            None => operations.running(&key),
        }
    }

    fn reason_of(&mut self, refusal: Refusal) -> WaitReason {
        match refusal {
            Refusal::Running { kind, .. } => WaitReason::Busy { kind },
            Refusal::BackOff { kind, until, error, .. } => {
                self.plan.wake_at = Some(self.plan.wake_at.map_or(until, |wake_at| wake_at.min(until)));
                WaitReason::BackOff { kind, until, error }
            }
        }
    }

    fn wait(&mut self, target: &Target<'_>, reason: WaitReason) {
        let names = target.wish.outer_names.iter().cloned().collect();
        let (volume, pod) = (target.name.clone(), Some(target.pod.clone()));
        self.plan.waits.push(Wait { volume, names, pod, is_wanted: true, reason });
    }

    fn wait_for_unmount(&mut self, volume: &VolumeName, pod: Option<&PodUid>, reason: WaitReason) {
        let (volume, pod) = (volume.clone(), pod.cloned());
        self.plan.waits.push(Wait { volume, names: Vec::new(), pod, is_wanted: false, reason });
    }
}
