//! `kubectl` with its own home folder and its complete output.

use std::fs;
use std::io::{Read, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;

use super::KubeApiServer;
use crate::Component;

/// How long a command may take.
const COMMAND_LIMIT: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(super) struct Kubectl {
    program: PathBuf,
    /// Its discovery cache.
    home: PathBuf,
    admin: PathBuf,
}

impl Kubectl {
    pub(super) fn new(dir: &Path, admin: &Path) -> anyhow::Result<Self> {
        let home = dir.join("home");
        fs::create_dir_all(&home).with_context(|| format!("cannot make {}", home.display()))?;
        Ok(Self { program: Component::Kubectl.find()?, home, admin: admin.to_owned() })
    }

    fn command(&self, kubeconfig: &Path, args: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.arg("--kubeconfig").arg(kubeconfig).args(args);
        command.env("HOME", &self.home).env_remove("KUBECONFIG").env_remove("KUBECACHEDIR").current_dir("/");
        command
    }

    /// Runs it to its end.
    fn run(&self, kubeconfig: &Path, args: &[&str], input: &str) -> anyhow::Result<Output> {
        let mut command = self.command(kubeconfig, args);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("cannot run {}", self.program.display()))?;
        let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (stdout, stderr) = (reader(stdout), reader(stderr));
        if let Some(mut stdin) = stdin {
            // A process that does not read it reports the reason.
            let _ = stdin.write_all(input.as_bytes());
        }
        let status = wait(&mut child).with_context(|| format!("kubectl {}", args.join(" ")))?;
        Ok(Output { status, stdout: read(stdout), stderr: read(stderr) })
    }
}

/// `kubectl proxy` on a unix socket: the API as plain HTTP/1.1, for tests that send many requests or measure time. Ends
/// when dropped.
#[derive(Debug)]
pub struct KubeProxy {
    child: Child,
    socket: PathBuf,
}

impl KubeProxy {
    /// Its socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Sends a request for what kubectl has no command for; `content_type` says what `body` is. Fails with what the server says
    /// when that is no success.
    pub fn send(&self, method: &str, path: &str, content_type: &str, body: &Value) -> anyhow::Result<()> {
        let mut stream = UnixStream::connect(&self.socket)?;
        stream.set_read_timeout(Some(COMMAND_LIMIT))?;
        let body = body.to_string();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: {content_type}\r\nContent-Length: {}\r\n\r\n{body}",
            body.len(),
        )?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        let answer = String::from_utf8_lossy(&answer);
        let status = answer.split(' ').nth(1).unwrap_or_default();
        ensure!(status.starts_with('2'), "{method} {path}: {answer}");
        Ok(())
    }
}

impl Drop for KubeProxy {
    fn drop(&mut self) {
        // Both fail only when it has ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits for a child that may hang; it is killed then.
fn wait(child: &mut Child) -> anyhow::Result<ExitStatus> {
    let deadline = Instant::now() + COMMAND_LIMIT;
    let mut pause = Duration::from_millis(2);
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if Instant::now() >= deadline {
            // Both fail only when it has ended by itself.
            let _ = child.kill();
            let _ = child.wait();
            bail!("does not end in {} s", COMMAND_LIMIT.as_secs());
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

/// Reads a pipe to its end, so that the writer never blocks.
fn reader(pipe: Option<impl Read + Send + 'static>) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        // After a read error, the bytes that were read before are the output.
        let _ = pipe.map(|mut pipe| pipe.read_to_end(&mut bytes));
        bytes
    })
}

fn read(reader: JoinHandle<Vec<u8>>) -> Vec<u8> {
    reader.join().unwrap_or_default()
}

impl KubeApiServer {
    /// Runs `kubectl` with `args` as the user that may do everything; at most a minute.
    pub fn kubectl(&self, args: &[&str]) -> anyhow::Result<Output> {
        self.kubectl_as(&self.kubectl.admin, args)
    }

    /// Runs `kubectl` with another kubeconfig.
    pub fn kubectl_as(&self, kubeconfig: &Path, args: &[&str]) -> anyhow::Result<Output> {
        self.kubectl.run(kubeconfig, args, "")
    }

    /// The decoded output of `kubectl … -o json`. An error contains its standard error.
    pub fn kubectl_json(&self, args: &[&str]) -> anyhow::Result<Value> {
        let output = self.kubectl(&[args, &["-o", "json"]].concat())?;
        let text = good(args, &output)?;
        serde_json::from_str(&text).with_context(|| format!("kubectl {} printed: {text}", args.join(" ")))
    }

    /// Starts a [`KubeProxy`] of the user that may do everything, and waits until it has its socket.
    pub fn proxy(&self) -> anyhow::Result<KubeProxy> {
        self.proxy_as(&self.kubectl.admin)
    }

    /// Like [`KubeApiServer::proxy`], as the user of another kubeconfig.
    pub fn proxy_as(&self, kubeconfig: &Path) -> anyhow::Result<KubeProxy> {
        let socket = self.kubectl.home.join(format!("{:08x}.sock", fastrand::u32(..)));
        let path = socket.to_str().context("the folder is no UTF-8")?;
        let mut command = self.kubectl.command(kubeconfig, &["proxy", "--unix-socket", path]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().context("cannot run kubectl proxy")?;
        let mut proxy = KubeProxy { child, socket };
        let deadline = Instant::now() + COMMAND_LIMIT;
        while UnixStream::connect(&proxy.socket).is_err() {
            if let Some(status) = proxy.child.try_wait()? {
                bail!("kubectl proxy has ended: {status}");
            }
            ensure!(Instant::now() < deadline, "kubectl proxy makes no socket");
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(proxy)
    }

    /// Makes an object, or makes it what it is to be; a List is several.
    pub fn apply(&self, object: &Value) -> anyhow::Result<()> {
        self.kubectl_with(&["apply", "--validate=false", "-f", "-"], object)
    }

    /// Runs `kubectl` with an object as its input; an error carries its standard error.
    pub(super) fn kubectl_with(&self, args: &[&str], object: &Value) -> anyhow::Result<()> {
        let output = self.kubectl.run(&self.kubectl.admin, args, &object.to_string())?;
        good(args, &output).map(drop)
    }

    /// Runs `kubectl`, which must go well; what it prints.
    pub(super) fn kubectl_good(&self, args: &[&str]) -> anyhow::Result<String> {
        good(args, &self.kubectl(args)?)
    }
}

fn good(args: &[&str], output: &Output) -> anyhow::Result<String> {
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "kubectl {}: {}", args.join(" "), error.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
