//! Static pods that cannot be admitted now: no controller would replace them, so they wait until they can.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use keelson_config::ServiceName;
use keelson_testkit::process::Signal;
use keelson_testkit::{Agent, BUSYBOX_IMAGE, Scratch, eventually};
use keelson_tests::{LIMIT, events, pods, until_cause, until_ready};

/// A pod that ignores SIGTERM and runs until the file `/shared/<name>.end` exists.
fn pod_ignoring_sigterm(scratch: &Scratch, name: &str, container: &str) -> String {
    let shared = scratch.path().join("shared");
    std::fs::create_dir_all(&shared).unwrap();
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: {name}\nspec:\n  hostNetwork: true\n  terminationGracePeriodSeconds: 600\n  \
         containers:\n  - name: main\n    image: {BUSYBOX_IMAGE}\n    imagePullPolicy: IfNotPresent\n    \
         command: [sh, -c, \"trap : TERM; until test -e /shared/{name}.end; do sleep 0.1; done\"]\n    \
         volumeMounts: [{{name: shared, mountPath: /shared}}]\n{container}  \
         volumes:\n  - name: shared\n    hostPath: {{path: {}}}\n",
        shared.display()
    )
}

fn allow_end(scratch: &Scratch, name: &str) {
    std::fs::write(scratch.path().join("shared").join(format!("{name}.end")), "").unwrap();
}

/// `old` runs and is deleted while `new` is created, which needs resources of `old`. `new` shows what it waits for, also
/// after pod-sync and resource-manager were killed, and starts when `old` has ended.
async fn assert_waits_for_the_other_pod(container: &str, reason: &str, text: &str, owner: &str) {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    agent.write_manifest("old.yaml", &pod_ignoring_sigterm(&scratch, "old", container)).unwrap();
    until_ready(&agent, &["old"]).await.unwrap();
    agent.write_manifest("new.yaml", &pod_ignoring_sigterm(&scratch, "new", container)).unwrap();
    agent.remove_manifest("old.yaml").unwrap();

    let name = format!("new-{}", agent.spec().node_name);
    let waits = async || {
        let shown = eventually(LIMIT, format!("{name} waits with {reason}"), async || {
            let pods = pods(&agent).await.unwrap_or_default();
            pods.get(&name).is_some_and(|pod| {
                let status = &pod["status"];
                let message = status["message"].as_str().unwrap_or_default();
                status["phase"] == "Pending" && status["reason"] == reason && message.contains(text)
            })
        });
        shown.await.unwrap();
        until_cause(&agent, &name, "admission", owner, text).await.unwrap();
    };
    waits().await;
    for service in [ServiceName::PodSync, ServiceName::ResourceManager] {
        let killed = agent.service(service).unwrap();
        killed.signal(Signal::KILL);
        killed.wait_gone(LIMIT);
        waits().await;
    }
    let all_events = events(&agent).await.unwrap();
    assert!(
        all_events.iter().any(|event| event["reason"] == reason && event["type"] == "Warning"),
        "{all_events:#?}"
    );

    allow_end(&scratch, "old");
    until_ready(&agent, &["new"]).await.unwrap();
    let status = pods(&agent).await.unwrap()[&name]["status"].clone();
    assert!(status["reason"].is_null() && status["message"].is_null(), "{status:#}");
    allow_end(&scratch, "new");
    agent.end().unwrap();
}

#[tokio::test]
async fn a_pod_waits_for_a_host_port_until_the_other_pod_has_ended() {
    let container = "    ports: [{containerPort: 18412, hostPort: 18412}]\n";
    assert_waits_for_the_other_pod(container, "NodePorts", "free ports", "pod-sync").await;
}

#[tokio::test]
async fn a_pod_waits_for_cpu_until_the_other_pod_has_ended() {
    // The machine's processors, even if this process may use fewer of them.
    let online = std::fs::read_to_string("/proc/cpuinfo").unwrap();
    let cores = online.lines().filter(|line| line.starts_with("processor")).count();
    // Only one such pod fits.
    let container = format!("    resources: {{requests: {{cpu: {}m}}}}\n", cores * 600);
    assert_waits_for_the_other_pod(&container, "OutOfcpu", "enough resource: cpu", "resource-manager").await;
}
