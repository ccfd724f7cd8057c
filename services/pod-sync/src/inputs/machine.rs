//! Facts about the node that change while it runs: its Node object and its machine.

use std::future::ready;
use std::sync::Arc;

use keelson_kube_model::Node;
use keelson_proto::keelson::pod_config::v1 as config;
use keelson_proto::keelson::resource_manager::v1::{Machine, WatchMachineRequest};
use keelson_service_kit::{Signal, follow};

use crate::effects::Effects;

/// Follows the Node object.
pub async fn follow_node(effects: Arc<Effects>) {
    let context = effects.context.clone();
    let clients = effects.clients.clone();
    let open = move || {
        let mut client = clients.pods();
        async move { client.watch_node(config::WatchNodeRequest {}).await }
    };
    let on = move |signal: Signal<config::WatchNodeResponse>| {
        if let Signal::Message(message) = signal {
            match serde_json::from_slice::<Node>(&message.node_json) {
                Ok(node) => {
                    effects.registry.node.object.send_replace(Some(Arc::new(node)));
                }
                Err(error) => tracing::error!(%error, "cannot decode the Node of pod-config"),
            }
        }
        ready(())
    };
    follow("the Node of pod-config", &context.progress, &context.shutdown, open, on).await;
}

/// Follows the machine of resource-manager.
pub async fn follow_machine(effects: Arc<Effects>) {
    let context = effects.context.clone();
    let clients = effects.clients.clone();
    let open = move || {
        let mut client = clients.resources();
        async move { client.watch_machine(WatchMachineRequest {}).await }
    };
    let on = move |signal: Signal<Machine>| {
        if let Signal::Message(machine) = signal {
            let opens = !machine.shutting_down && !machine.drained;
            let before = effects.registry.node.machine.send_replace(Arc::new(machine));
            if opens && (before.shutting_down || before.drained) {
                effects.registry.wake_admission_holds();
            }
        }
        ready(())
    };
    follow("resource-manager", &context.progress, &context.shutdown, open, on).await;
}

/// Sends volumes that depend on what pods may use of the machine again, each time that it changes.
pub async fn follow_allocatable(effects: Arc<Effects>) {
    let registry = &effects.registry;
    let mut machine = registry.node.machine.subscribe();
    let mut sent = machine.borrow_and_update().allocatable.clone();
    loop {
        // Cancel-safe: `changed` marks nothing as seen unless it returns.
        tokio::select! {
            () = effects.context.shutdown.cancelled() => return,
            changed = machine.changed() => if changed.is_err() {
                return;
            },
        }
        let allocatable = machine.borrow_and_update().allocatable.clone();
        if allocatable != sent {
            sent = allocatable;
            for uid in registry.uids() {
                registry.update_desired_state(&uid);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // A panic fails the test.

    use bytes::Bytes;
    use keelson_config::{Config, ServiceName};
    use keelson_kube_model::Pod;
    use keelson_pod_sync_core::worker::UpdateKind;
    use keelson_service_kit::Context;
    use serde_json::json;

    use super::*;
    use crate::state::pod_state::DesiredPod;

    fn pod_with(volume: serde_json::Value) -> Pod {
        let container = json!({"name": "c", "volumeMounts": [{"name": "v", "mountPath": "/v"}]});
        let spec = json!({"containers": [container], "volumes": [volume]});
        serde_json::from_value(json!({"metadata": {"name": "web"}, "spec": spec})).unwrap()
    }

    #[tokio::test]
    async fn volumes_that_depend_on_allocatable_are_sent_again_when_it_changes() {
        let effects = Effects::new(Context::detached(ServiceName::PodSync, Config::default()), None);
        let volume = json!({"name": "v", "downwardAPI": {"items": [
            {"path": "cpu", "resourceFieldRef": {"containerName": "c", "resource": "limits.cpu"}},
        ]}});
        let mut pod = pod_with(volume);
        pod.metadata.uid = "u".into();
        let desired = Arc::new(DesiredPod {
            raw: Bytes::new(),
            pod: Arc::new(pod),
            source: "file".into(),
            traceparent: String::new(),
            revision: 1,
            added_unix_nanos: 0,
        });
        effects.registry.set_desired(&desired, UpdateKind::Create, None);
        let volumes =
            || format!("{:?}", effects.registry.desired_state.sets.volumes.get("u").unwrap().volumes);
        assert!(volumes().contains("WaitsFor"), "{}", volumes());
        let following = tokio::spawn(follow_allocatable(Arc::clone(&effects)));
        // The task has to subscribe before there is a change.
        tokio::task::yield_now().await;
        let allocatable = [("cpu".to_owned(), 2500)].into_iter().collect();
        effects.registry.node.machine.send_replace(Arc::new(Machine { allocatable, ..Machine::default() }));
        let wait = async {
            while volumes().contains("WaitsFor") {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(std::time::Duration::from_secs(20), wait).await.unwrap();
        assert!(volumes().contains("Content([51])"), "the text 3: {}", volumes());
        effects.context.shutdown.cancel();
        following.await.unwrap();
    }
}
