use serde_json::json;

use crate::inputs::{Flags, Host};
use crate::outcome::WITHOUT_EFFECT;
use crate::testing::{assert_refused, errors_of, host, kubelet, run};

#[test]
fn single_process_oom_kill_false_needs_cgroup_v2() {
    let fields = kubelet(json!({"failCgroupV1": false, "singleProcessOOMKill": false}));
    let v1 = Host { cgroup_v1: true, ..host() };
    let errors = run(&Flags::default(), Some(&fields), None, &v1).unwrap_err();
    assert!(errors.len() == 1 && errors[0].contains("singleProcessOOMKill"), "{errors:?}");
    let v2 = run(&Flags::default(), Some(&fields), None, &host()).unwrap();
    assert_eq!(v2.config.pods.single_process_oom_kill, Some(false));
}

#[test]
fn limited_swap_is_applied_and_needs_cgroup_v2() {
    for (fields, limited) in [
        (json!({}), false),
        (json!({"memorySwap": {}}), false),
        (json!({"memorySwap": {"swapBehavior": ""}}), false),
        (json!({"memorySwap": {"swapBehavior": "NoSwap"}}), false),
        (json!({"memorySwap": {"swapBehavior": "LimitedSwap"}}), true),
    ] {
        let resolved = run(&Flags::default(), Some(&kubelet(fields.clone())), None, &host()).unwrap();
        assert_eq!(resolved.config.pods.limited_swap, limited, "{fields}");
        assert!(resolved.notes.iter().all(|note| note.event != Some(WITHOUT_EFFECT)), "{:?}", resolved.notes);
        let v1 = Host { cgroup_v1: true, ..host() };
        match run(&Flags::default(), Some(&kubelet(fields.clone())), None, &v1) {
            Ok(_) => assert!(!limited, "{fields}"),
            Err(errors) => {
                let [error] = &errors[..] else { panic!("{errors:?}") };
                assert!(limited && error.contains("memorySwap.swapBehavior = \"LimitedSwap\""), "{error}");
                assert!(error.contains("cgroup v2"), "{error}");
            }
        }
    }
    let errors = errors_of(json!({"memorySwap": {"swapBehavior": "UnlimitedSwap"}}));
    assert!(errors.len() == 1 && errors[0].contains("NoSwap, LimitedSwap"), "{errors:?}");
}

#[test]
fn pod_sync_backoff_sysctl_seccomp_and_oom_settings_are_applied() {
    let fields = kubelet(json!({
        "syncFrequency": "90s",
        "crashLoopBackOff": {"maxContainerRestartPeriod": "20s"},
        "allowedUnsafeSysctls": ["net.core.*", "kernel/msgmax"],
        "seccompDefault": true, "singleProcessOOMKill": true,
    }));
    let resolved = run(&Flags::default(), Some(&fields), None, &host()).unwrap();
    let pods = &resolved.config.pods;
    assert_eq!((pods.sync_frequency_ms, pods.max_restart_backoff_ms), (90_000, 20_000));
    assert_eq!(pods.allowed_unsafe_sysctls, ["net.core.*", "kernel/msgmax"]);
    assert_eq!((pods.seccomp_default, pods.single_process_oom_kill), (true, Some(true)));
    assert!(resolved.notes.iter().all(|note| note.event != Some(WITHOUT_EFFECT)), "{:?}", resolved.notes);
    let zero = kubelet(json!({"syncFrequency": "0s", "crashLoopBackOff": {}}));
    let pods = run(&Flags::default(), Some(&zero), None, &host()).unwrap().config.pods;
    assert_eq!(pods, keelson_config::Pods::default());
    for (wrong, field) in [
        (json!({"crashLoopBackOff": {"maxContainerRestartPeriod": "301s"}}), "maxContainerRestartPeriod"),
        (json!({"crashLoopBackOff": {"maxContainerRestartPeriod": "999ms"}}), "maxContainerRestartPeriod"),
        (json!({"syncFrequency": "-1s"}), "syncFrequency"),
        (json!({"allowedUnsafeSysctls": ["net.*", "vm.swappiness"]}), "vm.swappiness"),
        (json!({"seccompDefault": "yes"}), "seccompDefault"),
    ] {
        let errors = run(&Flags::default(), Some(&kubelet(wrong)), None, &host()).unwrap_err();
        assert!(errors.len() == 1 && errors[0].contains(field), "{errors:?}");
    }
}

#[test]
fn invalid_pod_fields_are_refused_with_a_remedy() {
    assert_refused(&[
        (
            json!({"runOnce": true}),
            "runOnce = true",
            "Runonce mode has been deprecated and should not be set",
        ),
        (json!({"userNamespaces": {"idsPerPod": 65537}}), "idsPerPod = 65537", "multiple of 65536"),
        (json!({"userNamespaces": {"idsPerPod": 4_294_967_296_u64}}), "idsPerPod", "from 1 to 4294967295"),
    ]);
}

#[test]
fn ids_per_pod_of_user_namespaces_are_applied() {
    for (fields, ids) in [
        (json!({}), 65_536),
        (json!({"userNamespaces": {}}), 65_536),
        (json!({"userNamespaces": {"idsPerPod": 131_072}}), 131_072),
    ] {
        let resolved = run(&Flags::default(), Some(&kubelet(fields.clone())), None, &host()).unwrap();
        assert_eq!(resolved.config.pods.ids_per_pod, ids, "{fields}");
        assert!(resolved.notes.iter().all(|note| note.event != Some(WITHOUT_EFFECT)), "{:?}", resolved.notes);
    }
}
