//! Pods of manifests that cannot be admitted now: nobody would make them again, so they wait until they can.

#![allow(clippy::unwrap_used)] // A test fails where it stands.

use keelson_config::ServiceName;
use keelson_testkit::process::Signal;
use keelson_testkit::{Agent, BUSYBOX_IMAGE, Scratch, eventually};
use keelson_tests::{LIMIT, events, pods, until_cause, until_ready};

/// A pod that goes on until the file `/shared/<name>.end` is there, however it is asked to end.
fn stubborn(scratch: &Scratch, name: &str, container: &str) -> String {
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

fn let_end(scratch: &Scratch, name: &str) {
    std::fs::write(scratch.path().join("shared").join(format!("{name}.end")), "").unwrap();
}

/// `old` runs and is taken away while `new` comes, which needs what `old` has until it has ended. `new` says what it waits for,
/// also after pod-sync and resource-manager were killed, and begins when `old` has ended.
async fn waits_for_the_end_of_another(container: &str, reason: &str, text: &str, owner: &str) {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    agent.write_manifest("old.yaml", &stubborn(&scratch, "old", container)).unwrap();
    until_ready(&agent, &["old"]).await.unwrap();
    agent.write_manifest("new.yaml", &stubborn(&scratch, "new", container)).unwrap();
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
    let told = events(&agent).await.unwrap();
    assert!(told.iter().any(|event| event["reason"] == reason && event["type"] == "Warning"), "{told:#?}");

    let_end(&scratch, "old");
    until_ready(&agent, &["new"]).await.unwrap();
    let status = pods(&agent).await.unwrap()[&name]["status"].clone();
    assert!(status["reason"].is_null() && status["message"].is_null(), "{status:#}");
    let_end(&scratch, "new");
    agent.end().unwrap();
}

#[tokio::test]
async fn a_pod_waits_for_a_port_of_the_node_until_the_other_has_ended() {
    let container = "    ports: [{containerPort: 18412, hostPort: 18412}]\n";
    waits_for_the_end_of_another(container, "NodePorts", "free ports", "pod-sync").await;
}

#[tokio::test]
async fn a_pod_waits_for_cpu_until_the_other_has_ended() {
    // The machine's, however many of them this process may use.
    let online = std::fs::read_to_string("/proc/cpuinfo").unwrap();
    let cores = online.lines().filter(|line| line.starts_with("processor")).count();
    // Of two such pods only one fits.
    let container = format!("    resources: {{requests: {{cpu: {}m}}}}\n", cores * 600);
    waits_for_the_end_of_another(&container, "OutOfcpu", "enough resource: cpu", "resource-manager").await;
}
