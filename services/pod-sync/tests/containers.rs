//! Defaults of containers from the node's configuration and the machine.

#![allow(clippy::unwrap_used)]

mod fake;

use std::fs;
use std::sync::atomic::Ordering;

use serde_json::json;

use fake::World;

/// Starts a container that requests 4 MiB of huge pages and nothing else; counts its CRI calls.
async fn start_and_count_calls(world: &World, service: &fake::PodSync) -> impl Fn(&str) -> usize {
    let resources = json!({"hugepages-2Mi": "4Mi", "memory": "64Mi", "cpu": "10m"});
    let container = json!({
        "name": "main", "image": "i:1", "imagePullPolicy": "IfNotPresent",
        "resources": {"requests": resources, "limits": resources},
    });
    world.add_pod_with_spec("web", json!({"restartPolicy": "Never", "containers": [container]}), 1);
    service.phase("web", "Running").await;
    let shim = std::sync::Arc::clone(&world.shim);
    move |call| shim.calls(call)
}

#[tokio::test]
async fn huge_pages_are_limited_and_seccomp_is_unconfined_by_default() {
    let world = World::start();
    let service = world.pod_sync().await;
    let calls = start_and_count_calls(&world, &service).await;
    assert_eq!(calls("huge pages of 2MB: 4194304"), 1);
    assert_eq!((calls("seccomp Unconfined"), calls("memory.oom.group=1")), (1, 0));
    service.kill();
}

#[tokio::test]
async fn seccomp_default_applies_to_containers_without_a_profile() {
    let mut world = World::start();
    world.settings.seccomp_default = true;
    let service = world.pod_sync().await;
    let calls = start_and_count_calls(&world, &service).await;
    assert_eq!((calls("seccomp RuntimeDefault"), calls("seccomp Unconfined")), (1, 0));
    service.kill();
}

#[tokio::test]
async fn memory_oom_group_is_set_on_cgroup_v2_unless_single_process_oom_kill() {
    for (single, whole) in [(None, 1), (Some(false), 1), (Some(true), 0)] {
        let mut world = World::start();
        world.machine.cgroup_v2.store(true, Ordering::Relaxed);
        world.settings.single_process_oom_kill = single;
        let service = world.pod_sync().await;
        let calls = start_and_count_calls(&world, &service).await;
        assert_eq!(calls("memory.oom.group=1"), whole, "{single:?}");
        service.kill();
    }
}

#[tokio::test]
async fn limited_swap_applies_to_burstable_api_pods() {
    for (limited, source, swap) in [(false, "api", 0), (true, "api", 32 << 20), (true, "file", 0)] {
        let mut world = World::start();
        world.source = source;
        world.machine.cgroup_v2.store(true, Ordering::Relaxed);
        world.settings.limited_swap = limited;
        let service = world.pod_sync().await;
        // Half a GiB of swap in addition to 1 GiB of memory.
        let resources = json!({"requests": {"memory": "64Mi"}, "limits": {"memory": "128Mi"}});
        let container = json!({
            "name": "main", "image": "i:1", "imagePullPolicy": "IfNotPresent", "resources": resources,
        });
        world.add_pod_with_spec("web", json!({"restartPolicy": "Never", "containers": [container]}), 1);
        service.phase("web", "Running").await;
        assert_eq!(world.shim.calls(&format!("memory.swap.max={swap}")), 1, "{:?}", world.shim.order());
        service.kill();
    }
}

#[tokio::test]
async fn resolv_conf_is_read_for_each_sandbox_and_checked_at_startup() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("resolv.conf");
    let searches: String = (0..33).map(|i| format!(" s{i}")).collect();
    fs::write(&file, format!("nameserver 192.0.2.1\nsearch{searches}\n")).unwrap();
    let mut world = World::start();
    world.resolv_conf = file.to_string_lossy().into_owned();
    let service = world.pod_sync().await;
    let event = service.event("Warning CheckLimitsForResolvConf: ").await;
    assert!(event.contains(&world.resolv_conf) && event.contains("33 search paths"), "{event}");
    world.add_pod("one", "Never", 1);
    service.phase("one", "Running").await;
    fs::write(&file, "nameserver 192.0.2.2\n").unwrap();
    world.add_pod("two", "Never", 1);
    service.phase("two", "Running").await;
    assert_eq!((world.shim.calls("dns 192.0.2.1"), world.shim.calls("dns 192.0.2.2")), (1, 1));
    service.kill();
}

#[tokio::test]
async fn event_messages_name_the_container_not_its_id() {
    let world = World::start();
    let service = world.pod_sync().await;
    let container = json!({"name": "broken", "image": "i:1", "imagePullPolicy": "IfNotPresent"});
    world.add_pod_with_spec("web", json!({"restartPolicy": "Never", "containers": [container]}), 1);
    let event = service.event("Warning Failed: Error: ").await;
    assert!(event.contains("the runtime cannot start broken for a reason"), "{event}");
    service.kill();
}

#[tokio::test]
async fn a_container_gets_the_host_ip_by_field_ref() {
    let world = World::start();
    let service = world.pod_sync().await;
    let field =
        |name: &str, path: &str| json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}});
    let container = json!({
        "name": "main", "image": "i:1", "imagePullPolicy": "IfNotPresent",
        "env": [field("HOST", "status.hostIP"), field("POD", "status.podIP"), field("ALL", "status.hostIPs")],
    });
    let spec = json!({"restartPolicy": "Never", "hostNetwork": true, "containers": [container]});
    world.add_pod_with_spec("web", spec, 1);
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
async fn recursive_read_only_mounts_need_support_of_the_runtime_handler() {
    let mount = |path: &str, recursive: &str| json!({"name": "data", "mountPath": path, "readOnly": true, "recursiveReadOnly": recursive});
    let pod = |mounts: serde_json::Value| {
        let container = json!({"name": "main", "image": "i:1", "imagePullPolicy": "IfNotPresent", "volumeMounts": mounts});
        json!({"restartPolicy": "Never", "containers": [container], "volumes": [{"name": "data", "emptyDir": {}}]})
    };
    for default in [true, false] {
        let world = World::start();
        world.shim.mounts_recursively(default);
        let service = world.pod_sync().await;
        world.add_pod_with_spec("may", pod(json!([mount("/m", "IfPossible")])), 1);
        service.phase("may", "Running").await;
        assert_eq!(world.shim.calls("all of /m read-only"), usize::from(default));
        world.add_pod_with_spec("must", pod(json!([mount("/n", "Enabled")])), 1);
        if default {
            service.phase("must", "Running").await;
            assert_eq!(world.shim.calls("all of /n read-only"), 1);
        } else {
            let event = service.event("Warning Failed: Error: ").await;
            assert!(event.contains("recursive"), "{event}");
        }
        service.kill();
    }
}

#[tokio::test]
async fn an_ephemeral_container_shares_its_targets_pid_namespace_and_starts_once() {
    let mut world = World::start();
    world.source = "api";
    let service = world.pod_sync().await;
    let spec = |targets: &[(&str, &str)]| {
        let debug = |(name, target): &(&str, &str)| {
            json!({
                "name": name, "image": "i:1", "imagePullPolicy": "IfNotPresent",
                "targetContainerName": target,
            })
        };
        json!({
            "restartPolicy": "Always",
            "containers": [{"name": "main", "image": "i:1", "imagePullPolicy": "IfNotPresent"}],
            "ephemeralContainers": targets.iter().map(debug).collect::<Vec<_>>(),
        })
    };
    world.add_pod_with_spec("web", spec(&[]), 1);
    service.phase("web", "Running").await;
    let main = world.shim.pod("web").unwrap().containers[0].id.clone();

    world.add_pod_with_spec("web", spec(&[("debug", "main"), ("lost", "nobody")]), 2);
    let state =
        |pod: &serde_json::Value, i: usize| pod["status"]["ephemeralContainerStatuses"][i]["state"].clone();
    let pod = fake::eventually("the added container runs, the other says why not", async || {
        let pod = service.pod("web").await?;
        let waits = state(&pod, 1)["waiting"]["reason"] == "CreateContainerConfigError";
        (waits && !state(&pod, 0)["running"].is_null()).then_some(pod)
    })
    .await;
    let why = state(&pod, 1)["waiting"]["message"].to_string();
    assert!(why.contains("targetContainerName") && why.contains("nobody"), "{why}");
    assert_eq!(world.shim.calls(&format!("processes of {main}")), 1, "{:?}", world.shim.order());
    assert!(service.has_metric("kubelet_managed_ephemeral_containers 2"));

    // It does not restart, under any restart policy.
    world.shim.change("web", |pod| {
        let debug = pod.containers.iter_mut().find(|container| container.name == "debug").unwrap();
        debug.set_state(keelson_proto::keelson::runtime::v1::ContainerState::Exited);
        debug.finished_unix_nanos = keelson_service_kit::now_unix_nanos();
    });
    fake::eventually("its termination in the status", async || {
        let pod = service.pod("web").await?;
        (!state(&pod, 0)["terminated"].is_null()).then_some(())
    })
    .await;
    world.add_pod_with_spec("web", spec(&[("debug", "main")]), 3);
    fake::eventually("the other is forgotten", async || {
        let pod = service.pod("web").await?;
        (pod["status"]["ephemeralContainerStatuses"].as_array()?.len() == 1).then_some(())
    })
    .await;
    assert_eq!(world.shim.calls(&format!("processes of {main}")), 1);
    service.kill();
}
