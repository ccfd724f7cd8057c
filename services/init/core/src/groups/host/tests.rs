use serde_json::json;

use crate::inputs::{Flags, Host};
use crate::outcome::Level;
use crate::testing::{host, kubelet, run};

#[test]
fn cgroup_v1_is_refused_with_fail_cgroup_v1_and_a_warning_by_default() {
    let v1 = Host { cgroup_v1: true, ..host() };
    let warns = |fields, host: &Host| {
        let resolved = run(&Flags::default(), Some(&kubelet(fields)), None, host);
        resolved.map(|it| it.notes.iter().any(|n| n.level == Level::Warn && n.text.contains("cgroup v1")))
    };
    assert!(warns(json!({}), &v1).unwrap());
    assert!(!warns(json!({"failCgroupV1": false}), &v1).unwrap());
    assert!(!warns(json!({"failCgroupV1": true}), &host()).unwrap());
    let refused = format!("{:?}", warns(json!({"failCgroupV1": true}), &v1).unwrap_err());
    assert!(refused.contains("kubelet is configured to not run on a host using cgroup v1"), "{refused}");
    assert!(refused.contains("failCgroupV1"), "{refused}");
}

#[test]
fn swap_is_refused_unless_fail_swap_on_is_false() {
    let swap = Host { swap: vec!["/dev/sda2".to_owned(), "/swap".to_owned()], ..host() };
    for (fields, origin) in [(json!({}), "default"), (json!({"failSwapOn": true}), "kubelet.yaml")] {
        let errors = run(&Flags::default(), Some(&kubelet(fields)), None, &swap).unwrap_err();
        let [error] = &errors[..] else { panic!("{errors:?}") };
        for part in [origin, "failSwapOn", "(/dev/sda2, /swap)", "swapoff -a", "failSwapOn: false"] {
            assert!(error.contains(part), "{part}: {error}");
        }
    }
    assert_eq!(run(&Flags::default(), None, None, &swap).unwrap_err().len(), 1);
    assert!(run(&Flags::default(), Some(&kubelet(json!({"failSwapOn": false}))), None, &swap).is_ok());
    assert!(run(&Flags::default(), Some(&kubelet(json!({"failSwapOn": true}))), None, &host()).is_ok());
}
