//! A node whose API server has the current node authorizer: reads are limited to objects related to the node, and what does
//! not exist is forbidden, not missing.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::collections::BTreeMap;

use keelson_config::ServiceName;
use keelson_proto::keelson::node_status::v1::GetReportStateRequest;
use keelson_proto::keelson::node_status::v1::node_status_client::NodeStatusClient;
use keelson_service_kit::connect_unix;
use keelson_testkit::process::Signal;
use keelson_testkit::{Agent, BUSYBOX_IMAGE, NodeServer, Refusal, Relay, Scratch, eventually};
use keelson_tests::cluster::condition;
use keelson_tests::csi_driver::{CsiDriver, CsiDriverSpec};
use keelson_tests::{LIMIT, running, until_cause};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

const PODS: &str = "/api/v1/namespaces/default/pods";
/// The limit for repeated forbidden requests: no report is retried more often, and a pod that is deleted has few.
const TRIES: usize = 10;

/// A node, its server, and the relay between them.
struct Cluster {
    agent: Agent,
    server: NodeServer,
    network: Relay,
    node: String,
}

impl Cluster {
    /// Starts both with one static pod, and waits until the Node is Ready.
    async fn start(scratch: &Scratch) -> Self {
        let server = NodeServer::start().unwrap();
        let network = Relay::to(server.address()).unwrap();
        let node = format!("test-{:08x}", std::process::id());
        let account = json!({"metadata": {"name": "default", "namespace": "default"}});
        server.create("/api/v1/namespaces/default/serviceaccounts", &account).unwrap();
        let metadata = json!({"name": "kube-root-ca.crt", "namespace": "default"});
        let authority = json!({"metadata": metadata, "data": {"ca.crt": "an authority"}});
        server.create("/api/v1/namespaces/default/configmaps", &authority).unwrap();
        let kubeconfig = server.node_kubeconfig(scratch.path(), &node, network.address()).unwrap();
        let agent = Agent::builder(scratch.path())
            .node_name(&node)
            .kubeconfig(kubeconfig)
            .manifest("fixed.yaml", &static_pod("fixed", "1"))
            .start()
            .await
            .unwrap();
        let cluster = Self { agent, server, network, node };
        let path = format!("/api/v1/nodes/{}", cluster.node);
        cluster.until("the Node is Ready", |server| has_true_condition(server.get(&path), "Ready")).await;
        cluster
    }

    async fn until(&self, what: &str, holds: impl Fn(&NodeServer) -> bool) {
        let waited = self.server.until(LIMIT, what, holds).await;
        waited.unwrap_or_else(|error| panic!("{error:#}\n{}", self.agent.log_tail()));
    }

    async fn until_ready(&self, pod: &str) {
        self.until(&format!("{pod} is Ready"), |server| has_true_condition(server.get(&path(pod)), "Ready"))
            .await;
    }

    async fn until_gone(&self, pod: &str) {
        self.until(&format!("{pod} is gone"), |server| server.get(&path(pod)).is_none()).await;
    }

    async fn until_stopped(&self, pod: &str) {
        let container = format!("{pod}/main");
        let stopped = eventually(LIMIT, "its container has stopped", async || {
            running(&self.agent).await.is_ok_and(|all| !all.contains_key(&container))
        });
        stopped.await.unwrap_or_else(|error| panic!("{pod}: {error:#}\n{}", self.agent.log_tail()));
    }

    /// The name of a static pod's mirror.
    fn mirror(&self, pod: &str) -> String {
        format!("{pod}-{}", self.node)
    }

    fn run(&self, name: &str) {
        self.server.create(PODS, &bound_pod(name, &self.node)).unwrap();
    }

    fn delete(&self, pod: &str, grace_seconds: u32) {
        self.server.delete(&path(pod), &json!({"gracePeriodSeconds": grace_seconds})).unwrap();
    }

    /// Waits until node-status has no report left for the server.
    async fn until_all_reported(&self) {
        let channel = connect_unix("node-status", &self.agent.socket(ServiceName::NodeStatus));
        let mut client = NodeStatusClient::new(channel);
        let mut last = 0;
        let result = eventually(LIMIT, "nothing is queued", async || {
            let state = client.get_report_state(GetReportStateRequest {}).await;
            last = state.map_or(u32::MAX, |state| state.into_inner().queued);
            last == 0
        });
        let result = result.await;
        result.unwrap_or_else(|error| {
            panic!("{error:#}; {last} are; {:#?}\n{}", self.server.take_refusals(), self.agent.log_tail());
        });
    }
}

fn path(pod: &str) -> String {
    format!("{PODS}/{pod}")
}

fn has_true_condition(object: Option<Value>, kind: &str) -> bool {
    object.is_some_and(|object| condition(&object, kind) == "True")
}

/// A container that sleeps and ends at once on SIGTERM.
fn container() -> Value {
    json!({
        "name": "main", "image": BUSYBOX_IMAGE, "imagePullPolicy": "IfNotPresent",
        "command": ["/bin/sh", "-c", "trap exit TERM; sleep 1000000 & wait"],
    })
}

fn static_pod(name: &str, version: &str) -> String {
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"version": version}},
        "spec": {"containers": [container()]},
    });
    pod.to_string()
}

/// A pod with all that an API server adds, including its token.
fn bound_pod(name: &str, node: &str) -> Value {
    let mut main = container();
    main["terminationMessagePath"] = "/dev/termination-log".into();
    main["terminationMessagePolicy"] = "File".into();
    main["volumeMounts"] = json!([
        {"name": "token", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount", "readOnly": true},
    ]);
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "labels": {"app": name}},
        "spec": {
            "nodeName": node, "serviceAccountName": "default", "restartPolicy": "Always", "dnsPolicy": "Default",
            "terminationGracePeriodSeconds": 5, "enableServiceLinks": true, "securityContext": {},
            "schedulerName": "default-scheduler",
            "containers": [main],
            "volumes": [{"name": "token", "projected": {"defaultMode": 420, "sources": [
                {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}},
                {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
            ]}}],
        },
    })
}

/// The refused requests without their query, with a count of each.
fn count_refusals(refusals: &[Refusal]) -> BTreeMap<(String, u16), usize> {
    let mut counted = BTreeMap::new();
    for refusal in refusals {
        let request = refusal.request.split('?').next().unwrap_or_default().to_owned();
        *counted.entry((request, refusal.code)).or_default() += 1;
    }
    counted
}

#[tokio::test]
async fn the_node_sends_no_request_that_the_node_authorizer_forbids() {
    let scratch = Scratch::new().unwrap();
    let cluster = Cluster::start(&scratch).await;
    let mirror = cluster.mirror("fixed");
    cluster.until_ready(&mirror).await;
    let ready = cluster.server.get(&path(&mirror)).unwrap();
    let conditions = ready["status"]["conditions"].as_array().unwrap();
    let of_earlier = conditions.iter().find(|c| c["status"] == "True" && !c["reason"].is_null());
    assert_eq!(of_earlier, None, "a reason belongs to the present status");

    // Pods of the server, with their tokens.
    for pod in ["web", "forced"] {
        cluster.run(pod);
        cluster.until_ready(pod).await;
    }
    let token = ["exec", "web", "--", "cat", "/var/run/secrets/kubernetes.io/serviceaccount/token"];
    let token = cluster.agent.keelson(&token).await.unwrap();
    assert!(token.status.success() && !token.stdout.is_empty(), "{token:?}");

    // A graceful deletion, a forced one, and a deletion of a mirror pod.
    cluster.delete("web", 5);
    cluster.until_gone("web").await;
    cluster.delete("forced", 0);
    cluster.until_stopped("forced").await;
    let uid = ready["metadata"]["uid"].clone();
    cluster.delete(&mirror, 0);
    let is_new =
        |server: &NodeServer| server.get(&path(&mirror)).is_some_and(|pod| pod["metadata"]["uid"] != uid);
    cluster.until("the mirror is made again", is_new).await;

    // The static pod is changed and then removed.
    cluster.agent.write_manifest("fixed.yaml", &static_pod("fixed", "2")).unwrap();
    let is_second = |server: &NodeServer| {
        let pod = server.get(&path(&mirror)).unwrap_or_default();
        pod["metadata"]["labels"]["version"] == "2" && condition(&pod, "Ready") == "True"
    };
    cluster.until("the mirror is that of the new one", is_second).await;
    cluster.agent.remove_manifest("fixed.yaml").unwrap();
    cluster.until_gone(&mirror).await;
    cluster.until_all_reported().await;

    // The requests that may be refused: their objects may be gone without the node knowing.
    let node = format!("/api/v1/nodes/{}", cluster.node);
    let lease = format!("/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{}", cluster.node);
    let csi_node = format!("/apis/storage.k8s.io/v1/csinodes/{}", cluster.node);
    let gone = ["forced", "web", &mirror].map(path);
    for ((request, code), times) in count_refusals(&cluster.server.take_refusals()) {
        let (verb, asked) = request.split_once(' ').unwrap();
        let is_expected = match (verb, code) {
            // Before the first registration.
            ("get", 404) => asked == node || asked == lease || asked == csi_node,
            // A write that races with a deletion.
            ("patch", 404 | 409) => gone.iter().any(|pod| asked == format!("{pod}/status")),
            ("delete", 404 | 409) => gone.iter().any(|pod| asked == pod),
            // A mirror is created without looking for an earlier one, which may still exist.
            ("post", 409) => asked == PODS,
            // A report about a pod that is gone from the server.
            ("get", 403) => gone.iter().any(|pod| asked == pod),
            _ => false,
        };
        assert!(
            is_expected && times <= TRIES,
            "{request}: {code}, {times} times\n{}",
            cluster.agent.log_tail()
        );
    }
    cluster.agent.end().unwrap();
}

#[tokio::test]
async fn after_a_partition_the_node_reports_the_true_status_of_its_pods() {
    let scratch = Scratch::new().unwrap();
    let cluster = Cluster::start(&scratch).await;
    let mirror = cluster.mirror("fixed");
    cluster.until_ready(&mirror).await;
    for pod in ["kept", "ending", "forced"] {
        cluster.run(pod);
        cluster.until_ready(pod).await;
    }
    let before = running(&cluster.agent).await.unwrap();

    cluster.network.cut();
    cluster.delete("ending", 5);
    cluster.delete("forced", 0);
    cluster.agent.write_manifest("new.yaml", &static_pod("new", "1")).unwrap();
    cluster.agent.remove_manifest("fixed.yaml").unwrap();
    cluster.until_stopped(&mirror).await;
    // The restarted node-status has forgotten its pending reports.
    let node_status = cluster.agent.service(ServiceName::NodeStatus).unwrap();
    node_status.signal(Signal::KILL);
    cluster.network.reset();
    cluster.network.heal();

    cluster.until_gone("ending").await;
    cluster.until_stopped("forced").await;
    cluster.until_ready(&cluster.mirror("new")).await;
    cluster.until_gone(&mirror).await;
    // No report that can never succeed delays a new pod.
    cluster.run("last");
    cluster.until_ready("last").await;
    cluster.until_all_reported().await;
    let after = running(&cluster.agent).await.unwrap();
    assert_eq!(after.get("kept/main"), before.get("kept/main"), "it has noticed nothing");
    assert_eq!(
        after.keys().filter(|name| name.starts_with("forced") || name.starts_with("ending")).count(),
        0
    );
    cluster.agent.end().unwrap();
}

const CLAIMS: &str = "/api/v1/namespaces/default/persistentvolumeclaims";
const VOLUMES: &str = "/api/v1/persistentvolumes";
const STORAGE: &str = "/apis/storage.k8s.io/v1";
const DRIVER: &str = "disks.example.org";

/// A claim `data` that is bound to the PersistentVolume `disk` of the CSI driver.
fn bind_claim(server: &NodeServer) {
    let claim = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": {"name": "data", "namespace": "default", "finalizers": ["kubernetes.io/pvc-protection"]},
        "spec": {
            "accessModes": ["ReadWriteOnce"], "volumeName": "disk", "volumeMode": "Filesystem",
            "storageClassName": "", "resources": {"requests": {"storage": "1Gi"}},
        },
        "status": {"phase": "Bound", "capacity": {"storage": "1Gi"}},
    });
    let claim = server.create(CLAIMS, &claim).unwrap();
    let reference = json!({"namespace": "default", "name": "data", "uid": claim["metadata"]["uid"]});
    let volume = json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "disk"},
        "spec": {
            "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"}, "volumeMode": "Filesystem",
            "claimRef": reference, "csi": {"driver": DRIVER, "volumeHandle": "handle"},
        },
        "status": {"phase": "Bound"},
    });
    server.create(VOLUMES, &volume).unwrap();
}

/// Starts the CSI driver, which registers at the node.
async fn start_driver(cluster: &Cluster, scratch: &Scratch, arguments: &[&str]) -> CsiDriver {
    let folder = scratch.path().join("driver");
    std::fs::create_dir(&folder).unwrap();
    let registry = cluster.agent.spec().root_dir.join("plugins_registry");
    let spec = CsiDriverSpec::new(env!("CARGO_BIN_EXE_csi-test-driver"), DRIVER, &folder, &registry);
    CsiDriver::start(spec.with(arguments)).await.unwrap()
}

/// The VolumeAttachment of the volume, with this status.
fn attachment(node: &str, status: &Value) -> Value {
    // volumes.md §11.4
    let digest = Sha256::digest(format!("handle{DRIVER}{node}"));
    let digest: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    json!({
        "apiVersion": "storage.k8s.io/v1", "kind": "VolumeAttachment", "metadata": {"name": format!("csi-{digest}")},
        "spec": {"attacher": DRIVER, "nodeName": node, "source": {"persistentVolumeName": "disk"}},
        "status": status,
    })
}

/// A pod `web` that uses the claim.
fn pod_with_claim(node: &str) -> Value {
    let mut pod = bound_pod("web", node);
    let mount = json!({"name": "data", "mountPath": "/data"});
    pod["spec"]["containers"][0]["volumeMounts"].as_array_mut().unwrap().push(mount);
    let volume = json!({"name": "data", "persistentVolumeClaim": {"claimName": "data"}});
    pod["spec"]["volumes"].as_array_mut().unwrap().push(volume);
    pod
}

/// Attaches the volume, as the controller of the control plane does.
fn attach(server: &NodeServer, node: &str, volume: &str) {
    let attachment = attachment(node, &json!({"attached": true}));
    server.create(&format!("{STORAGE}/volumeattachments"), &attachment).unwrap();
    let attached = json!({"status": {"volumesAttached": [{"name": volume, "devicePath": ""}]}});
    server.patch(&format!("/api/v1/nodes/{node}"), &attached).unwrap();
}

#[tokio::test]
async fn a_csi_volume_waits_until_it_is_reported_in_use_and_attached() {
    let scratch = Scratch::new().unwrap();
    let cluster = Cluster::start(&scratch).await;
    let driver = start_driver(
        &cluster,
        &scratch,
        &["--stage", "--node-id", "id-1", "--topology", &format!("{ZONE}=z1")],
    )
    .await;
    let csi_node = format!("{STORAGE}/csinodes/{}", cluster.node);
    let is_listed = |server: &NodeServer| {
        let drivers = server.get(&csi_node).unwrap_or_default()["spec"]["drivers"].clone();
        drivers.as_array().is_some_and(|drivers| drivers.iter().any(|driver| driver["name"] == DRIVER))
    };
    cluster.until("the driver is in the CSINode", is_listed).await;
    cluster.until("the Node shows the driver", |server| shown_driver(server, &cluster.node) == "id-1").await;

    bind_claim(&cluster.server);
    cluster.server.create(PODS, &pod_with_claim(&cluster.node)).unwrap();

    let node = format!("/api/v1/nodes/{}", cluster.node);
    let name = format!("kubernetes.io/csi/{DRIVER}^handle");
    let is_in_use = |server: &NodeServer| {
        let in_use = server.get(&node).unwrap_or_default()["status"]["volumesInUse"].clone();
        in_use.as_array().is_some_and(|names| names.iter().any(|found| found == name.as_str()))
    };
    cluster.until("the volume is in use", is_in_use).await;
    until_cause(&cluster.agent, "web", "volumes", "attach-detach controller", "it is not attached")
        .await
        .unwrap();
    assert_eq!(driver.calls().unwrap().iter().filter(|call| call["method"] == "NodeStageVolume").count(), 0);

    attach(&cluster.server, &cluster.node, &name);
    cluster.until_ready("web").await;
    driver.until_call("NodePublishVolume", "OK").await.unwrap();
    cluster.delete("web", 0);
    driver.until_call("NodeUnstageVolume", "OK").await.unwrap();
    cluster.until("the volume is not in use any more", |server| !is_in_use(server)).await;
    cluster.agent.end().unwrap();
}

/// Grows the PersistentVolume and asks for more in the claim, as the resizer of the control plane leaves them to the node.
fn request_expansion(server: &NodeServer, size: &str) {
    let volume = json!({"spec": {"capacity": {"storage": size}}});
    server.patch(&format!("{VOLUMES}/disk"), &volume).unwrap();
    let claim = json!({
        "spec": {"resources": {"requests": {"storage": size}}},
        "status": {
            "allocatedResources": {"storage": size},
            "allocatedResourceStatuses": {"storage": "NodeResizePending"},
            "conditions": [{"type": "FileSystemResizePending", "status": "True"}],
        },
    });
    server.patch(&format!("{CLAIMS}/data"), &claim).unwrap();
}

#[tokio::test]
async fn a_csi_volume_grows_while_it_is_in_use_and_its_claim_says_so() {
    let scratch = Scratch::new().unwrap();
    let cluster = Cluster::start(&scratch).await;
    let driver =
        start_driver(&cluster, &scratch, &["--stage", "--node-id", "id-1", "--capabilities", "expand"]).await;
    bind_claim(&cluster.server);
    attach(&cluster.server, &cluster.node, &format!("kubernetes.io/csi/{DRIVER}^handle"));
    cluster.server.create(PODS, &pod_with_claim(&cluster.node)).unwrap();
    cluster.until_ready("web").await;
    let before = running(&cluster.agent).await.unwrap()["web/main"].clone();

    // The driver fails once: the claim says that the node has not resized the volume, and the node tries again.
    driver
        .set_faults(&json!({"NodeExpandVolume": {"fail": {"code": 13, "times": 1, "message": "no room"}}}))
        .unwrap();
    request_expansion(&cluster.server, "2Gi");
    // Pods are synchronised once a minute; a change does it at once.
    cluster.server.patch(&path("web"), &json!({"metadata": {"annotations": {"synced": "1"}}})).unwrap();
    driver.until_call("NodeExpandVolume", "OK").await.unwrap();
    let has_grown = |server: &NodeServer| {
        let status = server.get(&format!("{CLAIMS}/data")).unwrap_or_default()["status"].clone();
        status["capacity"]["storage"] == "2Gi"
            && status["allocatedResourceStatuses"].as_object().is_none_or(serde_json::Map::is_empty)
            && status["conditions"].as_array().is_none_or(Vec::is_empty)
    };
    let grown = cluster.server.until(3 * LIMIT, "the claim has grown", has_grown).await;
    grown.unwrap_or_else(|error| {
        let claim = cluster.server.get(&format!("{CLAIMS}/data"));
        panic!("{error:#}\n{claim:#?}\n{}", cluster.agent.log_tail())
    });
    assert_eq!(running(&cluster.agent).await.unwrap()["web/main"], before, "the container has run on");
    let refusals = count_refusals(&cluster.server.take_refusals());
    assert!(refusals.keys().all(|(what, _)| !what.contains("persistentvolumeclaims")), "{refusals:?}");
    cluster.agent.end().unwrap();
}

#[tokio::test]
async fn a_pod_whose_csi_volume_has_no_room_on_the_node_is_rejected() {
    let scratch = Scratch::new().unwrap();
    let cluster = Cluster::start(&scratch).await;
    let object = json!({
        "apiVersion": "storage.k8s.io/v1", "kind": "CSIDriver", "metadata": {"name": DRIVER},
        "spec": {"nodeAllocatableUpdatePeriodSeconds": 3600},
    });
    cluster.server.create(&format!("{STORAGE}/csidrivers"), &object).unwrap();
    let driver = start_driver(&cluster, &scratch, &["--stage"]).await;
    bind_claim(&cluster.server);
    let full = json!({"attached": false, "attachError": {"errorCode": 8, "message": "no slot is free"}});
    cluster
        .server
        .create(&format!("{STORAGE}/volumeattachments"), &attachment(&cluster.node, &full))
        .unwrap();
    cluster.server.create(PODS, &pod_with_claim(&cluster.node)).unwrap();
    let is_rejected = |server: &NodeServer| {
        let status = server.get(&path("web")).unwrap_or_default()["status"].clone();
        status["phase"] == "Failed" && status["reason"] == "VolumeAttachmentLimitExceeded"
    };
    // The limit is examined when a wait of a minute ends.
    let rejected = cluster.server.until(3 * LIMIT, "the pod is rejected", is_rejected).await;
    rejected.unwrap_or_else(|error| panic!("{error:#}\n{}", cluster.agent.log_tail()));
    let status = cluster.server.get(&path("web")).unwrap()["status"].clone();
    assert!(status["message"].as_str().unwrap().contains("no slot is free"), "{status}");
    let asked = eventually(LIMIT, "the driver is asked again for its limit", async || {
        let calls = driver.calls().unwrap_or_default();
        calls.iter().filter(|call| call["method"] == "NodeGetInfo").count() == 2
    });
    asked.await.unwrap_or_else(|error| panic!("{error:#}\n{}", cluster.agent.log_tail()));
    cluster.agent.end().unwrap();
}

/// The annotation of the Node with the node IDs of CSI drivers.
const NODE_IDS: &str = "csi.volume.kubernetes.io/nodeid";
/// The label with the topology of the driver.
const ZONE: &str = "topology.example.org/zone";

/// What the Node shows of the driver: its node ID, if the label is there too.
fn shown_driver(server: &NodeServer, node: &str) -> String {
    let metadata = server.get(&format!("/api/v1/nodes/{node}")).unwrap_or_default()["metadata"].clone();
    if metadata["labels"][ZONE] != "z1" {
        return "no label".to_owned();
    }
    let Some(text) = metadata["annotations"][NODE_IDS].as_str() else { return "no annotation".to_owned() };
    let ids: Value = serde_json::from_str(text).unwrap();
    ids[DRIVER].as_str().unwrap_or("no ID").to_owned()
}

async fn until_registered(cluster: &Cluster, driver: &CsiDriver, times: usize) {
    let registered = eventually(LIMIT, format!("the driver is registered {times} times"), async || {
        let calls = driver.calls().unwrap_or_default();
        calls.iter().filter(|call| call["request"]["plugin_registered"] == true).count() == times
    });
    registered.await.unwrap_or_else(|error| panic!("{error:#}\n{}", cluster.agent.log_tail()));
}

#[tokio::test]
async fn the_node_shows_a_csi_driver_through_kills_until_it_leaves_and_keeps_its_labels() {
    let scratch = Scratch::new().unwrap();
    let cluster = Cluster::start(&scratch).await;
    let driver =
        start_driver(&cluster, &scratch, &["--node-id", "id-1", "--topology", &format!("{ZONE}=z1")]).await;
    let node = cluster.node.clone();
    cluster.until("the Node shows the driver", |server| shown_driver(server, &node) == "id-1").await;

    until_registered(&cluster, &driver, 1).await;
    cluster.agent.service(ServiceName::VolumeManager).unwrap().signal(Signal::KILL);
    until_registered(&cluster, &driver, 2).await;
    assert_eq!(shown_driver(&cluster.server, &node), "id-1");

    cluster.agent.service(ServiceName::NodeStatus).unwrap().signal(Signal::KILL);
    drop(driver);
    cluster.until("the driver is gone", |server| shown_driver(server, &node) == "no annotation").await;
    cluster.agent.end().unwrap();
}
