//! The task with a plugin whose answers the test gives.

mod block;
mod claims;
mod drivers;
mod expansion;
mod labels;
mod look_up;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use keelson_config::{Config, ServiceName};
use keelson_proto::keelson::events::v1::ListEventsRequest;
use keelson_proto::keelson::events::v1::events_server::Events as _;
use keelson_service_kit::{CancellationToken, Context, Metrics};
use keelson_volume_manager_core::claims::VolumeMode;
use keelson_volume_manager_core::desire::{FsGroupPolicy, PodRef};
use keelson_volume_manager_core::objects::PersistentVolume;
use keelson_volume_manager_core::wait_owner::WaitOwner;
use keelson_volume_manager_core::world::{FailureClass, Learned, Shape};
use serde_json::{Value, json};
use tokio::sync::{Semaphore, watch};

use super::restore::{FoundVolumes, PluginFolder};
use super::*;
use crate::live_objects::LiveObjects;
use crate::metrics::OperationMetrics;
use crate::mounter::Mounter;
use crate::node_facts::NodeFacts;
use crate::plugins::{
    Abilities, Answer, DevicePlace, DeviceRequest, FoundFolder, Identity, Plugin, PluginError, Plugins,
    Reconstructed, SetUp, SetUpRequest, VolumePlace, VolumeSpec,
};
use crate::selinux::{SeLinuxMetrics, VolumeLabels};
use crate::totals::VolumeTotals;

/// How a call ends; each script entry is used once, then calls succeed.
#[derive(Debug, Clone)]
enum End {
    Fail(PluginError),
    Panic,
    /// Not before a permit is added.
    Wait(Arc<Semaphore>),
}

/// A plugin that records its calls.
#[derive(Debug)]
struct FakePlugin {
    calls: watch::Sender<Vec<String>>,
    script: Mutex<BTreeMap<String, Vec<End>>>,
    shape: Shape,
    /// The threads on which the plugin was looked up by the name of a driver.
    looked_up_on: Mutex<Vec<std::thread::ThreadId>>,
}

impl FakePlugin {
    fn new(shape: Shape) -> Arc<Self> {
        Arc::new(Self {
            calls: watch::Sender::new(Vec::new()),
            script: Mutex::default(),
            shape,
            looked_up_on: Mutex::default(),
        })
    }

    fn on(&self, call: &str, end: End) {
        self.script.lock().unwrap().entry(call.to_owned()).or_default().push(end);
    }

    async fn called(&self, call: String) -> Result<(), PluginError> {
        self.calls.send_modify(|calls| calls.push(call.clone()));
        let end = {
            let mut script = self.script.lock().unwrap();
            script.get_mut(&call).filter(|ends| !ends.is_empty()).map(|ends| ends.remove(0))
        };
        match end {
            None => Ok(()),
            Some(End::Fail(error)) => Err(error),
            Some(End::Panic) => panic!("as the test wants"),
            Some(End::Wait(gate)) => {
                gate.acquire().await.unwrap().forget();
                Ok(())
            }
        }
    }

    /// Waits until a call was made `times` times.
    async fn until_called(&self, call: &str, times: usize) {
        let mut calls = self.calls.subscribe();
        calls.wait_for(|calls| calls.iter().filter(|c| *c == call).count() >= times).await.unwrap();
    }

    fn count(&self, call: &str) -> usize {
        self.calls.borrow().iter().filter(|c| *c == call).count()
    }
}

impl Plugin for FakePlugin {
    fn name(&self) -> &'static str {
        "example.org/fake"
    }

    fn serves(&self, name: &str) -> bool {
        self.looked_up_on.lock().unwrap().push(std::thread::current().id());
        name == "example.org/driver"
    }

    fn field(&self) -> &'static str {
        "fake"
    }

    fn abilities(&self) -> Abilities {
        Abilities { mount_options: true, block: true, inline: true, persistent: true }
    }

    fn identify<'a>(&'a self, _: &'a VolumeSpec) -> Answer<'a, Identity> {
        unreachable!("the resolver asks")
    }

    fn mount_device<'a>(&'a self, volume: &'a VolumeSpec, _: DeviceRequest<'a>) -> Answer<'a, Learned> {
        Box::pin(async move {
            self.called(format!("mount device {}", volume.inner_name)).await?;
            Ok(Learned { device_mount_path: Some("/device".into()), ..Learned::default() })
        })
    }

    fn set_up<'a>(&'a self, volume: &'a VolumeSpec, request: SetUpRequest<'a>) -> Answer<'a, SetUp> {
        Box::pin(async move {
            let again = if request.is_remount { " again" } else { "" };
            self.called(format!("set up {} for {}{again}", volume.inner_name, volume.pod.uid)).await?;
            let host_path = PathBuf::from(format!("/volumes/{}/{}", volume.pod.uid, volume.inner_name));
            Ok(SetUp { host_path, learned: Learned::default() })
        })
    }

    fn has_file_labels<'a>(&'a self, volume: &'a VolumeSpec, path: &'a Path) -> Answer<'a, bool> {
        let call = format!("look at the labels of {} at {}", volume.inner_name, path.display());
        Box::pin(async move { self.called(call).await.map(|()| true) })
    }

    fn tear_down<'a>(&'a self, place: &'a VolumePlace) -> Answer<'a, ()> {
        Box::pin(self.called(format!("tear down {} for {}", place.inner_name, place.pod.as_str())))
    }

    fn expand<'a>(&'a self, volume: &'a VolumeSpec, _: SetUpRequest<'a>, size: u64) -> Answer<'a, u64> {
        Box::pin(async move {
            self.called(format!("expand {} for {} to {size}", volume.inner_name, volume.pod.uid)).await?;
            Ok(size)
        })
    }

    fn unmount_device<'a>(&'a self, device: &'a DevicePlace) -> Answer<'a, ()> {
        Box::pin(self.called(format!("unmount device {}", device.inner_name)))
    }

    fn reconstruct<'a>(&'a self, folder: &'a FoundFolder) -> Answer<'a, Reconstructed> {
        Box::pin(async move {
            self.called(format!("reconstruct {}", folder.inner_name)).await?;
            Ok(Reconstructed {
                shared_name: self
                    .shape
                    .has_device()
                    .then(|| format!("example.org/fake/{}", folder.inner_name).into()),
                has_device: self.shape.has_device(),
                device_mount_path: None,
                label: None,
            })
        })
    }
}

/// A running task.
struct World {
    shared: SharedVolumes,
    plugin: Arc<FakePlugin>,
    ctx: Context,
    shutdown: CancellationToken,
    _folder: tempfile::TempDir,
}

impl Drop for World {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

async fn start(plugin: &Arc<FakePlugin>, found: &[(&str, &str)]) -> World {
    start_with(plugin, found, Config::default(), false).await
}

async fn start_with(
    plugin: &Arc<FakePlugin>,
    found: &[(&str, &str)],
    config: Config,
    has_api_server: bool,
) -> World {
    let plugins = Plugins::new(vec![Arc::clone(plugin) as Arc<dyn Plugin>]);
    let folders = found.iter().map(|(uid, inner_name)| PluginFolder {
        plugin: "example.org~fake".into(),
        folder: FoundFolder { pod: (*uid).into(), inner_name: (*inner_name).into(), is_block: false },
    });
    let found = find_volumes(&plugins, folders.collect()).await;
    start_found(plugin, found, config, has_api_server)
}

fn start_found(plugin: &Arc<FakePlugin>, found: FoundVolumes, config: Config, has_api_server: bool) -> World {
    let ctx = Context::detached(ServiceName::VolumeManager, config);
    let folder = tempfile::tempdir().unwrap();
    let environment = Environment {
        node_name: "n".into(),
        root: folder.path().to_owned(),
        mounter: Mounter::default(),
        live: LiveObjects::new(ctx.peer(ServiceName::PodConfig)),
        events: ctx.events.clone(),
        metrics: OperationMetrics::register(&Metrics::new()),
        totals: VolumeTotals::register(&ctx.metrics),
        has_attach_controller: true,
        has_api_server,
        selinux: SeLinuxMetrics::default(),
    };
    let (shared, inbox) = SharedVolumes::new();
    let (facts, node) = watch::channel(Some(NodeFacts::default()));
    let task = SharedVolumesTask::new(environment, inbox, node, found);
    let shutdown = CancellationToken::new();
    let (token, handle) = (shutdown.clone(), ctx.progress.register("volumes of plugins"));
    tokio::spawn(async move {
        let _facts = facts;
        task.run(token, handle).await;
    });
    World { shared, plugin: Arc::clone(plugin), ctx, shutdown, _folder: folder }
}

impl World {
    fn want(&self, uid: &str, name: &str, persistent: Option<Value>) {
        self.want_volume(uid, (name, name), false, persistent);
    }

    /// Under another name than that of the volume.
    fn want_as(&self, uid: &str, name: &str, outer_name: &str, read_only: bool) {
        self.want_volume(uid, (name, outer_name), read_only, None);
    }

    fn want_volume(
        &self,
        uid: &str,
        (name, outer_name): (&str, &str),
        read_only: bool,
        persistent: Option<Value>,
    ) {
        let spec = VolumeSpec {
            outer_name: outer_name.into(),
            persistent: persistent
                .map(|json| Arc::new(serde_json::from_value::<PersistentVolume>(json).unwrap())),
            ..spec(uid, name)
        };
        self.want_spec(spec, read_only);
    }

    fn want_spec(&self, spec: VolumeSpec, read_only: bool) {
        let shape = self.plugin.shape;
        let identity = Identity {
            shared_name: shape.has_device().then(|| format!("example.org/fake/{}", spec.inner_name).into()),
            shape,
            is_set_up_each_sync: true,
            supports_label: false,
            can_expand: true,
            read_only,
        };
        let plugin = Arc::clone(&self.plugin) as Arc<dyn Plugin>;
        let labels = VolumeLabels::default();
        self.shared.want(ResolvedSpec { plugin, identity, spec: Arc::new(spec), labels });
    }

    /// Waits for a status of a pod.
    async fn until(&self, uid: &str, what: impl Fn(&PodStatus) -> bool) -> PodStatus {
        self.shared.watch_pod(uid).wait_for(|status| what(status)).await.unwrap().clone()
    }

    async fn until_mounted(&self, uid: &str, name: &str) -> PodStatus {
        self.until(uid, |status| status.mounted.contains_key(name)).await
    }

    /// Reason and message of each event.
    async fn events(&self) -> Vec<String> {
        let request = tonic::Request::new(ListEventsRequest::default());
        let events = self.ctx.events.list_events(request).await.unwrap().into_inner().events;
        events.into_iter().map(|event| format!("{} {}", event.reason, event.message)).collect()
    }

    async fn until_gone(&self, uid: &str) {
        self.until(uid, |status| *status == PodStatus::default()).await;
    }
}

/// A volume that a pod names itself.
fn spec(uid: &str, name: &str) -> VolumeSpec {
    VolumeSpec {
        pod: PodRef { uid: uid.into(), namespace: "default".into(), name: format!("pod-{uid}") },
        service_account: String::new(),
        outer_name: name.into(),
        inner_name: name.into(),
        field: "fake".into(),
        source: json!({}),
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

fn failed(class: FailureClass) -> End {
    End::Fail(PluginError::new("the server says no").of_class(class))
}

#[tokio::test(start_paused = true)]
async fn a_wanted_volume_is_set_up_and_torn_down_once_its_pod_is_released() {
    let world = start(&FakePlugin::new(Shape::PerPod), &[]).await;
    world.shared.set_populated();
    world.want("a", "data", None);
    let status = world.until_mounted("a", "data").await;
    assert_eq!(status.mounted["data"].host_path, "/volumes/a/data");
    assert!(status.may_have_mounts && status.waits.is_empty());
    world.shared.release("a").await;
    world.until_gone("a").await;
    let calls = world.plugin.calls.borrow().clone();
    assert_eq!(calls, ["set up data for a", "tear down data for a"]);
}

#[tokio::test(start_paused = true)]
async fn a_failed_set_up_is_an_event_and_a_wait_and_is_retried() {
    let plugin = FakePlugin::new(Shape::PerPod);
    plugin.on("set up data for a", End::Fail(PluginError::new("the server says no").for_you()));
    let world = start(&plugin, &[]).await;
    world.want("a", "data", None);
    let status = world.until("a", |status| status.waits.values().any(|wait| wait.is_error)).await;
    let wait = &status.waits["data"];
    assert_eq!((wait.wait.message.as_str(), &wait.wait.owner), ("the server says no", &WaitOwner::You));
    assert!(wait.next_try_unix_nanos > 0);
    world.until_mounted("a", "data").await;
    assert_eq!(plugin.count("set up data for a"), 2);
    assert_eq!(
        world.events().await,
        ["FailedMount MountVolume.SetUp failed for volume \"data\" : the server says no"]
    );
}

#[tokio::test(start_paused = true)]
async fn an_uncertain_failure_keeps_the_volume_until_it_is_torn_down() {
    let plugin = FakePlugin::new(Shape::PerPod);
    let gate = Arc::new(Semaphore::new(0));
    plugin.on("set up data for a", failed(FailureClass::Uncertain));
    plugin.on("set up data for a", End::Wait(Arc::clone(&gate)));
    let world = start(&plugin, &[]).await;
    world.shared.set_populated();
    world.want("a", "data", None);
    plugin.until_called("set up data for a", 2).await;
    world.shared.release("a").await;
    gate.add_permits(1);
    plugin.until_called("tear down data for a", 1).await;
    world.until_gone("a").await;
}

#[tokio::test(start_paused = true)]
async fn a_volume_that_hangs_holds_up_no_other_volume() {
    let plugin = FakePlugin::new(Shape::PerPod);
    let gate = Arc::new(Semaphore::new(0));
    plugin.on("set up slow for a", End::Wait(Arc::clone(&gate)));
    let world = start(&plugin, &[]).await;
    world.want("a", "slow", None);
    plugin.until_called("set up slow for a", 1).await;
    world.want("a", "fast", None);
    world.want("b", "data", None);
    let status = world.until_mounted("a", "fast").await;
    assert_eq!(status.waits["slow"].wait.message, "the set-up is running: it waits for fake");
    world.until_mounted("b", "data").await;
    gate.add_permits(1);
    world.until_mounted("a", "slow").await;
}

#[tokio::test(start_paused = true)]
async fn a_device_is_mounted_once_for_two_pods_and_unmounted_after_the_last() {
    let plugin = FakePlugin::new(Shape::Device);
    let world = start(&plugin, &[]).await;
    world.shared.set_populated();
    world.want("a", "disk", None);
    world.want("b", "disk", None);
    world.until_mounted("a", "disk").await;
    world.until_mounted("b", "disk").await;
    assert_eq!(plugin.count("mount device disk"), 1);
    world.shared.release("a").await;
    plugin.until_called("tear down disk for a", 1).await;
    world.until_gone("a").await;
    assert_eq!(plugin.count("unmount device disk"), 0);
    world.shared.release("b").await;
    plugin.until_called("unmount device disk", 1).await;
    world.until_gone("b").await;
    assert_eq!(plugin.calls.borrow().last().map(String::as_str), Some("unmount device disk"));
}

#[tokio::test(start_paused = true)]
async fn a_volume_found_at_startup_stays_until_its_pod_is_released() {
    let plugin = FakePlugin::new(Shape::Device);
    let world = start(&plugin, &[("a", "disk"), ("gone", "old")]).await;
    world.until("a", |status| status.may_have_mounts).await;
    world.shared.set_populated();
    world.want("b", "other", None);
    world.until_mounted("b", "other").await;
    assert_eq!(plugin.count("tear down disk for a") + plugin.count("tear down old for gone"), 0);
    world.want("a", "disk", None);
    world.until_mounted("a", "disk").await;
    world.shared.release("gone").await;
    plugin.until_called("unmount device old", 1).await;
    world.until_gone("gone").await;
    assert_eq!(plugin.count("tear down disk for a"), 0);
}

#[tokio::test(start_paused = true)]
async fn a_folder_that_no_plugin_understands_is_unmounted_once_its_pod_is_released() {
    let plugin = FakePlugin::new(Shape::PerPod);
    plugin.on("reconstruct odd", failed(FailureClass::Final));
    plugin.on("tear down odd for a", failed(FailureClass::Final));
    let world = start(&plugin, &[("a", "odd")]).await;
    world.until("a", |status| status.may_have_mounts).await;
    world.shared.set_populated();
    world.want("b", "data", None);
    world.until_mounted("b", "data").await;
    assert_eq!(plugin.count("tear down odd for a"), 0);
    world.shared.release("a").await;
    let status = world.until("a", |status| !status.teardown.is_empty()).await;
    assert_eq!(status.teardown, "the server says no");
    world.until_gone("a").await;
    assert_eq!(plugin.count("tear down odd for a"), 2, "once more after the error");
}

#[tokio::test(start_paused = true)]
async fn a_second_pod_waits_for_a_read_write_once_pod_volume() {
    let plugin = FakePlugin::new(Shape::Device);
    let world = start(&plugin, &[]).await;
    world.shared.set_populated();
    let volume = json!({"metadata": {"name": "disk"}, "spec": {"accessModes": ["ReadWriteOncePod"]}});
    world.want("a", "disk", Some(volume.clone()));
    world.until_mounted("a", "disk").await;
    world.want("b", "disk", Some(volume));
    let status = world.until("b", |status| status.waits.contains_key("disk")).await;
    let wait = &status.waits["disk"];
    let text = "volume uses the ReadWriteOncePod access mode and is already in use by another pod";
    assert!(wait.wait.message.contains(text) && wait.is_error, "{}", wait.wait.message);
    world.shared.release("a").await;
    world.until_mounted("b", "disk").await;
}

#[tokio::test(start_paused = true)]
async fn a_remount_sets_a_mounted_volume_up_again_and_its_failure_keeps_it() {
    let plugin = FakePlugin::new(Shape::PerPod);
    plugin.on("set up data for a again", failed(FailureClass::Final));
    let world = start(&plugin, &[]).await;
    world.want("a", "data", None);
    world.until_mounted("a", "data").await;
    world.shared.require_remounts("a");
    plugin.until_called("set up data for a again", 2).await;
    let status = world.until("a", |_| true).await;
    assert!(status.mounted.contains_key("data"));
    assert_eq!(plugin.count("tear down data for a"), 0);
}

#[tokio::test(start_paused = true)]
async fn a_panic_of_a_plugin_is_an_error_of_its_operation() {
    let plugin = FakePlugin::new(Shape::PerPod);
    plugin.on("set up data for a", End::Panic);
    let world = start(&plugin, &[]).await;
    world.want("a", "data", None);
    let status = world.until("a", |status| status.waits.values().any(|wait| wait.is_error)).await;
    assert!(status.waits["data"].wait.message.contains("ended unexpectedly"));
    world.until_mounted("a", "data").await;
}

#[tokio::test(start_paused = true)]
async fn volumes_in_use_are_attachable_ones_only() {
    let world = start(&FakePlugin::new(Shape::AttachableDevice), &[]).await;
    world.want("a", "disk", None);
    let mut in_use = world.shared.in_use();
    let expected = vec!["example.org/fake/disk".into()];
    in_use.wait_for(|names| names.as_ref() == Some(&expected)).await.unwrap();
    let status = world.until("a", |status| status.waits.contains_key("disk")).await;
    assert_eq!(status.waits["disk"].wait.owner, WaitOwner::NodeStatus);
}

#[tokio::test(start_paused = true)]
async fn a_stopping_pod_keeps_its_volumes_and_gets_no_others() {
    let plugin = FakePlugin::new(Shape::PerPod);
    for _ in 0..3 {
        plugin.on("set up broken for a", failed(FailureClass::Final));
    }
    let world = start(&plugin, &[]).await;
    world.shared.set_populated();
    world.want("a", "data", None);
    world.until_mounted("a", "data").await;
    world.want("a", "broken", None);
    plugin.until_called("set up broken for a", 1).await;
    world.until("a", |status| status.waits.values().any(|wait| wait.is_error)).await;
    world.shared.stop("a");
    let status = world.until("a", |status| status.waits.is_empty()).await;
    assert!(status.mounted.contains_key("data") && status.may_have_mounts);
    // Longer than any back-off.
    tokio::time::sleep(std::time::Duration::from_secs(600)).await;
    assert_eq!((plugin.count("set up broken for a"), plugin.count("tear down data for a")), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn a_folder_that_was_not_understood_is_known_again_once_its_volume_is_set_up() {
    let plugin = FakePlugin::new(Shape::PerPod);
    plugin.on("reconstruct data", failed(FailureClass::Final));
    let world = start(&plugin, &[("a", "data")]).await;
    world.shared.set_populated();
    world.want("a", "data", None);
    world.until_mounted("a", "data").await;
    world.shared.release("a").await;
    world.until_gone("a").await;
    assert_eq!(plugin.count("tear down data for a"), 1);
}

#[tokio::test(start_paused = true)]
async fn no_device_is_unmounted_while_a_folder_of_a_running_pod_is_not_understood() {
    let plugin = FakePlugin::new(Shape::Device);
    plugin.on("reconstruct odd", failed(FailureClass::Final));
    let world = start(&plugin, &[("a", "odd"), ("b", "disk")]).await;
    world.until("b", |status| status.may_have_mounts).await;
    world.shared.set_populated();
    world.shared.release("b").await;
    plugin.until_called("tear down disk for b", 1).await;
    world.want("c", "other", None);
    world.until_mounted("c", "other").await;
    assert_eq!(plugin.count("unmount device disk"), 0, "it may be the device of pod a");
    world.shared.release("a").await;
    plugin.until_called("unmount device disk", 1).await;
}

#[tokio::test(start_paused = true)]
async fn a_pods_two_names_for_one_volume_keep_their_access() {
    let world = start(&FakePlugin::new(Shape::Device), &[]).await;
    world.want_as("a", "disk", "reads", true);
    world.want_as("a", "disk", "writes", false);
    world.want_as("a", "disk", "reads", true);
    let status = world.until_mounted("a", "writes").await;
    assert!(status.mounted["reads"].read_only && !status.mounted["writes"].read_only);
}
