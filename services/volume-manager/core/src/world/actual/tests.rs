use super::*;
use crate::world::desired::{Shape, WantedVolume};

fn volume() -> VolumeName {
    "v".into()
}

fn pod(name: &str) -> PodUid {
    name.into()
}

fn context(label: &str) -> MountLabel {
    MountLabel::Context(label.into())
}

fn verify() -> Action {
    Action::VerifyAttached { volume: volume(), pod: pod("a") }
}

fn mount_device(label: &MountLabel) -> Action {
    Action::MountDevice { volume: volume(), pod: pod("a"), label: label.clone() }
}

fn set_up(name: &str, label: &MountLabel) -> Action {
    Action::SetUp {
        volume: volume(),
        pod: pod(name),
        label: label.clone(),
        is_remount: false,
        is_reconstructed: false,
        is_serialised: true,
    }
}

fn tear_down(name: &str) -> Action {
    Action::TearDown { volume: volume(), pod: pod(name) }
}

fn unmount_device() -> Action {
    Action::UnmountDevice { volume: volume() }
}

fn found(name: &str) -> FoundVolume {
    FoundVolume {
        volume: volume(),
        pod: pod(name),
        has_device: true,
        device_mount_path: Some("/g".into()),
        label: None,
    }
}

/// A world in which these actions have succeeded.
fn after(actions: &[Action]) -> ActualWorld {
    let mut world = ActualWorld::default();
    world.finish_reading();
    for action in actions {
        world.record_start(action);
        world.record_success(action, Learned::default());
    }
    world
}

fn mounted() -> ActualWorld {
    let none = MountLabel::Unlabelled;
    after(&[verify(), mount_device(&none), set_up("a", &none)])
}

fn look(world: &ActualWorld, name: &str) -> Lookup {
    world.lookup(&volume(), &pod(name), &MountLabel::Unlabelled, None)
}

fn device(world: &ActualWorld) -> DeviceState {
    world.volume(&volume()).unwrap().device
}

#[test]
fn a_device_found_without_a_pod_may_be_mounted_and_waits_for_the_nodes_status() {
    let mut world = ActualWorld::default();
    world.add_found_device("v".into(), "/global".into(), None);
    world.finish_reading();
    assert!(world.awaits_node_status());
    world.apply_node_status(&[("v".into(), "/dev/x".to_owned())].into());
    let volume = world.volume(&"v".into()).unwrap();
    assert_eq!((volume.device, volume.attachability), (DeviceState::Uncertain, Attachability::True));
    assert_eq!(volume.device_mount_path.as_deref(), Some("/global"));
    assert!(volume.owes_unmount && volume.pods.is_empty());
}

#[test]
fn a_device_found_with_a_label_has_it_also_in_the_kernels_spelling() {
    let label = |level: &str| MountLabel::Context(format!("u:object_r:t:{level}"));
    let mut world = ActualWorld::default();
    world.add_found_device(
        "v".into(),
        "/global".into(),
        MountLabel::of_options("rw,context=\"u:object_r:t:s0:c1,c2\""),
    );
    let look = |level: &str| world.lookup(&"v".into(), &pod("a"), &label(level), None);
    assert_eq!((look("s0:c1,c2"), look("s0:c2,c1")), (Lookup::NotMounted, Lookup::NotMounted));
    assert_eq!(look("s0:c1"), Lookup::LabelDiffers { mounted: label("s0:c1,c2") });
    assert!(!world.volume(&"v".into()).unwrap().differs_from(&label("s0:c2,c1")));
    for (options, expected) in [
        ("rw,seclabel", Some(MountLabel::Unlabelled)),
        ("", Some(MountLabel::Unlabelled)),
        ("rw,context=u:object_r:t:s0,noexec", Some(label("s0"))),
        ("rw,rootcontext=\"u:object_r:t:s0\"", Some(MountLabel::Unlabelled)),
        ("rw,context=nothing", None),
    ] {
        assert_eq!(MountLabel::of_options(options), expected, "{options}");
    }
}

#[test]
fn a_lookup_follows_a_mount_from_attachment_to_teardown() {
    let mut world = after(&[]);
    assert_eq!(look(&world, "a"), Lookup::NotAttached);
    for (action, state, is_mounted) in [
        (verify(), DeviceState::NotMounted, false),
        (mount_device(&MountLabel::Unlabelled), DeviceState::GloballyMounted, false),
        (set_up("a", &MountLabel::Unlabelled), DeviceState::GloballyMounted, true),
        (tear_down("a"), DeviceState::GloballyMounted, false),
        (unmount_device(), DeviceState::NotMounted, false),
    ] {
        world.record_success(&action, Learned::default());
        assert_eq!(device(&world), state, "{action:?}");
        let lookup = if is_mounted { Lookup::Mounted } else { Lookup::NotMounted };
        assert_eq!(look(&world, "a"), lookup, "{action:?}");
        assert_eq!(world.may_have_mounts(&pod("a")), is_mounted, "{action:?}");
    }
    world.record_success(&Action::Forget { volume: volume() }, Learned::default());
    assert_eq!(world, after(&[]));
}

#[test]
fn a_lookup_says_first_what_has_to_be_resolved_first() {
    let mut desired = DesiredWorld::default();
    let inline = WantedVolume::inline(volume(), pod("a"), "pv", Shape::AttachableDevice);
    let wish = WantedVolume { is_set_up_each_sync: true, ..inline };
    desired.add(wish).unwrap();
    let mut world = mounted();
    world.initialise_size(&volume(), 10);
    let look = |world: &ActualWorld, label: &MountLabel| world.lookup(&volume(), &pod("a"), label, Some(11));
    let (none, other) = (MountLabel::Unlabelled, context("l"));
    assert_eq!(look(&world, &none), Lookup::ExpansionRequired);
    world.require_remounts(&desired, &pod("a"));
    assert_eq!(look(&world, &none), Lookup::RemountRequired);
    world.record_start(&tear_down("a"));
    assert_eq!(look(&world, &none), Lookup::Uncertain);
    assert_eq!(look(&world, &other), Lookup::LabelDiffers { mounted: none.clone() });
}

#[test]
fn an_expansion_needs_two_known_sizes_and_a_driver_that_has_not_refused() {
    for (recorded, wanted, lookup) in [
        (0, Some(9), Lookup::Mounted),
        (8, None, Lookup::Mounted),
        (8, Some(8), Lookup::Mounted),
        (8, Some(7), Lookup::Mounted),
        (8, Some(9), Lookup::ExpansionRequired),
    ] {
        let mut world = mounted();
        world.initialise_size(&volume(), recorded);
        let look = |world: &ActualWorld| world.lookup(&volume(), &pod("a"), &MountLabel::Unlabelled, wanted);
        assert_eq!(look(&world), lookup, "{recorded} {wanted:?}");
        let resize = Action::Resize { volume: volume(), pod: pod("a"), size: 9 };
        let refused = Learned { is_expansion_refused: true, ..Learned::default() };
        world.record_success(&resize, refused);
        world.reconsider_expansion(&volume());
        assert_eq!(look(&world), Lookup::Mounted);
        // The refusal ends with the mount.
        for action in [tear_down("a"), unmount_device()] {
            assert!(world.volume(&volume()).unwrap().is_expansion_refused);
            world.record_success(&action, Learned::default());
        }
        assert!(!world.volume(&volume()).unwrap().is_expansion_refused);
    }
}

#[test]
fn the_size_is_initialised_once_and_grows_with_an_expansion() {
    let mut world = mounted();
    let size = |world: &ActualWorld| world.volume(&volume()).unwrap().size;
    for (given, recorded) in [(0, None), (5, Some(5)), (6, Some(5))] {
        world.initialise_size(&volume(), given);
        assert_eq!(size(&world), recorded);
    }
    let resize = Action::Resize { volume: volume(), pod: pod("a"), size: 9 };
    world.record_failure(&resize, FailureClass::Final);
    assert_eq!(size(&world), Some(5));
    world.record_success(&resize, Learned { size: Some(9), ..Learned::default() });
    assert_eq!(size(&world), Some(9));
    world.record_success(&resize, Learned { size: Some(12), ..Learned::default() });
    assert_eq!(size(&world), Some(12));
    world.record_success(&verify(), Learned { size: Some(0), ..Learned::default() });
    assert_eq!(size(&world), Some(12));
}

#[test]
fn an_expansion_that_has_to_wait_for_the_resizer_is_tried_again_with_the_next_sync() {
    let mut world = mounted();
    world.initialise_size(&volume(), 5);
    let is_due = |world: &ActualWorld| {
        world.lookup(&volume(), &pod("a"), &MountLabel::Unlabelled, Some(9)) == Lookup::ExpansionRequired
    };
    let resize = Action::Resize { volume: volume(), pod: pod("a"), size: 9 };
    for reached in [None, Some(5), Some(8)] {
        assert!(is_due(&world), "{reached:?}");
        world.record_success(&resize, Learned { size: reached, ..Learned::default() });
        assert!(!is_due(&world), "{reached:?}");
        world.reconsider_expansion(&volume());
    }
    world.record_success(&resize, Learned { size: Some(9), ..Learned::default() });
    assert!(!world.volume(&volume()).unwrap().is_expansion_postponed && !is_due(&world));
}

#[test]
fn a_final_error_of_an_expansion_is_remembered_until_one_ends_without() {
    let mut world = mounted();
    let had_error = |world: &ActualWorld| world.volume(&volume()).unwrap().had_final_expansion_error;
    world.record_expansion_error(&volume(), true);
    // A device mount or a set-up that tried no expansion says nothing about it.
    world.record_success(&set_up("b", &MountLabel::Unlabelled), Learned::default());
    assert!(had_error(&world));
    world.record_expansion_error(&volume(), false);
    assert!(!had_error(&world));
    let resize = Action::Resize { volume: volume(), pod: pod("a"), size: 9 };
    for is_final in [true, false] {
        world.record_success(
            &resize,
            Learned { had_final_expansion_error: Some(is_final), ..Learned::default() },
        );
        assert_eq!(had_error(&world), is_final);
    }
}

#[test]
fn a_failed_set_up_changes_a_pod_by_its_class() {
    let none = MountLabel::Unlabelled;
    for (class, lookup) in [
        (FailureClass::Final, Lookup::NotMounted),
        (FailureClass::Transient, Lookup::NotMounted),
        (FailureClass::Uncertain, Lookup::Uncertain),
    ] {
        let mut world = after(&[verify(), mount_device(&none)]);
        world.record_failure(&set_up("a", &none), class);
        assert_eq!(look(&world, "a"), lookup, "{class:?}");
        // A volume that is mounted stays mounted.
        let mut world = mounted();
        world.record_failure(&set_up("a", &none), class);
        assert_eq!(look(&world, "a"), Lookup::Mounted, "{class:?}");
    }
    let mut world = after(&[verify(), mount_device(&none)]);
    world.record_failure(&set_up("a", &none), FailureClass::Uncertain);
    world.record_failure(&set_up("a", &none), FailureClass::Transient);
    assert_eq!(look(&world, "a"), Lookup::Uncertain);
    world.record_failure(&set_up("a", &none), FailureClass::Final);
    assert_eq!(look(&world, "a"), Lookup::NotMounted);
}

#[test]
fn a_failed_device_mount_changes_the_device_by_its_class() {
    let mount = mount_device(&MountLabel::Unlabelled);
    for (classes, state) in [
        (&[FailureClass::Final][..], DeviceState::NotMounted),
        (&[FailureClass::Transient], DeviceState::NotMounted),
        (&[FailureClass::Uncertain], DeviceState::Uncertain),
        (&[FailureClass::Uncertain, FailureClass::Transient], DeviceState::Uncertain),
        (&[FailureClass::Uncertain, FailureClass::Final], DeviceState::NotMounted),
    ] {
        let mut world = after(&[verify()]);
        for class in classes {
            world.record_failure(&mount, *class);
        }
        assert_eq!(device(&world), state, "{classes:?}");
    }
}

#[test]
fn what_was_mounted_once_or_found_is_unmounted_whatever_fails_after_it() {
    let none = MountLabel::Unlabelled;
    let mut once_mounted = mounted();
    for action in [tear_down("a"), unmount_device()] {
        once_mounted.record_start(&action);
        once_mounted.record_failure(&action, FailureClass::Transient);
    }
    let mut at_startup = ActualWorld::default();
    at_startup.add_found(found("a"));
    at_startup.finish_reading();
    for mut world in [once_mounted, at_startup] {
        world.record_failure(&set_up("a", &none), FailureClass::Final);
        world.record_failure(&mount_device(&none), FailureClass::Final);
        assert_eq!(look(&world, "a"), Lookup::Uncertain);
        assert_eq!(device(&world), DeviceState::Uncertain);
        // After a teardown that succeeded, a final error leaves nothing again.
        for action in [tear_down("a"), unmount_device()] {
            world.record_success(&action, Learned::default());
        }
        for class in [FailureClass::Uncertain, FailureClass::Final] {
            world.record_failure(&set_up("a", &none), class);
            world.record_failure(&mount_device(&none), class);
        }
        assert!(world.volume(&volume()).unwrap().is_unmounted());
    }
}

#[test]
fn a_teardown_that_starts_or_fails_makes_its_state_uncertain() {
    for is_over in [false, true] {
        let mut world = mounted();
        world.record_start(&tear_down("a"));
        world.record_start(&unmount_device());
        if is_over {
            world.record_failure(&tear_down("a"), FailureClass::Final);
            world.record_failure(&unmount_device(), FailureClass::Final);
        }
        assert_eq!(look(&world, "a"), Lookup::Uncertain);
        assert_eq!(device(&world), DeviceState::Uncertain);
    }
}

#[test]
fn the_label_of_a_mount_is_forgotten_only_with_its_last_part() {
    let label = context("l");
    let mut world = after(&[verify()]);
    let mounted = |world: &ActualWorld| world.volume(&volume()).unwrap().label.clone();
    world.record_failure(&mount_device(&label), FailureClass::Final);
    assert_eq!(mounted(&world), None);
    world.record_failure(&mount_device(&label), FailureClass::Uncertain);
    assert_eq!(mounted(&world), Some(label.clone()));
    world.record_success(&mount_device(&label), Learned::default());
    world.record_success(&set_up("a", &label), Learned::default());
    world.record_failure(&set_up("c", &context("other")), FailureClass::Final);
    assert_eq!(mounted(&world), Some(label.clone()));
    world.record_success(&set_up("b", &label), Learned::default());
    for action in [tear_down("a"), tear_down("b")] {
        world.record_success(&action, Learned::default());
        assert_eq!(mounted(&world), Some(label.clone()));
    }
    world.record_success(&unmount_device(), Learned::default());
    assert_eq!(mounted(&world), None);
}

#[test]
fn a_volume_of_which_something_may_be_mounted_is_never_forgotten() {
    for action in [Action::Forget { volume: volume() }, Action::Detach { volume: volume() }] {
        let mut world = mounted();
        world.record_success(&action, Learned::default());
        assert_eq!(look(&world, "a"), Lookup::Mounted);
        world.record_success(&tear_down("a"), Learned::default());
        world.record_success(&action, Learned::default());
        assert!(world.volume(&volume()).is_some(), "its device is mounted");
        world.record_success(&unmount_device(), Learned::default());
        world.record_failure(&action, FailureClass::Final);
        assert!(world.volume(&volume()).is_some());
        world.record_success(&action, Learned::default());
        assert!(world.volume(&volume()).is_none());
    }
}

#[test]
fn only_mounted_volumes_that_are_set_up_each_sync_are_marked_for_a_remount() {
    let none = MountLabel::Unlabelled;
    for (is_set_up_each_sync, is_mounted, lookup) in [
        (true, true, Lookup::RemountRequired),
        (false, true, Lookup::Mounted),
        (true, false, Lookup::Uncertain),
    ] {
        let mut desired = DesiredWorld::default();
        let inline = WantedVolume::inline(volume(), pod("a"), "data", Shape::PerPod);
        let wish = WantedVolume { is_set_up_each_sync, ..inline };
        desired.add(wish).unwrap();
        let mut world = mounted();
        if !is_mounted {
            world.record_failure(&tear_down("a"), FailureClass::Final);
        }
        world.require_remounts(&desired, &pod("b"));
        world.require_remounts(&desired, &pod("a"));
        assert_eq!(look(&world, "a"), lookup);
        // A remount that fails leaves the volume mounted and marked; one that succeeds ends it.
        world.record_failure(&set_up("a", &none), FailureClass::Uncertain);
        assert_eq!(look(&world, "a"), lookup);
        world.record_success(&set_up("a", &none), Learned::default());
        assert_eq!(look(&world, "a"), Lookup::Mounted);
    }
}

#[test]
fn device_paths_of_found_volumes_come_from_the_nodes_status() {
    for (path, attachability, device_path) in [
        (Some("/dev/sdb"), Attachability::True, Some("/dev/sdb")),
        (Some(""), Attachability::True, None),
        (None, Attachability::False, None),
    ] {
        let mut world = ActualWorld::default();
        world.add_found(found("a"));
        world.add_found(found("b"));
        assert!(!world.has_read_disk() && !world.is_synced());
        world.finish_reading();
        assert!(world.has_read_disk() && world.awaits_node_status() && !world.is_synced());
        let entry = world.volume(&volume()).unwrap();
        assert_eq!((entry.attachability, &entry.device_path), (Attachability::Uncertain, &None));
        let attached = path.map(|path| (volume(), path.to_owned())).into_iter().collect();
        world.apply_node_status(&attached);
        let entry = world.volume(&volume()).unwrap();
        assert_eq!((entry.attachability, entry.device_path.as_deref()), (attachability, device_path));
        assert!(world.is_synced() && !world.awaits_node_status());
        // A later status changes nothing: attachments are verified one by one from now on.
        let before = world.clone();
        world.apply_node_status(&BTreeMap::from([(volume(), "/dev/sdz".to_owned())]));
        assert_eq!(world, before);
    }
}

#[test]
fn without_an_api_server_the_state_is_synced_and_attachments_stay_uncertain() {
    let mut world = ActualWorld::default();
    world.add_found(found("a"));
    world.skip_node_status();
    assert!(!world.is_synced(), "the disk was not read");
    world.finish_reading();
    world.skip_node_status();
    assert!(world.is_synced());
    assert_eq!(world.volume(&volume()).unwrap().attachability, Attachability::Uncertain);
    let mut empty = ActualWorld::default();
    empty.finish_reading();
    assert!(empty.is_synced());
}

#[test]
fn a_found_volume_is_reconstructed_until_it_is_set_up_or_torn_down_once() {
    let none = MountLabel::Unlabelled;
    let start = || {
        let mut world = ActualWorld::default();
        world.add_found(found("a"));
        world.finish_reading();
        world
    };
    for (action, is_success, remains) in [
        (set_up("a", &none), true, false),
        (tear_down("a"), true, false),
        (set_up("a", &none), false, true),
        (tear_down("a"), false, true),
        (set_up("b", &none), true, true),
        (tear_down("b"), true, true),
        (mount_device(&none), true, true),
    ] {
        let mut world = start();
        assert_eq!(look(&world, "a"), Lookup::Uncertain);
        world.record_start(&action);
        if is_success {
            world.record_success(&action, Learned::default());
        } else {
            world.record_failure(&action, FailureClass::Final);
        }
        assert_eq!(world.is_reconstructed(&volume(), &pod("a")), remains, "{action:?} {is_success}");
    }
}

#[test]
fn actions_on_an_unknown_volume_change_nothing() {
    let none = MountLabel::Unlabelled;
    for action in [mount_device(&none), set_up("a", &none), tear_down("a"), unmount_device()] {
        let mut world = after(&[]);
        world.record_start(&action);
        world.record_success(&action, Learned::default());
        world.record_failure(&action, FailureClass::Uncertain);
        assert_eq!(world, after(&[]), "{action:?}");
    }
}
