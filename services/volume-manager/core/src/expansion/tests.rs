use keelson_testkit::Reached;
use proptest::prelude::*;

use super::*;

const NOW: &str = "2026-01-02T03:04:05Z";

fn size(gib: u64) -> Size {
    Size { bytes: gib << 30, text: format!("{gib}Gi") }
}

/// A claim as the API server has it.
fn object(status: Option<&str>, allocated: Option<u64>, capacity: u64) -> Value {
    let mut object = json!({
        "metadata": {"name": "claim", "namespace": "ns", "resourceVersion": "7"},
        "spec": {"accessModes": ["ReadWriteOnce"], "volumeName": "pv"},
        "status": {"phase": "Bound", "capacity": {"storage": size(capacity).text, "other": "1"}},
    });
    if let Some(status) = status {
        object["status"]["allocatedResourceStatuses"] =
            json!({"storage": status, "other": "NodeResizePending"});
    }
    if let Some(allocated) = allocated {
        object["status"]["allocatedResources"] = json!({"storage": size(allocated).text});
    }
    object
}

fn read(object: &Value) -> PersistentVolumeClaim {
    serde_json::from_value(object.clone()).unwrap()
}

fn gib(text: &str) -> u64 {
    text.strip_suffix("Gi").unwrap().parse::<u64>().unwrap() << 30
}

/// Decides at a mount or online for a claim that asks for the size of its volume, 2 GiB.
fn decided(object: &Value, moment: Moment) -> Step {
    with_sizes(&read(object), |claim, sizes| decide(claim, sizes, moment, false))
}

/// Calls `f` with the sizes of the claim and a volume of 2 GiB.
fn with_sizes<T>(
    claim: &PersistentVolumeClaim,
    f: impl FnOnce(&PersistentVolumeClaim, &Sizes<'_>) -> T,
) -> T {
    let allocated = claim.status.allocated_resources.get("storage");
    let allocated = allocated.map(|text| Size { bytes: gib(text), text: text.clone() });
    let capacity = claim.status.capacity.get("storage").map_or(0, |text| gib(text));
    let volume = size(2);
    let sizes = Sizes { volume: &volume, requested: size(2).bytes, capacity, allocated: allocated.as_ref() };
    f(claim, &sizes)
}

fn online(recorded: u64) -> Moment {
    Moment::Online { recorded: size(recorded).bytes }
}

fn expansion(mode: Mode) -> Expansion {
    Expansion { from: size(1).bytes, to: size(2), mode, before: None }
}

fn error(class: ErrorClass) -> Result<(), ExpandError<'static>> {
    Err(ExpandError { class, text: "no space", now: NOW })
}

/// A strategic merge, as far as the status of a claim needs one.
fn apply(object: &mut Value, patch: &Value) {
    let Value::Object(changes) = patch else {
        *object = patch.clone();
        return;
    };
    if !object.is_object() {
        *object = json!({});
    }
    for (field, change) in changes {
        if change.is_null() {
            object.as_object_mut().unwrap().remove(field);
        } else if field == "conditions" {
            let mut list = object[field].as_array().cloned().unwrap_or_default();
            for item in change.as_array().unwrap() {
                let at = list.iter().position(|old| old["type"] == item["type"]);
                match (at, item["$patch"] == "delete") {
                    (Some(at), true) => drop(list.remove(at)),
                    (Some(at), false) => apply(&mut list[at], item),
                    (None, true) => panic!("deletes a condition that is missing: {item}"),
                    (None, false) => list.push(item.clone()),
                }
            }
            object[field] = list.into();
        } else {
            apply(&mut object[field], change);
        }
    }
}

#[test]
fn only_persistent_volumes_whose_plugin_can_expand_are_expanded() {
    assert!(is_expandable(Origin::PersistentVolume, true));
    assert!(!is_expandable(Origin::PersistentVolume, false));
    assert!(!is_expandable(Origin::Inline, true) && !is_expandable(Origin::InlineMigrated, true));
}

#[test]
fn a_volume_that_has_the_size_already_is_done() {
    assert_eq!(
        decided(&object(Some(PENDING), Some(2), 2), Moment::AtMount),
        Step::Done { recorded: 2 << 30 }
    );
    assert_eq!(decided(&object(None, None, 3), Moment::AtMount), Step::Done { recorded: 3 << 30 });
    assert_eq!(decided(&object(None, None, 1), online(2)), Step::Done { recorded: 2 << 30 });
}

#[test]
fn sizes_are_compared_by_value() {
    let claim = read(&object(None, None, 1));
    let volume = Size { bytes: 1 << 30, text: "1024Mi".to_owned() };
    let sizes = Sizes { volume: &volume, requested: 0, capacity: 1 << 30, allocated: None };
    assert_eq!(decide(&claim, &sizes, Moment::AtMount, false), Step::Done { recorded: 1 << 30 });
}

#[test]
fn a_read_only_use_is_reported_and_expands_nothing() {
    for moment in [Moment::AtMount, online(1)] {
        for object in [object(None, None, 1), object(Some(PENDING), Some(2), 1)] {
            let step = with_sizes(&read(&object), |claim, sizes| decide(claim, sizes, moment, true));
            assert_eq!(step, Step::ReadOnly { recorded: 1 << 30 });
        }
    }
    let step =
        with_sizes(&read(&object(None, None, 2)), |claim, sizes| decide(claim, sizes, Moment::AtMount, true));
    assert_eq!(step, Step::Done { recorded: 2 << 30 });
}

#[test]
fn a_claim_without_tracking_is_expanded_to_the_size_of_its_volume() {
    for moment in [Moment::AtMount, online(1)] {
        assert_eq!(decided(&object(None, None, 1), moment), Step::Expand(expansion(Mode::Untracked)));
    }
}

#[test]
fn a_pending_claim_is_marked_as_in_progress_before_the_driver_is_called() {
    for moment in [Moment::AtMount, online(1)] {
        let before = json!({
            "status": {"allocatedResourceStatuses": {"storage": "NodeResizeInProgress"}},
            "metadata": {"resourceVersion": "7"},
        });
        let expected = Expansion { before: Some(before), ..expansion(Mode::Tracked) };
        assert_eq!(decided(&object(Some(PENDING), Some(2), 1), moment), Step::Expand(expected));
        let step = decided(&object(Some(IN_PROGRESS), Some(2), 1), moment);
        assert_eq!(step, Step::Expand(expansion(Mode::Tracked)));
    }
}

#[test]
fn a_tracked_claim_is_expanded_to_its_allocated_size() {
    let Step::Expand(expansion) = decided(&object(Some(IN_PROGRESS), Some(3), 1), online(1)) else {
        panic!()
    };
    assert_eq!(expansion.to, size(3));
    let Step::Expand(expansion) = decided(&object(Some(IN_PROGRESS), None, 1), online(1)) else { panic!() };
    assert_eq!(expansion.to, size(2));
}

#[test]
fn a_claim_in_another_status_waits_for_the_resizer() {
    for status in [
        "NodeResizeInfeasible",
        "ControllerResizeInProgress",
        "ControllerResizeInfeasible",
        "NodeResizeFailed",
        "nodeResizePending",
    ] {
        for moment in [Moment::AtMount, online(1)] {
            let step = decided(&object(Some(status), Some(2), 1), moment);
            assert_eq!(step, Step::Later { status: status.to_owned() });
        }
    }
    assert_eq!(decided(&object(None, Some(2), 1), online(1)), Step::Later { status: String::new() });
}

#[test]
fn a_finished_claim_is_expanded_again_only_if_each_node_has_to() {
    let mut claim = object(None, Some(2), 2);
    assert_eq!(decided(&claim, online(1)), Step::Done { recorded: 2 << 30 });
    claim["spec"]["accessModes"] = json!(["ReadOnlyMany", "ReadWriteMany"]);
    assert_eq!(decided(&claim, online(1)), Step::Expand(expansion(Mode::ClaimDone)));
    claim["metadata"]["annotations"] = json!({"volume.kubernetes.io/node-expansion-not-required": "false"});
    assert_eq!(decided(&claim, online(1)), Step::Done { recorded: 2 << 30 });
    // ReadWriteMany does not replace the resizer.
    let mut claim = object(None, Some(2), 1);
    claim["spec"]["accessModes"] = json!(["ReadWriteMany"]);
    assert_eq!(decided(&claim, online(1)), Step::Later { status: String::new() });
}

#[test]
fn codes_of_drivers_have_their_classes_and_a_timeout_is_not_final() {
    for (class, codes) in [
        (ErrorClass::InUse, &[9][..]),
        (ErrorClass::Infeasible, &[3, 5, 11]),
        (ErrorClass::Unfinished, &[1, 4, 8, 10, 14]),
        (ErrorClass::Final, &[2, 6, 7, 12, 13, 15, 16, 99]),
    ] {
        for code in codes {
            assert_eq!(ErrorClass::of_code(Some(*code)), class, "{code}");
        }
    }
    assert_eq!(ErrorClass::of_code(None), ErrorClass::Unfinished);
}

fn finished(object: &Value, mode: Mode, result: Result<(), ExpandError<'_>>) -> Outcome {
    with_sizes(&read(object), |claim, sizes| finish(&expansion(mode), claim, sizes, false, result))
}

#[test]
fn a_success_sets_the_capacity_and_drops_status_and_conditions_of_the_expansion() {
    let mut claim = object(Some(IN_PROGRESS), Some(2), 1);
    let kinds = ["Resizing", "Kept", "FileSystemResizePending", "ControllerResizeError", "NodeResizeError"];
    claim["status"]["conditions"] =
        kinds.iter().map(|kind| json!({"type": kind, "status": "True"})).collect();
    let outcome = finished(&claim, Mode::Tracked, Ok(()));
    let deleted = |kind: &str| json!({"$patch": "delete", "type": kind});
    let patch = json!({
        "metadata": {"resourceVersion": "7"},
        "status": {
            "capacity": {"storage": "2Gi"},
            "allocatedResourceStatuses": {"storage": null},
            "conditions": [
                deleted("Resizing"),
                deleted("FileSystemResizePending"),
                deleted("ControllerResizeError"),
                deleted("NodeResizeError"),
            ],
        },
    });
    assert_eq!(outcome, Outcome::Expanded { recorded: 2 << 30, patch: Some(patch.clone()) });
    apply(&mut claim, &patch);
    let status = &claim["status"];
    assert_eq!(status["conditions"], json!([{"type": "Kept", "status": "True"}]));
    assert_eq!(status["capacity"], json!({"storage": "2Gi", "other": "1"}));
    assert_eq!(status["allocatedResourceStatuses"], json!({"other": "NodeResizePending"}));
    assert_eq!(status["allocatedResources"], json!({"storage": "2Gi"}));
}

#[test]
fn a_success_patches_a_claim_only_if_it_lacks_the_size() {
    let patch = json!({"status": {"capacity": {"storage": "2Gi"}}, "metadata": {"resourceVersion": "7"}});
    let mut other = object(None, None, 1);
    other["status"]["allocatedResourceStatuses"] = json!({"other": "NodeResizePending"});
    for (claim, mode, patch) in [
        (object(None, None, 1), Mode::Untracked, Some(patch.clone())),
        (other, Mode::Untracked, Some(patch)),
        (object(None, None, 2), Mode::Untracked, None),
        (object(None, Some(2), 2), Mode::ClaimDone, None),
    ] {
        assert_eq!(finished(&claim, mode, Ok(())), Outcome::Expanded { recorded: 2 << 30, patch });
    }
}

fn condition_patch(status: Option<&str>) -> Value {
    let mut patch = json!({"status": {"conditions": [{
        "type": "NodeResizeError", "status": "True", "message": "failed to expand pvc with no space",
        "lastTransitionTime": NOW,
    }]}});
    if let Some(status) = status {
        patch["status"]["allocatedResourceStatuses"] = json!({"storage": status});
    }
    patch
}

#[test]
fn each_error_class_has_its_outcome_in_each_mode() {
    let failed = |is_final, patch| Outcome::Failed { is_final, patch };
    let refused = |recorded, is_final, patch| Outcome::Refused { recorded, is_final, patch };
    let done = || Outcome::NotNeeded { recorded: 2 << 30 };
    let condition = || Some(condition_patch(None));
    let infeasible = || Some(condition_patch(Some("NodeResizeInfeasible")));
    for (mode, class, expected) in [
        (Mode::Tracked, ErrorClass::NotSupported, failed(true, condition())),
        (Mode::Tracked, ErrorClass::InUse, refused(None, true, condition())),
        (Mode::Tracked, ErrorClass::Infeasible, failed(true, infeasible())),
        (Mode::Tracked, ErrorClass::Final, failed(true, condition())),
        (Mode::Tracked, ErrorClass::Unfinished, failed(false, None)),
        (Mode::ClaimDone, ErrorClass::NotSupported, done()),
        (Mode::ClaimDone, ErrorClass::InUse, refused(None, true, condition())),
        (Mode::ClaimDone, ErrorClass::Infeasible, failed(true, infeasible())),
        (Mode::ClaimDone, ErrorClass::Final, failed(true, condition())),
        (Mode::ClaimDone, ErrorClass::Unfinished, failed(false, None)),
        (Mode::Untracked, ErrorClass::NotSupported, done()),
        (Mode::Untracked, ErrorClass::InUse, refused(Some(2 << 30), false, None)),
        (Mode::Untracked, ErrorClass::Infeasible, failed(false, None)),
        (Mode::Untracked, ErrorClass::Final, failed(false, None)),
        (Mode::Untracked, ErrorClass::Unfinished, failed(false, None)),
    ] {
        let status = (mode == Mode::Tracked).then_some(IN_PROGRESS);
        let outcome = finished(&object(status, Some(2), 1), mode, error(class));
        assert_eq!(outcome, expected, "{mode:?} {class:?}");
    }
}

#[test]
fn a_repeated_final_error_is_infeasible_once_the_user_asks_for_another_size() {
    let object = object(Some(IN_PROGRESS), Some(2), 1);
    for (had_final_error, requested, class, is_infeasible) in [
        (true, 3, ErrorClass::Final, true),
        (true, 1, ErrorClass::Final, true),
        (true, 3, ErrorClass::InUse, true),
        (true, 2, ErrorClass::Final, false),
        (false, 3, ErrorClass::Final, false),
    ] {
        let outcome = with_sizes(&read(&object), |claim, sizes| {
            let sizes = Sizes { requested: size(requested).bytes, ..*sizes };
            finish(&expansion(Mode::Tracked), claim, &sizes, had_final_error, error(class))
        });
        let (Outcome::Failed { patch, .. } | Outcome::Refused { patch, .. }) = outcome else { panic!() };
        let expected = condition_patch(is_infeasible.then_some("NodeResizeInfeasible"));
        assert_eq!(patch, Some(expected), "{had_final_error} {requested} {class:?}");
    }
}

#[test]
fn a_reported_error_keeps_its_time_and_is_not_reported_twice() {
    let mut claim = object(Some(IN_PROGRESS), Some(2), 1);
    let outcome = finished(&claim, Mode::Tracked, error(ErrorClass::Infeasible));
    let Outcome::Failed { patch: Some(patch), .. } = outcome else { panic!() };
    assert!(patch["metadata"].is_null(), "{patch}");
    apply(&mut claim, &patch);
    let again = finished(&claim, Mode::Tracked, error(ErrorClass::Infeasible));
    assert_eq!(again, Outcome::Failed { is_final: true, patch: None });
    let later = ExpandError { class: ErrorClass::Final, text: "other", now: "2027-01-01T00:00:00Z" };
    let Outcome::Failed { patch: Some(patch), .. } = finished(&claim, Mode::Tracked, Err(later)) else {
        panic!()
    };
    apply(&mut claim, &patch);
    let condition = json!({"type": "NodeResizeError", "status": "True", "message": "failed to expand pvc with other",
        "lastTransitionTime": NOW});
    assert_eq!(claim["status"]["conditions"], json!([condition]));
    // A condition that was false becomes true at a new time.
    claim["status"]["conditions"][0]["status"] = json!("False");
    let Outcome::Failed { patch: Some(patch), .. } = finished(&claim, Mode::Tracked, Err(later)) else {
        panic!()
    };
    assert_eq!(patch["status"]["conditions"][0]["lastTransitionTime"], "2027-01-01T00:00:00Z");
}

#[test]
fn conditions_that_are_not_objects_are_left_alone() {
    let mut claim = object(Some(IN_PROGRESS), Some(2), 1);
    claim["status"]["conditions"] = json!([null, "x", {"type": 7}, []]);
    let Outcome::Expanded { patch: Some(patch), .. } = finished(&claim, Mode::Tracked, Ok(())) else {
        panic!()
    };
    assert!(patch["status"]["conditions"].is_null(), "{patch}");
}

#[test]
fn event_texts_name_volume_and_node() {
    assert_eq!(expanded_text("pv", "n1"), "MountVolume.NodeExpandVolume succeeded for volume \"pv\" n1");
    let text = read_only_text("pv");
    let start = "MountVolume.NodeExpandVolume failed for volume \"pv\" requested read-only file system";
    assert!(text.starts_with(start), "{text}");
}

/// Carries out decisions until nothing is left to do; the driver answers with `answers`, then succeeds. Returns the
/// recorded size and how often the driver was called.
fn carry_out(claim: &mut Value, answers: &[ErrorClass]) -> Result<(u64, usize), TestCaseError> {
    let (mut recorded, mut calls, mut had_final_error) = (size(1).bytes, 0, false);
    for _ in 0..=answers.len() + 1 {
        let step = decided(claim, Moment::Online { recorded });
        let Step::Expand(expansion) = step else {
            if let Step::Done { recorded: new } = step {
                recorded = new;
            }
            break;
        };
        if let Some(before) = &expansion.before {
            apply(claim, before);
        }
        let status = &claim["status"]["allocatedResourceStatuses"]["storage"];
        prop_assert!(expansion.mode != Mode::Tracked || *status == IN_PROGRESS);
        let result = answers.get(calls).map_or(Ok(()), |class| error(*class));
        calls += 1;
        let outcome = with_sizes(&read(claim), |claim, sizes| {
            finish(&expansion, claim, sizes, had_final_error, result)
        });
        let (new, patch, is_final, is_over) = match outcome {
            Outcome::Expanded { recorded, patch } => (Some(recorded), patch, false, false),
            Outcome::NotNeeded { recorded } => (Some(recorded), None, false, false),
            Outcome::Refused { recorded, patch, is_final } => (recorded, patch, is_final, true),
            Outcome::Failed { patch, is_final } => (None, patch, is_final, false),
        };
        had_final_error |= is_final;
        recorded = new.unwrap_or(recorded);
        if let Some(patch) = &patch {
            apply(claim, patch);
        }
        if is_over {
            break;
        }
    }
    Ok((recorded, calls))
}

#[test]
fn an_expansion_ends_expanded_refused_or_infeasible_and_keeps_what_is_not_its_own() {
    let reached = &Reached::default();
    let classes = prop::sample::select(vec![
        ErrorClass::NotSupported,
        ErrorClass::InUse,
        ErrorClass::Infeasible,
        ErrorClass::Final,
        ErrorClass::Unfinished,
        ErrorClass::Unfinished,
    ]);
    let statuses = prop::sample::select(vec![
        None,
        Some(PENDING),
        Some(IN_PROGRESS),
        Some("ControllerResizeInProgress"),
    ]);
    let kinds = prop::sample::subsequence(vec!["Resizing", "Kept", "NodeResizeError"], 0..=3);
    let claims = (statuses, prop::option::of(Just(2)), 1u64..3, any::<bool>(), kinds);
    let answers = prop::collection::vec(classes, 0..5);
    proptest!(ProptestConfig::with_cases(2048), |(
        (status, allocated, capacity, is_shared, kinds) in claims, answers in answers,
    )| {
        let mut claim = object(status, allocated, capacity);
        let conditions = kinds.iter().map(|kind| json!({"type": kind, "status": "True"}));
        claim["status"]["conditions"] = conditions.collect();
        if is_shared {
            claim["spec"]["accessModes"] = json!(["ReadWriteMany"]);
        }
        let before = claim.clone();
        let (recorded, calls) = carry_out(&mut claim, &answers)?;
        let kept = |claim: &Value| {
            let list = claim["status"]["conditions"].as_array().cloned().unwrap_or_default();
            let others = list.into_iter().filter(|item| item["type"] == "Kept").collect::<Vec<_>>();
            (others, claim["status"]["capacity"]["other"].clone(), claim["status"]["phase"].clone())
        };
        prop_assert_eq!(kept(&claim), kept(&before));
        let status_of = |claim: &Value, resource: &str| claim["status"]["allocatedResourceStatuses"][resource].clone();
        prop_assert_eq!(status_of(&claim, "other"), status_of(&before, "other"));
        let old = gib(before["status"]["capacity"]["storage"].as_str().unwrap());
        let new = gib(claim["status"]["capacity"]["storage"].as_str().unwrap());
        prop_assert!(new >= old);
        let is_expanded = recorded == size(2).bytes;
        let is_infeasible = status_of(&claim, "storage") == "NodeResizeInfeasible";
        let is_refused = answers.iter().take(calls).any(|class| *class == ErrorClass::InUse);
        let waits = calls == 0;
        prop_assert!(is_expanded || is_infeasible || is_refused || waits, "{:?} {}", answers, claim);
        if new > old {
            prop_assert!(is_expanded && status_of(&claim, "storage").is_null());
            let list = claim["status"]["conditions"].as_array().cloned().unwrap_or_default();
            prop_assert!(list.iter().all(|item| item["type"] == "Kept"));
        }
        reached.case([
            ("the claim is patched to the size", new > old),
            ("infeasible", is_infeasible),
            ("refused", is_refused && !is_expanded),
            ("waits for the resizer", waits && !is_expanded),
            ("the driver is asked again", calls > 1),
            ("only the node grows", is_expanded && calls > 0 && new == old),
        ]);
    });
    // The rarest: "refused", in one case of 9.
    reached.assert_each();
}
