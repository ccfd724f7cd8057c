//! Shell completion, and the manual pages.

use std::path::Path;
use std::process::{Command, Stdio};

use keelson_config::ServiceName;

use crate::fake::Fake;
use crate::{CommandResult, command, keelson, world};

/// The completions of the last word of a line, as bash gets them.
fn completed(run_dir: &Path, line: &[&str]) -> Vec<String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_keelson"));
    command.env("KEELSON_COMPLETE", "bash").env("KEELSON_RUN_DIR", run_dir).env("_CLAP_IFS", "\n");
    command.env("_CLAP_COMPLETE_INDEX", (line.len() - 1).to_string()).env("_CLAP_COMPLETE_COMP_TYPE", "9");
    let output = command.arg("--").args(line).stdin(Stdio::null()).output().unwrap();
    CommandResult::of(output).ok().lines().map(|word| word.trim_end().to_owned()).collect()
}

#[test]
fn completion_offers_pods_services_and_flags() {
    let fake = Fake::start(world());
    let pods = |line: &[&str]| {
        let mut pods = completed(&fake.run_dir, line);
        pods.retain(|word| !word.starts_with('-'));
        pods
    };
    assert_eq!(pods(&["keelson", "logs", ""]), ["db-edge", "web-edge"]);
    assert_eq!(pods(&["keelson", "logs", "w"]), ["web-edge"]);
    assert_eq!(pods(&["keelson", "get", "pods", "-n", "system", ""]), ["dns-edge"]);
    assert_eq!(pods(&["keelson", "describe", "pod", "-A", "d"]), ["db-edge", "dns-edge"]);
    assert_eq!(pods(&["keelson", "exec", "-it", "w"]), ["web-edge"]);
    assert_eq!(pods(&["keelson", "services", "restart", "pod"]), ["pod-config", "pod-sync"]);
    assert_eq!(pods(&["keelson", "services", "restart", "in"]), Vec::<String>::new());
    assert_eq!(pods(&["keelson", "desc"]), ["describe"]);
    assert!(completed(&fake.run_dir, &["keelson", "get", "pods", "--wat"]).contains(&"--watch".to_owned()));
}

#[test]
fn completion_offers_the_uids_of_orphaned_pods() {
    let fake = Fake::start(crate::orphans::world_with_orphans());
    assert_eq!(completed(&fake.run_dir, &["keelson", "orphans", "clean", "u"]), ["u8", "u9"]);
    assert_eq!(completed(&fake.run_dir, &["keelson", "orphans", "clean", "u8", "g"]), ["gone"]);
}

#[test]
fn completion_offers_claims_of_the_namespace_and_volumes() {
    let fake = Fake::start(crate::volume_objects::world_with_claims());
    let objects = |line: &[&str]| {
        let mut objects = completed(&fake.run_dir, &[&["keelson"], line].concat());
        objects.retain(|word| !word.starts_with('-'));
        objects
    };
    assert_eq!(objects(&["get", "pvc", ""]), ["db", "idle"]);
    assert_eq!(objects(&["delete", "pvc", "-n", "system", ""]), ["cache"]);
    assert_eq!(objects(&["get", "persistentvolumeclaims", "-A", "c"]), ["cache"]);
    assert_eq!(objects(&["delete", "pv", "di"]), ["disk"]);
    assert_eq!(objects(&["get", "pv", ""]), ["db", "disk"]);
}

#[test]
fn completion_is_empty_without_an_agent_that_answers() {
    let folder = tempfile::tempdir().unwrap();
    let line = ["keelson", "logs", "w"];
    assert_eq!(completed(folder.path(), &line), Vec::<String>::new());
    let socket = keelson_config::Paths::socket_below(folder.path(), ServiceName::PodSync);
    std::fs::create_dir(socket.parent().unwrap()).unwrap();
    let _silent_listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let started_at = std::time::Instant::now();
    assert_eq!(completed(folder.path(), &line), Vec::<String>::new());
    assert!(started_at.elapsed() < std::time::Duration::from_secs(10));
}

#[test]
fn bash_completion_script_completes_a_line() {
    let fake = Fake::start(world());
    let binary = Path::new(env!("CARGO_BIN_EXE_keelson"));
    let path = format!("{}:{}", binary.parent().unwrap().display(), std::env::var("PATH").unwrap());
    let script = "source <(keelson completion bash)\n\
                  COMP_WORDS=(keelson logs we) COMP_CWORD=2 COMP_TYPE=9\n\
                  _clap_complete_keelson keelson we logs\n\
                  printf '%s\\n' \"${COMPREPLY[@]}\"";
    let mut bash = Command::new("bash");
    bash.args(["--norc", "-c", script]).env("PATH", path).env("KEELSON_RUN_DIR", &fake.run_dir);
    let result = CommandResult::of(bash.stdin(Stdio::null()).output().unwrap());
    assert_eq!(result.ok().split_whitespace().collect::<Vec<_>>(), ["web-edge"]);
}

#[test]
fn completion_scripts_need_no_agent_and_have_an_alias() {
    let nowhere = Path::new("/nonexistent");
    for shell in ["bash", "zsh", "fish"] {
        let script = keelson(nowhere, &["completion", shell]).ok();
        assert!(script.contains("keelson") && script.contains("KEELSON_COMPLETE"), "{shell}: {script}");
        assert_eq!(keelson(nowhere, &["completions", shell]).ok(), script);
    }
    assert_eq!(keelson(nowhere, &["completion", "cmd"]).code, Some(64));
}

#[test]
fn man_writes_a_page_for_each_command() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("man/man1");
    let result = keelson(Path::new("/nonexistent"), &["man", "--dir", dir.to_str().unwrap()]);
    assert_eq!((result.code, result.out.as_str()), (Some(0), ""));
    for page in ["keelson", "keelson-get", "keelson-get-pods", "keelson-exec", "keelson-services-restart"] {
        let text = std::fs::read_to_string(dir.join(format!("{page}.1"))).unwrap();
        assert!(text.contains(".TH") && text.contains(".SH SYNOPSIS"), "{page}: {text}");
    }
    let first = std::fs::read_to_string(dir.join("keelson.1")).unwrap();
    assert!(first.contains("Exit codes") && first.contains("77"), "{first}");
    let result = keelson(Path::new("/nonexistent"), &["man", "--dir", "/proc/nowhere"]);
    assert!(result.failed(1).0.contains("/proc/nowhere"), "{result:?}");
    assert_eq!(CommandResult::of(command(Path::new("/"), &["man"]).output().unwrap()).code, Some(64));
}
