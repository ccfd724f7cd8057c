//! Image volumes (volumes.md §10.7): pulled like the images of containers, mounted by the runtime, refused where it cannot.

#![allow(clippy::unwrap_used)]

mod fake;

use serde_json::{Value, json};

use fake::{PodSync, World, eventually};

const METRICS: [&str; 3] = [
    "kubelet_image_volume_requested_total",
    "kubelet_image_volume_mounted_succeed_total",
    "kubelet_image_volume_mounted_errors_total",
];

/// A container that mounts `volume`, or nothing if that is empty.
fn container(name: &str, volume: &str) -> Value {
    let mounts = if volume.is_empty() { json!([]) } else { json!([{"name": volume, "mountPath": "/oci"}]) };
    json!({"name": name, "image": "i:1", "imagePullPolicy": "IfNotPresent", "volumeMounts": mounts})
}

/// A pod with these containers and two image volumes, `data` and `spare`.
fn spec(containers: &[Value]) -> Value {
    let volume = |name: &str, policy: &str| json!({"name": name, "image": {"reference": format!("{name}:1"), "pullPolicy": policy}});
    json!({
        "restartPolicy": "Never",
        "imagePullSecrets": [{"name": "registry"}],
        "containers": containers,
        "volumes": [volume("data", "Always"), volume("spare", "IfNotPresent")],
    })
}

/// The state of a container once it waits for this reason.
async fn until_waiting(service: &PodSync, container: &str, reason: &str) -> String {
    eventually(&format!("{container} waits: {reason}"), async || {
        let statuses = service.pod("web").await?["status"]["containerStatuses"].take();
        let status = statuses.as_array()?.iter().find(|status| status["name"] == container)?;
        let waiting = &status["state"]["waiting"];
        (waiting["reason"] == reason).then(|| waiting["message"].as_str().unwrap_or_default().to_owned())
    })
    .await
}

#[tokio::test]
async fn image_volumes_are_pulled_with_the_pods_secrets_and_mounted_by_the_runtime() {
    let world = World::start();
    world.shim.set_runtime("containerd", "v2.1.4");
    let service = world.pod_sync().await;
    world.add_pod_with_spec("web", spec(&[container("main", "data"), container("other", "data")]), 1);
    service.phase("web", "Running").await;
    eventually("the unused image", async || {
        (world.shim.calls("image spare:1 for a volume: IfNotPresent registry") == 1).then_some(())
    })
    .await;
    for (call, count) in [
        ("image data:1 for a volume: Always registry", 1),
        ("mount image sha256:data:1 (data:1, 1)", 2),
        ("mount  at /oci", 2),
        ("/oci read-only", 2),
    ] {
        assert_eq!(world.shim.calls(call), count, "{call}: {:#?}", world.shim.order());
    }
    let events = service.events().await;
    assert_eq!(events.iter().filter(|event| *event == "Normal Pulled: data:1 is present").count(), 1);
    let images = world.shim.images("web");
    assert!(images.contains(&"data:1".to_owned()) && images.contains(&"spare:1".to_owned()), "{images:?}");
    for (name, count) in METRICS.into_iter().zip([2, 2, 0]) {
        service.wait_for_metrics(&[&format!("{name} {count}")]).await;
    }
    service.kill();
}

#[tokio::test]
async fn only_containers_that_mount_an_image_volume_wait_for_its_image() {
    let world = World::start();
    world.shim.set_runtime("cri-o", "1.33.0");
    world.shim.fail_image("data:1");
    world.shim.fail_image("spare:1");
    let service = world.pod_sync().await;
    world.add_pod_with_spec("web", spec(&[container("main", "data"), container("other", "")]), 1);
    let message = until_waiting(&service, "main", "ImagePullBackOff").await;
    assert_eq!(message, "the registry does not have it");
    service.event("Warning Failed: Error: the registry does not have it").await;
    let step = service.step("web", "image", |step| step.subject == "volume data").await;
    assert_eq!((step.state.as_str(), step.owner.as_str()), ("failed", "you"), "{step:?}");
    eventually("the other container runs", async || {
        let pod = service.pod("web").await?;
        pod["status"]["containerStatuses"]
            .as_array()?
            .iter()
            .any(|status| status["name"] == "other" && !status["state"]["running"].is_null())
            .then_some(())
    })
    .await;
    assert_eq!(world.shim.calls("CreateContainer"), 1, "{:#?}", world.shim.order());
    service.kill();
}

#[tokio::test]
async fn a_runtime_that_ignores_image_volumes_is_refused_by_name() {
    for (runtime, text) in [
        (
            ("containerd", "1.6.20~ds1"),
            "volume \"data\" is an image, which containerd 1.6.20~ds1 cannot mount",
        ),
        (("other", "9.0"), "volume \"data\" is an image, which other 9.0 cannot mount"),
    ] {
        let world = World::start();
        world.shim.set_runtime(runtime.0, runtime.1);
        let service = world.pod_sync().await;
        world.add_pod_with_spec("web", spec(&[container("main", "data")]), 1);
        let message = until_waiting(&service, "main", "CreateContainerConfigError").await;
        assert!(message.contains(text), "{message}");
        let (pulls, created) =
            (world.shim.calls_beginning("image data:1"), world.shim.calls("CreateContainer"));
        assert_eq!((pulls, created), (0, 0), "{:#?}", world.shim.order());
        assert!(METRICS.iter().all(|name| service.has_metric(&format!("{name} 0"))));
        service.kill();
    }
}

#[tokio::test]
async fn an_image_that_the_runtime_cannot_mount_is_counted() {
    let world = World::start();
    world.shim.set_runtime("containerd", "v2.1.4");
    let service = world.pod_sync().await;
    world.add_pod_with_spec("web", spec(&[container("unmountable", "data")]), 1);
    let message = until_waiting(&service, "unmountable", "CreateContainerError").await;
    assert!(message.contains("ImageVolumeMountFailed: no such snapshot"), "{message}");
    service.event("Warning Failed: Error: ").await;
    eventually("each attempt is counted as an error", async || {
        let text = service.ctx.metrics.text();
        let value =
            |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u32>().ok());
        let counts = METRICS.iter().map(|name| value(name)).collect::<Option<Vec<_>>>()?;
        (counts[2] > 0 && counts[0] == counts[2] && counts[1] == 0).then_some(())
    })
    .await;
    service.kill();
}
