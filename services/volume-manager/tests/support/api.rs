//! The API objects and tokens of a test, served by a fake pod-config.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use keelson_config::ServiceName;
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_proto::keelson::pod_config::v1::watch_objects_response::Item;
use keelson_proto::keelson::volume_manager::v1 as vm;
use keelson_service_kit::status::error;
use keelson_testkit::fakes::{Conversation, FakePodConfig, FakeServer};
use tokio::sync::watch;
use tonic::service::Routes;
use tonic::{Code, Status};

use super::{World, volume};

/// Kind and name.
type Name = (String, String);

/// The objects and tokens of the API. The fake pod-config that serves them may be restarted.
#[derive(Default)]
pub struct FakeApi {
    pod_config: FakePodConfig,
    objects: Arc<Objects>,
    tokens: Arc<Mutex<Tokens>>,
    /// The JSON of what is read live: claims and PersistentVolumes.
    live: Arc<Mutex<BTreeMap<Name, String>>>,
}

#[derive(Default)]
struct Objects {
    /// The JSON of each object, `None` for one that does not exist. Objects without an entry are never reported.
    json: watch::Sender<BTreeMap<Name, Option<String>>>,
    watched: Mutex<BTreeSet<Name>>,
}

#[derive(Default)]
struct Tokens {
    /// The error that requests get instead of a token.
    refusal: Option<Status>,
    /// The issue time of new tokens, in seconds since 1970.
    issued: i64,
    /// The text of the token of each request; empty for a refused one.
    texts: Vec<String>,
}

/// Seconds since 1970.
pub fn now() -> i64 {
    keelson_service_kit::now_unix_nanos() / 1_000_000_000
}

impl FakeApi {
    fn set(&self, kind: &str, name: &str, json: Option<String>) {
        let name = (kind.to_owned(), name.to_owned());
        self.objects.json.send_modify(|objects| drop(objects.insert(name, json)));
    }

    fn tokens(&self) -> MutexGuard<'_, Tokens> {
        self.tokens.lock().unwrap()
    }

    /// Creates or replaces a ConfigMap with this data.
    pub fn config_map(&self, name: &str, data: &str) {
        self.set("ConfigMap", name, Some(format!("{{\"data\": {data}}}")));
    }

    /// Creates or replaces a Secret with this data, in base64.
    pub fn secret(&self, name: &str, data: &str) {
        self.set("Secret", name, Some(format!("{{\"data\": {data}}}")));
    }

    /// Creates or replaces an object of any kind.
    pub fn object(&self, kind: &str, name: &str, json: String) {
        self.set(kind, name, Some(json));
    }

    /// Deletes an object, and reports it as missing from now on.
    pub fn delete(&self, kind: &str, name: &str) {
        self.set(kind, name, None);
    }

    /// Creates or replaces a claim or PersistentVolume.
    pub fn live(&self, kind: &str, name: &str, json: String) {
        self.live.lock().unwrap().insert((kind.to_owned(), name.to_owned()), json);
    }

    /// Deletes a claim or PersistentVolume. Returns what it was.
    pub fn delete_live(&self, kind: &str, name: &str) -> String {
        self.live.lock().unwrap().remove(&(kind.to_owned(), name.to_owned())).unwrap()
    }

    /// Refuses tokens with this status from now on.
    pub fn refuse_tokens(&self, status: Status) {
        self.tokens().refusal = Some(status);
    }

    /// Issues tokens from now on, with an issue time this many seconds ago.
    pub fn issue_tokens(&self, seconds_ago: i64) {
        let mut tokens = self.tokens();
        (tokens.refusal, tokens.issued) = (None, now() - seconds_ago);
    }

    /// Overwrites a token in a volume with one that expires in a minute. Returns its text.
    pub fn write_expiring_token(&self, path: &std::path::Path) -> String {
        let old = jwt(0, now() - 3540, 3600);
        std::fs::write(path, &old).unwrap();
        old
    }

    /// All token requests so far, refused or not.
    pub fn token_requests(&self) -> Vec<pb::CreateTokenRequest> {
        self.pod_config.create_token.requests().all()
    }

    /// The text of the token with this number, counted from 1. Refused requests count, too.
    pub fn token(&self, number: usize) -> String {
        self.tokens().texts[number - 1].clone()
    }

    /// All requests for certificates so far. They are named `req-1`, `req-2` and so on.
    pub fn certificate_requests(&self) -> Vec<pb::RequestPodCertificateRequest> {
        self.pod_config.request_pod_certificate.requests().all()
    }

    /// The objects that are watched now.
    pub fn watched(&self) -> Vec<String> {
        let watched = self.objects.watched.lock().unwrap();
        watched.iter().map(|(kind, name)| format!("{kind}/{name}")).collect()
    }

    /// Serves them at the socket of pod-config.
    pub async fn serve(&self, world: &World) -> FakeServer {
        let (objects, tokens) = (Arc::clone(&self.objects), Arc::clone(&self.tokens));
        self.pod_config.watch_objects.handle(move |watch| send_objects(Arc::clone(&objects), watch));
        self.pod_config.create_token.answer_with(move |request| tokens.lock().unwrap().create(&request));
        let number = AtomicUsize::new(self.certificate_requests().len());
        self.pod_config.request_pod_certificate.answer_with(move |_| {
            let name = format!("req-{}", number.fetch_add(1, Ordering::Relaxed) + 1);
            Ok(pb::RequestPodCertificateResponse { name })
        });
        let live = Arc::clone(&self.live);
        self.pod_config.get_live.answer_with(move |request| {
            if request.kind == "CSINode" {
                return Err(error(Code::FailedPrecondition, "NO_API_SERVER", "this node has no API server"));
            }
            let json = live.lock().unwrap().get(&(request.kind, request.name)).cloned();
            let missing = || error(Code::NotFound, "OBJECT_UNKNOWN", "it does not exist");
            json.map(|json| pb::GetLiveResponse { object_json: json.into_bytes() }).ok_or_else(missing)
        });
        let node_json = br#"{"metadata": {"name": "node"}}"#.to_vec();
        self.pod_config.watch_node.replay([pb::WatchNodeResponse { node_json, registered: false }]);
        let routes = Routes::new(self.pod_config.server());
        FakeServer::start(&world.config, ServiceName::PodConfig, routes).await.unwrap()
    }
}

impl Tokens {
    fn create(&mut self, request: &pb::CreateTokenRequest) -> Result<pb::CreateTokenResponse, Status> {
        if let Some(refusal) = &self.refusal {
            self.texts.push(String::new());
            return Err(refusal.clone());
        }
        let lifetime = request.expiration_seconds;
        let token = jwt(self.texts.len() + 1, self.issued, lifetime);
        self.texts.push(token.clone());
        Ok(pb::CreateTokenResponse {
            token,
            expires_unix_seconds: self.issued + lifetime,
            lifetime_seconds: lifetime,
        })
    }
}

fn jwt(number: usize, issued: i64, lifetime: i64) -> String {
    use base64::Engine as _;
    let claims = format!("{{\"iat\": {issued}, \"exp\": {}, \"n\": {number}}}", issued + lifetime);
    format!("e30.{}.c2ln", base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(claims))
}

/// Sends the objects that the caller watches, and their changes, until it leaves.
async fn send_objects(
    objects: Arc<Objects>,
    mut watch: Conversation<pb::WatchObjectsRequest, pb::WatchObjectsResponse>,
) -> Result<(), Status> {
    let mut json = objects.json.subscribe();
    let mut sent: BTreeMap<Name, Option<String>> = BTreeMap::new();
    let mut watched: BTreeMap<Name, pb::ObjectReference> = BTreeMap::new();
    loop {
        tokio::select! {
            request = watch.next() => {
                let Some(request) = request else { return Ok(()) };
                let name = |r: &pb::ObjectReference| (r.kind.clone(), r.name.clone());
                for reference in request.unwatch {
                    watched.remove(&name(&reference));
                    sent.remove(&name(&reference));
                }
                watched.extend(request.watch.into_iter().map(|r| (name(&r), r)));
                *objects.watched.lock().unwrap() = watched.keys().cloned().collect();
            }
            changed = json.changed() => changed.unwrap(),
        }
        let present = json.borrow_and_update().clone();
        for (name, reference) in &watched {
            let Some(now) = present.get(name).filter(|now| sent.get(name) != Some(*now)) else { continue };
            sent.insert(name.clone(), now.clone());
            let object_json = now.clone().map(String::into_bytes);
            let state = pb::ObjectState { reference: Some(reference.clone()), object_json };
            watch.send(pb::WatchObjectsResponse { item: Some(Item::Object(state)) }).await;
        }
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
