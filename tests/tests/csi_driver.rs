//! The CSI driver for tests itself: it mounts, it is strict, and its faults are what they say.

#![allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them")]
#![allow(clippy::unwrap_used, reason = "the functions are part of tests")]

use std::path::{Path, PathBuf};

use keelson_proto::csi::v1 as pb;
use keelson_proto::csi::v1::node_client::NodeClient;
use keelson_proto::pluginregistration as reg;
use keelson_proto::pluginregistration::registration_client::RegistrationClient;
use keelson_service_kit::{PeerChannel, connect_foreign};
use keelson_testkit::Scratch;
use keelson_tests::csi_driver::{CsiDriver, CsiDriverSpec, mount_points};
use serde_json::{Value, json};
use tonic::Code;

const BINARY: &str = env!("CARGO_BIN_EXE_csi-test-driver");

async fn start(scratch: &Scratch, arguments: &[&str]) -> CsiDriver {
    let folder = scratch.path().join("driver");
    let spec = CsiDriverSpec::new(BINARY, "csi.example.com", &folder, &scratch.path().join("registry"));
    CsiDriver::start(spec.with(arguments)).await.unwrap()
}

fn node(driver: &CsiDriver) -> NodeClient<PeerChannel> {
    NodeClient::new(connect_foreign("the CSI driver", &driver.spec().socket()))
}

fn capability(block: bool) -> Option<pb::VolumeCapability> {
    use pb::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
    let access =
        if block { AccessType::Block(BlockVolume {}) } else { AccessType::Mount(MountVolume::default()) };
    Some(pb::VolumeCapability { access_mode: Some(AccessMode { mode: 1 }), access_type: Some(access) })
}

fn text(path: &Path) -> String {
    path.to_str().unwrap().to_owned()
}

fn is_mounted(path: &Path) -> bool {
    mount_points().unwrap().iter().any(|point| point == path)
}

fn stage(staging: &Path, block: bool) -> pb::NodeStageVolumeRequest {
    pb::NodeStageVolumeRequest {
        volume_id: "v".to_owned(),
        staging_target_path: text(staging),
        volume_capability: capability(block),
        secrets: [("key".to_owned(), "hunter2".to_owned())].into(),
        ..pb::NodeStageVolumeRequest::default()
    }
}

fn publish(staging: &Path, target: &Path, block: bool) -> pb::NodePublishVolumeRequest {
    pb::NodePublishVolumeRequest {
        volume_id: "v".to_owned(),
        staging_target_path: text(staging),
        target_path: text(target),
        volume_capability: capability(block),
        ..pb::NodePublishVolumeRequest::default()
    }
}

/// Makes a request wrong.
type Change = fn(&mut pb::NodePublishVolumeRequest);

fn folders(scratch: &Scratch) -> (PathBuf, PathBuf) {
    let staging = scratch.path().join("staging");
    std::fs::create_dir_all(&staging).unwrap();
    (staging, scratch.path().join("target"))
}

#[tokio::test]
async fn the_driver_registers_and_mounts_a_volume_that_keeps_its_files() {
    let scratch = Scratch::new().unwrap();
    let driver = start(&scratch, &["--stage", "--max-volumes", "7"]).await;
    let channel = connect_foreign("the registration", &driver.spec().registration_socket());
    let info = RegistrationClient::new(channel).get_info(reg::InfoRequest {}).await.unwrap().into_inner();
    assert_eq!((info.r#type.as_str(), info.name.as_str()), ("CSIPlugin", "csi.example.com"));
    assert_eq!(info.endpoint, text(&driver.spec().socket()));
    let mut node = node(&driver);
    let info = node.node_get_info(pb::NodeGetInfoRequest {}).await.unwrap().into_inner();
    assert_eq!((info.node_id.as_str(), info.max_volumes_per_node), ("test-node", 7));

    let (staging, target) = folders(&scratch);
    for round in 0..2 {
        node.node_stage_volume(stage(&staging, false)).await.unwrap();
        for _ in 0..2 {
            node.node_publish_volume(publish(&staging, &target, false)).await.unwrap();
        }
        assert!(is_mounted(&staging) && is_mounted(&target));
        assert_eq!(target.join("file").exists(), round > 0);
        std::fs::write(target.join("file"), b"x").unwrap();
        for _ in 0..2 {
            let request =
                pb::NodeUnpublishVolumeRequest { volume_id: "v".into(), target_path: text(&target) };
            node.node_unpublish_volume(request).await.unwrap();
        }
        let request =
            pb::NodeUnstageVolumeRequest { volume_id: "v".into(), staging_target_path: text(&staging) };
        node.node_unstage_volume(request).await.unwrap();
        assert!(!is_mounted(&staging) && !target.exists());
    }
    let staged = driver.until_call("NodeStageVolume", "OK").await.unwrap();
    assert_eq!(staged["request"]["secrets"], json!(["key"]));
    assert!(!format!("{:?}", driver.calls().unwrap()).contains("hunter2"));
}

#[tokio::test]
async fn the_driver_refuses_what_csi_does_not_allow() {
    let scratch = Scratch::new().unwrap();
    let driver = start(&scratch, &["--stage"]).await;
    let mut node = node(&driver);
    let (staging, target) = folders(&scratch);
    let cases: [(Change, Code); 6] = [
        (|request| request.volume_id.clear(), Code::InvalidArgument),
        (|request| request.target_path.clear(), Code::InvalidArgument),
        (|request| request.volume_capability = None, Code::InvalidArgument),
        (|request| request.staging_target_path.clear(), Code::InvalidArgument),
        (|request| request.target_path.push_str("/without/parent"), Code::InvalidArgument),
        (|_| {}, Code::FailedPrecondition),
    ];
    for (change, code) in cases {
        let mut request = publish(&staging, &target, false);
        change(&mut request);
        let status = node.node_publish_volume(request).await.unwrap_err();
        assert_eq!(status.code(), code, "{status}");
    }
}

#[tokio::test]
async fn a_block_volume_is_a_loop_device() {
    use std::os::unix::fs::FileTypeExt as _;
    let has_loop_devices = Path::new("/dev/loop-control").exists();
    assert!(
        has_loop_devices,
        "there is no /dev/loop-control; `modprobe loop` loads the module that makes it"
    );
    let scratch = Scratch::new().unwrap();
    let driver = start(&scratch, &["--stage"]).await;
    let mut node = node(&driver);
    let (staging, target) = folders(&scratch);
    node.node_stage_volume(stage(&staging, true)).await.unwrap();
    node.node_publish_volume(publish(&staging, &target, true)).await.unwrap();
    assert!(std::fs::metadata(&target).unwrap().file_type().is_block_device());
    let request = pb::NodeUnpublishVolumeRequest { volume_id: "v".into(), target_path: text(&target) };
    node.node_unpublish_volume(request).await.unwrap();
    assert!(!target.exists());
}

#[tokio::test]
async fn each_fault_does_what_it_says() {
    let scratch = Scratch::new().unwrap();
    let mut driver = start(&scratch, &[]).await;
    let mut client = node(&driver);
    let (_, target) = folders(&scratch);
    let request = || publish(Path::new(""), &target, false);
    let fault = |fault: Value| json!({"NodePublishVolume": fault});
    driver.set_faults(&fault(json!({"fail": {"code": 13, "times": 2}}))).unwrap();
    for _ in 0..2 {
        assert_eq!(client.node_publish_volume(request()).await.unwrap_err().code(), Code::Internal);
    }
    driver.set_faults(&fault(json!({"lie": true}))).unwrap();
    client.node_publish_volume(request()).await.unwrap();
    assert!(!target.exists());
    for garbage in ["empty", "broken", "large"] {
        driver.set_faults(&fault(json!({"garbage": garbage}))).unwrap();
        client.node_publish_volume(request()).await.unwrap_err();
    }
    driver.set_faults(&fault(json!({"hang": true}))).unwrap();
    let mut hanging = client.clone();
    let message = request();
    let call = tokio::spawn(async move { hanging.node_publish_volume(message).await });
    driver.until_call("NodePublishVolume", "hang").await.unwrap();
    assert!(!call.is_finished());
    driver.set_faults(&json!({})).unwrap();
    call.await.unwrap().unwrap();
    assert!(is_mounted(&target));

    driver.set_faults(&fault(json!({"exit": 3}))).unwrap();
    client.node_publish_volume(request()).await.unwrap_err();
    driver.set_faults(&json!({})).unwrap();
    driver.restart().await.unwrap();
    assert!(is_mounted(&target), "mounts survive the driver");
    let mut client = node(&driver);
    client.node_publish_volume(request()).await.unwrap();
    drop(driver);
    assert!(!is_mounted(&target));
}
