use keelson_volume_manager_core::operations::PodUid;

use super::*;
use crate::mounter::testing::{LoopDevice, TestFolder};

fn place(folder: &TestFolder, uid: &str) -> BlockPlace {
    let place = VolumePlace {
        volume: "kubernetes.io/local-volume/pv".into(),
        pod: PodUid::from(uid),
        plugin: "kubernetes.io/local-volume".into(),
        inner_name: "pv".into(),
        is_block: true,
    };
    BlockPlace::new(folder.path(), &folder.path().join("maps/pv"), &place)
}

#[tokio::test]
async fn a_device_is_mapped_with_a_bind_mount_a_link_and_a_lock_until_it_is_unmapped() {
    let folder = TestFolder::new();
    let device = LoopDevice::new(&folder, "disk", 4);
    let (mounter, place) = (folder.mounter(), place(&folder, "uid"));
    let link = folder.path().join("pods/uid/volumeDevices/kubernetes.io~local-volume/pv");
    // Repeated, since the service may have ended in the middle.
    for _ in 0..2 {
        assert_eq!(map(&mounter, &place, &device.0).await.unwrap(), link);
    }
    assert_eq!(fs::read_link(&link).unwrap(), device.0);
    let lock = find_lock(&place.global).await.unwrap().unwrap();
    assert_ne!(lock, device.0);
    let error = remove_global_map(&folder.path().join("maps/pv")).await.unwrap_err();
    assert!(error.message.contains("still referenced by the pod uid"), "{}", error.message);
    for _ in 0..2 {
        unmap(&mounter, &place).await.unwrap();
    }
    assert!(find_lock(&place.global).await.unwrap().is_none());
    assert!(fs::symlink_metadata(&link).is_err() && !place.global.exists());
    for _ in 0..2 {
        remove_global_map(&folder.path().join("maps/pv")).await.unwrap();
    }
    assert!(!folder.path().join("maps/pv").exists());
}

#[tokio::test]
async fn a_device_that_was_attached_again_is_mapped_instead_of_the_old_one() {
    let folder = TestFolder::new();
    let old = LoopDevice::new(&folder, "old", 4);
    let new = LoopDevice::new(&folder, "new", 4);
    let (mounter, place) = (folder.mounter(), place(&folder, "uid"));
    map(&mounter, &place, &old.0).await.unwrap();
    map(&mounter, &place, &new.0).await.unwrap();
    let number = |path: &Path| std::os::unix::fs::MetadataExt::rdev(&fs::metadata(path).unwrap());
    assert_eq!(number(&place.global), number(&new.0));
    assert_eq!(fs::read_link(&place.link).unwrap(), new.0);
    unmap(&mounter, &place).await.unwrap();
}

#[tokio::test]
async fn a_map_of_an_unknown_folder_is_found_by_the_pods_link_or_named() {
    let folder = TestFolder::new();
    let device = LoopDevice::new(&folder, "disk", 4);
    let mounter = folder.mounter();
    let root = folder.path();
    let place = VolumePlace {
        volume: "kubernetes.io/iscsi/disk".into(),
        pod: PodUid::from("uid"),
        plugin: "kubernetes.io/iscsi".into(),
        inner_name: "pv".into(),
        is_block: true,
    };
    assert_eq!(BlockPlace::find(&mounter, root, &place).await.unwrap(), None);
    let mapped = BlockPlace::new(root, &root.join("plugins/x/maps"), &place);
    map(&mounter, &mapped, &device.0).await.unwrap();
    assert_eq!(BlockPlace::find(&mounter, root, &place).await.unwrap(), Some(mapped.clone()));
    unmap(&mounter, &mapped).await.unwrap();
    point_link(&mapped.link, &device.0).unwrap();
    let error = BlockPlace::find(&mounter, root, &place).await.unwrap_err();
    let text = format!("then remove the link {}", mapped.link.display());
    assert!(error.message.ends_with(&text), "{}", error.message);
}

#[tokio::test]
async fn only_a_block_device_is_mapped() {
    let folder = TestFolder::new();
    let (mounter, place) = (folder.mounter(), place(&folder, "uid"));
    for (device, expected) in [("/dev/null", "is not a block device"), ("/dev/nothing", "does not exist")] {
        let error = map(&mounter, &place, Path::new(device)).await.unwrap_err();
        assert!(error.message.contains(expected), "{}", error.message);
        assert_eq!(error.class, FailureClass::Uncertain);
    }
    assert!(!place.global.exists());
}

#[test]
fn the_link_of_a_device_replaces_a_link_but_no_other_file() {
    let dir = tempfile::tempdir().unwrap();
    let link = dir.path().join("deep/link");
    for target in ["/dev/a", "/dev/b", "/dev/b"] {
        point_link(&link, Path::new(target)).unwrap();
        assert_eq!(fs::read_link(&link).unwrap(), Path::new(target));
    }
    let file = dir.path().join("file");
    fs::write(&file, "x").unwrap();
    assert!(point_link(&file, Path::new("/dev/a")).is_err());
    assert_eq!(fs::read_to_string(&file).unwrap(), "x");
}

#[test]
fn a_loop_device_is_found_by_its_backing_file_even_if_that_was_removed() {
    let dir = tempfile::tempdir().unwrap();
    for (name, backing) in [("loop0", "/a\n"), ("loop7", "/b (deleted)\n"), ("sda", "/c\n")] {
        let folder = dir.path().join(name).join("loop");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("backing_file"), backing).unwrap();
    }
    fs::create_dir_all(dir.path().join("loop1")).unwrap();
    let find = |path: &str| find_loop(dir.path(), Path::new(path)).unwrap();
    assert_eq!(find("/a"), Some("/dev/loop0".into()));
    assert_eq!(find("/b"), Some("/dev/loop7".into()));
    assert_eq!([find("/c"), find("/")], [None, None]);
}
