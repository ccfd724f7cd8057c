//! Services of two successive releases work together: a node is upgraded from the previous release to this one service by
//! service, and at every step pods start, run and end (architecture §9). `cargo xtask skew` builds that release and runs this.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use keelson_config::ServiceName;
use keelson_testkit::process::Signal;
use keelson_testkit::{Agent, AgentSpec, Scratch, binary_names, built_binaries, copy_binaries, eventually};
use keelson_tests::{LIMIT, Process, pods, running, sleeper, text, until_ready};

/// Environment variable with the folder of the previous release's binaries.
const PREVIOUS: &str = "KEELSON_PREVIOUS_BIN_DIR";

fn previous() -> PathBuf {
    let folder = std::env::var_os(PREVIOUS).map(PathBuf::from);
    folder.unwrap_or_else(|| panic!("{PREVIOUS} names no folder; run: cargo xtask skew"))
}

/// Makes the agent start with the binaries of the previous release.
fn start_with_previous(spec: &mut AgentSpec) {
    let bins = spec.config_dir.with_file_name("mixed-bin");
    copy_binaries(&previous(), &bins).unwrap();
    spec.bin_dir = bins;
}

/// Replaces a binary of the previous release by this release's.
fn replace_binary(bins: &Path, name: &str) {
    let (own, place) = (built_binaries().unwrap().join(name), bins.join(name));
    fs::remove_file(&place).unwrap();
    fs::copy(own, place).unwrap();
}

/// Starts an agent of the previous release with two pods.
async fn old_agent(scratch: &Scratch) -> (Agent, BTreeMap<String, Process>) {
    let agent = Agent::builder(scratch.path()).configure(start_with_previous).start().await.unwrap();
    for name in ["one", "two"] {
        agent.write_manifest(&format!("{name}.yaml"), &sleeper(name)).unwrap();
    }
    until_ready(&agent, &["one", "two"]).await.unwrap();
    let before = running(&agent).await.unwrap();
    (agent, before)
}

/// Makes the service run this release's binary.
async fn upgrade_service(agent: &Agent, service: ServiceName) {
    let former = agent.service(service).unwrap();
    replace_binary(&agent.spec().bin_dir, service.binary());
    former.signal(Signal::KILL);
    let new = agent.spec().bin_dir.join(service.binary());
    eventually(LIMIT, format!("{service} runs the new binary"), async || {
        let now = agent.service(service).filter(|process| *process != former);
        now.is_some_and(|now| fs::read_link(format!("/proc/{}/exe", now.pid)).is_ok_and(|exe| exe == new))
    })
    .await
    .unwrap_or_else(|error| panic!("{error:#}\n{}", agent.log_tail()));
}

/// Runs a pod, queries it with every command and deletes it; the other pods are unaffected.
async fn assert_pods_work(agent: &Agent, step: &str, before: &BTreeMap<String, Process>) {
    let name = format!("with-new-{step}");
    agent.write_manifest(&format!("{name}.yaml"), &sleeper(&name)).unwrap();
    until_ready(agent, &["one", "two", &name]).await.unwrap_or_else(|error| {
        panic!("{step}: {error:#}\n{}", agent.log_tail());
    });
    eventually(LIMIT, "every service is healthy", async || {
        let output = agent.keelson(&["get", "services"]).await.unwrap();
        let table = text(&output);
        output.status.success() && table.lines().skip(1).all(|line| line.contains(" running "))
    })
    .await
    .unwrap_or_else(|error| panic!("{step}: {error:#}\n{}", agent.log_tail()));
    for (arguments, wanted) in [
        (vec!["get", "pods", "-o", "wide"], "Running"),
        (vec!["describe", "pod", &name], "Started"),
        (vec!["explain", "pod", &name], "waits for nothing"),
        (vec!["get", "node"], agent.spec().node_name.as_str()),
        (vec!["get", "volumes"], "scratch"),
        (vec!["get", "images"], "busybox"),
        (vec!["logs", &name], "hello from"),
        (vec!["exec", &name, "--", "echo", "inside"], "inside"),
    ] {
        let output = agent.keelson(&arguments).await.unwrap();
        assert!(output.status.success(), "{step}: {arguments:?}: {}", text(&output));
        assert!(text(&output).contains(wanted), "{step}: {arguments:?}: {}", text(&output));
    }
    agent.remove_manifest(&format!("{name}.yaml")).unwrap();
    eventually(LIMIT, "only what was running before runs", async || {
        running(agent).await.is_ok_and(|now| now == *before)
            && pods(agent).await.is_ok_and(|pods| pods.len() == 2)
    })
    .await
    .unwrap_or_else(|error| panic!("{step}: {error:#}\n{}", agent.log_tail()));
}

/// As a package does it: the services in order with the old configuration, and init at the next start.
#[tokio::test]
#[ignore = "needs the binaries of the release before, which takes minutes; cargo xtask skew builds them"]
async fn services_of_this_release_work_with_those_of_the_previous_release() {
    let scratch = Scratch::new().unwrap();
    let (mut agent, before) = old_agent(&scratch).await;
    assert_pods_work(&agent, "nothing", &before).await;
    for service in ServiceName::supervised() {
        upgrade_service(&agent, service).await;
        assert_pods_work(&agent, service.binary(), &before).await;
    }
    replace_binary(&agent.spec().bin_dir, ServiceName::Init.binary());
    agent.kill_init();
    agent.start().await.unwrap();
    assert_pods_work(&agent, "init", &before).await;
    replace_binary(&agent.spec().bin_dir, "keelson");
    assert_pods_work(&agent, "command", &before).await;
    agent.end().unwrap();
}

/// In reverse: the command and init with its configuration first, then the services from the last to the first.
#[tokio::test]
#[ignore = "needs the binaries of the release before, which takes minutes; cargo xtask skew builds them"]
async fn services_of_the_previous_release_work_under_this_releases_init() {
    let scratch = Scratch::new().unwrap();
    let (mut agent, before) = old_agent(&scratch).await;
    replace_binary(&agent.spec().bin_dir, "keelson");
    assert_pods_work(&agent, "command", &before).await;
    replace_binary(&agent.spec().bin_dir, ServiceName::Init.binary());
    agent.kill_init();
    agent.start().await.unwrap();
    assert_pods_work(&agent, "init", &before).await;
    let services: Vec<ServiceName> = ServiceName::supervised().collect();
    for service in services.into_iter().rev() {
        upgrade_service(&agent, service).await;
        assert_pods_work(&agent, service.binary(), &before).await;
    }
    for name in binary_names() {
        assert_eq!(
            fs::read(agent.spec().bin_dir.join(name)).unwrap(),
            fs::read(built_binaries().unwrap().join(name)).unwrap(),
            "{name} is of this release at the end"
        );
    }
    agent.end().unwrap();
}
