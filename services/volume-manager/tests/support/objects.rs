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
    tokens: Arc<Mutex<Tokens>>,
}

/// The tokens that are made.
#[derive(Default)]
struct Tokens {
    /// What is answered instead.
    refusal: Option<Status>,
    /// What was asked, refused or not.
    asked: Vec<pb::CreateTokenRequest>,
    /// When those to come have begun, seconds since 1970; none: when they are made.
    issued: Option<i64>,
}

/// Seconds since 1970.
pub fn now() -> i64 {
    keelson_service_kit::now_unix_nanos() / 1_000_000_000
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

    /// From now on tokens are refused so.
    pub fn refuse_tokens(&self, status: Status) {
        self.tokens.lock().unwrap().refusal = Some(status);
    }

    /// From now on tokens are made, which began so many seconds ago.
    pub fn make_tokens(&self, seconds_ago: i64) {
        let mut tokens = self.tokens.lock().unwrap();
        (tokens.refusal, tokens.issued) = (None, Some(now() - seconds_ago));
    }

    /// Puts a token into a volume in the place of its own that has used up its time but for a minute; its text.
    pub fn put_old_token(&self, path: &std::path::Path) -> String {
        let old = jwt(0, now() - 3540, 3600);
        std::fs::write(path, &old).unwrap();
        old
    }

    /// What tokens were asked for.
    pub fn tokens_asked(&self) -> Vec<pb::CreateTokenRequest> {
        self.tokens.lock().unwrap().asked.clone()
    }

    /// The text of the token with this number, from 1.
    pub fn token(&self, number: usize) -> String {
        let tokens = self.tokens.lock().unwrap();
        jwt(number, tokens.issued.unwrap(), tokens.asked[number - 1].expiration_seconds)
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

fn jwt(number: usize, issued: i64, lifetime: i64) -> String {
    use base64::Engine as _;
    let claims = format!("{{\"iat\": {issued}, \"exp\": {}, \"n\": {number}}}", issued + lifetime);
    format!("e30.{}.c2ln", base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(claims))
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

    async fn mutate(&self, _: Request<pb::MutateRequest>) -> Result<Response<pb::MutateResponse>, Status> {
        not_here()
    }

    async fn create_token(
        &self,
        request: Request<pb::CreateTokenRequest>,
    ) -> Result<Response<pb::CreateTokenResponse>, Status> {
        let request = request.into_inner();
        let mut tokens = self.told.tokens.lock().unwrap();
        tokens.asked.push(request.clone());
        if let Some(refusal) = &tokens.refusal {
            return Err(refusal.clone());
        }
        let (lifetime, issued) = (request.expiration_seconds, tokens.issued.unwrap());
        Ok(Response::new(pb::CreateTokenResponse {
            token: jwt(tokens.asked.len(), issued, lifetime),
            expires_unix_seconds: issued + lifetime,
            lifetime_seconds: lifetime,
        }))
    }

    async fn get_service_env(
        &self,
        _: Request<pb::GetServiceEnvRequest>,
    ) -> Result<Response<pb::GetServiceEnvResponse>, Status> {
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

/// A projected volume with the token of the default account.
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
