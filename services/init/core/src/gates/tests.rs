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
    let is_removal = |note: &Note| note.level == Level::Warn && note.event.is_none();
    (gates, notes.into_iter().filter(is_removal).map(|note| note.text).collect())
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
    let (gates, warnings) = evaluated(&[("EnvFiles", false), ("PodsAPI", true)]);
    assert_eq!((gates.is_on("EnvFiles"), gates.is_on("PodsAPI"), warnings.len()), (false, true, 0));
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
        ("SELinuxMount", true),
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

fn warnings_without_effect(pairs: &[(&str, bool)]) -> Vec<String> {
    let (_, errors, notes) = evaluate(&given(pairs));
    assert!(errors.is_empty(), "{errors:?}");
    let is_wanted = |note: &Note| note.event == Some(WITHOUT_EFFECT) && note.level == Level::Warn;
    notes.into_iter().filter(is_wanted).map(|note| note.text).collect()
}

#[test]
fn every_settable_node_gate_has_one_effect_and_locked_ones_have_none() {
    let settable: Vec<&str> = {
        let groups = table::NODE.iter().filter(|group| !group.locked);
        let mut names: Vec<&str> = groups.flat_map(|group| group.names.iter().copied()).collect();
        names.sort_unstable();
        names
    };
    let rows: Vec<&str> = effects::EFFECTS.iter().map(|(name, _)| *name).collect();
    assert_eq!(rows, settable);
}

#[test]
fn gates_of_fields_are_exactly_those_in_the_table_of_fields() {
    // These have an effect of their own, and two are refused, so that their fields are, too.
    let others = ["KubeletEnsureSecretPulledImages", "MemoryQoS", "QOSReserved"];
    for (name, effect) in effects::EFFECTS {
        let has_fields = reference::gated_fields(name).next().is_some();
        assert_eq!(has_fields, *effect == Effect::Fields || others.contains(name), "{name}");
    }
    let gates = keelson_config::kubelet_fields().iter().filter_map(|field| field.gate.as_ref());
    for gate in gates {
        assert!(effects::effect_of(gate.name).is_some(), "{}", gate.name);
    }
}

#[test]
fn reasons_of_gates_with_one_way_are_plain_text_that_fits_a_table() {
    for (name, effect) in effects::EFFECTS {
        let (text, ends_with_stop) = match effect {
            Effect::Acts(text) | Effect::Elsewhere(text) => (*text, true),
            Effect::OneWay(one) => (one.instead, false),
            Effect::Fields => continue,
        };
        assert!(text.len() > 20 && !text.contains(['|', '\n']), "{name}: {text}");
        assert_eq!(text.ends_with('.'), ends_with_stop, "{name}: {text}");
    }
}

#[test]
fn each_gate_set_to_a_value_without_effect_is_a_warning_with_the_reason() {
    for (name, effect) in effects::EFFECTS {
        let Effect::OneWay(OneWay { ignored, level: Level::Warn, instead }) = effect else { continue };
        let needs: Vec<(&str, bool)> = table::NEEDS
            .iter()
            .filter(|(of, needs)| (of == name && *ignored) || (!ignored && needs.contains(name)))
            .flat_map(|(of, needs)| if of == name { needs.to_vec() } else { vec![*of] })
            .filter(|other| gates().get(other).is_some_and(|gate| !gate.locked))
            .map(|other| (other, *ignored))
            .collect();
        let set: Vec<(&str, bool)> = needs.iter().copied().chain([(*name, *ignored)]).collect();
        let warnings = warnings_without_effect(&set);
        let expected =
            format!("k.yaml:7: featureGates.{name} = {ignored} has no effect: {instead}; remove it");
        assert_eq!(warnings.iter().filter(|text| **text == expected).count(), 1, "{warnings:?}");
        let opposite = warnings_without_effect(&[(*name, !ignored)]);
        assert!(opposite.iter().all(|text| !text.contains(&format!("featureGates.{name} "))), "{opposite:?}");
    }
}

#[test]
fn gates_that_would_make_the_node_less_safe_are_refused_by_name() {
    for (name, value, reason) in [
        ("MemoryQoS", true, "this feature gate cannot be on: the agent sets neither memory.high"),
        ("QOSReserved", true, "this feature gate cannot be on: qosReserved would have no effect"),
        (
            "ContainerStopSignals",
            true,
            "this feature gate cannot be on: lifecycle.stopSignal would be ignored",
        ),
        ("AllowParsingUserUIDFromCertAuth", false, "this feature gate cannot be off: the UID in a client"),
    ] {
        let found = errors(&[(name, value)]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(
            found[0].starts_with(&format!("invalid configuration: featureGates.{name} = {value} (k.yaml:7)"))
        );
        assert!(found[0].contains(reason) && found[0].ends_with("; remove it"), "{found:?}");
        assert!(errors(&[(name, !value)]).is_empty());
        assert!(warnings_without_effect(&[(name, !value)]).is_empty());
    }
}

#[test]
fn what_a_whole_stage_switches_without_effect_is_a_warning_per_gate() {
    let warnings = warnings_without_effect(&[("AllAlpha", true), ("PodsAPI", false)]);
    let of = |name: &str| warnings.iter().filter(|text| text.contains(&format!("gate {name} "))).count();
    assert_eq!((of("MemoryQoS"), of("PodsAPI"), of("CSIVolumeHealth"), of("EventedPLEG")), (1, 0, 0, 0));
    let expected = "k.yaml:7: AllAlpha switches the feature gate CRIListStreaming on, which has no effect: pods, containers \
                    and images are listed with one answer of the runtime each; set CRIListStreaming to false";
    assert!(warnings.iter().any(|text| text == expected), "{warnings:#?}");
    let beta = warnings_without_effect(&[("AllBeta", false)]);
    assert!(
        beta.iter().any(|text| text.contains("AllBeta switches the feature gate EnvFiles off")),
        "{beta:?}"
    );
    assert!(beta.iter().all(|text| !text.contains("NodeDeclaredFeatures")), "it acts: {beta:?}");
    assert!(
        warnings_without_effect(&[("AllBeta", true)]).iter().all(|text| text.contains("DRADeviceTaintRules")
            || text.contains("LocalStorageCapacityIsolationFSQuotaMonitoring"))
    );
}

#[test]
fn gates_with_effect_and_those_of_other_components_are_not_reported() {
    for (name, effect) in effects::EFFECTS {
        if !matches!(effect, Effect::OneWay(_)) && table::NEEDS.iter().all(|(_, needs)| !needs.contains(name))
        {
            let on = !gates()[name].on;
            let needed: Vec<(&str, bool)> = table::NEEDS
                .iter()
                .filter(|(of, _)| of == name && on)
                .flat_map(|(_, needs)| needs.iter().map(|need| (*need, true)))
                .chain([(*name, on)])
                .collect();
            let warnings = warnings_without_effect(&needed);
            assert!(warnings.is_empty(), "{name}: {warnings:?}");
        }
    }
    assert!(warnings_without_effect(&[("WatchList", false), ("NodeSwap", true)]).is_empty());
}

#[test]
fn a_configuration_without_gates_has_no_warnings_about_them() {
    assert!(warnings_without_effect(&[]).is_empty());
}
