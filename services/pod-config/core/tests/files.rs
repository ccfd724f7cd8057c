//! Last good versions, removals and duplicates.

use std::sync::Arc;

use keelson_pod_config_core::files::{SourceFiles, SourceSet};
use keelson_pod_config_core::manifest::Kind;
use keelson_pod_config_core::object::ObjectKey;
use keelson_pod_config_core::static_pod::StaticRules;
use keelson_pod_config_core::{ManifestErrorKind, parse_file};

fn pod(name: &str, image: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec:\n  containers: [{{name: c, image: {image}}}]\n"
    )
}

fn read(files: &mut SourceFiles, path: &str, text: &str) {
    files.update(path, parse_file(text.as_bytes(), path, &StaticRules::standalone("n1")));
}

fn names(set: &SourceSet) -> Vec<(&str, &str)> {
    set.pods.iter().map(|p| (p.name.as_str(), p.origin.as_str())).collect()
}

#[test]
fn a_broken_file_keeps_its_last_good_pods_and_reports_an_error() {
    let mut files = SourceFiles::default();
    read(&mut files, "/m/a.yaml", &pod("a", "one"));
    let before = files.assemble().pods[0].uid.clone();
    read(&mut files, "/m/a.yaml", "kind: [");
    let set = files.assemble();
    assert_eq!(set.pods[0].uid, before);
    assert_eq!(set.errors.len(), 1);
    assert_eq!(set.errors[0].kept_pods[0].name, "a-n1");
    assert_eq!(set.errors[0].error.kind, ManifestErrorKind::Syntax);
    read(&mut files, "/m/a.yaml", &pod("a", "two"));
    let set = files.assemble();
    assert_ne!(set.pods[0].uid, before);
    assert!(set.errors.is_empty());
}

#[test]
fn one_bad_document_keeps_the_whole_last_good_version() {
    let mut files = SourceFiles::default();
    read(&mut files, "/m/a.yaml", &pod("a", "one"));
    let before = files.assemble().pods;
    read(&mut files, "/m/a.yaml", &format!("{}---\n{}", pod("a", "two"), pod("B", "x")));
    assert_eq!(files.assemble().pods, before);
}

#[test]
fn a_file_that_was_never_valid_yields_only_its_error() {
    let mut files = SourceFiles::default();
    read(&mut files, "/m/a.yaml", "nonsense");
    let set = files.assemble();
    assert!(set.pods.is_empty());
    assert!(set.errors[0].kept_pods.is_empty());
}

#[test]
fn a_removed_file_removes_its_pods_and_errors() {
    let mut files = SourceFiles::default();
    read(&mut files, "/m/a.yaml", &pod("a", "one"));
    read(&mut files, "/m/a.yaml", "nonsense");
    assert!(files.remove("/m/a.yaml"));
    assert!(!files.remove("/m/a.yaml"));
    let set = files.assemble();
    assert!(set.pods.is_empty() && set.errors.is_empty() && files.is_empty());
}

#[test]
fn restored_content_is_used_until_the_file_is_valid() {
    let content =
        |text: String| parse_file(text.as_bytes(), "/m/a.yaml", &StaticRules::standalone("n1")).unwrap();
    let mut files = SourceFiles::default();
    read(&mut files, "/m/a.yaml", "nonsense");
    files.restore_content("/m/a.yaml", content(pod("a", "old")));
    assert_eq!(files.assemble().errors[0].kept_pods.len(), 1);
    read(&mut files, "/m/a.yaml", &pod("a", "new"));
    let new = files.assemble().pods;
    files.restore_content("/m/a.yaml", content(pod("a", "old")));
    assert_eq!(files.assemble().pods, new);
}

#[test]
fn of_two_files_with_one_pod_the_first_path_wins_and_the_error_names_both() {
    let mut files = SourceFiles::default();
    read(&mut files, "/m/b.yaml", &pod("same", "b"));
    read(&mut files, "/m/a.yaml", &pod("same", "a"));
    let set = files.assemble();
    assert_eq!(names(&set), [("same-n1", "/m/a.yaml")]);
    let error = &set.errors[0];
    assert_eq!((error.origin.as_str(), error.error.kind), ("/m/b.yaml", ManifestErrorKind::Duplicate));
    assert!(error.error.message.contains("/m/a.yaml:1"), "{error:?}");
    files.remove("/m/a.yaml");
    assert_eq!(names(&files.assemble()), [("same-n1", "/m/b.yaml")]);
}

#[test]
fn the_file_that_owns_a_pod_keeps_it_when_an_earlier_path_defines_it_too() {
    let mut files = SourceFiles::default();
    read(&mut files, "/m/b.yaml", &pod("same", "b"));
    let before = files.assemble().pods;
    read(&mut files, "/m/a.yaml", &pod("same", "a"));
    let set = files.assemble();
    assert_eq!(set.pods, before);
    let error = &set.errors[0];
    assert_eq!((error.origin.as_str(), error.error.kind), ("/m/a.yaml", ManifestErrorKind::Duplicate));
    assert!(error.error.message.contains("/m/b.yaml:1"), "{error:?}");
    // The owner may edit its pod, although the UID changes.
    read(&mut files, "/m/b.yaml", &pod("same", "b2"));
    let edited = files.assemble().pods;
    assert_eq!((edited[0].origin.as_str(), edited[0].uid != before[0].uid), ("/m/b.yaml", true));
    // The owner is broken: its last good version stays. It defines another pod: the other file gets the name.
    read(&mut files, "/m/b.yaml", "nonsense");
    assert_eq!(files.assemble().pods, edited);
    read(&mut files, "/m/b.yaml", &pod("other", "b"));
    assert_eq!(names(&files.assemble()), [("same-n1", "/m/a.yaml"), ("other-n1", "/m/b.yaml")]);
    read(&mut files, "/m/b.yaml", &pod("same", "b"));
    assert_eq!(names(&files.assemble()), [("same-n1", "/m/a.yaml")]);
}

#[test]
fn restored_name_owners_apply_to_files_that_are_not_read_yet() {
    let mut first = SourceFiles::default();
    read(&mut first, "/m/b.yaml", &pod("same", "b"));
    first.assemble();
    let mut files = SourceFiles::restore(first.name_owners().clone());
    files.assemble();
    assert_eq!(files.name_owners(), first.name_owners());
    read(&mut files, "/m/a.yaml", &pod("same", "a"));
    read(&mut files, "/m/b.yaml", &pod("same", "b"));
    assert_eq!(names(&files.assemble()), [("same-n1", "/m/b.yaml")]);

    let mut files = SourceFiles::restore(first.name_owners().clone());
    read(&mut files, "/m/a.yaml", &pod("other", "a"));
    files.forget_unread_owners();
    files.assemble();
    assert_eq!(files.name_owners().keys().collect::<Vec<_>>(), ["Pod default/other-n1"]);
    files.remove("/m/a.yaml");
    assert!(files.name_owners().is_empty());
}

#[test]
fn the_first_of_two_documents_with_one_pod_wins() {
    let mut files = SourceFiles::default();
    read(&mut files, "/m/a.yaml", &format!("{}---\n{}", pod("same", "a"), pod("same", "b")));
    let set = files.assemble();
    assert_eq!(set.pods.len(), 1);
    assert_eq!((set.errors[0].error.document, set.errors[0].error.line), (2, 7));
}

#[test]
fn two_pods_with_one_uid_are_a_duplicate_too() {
    let with_uid = |name: &str| pod(name, "i").replace("}\nspec", ", uid: u1}\nspec");
    let mut files = SourceFiles::default();
    read(&mut files, "/m/a.yaml", &with_uid("a"));
    read(&mut files, "/m/b.yaml", &with_uid("b"));
    let set = files.assemble();
    assert_eq!(names(&set), [("a-n1", "/m/a.yaml")]);
    assert!(set.errors[0].error.message.contains("UID u1"), "{:?}", set.errors);
}

#[test]
fn duplicate_secrets_and_config_maps_follow_the_rules_of_pods() {
    let map = |value: &str| {
        format!("apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: c}}\ndata: {{k: {value}}}\n")
    };
    let mut files = SourceFiles::default();
    read(&mut files, "/m/a.yaml", &map("a"));
    read(&mut files, "/m/b.yaml", &map("b"));
    let set = files.assemble();
    let key = ObjectKey { kind: Kind::ConfigMap, namespace: "default".into(), name: "c".into() };
    assert_eq!(set.objects[&key].origin, "/m/a.yaml");
    assert_eq!(set.errors.len(), 1);
    read(&mut files, "/m/a.yaml", "nonsense");
    assert_eq!(files.assemble().objects[&key].origin, "/m/a.yaml");
    files.remove("/m/a.yaml");
    assert_eq!(files.assemble().objects[&key].origin, "/m/b.yaml");
    read(&mut files, "/m/a.yaml", &map("a"));
    let set = files.assemble();
    assert_eq!((set.objects[&key].origin.as_str(), set.errors.len()), ("/m/b.yaml", 1));
    assert_eq!(files.name_owners()["ConfigMap default/c"], "/m/b.yaml");
}

#[test]
fn an_edit_of_one_file_reuses_the_records_of_the_other_files() {
    let map = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\n";
    let mut files = SourceFiles::default();
    read(&mut files, "/m/a.yaml", &pod("a", "one"));
    read(&mut files, "/m/b.yaml", &format!("{}---\n{map}", pod("b", "one")));
    let before = files.assemble();
    read(&mut files, "/m/a.yaml", &pod("a", "two"));
    let after = files.assemble();
    let reused: Vec<_> = before.pods.iter().zip(&after.pods).map(|(a, b)| Arc::ptr_eq(a, b)).collect();
    assert_eq!(reused, [false, true]);
    let key = ObjectKey { kind: Kind::ConfigMap, namespace: "default".into(), name: "c".into() };
    assert!(Arc::ptr_eq(&before.objects[&key], &after.objects[&key]));
}

#[test]
fn an_edit_of_one_pod_reuses_the_records_of_the_other_pods_in_its_file() {
    let text = |image: &str| format!("{}---\n{}", pod("a", "one"), pod("b", image));
    let mut files = SourceFiles::default();
    read(&mut files, "/m/a.yaml", &text("one"));
    let before = files.assemble().pods;
    read(&mut files, "/m/a.yaml", &text("two"));
    let after = files.assemble().pods;
    let reused: Vec<_> = before.iter().zip(&after).map(|(a, b)| Arc::ptr_eq(a, b)).collect();
    assert_eq!(reused, [true, false]);
}
