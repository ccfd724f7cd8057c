//! Claims are mounted once pod-config has confirmed that they are in use, and are in use until they are unmounted.

#![allow(clippy::unwrap_used)]
#![allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them")]

mod support;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use keelson_config::ServiceName;
use keelson_proto::keelson::common::v1::Want;
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_proto::keelson::runtime::v1::ContainerState;
use keelson_proto::keelson::volume_manager::v1 as vm;
use keelson_service_kit::status::error;
use keelson_testkit::fakes::{Conversation, FakePodConfig, FakeServer};
use serde_json::json;
use support::{Client, LONG, Sync, World, desire, empty_dir, mount, unmount, until_some, volume, within};
use tokio::sync::watch;
use tonic::service::Routes;
use tonic::{Code, Status};

/// What uses each claim of a set.
type Set = BTreeMap<String, String>;
/// The JSON of claims and PersistentVolumes by kind and name.
type Live = Arc<Mutex<BTreeMap<(String, String), String>>>;

const WAIT: &str = "pod-config has not confirmed that the claim default/data is in use";
const CLAIM: &str = "PersistentVolumeClaim";
const POD: &str = "the pod default/pod-u1";

/// A pod-config whose claims the test binds, and that confirms reports when the test says so.
struct PodConfig {
    fake: FakePodConfig,
    live: Live,
    /// The complete sets of all streams.
    sets: watch::Sender<Vec<Set>>,
    is_confirming: watch::Sender<bool>,
}

impl PodConfig {
    /// Takes reports, and confirms none.
    fn new() -> Self {
        let (sets, is_confirming) = (watch::Sender::default(), watch::Sender::new(false));
        let (fake, live) = (FakePodConfig::default(), Live::default());
        let objects = Arc::clone(&live);
        fake.get_live.answer_with(move |request| {
            let json = objects.lock().unwrap().get(&(request.kind, request.name)).cloned();
            let missing = || error(Code::NotFound, "OBJECT_UNKNOWN", "it does not exist");
            json.map(|json| pb::GetLiveResponse { object_json: json.into_bytes() }).ok_or_else(missing)
        });
        let node_json = br#"{"metadata": {"name": "node"}}"#.to_vec();
        fake.watch_node.replay([pb::WatchNodeResponse { node_json, registered: false }]);
        Self { fake, live, sets, is_confirming }
    }

    fn take_reports(&self) {
        let (sets, is_confirming) = (self.sets.clone(), self.is_confirming.clone());
        self.fake
            .report_claims_in_use
            .handle(move |reports| confirm(sets.clone(), is_confirming.subscribe(), reports));
    }

    async fn serve(&self, world: &World) -> FakeServer {
        let routes = Routes::new(self.fake.server());
        FakeServer::start(&world.config, ServiceName::PodConfig, routes).await.unwrap()
    }

    fn confirm(&self) {
        self.is_confirming.send_replace(true);
    }

    /// Binds the claim `data` to a PersistentVolume of a folder of this name.
    fn bind(&self, world: &World, name: &str) -> PathBuf {
        let folder = world.config.paths.root_dir.parent().unwrap().join(name);
        std::fs::create_dir_all(&folder).unwrap();
        let volume = json!({
            "metadata": {"name": name, "uid": "pv"},
            "spec": {
                "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"}, "volumeMode": "Filesystem",
                "claimRef": {"namespace": "default", "name": "data", "uid": "claim"},
                "hostPath": {"path": folder},
            },
        });
        let claim = json!({
            "metadata": {"name": "data", "namespace": "default", "uid": "claim"},
            "spec": {"accessModes": ["ReadWriteOnce"], "volumeName": name},
            "status": {"phase": "Bound", "capacity": {"storage": "1Gi"}},
        });
        let mut live = self.live.lock().unwrap();
        live.insert(("PersistentVolume".into(), name.into()), volume.to_string());
        live.insert((CLAIM.into(), "data".into()), claim.to_string());
        folder
    }

    /// Waits for a set after the first `skipped` ones, and returns how many there are then.
    async fn until_set(&self, skipped: usize, expected: &[(&str, &str)]) -> usize {
        let expected: Set = expected.iter().map(|(claim, user)| ((*claim).into(), (*user).into())).collect();
        let mut sets = self.sets.subscribe();
        let found = sets.wait_for(|sets| sets.iter().skip(skipped).any(|set| *set == expected));
        match tokio::time::timeout(LONG, found).await {
            Ok(sets) => sets.unwrap().len(),
            Err(_) => panic!("no set {expected:?} in {:?}", self.sets.borrow()),
        }
    }

    /// How often the claim was read.
    fn reads(&self) -> usize {
        self.fake.get_live.requests().all().iter().filter(|request| request.kind == CLAIM).count()
    }
}

/// Records the sets of a stream, and confirms each of them once the test wants that.
async fn confirm(
    sets: watch::Sender<Vec<Set>>,
    mut is_confirming: watch::Receiver<bool>,
    mut reports: Conversation<pb::ReportClaimsInUseRequest, pb::ReportClaimsInUseResponse>,
) -> Result<(), Status> {
    let mut set = Set::new();
    while let Some(request) = reports.next().await {
        for pb::ClaimInUse { namespace, name, persistent_volume, user } in request.claims {
            let claim = if name.is_empty() { persistent_volume } else { format!("{namespace}/{name}") };
            set.insert(claim, user);
        }
        if request.complete {
            let complete = std::mem::take(&mut set);
            sets.send_modify(|sets| sets.push(complete));
            is_confirming.wait_for(|is_confirming| *is_confirming).await.unwrap();
            reports.send(pb::ReportClaimsInUseResponse { revision: request.revision }).await;
        }
    }
    Ok(())
}

fn claimed() -> vm::Volume {
    let claim = vm::ClaimVolume { claim_name: "data".into(), ephemeral: false, read_only: false };
    vm::Volume { mounted: true, ..volume("data", vm::volume::Source::Claim(claim)) }
}

/// The first progress of `MountPod` whose message contains `text`.
async fn until_progress(client: &mut Client, uid: &str, text: &str) -> vm::MountProgress {
    let request = within(vm::MountPodRequest { uid: uid.into(), revision: 1 }, LONG);
    let mut stream = client.mount_pod(request).await.unwrap().into_inner();
    loop {
        let item = stream.message().await.unwrap().unwrap().item;
        let Some(vm::mount_pod_response::Item::Progress(progress)) = item else {
            panic!("the volumes are ready")
        };
        if progress.waiting_for.contains(text) {
            return progress;
        }
    }
}

fn host_path(ready: &vm::MountsReady) -> PathBuf {
    ready.volumes.iter().find(|volume| volume.name == "data").unwrap().host_path.clone().into()
}

#[tokio::test]
async fn a_claim_waits_for_its_confirmation_and_is_read_after_it_while_others_are_mounted() {
    let (world, pod_config) = (World::new(), PodConfig::new());
    pod_config.take_reports();
    let _server = pod_config.serve(&world).await;
    pod_config.bind(&world, "old");
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Run, vec![claimed(), empty_dir("scratch", "", 0)])).await;
    let progress = until_progress(&mut client, "u1", WAIT).await;
    assert_eq!(progress.owner, "pod-config");
    assert!(progress.waiting_for.contains("it has not answered yet"), "{}", progress.waiting_for);
    let scratch = world.empty_dir("u1", "scratch");
    until_some("the pod's other volume", || std::future::ready(scratch.exists().then_some(()))).await;
    sync.pod(desire("u2", 1, Want::Run, vec![empty_dir("scratch", "", 0)])).await;
    mount(&mut client, "u2", 1).await.1.unwrap();
    assert_eq!(pod_config.reads(), 0, "what is read before the confirmation may change");

    let folder = pod_config.bind(&world, "new");
    pod_config.confirm();
    pod_config.until_set(0, &[("default/data", POD)]).await;
    let ready = mount(&mut client, "u1", 1).await.1.unwrap();
    assert_eq!(host_path(&ready), folder);
}

#[tokio::test]
async fn a_claim_is_in_use_until_it_is_unmounted_over_a_restart_that_forgets_the_pod() {
    let (world, pod_config) = (World::new(), PodConfig::new());
    pod_config.take_reports();
    pod_config.confirm();
    let (_server, runtime) = (pod_config.serve(&world).await, world.start_runtime().await);
    pod_config.bind(&world, "disk");
    runtime.set_container("u1", ContainerState::Running);
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Run, vec![claimed()])).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    let before = pod_config.until_set(0, &[("default/data", POD)]).await;
    // The claim's object has gone with its manifest, and the pod has left its source.
    pod_config.live.lock().unwrap().clear();
    sync.pod(desire("u1", 2, Want::Stop, vec![claimed()])).await;
    sync.pod(desire("u1", 3, Want::Unmount, vec![claimed()])).await;
    let why = unmount(&mut client, "u1", Duration::from_secs(2)).await.unwrap_err();
    assert!(why.message().contains("container main"), "{why}");
    assert_eq!(pod_config.sets.borrow().len(), before, "it is in use all the time");
    drop(sync);
    service.stop().await;

    let service = world.start().await;
    let unknown = [("disk", "the volumes of the pod with UID u1")];
    let before = pod_config.until_set(before, &unknown).await;
    let mut client = service.client();
    let mut sync = Sync::open(&mut client).await;
    sync.complete(1, true).await;
    runtime.api.get_pod.requests().until(|requests| requests.len() > 2).await;
    assert_eq!(pod_config.sets.borrow().len(), before, "a container may write to it");
    runtime.set_container("u1", ContainerState::Exited);
    pod_config.until_set(before, &[]).await;
    assert!(!world.volume("u1", "host-path", "disk").exists());
}

#[tokio::test]
async fn a_folder_of_an_unknown_plugin_holds_its_persistent_volume_until_it_is_empty() {
    let (world, pod_config) = (World::new(), PodConfig::new());
    pod_config.take_reports();
    pod_config.confirm();
    let (_server, _runtime) = (pod_config.serve(&world).await, world.start_runtime().await);
    // As an agent leaves it that has other plugins.
    let folder = world.config.paths.root_dir.join("pods/u1/volumes/example.com~other/disk");
    std::fs::create_dir_all(folder.join("data")).unwrap();
    let service = world.start().await;
    let before = pod_config.until_set(0, &[("disk", "the volumes of the pod with UID u1")]).await;
    let mut client = service.client();
    let mut sync = Sync::open(&mut client).await;
    sync.complete(1, true).await;
    let request = vm::WatchPodVolumesRequest {};
    let mut watch = client.watch_pod_volumes(request).await.unwrap().into_inner();
    loop {
        if let Some(vm::watch_pod_volumes_response::Item::Pod(pod)) =
            watch.message().await.unwrap().unwrap().item
            && pod.message.contains("the plugin example.com/other, which this version cannot tear down")
        {
            break;
        }
    }
    assert_eq!(pod_config.sets.borrow().len(), before, "something may be in it");
    std::fs::remove_dir(folder.join("data")).unwrap();
    pod_config.until_set(before, &[]).await;
    until_some("the removal", || std::future::ready((!folder.exists()).then_some(()))).await;
}

#[tokio::test]
async fn after_each_connection_the_whole_set_is_reported_and_confirmed_again() {
    let (world, pod_config) = (World::new(), PodConfig::new());
    pod_config.take_reports();
    pod_config.confirm();
    let server = pod_config.serve(&world).await;
    pod_config.bind(&world, "disk");
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Run, vec![claimed()])).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    let before = pod_config.until_set(0, &[("default/data", POD)]).await;
    server.kill();
    let text = service.condition("reports of claims to pod-config", false).await;
    assert!(text.contains("cannot report to pod-config which claims are in use"), "{text}");

    // A confirmation of the stream before counts no more.
    pod_config.is_confirming.send_replace(false);
    let _server = pod_config.serve(&world).await;
    let before = pod_config.until_set(before, &[("default/data", POD)]).await;
    sync.pod(desire("u2", 1, Want::Run, vec![claimed()])).await;
    assert_eq!(until_progress(&mut client, "u2", WAIT).await.owner, "pod-config");
    let newer = error(Code::Aborted, "NEWER_STREAM", "a newer stream has replaced this one");
    pod_config.fake.report_claims_in_use.break_streams(newer);
    let both = [("default/data", "the pod default/pod-u1 and another pod")];
    pod_config.until_set(before, &both).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    pod_config.confirm();
    mount(&mut client, "u2", 1).await.1.unwrap();
    service.condition("reports of claims to pod-config", true).await;
}

#[tokio::test]
async fn a_pod_that_waited_when_the_service_was_restarted_waits_for_a_new_confirmation() {
    let (world, pod_config) = (World::new(), PodConfig::new());
    pod_config.take_reports();
    let _server = pod_config.serve(&world).await;
    pod_config.bind(&world, "disk");
    let mut before = 0;
    for _ in 0..2 {
        let service = world.start().await;
        let mut client = service.client();
        let sync = Sync::open(&mut client).await;
        pod_config.until_set(before, &[]).await;
        sync.pod(desire("u1", 1, Want::Run, vec![claimed()])).await;
        until_progress(&mut client, "u1", WAIT).await;
        before = pod_config.sets.borrow().len();
        drop(sync);
        service.stop().await;
    }
    assert!(!world.volume("u1", "host-path", "disk").exists());
    pod_config.confirm();
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Run, vec![claimed()])).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    pod_config.until_set(before, &[("default/data", POD)]).await;
}

#[tokio::test]
async fn nothing_waits_for_a_pod_config_that_takes_no_reports_until_another_one_connects() {
    let refused = || error(Code::FailedPrecondition, "API_SERVER", "the claims are those of the API server");
    for has_api_server in [true, false] {
        let (world, pod_config) = (World::new(), PodConfig::new());
        if has_api_server {
            pod_config.take_reports();
            pod_config.fake.report_claims_in_use.check_first(move |_| Err(refused()));
        }
        let server = pod_config.serve(&world).await;
        pod_config.bind(&world, "disk");
        let service = world.start().await;
        let mut client = service.client();
        let sync = Sync::open(&mut client).await;
        sync.pod(desire("u1", 1, Want::Run, vec![claimed()])).await;
        let (waits, ready) = mount(&mut client, "u1", 1).await;
        ready.unwrap();
        assert!(!waits.iter().any(|wait| wait.contains("confirmed")), "{waits:?}");
        service.condition("reports of claims to pod-config", true).await;

        server.kill();
        let newer = PodConfig::new();
        newer.take_reports();
        let _server = newer.serve(&world).await;
        newer.bind(&world, "disk");
        newer.until_set(0, &[("default/data", POD)]).await;
        sync.pod(desire("u2", 1, Want::Run, vec![claimed()])).await;
        until_progress(&mut client, "u2", WAIT).await;
        newer.confirm();
        mount(&mut client, "u2", 1).await.1.unwrap();
    }
}

#[tokio::test]
async fn a_claim_waits_while_pod_config_is_down() {
    let (world, pod_config) = (World::new(), PodConfig::new());
    pod_config.take_reports();
    pod_config.confirm();
    pod_config.bind(&world, "disk");
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Run, vec![claimed()])).await;
    let progress = until_progress(&mut client, "u1", WAIT).await;
    assert_eq!(progress.owner, "pod-config");
    sync.pod(desire("u2", 1, Want::Run, vec![empty_dir("scratch", "", 0)])).await;
    mount(&mut client, "u2", 1).await.1.unwrap();
    let _server = pod_config.serve(&world).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
}
