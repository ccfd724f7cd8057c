//! Exact limits, exact positions, and the other fields of errors.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::BTreeMap;
use std::sync::Arc;

use keelson_kube_model::Pod;
use keelson_kube_model::validate::AllowedReferences;
use keelson_pod_config_core::desired_pod::DesiredPod;
use keelson_pod_config_core::files::SourceFiles;
use keelson_pod_config_core::manifest::read_manifest;
use keelson_pod_config_core::merge::{Merge, Op};
use keelson_pod_config_core::scan::{FolderView, Listing, QUIET_NANOS, Stamp};
use keelson_pod_config_core::static_pod::StaticRules;
use keelson_pod_config_core::{FileContent, ManifestError, ManifestErrorKind, parse_file};
use serde::Deserialize as _;
use serde_json::{Value, json};

const PATH: &str = "/m/web.yaml";
const SECOND: i64 = 1_000_000_000;
/// The size limit of an object.
const MAX_OBJECT: usize = 3 * 1024 * 1024;
/// The limit of values in a file.
const MAX_VALUES: usize = 250_000;

fn parse(text: &str) -> Result<FileContent, Vec<ManifestError>> {
    parse_file(text.as_bytes(), PATH, &StaticRules::standalone("node1"))
}

fn only(text: &str) -> ManifestError {
    let mut errors = parse(text).map(|content| panic!("{content:?}")).unwrap_err();
    assert_eq!(errors.len(), 1, "{errors:?}");
    errors.remove(0)
}

fn config_map(name: &str, namespace: &str) -> String {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": namespace}})
        .to_string()
}

fn pod_with(spec: &Value) -> String {
    let mut spec = spec.clone();
    spec["containers"] = json!([{"name": "c", "image": "i"}]);
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web"}, "spec": spec}).to_string()
}

#[test]
fn errors_name_the_document_from_the_second_on() {
    let of = |document| {
        ManifestError { document, ..ManifestError::file(ManifestErrorKind::Invalid, "wrong") }.to_string()
    };
    assert_eq!([of(0), of(1), of(2)], ["wrong", "wrong", "document 2: wrong"]);
}

#[test]
fn checkpoint_bytes_are_not_kept_in_memory() {
    let content = parse(&pod_with(&json!({}))).unwrap();
    assert!(!content.checkpoint.is_empty());
    let mut files = SourceFiles::default();
    files.restore_content("/m/old.yaml", content.clone());
    files.update(PATH, Ok(content.clone()));
    for path in ["/m/old.yaml", PATH] {
        let kept = files.content(path).unwrap();
        assert!(kept.checkpoint.is_empty(), "{path}");
        assert_eq!(kept.pods, content.pods);
    }
    assert!(files.content("/m/other.yaml").is_none());
}

#[test]
fn a_duplicate_error_names_the_rejected_pod() {
    let mut files = SourceFiles::default();
    for path in ["/m/a.yaml", "/m/b.yaml"] {
        files.update(path, parse(&pod_with(&json!({}))));
    }
    let errors = files.assemble().errors;
    let pod = errors[0].error.pod.clone().unwrap();
    assert_eq!((pod.namespace.as_str(), pod.name.as_str()), ("default", "web-node1"));
}

#[test]
fn only_errors_of_named_pods_name_a_pod() {
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "data": {"k": "!"}});
    assert_eq!(only(&secret.to_string()).pod, None);
    assert_eq!(only("apiVersion: v1\nkind: Pod\nmetadata: {}\n").pod, None);
}

#[test]
fn an_object_may_have_exactly_the_size_limit() {
    let of = |length: usize| {
        let object = |fill: usize| {
            json!({
                "apiVersion": "v1", "kind": "ConfigMap",
                "metadata": {"name": "m", "namespace": "default", "annotations": {"k": "x".repeat(fill)}},
            })
            .to_string()
        };
        object(length - object(0).len())
    };
    assert_eq!(parse(&of(MAX_OBJECT)).unwrap().objects[0].json.len(), MAX_OBJECT);
    assert!(only(&of(MAX_OBJECT + 1)).message.contains("longer than 3 MiB"));
}

#[test]
fn json_documents_and_syntax_errors_have_line_and_column() {
    let (first, second) = (config_map("a", "x"), config_map("b", "x"));
    let places = |text: &str| -> Vec<_> {
        let documents = read_manifest(text.as_bytes()).unwrap();
        documents.iter().map(|d| (d.number, d.line, d.column)).collect()
    };
    assert_eq!(places(&format!("{first}\n\n   {second}")), [(1, 1, 1), (2, 3, 4)]);
    assert_eq!(
        places(&format!("  {first}{second}")),
        [(1, 1, 3), (2, 1, 3 + u32::try_from(first.len()).unwrap())]
    );
    let error = only(&format!("{first}\n{{\"a\": ]"));
    assert_eq!((error.document, error.line, error.column), (2, 2, 7), "{error:?}");
    let error = only("a: 1\nb: [1\nc: }\n");
    assert_eq!((error.document, error.line, error.column), (1, 3, 2), "{error:?}");
}

#[test]
fn a_removal_has_a_revision_of_its_own() {
    let value = json!({"metadata": {"uid": "u", "name": "p"}, "spec": {}});
    let pod = Arc::new(DesiredPod::new(&value, &Pod::deserialize(&value).unwrap(), PATH));
    let mut merge = Merge::default();
    let added = merge.set("file", vec![pod], 1).changes[0].sent.revision;
    let removed = merge.set("file", vec![], 2).changes.remove(0);
    assert_eq!((removed.op, removed.sent.revision), (Op::Remove, added + 1));
}

#[test]
fn object_names_are_dns_names_and_namespaces_are_dns_labels() {
    let label = "a".repeat(63);
    for (name, namespace) in
        [("a", "b"), ("a.b-c.d0", "x-1"), ("0", "0"), (&[label.as_str(); 3].join("."), "n")]
    {
        assert!(parse(&config_map(name, namespace)).is_ok(), "{name} in {namespace}");
    }
    for name in ["A", "a_b", "-a", "a-", ".a", "a.", "a..b", "a.-b", &"a".repeat(254)] {
        assert_eq!(only(&config_map(name, "n")).field, "metadata.name", "{name}");
    }
    for namespace in ["A", "a.b", "-a", "a-", "a_b"] {
        assert_eq!(only(&config_map("n", namespace)).field, "metadata.namespace", "{namespace}");
    }
    assert!(parse(&config_map(&"a".repeat(253), "n")).is_ok());
}

#[test]
fn an_unreadable_file_that_was_deleted_is_new_when_it_returns() {
    let mut view = FolderView::default();
    let stamp = Stamp { modified: 100 * SECOND, ..Stamp::default() };
    view.record_unreadable("a");
    assert_eq!(view.readable_in("a", &stamp, 100 * SECOND), 0);
    view.forget("a");
    assert_eq!(view.readable_in("a", &stamp, 100 * SECOND), QUIET_NANOS);
    view.record_read("a", stamp);
    view.forget("a");
    let listing = Listing::Files(BTreeMap::from([("a".to_owned(), stamp)]));
    assert_eq!(view.decide("/m", listing, &[], 200 * SECOND).read, ["a"]);
}

#[test]
fn a_settled_source_stays_settled_while_a_new_file_is_changing() {
    let mut view = FolderView::default();
    let now = 100 * SECOND;
    assert!(view.decide("/m", Listing::Files(BTreeMap::new()), &[], now).settled);
    let young = Stamp { modified: now, ..Stamp::default() };
    let listing = Listing::Files(BTreeMap::from([("a".to_owned(), young)]));
    let plan = view.decide("/m", listing, &[], now + SECOND);
    assert_eq!((plan.settled, plan.still_changing.as_slice()), (true, ["a".to_owned()].as_slice()));
}

#[test]
fn a_change_within_one_clock_tick_before_the_first_scan_may_be_unfinished() {
    let tick = 20_000_000;
    let now = 100 * SECOND;
    let waits = |modified: i64| {
        let stamp = Stamp { modified, ..Stamp::default() };
        let listing = Listing::Files(BTreeMap::from([("a".to_owned(), stamp)]));
        FolderView::default().decide("/m", listing, &[], now).rescan_after
    };
    assert_eq!(waits(now - tick), Some(QUIET_NANOS - tick));
    assert_eq!(waits(now - tick - 1), Some(SECOND - tick - 1));
}

#[test]
fn a_pod_from_a_list_gets_api_version_and_kind() {
    let list = json!({"apiVersion": "v1", "kind": "PodList", "items": [
        {"metadata": {"name": "x"}, "spec": {"containers": [{"name": "c", "image": "i"}]}},
    ]});
    let content = parse(&list.to_string()).unwrap();
    let value: Value = serde_json::from_slice(&content.pods[0].json).unwrap();
    assert_eq!((&value["apiVersion"], &value["kind"]), (&json!("v1"), &json!("Pod")));
    let error = only("apiVersion: v1\nkind: Pod\nmetadata: ~\nspec: ~\n");
    assert_eq!(error.field, "metadata.name");
}

#[test]
fn a_reference_to_an_api_object_is_reported_at_its_field() {
    let secret = json!({"volumes": [{"name": "v", "secret": {"secretName": "s"}}]});
    let claim = json!({"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "p"}}]});
    let resource = json!({"resourceClaims": [{"name": "r", "resourceClaimName": "r"}]});
    let nothing = StaticRules { allowed: AllowedReferences::default(), ..StaticRules::standalone("node1") };
    for (spec, field) in [
        (json!({"serviceAccountName": "a"}), "spec.serviceAccountName"),
        (resource, "spec.resourceClaims"),
        (secret, "spec"),
        (claim, "spec.volumes"),
    ] {
        let errors = parse_file(pod_with(&spec).as_bytes(), PATH, &nothing).unwrap_err();
        assert!(
            errors.iter().any(|e| e.field == field && e.message.contains("Forbidden")),
            "{field}: {errors:?}"
        );
    }
}

/// How a YAML value is read, found by an unknown field, which is preserved.
fn value_of(text: &str) -> Value {
    let manifest = format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: web}}\nspec:\n  containers: [{{name: c, image: i}}]\n  invented: {text}\n"
    );
    let content = parse(&manifest).unwrap_or_else(|errors| panic!("{text}: {errors:?}"));
    let value: Value = serde_json::from_slice(&content.pods[0].json).unwrap();
    value["spec"]["invented"].clone()
}

#[test]
fn yaml_numbers_may_have_a_sign_a_base_or_a_leading_point() {
    for (text, value) in [
        ("-0x1F", json!(-31)),
        ("+0x1F", json!(31)),
        ("-0o17", json!(-15)),
        ("+017", json!(15)),
        (".5", json!(0.5)),
        ("-.5", json!(-0.5)),
        ("+inf", json!("+inf")),
        ("9007199254740991.0", json!(9_007_199_254_740_991_i64)),
        ("9007199254740992.0", json!(9_007_199_254_740_992.0_f64)),
    ] {
        assert_eq!(value_of(text), value, "{text}");
    }
}

#[test]
fn a_pod_with_a_full_precision_float_is_restored_unchanged() {
    let float = 0.123_458_901_234_567_89;
    let pod = pod_with(&json!({"invented": [float, 1e-300, 5e-324, f64::MAX]}));
    let first = parse(&pod).unwrap();
    let again = parse_file(&first.checkpoint, PATH, &StaticRules::standalone("node1")).unwrap();
    assert_eq!(again.pods, first.pods);
    let value: Value = serde_json::from_slice(&again.pods[0].json).unwrap();
    assert_eq!(value["spec"]["invented"][0].as_f64().unwrap().to_bits(), f64::to_bits(float));
}

#[test]
fn a_yaml_alias_of_text_may_be_a_key() {
    assert_eq!(value_of("{a: &k foo, b: {*k : 1}}"), json!({"a": "foo", "b": {"foo": 1}}));
    let manifest = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: m}\na: &k [1]\nb: {*k : 1}\n";
    assert!(only(manifest).message.contains("a key must be text"));
}

#[test]
fn nesting_is_limited_in_lists_and_mappings() {
    // Below the document itself and `spec`.
    let (lists, maps) = (
        |n: usize| format!("{}1{}", "[".repeat(n), "]".repeat(n)),
        |n: usize| format!("{}1{}", "{a: ".repeat(n), "}".repeat(n)),
    );
    value_of(&lists(98));
    value_of(&maps(98));
    for text in [lists(99), maps(99)] {
        let manifest = format!("apiVersion: v1\nkind: Pod\nspec:\n  invented: {text}\n");
        let error = only(&manifest);
        assert!(error.message.contains("nested more than 100 deep"), "{error:?}");
    }
}

#[test]
fn values_are_counted_with_aliases_expanded_up_to_the_exact_limit() {
    // The document, its three fields and the name: 5. `a`: 1 + 993, and the same again for its copy. `b`: 1, and for each alias
    // the 994 values that it expands to.
    let manifest = |more: usize| {
        let a = vec!["1"; 993].join(",");
        let b = [vec!["*a"; 249], vec!["1"; more]].concat().join(",");
        format!("apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: m}}\na: &a [{a}]\nb: [{b}]\n")
    };
    let used = 5 + 994 + 994 + 1 + 249 * 994;
    assert!(parse(&manifest(MAX_VALUES - used)).is_ok());
    let error = only(&manifest(MAX_VALUES - used + 1));
    assert!(error.message.contains("more than 250000 values"), "{error:?}");
}

#[test]
fn a_file_is_known_from_its_first_read_until_it_is_removed() {
    let mut files = SourceFiles::default();
    assert!(files.is_empty());
    for reading in [parse(&config_map("a", "b")), parse("{")] {
        files.update(PATH, reading);
        assert!(!files.is_empty());
        assert_eq!(files.paths().collect::<Vec<_>>(), [PATH]);
    }
    assert!(files.remove(PATH) && files.is_empty());
    assert_eq!((files.paths().count(), files.remove(PATH)), (0, false));
}
