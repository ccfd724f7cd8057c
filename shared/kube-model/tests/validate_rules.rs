//! The golden table of create validation: each row is an example that breaks exactly one rule of the API server, with the field
//! and the message by which it is refused.
#![allow(clippy::unwrap_used)] // helpers outside #[test] functions may unwrap too

use keelson_kube_model::*;
use serde_json::{Value, json};

/// How many rows there are: one that is lost is a rule that nothing shows.
const ROWS: usize = 242;
const RULES: &str = include_str!("validation-rules.txt");

fn errors_of(mut pod: Value) -> Vec<String> {
    default_pod(&mut pod);
    let pod: Pod = serde_json::from_value(pod).unwrap();
    validate_pod(&pod).iter().map(ToString::to_string).collect()
}

/// Lays `patch` over `base`, maps by their keys.
fn lay(base: &mut Value, patch: &Value) {
    match (base, patch) {
        (Value::Object(base), Value::Object(patch)) => {
            for (key, value) in patch {
                lay(base.entry(key.clone()).or_insert(Value::Null), value);
            }
        }
        (base, patch) => *base = patch.clone(),
    }
}

/// A good pod; what a row says of `c` is laid over its container, the rest over the pod.
fn pod_of(row: &Value) -> Value {
    let mut pod = json!({
        "metadata": {"name": "web", "namespace": "default"},
        "spec": {"containers": [{"name": "c", "image": "i:1"}], "volumes": [{"name": "v", "emptyDir": {}}]},
    });
    let mut row = row.clone();
    if let Some(container) = row.as_object_mut().unwrap().remove("c") {
        lay(&mut pod["spec"]["containers"][0], &container);
    }
    lay(&mut pod, &row);
    pod
}

#[test]
fn each_validation_rule_refuses_its_example_with_field_and_text() {
    let mut wrong = Vec::new();
    let mut count = 0;
    for line in RULES.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        count += 1;
        let (example, expected) = line.split_once(" => ").unwrap();
        let errors = errors_of(pod_of(&serde_json::from_str(example).unwrap()));
        let as_expected = match expected {
            "good" => errors.is_empty(),
            expected => errors.len() == 1 && errors[0].starts_with(expected),
        };
        if !as_expected {
            wrong.push(format!("{example}\n    expected {expected}\n    found    {errors:?}"));
        }
    }
    assert_eq!(count, ROWS, "rows were added or lost; say how many there are");
    assert!(wrong.is_empty(), "{} of {count} rows are wrong:\n{}", wrong.len(), wrong.join("\n"));
}
