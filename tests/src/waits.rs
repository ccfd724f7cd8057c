//! Waits for pods, and for the retries that `keelson explain` shows.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use keelson_testkit::{Agent, BUSYBOX_IMAGE, eventually};
use serde_json::Value;

use crate::{LIMIT, is_ready, pods, until_explained};

/// A pod that sleeps, with these lines in its container and these in its spec, already indented.
pub fn pod_with(name: &str, container: &str, spec: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: {name}\nspec:\n  terminationGracePeriodSeconds: 0\n  \
         containers:\n  - name: main\n    image: {BUSYBOX_IMAGE}\n    imagePullPolicy: IfNotPresent\n    \
         command: [\"/bin/sh\", \"-c\", \"exec sleep 1000000\"]\n{container}{spec}"
    )
}

/// Waits until one pod is Ready, in any state of the others.
///
/// # Panics
/// It is not within [`LIMIT`].
pub async fn until_one_ready(agent: &Agent, name: &str) {
    let full = format!("{name}-{}", agent.spec().node_name);
    let ready = eventually(LIMIT, format!("{name} is Ready"), async || {
        pods(agent).await.is_ok_and(|p| p.get(&full).is_some_and(is_ready))
    });
    ready.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
}

/// As [`until_cause`](crate::until_cause) for a step that has failed and is retried: it has a next attempt, after its start.
///
/// # Panics
/// There is no such wait within [`LIMIT`].
pub async fn until_retried(agent: &Agent, pod: &str, step: &str, owner: &str, text: &str) -> Value {
    let what = format!("the step {step} of {pod} is retried by {owner} because of {text:?}");
    let find = |explained: &Value| {
        let fits = |s: &&Value| {
            let says = s["message"].as_str().is_some_and(|m| m.contains(text));
            // During an attempt no next one is known.
            s["name"] == step && s["owner"] == owner && says && s["next_retry"].is_string()
        };
        explained["steps"].as_array()?.iter().find(fits).cloned()
    };
    let explained = until_explained(agent, pod, &what, |e| find(e).is_some()).await.unwrap();
    let found = find(&explained).unwrap();
    assert!(found["since"].is_string(), "no start time: {found}");
    assert!(found["next_retry"].as_str() >= found["since"].as_str(), "{found}");
    found
}

/// Checks that a step has a start time and no scheduled retry: it ends with its cause, not with time.
///
/// # Panics
/// It has a next attempt, or no start time.
pub fn assert_not_scheduled(step: &Value) {
    assert!(step["since"].is_string(), "no start time: {step}");
    assert!(step.get("next_retry").is_some_and(Value::is_null), "{step}");
}

/// Checks that a step has the same start time after an unsuccessful retry.
///
/// # Panics
/// It is not, or is not tried again within [`LIMIT`].
pub async fn assert_same_after_a_retry(agent: &Agent, pod: &str, first: &Value) {
    let is_same = |s: &Value| s["name"] == first["name"] && s["state"] == first["state"];
    let find = |e: &Value| e["steps"].as_array().and_then(|s| s.iter().find(|s| is_same(s)).cloned());
    let is_retried = |e: &Value| {
        find(e).is_some_and(|s| s["next_retry"].is_string() && s["next_retry"] != first["next_retry"])
    };
    let later = until_explained(agent, pod, "a retry has failed", is_retried).await.unwrap();
    let later = find(&later).unwrap();
    assert_eq!(later["since"], first["since"], "{later}");
    assert_eq!(later["owner"], first["owner"], "{later}");
}

/// The waiting reason of the first container; empty when it is not waiting.
pub async fn waiting_reason(agent: &Agent, name: &str) -> String {
    let full = format!("{name}-{}", agent.spec().node_name);
    let pods = pods(agent).await.unwrap_or_default();
    let state = &pods.get(&full).unwrap_or(&Value::Null)["status"]["containerStatuses"][0]["state"];
    state["waiting"]["reason"].as_str().unwrap_or_default().to_owned()
}
