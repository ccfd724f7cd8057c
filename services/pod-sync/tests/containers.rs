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

#[tokio::test]
async fn a_container_that_is_added_to_look_into_another_sees_its_processes_and_is_started_once() {
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
    world.name_with("web", spec(&[]), 1);
    service.phase("web", "Running").await;
    let main = world.shim.pod("web").unwrap().containers[0].id.clone();

    world.name_with("web", spec(&[("debug", "main"), ("lost", "nobody")]), 2);
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
    assert!(service.counts("kubelet_managed_ephemeral_containers 2"));

    // It is not started again when it has ended, whatever the restart policy says.
    world.shim.change("web", |pod| {
        let debug = pod.containers.iter_mut().find(|container| container.name == "debug").unwrap();
        debug.set_state(keelson_proto::keelson::runtime::v1::ContainerState::Exited);
        debug.finished_unix_nanos = keelson_service_kit::now_unix_nanos();
    });
    fake::eventually("its end is told", async || {
        let pod = service.pod("web").await?;
        (!state(&pod, 0)["terminated"].is_null()).then_some(())
    })
    .await;
    world.name_with("web", spec(&[("debug", "main")]), 3);
    fake::eventually("the other is forgotten", async || {
        let pod = service.pod("web").await?;
        (pod["status"]["ephemeralContainerStatuses"].as_array()?.len() == 1).then_some(())
    })
    .await;
    assert_eq!(world.shim.calls(&format!("processes of {main}")), 1);
    service.kill();
}
