//! Metrics of pods and their workers.

#![allow(clippy::unwrap_used)]

mod fake;

use std::time::Duration;

use keelson_proto::keelson::runtime::v1::Sandbox;
use serde_json::json;

use fake::{PodSync, World, eventually};

fn container(name: &str) -> serde_json::Value {
    json!({"name": name, "image": "i:1", "imagePullPolicy": "IfNotPresent"})
}

/// The value of the only sample with this prefix.
fn sample(service: &PodSync, begins: &str) -> f64 {
    let text = service.ctx.metrics.text();
    let mut found = text.lines().filter_map(|line| line.strip_prefix(begins));
    let value = found.next().unwrap_or_else(|| panic!("no {begins}\n{text}")).trim().parse().unwrap();
    assert_eq!(found.next(), None, "{begins}");
    value
}

fn workers_line(lifecycle: &str, config: &str, is_static: &str, count: u8) -> String {
    format!(
        "kubelet_working_pods{{lifecycle=\"{lifecycle}\",config=\"{config}\",static=\"{is_static}\"}} {count}"
    )
}

#[tokio::test]
async fn pod_start_duration_is_observed_once_from_the_first_seen_time() {
    let mut world = World::start();
    world.seen_ago = Duration::from_secs(100);
    let service = world.pod_sync().await;
    let spec = json!({"restartPolicy": "Always", "containers": [container("a"), container("b"), container("c")],
        "initContainers": [container("i")]});
    world.add_pod_with_spec("web", spec, 1);
    eventually("init", async || (world.shim.calls("StartContainer") == 1).then_some(())).await;
    assert!(service.has_metric("kubelet_pod_start_duration_seconds_count 0"), "it is Pending");
    world.shim.exit("web", 0);
    service.phase("web", "Running").await;
    let start = "kubelet_pod_start_duration_seconds";
    service.wait_for_metrics(&[&format!("{start}_count 1")]).await;
    let seconds = sample(&service, &format!("{start}_sum"));
    assert!((100.0..120.0).contains(&seconds), "{seconds}");
    for bound in ["0.5", "60.0", "120.0", "180.0", "3600.0"] {
        let reached = u8::from(!matches!(bound, "0.5" | "60.0"));
        let line = format!("{start}_bucket{{le=\"{bound}\"}} {reached}");
        assert!(service.has_metric(&line), "{line}\n{}", service.ctx.metrics.text());
    }
    let first = sample(&service, "kubelet_pod_worker_start_duration_seconds_sum");
    assert!((100.0..=seconds).contains(&first), "{first}");
    let lines = ["kubelet_containers_per_pod_count_count 1", "kubelet_containers_per_pod_count_sum 3.0"];
    service.wait_for_metrics(&lines).await;

    // Container restarts and manifest changes are not pod starts.
    world.shim.exit("web", 1);
    eventually("the restart", async || (world.shim.calls("StartContainer") == 7).then_some(())).await;
    service.phase("web", "Running").await;
    world.add_pod("web", "Always", 2);
    service
        .wait_for_metrics(&["kubelet_pod_worker_duration_seconds_count{operation_type=\"update\"} 1"])
        .await;
    let counts = [start, "kubelet_pod_worker_start_duration_seconds", "kubelet_containers_per_pod_count"];
    for family in counts {
        assert!(service.has_metric(&format!("{family}_count 1")), "{}", service.ctx.metrics.text());
    }
    service.kill();
}

#[tokio::test]
async fn pod_start_sli_duration_is_observed_only_for_api_pods_without_host_path() {
    let (total, of_node) =
        ("kubelet_pod_start_total_duration_seconds", "kubelet_pod_start_sli_duration_seconds");
    let first = "kubelet_first_network_pod_start_sli_duration_seconds";
    for (source, counted) in [("api", 2), ("file", 0)] {
        let mut world = World::start();
        (world.source, world.seen_ago) = (source, Duration::from_secs(100));
        let service = world.pod_sync().await;
        let spec = |volumes: serde_json::Value| json!({"restartPolicy": "Always", "containers": [container("main")], "volumes": volumes});
        world.add_pod_with_spec("host", spec(json!([{"name": "h", "hostPath": {"path": "/"}}])), 1);
        service.phase("host", "Running").await;
        service.wait_for_metrics(&["kubelet_pod_start_duration_seconds_count 1"]).await;
        assert!(!service.ctx.metrics.text().contains(first), "how long its volume took is not the node's");
        world.add_pod_with_spec("web", spec(json!([])), 1);
        service.phase("web", "Running").await;
        let lines = [format!("{total}_count {counted}"), format!("{of_node}_count {}", counted / 2)];
        service.wait_for_metrics(&lines.each_ref().map(String::as_str)).await;
        if counted > 0 {
            for name in [format!("{of_node}_sum "), format!("{first} ")] {
                let seconds = sample(&service, &name);
                assert!((100.0..120.0).contains(&seconds), "{name}{seconds}");
            }
        }
        // The next process has not started the pods that it finds running, nor the node's first pod.
        service.kill();
        let service = world.pod_sync().await;
        service.phase("web", "Running").await;
        world.add_pod_with_spec("later", spec(json!([])), 1);
        service.phase("later", "Running").await;
        let line = format!("{total}_count {}", counted / 2);
        service.wait_for_metrics(&["kubelet_pod_start_duration_seconds_count 1", &line]).await;
        assert!(!service.ctx.metrics.text().contains(first));
        service.kill();
    }
}

#[tokio::test]
async fn worker_duration_is_observed_by_operation_type() {
    let world = World::start();
    let service = world.pod_sync().await;
    let count =
        |kind: &str| format!("kubelet_pod_worker_duration_seconds_count{{operation_type=\"{kind}\"}}");
    world.add_pod("web", "Always", 1);
    service.phase("web", "Running").await;
    service.wait_for_metrics(&[&format!("{} 1", count("create"))]).await;
    assert!(!service.ctx.metrics.text().contains("operation_type=\"kill\""));
    world.shim.exit("web", 1);
    eventually("a sync turn", async || service.ctx.metrics.text().contains(&count("sync")).then_some(()))
        .await;
    world.pods.remove(&"web".to_owned());
    eventually("the end", async || service.pod("web").await.is_none().then_some(())).await;
    // Its processes first, then its volumes and cgroup.
    service.wait_for_metrics(&[&format!("{} 2", count("kill")), &format!("{} 1", count("create"))]).await;
    service.kill();
}

#[tokio::test]
async fn adopted_pods_are_not_counted_as_started_or_restarted() {
    for lost in [false, true] {
        let world = World::start();
        let first = world.pod_sync().await;
        world.add_pod("web", "Always", 1);
        world.add_pod("job", "Never", 1);
        first.phase("web", "Running").await;
        first.phase("job", "Running").await;
        first.kill();
        if lost {
            world.delete_records();
        }
        let second = world.pod_sync().await;
        // A container restart shows that the pod has been adopted.
        world.shim.exit("web", 1);
        eventually("the restart", async || (world.shim.calls("StartContainer") == 3).then_some(())).await;
        world.shim.exit("job", 0);
        second.phase("job", "Succeeded").await;
        second
            .wait_for_metrics(&[
                &workers_line("sync", "desired", "true", 1),
                &workers_line("terminated", "desired", "true", 1),
                &workers_line("sync", "orphan", "true", 0),
                &workers_line("terminating", "runtime_only", "unknown", 0),
                "kubelet_desired_pods{static=\"true\"} 2",
                "kubelet_desired_pods{static=\"\"} 0",
                "kubelet_active_pods{static=\"true\"} 1",
            ])
            .await;
        let text = second.ctx.metrics.text();
        assert_eq!(text.lines().filter(|line| line.starts_with("kubelet_working_pods{")).count(), 15);
        for line in [
            "kubelet_pod_start_duration_seconds_count 0",
            "kubelet_pod_worker_start_duration_seconds_count 0",
            "kubelet_containers_per_pod_count_count 0",
            "kubelet_orphaned_runtime_pods_total 0",
        ] {
            assert!(second.has_metric(line), "records lost: {lost}: {line}\n{text}");
        }
        for none in ["operation_type=\"create\"", "kubelet_restarted_pods_total{"] {
            assert!(!text.contains(none), "records lost: {lost}: {none}\n{text}");
        }
        second.kill();
    }
}

#[tokio::test]
async fn a_pod_removed_from_its_source_counts_as_orphan_until_it_has_ended() {
    let world = World::start();
    let service = world.pod_sync().await;
    world.add_pod("web", "Always", 1);
    service.phase("web", "Running").await;
    service
        .wait_for_metrics(&[
            "kubelet_desired_pods{static=\"true\"} 1",
            "kubelet_active_pods{static=\"true\"} 1",
        ])
        .await;
    world.shim.hold_stops();
    world.pods.remove(&"web".to_owned());
    let desired = "kubelet_desired_pods{static=\"true\"} 0";
    service.wait_for_metrics(&[&workers_line("terminating", "orphan", "true", 1), desired]).await;
    world.shim.release_stops();
    service.wait_for_metrics(&[&workers_line("terminating", "orphan", "true", 0)]).await;
    eventually("the end", async || service.pod("web").await.is_none().then_some(())).await;
    assert!(service.has_metric(&workers_line("terminated", "orphan", "true", 0)));
    service.kill();
}

#[tokio::test]
async fn runtime_only_pods_and_restarted_uids_are_counted() {
    let world = World::start();
    let service = world.pod_sync().await;
    world.add_pod("job", "Never", 1);
    service.phase("job", "Running").await;
    world.shim.exit("job", 0);
    service.phase("job", "Succeeded").await;
    world.pods.remove(&"job".to_owned());
    eventually("the end", async || service.pod("job").await.is_none().then_some(())).await;
    world.add_pod("job", "Never", 2);
    service.step("job", "source", |step| step.message.contains("earlier run")).await;
    assert!(!service.ctx.metrics.text().contains("kubelet_restarted_pods_total{"), "it still waits");
    world.shim.remove("job");
    service.phase("job", "Running").await;
    service
        .wait_for_metrics(&[
            "kubelet_restarted_pods_total{static=\"true\"} 1",
            "kubelet_pod_start_duration_seconds_count 2",
        ])
        .await;

    assert!(service.has_metric("kubelet_orphaned_runtime_pods_total 0"));
    world.shim.change("stray", |pod| {
        pod.sandboxes.push(Sandbox { id: "s-stray".into(), ready: true, ..Sandbox::default() });
    });
    service.wait_for_metrics(&["kubelet_orphaned_runtime_pods_total 1"]).await;
    eventually("its end", async || (world.shim.calls("StopPodSandbox") == 2).then_some(())).await;
    service.kill();
}

#[tokio::test]
async fn a_sleep_hook_is_counted_only_if_the_grace_period_ends_it() {
    let world = World::start();
    let service = world.pod_sync().await;
    let early = |count: u8| format!("kubelet_sleep_action_terminated_early_total {count}");
    for (uid, seconds, count) in [("short", 0, 0), ("long", 60, 1), ("endless", i64::MAX, 2)] {
        let mut sleeps = container("main");
        sleeps["lifecycle"] = json!({"preStop": {"sleep": {"seconds": seconds}}});
        world.add_pod_with_spec(uid, json!({"restartPolicy": "Always", "containers": [sleeps]}), 1);
        service.phase(uid, "Running").await;
        world.pods.remove(&uid.to_owned());
        eventually("the end", async || service.pod(uid).await.is_none().then_some(())).await;
        assert!(service.has_metric(&early(count)), "{uid}\n{}", service.ctx.metrics.text());
    }
    service.kill();
}
