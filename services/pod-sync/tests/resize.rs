//! In-place resize of running pods: decided on, carried out, shown, and continued by the next process.

#![allow(clippy::unwrap_used)]

mod fake;

use keelson_proto::keelson::pod_sync::v1::ExplainPodRequest;
use keelson_service_kit::status::error;
use serde_json::{Value, json};
use tonic::Code;

use fake::{PodSync, World, eventually};

const MIB: i64 = 1 << 20;

/// A pod with one container that requests and may use this much.
fn with(cpu: &str, memory: &str, policy: Value) -> Value {
    let both = json!({"cpu": cpu, "memory": memory});
    let resources = json!({"requests": both, "limits": both});
    json!({"restartPolicy": "Always", "containers": [
        {"name": "main", "image": "i:1", "imagePullPolicy": "IfNotPresent", "resources": resources,
         "resizePolicy": policy},
    ]})
}

fn with_cpu(cpu: &str) -> Value {
    with(cpu, "64Mi", json!([]))
}

fn condition<'a>(status: &'a Value, name: &str) -> Option<&'a Value> {
    status["conditions"].as_array()?.iter().find(|condition| condition["type"] == name)
}

/// Waits until the status of the pod is like this; returns it.
async fn until(service: &PodSync, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
    eventually(what, async || {
        let status = service.pod("web").await?["status"].take();
        holds(&status).then_some(status)
    })
    .await
}

/// Waits until the pod has this much CPU and no resize; returns its first container's status.
async fn until_resized(service: &PodSync, cpu: &str) -> Value {
    let status = until(service, "the end of the resize", |status| {
        let none = |name| condition(status, name).is_none();
        let allocated = &status["containerStatuses"][0]["allocatedResources"]["cpu"];
        allocated == cpu && none("PodResizePending") && none("PodResizeInProgress")
    });
    status.await["containerStatuses"][0].clone()
}

/// Waits until the resize is pending for this reason; returns the message.
async fn until_pending(service: &PodSync, reason: &str) -> String {
    let is = |status: &Value| condition(status, "PodResizePending").is_some_and(|c| c["reason"] == reason);
    let status = until(service, reason, is).await;
    condition(&status, "PodResizePending").unwrap()["message"].as_str().unwrap().to_owned()
}

/// Waits until no resize is among the steps of the pod.
async fn until_no_step(service: &PodSync) {
    eventually("the end of the step", async || {
        let request = ExplainPodRequest { uid: "web".into(), ..Default::default() };
        let steps = service.client().explain_pod(request).await.ok()?.into_inner().steps;
        steps.iter().all(|step| step.name != "resize").then_some(())
    })
    .await;
}

async fn running(spec: Value) -> (World, PodSync) {
    let mut world = World::start();
    world.source = "api";
    let service = world.pod_sync().await;
    world.add_pod_with_spec("web", spec, 1);
    service.phase("web", "Running").await;
    (world, service)
}

#[tokio::test]
async fn a_resize_changes_the_container_and_the_cgroup_without_a_restart() {
    let (world, service) = running(with_cpu("500m")).await;
    let acts = world.shim.mutating_calls();
    world.add_pod_with_spec("web", with_cpu("900m"), 2);
    let container = until_resized(&service, "900m").await;
    assert_eq!(
        (&container["restartCount"], &container["resources"]["limits"]["cpu"]),
        (&json!(0), &json!("900m"))
    );
    assert_eq!(world.shim.mutating_calls(), acts);
    let updates = world.shim.updates();
    assert_eq!(updates.len(), 1, "{updates:?}");
    assert_eq!((updates[0].cpu_quota, updates[0].memory_limit_in_bytes), (90_000, 64 * MIB));
    assert_eq!(world.machine.resizes().all()[0].requests["cpu"], 900);
    let sent = world.machine.desire("web").unwrap();
    assert_eq!((sent.requests["cpu"], sent.cgroup.unwrap().cpu_quota_us), (900, 90_000));
    service.event("Normal ResizeStarted: Pod resize started: {\"containers\":[{\"name\":\"main\"").await;
    service.event("Normal ResizeCompleted: Pod resize completed: {").await;
    service
        .wait_for_metrics(&[
            "kubelet_container_requested_resizes_total{resource=\"cpu\",requirement=\"limits\",operation=\"increase\"} 1",
            "kubelet_pod_resize_duration_milliseconds_count{success=\"true\"} 1",
        ])
        .await;
    service.kill();
}

#[tokio::test]
async fn the_cgroup_grows_before_the_container_and_shrinks_after_it() {
    let (world, service) = running(with("500m", "64Mi", json!([]))).await;
    world.machine.prepared().all();
    world.add_pod_with_spec("web", with("250m", "128Mi", json!([])), 2);
    until_resized(&service, "250m").await;
    let values: Vec<(i64, i64)> = world
        .machine
        .prepared()
        .all()
        .into_iter()
        .filter_map(|request| request.cgroup)
        .map(|cgroup| (cgroup.cpu_quota_us, cgroup.memory_limit_bytes / MIB))
        .collect();
    assert_eq!(values, [(50_000, 128), (25_000, 128)], "both, then the new ones");
    let updates = world.shim.updates();
    let updates: Vec<_> = updates.iter().map(|u| (u.cpu_quota, u.memory_limit_in_bytes / MIB)).collect();
    assert_eq!(updates, [(50_000, 128), (25_000, 128)], "memory, then CPU");
    service.kill();
}

#[tokio::test]
async fn a_deferred_resize_stays_deferred_after_a_restart_until_there_is_room() {
    let (world, first) = running(with_cpu("500m")).await;
    let acts = world.shim.mutating_calls();
    world.machine.reject_resizes("Node didn't have enough resource: cpu", true);
    world.add_pod_with_spec("web", with_cpu("900m"), 2);
    assert!(until_pending(&first, "Deferred").await.starts_with("Node didn't have enough resource"));
    first.event("Warning ResizeDeferred: Pod resize deferred: {").await;
    first.step("web", "resize", |step| step.owner == "resource-manager" && step.state == "waiting").await;
    let sent = world.machine.desire("web").unwrap();
    assert_eq!((sent.requests["cpu"], sent.cgroup.unwrap().cpu_quota_us), (500, 50_000));
    first.kill();

    let second = world.pod_sync().await;
    world.machine.resizes().until_len(2).await;
    until_pending(&second, "Deferred").await;
    assert!(!second.events().await.iter().any(|event| event.contains("ResizeDeferred")), "told already");
    let container = second.phase("web", "Running").await;
    assert_eq!(container["allocatedResources"]["cpu"], "500m");
    world.machine.accept_resizes();
    // Resources become free for reasons that nobody tells of.
    until_resized(&second, "900m").await;
    assert_eq!(world.shim.mutating_calls(), acts);
    second.kill();
}

#[tokio::test]
async fn an_infeasible_resize_changes_nothing_and_a_reverted_one_is_not_pending() {
    let (world, service) = running(with_cpu("500m")).await;
    world.machine.reject_resizes("Node didn't have enough resource: cpu", false);
    world.add_pod_with_spec("web", with_cpu("900m"), 2);
    until_pending(&service, "Infeasible").await;
    service.event("Warning ResizeInfeasible: Pod resize infeasible: {").await;
    service.step("web", "resize", |step| step.owner == "you" && step.state == "failed").await;
    // Without a question to resource-manager: no pod can have that.
    let asked = world.machine.resizes().all().len();
    let mut other_class = with_cpu("900m");
    other_class["containers"][0]["resources"]["requests"]["cpu"] = "100m".into();
    world.add_pod_with_spec("web", other_class, 3);
    eventually("the other reason", async || {
        let message = until_pending(&service, "Infeasible").await;
        message.contains("Pod QOS Class may not change").then_some(())
    })
    .await;
    assert_eq!(world.machine.resizes().all().len(), asked);
    world.add_pod_with_spec("web", with_cpu("500m"), 4);
    let container = until_resized(&service, "500m").await;
    assert_eq!((&container["restartCount"], world.shim.updates().len()), (&json!(0), 0));
    until_no_step(&service).await;
    service.kill();
}

#[tokio::test]
async fn a_container_whose_policy_demands_it_restarts_with_its_new_resources() {
    let policy = json!([{"resourceName": "memory", "restartPolicy": "RestartContainer"}]);
    let (world, service) = running(with("500m", "64Mi", policy.clone())).await;
    world.add_pod_with_spec("web", with("600m", "128Mi", policy), 2);
    let container = until_resized(&service, "600m").await;
    assert_eq!(container["restartCount"], 1);
    assert_eq!((world.shim.calls("StopContainer"), world.shim.updates().len()), (1, 0));
    service.kill();
}

#[tokio::test]
async fn a_container_is_not_stopped_for_a_resize_while_its_pod_cannot_grow() {
    let policy = json!([{"resourceName": "memory", "restartPolicy": "RestartContainer"}]);
    let (world, service) = running(with("500m", "64Mi", policy.clone())).await;
    let failed = |status: &Value| {
        condition(status, "PodResizeInProgress").is_some_and(|condition| condition["reason"] == "Error")
    };
    world.machine.refuse_cgroups(Some(error(Code::Internal, "BROKEN", "cannot write the cgroup")));
    world.add_pod_with_spec("web", with("500m", "128Mi", policy.clone()), 2);
    until(&service, "the error", failed).await;
    service.event("Warning ResizeError: Pod resize error: {").await;
    world.machine.prepared().until_len(world.machine.prepared().all().len() + 2).await;
    assert_eq!(world.shim.calls("StopContainer"), 0);
    world.machine.refuse_cgroups(None);
    let container = until_resized(&service, "500m").await;
    assert_eq!((&container["restartCount"], world.shim.calls("StopContainer")), (&json!(1), 1));
    service.kill();
}

#[tokio::test]
async fn a_limit_of_the_pod_below_its_usage_is_an_error_until_the_usage_falls() {
    let (world, service) = running(with("500m", "64Mi", json!([]))).await;
    let refused = |usage: i64| {
        let text = format!("attempting to set pod memory limit (33554432) below current usage ({usage})");
        Some(error(Code::FailedPrecondition, "LIMIT_BELOW_USAGE", text))
    };
    world.machine.refuse_cgroups(refused(40 << 20));
    world.add_pod_with_spec("web", with("500m", "32Mi", json!([])), 2);
    service.event("Warning ResizeError: Pod resize error: {").await;
    world.machine.refuse_cgroups(refused(41 << 20));
    let usage = format!("current usage ({})", 41 << 20);
    service.step("web", "resize", |step| step.state == "failed" && step.message.contains(&usage)).await;
    world.machine.refuse_cgroups(None);
    until_resized(&service, "500m").await;
    let told = service.events().await.into_iter().filter(|event| event.contains("ResizeError")).count();
    assert_eq!(told, 1, "another usage is no other error");
    service.kill();
}

#[tokio::test]
async fn a_pod_can_be_ended_while_the_runtime_does_not_answer_an_update() {
    let (world, service) = running(with_cpu("500m")).await;
    world.shim.hang_updates();
    world.add_pod_with_spec("web", with_cpu("900m"), 2);
    eventually("the update", async || (!world.shim.updates().is_empty()).then_some(())).await;
    world.pods.remove(&"web".to_owned());
    eventually("its end", async || (world.shim.calls("StopPodSandbox") > 0).then_some(())).await;
    service.kill();
}

#[tokio::test]
async fn a_pod_that_changes_while_its_resize_is_decided_on_is_decided_on_again() {
    let (world, service) = running(with_cpu("500m")).await;
    let answers = world.machine.hold_resizes();
    world.add_pod_with_spec("web", with_cpu("900m"), 2);
    world.machine.resizes().until_len(1).await;
    // The set of pods says again what the pod is allocated.
    world.add_pod_with_spec("web", with_cpu("900m"), 3);
    eventually("the change", async || (world.machine.desire("web")?.revision == 3).then_some(())).await;
    answers.add_permits(2);
    until_resized(&service, "900m").await;
    let revisions: Vec<u64> = world.machine.resizes().all().iter().map(|resize| resize.revision).collect();
    assert_eq!(revisions, [2, 3]);
    service.kill();
}

#[tokio::test]
async fn a_pod_that_is_not_decided_on_does_not_delay_the_resize_of_another() {
    let (world, service) = running(with_cpu("500m")).await;
    world.add_pod_with_spec("a", with_cpu("500m"), 1);
    service.phase("a", "Running").await;
    world.machine.leave_undecided("a");
    world.add_pod_with_spec("a", with_cpu("600m"), 2);
    service.step("a", "resize", |step| step.state == "waiting").await;
    world.add_pod_with_spec("web", with_cpu("900m"), 2);
    until_resized(&service, "900m").await;
    service.kill();
}

#[tokio::test]
async fn a_resize_waits_for_the_admission_of_a_pod_that_does_not_run_after_a_restart() {
    // Pods from files wait for their admission.
    let world = World::start();
    let first = world.pod_sync().await;
    world.add_pod_with_spec("web", with_cpu("500m"), 1);
    first.phase("web", "Running").await;
    world.shim.hold_updates(true);
    world.add_pod_with_spec("web", with_cpu("900m"), 2);
    eventually("an attempt", async || (!world.shim.updates().is_empty()).then_some(())).await;
    first.kill();
    world.shim.hold_updates(false);
    world.shim.remove("web");
    world.machine.reject_temporarily("NodeDrained", "The node is drained.");
    let of_resizes = || world.machine.prepared().all().iter().filter(|call| call.cgroup.is_some()).count();
    let before = of_resizes();

    let second = world.pod_sync().await;
    second.step("web", "admission", |step| step.message == "The node is drained.").await;
    assert_eq!(of_resizes(), before);
    assert!(!second.events().await.iter().any(|event| event.contains("Resize")));
    world.machine.admit();
    until_resized(&second, "900m").await;
    second.event("Normal ResizeCompleted: ").await;
    second.kill();
}

#[tokio::test]
async fn memory_is_not_lowered_below_what_is_in_use() {
    let (world, service) = running(with("500m", "64Mi", json!([]))).await;
    world.shim.use_memory(40 << 20);
    world.add_pod_with_spec("web", with("500m", "32Mi", json!([])), 2);
    let failed = |status: &Value| {
        condition(status, "PodResizeInProgress").is_some_and(|condition| condition["reason"] == "Error")
    };
    let status = until(&service, "the error", failed).await;
    assert_eq!(
        condition(&status, "PodResizeInProgress").unwrap()["message"],
        "attempting to set container \"main\" memory limit (33554432) below current usage (41943040)"
    );
    let container = &status["containerStatuses"][0];
    assert_eq!(
        (&container["resources"]["limits"]["memory"], world.shim.updates().len()),
        (&json!("64Mi"), 0)
    );
    service.event("Warning ResizeError: Pod resize error: {").await;
    world.shim.use_memory(8 << 20);
    let container = until_resized(&service, "500m").await;
    assert_eq!(
        (&container["allocatedResources"]["memory"], &container["restartCount"]),
        (&json!("32Mi"), &json!(0))
    );
    service.kill();
}

#[tokio::test]
async fn a_resize_that_was_interrupted_is_completed_by_the_next_process() {
    let (world, first) = running(with_cpu("500m")).await;
    let acts = world.shim.mutating_calls();
    world.shim.hold_updates(true);
    world.add_pod_with_spec("web", with_cpu("900m"), 2);
    let in_progress = |status: &Value| condition(status, "PodResizeInProgress").is_some();
    let status = until(&first, "the beginning", in_progress).await;
    let container = &status["containerStatuses"][0];
    assert_eq!(container["allocatedResources"]["cpu"], "900m");
    assert_eq!(container["resources"]["limits"]["cpu"], "500m", "what was written last");
    eventually("an attempt", async || (!world.shim.updates().is_empty()).then_some(())).await;
    first.kill();
    world.shim.hold_updates(false);

    let second = world.pod_sync().await;
    let container = until_resized(&second, "900m").await;
    assert_eq!((&container["restartCount"], world.shim.mutating_calls()), (&json!(0), acts));
    second.event("Normal ResizeCompleted: ").await;
    second.kill();
}

#[tokio::test]
async fn of_a_thousand_resizes_in_a_row_the_last_one_counts() {
    let (world, service) = running(with_cpu("500m")).await;
    let acts = world.shim.mutating_calls();
    for revision in 2..=1001_u64 {
        world.add_pod_with_spec("web", with_cpu(&format!("{}m", 500 + revision)), revision);
    }
    let container = until_resized(&service, "1501m").await;
    assert_eq!((&container["restartCount"], world.shim.mutating_calls()), (&json!(0), acts));
    assert_eq!(world.shim.updates().last().unwrap().cpu_quota, 150_100);
    assert_eq!(world.machine.desire("web").unwrap().cgroup.unwrap().cpu_quota_us, 150_100);
    service.kill();
}
