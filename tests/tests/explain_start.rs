//! Errors of the runtime are explained with owner, since when and the next attempt, until the cause is fixed
//! (proof 9).

#![allow(clippy::unwrap_used)] // A panic fails the test.

use keelson_testkit::{Agent, Scratch, eventually};
use keelson_tests::waits::{
    assert_same_after_a_retry, pod_with, until_one_ready, until_retried, waiting_reason,
};
use keelson_tests::{
    LIMIT, is_ready, running, sleeper, until_event, until_explained, until_no_cause, until_ready,
};

#[tokio::test]
async fn a_missing_cni_configuration_waits_for_you_and_delays_no_host_network_pod() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    agent.write_manifest("old.yaml", &sleeper("old")).unwrap();
    until_ready(&agent, &["old"]).await.unwrap();
    let before = running(&agent).await.unwrap();
    agent.containerd().remove_network().unwrap();
    let node_is_ready = async || {
        let node = agent.keelson_json(&["get", "node", "-o", "json"]).await.unwrap();
        let named = node["status"]["conditions"].to_string().contains("NetworkReady=false");
        assert_ne!(named, is_ready(&node), "Ready names what it lacks: {node:#}");
        is_ready(&node)
    };
    let result = eventually(LIMIT, "the node is not Ready", async || !node_is_ready().await);
    result.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));

    agent.write_manifest("web.yaml", &sleeper("web")).unwrap();
    let step = until_retried(&agent, "web", "sandbox", "you", "NetworkReady=false").await;
    assert_eq!(step["state"], "waiting");
    until_event(&agent, "NetworkNotReady", "NetworkReady=false").await.unwrap();
    assert_same_after_a_retry(&agent, "web", &step).await;
    let on_host = sleeper("onhost").replace("spec:\n", "spec:\n  hostNetwork: true\n");
    agent.write_manifest("onhost.yaml", &on_host).unwrap();
    until_one_ready(&agent, "onhost").await;
    let now = running(&agent).await.unwrap();
    assert!(before.iter().all(|(name, process)| now.get(name) == Some(process)), "{before:#?} {now:#?}");
    assert!(!now.keys().any(|name| name.starts_with("web-")), "{now:#?}");

    agent.containerd().restore_network().unwrap();
    until_ready(&agent, &["old", "onhost", "web"]).await.unwrap();
    until_no_cause(&agent, "web").await.unwrap();
    let result = eventually(LIMIT, "the node is Ready", node_is_ready);
    result.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    agent.end().unwrap();
}

#[tokio::test]
async fn a_cni_plugin_error_is_explained_until_the_plugin_works() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    agent.write_manifest("old.yaml", &sleeper("old")).unwrap();
    until_ready(&agent, &["old"]).await.unwrap();
    let before = running(&agent).await.unwrap();
    agent.containerd().break_network("keelson-no-such-plugin").unwrap();
    agent.write_manifest("web.yaml", &sleeper("web")).unwrap();
    let step = until_retried(&agent, "web", "sandbox", "you", "keelson-no-such-plugin").await;
    assert_eq!(step["state"], "failed");
    until_event(&agent, "FailedCreatePodSandBox", "keelson-no-such-plugin").await.unwrap();
    assert_same_after_a_retry(&agent, "web", &step).await;
    assert_eq!(waiting_reason(&agent, "web").await, "ContainerCreating");
    assert_eq!(running(&agent).await.unwrap(), before);

    agent.containerd().restore_network().unwrap();
    until_ready(&agent, &["old", "web"]).await.unwrap();
    until_no_cause(&agent, "web").await.unwrap();
    let now = running(&agent).await.unwrap();
    assert!(before.iter().all(|(name, process)| now.get(name) == Some(process)), "{before:#?} {now:#?}");
    agent.end().unwrap();
}

#[tokio::test]
async fn a_command_missing_in_the_image_waits_for_you_also_during_back_off() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let wrong = pod_with("web", "", "").replace("/bin/sh", "/no/such/program");
    agent.write_manifest("web.yaml", &wrong).unwrap();
    until_event(&agent, "Failed", "/no/such/program").await.unwrap();
    let waits = eventually(LIMIT, "it is restarted with a growing back-off", async || {
        waiting_reason(&agent, "web").await == "CrashLoopBackOff"
    });
    waits.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    // It backs off nearly all the time, so the cause must be shown then, as for a missing image.
    let explained = until_explained(&agent, "web", "the next attempt is known", |e| {
        let steps = e["steps"].as_array();
        let next = |s: &serde_json::Value| s["name"] == "container" && s["next_retry"].is_string();
        steps.is_some_and(|s| s.iter().any(next))
    });
    let explained = explained.await.unwrap();
    let container = explained["steps"].as_array().unwrap().iter().find(|s| s["name"] == "container").unwrap();
    assert!(container["since"].is_string() && container["subject"] == "main", "{container}");
    assert_eq!(container["owner"], "you", "{container}");
    assert!(container["message"].as_str().unwrap().contains("/no/such/program"), "{container}");

    agent.write_manifest("web.yaml", &sleeper("web")).unwrap();
    until_ready(&agent, &["web"]).await.unwrap();
    until_no_cause(&agent, "web").await.unwrap();
    agent.end().unwrap();
}

#[tokio::test]
async fn a_container_creation_error_is_explained_until_it_succeeds() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    // A folder below a file: without a type only the runtime finds out.
    let file = scratch.path().join("file");
    std::fs::write(&file, "").unwrap();
    let mount = format!(
        "    volumeMounts:\n    - name: data\n      mountPath: /data\n  volumes:\n  - name: data\n    \
         hostPath:\n      path: {}/below\n",
        file.display()
    );
    agent.write_manifest("web.yaml", &pod_with("web", &mount, "")).unwrap();
    let wanted = format!("{}/below", file.display());
    let step = until_retried(&agent, "web", "container", "you", &wanted).await;
    assert_eq!((&step["state"], &step["subject"]), (&"failed".into(), &"main".into()), "{step}");
    assert_eq!(waiting_reason(&agent, "web").await, "CreateContainerError");
    assert_same_after_a_retry(&agent, "web", &step).await;

    std::fs::remove_file(&file).unwrap();
    std::fs::create_dir(&file).unwrap();
    until_ready(&agent, &["web"]).await.unwrap();
    until_no_cause(&agent, "web").await.unwrap();
    agent.end().unwrap();
}
