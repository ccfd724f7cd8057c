//! A node of a test: a driver on a real socket, a real root folder, and fakes of mounts, Secrets and the API server.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use futures_util::future::BoxFuture;
use keelson_proto::csi::v1 as pb;
use keelson_proto::csi::v1::node_server::{Node, NodeServer};
use keelson_service_kit::Metrics;
use keelson_volume_manager_core::claims::VolumeMode;
use keelson_volume_manager_core::csi::CsiDriver;
use keelson_volume_manager_core::csi::attachment::VolumeAttachment;
use keelson_volume_manager_core::csi::csi_node::{Allocatable, DriverEntry};
use keelson_volume_manager_core::csi::paths::{DriverName, attachment_name, unique_volume_name};
use keelson_volume_manager_core::csi::registration::Version;
use keelson_volume_manager_core::desire::{FsGroupPolicy, PodRef};
use keelson_volume_manager_core::token::{TokenName, Validity};
use keelson_volume_manager_core::world::{FailureClass, MountLabel};
use serde_json::{Value, json};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status};

use crate::csi::client::{Client, CsiMetrics};
use crate::csi::drivers::{Driver, Drivers, NodeInfo};
use crate::mounter::MountRequest;
use crate::plugins::csi::ports::{NewToken, Objects, Read, TokenIssuer};
use crate::plugins::csi::{Csi, CsiParts, MeasuredVolume};
use crate::plugins::host::{Mounts, Ownership};
use crate::plugins::secrets::{Secret, Secrets};
use crate::plugins::{
    Answer, DevicePlace, DeviceRequest, PluginError, SetUpRequest, VolumePlace, VolumeSpec,
};
use crate::walks::FsGroupWalks;

pub(super) const DRIVER: &str = "csi.example.com";
pub(super) const NODE: &str = "n1";
pub(super) const STAGE: i32 = 1;
pub(super) const STATS: i32 = 2;
pub(super) const EXPAND: i32 = 3;
pub(super) const CONDITION: i32 = 4;
pub(super) const MULTI_WRITER: i32 = 5;
pub(super) const MOUNT_GROUP: i32 = 6;
pub(super) const UNLABELLED: &MountLabel = &MountLabel::Unlabelled;

/// A call that the driver has got.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Call {
    Stage(pb::NodeStageVolumeRequest),
    Unstage(pb::NodeUnstageVolumeRequest),
    Publish(pb::NodePublishVolumeRequest),
    Unpublish(pb::NodeUnpublishVolumeRequest),
    Expand(pb::NodeExpandVolumeRequest),
    Stats(pb::NodeGetVolumeStatsRequest),
}

impl Call {
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Stage(_) => "stage",
            Self::Unstage(_) => "unstage",
            Self::Publish(_) => "publish",
            Self::Unpublish(_) => "unpublish",
            Self::Expand(_) => "expand",
            Self::Stats(_) => "stats",
        }
    }
}

/// What the driver does.
#[derive(Debug, Default)]
pub(super) struct Script {
    pub(super) capabilities: Vec<i32>,
    /// The error of every call with a name.
    pub(super) errors: BTreeMap<&'static str, Status>,
    /// Reports success and does nothing.
    pub(super) lies: bool,
    pub(super) calls: Vec<Call>,
    /// The data files that exist when a call arrives.
    pub(super) data_at_call: Vec<Option<Value>>,
    pub(super) stats: pb::NodeGetVolumeStatsResponse,
    pub(super) expanded_to: i64,
}

/// A driver that keeps its mounts in [`FakeMounts`].
#[derive(Debug, Clone)]
struct FakeNode {
    script: Arc<Mutex<Script>>,
    mounts: Arc<FakeMounts>,
}

impl FakeNode {
    /// Records a call, and says whether to do something.
    fn record(&self, call: Call, data_file: Option<PathBuf>) -> Result<bool, Status> {
        let mut script = self.script.lock().unwrap();
        let data = data_file.and_then(|file| fs::read(file).ok());
        script.data_at_call.push(data.map(|bytes| serde_json::from_slice(&bytes).unwrap()));
        let name = call.name();
        script.calls.push(call);
        match script.errors.get(name) {
            Some(status) => Err(status.clone()),
            None => Ok(!script.lies),
        }
    }
}

fn beside(target: &str) -> Option<PathBuf> {
    Some(Path::new(target).parent()?.join("vol_data.json"))
}

type Reply<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl Node for FakeNode {
    async fn node_stage_volume(
        &self,
        request: Request<pb::NodeStageVolumeRequest>,
    ) -> Reply<pb::NodeStageVolumeResponse> {
        let request = request.into_inner();
        let staging = PathBuf::from(&request.staging_target_path);
        let data = beside(&request.staging_target_path);
        if self.record(Call::Stage(request), data)? {
            assert!(staging.is_dir(), "the agent creates the staging folder");
            self.mounts.add(&staging);
        }
        Ok(Response::new(pb::NodeStageVolumeResponse {}))
    }

    async fn node_unstage_volume(
        &self,
        request: Request<pb::NodeUnstageVolumeRequest>,
    ) -> Reply<pb::NodeUnstageVolumeResponse> {
        let request = request.into_inner();
        let staging = PathBuf::from(&request.staging_target_path);
        if self.record(Call::Unstage(request), None)? {
            self.mounts.remove(&staging);
        }
        Ok(Response::new(pb::NodeUnstageVolumeResponse {}))
    }

    async fn node_publish_volume(
        &self,
        request: Request<pb::NodePublishVolumeRequest>,
    ) -> Reply<pb::NodePublishVolumeResponse> {
        use pb::volume_capability::AccessType;
        let request = request.into_inner();
        let target = PathBuf::from(&request.target_path);
        let data = beside(&request.target_path);
        let access = request.volume_capability.clone().and_then(|capability| capability.access_type);
        if self.record(Call::Publish(request), data)? {
            match access {
                Some(AccessType::Mount(_)) => fs::create_dir_all(&target).unwrap(),
                Some(AccessType::Block(_)) => fs::write(&target, b"").unwrap(),
                None => return Err(Status::invalid_argument("no access type")),
            }
            self.mounts.add(&target);
        }
        Ok(Response::new(pb::NodePublishVolumeResponse {}))
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<pb::NodeUnpublishVolumeRequest>,
    ) -> Reply<pb::NodeUnpublishVolumeResponse> {
        let request = request.into_inner();
        let target = PathBuf::from(&request.target_path);
        if self.record(Call::Unpublish(request), None)? {
            self.mounts.remove(&target);
        }
        Ok(Response::new(pb::NodeUnpublishVolumeResponse {}))
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<pb::NodeGetVolumeStatsRequest>,
    ) -> Reply<pb::NodeGetVolumeStatsResponse> {
        self.record(Call::Stats(request.into_inner()), None)?;
        Ok(Response::new(self.script.lock().unwrap().stats.clone()))
    }

    async fn node_expand_volume(
        &self,
        request: Request<pb::NodeExpandVolumeRequest>,
    ) -> Reply<pb::NodeExpandVolumeResponse> {
        self.record(Call::Expand(request.into_inner()), None)?;
        let capacity_bytes = self.script.lock().unwrap().expanded_to;
        Ok(Response::new(pb::NodeExpandVolumeResponse { capacity_bytes }))
    }

    async fn node_get_capabilities(
        &self,
        _: Request<pb::NodeGetCapabilitiesRequest>,
    ) -> Reply<pb::NodeGetCapabilitiesResponse> {
        use pb::node_service_capability::{Rpc, Type};
        let capability =
            |number: &i32| pb::NodeServiceCapability { r#type: Some(Type::Rpc(Rpc { r#type: *number })) };
        let script = self.script.lock().unwrap();
        if let Some(status) = script.errors.get("capabilities") {
            return Err(status.clone());
        }
        let capabilities = script.capabilities.iter().map(capability).collect();
        Ok(Response::new(pb::NodeGetCapabilitiesResponse { capabilities }))
    }

    async fn node_get_info(&self, _: Request<pb::NodeGetInfoRequest>) -> Reply<pb::NodeGetInfoResponse> {
        Err(Status::unimplemented("not used"))
    }
}

/// The mounts of the node.
#[derive(Debug, Default)]
pub(super) struct FakeMounts {
    mounts: Mutex<BTreeSet<PathBuf>>,
    pub(super) references: Mutex<Vec<PathBuf>>,
    /// The options of filesystems, by mount point.
    pub(super) options: Mutex<BTreeMap<PathBuf, String>>,
    pub(super) walks: Mutex<Vec<(PathBuf, u32, FsGroupPolicy)>>,
    pub(super) walk_error: Mutex<Option<PluginError>>,
}

impl FakeMounts {
    pub(super) fn add(&self, path: &Path) {
        self.mounts.lock().unwrap().insert(path.to_owned());
    }

    pub(super) fn remove(&self, path: &Path) {
        self.mounts.lock().unwrap().remove(path);
    }
}

impl Mounts for FakeMounts {
    fn format_and_mount<'a>(&'a self, _: MountRequest<'a>) -> Answer<'a, ()> {
        unreachable!("drivers mount")
    }

    fn bind<'a>(&'a self, _: &'a Path, _: &'a Path, _: &'a [String]) -> Answer<'a, ()> {
        unreachable!("drivers mount")
    }

    fn is_mount_point(&self, path: &Path) -> Result<bool, PluginError> {
        Ok(self.mounts.lock().unwrap().contains(path))
    }

    fn filesystem_options(&self, path: &Path) -> Result<String, PluginError> {
        Ok(self.options.lock().unwrap().get(path).cloned().unwrap_or_default())
    }

    fn exists<'a>(&'a self, path: &'a Path) -> Answer<'a, bool> {
        Box::pin(async move { path.try_exists().map_err(|error| PluginError::new(error.to_string())) })
    }

    fn clean_mount_point<'a>(&'a self, _: &'a Path) -> Answer<'a, ()> {
        unreachable!("drivers unmount")
    }

    fn mount_references(&self, _: &Path) -> Result<Vec<PathBuf>, PluginError> {
        Ok(self.references.lock().unwrap().clone())
    }

    fn create_folders<'a>(&'a self, _: &'a Path) -> Answer<'a, ()> {
        unreachable!("these folders are on the node's own filesystem")
    }

    fn apply_fs_group<'a>(&'a self, path: &'a Path, ownership: Ownership<'a>) -> Answer<'a, ()> {
        self.walks.lock().unwrap().push((path.to_owned(), ownership.group, ownership.policy));
        let error = self.walk_error.lock().unwrap().clone();
        Box::pin(async move { error.map_or(Ok(()), Err) })
    }
}

/// The API server.
#[derive(Debug, Default)]
pub(super) struct FakeApi {
    pub(super) driver: Mutex<Option<CsiDriver>>,
    pub(super) driver_error: Mutex<Option<String>>,
    /// Reads of CSIDrivers are not answered.
    pub(super) driver_hangs: Mutex<bool>,
    pub(super) driver_reads: Mutex<usize>,
    pub(super) attachments: Mutex<BTreeMap<String, VolumeAttachment>>,
    pub(super) attachment_error: Mutex<Option<String>>,
    pub(super) secrets: Mutex<BTreeMap<String, Secret>>,
    pub(super) tokens: Mutex<Vec<TokenName>>,
    pub(super) token_error: Mutex<Option<String>>,
    /// Seconds that new tokens are valid.
    pub(super) token_lifetime: Mutex<i64>,
}

impl Objects for FakeApi {
    fn csi_driver<'a>(&'a self, _: &'a str) -> Read<'a, CsiDriver> {
        *self.driver_reads.lock().unwrap() += 1;
        let error = self.driver_error.lock().unwrap().clone();
        let object = self.driver.lock().unwrap().clone();
        let hangs = *self.driver_hangs.lock().unwrap();
        Box::pin(async move {
            if hangs {
                std::future::pending::<()>().await;
            }
            error.map_or(Ok(object), Err)
        })
    }

    fn attachment<'a>(&'a self, name: &'a str) -> Read<'a, VolumeAttachment> {
        let error = self.attachment_error.lock().unwrap().clone();
        let object = self.attachments.lock().unwrap().get(name).cloned();
        Box::pin(async move { error.map_or(Ok(object), Err) })
    }
}

impl Secrets for FakeApi {
    fn read<'a>(&'a self, namespace: &'a str, name: &'a str) -> Answer<'a, Secret> {
        let secret = self.secrets.lock().unwrap().get(&format!("{namespace}/{name}")).cloned();
        let error =
            move || PluginError::new(format!("cannot read the Secret {namespace}/{name}: it does not exist"));
        Box::pin(async move { secret.ok_or_else(error) })
    }
}

impl TokenIssuer for FakeApi {
    fn issue<'a>(&'a self, _: &'a PodRef, name: &'a TokenName) -> BoxFuture<'a, Result<NewToken, String>> {
        let error = self.token_error.lock().unwrap().clone();
        let mut tokens = self.tokens.lock().unwrap();
        tokens.push(name.clone());
        let lifetime = *self.token_lifetime.lock().unwrap();
        let now = keelson_service_kit::now_unix_nanos() / 1_000_000_000;
        let token = NewToken {
            text: format!("secret-token-{}", tokens.len()),
            validity: Validity { issued: now, expires: now + lifetime },
        };
        Box::pin(async move { error.map_or(Ok(token), Err) })
    }
}

/// The node.
pub(super) struct World {
    pub(super) folder: tempfile::TempDir,
    pub(super) script: Arc<Mutex<Script>>,
    pub(super) mounts: Arc<FakeMounts>,
    pub(super) api: Arc<FakeApi>,
    pub(super) drivers: Drivers,
    pub(super) csi: Csi,
    pub(super) walks: FsGroupWalks,
    metrics: Metrics,
    server: tokio::task::JoinHandle<()>,
}

impl Drop for World {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl World {
    /// A node whose driver is registered and has these capabilities. Its volumes need not be attached.
    pub(super) fn new(capabilities: &[i32]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("csi.sock");
        let script =
            Arc::new(Mutex::new(Script { capabilities: capabilities.to_vec(), ..Script::default() }));
        let mounts = Arc::new(FakeMounts::default());
        let node = FakeNode { script: Arc::clone(&script), mounts: Arc::clone(&mounts) };
        let listener = tokio::net::UnixListener::bind(&socket).unwrap();
        let server = tokio::spawn(async move {
            let server = tonic::transport::Server::builder().add_service(NodeServer::new(node));
            server.serve_with_incoming(UnixListenerStream::new(listener)).await.unwrap();
        });
        let metrics = Metrics::new();
        let drivers = Drivers::new(CsiMetrics::register(&metrics), folder.path());
        let api = Arc::new(FakeApi::default());
        *api.token_lifetime.lock().unwrap() = 3600;
        let root = folder.path().join("root");
        fs::create_dir(&root).unwrap();
        let csi = Csi::new(CsiParts {
            root,
            node: NODE.to_owned(),
            drivers: drivers.clone(),
            mounts: mounts.clone(),
            secrets: api.clone(),
            objects: api.clone(),
            tokens: api.clone(),
        });
        let world = Self {
            folder,
            script,
            mounts,
            api,
            drivers,
            csi,
            walks: FsGroupWalks::default(),
            metrics,
            server,
        };
        world.register(&socket);
        world.set_driver(json!({"attachRequired": false}));
        world
    }

    fn register(&self, socket: &Path) {
        let name = DriverName::parse(DRIVER).unwrap();
        let entry = DriverEntry {
            name: name.clone(),
            node_id: NODE.to_owned(),
            topology_keys: BTreeSet::new(),
            allocatable: Allocatable::Unlimited,
        };
        let client = Client::new(name.clone(), socket, self.drivers.metrics().clone());
        let info = NodeInfo { entry, topology: BTreeMap::new() };
        let version = Version::parse("1.0.0").unwrap();
        self.drivers
            .add(&Driver::new(name, version, self.folder.path().join("reg.sock"), client, info))
            .unwrap();
    }

    pub(super) fn unregister(&self) {
        assert!(
            self.drivers.remove(&DriverName::parse(DRIVER).unwrap(), &self.folder.path().join("reg.sock"))
        );
    }

    pub(super) fn register_again(&self) {
        self.register(&self.folder.path().join("csi.sock"));
    }

    /// How often the node had no room for another volume of the driver.
    pub(super) fn exhaustions(&self) -> u64 {
        self.drivers.exhaustions().borrow().values().sum()
    }

    /// The values of the label `migrated` of the calls of a method.
    pub(super) fn migrated(&self, method: &str) -> Vec<String> {
        let text = self.metrics.text();
        let of_method = |line: &&str| {
            line.starts_with("csi_operations_seconds_count")
                && line.contains(&format!("/csi.v1.Node/{method}\""))
        };
        let label = |line: &str| Some(line.split_once("migrated=\"")?.1.split_once('"')?.0.to_owned());
        text.lines().filter(of_method).filter_map(label).collect()
    }

    /// Creates or replaces the CSIDriver.
    pub(super) fn set_driver(&self, spec: Value) {
        let object = serde_json::from_value(json!({"metadata": {"name": DRIVER}, "spec": spec})).unwrap();
        *self.api.driver.lock().unwrap() = Some(object);
    }

    pub(super) fn set_attachment(&self, handle: &str, object: Value) {
        let name = attachment_name(handle, &DriverName::parse(DRIVER).unwrap(), NODE);
        self.api.attachments.lock().unwrap().insert(name, serde_json::from_value(object).unwrap());
    }

    pub(super) fn set_secret(&self, name: &str, key: &str, base64: &str) {
        let secret = serde_json::from_value(json!({"data": {key: base64}})).unwrap();
        self.api.secrets.lock().unwrap().insert(name.to_owned(), secret);
    }

    pub(super) fn fail(&self, call: &'static str, code: i32) {
        let status = Status::new(tonic::Code::from_i32(code), "made to fail");
        self.script.lock().unwrap().errors.insert(call, status);
    }

    pub(super) fn succeed(&self) {
        self.script.lock().unwrap().errors.clear();
    }

    pub(super) fn root(&self) -> PathBuf {
        self.folder.path().join("root")
    }

    pub(super) fn calls(&self) -> Vec<Call> {
        self.script.lock().unwrap().calls.clone()
    }

    /// The names of the calls since the last time.
    pub(super) fn take_calls(&self) -> Vec<&'static str> {
        let calls = std::mem::take(&mut self.script.lock().unwrap().calls);
        calls.iter().map(Call::name).collect()
    }

    pub(super) fn last_publish(&self) -> pb::NodePublishVolumeRequest {
        let publish =
            |call: &Call| if let Call::Publish(request) = call { Some(request.clone()) } else { None };
        self.calls().iter().rev().find_map(publish).expect("the volume was published")
    }

    pub(super) fn last_stage(&self) -> pb::NodeStageVolumeRequest {
        let stage = |call: &Call| if let Call::Stage(request) = call { Some(request.clone()) } else { None };
        self.calls().iter().rev().find_map(stage).expect("the volume was staged")
    }

    pub(super) fn set_up_request(&self) -> SetUpRequest<'_> {
        SetUpRequest {
            device_path: None,
            device_mount_path: None,
            label: UNLABELLED,
            is_remount: false,
            is_reconstructed: false,
            walks: &self.walks,
        }
    }

    /// Every entry below the root folder, sorted, without what is mounted.
    pub(super) fn files(&self) -> Vec<String> {
        let mut found = Vec::new();
        collect(&self.root(), &self.root(), &mut found);
        found.sort();
        found
    }

    /// The files among [`Self::files`].
    pub(super) fn data_files(&self) -> Vec<String> {
        self.files().into_iter().filter(|path| path.ends_with(".json")).collect()
    }
}

fn collect(root: &Path, folder: &Path, found: &mut Vec<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        found.push(path.strip_prefix(root).unwrap().to_str().unwrap().to_owned());
        if path.is_dir() {
            collect(root, &path, found);
        }
    }
}

pub(super) const fn device_request() -> DeviceRequest<'static> {
    DeviceRequest { device_path: None, label: UNLABELLED }
}

/// A volume of the pod `uid` through a claim; `csi` adds to its source.
pub(super) fn persistent(uid: &str, csi: &Value) -> VolumeSpec {
    let mut source = json!({"driver": DRIVER, "volumeHandle": "vol-1"});
    source.as_object_mut().unwrap().extend(csi.as_object().unwrap().clone());
    let volume =
        json!({"metadata": {"name": "pv1"}, "spec": {"accessModes": ["ReadWriteOnce"], "csi": source}});
    VolumeSpec {
        inner_name: "pv1".to_owned(),
        persistent: Some(Arc::new(serde_json::from_value(volume).unwrap())),
        claim: Some("claim".to_owned()),
        ..inline(uid, &source)
    }
}

/// A volume of the pod `uid` without a claim; `csi` is its source.
pub(super) fn inline(uid: &str, csi: &Value) -> VolumeSpec {
    VolumeSpec {
        pod: PodRef { uid: uid.to_owned(), namespace: "ns".to_owned(), name: "p".to_owned() },
        service_account: "sa".to_owned(),
        outer_name: "data".to_owned(),
        inner_name: "data".to_owned(),
        field: "csi".to_owned(),
        source: csi.clone(),
        persistent: None,
        claim: None,
        claim_size: None,
        mode: VolumeMode::Filesystem,
        read_only: false,
        is_migrated: false,
        mount_options: Vec::new(),
        fs_group: None,
        fs_group_policy: FsGroupPolicy::Always,
    }
}

pub(super) fn block(uid: &str) -> VolumeSpec {
    VolumeSpec { mode: VolumeMode::Block, ..persistent(uid, &json!({})) }
}

pub(super) fn measured(spec: &VolumeSpec) -> MeasuredVolume {
    let VolumePlace { pod, inner_name, is_block, .. } = place(spec);
    MeasuredVolume { pod, inner_name, is_block }
}

pub(super) fn place(spec: &VolumeSpec) -> VolumePlace {
    VolumePlace {
        volume: volume_name().as_str().into(),
        pod: spec.pod.uid.as_str().into(),
        plugin: "kubernetes.io/csi".to_owned(),
        inner_name: spec.inner_name.clone(),
        is_block: spec.mode == VolumeMode::Block,
    }
}

pub(super) fn device(spec: &VolumeSpec) -> DevicePlace {
    DevicePlace {
        volume: volume_name().as_str().into(),
        inner_name: spec.inner_name.clone(),
        is_block: spec.mode == VolumeMode::Block,
        device_path: None,
        device_mount_path: None,
    }
}

fn volume_name() -> String {
    unique_volume_name(&DriverName::parse(DRIVER).unwrap(), "vol-1")
}

pub(super) fn map(pairs: &[(&str, &str)]) -> HashMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

/// Every code that a driver may fail with, and the class of the error (volumes.md §11.3).
pub(super) const CLASSES: [(i32, FailureClass); 16] = [
    (1, FailureClass::Uncertain),
    (2, FailureClass::Final),
    (3, FailureClass::Final),
    (4, FailureClass::Uncertain),
    (5, FailureClass::Final),
    (6, FailureClass::Final),
    (7, FailureClass::Final),
    (8, FailureClass::Uncertain),
    (9, FailureClass::Final),
    (10, FailureClass::Uncertain),
    (11, FailureClass::Final),
    (12, FailureClass::Final),
    (13, FailureClass::Final),
    (14, FailureClass::Uncertain),
    (15, FailureClass::Final),
    (16, FailureClass::Final),
];
