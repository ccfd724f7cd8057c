use serde_json::json;

use crate::testing::with_kubelet;

#[test]
fn bare_runtime_endpoint_and_empty_paths_are_read_like_a_kubelets() {
    let config = with_kubelet(
        json!({"containerRuntimeEndpoint": "/run/c.sock", "staticPodPath": "", "cgroupRoot": "", "resolvConf": ""}),
    );
    assert_eq!(config.runtime.endpoint, "unix:///run/c.sock");
    assert_eq!(config.sources.static_pod_path, None);
    assert_eq!((config.runtime.cgroup_root.as_str(), config.runtime.resolv_conf.as_str()), ("/", ""));
}
