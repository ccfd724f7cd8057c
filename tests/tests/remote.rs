//! `keelson logs` and `keelson exec` from anywhere: to a node whose control plane is etcd, over its own API.

#![allow(clippy::unwrap_used)] // A test fails where it stands.

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

struct World {
    cluster: EtcdCluster,
    agent: Agent,
    scratch: Scratch,
    operator: (PathBuf, PathBuf),
}

/// What a command has said and how it ended.
#[derive(Debug)]
struct Said {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl World {
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
        let world = Self { cluster, agent, scratch, operator };
        let manifest = world.scratch.path().join("web.yaml");
        std::fs::write(&manifest, sleeper("web")).unwrap();
        let said = world.keelson(None, &["apply", "-f", manifest.to_str().unwrap()], "").await;
        assert_eq!(said.code, Some(0), "{said:?}");
        world.until_let_in().await;
        world
    }

    /// Until the node has told of its API.
    async fn until_let_in(&self) {
        let mut last = None;
        let result = eventually(LIMIT, "the node lets the operator in", async || {
            let said = self.operator(&["exec", "web", "--", "true"], "").await;
            last = Some(said);
            last.as_ref().is_some_and(|said| said.code == Some(0))
        });
        let result = result.await;
        result.unwrap_or_else(|e| panic!("{e:#}\n{last:?}\n{}", self.agent.log_tail()));
    }

    async fn operator(&self, args: &[&str], input: &str) -> Said {
        self.keelson(Some(&self.operator), args, input).await
    }

    /// Runs the command as somebody on another machine would: nothing of the agent's folders is named.
    async fn keelson(&self, who: Option<&(PathBuf, PathBuf)>, args: &[&str], input: &str) -> Said {
        let mut child = self.begin(who, args);
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(input.as_bytes()).await.unwrap();
        drop(stdin);
        ended(child).await
    }

    /// Starts it.
    fn begin(&self, who: Option<&(PathBuf, PathBuf)>, args: &[&str]) -> Child {
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

/// Waits for it; its standard output is empty where that was taken.
async fn ended(child: Child) -> Said {
    let output = tokio::time::timeout(LIMIT, child.wait_with_output()).await.unwrap().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Said { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

#[tokio::test]
async fn an_operator_reads_logs_and_runs_commands_from_another_machine() {
    let world = World::new().await;
    let said = world.operator(&["exec", "web", "--", "sh", "-c", "echo out; echo err >&2; exit 3"], "").await;
    assert_eq!((said.code, said.stdout.as_str()), (Some(3), "out\n"), "{said:?}");
    assert!(said.stderr.starts_with("err\n"), "{said:?}");
    let long = "x y\n".repeat(100_000);
    let said = world.operator(&["exec", "-i", "web", "--", "cat"], &long).await;
    assert!(said.code == Some(0) && said.stdout == long, "{:?} {}", said.code, said.stderr);
    let odd = "a b&c=d/é'\"";
    let said = world.operator(&["exec", "web", "--", "echo", odd], "").await;
    assert_eq!(said.stdout, format!("{odd}\n"), "{said:?}");
    let said = world.operator(&["exec", "web", "--", "/no/such"], "").await;
    assert!(said.code == Some(1) && said.stderr.contains("no such file"), "{said:?}");

    world
        .operator(&["exec", "web", "--", "sh", "-c", "echo one >/proc/1/fd/1; echo two >/proc/1/fd/1"], "")
        .await;
    let said = world.operator(&["logs", "web", "--tail", "1"], "").await;
    assert_eq!((said.code, said.stdout.as_str()), (Some(0), "two\n"), "{said:?}");
    let said = world.operator(&["logs", "web", "-p"], "").await;
    assert!(said.code == Some(1) && said.stderr.contains("previous terminated container"), "{said:?}");
    let said = world.operator(&["logs", "none"], "").await;
    assert!(said.code == Some(1) && said.stderr.contains("no node tells of a pod \"none\""), "{said:?}");
}

#[tokio::test]
async fn who_shows_no_certificate_or_another_ones_is_not_let_in() {
    let world = World::new().await;
    let before = running(&world.agent).await.unwrap();
    let stranger = Authority::new("clients").files_of("stranger", world.scratch.path());
    for command in [&["exec", "web", "--", "true"][..], &["logs", "web"]] {
        let said = world.keelson(Some(&stranger), command, "").await;
        assert!(said.code == Some(77) && said.stderr.contains("does not know who you are"), "{said:?}");
        let said = world.keelson(None, command, "").await;
        assert!(said.code == Some(64) && said.stderr.contains("--node-cert"), "{said:?}");
    }
    assert_eq!(running(&world.agent).await.unwrap(), before);
}

#[tokio::test]
async fn node_api_is_killed_and_the_node_is_known_again_by_its_certificate() {
    let world = World::new().await;
    let before = running(&world.agent).await.unwrap();
    let shown = std::fs::read_to_string(world.agent.spec().run_dir.join("node-api/serving.crt")).unwrap();
    assert!(world.agent.service(ServiceName::NodeApi).unwrap().signal(Signal::KILL));
    world.until_let_in().await;
    let again = std::fs::read_to_string(world.agent.spec().run_dir.join("node-api/serving.crt")).unwrap();
    assert_eq!(again, shown);
    assert_eq!(running(&world.agent).await.unwrap(), before);

    // runtime-shim, through which the bytes go, dies under a command.
    let mut child =
        world.begin(Some(&world.operator), &["exec", "web", "--", "sh", "-c", "echo begun; sleep 600"]);
    let mut heard = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    tokio::time::timeout(LIMIT, heard.read_line(&mut line)).await.unwrap().unwrap();
    assert_eq!(line, "begun\n");
    assert!(world.agent.service(ServiceName::RuntimeShim).unwrap().signal(Signal::KILL));
    let said = ended(child).await;
    assert_eq!(said.code, Some(1), "{said:?}");
    assert!(said.stderr.contains("it may still run"), "{said:?}");
    assert_eq!(running(&world.agent).await.unwrap(), before);
}

/// Waits until a stream is stuck: nothing has moved on while another command of the same node ran to its end.
async fn until_stuck(world: &World, moved: &AtomicU64, what: &str) {
    loop {
        let before = moved.load(Ordering::Relaxed);
        let said = tokio::time::timeout(LIMIT, world.operator(&["exec", "web", "--", "true"], "")).await;
        let said = said.unwrap_or_else(|_| panic!("held up by {what}\n{}", world.agent.log_tail()));
        assert_eq!(said.code, Some(0), "{what}: {said:?}");
        if before > 0 && moved.load(Ordering::Relaxed) == before {
            return;
        }
    }
}

#[tokio::test]
async fn streams_that_nobody_reads_hold_up_no_other_command() {
    let world = World::new().await;
    let operator = Some(&world.operator);
    let mut stuck = Vec::new();
    for n in 0..3 {
        let mut child = world.begin(operator, &["exec", "-i", "web", "--", "sleep", "1000000"]);
        let mut input = child.stdin.take().unwrap();
        let moved = Arc::new(AtomicU64::new(0));
        let writing = Arc::clone(&moved);
        tokio::spawn(async move {
            let piece = vec![b'x'; 64 << 10];
            while input.write_all(&piece).await.is_ok() {
                writing.fetch_add(1, Ordering::Relaxed);
            }
        });
        until_stuck(&world, &moved, &format!("{n} commands that do not read their input, and one more"))
            .await;
        stuck.push(child);
    }
    for n in 0..4 {
        // Of what it writes one byte is read.
        let mut child = world.begin(operator, &["exec", "web", "--", "cat", "/dev/zero"]);
        let mut output = child.stdout.take().unwrap();
        tokio::time::timeout(LIMIT, output.read_u8()).await.unwrap().unwrap();
        let written = AtomicU64::new(1);
        until_stuck(&world, &written, &format!("{n} readers who do not read, and one more")).await;
        child.stdout = Some(output);
        stuck.push(child);
    }
    let said = world.operator(&["logs", "web"], "").await;
    assert_eq!(said.code, Some(0), "{said:?}");
    drop(stuck);
}
