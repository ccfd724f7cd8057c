//! Expansion with a fake pod-config that has the claim.

use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_service_kit::status::error;
use keelson_testkit::fakes::{FakePodConfig, FakeServer};
use keelson_testkit::service::until_some;
use keelson_volume_manager_core::expansion::ErrorClass;
use tonic::service::Routes;
use tonic::{Code, Status};

use super::*;

/// A node with one claim at its API server.
struct Node {
    world: World,
    api: Api,
}

/// A fake pod-config with one claim.
struct Api {
    pod_config: FakePodConfig,
    claim: Arc<Mutex<Value>>,
    config: Config,
    _server: FakeServer,
    _run_folder: tempfile::TempDir,
}

const OTHER: &str = "Other";

/// A claim that asks for 2 GiB and has 1 GiB. `tracked`: `allocatedResourceStatuses.storage` for 2 GiB.
fn claim(tracked: Option<&str>) -> Value {
    let mut claim = json!({
        "metadata": {"name": "claim", "namespace": "default", "uid": "claim-uid", "resourceVersion": "1"},
        "spec": {"accessModes": ["ReadWriteOnce"], "volumeName": "disk", "resources": {"requests": {"storage": "2Gi"}}},
        "status": {"phase": "Bound", "capacity": {"storage": "1Gi"}},
    });
    if let Some(status) = tracked {
        claim["status"]["allocatedResources"] = json!({"storage": "2Gi"});
        claim["status"]["allocatedResourceStatuses"] = json!({"storage": status});
        claim["status"]["conditions"] =
            json!([{"type": "FileSystemResizePending", "status": "True"}, {"type": OTHER, "status": "True"}]);
    }
    claim
}

impl Api {
    async fn start(claim: Value) -> Self {
        let run_folder = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        config.paths.run_dir = run_folder.path().join("run");
        let (pod_config, claim) = (FakePodConfig::default(), Arc::new(Mutex::new(claim)));
        let shared = Arc::clone(&claim);
        pod_config.get_live.answer_with(move |request| {
            let asked = (request.kind.as_str(), request.namespace.as_str(), request.name.as_str());
            assert_eq!(asked, ("PersistentVolumeClaim", "default", "claim"));
            Ok(pb::GetLiveResponse { object_json: shared.lock().unwrap().to_string().into_bytes() })
        });
        let shared = Arc::clone(&claim);
        pod_config.mutate.answer_with(move |request| patched(&mut shared.lock().unwrap(), &request));
        let routes = Routes::new(pod_config.server());
        let server = FakeServer::start(&config, ServiceName::PodConfig, routes).await.unwrap();
        Self { pod_config, claim, config, _server: server, _run_folder: run_folder }
    }

    fn set(&self, field: &str, value: Value) {
        self.claim.lock().unwrap()["status"][field] = value;
    }

    fn status(&self) -> Value {
        self.claim.lock().unwrap()["status"].clone()
    }

    /// The types of the conditions of the claim.
    fn conditions(&self) -> Vec<String> {
        let status = self.status();
        let all = status["conditions"].as_array().into_iter().flatten();
        all.map(|condition| condition["type"].as_str().unwrap().to_owned()).collect()
    }

    fn patches(&self) -> usize {
        self.pod_config.mutate.requests().len()
    }
}

/// Patches the status of the claim, as an API server does.
fn patched(claim: &mut Value, request: &pb::MutateRequest) -> Result<pb::MutateResponse, Status> {
    let what = (request.kind.as_str(), request.subresource.as_str(), request.name.as_str());
    assert_eq!(what, ("PersistentVolumeClaim", "status", "claim"));
    assert_eq!(request.verb(), pb::mutate_request::Verb::StrategicPatch);
    let patch: Value = serde_json::from_slice(&request.body_json).unwrap();
    let version = &patch["metadata"]["resourceVersion"];
    if !version.is_null() && *version != claim["metadata"]["resourceVersion"] {
        return Err(error(Code::Aborted, "CONFLICT", "the claim was changed meanwhile"));
    }
    merge(&mut claim["status"], &patch["status"]);
    let next = claim["metadata"]["resourceVersion"].as_str().unwrap().parse::<u64>().unwrap() + 1;
    claim["metadata"]["resourceVersion"] = next.to_string().into();
    Ok(pb::MutateResponse { object_json: claim.to_string().into_bytes() })
}

/// A strategic merge, as far as the status of a claim needs one.
fn merge(object: &mut Value, patch: &Value) {
    let Value::Object(changes) = patch else {
        *object = patch.clone();
        return;
    };
    if !object.is_object() {
        *object = json!({});
    }
    for (field, change) in changes {
        if change.is_null() {
            object.as_object_mut().unwrap().remove(field);
        } else if let Value::Array(items) = change {
            let mut list = object[field].as_array().cloned().unwrap_or_default();
            for item in items {
                list.retain(|old| old["type"] != item["type"]);
                if item["$patch"] != "delete" {
                    list.push(item.clone());
                }
            }
            object[field] = list.into();
        } else {
            merge(&mut object[field], change);
        }
    }
}

impl Node {
    /// A node that has found these volumes at startup.
    async fn start(claim: Value, found: &[(&str, &str)], has_api_server: bool) -> Self {
        let api = Api::start(claim).await;
        let plugin = FakePlugin::new(Shape::PerPod);
        Self { world: start_with(&plugin, found, api.config.clone(), has_api_server).await, api }
    }

    async fn with(claim: Value) -> Self {
        Self::start(claim, &[], true).await
    }

    /// As the resolver does with each sync of pod `a`: the claim and a PersistentVolume of this size.
    fn sync(&self, volume_size: &str, read_only: bool) {
        let capacity = self.api.status()["capacity"]["storage"].as_str().and_then(crate::quantities::storage);
        let volume = json!({"metadata": {"name": "disk"}, "spec": {"capacity": {"storage": volume_size}}});
        let spec = VolumeSpec {
            persistent: Some(Arc::new(serde_json::from_value(volume).unwrap())),
            claim: Some("claim".into()),
            claim_size: capacity,
            read_only,
            ..spec("a", "disk")
        };
        self.world.want_spec(spec, read_only);
    }

    async fn until_mounted(&self) {
        self.world.until_mounted("a", "disk").await;
    }

    /// Waits until the status of the claim is so.
    async fn until_status(&self, what: impl Fn(&Value) -> bool) {
        until_some("the status of the claim", || std::future::ready(what(&self.api.status()).then_some(())))
            .await;
    }

    /// The number of expansions to 2 GiB so far.
    fn expansions(&self) -> usize {
        self.world.plugin.count(EXPAND)
    }

    /// Kind and message of each event with a reason.
    async fn events(&self, reason: &str) -> Vec<(String, String)> {
        let request = tonic::Request::new(ListEventsRequest::default());
        let events = self.world.ctx.events.list_events(request).await.unwrap().into_inner().events;
        let found = events.into_iter().filter(|event| event.reason == reason);
        found.map(|event| (event.kind, event.message)).collect()
    }
}

const EXPAND: &str = "expand disk for a to 2147483648";

fn expansion_failed(class: ErrorClass, then: FailureClass) -> End {
    End::Fail(PluginError::new("no space").of_class(then).of_expansion(class))
}

fn is_grown(status: &Value) -> bool {
    status["capacity"]["storage"] == "2Gi"
}

#[tokio::test]
async fn a_pending_expansion_is_done_at_the_mount_and_leaves_the_claims_status() {
    let node = Node::with(claim(Some("NodeResizePending"))).await;
    let gate = Arc::new(Semaphore::new(0));
    node.world.plugin.on(EXPAND, End::Wait(Arc::clone(&gate)));
    node.sync("2Gi", false);
    node.world.plugin.until_called(EXPAND, 1).await;
    assert_eq!(node.api.status()["allocatedResourceStatuses"]["storage"], "NodeResizeInProgress");
    let status = node.world.until("a", |status| !status.waits.is_empty()).await;
    assert!(status.mounted.is_empty(), "the pod must not use the volume before it has grown");
    gate.add_permits(1);
    node.until_mounted().await;
    let status = node.api.status();
    assert!(is_grown(&status), "{status}");
    assert_eq!(status["allocatedResourceStatuses"], json!({}));
    assert_eq!(node.api.conditions(), [OTHER]);
    let text = "MountVolume.NodeExpandVolume succeeded for volume \"disk\" n".to_owned();
    let expected = [("Pod".to_owned(), text.clone()), ("PersistentVolumeClaim".to_owned(), text)];
    assert_eq!(node.events("FileSystemResizeSuccessful").await, expected);
    assert_eq!(node.expansions(), 1);
}

#[tokio::test]
async fn a_mounted_volume_grows_with_the_next_sync_and_stays_usable() {
    let node = Node::with(claim(None)).await;
    node.sync("1Gi", false);
    node.until_mounted().await;
    assert_eq!(node.api.pod_config.get_live.requests().len(), 0, "the resolver has just read the claim");
    let pending = claim(Some("NodeResizePending"))["status"].clone();
    for field in ["allocatedResources", "allocatedResourceStatuses", "conditions"] {
        node.api.set(field, pending[field].clone());
    }
    let gate = Arc::new(Semaphore::new(0));
    node.world.plugin.on(EXPAND, End::Wait(Arc::clone(&gate)));
    node.sync("2Gi", false);
    node.world.plugin.until_called(EXPAND, 1).await;
    let status = node.world.until("a", |_| true).await;
    assert!(status.mounted.contains_key("disk"), "it is usable meanwhile: {status:?}");
    gate.add_permits(1);
    node.until_status(is_grown).await;
    node.sync("2Gi", false);
    node.until_mounted().await;
    assert_eq!((node.expansions(), node.api.patches()), (1, 2));
}

#[tokio::test]
async fn an_old_resizers_claim_gets_its_size_and_no_other_status() {
    let node = Node::with(claim(None)).await;
    node.sync("2Gi", false);
    node.until_mounted().await;
    assert_eq!(node.api.status(), json!({"phase": "Bound", "capacity": {"storage": "2Gi"}}));
    assert_eq!((node.expansions(), node.api.patches()), (1, 1));
}

#[tokio::test]
async fn a_size_that_is_infeasible_at_the_mount_is_reported_and_not_tried_again() {
    let node = Node::with(claim(Some("NodeResizePending"))).await;
    node.world.plugin.on(EXPAND, expansion_failed(ErrorClass::Infeasible, FailureClass::Final));
    node.sync("2Gi", false);
    // The retry finds that the resizer has to act, and mounts the volume as it is.
    node.until_mounted().await;
    let status = node.api.status();
    assert_eq!(status["allocatedResourceStatuses"]["storage"], "NodeResizeInfeasible");
    assert_eq!(status["capacity"]["storage"], "1Gi");
    let condition = status["conditions"].as_array().unwrap().last().unwrap().clone();
    assert_eq!(condition["type"], "NodeResizeError");
    assert_eq!(condition["message"], "failed to expand pvc with no space");
    assert_eq!(condition["lastTransitionTime"].as_str().unwrap().len(), "2026-01-02T03:04:05Z".len());
    let text = "MountVolume.Setup failed while expanding volume for volume \"disk\" : no space";
    assert_eq!(node.events("FailedMount").await, [("Pod".to_owned(), text.to_owned())]);
    assert_eq!(node.expansions(), 1);
}

#[tokio::test]
async fn an_online_error_is_an_event_and_a_condition_and_is_retried() {
    let node = Node::with(claim(None)).await;
    node.sync("1Gi", false);
    node.until_mounted().await;
    let pending = claim(Some("NodeResizePending"))["status"].clone();
    for field in ["allocatedResources", "allocatedResourceStatuses"] {
        node.api.set(field, pending[field].clone());
    }
    let plugin = &node.world.plugin;
    plugin.on(EXPAND, expansion_failed(ErrorClass::Final, FailureClass::Final));
    let gate = Arc::new(Semaphore::new(0));
    plugin.on(EXPAND, End::Wait(Arc::clone(&gate)));
    node.sync("2Gi", false);
    plugin.until_called(EXPAND, 2).await;
    assert_eq!(node.api.conditions(), ["NodeResizeError"]);
    assert_eq!(node.api.status()["allocatedResourceStatuses"]["storage"], "NodeResizeInProgress");
    let text = "NodeExpandVolume.NodeExpandVolume failed for volume \"disk\" : no space".to_owned();
    assert_eq!(node.events("VolumeResizeFailed").await, [("Pod".to_owned(), text)]);
    gate.add_permits(1);
    node.until_status(is_grown).await;
    assert_eq!(node.api.conditions(), [""; 0]);
}

#[tokio::test]
async fn a_final_error_after_which_the_user_asks_for_another_size_is_infeasible() {
    let node = Node::with(claim(None)).await;
    node.sync("1Gi", false);
    node.until_mounted().await;
    let pending = claim(Some("NodeResizePending"))["status"].clone();
    for field in ["allocatedResources", "allocatedResourceStatuses"] {
        node.api.set(field, pending[field].clone());
    }
    let plugin = &node.world.plugin;
    plugin.on(EXPAND, expansion_failed(ErrorClass::Final, FailureClass::Final));
    plugin.on(EXPAND, expansion_failed(ErrorClass::Final, FailureClass::Final));
    node.api.claim.lock().unwrap()["spec"]["resources"]["requests"]["storage"] = "1536Mi".into();
    node.sync("2Gi", false);
    node.until_status(|status| status["allocatedResourceStatuses"]["storage"] == "NodeResizeInfeasible")
        .await;
    assert_eq!(node.expansions(), 2);
}

#[tokio::test]
async fn a_driver_that_refuses_a_volume_in_use_is_asked_again_at_the_next_mount_only() {
    let node = Node::with(claim(None)).await;
    node.world.shared.set_populated();
    node.sync("1Gi", false);
    node.until_mounted().await;
    let pending = claim(Some("NodeResizePending"))["status"].clone();
    for field in ["allocatedResources", "allocatedResourceStatuses"] {
        node.api.set(field, pending[field].clone());
    }
    node.world.plugin.on(EXPAND, expansion_failed(ErrorClass::InUse, FailureClass::Final));
    node.sync("2Gi", false);
    node.until_status(|status| status["conditions"][0]["type"] == "NodeResizeError").await;
    for uid in ["b", "c"] {
        // Each is handled after what was asked for before.
        node.sync("2Gi", false);
        node.world.want(uid, "data", None);
        node.world.until_mounted(uid, "data").await;
    }
    assert_eq!(node.expansions(), 1);
    assert_eq!(node.events("VolumeResizeFailed").await, [], "the operation does not count as failed");
    node.world.shared.release("a").await;
    node.world.until_gone("a").await;
    node.sync("2Gi", false);
    node.until_mounted().await;
    assert_eq!(node.expansions(), 2);
    assert!(is_grown(&node.api.status()));
}

#[tokio::test]
async fn a_read_only_use_is_reported_on_pod_and_claim_and_changes_nothing() {
    let node = Node::with(claim(Some("NodeResizePending"))).await;
    let before = node.api.status();
    node.sync("2Gi", true);
    node.until_mounted().await;
    node.sync("2Gi", true);
    node.world.want("b", "data", None);
    node.world.until_mounted("b", "data").await;
    let kinds: Vec<String> =
        node.events("FileSystemResizeFailed").await.into_iter().map(|(kind, _)| kind).collect();
    assert_eq!(kinds, ["Pod", "PersistentVolumeClaim"]);
    assert_eq!((node.api.status(), node.expansions(), node.api.patches()), (before, 0, 0));
}

#[tokio::test]
async fn without_an_api_server_a_volume_grows_and_no_status_is_written() {
    let node = Node::start(claim(None), &[], false).await;
    node.sync("2Gi", false);
    node.until_mounted().await;
    assert_eq!((node.expansions(), node.api.patches()), (1, 0));
    node.sync("2Gi", false);
    node.world.want("b", "data", None);
    node.world.until_mounted("b", "data").await;
    assert_eq!(node.expansions(), 1);
}

#[tokio::test]
async fn each_node_grows_its_mount_of_a_shared_volume_unless_the_claim_says_otherwise() {
    for (annotation, expansions) in [(None, 1), (Some("volume.kubernetes.io/node-expansion-not-required"), 0)]
    {
        // Another node has finished the claim, after this one has mounted the volume.
        let node = Node::with(claim(None)).await;
        node.sync("1Gi", false);
        node.until_mounted().await;
        {
            let mut claim = node.api.claim.lock().unwrap();
            claim["spec"]["accessModes"] = json!(["ReadWriteMany"]);
            claim["status"]["capacity"]["storage"] = "2Gi".into();
            claim["status"]["allocatedResources"] = json!({"storage": "2Gi"});
            if let Some(name) = annotation {
                claim["metadata"]["annotations"] = json!({name: "true"});
            }
        }
        node.sync("2Gi", false);
        node.api.pod_config.get_live.requests().until_len(1).await;
        if expansions > 0 {
            node.world.plugin.until_called(EXPAND, expansions).await;
        }
        node.sync("2Gi", false);
        node.world.want("b", "data", None);
        node.world.until_mounted("b", "data").await;
        assert_eq!((node.expansions(), node.api.patches()), (expansions, 0), "{annotation:?}");
    }
}

#[tokio::test]
async fn a_claim_that_waits_for_the_resizer_is_looked_at_again_with_the_next_sync() {
    let node = Node::with(claim(Some("ControllerResizeInProgress"))).await;
    node.sync("2Gi", false);
    node.until_mounted().await;
    // At the mount, and then once for the mounted volume.
    node.api.pod_config.get_live.requests().until_len(2).await;
    assert_eq!((node.expansions(), node.api.patches()), (0, 0));
    node.api.set("allocatedResourceStatuses", json!({"storage": "NodeResizePending"}));
    // A sync that comes before the end of the look counts as one before it.
    until_some("the expansion", || {
        node.sync("2Gi", false);
        std::future::ready((node.expansions() > 0).then_some(()))
    })
    .await;
    node.until_status(is_grown).await;
    assert_eq!(node.expansions(), 1);
}

#[tokio::test]
async fn the_driver_is_not_asked_before_the_claim_says_that_the_node_expands() {
    let node = Node::with(claim(Some("NodeResizePending"))).await;
    let refusal = error(Code::Aborted, "CONFLICT", "the claim was changed meanwhile");
    node.api.pod_config.mutate.answer_once(Err(refusal));
    node.sync("2Gi", false);
    node.until_mounted().await;
    let events = node.events("FailedMount").await;
    assert!(events[0].1.contains("the claim was changed meanwhile"), "{events:?}");
    assert_eq!((node.expansions(), node.api.patches()), (1, 3));
}

#[tokio::test]
async fn an_expansion_that_a_kill_has_cut_off_is_finished_after_the_restart() {
    let node = Node::start(claim(Some("NodeResizeInProgress")), &[("a", "disk")], false).await;
    // A restarted service has found the volume of the pod.
    node.world.until("a", |status| status.may_have_mounts).await;
    node.sync("2Gi", false);
    node.until_mounted().await;
    assert_eq!(node.expansions(), 1);
    drop(node);
    let node = Node::with(claim(Some("NodeResizeInProgress"))).await;
    node.sync("2Gi", false);
    node.until_mounted().await;
    assert!(is_grown(&node.api.status()) && node.api.conditions() == [OTHER]);
}
