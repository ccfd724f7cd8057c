use std::io::Read as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{RenameFlags, renameat_with};

use super::*;
use crate::mounts::read_mounts;

/// A pod's folder and a volume next to it. Mounts are removed with it.
struct World {
    dir: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("pod")).unwrap();
        fs::create_dir(dir.path().join("volume")).unwrap();
        fs::create_dir(dir.path().join("outside")).unwrap();
        fs::write(dir.path().join("outside/secret"), "of the node").unwrap();
        Self { dir }
    }

    fn volume(&self) -> PathBuf {
        self.dir.path().join("volume")
    }

    fn pod(&self) -> PathBuf {
        self.dir.path().join("pod")
    }

    fn outside(&self) -> PathBuf {
        self.dir.path().join("outside")
    }

    fn prepare(&self, path: &str) -> Result<PathBuf, SubPathError> {
        self.prepare_as(path, false)
    }

    fn prepare_as(&self, path: &str, read_only: bool) -> Result<PathBuf, SubPathError> {
        let subpath = SubPath { index: 3, volume: "data".into(), path: path.into(), read_only };
        prepare(&self.pod(), "main", &self.volume(), &subpath)
    }

    fn mounts(&self) -> usize {
        let below = |m: &keelson_mountinfo::Mount| m.point.starts_with(self.dir.path());
        read_mounts().unwrap().into_iter().filter(below).count()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let mounts = read_mounts().unwrap_or_default();
        for mount in mounts.iter().rev().filter(|m| m.point.starts_with(self.dir.path())) {
            let _ = unmount(&mount.point, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
        }
    }
}

fn ino(path: &Path) -> u64 {
    fs::metadata(path).unwrap().ino()
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

#[test]
fn subpath_folders_and_files_are_bound_at_the_kubelets_paths_and_reused() {
    let world = World::new();
    fs::create_dir_all(world.volume().join("a/b")).unwrap();
    let target = world.prepare("a/b").unwrap();
    assert_eq!(target, world.pod().join("volume-subpaths/data/main/3"));
    assert_eq!(ino(&target), ino(&world.volume().join("a/b")));
    assert_eq!(mode(target.parent().unwrap()), 0o750);
    fs::write(target.join("x"), "1").unwrap();
    assert!(world.volume().join("a/b/x").exists());
    assert_eq!((world.prepare("a/b").unwrap(), world.mounts()), (target.clone(), 1), "it is reused");
    // Another path at the same mount point, a file this time, replaces the mount.
    assert_eq!(world.prepare("./a//b/x").unwrap(), target);
    assert_eq!((fs::read_to_string(&target).unwrap().as_str(), world.mounts()), ("1", 1));
    remove(&world.pod(), Some("other")).unwrap();
    assert_eq!(world.mounts(), 1);
    remove(&world.pod(), Some("data")).unwrap();
    assert_eq!((world.mounts(), has_any(&world.pod())), (0, false));
    assert_eq!(fs::read_to_string(world.volume().join("a/b/x")).unwrap(), "1", "the volume keeps its files");
    remove(&world.pod(), None).unwrap();
}

#[test]
fn missing_subpath_folders_are_created_with_the_mode_of_the_volume() {
    let world = World::new();
    fs::set_permissions(world.volume(), fs::Permissions::from_mode(0o2777)).unwrap();
    fs::create_dir(world.volume().join("there")).unwrap();
    fs::set_permissions(world.volume().join("there"), fs::Permissions::from_mode(0o700)).unwrap();
    world.prepare("there/new/deep").unwrap();
    let modes = ["there", "there/new", "there/new/deep"].map(|path| mode(&world.volume().join(path)));
    assert_eq!(modes, [0o700, 0o2777, 0o2777]);
    // The volume itself.
    assert_eq!(ino(&world.prepare(".").unwrap()), ino(&world.volume()));
}

#[test]
fn subpath_links_are_followed_inside_the_volume_but_never_out_of_it() {
    let world = World::new();
    fs::create_dir_all(world.volume().join("..v1/sub")).unwrap();
    fs::write(world.volume().join("..v1/key"), "value").unwrap();
    symlink("..v1", world.volume().join("..data")).unwrap();
    symlink("..data/key", world.volume().join("key")).unwrap();
    assert_eq!(fs::read_to_string(world.prepare("key").unwrap()).unwrap(), "value");
    symlink(world.outside(), world.volume().join("absolute")).unwrap();
    symlink("../outside", world.volume().join("upwards")).unwrap();
    symlink("/proc/self/root", world.volume().join("magic")).unwrap();
    symlink("round", world.volume().join("round")).unwrap();
    symlink("nothing", world.volume().join("dangling")).unwrap();
    fs::write(world.volume().join("file"), "").unwrap();
    for (path, text) in [
        ("absolute", "out of the volume"),
        ("absolute/secret", "out of the volume"),
        ("absolute/new", "out of the volume"),
        ("upwards/secret", "out of the volume"),
        ("upwards/new", "out of the volume"),
        ("magic/etc", "out of the volume"),
        ("../outside", "out of the volume"),
        ("/etc", "out of the volume"),
        ("round", "cannot be followed"),
        ("dangling/x", "not a directory"),
        ("file/x", "not a directory"),
    ] {
        let error = world.prepare(path).unwrap_err().to_string();
        assert!(error.contains(text), "{path}: {error}");
        assert!(!error.contains(&*world.dir.path().to_string_lossy()), "{path}: {error}");
    }
    assert_eq!(fs::read_dir(world.outside()).unwrap().count(), 1, "nothing was created there");
}

#[test]
fn a_subpath_swapped_for_a_link_during_the_lookup_never_leaves_the_volume() {
    let world = World::new();
    fs::create_dir_all(world.volume().join("d/sub")).unwrap();
    fs::create_dir(world.outside().join("sub")).unwrap();
    symlink(world.outside(), world.volume().join("link")).unwrap();
    let (inside, outside) = (ino(&world.volume().join("d/sub")), ino(&world.outside().join("sub")));
    let stop = Arc::new(AtomicBool::new(false));
    let swapping = {
        let (stop, volume) = (Arc::clone(&stop), world.volume());
        std::thread::spawn(move || {
            let mut swaps = 0_u64;
            while !stop.load(Ordering::Relaxed) {
                renameat_with(CWD, volume.join("d"), CWD, volume.join("link"), RenameFlags::EXCHANGE)
                    .unwrap();
                swaps += 1;
            }
            swaps
        })
    };
    let (mut bound, mut refused) = (0, 0);
    let begun = std::time::Instant::now();
    // Until both outcomes have occurred: a run without races proves nothing.
    while (bound < 50 || refused < 50) && begun.elapsed().as_secs() < 20 {
        for path in ["d/sub".to_owned(), format!("d/sub/new{bound}")] {
            match world.prepare(&path) {
                Ok(target) => {
                    bound += 1;
                    assert_ne!(ino(&target), outside, "{path}");
                    assert!(path != "d/sub" || ino(&target) == inside, "{path}");
                }
                Err(_) => refused += 1,
            }
        }
    }
    stop.store(true, Ordering::Relaxed);
    assert!(swapping.join().unwrap() > 100);
    assert!(bound >= 50 && refused >= 50, "{bound} bound, {refused} refused");
    assert_eq!(fs::read_dir(world.outside().join("sub")).unwrap().count(), 0, "nothing was created there");
}

#[test]
fn a_read_only_subpath_refuses_writes_and_its_volume_allows_them() {
    let world = World::new();
    fs::create_dir(world.volume().join("a")).unwrap();
    let target = world.prepare_as("a", true).unwrap();
    let refused = fs::write(target.join("x"), "").unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::ReadOnlyFilesystem);
    fs::write(world.volume().join("a/x"), "").unwrap();
    world.prepare_as("a", true).unwrap();
    assert_eq!(world.mounts(), 1);
    // As if killed between the bind mount and the remount, it is found writable.
    mount_remount(&target, MountFlags::BIND, c"").unwrap();
    fs::write(target.join("y"), "").unwrap();
    world.prepare_as("a", true).unwrap();
    assert!(fs::write(target.join("z"), "").is_err());
    world.prepare_as("a", false).unwrap();
    fs::write(target.join("z"), "").unwrap();
    assert_eq!(world.mounts(), 1);
}

#[test]
fn a_subpath_is_bound_to_the_new_file_after_a_replacement() {
    let world = World::new();
    fs::write(world.volume().join("f"), "old").unwrap();
    let target = world.prepare("f").unwrap();
    fs::remove_file(world.volume().join("f")).unwrap();
    fs::write(world.volume().join("f"), "new").unwrap();
    assert_eq!(fs::read_to_string(&target).unwrap(), "old");
    assert_eq!(fs::read_to_string(world.prepare("f").unwrap()).unwrap(), "new");
    // If the path is missing, a folder is created, which has another kind than the mounted file.
    fs::remove_file(world.volume().join("f")).unwrap();
    assert!(world.prepare("f").unwrap().is_dir());
    assert_eq!(world.mounts(), 1);
}

#[test]
fn subpath_leftovers_of_a_killed_service_are_reused_or_removed() {
    let world = World::new();
    fs::create_dir(world.volume().join("a")).unwrap();
    // A mount point of the wrong kind, without its mount.
    let folder = world.pod().join("volume-subpaths/data/main");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("3"), "").unwrap();
    let target = world.prepare("a").unwrap();
    // Two mounts on it, one of them with a deleted source.
    fs::create_dir(world.volume().join("b")).unwrap();
    rustix::mount::mount_bind(world.volume().join("b"), &target).unwrap();
    fs::remove_dir(world.volume().join("b")).unwrap();
    assert_eq!(world.mounts(), 2);
    assert_eq!(ino(&world.prepare("a").unwrap()), ino(&world.volume().join("a")));
    assert_eq!(world.mounts(), 1);
    rustix::mount::mount_bind(world.volume(), &target).unwrap();
    remove(&world.pod(), None).unwrap();
    assert_eq!((world.mounts(), has_any(&world.pod())), (0, false));
}

#[test]
fn mounts_inside_the_volume_stay_when_a_subpath_is_removed() {
    let world = World::new();
    let inner = world.volume().join("a/inner");
    fs::create_dir_all(&inner).unwrap();
    // The volume is a shared mount, as below an agent's root, so that its mounts propagate to every copy.
    rustix::mount::mount_bind(world.volume(), world.volume()).unwrap();
    mount_change(world.volume(), MountPropagationFlags::SHARED).unwrap();
    world.prepare("a").unwrap();
    rustix::mount::mount("tmpfs", &inner, "tmpfs", MountFlags::empty(), c"size=4096").unwrap();
    let before = world.mounts();
    assert!(before >= 4, "the volume, the subPath, the tmpfs and its copy: {before}");
    remove(&world.pod(), None).unwrap();
    assert!(is_mount_point(&inner).unwrap());
    assert_eq!(world.mounts(), before - 2);
}

#[test]
fn a_missing_subpath_in_a_read_only_volume_is_an_error() {
    let world = World::new();
    fs::write(world.volume().join("file"), "x").unwrap();
    rustix::mount::mount_bind(world.volume(), world.volume()).unwrap();
    mount_remount(world.volume(), MountFlags::BIND | MountFlags::RDONLY, c"").unwrap();
    let error = world.prepare("missing").unwrap_err().to_string();
    assert!(error.contains("the volume is read-only"), "{error}");
    assert!(!has_any(&world.pod()), "nothing was created");
    let target = world.prepare("file").unwrap();
    assert!(fs::write(&target, "y").is_err());
    assert_eq!(world.prepare("file").unwrap(), target);
}

#[test]
fn only_regular_files_beneath_the_volume_root_are_opened() {
    let world = World::new();
    fs::write(world.volume().join("real"), "text").unwrap();
    symlink("real", world.volume().join("link")).unwrap();
    symlink(world.outside().join("secret"), world.volume().join("out")).unwrap();
    rustix::fs::mknodat(CWD, world.volume().join("pipe"), FileType::Fifo, Mode::RUSR, 0).unwrap();
    let root = open_root(&world.volume()).unwrap();
    for path in ["real", "link"] {
        let mut text = String::new();
        open_file(&root, path).unwrap().unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "text", "{path}");
    }
    assert!(open_file(&root, "none").unwrap().is_none());
    for path in ["out", "pipe", ".", "../outside/secret"] {
        let error = open_file(&root, path).map(|_| ()).unwrap_err().to_string();
        assert!(!error.contains("secret"), "{path}: {error}");
    }
}
