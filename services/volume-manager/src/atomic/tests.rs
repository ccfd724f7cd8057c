use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;
use std::sync::Arc;

use super::*;
use crate::walks::FsGroupWalks;

/// 2026-11-21 08:05:09 UTC and 7 ns.
const NOW: i64 = 1_795_248_309_000_000_007;

fn payload(files: &[(&str, &str)]) -> Payload {
    let file = |text: &str| File { bytes: text.as_bytes().into(), mode: 0o644, owner: None };
    Payload {
        files: files.iter().map(|(path, text)| ((*path).to_owned(), file(text))).collect(),
        ..Payload::default()
    }
}

/// The files that users see: each path with its text, through the links.
fn visible_files(volume: &Path) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(volume).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if !name.starts_with("..") {
            walk(&path, name, &mut found);
        }
    }
    found
}

fn walk(path: &Path, name: String, found: &mut BTreeMap<String, String>) {
    if path.is_dir() {
        for entry in fs::read_dir(path).unwrap() {
            let entry = entry.unwrap();
            walk(&entry.path(), format!("{name}/{}", entry.file_name().to_str().unwrap()), found);
        }
    } else {
        found.insert(name, fs::read_to_string(path).unwrap());
    }
}

fn texts(files: &[(&str, &str)]) -> BTreeMap<String, String> {
    files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect()
}

/// Everything in the volume that begins with two dots.
fn dotted_names(volume: &Path) -> Vec<String> {
    let names = fs::read_dir(volume).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| name.starts_with("..")).collect();
    names.sort();
    names
}

/// The inode and change time of everything in the volume.
fn inodes_and_times(folder: &Path) -> Vec<(PathBuf, u64, i64, i64)> {
    let mut found = Vec::new();
    let meta = fs::symlink_metadata(folder).unwrap();
    found.push((folder.to_owned(), meta.ino(), meta.ctime(), meta.ctime_nsec()));
    if meta.is_dir() {
        let mut paths: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
        paths.sort();
        paths.iter().for_each(|path| found.extend(inodes_and_times(path)));
    }
    found
}

#[test]
fn files_lie_in_a_dated_folder_behind_relative_links() {
    let dir = tempfile::tempdir().unwrap();
    let files = [("a", "1"), ("deep/er/b", "2")];
    assert!(write(dir.path(), &payload(&files), None, NOW).unwrap());
    assert_eq!(visible_files(dir.path()), texts(&files));
    assert_eq!(dotted_names(dir.path()), ["..2026_11_21_08_05_09.7", "..data"]);
    let link = |name: &str| fs::read_link(dir.path().join(name)).unwrap();
    assert_eq!(link("..data"), Path::new("..2026_11_21_08_05_09.7"));
    assert_eq!(link("a"), Path::new("..data/a"));
    assert_eq!(link("deep"), Path::new("..data/deep"));
    let mode = |name: &str| fs::metadata(dir.path().join(name)).unwrap().mode() & 0o7777;
    assert_eq!((mode("..data/"), mode("a"), mode("deep"), mode("deep/er")), (0o755, 0o644, 0o755, 0o755));
}

#[test]
fn the_same_payload_writes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let files = payload(&[("a", "1"), ("deep/b", "2")]);
    write(dir.path(), &files, None, NOW).unwrap();
    let before = inodes_and_times(dir.path());
    assert!(!write(dir.path(), &files, None, NOW + 1).unwrap());
    assert_eq!(inodes_and_times(dir.path()), before);
}

#[test]
fn a_changed_file_changes_all_at_once_and_the_old_folder_goes() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &payload(&[("a", "1"), ("b", "1")]), None, NOW).unwrap();
    // A reader that has already resolved the link continues with the old files.
    let old = fs::File::open(dir.path().join("a")).unwrap();
    assert!(write(dir.path(), &payload(&[("a", "2"), ("b", "2")]), None, NOW).unwrap());
    assert_eq!(visible_files(dir.path()), texts(&[("a", "2"), ("b", "2")]));
    assert_eq!(dotted_names(dir.path()), ["..2026_11_21_08_05_09.8", "..data"]);
    assert_eq!(io::read_to_string(old).unwrap(), "1");
    // The same length with other content, and the same content at another path.
    assert!(write(dir.path(), &payload(&[("a", "2"), ("c", "2")]), None, NOW).unwrap());
    assert_eq!(visible_files(dir.path()), texts(&[("a", "2"), ("c", "2")]));
}

#[test]
fn a_removed_key_loses_its_link_and_an_empty_payload_is_valid() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &payload(&[("a", "1"), ("deep/b", "2"), ("deep/c", "3")]), None, NOW).unwrap();
    assert!(write(dir.path(), &payload(&[("a", "1"), ("deep/c", "3")]), None, NOW).unwrap());
    assert_eq!(visible_files(dir.path()), texts(&[("a", "1"), ("deep/c", "3")]));
    assert!(write(dir.path(), &payload(&[("a", "1")]), None, NOW).unwrap());
    assert!(fs::symlink_metadata(dir.path().join("deep")).is_err());
    assert!(write(dir.path(), &payload(&[]), None, NOW).unwrap());
    assert!(visible_files(dir.path()).is_empty());
    assert!(!write(dir.path(), &payload(&[]), None, NOW).unwrap());
}

#[test]
fn leftovers_of_a_killed_atomic_writer_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let (one, two) = (payload(&[("a", "1"), ("gone", "1")]), payload(&[("a", "2")]));
    write(dir.path(), &one, None, NOW).unwrap();
    // As if killed during a write, and once more before the rename.
    fs::create_dir(dir.path().join("..2026_11_21_08_05_00.1")).unwrap();
    fs::write(dir.path().join("..2026_11_21_08_05_00.1/a"), "ha").unwrap();
    symlink("..2026_11_21_08_05_00.1", dir.path().join("..data_tmp")).unwrap();
    assert!(write(dir.path(), &two, None, NOW).unwrap());
    assert_eq!(visible_files(dir.path()), texts(&[("a", "2")]));
    assert_eq!(dotted_names(dir.path()).len(), 2, "{:?}", dotted_names(dir.path()));
    // As if killed after the rename: the links are not up to date.
    fs::remove_file(dir.path().join("a")).unwrap();
    symlink("..data/gone", dir.path().join("gone")).unwrap();
    assert!(!write(dir.path(), &two, None, NOW).unwrap());
    assert_eq!(visible_files(dir.path()), texts(&[("a", "2")]));
    // The folder that the link points to was removed.
    fs::remove_dir_all(dir.path().join(fs::read_link(dir.path().join("..data")).unwrap())).unwrap();
    assert!(write(dir.path(), &two, None, NOW).unwrap());
    assert_eq!(visible_files(dir.path()), texts(&[("a", "2")]));
}

#[test]
fn a_failed_atomic_write_leaves_the_old_files() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &payload(&[("a", "1")]), None, NOW).unwrap();
    let before = (visible_files(dir.path()), dotted_names(dir.path()));
    // The core would refuse this payload, which has a file below a file.
    write(dir.path(), &payload(&[("a", "2"), ("x", ""), ("x/y", "")]), None, NOW).unwrap_err();
    assert_eq!((visible_files(dir.path()), dotted_names(dir.path())), before);
}

#[test]
fn a_folder_in_place_of_a_link_of_the_atomic_writer_is_an_error_until_it_is_removed() {
    for link in ["..data", "..data_tmp"] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(link);
        fs::create_dir(&path).unwrap();
        fs::write(path.join("precious"), "x").unwrap();
        for _ in 0..2 {
            let error = write(dir.path(), &payload(&[("a", "1")]), None, NOW).unwrap_err();
            assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
        }
        assert_eq!(fs::read_to_string(path.join("precious")).unwrap(), "x", "nothing foreign is removed");
        assert_eq!(dotted_names(dir.path()), [link], "no half-written folder is left");
        fs::remove_dir_all(&path).unwrap();
        write(dir.path(), &payload(&[("a", "1")]), None, NOW).unwrap();
        assert_eq!(visible_files(dir.path()), texts(&[("a", "1")]));
    }
}

#[test]
fn a_folder_with_the_name_of_a_key_stays_and_hides_no_other_key() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("a")).unwrap();
    fs::write(dir.path().join("a/precious"), "x").unwrap();
    write(dir.path(), &payload(&[("a", "1"), ("b", "1")]), None, NOW).unwrap();
    assert_eq!(visible_files(dir.path()), texts(&[("a/precious", "x"), ("b", "1")]));
    fs::remove_dir_all(dir.path().join("a")).unwrap();
    write(dir.path(), &payload(&[("a", "1"), ("b", "1")]), None, NOW).unwrap();
    assert_eq!(visible_files(dir.path()), texts(&[("a", "1"), ("b", "1")]));
}

#[test]
fn foreign_files_and_nested_mounts_in_a_file_volume_stay() {
    let dir = tempfile::tempdir().unwrap();
    let mut files = payload(&[("a", "1")]);
    files.folders.insert("mount/deep".into());
    write(dir.path(), &files, None, NOW).unwrap();
    let mode = |name: &str| fs::metadata(dir.path().join(name)).unwrap().mode() & 0o7777;
    assert_eq!((mode("mount"), mode("mount/deep")), (0o755, 0o755));
    fs::write(dir.path().join("other"), "x").unwrap();
    symlink("/etc/hosts", dir.path().join("link")).unwrap();
    // A key with the name of a nested mount does not replace it.
    let mut more = payload(&[("mount", "2")]);
    more.folders.insert("mount/deep".into());
    write(dir.path(), &more, None, NOW).unwrap();
    assert!(dir.path().join("mount/deep").is_dir() && dir.path().join("other").is_file());
    assert_eq!(fs::read_link(dir.path().join("link")).unwrap(), Path::new("/etc/hosts"));
}

#[test]
fn fsgroup_is_applied_before_new_files_become_visible() {
    let dir = tempfile::tempdir().unwrap();
    let mut files = payload(&[("a", "1"), ("deep/b", "2")]);
    files.files.get_mut("a").unwrap().mode = 0o400;
    let walks = FsGroupWalks::default();
    write(dir.path(), &files, Some(FsGroup { gid: 4711, walks: &walks }), NOW).unwrap();
    let shown = |name: &str| {
        let meta = fs::metadata(dir.path().join(name)).unwrap();
        (meta.gid(), meta.mode() & 0o7777)
    };
    assert_eq!(shown("a"), (4711, 0o440));
    assert_eq!(shown("deep"), (4711, 0o2755));
    assert_eq!(shown("deep/b"), (4711, 0o644));
}

#[test]
fn a_reader_never_sees_a_mix_of_two_payloads() {
    let dir = tempfile::tempdir().unwrap();
    let state = |n: usize| payload(&[("a", &n.to_string()), ("b", &n.to_string())]);
    write(dir.path(), &state(0), None, NOW).unwrap();
    let volume = dir.path().to_owned();
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let reader = std::thread::spawn(move || {
        let (mut states, mut last) = (0, 0);
        while !stopped.load(std::sync::atomic::Ordering::Relaxed) {
            let folder = volume.join(fs::read_link(volume.join("..data")).unwrap());
            let read = |name: &str| fs::read_to_string(folder.join(name));
            // The folder may have been removed since the link was read; then there is nothing to compare.
            let (Ok(a), Ok(b)) = (read("a"), read("b")) else { continue };
            assert_eq!(a, b);
            let now: usize = a.parse().unwrap();
            assert!(now >= last, "{now} after {last}");
            states += usize::from(now > last);
            last = now;
        }
        states
    });
    for n in 1..500 {
        assert!(write(dir.path(), &state(n), None, NOW + i64::try_from(n).unwrap()).unwrap());
        std::thread::yield_now();
    }
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    assert!(reader.join().unwrap() > 0, "the reader has not seen a change");
}
