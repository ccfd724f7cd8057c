//! Runs a whole init with fake services in its own folder.
#![allow(dead_code, reason = "each test binary uses another part")]
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use keelson_config::{Paths, ServiceName};
use keelson_proto::keelson::events::v1::events_client::EventsClient;
use keelson_proto::keelson::events::v1::{Event, ListEventsRequest};
use keelson_proto::keelson::supervisor::v1 as pb;
use keelson_proto::keelson::supervisor::v1::supervisor_client::SupervisorClient;
use keelson_proto::keelson::supervisor::v1::watch_services_response::Item;
use keelson_service_kit::{PeerChannel, connect_unix};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// The timeout of everything in these tests.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The folder with binaries, run, state and root folders of one agent.
pub struct Scene {
    dir: TempDir,
}

impl Scene {
    pub fn new() -> Self {
        let dir = tempfile::Builder::new().prefix("ki-").tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let scene = Self { dir };
        fs::create_dir(scene.path("bin")).unwrap();
        let fake =
            Path::new(env!("CARGO_BIN_EXE_keelson-init")).with_file_name("examples").join("fake_service");
        assert!(fake.exists(), "{} is missing: cargo build -p keelson-init --examples", fake.display());
        fs::copy(&fake, scene.path("bin/fake")).unwrap();
        for service in ServiceName::supervised() {
            std::os::unix::fs::symlink("fake", scene.path("bin").join(service.binary())).unwrap();
        }
        scene.write_config("");
        scene
    }

    pub fn path(&self, below: &str) -> PathBuf {
        self.dir.path().join(below)
    }

    pub fn text(&self, below: &str) -> String {
        self.path(below).to_str().unwrap().to_owned()
    }

    /// Writes the KeelsonConfiguration with additional lines.
    pub fn write_config(&self, more: &str) {
        let text = format!(
            "apiVersion: keelson/v1\nkind: KeelsonConfiguration\nbinDir: {}\ncontainerLinksDir: {}\n{more}",
            self.text("bin"),
            self.text("links"),
        );
        fs::write(self.path("keelson.yaml"), text).unwrap();
        let text = format!(
            "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\npodLogsDir: {}\nfailCgroupV1: false\nfailSwapOn: false\n",
            self.text("logs")
        );
        fs::write(self.path("kubelet.yaml"), text).unwrap();
    }

    /// Sets what a fake service does at its next start.
    pub fn behave(&self, service: ServiceName, what: &str) {
        let folder = self.path("state").join(service.as_str());
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("behaviour"), what).unwrap();
    }

    /// The command line of init.
    pub fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_keelson-init"));
        command
            .args(["--config", &self.text("kubelet.yaml"), "--keelson-config", &self.text("keelson.yaml")])
            .args(["--run-dir", &self.text("run"), "--state-dir", &self.text("state")])
            .args(["--root-dir", &self.text("root"), "--hostname-override", "testnode"])
            .args(["--container-runtime-endpoint", &format!("unix://{}", self.text("c.sock"))])
            .stdin(Stdio::null());
        command
    }

    pub fn start(&self) -> Init<'_> {
        self.start_as(self.command())
    }

    pub fn start_as(&self, mut command: Command) -> Init<'_> {
        Init { child: command.spawn().unwrap(), scene: self }
    }

    pub fn client(&self) -> SupervisorClient<PeerChannel> {
        let socket = Paths::socket_below(&self.path("run"), ServiceName::Init);
        SupervisorClient::new(connect_unix("init", &socket))
    }

    /// The events of init.
    pub async fn events(&self) -> Vec<Event> {
        let socket = Paths::socket_below(&self.path("run"), ServiceName::Init);
        let mut client = EventsClient::new(connect_unix("init", &socket));
        client.list_events(ListEventsRequest::default()).await.unwrap().into_inner().events
    }

    /// All processes that were started for this scene, without zombies.
    pub fn processes(&self) -> Vec<u32> {
        let needle = self.dir.path().to_str().unwrap();
        let entries = fs::read_dir("/proc").unwrap().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        pids.filter(|pid| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            *pid != std::process::id() && String::from_utf8_lossy(&line).contains(needle)
        })
        .collect()
    }

    /// Waits until `good` is true for the services.
    pub async fn wait(&self, what: &str, good: impl Fn(&[pb::Service]) -> bool) -> Vec<pb::Service> {
        let deadline = Instant::now() + PATIENCE;
        let mut seen: Vec<pb::Service> = Vec::new();
        while Instant::now() < deadline {
            let Ok(stream) = self.client().watch_services(pb::WatchServicesRequest {}).await else {
                tokio::time::sleep(Duration::from_millis(20)).await;
                continue;
            };
            let mut stream = stream.into_inner();
            seen.clear();
            let mut synced = false;
            while let Ok(Ok(Some(message))) =
                tokio::time::timeout(deadline.saturating_duration_since(Instant::now()), stream.message())
                    .await
            {
                match message.item {
                    Some(Item::Service(service)) => {
                        seen.retain(|old| old.name != service.name);
                        seen.push(service);
                    }
                    Some(Item::Synced(_)) => synced = true,
                    None => {}
                }
                if synced && good(&seen) {
                    return seen;
                }
            }
        }
        panic!("timed out after {PATIENCE:?}: {what}; seen: {seen:#?}");
    }

    /// Waits until all services run.
    pub async fn all_running(&self) -> Vec<pb::Service> {
        self.wait("all services run", |services| {
            services.len() == ServiceName::ALL.len() && services.iter().all(|s| s.state == "running")
        })
        .await
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        for pid in self.processes() {
            signal(pid, Signal::KILL);
        }
        // A killed init leaves this lock outside its folders.
        let endpoint = format!("unix://{}", self.text("c.sock"));
        let _ =
            fs::remove_file(Path::new("/run/lock").join(keelson_init_core::endpoint_lock_name(&endpoint)));
    }
}

/// A running init; killed when dropped.
pub struct Init<'a> {
    pub child: Child,
    scene: &'a Scene,
}

impl Init<'_> {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, what: Signal) {
        signal(self.child.id(), what);
    }

    /// Waits for init to end and returns its exit code.
    pub async fn ended(&mut self) -> Option<i32> {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("init has not ended within {PATIENCE:?}");
    }
}

impl Drop for Init<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        for pid in self.scene.processes() {
            signal(pid, Signal::KILL);
        }
    }
}

pub fn signal(pid: u32, what: Signal) {
    if let Some(pid) = Pid::from_raw(i32::try_from(pid).unwrap()) {
        let _ = kill_process(pid, what);
    }
}

pub fn find(services: &[pb::Service], name: ServiceName) -> &pb::Service {
    services.iter().find(|service| service.name == name.as_str()).unwrap()
}

/// A field of /proc/PID/status.
pub fn status_field(pid: u32, name: &str) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name}:"))).unwrap();
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Waits until `good` is true.
pub async fn eventually(what: &str, good: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !good() {
        assert!(Instant::now() < deadline, "timed out after {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Whether a process exists and is not a zombie.
pub fn is_alive(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat[stat.rfind(')').unwrap_or(0)..].starts_with(") Z"))
}
