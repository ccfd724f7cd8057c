//! The `keelson` binary against fake services on real sockets.

// Helpers outside of `#[test]` functions are test code too.
#![allow(clippy::unwrap_used)]

mod attach;
mod completion;
mod configuration;
mod cp;
mod drain;
mod events;
mod exec;
mod explain;
mod failures;
mod fake;
mod fleet;
mod fleet_delete;
mod fleet_flags;
mod fleet_objects;
mod fleet_volume_objects;
mod fleet_watch;
mod get;
mod hostile;
mod manifests;
mod orphans;
mod running;
mod services;
mod up;
mod volume_object_watch;
mod volume_objects;
mod waiting;
mod watch;

use std::path::Path;
use std::process::{Command, Output, Stdio};

use keelson_proto::keelson::pod_sync::v1::PodDocument;
use keelson_proto::keelson::supervisor::v1::Service;
use serde_json::{Value, json};

use crate::fake::World;

const SECOND: i64 = 1_000_000_000;

/// The exit code and the output of a command.
#[derive(Debug)]
struct CommandResult {
    code: Option<i32>,
    out: String,
    err: String,
}

impl CommandResult {
    fn of(output: Output) -> Self {
        Self {
            code: output.status.code(),
            out: String::from_utf8(output.stdout).unwrap(),
            err: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// The standard output of a command that has succeeded.
    #[track_caller]
    fn ok(self) -> String {
        assert_eq!(self.code, Some(0), "{self:?}");
        self.out
    }

    #[track_caller]
    fn json(self) -> Value {
        let out = self.ok();
        serde_json::from_str(&out).unwrap_or_else(|e| panic!("{e}: {out}"))
    }

    /// The `error:` line and the `try:` line of a command that has failed with `code`.
    #[track_caller]
    fn failed(&self, code: i32) -> (&str, &str) {
        assert_eq!(self.code, Some(code), "{self:?}");
        let find = |prefix: &str| self.err.lines().rev().find_map(|line| line.strip_prefix(prefix));
        (find("error: ").unwrap_or_else(|| panic!("{self:?}")), find("try: ").unwrap_or_default())
    }
}

fn command(run_dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_keelson"));
    let variables = std::env::vars_os().map(|(name, _)| name);
    for name in variables.filter(|name| name.to_string_lossy().starts_with("KEELSON_")) {
        command.env_remove(name);
    }
    command.arg("--run-dir").arg(run_dir).args(args).stdin(Stdio::null());
    command
}

fn keelson(run_dir: &Path, args: &[&str]) -> CommandResult {
    CommandResult::of(command(run_dir, args).output().unwrap())
}

fn now() -> i64 {
    keelson_service_kit::now_unix_nanos()
}

fn document(namespace: &str, name: &str, uid: &str, pod: Value) -> PodDocument {
    PodDocument {
        uid: uid.into(),
        namespace: namespace.into(),
        name: name.into(),
        pod_json: pod.to_string().into(),
        source: "file".into(),
        ..PodDocument::default()
    }
}

/// A running pod, with a field that our types do not have.
fn running_pod(namespace: &str, name: &str, uid: &str) -> PodDocument {
    document(
        namespace,
        name,
        uid,
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": namespace, "uid": uid, "labels": {"app": "web"}},
            "spec": {
                "nodeName": "edge", "restartPolicy": "Always", "fromTheFuture": {"z": 1, "a": [2]},
                "containers": [{"name": "app", "image": "busybox"}, {"name": "proxy", "image": "envoy"}],
                "volumes": [{"name": "data", "emptyDir": {"medium": "Memory"}}],
            },
            "status": {
                "phase": "Running", "podIP": "10.88.0.4", "qosClass": "BestEffort",
                "conditions": [{"type": "Ready", "status": "True"}],
                "containerStatuses": [
                    {"name": "app", "ready": true, "restartCount": 1, "state": {"running": {}}},
                    {"name": "proxy", "ready": true, "restartCount": 0, "state": {"running": {}}},
                ],
            },
        }),
    )
}

/// An agent with three pods in two namespaces on the node `edge`.
fn world() -> World {
    World {
        pods: vec![
            running_pod("default", "web-edge", "u1"),
            document(
                "default",
                "db-edge",
                "u2",
                json!({"metadata": {"name": "db-edge", "namespace": "default"}, "spec": {"nodeName": "edge",
                       "initContainers": [{"name": "i"}], "containers": [{"name": "db"}]},
                       "status": {"phase": "Pending", "initContainerStatuses": [{"name": "i", "state": {"running": {}}}]}}),
            ),
            running_pod("system", "dns-edge", "u3"),
        ],
        services: vec![
            Service {
                name: "pod-sync".into(),
                pid: 4242,
                state: "running".into(),
                restarts: 2,
                pss_kib: 5427,
                started_unix_nanos: now() - (30 * 60 + 5) * SECOND,
                uid: 64_205,
                ..Service::default()
            },
            Service {
                name: "node-api".into(),
                state: "backing-off".into(),
                restarts: 5,
                message: "ended with exit code 70".into(),
                ..Service::default()
            },
        ],
        node: json!({
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": "edge"},
            "status": {
                "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
                "addresses": [{"type": "InternalIP", "address": "10.0.0.5"}],
                "capacity": {"cpu": "4", "memory": "8Gi", "pods": "110"},
                "allocatable": {"cpu": "4", "memory": "7Gi", "pods": "110"},
                "nodeInfo": {"kubeletVersion": "v1.36.0+keelson"},
            },
        }),
        log: vec!["first\n", "second\n"],
        ..World::default()
    }
}
