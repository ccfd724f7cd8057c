//! Whatever stands in a file, reading it ends with objects or with an error.

use keelson_pod_config_core::parse_file;
use keelson_pod_config_core::static_pod::StaticRules;
use proptest::prelude::*;

const SEED: &str = "\
apiVersion: v1
kind: Pod
metadata: &m
  name: web
  labels: {a: b, 'c': \"d\"}
spec:
  volumes:
  - name: v
    emptyDir: {sizeLimit: 1Mi}
  containers:
  - name: main
    image: busybox:1.36
    command: [sh, -c, |-
      sleep 1]
    resources: {limits: {cpu: 100m}}
---
apiVersion: v1
kind: Secret
metadata: *m
stringData:
  k: >
    text
";

fn check(bytes: &[u8]) -> Result<(), TestCaseError> {
    if let Err(errors) = parse_file(bytes, "/m/x.yaml", &StaticRules::standalone("n")) {
        prop_assert!(!errors.is_empty());
        let lines = bytes.iter().filter(|b| **b == b'\n').count() as u32 + 2;
        for error in errors {
            prop_assert!(
                error.line <= lines + bytes.iter().filter(|b| **b == b'\r').count() as u32,
                "{error:?}"
            );
            prop_assert!(!error.at("/m/x.yaml").is_empty());
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn any_bytes_are_read_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        check(&bytes)?;
    }

    #[test]
    fn any_text_of_yaml_signs_is_read_without_a_panic(text in "[ \\n\\t:\\-{}\\[\\]&*!|>'\"#%@a-c0-9.~,?<]{0,200}") {
        check(text.as_bytes())?;
    }

    #[test]
    fn a_manifest_with_a_hole_and_a_graft_is_read_without_a_panic(
        at in 0..SEED.len(), cut in 0usize..40, graft in "[ \\n:\\-{}\\[\\]&*!|>'\"a0]{0,12}"
    ) {
        let mut bytes = SEED.as_bytes().to_vec();
        let end = (at + cut).min(bytes.len());
        bytes.splice(at..end, graft.bytes());
        check(&bytes)?;
    }
}
