//! Reading of YAML manifests.

use serde_json::json;

use super::*;

fn one(text: &str) -> Value {
    let mut all = documents(text).unwrap();
    assert_eq!(all.len(), 1);
    all.remove(0).value
}

#[test]
fn yaml_keys_that_are_not_text_are_converted_as_in_the_kubelet() {
    let one = |text: &str| documents(text).map(|mut all| all.remove(0).value).map_err(|error| error.message);
    for (text, key) in [
        ("on: 1", "true"),
        ("no: 1", "false"),
        ("y: 1", "true"),
        ("0644: 1", "420"),
        ("1.10: 1", "1.1"),
        ("8080: 1", "8080"),
        ("0.0: 1", "0"),
        ("'on': 1", "on"),
        ("\"0644\": 1", "0644"),
        ("!!str on: 1", "on"),
        ("plain: 1", "plain"),
    ] {
        assert_eq!(one(text), Ok(json!({ key: 1 })), "{text}");
    }
    for text in ["~: 1", "null: 1", "1e300: 1", "1234567.5: 1", "1e-5: 1"] {
        assert!(one(text).unwrap_err().contains("quote it"), "{text}");
    }
}

#[test]
fn plain_scalars_follow_yaml_1_1_and_quoted_ones_are_text() {
    let cases = [
        ("yes", json!(true)),
        ("Off", json!(false)),
        ("y", json!(true)),
        ("N", json!(false)),
        ("\"y\"", json!("y")),
        ("!!str y", json!("y")),
        ("!!binary aGVsbG8=", json!("hello")),
        ("~", Value::Null),
        ("0644", json!(420)),
        ("0o644", json!(420)),
        ("08", json!(8)),
        ("0x1F", json!(31)),
        ("-12", json!(-12)),
        ("+-1", json!("+-1")),
        ("1_000", json!(1000)),
        ("1e3", json!(1000)),
        ("1.5", json!(1.5)),
        ("1.2.3", json!("1.2.3")),
        ("10.0.0.1", json!("10.0.0.1")),
        ("100m", json!("100m")),
        ("18446744073709551615", json!(18_446_744_073_709_551_615u64)),
        ("2001-12-14", json!("2001-12-14")),
        ("\"yes\"", json!("yes")),
        ("'0644'", json!("0644")),
        ("!!str 12", json!("12")),
        ("!!int \"12\"", json!(12)),
        ("!own 12", json!("12")),
        ("|-\n 12", json!("12")),
    ];
    for (text, value) in cases {
        assert_eq!(one(text), value, "{text}");
    }
    assert!(documents("a: .inf").unwrap_err().message.contains(".inf"));
}

#[test]
fn yaml_anchors_and_merge_keys_are_expanded() {
    let text = "base: &b {a: 1, b: 2}\nmine:\n  <<: *b\n  b: 3\nlist: [*b]\n";
    let value = one(text);
    assert_eq!(value["mine"], json!({"b": 3, "a": 1}));
    assert_eq!(value["list"], json!([{"a": 1, "b": 2}]));
    assert!(documents("a: {<<: 1}").unwrap_err().message.contains("<<"));
    assert!(documents("a: &x [*x]").unwrap_err().message.contains("part of"));
}

#[test]
fn the_last_of_equal_yaml_keys_wins_and_is_the_one_located() {
    assert_eq!(one("a: 1\na: 2"), json!({"a": 2}));
    assert_eq!(locate("a: 1\na: 2", &[(0, "a")]), [Some((2, 1))]);
}

#[test]
fn yaml_errors_in_later_documents_have_the_line_of_the_file() {
    let error = documents("a: 1\n---\nb: 2\n---\nc: [1\nd: }\n").unwrap_err();
    assert_eq!(error.document, 3);
    assert!(error.line >= 5, "{error:?}");
}

#[test]
fn nested_yaml_aliases_are_limited() {
    let mut text = String::from("a0: &a0 [x,x,x,x,x,x,x,x,x]\n");
    for i in 1..9 {
        let refs = vec![format!("*a{}", i - 1); 9].join(",");
        text.push_str(&format!("a{i}: &a{i} [{refs}]\n"));
    }
    assert!(documents(&text).unwrap_err().message.contains("more than"));
    let deep = format!("{}{}", "[".repeat(200), "]".repeat(200));
    assert!(documents(&deep).unwrap_err().message.contains("deep"));
}

#[test]
fn yaml_aliases_of_one_long_text_are_limited() {
    let text = format!("a: &a {}\nb: [{}]\n", "x".repeat(1 << 20), "*a,".repeat(1000));
    assert!(documents(&text).unwrap_err().message.contains("MiB of text"));
    let keys = format!("a: &a {{{}: 1}}\nb: [{}]\n", "x".repeat(1 << 10), "*a,".repeat(100_000));
    assert!(documents(&keys).unwrap_err().message.contains("MiB of text"));
}

#[test]
fn yaml_aliases_within_aliases_are_limited_in_depth() {
    let mut text = String::from("- &a0 []\n");
    for i in 1..50 {
        text.push_str(&format!("- &a{i} {}*a{}{}\n", "[".repeat(90), i - 1, "]".repeat(90)));
    }
    assert!(documents(&text).unwrap_err().message.contains("deep"));
}

#[test]
fn nested_yaml_anchors_are_limited() {
    let anchors: String = (0..90).map(|i| format!("&a{i} [")).collect();
    let text = format!("{anchors}{}{}", "x,".repeat(100_000), "]".repeat(90));
    assert!(documents(&text).unwrap_err().message.contains("values"));
}

#[test]
fn fields_are_located_by_key_and_missing_fields_by_their_nearest_parent() {
    let text = "x: 1\n---\nspec:\n  containers:\n  - name: a\n    image: i\n  - name: b\n";
    let cases = [
        (1, "spec.containers[1].name", Some((7, 5))),
        (1, "spec.containers[1].image", Some((7, 5))),
        (1, "spec.containers[0].image", Some((6, 5))),
        (1, "metadata.name", Some((3, 1))),
        (4, "metadata.name", None),
    ];
    let positions = locate(text, &cases.map(|(document, field, _)| (document, field)));
    assert_eq!(positions, cases.map(|(.., position)| position));
    assert_eq!(locate("a: [", &[(0, "a")]), [None]);
}
