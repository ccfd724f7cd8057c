mod real;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use keelson_service_kit::{CancellationToken, Progress};
use keelson_testkit::service::until_some;
use keelson_volume_manager_core::wait_owner::WaitOwner;
use keelson_volume_manager_core::world::FailureClass;
use serde_json::{Value, json};

use super::*;
use crate::mounter::CommandOutput;
use crate::plugins::fake::{
    FakeNode, UNLABELLED, device_place, ended, found, inline, persistent, place, set_up_request,
};
use crate::plugins::secrets::Secret;
use crate::plugins::{FoundDevice, Plugins};
use crate::walks::FsGroupWalks;
use keelson_volume_manager_core::world::MountStep;

const DRIVER: &str = "example.com/disk";
const NAME: &str = "example.com/disk/data";
const GLOBAL: &str = "plugins/kubernetes.io/flexvolume/example.com/disk/mounts/data";
const TARGET: &str = "pods/u1/volumes/example.com~disk/data";
const SUCCESS: &str = r#"{"status": "Success"}"#;
const NOT_SUPPORTED: &str = r#"{"status": "Not supported"}"#;
const FAILURE: &str = r#"{"status": "Failure", "message": "no disk"}"#;

/// A node with the driver's executable, which is called as `answer` says.
struct Fixture {
    node: FakeNode,
    plugin: FlexVolume,
}

fn folder(node: &FakeNode) -> PathBuf {
    node.machine("/flex")
}

fn program(node: &FakeNode) -> PathBuf {
    folder(node).join("example.com~disk/disk")
}

fn install(program: &Path, text: &str) {
    fs::create_dir_all(program.parent().unwrap()).unwrap();
    let new = program.with_extension("new");
    fs::write(&new, text).unwrap();
    fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).unwrap();
    fs::rename(new, program).unwrap();
}

fn plugin(node: &FakeNode) -> FlexVolume {
    let settings = FlexSettings::new(folder(node), "node1".into());
    FlexVolume::new(node.host(), Arc::new(node.clone()), settings)
}

impl Fixture {
    /// A driver that answers each command as `answers` says, `init` with these capabilities, and all others with success.
    fn new(capabilities: &'static str, answers: &'static [(&'static str, &'static str)]) -> Self {
        let node = FakeNode::new();
        install(&program(&node), "1");
        node.program(&program(&node).display().to_string(), move |arguments| {
            let answer = answers.iter().find(|(command, _)| *command == arguments[0]);
            match (answer, arguments[0]) {
                (Some((_, answer)), _) => ended(0, answer),
                (None, "init") => {
                    ended(0, &format!(r#"{{"status": "Success", "capabilities": {capabilities}}}"#))
                }
                (None, _) => ended(0, SUCCESS),
            }
        });
        Self { plugin: plugin(&node), node }
    }

    /// The calls of the driver since the last time, without the path of the driver.
    fn calls(&self) -> Vec<String> {
        let prefix = format!("{} ", program(&self.node).display());
        let root = format!("{}/", self.node.root().display());
        let calls = self.node.take_log().into_iter();
        calls.map(|line| line.replace(&prefix, "").replace(&root, "")).collect()
    }

    fn commands(&self) -> Vec<String> {
        self.calls().iter().map(|call| call.split(' ').next().unwrap().to_owned()).collect()
    }

    async fn set_up(&self, volume: &VolumeSpec) -> Result<SetUp, PluginError> {
        self.plugin.set_up(volume, set_up_request(&FsGroupWalks::default())).await
    }
}

fn source() -> Value {
    json!({"driver": DRIVER, "fsType": "ext4", "options": {"size": "1"}})
}

fn volume() -> VolumeSpec {
    inline("flexVolume", source())
}

const PER_POD: &str = r#"{"attach": false}"#;
const DEVICE: &str = "{}";

#[tokio::test]
async fn a_driver_that_attaches_has_a_shared_device() {
    let fixture = Fixture::new(DEVICE, &[]);
    let identity = fixture.plugin.identify(&volume()).await.unwrap();
    assert_eq!((identity.shared_name, identity.shape), (Some(NAME.into()), Shape::AttachableDevice));
    assert!(identity.can_expand);
    assert_eq!(fixture.commands(), ["init", "getvolumename"]);
    assert_eq!(fixture.plugin.plugin_name(&volume()), DRIVER);
}

#[tokio::test]
async fn a_driver_that_does_not_attach_has_a_volume_per_pod() {
    let fixture = Fixture::new(r#"{"attach": false, "requiresFSResize": false}"#, &[]);
    let identity = fixture.plugin.identify(&volume()).await.unwrap();
    assert_eq!((identity.shared_name, identity.shape, identity.can_expand), (None, Shape::PerPod, false));
    assert_eq!(fixture.commands(), ["init"]);
}

#[tokio::test]
async fn a_driver_that_is_missing_or_no_program_is_for_a_person() {
    let node = FakeNode::new();
    let plugin = plugin(&node);
    let identify = async |text: &str| {
        let error = plugin.identify(&volume()).await.unwrap_err();
        assert!(error.message.contains(text) && error.message.contains("example.com~disk/disk"), "{error}");
        assert_eq!((error.owner, error.class), (WaitOwner::You, FailureClass::Transient));
    };
    identify("no volume plugin matched").await;
    fs::create_dir_all(program(&node)).unwrap();
    identify("not an executable file").await;
    fs::remove_dir(program(&node)).unwrap();
    fs::write(program(&node), "").unwrap();
    identify("not an executable file").await;
    assert_eq!(node.take_log(), Vec::<String>::new());
}

#[tokio::test]
async fn names_that_lead_elsewhere_are_refused() {
    let fixture = Fixture::new(DEVICE, &[]);
    for driver in ["", "../x/y", "a/b/c", "..", ".hidden/x", "a~b"] {
        let mut wrong = source();
        wrong["driver"] = driver.into();
        let error = fixture.plugin.identify(&inline("flexVolume", wrong)).await.unwrap_err();
        assert!(error.message.contains("vendor/driver"), "{driver}: {error}");
        assert!(!fixture.plugin.serves(driver), "{driver}");
    }
    assert_eq!(fixture.calls(), Vec::<String>::new());
}

#[tokio::test]
async fn a_changed_executable_is_initialised_again_and_a_removed_one_is_forgotten() {
    let fixture = Fixture::new(PER_POD, &[]);
    for _ in 0..2 {
        fixture.plugin.identify(&volume()).await.unwrap();
    }
    assert_eq!(fixture.commands(), ["init"]);
    install(&program(&fixture.node), "2");
    fixture.plugin.identify(&volume()).await.unwrap();
    assert_eq!(fixture.commands(), ["init"]);
    fs::remove_file(program(&fixture.node)).unwrap();
    assert!(fixture.plugin.identify(&volume()).await.is_err());
    install(&program(&fixture.node), "2");
    fixture.plugin.identify(&volume()).await.unwrap();
    assert_eq!(fixture.commands(), ["init"]);
}

#[tokio::test]
async fn a_driver_whose_init_fails_is_asked_again() {
    for answer in [FAILURE, NOT_SUPPORTED, "no JSON"] {
        let fixture = Fixture::new(DEVICE, &[]);
        let path = program(&fixture.node).display().to_string();
        fixture.node.program(&path, move |_| ended(0, answer));
        let error = fixture.plugin.identify(&volume()).await.unwrap_err();
        assert!(error.message.contains(DRIVER) && error.message.contains("init"), "{error}");
        assert_eq!(error.class, FailureClass::Transient);
        fixture.node.program(&path, |_| ended(0, SUCCESS));
        fixture.plugin.identify(&volume()).await.unwrap();
    }
}

#[tokio::test]
async fn a_volume_goes_through_every_command_of_its_driver() {
    let fixture = Fixture::new(
        DEVICE,
        &[
            ("attach", r#"{"status": "Success", "device": "/dev/a"}"#),
            ("waitforattach", r#"{"status": "Success", "device": "/dev/b"}"#),
        ],
    );
    let (plugin, volume) = (&fixture.plugin, volume());
    plugin.identify(&volume).await.unwrap();
    fixture.calls();
    let json = r#"{"kubernetes.io/fsType":"ext4","kubernetes.io/pvOrVolumeName":"data","kubernetes.io/readwrite":"rw","size":"1"}"#;
    assert_eq!(plugin.attach(&volume).await.unwrap().device_path.as_deref(), Some("/dev/a"));
    assert_eq!(fixture.calls(), [format!("attach {json} node1")]);
    let request = DeviceRequest { device_path: Some("/dev/a"), ..UNLABELLED };
    let learned = plugin.mount_device(&volume, request).await.unwrap();
    assert_eq!(learned.device_path.as_deref(), Some("/dev/b"));
    assert_eq!(
        fixture.calls(),
        [format!("waitforattach /dev/a {json}"), format!("mountdevice {GLOBAL} /dev/b {json}")]
    );
    fixture.set_up(&volume).await.unwrap();
    assert!(fixture.calls()[0].starts_with(&format!("mount {TARGET} {{")));
    let walks = FsGroupWalks::default();
    let request = SetUpRequest {
        device_path: Some("/dev/b"),
        device_mount_path: Some("/mnt"),
        ..set_up_request(&walks)
    };
    assert_eq!(plugin.expand(&volume, request, 9).await.unwrap(), 9);
    assert_eq!(fixture.calls(), [format!("expandfs {json} /dev/b /mnt 9 0")]);
    plugin.tear_down(&place(DRIVER, &volume)).await.unwrap();
    assert_eq!(fixture.calls(), [format!("unmount {TARGET}"), format!("clean {TARGET}")]);
    fixture.node.state().mounts.insert(fixture.node.root().join(GLOBAL), "d".into());
    plugin.unmount_device(&device_place(NAME, &volume)).await.unwrap();
    // The driver has left the mount.
    let calls = [format!("unmountdevice {GLOBAL}"), format!("umount {GLOBAL}"), format!("clean {GLOBAL}")];
    assert_eq!(fixture.calls(), calls);
    plugin.detach(&device_place(NAME, &volume)).await.unwrap();
    assert_eq!(fixture.calls(), ["detach data node1"]);
    for path in [GLOBAL, TARGET] {
        assert!(!fixture.node.root().join(path).exists(), "{path}");
    }
}

#[tokio::test]
async fn default_actions_replace_commands_that_a_driver_does_not_support() {
    let fixture = Fixture::new(
        DEVICE,
        &[
            ("getvolumename", NOT_SUPPORTED),
            ("attach", NOT_SUPPORTED),
            ("detach", NOT_SUPPORTED),
            ("waitforattach", NOT_SUPPORTED),
            ("mountdevice", NOT_SUPPORTED),
            ("mount", NOT_SUPPORTED),
            ("unmount", NOT_SUPPORTED),
            ("unmountdevice", NOT_SUPPORTED),
            ("expandfs", NOT_SUPPORTED),
        ],
    );
    let (plugin, mut volume) = (&fixture.plugin, volume());
    volume.source["readOnly"] = true.into();
    for round in 0..2 {
        assert_eq!(plugin.identify(&volume).await.unwrap().shared_name, Some(NAME.into()));
        assert_eq!(plugin.attach(&volume).await.unwrap(), Learned::default());
        let request = DeviceRequest { device_path: Some("/dev/a"), ..UNLABELLED };
        plugin.mount_device(&volume, request).await.unwrap();
        fixture.set_up(&volume).await.unwrap();
        let walks = FsGroupWalks::default();
        let request = SetUpRequest {
            device_path: Some("/dev/a"),
            device_mount_path: Some("/mnt"),
            ..set_up_request(&walks)
        };
        plugin.expand(&volume, request, 9).await.unwrap();
        plugin.tear_down(&place(DRIVER, &volume)).await.unwrap();
        plugin.unmount_device(&device_place(NAME, &volume)).await.unwrap();
        plugin.detach(&device_place(NAME, &volume)).await.unwrap();
        let calls = fixture.calls();
        let done: Vec<&String> = calls.iter().filter(|call| !call.contains('{')).collect();
        let defaults = [
            format!("mount /dev/a {GLOBAL} ext4 ro"),
            format!("bind {GLOBAL} {TARGET} ro"),
            "grow /dev/a /mnt".to_owned(),
            format!("clean {TARGET}"),
            format!("umount {GLOBAL}"),
            format!("clean {GLOBAL}"),
        ];
        for line in &defaults {
            assert!(done.contains(&line), "{line}: {calls:?}");
        }
        assert_eq!(
            calls.len() == defaults.len(),
            round == 1,
            "unsupported commands are remembered: {calls:?}"
        );
    }
}

#[tokio::test]
async fn a_driver_without_mount_and_without_a_device_is_refused() {
    let fixture = Fixture::new(PER_POD, &[("mount", NOT_SUPPORTED)]);
    let error = fixture.set_up(&volume()).await.unwrap_err();
    assert!(error.message.contains("supports neither mount nor a device"), "{error}");
    assert!(!fixture.node.root().join(TARGET).exists());
    let fixture = Fixture::new(DEVICE, &[("mountdevice", NOT_SUPPORTED), ("waitforattach", NOT_SUPPORTED)]);
    let error = fixture.plugin.mount_device(&volume(), UNLABELLED).await.unwrap_err();
    assert!(error.message.contains("names no device"), "{error}");
    assert!(!fixture.node.root().join(GLOBAL).exists());
}

#[tokio::test]
async fn a_failed_mount_has_a_class_and_leaves_no_folder() {
    let cases = [
        (ended(0, FAILURE), FailureClass::Final),
        (ended(1, FAILURE), FailureClass::Final),
        (ended(0, "no JSON"), FailureClass::Uncertain),
        (ended(1, SUCCESS), FailureClass::Uncertain),
        (CommandOutput { code: None, stdout: String::new(), stderr: String::new() }, FailureClass::Uncertain),
    ];
    for (output, class) in cases {
        let fixture = Fixture::new(PER_POD, &[]);
        fixture.plugin.identify(&volume()).await.unwrap();
        let answer = output.clone();
        fixture.node.program(&program(&fixture.node).display().to_string(), move |_| answer.clone());
        let error = fixture.set_up(&volume()).await.unwrap_err();
        assert_eq!(error.class, class, "{output:?}: {error}");
        let is_left = fixture.node.root().join(TARGET).exists();
        assert_eq!(is_left, class == FailureClass::Uncertain, "{output:?}");
    }
}

#[tokio::test]
async fn a_failure_after_which_something_is_mounted_is_uncertain() {
    let fixture = Fixture::new(PER_POD, &[]);
    fixture.plugin.identify(&volume()).await.unwrap();
    let (node, target) = (fixture.node.clone(), fixture.node.root().join(TARGET));
    let plugin = fixture.plugin.clone();
    let path = program(&node).display().to_string();
    // The mount appears with the call.
    let mounted = fixture.node.root().join(TARGET);
    let marker = mounted.clone();
    fixture.node.program(&path, move |_| {
        fs::write(marker.join("mounted"), "").unwrap();
        ended(0, FAILURE)
    });
    let error = plugin.set_up(&volume(), set_up_request(&FsGroupWalks::default())).await.unwrap_err();
    assert_eq!(error.class, FailureClass::Uncertain, "a folder that is not empty may be a mount");
    assert!(target.exists());
}

#[tokio::test]
async fn a_reconstructed_volume_keeps_its_folder_after_an_error() {
    let fixture = Fixture::new(PER_POD, &[("mount", FAILURE)]);
    let walks = FsGroupWalks::default();
    let request = SetUpRequest { is_reconstructed: true, ..set_up_request(&walks) };
    assert!(fixture.plugin.set_up(&volume(), request).await.is_err());
    assert!(fixture.node.root().join(TARGET).exists());
}

#[tokio::test]
async fn a_driver_that_does_not_end_is_an_uncertain_error_without_its_arguments() {
    let fixture = Fixture::new(PER_POD, &[]);
    fixture.plugin.identify(&volume()).await.unwrap();
    fixture.node.fail(&program(&fixture.node).display().to_string(), FailureClass::Final);
    let error = fixture.set_up(&volume()).await.unwrap_err();
    assert_eq!(error.class, FailureClass::Uncertain);
    assert!(error.message.contains("did not end its command mount within 120 s"), "{error}");
    assert!(fixture.node.root().join(TARGET).exists());
}

fn with_secret() -> VolumeSpec {
    let mut source = source();
    source["secretRef"] = json!({"name": "key"});
    VolumeSpec { fs_group: Some(7), ..inline("flexVolume", source) }
}

#[tokio::test]
async fn mount_gets_the_pod_the_fs_group_and_the_secret() {
    let fixture = Fixture::new(PER_POD, &[]);
    let secret = Secret { kind: DRIVER.into(), data: [("k".into(), "dg==".into())].into() };
    fixture.node.state().secrets.insert("shop/key".into(), secret);
    fixture.set_up(&with_secret()).await.unwrap();
    let calls = fixture.calls();
    let json = calls[1].strip_prefix(&format!("mount {TARGET} ")).unwrap();
    let options: Value = serde_json::from_str(json).unwrap();
    for (name, value) in [
        ("kubernetes.io/pod.name", "web"),
        ("kubernetes.io/pod.namespace", "shop"),
        ("kubernetes.io/pod.uid", "u1"),
        ("kubernetes.io/serviceAccount.name", "sa"),
        ("kubernetes.io/mounterArgs.FsGroup", "7"),
        ("kubernetes.io/secret/k", "dg=="),
        ("size", "1"),
    ] {
        assert_eq!(options[name], value, "{name}");
    }
    assert_eq!(calls.last(), Some(&format!("own {TARGET} 7")));
}

#[tokio::test]
async fn a_secret_that_is_missing_or_of_another_type_is_refused_before_the_call() {
    let fixture = Fixture::new(PER_POD, &[]);
    let error = fixture.set_up(&with_secret()).await.unwrap_err();
    assert!(error.message.contains("shop/key"), "{error}");
    let secret = Secret { kind: "Opaque".into(), ..Secret::default() };
    fixture.node.state().secrets.insert("shop/key".into(), secret);
    let error = fixture.set_up(&with_secret()).await.unwrap_err();
    assert!(error.message.contains("Opaque") && error.owner == WaitOwner::You, "{error}");
    assert_eq!(fixture.commands(), ["init"]);
    assert!(!fixture.node.root().join(TARGET).exists());
}

#[tokio::test]
async fn the_fs_group_is_left_to_drivers_that_want_that() {
    let fixture = Fixture::new(r#"{"attach": false, "fsGroup": false}"#, &[]);
    fixture.set_up(&VolumeSpec { fs_group: Some(7), ..volume() }).await.unwrap();
    assert!(!fixture.calls().iter().any(|call| call.starts_with("own")));
    let fixture = Fixture::new(PER_POD, &[]);
    fixture.node.fail("own", FailureClass::Final);
    let error = fixture.set_up(&VolumeSpec { fs_group: Some(7), ..volume() }).await.unwrap_err();
    assert_eq!((error.class, error.step), (FailureClass::Uncertain, None::<MountStep>));
}

#[tokio::test]
async fn a_teardown_needs_only_the_names_of_the_folders() {
    let fixture = Fixture::new(PER_POD, &[]);
    let volume = volume();
    fixture.plugin.tear_down(&place(DRIVER, &volume)).await.unwrap();
    fixture.plugin.unmount_device(&device_place(NAME, &volume)).await.unwrap();
    assert_eq!(fixture.calls(), Vec::<String>::new(), "nothing is there");
    fs::create_dir_all(fixture.node.root().join(TARGET)).unwrap();
    fs::remove_file(program(&fixture.node)).unwrap();
    let error = fixture.plugin.tear_down(&place(DRIVER, &volume)).await.unwrap_err();
    assert!(error.message.contains("install it"), "{error}");
    assert!(fixture.node.root().join(TARGET).exists());
    install(&program(&fixture.node), "2");
    fixture.plugin.tear_down(&place(DRIVER, &volume)).await.unwrap();
    assert_eq!(fixture.commands(), ["init", "unmount", "clean"]);
    assert!(!fixture.node.root().join(TARGET).exists());
}

#[tokio::test]
async fn a_folder_in_a_pod_is_reconstructed_by_the_name_of_its_driver() {
    for (capabilities, name) in [(PER_POD, None), (DEVICE, Some(NAME))] {
        let fixture = Fixture::new(capabilities, &[]);
        let volume = volume();
        assert!(fixture.plugin.reconstruct(&found(&volume)).await.is_err());
        fs::create_dir_all(fixture.node.root().join(TARGET)).unwrap();
        fs::create_dir_all(fixture.node.root().join("pods/u1/volumes/example.com~other/data")).unwrap();
        let read = fixture.plugin.reconstruct(&found(&volume)).await.unwrap();
        assert_eq!((read.shared_name, read.has_device), (name.map(Into::into), name.is_some()));
        let path = fixture.node.root().join(GLOBAL).display().to_string();
        assert_eq!(read.device_mount_path, name.map(|_| path));
    }
}

#[tokio::test]
async fn files_have_labels_unless_the_driver_says_otherwise() {
    for (capabilities, expected) in
        [(PER_POD, true), (r#"{"attach": false, "selinuxRelabel": false}"#, false)]
    {
        let fixture = Fixture::new(capabilities, &[]);
        let path = fixture.node.root().join(TARGET);
        assert_eq!(fixture.plugin.has_file_labels(&volume(), &path).await.unwrap(), expected);
    }
}

#[tokio::test]
async fn a_driver_that_fails_at_startup_has_a_device_if_one_is_mounted() {
    let fixture = Fixture::new(DEVICE, &[("init", FAILURE)]);
    fs::create_dir_all(fixture.node.root().join(TARGET)).unwrap();
    assert!(!fixture.plugin.reconstruct(&found(&volume())).await.unwrap().has_device);
    fixture.node.state().mounts.insert(fixture.node.root().join(GLOBAL), "d".into());
    let read = fixture.plugin.reconstruct(&found(&volume())).await.unwrap();
    assert_eq!((read.shared_name, read.has_device), (Some(NAME.into()), true));
}

#[tokio::test]
async fn the_name_of_a_driver_finds_the_plugin_and_no_other_name_does() {
    let fixture = Fixture::new(DEVICE, &[]);
    let fc = super::super::fc::Fc::new(fixture.node.host());
    // Even a driver of that name does not replace a plugin.
    install(&folder(&fixture.node).join("kubernetes.io~fc/fc"), "1");
    let plugins = Plugins::new(vec![Arc::new(fixture.plugin.clone()), Arc::new(fc)]);
    for (name, family) in [
        (DRIVER, Some("flexvolume")),
        ("kubernetes.io/fc", Some("kubernetes.io/fc")),
        ("example.com/other", None),
    ] {
        assert_eq!(plugins.named(name).map(|plugin| plugin.name()), family, "{name}");
    }
    assert_eq!(plugins.for_field("flexVolume").map(|plugin| plugin.name()), Some("flexvolume"));
}

#[tokio::test]
async fn the_claim_says_whether_a_persistent_volume_is_read_only() {
    let fixture = Fixture::new(PER_POD, &[]);
    let mut written = source();
    written["readOnly"] = true.into();
    assert!(fixture.plugin.identify(&inline("flexVolume", written.clone())).await.unwrap().read_only);
    assert!(!fixture.plugin.identify(&persistent("flexVolume", written)).await.unwrap().read_only);
}

/// The device of [`volume`] that a restart finds.
async fn found_device(plugin: &FlexVolume) -> Option<FoundDevice> {
    let mut found = plugin.found_devices().await.unwrap();
    assert!(found.len() <= 1, "{found:?}");
    found.pop()
}

#[tokio::test]
async fn devices_without_a_pod_are_found_after_a_restart_by_their_folders() {
    let fixture = Fixture::new(DEVICE, &[]);
    assert_eq!(fixture.plugin.found_devices().await.unwrap(), []);
    let base = fixture.node.root().join("plugins/kubernetes.io/flexvolume");
    for folder in
        ["example.com/disk/mounts/data", "example.com/disk/mounts/b", "plain/mounts/c", ".x/y/mounts/d"]
    {
        fs::create_dir_all(base.join(folder)).unwrap();
    }
    let device = |volume: &str, inner_name: &str, folder: &str| FoundDevice {
        volume: volume.into(),
        inner_name: inner_name.into(),
        is_block: false,
        device_mount_path: base.join(folder).display().to_string(),
        label: None,
    };
    let expected = [
        device("example.com/disk/b", "b", "example.com/disk/mounts/b"),
        device(NAME, "data", "example.com/disk/mounts/data"),
        device("plain/c", "c", "plain/mounts/c"),
    ];
    assert_eq!(fixture.plugin.found_devices().await.unwrap(), expected);
    assert_eq!(fixture.calls(), Vec::<String>::new(), "no driver is asked");
}

#[tokio::test]
async fn an_attached_volume_is_found_after_a_restart_until_it_is_detached() {
    let fixture = Fixture::new(DEVICE, &[("attach", r#"{"status": "Success", "device": "/dev/a"}"#)]);
    let (plugin, volume) = (&fixture.plugin, volume());
    plugin.attach(&volume).await.unwrap();
    assert_eq!(found_device(plugin).await.unwrap().volume, NAME.into());
    // What `attach` has answered is known, too.
    let learned = plugin.mount_device(&volume, UNLABELLED).await.unwrap();
    assert_eq!(learned.device_path.as_deref(), Some("/dev/a"));
    plugin.unmount_device(&device_place(NAME, &volume)).await.unwrap();
    assert!(!fixture.node.root().join(GLOBAL).exists());
    assert!(found_device(plugin).await.is_some(), "it is still attached");
    fixture.calls();
    plugin.unmount_device(&device_place(NAME, &volume)).await.unwrap();
    plugin.detach(&device_place(NAME, &volume)).await.unwrap();
    assert_eq!(fixture.calls(), [format!("clean {GLOBAL}"), "detach data node1".to_owned()]);
    assert_eq!(found_device(plugin).await, None);
}

#[tokio::test]
async fn an_attach_that_the_driver_refuses_leaves_no_record_and_an_unclear_one_does() {
    for (answer, is_left) in [(FAILURE, false), ("no JSON", true)] {
        let fixture = Fixture::new(DEVICE, &[]);
        fixture.plugin.identify(&volume()).await.unwrap();
        fixture.node.program(&program(&fixture.node).display().to_string(), move |_| ended(0, answer));
        assert!(fixture.plugin.attach(&volume()).await.is_err());
        assert_eq!(found_device(&fixture.plugin).await.is_some(), is_left, "{answer}");
    }
}

#[tokio::test]
async fn a_device_that_is_mounted_elsewhere_too_is_not_unmounted() {
    let fixture = Fixture::new(DEVICE, &[]);
    let volume = volume();
    let global = fixture.node.root().join(GLOBAL);
    fixture.plugin.identify(&volume).await.unwrap();
    for point in [global.clone(), PathBuf::from("/host").join(GLOBAL), "/mnt/backup".into()] {
        fixture.node.state().mounts.insert(point, "/dev/a".into());
    }
    fs::create_dir_all(&global).unwrap();
    fixture.calls();
    let error = fixture.plugin.unmount_device(&device_place(NAME, &volume)).await.unwrap_err();
    assert!(error.message.ends_with("is still mounted on /mnt/backup"), "{error}");
    assert_eq!(fixture.calls(), Vec::<String>::new());
    fixture.node.state().mounts.remove(Path::new("/mnt/backup"));
    fixture.plugin.unmount_device(&device_place(NAME, &volume)).await.unwrap();
    assert_eq!(fixture.commands(), ["unmountdevice", "umount", "clean"]);
}

/// Also after a restart, when only the record knows the device.
#[tokio::test]
async fn nothing_is_detached_while_something_holds_the_device() {
    let fixture = Fixture::new(DEVICE, &[("waitforattach", r#"{"status": "Success", "device": "/dev/a"}"#)]);
    let volume = volume();
    fixture.plugin.attach(&volume).await.unwrap();
    fixture.plugin.mount_device(&volume, UNLABELLED).await.unwrap();
    fixture.node.state().mounts.insert(fixture.node.root().join(GLOBAL), "/dev/a".into());
    fixture.node.state().busy.insert("/dev/a".into());
    fixture.calls();
    for commands in [vec!["unmountdevice", "umount"], vec![]] {
        let error = fixture.plugin.unmount_device(&device_place(NAME, &volume)).await.unwrap_err();
        assert!(error.message.starts_with("the device /dev/a is in use"), "{error}");
        assert_eq!(error.class, FailureClass::Uncertain);
        assert_eq!(fixture.commands(), commands);
    }
    let plugin = plugin(&fixture.node);
    assert!(found_device(&plugin).await.is_some());
    assert!(plugin.detach(&device_place(NAME, &volume)).await.is_err());
    assert!(!fixture.commands().contains(&"detach".to_owned()));
    fixture.node.state().busy.clear();
    plugin.unmount_device(&device_place(NAME, &volume)).await.unwrap();
    plugin.detach(&device_place(NAME, &volume)).await.unwrap();
    assert!(fixture.commands().contains(&"detach".to_owned()));
    assert_eq!(found_device(&plugin).await, None);
}

async fn until_known(plugin: &FlexVolume, name: &str, is_known: bool) {
    let driver = Driver::new(name).unwrap();
    until_some(name, || std::future::ready((plugin.0.drivers.is_known(&driver) == is_known).then_some(())))
        .await;
}

#[tokio::test]
async fn drivers_that_appear_change_and_go_are_noticed_at_run_time() {
    let fixture = Fixture::new(DEVICE, &[]);
    let (plugin, path) = (fixture.plugin.clone(), folder(&fixture.node));
    let other = path.join("example.com~other/other");
    fixture.node.program(&other.display().to_string(), |_| ended(0, SUCCESS));
    let shutdown = CancellationToken::new();
    let progress = Progress::default();
    let watch = tokio::spawn(plugin.clone().watch(progress, shutdown.clone()));
    until_known(&plugin, DRIVER, true).await;
    install(&other, "1");
    until_known(&plugin, "example.com/other", true).await;
    fixture.calls();
    install(&program(&fixture.node), "2");
    until_some("init of the changed driver", || {
        std::future::ready(fixture.commands().contains(&"init".to_owned()).then_some(()))
    })
    .await;
    fs::remove_file(&other).unwrap();
    until_known(&plugin, "example.com/other", false).await;
    fs::remove_dir_all(&path).unwrap();
    until_known(&plugin, DRIVER, false).await;
    until_some("the folder again", || std::future::ready(path.is_dir().then_some(()))).await;
    install(&program(&fixture.node), "3");
    until_known(&plugin, DRIVER, true).await;
    shutdown.cancel();
    watch.await.unwrap();
}
