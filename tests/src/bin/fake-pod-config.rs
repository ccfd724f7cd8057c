//! A fake pod-config for tests that need pods of an API server, which are neither static nor
//! critical. It serves the manifests of the folder `staticPodPath` as such pods; each is one JSON file with
//! a UID.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use keelson_config::ServiceName;
use keelson_proto::descriptors;
use keelson_proto::keelson::common::v1::Synced;
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_service_kit::{Context, LoopHandle, ServiceSpec, WatchHub, WatchItem};
use keelson_testkit::fakes::{FakePodConfig, StreamAnswer};
use serde_json::{Value, json};
use tokio_stream::{Stream, StreamExt as _};
use tonic::Status;
use tonic::service::Routes;

const SOURCE: &str = "api";
/// Time between two reads of the folder.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

type Hub = WatchHub<String, pb::DesiredPod>;

fn main() -> ExitCode {
    keelson_service_kit::run(
        ServiceSpec {
            name: ServiceName::PodConfig,
            about: "Serves the manifests of a folder as pods of an API server.",
            version: env!("CARGO_PKG_VERSION"),
            descriptor: Some(descriptors::POD_CONFIG),
            threads: 1,
        },
        |ctx| async move {
            let hub = Hub::new();
            let folder = ctx.config.sources.static_pod_path.clone().unwrap_or_default();
            let handle = ctx.progress.register("pods");
            ctx.spawn("pods", follow(ctx.clone(), folder, hub.clone(), handle));
            Ok(Routes::new(pod_config(hub, &ctx.config.node_name).server()))
        },
    )
}

async fn follow(ctx: Context, folder: PathBuf, hub: Hub, handle: LoopHandle) {
    let mut revision = 0;
    loop {
        handle.tick();
        let found = read(&folder);
        for uid in hub.keys().into_iter().filter(|uid| !found.contains_key(uid)) {
            hub.remove(&uid);
        }
        for (uid, pod) in found {
            let bytes: Vec<u8> = pod.to_string().into_bytes();
            let known = hub.get(&uid);
            if known.as_ref().is_some_and(|known| known.pod_json == bytes) {
                continue;
            }
            revision += 1;
            let text = |name: &str| pod["metadata"][name].as_str().unwrap_or_default().to_owned();
            let desired = pb::DesiredPod {
                uid: uid.clone(),
                namespace: text("namespace"),
                name: text("name"),
                source: SOURCE.to_owned(),
                revision,
                origin: folder.display().to_string(),
                seen_unix_nanos: known
                    .map_or_else(keelson_service_kit::now_unix_nanos, |known| known.seen_unix_nanos),
                pod_json: bytes.into(),
                ..Default::default()
            };
            hub.set(uid, desired);
        }
        // Cancel-safe: neither future has state.
        tokio::select! {
            () = ctx.shutdown.cancelled() => return,
            () = tokio::time::sleep(POLL_INTERVAL) => {}
        }
    }
}

/// The pods of the folder; files that are not pods are skipped.
fn read(folder: &Path) -> BTreeMap<String, Value> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let texts = entries.filter_map(|entry| std::fs::read(entry.path()).ok());
    let pods = texts.filter_map(|text| serde_json::from_slice::<Value>(&text).ok());
    pods.filter_map(|mut pod| {
        keelson_kube_model::default_pod(&mut pod);
        pod["metadata"]["namespace"] = "default".into();
        Some((pod["metadata"]["uid"].as_str()?.to_owned(), pod))
    })
    .collect()
}

/// The pods of `hub`, a Node with this name, and no other objects.
fn pod_config(hub: Hub, node_name: &str) -> FakePodConfig {
    let fake = FakePodConfig::default();
    fake.watch_pods.answer_with(move |_| Ok(StreamAnswer::stream(pods(&hub))));
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node_name}});
    let node_json = node.to_string().into_bytes();
    fake.watch_node.replay([pb::WatchNodeResponse { node_json, registered: false }]);
    fake.get_object.fail(Status::not_found("there are no objects"));
    fake.watch_objects.handle(|mut conversation| async move {
        use pb::watch_objects_response::Item;
        conversation.send(pb::WatchObjectsResponse { item: Some(Item::Synced(Synced {})) }).await;
        while conversation.next().await.is_some() {}
        Ok(())
    });
    fake.list_sources.answer(pb::ListSourcesResponse::default());
    fake
}

/// The stream of `WatchPods`: the only source has reported, then the pods of `hub`.
fn pods(hub: &Hub) -> impl Stream<Item = Result<pb::WatchPodsResponse, Status>> + use<> {
    use pb::watch_pods_response::Item;
    let message = |item| Ok(pb::WatchPodsResponse { item: Some(item) });
    let ready = pb::SourceReady { source: SOURCE.to_owned(), configured: vec![SOURCE.to_owned()] };
    let items = hub.subscribe().into_stream(move |item| match item {
        WatchItem::Set(_, pod) => message(Item::Pod(pod)),
        WatchItem::Gone(uid) => message(Item::GoneUid(uid)),
        WatchItem::Synced => message(Item::Synced(Synced {})),
    });
    tokio_stream::once(message(Item::SourceReady(ready))).chain(items)
}
