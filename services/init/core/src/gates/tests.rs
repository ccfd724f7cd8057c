use super::*;

/// The gates that touch a node, from node-and-api.md §3: stage, default, lock, name. The spec writes
/// `RuntimeClassInImageCriAPI`, which is the name of a constant; files have `RuntimeClassInImageCriApi`.
const GOLDEN: &str = include_str!("golden.txt");
/// A few of the gates that only the other components have.
const SHARED: &str =
    "APIServerTracing MemoryManager SchedulerQueueingHints WatchList GenericWorkload KMSv1 WinDSR";

fn given(pairs: &[(&str, bool)]) -> Given {
    let one = |(name, value): &(&str, bool)| Sourced {
        value: *value,
        origin: "k.yaml:7".to_owned(),
        field: format!("{FIELD}.{name}"),
    };
    pairs.iter().map(one).collect()
}

fn problems(pairs: &[(&str, bool)]) -> Vec<String> {
    judge(&given(pairs)).1.iter().map(ToString::to_string).collect()
}

fn judged(pairs: &[(&str, bool)]) -> (FeatureGates, Vec<String>) {
    let (gates, problems, notes) = judge(&given(pairs));
    assert!(problems.is_empty(), "{problems:?}");
    (gates, notes.into_iter().filter(|note| note.level == Level::Warn).map(|note| note.text).collect())
}

#[test]
fn the_gates_of_a_node_have_stage_default_and_lock_of_1_36() {
    let golden: BTreeSet<&str> = GOLDEN.lines().filter(|line| !line.starts_with('#')).collect();
    let ours: BTreeSet<String> = table::NODE
        .iter()
        .flat_map(|group| {
            let on = if group.on { "on" } else { "off" };
            let locked = if group.locked { "locked" } else { "free" };
            group.names.iter().map(move |name| format!("{:?} {on} {locked} {name}", group.stage))
        })
        .collect();
    assert_eq!(ours.iter().map(String::as_str).collect::<BTreeSet<_>>(), golden);
    assert_eq!(golden.len(), 107);
}

#[test]
fn no_gate_stands_twice_and_those_of_other_components_are_known() {
    let names = || table::NODE.iter().chain(table::OTHER).flat_map(|group| group.names);
    assert_eq!(names().count(), gates().len());
    assert!(table::OTHER.iter().all(|group| !group.locked));
    for name in SHARED.split_whitespace() {
        let on = !gates()[name].on;
        judged(&[(name, on)]);
    }
}

#[test]
fn what_is_not_set_is_as_by_default_and_a_gate_is_as_it_is_set() {
    let (gates, warnings) = judged(&[]);
    assert_eq!((gates.clone(), warnings.len()), (FeatureGates::default(), 0));
    assert!(gates.is_on("EnvFiles") && !gates.is_on("MemoryQoS") && !gates.is_on("NoSuchGate"));
    let (gates, warnings) = judged(&[("EnvFiles", false), ("MemoryQoS", true)]);
    assert_eq!((gates.is_on("EnvFiles"), gates.is_on("MemoryQoS"), warnings.len()), (false, true, 0));
}

#[test]
fn all_of_a_stage_sets_what_is_not_set_by_its_name() {
    let (gates, _) = judged(&[("AllAlpha", true), ("MemoryQoS", false)]);
    assert!(gates.is_on("EventedPLEG") && gates.is_on("QOSReserved") && !gates.is_on("MemoryQoS"));
    assert!(!gates.is_on("SELinuxMount"), "a beta gate");
    let (gates, _) = judged(&[("AllBeta", true)]);
    assert!(gates.is_on("SELinuxMount") && !gates.is_on("EventedPLEG"));
    let (gates, _) = judged(&[("AllBeta", false), ("EnvFiles", true)]);
    assert!(!gates.is_on("GracefulNodeShutdown") && gates.is_on("EnvFiles") && gates.is_on("NodeSwap"));
}

#[test]
fn every_gate_is_told_with_the_stage_that_metrics_have() {
    let all = judged(&[("AllAlpha", true), ("MemoryQoS", false)]).0.all();
    assert_eq!(all.len(), gates().len() + 2);
    let of = |name: &str| {
        let gate = all.iter().find(|gate| gate.name == name).unwrap();
        (gate.stage.to_string(), gate.enabled)
    };
    for (name, stage, enabled) in [
        ("AllAlpha", "ALPHA", true),
        ("AllBeta", "BETA", false),
        ("MemoryQoS", "ALPHA", false),
        ("EventedPLEG", "ALPHA", true),
        ("EnvFiles", "BETA", true),
        ("NodeSwap", "", true),
    ] {
        assert_eq!(of(name), (stage.to_owned(), enabled), "{name}");
    }
    assert!(all.iter().any(|gate| gate.stage == "DEPRECATED"));
}

#[test]
fn each_gate_that_there_is_not_is_told_with_its_place() {
    let problems = problems(&[("DynamicKubeletConfig", true), ("EnvFiles", true), ("envfiles", false)]);
    assert_eq!(problems.len(), 2, "{problems:?}");
    let start = "invalid configuration: featureGates.DynamicKubeletConfig = true (k.yaml:7): \
                 unrecognized feature gate: DynamicKubeletConfig";
    assert!(problems[0].starts_with(start), "{problems:?}");
    assert!(problems[1].contains("unrecognized feature gate: envfiles"), "{problems:?}");
}

#[test]
fn a_locked_gate_cannot_be_changed_and_may_be_set_to_what_it_is() {
    for (name, value, text) in [
        ("NodeSwap", false, "cannot set feature gate NodeSwap to false, feature is locked to true"),
        (
            "GitRepoVolumeDriver",
            true,
            "cannot set feature gate GitRepoVolumeDriver to true, feature is locked to false",
        ),
        (
            "DisableNodeKubeProxyVersion",
            false,
            "cannot set feature gate DisableNodeKubeProxyVersion to false, feature is locked to true",
        ),
    ] {
        let problems = problems(&[(name, value)]);
        assert!(problems.len() == 1 && problems[0].contains(text), "{problems:?}");
        judged(&[(name, !value)]);
    }
    // These two are GA and not locked.
    assert!(!judged(&[("DRAPrioritizedList", false)]).0.is_on("DRAPrioritizedList"));
    assert!(!judged(&[("CustomCPUCFSQuotaPeriod", false)]).0.is_on("CustomCPUCFSQuotaPeriod"));
}

#[test]
fn gates_that_go_with_a_later_release_are_warned_about_once_each() {
    let (_, warnings) =
        judged(&[("NodeSwap", true), ("AllowDNSOnlyNodeCSR", true), ("EnvFiles", true), ("MemoryQoS", true)]);
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(warnings[0].starts_with("k.yaml:7: the feature gate NodeSwap is GA and goes"), "{warnings:?}");
    assert!(warnings[1].contains("AllowDNSOnlyNodeCSR is deprecated"), "{warnings:?}");
}

#[test]
fn a_gate_needs_those_that_it_depends_on() {
    for (set, text) in [
        (
            &[("ClusterTrustBundleProjection", true)][..],
            "ClusterTrustBundleProjection is enabled, but depends on features that are disabled: [ClusterTrustBundle]",
        ),
        (
            &[("GracefulNodeShutdown", false)],
            "GracefulNodeShutdownBasedOnPodPriority is enabled, but depends on features that are disabled: \
             [GracefulNodeShutdown]",
        ),
        (
            &[("PodLevelResources", false)],
            "InPlacePodLevelResourcesVerticalScaling is enabled, but depends on features that are disabled: \
             [PodLevelResources]",
        ),
        (
            &[("AllBeta", false), ("RestartAllContainersOnContainerExits", true)],
            "RestartAllContainersOnContainerExits is enabled, but depends on features that are disabled: \
             [ContainerRestartRules NodeDeclaredFeatures]",
        ),
    ] {
        let problems = problems(set);
        assert!(problems.len() == 1 && problems[0].contains(text), "{set:?}: {problems:?}");
    }
    let problems = problems(&[("NodeDeclaredFeatures", false)]);
    assert_eq!(problems.len(), 3, "three gates that are on by default need it: {problems:?}");
    assert!(problems.iter().all(|problem| problem.contains("featureGates.NodeDeclaredFeatures = false")));
    judged(&[("ClusterTrustBundle", true), ("ClusterTrustBundleProjection", true)]);
    judged(&[("AllAlpha", true), ("AllBeta", true)]);
}

#[test]
fn what_a_gate_needs_is_a_gate() {
    for (name, needs) in table::NEEDS {
        assert!(gates().contains_key(name), "{name}");
        assert!(needs.iter().all(|need| gates().contains_key(need)), "{name}");
    }
}

#[test]
fn gates_that_are_not_as_by_default_are_named_in_one_line() {
    let (_, _, notes) = judge(&given(&[("EnvFiles", true), ("MemoryQoS", true), ("AllAlpha", true)]));
    let infos: Vec<&str> =
        notes.iter().filter(|note| note.level == Level::Info).map(|note| note.text.as_str()).collect();
    assert_eq!(infos, ["these feature gates change only what may be configured, yet: AllAlpha, MemoryQoS"]);
}
