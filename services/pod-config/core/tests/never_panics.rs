//! Parsing any file ends with objects or with an error.

use std::cell::Cell;

use keelson_pod_config_core::static_pod::StaticRules;
use keelson_pod_config_core::{ManifestErrorKind, parse_file};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

const SEED: &str = "\
apiVersion: v1
kind: Pod
metadata:
  name: web
  labels: &l {a: b, 'c': \"d\"}
  annotations: {<<: *l, e: f}
spec:
  volumes:
  - name: v
    emptyDir: {sizeLimit: 1Mi}
  containers:
  - name: main
    image: busybox:1.36
    command:
    - sh
    - -c
    - |-
      sleep 1
    resources: {limits: {cpu: 100m}}
---
apiVersion: v1
kind: Secret
metadata: {name: s}
stringData:
  k: >
    text
";

/// How many texts were valid, had a syntax error, and broke a rule.
#[derive(Debug, Default)]
struct Outcomes {
    valid: Cell<u32>,
    syntax: Cell<u32>,
    rule: Cell<u32>,
}

fn check(bytes: &[u8], outcomes: &Outcomes) -> Result<(), TestCaseError> {
    let count = |cell: &Cell<u32>| cell.set(cell.get() + 1);
    let Err(errors) = parse_file(bytes, "/m/x.yaml", &StaticRules::standalone("n")) else {
        count(&outcomes.valid);
        return Ok(());
    };
    prop_assert!(!errors.is_empty());
    count(if errors[0].kind == ManifestErrorKind::Syntax { &outcomes.syntax } else { &outcomes.rule });
    let ends = bytes.iter().filter(|b| matches!(b, b'\n' | b'\r')).count();
    for error in errors {
        prop_assert!(error.line as usize <= ends + 2, "{error:?}");
        prop_assert!(!error.at("/m/x.yaml").is_empty());
    }
    Ok(())
}

fn run<S: Strategy>(strategy: S, bytes: impl Fn(S::Value) -> Vec<u8>) -> Outcomes {
    let outcomes = Outcomes::default();
    let mut runner = TestRunner::new(ProptestConfig::with_cases(1024));
    runner.run(&strategy, |value| check(&bytes(value), &outcomes)).unwrap_or_else(|error| panic!("{error}"));
    println!("{outcomes:?}");
    outcomes
}

#[test]
fn any_bytes_are_read_without_a_panic() {
    let outcomes = run(proptest::collection::vec(any::<u8>(), 0..400), |bytes| bytes);
    assert!(outcomes.syntax.get() > 100);
}

#[test]
fn any_text_of_yaml_characters_is_read_without_a_panic() {
    let signs = "[ \\n\\t:\\-{}\\[\\]&*!|>'\"#%@a-c0-9.~,?<]{0,200}";
    let outcomes = run(signs, |text: String| text.into_bytes());
    assert!(outcomes.syntax.get() > 100);
}

#[test]
fn a_mutated_manifest_is_read_without_a_panic() {
    let graft = "[ \\n:\\-{}\\[\\]&*!|>'\"a0]{0,12}";
    let outcomes = run((0..SEED.len(), 0usize..40, graft), |(at, cut, graft)| {
        let mut bytes = SEED.as_bytes().to_vec();
        let end = (at + cut).min(bytes.len());
        bytes.splice(at..end, graft.bytes());
        bytes
    });
    // The seed is valid, so that each outcome is frequent.
    assert!(
        outcomes.valid.get() > 10 && outcomes.syntax.get() > 10 && outcomes.rule.get() > 10,
        "{outcomes:?}"
    );
}
