//! `keelson logs` and `keelson exec` from another machine: to a node whose control plane is etcd, over its own API.

#![allow(clippy::unwrap_used)] // A panic fails the test.
#![allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them")]

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use keelson_config::ServiceName;
use keelson_testkit::process::Signal;
use keelson_testkit::{Agent, EtcdCluster, Scratch, eventually};
use keelson_tests::{LIMIT, running, sleeper};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use serde_json::json;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, Command};

struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// Files with a certificate of `name` and its key.
    fn files_of(&self, name: &str, dir: &Path) -> (PathBuf, PathBuf) {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().unwrap();
        let (cert_file, key_file) = (dir.join(format!("{name}.crt")), dir.join(format!("{name}.key")));
        std::fs::write(&cert_file, params.signed_by(&key, &self.0).unwrap().pem()).unwrap();
        std::fs::write(&key_file, key.serialize_pem()).unwrap();
        (cert_file, key_file)
    }
}

struct TestNode {
    cluster: EtcdCluster,
    agent: Agent,
    scratch: Scratch,
    operator: (PathBuf, PathBuf),
}

/// The outputs and the exit code of a command.
#[derive(Debug)]
struct CommandOutput {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl TestNode {
    async fn new() -> Self {
        let scratch = Scratch::new().unwrap();
        let own = scratch.path().file_name().unwrap().to_str().unwrap().to_owned();
        let cluster = EtcdCluster::start(&scratch.path().join("e"), 1).unwrap();
        let clients = Authority::new("clients");
        let dir = scratch.path().join("n");
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("clients.pem"), clients.0.pem()).unwrap();
        let agent = Agent::builder(&dir)
            .node_name(&format!("{own}-r"))
            .etcd(json!({"endpoints": cluster.endpoints()}))
            .configure(|spec| {
                let fields = json!({
                    "authentication": {"x509": {"clientCAFile": "../clients.pem"}},
                    "authorization": {"mode": "AlwaysAllow"},
                    "address": "127.0.0.1",
                });
                spec.kubelet.extend(fields.as_object().unwrap().clone());
            })
            .start()
            .await
            .unwrap();
        let operator = clients.files_of("operator", scratch.path());
        let test_node = Self { cluster, agent, scratch, operator };
        let manifest = test_node.scratch.path().join("web.yaml");
        std::fs::write(&manifest, sleeper("web")).unwrap();
        let output = test_node.keelson(None, &["apply", "-f", manifest.to_str().unwrap()], "").await;
        assert_eq!(output.code, Some(0), "{output:?}");
        test_node.until_authorized().await;
        test_node
    }

    /// Waits until the node has published its API's address.
    async fn until_authorized(&self) {
        let mut last = None;
        let result = eventually(LIMIT, "the node lets the operator in", async || {
            let output = self.operator(&["exec", "web", "--", "true"], "").await;
            last = Some(output);
            last.as_ref().is_some_and(|output| output.code == Some(0))
        });
        let result = result.await;
        result.unwrap_or_else(|e| panic!("{e:#}\n{last:?}\n{}", self.agent.log_tail()));
    }

    async fn operator(&self, args: &[&str], input: &str) -> CommandOutput {
        self.keelson(Some(&self.operator), args, input).await
    }

    /// Runs the command as on another machine: without any of the agent's folders.
    async fn keelson(&self, who: Option<&(PathBuf, PathBuf)>, args: &[&str], input: &str) -> CommandOutput {
        let mut child = self.spawn_command(who, args);
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(input.as_bytes()).await.unwrap();
        drop(stdin);
        wait_for_end(child).await
    }

    /// Starts the command.
    fn spawn_command(&self, who: Option<&(PathBuf, PathBuf)>, args: &[&str]) -> Child {
        let mut command = Command::new(self.agent.spec().bin_dir.join("keelson"));
        command.env("KEELSON_RUN_DIR", "/nonexistent");
        let (before, after) = match args.iter().position(|arg| *arg == "--") {
            Some(at) => args.split_at(at),
            None => (args, &[][..]),
        };
        command.args(before).args(["--etcd", &self.cluster.endpoints().join(",")]);
        command.args(["--node", &self.agent.spec().node_name]);
        command.args(["--node-address", &format!("127.0.0.1:{}", self.agent.spec().port)]);
        if let Some((cert, key)) = who {
            command.arg("--node-cert").arg(cert).arg("--node-key").arg(key);
        }
        command
            .args(after)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        command.spawn().unwrap()
    }
}

/// Waits for the end of a command; its standard output is empty if it was taken.
async fn wait_for_end(child: Child) -> CommandOutput {
    let output = tokio::time::timeout(LIMIT, child.wait_with_output()).await.unwrap().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    CommandOutput { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

#[tokio::test]
async fn an_operator_reads_logs_and_runs_commands_from_another_machine() {
    let test_node = TestNode::new().await;
    let output =
        test_node.operator(&["exec", "web", "--", "sh", "-c", "echo out; echo err >&2; exit 3"], "").await;
    assert_eq!((output.code, output.stdout.as_str()), (Some(3), "out\n"), "{output:?}");
    assert!(output.stderr.starts_with("err\n"), "{output:?}");
    let long = "x y\n".repeat(100_000);
    let output = test_node.operator(&["exec", "-i", "web", "--", "cat"], &long).await;
    assert!(output.code == Some(0) && output.stdout == long, "{:?} {}", output.code, output.stderr);
    let odd = "a b&c=d/é'\"";
    let output = test_node.operator(&["exec", "web", "--", "echo", odd], "").await;
    assert_eq!(output.stdout, format!("{odd}\n"), "{output:?}");
    let output = test_node.operator(&["exec", "web", "--", "/no/such"], "").await;
    assert!(output.code == Some(1) && output.stderr.contains("no such file"), "{output:?}");

    test_node
        .operator(&["exec", "web", "--", "sh", "-c", "echo one >/proc/1/fd/1; echo two >/proc/1/fd/1"], "")
        .await;
    let output = test_node.operator(&["logs", "web", "--tail", "1"], "").await;
    assert_eq!((output.code, output.stdout.as_str()), (Some(0), "two\n"), "{output:?}");
    let output = test_node.operator(&["logs", "web", "-p"], "").await;
    assert!(output.code == Some(1) && output.stderr.contains("previous terminated container"), "{output:?}");
    let output = test_node.operator(&["logs", "none"], "").await;
    assert!(output.code == Some(1) && output.stderr.contains("no node reports a pod \"none\""), "{output:?}");
}

#[tokio::test]
async fn a_client_without_a_certificate_of_the_operators_ca_is_refused() {
    let test_node = TestNode::new().await;
    let before = running(&test_node.agent).await.unwrap();
    let stranger = Authority::new("clients").files_of("stranger", test_node.scratch.path());
    for command in [&["exec", "web", "--", "true"][..], &["logs", "web"]] {
        let output = test_node.keelson(Some(&stranger), command, "").await;
        assert!(
            output.code == Some(77) && output.stderr.contains("does not accept your certificate"),
            "{output:?}"
        );
        let output = test_node.keelson(None, command, "").await;
        assert!(output.code == Some(64) && output.stderr.contains("--node-cert"), "{output:?}");
    }
    assert_eq!(running(&test_node.agent).await.unwrap(), before);
}

#[tokio::test]
async fn node_api_keeps_its_serving_certificate_after_a_kill() {
    let test_node = TestNode::new().await;
    let before = running(&test_node.agent).await.unwrap();
    let shown = std::fs::read_to_string(test_node.agent.spec().run_dir.join("node-api/serving.crt")).unwrap();
    assert!(test_node.agent.service(ServiceName::NodeApi).unwrap().signal(Signal::KILL));
    test_node.until_authorized().await;
    let again = std::fs::read_to_string(test_node.agent.spec().run_dir.join("node-api/serving.crt")).unwrap();
    assert_eq!(again, shown);
    assert_eq!(running(&test_node.agent).await.unwrap(), before);

    // runtime-shim, which forwards the bytes, is killed during a command.
    let mut child = test_node.spawn_command(
        Some(&test_node.operator),
        &["exec", "web", "--", "sh", "-c", "echo begun; sleep 600"],
    );
    let mut reader = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    tokio::time::timeout(LIMIT, reader.read_line(&mut line)).await.unwrap().unwrap();
    assert_eq!(line, "begun\n");
    assert!(test_node.agent.service(ServiceName::RuntimeShim).unwrap().signal(Signal::KILL));
    let output = wait_for_end(child).await;
    assert_eq!(output.code, Some(1), "{output:?}");
    assert!(output.stderr.contains("it may still run"), "{output:?}");
    assert_eq!(running(&test_node.agent).await.unwrap(), before);
}

/// Waits until a stream is stuck: no byte was moved while another command of the same node ran to its end.
async fn until_stuck(test_node: &TestNode, moved: &AtomicU64, what: &str) {
    loop {
        let before = moved.load(Ordering::Relaxed);
        let output =
            tokio::time::timeout(LIMIT, test_node.operator(&["exec", "web", "--", "true"], "")).await;
        let output = output.unwrap_or_else(|_| panic!("delayed by {what}\n{}", test_node.agent.log_tail()));
        assert_eq!(output.code, Some(0), "{what}: {output:?}");
        if before > 0 && moved.load(Ordering::Relaxed) == before {
            return;
        }
    }
}

#[tokio::test]
async fn unread_streams_delay_no_other_command() {
    let test_node = TestNode::new().await;
    let operator = Some(&test_node.operator);
    let mut stuck = Vec::new();
    for n in 0..3 {
        let mut child = test_node.spawn_command(operator, &["exec", "-i", "web", "--", "sleep", "1000000"]);
        let mut input = child.stdin.take().unwrap();
        let moved = Arc::new(AtomicU64::new(0));
        let writing = Arc::clone(&moved);
        tokio::spawn(async move {
            let piece = vec![b'x'; 64 << 10];
            while input.write_all(&piece).await.is_ok() {
                writing.fetch_add(1, Ordering::Relaxed);
            }
        });
        until_stuck(&test_node, &moved, &format!("{n} commands that do not read their input, and one more"))
            .await;
        stuck.push(child);
    }
    for n in 0..4 {
        // Only one byte of its output is read.
        let mut child = test_node.spawn_command(operator, &["exec", "web", "--", "cat", "/dev/zero"]);
        let mut output = child.stdout.take().unwrap();
        tokio::time::timeout(LIMIT, output.read_u8()).await.unwrap().unwrap();
        let written = AtomicU64::new(1);
        until_stuck(&test_node, &written, &format!("{n} readers who do not read, and one more")).await;
        child.stdout = Some(output);
        stuck.push(child);
    }
    let output = test_node.operator(&["logs", "web"], "").await;
    assert_eq!(output.code, Some(0), "{output:?}");
    drop(stuck);
}
