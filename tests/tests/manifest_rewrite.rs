//! Manifests that are deleted and rewritten at once, and exported manifests with fields that are ignored.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use keelson_config::ServiceName;
use keelson_testkit::process::Signal;
use keelson_testkit::{Agent, Scratch, eventually};
use keelson_tests::{LIMIT, events, pods, sleeper, text, until_ready};
use serde_json::Value;

/// The container ID of a pod's only container.
async fn container_id(agent: &Agent, pod: &str) -> String {
    let pods = pods(agent).await.unwrap();
    let id = &pods[pod]["status"]["containerStatuses"][0]["containerID"];
    id.as_str().unwrap_or_else(|| panic!("{id}")).to_owned()
}

/// The rows of `keelson get sources`; empty while pod-config does not answer.
async fn sources(agent: &Agent) -> Vec<Value> {
    let list = agent.keelson_json(&["get", "sources", "-o", "json"]).await.unwrap_or_default();
    list["items"].as_array().cloned().unwrap_or_default()
}

#[tokio::test]
async fn a_manifest_deleted_and_rewritten_at_once_recreates_its_pod() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let manifest = sleeper("web");
    agent.write_manifest("web.yaml", &manifest).unwrap();
    until_ready(&agent, &["web"]).await.unwrap();
    let name = format!("web-{}", agent.spec().node_name);
    let mut before = container_id(&agent, &name).await;
    for killed in [false, true] {
        // A restarted pod-config finds everything unchanged.
        if killed {
            let killed = agent.service(ServiceName::PodConfig).unwrap();
            killed.signal(Signal::KILL);
            killed.wait_gone(LIMIT);
            eventually(LIMIT, "the folder has been read", async || {
                let sources = sources(&agent).await;
                sources.iter().any(|source| source["ready"] == true && source["pods"] == 1)
            })
            .await
            .unwrap();
            assert_eq!(container_id(&agent, &name).await, before);
        }
        agent.remove_manifest("web.yaml").unwrap();
        agent.write_manifest("web.yaml", &manifest).unwrap();
        eventually(LIMIT, "the container is another one", async || {
            let pods = pods(&agent).await.unwrap_or_default();
            let status = pods.get(&name).map(|pod| pod["status"]["containerStatuses"][0].clone());
            status.is_some_and(|status| {
                let id = status["containerID"].as_str().unwrap_or_default();
                status["ready"] == true && !id.is_empty() && id != before
            })
        })
        .await
        .unwrap();
        before = container_id(&agent, &name).await;
    }
    agent.end().unwrap();
}

#[tokio::test]
async fn an_exported_manifest_runs_and_its_ignored_fields_are_reported() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let exported = sleeper("web").replace(
        "metadata:\n",
        "metadata:\n  annotations: {kubernetes.io/config.mirror: 0123456789abcdef0123456789abcdef}\n  deletionTimestamp: \
         \"2026-01-01T00:00:00Z\"\n  deletionGracePeriodSeconds: 30\n",
    );
    agent.write_manifest("web.yaml", &exported).unwrap();
    until_ready(&agent, &["web"]).await.unwrap();
    let name = format!("web-{}", agent.spec().node_name);
    let fields = ["metadata.deletionTimestamp", "metadata.annotations[kubernetes.io/config.mirror]"];
    let says = |what: &str, shown: &str| {
        assert!(fields.iter().all(|field| shown.contains(field)), "{what}: {shown}");
        assert!(shown.contains("web.yaml:1:"), "{what}: {shown}");
    };
    says("get sources", &text(&agent.keelson(&["get", "sources"]).await.unwrap()));
    says("explain", &text(&agent.keelson(&["explain", "pod", &name]).await.unwrap()));
    let full = format!("default/{name}");
    let sources = sources(&agent).await;
    assert!(sources.iter().any(|s| s["pods"] == 1 && s["warnings"][0]["pod"] == full), "{sources:#?}");
    let all_events = events(&agent).await.unwrap();
    let warning = all_events.iter().find(|event| event["reason"] == "ManifestWarning").unwrap();
    says("the event", &warning.to_string());
    agent.end().unwrap();
}
