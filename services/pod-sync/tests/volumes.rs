//! Volumes are mounted before the sandbox is made, and subpaths and file values are prepared before the container is created.

#![allow(clippy::unwrap_used)]

mod fake;

use futures_util::stream;
use keelson_proto::keelson::volume_manager::v1 as vm;
use keelson_service_kit::status::error;
use keelson_testkit::fakes::StreamAnswer;
use serde_json::{Value, json};
use tonic::{Code, Status};

use fake::{PodSync, World, eventually};

fn spec(container: Value) -> Value {
    let mut main = json!({"name": "main", "image": "i:1", "imagePullPolicy": "IfNotPresent"});
    main.as_object_mut().unwrap().extend(container.as_object().unwrap().clone());
    json!({
        "restartPolicy": "Never",
        "containers": [main],
        "volumes": [{"name": "data", "emptyDir": {}}],
    })
}

/// A `volumeMounts` entry of the volume.
fn mount(path: &str, more: Value) -> Value {
    let mut mount = json!({"name": "data", "mountPath": path});
    mount.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    mount
}

#[tokio::test]
async fn subpaths_and_file_key_refs_are_prepared_and_reach_the_runtime() {
    let world = World::start();
    let service = world.pod_sync().await;
    let file = |path: &str, optional: bool| json!({"fileKeyRef": {"volumeName": "data", "path": path, "key": "K", "optional": optional}});
    let container = json!({
        "env": [
            {"name": "WHO", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "FILE", "valueFrom": file("app.env", false)},
            {"name": "NONE", "valueFrom": file("none", true)},
        ],
        "volumeMounts": [
            mount("/whole", json!({})),
            mount("/part", json!({"subPath": "a/b"})),
            mount("/own", json!({"subPathExpr": "of/$(WHO)"})),
        ],
    });
    world.add_pod_with_spec("web", spec(container), 1);
    service.phase("web", "Running").await;
    for call in [
        "mount /volumes/data at /whole",
        "mount /prepared/main/data/a/b at /part",
        "mount /prepared/main/data/of/web at /own",
        "env FILE=K of app.env in data",
    ] {
        assert_eq!(world.shim.calls(call), 1, "{call}");
    }
    assert_eq!(world.shim.calls("env NONE="), 0);
    service.kill();
}

#[tokio::test]
async fn a_subpath_that_cannot_be_prepared_is_the_waiting_reason_owned_by_you() {
    let file = json!([{"name": "F", "valueFrom": {"fileKeyRef": {"volumeName": "data", "path": "none", "key": "K"}}}]);
    for (uid, container, text) in [
        (
            "out",
            json!({"volumeMounts": [mount("/v", json!({"subPath": "out"}))]}),
            "subPath of data: it leads out",
        ),
        (
            "variable",
            json!({"volumeMounts": [mount("/v", json!({"subPathExpr": "$(NOBODY)"}))]}),
            "missing value for NOBODY",
        ),
        ("upwards", json!({"volumeMounts": [mount("/v", json!({"subPathExpr": "a/../.."}))]}), "subPath"),
        ("key", json!({"env": file}), "environment variable key \"K\" not found in file \"none\""),
    ] {
        let world = World::start();
        let service = world.pod_sync().await;
        world.add_pod_with_spec(uid, spec(container), 1);
        let step = service.step(uid, "container", |step| step.message.contains(text)).await;
        assert_eq!(step.owner, "you", "{step:?}");
        let waiting = eventually("the waiting reason", async || {
            let state = service.pod(uid).await?["status"]["containerStatuses"][0]["state"].take();
            state["waiting"]["message"].as_str().is_some_and(|m| m.contains(text)).then_some(state)
        })
        .await;
        assert_eq!(waiting["waiting"]["reason"], "CreateContainerConfigError");
        assert_eq!(world.shim.calls("CreateContainer"), 0);
        service.kill();
    }
}

fn ready(volumes: Vec<vm::VolumeMount>) -> vm::MountPodResponse {
    let ready = vm::MountsReady { volumes, ..vm::MountsReady::default() };
    vm::MountPodResponse { item: Some(vm::mount_pod_response::Item::Ready(ready)) }
}

fn device(name: &str, read_only: bool) -> vm::VolumeMount {
    let (name, host_path) = (name.to_owned(), format!("/devices/{name}"));
    vm::VolumeMount { name, host_path, read_only, block_device: true, ..vm::VolumeMount::default() }
}

fn claims(names: &[&str]) -> Vec<Value> {
    names.iter().map(|name| json!({"name": name, "persistentVolumeClaim": {"claimName": name}})).collect()
}

#[tokio::test]
async fn block_volumes_reach_the_runtime_as_devices_and_are_not_mounted() {
    let world = World::start();
    let data = vm::VolumeMount {
        name: "data".into(),
        host_path: "/volumes/data".into(),
        read_only: true,
        ..vm::VolumeMount::default()
    };
    world.volumes.mount_pod.list([ready(vec![data, device("disk", false), device("copy", true)])]);
    let service = world.pod_sync().await;
    let device = |name: &str| json!({"name": name, "devicePath": format!("/dev/{name}")});
    let mut spec = spec(json!({
        "volumeMounts": [mount("/data", json!({}))],
        "volumeDevices": [device("disk"), device("copy")],
    }));
    spec["volumes"] = json!(claims(&["data", "disk", "copy"]));
    world.add_pod_with_spec("web", spec, 1);
    service.phase("web", "Running").await;
    for call in [
        "mount /volumes/data at /data",
        "/data read-only",
        "device /devices/disk at /dev/disk mrw",
        "device /devices/copy at /dev/copy r",
    ] {
        assert_eq!(world.shim.calls(call), 1, "{call}");
    }
    // None of them is mounted.
    assert_eq!(
        (world.shim.calls_beginning("mount /devices/"), world.shim.calls_beginning("device ")),
        (0, 2)
    );
    service.kill();
}

#[tokio::test]
async fn groups_of_volumes_are_those_of_sandbox_and_containers() {
    let world = World::start();
    let volume = |name: &str, group| vm::VolumeMount {
        name: name.into(),
        host_path: format!("/volumes/{name}"),
        supplemental_group: group,
        ..vm::VolumeMount::default()
    };
    let volumes =
        vec![volume("a", Some(70)), volume("b", Some(70)), volume("c", None), volume("data", Some(5))];
    world.volumes.mount_pod.list([ready(volumes)]);
    let service = world.pod_sync().await;
    let mounts = ["a", "b", "c", "data"].map(|name| json!({"name": name, "mountPath": format!("/{name}")}));
    let mut spec = spec(json!({ "volumeMounts": mounts }));
    spec["volumes"] = json!(claims(&["a", "b", "c", "data"]));
    spec["securityContext"] = json!({"fsGroup": 5, "supplementalGroups": [6]});
    world.add_pod_with_spec("web", spec, 1);
    service.phase("web", "Running").await;
    for call in ["sandbox groups [5, 70, 6]", "groups [5, 6, 70]"] {
        assert_eq!(world.shim.calls(call), 1, "{call}");
    }
    service.kill();
}

/// A call of `MountPod` that reports a wait and ends with an error.
fn wait_then_fail(progress: &vm::MountProgress, status: &Status) -> StreamAnswer<vm::MountPodResponse> {
    let item = Some(vm::mount_pod_response::Item::Progress(progress.clone()));
    StreamAnswer::stream(stream::iter([Ok(vm::MountPodResponse { item }), Err(status.clone())]))
}

/// Has pod-sync retry at once, and waits until it has asked for the mounts this many times.
async fn mounts_requested(world: &World, service: &PodSync, times: usize) {
    eventually("requests for mounts", async || {
        service.retry("web").await;
        (world.volumes.mount_pod.requests().len() >= times).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_wait_for_volumes_shows_who_has_to_act_and_is_one_event_at_its_deadline() {
    for (owner, shown) in [
        ("", "volume-manager"),
        ("API server", "API server"),
        ("attach-detach controller", "attach-detach controller"),
        ("persistent volume controller", "persistent volume controller"),
        ("pod default/other", "pod default/other"),
        ("provisioner disks.example.com", "provisioner disks.example.com"),
        ("you", "you"),
    ] {
        let world = World::start();
        let progress = vm::MountProgress {
            waiting_for: "the claim d".into(),
            next_try_unix_nanos: 0,
            owner: owner.into(),
        };
        let deadline = error(Code::DeadlineExceeded, "NOT_MOUNTED", "pod web still waits for the claim d");
        world.volumes.mount_pod.answer_with(move |_| Ok(wait_then_fail(&progress, &deadline)));
        let service = world.pod_sync().await;
        world.add_pod_with_spec("web", spec(json!({"volumeMounts": [mount("/v", json!({}))]})), 1);
        let first = service.step("web", "volumes", |step| step.owner == shown).await;
        assert_eq!((first.state.as_str(), first.message.as_str()), ("waiting", "the claim d"));
        // The end of a call changes neither the cause nor the time since when the pod waits.
        mounts_requested(&world, &service, 3).await;
        let later = service.step("web", "volumes", |_| true).await;
        assert_eq!((later.owner.as_str(), later.since_unix_nanos), (shown, first.since_unix_nanos));
        let act = if owner == "you" { "you have to act".to_owned() } else { format!("{shown} is to act") };
        let summary = service.summary("web").await;
        assert!(summary.contains(&format!("the claim d ({act}")), "{summary}");
        let events = service.events().await;
        let text =
            "Warning FailedMount: Unable to attach or mount volumes: pod web still waits for the claim d";
        let shown: Vec<_> = events.iter().filter(|event| event.contains("FailedMount")).collect();
        assert_eq!(shown, [text], "{events:?}");
        service.kill();
    }
}

#[tokio::test]
async fn a_failed_mount_that_is_retried_shows_its_owner_and_next_attempt() {
    let world = World::start();
    let next = keelson_service_kit::now_unix_nanos() + 3_600_000_000_000;
    let progress = vm::MountProgress {
        waiting_for: "the server does not answer".into(),
        next_try_unix_nanos: next,
        owner: "API server".into(),
    };
    let item = Some(vm::mount_pod_response::Item::Progress(progress));
    let answer = vm::MountPodResponse { item };
    world.volumes.mount_pod.answer_with(move |_| Ok(StreamAnswer::items([answer.clone()]).then_open()));
    let service = world.pod_sync().await;
    world.add_pod_with_spec("web", spec(json!({"volumeMounts": [mount("/v", json!({}))]})), 1);
    let step = service.step("web", "volumes", |step| step.state == "failed").await;
    assert_eq!((step.owner.as_str(), step.next_retry_unix_nanos), ("API server", next));
    service.kill();
}

#[tokio::test]
async fn a_volume_that_cannot_be_mounted_is_one_event_and_owned_by_you() {
    let world = World::start();
    let refused = error(Code::FailedPrecondition, "VOLUME_NOT_USABLE", "the claim d does not exist");
    world.volumes.mount_pod.fail(refused);
    let service = world.pod_sync().await;
    world.add_pod_with_spec("web", spec(json!({"volumeMounts": [mount("/v", json!({}))]})), 1);
    let step = service.step("web", "volumes", |step| step.state == "failed").await;
    assert_eq!(step.owner, "you");
    mounts_requested(&world, &service, 3).await;
    let text = "Warning FailedMount: Unable to attach or mount volumes: the claim d does not exist";
    let events = service.events().await;
    assert_eq!(events.iter().filter(|event| *event == text).count(), 1, "{events:?}");
    service.kill();
}
