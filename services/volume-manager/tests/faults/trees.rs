//! Folders that a kubelet, or the time before a reboot, has left: what is desired stays, and the rest is torn down.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};

use keelson_proto::keelson::common::v1::Want;
use keelson_proto::keelson::volume_manager::v1 as pb;
use rustix::mount::{MountPropagationFlags, UnmountFlags};

use crate::node::{Node, claimed};
use crate::support::api::config_map;
use crate::support::{LONG, Sync, desire, empty_dir, mount, mounts_below, unmount, until_some};
use crate::{has_text, until, until_progress};

/// Writes folders by a kubelet's rules.
struct Kubelet<'a>(&'a Node);

impl Kubelet<'_> {
    fn root(&self) -> &Path {
        &self.0.world.config.paths.root_dir
    }

    fn folder(&self, path: &str) -> PathBuf {
        let folder = self.root().join(path);
        fs::create_dir_all(&folder).unwrap();
        for folder in folder.ancestors().take_while(|folder| *folder != self.root()) {
            fs::set_permissions(folder, fs::Permissions::from_mode(0o750)).unwrap();
        }
        folder
    }

    /// A disk emptyDir with its marker.
    fn empty_dir(&self, uid: &str, name: &str) {
        let folder = self.folder(&format!("pods/{uid}/volumes/kubernetes.io~empty-dir/{name}"));
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).unwrap();
        fs::write(folder.join("file"), uid).unwrap();
        let marker = self.folder(&format!("pods/{uid}/plugins/kubernetes.io~empty-dir/{name}"));
        fs::write(marker.join("ready"), "").unwrap();
    }

    /// A configMap volume with one file.
    fn config_map(&self, uid: &str, name: &str, key: &str, text: &str) {
        let folder = self.folder(&format!("pods/{uid}/volumes/kubernetes.io~configmap/{name}"));
        let dated = "..2025_12_31_23_59_59.1234567890";
        fs::create_dir(folder.join(dated)).unwrap();
        fs::write(folder.join(dated).join(key), text).unwrap();
        symlink(dated, folder.join("..data")).unwrap();
        symlink(format!("..data/{key}"), folder.join(key)).unwrap();
        let marker = self.folder(&format!("pods/{uid}/plugins/kubernetes.io~empty-dir/wrapped_{name}"));
        fs::write(marker.join("ready"), "").unwrap();
    }

    /// A local volume of a folder, bind-mounted for the pod.
    fn local(&self, uid: &str, name: &str, disk: &Path) -> PathBuf {
        let folder = self.folder(&format!("pods/{uid}/volumes/kubernetes.io~local-volume/{name}"));
        rustix::mount::mount_bind(disk, &folder).unwrap();
        folder
    }

    /// A CSI volume that is published, as the file of an older or a present kubelet says.
    fn csi(&self, uid: &str, name: &str, data: &str) -> PathBuf {
        let folder = self.folder(&format!("pods/{uid}/volumes/kubernetes.io~csi/{name}"));
        fs::create_dir(folder.join("mount")).unwrap();
        fs::write(folder.join("vol_data.json"), data).unwrap();
        folder
    }
}

/// The ids of the mounts below a folder: another id is another mount.
fn mount_ids(folder: &Path) -> Vec<(String, PathBuf)> {
    let text = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let fields = text.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let mounts = fields.map(|fields| (fields[0].to_owned(), PathBuf::from(fields[4])));
    mounts.filter(|(_, point)| point.starts_with(folder)).collect()
}

const OLD_DATA: &str = r#"{"attachmentID":"csi-1","driverName":"csi.example.com","nodeName":"node","specVolID":"old","volumeHandle":"old"}"#;
const DATA: &str = r#"{"attachmentID":"csi-2","driverName":"csi.example.com","nodeName":"node","specVolID":"new","volumeHandle":"new","volumeLifecycleMode":"Persistent"}"#;

#[tokio::test]
async fn a_tree_of_a_kubelet_keeps_what_is_desired_and_the_rest_is_torn_down() {
    let mut node = Node::new().await;
    let disks = ["kept", "gone"].map(|name| node.local_volume(name));
    node.api.config_map("conf", r#"{"key": "same"}"#);
    let kubelet = Kubelet(&node);
    let root = kubelet.root().to_owned();
    for (uid, disk) in ["kept", "gone"].into_iter().zip(&disks) {
        kubelet.empty_dir(uid, "data");
        kubelet.config_map(uid, "conf", "key", "same");
        kubelet.local(uid, uid, disk);
        let container = kubelet.folder(&format!("pods/{uid}/containers/main"));
        fs::write(container.join("0badcafe"), "").unwrap();
        fs::write(root.join(format!("pods/{uid}/etc-hosts")), "127.0.0.1 localhost\n").unwrap();
    }
    // Volumes of a driver that has not registered again: nobody else can unmount them.
    let waiting = [kubelet.csi("driver", "old", OLD_DATA), kubelet.csi("driver", "new", DATA)];
    let staged = kubelet.folder("plugins/kubernetes.io/csi/csi.example.com/0123/globalmount");
    fs::write(
        staged.with_file_name("vol_data.json"),
        r#"{"driverName":"csi.example.com","volumeHandle":"new"}"#,
    )
    .unwrap();
    let kept = root.join("pods/kept");
    let data_link = fs::read_link(kept.join("volumes/kubernetes.io~configmap/conf/..data")).unwrap();
    let before = mount_ids(&kept);
    assert_eq!(before.len(), 1);

    let mut client = node.start().await;
    let mut sync = Sync::open(&mut client).await;
    let volumes = || vec![empty_dir("data", "", 0), config_map("conf"), claimed("kept")];
    sync.pod(desire("kept", 1, Want::Run, volumes())).await;
    sync.complete(1, true).await;
    let ready = mount(&mut client, "kept", 1).await.1.unwrap();
    assert_eq!(ready.volumes.len(), 3);
    until("the removal of the pod that is gone", || !root.join("pods/gone").exists()).await;
    assert!(mounts_below(&root.join("pods/gone")).is_empty());
    assert!(has_text(&disks[1].join("file"), "gone"), "the data of a local volume stay");

    assert_eq!(mount_ids(&kept), before, "nothing is mounted again");
    assert!(has_text(&kept.join("volumes/kubernetes.io~empty-dir/data/file"), "kept"));
    let link = fs::read_link(kept.join("volumes/kubernetes.io~configmap/conf/..data")).unwrap();
    assert_eq!(link, data_link, "equal files are not written again");
    let orphans = client.list_orphans(pb::ListOrphansRequest {}).await.unwrap().into_inner().pods;
    let waits: Vec<_> = orphans.iter().filter(|pod| pod.uid == "driver").collect();
    assert_eq!(waits.len(), 1, "{orphans:?}");
    assert!(waiting.iter().all(|folder| folder.join("vol_data.json").exists()) && staged.is_dir());

    sync.pod(desire("kept", 2, Want::Unmount, volumes())).await;
    unmount(&mut client, "kept", LONG).await.unwrap();
    assert!(mounts_below(&kept).is_empty() && has_text(&disks[0].join("file"), "kept"));
}

#[tokio::test]
async fn after_a_reboot_a_local_volume_is_mounted_again_and_that_of_a_gone_pod_removed() {
    let mut node = Node::new().await;
    for name in ["kept", "gone"] {
        node.local_volume(name);
        // The folder of the mount, with nothing mounted on it.
        Kubelet(&node).folder(&format!("pods/{name}/volumes/kubernetes.io~local-volume/{name}"));
    }
    let mut client = node.start().await;
    let mut sync = Sync::open(&mut client).await;
    sync.pod(desire("kept", 1, Want::Run, vec![claimed("kept")])).await;
    sync.complete(1, true).await;
    let ready = mount(&mut client, "kept", 1).await.1.unwrap();
    let path = PathBuf::from(&ready.volumes[0].host_path);
    assert!(has_text(&path.join("file"), "kept"));
    assert_eq!(mounts_below(&node.world.pod("kept")), [path]);
    until("the removal of the pod that is gone", || !node.world.pod("gone").exists()).await;
}

#[tokio::test]
async fn a_half_written_vol_data_holds_up_only_its_own_pod_until_its_mount_is_gone() {
    let mut node = Node::new().await;
    let disk = node.local_volume("other");
    let torn = Kubelet(&node).csi("torn", "pv1", r#"{"driverName":"csi.exam"#);
    rustix::mount::mount_bind(&disk, torn.join("mount")).unwrap();
    let mut client = node.start().await;
    let mut sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Run, vec![claimed("other")])).await;
    sync.complete(1, true).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    let message = until_some("the cause", || {
        let mut client = client.clone();
        async move {
            let pods = client.list_orphans(pb::ListOrphansRequest {}).await.ok()?.into_inner().pods;
            let torn = pods.into_iter().find(|pod| pod.uid == "torn")?;
            torn.message.contains("vol_data.json").then_some(torn.message)
        }
    })
    .await;
    assert!(message.contains("pv1"), "{message}");
    assert!(torn.join("vol_data.json").exists() && has_text(&torn.join("mount/file"), "other"));
    rustix::mount::unmount(torn.join("mount"), rustix::mount::UnmountFlags::empty()).unwrap();
    until("the removal of the folder", || !node.world.pod("torn").exists()).await;
    assert!(has_text(&disk.join("file"), "other"));
    mount(&mut client, "u1", 1).await.1.unwrap();
}

#[tokio::test]
async fn a_claim_deleted_while_its_pod_starts_is_named_and_its_return_mounts_it() {
    let mut node = Node::new().await;
    node.local_volume("data");
    let volume = node.api.delete_live("PersistentVolume", "data");
    let mut client = node.start().await;
    let mut sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Run, vec![claimed("data")])).await;
    sync.complete(1, true).await;
    until_progress(&mut client, "u1", "failed to fetch PV data from API server").await;
    node.api.delete_live("PersistentVolumeClaim", "data");
    let progress = until_progress(&mut client, "u1", "persistentvolumeclaims \"data\" not found").await;
    assert_eq!(progress.owner, "you");
    assert!(mounts_below(&node.world.pod("u1")).is_empty());
    node.api.live("PersistentVolume", "data", volume);
    node.claim("data");
    let ready = mount(&mut client, "u1", 1).await.1.unwrap();
    // A mounted volume stays while its claim does not exist.
    node.api.delete_live("PersistentVolumeClaim", "data");
    sync.pod(desire("u1", 2, Want::Run, vec![claimed("data")])).await;
    let again = mount(&mut client, "u1", 2).await.1.unwrap();
    assert_eq!(again.volumes[0].host_path, ready.volumes[0].host_path);
    assert_eq!(mounts_below(&node.world.pod("u1")).len(), 1);
}

/// A kubelet has mounted volumes below a root that is on a private mount. The service bind-mounts the root on itself.
#[tokio::test]
async fn volumes_below_a_root_that_was_on_a_private_mount_stay_and_can_be_unmounted() {
    let mut node = Node::with_private_root().await;
    let disks = ["kept", "gone"].map(|name| node.local_volume(name));
    let kubelet = Kubelet(&node);
    let root = kubelet.root().to_owned();
    for (uid, disk) in ["kept", "gone"].into_iter().zip(&disks) {
        kubelet.empty_dir(uid, "data");
        let volume = kubelet.local(uid, uid, disk);
        // Shared, as mounts of containers in it are: an unmount in the covered one must not reach its copy.
        rustix::mount::mount_change(&volume, MountPropagationFlags::SHARED).unwrap();
        fs::create_dir_all(disk.join("inner")).unwrap();
        rustix::mount::mount_bind(disk, volume.join("inner")).unwrap();
    }
    let kept = root.join("pods/kept");
    let inner = kept.join("volumes/kubernetes.io~local-volume/kept/inner");
    let mut client = node.start().await;
    assert_eq!((mounts_below(&root).len(), mount_ids(&kept).len()), (5, 2), "each is there once");
    assert!(has_text(&inner.join("file"), "kept"));
    let gone = root.join("pods/gone/volumes/kubernetes.io~local-volume/gone/inner");
    rustix::mount::unmount(&gone, UnmountFlags::empty()).unwrap();
    let mut sync = Sync::open(&mut client).await;
    let volumes = || vec![empty_dir("data", "", 0), claimed("kept")];
    sync.pod(desire("kept", 1, Want::Run, volumes())).await;
    sync.complete(1, true).await;
    mount(&mut client, "kept", 1).await.1.unwrap();
    until("the removal of the pod that is gone", || !root.join("pods/gone").exists()).await;
    assert!(has_text(&disks[1].join("file"), "gone"), "the data of a local volume stay");
    assert!(has_text(&inner.join("file"), "kept"));
    rustix::mount::unmount(&inner, UnmountFlags::empty()).unwrap();
    sync.pod(desire("kept", 2, Want::Unmount, volumes())).await;
    unmount(&mut client, "kept", LONG).await.unwrap();
    assert!(mounts_below(&kept).is_empty() && has_text(&disks[0].join("file"), "kept"));
}
