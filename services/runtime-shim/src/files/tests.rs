use std::fs::File;

use rustix::fs::FlockOperation;

use super::*;
use crate::files::logs::OWNER_MARK;

fn files(dir: &Path) -> Files {
    let paths = Paths {
        root_dir: dir.join("root"),
        pod_logs_dir: dir.join("logs"),
        container_links_dir: dir.join("links"),
        ..Paths::default()
    };
    fs::create_dir_all(paths.pod_dir("u")).unwrap();
    fs::create_dir_all(&paths.pod_logs_dir).unwrap();
    Files::new(paths)
}

fn pod() -> PodRef {
    PodRef { uid: "u".into(), namespace: "default".into(), name: "web".into() }
}

fn source(path: &Path) -> TerminationMessageSource {
    TerminationMessageSource { file: Some(path.to_owned()), fallback_log: None }
}

#[test]
fn pod_log_folder_is_spread_over_block_groups() {
    let dir = tempfile::tempdir().unwrap();
    let files = files(dir.path());
    fs::remove_dir(dir.path().join("logs")).unwrap();
    files.prepare().unwrap();
    files.prepare().unwrap();
    assert!(keelson_service_kit::is_spread(&dir.path().join("logs")));
}

#[test]
fn container_gets_etc_hosts_and_a_world_writable_termination_file() {
    let dir = tempfile::tempdir().unwrap();
    let request = pb::WriteContainerFilesRequest {
        container: "c".into(),
        termination_message_path: "/dev/termination-log".into(),
        etc_hosts: Some(pb::EtcHosts {
            pod_ips: vec!["10.0.0.2".into()],
            hostname: "web".into(),
            ..Default::default()
        }),
        ..Default::default()
    };
    let answer = files(dir.path()).write(&pod(), &request).unwrap();
    let hosts = fs::read_to_string(&answer.mounts[0].host_path).unwrap();
    assert!(hosts.ends_with("10.0.0.2\tweb\n"), "{hosts}");
    let mode = fs::metadata(&answer.mounts[1].host_path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o666);
}

#[test]
fn container_name_with_path_traversal_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let request = pb::WriteContainerFilesRequest { container: "../x".into(), ..Default::default() };
    assert!(matches!(files(dir.path()).write(&pod(), &request), Err(FileError::BadName(_))));
}

#[test]
fn termination_message_is_the_last_4096_bytes_of_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let files = files(dir.path());
    let path = dir.path().join("root/pods/u/message");
    fs::write(&path, format!("{}end", "x".repeat(5000))).unwrap();
    let message = files.termination_message(&source(&path));
    assert_eq!(message.len(), 4096);
    assert!(message.ends_with("end"));
}

#[test]
fn symlink_as_termination_file_is_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let files = files(dir.path());
    let path = dir.path().join("root/pods/u/message");
    std::os::unix::fs::symlink("/etc/passwd", &path).unwrap();
    assert_eq!(files.termination_message(&source(&path)), "");
    assert_eq!(files.termination_message(&source(Path::new("/etc/passwd"))), "");
}

#[test]
fn next_attempt_follows_the_highest_log_number() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(next_attempt(dir.path()), 0);
    fs::write(dir.path().join("0.log"), "").unwrap();
    fs::write(dir.path().join("4.log.20260101-000000"), "").unwrap();
    assert_eq!(next_attempt(dir.path()), 5);
}

fn make(files: &Files, name: &str) {
    files.make_log_dir(&files.paths.pod_logs_dir.join(name)).unwrap();
}

#[test]
fn log_folders_of_unknown_pods_are_removed_and_others_kept() {
    let dir = tempfile::tempdir().unwrap();
    let files = files(dir.path());
    make(&files, "default_web_u");
    make(&files, "default_old_v");
    assert_eq!(files.sweep_logs(|uid| uid == "u").unwrap(), 1);
    assert!(dir.path().join("logs/default_web_u").exists());
}

#[test]
fn a_uid_with_an_underscore_keeps_its_logs() {
    let dir = tempfile::tempdir().unwrap();
    let files = files(dir.path());
    make(&files, "default_web_u_1");
    assert_eq!(files.sweep_logs(|uid| uid == "u_1").unwrap(), 0);
    assert_eq!(files.sweep_logs(|uid| uid == "1").unwrap(), 1);
}

#[test]
fn log_folders_of_other_agents_are_not_removed() {
    let dir = tempfile::tempdir().unwrap();
    let own = files(dir.path());
    let other = Files::new(Paths { root_dir: dir.path().join("other"), ..own.paths.clone() });
    let (logs, links) = (dir.path().join("logs"), dir.path().join("links"));
    fs::create_dir_all(&links).unwrap();
    make(&own, "default_own_1");
    make(&other, "default_other_2");
    fs::create_dir(logs.join("default_kubelets_3")).unwrap();
    for (name, pod) in
        [("own", "default_own_1"), ("other", "default_other_2"), ("kubelets", "default_kubelets_3")]
    {
        std::os::unix::fs::symlink(logs.join(pod).join("c/0.log"), links.join(name)).unwrap();
    }
    assert_eq!(own.sweep_logs(|_| false).unwrap(), 1);
    let names = |dir: &Path| {
        let mut names: Vec<_> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(names(&logs), ["default_kubelets_3", "default_other_2"]);
    assert_eq!(names(&links), ["kubelets", "other"]);
}

#[test]
fn log_folder_of_an_interrupted_removal_is_still_removed_later() {
    let dir = tempfile::tempdir().unwrap();
    let files = files(dir.path());
    make(&files, "default_old_v");
    let folder = dir.path().join("logs/default_old_v");
    fs::create_dir(folder.join("c")).unwrap();
    fs::write(folder.join("c/0.log"), "").unwrap();
    // A container's folder that cannot be removed because something is mounted on it.
    rustix::mount::mount_bind(folder.join("c"), folder.join("c")).unwrap();
    let first = files.sweep_logs(|_| false).unwrap();
    rustix::mount::unmount(folder.join("c"), rustix::mount::UnmountFlags::DETACH).unwrap();
    assert_eq!(first, 0);
    assert!(folder.join(OWNER_MARK).exists());
    assert_eq!(files.sweep_logs(|_| false).unwrap(), 1);
    assert!(!folder.exists());
}

#[test]
fn dangling_log_link_is_removed_if_its_folder_is_this_agents() {
    let dir = tempfile::tempdir().unwrap();
    let files = files(dir.path());
    make(&files, "default_web_u");
    let (logs, links) = (dir.path().join("logs"), dir.path().join("links"));
    fs::create_dir_all(logs.join("default_web_u/c")).unwrap();
    fs::create_dir_all(&links).unwrap();
    fs::write(logs.join("default_web_u/c/1.log"), "").unwrap();
    for n in [0, 1] {
        let target = logs.join(format!("default_web_u/c/{n}.log"));
        std::os::unix::fs::symlink(target, links.join(n.to_string())).unwrap();
    }
    assert_eq!(files.sweep_logs(|uid| uid == "u").unwrap(), 0);
    assert!(fs::symlink_metadata(links.join("0")).is_err() && links.join("1").exists());
}

#[test]
fn log_folder_of_an_adopted_pod_is_marked_as_this_agents() {
    let dir = tempfile::tempdir().unwrap();
    let own = files(dir.path());
    let other = Files::new(Paths { root_dir: dir.path().join("other"), ..own.paths.clone() });
    let logs = dir.path().join("logs");
    fs::create_dir_all(logs.join("default_web_u")).unwrap();
    make(&other, "default_others_v");
    assert_eq!(own.sweep_logs(|_| true).unwrap(), 0);
    assert_eq!(own.sweep_logs(|_| false).unwrap(), 1);
    assert!(!logs.join("default_web_u").exists() && other.is_own(&logs.join("default_others_v")));
}

#[test]
fn dangling_log_links_are_removed_and_links_outside_kept() {
    let dir = tempfile::tempdir().unwrap();
    let files = files(dir.path());
    let (logs, links) = (dir.path().join("logs"), dir.path().join("links"));
    fs::create_dir_all(&logs).unwrap();
    fs::create_dir_all(&links).unwrap();
    let target = |name: &str| logs.join(name).join("c/0.log");
    std::os::unix::fs::symlink(target("default_web_u"), links.join("gone")).unwrap();
    std::os::unix::fs::symlink(dir.path().join("elsewhere/default_web_u/c/0.log"), links.join("other"))
        .unwrap();
    assert_eq!(files.sweep_logs(|_| false).unwrap(), 0);
    let left = |name: &str| fs::symlink_metadata(links.join(name)).is_ok();
    assert_eq!((left("gone"), left("other")), (false, true));
}

#[test]
fn log_folders_are_kept_while_another_process_holds_the_lock() {
    let dir = tempfile::tempdir().unwrap();
    let files = files(dir.path());
    make(&files, "default_old_v");
    let logs = dir.path().join("logs");
    // A flock(2) lock belongs to the open file description, so this one acts like another process's.
    let held = File::open(&logs).unwrap();
    rustix::fs::flock(&held, FlockOperation::LockExclusive).unwrap();
    let error = files.sweep_logs(|_| false).unwrap_err().to_string();
    let holders = [format!("process {} (", std::process::id()), "another process".to_owned()];
    assert!(holders.iter().any(|by| error.contains(&format!("is being swept by {by}"))), "{error}");
    assert!(error.contains("set another podLogsDir"), "{error}");
    assert!(logs.join("default_old_v").exists());
    drop(held);
    assert_eq!(files.sweep_logs(|_| false).unwrap(), 1);
}
