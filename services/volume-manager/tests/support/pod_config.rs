//! A fake pod-config that serves the objects and tokens of a test.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use futures_util::Stream;
use keelson_config::ServiceName;
use keelson_pod_reconciler::testing::Service;
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_proto::keelson::pod_config::v1::pod_config_client::PodConfigClient;
use keelson_proto::keelson::pod_config::v1::pod_config_server::{PodConfig, PodConfigServer};
use keelson_proto::keelson::pod_config::v1::watch_objects_response::Item;
use keelson_proto::keelson::volume_manager::v1 as vm;
use keelson_service_kit::{Context, PeerChannel};
use tokio::sync::watch;
use tokio_stream::StreamExt as _;
use tonic::service::Routes;
use tonic::{Request, Response, Status, Streaming};

use super::{World, volume};

/// Kind and name.
type Name = (String, String);

/// The objects and tokens of the fake; cheap to clone.
#[derive(Clone, Default)]
pub struct FakePodConfig {
    /// The JSON of each object, `None` for one that does not exist. Objects without an entry are never reported.
    objects: Arc<Mutex<BTreeMap<Name, Option<String>>>>,
    watched: Arc<Mutex<BTreeSet<Name>>>,
    version: Arc<watch::Sender<u64>>,
    tokens: Arc<Mutex<Tokens>>,
}

/// The state of token requests.
#[derive(Default)]
struct Tokens {
    /// The error that requests get instead of a token.
    refusal: Option<Status>,
    /// All requests, refused or not.
    requests: Vec<pb::CreateTokenRequest>,
    /// The issue time of new tokens, in seconds since 1970.
    issued: Option<i64>,
}

/// Seconds since 1970.
pub fn now() -> i64 {
    keelson_service_kit::now_unix_nanos() / 1_000_000_000
}

impl FakePodConfig {
    fn set(&self, kind: &str, name: &str, json: Option<String>) {
        self.objects.lock().unwrap().insert((kind.to_owned(), name.to_owned()), json);
        self.version.send_modify(|version| *version += 1);
    }

    /// Creates or replaces a ConfigMap with this data.
    pub fn config_map(&self, name: &str, data: &str) {
        self.set("ConfigMap", name, Some(format!("{{\"data\": {data}}}")));
    }

    /// Creates or replaces a Secret with this data, in base64.
    pub fn secret(&self, name: &str, data: &str) {
        self.set("Secret", name, Some(format!("{{\"data\": {data}}}")));
    }

    /// Deletes an object, and reports it as missing from now on.
    pub fn delete(&self, kind: &str, name: &str) {
        self.set(kind, name, None);
    }

    /// Refuses tokens with this status from now on.
    pub fn refuse_tokens(&self, status: Status) {
        self.tokens.lock().unwrap().refusal = Some(status);
    }

    /// Issues tokens from now on, with an issue time this many seconds ago.
    pub fn issue_tokens(&self, seconds_ago: i64) {
        let mut tokens = self.tokens.lock().unwrap();
        (tokens.refusal, tokens.issued) = (None, Some(now() - seconds_ago));
    }

    /// Overwrites a token in a volume with one that expires in a minute. Returns its text.
    pub fn write_expiring_token(&self, path: &std::path::Path) -> String {
        let old = jwt(0, now() - 3540, 3600);
        std::fs::write(path, &old).unwrap();
        old
    }

    /// All token requests so far.
    pub fn token_requests(&self) -> Vec<pb::CreateTokenRequest> {
        self.tokens.lock().unwrap().requests.clone()
    }

    /// The text of the token with this number, counted from 1.
    pub fn token(&self, number: usize) -> String {
        let tokens = self.tokens.lock().unwrap();
        jwt(number, tokens.issued.unwrap(), tokens.requests[number - 1].expiration_seconds)
    }

    /// The objects that are watched now.
    pub fn watched(&self) -> Vec<String> {
        self.watched.lock().unwrap().iter().map(|(kind, name)| format!("{kind}/{name}")).collect()
    }

    /// Serves the fake at the socket of pod-config.
    pub async fn serve(&self, world: &World) -> Service<PodConfigClient<PeerChannel>> {
        let ctx = Context::detached(ServiceName::PodConfig, world.config.clone());
        let stop = ctx.shutdown.clone();
        let server = FakeServer { pod_config: self.clone(), stop };
        Service::start(ctx, Routes::new(PodConfigServer::new(server)), PodConfigClient::new).await
    }
}

fn jwt(number: usize, issued: i64, lifetime: i64) -> String {
    use base64::Engine as _;
    let claims = format!("{{\"iat\": {issued}, \"exp\": {}, \"n\": {number}}}", issued + lifetime);
    format!("e30.{}.c2ln", base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(claims))
}

struct FakeServer {
    pod_config: FakePodConfig,
    stop: keelson_service_kit::CancellationToken,
}

type ResponseStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn unimplemented<T>() -> Result<Response<T>, Status> {
    Err(Status::unimplemented("the fake does not implement this call"))
}

async fn send_objects(
    pod_config: FakePodConfig,
    mut requests: Streaming<pb::WatchObjectsRequest>,
    responses: tokio::sync::mpsc::Sender<Result<pb::WatchObjectsResponse, Status>>,
) {
    let mut version = pod_config.version.subscribe();
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
                *pod_config.watched.lock().unwrap() = watched.keys().cloned().collect();
            }
            changed = version.changed() => changed.unwrap(),
        }
        for (name, reference) in &watched {
            let Some(now) = pod_config.objects.lock().unwrap().get(name).cloned() else { continue };
            if sent.get(name) == Some(&now) {
                continue;
            }
            sent.insert(name.clone(), now.clone());
            let object_json = now.map(String::into_bytes);
            let state = pb::ObjectState { reference: Some(reference.clone()), object_json };
            let response = pb::WatchObjectsResponse { item: Some(Item::Object(state)) };
            if responses.send(Ok(response)).await.is_err() {
                return;
            }
        }
    }
}

#[tonic::async_trait]
impl PodConfig for FakeServer {
    type WatchPodsStream = ResponseStream<pb::WatchPodsResponse>;
    type WatchNodeStream = ResponseStream<pb::WatchNodeResponse>;
    type WatchObjectsStream = ResponseStream<pb::WatchObjectsResponse>;

    async fn watch_objects(
        &self,
        request: Request<Streaming<pb::WatchObjectsRequest>>,
    ) -> Result<Response<Self::WatchObjectsStream>, Status> {
        let (responses, receiver) = tokio::sync::mpsc::channel(4);
        let (pod_config, stop) = (self.pod_config.clone(), self.stop.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = stop.cancelled() => {}
                () = send_objects(pod_config, request.into_inner(), responses) => {}
            }
        });
        Ok(Response::new(Box::pin(tokio_stream::wrappers::ReceiverStream::new(receiver))))
    }

    async fn watch_pods(
        &self,
        _: Request<pb::WatchPodsRequest>,
    ) -> Result<Response<Self::WatchPodsStream>, Status> {
        unimplemented()
    }

    async fn watch_node(
        &self,
        _: Request<pb::WatchNodeRequest>,
    ) -> Result<Response<Self::WatchNodeStream>, Status> {
        unimplemented()
    }

    async fn get_object(
        &self,
        _: Request<pb::GetObjectRequest>,
    ) -> Result<Response<pb::GetObjectResponse>, Status> {
        unimplemented()
    }

    async fn mutate(&self, _: Request<pb::MutateRequest>) -> Result<Response<pb::MutateResponse>, Status> {
        unimplemented()
    }

    async fn create_token(
        &self,
        request: Request<pb::CreateTokenRequest>,
    ) -> Result<Response<pb::CreateTokenResponse>, Status> {
        let request = request.into_inner();
        let mut tokens = self.pod_config.tokens.lock().unwrap();
        tokens.requests.push(request.clone());
        if let Some(refusal) = &tokens.refusal {
            return Err(refusal.clone());
        }
        let (lifetime, issued) = (request.expiration_seconds, tokens.issued.unwrap());
        Ok(Response::new(pb::CreateTokenResponse {
            token: jwt(tokens.requests.len(), issued, lifetime),
            expires_unix_seconds: issued + lifetime,
            lifetime_seconds: lifetime,
        }))
    }

    async fn get_service_env(
        &self,
        _: Request<pb::GetServiceEnvRequest>,
    ) -> Result<Response<pb::GetServiceEnvResponse>, Status> {
        unimplemented()
    }

    async fn apply_manifest(
        &self,
        _: Request<pb::ApplyManifestRequest>,
    ) -> Result<Response<pb::ApplyManifestResponse>, Status> {
        unimplemented()
    }

    async fn delete_manifest(
        &self,
        _: Request<pb::DeleteManifestRequest>,
    ) -> Result<Response<pb::DeleteManifestResponse>, Status> {
        unimplemented()
    }

    async fn review_token(
        &self,
        _: Request<pb::ReviewTokenRequest>,
    ) -> Result<Response<pb::ReviewTokenResponse>, Status> {
        unimplemented()
    }

    async fn review_access(
        &self,
        _: Request<pb::ReviewAccessRequest>,
    ) -> Result<Response<pb::ReviewAccessResponse>, Status> {
        unimplemented()
    }

    async fn list_sources(
        &self,
        _: Request<pb::ListSourcesRequest>,
    ) -> Result<Response<pb::ListSourcesResponse>, Status> {
        unimplemented()
    }
}

/// A volume of files.
pub fn files(name: &str, kind: vm::file_volume::Kind, sources: Vec<vm::file_source::Source>) -> vm::Volume {
    let sources = sources.into_iter().map(|source| vm::FileSource { source: Some(source) }).collect();
    let files = vm::FileVolume { kind: kind.into(), sources, default_mode: Some(0o644), nested: Vec::new() };
    volume(name, vm::volume::Source::Files(files))
}

/// A source with every key of an object.
pub fn object(kind: &str, name: &str, optional: bool) -> vm::file_source::Source {
    let (kind, name) = (kind.to_owned(), name.to_owned());
    vm::file_source::Source::Object(vm::ObjectFiles { kind, name, items: Vec::new(), optional })
}

/// A configMap volume named like its object.
pub fn config_map(name: &str) -> vm::Volume {
    files(name, vm::file_volume::Kind::ConfigMap, vec![object("ConfigMap", name, false)])
}

/// A secret volume named like its object.
pub fn secret(name: &str) -> vm::Volume {
    files(name, vm::file_volume::Kind::Secret, vec![object("Secret", name, false)])
}

/// A projected volume with a token of the default service account.
pub fn token(name: &str, mode: Option<u32>, owner_uid: Option<i64>) -> vm::Volume {
    let source = vm::ServiceAccountToken {
        service_account: "default".to_owned(),
        audience: String::new(),
        expiration_seconds: 3600,
        path: "token".to_owned(),
        mode,
        owner_uid,
    };
    let kind = vm::file_volume::Kind::Projected;
    files(name, kind, vec![vm::file_source::Source::Token(source)])
}

/// A downwardAPI volume with one file.
pub fn downward(name: &str, path: &str, text: &str) -> vm::Volume {
    let value = vm::downward_file::Value::Content(text.as_bytes().to_vec());
    let file = vm::DownwardFile { path: path.to_owned(), mode: None, value: Some(value) };
    let fields = vm::DownwardFiles { files: vec![file] };
    let kind = vm::file_volume::Kind::DownwardApi;
    files(name, kind, vec![vm::file_source::Source::Downward(fields)])
}
