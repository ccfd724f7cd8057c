use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::*;
use crate::flags;
use crate::resolve::tests::{host, kubelet};
use crate::resolve::{Flags, Resolved, resolve};

/// A drop-in whose thresholds have lines of their own, as they have in a file.
fn drop_in(name: &str, fields: Value) -> Document {
    let mut document = Document { file: name.to_owned(), ..kubelet(fields) };
    let set = document.root.get(HARD).and_then(Value::as_object).cloned().unwrap_or_default();
    document.lines.extend(set.keys().map(|signal| (format!("{HARD}.{signal}"), 9)));
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

/// Each threshold that is no default, with where it is from.
fn set(resolved: &Resolved) -> BTreeMap<&str, &str> {
    let prefix = "kubeletConfiguration.evictionHard.";
    let provenance = resolved.config.provenance.iter();
    provenance.filter_map(|(path, origin)| Some((path.strip_prefix(prefix)?, origin.as_str()))).collect()
}

#[test]
fn a_default_that_stands_beside_a_threshold_of_a_drop_in_is_from_nowhere() {
    let drop_ins = [
        json!({HARD: {"memory.available": "200Mi"}}),
        json!({HARD: {"nodefs.available": "20%", "imagefs.inodesFree": null}}),
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
    assert_eq!(resolved.kubelet_configuration[HARD].as_object().unwrap().len(), 4, "and it is shown");
}

#[test]
fn defaults_are_merged_with_the_thresholds_of_the_file_that_asks_for_it_before_anything_is_laid_over() {
    let one = || json!({HARD: {"memory.available": "1Gi"}});
    let merging = || json!({HARD: {"memory.available": "1Gi"}, "mergeDefaultEvictionSettings": true});
    let without = json!({HARD: {"nodefs.available": null}});
    let flag = "--eviction-hard=pid.available<5%";
    for (main, drop_ins, arguments, count, memory) in [
        (Some(one()), vec![], vec![], 1, Some("kubelet.yaml")),
        (Some(merging()), vec![], vec![], 5, Some("kubelet.yaml")),
        (Some(merging()), vec![without], vec![], 4, None),
        (Some(merging()), vec![], vec![flag], 1, None),
        (Some(one()), vec![json!({"mergeDefaultEvictionSettings": true})], vec![], 5, Some("kubelet.yaml")),
        (Some(json!({})), vec![merging()], vec![], 5, Some("10.conf:9")),
        (Some(json!({})), vec![json!({HARD: null})], vec![], 5, None),
        (None, vec![one()], vec![], 1, Some("10.conf:9")),
        (None, vec![merging()], vec![], 5, Some("10.conf:9")),
    ] {
        let what = format!("{main:?} {drop_ins:?} {arguments:?}");
        let resolved = resolved(main, &drop_ins, &arguments);
        assert_eq!(hard(&resolved).len(), count, "{what}: {:?}", hard(&resolved));
        assert_eq!(resolved.kubelet_configuration[HARD].as_object().unwrap().len(), count, "{what}");
        if let Some(memory) = memory {
            let set = set(&resolved);
            assert_eq!(set.len(), 1, "{what}: {set:?}");
            assert!(set["memory.available"].starts_with(memory), "{what}: {set:?}");
        }
    }
}
