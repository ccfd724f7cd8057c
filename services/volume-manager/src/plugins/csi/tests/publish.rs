//! Publishing and unpublishing filesystem volumes.

use std::fs;

use keelson_volume_manager_core::desire::FsGroupPolicy;
use keelson_volume_manager_core::wait_owner::WaitOwner;
use keelson_volume_manager_core::world::{FailureClass, MountLabel};
use serde_json::{Value, json};

use super::world::{
    CLASSES, Call, DRIVER, MOUNT_GROUP, STAGE, World, device_request, inline, map, persistent, place,
};
use crate::plugins::{Plugin as _, PluginError, SetUpRequest};

const VOLUME: &str = "pods/u/volumes/kubernetes.io~csi/pv1";

fn inline_volume() -> Value {
    json!({"driver": DRIVER, "volumeAttributes": {"a": "b"}, "nodePublishSecretRef": {"name": "p"}})
}

#[tokio::test]
async fn publishing_passes_paths_and_writes_the_data_file_before_the_call() {
    let world = World::new(&[STAGE]);
    let mut spec = persistent("u", &json!({"volumeAttributes": {"a": "b"}}));
    spec.read_only = true;
    let ready = world.csi.set_up(&spec, world.set_up_request()).await.unwrap();
    assert_eq!(ready.host_path, world.root().join(VOLUME).join("mount"));
    let request = world.last_publish();
    assert_eq!(request.target_path, ready.host_path.to_str().unwrap());
    assert!(request.staging_target_path.ends_with("/globalmount") && request.readonly, "{request:?}");
    assert_eq!(request.volume_context, map(&[("a", "b")]), "the CSIDriver asks for nothing else");
    let data = world.script.lock().unwrap().data_at_call[0].clone().expect("written before the call");
    let attachment = data["attachmentID"].as_str().unwrap().to_owned();
    assert!(attachment.starts_with("csi-"), "{attachment}");
    let expected = json!({"specVolID": "pv1", "volumeHandle": "vol-1", "driverName": DRIVER, "nodeName": "n1",
        "volumeLifecycleMode": "Persistent", "attachmentID": attachment});
    assert_eq!(data, expected);
}

#[tokio::test]
async fn files_have_labels_if_the_drivers_mount_shows_that() {
    let world = World::new(&[STAGE]);
    let spec = persistent("u", &json!({}));
    let ready = world.csi.set_up(&spec, world.set_up_request()).await.unwrap();
    for (options, expected) in
        [("rw,relatime,rw,seclabel", true), ("rw,relatime,rw", false), ("rw,context=\"u:r:t:s0\"", false)]
    {
        world.mounts.options.lock().unwrap().insert(ready.host_path.clone(), options.to_owned());
        assert_eq!(world.csi.has_file_labels(&spec, &ready.host_path).await.unwrap(), expected, "{options}");
    }
}

#[tokio::test]
async fn a_driver_without_stage_gets_no_staging_path() {
    let world = World::new(&[]);
    world.csi.set_up(&persistent("u", &json!({})), world.set_up_request()).await.unwrap();
    assert_eq!(world.last_publish().staging_target_path, "");
}

#[tokio::test]
async fn an_inline_volume_has_an_id_of_its_own_and_a_secret_of_the_pods_namespace() {
    let world = World::new(&[STAGE]);
    world.set_driver(json!({"volumeLifecycleModes": ["Ephemeral"], "podInfoOnMount": true}));
    world.set_secret("ns/p", "key", "aHVudGVyMg==");
    world.set_secret("other/p", "key", "b3RoZXI=");
    let mut source = inline_volume();
    source["nodePublishSecretRef"]["namespace"] = json!("other");
    let spec = inline("u", &source);
    world.csi.set_up(&spec, world.set_up_request()).await.unwrap();
    let request = world.last_publish();
    assert!(request.volume_id.starts_with("csi-") && request.volume_id.len() == 68, "{}", request.volume_id);
    assert_eq!(request.staging_target_path, "");
    assert_eq!(request.secrets, map(&[("key", "hunter2")]), "never of the namespace other");
    assert_eq!(request.volume_context["csi.storage.k8s.io/ephemeral"], "true");
    let data = world.script.lock().unwrap().data_at_call[0].clone().unwrap();
    assert_eq!((&data["volumeLifecycleMode"], &data["specVolID"]), (&json!("Ephemeral"), &json!("data")));
    world.csi.tear_down(&place(&spec)).await.unwrap();
    let Some(Call::Unpublish(unpublish)) = world.calls().last().cloned() else { panic!("not unpublished") };
    assert_eq!(unpublish.volume_id, request.volume_id);
}

#[tokio::test]
async fn a_lifecycle_mode_that_the_csi_driver_lacks_is_a_transient_error() {
    let world = World::new(&[]);
    let source = json!({"driver": DRIVER});
    for (driver, is_inline, text) in [
        (None, true, "there is no CSIDriver"),
        (Some(json!({})), true, "does not support Ephemeral volumes"),
        (Some(json!({"volumeLifecycleModes": ["Ephemeral"]})), false, "does not support Persistent volumes"),
    ] {
        match driver {
            Some(spec) => world.set_driver(spec),
            None => *world.api.driver.lock().unwrap() = None,
        }
        let spec = if is_inline { inline("u", &source) } else { persistent("u", &json!({})) };
        let error = world.csi.set_up(&spec, world.set_up_request()).await.unwrap_err();
        assert!(error.message.contains(text) && error.class == FailureClass::Transient, "{error}");
    }
    // A change is noticed at once: a pod waits for it.
    world.set_driver(json!({"attachRequired": false, "volumeLifecycleModes": ["Persistent", "Ephemeral"]}));
    world.csi.set_up(&persistent("u", &json!({})), world.set_up_request()).await.unwrap();
    world.csi.set_up(&inline("u", &source), world.set_up_request()).await.unwrap();
}

#[tokio::test]
async fn pod_info_and_tokens_are_added_as_the_csi_driver_asks() {
    let world = World::new(&[]);
    let requests = json!([{"audience": "vault", "expirationSeconds": 700}, {}]);
    world.set_driver(json!({"attachRequired": false, "podInfoOnMount": true, "tokenRequests": requests}));
    let spec = persistent("u", &json!({"volumeAttributes": {"a": "b"}}));
    world.csi.set_up(&spec, world.set_up_request()).await.unwrap();
    let context = world.last_publish().volume_context;
    let info = |key: &str| context[&format!("csi.storage.k8s.io/{key}")].as_str();
    assert_eq!((info("pod.name"), info("pod.namespace"), info("pod.uid")), ("p", "ns", "u"));
    assert_eq!((info("serviceAccount.name"), info("ephemeral"), context["a"].as_str()), ("sa", "false", "b"));
    let tokens: Value = serde_json::from_str(info("serviceAccount.tokens")).unwrap();
    assert_eq!(
        (&tokens["vault"]["token"], &tokens[""]["token"]),
        (&json!("secret-token-1"), &json!("secret-token-2"))
    );
    assert!(tokens["vault"]["expirationTimestamp"].as_str().unwrap().ends_with('Z'), "{tokens}");
    let names = world.api.tokens.lock().unwrap().clone();
    assert_eq!(names.iter().map(|name| name.expiration_seconds).collect::<Vec<_>>(), [700, 3600]);
    assert!(
        spec.persistent.as_ref().unwrap().spec.other["csi"]["volumeAttributes"].as_object().unwrap().len()
            == 1
    );
}

#[tokio::test]
async fn tokens_go_into_the_secrets_if_the_csi_driver_says_so() {
    let world = World::new(&[]);
    world.set_driver(
        json!({"attachRequired": false, "tokenRequests": [{}], "serviceAccountTokenInSecrets": true}),
    );
    world.csi.set_up(&persistent("u", &json!({})), world.set_up_request()).await.unwrap();
    let request = world.last_publish();
    assert!(request.secrets.contains_key("csi.storage.k8s.io/serviceAccount.tokens"));
    assert!(request.volume_context.is_empty());
}

#[tokio::test]
async fn a_token_is_used_again_until_it_is_to_be_renewed_and_forgotten_with_the_pod() {
    let world = World::new(&[]);
    world.set_driver(json!({"attachRequired": false, "tokenRequests": [{}], "requiresRepublish": true}));
    let spec = persistent("u", &json!({}));
    let republish = SetUpRequest { is_remount: true, ..world.set_up_request() };
    let issued = || world.api.tokens.lock().unwrap().len();
    world.csi.set_up(&spec, republish).await.unwrap();
    world.csi.set_up(&spec, republish).await.unwrap();
    assert_eq!(issued(), 1);
    world.csi.tear_down(&place(&spec)).await.unwrap();
    // Renewed at once, and used as long as it is valid.
    *world.api.token_lifetime.lock().unwrap() = 4;
    world.csi.set_up(&spec, republish).await.unwrap();
    assert_eq!(issued(), 2);
    *world.api.token_lifetime.lock().unwrap() = -4;
    world.csi.tear_down(&place(&spec)).await.unwrap();
    world.csi.set_up(&spec, republish).await.unwrap();
    assert_eq!(issued(), 3);
    *world.api.token_error.lock().unwrap() = Some("forbidden".to_owned());
    let error = world.csi.set_up(&spec, republish).await.unwrap_err();
    assert!(
        error.message.contains("cannot create the token of the service account \"sa\": forbidden"),
        "{error}"
    );
    assert_eq!((error.class, error.owner), (FailureClass::Transient, WaitOwner::ApiServer));
    assert!(world.files().contains(&format!("{VOLUME}/mount")), "the mount stays");
}

#[tokio::test]
async fn each_code_of_a_failed_publish_has_its_class_and_only_final_ones_clean_up() {
    let world = World::new(&[]);
    let spec = persistent("u", &json!({}));
    for (code, class) in CLASSES {
        world.fail("publish", code);
        let error = world.csi.set_up(&spec, world.set_up_request()).await.unwrap_err();
        assert_eq!(error.class, class, "{code}: {error}");
        let is_left = world.root().join(VOLUME).exists();
        assert_eq!(is_left, class == FailureClass::Uncertain, "{code}: {:?}", world.files());
        if is_left {
            fs::remove_dir_all(world.root().join(VOLUME)).unwrap();
        }
    }
}

#[tokio::test]
async fn a_final_error_of_a_mounted_or_reconstructed_volume_removes_nothing() {
    let world = World::new(&[]);
    let spec = persistent("u", &json!({}));
    world.csi.set_up(&spec, world.set_up_request()).await.unwrap();
    let files = world.files();
    let target = world.root().join(VOLUME).join("mount");
    world.fail("publish", 13);
    let base = world.set_up_request();
    for request in
        [SetUpRequest { is_remount: true, ..base }, SetUpRequest { is_reconstructed: true, ..base }]
    {
        // Not even if nothing seems to be mounted.
        world.mounts.remove(&target);
        world.csi.set_up(&spec, request).await.unwrap_err();
        assert_eq!(world.files(), files);
    }
    world.mounts.add(&target);
    world.csi.set_up(&spec, base).await.unwrap_err();
    assert_eq!(world.files(), files, "something is mounted");
}

#[tokio::test]
async fn publishing_without_driver_secret_or_attachment_is_transient_and_starts_nothing() {
    let world = World::new(&[]);
    world.set_driver(json!({"attachRequired": true}));
    let spec = persistent("u", &json!({}));
    let error = world.csi.set_up(&spec, world.set_up_request()).await.unwrap_err();
    assert!(error.message.contains("VolumeAttachment"), "{error}");
    assert_eq!(error.class, FailureClass::Transient);
    let secret = persistent("u", &json!({"nodePublishSecretRef": {"name": "s", "namespace": "sec"}}));
    let error = world.csi.set_up(&secret, world.set_up_request()).await.unwrap_err();
    assert!(error.message.contains("sec/s") && error.class == FailureClass::Transient, "{error}");
    world.unregister();
    let error = world.csi.set_up(&spec, world.set_up_request()).await.unwrap_err();
    assert!(
        error.message.contains("registered CSI drivers") && error.class == FailureClass::Transient,
        "{error}"
    );
    assert!(world.calls().is_empty() && world.files().is_empty());
}

#[tokio::test]
async fn a_driver_that_reports_success_without_a_target_is_an_uncertain_error() {
    let world = World::new(&[]);
    world.script.lock().unwrap().lies = true;
    let error = world.csi.set_up(&persistent("u", &json!({})), world.set_up_request()).await.unwrap_err();
    assert!(error.message.contains("does not exist") && error.message.contains(DRIVER), "{error}");
    assert_eq!(error.class, FailureClass::Uncertain);
}

#[tokio::test]
async fn fs_group_is_applied_as_the_csi_driver_says() {
    let rows = [
        (json!({}), "ext4", false, true),
        (json!({}), "", false, false),
        (json!({}), "ext4", true, false),
        (json!({"fsGroupPolicy": "File"}), "", false, true),
        (json!({"fsGroupPolicy": "File"}), "", true, false),
        (json!({"fsGroupPolicy": "None"}), "ext4", false, false),
    ];
    for (mut driver, fs_type, read_only, walks) in rows {
        let world = World::new(&[]);
        driver["attachRequired"] = json!(false);
        world.set_driver(driver.clone());
        let mut spec = persistent("u", &json!({"fsType": fs_type}));
        spec.fs_group = Some(77);
        spec.fs_group_policy = FsGroupPolicy::OnRootMismatch;
        spec.read_only = read_only;
        let ready = world.csi.set_up(&spec, world.set_up_request()).await.unwrap();
        let expected =
            if walks { vec![(ready.host_path, 77, FsGroupPolicy::OnRootMismatch)] } else { Vec::new() };
        assert_eq!(*world.mounts.walks.lock().unwrap(), expected, "{driver} {fs_type} {read_only}");
    }
}

#[tokio::test]
async fn a_driver_with_mount_group_applies_fs_group_itself() {
    let world = World::new(&[MOUNT_GROUP]);
    let mut spec = persistent("u", &json!({"fsType": "ext4"}));
    spec.fs_group = Some(77);
    world.csi.set_up(&spec, world.set_up_request()).await.unwrap();
    assert!(world.mounts.walks.lock().unwrap().is_empty());
    let capability = format!("{:?}", world.last_publish().volume_capability);
    assert!(capability.contains(r#"volume_mount_group: "77""#), "{capability}");
}

#[tokio::test]
async fn a_failed_walk_is_an_uncertain_error_and_an_unknown_policy_starts_nothing() {
    let world = World::new(&[]);
    let mut spec = persistent("u", &json!({"fsType": "ext4"}));
    spec.fs_group = Some(77);
    *world.mounts.walk_error.lock().unwrap() = Some(PluginError::new("cannot read a folder"));
    let error = world.csi.set_up(&spec, world.set_up_request()).await.unwrap_err();
    assert_eq!((error.class, error.message.as_str()), (FailureClass::Uncertain, "cannot read a folder"));
    assert_eq!(world.take_calls(), ["publish"]);

    let world = World::new(&[]);
    world.set_driver(json!({"attachRequired": false, "fsGroupPolicy": "Sometimes"}));
    let error = world.csi.set_up(&spec, world.set_up_request()).await.unwrap_err();
    assert!(error.message.contains("unknown fsGroupPolicy \"Sometimes\""), "{error}");
    assert!(world.calls().is_empty());
}

#[tokio::test]
async fn an_unknown_access_mode_is_refused() {
    let world = World::new(&[STAGE]);
    let mut spec = persistent("u", &json!({}));
    let mut volume = (**spec.persistent.as_ref().unwrap()).clone();
    volume.spec.access_modes = vec!["ReadWriteSometimes".to_owned()];
    spec.persistent = Some(volume.into());
    let errors = [
        world.csi.set_up(&spec, world.set_up_request()).await.unwrap_err(),
        world.csi.mount_device(&spec, device_request()).await.unwrap_err(),
    ];
    for error in errors {
        assert!(error.message.contains("ReadWriteSometimes") && error.owner == WaitOwner::You, "{error}");
    }
    assert!(world.calls().is_empty());
}

#[tokio::test]
async fn a_published_volume_has_the_selinux_label_in_flags_and_data_file() {
    let world = World::new(&[]);
    let label = MountLabel::Context("system_u:object_r:container_file_t:s0".to_owned());
    let request = SetUpRequest { label: &label, ..world.set_up_request() };
    world.csi.set_up(&persistent("u", &json!({})), request).await.unwrap();
    let capability = format!("{:?}", world.last_publish().volume_capability);
    assert!(capability.contains(r#"context=\"system_u:object_r:container_file_t:s0\""#), "{capability}");
    let data = world.script.lock().unwrap().data_at_call[0].clone().unwrap();
    assert_eq!(data["seLinuxMountContext"], "system_u:object_r:container_file_t:s0");
    let broken = MountLabel::Context("a\",ro".to_owned());
    let request = SetUpRequest { label: &broken, ..world.set_up_request() };
    world.csi.set_up(&persistent("v", &json!({})), request).await.unwrap_err();
    assert_eq!(world.take_calls(), ["publish"]);
}

#[tokio::test]
async fn no_error_of_the_driver_shows_a_secret_or_a_token() {
    let world = World::new(&[]);
    world.set_driver(json!({"attachRequired": false, "tokenRequests": [{}]}));
    world.set_secret("sec/p", "key", "aHVudGVyMg==");
    let status = tonic::Status::internal("denied: hunter2 secret-token-1");
    world.script.lock().unwrap().errors.insert("publish", status);
    let spec = persistent("u", &json!({"nodePublishSecretRef": {"name": "p", "namespace": "sec"}}));
    let error = world.csi.set_up(&spec, world.set_up_request()).await.unwrap_err();
    assert!(error.message.contains("denied"), "{error}");
    assert!(!error.message.contains("hunter2") && !error.message.contains("secret-token-1"), "{error}");
}

#[tokio::test]
async fn unpublishing_needs_only_the_disk_and_removes_everything() {
    let world = World::new(&[]);
    let spec = persistent("u", &json!({}));
    world.csi.set_up(&spec, world.set_up_request()).await.unwrap();
    *world.api.driver_error.lock().unwrap() = Some("the API server is down".to_owned());
    world.csi.tear_down(&place(&spec)).await.unwrap();
    let Some(Call::Unpublish(request)) = world.calls().last().cloned() else { panic!("not unpublished") };
    assert_eq!(request.volume_id, "vol-1");
    assert!(request.target_path.ends_with(&format!("{VOLUME}/mount")));
    assert!(!world.root().join(VOLUME).exists());
    world.csi.tear_down(&place(&spec)).await.unwrap();
    assert_eq!(world.take_calls(), ["publish", "unpublish"], "a volume that is not there is no error");
}

#[tokio::test]
async fn a_failed_unpublish_keeps_the_data_file_for_the_next_attempt() {
    let world = World::new(&[]);
    let spec = persistent("u", &json!({}));
    world.csi.set_up(&spec, world.set_up_request()).await.unwrap();
    for (code, class) in CLASSES {
        world.fail("unpublish", code);
        let error = world.csi.tear_down(&place(&spec)).await.unwrap_err();
        assert_eq!(error.class, class, "{error}");
        assert_eq!(world.data_files().len(), 1);
    }
    world.succeed();
    world.unregister();
    let error = world.csi.tear_down(&place(&spec)).await.unwrap_err();
    assert_eq!(error.class, FailureClass::Transient, "{error}");
    world.register_again();
    world.script.lock().unwrap().lies = true;
    let error = world.csi.tear_down(&place(&spec)).await.unwrap_err();
    assert!(error.message.contains("is still mounted") && error.class == FailureClass::Uncertain, "{error}");
    world.script.lock().unwrap().lies = false;
    world.csi.tear_down(&place(&spec)).await.unwrap();
    assert!(world.data_files().is_empty());
}
