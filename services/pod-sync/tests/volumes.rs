//! Subpaths and file values are prepared before the container is created.

#![allow(clippy::unwrap_used)]

mod fake;

use serde_json::{Value, json};

use fake::{World, eventually};

fn spec(container: Value) -> Value {
    let mut main = json!({"name": "main", "image": "i:1", "imagePullPolicy": "IfNotPresent"});
    main.as_object_mut().unwrap().extend(container.as_object().unwrap().clone());
    json!({
        "restartPolicy": "Never",
        "containers": [main],
        "volumes": [{"name": "data", "emptyDir": {}}],
    })
}

/// A `volumeMounts` entry of the volume.
fn mount(path: &str, more: Value) -> Value {
    let mut mount = json!({"name": "data", "mountPath": path});
    mount.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    mount
}

#[tokio::test]
async fn subpaths_and_file_key_refs_are_prepared_and_reach_the_runtime() {
    let world = World::start();
    let service = world.pod_sync().await;
    let file = |path: &str, optional: bool| json!({"fileKeyRef": {"volumeName": "data", "path": path, "key": "K", "optional": optional}});
    let container = json!({
        "env": [
            {"name": "WHO", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "FILE", "valueFrom": file("app.env", false)},
            {"name": "NONE", "valueFrom": file("none", true)},
        ],
        "volumeMounts": [
            mount("/whole", json!({})),
            mount("/part", json!({"subPath": "a/b"})),
            mount("/own", json!({"subPathExpr": "of/$(WHO)"})),
        ],
    });
    world.add_pod_with_spec("web", spec(container), 1);
    service.phase("web", "Running").await;
    for call in [
        "mount /volumes/data at /whole",
        "mount /prepared/main/data/a/b at /part",
        "mount /prepared/main/data/of/web at /own",
        "env FILE=K of app.env in data",
    ] {
        assert_eq!(world.shim.calls(call), 1, "{call}");
    }
    assert_eq!(world.shim.calls("env NONE="), 0);
    service.kill();
}

#[tokio::test]
async fn a_subpath_that_cannot_be_prepared_is_the_waiting_reason_owned_by_you() {
    let file = json!([{"name": "F", "valueFrom": {"fileKeyRef": {"volumeName": "data", "path": "none", "key": "K"}}}]);
    for (uid, container, text) in [
        (
            "out",
            json!({"volumeMounts": [mount("/v", json!({"subPath": "out"}))]}),
            "subPath of data: it leads out",
        ),
        (
            "variable",
            json!({"volumeMounts": [mount("/v", json!({"subPathExpr": "$(NOBODY)"}))]}),
            "missing value for NOBODY",
        ),
        ("upwards", json!({"volumeMounts": [mount("/v", json!({"subPathExpr": "a/../.."}))]}), "subPath"),
        ("key", json!({"env": file}), "environment variable key \"K\" not found in file \"none\""),
    ] {
        let world = World::start();
        let service = world.pod_sync().await;
        world.add_pod_with_spec(uid, spec(container), 1);
        let step = service.step(uid, "container", |step| step.message.contains(text)).await;
        assert_eq!(step.owner, "you", "{step:?}");
        let waiting = eventually("the waiting reason", async || {
            let state = service.pod(uid).await?["status"]["containerStatuses"][0]["state"].take();
            state["waiting"]["message"].as_str().is_some_and(|m| m.contains(text)).then_some(state)
        })
        .await;
        assert_eq!(waiting["waiting"]["reason"], "CreateContainerConfigError");
        assert_eq!(world.shim.calls("CreateContainer"), 0);
        service.kill();
    }
}
