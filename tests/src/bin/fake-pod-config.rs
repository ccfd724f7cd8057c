//! A fake pod-config for tests that need pods of an API server, which are neither static nor
//! critical. It serves the manifests of the folder `staticPodPath` as such pods; each is one JSON file with
//! a UID.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::ExitCode;
use std::time::Duration;

use keelson_config::ServiceName;
use keelson_proto::descriptors;
use keelson_proto::keelson::common::v1::Synced;
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_proto::keelson::pod_config::v1::pod_config_server::{PodConfig, PodConfigServer};
use keelson_service_kit::{Context, LoopHandle, ServiceSpec, WatchHub, WatchItem};
use serde_json::{Value, json};
use tokio_stream::{Stream, StreamExt as _};
use tonic::service::Routes;
use tonic::{Request, Response, Status, Streaming};

const SOURCE: &str = "api";
/// Time between two reads of the folder.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

type Hub = WatchHub<String, pb::DesiredPod>;
type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

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
            let node =
                json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": ctx.config.node_name}});
            Ok(Routes::new(PodConfigServer::new(FakePodConfig { hub, node: node.to_string().into_bytes() })))
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
            if hub.get(&uid).is_some_and(|known| known.pod_json == bytes) {
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
                seen_unix_nanos: keelson_service_kit::now_unix_nanos(),
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
        pod["metadata"]["annotations"]["kubernetes.io/config.source"] = SOURCE.into();
        Some((pod["metadata"]["uid"].as_str()?.to_owned(), pod))
    })
    .collect()
}

struct FakePodConfig {
    hub: Hub,
    node: Vec<u8>,
}

fn unimplemented_rpc<T>() -> Result<T, Status> {
    Err(Status::unimplemented("not implemented by this fake"))
}

#[tonic::async_trait]
impl PodConfig for FakePodConfig {
    type WatchPodsStream = Answers<pb::WatchPodsResponse>;
    type WatchNodeStream = Answers<pb::WatchNodeResponse>;
    type WatchObjectsStream = Answers<pb::WatchObjectsResponse>;

    async fn watch_pods(
        &self,
        _: Request<pb::WatchPodsRequest>,
    ) -> Result<Response<Self::WatchPodsStream>, Status> {
        use pb::watch_pods_response::Item;
        let message = |item| Ok(pb::WatchPodsResponse { item: Some(item) });
        let ready = pb::SourceReady { source: SOURCE.to_owned(), configured: vec![SOURCE.to_owned()] };
        let items = self.hub.subscribe().into_stream(move |item| match item {
            WatchItem::Set(_, pod) => message(Item::Pod(pod)),
            WatchItem::Gone(uid) => message(Item::GoneUid(uid)),
            WatchItem::Synced => message(Item::Synced(Synced {})),
        });
        Ok(Response::new(Box::pin(tokio_stream::once(message(Item::SourceReady(ready))).chain(items))))
    }

    async fn watch_node(
        &self,
        _: Request<pb::WatchNodeRequest>,
    ) -> Result<Response<Self::WatchNodeStream>, Status> {
        let node = pb::WatchNodeResponse { node_json: self.node.clone(), registered: false };
        Ok(Response::new(Box::pin(tokio_stream::once(Ok(node)).chain(tokio_stream::pending()))))
    }

    async fn get_object(
        &self,
        _: Request<pb::GetObjectRequest>,
    ) -> Result<Response<pb::GetObjectResponse>, Status> {
        Err(Status::not_found("there are no objects"))
    }

    async fn watch_objects(
        &self,
        _: Request<Streaming<pb::WatchObjectsRequest>>,
    ) -> Result<Response<Self::WatchObjectsStream>, Status> {
        use pb::watch_objects_response::Item;
        let synced = pb::WatchObjectsResponse { item: Some(Item::Synced(Synced {})) };
        Ok(Response::new(Box::pin(tokio_stream::once(Ok(synced)).chain(tokio_stream::pending()))))
    }

    async fn get_service_env(
        &self,
        _: Request<pb::GetServiceEnvRequest>,
    ) -> Result<Response<pb::GetServiceEnvResponse>, Status> {
        unimplemented_rpc()
    }

    async fn mutate(&self, _: Request<pb::MutateRequest>) -> Result<Response<pb::MutateResponse>, Status> {
        unimplemented_rpc()
    }

    async fn create_token(
        &self,
        _: Request<pb::CreateTokenRequest>,
    ) -> Result<Response<pb::CreateTokenResponse>, Status> {
        unimplemented_rpc()
    }

    async fn apply_manifest(
        &self,
        _: Request<pb::ApplyManifestRequest>,
    ) -> Result<Response<pb::ApplyManifestResponse>, Status> {
        unimplemented_rpc()
    }

    async fn delete_manifest(
        &self,
        _: Request<pb::DeleteManifestRequest>,
    ) -> Result<Response<pb::DeleteManifestResponse>, Status> {
        unimplemented_rpc()
    }

    async fn review_token(
        &self,
        _: Request<pb::ReviewTokenRequest>,
    ) -> Result<Response<pb::ReviewTokenResponse>, Status> {
        unimplemented_rpc()
    }

    async fn review_access(
        &self,
        _: Request<pb::ReviewAccessRequest>,
    ) -> Result<Response<pb::ReviewAccessResponse>, Status> {
        unimplemented_rpc()
    }

    async fn list_sources(
        &self,
        _: Request<pb::ListSourcesRequest>,
    ) -> Result<Response<pb::ListSourcesResponse>, Status> {
        Ok(Response::new(pb::ListSourcesResponse::default()))
    }
}
