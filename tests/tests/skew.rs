//! Neighbours one release apart work together: a node goes from the release before to this one, a service after the other,
//! and at every step pods start, run on and go (architecture §9). `cargo xtask skew` builds that release and runs this.

#![allow(clippy::unwrap_used)] // A test fails where it stands.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use keelson_config::ServiceName;
use keelson_testkit::process::Signal;
use keelson_testkit::{Agent, AgentSpec, Scratch, binary_names, built_binaries, copy_binaries, eventually};
use keelson_tests::{LIMIT, Process, pods, running, sleeper, text, until_ready};

/// Names the folder with the binaries of the release before.
const PREVIOUS: &str = "KEELSON_PREVIOUS_BIN_DIR";

fn previous() -> PathBuf {
    let folder = std::env::var_os(PREVIOUS).map(PathBuf::from);
    folder.unwrap_or_else(|| panic!("{PREVIOUS} names no folder; run: cargo xtask skew"))
}

/// The agent begins with the binaries of the release before.
fn begin_with_previous(spec: &mut AgentSpec) {
    let bins = spec.config_dir.with_file_name("mixed-bin");
    copy_binaries(&previous(), &bins).unwrap();
    spec.bin_dir = bins;
}

/// Puts this release's binary in the place of the former one.
fn renew(bins: &Path, name: &str) {
    let (own, place) = (built_binaries().unwrap().join(name), bins.join(name));
    fs::remove_file(&place).unwrap();
    fs::copy(own, place).unwrap();
}

/// Starts an agent of the release before with two pods.
async fn old_agent(scratch: &Scratch) -> (Agent, BTreeMap<String, Process>) {
    let agent = Agent::builder(scratch.path()).configure(begin_with_previous).start().await.unwrap();
    for name in ["one", "two"] {
        agent.write_manifest(&format!("{name}.yaml"), &sleeper(name)).unwrap();
    }
    until_ready(&agent, &["one", "two"]).await.unwrap();
    let before = running(&agent).await.unwrap();
    (agent, before)
}

/// Has the service run this release's binary.
async fn renew_service(agent: &Agent, service: ServiceName) {
    let former = agent.service(service).unwrap();
    renew(&agent.spec().bin_dir, service.binary());
    former.signal(Signal::KILL);
    let new = agent.spec().bin_dir.join(service.binary());
    eventually(LIMIT, format!("{service} runs the new binary"), async || {
        let now = agent.service(service).filter(|process| *process != former);
        now.is_some_and(|now| fs::read_link(format!("/proc/{}/exe", now.pid)).is_ok_and(|exe| exe == new))
    })
    .await
    .unwrap_or_else(|error| panic!("{error:#}\n{}", agent.log_tail()));
}

/// A pod comes, is asked about in every way, and goes; the others notice nothing.
async fn works(agent: &Agent, step: &str, before: &BTreeMap<String, Process>) {
    let name = format!("with-new-{step}");
    agent.write_manifest(&format!("{name}.yaml"), &sleeper(&name)).unwrap();
    until_ready(agent, &["one", "two", &name]).await.unwrap_or_else(|error| {
        panic!("{step}: {error:#}\n{}", agent.log_tail());
    });
    eventually(LIMIT, "every service is well", async || {
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

/// As a package does it: the services in their order on the former configuration, and init with the next start.
#[tokio::test]
#[ignore = "needs the binaries of the release before, which takes minutes; cargo xtask skew builds them"]
async fn services_of_this_release_work_among_those_of_the_one_before() {
    let scratch = Scratch::new().unwrap();
    let (mut agent, before) = old_agent(&scratch).await;
    works(&agent, "nothing", &before).await;
    for service in ServiceName::supervised() {
        renew_service(&agent, service).await;
        works(&agent, service.binary(), &before).await;
    }
    renew(&agent.spec().bin_dir, ServiceName::Init.binary());
    agent.kill_init();
    agent.start().await.unwrap();
    works(&agent, "init", &before).await;
    renew(&agent.spec().bin_dir, "keelson");
    works(&agent, "command", &before).await;
    agent.end().unwrap();
}

/// The other way around: the command and init with its configuration first, then the services from the last to the first.
#[tokio::test]
#[ignore = "needs the binaries of the release before, which takes minutes; cargo xtask skew builds them"]
async fn services_of_the_release_before_work_under_the_init_of_this_one() {
    let scratch = Scratch::new().unwrap();
    let (mut agent, before) = old_agent(&scratch).await;
    renew(&agent.spec().bin_dir, "keelson");
    works(&agent, "command", &before).await;
    renew(&agent.spec().bin_dir, ServiceName::Init.binary());
    agent.kill_init();
    agent.start().await.unwrap();
    works(&agent, "init", &before).await;
    let services: Vec<ServiceName> = ServiceName::supervised().collect();
    for service in services.into_iter().rev() {
        renew_service(&agent, service).await;
        works(&agent, service.binary(), &before).await;
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
