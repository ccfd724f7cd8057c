use std::collections::BTreeMap;

use keelson_config::Config;
use serde_json::{Value, json};

use super::*;
use crate::flags;
use crate::inputs::Flags;
use crate::resolve::{Resolved, resolve};
use crate::testing::{document, fields, host, keelson, kubelet, run};

/// A drop-in with a line number for each threshold, as a document read from a file has.
fn drop_in(name: &str, fields: Value) -> Document {
    let mut document = Document { file: name.to_owned(), ..kubelet(fields) };
    let set = document.root.get(EVICTION_HARD).and_then(Value::as_object).cloned().unwrap_or_default();
    document.lines.extend(set.keys().map(|signal| (format!("{EVICTION_HARD}.{signal}"), 9)));
    document
}

fn resolved(main: Option<Value>, drop_ins: &[Value], arguments: &[&str]) -> Resolved {
    let arguments: Vec<String> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
    let flags = Flags { fields: flags::parse(&arguments, "/srv").unwrap().fields, ..Flags::default() };
    let main = main.map(kubelet);
    let drop_ins: Vec<Document> = (1..)
        .zip(drop_ins)
        .map(|(number, fields)| drop_in(&format!("{number}0.conf"), fields.clone()))
        .collect();
    let host = &host();
    resolve(Inputs { flags: &flags, kubelet: main.as_ref(), drop_ins: &drop_ins, keelson: None, host })
        .unwrap()
}

fn hard(resolved: &Resolved) -> Vec<String> {
    let hard = &resolved.config.resources.eviction.hard;
    hard.iter().map(|(signal, amount)| format!("{signal}<{amount}")).collect()
}

/// Each threshold that is not a default, with its origin.
fn set(resolved: &Resolved) -> BTreeMap<&str, &str> {
    let prefix = "kubeletConfiguration.evictionHard.";
    let provenance = resolved.config.provenance.iter();
    provenance.filter_map(|(path, origin)| Some((path.strip_prefix(prefix)?, origin.as_str()))).collect()
}

#[test]
fn default_eviction_thresholds_next_to_a_drop_ins_have_no_origin() {
    let drop_ins = [
        json!({EVICTION_HARD: {"memory.available": "200Mi"}}),
        json!({EVICTION_HARD: {"nodefs.available": "20%", "imagefs.inodesFree": null}}),
    ];
    let resolved = resolved(Some(json!({})), &drop_ins, &[]);
    assert_eq!(
        hard(&resolved),
        ["imagefs.available<15%", "memory.available<200Mi", "nodefs.available<20%", "nodefs.inodesFree<5%"]
    );
    assert_eq!(
        set(&resolved),
        [("memory.available", "10.conf:9"), ("nodefs.available", "20.conf:9")].into(),
        "{:?}",
        resolved.config.provenance
    );
    assert_eq!(
        resolved.kubelet_configuration[EVICTION_HARD].as_object().unwrap().len(),
        4,
        "/configz shows the default too"
    );
}

#[test]
fn merge_default_eviction_settings_applies_to_its_file_before_merging() {
    let one = || json!({EVICTION_HARD: {"memory.available": "1Gi"}});
    let merging =
        || json!({EVICTION_HARD: {"memory.available": "1Gi"}, "mergeDefaultEvictionSettings": true});
    let without = json!({EVICTION_HARD: {"nodefs.available": null}});
    let flag = "--eviction-hard=pid.available<5%";
    for (main, drop_ins, arguments, count, memory) in [
        (Some(one()), vec![], vec![], 1, Some("kubelet.yaml")),
        (Some(merging()), vec![], vec![], 5, Some("kubelet.yaml")),
        (Some(merging()), vec![without], vec![], 4, None),
        (Some(merging()), vec![], vec![flag], 1, None),
        (Some(one()), vec![json!({"mergeDefaultEvictionSettings": true})], vec![], 5, Some("kubelet.yaml")),
        (Some(json!({})), vec![merging()], vec![], 5, Some("10.conf:9")),
        (Some(json!({})), vec![json!({EVICTION_HARD: null})], vec![], 5, None),
        (None, vec![one()], vec![], 1, Some("10.conf:9")),
        (None, vec![merging()], vec![], 5, Some("10.conf:9")),
    ] {
        let what = format!("{main:?} {drop_ins:?} {arguments:?}");
        let resolved = resolved(main, &drop_ins, &arguments);
        assert_eq!(hard(&resolved).len(), count, "{what}: {:?}", hard(&resolved));
        assert_eq!(resolved.kubelet_configuration[EVICTION_HARD].as_object().unwrap().len(), count, "{what}");
        if let Some(memory) = memory {
            let set = set(&resolved);
            assert_eq!(set.len(), 1, "{what}: {set:?}");
            assert!(set["memory.available"].starts_with(memory), "{what}: {set:?}");
        }
    }
}

#[test]
fn a_flag_replaces_the_whole_map_of_the_file() {
    let flags = Flags {
        fields: fields(&[
            "--eviction-hard=memory.available<1Gi",
            "--max-pods=7",
            "--v=4",
            "--kube-reserved=cpu=1",
        ]),
        ..Flags::default()
    };
    let file = kubelet(json!({
        "evictionHard": {"nodefs.available": "5%"}, "maxPods": 50, "port": 1234, "kubeReserved": {"memory": "1Gi"},
    }));
    let resolved = run(&flags, Some(&file), None, &host()).unwrap();
    let (config, whole) = (&resolved.config, &resolved.kubelet_configuration);
    assert_eq!((config.resources.max_pods, config.logging.level.as_str()), (7, "debug"));
    assert_eq!(whole["evictionHard"], json!({"memory.available": "1Gi"}));
    assert_eq!(whole["kubeReserved"], json!({"cpu": "1"}));
    assert_eq!((&whole["maxPods"], &whole["port"]), (&json!(7), &json!(1234)));
    assert_eq!(config.provenance["resources.maxPods"], "--max-pods");
    assert_eq!(config.provenance["api.port"], "kubelet.yaml:5");
}

#[test]
fn feature_gates_of_flags_are_added_to_those_of_the_file() {
    let flags = Flags {
        fields: fields(&["--feature-gates=CSIVolumeHealth=true,NodeLogQuery=true,EnvFiles=true"]),
        ..Flags::default()
    };
    let file =
        kubelet(json!({"featureGates": {"EnvFiles": false, "NodeLogQuery": false, "EventedPLEG": true}}));
    let whole = run(&flags, Some(&file), None, &host()).unwrap().kubelet_configuration;
    // The flag replaces the value in the file, which would be refused.
    let all = json!({"EnvFiles": true, "CSIVolumeHealth": true, "NodeLogQuery": true, "EventedPLEG": true});
    assert_eq!(whole["featureGates"], all);
}

#[test]
fn flags_without_a_file_have_no_default_thresholds() {
    let alone = |arguments: &[&str]| {
        run(&Flags { fields: fields(arguments), ..Flags::default() }, None, None, &host())
    };
    let resolved = alone(&["--max-pods=7"]).unwrap();
    assert!(!resolved.kubelet_configuration.contains_key("evictionHard"));
    assert_eq!(resolved.kubelet_configuration["authorization"]["mode"], "AlwaysAllow");
    assert!(resolved.config.resources.eviction.hard.is_empty());
    assert!(!resolved.notes.iter().any(|note| note.text.contains("dropped")), "{:?}", resolved.notes);
    let some = alone(&["--eviction-hard=memory.available<1Gi"]).unwrap();
    assert_eq!(some.kubelet_configuration["evictionHard"], json!({"memory.available": "1Gi"}));
    assert_eq!(some.config.resources.eviction.hard.len(), 1);
    let errors = alone(&["--max-pods=-1", "--cgroup-driver=other"]).unwrap_err();
    assert!(errors.iter().any(|error| error.contains("maxPods = -1 (--max-pods)")), "{errors:?}");
    assert!(
        errors.iter().any(|error| error.contains("cgroupDriver = \"other\" (--cgroup-driver)")),
        "{errors:?}"
    );
}

#[test]
fn drop_ins_override_the_file_in_order_and_flags_override_them() {
    let lined = |file: &str, fields: Value| Document {
        file: file.to_owned(),
        ..document(file, KUBELET_API_VERSION, KUBELET_KIND, fields)
    };
    let drop_ins = [
        lined("10.conf", json!({"maxPods": 60, "clusterDNS": ["10.0.0.1"], "kubeReserved": {"cpu": "1"}})),
        lined(
            "20.conf",
            json!({"maxPods": 70, "clusterDNS": ["10.0.0.2"], "port": null, "staticPodPath": "pods"}),
        ),
    ];
    let file =
        kubelet(json!({"maxPods": 50, "port": 1234, "kubeReserved": {"memory": "1Gi"}, "healthzPort": 0}));
    let flags = Flags { fields: fields(&["--healthz-port=99"]), ..Flags::default() };
    let resolved = resolve(Inputs {
        flags: &flags,
        kubelet: Some(&file),
        drop_ins: &drop_ins,
        keelson: None,
        host: &host(),
    });
    let Resolved { config, kubelet_configuration: whole, .. } = resolved.unwrap();
    assert_eq!(whole["kubeReserved"], json!({"cpu": "1", "memory": "1Gi"}));
    assert_eq!((&whole["clusterDNS"], &whole["maxPods"]), (&json!(["10.0.0.2"]), &json!(70)));
    assert_eq!((&whole["port"], &whole["healthzPort"]), (&json!(10250), &json!(99)), "null removes a field");
    assert_eq!(config.provenance["resources.maxPods"], "20.conf:3");
    assert_eq!(config.provenance["api.healthzPort"], "--healthz-port");
    assert_eq!(whole["staticPodPath"], "/srv/pods", "relative paths start from the working directory");
}

#[test]
fn a_drop_in_of_another_kind_is_refused_and_unknown_fields_cause_a_warning() {
    let with = |drop_in: Document| {
        let inputs = Inputs {
            flags: &Flags::default(),
            kubelet: None,
            drop_ins: &[drop_in],
            keelson: None,
            host: &host(),
        };
        resolve(inputs)
    };
    let wrong = document("x.conf", "v1", KUBELET_KIND, json!({"maxPods": -1}));
    let errors = with(wrong.clone()).unwrap_err();
    assert!(errors.len() == 1 && errors[0].to_string().contains("x.conf"), "{errors:?}");
    // All errors are reported at once, including those next to a file of another kind.
    let other = document("y.conf", KUBELET_API_VERSION, KUBELET_KIND, json!({"maxPods": -2}));
    let flags = Flags { log_level: Some("loud".into()), ..Flags::default() };
    let errors = resolve(Inputs {
        flags: &flags,
        kubelet: Some(&document("k.yaml", "v1", "Other", json!({"maxPods": -3}))),
        drop_ins: &[wrong, other],
        keelson: Some(&keelson(json!({"uidBase": 0}))),
        host: &host(),
    });
    let errors: Vec<String> = errors.unwrap_err().iter().map(ToString::to_string).collect();
    let parts = ["k.yaml", "k.yaml", "x.conf", "maxPods = -2", "uidBase = 0", "--log-level"];
    assert_eq!(errors.len(), parts.len(), "{errors:#?}");
    assert!(errors.iter().zip(parts).all(|(error, part)| error.contains(part)), "{errors:#?}");
    let notes =
        with(document("x.conf", KUBELET_API_VERSION, KUBELET_KIND, json!({"maxPod": 1}))).unwrap().notes;
    assert!(
        notes
            .iter()
            .any(|note| note.text.contains(": x.conf:3: ") && note.text.contains("has no field maxPod")),
        "{notes:?}"
    );
}

#[test]
fn drop_ins_without_a_file_allow_anonymous_and_have_no_thresholds() {
    let with = |kubelet: Option<&Document>, drop_in: Value| {
        let drop_in = document("10.conf", KUBELET_API_VERSION, KUBELET_KIND, drop_in);
        resolve(Inputs {
            flags: &Flags::default(),
            kubelet,
            drop_ins: &[drop_in],
            keelson: None,
            host: &host(),
        })
    };
    let authorities = json!({"authentication": {"x509": {"clientCAFile": "/ca"}}});
    let Resolved { config, kubelet_configuration: whole, .. } = with(None, authorities.clone()).unwrap();
    let tls = config.api.tls.unwrap();
    assert_eq!((tls.anonymous, tls.tokens, tls.reviews), (true, false, false));
    assert_eq!(whole["authentication"]["anonymous"]["enabled"], true);
    assert_eq!(whole["authorization"]["mode"], "AlwaysAllow");
    assert!(config.resources.eviction.hard.is_empty() && !whole.contains_key("evictionHard"));
    let own = json!({
        "authentication": {"anonymous": {"enabled": false}, "x509": {"clientCAFile": "/ca"}},
        "evictionHard": {"memory.available": "1Gi"},
    });
    let explicit = with(None, own).unwrap().config;
    assert!(!explicit.api.tls.unwrap().anonymous);
    assert_eq!(explicit.resources.eviction.hard.len(), 1);
    // With a file, anonymous requests are refused, and the default thresholds apply.
    let file = kubelet(
        json!({"authentication": {"webhook": {"enabled": false}}, "authorization": {"mode": "AlwaysAllow"}}),
    );
    let safe = with(Some(&file), authorities).unwrap().config;
    assert!(!safe.api.tls.unwrap().anonymous);
    assert_eq!(safe.resources.eviction.hard.len(), 5);
}

#[test]
fn a_drop_in_keeps_unset_thresholds_and_report_frequency_of_the_file() {
    let with = |file: Value, drop_ins: &[Value]| {
        let drop_ins: Vec<Document> = drop_ins
            .iter()
            .map(|fields| document("10.conf", KUBELET_API_VERSION, KUBELET_KIND, fields.clone()))
            .collect();
        resolve(Inputs {
            flags: &Flags::default(),
            kubelet: Some(&kubelet(file)),
            drop_ins: &drop_ins,
            keelson: None,
            host: &host(),
        })
        .unwrap()
        .config
    };
    let hard = |config: &Config| -> Vec<String> {
        config.resources.eviction.hard.iter().map(|(signal, amount)| format!("{signal}<{amount}")).collect()
    };
    let one = json!({"evictionHard": {"memory.available": "200Mi"}});
    let two = json!({"evictionHard": {"pid.available": "5%", "nodefs.available": null}});
    assert_eq!(
        hard(&with(json!({}), &[one.clone(), two.clone()])),
        [
            "imagefs.available<15%",
            "imagefs.inodesFree<5%",
            "memory.available<200Mi",
            "nodefs.inodesFree<5%",
            "pid.available<5%"
        ]
    );
    let named = json!({"evictionHard": {"nodefs.available": "1%"}});
    assert_eq!(hard(&with(named, &[one])), ["memory.available<200Mi", "nodefs.available<1%"]);

    let update = json!({"nodeStatusUpdateFrequency": "4s"});
    let report = |config: Config| config.node_status.status_report_ms;
    assert_eq!(report(with(json!({}), std::slice::from_ref(&update))), 300_000);
    assert_eq!(
        report(with(json!({"nodeStatusUpdateFrequency": "7s"}), std::slice::from_ref(&update))),
        7_000
    );
    let explicit = json!({"nodeStatusReportFrequency": "9s"});
    assert_eq!(report(with(json!({"nodeStatusUpdateFrequency": "7s"}), &[update, explicit])), 9_000);
}
