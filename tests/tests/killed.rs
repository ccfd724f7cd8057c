//! No kill of a part of the agent affects a container (proof 3 and 4).

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::time::{Duration, Instant};

use keelson_config::ServiceName;
use keelson_testkit::process::Signal;
use keelson_testkit::{Agent, Scratch, eventually};
use keelson_tests::{LIMIT, pods, running, sleeper, until_ready};
use serde_json::Value;

async fn agent_with(scratch: &Scratch, names: &[&str]) -> Agent {
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    for name in names {
        agent.write_manifest(&format!("{name}.yaml"), &sleeper(name)).unwrap();
    }
    until_ready(&agent, names).await.unwrap();
    agent
}

#[tokio::test]
async fn killing_any_one_service_affects_no_container() {
    let scratch = Scratch::new().unwrap();
    let agent = agent_with(&scratch, &["one", "two"]).await;
    let before = running(&agent).await.unwrap();
    for service in ServiceName::supervised() {
        let process = agent.service(service).unwrap();
        process.signal(Signal::KILL);
        // A pod is created and another one deleted while the service is down.
        let extra = format!("extra-{service}");
        agent.write_manifest(&format!("{extra}.yaml"), &sleeper(&extra)).unwrap();
        eventually(LIMIT, format!("{service} runs again"), async || {
            agent.service(service).is_some_and(|p| p != process)
        })
        .await
        .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
        until_ready(&agent, &["one", "two", &extra]).await.unwrap();
        agent.remove_manifest(&format!("{extra}.yaml")).unwrap();
        agent.service(service).unwrap().signal(Signal::KILL);
        until_ready(&agent, &["one", "two"]).await.unwrap();
        eventually(LIMIT, "only what was running before runs", async || {
            running(&agent).await.is_ok_and(|now| now == before)
        })
        .await
        .unwrap_or_else(|e| panic!("{service}: {e:#}\n{}", agent.log_tail()));
    }
    agent.end().unwrap();
}

#[tokio::test]
async fn after_a_kill_of_everything_the_next_agent_adopts_running_containers() {
    let scratch = Scratch::new().unwrap();
    let names: Vec<String> = (0..10).map(|i| format!("p{i}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut agent = agent_with(&scratch, &names).await;
    let before = running(&agent).await.unwrap();
    let statuses = pods(&agent).await.unwrap();
    for service in ServiceName::supervised() {
        agent.service(service).unwrap().signal(Signal::KILL);
    }
    agent.kill_init();
    agent.start().await.unwrap();
    until_ready(&agent, &names).await.unwrap();
    assert_eq!(running(&agent).await.unwrap(), before);
    // No status has flapped: start times and transition times are unchanged.
    for (name, pod) in pods(&agent).await.unwrap() {
        assert_eq!(pod["status"], statuses[&name]["status"], "{name}");
    }
    agent.end().unwrap();
}

#[tokio::test]
async fn a_pod_removed_from_its_source_while_the_agent_was_down_is_ended() {
    let scratch = Scratch::new().unwrap();
    let mut agent = agent_with(&scratch, &["stays", "leaves"]).await;
    let before = running(&agent).await.unwrap();
    agent.kill_init();
    agent.remove_manifest("leaves.yaml").unwrap();
    agent.start().await.unwrap();
    until_ready(&agent, &["stays"]).await.unwrap();
    let stays = format!("stays-{}/main", agent.spec().node_name);
    eventually(LIMIT, "only the pod that stayed runs", async || {
        running(&agent).await.is_ok_and(|now| now.len() == 1 && now.get(&stays) == before.get(&stays))
    })
    .await
    .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    agent.end().unwrap();
}

/// The condition Ready of the node.
async fn ready_condition(agent: &Agent) -> Value {
    let node = agent.keelson_json(&["get", "node", "-o", "json"]).await.unwrap();
    let conditions = node["status"]["conditions"].as_array();
    conditions.into_iter().flatten().find(|c| c["type"] == "Ready").cloned().unwrap_or_default()
}

#[tokio::test]
async fn the_node_is_ready_within_five_seconds_after_a_killed_containerd_returns() {
    let scratch = Scratch::new().unwrap();
    let mut agent = agent_with(&scratch, &["one", "two"]).await;
    let before = running(&agent).await.unwrap();
    agent.containerd_mut().kill();
    let result = eventually(LIMIT, "the agent reports that the runtime is unavailable", async || {
        let output = agent.keelson(&["get", "services"]).await.unwrap();
        String::from_utf8_lossy(&output.stdout).contains("container runtime")
    });
    result.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    agent.write_manifest("later.yaml", &sleeper("later")).unwrap();
    // Down long enough for the node to report it; a shorter outage does not show in Ready (SILENCE_MS of node-status).
    let mut last = Value::Null;
    let down = eventually(LIMIT, "the node is not Ready because of the runtime", async || {
        last = ready_condition(&agent).await;
        last["status"] == "False" && last["message"].as_str().is_some_and(|m| m.contains("container runtime"))
    });
    down.await.unwrap_or_else(|e| panic!("{e:#}: {last}\n{}", agent.log_tail()));
    println!("{last}");
    agent.containerd_mut().restart().unwrap();
    let loaded = Instant::now();
    // Its plugins are loaded and its socket exists; it answers once it has read its state.
    agent.containerd().wait_ready().await.unwrap();
    let back = Instant::now();
    eventually(LIMIT, "the node is Ready", async || {
        last = ready_condition(&agent).await;
        last["status"] == "True"
    })
    .await
    .unwrap_or_else(|e| panic!("{e:#}: {last}\n{}", agent.log_tail()));
    let took = back.elapsed();
    println!("CRI answers {:?} after it was loaded, the node is Ready {took:?} later", back - loaded);
    assert!(took < Duration::from_secs(5), "Ready only {took:?} after the runtime answered: {last}");
    until_ready(&agent, &["one", "two", "later"]).await.unwrap();
    let now = running(&agent).await.unwrap();
    assert!(before.iter().all(|(name, process)| now.get(name) == Some(process)), "{before:#?} {now:#?}");
    agent.end().unwrap();
}

#[tokio::test]
async fn a_terminating_pod_keeps_its_deadline_when_pod_sync_is_killed() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    // The shell ignores SIGTERM, so the whole grace period is used.
    let stubborn = sleeper("stubborn")
        .replace("terminationGracePeriodSeconds: 0", "terminationGracePeriodSeconds: 8")
        .replace("exec sleep 1000000", "trap '' TERM; while true; do sleep 1; done");
    agent.write_manifest("stubborn.yaml", &stubborn).unwrap();
    until_ready(&agent, &["stubborn"]).await.unwrap();
    let removed = Instant::now();
    agent.remove_manifest("stubborn.yaml").unwrap();
    eventually(LIMIT, "the pod is being ended", async || {
        let output = agent.keelson(&["get", "pods"]).await.unwrap();
        String::from_utf8_lossy(&output.stdout).contains("Terminating")
    })
    .await
    .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    for _ in 0..3 {
        let process = agent.service(ServiceName::PodSync).unwrap();
        process.signal(Signal::KILL);
        eventually(LIMIT, "pod-sync runs again", async || {
            agent.service(ServiceName::PodSync).is_some_and(|p| p != process)
        })
        .await
        .unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    eventually(LIMIT, "the container has ended", async || {
        running(&agent).await.is_ok_and(|now| now.is_empty())
    })
    .await
    .unwrap();
    let took = removed.elapsed();
    assert!(took > Duration::from_secs(6), "killed before its grace was over: {took:?}");
    assert!(took < Duration::from_secs(14), "the grace period was restarted: {took:?}");
    until_ready(&agent, &[]).await.unwrap();
    agent.end().unwrap();
}
