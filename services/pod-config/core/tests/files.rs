//! Keep-last-good, removal and duplicates.

use keelson_pod_config_core::files::{SourceFiles, SourceSet};
use keelson_pod_config_core::manifest::Kind;
use keelson_pod_config_core::object::ObjectKey;
use keelson_pod_config_core::static_pod::StaticRules;
use keelson_pod_config_core::{Why, parse_file};

fn pod(name: &str, image: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec:\n  containers: [{{name: c, image: {image}}}]\n"
    )
}

fn read(files: &mut SourceFiles, path: &str, text: &str) {
    files.read(path, parse_file(text.as_bytes(), path, &StaticRules::standalone("n1")));
}

fn names(set: &SourceSet) -> Vec<(&str, &str)> {
    set.pods.iter().map(|p| (p.name.as_str(), p.origin.as_str())).collect()
}

#[test]
fn a_file_that_breaks_keeps_its_last_good_pods_and_says_so() {
    let mut files = SourceFiles::default();
    read(&mut files, "/m/a.yaml", &pod("a", "one"));
    let before = files.assemble().pods[0].uid.clone();
    read(&mut files, "/m/a.yaml", "kind: [");
    let set = files.assemble();
    assert_eq!(set.pods[0].uid, before);
    assert_eq!(set.problems.len(), 1);
    assert_eq!(set.problems[0].kept[0].name, "a-n1");
    assert_eq!(set.problems[0].error.why, Why::Syntax);
    read(&mut files, "/m/a.yaml", &pod("a", "two"));
    let set = files.assemble();
    assert_ne!(set.pods[0].uid, before);
    assert!(set.problems.is_empty());
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
fn a_file_that_never_was_good_yields_only_the_problem() {
    let mut files = SourceFiles::default();
    read(&mut files, "/m/a.yaml", "nonsense");
    let set = files.assemble();
    assert!(set.pods.is_empty());
    assert!(set.problems[0].kept.is_empty());
}

#[test]
fn a_removed_file_takes_its_pods_and_problems_with_it() {
    let mut files = SourceFiles::default();
    read(&mut files, "/m/a.yaml", &pod("a", "one"));
    read(&mut files, "/m/a.yaml", "nonsense");
    assert!(files.remove("/m/a.yaml"));
    assert!(!files.remove("/m/a.yaml"));
    let set = files.assemble();
    assert!(set.pods.is_empty() && set.problems.is_empty() && files.is_empty());
}

#[test]
fn what_an_earlier_run_knew_stands_until_the_file_is_good() {
    let content =
        |text: String| parse_file(text.as_bytes(), "/m/a.yaml", &StaticRules::standalone("n1")).unwrap();
    let mut files = SourceFiles::default();
    read(&mut files, "/m/a.yaml", "nonsense");
    files.remember("/m/a.yaml", content(pod("a", "old")));
    assert_eq!(files.assemble().problems[0].kept.len(), 1);
    read(&mut files, "/m/a.yaml", &pod("a", "new"));
    let new = files.assemble().pods;
    files.remember("/m/a.yaml", content(pod("a", "old")));
    assert_eq!(files.assemble().pods, new);
}

#[test]
fn of_two_files_with_one_pod_the_first_by_name_wins_and_the_problem_names_both() {
    let mut files = SourceFiles::default();
    read(&mut files, "/m/b.yaml", &pod("same", "b"));
    read(&mut files, "/m/a.yaml", &pod("same", "a"));
    let set = files.assemble();
    assert_eq!(names(&set), [("same-n1", "/m/a.yaml")]);
    let problem = &set.problems[0];
    assert_eq!((problem.origin.as_str(), problem.error.why), ("/m/b.yaml", Why::Duplicate));
    assert!(problem.error.message.contains("/m/a.yaml:1"), "{problem:?}");
    files.remove("/m/a.yaml");
    assert_eq!(names(&files.assemble()), [("same-n1", "/m/b.yaml")]);
}

#[test]
fn the_file_that_has_a_pod_keeps_it_whatever_comes_before_it() {
    let mut files = SourceFiles::default();
    read(&mut files, "/m/b.yaml", &pod("same", "b"));
    let before = files.assemble().pods;
    read(&mut files, "/m/a.yaml", &pod("same", "a"));
    let set = files.assemble();
    assert_eq!(set.pods, before);
    let problem = &set.problems[0];
    assert_eq!((problem.origin.as_str(), problem.error.why), ("/m/a.yaml", Why::Duplicate));
    assert!(problem.error.message.contains("/m/b.yaml:1"), "{problem:?}");
    // Its own edits are its own, although the UID changes.
    read(&mut files, "/m/b.yaml", &pod("same", "b2"));
    let edited = files.assemble().pods;
    assert_eq!((edited[0].origin.as_str(), edited[0].uid != before[0].uid), ("/m/b.yaml", true));
    // It breaks: the last good version holds. It names another pod: the other file's turn.
    read(&mut files, "/m/b.yaml", "nonsense");
    assert_eq!(files.assemble().pods, edited);
    read(&mut files, "/m/b.yaml", &pod("other", "b"));
    assert_eq!(names(&files.assemble()), [("same-n1", "/m/a.yaml"), ("other-n1", "/m/b.yaml")]);
    read(&mut files, "/m/b.yaml", &pod("same", "b"));
    assert_eq!(names(&files.assemble()), [("same-n1", "/m/a.yaml")]);
}

#[test]
fn what_an_earlier_run_had_is_held_for_files_that_are_not_read_yet() {
    let mut first = SourceFiles::default();
    read(&mut first, "/m/b.yaml", &pod("same", "b"));
    first.assemble();
    let mut files = SourceFiles::resuming(first.holders().clone());
    files.assemble();
    assert_eq!(files.holders(), first.holders());
    read(&mut files, "/m/a.yaml", &pod("same", "a"));
    read(&mut files, "/m/b.yaml", &pod("same", "b"));
    assert_eq!(names(&files.assemble()), [("same-n1", "/m/b.yaml")]);

    let mut files = SourceFiles::resuming(first.holders().clone());
    read(&mut files, "/m/a.yaml", &pod("other", "a"));
    files.all_are_known();
    files.assemble();
    assert_eq!(files.holders().keys().collect::<Vec<_>>(), ["Pod default/other-n1"]);
    files.remove("/m/a.yaml");
    assert!(files.holders().is_empty());
}

#[test]
fn of_two_documents_with_one_pod_the_first_wins() {
    let mut files = SourceFiles::default();
    read(&mut files, "/m/a.yaml", &format!("{}---\n{}", pod("same", "a"), pod("same", "b")));
    let set = files.assemble();
    assert_eq!(set.pods.len(), 1);
    assert_eq!((set.problems[0].error.document, set.problems[0].error.line), (2, 7));
}

#[test]
fn two_pods_with_one_uid_are_a_duplicate_too() {
    let with_uid = |name: &str| pod(name, "i").replace("}\nspec", ", uid: u1}\nspec");
    let mut files = SourceFiles::default();
    read(&mut files, "/m/a.yaml", &with_uid("a"));
    read(&mut files, "/m/b.yaml", &with_uid("b"));
    let set = files.assemble();
    assert_eq!(names(&set), [("a-n1", "/m/a.yaml")]);
    assert!(set.problems[0].error.message.contains("UID u1"), "{:?}", set.problems);
}

#[test]
fn objects_follow_the_same_rules() {
    let map = |value: &str| {
        format!("apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: c}}\ndata: {{k: {value}}}\n")
    };
    let mut files = SourceFiles::default();
    read(&mut files, "/m/a.yaml", &map("a"));
    read(&mut files, "/m/b.yaml", &map("b"));
    let set = files.assemble();
    let key = ObjectKey { kind: Kind::ConfigMap, namespace: "default".into(), name: "c".into() };
    assert_eq!(set.objects[&key].origin, "/m/a.yaml");
    assert_eq!(set.problems.len(), 1);
    read(&mut files, "/m/a.yaml", "nonsense");
    assert_eq!(files.assemble().objects[&key].origin, "/m/a.yaml");
    files.remove("/m/a.yaml");
    assert_eq!(files.assemble().objects[&key].origin, "/m/b.yaml");
    read(&mut files, "/m/a.yaml", &map("a"));
    let set = files.assemble();
    assert_eq!((set.objects[&key].origin.as_str(), set.problems.len()), ("/m/b.yaml", 1));
    assert_eq!(files.holders()["ConfigMap default/c"], "/m/b.yaml");
}
