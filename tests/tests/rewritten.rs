//! Manifests that are removed and written again at once, and manifests that hold more than is used of them.

#![allow(clippy::unwrap_used)] // A test fails where it stands.

use keelson_config::ServiceName;
use keelson_testkit::process::Signal;
use keelson_testkit::{Agent, Scratch, eventually};
use keelson_tests::{LIMIT, events, pods, sleeper, text, until_ready};
use serde_json::Value;

/// What of a pod's status names the run of its only container.
async fn container(agent: &Agent, pod: &str) -> String {
    let pods = pods(agent).await.unwrap();
    let id = &pods[pod]["status"]["containerStatuses"][0]["containerID"];
    id.as_str().unwrap_or_else(|| panic!("{id}")).to_owned()
}

/// What `keelson get sources` lists; nothing while pod-config does not answer.
async fn sources(agent: &Agent) -> Vec<Value> {
    let list = agent.keelson_json(&["get", "sources", "-o", "json"]).await.unwrap_or_default();
    list["items"].as_array().cloned().unwrap_or_default()
}

#[tokio::test]
async fn a_pod_whose_manifest_is_deleted_and_written_again_at_once_is_started_anew() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let manifest = sleeper("web");
    agent.write_manifest("web.yaml", &manifest).unwrap();
    until_ready(&agent, &["web"]).await.unwrap();
    let name = format!("web-{}", agent.spec().node_name);
    let mut before = container(&agent, &name).await;
    for killed in [false, true] {
        // A pod-config that is started anew finds everything as it was.
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
            assert_eq!(container(&agent, &name).await, before);
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
        before = container(&agent, &name).await;
    }
    agent.end().unwrap();
}

#[tokio::test]
async fn a_manifest_that_was_exported_runs_and_everybody_says_what_is_not_used_of_it() {
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
    let says = |what: &str, said: &str| {
        assert!(fields.iter().all(|field| said.contains(field)), "{what}: {said}");
        assert!(said.contains("web.yaml:1:"), "{what}: {said}");
    };
    says("get sources", &text(&agent.keelson(&["get", "sources"]).await.unwrap()));
    says("explain", &text(&agent.keelson(&["explain", "pod", &name]).await.unwrap()));
    let full = format!("default/{name}");
    let sources = sources(&agent).await;
    assert!(sources.iter().any(|s| s["pods"] == 1 && s["warnings"][0]["pod"] == full), "{sources:#?}");
    let told = events(&agent).await.unwrap();
    let warning = told.iter().find(|event| event["reason"] == "ManifestWarning").unwrap();
    says("the event", &warning.to_string());
    agent.end().unwrap();
}
