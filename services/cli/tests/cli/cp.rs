//! `keelson cp` with the tar of this machine in the fake container.

use std::fs;

use crate::fake::Fake;
use crate::{keelson, world};

#[test]
fn cp_copies_files_and_folders_both_ways() {
    let fake = Fake::start(world());
    let dir = tempfile::tempdir().unwrap();
    let (here, there) = (dir.path().join("here"), dir.path().join("there"));
    fs::create_dir_all(here.join("tree/empty")).unwrap();
    fs::create_dir(&there).unwrap();
    let large = "x".repeat(1 << 20);
    fs::write(here.join("tree/large"), &large).unwrap();
    fs::write(here.join("file"), "text").unwrap();
    let copy = |from: &str, to: &str| {
        let result = keelson(&fake.run_dir, &["cp", from, to, "-c", "app"]);
        assert_eq!((result.code, result.out.as_str()), (Some(0), ""), "{result:?}");
        result.err
    };
    let (here_text, there_text) = (here.to_str().unwrap(), there.to_str().unwrap());
    // Into a folder that exists, under a new name, and a whole folder.
    copy(&format!("{here_text}/file"), &format!("web:{there_text}"));
    copy(&format!("{here_text}/file"), &format!("web:{there_text}/renamed"));
    copy(&format!("{here_text}/tree"), &format!("web:{there_text}/"));
    assert_eq!(fs::read_to_string(there.join("file")).unwrap(), "text");
    assert_eq!(fs::read_to_string(there.join("renamed")).unwrap(), "text");
    assert_eq!(fs::read_to_string(there.join("tree/large")).unwrap(), large);
    assert!(there.join("tree/empty").is_dir());
    // And back, without links.
    std::os::unix::fs::symlink("/etc/passwd", there.join("tree/link")).unwrap();
    let notice = copy(&format!("web:{there_text}/tree"), &format!("{here_text}/back"));
    assert!(notice.contains("tree/link is a link or a special file and was not copied"), "{notice}");
    assert_eq!(fs::read_to_string(here.join("back/large")).unwrap(), large);
    assert!(here.join("back/empty").is_dir() && !here.join("back/link").exists());
    copy(&format!("web:{there_text}/renamed"), here_text);
    assert_eq!(fs::read_to_string(here.join("renamed")).unwrap(), "text");
}

#[test]
fn cp_errors_name_the_path_and_the_way_out() {
    let fake = Fake::start(world());
    let run = |args: &[&str]| keelson(&fake.run_dir, &[&["cp", "-c", "app"], args].concat());
    let missing = run(&["web:/nowhere/file", "/tmp/unused"]);
    assert!(missing.failed(1).0.contains("tar in the container ended with exit code"), "{missing:?}");
    let no_source = run(&["/nowhere/file", "web:/tmp"]);
    assert!(no_source.failed(1).0.contains("/nowhere/file"), "{no_source:?}");
    let no_pod = run(&["a", "b"]);
    assert!(no_pod.failed(64).1.contains("POD:PATH"), "{no_pod:?}");
    let dir = tempfile::tempdir().unwrap();
    let unwritable = dir.path().join("file/below");
    fs::write(dir.path().join("file"), "").unwrap();
    let no_target = run(&[&format!("web:{}/file", dir.path().display()), unwritable.to_str().unwrap()]);
    assert!(no_target.failed(1).0.contains("cannot write"), "{no_target:?}");
}
