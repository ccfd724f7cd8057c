//! A running init with a kubeconfig whose user has an exec plugin.
#![allow(clippy::unwrap_used, reason = "tests and their helpers")]

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use common::{Scene, eventually, find};
use keelson_config::ServiceName;
use rustix::process::Signal;
use serde_json::{Value, json};

const V1: &str = "client.authentication.k8s.io/v1";

fn write_program(scene: &Scene, answer: &str) {
    let text = format!("#!/bin/sh\necho run >> {}\n{answer}\n", scene.path("runs").display());
    let (path, new) = (scene.path("login"), scene.path("login.new"));
    fs::write(&new, text).unwrap();
    fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).unwrap();
    fs::rename(new, path).unwrap();
}

fn token(token: &str) -> String {
    let status = json!({"token": token});
    format!("echo '{}'", json!({"kind": "ExecCredential", "apiVersion": V1, "status": status}))
}

#[tokio::test]
async fn a_failed_exec_plugin_is_reported_and_its_token_survives_init() {
    let scene = Scene::new();
    write_program(&scene, "echo no network >&2; exit 1");
    let kubeconfig = json!({
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": "https://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {
            "exec": {"apiVersion": V1, "command": "./login", "interactiveMode": "Never"}}}],
    });
    fs::write(scene.path("kubelet.conf"), kubeconfig.to_string()).unwrap();
    let command = || {
        let mut command = scene.command();
        command.arg("--kubeconfig").arg(scene.path("kubelet.conf"));
        command
    };
    let init = scene.start_as(command());
    let services = scene
        .wait("init reports the failed plugin", |services| {
            services.iter().any(|service| {
                service.name == "init"
                    && service.message.contains("login: it has ended with exit status: 1: \"no network\"")
            })
        })
        .await;
    assert_eq!(find(&services, ServiceName::Init).state, "degraded");
    let copy = scene.path("run/credentials/node-status/kubeconfig.json");
    assert!(!copy.exists());

    write_program(&scene, &token("abc"));
    eventually("the token is copied", || copy.exists()).await;
    let copied = || serde_json::from_slice::<Value>(&fs::read(&copy).unwrap()).unwrap();
    assert_eq!(copied()["users"][0]["user"], json!({"token": "abc"}));

    init.signal(Signal::KILL);
    drop(init);
    let runs = fs::read_to_string(scene.path("runs")).unwrap();
    let mut init = scene.start_as(command());
    scene.all_running().await;
    assert_eq!(copied()["users"][0]["user"], json!({"token": "abc"}));
    assert_eq!(fs::read_to_string(scene.path("runs")).unwrap(), runs, "the plugin does not run again");
    init.signal(Signal::TERM);
    assert_eq!(init.ended().await, Some(0));
}
