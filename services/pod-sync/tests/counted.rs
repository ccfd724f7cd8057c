//! What is counted and measured of pods and their workers.

#![allow(clippy::unwrap_used)]

mod fake;

use std::time::Duration;

use keelson_proto::keelson::runtime::v1::Sandbox;
use serde_json::json;

use fake::{PodSync, World, eventually};

fn container(name: &str) -> serde_json::Value {
    json!({"name": name, "image": "i:1", "imagePullPolicy": "IfNotPresent"})
}

/// The only sample of metrics that begins so.
fn sample(service: &PodSync, begins: &str) -> f64 {
    let text = service.ctx.metrics.text();
    let mut found = text.lines().filter_map(|line| line.strip_prefix(begins));
    let value = found.next().unwrap_or_else(|| panic!("no {begins}\n{text}")).trim().parse().unwrap();
    assert_eq!(found.next(), None, "{begins}");
    value
}

fn working(lifecycle: &str, config: &str, is_static: &str, count: u8) -> String {
    format!(
        "kubelet_working_pods{{lifecycle=\"{lifecycle}\",config=\"{config}\",static=\"{is_static}\"}} {count}"
    )
}

#[tokio::test]
async fn a_start_is_measured_once_from_the_first_sight_of_the_pod() {
    let mut world = World::start();
    world.seen_ago = Duration::from_secs(100);
    let service = world.pod_sync().await;
    let spec = json!({"restartPolicy": "Always", "containers": [container("a"), container("b"), container("c")],
        "initContainers": [container("i")]});
    world.name_with("web", spec, 1);
    eventually("init", async || (world.shim.calls("StartContainer") == 1).then_some(())).await;
    assert!(service.counts("kubelet_pod_start_duration_seconds_count 0"), "it is Pending");
    world.shim.exit("web", 0);
    service.phase("web", "Running").await;
    let start = "kubelet_pod_start_duration_seconds";
    service.counted(&[&format!("{start}_count 1")]).await;
    let seconds = sample(&service, &format!("{start}_sum"));
    assert!((100.0..120.0).contains(&seconds), "{seconds}");
    for bound in ["0.5", "60.0", "120.0", "180.0", "3600.0"] {
        let reached = u8::from(!matches!(bound, "0.5" | "60.0"));
        let line = format!("{start}_bucket{{le=\"{bound}\"}} {reached}");
        assert!(service.counts(&line), "{line}\n{}", service.ctx.metrics.text());
    }
    let first = sample(&service, "kubelet_pod_worker_start_duration_seconds_sum");
    assert!((100.0..=seconds).contains(&first), "{first}");
    let lines = ["kubelet_containers_per_pod_count_count 1", "kubelet_containers_per_pod_count_sum 3.0"];
    service.counted(&lines).await;

    // Restarts of its containers and a change of its manifest are no starts.
    world.shim.exit("web", 1);
    eventually("the restart", async || (world.shim.calls("StartContainer") == 7).then_some(())).await;
    service.phase("web", "Running").await;
    world.name("web", "Always", 2);
    service.counted(&["kubelet_pod_worker_duration_seconds_count{operation_type=\"update\"} 1"]).await;
    let counts = [start, "kubelet_pod_worker_start_duration_seconds", "kubelet_containers_per_pod_count"];
    for family in counts {
        assert!(service.counts(&format!("{family}_count 1")), "{}", service.ctx.metrics.text());
    }
    service.kill();
}

#[tokio::test]
async fn what_a_pod_of_the_api_took_since_its_creation_is_measured_with_and_without_what_is_not_the_nodes() {
    let (total, of_node) =
        ("kubelet_pod_start_total_duration_seconds", "kubelet_pod_start_sli_duration_seconds");
    let first = "kubelet_first_network_pod_start_sli_duration_seconds";
    for (source, counted) in [("api", 2), ("file", 0)] {
        let mut world = World::start();
        (world.source, world.seen_ago) = (source, Duration::from_secs(100));
        let service = world.pod_sync().await;
        let spec = |volumes: serde_json::Value| json!({"restartPolicy": "Always", "containers": [container("main")], "volumes": volumes});
        world.name_with("host", spec(json!([{"name": "h", "hostPath": {"path": "/"}}])), 1);
        service.phase("host", "Running").await;
        service.counted(&["kubelet_pod_start_duration_seconds_count 1"]).await;
        assert!(!service.ctx.metrics.text().contains(first), "how long its volume took is not the node's");
        world.name_with("web", spec(json!([])), 1);
        service.phase("web", "Running").await;
        let lines = [format!("{total}_count {counted}"), format!("{of_node}_count {}", counted / 2)];
        service.counted(&lines.each_ref().map(String::as_str)).await;
        if counted > 0 {
            for name in [format!("{of_node}_sum "), format!("{first} ")] {
                let seconds = sample(&service, &name);
                assert!((100.0..120.0).contains(&seconds), "{name}{seconds}");
            }
        }
        // What the next process finds running is not its doing, and neither is the node's first pod.
        service.kill();
        let service = world.pod_sync().await;
        service.phase("web", "Running").await;
        world.name_with("later", spec(json!([])), 1);
        service.phase("later", "Running").await;
        let line = format!("{total}_count {}", counted / 2);
        service.counted(&["kubelet_pod_start_duration_seconds_count 1", &line]).await;
        assert!(!service.ctx.metrics.text().contains(first));
        service.kill();
    }
}

#[tokio::test]
async fn turns_are_measured_by_what_they_are_about() {
    let world = World::start();
    let service = world.pod_sync().await;
    let count =
        |kind: &str| format!("kubelet_pod_worker_duration_seconds_count{{operation_type=\"{kind}\"}}");
    world.name("web", "Always", 1);
    service.phase("web", "Running").await;
    service.counted(&[&format!("{} 1", count("create"))]).await;
    assert!(!service.ctx.metrics.text().contains("operation_type=\"kill\""));
    world.shim.exit("web", 1);
    eventually("a look", async || service.ctx.metrics.text().contains(&count("sync")).then_some(())).await;
    world.pods.remove(&"web".to_owned());
    eventually("the end", async || service.pod("web").await.is_none().then_some(())).await;
    // Its processes, then what is left.
    service.counted(&[&format!("{} 2", count("kill")), &format!("{} 1", count("create"))]).await;
    service.kill();
}

#[tokio::test]
async fn what_an_earlier_process_has_begun_is_neither_created_nor_started_nor_restarted_again() {
    for lost in [false, true] {
        let world = World::start();
        let first = world.pod_sync().await;
        world.name("web", "Always", 1);
        world.name("job", "Never", 1);
        first.phase("web", "Running").await;
        first.phase("job", "Running").await;
        first.kill();
        if lost {
            world.lose_records();
        }
        let second = world.pod_sync().await;
        // A restart of a container shows that the pod has been taken over.
        world.shim.exit("web", 1);
        eventually("the restart", async || (world.shim.calls("StartContainer") == 3).then_some(())).await;
        world.shim.exit("job", 0);
        second.phase("job", "Succeeded").await;
        second
            .counted(&[
                &working("sync", "desired", "true", 1),
                &working("terminated", "desired", "true", 1),
                &working("sync", "orphan", "true", 0),
                &working("terminating", "runtime_only", "unknown", 0),
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
            assert!(second.counts(line), "records lost: {lost}: {line}\n{text}");
        }
        for none in ["operation_type=\"create\"", "kubelet_restarted_pods_total{"] {
            assert!(!text.contains(none), "records lost: {lost}: {none}\n{text}");
        }
        second.kill();
    }
}

#[tokio::test]
async fn a_pod_that_its_source_drops_is_an_orphan_until_it_has_ended() {
    let world = World::start();
    let service = world.pod_sync().await;
    world.name("web", "Always", 1);
    service.phase("web", "Running").await;
    service
        .counted(&["kubelet_desired_pods{static=\"true\"} 1", "kubelet_active_pods{static=\"true\"} 1"])
        .await;
    world.shim.hold_stops();
    world.pods.remove(&"web".to_owned());
    let desired = "kubelet_desired_pods{static=\"true\"} 0";
    service.counted(&[&working("terminating", "orphan", "true", 1), desired]).await;
    world.shim.stop_freely();
    service.counted(&[&working("terminating", "orphan", "true", 0)]).await;
    eventually("the end", async || service.pod("web").await.is_none().then_some(())).await;
    assert!(service.counts(&working("terminated", "orphan", "true", 0)));
    service.kill();
}

#[tokio::test]
async fn what_only_the_runtime_knows_and_a_uid_that_begins_anew_are_counted() {
    let world = World::start();
    let service = world.pod_sync().await;
    world.name("job", "Never", 1);
    service.phase("job", "Running").await;
    world.shim.exit("job", 0);
    service.phase("job", "Succeeded").await;
    world.pods.remove(&"job".to_owned());
    eventually("the end", async || service.pod("job").await.is_none().then_some(())).await;
    world.name("job", "Never", 2);
    service.step("job", "source", |step| step.message.contains("earlier run")).await;
    assert!(!service.ctx.metrics.text().contains("kubelet_restarted_pods_total{"), "it still waits");
    world.shim.collect("job");
    service.phase("job", "Running").await;
    service
        .counted(&[
            "kubelet_restarted_pods_total{static=\"true\"} 1",
            "kubelet_pod_start_duration_seconds_count 2",
        ])
        .await;

    assert!(service.counts("kubelet_orphaned_runtime_pods_total 0"));
    world.shim.change("stray", |pod| {
        pod.sandboxes.push(Sandbox { id: "s-stray".into(), ready: true, ..Sandbox::default() });
    });
    service.counted(&["kubelet_orphaned_runtime_pods_total 1"]).await;
    eventually("its end", async || (world.shim.calls("StopPodSandbox") == 2).then_some(())).await;
    service.kill();
}

#[tokio::test]
async fn a_hook_that_sleeps_is_counted_when_the_grace_ends_it_and_not_when_it_has_slept() {
    let world = World::start();
    let service = world.pod_sync().await;
    let early = |count: u8| format!("kubelet_sleep_action_terminated_early_total {count}");
    for (uid, seconds, count) in [("short", 0, 0), ("long", 60, 1), ("endless", i64::MAX, 2)] {
        let mut sleeps = container("main");
        sleeps["lifecycle"] = json!({"preStop": {"sleep": {"seconds": seconds}}});
        world.name_with(uid, json!({"restartPolicy": "Always", "containers": [sleeps]}), 1);
        service.phase(uid, "Running").await;
        world.pods.remove(&uid.to_owned());
        eventually("the end", async || service.pod(uid).await.is_none().then_some(())).await;
        assert!(service.counts(&early(count)), "{uid}\n{}", service.ctx.metrics.text());
    }
    service.kill();
}
