//! The ordering rules of volumes.md §16, over random pods, errors and interleavings.

use std::collections::{BTreeMap, BTreeSet};

use keelson_testkit::Reached;
use proptest::prelude::*;

use super::*;
use crate::operations::{OperationKind, Operations, PodUid, VolumeName};

const SHAPES: [Shape; 3] = [Shape::PerPod, Shape::Device, Shape::AttachableDevice];
const PODS: [&str; 3] = ["a", "b", "c"];

/// What happens between two plans.
#[derive(Debug, Clone)]
enum Change {
    /// A pod begins to want a volume of this shape.
    Want(usize, usize),
    /// A pod ends.
    End(usize),
    /// A pod is synced.
    Sync(usize),
    /// The operation with this place in the list of those that run ends.
    Finish(usize, Option<FailureClass>),
    /// node-status reports the volumes in use, and the controller attaches them.
    Report,
    /// The sources of pods become ready.
    Populate,
    /// The node's status is read.
    ReadNode,
    /// Time passes.
    Later(u64),
}

/// What really exists on the disk. The planner does not see it.
#[derive(Debug, Default)]
struct Disk {
    /// Devices that are mounted.
    staged: BTreeSet<VolumeName>,
    /// Devices of which an attempt to mount them may have left something.
    maybe_staged: BTreeSet<VolumeName>,
    /// Volumes that pods have.
    published: BTreeSet<(VolumeName, PodUid)>,
    /// Mounts that have succeeded and were not undone: `None` for the device, else the pod. A final error of a later
    /// attempt leaves them.
    succeeded: BTreeSet<(VolumeName, Option<PodUid>)>,
    /// The number of successful device unmounts, by volume.
    unmounts: BTreeMap<VolumeName, usize>,
}

/// How often each thing happened in a case.
#[derive(Debug, Default)]
struct Seen {
    device_mounts: usize,
    again: usize,
    set_ups: usize,
    teardowns: usize,
    device_unmounts: usize,
    remounts: usize,
    uncertain: usize,
    final_errors: usize,
    reconstructed: usize,
    together: usize,
    ended_while_mounting: usize,
}

struct Simulation {
    desired: DesiredWorld,
    actual: ActualWorld,
    operations: Operations,
    running: Vec<Action>,
    /// `volumesInUse` in the API object, and `volumesAttached` in one with it.
    attached: BTreeSet<VolumeName>,
    is_populated: bool,
    now: u64,
    disk: Disk,
    seen: Seen,
}

fn name(shape: usize, pod: usize) -> VolumeName {
    match SHAPES[shape] {
        Shape::PerPod => format!("plain/{}", PODS[pod]).into(),
        Shape::Device => "device".into(),
        Shape::AttachableDevice => "attachable".into(),
    }
}

/// The waits of a plan whose actions were started are those of a second plan. One that backs off may be blocked by what
/// was started, too.
fn check_waits(noted: &WorldPlan, after: &WorldPlan) -> Result<(), TestCaseError> {
    let name = |wait: &Wait| (wait.volume.clone(), wait.pod.clone(), wait.is_wanted, wait.names.clone());
    let sorted = |plan: &WorldPlan| {
        let mut waits = plan.waits.clone();
        waits.sort_by_key(name);
        waits
    };
    let (noted_waits, after_waits) = (sorted(noted), sorted(after));
    prop_assert_eq!(noted_waits.len(), after_waits.len(), "{:?} {:?}", noted_waits, after_waits);
    for (noted, after) in noted_waits.iter().zip(&after_waits) {
        let is_blocked = matches!(noted.reason, WaitReason::BackOff { .. })
            && matches!(after.reason, WaitReason::Busy { .. });
        prop_assert_eq!(name(noted), name(after));
        prop_assert!(noted.reason == after.reason || is_blocked, "{:?} {:?}", noted, after);
    }
    let wakes = after.wake_at.is_none_or(|at| noted.wake_at.is_some_and(|noted| noted <= at));
    prop_assert!(wakes, "{:?} {:?}", noted.wake_at, after.wake_at);
    Ok(())
}

impl Simulation {
    /// A node on which these volumes (shape, pod) are mounted at startup.
    fn new(found: &BTreeSet<(usize, usize)>) -> Self {
        let (mut actual, mut disk) = (ActualWorld::default(), Disk::default());
        for (shape, pod) in found {
            let (volume, pod_uid) = (name(*shape, *pod), PodUid::from(PODS[*pod]));
            let has_device = SHAPES[*shape].has_device();
            if has_device {
                disk.staged.insert(volume.clone());
                disk.maybe_staged.insert(volume.clone());
                disk.succeeded.insert((volume.clone(), None));
            }
            disk.published.insert((volume.clone(), pod_uid.clone()));
            disk.succeeded.insert((volume.clone(), Some(pod_uid.clone())));
            let (device_mount_path, label) = (None, None);
            actual.add_found(FoundVolume { volume, pod: pod_uid, has_device, device_mount_path, label });
        }
        actual.finish_reading();
        let attached = disk.staged.iter().filter(|volume| volume.as_str() == "attachable").cloned().collect();
        Self {
            desired: DesiredWorld::default(),
            actual,
            operations: Operations::default(),
            running: Vec::new(),
            attached,
            is_populated: false,
            now: 0,
            disk,
            seen: Seen { reconstructed: found.len(), ..Seen::default() },
        }
    }

    fn plan(&self) -> WorldPlan {
        plan_world(&Situation {
            desired: &self.desired,
            actual: &self.actual,
            operations: &self.operations,
            is_populated: self.is_populated,
            attached_by: AttachedBy::Controller { attached: &self.attached },
            now: self.now,
        })
    }

    fn change(&mut self, change: &Change) -> Result<(), TestCaseError> {
        match *change {
            Change::Want(shape, pod) => {
                let inline = WantedVolume::inline(name(shape, pod), PODS[pod].into(), "data", SHAPES[shape]);
                let wish = WantedVolume { is_set_up_each_sync: true, ..inline };
                self.desired.add(wish).map_err(|error| TestCaseError::fail(error.to_string()))?;
            }
            Change::End(pod) => {
                let is_mounting = |a: &Action| a.kind() == Some(OperationKind::MountDevice);
                let is_its = |a: &Action| a.pod().is_some_and(|p| p.as_str() == PODS[pod]);
                self.seen.ended_while_mounting +=
                    usize::from(self.running.iter().any(|a| is_mounting(a) && is_its(a)));
                self.desired.remove_pod(&PODS[pod].into());
            }
            Change::Sync(pod) => self.actual.require_remounts(&self.desired, &PODS[pod].into()),
            Change::Finish(place, class) => {
                if !self.running.is_empty() {
                    let action = self.running.remove(place % self.running.len());
                    self.finish(&action, class)?;
                }
            }
            Change::Report => {
                if let Some(in_use) = volumes_in_use(&self.desired, &self.actual, &self.operations) {
                    self.attached = in_use.into_iter().collect();
                    self.desired.mark_reported(&self.attached);
                }
            }
            Change::Populate => self.is_populated = true,
            Change::ReadNode => {
                let listed = self.attached.iter().map(|volume| (volume.clone(), "/dev/sdb".to_owned()));
                self.actual.apply_node_status(&listed.collect());
            }
            Change::Later(milliseconds) => self.now += milliseconds,
        }
        self.run()
    }

    /// Carries out plans: everything starts that can.
    fn run(&mut self) -> Result<(), TestCaseError> {
        for _ in 0..32 {
            let plan = self.plan();
            let is_stable = plan.actions.iter().all(|action| action.kind().is_some());
            let mut noted = plan.clone();
            noted.note_started(&self.desired, &plan.actions);
            for action in plan.actions {
                self.start(action)?;
            }
            self.check_lookups()?;
            if is_stable {
                let after = self.plan();
                prop_assert_eq!(&after.actions, &vec![], "a plan starts everything that can start");
                check_waits(&noted, &after)?;
                return Ok(());
            }
        }
        Err(TestCaseError::fail("a plan repeats itself"))
    }

    fn start(&mut self, action: Action) -> Result<(), TestCaseError> {
        self.check_order(&action)?;
        self.actual.record_start(&action);
        let Some(kind) = action.kind() else {
            self.actual.record_success(&action, Learned::default());
            return Ok(());
        };
        prop_assert_eq!(self.operations.start(&action.key(), kind, self.now), Ok(()));
        prop_assert!(self.running.iter().all(|other| !other.key().matches(&action.key())));
        self.running.push(action);
        self.seen.together += usize::from(self.running.len() > 1);
        Ok(())
    }

    /// The rules of §16 for an action that starts.
    fn check_order(&self, action: &Action) -> Result<(), TestCaseError> {
        let volume = action.volume();
        let has_pods = self.disk.published.iter().any(|(v, _)| v == volume);
        match action {
            Action::TearDown { pod, .. } => {
                prop_assert!(self.desired.pod(volume, pod).is_none(), "{:?} is wanted", action);
                prop_assert!(self.is_populated && self.actual.is_synced(), "{:?} is too early", action);
            }
            Action::UnmountDevice { .. } => {
                prop_assert!(!has_pods, "{:?} has pods", action);
                prop_assert!(self.desired.volume(volume).is_none(), "{:?} is wanted", action);
                prop_assert!(self.disk.maybe_staged.contains(volume), "{:?} was never mounted", action);
                prop_assert!(self.is_populated && self.actual.is_synced(), "{:?} is too early", action);
            }
            Action::Forget { .. } => {
                prop_assert!(!has_pods && !self.disk.maybe_staged.contains(volume), "{:?} leaks", action);
            }
            Action::MountDevice { .. } if volume.as_str() == "attachable" => {
                prop_assert!(self.attached.contains(volume), "{:?} is not reported in use", action);
            }
            Action::SetUp { .. } if !volume.as_str().starts_with("plain") => {
                prop_assert!(self.disk.staged.contains(volume), "{:?} without its device", action);
            }
            _ => {}
        }
        Ok(())
    }

    /// A volume that counts as mounted is mounted, and nothing is undoing that.
    fn check_lookups(&self) -> Result<(), TestCaseError> {
        for (volume, desired) in self.desired.volumes() {
            for pod in desired.pods.keys() {
                let lookup = self.actual.lookup(volume, pod, &desired.label, desired.size);
                if matches!(lookup, Lookup::Mounted | Lookup::RemountRequired) {
                    prop_assert!(self.disk.published.contains(&(volume.clone(), pod.clone())));
                    let undo = Action::TearDown { volume: volume.clone(), pod: pod.clone() };
                    prop_assert!(!self.running.contains(&undo), "{} counts as mounted", volume);
                }
            }
        }
        if let Some(in_use) = volumes_in_use(&self.desired, &self.actual, &self.operations) {
            let staged = self.disk.maybe_staged.contains(&"attachable".into());
            prop_assert!(!staged || in_use.contains(&"attachable".into()), "not in use while staged");
        }
        Ok(())
    }

    fn finish(&mut self, action: &Action, class: Option<FailureClass>) -> Result<(), TestCaseError> {
        let result = match class {
            None => {
                self.succeed_on_disk(action)?;
                self.actual.record_success(action, Learned::default());
                Ok(())
            }
            Some(class) => {
                self.fail_on_disk(action, class);
                self.actual.record_failure(action, class);
                Err("error".to_owned())
            }
        };
        self.operations.finish(&action.key(), result, self.now);
        Ok(())
    }

    fn succeed_on_disk(&mut self, action: &Action) -> Result<(), TestCaseError> {
        let (volume, disk) = (action.volume().clone(), &mut self.disk);
        let mount = (volume.clone(), action.pod().cloned());
        match action {
            Action::MountDevice { .. } => {
                self.seen.device_mounts += 1;
                self.seen.again += usize::from(disk.unmounts.contains_key(&volume));
                disk.staged.insert(volume.clone());
                disk.maybe_staged.insert(volume.clone());
                disk.succeeded.insert((volume, None));
            }
            Action::SetUp { pod, is_remount, .. } => {
                self.seen.set_ups += 1;
                self.seen.remounts += usize::from(*is_remount);
                disk.published.insert((volume, pod.clone()));
                disk.succeeded.insert(mount);
            }
            Action::TearDown { pod, .. } => {
                self.seen.teardowns += 1;
                disk.published.remove(&(volume, pod.clone()));
                disk.succeeded.remove(&mount);
            }
            Action::UnmountDevice { .. } => {
                self.seen.device_unmounts += 1;
                disk.staged.remove(&volume);
                disk.succeeded.remove(&mount);
                prop_assert!(disk.maybe_staged.remove(&volume), "unmounted twice");
                *disk.unmounts.entry(volume).or_default() += 1;
            }
            _ => {}
        }
        Ok(())
    }

    /// An uncertain error may have done the work: about every second one has. After a final error nothing is left of
    /// the attempts since the last success.
    fn fail_on_disk(&mut self, action: &Action, class: FailureClass) {
        let (volume, disk) = (action.volume().clone(), &mut self.disk);
        let is_final = class == FailureClass::Final;
        let is_uncertain = class == FailureClass::Uncertain;
        let has_worked = is_uncertain && self.now.is_multiple_of(2);
        self.seen.final_errors += usize::from(is_final);
        let mount = (volume.clone(), action.pod().cloned());
        match action {
            Action::MountDevice { .. } => {
                self.seen.uncertain += usize::from(is_uncertain);
                if is_uncertain {
                    disk.maybe_staged.insert(volume.clone());
                }
                if has_worked {
                    disk.staged.insert(volume);
                } else if is_final && !disk.succeeded.contains(&(volume.clone(), None)) {
                    disk.staged.remove(&volume);
                    disk.maybe_staged.remove(&volume);
                }
            }
            Action::SetUp { pod, .. } if has_worked => {
                disk.published.insert((volume, pod.clone()));
            }
            Action::SetUp { pod, .. } if is_final && !disk.succeeded.contains(&mount) => {
                disk.published.remove(&(volume, pod.clone()));
            }
            Action::TearDown { pod, .. } if has_worked => {
                disk.published.remove(&(volume, pod.clone()));
            }
            Action::UnmountDevice { .. } if has_worked => {
                disk.staged.remove(&volume);
            }
            _ => {}
        }
    }

    /// Lets everything succeed from now on, until nothing changes any more.
    fn settle(&mut self) -> Result<(), TestCaseError> {
        for change in [Change::Populate, Change::ReadNode] {
            self.change(&change)?;
        }
        for _ in 0..200 {
            self.change(&Change::Report)?;
            self.change(&Change::Later(crate::operations::MAX_BACK_OFF))?;
            if self.running.is_empty() {
                let plan = self.plan();
                prop_assert_eq!(plan.actions, vec![]);
                prop_assert_eq!(plan.waits, vec![], "what has settled waits for nothing");
                return Ok(());
            }
            while !self.running.is_empty() {
                self.change(&Change::Finish(0, None))?;
            }
        }
        Err(TestCaseError::fail("never settles"))
    }
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let class = prop::sample::select(vec![
        None,
        None,
        Some(FailureClass::Final),
        Some(FailureClass::Uncertain),
        Some(FailureClass::Transient),
    ]);
    let change = prop_oneof![
        3 => (0..3usize, 0..3usize).prop_map(|(shape, pod)| Change::Want(shape, pod)),
        1 => (0..3usize).prop_map(Change::End),
        1 => (0..3usize).prop_map(Change::Sync),
        6 => (0..4usize, class).prop_map(|(place, class)| Change::Finish(place, class)),
        2 => Just(Change::Report),
        1 => Just(Change::Populate),
        1 => Just(Change::ReadNode),
        2 => (1..2000u64).prop_map(Change::Later),
    ];
    prop::collection::vec(change, 1..80)
}

/// Rules 1, 2, 3, 4, 5, 7 and 9 of §16, as far as they are decisions: see [`Simulation::check_order`] and
/// [`Simulation::check_lookups`]. In the end everything desired is mounted, and nothing else is.
#[test]
fn every_desired_world_settles_and_each_step_keeps_the_order() {
    let reached = &Reached::default();
    let found = prop::collection::btree_set((0..3usize, 0..3usize), 0..3);
    proptest!(ProptestConfig::with_cases(2048), |(found in found, changes in changes())| {
        let mut node = Simulation::new(&found);
        for change in &changes {
            node.change(change)?;
        }
        node.settle()?;
        let wanted: BTreeSet<_> = node
            .desired
            .volumes()
            .flat_map(|(volume, desired)| desired.pods.keys().map(|pod| (volume.clone(), pod.clone())))
            .collect();
        prop_assert_eq!(&node.disk.published, &wanted);
        // Every pod ends: each device mount is undone, and nothing is left.
        let before = node.disk.unmounts.clone();
        let staged = node.disk.staged.clone();
        for pod in 0..PODS.len() {
            node.change(&Change::End(pod))?;
        }
        node.settle()?;
        prop_assert!(node.disk.published.is_empty() && node.disk.maybe_staged.is_empty());
        prop_assert_eq!(node.actual.volumes().count(), 0);
        for volume in &staged {
            let count = |counts: &BTreeMap<VolumeName, usize>| counts.get(volume).copied().unwrap_or_default();
            prop_assert_eq!(count(&node.disk.unmounts), count(&before) + 1, "one unmount of {}", volume);
        }
        let seen = &node.seen;
        reached.case([
            ("a device is mounted", seen.device_mounts > 0),
            ("a device is mounted again after its unmount", seen.again > 0),
            ("a volume is set up", seen.set_ups > 0),
            ("a volume is set up again", seen.remounts > 0),
            ("a volume is torn down", seen.teardowns > 0),
            ("a device is unmounted", seen.device_unmounts > 0),
            ("a device mount ends uncertain", seen.uncertain > 0),
            ("an error is final", seen.final_errors > 0),
            ("a volume is found at startup", seen.reconstructed > 0),
            ("operations run at the same time", seen.together > 0),
            ("a pod ends during the mount of its device", seen.ended_while_mounting > 0),
        ]);
    });
    // The rarest: "a device is mounted again after its unmount", in one case of 17.
    reached.assert_each();
}

/// A pod that fails for ever does not keep another pod of the same volume from being mounted, nor other volumes.
#[test]
fn a_pod_that_always_fails_keeps_no_other_pod_waiting_for_ever() {
    let reached = &Reached::default();
    proptest!(ProptestConfig::with_cases(256), |(bad in 0..3usize, shape in 0..3usize, class in 0..3usize)| {
        let class = [FailureClass::Final, FailureClass::Uncertain, FailureClass::Transient][class];
        let mut node = Simulation::new(&BTreeSet::new());
        for change in [Change::Populate, Change::ReadNode] {
            node.change(&change)?;
        }
        for pod in 0..PODS.len() {
            node.change(&Change::Want(shape, pod))?;
        }
        for _ in 0..16 {
            node.change(&Change::Report)?;
            while let Some(action) = node.running.first() {
                let is_set_up = action.kind() == Some(OperationKind::SetUp);
                let fails = is_set_up && action.pod().is_some_and(|pod| pod.as_str() == PODS[bad]);
                node.change(&Change::Finish(0, fails.then_some(class)))?;
            }
            node.change(&Change::Later(crate::operations::MAX_BACK_OFF))?;
        }
        for (pod, uid) in PODS.iter().enumerate() {
            let lookup = node.actual.lookup(&name(shape, pod), &(*uid).into(), &MountLabel::Unlabelled, None);
            prop_assert_eq!(lookup == Lookup::Mounted, pod != bad, "{}", uid);
        }
        reached.case([("the first fails", bad == 0), ("the second", bad == 1), ("the last", bad == 2)]);
    });
    // Each in one case of 3.
    reached.assert_each();
}
