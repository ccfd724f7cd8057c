use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::*;
use crate::flags;
use crate::resolve::tests::{host, kubelet};
use crate::resolve::{Flags, Resolved, resolve};

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
