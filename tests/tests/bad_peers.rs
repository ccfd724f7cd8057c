//! The agent with a runtime that is absent or answers garbage, with a service that hangs, and with another agent on the
//! machine.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::collections::BTreeMap;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use keelson_config::ServiceName;
use keelson_testkit::process::Signal;
use keelson_testkit::{Agent, AgentSpec, Scratch, TraceCollector, eventually};
use keelson_tests::{
    LIMIT, is_ready, own_kib, pods, restarts, running, service_row, sleeper, text, until_cause,
    until_explained, until_ready, until_service,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UnixListener, UnixStream};
use tokio::task::JoinSet;

/// A runtime socket path that the test controls.
fn runtime_socket(spec: &AgentSpec) -> PathBuf {
    spec.config_dir.with_file_name("rt.sock")
}

fn use_runtime_socket(spec: &mut AgentSpec) {
    spec.runtime_endpoint = format!("unix://{}", runtime_socket(spec).display());
}

/// A fake server at the runtime's socket; ends when dropped.
struct FakeRuntime(JoinSet<()>);

#[derive(Clone, Debug)]
enum RuntimeBehavior {
    /// Sends garbage until the client closes the connection.
    Garbage,
    /// Answers in another protocol and closes the connection.
    Http1,
    /// Accepts connections and never answers.
    Silence,
    /// Forwards to a gRPC server that does not serve CRI.
    OtherServer(String),
}

impl FakeRuntime {
    fn at(socket: &Path, behavior: RuntimeBehavior) -> Self {
        let listener = UnixListener::bind(socket).unwrap();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(serve(stream, behavior.clone()));
                // Drops tasks that have ended.
                while connections.try_join_next().is_some() {}
            }
        });
        Self(tasks)
    }

    /// Ends it and puts the real runtime in its place.
    async fn replace_by_real_runtime(mut self, agent: &Agent) {
        self.0.shutdown().await;
        let socket = runtime_socket(agent.spec());
        std::fs::remove_file(&socket).unwrap();
        symlink(agent.containerd().socket(), &socket).unwrap();
    }
}

async fn serve(mut stream: UnixStream, behavior: RuntimeBehavior) {
    match behavior {
        RuntimeBehavior::Garbage => {
            let mut state = 0x9e37_79b9_7f4a_7c15_u64;
            loop {
                let block: Vec<u8> = std::iter::repeat_with(|| {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    state.to_le_bytes()
                })
                .take(512)
                .flatten()
                .collect();
                if stream.write_all(&block).await.is_err() {
                    return;
                }
            }
        }
        RuntimeBehavior::Http1 => {
            let answer = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
            let _ = stream.write_all(answer).await;
        }
        RuntimeBehavior::Silence => {
            let mut sink = [0; 4096];
            while stream.read(&mut sink).await.is_ok_and(|n| n > 0) {}
        }
        RuntimeBehavior::OtherServer(address) => {
            let Ok(mut other) = TcpStream::connect(&address).await else { return };
            let _ = tokio::io::copy_bidirectional(&mut stream, &mut other).await;
        }
    }
}

/// Checks that the agent reports what is wrong with the runtime, restarts no service, and starts pods once there is a runtime.
async fn assert_reported_and_nothing_crashes(behavior: RuntimeBehavior) {
    let scratch = Scratch::new().unwrap();
    let fake_runtime = FakeRuntime::at(&scratch.path().join("rt.sock"), behavior.clone());
    let agent = Agent::builder(scratch.path()).configure(use_runtime_socket).start().await.unwrap();
    agent.write_manifest("web.yaml", &sleeper("web")).unwrap();
    let socket = runtime_socket(agent.spec()).display().to_string();
    let row = until_service(&agent, ServiceName::RuntimeShim, &["degraded"], &socket).await.unwrap();
    let message = row["message"].as_str().unwrap();
    println!("{behavior:?}: {message}");
    if matches!(behavior, RuntimeBehavior::OtherServer(_)) {
        assert!(message.contains("does not speak CRI"), "{message}");
    }
    assert!(message.contains("containerRuntimeEndpoint"), "no remedy: {message}");
    let step = until_cause(&agent, "web", "sandbox", "runtime-shim", &socket).await.unwrap();
    assert_eq!(step["state"], "waiting");

    // For a while: no process ends, memory does not grow, and commands are answered at once.
    let shim = agent.service_pid(ServiceName::RuntimeShim).unwrap();
    let memory = own_kib(shim);
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(6) {
        let asked = Instant::now();
        assert!(pods(&agent).await.unwrap().values().all(|p| !is_ready(p)));
        assert!(asked.elapsed() < Duration::from_secs(10), "{:?}", asked.elapsed());
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    assert_eq!(restarts(&agent).await.unwrap(), BTreeMap::new());
    assert_eq!(agent.service_pid(ServiceName::RuntimeShim), Some(shim));
    let now = own_kib(shim);
    assert!(now < memory + 8 * 1024, "runtime-shim grew from {memory} KiB to {now} KiB");
    assert!(agent.log().len() < 1 << 20, "the log is flooded: {} bytes", agent.log().len());

    fake_runtime.replace_by_real_runtime(&agent).await;
    until_ready(&agent, &["web"]).await.unwrap();
    until_service(&agent, ServiceName::RuntimeShim, &["running"], "").await.unwrap();
    assert_eq!(restarts(&agent).await.unwrap(), BTreeMap::new());
    agent.end().unwrap();
}

#[tokio::test]
async fn an_absent_runtime_is_reported_and_pods_start_when_it_appears() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).configure(use_runtime_socket).start().await.unwrap();
    agent.write_manifest("web.yaml", &sleeper("web")).unwrap();
    let socket = runtime_socket(agent.spec());
    let endpoint = socket.display().to_string();
    let row = until_service(&agent, ServiceName::RuntimeShim, &["degraded"], &endpoint).await.unwrap();
    let message = row["message"].as_str().unwrap();
    assert!(message.contains("start it") && message.contains("containerRuntimeEndpoint"), "{message}");
    until_cause(&agent, "web", "sandbox", "runtime-shim", &endpoint).await.unwrap();
    let node = agent.keelson_json(&["get", "node", "-o", "json"]).await.unwrap();
    assert!(!is_ready(&node), "{node}");
    assert!(node["status"]["conditions"].to_string().contains("container runtime"), "{node:#}");

    symlink(agent.containerd().socket(), &socket).unwrap();
    let appeared = Instant::now();
    until_ready(&agent, &["web"]).await.unwrap();
    assert!(appeared.elapsed() < Duration::from_secs(30), "Ready only after {:?}", appeared.elapsed());
    until_service(&agent, ServiceName::RuntimeShim, &["running"], "").await.unwrap();
    assert_eq!(restarts(&agent).await.unwrap(), BTreeMap::new());
    agent.end().unwrap();
}

#[tokio::test]
async fn a_runtime_that_answers_garbage_is_reported_and_nothing_crashes() {
    assert_reported_and_nothing_crashes(RuntimeBehavior::Garbage).await;
}

#[tokio::test]
async fn a_runtime_that_speaks_another_protocol_is_reported_and_nothing_crashes() {
    assert_reported_and_nothing_crashes(RuntimeBehavior::Http1).await;
}

#[tokio::test]
async fn a_runtime_that_accepts_but_never_answers_is_reported_and_nothing_crashes() {
    assert_reported_and_nothing_crashes(RuntimeBehavior::Silence).await;
}

#[tokio::test]
async fn a_server_that_is_not_a_runtime_is_reported_and_nothing_crashes() {
    let collector = TraceCollector::start().await.unwrap();
    let address = collector.endpoint().replace("http://", "");
    assert_reported_and_nothing_crashes(RuntimeBehavior::OtherServer(address)).await;
}

/// Runs a command that must not hang; its output.
async fn run_quickly(agent: &Agent, args: &[&str]) -> String {
    let asked = Instant::now();
    let output = agent.keelson(args).await.unwrap();
    let took = asked.elapsed();
    assert!(took < LIMIT, "{args:?} took {took:?}: {}", text(&output));
    text(&output)
}

#[tokio::test]
async fn a_stopped_service_is_reported_and_the_others_continue() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    agent.write_manifest("web.yaml", &sleeper("web")).unwrap();
    until_ready(&agent, &["web"]).await.unwrap();
    let before = running(&agent).await.unwrap();
    let needed = |command: &str| match command {
        "pods" => ServiceName::PodSync,
        "sources" => ServiceName::PodConfig,
        _ => ServiceName::NodeStatus,
    };
    for service in ServiceName::supervised() {
        let process = agent.service(service).unwrap();
        assert!(process.signal(Signal::STOP));
        let stopped = Instant::now();
        // init checks each healthy service every ten seconds.
        let named = eventually(LIMIT, format!("{service} is reported as stuck"), async || {
            let row = service_row(&agent, service).await.unwrap();
            row["state"] == "stuck" && !row["message"].as_str().unwrap_or_default().is_empty()
        });
        let named = named.await;
        println!("{service} was named after {:?}", stopped.elapsed());
        // Each command is answered, or names the service that does not answer.
        let mut answers = Vec::new();
        for what in ["pods", "sources", "node", "events"] {
            let output = run_quickly(&agent, &["get", what, "--request-timeout", "2s"]).await;
            if what != "events" && needed(what) == service {
                answers.push((what, output.contains(service.as_str()), output));
            } else {
                answers.push((what, !output.contains("error:"), output));
            }
        }
        assert!(process.signal(Signal::CONT));
        named.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
        for (what, good, output) in answers {
            assert!(good, "{service} stopped, get {what}: {output}");
        }
        until_service(&agent, service, &["running"], "").await.unwrap();
    }
    assert_eq!(running(&agent).await.unwrap(), before);
    assert_eq!(restarts(&agent).await.unwrap(), BTreeMap::new());
    until_ready(&agent, &["web"]).await.unwrap();
    until_explained(&agent, "web", "nothing is left of it", |e| {
        e["summary"].as_str().is_some_and(|s| s.contains("waits for nothing"))
    })
    .await
    .unwrap();
    agent.end().unwrap();
}

/// Starts a second agent, which must be refused; its output.
fn expect_refusal(spec: &AgentSpec) -> String {
    spec.write().unwrap();
    let mut command: Command = spec.command();
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let begun = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begun.elapsed() > Duration::from_secs(10) {
            child.kill().unwrap();
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(78), "{}", text(&output));
    text(&output)
}

#[tokio::test]
async fn a_second_agent_on_the_same_folders_or_the_same_runtime_is_refused() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    agent.write_manifest("web.yaml", &sleeper("web")).unwrap();
    until_ready(&agent, &["web"]).await.unwrap();
    let before = running(&agent).await.unwrap();
    let first = agent.spec();
    let pid = format!("pid {}", agent.init().unwrap().pid);
    let second = || {
        let endpoint = format!("unix://{}/other.sock", scratch.path().display());
        let mut spec = AgentSpec::below(&scratch.path().join("b"), first.bin_dir.clone(), "other", endpoint);
        spec.cgroup_root = format!("{}-b", first.cgroup_root);
        (spec.port, spec.healthz_port) = (0, 0);
        spec
    };

    let mut same_root = second();
    same_root.root_dir.clone_from(&first.root_dir);
    let output = expect_refusal(&same_root);
    assert!(output.contains(&pid) && output.contains("--root-dir"), "{output}");
    assert!(output.contains(first.root_dir.to_str().unwrap()), "{output}");

    let mut same_runtime = second();
    same_runtime.runtime_endpoint.clone_from(&first.runtime_endpoint);
    let output = expect_refusal(&same_runtime);
    assert!(output.contains(&pid) && output.contains("--container-runtime-endpoint"), "{output}");
    assert!(output.contains(&first.runtime_endpoint), "{output}");

    let mut same_run = second();
    same_run.run_dir.clone_from(&first.run_dir);
    let output = expect_refusal(&same_run);
    assert!(output.contains(&pid) && output.contains("--run-dir"), "{output}");

    // The first agent is unaffected.
    assert_eq!(running(&agent).await.unwrap(), before);
    assert_eq!(restarts(&agent).await.unwrap(), BTreeMap::new());
    until_ready(&agent, &["web"]).await.unwrap();
    agent.end().unwrap();
}

#[tokio::test]
async fn two_agents_with_separate_runtimes_do_not_affect_each_other() {
    let scratches = [Scratch::new().unwrap(), Scratch::new().unwrap()];
    let one = Agent::builder(scratches[0].path()).start().await.unwrap();
    let two = Agent::builder(scratches[1].path()).start().await.unwrap();
    // The same pod on both.
    for agent in [&one, &two] {
        agent.write_manifest("web.yaml", &sleeper("web")).unwrap();
    }
    until_ready(&one, &["web"]).await.unwrap();
    until_ready(&two, &["web"]).await.unwrap();
    let before = running(&two).await.unwrap();
    assert_eq!(before.len(), 1);
    one.remove_manifest("web.yaml").unwrap();
    until_ready(&one, &[]).await.unwrap();
    assert_eq!(running(&two).await.unwrap(), before);
    one.end().unwrap();
    assert_eq!(running(&two).await.unwrap(), before);
    assert_eq!(restarts(&two).await.unwrap(), BTreeMap::new());
    let ready = eventually(LIMIT, "the other pod is still Ready", async || {
        pods(&two).await.is_ok_and(|p| p.values().all(is_ready))
    });
    ready.await.unwrap();
    two.end().unwrap();
}
