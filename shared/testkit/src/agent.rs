//! A complete agent on a private containerd, with its own folders, ports and names.

use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use keelson_config::{Paths, ServiceName};
use serde_json::{Map, Value, json};

use crate::containerd::{open_log, tail};
use crate::process::{self, ProcessId, Signal};
use crate::scratch::{remember, report};
use crate::{AgentSpec, Options, PrivateContainerd, Remains, built_binaries, eventually, reachable_binaries};

/// How long all services may take to bind their sockets.
const START_LIMIT: Duration = Duration::from_secs(30);

/// How long init may take to end its services and itself.
const STOP_LIMIT: Duration = Duration::from_secs(30);

/// How long a command of the person's tool may take.
const COMMAND_LIMIT: Duration = Duration::from_secs(60);

/// A running agent with its containerd.
///
/// Dropping it ends both and all containers and removes everything they made.
#[derive(Debug)]
pub struct Agent {
    spec: AgentSpec,
    log: PathBuf,
    containerd: Option<PrivateContainerd>,
    init: Option<Child>,
}

/// Builder of an agent.
#[derive(Debug)]
pub struct AgentBuilder {
    dir: PathBuf,
    node_name: Option<String>,
    containerd: Options,
    configure: Vec<fn(&mut AgentSpec)>,
    trace_endpoint: Option<String>,
    manifests: Vec<(String, String)>,
    etcd: Option<Value>,
    kubeconfig: Option<PathBuf>,
    flags: Vec<String>,
    fields: Map<String, Value>,
    keelson_fields: Map<String, Value>,
}

impl AgentBuilder {
    /// The node's name; otherwise `test-` and something unique.
    #[must_use]
    pub fn node_name(mut self, name: &str) -> Self {
        self.node_name = Some(name.to_owned());
        self
    }

    /// Another kind of containerd.
    #[must_use]
    pub fn containerd(mut self, options: Options) -> Self {
        self.containerd = options;
        self
    }

    /// Changes the agent's configuration before it is written.
    #[must_use]
    pub fn configure(mut self, change: fn(&mut AgentSpec)) -> Self {
        self.configure.push(change);
        self
    }

    /// Sends all traces to this collector.
    #[must_use]
    pub fn traces_to(mut self, endpoint: String) -> Self {
        self.trace_endpoint = Some(endpoint);
        self
    }

    /// The etcd that is its control plane, as `etcd` in the KeelsonConfiguration.
    #[must_use]
    pub fn etcd(mut self, settings: Value) -> Self {
        self.etcd = Some(settings);
        self
    }

    /// The Kubernetes API is its control plane (`--kubeconfig`).
    #[must_use]
    pub fn kubeconfig(mut self, path: PathBuf) -> Self {
        self.kubeconfig = Some(path);
        self
    }

    /// One more flag.
    #[must_use]
    pub fn flag(mut self, flag: String) -> Self {
        self.flags.push(flag);
        self
    }

    /// More fields of the KubeletConfiguration, an object.
    #[must_use]
    pub fn fields(mut self, fields: &Value) -> Self {
        self.fields.extend(fields.as_object().cloned().unwrap_or_default());
        self
    }

    /// A field of the KeelsonConfiguration.
    #[must_use]
    pub fn keelson_field(mut self, name: &str, value: Value) -> Self {
        self.keelson_fields.insert(name.to_owned(), value);
        self
    }

    /// A manifest that exists before the agent starts.
    #[must_use]
    pub fn manifest(mut self, name: &str, text: &str) -> Self {
        self.manifests.push((name.to_owned(), text.to_owned()));
        self
    }

    /// Starts containerd, then the agent, and waits until every service has bound its socket.
    pub async fn start(self) -> anyhow::Result<Agent> {
        let built = built_binaries()?;
        let binaries = reachable_binaries(&built, &self.dir.join("bin"))?;
        let node_name = self.node_name.unwrap_or_else(|| format!("test-{:08x}", fastrand::u32(..)));
        let containerd = PrivateContainerd::start(&self.dir.join("c"), self.containerd).await?;
        let spec = AgentSpec::below(&self.dir.join("a"), binaries, &node_name, containerd.endpoint());
        let mut spec = spec.whatever_the_disk_holds();
        (spec.port, spec.healthz_port) = free_ports()?;
        spec.trace_endpoint = self.trace_endpoint;
        if let Some(settings) = self.etcd {
            spec.keelson.insert("controlPlane".to_owned(), json!("etcd"));
            spec.keelson.insert("etcd".to_owned(), settings);
        }
        if let Some(path) = self.kubeconfig {
            spec.flags.push(format!("--kubeconfig={}", path.display()));
        }
        spec.flags.extend(self.flags);
        spec.kubelet.extend(self.fields);
        spec.keelson.extend(self.keelson_fields);
        for change in self.configure {
            change(&mut spec);
        }
        let log = spec.config_dir.join("agent.log");
        let mut agent = Agent { spec, log, containerd: Some(containerd), init: None };
        remember(&self.dir, &agent.remains())?;
        agent.spec.write()?;
        for (name, text) in self.manifests {
            agent.write_manifest(&name, &text)?;
        }
        agent.start().await?;
        Ok(agent)
    }
}

impl Agent {
    /// An agent with all its folders below `dir`, which should be a [`Scratch`](crate::Scratch).
    pub fn builder(dir: &Path) -> AgentBuilder {
        AgentBuilder {
            dir: dir.to_owned(),
            node_name: None,
            containerd: Options::default(),
            configure: Vec::new(),
            trace_endpoint: None,
            manifests: Vec::new(),
            etcd: None,
            kubeconfig: None,
            flags: Vec::new(),
            fields: Map::new(),
            keelson_fields: Map::new(),
        }
    }

    /// How it is set up.
    pub fn spec(&self) -> &AgentSpec {
        &self.spec
    }

    /// Its containerd.
    pub fn containerd(&self) -> &PrivateContainerd {
        self.containerd.as_ref().expect("the containerd is taken only when the agent is dropped")
    }

    /// Its containerd, to kill and restart it.
    pub fn containerd_mut(&mut self) -> &mut PrivateContainerd {
        self.containerd.as_mut().expect("the containerd is taken only when the agent is dropped")
    }

    /// The folder that it takes its manifests from.
    pub fn manifest_dir(&self) -> &Path {
        &self.spec.manifest_dir
    }

    /// Puts a manifest into the folder, atomically.
    pub fn write_manifest(&self, name: &str, text: &str) -> anyhow::Result<()> {
        let path = self.spec.manifest_dir.join(name);
        // Written outside of the folder first, so that no partial file is ever in it.
        let unfinished = self.spec.config_dir.join(format!("{name}.unfinished"));
        fs::write(&unfinished, text)
            .and_then(|()| fs::rename(&unfinished, &path))
            .with_context(|| format!("cannot write {}", path.display()))
    }

    /// Takes a manifest out of the folder.
    pub fn remove_manifest(&self, name: &str) -> anyhow::Result<()> {
        let path = self.spec.manifest_dir.join(name);
        fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))
    }

    /// The kubelet API, `http://127.0.0.1:<port>`.
    pub fn api_url(&self) -> String {
        format!("http://127.0.0.1:{}", self.spec.port)
    }

    /// The health port, `http://127.0.0.1:<port>`.
    pub fn healthz_url(&self) -> String {
        format!("http://127.0.0.1:{}", self.spec.healthz_port)
    }

    /// The socket of a service.
    pub fn socket(&self, service: ServiceName) -> PathBuf {
        Paths::socket_below(&self.spec.run_dir, service)
    }

    /// Runs `keelson --run-dir <ours>` with `args`.
    pub async fn keelson(&self, args: &[&str]) -> anyhow::Result<Output> {
        let mut command = tokio::process::Command::from(self.spec.cli());
        command.args(args).stdin(Stdio::null()).kill_on_drop(true);
        let output = tokio::time::timeout(COMMAND_LIMIT, command.output());
        output
            .await
            .with_context(|| format!("keelson {} hangs", args.join(" ")))?
            .with_context(|| format!("cannot run keelson in {}", self.spec.bin_dir.display()))
    }

    /// Runs `keelson` with `args` and returns its output, decoded from JSON. An error contains its standard error.
    pub async fn keelson_json(&self, args: &[&str]) -> anyhow::Result<serde_json::Value> {
        let output = self.keelson(args).await?;
        let error = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "keelson {}: {}", args.join(" "), error.trim());
        let text = String::from_utf8_lossy(&output.stdout);
        serde_json::from_str(&text).with_context(|| format!("keelson {} printed: {text}", args.join(" ")))
    }

    /// The process of init; `None` when it does not run.
    pub fn init(&self) -> Option<ProcessId> {
        self.init.as_ref().and_then(|child| ProcessId::of(child.id()))
    }

    /// The process of a service as /proc shows it, a child of init; `None` when it does not run.
    pub fn service(&self, service: ServiceName) -> Option<ProcessId> {
        if service == ServiceName::Init {
            return self.init();
        }
        let (init, binary) = (self.init()?, service.binary());
        let all = process::all();
        let of_init = |p: &&process::Process| p.parent == init.pid;
        all.iter().filter(of_init).find(|p| p.exe_name().as_deref() == Some(binary)).map(|p| p.id)
    }

    /// The pid of a service; `None` when it does not run.
    pub fn service_pid(&self, service: ServiceName) -> Option<u32> {
        self.service(service).map(|process| process.pid)
    }

    /// Kills init alone (SIGKILL); its services end by themselves.
    pub fn kill_init(&mut self) {
        if let Some(mut init) = self.init.take() {
            // Both fail only when it has ended by itself.
            let _ = init.kill();
            let _ = init.wait();
        }
    }

    /// Ends the agent (SIGTERM to init) and waits; containers and containerd continue to run.
    pub async fn stop(&mut self) -> anyhow::Result<()> {
        let Some(mut init) = self.init.take() else { return Ok(()) };
        if let Some(process) = ProcessId::of(init.id()) {
            process.signal(Signal::TERM);
        }
        let ended = eventually(STOP_LIMIT, "init has ended", || {
            std::future::ready(!matches!(init.try_wait(), Ok(None)))
        });
        if let Err(error) = ended.await {
            self.init = Some(init);
            return Err(error.context(self.log_tail()));
        }
        let gone = || std::future::ready(self.services_left().is_empty());
        eventually(STOP_LIMIT, "every service has ended", gone).await.with_context(|| self.log_tail())
    }

    /// Starts the agent on the folders that it had, after [`stop`](Self::stop) or
    /// [`kill_init`](Self::kill_init), and waits until every service has bound its socket.
    pub async fn start(&mut self) -> anyhow::Result<()> {
        ensure!(self.init.is_none(), "the agent is running");
        let log = open_log(&self.log)?;
        let mut command = self.spec.command();
        command.current_dir("/").stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let child = command.spawn().with_context(|| format!("cannot run {command:?}"))?;
        self.init = Some(child);
        let mut ended = None;
        let up = eventually(START_LIMIT, "every service has bound its socket", || {
            ended = self.init.as_mut().and_then(|init| init.try_wait().ok().flatten());
            std::future::ready(ended.is_some() || self.unbound().is_empty())
        });
        up.await.with_context(|| format!("without: {}\n{}", self.unbound().join(", "), self.log_tail()))?;
        if let Some(status) = ended {
            self.init = None;
            bail!("init ended with {status}; the end of its log:\n{}", self.log_tail());
        }
        Ok(())
    }

    /// [`stop`](Self::stop) and [`start`](Self::start).
    pub async fn restart(&mut self) -> anyhow::Result<()> {
        self.stop().await?;
        self.start().await
    }

    /// Ends everything and removes what it made; fails with what could not be removed.
    pub fn end(mut self) -> anyhow::Result<()> {
        let problems = self.clean_up();
        ensure!(problems.is_empty(), "left behind: {}", problems.join("; "));
        Ok(())
    }

    /// The last lines of the logs of init and all services.
    pub fn log_tail(&self) -> String {
        tail(&self.log, 60)
    }

    /// The logs of init and all services.
    pub fn log(&self) -> String {
        tail(&self.log, usize::MAX)
    }

    /// Everything that the agent and containerd may leave on the machine.
    pub fn remains(&self) -> Remains {
        let mut remains = self.spec.remains();
        remains.processes.extend(self.init());
        remains.dirs.push(self.spec.pod_logs_dir.clone());
        remains.dirs.push(self.spec.links_dir.clone());
        if let Some(containerd) = &self.containerd {
            remains.merge(&containerd.remains());
        }
        remains
    }

    fn clean_up(&mut self) -> Vec<String> {
        let remains = self.remains();
        self.kill_init();
        if let Some(mut containerd) = self.containerd.take() {
            containerd.kill();
            containerd.leave_running();
        }
        remains.remove()
    }

    /// The services whose sockets have no listener.
    fn unbound(&self) -> Vec<String> {
        ServiceName::supervised()
            .filter(|service| UnixStream::connect(self.socket(*service)).is_err())
            .map(|service| service.to_string())
            .collect()
    }

    /// The services that were started with our run folder.
    fn services_left(&self) -> Vec<ProcessId> {
        let ours = |p: &&process::Process| {
            p.mentions(&self.spec.run_dir) && p.exe_name().is_some_and(|name| name.starts_with("keelson-"))
        };
        process::all().iter().filter(ours).map(|p| p.id).collect()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if self.containerd.is_some() {
            let failed = std::thread::panicking();
            if failed {
                eprintln!("the end of the agent's log:\n{}", self.log_tail());
            }
            let problems = self.clean_up();
            report(&self.spec.config_dir, &problems);
        }
    }
}

/// Two unused ports of loopback.
fn free_ports() -> anyhow::Result<(u16, u16)> {
    let bind = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("no free port on loopback");
    let (one, two) = (bind()?, bind()?);
    Ok((one.local_addr()?.port(), two.local_addr()?.port()))
}
