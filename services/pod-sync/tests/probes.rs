//! Probes of running containers, with a fake runtime whose commands have the outcomes that a test sets.

#![allow(clippy::unwrap_used)]

mod fake;

use serde_json::{Value, json};

use fake::{PodSync, World, eventually};

/// A command that the probe runs each second.
fn probe(word: &str, failures: u32) -> Value {
    json!({"exec": {"command": [word]}, "periodSeconds": 1, "timeoutSeconds": 5,
        "successThreshold": 1, "failureThreshold": failures})
}

fn container(name: &str, fields: &Value) -> Value {
    let mut container = json!({"name": name, "image": "i:1", "imagePullPolicy": "IfNotPresent"});
    container.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    container
}

/// Adds the pod `web` with one container, `main`.
fn add_pod(world: &World, fields: &Value) {
    world.add_pod_with_spec(
        "web",
        json!({"restartPolicy": "Always", "containers": [container("main", fields)]}),
        1,
    );
}

/// Waits until the status of the container `main` has these values of `ready` and `started`.
async fn wait_for_readiness(service: &PodSync, ready: bool, started: bool) -> Value {
    eventually(&format!("ready {ready}, started {started}"), async || {
        let status = service.pod("web").await?["status"].take();
        let main = status["containerStatuses"][0].clone();
        (main["state"]["running"].is_object() && main["ready"] == ready && main["started"] == started)
            .then_some(status)
    })
    .await
}

fn is_ready(status: &Value) -> bool {
    let conditions = status["conditions"].as_array().unwrap();
    conditions.iter().any(|c| c["type"] == "Ready" && c["status"] == "True")
}

/// Waits until a command has run this many times.
async fn wait_for_command(world: &World, word: &str, times: usize) {
    eventually(&format!("{word} {times} times"), async || (world.shim.calls(word) >= times).then_some(()))
        .await;
}

#[tokio::test]
async fn readiness_changes_are_published_at_once_without_a_restart() {
    let world = World::start();
    world.shim.command("ready?", 1, "not yet\n");
    let service = world.pod_sync().await;
    add_pod(&world, &json!({"readinessProbe": probe("ready?", 1)}));
    assert!(!is_ready(&wait_for_readiness(&service, false, true).await));
    let event = service.event("Warning Unhealthy: ").await;
    assert_eq!(event, "Warning Unhealthy: Readiness probe failed: not yet\n");
    let step = service.step("web", "container", |step| step.state == "failed").await;
    assert_eq!((step.subject.as_str(), step.owner.as_str()), ("main", "you"));
    assert_eq!(step.message, "its readiness probe fails: not yet");
    assert!(step.next_retry_unix_nanos > step.since_unix_nanos, "{step:?}");

    world.shim.command("ready?", 0, "");
    assert!(is_ready(&wait_for_readiness(&service, true, true).await));
    service.step("web", "container", |step| step.state == "done").await;
    world.shim.command("ready?", 1, "");
    assert!(!is_ready(&wait_for_readiness(&service, false, true).await));
    service.event("Warning Unhealthy: Readiness probe failed: command exited with 1").await;
    assert_eq!((world.shim.calls("StartContainer"), world.shim.calls("StopContainer")), (1, 0));
    service.kill();
}

#[tokio::test]
async fn early_readiness_probes_run_before_the_period_without_events() {
    let world = World::start();
    world.shim.command("up?", 1, "starting");
    world.shim.command("ready?", 1, "not yet");
    let service = world.pod_sync().await;
    // Longer than this test may take.
    let slow =
        |word: &str| json!({"exec": {"command": [word]}, "periodSeconds": 3600, "failureThreshold": 1});
    add_pod(&world, &json!({"startupProbe": probe("up?", 100), "readinessProbe": slow("ready?")}));
    wait_for_command(&world, "up?", 3).await;
    world.shim.command("up?", 0, "");
    // The first probe and several early ones.
    wait_for_command(&world, "ready?", 4).await;
    assert!(!is_ready(&wait_for_readiness(&service, false, true).await));
    service.event("Warning Unhealthy: Readiness probe failed: not yet").await;
    world.shim.command("ready?", 0, "");
    assert!(is_ready(&wait_for_readiness(&service, true, true).await));
    assert_eq!(world.shim.calls("StopContainer"), 0);
    service.kill();
}

#[tokio::test]
async fn early_startup_probe_failures_do_not_restart_the_container() {
    let world = World::start();
    world.shim.command("up?", 1, "starting");
    let service = world.pod_sync().await;
    let slow = json!({"exec": {"command": ["up?"]}, "periodSeconds": 3600, "failureThreshold": 2});
    add_pod(&world, &json!({"startupProbe": slow}));
    wait_for_command(&world, "up?", 5).await;
    world.shim.command("up?", 0, "");
    assert!(is_ready(&wait_for_readiness(&service, true, true).await));
    assert_eq!(world.shim.calls("StopContainer"), 0);
    service.kill();
}

#[tokio::test]
async fn a_failed_liveness_probe_restarts_only_its_container() {
    let world = World::start();
    let service = world.pod_sync().await;
    let main = container("main", &json!({"livenessProbe": probe("alive?", 2)}));
    let other = container("other", &json!({}));
    world.add_pod_with_spec("web", json!({"restartPolicy": "Always", "containers": [main, other]}), 1);
    wait_for_readiness(&service, true, true).await;
    wait_for_command(&world, "alive?", 1).await;
    assert_eq!(world.shim.calls("StopContainer"), 0);
    world.shim.command("alive?", 7, "dead");
    service.event("Warning Unhealthy: Liveness probe failed: dead").await;
    service.event("Normal Killing: Container main failed liveness probe, will be restarted").await;
    world.shim.command("alive?", 0, "");
    eventually("the restart", async || {
        let status = service.pod("web").await?["status"].take();
        let [main, other] = [0, 1].map(|at| status["containerStatuses"][at]["restartCount"].clone());
        (main == 1 && status["containerStatuses"][0]["ready"] == true).then(|| assert_eq!(other, 0))
    })
    .await;
    assert_eq!(world.shim.calls("StopContainer"), 1);
    service.kill();
}

#[tokio::test]
async fn other_probes_wait_for_the_startup_probe_whose_failure_restarts() {
    let world = World::start();
    world.shim.command("up?", 1, "starting");
    let service = world.pod_sync().await;
    let fields = json!({"startupProbe": probe("up?", 3), "readinessProbe": probe("ready?", 1),
        "livenessProbe": probe("alive?", 1)});
    add_pod(&world, &fields);
    wait_for_readiness(&service, false, false).await;
    let step = service.step("web", "container", |step| step.message.contains("starting")).await;
    assert_eq!((step.state.as_str(), step.owner.as_str()), ("waiting", "you"));
    assert!(step.message.starts_with("its startup probe fails ("), "{}", step.message);
    service.event("Normal Killing: Container main failed startup probe, will be restarted").await;
    assert_eq!((world.shim.calls("ready?"), world.shim.calls("alive?")), (0, 0));

    world.shim.command("up?", 0, "");
    let status = wait_for_readiness(&service, true, true).await;
    assert_eq!(status["containerStatuses"][0]["restartCount"], 1);
    wait_for_command(&world, "alive?", 1).await;
    let asked = world.shim.calls("up?");
    wait_for_command(&world, "ready?", 3).await;
    assert_eq!(world.shim.calls("up?"), asked, "once started it is asked no more");
    service.kill();
}

#[tokio::test]
async fn containers_after_a_sidecar_wait_for_its_startup_probe() {
    let world = World::start();
    world.shim.command("up?", 1, "");
    let service = world.pod_sync().await;
    let sidecar = container("side", &json!({"restartPolicy": "Always", "startupProbe": probe("up?", 100)}));
    let spec = json!({"restartPolicy": "Always", "initContainers": [sidecar],
        "containers": [container("main", &json!({}))]});
    world.add_pod_with_spec("web", spec, 1);
    let waits = |step: &_| -> bool {
        let step: &keelson_proto::keelson::pod_sync::v1::Step = step;
        step.subject == "side" && step.state == "waiting" && step.owner == "you"
    };
    service.step("web", "container", waits).await;
    wait_for_command(&world, "up?", 2).await;
    assert_eq!(world.shim.calls("StartContainer"), 1);
    world.shim.command("up?", 0, "");
    wait_for_readiness(&service, true, true).await;
    assert_eq!(world.shim.calls("StartContainer"), 2);
    service.kill();
}

#[tokio::test]
async fn probe_results_and_counters_survive_a_restart_of_pod_sync() {
    let world = World::start();
    let first = world.pod_sync().await;
    let mut patient = probe("alive?", 3);
    patient["timeoutSeconds"] = 600.into();
    let fields = json!({"startupProbe": probe("up?", 1), "readinessProbe": probe("ready?", 1),
        "livenessProbe": patient});
    add_pod(&world, &fields);
    let status = wait_for_readiness(&first, true, true).await;
    wait_for_command(&world, "alive?", 1).await;
    let (arrived, answer) = world.shim.hold_command("alive?");
    world.shim.command("alive?", 1, "dead");
    answer.add_permits(1);
    first.event("Warning Unhealthy: Liveness").await;
    // The next probe begins when the failure is stored. It gets no outcome.
    eventually("the next probe", async || (arrived.available_permits() == 2).then_some(())).await;
    first.kill();
    world.shim.release_command("alive?");
    let before = world.shim.order().len();

    world.shim.command("up?", 1, "");
    let second = world.pod_sync().await;
    let kept = eventually("the pod", async || second.pod("web").await).await;
    assert_eq!(kept["status"], status, "nothing has flapped");
    second.event("Normal Killing: Container main failed liveness probe").await;
    // The probes of the new container start again, so only those before it count.
    let order = world.shim.order();
    let same = order[before..].iter().take_while(|call| *call != "StopContainer");
    let count = |wanted: &str| same.clone().filter(|call| *call == wanted).count();
    assert_eq!(count("up?"), 0, "what has started is not asked again");
    assert_eq!(count("alive?"), 2, "the failure before counts");
    second.kill();
}

#[tokio::test]
async fn probes_are_counted_by_outcome_until_the_pod_is_removed() {
    let world = World::start();
    world.shim.command("ready?", 1, "not yet");
    let service = world.pod_sync().await;
    add_pod(&world, &json!({"readinessProbe": probe("ready?", 1)}));
    let counted = |result: &str, service: &PodSync| {
        let labels = format!(
            "prober_probe_total{{probe_type=\"Readiness\",result=\"{result}\",container=\"main\",pod=\"web\",\
             namespace=\"default\",pod_uid=\"web\"}}"
        );
        service.ctx.metrics.text().contains(&labels)
    };
    wait_for_readiness(&service, false, true).await;
    eventually("a failure is counted", async || counted("failed", &service).then_some(())).await;
    world.shim.command("ready?", 0, "");
    wait_for_readiness(&service, true, true).await;
    eventually("a success is counted", async || counted("successful", &service).then_some(())).await;
    let took = "prober_probe_duration_seconds_count{probe_type=\"Readiness\",container=\"main\"";
    assert!(service.ctx.metrics.text().contains(took), "{}", service.ctx.metrics.text());
    world.pods.remove(&"web".to_owned());
    eventually("its end", async || service.pod("web").await.is_none().then_some(())).await;
    eventually("the end of its series", async || {
        (!service.ctx.metrics.text().contains("pod=\"web\"")).then_some(())
    })
    .await;
    service.kill();
}

#[tokio::test]
async fn a_terminating_pod_is_not_restarted_by_probes_and_leaves_no_task() {
    let world = World::start();
    let service = world.pod_sync().await;
    add_pod(&world, &json!({"readinessProbe": probe("ready?", 1), "livenessProbe": probe("alive?", 1)}));
    wait_for_readiness(&service, true, true).await;
    world.pods.remove(&"web".to_owned());
    eventually("its end", async || service.pod("web").await.is_none().then_some(())).await;
    // The probe of another pod shows that periods pass. A call may be on its way at the end of the pod, but not a period later.
    let other = container("main", &json!({"readinessProbe": probe("other?", 1)}));
    world.add_pod_with_spec("other", json!({"restartPolicy": "Always", "containers": [other]}), 1);
    wait_for_command(&world, "other?", 2).await;
    let asked = || (world.shim.calls("ready?"), world.shim.calls("alive?"));
    let before = asked();
    wait_for_command(&world, "other?", 4).await;
    assert_eq!(asked(), before);
    assert_eq!(world.shim.calls("StartContainer"), 2, "one of each pod");
    service.kill();
}
