//! The service is killed at each call of a CSI driver, before and after the driver's work: a volume ends up mounted once, or
//! nothing of it is left. The service is a process of its own; the driver mounts folders.

use std::collections::BTreeSet;
use std::fs;
use std::future::pending;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use keelson_proto::csi::v1 as csi;
use keelson_proto::keelson::common::v1::Want;
use keelson_proto::pluginregistration as registration;
use keelson_testkit::fakes::{FakeCsiNode, FakePluginRegistration, FakeServer};
use rustix::mount::UnmountFlags;
use serde_json::json;
use tokio::sync::Semaphore;
use tonic::Status;
use tonic::service::Routes;

use crate::node::{Node, claimed};
use crate::support::{LONG, Sync, desire, mount, mounts, mounts_below, unmount};
use crate::until;

const DRIVER: &str = "csi.example.com";
/// The size of the volumes, and of their claims, in GiB.
const SIZES: (i64, i64) = (2, 1);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moment {
    BeforeWork,
    AfterWork,
}

const MOMENTS: [Moment; 2] = [Moment::BeforeWork, Moment::AfterWork];

/// What the driver knows, apart from mounts.
#[derive(Default)]
struct State {
    staged: BTreeSet<String>,
    /// Volume and target path.
    published: BTreeSet<(String, String)>,
    size: i64,
    /// Method and volume of each call that did its work.
    calls: Vec<(&'static str, String)>,
    /// Calls that no agent may make in the state of the volume.
    wrong: Vec<String>,
    /// The call that does not end, and when.
    hold: Option<(&'static str, Moment)>,
}

/// A driver with the capabilities to stage and to expand volumes. It registers with the agent at each of its starts.
struct Driver {
    state: Arc<Mutex<State>>,
    held: Arc<Semaphore>,
    disk: PathBuf,
    _servers: [FakeServer; 2],
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap()
}

fn is_mounted(path: &Path) -> bool {
    mounts().iter().any(|mount| mount.point == path)
}

fn bind(source: &Path, target: &str) {
    let target = Path::new(target);
    fs::create_dir_all(target).unwrap();
    if !is_mounted(target) {
        rustix::mount::mount_bind(source, target).unwrap();
    }
}

fn unbind(target: &str) {
    while is_mounted(Path::new(target)) {
        rustix::mount::unmount(target, UnmountFlags::empty()).unwrap();
    }
}

impl State {
    fn stage(&mut self, request: &csi::NodeStageVolumeRequest, disk: &Path) -> csi::NodeStageVolumeResponse {
        bind(disk, &request.staging_target_path);
        self.staged.insert(request.volume_id.clone());
        csi::NodeStageVolumeResponse {}
    }

    fn unstage(
        &mut self,
        request: &csi::NodeUnstageVolumeRequest,
        _: &Path,
    ) -> csi::NodeUnstageVolumeResponse {
        if self.published.iter().any(|(volume, _)| *volume == request.volume_id) {
            self.wrong.push(format!("unstaged while published: {request:?}"));
        }
        unbind(&request.staging_target_path);
        self.staged.remove(&request.volume_id);
        csi::NodeUnstageVolumeResponse {}
    }

    fn publish(
        &mut self,
        request: &csi::NodePublishVolumeRequest,
        disk: &Path,
    ) -> csi::NodePublishVolumeResponse {
        if !self.staged.contains(&request.volume_id) {
            self.wrong.push(format!("published before it was staged: {request:?}"));
        }
        bind(disk, &request.target_path);
        self.published.insert((request.volume_id.clone(), request.target_path.clone()));
        csi::NodePublishVolumeResponse {}
    }

    fn unpublish(
        &mut self,
        request: &csi::NodeUnpublishVolumeRequest,
        _: &Path,
    ) -> csi::NodeUnpublishVolumeResponse {
        unbind(&request.target_path);
        let _ = fs::remove_dir(&request.target_path);
        self.published.remove(&(request.volume_id.clone(), request.target_path.clone()));
        csi::NodeUnpublishVolumeResponse {}
    }

    fn expand(&mut self, request: &csi::NodeExpandVolumeRequest, _: &Path) -> csi::NodeExpandVolumeResponse {
        if !is_mounted(Path::new(&request.volume_path)) {
            self.wrong.push(format!("expanded while not published: {request:?}"));
        }
        let capacity_bytes = request.capacity_range.as_ref().unwrap().required_bytes;
        self.size = capacity_bytes;
        csi::NodeExpandVolumeResponse { capacity_bytes }
    }
}

/// Scripts a method: it does `work`, unless the call is held.
macro_rules! script {
    ($driver:expr, $node:expr, $method:ident, $name:literal, $work:expr) => {
        let (state, held, disk) =
            (Arc::clone(&$driver.state), Arc::clone(&$driver.held), $driver.disk.clone());
        $node.$method.answer_async(move |request| {
            let (state, held, disk) = (Arc::clone(&state), Arc::clone(&held), disk.clone());
            async move {
                let hold = lock(&state).hold.take_if(|(name, _)| *name == $name).map(|(_, moment)| moment);
                if hold == Some(Moment::BeforeWork) {
                    held.add_permits(1);
                    return pending().await;
                }
                let answer = {
                    let mut state = lock(&state);
                    state.calls.push(($name, request.volume_id.clone()));
                    $work(&mut state, &request, &disk)
                };
                if hold == Some(Moment::AfterWork) {
                    held.add_permits(1);
                    return pending().await;
                }
                Ok::<_, Status>(answer)
            }
        });
    };
}

impl Driver {
    async fn start(node: &Node) -> Self {
        let base = node.world.config.paths.root_dir.parent().unwrap().join("driver");
        let disk = base.join("disk");
        fs::create_dir_all(&disk).unwrap();
        fs::write(disk.join("file"), "data").unwrap();
        let registry = node.world.config.paths.root_dir.join("plugins_registry");
        fs::create_dir_all(&registry).unwrap();
        let (api, plugin) = (FakeCsiNode::default(), FakePluginRegistration::default());
        let endpoint = base.join("csi.sock");
        plugin.get_info.answer(registration::PluginInfo {
            r#type: "CSIPlugin".into(),
            name: DRIVER.into(),
            endpoint: endpoint.display().to_string(),
            supported_versions: vec!["1.0.0".into()],
        });
        plugin.notify_registration_status.answer(registration::RegistrationStatusResponse {});
        let servers = [
            FakeServer::at(&endpoint, Routes::new(api.server())).await.unwrap(),
            FakeServer::at(&registry.join("driver-reg.sock"), Routes::new(plugin.server())).await.unwrap(),
        ];
        let driver =
            Self { state: Arc::default(), held: Arc::new(Semaphore::new(0)), disk, _servers: servers };
        driver.serve(&api);
        driver
    }

    fn serve(&self, api: &FakeCsiNode) {
        use csi::node_service_capability::{Rpc, Type, rpc};
        let has = |rpc: rpc::Type| csi::NodeServiceCapability {
            r#type: Some(Type::Rpc(Rpc { r#type: rpc.into() })),
        };
        let capabilities = [rpc::Type::StageUnstageVolume, rpc::Type::ExpandVolume].map(has).to_vec();
        api.node_get_capabilities.answer(csi::NodeGetCapabilitiesResponse { capabilities });
        api.node_get_info.answer(csi::NodeGetInfoResponse {
            node_id: "node".into(),
            ..csi::NodeGetInfoResponse::default()
        });
        script!(self, api, node_stage_volume, "stage", State::stage);
        script!(self, api, node_unstage_volume, "unstage", State::unstage);
        script!(self, api, node_publish_volume, "publish", State::publish);
        script!(self, api, node_unpublish_volume, "unpublish", State::unpublish);
        script!(self, api, node_expand_volume, "expand", State::expand);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn hold(&self, call: &'static str, moment: Moment) {
        self.state().hold = Some((call, moment));
    }

    async fn until_held(&self, what: &str) {
        until(&format!("{what}: the call"), || self.held.available_permits() > 0).await;
    }

    /// The calls for a volume that did their work.
    fn calls(&self, volume: &str) -> Vec<&'static str> {
        self.state().calls.iter().filter(|(_, id)| id == volume).map(|(name, _)| *name).collect()
    }

    /// The machine has rebooted: nothing is mounted, and the driver knows of no volume.
    fn reboot(&self, root: &Path) {
        for point in mounts_below(root).into_iter().rev().filter(|point| point != root) {
            rustix::mount::unmount(&point, UnmountFlags::empty()).unwrap();
        }
        let mut state = self.state();
        (state.staged, state.published) = (BTreeSet::new(), BTreeSet::new());
    }
}

fn root(node: &Node) -> &Path {
    &node.world.config.paths.root_dir
}

/// Creates a bound claim with a PersistentVolume of the driver.
fn add_volume(node: &Node, name: &str) {
    let size = |gib: i64| format!("{gib}Gi");
    let volume = json!({
        "metadata": {"name": name, "uid": format!("pv-{name}")},
        "spec": {
            "accessModes": ["ReadWriteOnce"], "capacity": {"storage": size(SIZES.0)}, "volumeMode": "Filesystem",
            "claimRef": {"namespace": "default", "name": name, "uid": format!("claim-{name}")},
            "csi": {"driver": DRIVER, "volumeHandle": name},
        },
    });
    let claim = json!({
        "metadata": {"name": name, "namespace": "default", "uid": format!("claim-{name}")},
        "spec": {
            "accessModes": ["ReadWriteOnce"], "volumeName": name,
            "resources": {"requests": {"storage": size(SIZES.0)}},
        },
        "status": {"phase": "Bound", "capacity": {"storage": size(SIZES.1)}},
    });
    node.api.live("PersistentVolume", name, volume.to_string());
    node.api.live("PersistentVolumeClaim", name, claim.to_string());
}

fn folder(node: &Node, uid: &str, volume: &str) -> PathBuf {
    node.world.volume(uid, "csi", volume)
}

/// The folders of staged volumes.
fn staged(node: &Node) -> Vec<PathBuf> {
    let folder = root(node).join("plugins/kubernetes.io/csi").join(DRIVER);
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

fn count(path: &Path) -> usize {
    mounts().iter().filter(|mount| mount.point == path).count()
}

/// The volume is staged and published, each with one mount and its data file.
fn assert_mounted_once(node: &Node, driver: &Driver, what: &str) {
    let published = folder(node, "u1", "data");
    let staged = staged(node);
    assert_eq!(staged.len(), 1, "{what}: {staged:?}");
    assert_eq!((count(&published.join("mount")), count(&staged[0].join("globalmount"))), (1, 1), "{what}");
    assert_eq!(fs::read_to_string(published.join("mount/file")).unwrap(), "data", "{what}");
    for folder in [&published, &staged[0]] {
        assert!(folder.join("vol_data.json").exists(), "{what}: {folder:?}");
    }
    let state = driver.state();
    assert_eq!((state.staged.len(), state.published.len()), (1, 1), "{what}: {:?}", state.calls);
}

async fn until_nothing_is_left(node: &Node, driver: &Driver, what: &str) {
    let is_root = |point: &PathBuf| point == root(node);
    let is_gone = || {
        let state = driver.state();
        state.staged.is_empty()
            && state.published.is_empty()
            && staged(node).is_empty()
            && !folder(node, "u1", "data").exists()
            && mounts_below(root(node)).iter().all(is_root)
    };
    until(&format!("{what}: nothing is left"), is_gone).await;
    let calls = driver.calls("data");
    if let Some(last) = calls.last() {
        assert_eq!(*last, "unstage", "{what}: {calls:?}");
    }
}

/// Kills the service in a call. `is_wanted`: its pod is still there when the service has been restarted.
async fn kill_in(call: &'static str, moment: Moment, is_wanted: bool) {
    let what = format!("{call}, {moment:?}, wanted: {is_wanted}");
    let mut node = Node::new().await;
    add_volume(&node, "data");
    let driver = Driver::start(&node).await;
    driver.hold(call, moment);
    let ends = ["unpublish", "unstage"].contains(&call);
    let pod = |revision, want| desire("u1", revision, want, vec![claimed("data")]);
    {
        let mut client = node.start().await;
        let mut sync = Sync::open(&mut client).await;
        sync.pod(pod(1, Want::Run)).await;
        sync.complete(1, true).await;
        if ends {
            mount(&mut client, "u1", 1).await.1.unwrap();
            sync.pod(pod(2, Want::Unmount)).await;
        }
        driver.until_held(&what).await;
        node.kill();
    }
    let mut client = node.start().await;
    let mut sync = Sync::open(&mut client).await;
    if is_wanted && !ends {
        sync.pod(pod(1, Want::Run)).await;
        sync.complete(1, true).await;
        mount(&mut client, "u1", 1).await.1.unwrap();
        until(&format!("{what}: the expansion"), || driver.state().size == SIZES.0 << 30).await;
        assert_mounted_once(&node, &driver, &what);
    }
    if is_wanted {
        sync.pod(pod(2, Want::Unmount)).await;
        sync.complete(2, true).await;
        unmount(&mut client, "u1", LONG).await.unwrap();
    } else {
        sync.complete(1, true).await;
        until(&format!("{what}: the removal of the pod"), || !node.world.pod("u1").exists()).await;
    }
    until_nothing_is_left(&node, &driver, &what).await;
    assert_eq!(driver.state().wrong, Vec::<String>::new(), "{what}");
}

#[tokio::test]
async fn a_csi_volume_is_mounted_once_after_sigkill_in_any_call_of_its_set_up() {
    for call in ["stage", "publish", "expand"] {
        for moment in MOMENTS {
            kill_in(call, moment, true).await;
        }
    }
}

#[tokio::test]
async fn a_csi_volume_of_a_gone_pod_is_removed_after_sigkill_in_any_call_of_its_set_up() {
    for call in ["stage", "publish", "expand"] {
        for moment in MOMENTS {
            kill_in(call, moment, false).await;
        }
    }
}

#[tokio::test]
async fn a_csi_volume_is_removed_after_sigkill_in_any_call_of_its_teardown() {
    for call in ["unpublish", "unstage"] {
        for moment in MOMENTS {
            for is_wanted in [true, false] {
                kill_in(call, moment, is_wanted).await;
            }
        }
    }
}

/// Killed after it has created the staging folder, with the data file half written beside its name.
#[tokio::test]
async fn a_csi_volume_is_staged_after_sigkill_while_its_vol_data_is_written() {
    let mut node = Node::new().await;
    add_volume(&node, "data");
    let driver = Driver::start(&node).await;
    // The name of the folder is learned from a first mount.
    let pod = |revision, want| desire("u1", revision, want, vec![claimed("data")]);
    let mut client = node.start().await;
    let mut sync = Sync::open(&mut client).await;
    sync.pod(pod(1, Want::Run)).await;
    sync.complete(1, true).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    let folders = [staged(&node).remove(0), folder(&node, "u1", "data")];
    sync.pod(pod(2, Want::Unmount)).await;
    until_nothing_is_left(&node, &driver, "the first mount").await;
    node.kill();
    drop(sync);
    fs::create_dir_all(folders[0].join("globalmount")).unwrap();
    for folder in &folders {
        fs::create_dir_all(folder).unwrap();
        fs::write(folder.join("vol_data.json.new"), "{\"driverNa").unwrap();
    }
    let mut client = node.start().await;
    let mut sync = Sync::open(&mut client).await;
    sync.pod(pod(3, Want::Run)).await;
    sync.complete(1, true).await;
    mount(&mut client, "u1", 3).await.1.unwrap();
    assert_mounted_once(&node, &driver, "half written");
    sync.pod(pod(4, Want::Unmount)).await;
    unmount(&mut client, "u1", LONG).await.unwrap();
    until_nothing_is_left(&node, &driver, "half written").await;
    assert_eq!(driver.state().wrong, Vec::<String>::new());
}

/// Killed after it has created the staging folder and before the data file; the pod is gone when it starts again.
#[tokio::test]
async fn staging_folder_without_vol_data_of_a_gone_pod_is_removed_after_sigkill() {
    let mut node = Node::new().await;
    add_volume(&node, "data");
    let driver = Driver::start(&node).await;
    // The name of the folder is learned from a first mount.
    let pod = |revision, want| desire("u1", revision, want, vec![claimed("data")]);
    let mut client = node.start().await;
    let mut sync = Sync::open(&mut client).await;
    sync.pod(pod(1, Want::Run)).await;
    sync.complete(1, true).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    let folder = staged(&node).remove(0);
    sync.pod(pod(2, Want::Unmount)).await;
    until_nothing_is_left(&node, &driver, "the first mount").await;
    // The service looks at the old data file before it writes the new one, and a pipe without a writer holds it up there.
    fs::create_dir(&folder).unwrap();
    let data_file = folder.join("vol_data.json");
    rustix::fs::mkfifoat(rustix::fs::CWD, &data_file, rustix::fs::Mode::RUSR).unwrap();
    sync.pod(pod(3, Want::Run)).await;
    until("the staging folder", || folder.join("globalmount").is_dir()).await;
    node.kill();
    drop(sync);
    fs::remove_file(&data_file).unwrap();
    let calls = driver.calls("data");

    let mut client = node.start().await;
    let mut sync = Sync::open(&mut client).await;
    sync.complete(1, true).await;
    until("the removal of the pod", || !node.world.pod("u1").exists()).await;
    until_nothing_is_left(&node, &driver, "killed before the data file").await;
    assert_eq!(driver.calls("data"), calls, "the driver has nothing to do");
    assert_eq!(driver.state().wrong, Vec::<String>::new());
}

/// Killed while it has written the data file of a pod's volume; the pod is gone when it starts again.
#[tokio::test]
async fn a_half_written_vol_data_of_a_gone_pod_is_removed_with_the_pod() {
    let mut node = Node::new().await;
    let _driver = Driver::start(&node).await;
    let volume = folder(&node, "gone", "data");
    fs::create_dir_all(&volume).unwrap();
    fs::write(volume.join("vol_data.json.new"), "{\"driverNa").unwrap();
    let mut client = node.start().await;
    let mut sync = Sync::open(&mut client).await;
    sync.complete(1, true).await;
    until("the removal of the pod that is gone", || !node.world.pod("gone").exists()).await;
}

#[tokio::test]
async fn after_a_reboot_csi_volumes_are_staged_again_and_those_of_gone_pods_released() {
    let mut node = Node::new().await;
    let driver = Driver::start(&node).await;
    let pods = [("u1", "data"), ("gone", "other")];
    let mut client = node.start().await;
    let mut sync = Sync::open(&mut client).await;
    for (uid, volume) in pods {
        add_volume(&node, volume);
        sync.pod(desire(uid, 1, Want::Run, vec![claimed(volume)])).await;
    }
    sync.complete(1, true).await;
    for (uid, _) in pods {
        mount(&mut client, uid, 1).await.1.unwrap();
    }
    node.kill();
    drop(sync);
    driver.reboot(root(&node));
    driver.state().calls.clear();
    let left: Vec<_> = staged(&node).iter().map(|folder| folder.join("vol_data.json").exists()).collect();
    assert_eq!(left, [true, true]);

    let mut client = node.start().await;
    let mut sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Run, vec![claimed("data")])).await;
    sync.complete(1, true).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    until("the removal of the pod that is gone", || !node.world.pod("gone").exists()).await;
    until("the removal of its staging folder", || staged(&node).len() == 1).await;
    assert_mounted_once(&node, &driver, "after the reboot");
    let kept = driver.calls("data");
    assert!(kept.starts_with(&["stage", "publish"]), "{kept:?}");
    let gone = driver.calls("other");
    assert_eq!(gone.last(), Some(&"unstage"), "{gone:?}");
    assert!(!gone.contains(&"stage") && !gone.contains(&"publish"), "{gone:?}");
    assert_eq!(driver.state().wrong, Vec::<String>::new());
}
