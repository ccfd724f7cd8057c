use super::*;
use crate::world::action::Learned;
use crate::world::actual::FoundVolume;
use crate::world::desired::{MountLabel, Shape, WantedVolume};
use crate::world::outcome::FailureClass;

/// The worlds of a test, with every gate open: pods are known, the disk and the node's status were read.
struct Node {
    desired: DesiredWorld,
    actual: ActualWorld,
    operations: Operations,
    is_populated: bool,
    attached: BTreeSet<VolumeName>,
    is_agent: bool,
    now: u64,
}

impl Node {
    fn new() -> Self {
        let mut actual = ActualWorld::default();
        actual.finish_reading();
        Self::with(actual)
    }

    fn with(actual: ActualWorld) -> Self {
        Self {
            desired: DesiredWorld::default(),
            actual,
            operations: Operations::default(),
            is_populated: true,
            attached: BTreeSet::new(),
            is_agent: false,
            now: 0,
        }
    }

    fn plan(&self) -> WorldPlan {
        let controller = AttachedBy::Controller { attached: &self.attached };
        plan_world(&Situation {
            desired: &self.desired,
            actual: &self.actual,
            operations: &self.operations,
            is_populated: self.is_populated,
            attached_by: if self.is_agent { AttachedBy::Agent } else { controller },
            now: self.now,
        })
    }

    fn actions(&self) -> Vec<Action> {
        self.plan().actions
    }

    fn wants(&mut self, pod: &str, shape: Shape) {
        self.desired.add(wanted(pod, shape)).unwrap();
    }

    fn wants_labelled(&mut self, pod: &str, label: &str) {
        let label = MountLabel::Context(label.into());
        self.desired.add(WantedVolume { label, ..wanted(pod, Shape::Device) }).unwrap();
    }

    fn drops(&mut self, pod: &str) {
        self.desired.remove_pod(&pod.into());
    }

    /// Lets an action succeed.
    fn succeed(&mut self, action: &Action) {
        self.start(action);
        let size = match action {
            Action::Resize { size, .. } => Some(*size),
            _ => None,
        };
        self.actual.record_success(action, Learned { size, ..Learned::default() });
        self.operations.finish(&action.key(), Ok(()), self.now);
    }

    fn fail(&mut self, action: &Action, class: FailureClass) {
        self.start(action);
        self.actual.record_failure(action, class);
        self.operations.finish(&action.key(), Err("out of order".into()), self.now);
    }

    fn start(&mut self, action: &Action) {
        if let Some(kind) = action.kind() {
            self.operations.start(&action.key(), kind, self.now).unwrap();
        }
        self.actual.record_start(action);
    }

    /// Lets all planned actions succeed until nothing is planned.
    fn settle(&mut self) -> Vec<Action> {
        let mut done = Vec::new();
        for _ in 0..32 {
            let actions = self.actions();
            if actions.is_empty() {
                return done;
            }
            for action in actions {
                self.succeed(&action);
                done.push(action);
            }
        }
        panic!("never settles: {done:?}");
    }

    /// The reasons for which the pod, or a volume without pods, waits.
    fn reasons(&self, pod: Option<&str>) -> Vec<WaitReason> {
        let waits = self.plan().waits.into_iter();
        waits.filter(|w| w.pod.as_ref().map(PodUid::as_str) == pod).map(|wait| wait.reason).collect()
    }
}

fn volume() -> VolumeName {
    "v".into()
}

fn wanted(pod: &str, shape: Shape) -> WantedVolume {
    WantedVolume::inline(volume(), pod.into(), "data", shape)
}

fn verify(pod: &str) -> Action {
    Action::VerifyAttached { volume: volume(), pod: pod.into() }
}

fn mount_device(pod: &str) -> Action {
    Action::MountDevice { volume: volume(), pod: pod.into(), label: MountLabel::Unlabelled }
}

fn set_up(pod: &str) -> Action {
    Action::SetUp {
        volume: volume(),
        pod: pod.into(),
        label: MountLabel::Unlabelled,
        is_remount: false,
        is_reconstructed: false,
        is_serialised: true,
    }
}

fn unshared_set_up(pod: &str) -> Action {
    match set_up(pod) {
        Action::SetUp { volume, pod, label, is_remount, is_reconstructed, .. } => {
            Action::SetUp { volume, pod, label, is_remount, is_reconstructed, is_serialised: false }
        }
        other => other,
    }
}

fn tear_down(pod: &str) -> Action {
    Action::TearDown { volume: volume(), pod: pod.into() }
}

fn unmount_device() -> Action {
    Action::UnmountDevice { volume: volume() }
}

fn forget() -> Action {
    Action::Forget { volume: volume() }
}

fn mark_attached() -> Action {
    Action::MarkAttached { volume: volume() }
}

fn found(pod: &str, label: Option<MountLabel>) -> FoundVolume {
    FoundVolume { volume: volume(), pod: pod.into(), has_device: true, device_mount_path: None, label }
}

/// A node that has found the volume for each of these pods and has read the disk.
fn restarted(pods: &[&str], label: Option<&MountLabel>) -> Node {
    let mut actual = ActualWorld::default();
    for pod in pods {
        actual.add_found(found(pod, label.cloned()));
    }
    actual.finish_reading();
    Node::with(actual)
}

#[test]
fn a_volume_of_one_pod_is_set_up_and_torn_down_without_a_device() {
    let mut node = Node::new();
    node.wants("a", Shape::PerPod);
    assert_eq!(node.settle(), [mark_attached(), unshared_set_up("a")]);
    node.drops("a");
    assert_eq!(node.settle(), [tear_down("a"), forget()]);
}

#[test]
fn a_device_is_mounted_before_its_first_pod_and_unmounted_after_its_last() {
    let mut node = Node::new();
    node.wants("a", Shape::Device);
    node.wants("b", Shape::Device);
    assert_eq!(node.settle(), [mark_attached(), mount_device("a"), set_up("a"), set_up("b")]);
    node.drops("a");
    assert_eq!(node.settle(), [tear_down("a")]);
    node.drops("b");
    assert_eq!(node.settle(), [tear_down("b"), unmount_device(), forget()]);
}

#[test]
fn an_attachable_volume_waits_for_its_report_and_then_for_its_attachment() {
    let mut node = Node::new();
    node.wants("a", Shape::AttachableDevice);
    assert_eq!(node.actions(), []);
    assert_eq!(node.reasons(Some("a")), [WaitReason::NotReportedInUse]);
    node.attached = [volume()].into();
    assert_eq!(node.reasons(Some("a")), [WaitReason::NotReportedInUse]);
    node.attached.clear();
    node.desired.mark_reported(&[volume()].into());
    assert_eq!(node.actions(), []);
    assert_eq!(node.reasons(Some("a")), [WaitReason::NotAttached]);
    node.attached = [volume()].into();
    assert_eq!(node.settle(), [verify("a"), mount_device("a"), set_up("a")]);
    assert_eq!(node.plan(), WorldPlan::default());
    node.drops("a");
    assert_eq!(node.settle(), [tear_down("a"), unmount_device(), forget()]);
}

#[test]
fn an_agent_that_attaches_volumes_itself_detaches_those_that_it_attached() {
    let mut node = Node { is_agent: true, ..Node::new() };
    node.wants("a", Shape::AttachableDevice);
    let attach = Action::Attach { volume: volume(), pod: "a".into() };
    assert_eq!(node.settle(), [attach, mount_device("a"), set_up("a")]);
    node.drops("a");
    let detach = Action::Detach { volume: volume() };
    assert_eq!(node.settle(), [tear_down("a"), unmount_device(), detach.clone()]);
    // A detachment that failed is retried.
    node.wants("a", Shape::AttachableDevice);
    node.succeed(&Action::Attach { volume: volume(), pod: "a".into() });
    node.drops("a");
    node.fail(&detach, FailureClass::Final);
    assert_eq!(node.actions(), []);
    assert_eq!(node.plan().wake_at, Some(500));
    node.now = 500;
    assert_eq!(node.settle(), [detach]);
    // One that needs no attachment is forgotten.
    node.wants("a", Shape::Device);
    node.settle();
    node.drops("a");
    assert_eq!(node.settle().last(), Some(&forget()));
}

#[test]
fn an_agent_that_attaches_itself_attaches_again_or_detaches_what_it_has_found() {
    let found = |is_agent| {
        let mut actual = ActualWorld::default();
        actual.add_found_device(volume(), "/global".into(), None);
        actual.finish_reading();
        actual.skip_node_status();
        Node { is_agent, ..Node::with(actual) }
    };
    assert_eq!(found(true).settle(), [unmount_device(), Action::Detach { volume: volume() }]);
    // A reboot may have detached it.
    let mut node = found(true);
    node.wants("a", Shape::AttachableDevice);
    let attach = Action::Attach { volume: volume(), pod: "a".into() };
    assert_eq!(node.settle(), [attach, mount_device("a"), set_up("a")]);
    assert_eq!(found(false).settle(), [unmount_device(), forget()]);
}

#[test]
fn a_volume_that_stops_being_attachable_is_mounted_without_an_attachment() {
    let mut node = Node::new();
    node.wants("a", Shape::AttachableDevice);
    assert_eq!(node.actions(), []);
    node.desired.mark_not_attachable(&volume());
    assert_eq!(node.settle(), [mark_attached(), mount_device("a"), set_up("a")]);
}

#[test]
fn nothing_is_planned_before_the_disk_was_read() {
    let mut node = Node::with(ActualWorld::default());
    node.wants("a", Shape::PerPod);
    assert_eq!(node.plan(), WorldPlan::default());
    node.actual.finish_reading();
    assert_eq!(node.actions(), [mark_attached()]);
}

#[test]
fn nothing_is_unmounted_before_sources_are_ready_and_node_status_was_read() {
    let mut node = restarted(&["a"], None);
    for (is_populated, is_read, reason) in [
        (false, false, Some(WaitReason::SourcesNotReady)),
        (true, false, Some(WaitReason::NodeStatusNotRead)),
        (false, true, Some(WaitReason::SourcesNotReady)),
        (true, true, None),
    ] {
        node.is_populated = is_populated;
        if is_read {
            node.actual.skip_node_status();
        }
        let actions = if reason.is_none() { vec![tear_down("a")] } else { vec![] };
        assert_eq!(node.actions(), actions);
        assert_eq!(node.reasons(Some("a")), reason.into_iter().collect::<Vec<_>>());
    }
    // The same gates hold for a device without pods, and for an attachment.
    node.succeed(&tear_down("a"));
    for action in [unmount_device(), forget()] {
        node.is_populated = false;
        assert_eq!(node.actions(), []);
        assert_eq!(node.reasons(None), [WaitReason::SourcesNotReady]);
        node.is_populated = true;
        assert_eq!(node.actions(), std::slice::from_ref(&action));
        node.succeed(&action);
    }
}

#[test]
fn mounts_do_not_wait_for_the_gates_of_unmounts() {
    let mut node = restarted(&["a"], None);
    node.is_populated = false;
    node.wants("a", Shape::Device);
    assert_eq!(node.actions(), [mount_device("a")]);
    node.succeed(&mount_device("a"));
    let actions = node.actions();
    assert!(
        matches!(actions[..], [Action::SetUp { is_reconstructed: true, is_remount: false, .. }]),
        "{actions:?}"
    );
}

#[test]
fn unmounts_come_before_mounts() {
    let mut node = Node::new();
    node.wants("a", Shape::Device);
    node.settle();
    node.drops("a");
    node.wants("b", Shape::Device);
    // The device is handed over: the set-up waits for the teardown on its volume, other volumes do not.
    node.desired.add(WantedVolume::inline("w".into(), "b".into(), "other", Shape::PerPod)).unwrap();
    assert_eq!(node.actions(), [tear_down("a"), Action::MarkAttached { volume: "w".into() }]);
    assert_eq!(node.reasons(Some("b")), [WaitReason::Busy { kind: OperationKind::TearDown }]);
    node.succeed(&tear_down("a"));
    assert!(node.actions().contains(&set_up("b")));
}

#[test]
fn a_volume_on_which_an_operation_runs_is_left_alone_and_others_are_not() {
    let mut node = Node::new();
    node.wants("a", Shape::Device);
    node.settle();
    node.wants("b", Shape::Device);
    node.start(&set_up("b"));
    node.drops("a");
    node.drops("b");
    assert_eq!(node.actions(), []);
    assert_eq!(node.reasons(Some("a")), [WaitReason::Busy { kind: OperationKind::SetUp }]);
    node.desired.add(WantedVolume::inline("w".into(), "c".into(), "other", Shape::PerPod)).unwrap();
    assert_eq!(node.actions(), [Action::MarkAttached { volume: "w".into() }]);
}

#[test]
fn teardowns_of_one_volume_run_side_by_side_and_the_device_waits_for_them() {
    let mut node = Node::new();
    node.wants("a", Shape::Device);
    node.wants("b", Shape::Device);
    node.settle();
    node.drops("a");
    node.drops("b");
    assert_eq!(node.actions(), [tear_down("a"), tear_down("b")]);
    node.start(&tear_down("b"));
    node.succeed(&tear_down("a"));
    assert_eq!(node.actions(), []);
}

#[test]
fn a_set_up_that_ended_uncertain_is_retried_while_wanted_and_torn_down_after() {
    let mut node = Node::new();
    node.wants("a", Shape::Device);
    node.succeed(&mark_attached());
    node.fail(&mount_device("a"), FailureClass::Uncertain);
    node.now = 500;
    assert_eq!(node.actions(), [mount_device("a")]);
    node.drops("a");
    assert_eq!(node.settle(), [unmount_device(), forget()]);
    node.wants("a", Shape::Device);
    node.succeed(&mark_attached());
    node.succeed(&mount_device("a"));
    node.fail(&set_up("a"), FailureClass::Uncertain);
    node.now = 1000;
    assert_eq!(node.actions(), [set_up("a")]);
    node.drops("a");
    assert_eq!(node.settle(), [tear_down("a"), unmount_device(), forget()]);
}

#[test]
fn a_device_whose_mount_failed_for_good_is_not_unmounted() {
    let mut node = Node::new();
    node.wants("a", Shape::Device);
    node.succeed(&mark_attached());
    node.fail(&mount_device("a"), FailureClass::Final);
    node.drops("a");
    assert_eq!(node.settle(), [forget()]);
}

#[test]
fn errors_back_off_with_the_moment_of_the_retry_and_the_error() {
    let mut node = Node::new();
    node.wants("a", Shape::Device);
    node.succeed(&mark_attached());
    node.fail(&mount_device("a"), FailureClass::Final);
    node.now = 499;
    let plan = node.plan();
    assert_eq!((plan.actions, plan.wake_at), (vec![], Some(500)));
    let text = plan.waits[0].to_string();
    assert_eq!(text, "volume \"data\": the device mount failed and will be retried: out of order");
    node.now = 500;
    let plan = node.plan();
    assert_eq!((plan.actions, plan.wake_at, plan.waits), (vec![mount_device("a")], None, vec![]));
}

#[test]
fn the_earliest_retry_wakes_the_planner() {
    let mut node = Node::new();
    for (name, now) in [("late", 300), ("soon", 100)] {
        let volume = VolumeName::from(name);
        node.desired.add(WantedVolume::inline(volume.clone(), "a".into(), name, Shape::Device)).unwrap();
        node.succeed(&Action::MarkAttached { volume: volume.clone() });
        node.now = now;
        node.fail(
            &Action::MountDevice { volume, pod: "a".into(), label: MountLabel::Unlabelled },
            FailureClass::Final,
        );
    }
    assert_eq!(node.plan().wake_at, Some(600));
}

#[test]
fn a_pod_whose_set_up_fails_lets_the_other_pods_of_the_volume_go_first() {
    let mut node = Node::new();
    for pod in ["a", "b", "c"] {
        node.wants(pod, Shape::Device);
    }
    node.succeed(&mark_attached());
    node.succeed(&mount_device("a"));
    for pod in ["a", "b", "c", "a"] {
        assert_eq!(node.actions(), [set_up(pod)]);
        node.fail(&set_up(pod), FailureClass::Final);
        node.now += 122_000;
    }
}

#[test]
fn a_remount_keeps_the_volume_mounted_while_it_fails() {
    let mut node = Node::new();
    node.desired.add(WantedVolume { is_set_up_each_sync: true, ..wanted("a", Shape::Device) }).unwrap();
    node.settle();
    node.actual.require_remounts(&node.desired, &"a".into());
    let actions = node.actions();
    assert!(matches!(actions[..], [Action::SetUp { is_remount: true, .. }]), "{actions:?}");
    node.fail(&actions[0], FailureClass::Final);
    assert_eq!(node.actions(), []);
    node.now = 500;
    assert_eq!(node.settle(), actions);
}

#[test]
fn a_remount_does_not_wait_for_an_attachment_that_became_necessary() {
    let mut node = Node::new();
    let wish = |pod, shape| WantedVolume { is_set_up_each_sync: true, ..wanted(pod, shape) };
    node.desired.add(wish("a", Shape::Device)).unwrap();
    node.settle();
    node.desired.add(wish("a", Shape::AttachableDevice)).unwrap();
    node.actual.require_remounts(&node.desired, &"a".into());
    let actions = node.actions();
    assert!(matches!(actions[..], [Action::SetUp { is_remount: true, .. }]), "{actions:?}");
    node.succeed(&actions[0]);
    // Another pod does wait for it.
    node.desired.add(wish("b", Shape::AttachableDevice)).unwrap();
    assert_eq!(node.actions(), []);
    assert_eq!(node.reasons(Some("b")), [WaitReason::NotReportedInUse]);
}

#[test]
fn a_volume_grows_through_a_pod_that_may_write_it() {
    let mut node = Node::new();
    node.wants("a", Shape::Device);
    node.desired.add(WantedVolume { size: Some(10), ..wanted("b", Shape::Device) }).unwrap();
    node.settle();
    node.actual.initialise_size(&volume(), 5);
    assert_eq!(node.actions(), [Action::Resize { volume: volume(), pod: "b".into(), size: 10 }]);
    node.drops("b");
    assert!(!node.actions().iter().any(|action| matches!(action, Action::Resize { .. })));
}

#[test]
fn a_volume_that_is_too_small_grows() {
    let mut node = Node::new();
    let sized = |size| WantedVolume { size: Some(size), ..wanted("a", Shape::Device) };
    node.desired.add(sized(10)).unwrap();
    node.settle();
    node.actual.initialise_size(&volume(), 10);
    assert_eq!(node.actions(), []);
    node.desired.add(sized(20)).unwrap();
    assert_eq!(node.settle(), [Action::Resize { volume: volume(), pod: "a".into(), size: 20 }]);
    node.desired.add(sized(30)).unwrap();
    let resize = Action::Resize { volume: volume(), pod: "a".into(), size: 30 };
    node.actual.record_success(&resize, Learned { is_expansion_refused: true, ..Learned::default() });
    node.actual.reconsider_expansion(&volume());
    assert_eq!(node.actions(), []);
}

#[test]
fn a_pod_with_another_label_waits_until_the_first_mount_is_gone() {
    let mut node = Node::new();
    node.wants_labelled("a", "l");
    node.settle();
    node.drops("a");
    node.wants_labelled("b", "m");
    assert_eq!(node.actions(), [tear_down("a")]);
    let (mounted, wanted) = (MountLabel::Context("l".into()), MountLabel::Context("m".into()));
    let reason = WaitReason::OtherLabel { mounted, wanted: wanted.clone() };
    assert!(reason.is_error());
    assert_eq!(node.reasons(Some("b")), [reason]);
    node.succeed(&tear_down("a"));
    assert_eq!(node.actions(), [unmount_device()]);
    let done = node.settle();
    assert!(
        done.contains(&Action::MountDevice { volume: volume(), pod: "b".into(), label: wanted }),
        "{done:?}"
    );
}

#[test]
fn a_pod_that_is_desired_again_with_another_label_is_mounted_again() {
    let mut node = Node::new();
    node.wants_labelled("a", "l");
    node.settle();
    node.drops("a");
    node.wants_labelled("a", "m");
    let done = node.settle();
    assert_eq!(done[..2], [tear_down("a"), unmount_device()]);
    assert_eq!(node.plan(), WorldPlan::default());
}

#[test]
fn a_volume_found_with_another_label_stays_until_its_pod_ends() {
    let label = MountLabel::Context("old".into());
    let mut node = restarted(&["a"], Some(&label));
    node.actual.apply_node_status(&std::collections::BTreeMap::new());
    node.wants_labelled("a", "new");
    assert_eq!(node.actions(), []);
    assert!(matches!(node.reasons(Some("a"))[..], [WaitReason::OtherLabel { .. }]));
    node.drops("a");
    assert_eq!(node.settle(), [tear_down("a"), unmount_device(), forget()]);
}

#[test]
fn a_device_found_with_another_label_is_unmounted_before_a_new_pod_has_it() {
    let label = |text: &str| MountLabel::Context(text.into());
    let mut actual = ActualWorld::default();
    actual.add_found_device(volume(), "/global".into(), Some(label("old")));
    actual.finish_reading();
    actual.skip_node_status();
    for wanted in ["old", "new"] {
        let mut node = Node { is_agent: true, ..Node::with(actual.clone()) };
        node.wants_labelled("a", wanted);
        let actions = node.settle();
        assert_eq!(actions.contains(&unmount_device()), wanted == "new", "{actions:?}");
        let last = MountLabel::Context(wanted.into());
        assert!(matches!(actions.last(), Some(Action::SetUp { label, .. }) if *label == last), "{actions:?}");
    }
}

#[test]
fn a_read_write_once_pod_volume_waits_while_another_pod_may_have_it() {
    let single = |pod| WantedVolume { is_single_pod: true, ..wanted(pod, Shape::Device) };
    let mut node = Node::new();
    node.desired.add(single("a")).unwrap();
    node.settle();
    node.desired.add(single("b")).unwrap();
    for is_uncertain in [false, true] {
        if is_uncertain {
            node.drops("a");
            node.fail(&tear_down("a"), FailureClass::Final);
        }
        assert_eq!(node.actions(), []);
        assert!(node.reasons(Some("b")).contains(&WaitReason::UsedByAnotherPod { other: "a".into() }));
    }
    node.now = 500;
    assert_eq!(node.settle(), [tear_down("a"), set_up("b")]);
    // Without the access mode two pods share the volume.
    let mut node = Node::new();
    node.wants("a", Shape::Device);
    node.wants("b", Shape::Device);
    node.settle();
    assert_eq!(node.plan(), WorldPlan::default());
}

#[test]
fn a_found_volume_that_the_node_does_not_list_is_verified_before_it_is_mounted() {
    for is_listed in [false, true] {
        let mut node = restarted(&["a"], None);
        node.wants("a", Shape::AttachableDevice);
        let attached = is_listed.then(|| (volume(), "/dev/sdb".to_owned())).into_iter().collect();
        node.actual.apply_node_status(&attached);
        let first = if is_listed { vec![mount_device("a")] } else { vec![] };
        assert_eq!(node.actions(), first);
        node.attached = [volume()].into();
        node.desired.mark_reported(&[volume()].into());
        let first = if is_listed { mount_device("a") } else { verify("a") };
        assert_eq!(node.settle().first(), Some(&first));
        assert_eq!(node.plan(), WorldPlan::default());
    }
}

#[test]
fn a_found_volume_that_nobody_wants_is_torn_down_with_its_device() {
    let mut node = restarted(&["a", "b"], None);
    node.actual.apply_node_status(&std::collections::BTreeMap::from([(volume(), "/dev/sdb".to_owned())]));
    assert_eq!(node.settle(), [tear_down("a"), tear_down("b"), unmount_device(), forget()]);
}

#[test]
fn each_wait_names_the_volume_the_reason_and_who_has_to_act() {
    let none = MountLabel::Unlabelled;
    let label = MountLabel::Context("s0:c1,c2".into());
    for (reason, owner, text) in [
        (WaitReason::NotReportedInUse, "node-status", "volumesInUse"),
        (WaitReason::NotAttached, "attach-detach controller", "status.volumesAttached does not list it"),
        (
            WaitReason::OtherLabel { mounted: label, wanted: none },
            "you",
            "a different SELinux label: it is mounted with the SELinux label s0:c1,c2, and this pod needs no SELinux label",
        ),
        (
            WaitReason::UsedByAnotherPod { other: "uid-b".into() },
            "you",
            "volume uses the ReadWriteOncePod access mode and is already in use by another pod (UID uid-b)",
        ),
        (WaitReason::Busy { kind: OperationKind::SetUp }, "volume-manager", "the set-up is running"),
        (
            WaitReason::BackOff { kind: OperationKind::Resize, until: 5, error: "no space".into() },
            "volume-manager",
            "the expansion failed and will be retried: no space",
        ),
        (WaitReason::SourcesNotReady, "pod-config", "every source of pods"),
        (WaitReason::NodeStatusNotRead, "API server", "the status of this node"),
    ] {
        assert_eq!(reason.owner().to_string(), owner);
        assert_eq!(reason.is_error(), owner == "you");
        let names = vec!["data".into(), "logs".into()];
        let mut wait = Wait { volume: volume(), names, pod: None, is_wanted: true, reason };
        let message = wait.to_string();
        assert!(message.starts_with("volume \"data, logs\": ") && message.contains(text), "{message}");
        wait.names.clear();
        assert!(wait.to_string().starts_with("volume v: "));
    }
}
