use super::*;

/// The gates that touch a node, from node-and-api.md §3: stage, default, lock, name. The spec writes
/// `RuntimeClassInImageCriAPI`, which is the name of a constant; files have `RuntimeClassInImageCriApi`.
const GOLDEN: &str = include_str!("golden.txt");
/// Some of the gates that only other components use.
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

fn errors(pairs: &[(&str, bool)]) -> Vec<String> {
    evaluate(&given(pairs)).1.iter().map(ToString::to_string).collect()
}

fn evaluated(pairs: &[(&str, bool)]) -> (FeatureGates, Vec<String>) {
    let (gates, errors, notes) = evaluate(&given(pairs));
    assert!(errors.is_empty(), "{errors:?}");
    (gates, notes.into_iter().filter(|note| note.level == Level::Warn).map(|note| note.text).collect())
}

#[test]
fn node_feature_gates_have_stage_default_and_lock_of_1_36() {
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
fn feature_gates_are_unique_and_those_of_other_components_known() {
    let names = || table::NODE.iter().chain(table::OTHER).flat_map(|group| group.names);
    assert_eq!(names().count(), gates().len());
    assert!(table::OTHER.iter().all(|group| !group.locked));
    for name in SHARED.split_whitespace() {
        let on = !gates()[name].on;
        evaluated(&[(name, on)]);
    }
}

#[test]
fn feature_gates_are_as_set_or_default() {
    let (gates, warnings) = evaluated(&[]);
    assert_eq!((gates.clone(), warnings.len()), (FeatureGates::default(), 0));
    assert!(gates.is_on("EnvFiles") && !gates.is_on("MemoryQoS") && !gates.is_on("NoSuchGate"));
    let (gates, warnings) = evaluated(&[("EnvFiles", false), ("MemoryQoS", true)]);
    assert_eq!((gates.is_on("EnvFiles"), gates.is_on("MemoryQoS"), warnings.len()), (false, true, 0));
}

#[test]
fn all_alpha_and_all_beta_set_gates_that_are_not_set_by_name() {
    let (gates, _) = evaluated(&[("AllAlpha", true), ("MemoryQoS", false)]);
    assert!(gates.is_on("EventedPLEG") && gates.is_on("QOSReserved") && !gates.is_on("MemoryQoS"));
    assert!(!gates.is_on("SELinuxMount"), "a beta gate");
    let (gates, _) = evaluated(&[("AllBeta", true)]);
    assert!(gates.is_on("SELinuxMount") && !gates.is_on("EventedPLEG"));
    let (gates, _) = evaluated(&[("AllBeta", false), ("EnvFiles", true)]);
    assert!(!gates.is_on("GracefulNodeShutdown") && gates.is_on("EnvFiles") && gates.is_on("NodeSwap"));
}

#[test]
fn every_feature_gate_has_the_stage_of_the_metric() {
    let all = evaluated(&[("AllAlpha", true), ("MemoryQoS", false)]).0.all();
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
fn unknown_feature_gates_are_refused_with_their_origin() {
    let errors = errors(&[("DynamicKubeletConfig", true), ("EnvFiles", true), ("envfiles", false)]);
    assert_eq!(errors.len(), 2, "{errors:?}");
    let start = "invalid configuration: featureGates.DynamicKubeletConfig = true (k.yaml:7): \
                 unrecognized feature gate: DynamicKubeletConfig";
    assert!(errors[0].starts_with(start), "{errors:?}");
    assert!(errors[1].contains("unrecognized feature gate: envfiles"), "{errors:?}");
}

#[test]
fn a_locked_feature_gate_can_only_be_set_to_its_default() {
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
        let errors = errors(&[(name, value)]);
        assert!(errors.len() == 1 && errors[0].contains(text), "{errors:?}");
        evaluated(&[(name, !value)]);
    }
    // These two are GA and not locked.
    assert!(!evaluated(&[("DRAPrioritizedList", false)]).0.is_on("DRAPrioritizedList"));
    assert!(!evaluated(&[("CustomCPUCFSQuotaPeriod", false)]).0.is_on("CustomCPUCFSQuotaPeriod"));
}

#[test]
fn ga_and_deprecated_feature_gates_cause_a_warning_each() {
    let (_, warnings) = evaluated(&[
        ("NodeSwap", true),
        ("AllowDNSOnlyNodeCSR", true),
        ("EnvFiles", true),
        ("MemoryQoS", true),
    ]);
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(
        warnings[0].starts_with("k.yaml:7: the feature gate NodeSwap is GA; a later release will remove it"),
        "{warnings:?}"
    );
    assert!(warnings[1].contains("AllowDNSOnlyNodeCSR is deprecated"), "{warnings:?}");
}

#[test]
fn a_feature_gate_needs_its_dependencies() {
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
        let errors = errors(set);
        assert!(errors.len() == 1 && errors[0].contains(text), "{set:?}: {errors:?}");
    }
    let errors = errors(&[("NodeDeclaredFeatures", false)]);
    assert_eq!(errors.len(), 3, "three gates that are on by default depend on it: {errors:?}");
    assert!(errors.iter().all(|error| error.contains("featureGates.NodeDeclaredFeatures = false")));
    evaluated(&[("ClusterTrustBundle", true), ("ClusterTrustBundleProjection", true)]);
    evaluated(&[("AllAlpha", true), ("AllBeta", true)]);
}

#[test]
fn feature_gate_dependencies_exist() {
    for (name, needs) in table::NEEDS {
        assert!(gates().contains_key(name), "{name}");
        assert!(needs.iter().all(|need| gates().contains_key(need)), "{name}");
    }
}

#[test]
fn non_default_feature_gates_without_effect_are_listed_in_one_note() {
    let (_, _, notes) = evaluate(&given(&[
        ("EnvFiles", true),
        ("MemoryQoS", true),
        ("AllAlpha", true),
        ("SELinuxMount", true),
        ("CSIVolumeHealth", true),
        ("PodCertificateRequest", true),
    ]));
    let infos: Vec<&str> =
        notes.iter().filter(|note| note.level == Level::Info).map(|note| note.text.as_str()).collect();
    assert_eq!(
        infos,
        ["these feature gates affect only which settings are allowed, so far: AllAlpha, MemoryQoS"]
    );
}
