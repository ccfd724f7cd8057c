//! Files in a folder of their own.

use std::os::unix::fs::{MetadataExt as _, symlink};

use super::*;

/// The names in `folder`, sorted.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn mode_of(path: &Path) -> u32 {
    fs::metadata(path).unwrap().mode() & 0o7777
}

#[test]
fn a_file_is_created_and_replaced_by_another_inode() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state.json");
    let inode = || fs::metadata(&path).unwrap().ino();
    for replacement in [
        Replacement::new(),
        Replacement::new().mode(0o600),
        Replacement::default().synced(),
        Replacement::new().mode(0o640).durable(),
    ] {
        let _ = fs::remove_file(&path);
        replacement.write(&path, b"one").unwrap();
        let (before, mut reader) = (inode(), File::open(&path).unwrap());
        replacement.write(&path, b"two").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "two");
        assert_ne!(inode(), before, "{replacement:?}");
        assert_eq!(io::read_to_string(&mut reader).unwrap(), "one", "an open file keeps the old content");
        assert_eq!(names(dir.path()), ["state.json"]);
    }
}

#[test]
fn the_new_file_has_the_given_mode_whatever_the_old_one_had() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    fs::write(&path, "").unwrap();
    for mode in [0o400, 0o600, 0o640, 0o666, 0o755, 0o2755] {
        Replacement::new().mode(mode).write(&path, b"x").unwrap();
        assert_eq!(mode_of(&path), mode, "{mode:o}");
    }
}

#[test]
fn a_link_at_the_temporary_name_is_removed_and_never_followed() {
    let dir = tempfile::tempdir().unwrap();
    let (path, victim) = (dir.path().join("file.json"), dir.path().join("victim"));
    fs::write(&victim, "untouched").unwrap();
    let missing = dir.path().join("missing");
    for target in [&victim, &missing] {
        symlink(target, dir.path().join("file.json.new")).unwrap();
        Replacement::new().mode(0o600).write(&path, b"new").unwrap();
        assert_eq!(names(dir.path()), ["file.json", "victim"]);
        assert!(fs::symlink_metadata(&path).unwrap().is_file());
    }
    assert_eq!(fs::read_to_string(&victim).unwrap(), "untouched");
}

#[test]
fn a_leftover_temporary_file_gives_neither_mode_nor_content_to_the_new_one() {
    let dir = tempfile::tempdir().unwrap();
    let (path, leftover) = (dir.path().join("file"), dir.path().join("file.new"));
    fs::write(&leftover, "a longer content of a killed writer").unwrap();
    fs::set_permissions(&leftover, Permissions::from_mode(0o666)).unwrap();
    let mut reader = File::open(&leftover).unwrap();
    Replacement::new().mode(0o600).write(&path, b"new").unwrap();
    assert_eq!((fs::read_to_string(&path).unwrap().as_str(), mode_of(&path)), ("new", 0o600));
    assert!(io::read_to_string(&mut reader).unwrap().starts_with("a longer content"));
}

#[test]
fn what_a_writer_left_that_was_killed_before_its_rename_is_removed_by_the_next_call() {
    type Call = fn(&Replacement<'_>, &Path);
    let calls: [(Call, Option<&str>); 4] = [
        (|replacement, path| replacement.write(path, b"next").unwrap(), Some("next")),
        (
            |replacement, path| {
                assert_eq!(replacement.write_if_changed(path, b"next").unwrap(), Written::Replaced)
            },
            Some("next"),
        ),
        (
            |replacement, path| {
                assert_eq!(replacement.write_if_changed(path, b"old").unwrap(), Written::Unchanged)
            },
            Some("old"),
        ),
        (|replacement, path| replacement.remove(path).unwrap(), None),
    ];
    for (call, content) in calls {
        for (replacement, leftover) in [
            (Replacement::new().mode(0o600), "state.json.new"),
            (Replacement::new().temporary_suffix(".tmp"), "state.json.tmp"),
            (Replacement::new().temporary_name(".writing").durable(), ".writing"),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("state.json");
            replacement.write(&path, b"old").unwrap();
            // The killed writer has written everything and not renamed it.
            fs::write(dir.path().join(leftover), "from a killed writer").unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), "old");
            call(&replacement, &path);
            assert_eq!(fs::read_to_string(&path).ok().as_deref(), content, "{leftover}");
            let left = Vec::from_iter(content.map(|_| "state.json"));
            assert_eq!(names(dir.path()), left, "{leftover}");
        }
    }
}

#[test]
fn a_leftover_that_cannot_be_removed_is_no_error_while_the_file_has_its_content() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    fs::write(&path, "content").unwrap();
    fs::create_dir(dir.path().join("file.new")).unwrap();
    assert_eq!(Replacement::new().write_if_changed(&path, b"content").unwrap(), Written::Unchanged);
    Replacement::new().write_if_changed(&path, b"other").unwrap_err();
}

#[test]
fn a_link_at_the_path_is_replaced_itself() {
    let dir = tempfile::tempdir().unwrap();
    let (path, target) = (dir.path().join("file"), dir.path().join("target"));
    fs::write(&target, "old").unwrap();
    symlink(&target, &path).unwrap();
    Replacement::new().write(&path, b"new").unwrap();
    assert!(fs::symlink_metadata(&path).unwrap().is_file());
    assert_eq!(fs::read_to_string(&target).unwrap(), "old");
}

#[test]
fn the_temporary_file_has_the_given_suffix_or_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pod.json");
    for (replacement, name) in [
        (Replacement::new(), "pod.json.new"),
        (Replacement::new().temporary_suffix(".tmp"), "pod.json.tmp"),
        (Replacement::new().temporary_name(".writing"), ".writing"),
    ] {
        assert_eq!(replacement.temporary(&path).unwrap(), dir.path().join(name));
        // A folder cannot be removed as a file: the error shows which name is used.
        fs::create_dir(dir.path().join(name)).unwrap();
        let error = replacement.write(&path, b"x").unwrap_err();
        assert!(error.to_string().contains(&format!("cannot remove {}", dir.path().join(name).display())));
        assert_eq!(names(dir.path()), [name], "what could not be removed is still there");
        fs::remove_dir(dir.path().join(name)).unwrap();
    }
}

#[test]
fn after_an_error_the_old_file_is_unchanged_and_no_temporary_file_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("in-the-way");
    fs::create_dir(&path).unwrap();
    fs::write(path.join("inside"), "").unwrap();
    let error = Replacement::new().write(&path, b"x").unwrap_err();
    let text = error.to_string();
    assert_eq!(error.kind(), io::ErrorKind::IsADirectory, "{text}");
    assert!(text.contains(&format!("rename {0}.new to {0}: ", path.display())), "{text}");
    assert_eq!(names(dir.path()), ["in-the-way"]);
    assert_eq!(names(&path), ["inside"]);
}

#[test]
fn an_error_names_the_step_and_the_path_and_has_the_kind_of_its_cause() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("missing/file");
    let error = Replacement::new().write(&missing, b"x").unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::NotFound);
    let expected = format!("cannot create {}.new: No such file or directory", missing.display());
    assert!(error.to_string().starts_with(&expected), "{error}");
    let error = Replacement::new().write(Path::new("/"), b"x").unwrap_err();
    assert_eq!(error.to_string(), "cannot write /: it has no file name");
}

#[test]
fn equal_content_leaves_the_file_untouched() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    let write = |bytes: &[u8]| Replacement::new().mode(0o600).write_if_changed(&path, bytes).unwrap();
    assert_eq!(write(b"one"), Written::Created);
    let before = fs::metadata(&path).unwrap().ino();
    assert_eq!(write(b"one"), Written::Unchanged);
    assert_eq!(fs::metadata(&path).unwrap().ino(), before);
    assert_eq!(write(b"on"), Written::Replaced);
    assert_eq!(fs::read(&path).unwrap(), b"on");
    assert_eq!(names(dir.path()), ["file"]);
}

#[test]
fn a_removed_file_leaves_no_temporary_file_behind() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("secret.json");
    Replacement::new().remove(&path).unwrap();
    fs::write(&path, "").unwrap();
    fs::write(dir.path().join("secret.json.new"), "a part of a secret").unwrap();
    Replacement::new().remove(&path).unwrap();
    assert_eq!(names(dir.path()), Vec::<String>::new());
}

#[test]
fn owner_and_group_are_set_when_this_process_may_do_so() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    let own = (rustix::process::geteuid(), rustix::process::getegid());
    let owner_of = |path: &Path| fs::metadata(path).map(|meta| (meta.uid(), meta.gid(), mode_of(path)));
    let kept = Replacement::new().mode(0o640).owner(None).group(own.1.as_raw());
    kept.write(&path, b"x").unwrap();
    assert_eq!(owner_of(&path).unwrap(), (own.0.as_raw(), own.1.as_raw(), 0o640));
    let given = Replacement::new().mode(0o4750).owner(64_299).group(64_298).write(&path, b"y");
    if own.0.is_root() {
        given.unwrap();
        assert_eq!(owner_of(&path).unwrap(), (64_299, 64_298, 0o4750));
    } else {
        let text = given.unwrap_err().to_string();
        assert!(text.contains("cannot set the owner of") && text.contains("file.new"), "{text}");
        assert_eq!(fs::read(&path).unwrap(), b"x");
    }
    assert_eq!(names(dir.path()), ["file"]);
}

#[test]
fn a_name_alone_is_in_the_current_folder() {
    assert_eq!(folder_of(Path::new("file")), Path::new("."));
    assert_eq!(folder_of(Path::new("a/file")), Path::new("a"));
}
