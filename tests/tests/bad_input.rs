//! Bad input: running pods are untouched, the last good version stays in effect, and the error is reported where operators
//! look.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use keelson_testkit::{Agent, BUSYBOX_IMAGE, Scratch, eventually, lines_with_event};
use keelson_tests::waits::assert_not_scheduled;
use keelson_tests::{
    LIMIT, events, is_ready, pods, running, sleeper, text, until_cause, until_event, until_explained,
    until_no_cause, until_ready,
};

async fn agent_with_web(scratch: &Scratch) -> Agent {
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    agent.write_manifest("web.yaml", &sleeper("web")).unwrap();
    until_ready(&agent, &["web"]).await.unwrap();
    agent
}

#[tokio::test]
async fn a_broken_manifest_keeps_its_pod_running_and_the_error_names_file_and_line() {
    let scratch = Scratch::new().unwrap();
    let mut agent = agent_with_web(&scratch).await;
    let before = running(&agent).await.unwrap();
    agent
        .write_manifest("web.yaml", "apiVersion: v1\nkind: Pod\nmetadata:\n  name: web\n spec: [\n")
        .unwrap();
    until_event(&agent, "InvalidManifest", "web.yaml").await.unwrap();
    let log = agent.log();
    let named = lines_with_event(&log, "manifest_error").iter().any(|line| line.contains("web.yaml"));
    assert!(named, "the log names the file");
    let sources = agent.keelson_json(&["get", "sources", "-o", "json"]).await.unwrap().to_string();
    assert!(sources.contains("web.yaml"), "{sources}");
    assert_eq!(running(&agent).await.unwrap(), before);

    // Also across a restart of everything: the last good version is on disk.
    agent.kill_init();
    agent.start().await.unwrap();
    until_ready(&agent, &["web"]).await.unwrap();
    assert_eq!(running(&agent).await.unwrap(), before);

    agent.write_manifest("web.yaml", &sleeper("web")).unwrap();
    eventually(LIMIT, "the problem is gone", async || {
        let sources = agent.keelson_json(&["get", "sources", "-o", "json"]).await.unwrap();
        !sources.to_string().contains("InvalidManifest")
            && sources["items"][0]["problems"].as_array().is_none_or(Vec::is_empty)
    })
    .await
    .unwrap();
    assert_eq!(running(&agent).await.unwrap(), before);
    agent.end().unwrap();
}

#[tokio::test]
async fn explain_and_the_log_name_file_and_line_of_a_broken_manifest() {
    let scratch = Scratch::new().unwrap();
    let agent = agent_with_web(&scratch).await;
    let before = running(&agent).await.unwrap();
    // A field of the wrong type, and text that is not YAML.
    let of_type = |name: &str| sleeper(name).replace(BUSYBOX_IMAGE, "[busybox]");
    let no_yaml = |name: &str| format!("apiVersion: v1\nkind: Pod\nmetadata:\n\tname: {name}\n");
    for (line, web, new) in [(9, of_type("web"), of_type("new")), (4, no_yaml("web"), no_yaml("new"))] {
        let place = |file: &str| format!("{}:{line}:", agent.manifest_dir().join(file).display());
        let in_log = |place: &str| {
            let log = agent.log();
            let errors = lines_with_event(&log, "manifest_error");
            errors.iter().any(|line| line.starts_with('W') && line.contains(place))
        };
        agent.write_manifest("web.yaml", &web).unwrap();
        let step = until_cause(&agent, "web", "source", "you", &place("web.yaml")).await.unwrap();
        assert_eq!(step["state"], "failed");
        let keeps_running =
            format!("the last good version keeps running: default/web-{}", agent.spec().node_name);
        assert!(step["message"].as_str().unwrap().contains(&keeps_running), "{step}");
        // The file is read again when it changes, and no retry is scheduled.
        assert_not_scheduled(&step);
        let shown = text(&agent.keelson(&["explain", "pod", "web"]).await.unwrap());
        assert!(shown.contains(&place("web.yaml")), "{shown}");
        assert!(in_log(&place("web.yaml")), "{}", agent.log_tail());

        // The pod never existed and is not known, but the error in its file is.
        agent.write_manifest("new.yaml", &new).unwrap();
        let step = until_cause(&agent, "new", "source", "you", &place("new.yaml")).await.unwrap();
        assert!(step["message"].as_str().unwrap().contains("none of its pods run"), "{step}");
        assert_not_scheduled(&step);
        let shown = agent.keelson(&["explain", "pod", "new"]).await.unwrap();
        assert!(!shown.status.success() && text(&shown).contains(&place("new.yaml")), "{}", text(&shown));
        assert!(in_log(&place("new.yaml")), "{}", agent.log_tail());
        assert_eq!(running(&agent).await.unwrap(), before);

        agent.write_manifest("web.yaml", &sleeper("web")).unwrap();
        until_no_cause(&agent, "web").await.unwrap();
        agent.remove_manifest("new.yaml").unwrap();
        let forgotten = eventually(LIMIT, "the new one is not explained", async || {
            !text(&agent.keelson(&["explain", "pod", "new"]).await.unwrap()).contains("new.yaml")
        });
        forgotten.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    }
    assert_eq!(running(&agent).await.unwrap(), before);
    agent.end().unwrap();
}

#[tokio::test]
async fn invalid_manifests_are_refused_and_other_pods_are_unaffected() {
    let scratch = Scratch::new().unwrap();
    let agent = agent_with_web(&scratch).await;
    let before = running(&agent).await.unwrap();
    let huge = format!("{}# {}\n", sleeper("huge"), "x".repeat(10 << 20));
    for (file, text) in [
        ("deployment.yaml", "apiVersion: apps/v1\nkind: Deployment\nmetadata:\n  name: d\n"),
        ("half.yaml", "apiVersion: v1\nkind: Pod\nmetadata:\n  name: half\nspec:\n  containers:\n  - na"),
        ("huge.yaml", huge.as_str()),
        ("web2.yaml", sleeper("web").as_str()),
        ("nameless.yaml", "apiVersion: v1\nkind: Pod\nspec:\n  containers: []\n"),
    ] {
        agent.write_manifest(file, text).unwrap();
        eventually(LIMIT, format!("an event names {file}"), async || {
            let events = events(&agent).await.unwrap_or_default();
            events
                .iter()
                .any(|e| e["type"] == "Warning" && e["message"].as_str().is_some_and(|m| m.contains(file)))
        })
        .await
        .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    }
    assert_eq!(running(&agent).await.unwrap(), before);
    until_ready(&agent, &["web"]).await.unwrap();
    agent.end().unwrap();
}

#[tokio::test]
async fn a_missing_image_is_explained_and_does_not_delay_other_pods() {
    let scratch = Scratch::new().unwrap();
    let agent = agent_with_web(&scratch).await;
    let missing = sleeper("missing").replace("keelson.local/busybox:1", "127.0.0.1:1/nowhere/image:1");
    agent.write_manifest("missing.yaml", &missing).unwrap();
    let explained = until_explained(&agent, "missing", "the explanation names the image", |e| {
        let steps = e["steps"].as_array();
        steps.into_iter().flatten().any(|s| {
            s["name"] == "image"
                && s["state"] == "failed"
                && s["message"].as_str().is_some_and(|m| m.contains("nowhere/image"))
        })
    })
    .await
    .unwrap();
    assert_eq!(explained["phase"], "Pending", "{explained}");
    agent.write_manifest("other.yaml", &sleeper("other")).unwrap();
    eventually(LIMIT, "the other pod is Ready", async || {
        let node = &agent.spec().node_name;
        pods(&agent).await.is_ok_and(|p| p.get(&format!("other-{node}")).is_some_and(is_ready))
    })
    .await
    .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));

    agent.write_manifest("missing.yaml", &sleeper("missing")).unwrap();
    until_ready(&agent, &["missing", "other", "web"]).await.unwrap();
    until_explained(&agent, "missing", "the cause is gone", |e| {
        e["steps"].as_array().is_some_and(|s| s.iter().all(|s| s["state"] == "done"))
    })
    .await
    .unwrap();
    agent.end().unwrap();
}
