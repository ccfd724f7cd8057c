//! A pod-config that tells of objects what the test wants.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use futures_util::Stream;
use keelson_config::ServiceName;
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_proto::keelson::pod_config::v1::pod_config_client::PodConfigClient;
use keelson_proto::keelson::pod_config::v1::pod_config_server::{PodConfig, PodConfigServer};
use keelson_proto::keelson::pod_config::v1::watch_objects_response::Item;
use keelson_proto::keelson::volume_manager::v1 as vm;
use keelson_service_kit::{Context, PeerChannel};
use keelson_sync_callee::testing::Service;
use tokio::sync::watch;
use tokio_stream::StreamExt as _;
use tonic::service::Routes;
use tonic::{Request, Response, Status, Streaming};

use super::{World, volume};

/// Kind and name.
type Name = (String, String);

/// What there is to tell; cheap to clone.
#[derive(Clone, Default)]
pub struct Told {
    /// The JSON of each object, `None` for one that is not there; of others nothing is said.
    objects: Arc<Mutex<BTreeMap<Name, Option<String>>>>,
    watched: Arc<Mutex<BTreeSet<Name>>>,
    version: Arc<watch::Sender<u64>>,
}

impl Told {
    fn set(&self, kind: &str, name: &str, json: Option<String>) {
        self.objects.lock().unwrap().insert((kind.to_owned(), name.to_owned()), json);
        self.version.send_modify(|version| *version += 1);
    }

    /// There is a ConfigMap with this data.
    pub fn config_map(&self, name: &str, data: &str) {
        self.set("ConfigMap", name, Some(format!("{{\"data\": {data}}}")));
    }

    /// There is a Secret with this data, in base64.
    pub fn secret(&self, name: &str, data: &str) {
        self.set("Secret", name, Some(format!("{{\"data\": {data}}}")));
    }

    /// There is no such object.
    pub fn missing(&self, kind: &str, name: &str) {
        self.set(kind, name, None);
    }

    /// What is watched now.
    pub fn watched(&self) -> Vec<String> {
        self.watched.lock().unwrap().iter().map(|(kind, name)| format!("{kind}/{name}")).collect()
    }

    /// Serves it at the socket of pod-config.
    pub async fn serve(&self, world: &World) -> Service<PodConfigClient<PeerChannel>> {
        let ctx = Context::detached(ServiceName::PodConfig, world.config.clone());
        let stop = ctx.shutdown.clone();
        let server = Fake { told: self.clone(), stop };
        Service::start(ctx, Routes::new(PodConfigServer::new(server)), PodConfigClient::new).await
    }
}

struct Fake {
    told: Told,
    stop: keelson_service_kit::CancellationToken,
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn not_here<T>() -> Result<Response<T>, Status> {
    Err(Status::unimplemented("not in this fake"))
}

async fn tell(
    told: Told,
    mut requests: Streaming<pb::WatchObjectsRequest>,
    answers: tokio::sync::mpsc::Sender<Result<pb::WatchObjectsResponse, Status>>,
) {
    let mut version = told.version.subscribe();
    let mut sent: BTreeMap<Name, Option<String>> = BTreeMap::new();
    let mut watched: BTreeMap<Name, pb::ObjectReference> = BTreeMap::new();
    loop {
        tokio::select! {
            request = requests.next() => {
                let Some(Ok(request)) = request else { return };
                let name = |r: &pb::ObjectReference| (r.kind.clone(), r.name.clone());
                for reference in request.unwatch {
                    watched.remove(&name(&reference));
                    sent.remove(&name(&reference));
                }
                watched.extend(request.watch.into_iter().map(|r| (name(&r), r)));
                *told.watched.lock().unwrap() = watched.keys().cloned().collect();
            }
            changed = version.changed() => changed.unwrap(),
        }
        for (name, reference) in &watched {
            let Some(now) = told.objects.lock().unwrap().get(name).cloned() else { continue };
            if sent.get(name) == Some(&now) {
                continue;
            }
            sent.insert(name.clone(), now.clone());
            let object_json = now.map(String::into_bytes);
            let state = pb::ObjectState { reference: Some(reference.clone()), object_json };
            let answer = pb::WatchObjectsResponse { item: Some(Item::Object(state)) };
            if answers.send(Ok(answer)).await.is_err() {
                return;
            }
        }
    }
}

#[tonic::async_trait]
impl PodConfig for Fake {
    type WatchPodsStream = Answers<pb::WatchPodsResponse>;
    type WatchNodeStream = Answers<pb::WatchNodeResponse>;
    type WatchObjectsStream = Answers<pb::WatchObjectsResponse>;

    async fn watch_objects(
        &self,
        request: Request<Streaming<pb::WatchObjectsRequest>>,
    ) -> Result<Response<Self::WatchObjectsStream>, Status> {
        let (answers, receiver) = tokio::sync::mpsc::channel(4);
        let (told, stop) = (self.told.clone(), self.stop.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = stop.cancelled() => {}
                () = tell(told, request.into_inner(), answers) => {}
            }
        });
        Ok(Response::new(Box::pin(tokio_stream::wrappers::ReceiverStream::new(receiver))))
    }

    async fn watch_pods(
        &self,
        _: Request<pb::WatchPodsRequest>,
    ) -> Result<Response<Self::WatchPodsStream>, Status> {
        not_here()
    }

    async fn watch_node(
        &self,
        _: Request<pb::WatchNodeRequest>,
    ) -> Result<Response<Self::WatchNodeStream>, Status> {
        not_here()
    }

    async fn get_object(
        &self,
        _: Request<pb::GetObjectRequest>,
    ) -> Result<Response<pb::GetObjectResponse>, Status> {
        not_here()
    }

    async fn apply_manifest(
        &self,
        _: Request<pb::ApplyManifestRequest>,
    ) -> Result<Response<pb::ApplyManifestResponse>, Status> {
        not_here()
    }

    async fn delete_manifest(
        &self,
        _: Request<pb::DeleteManifestRequest>,
    ) -> Result<Response<pb::DeleteManifestResponse>, Status> {
        not_here()
    }

    async fn review_token(
        &self,
        _: Request<pb::ReviewTokenRequest>,
    ) -> Result<Response<pb::ReviewTokenResponse>, Status> {
        not_here()
    }

    async fn review_access(
        &self,
        _: Request<pb::ReviewAccessRequest>,
    ) -> Result<Response<pb::ReviewAccessResponse>, Status> {
        not_here()
    }

    async fn list_sources(
        &self,
        _: Request<pb::ListSourcesRequest>,
    ) -> Result<Response<pb::ListSourcesResponse>, Status> {
        not_here()
    }
}

/// A volume of files.
pub fn files(name: &str, kind: vm::file_volume::Kind, sources: Vec<vm::file_source::Source>) -> vm::Volume {
    let sources = sources.into_iter().map(|source| vm::FileSource { source: Some(source) }).collect();
    let files = vm::FileVolume { kind: kind.into(), sources, default_mode: Some(0o644), nested: Vec::new() };
    volume(name, vm::volume::Source::Files(files))
}

/// Every key of an object.
pub fn object(kind: &str, name: &str, optional: bool) -> vm::file_source::Source {
    let (kind, name) = (kind.to_owned(), name.to_owned());
    vm::file_source::Source::Object(vm::ObjectFiles { kind, name, items: Vec::new(), optional })
}

/// A ConfigMap as a volume of its name.
pub fn config_map(name: &str) -> vm::Volume {
    files(name, vm::file_volume::Kind::ConfigMap, vec![object("ConfigMap", name, false)])
}

/// A Secret as a volume of its name.
pub fn secret(name: &str) -> vm::Volume {
    files(name, vm::file_volume::Kind::Secret, vec![object("Secret", name, false)])
}

/// A downwardAPI volume with one file.
pub fn downward(name: &str, path: &str, text: &str) -> vm::Volume {
    let value = vm::downward_file::Value::Content(text.as_bytes().to_vec());
    let file = vm::DownwardFile { path: path.to_owned(), mode: None, value: Some(value) };
    let fields = vm::DownwardFiles { files: vec![file] };
    let kind = vm::file_volume::Kind::DownwardApi;
    files(name, kind, vec![vm::file_source::Source::Downward(fields)])
}
