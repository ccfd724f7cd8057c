//! What the node's configuration and the machine make of a container that says nothing about it.

#![allow(clippy::unwrap_used)]

mod fake;

use std::fs;
use std::sync::atomic::Ordering;

use serde_json::json;

use fake::World;

/// What reaches the runtime of a container that asks for 4 MiB of huge pages and nothing else.
async fn made(world: &World, service: &fake::PodSync) -> impl Fn(&str) -> usize {
    let resources = json!({"hugepages-2Mi": "4Mi", "memory": "64Mi", "cpu": "10m"});
    let container = json!({
        "name": "main", "image": "i:1", "imagePullPolicy": "IfNotPresent",
        "resources": {"requests": resources, "limits": resources},
    });
    world.name_with("web", json!({"restartPolicy": "Never", "containers": [container]}), 1);
    service.phase("web", "Running").await;
    let shim = std::sync::Arc::clone(&world.shim);
    move |call| shim.calls(call)
}

#[tokio::test]
async fn huge_pages_are_bound_and_a_container_without_profile_has_none() {
    let world = World::start();
    let service = world.pod_sync().await;
    let calls = made(&world, &service).await;
    assert_eq!(calls("huge pages of 2MB: 4194304"), 1);
    assert_eq!((calls("seccomp Unconfined"), calls("memory.oom.group=1")), (1, 0));
    service.kill();
}

#[tokio::test]
async fn a_container_without_profile_has_the_runtimes_when_the_node_says_so() {
    let mut world = World::start();
    world.settings.seccomp_default = true;
    let service = world.pod_sync().await;
    let calls = made(&world, &service).await;
    assert_eq!((calls("seccomp RuntimeDefault"), calls("seccomp Unconfined")), (1, 0));
    service.kill();
}

#[tokio::test]
async fn on_cgroup_v2_a_container_dies_as_a_whole_unless_the_node_says_otherwise() {
    for (single, whole) in [(None, 1), (Some(false), 1), (Some(true), 0)] {
        let mut world = World::start();
        world.machine.cgroup_v2.store(true, Ordering::Relaxed);
        world.settings.single_process_oom_kill = single;
        let service = world.pod_sync().await;
        let calls = made(&world, &service).await;
        assert_eq!(calls("memory.oom.group=1"), whole, "{single:?}");
        service.kill();
    }
}

#[tokio::test]
async fn a_burstable_container_that_is_no_static_pods_has_its_part_of_the_swap_where_the_node_says_so() {
    for (limited, source, swap) in [(false, "api", 0), (true, "api", 32 << 20), (true, "file", 0)] {
        let mut world = World::start();
        world.source = source;
        world.machine.cgroup_v2.store(true, Ordering::Relaxed);
        world.settings.limited_swap = limited;
        let service = world.pod_sync().await;
        // Half a GiB of swap beside 1 GiB of memory.
        let resources = json!({"requests": {"memory": "64Mi"}, "limits": {"memory": "128Mi"}});
        let container = json!({
            "name": "main", "image": "i:1", "imagePullPolicy": "IfNotPresent", "resources": resources,
        });
        world.name_with("web", json!({"restartPolicy": "Never", "containers": [container]}), 1);
        service.phase("web", "Running").await;
        assert_eq!(world.shim.calls(&format!("memory.swap.max={swap}")), 1, "{:?}", world.shim.order());
        service.kill();
    }
}

#[tokio::test]
async fn the_nodes_dns_file_is_read_for_each_sandbox_and_judged_at_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("resolv.conf");
    let searches: String = (0..33).map(|i| format!(" s{i}")).collect();
    fs::write(&file, format!("nameserver 192.0.2.1\nsearch{searches}\n")).unwrap();
    let mut world = World::start();
    world.resolv_conf = file.to_string_lossy().into_owned();
    let service = world.pod_sync().await;
    let said = service.event("Warning CheckLimitsForResolvConf: ").await;
    assert!(said.contains(&world.resolv_conf) && said.contains("33 search paths"), "{said}");
    world.name("one", "Never", 1);
    service.phase("one", "Running").await;
    fs::write(&file, "nameserver 192.0.2.2\n").unwrap();
    world.name("two", "Never", 1);
    service.phase("two", "Running").await;
    assert_eq!((world.shim.calls("dns 192.0.2.1"), world.shim.calls("dns 192.0.2.2")), (1, 1));
    service.kill();
}

#[tokio::test]
async fn an_events_text_has_the_containers_name_in_place_of_its_id() {
    let world = World::start();
    let service = world.pod_sync().await;
    let container = json!({"name": "broken", "image": "i:1", "imagePullPolicy": "IfNotPresent"});
    world.name_with("web", json!({"restartPolicy": "Never", "containers": [container]}), 1);
    let said = service.event("Warning Failed: Error: ").await;
    assert!(said.contains("the runtime cannot start broken for a reason"), "{said}");
    service.kill();
}

#[tokio::test]
async fn a_container_is_told_the_nodes_address() {
    let world = World::start();
    let service = world.pod_sync().await;
    let field =
        |name: &str, path: &str| json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}});
    let container = json!({
        "name": "main", "image": "i:1", "imagePullPolicy": "IfNotPresent",
        "env": [field("HOST", "status.hostIP"), field("POD", "status.podIP"), field("ALL", "status.hostIPs")],
    });
    let spec = json!({"restartPolicy": "Never", "hostNetwork": true, "containers": [container]});
    world.name_with("web", spec, 1);
    service.phase("web", "Running").await;
    // A machine without a default route has none.
    let address = keelson_service_kit::default_route_address().map(|ip| ip.to_string()).unwrap_or_default();
    for name in ["HOST", "POD", "ALL"] {
        assert_eq!(world.shim.calls(&format!("env {name}={address}")), 1, "{name} {:?}", world.shim.order());
    }
    assert_eq!(world.shim.calls("RunPodSandbox"), 1);
    service.kill();
}

#[tokio::test]
async fn recursive_read_only_mounts_are_those_that_the_runtime_has() {
    let mount = |path: &str, recursive: &str| json!({"name": "data", "mountPath": path, "readOnly": true, "recursiveReadOnly": recursive});
    let pod = |mounts: serde_json::Value| {
        let container = json!({"name": "main", "image": "i:1", "imagePullPolicy": "IfNotPresent", "volumeMounts": mounts});
        json!({"restartPolicy": "Never", "containers": [container], "volumes": [{"name": "data", "emptyDir": {}}]})
    };
    for default in [true, false] {
        let world = World::start();
        world.shim.mounts_recursively(default);
        let service = world.pod_sync().await;
        world.name_with("may", pod(json!([mount("/m", "IfPossible")])), 1);
        service.phase("may", "Running").await;
        assert_eq!(world.shim.calls("all of /m read-only"), usize::from(default));
        world.name_with("must", pod(json!([mount("/n", "Enabled")])), 1);
        if default {
            service.phase("must", "Running").await;
            assert_eq!(world.shim.calls("all of /n read-only"), 1);
        } else {
            let said = service.event("Warning Failed: Error: ").await;
            assert!(said.contains("recursive"), "{said}");
        }
        service.kill();
    }
}
