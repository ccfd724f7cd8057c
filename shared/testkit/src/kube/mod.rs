//! A private Kubernetes API server with its own etcd, on loopback.
//!
//! There is no controller manager and no scheduler: [`KubeApiServer::namespace`] and [`KubeApiServer::sign_csr`] do
//! what the first would, and a pod is bound by the `nodeName` that its creator sets.

mod authority;
mod binary;
mod cluster;
mod kubectl;

use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};

use crate::containerd::{open_log, tail};
use crate::etcd::free_addresses;
use crate::process::{ProcessId, Signal};
use crate::scratch::{remember, report};
use crate::{EtcdCluster, Relay, Remains};

use authority::{Authority, certified, kubeconfig, write_private};
pub use binary::ApiServerBinary;
pub use kubectl::KubeProxy;
use kubectl::Kubectl;

/// How long the API server may take until it is ready, on a machine that builds at the same time.
const START_LIMIT: Duration = Duration::from_secs(120);
/// How long it may take to end: it lets requests end first, for a minute at most.
const STOP_LIMIT: Duration = Duration::from_secs(90);
/// Maximum number of attempts to find a port that is still free.
const TRIES: u32 = 3;
/// The addresses of services; nothing here forwards them.
const SERVICES: &str = "10.96.0.0/16";
/// The names by which clients and pods know the server, with the first address of [`SERVICES`].
const NAMES: [&str; 7] = [
    "127.0.0.1",
    "localhost",
    "10.96.0.1",
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
];

/// How a [`KubeApiServer`] differs from the usual one.
#[derive(Debug, Clone, Default)]
pub struct KubeOptions {
    /// More arguments, such as `--event-ttl=5m`.
    pub arguments: Vec<String>,
}

/// A running API server with its etcd and its authority.
///
/// HTTPS with client certificates, bootstrap tokens and service accounts' tokens; Node and RBAC authorisation, and
/// NodeRestriction. Dropping it ends both and removes their folder.
#[derive(Debug)]
pub struct KubeApiServer {
    dir: PathBuf,
    binary: ApiServerBinary,
    options: KubeOptions,
    authority: Authority,
    kubectl: Kubectl,
    address: SocketAddr,
    /// `None` only while it is dropped.
    etcd: Option<EtcdCluster>,
    child: Option<Child>,
}

impl KubeApiServer {
    /// Starts one in `dir`, which it makes, and waits until it is ready and has the namespace `default`.
    ///
    /// The first one below a target folder takes minutes: [`ApiServerBinary::find_or_build`].
    pub fn start(dir: &Path, options: KubeOptions) -> anyhow::Result<Self> {
        let binary = ApiServerBinary::find_or_build()?;
        let dir = std::path::absolute(dir)?;
        fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let authority = Authority::new()?;
        write_identities(&dir, &authority)?;
        let etcd = EtcdCluster::start(&dir.join("etcd"), 1)?;
        let admin = dir.join("admin.kubeconfig");
        let kubectl = Kubectl::new(&dir, &admin)?;
        let address = free_address()?;
        let mut server =
            Self { dir, binary, options, authority, kubectl, address, etcd: Some(etcd), child: None };
        server.run_on_free_port()?;
        server.namespace("default")?;
        Ok(server)
    }

    /// The first run chooses the port; another program may take it before the server does.
    fn run_on_free_port(&mut self) -> anyhow::Result<()> {
        let mut tried = 1;
        loop {
            let admin = self.kubeconfig_for("kubernetes-admin", &["system:masters"])?;
            fs::rename(admin, self.admin_kubeconfig())?;
            match self.run() {
                // The server may have ended because another process took its port.
                Err(_) if tried < TRIES && self.process().is_none() => self.address = free_address()?,
                done => return done,
            }
            tried += 1;
        }
    }

    /// Starts the process and waits until it is ready.
    fn run(&mut self) -> anyhow::Result<()> {
        ensure!(self.process().is_none(), "the API server is running");
        let log = open_log(&self.log_path())?;
        let mut command = Command::new(self.binary.path());
        command.args(self.arguments()?).args(&self.options.arguments).current_dir("/");
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let child = command.spawn().with_context(|| format!("cannot run {command:?}"))?;
        self.child = Some(child);
        remember(&self.dir, &self.remains())?;
        self.wait_ready()
    }

    fn arguments(&self) -> anyhow::Result<Vec<String>> {
        let etcd = self.etcd.as_ref().context("etcd was stopped")?;
        let file = |name: &str| self.dir.join(name).display().to_string();
        let mut arguments = vec![
            format!("--etcd-servers={}", etcd.endpoints().join(",")),
            format!("--bind-address={}", self.address.ip()),
            format!("--advertise-address={}", self.address.ip()),
            format!("--secure-port={}", self.address.port()),
            // An endpoint of the service `kubernetes` may not be on loopback.
            "--endpoint-reconciler-type=none".to_owned(),
            format!("--tls-cert-file={}", file("server.crt")),
            format!("--tls-private-key-file={}", file("server.key")),
            format!("--client-ca-file={}", file("ca.crt")),
            format!("--kubelet-client-certificate={}", file("kubelet-client.crt")),
            format!("--kubelet-client-key={}", file("kubelet-client.key")),
            // As with kubeadm; names of nodes cannot be resolved here.
            "--kubelet-preferred-address-types=InternalIP,ExternalIP,Hostname".to_owned(),
            format!("--service-account-signing-key-file={}", file("service-accounts.key")),
            format!("--service-account-key-file={}", file("service-accounts.pub")),
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local".to_owned(),
            format!("--service-cluster-ip-range={SERVICES}"),
            "--authorization-mode=Node,RBAC".to_owned(),
            "--enable-admission-plugins=NodeRestriction".to_owned(),
            "--enable-bootstrap-token-auth=true".to_owned(),
            "--allow-privileged=true".to_owned(),
        ];
        // Later releases do so by themselves. Without the first a pod would need a secret that a controller makes.
        let mut gates = Vec::new();
        if self.binary.version() < (1, 21) {
            gates.push("BoundServiceAccountTokenVolume=true");
        }
        if self.binary.version() < (1, 23) {
            gates.push("EphemeralContainers=true");
        }
        if !gates.is_empty() {
            arguments.push(format!("--feature-gates={}", gates.join(",")));
        }
        Ok(arguments)
    }

    fn wait_ready(&mut self) -> anyhow::Result<()> {
        let deadline = Instant::now() + START_LIMIT;
        let mut last = String::new();
        loop {
            // Without a connection, the server need not be asked.
            if TcpStream::connect(self.address).is_ok() {
                let output = self.kubectl(&["get", "--raw", "/readyz", "--request-timeout=5s"])?;
                if output.status.success() {
                    return Ok(());
                }
                last = String::from_utf8_lossy(&output.stderr).into_owned();
            }
            if let Some(child) = &mut self.child
                && let Some(status) = child.try_wait()?
            {
                self.child = None;
                bail!("kube-apiserver has ended with {status}:\n{}", self.log_tail());
            }
            if Instant::now() >= deadline {
                bail!("kube-apiserver does not get ready: {last}\n{}", self.log_tail());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Its address, `https://127.0.0.1:<port>`.
    pub fn url(&self) -> String {
        format!("https://{}", self.address)
    }

    /// The certificate of its authority, a PEM file: of the server, and of its clients.
    pub fn ca_file(&self) -> PathBuf {
        self.dir.join("ca.crt")
    }

    /// Major and minor version, such as `(1, 20)`.
    pub fn version(&self) -> (u32, u32) {
        self.binary.version()
    }

    /// Its process; `None` when it does not run.
    pub fn process(&self) -> Option<ProcessId> {
        self.child.as_ref().map(Child::id).and_then(ProcessId::of)
    }

    /// Its etcd, of one member.
    pub fn etcd(&self) -> &EtcdCluster {
        self.etcd.as_ref().expect("etcd is taken only when the server is dropped")
    }

    /// Its etcd, to kill and restart it.
    pub fn etcd_mut(&mut self) -> &mut EtcdCluster {
        self.etcd.as_mut().expect("etcd is taken only when the server is dropped")
    }

    /// A network to it that can be cut: [`KubeApiServer::kubeconfig_via`].
    pub fn relay(&self) -> anyhow::Result<Relay> {
        Relay::to(self.address)
    }

    /// Shuts it down gracefully (SIGTERM) and waits; etcd continues to run.
    pub fn stop(&mut self) -> anyhow::Result<()> {
        self.signal(Signal::TERM)?;
        let ended = self.process().is_none_or(|process| process.wait_gone(STOP_LIMIT));
        let log = self.log_tail();
        self.kill();
        ensure!(ended, "kube-apiserver does not end:\n{log}");
        Ok(())
    }

    /// Kills it (SIGKILL); etcd continues to run.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            // Both fail only when it has ended by itself.
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Kills it if it runs, starts it again on the same data and port, and waits until it is ready.
    pub fn restart(&mut self) -> anyhow::Result<()> {
        self.kill();
        self.run()
    }

    /// Stops it where it is (SIGSTOP): its connections stay open and unanswered.
    pub fn freeze(&self) -> anyhow::Result<()> {
        self.signal(Signal::STOP)
    }

    /// Resumes it (SIGCONT).
    pub fn thaw(&self) -> anyhow::Result<()> {
        self.signal(Signal::CONT)
    }

    fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let id = self.process().context("the API server does not run")?;
        ensure!(id.signal(signal), "cannot signal the API server");
        Ok(())
    }

    /// The kubeconfig of a user that may do everything.
    pub fn admin_kubeconfig(&self) -> PathBuf {
        self.dir.join("admin.kubeconfig")
    }

    /// A kubeconfig with a new client certificate of `user` in at most two `groups`, of mode 0600.
    pub fn kubeconfig_for(&self, user: &str, groups: &[&str]) -> anyhow::Result<PathBuf> {
        self.kubeconfig_via(self.address, user, groups)
    }

    /// Like [`KubeApiServer::kubeconfig_for`], for a client that reaches the server through a [`Relay`].
    pub fn kubeconfig_via(&self, via: SocketAddr, user: &str, groups: &[&str]) -> anyhow::Result<PathBuf> {
        let identity = self.authority.client(user, groups)?;
        self.write_kubeconfig(via, &certified(&identity))
    }

    /// The kubeconfig of a node, as the kubelet's after its bootstrap.
    pub fn node_kubeconfig(&self, node: &str) -> anyhow::Result<PathBuf> {
        self.kubeconfig_for(&format!("system:node:{node}"), &["system:nodes"])
    }

    fn write_kubeconfig(&self, via: SocketAddr, user: &serde_json::Value) -> anyhow::Result<PathBuf> {
        let path = self.dir.join(format!("{:08x}.kubeconfig", fastrand::u32(..)));
        let text = kubeconfig(&format!("https://{via}"), &self.authority.pem(), user);
        write_private(&path, &text)?;
        Ok(path)
    }

    /// The last lines of its log.
    pub fn log_tail(&self) -> String {
        tail(&self.log_path(), 40)
    }

    fn log_path(&self) -> PathBuf {
        self.dir.join("kube-apiserver.log")
    }

    fn remains(&self) -> Remains {
        let processes = self.process().into_iter().collect();
        Remains { processes, dirs: vec![self.dir.clone()], ..Remains::default() }
    }
}

impl Drop for KubeApiServer {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the end of the API server's log:\n{}", self.log_tail());
        }
        self.kill();
        self.etcd = None;
        report(&self.dir, &self.remains().remove());
    }
}

/// Writes the authority's certificate, the server's, its own as a client of kubelets, and service accounts' keys.
fn write_identities(dir: &Path, authority: &Authority) -> anyhow::Result<()> {
    let ca = dir.join("ca.crt");
    fs::write(&ca, authority.pem()).with_context(|| format!("cannot write {}", ca.display()))?;
    let as_client = authority.client("kube-apiserver-kubelet-client", &["system:masters"])?;
    for (name, identity) in [("server", authority.server(&NAMES)?), ("kubelet-client", as_client)] {
        write_private(&dir.join(format!("{name}.crt")), &identity.cert)?;
        write_private(&dir.join(format!("{name}.key")), &identity.key)?;
    }
    let key = rcgen::KeyPair::generate()?;
    write_private(&dir.join("service-accounts.key"), &key.serialize_pem())?;
    write_private(&dir.join("service-accounts.pub"), &key.public_key_pem())
}

fn free_address() -> anyhow::Result<SocketAddr> {
    free_addresses(1)?.pop().context("one address was asked for")
}
