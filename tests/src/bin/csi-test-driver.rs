//! A CSI driver for tests. Volumes are folders that it bind-mounts, and loop devices for block volumes. It serves the services
//! Identity and Node on `--endpoint`, and its registration on a socket in `--registration-dir`, and it is strict: a request that
//! the CSI specification does not allow is an error.
//!
//! ```text
//! csi-test-driver --name N --endpoint unix:///…/csi.sock --registration-dir DIR --state DIR [--node-id ID] [--stage]
//!     [--capabilities stats,expand,condition,multi-writer,mount-group] [--max-volumes N] [--topology KEY=VALUE]
//!     [--version V] [--faults FILE] [--end-with-stdin]
//! ```
//!
//! It prints `ready` once it serves. `calls.jsonl` in the state folder gets one line per call: `method`, `request` with the keys of
//! secrets instead of their values, `pod`, and `result`: `OK`, the name of a gRPC code, or the name of a fault.
//!
//! The file of faults may be replaced at any time. It is a JSON object, method → one of
//!
//! | fault | effect |
//! |---|---|
//! | `{"fail": {"code": 14, "times": 2, "message": "…"}}` | fails with this code so often, or always |
//! | `{"hang": true}` | does not answer until the fault is removed |
//! | `{"garbage": "empty"}` | answers without a message and without a status |
//! | `{"garbage": "broken"}` | answers with a message that is not Protobuf |
//! | `{"garbage": "large"}` | answers with 8 MiB |
//! | `{"lie": true}` | reports success and does nothing |
//! | `{"exit": 3}` | ends the process with this code |
//!
//! With `--end-with-stdin` it removes its mounts and ends when stdin is closed.

#![allow(clippy::disallowed_methods, reason = "the tasks end with the process")]

use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::fs::{self, OpenOptions};
use std::future::Future;
use std::hash::{Hash as _, Hasher as _};
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::{Command, ExitCode};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use anyhow::{Context as _, bail};
use keelson_proto::csi::v1 as pb;
use keelson_proto::csi::v1::identity_server::{Identity, IdentityServer};
use keelson_proto::csi::v1::node_server::{Node, NodeServer};
use keelson_proto::pluginregistration as reg;
use keelson_proto::pluginregistration::registration_server::{Registration, RegistrationServer};
use keelson_tests::csi_driver::{clean_up, loop_devices, mount_points};
use rustix::mount::{MountFlags, UnmountFlags};
use serde_json::{Value, json};
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::body::Body;
use tonic::codegen::Service;
use tonic::server::NamedService;
use tonic::transport::Server;
use tonic::{Code, Request, Response, Status};

/// The size of a new block volume in bytes.
const DISK_BYTES: u64 = 16 << 20;
/// Time between two reads of the file of faults while a call hangs.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The command line.
#[derive(Debug, Clone, Default)]
struct Arguments {
    name: String,
    endpoint: PathBuf,
    registration: PathBuf,
    state: PathBuf,
    node_id: String,
    version: String,
    stages: bool,
    capabilities: Vec<i32>,
    max_volumes: i64,
    topology: HashMap<String, String>,
    faults: Option<PathBuf>,
    ends_with_stdin: bool,
}

fn capability(name: &str) -> anyhow::Result<i32> {
    Ok(match name {
        "stats" => 2,
        "expand" => 3,
        "condition" => 4,
        "multi-writer" => 5,
        "mount-group" => 6,
        _ => bail!("unknown capability {name:?}"),
    })
}

fn parse(arguments: impl Iterator<Item = String>) -> anyhow::Result<Arguments> {
    let mut parsed = Arguments {
        node_id: "test-node".to_owned(),
        version: "1.0.0".to_owned(),
        capabilities: vec![2, 3],
        ..Arguments::default()
    };
    let mut arguments = arguments;
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().with_context(|| format!("{argument} needs a value"));
        match argument.as_str() {
            "--name" => parsed.name = value()?,
            "--endpoint" => {
                let endpoint = value()?;
                parsed.endpoint = endpoint.strip_prefix("unix://").unwrap_or(&endpoint).into();
            }
            "--registration-dir" => parsed.registration = value()?.into(),
            "--state" => parsed.state = value()?.into(),
            "--node-id" => parsed.node_id = value()?,
            "--version" => parsed.version = value()?,
            "--faults" => parsed.faults = Some(value()?.into()),
            "--max-volumes" => parsed.max_volumes = value()?.parse()?,
            "--topology" => {
                let text = value()?;
                let (key, topology) = text.split_once('=').context("--topology needs KEY=VALUE")?;
                parsed.topology.insert(key.to_owned(), topology.to_owned());
            }
            "--capabilities" => {
                let names = value()?;
                let names = names.split(',').filter(|name| !name.is_empty());
                parsed.capabilities = names.map(capability).collect::<anyhow::Result<_>>()?;
            }
            "--stage" => parsed.stages = true,
            "--end-with-stdin" => parsed.ends_with_stdin = true,
            other => bail!("unknown argument {other:?}"),
        }
    }
    for (name, path) in [
        ("--endpoint", &parsed.endpoint),
        ("--registration-dir", &parsed.registration),
        ("--state", &parsed.state),
    ] {
        if !path.is_absolute() {
            bail!("{name} must be an absolute path");
        }
    }
    if parsed.name.is_empty() {
        bail!("--name is missing");
    }
    if parsed.stages {
        parsed.capabilities.push(1);
    }
    Ok(parsed)
}

fn main() -> ExitCode {
    let result = parse(std::env::args().skip(1)).and_then(|arguments| {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()?
            .block_on(run(arguments))
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "csi-test-driver: {error:#}");
            ExitCode::from(64)
        }
    }
}

async fn run(arguments: Arguments) -> anyhow::Result<()> {
    fs::create_dir_all(arguments.state.join("volumes"))?;
    fs::create_dir_all(&arguments.registration)?;
    let registration = arguments.registration.join(format!("{}-reg.sock", arguments.name));
    let state = arguments.state.clone();
    let ends_with_stdin = arguments.ends_with_stdin;
    let endpoint = listen(&arguments.endpoint)?;
    let registered = listen(&registration)?;
    let driver = Driver(Arc::new(Inner {
        arguments,
        used: Mutex::default(),
        log: Mutex::default(),
        volumes: Mutex::default(),
    }));
    let csi = Server::builder()
        .add_service(Garbling(NodeServer::new(driver.clone())))
        .add_service(Garbling(IdentityServer::new(driver.clone())))
        .serve_with_incoming(UnixListenerStream::new(endpoint));
    let registration_api = Server::builder()
        .add_service(Garbling(RegistrationServer::new(driver)))
        .serve_with_incoming(UnixListenerStream::new(registered));
    if ends_with_stdin {
        std::thread::spawn(move || {
            let _ = std::io::stdin().read_to_end(&mut Vec::new());
            let _ = fs::remove_file(&registration);
            clean_up(&state);
            std::process::exit(0);
        });
    }
    let mut stdout = std::io::stdout();
    writeln!(stdout, "ready")?;
    stdout.flush()?;
    // Neither ends before the process does.
    tokio::select! {
        ended = csi => ended?,
        ended = registration_api => ended?,
    }
    Ok(())
}

fn listen(socket: &Path) -> anyhow::Result<UnixListener> {
    if let Some(folder) = socket.parent() {
        fs::create_dir_all(folder)?;
    }
    let _ = fs::remove_file(socket);
    UnixListener::bind(socket).with_context(|| format!("cannot listen on {}", socket.display()))
}

/// The driver. Cheap to clone.
#[derive(Debug, Clone)]
struct Driver(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    arguments: Arguments,
    /// How often a fault was used, by method; with its text, so that a new fault counts anew.
    used: Mutex<HashMap<String, (String, u64)>>,
    log: Mutex<()>,
    /// Held while volumes change.
    volumes: Mutex<()>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a call does instead of its work.
#[derive(Debug, Clone)]
enum Fault {
    Fail(Status),
    Hang,
    Garbage(Garbage),
    Lie,
    Exit(i32),
}

/// An answer that no driver gives. It travels from the handler to [`Garbling`] as an extension of the response.
#[derive(Debug, Clone, Copy)]
enum Garbage {
    Empty,
    Broken,
    Large,
}

impl Driver {
    /// The fault of a method, if there is one.
    fn fault(&self, method: &str) -> Option<Fault> {
        let text = fs::read_to_string(self.0.arguments.faults.as_ref()?).ok()?;
        let faults: Value = serde_json::from_str(&text).ok()?;
        let fault = faults.get(method)?;
        if let Some(fail) = fault.get("fail") {
            let mut used = lock(&self.0.used);
            let (known, count) = used.entry(method.to_owned()).or_default();
            let text = fault.to_string();
            if *known != text {
                (*known, *count) = (text, 0);
            }
            *count += 1;
            if fail["times"].as_u64().is_some_and(|times| *count > times) {
                return None;
            }
            let code = fail["code"].as_i64().and_then(|code| i32::try_from(code).ok()).unwrap_or(2);
            let message = fail["message"].as_str().unwrap_or("made to fail");
            return Some(Fault::Fail(Status::new(Code::from_i32(code), message)));
        }
        if let Some(code) = fault["exit"].as_i64() {
            return Some(Fault::Exit(i32::try_from(code).unwrap_or(1)));
        }
        match fault["garbage"].as_str() {
            Some("large") => return Some(Fault::Garbage(Garbage::Large)),
            Some("broken") => return Some(Fault::Garbage(Garbage::Broken)),
            Some(_) => return Some(Fault::Garbage(Garbage::Empty)),
            None => {}
        }
        if fault["hang"] == true {
            return Some(Fault::Hang);
        }
        (fault["lie"] == true).then_some(Fault::Lie)
    }

    /// Does the work of a call, unless there is a fault, and writes it to the log.
    async fn handle<A: Default>(
        &self,
        method: &'static str,
        request: Value,
        work: impl FnOnce(&Arguments) -> Result<A, Status>,
    ) -> Result<Response<A>, Status> {
        let mut fault = self.fault(method);
        if matches!(fault, Some(Fault::Hang)) {
            self.log(method, &request, "hang");
            while matches!(fault, Some(Fault::Hang)) {
                tokio::time::sleep(POLL_INTERVAL).await;
                fault = self.fault(method);
            }
        }
        match fault {
            Some(Fault::Fail(status)) => {
                self.log(method, &request, &format!("{:?}", status.code()));
                Err(status)
            }
            Some(Fault::Garbage(garbage)) => {
                self.log(method, &request, "garbage");
                let mut response = Response::new(A::default());
                response.extensions_mut().insert(garbage);
                Ok(response)
            }
            Some(Fault::Lie) => {
                self.log(method, &request, "lie");
                Ok(Response::new(A::default()))
            }
            Some(Fault::Exit(code)) => {
                self.log(method, &request, "exit");
                std::process::exit(code)
            }
            Some(Fault::Hang) | None => {
                let result = {
                    let _volumes = lock(&self.0.volumes);
                    work(&self.0.arguments)
                };
                let code = result.as_ref().map_or_else(Status::code, |_| Code::Ok);
                let name = if code == Code::Ok { "OK".to_owned() } else { format!("{code:?}") };
                self.log(method, &request, &name);
                result.map(Response::new)
            }
        }
    }

    fn log(&self, method: &str, request: &Value, result: &str) {
        let context = &request["volume_context"];
        let part = |key: &str| context[format!("csi.storage.k8s.io/pod.{key}")].as_str().unwrap_or_default();
        let pod = match (part("namespace"), part("name")) {
            ("", "") => Value::Null,
            (namespace, name) => json!(format!("{namespace}/{name}")),
        };
        let line = json!({"method": method, "request": request, "pod": pod, "result": result});
        let _log = lock(&self.0.log);
        let file = self.0.arguments.state.join("calls.jsonl");
        let opened = OpenOptions::new().create(true).append(true).open(file);
        if let Ok(mut file) = opened {
            let _ = file.write_all(format!("{line}\n").as_bytes());
        }
    }
}

/// The keys of secrets, sorted.
fn keys(secrets: &HashMap<String, String>) -> Vec<&String> {
    let mut keys: Vec<&String> = secrets.keys().collect();
    keys.sort();
    keys
}

/// The volume context, without the tokens in it.
fn shown(context: &HashMap<String, String>) -> BTreeMap<&str, &str> {
    let hide = |key: &str| key == "csi.storage.k8s.io/serviceAccount.tokens";
    context.iter().map(|(key, value)| (key.as_str(), if hide(key) { "<masked>" } else { value })).collect()
}

fn capability_json(capability: Option<&pb::VolumeCapability>) -> Value {
    use pb::volume_capability::AccessType;
    let Some(capability) = capability else { return Value::Null };
    let mode = capability.access_mode.as_ref().map_or(0, |mode| mode.mode);
    match &capability.access_type {
        Some(AccessType::Block(_)) => json!({"block": {}, "mode": mode}),
        Some(AccessType::Mount(mount)) => json!({"mode": mode, "mount": {"fs_type": mount.fs_type,
            "mount_flags": mount.mount_flags, "volume_mount_group": mount.volume_mount_group}}),
        None => json!({"mode": mode}),
    }
}

fn invalid(text: &str) -> Status {
    Status::invalid_argument(text)
}

fn failed(what: &str, error: &dyn std::fmt::Display) -> Status {
    Status::internal(format!("cannot {what}: {error}"))
}

/// Whether it is a block volume.
fn is_block(capability: Option<&pb::VolumeCapability>) -> Result<bool, Status> {
    use pb::volume_capability::AccessType;
    let capability = capability.ok_or_else(|| invalid("volume_capability is missing"))?;
    if capability.access_mode.as_ref().is_none_or(|mode| mode.mode == 0) {
        return Err(invalid("access_mode is missing"));
    }
    match capability.access_type {
        Some(AccessType::Block(_)) => Ok(true),
        Some(AccessType::Mount(_)) => Ok(false),
        None => Err(invalid("access_type is missing")),
    }
}

fn check(fields: &[(&str, &str)]) -> Result<(), Status> {
    match fields.iter().find(|(_, value)| value.is_empty()) {
        Some((name, _)) => Err(invalid(&format!("{name} is empty"))),
        None => Ok(()),
    }
}

impl Arguments {
    /// The folder of a volume's files.
    fn volume(&self, id: &str) -> Result<PathBuf, Status> {
        let mut hasher = DefaultHasher::new();
        id.hash(&mut hasher);
        let folder = self.state.join("volumes").join(format!("{:016x}", hasher.finish()));
        fs::create_dir_all(&folder).map_err(|error| failed("create the volume", &error))?;
        fs::write(folder.join("id"), id).map_err(|error| failed("create the volume", &error))?;
        Ok(folder)
    }

    /// The folder that is mounted.
    fn data(&self, id: &str) -> Result<PathBuf, Status> {
        let data = self.volume(id)?.join("data");
        fs::create_dir_all(&data).map_err(|error| failed("create the volume", &error))?;
        Ok(data)
    }

    /// The loop device of a block volume.
    fn device(&self, id: &str) -> Result<PathBuf, Status> {
        let disk = self.volume(id)?.join("disk.img");
        if !disk.exists() {
            let file = fs::File::create(&disk).map_err(|error| failed("create the disk", &error))?;
            file.set_len(DISK_BYTES).map_err(|error| failed("create the disk", &error))?;
        }
        if let Some(device) = loop_devices(&disk).pop() {
            return Ok(device);
        }
        let output = Command::new("losetup").args(["--find", "--show"]).arg(&disk).output();
        let output = output.map_err(|error| failed("run losetup", &error))?;
        if !output.status.success() {
            return Err(failed("attach a loop device", &String::from_utf8_lossy(&output.stderr)));
        }
        Ok(String::from_utf8_lossy(&output.stdout).trim().into())
    }

    fn detach(&self, id: &str) -> Result<(), Status> {
        for device in loop_devices(&self.volume(id)?.join("disk.img")) {
            let status = Command::new("losetup").arg("--detach").arg(&device).status();
            status.map_err(|error| failed("detach a loop device", &error))?;
        }
        Ok(())
    }

    fn bind(&self, source: &Path, target: &Path, read_only: bool) -> Result<(), Status> {
        let file = self.state.join("mounts");
        let opened = OpenOptions::new().create(true).append(true).open(file);
        let mut recorded = opened.map_err(|error| failed("record the mount", &error))?;
        let line = format!("{}\n", target.display());
        recorded.write_all(line.as_bytes()).map_err(|error| failed("record the mount", &error))?;
        rustix::mount::mount_bind(source, target).map_err(|error| failed("bind-mount", &error))?;
        if read_only {
            let flags = MountFlags::BIND | MountFlags::RDONLY;
            rustix::mount::mount_remount(target, flags, c"").map_err(|error| failed("remount", &error))?;
        }
        Ok(())
    }

    fn stage(&self, request: &pb::NodeStageVolumeRequest) -> Result<pb::NodeStageVolumeResponse, Status> {
        check(&[("volume_id", &request.volume_id), ("staging_target_path", &request.staging_target_path)])?;
        if !self.stages {
            return Err(Status::unimplemented("the driver does not stage volumes"));
        }
        let staging = Path::new(&request.staging_target_path);
        if is_block(request.volume_capability.as_ref())? {
            self.device(&request.volume_id)?;
        } else if !is_mounted(staging)? {
            self.bind(&self.data(&request.volume_id)?, staging, false)?;
        }
        fs::write(self.volume(&request.volume_id)?.join("staged"), &request.staging_target_path)
            .map_err(|error| failed("record the stage", &error))?;
        Ok(pb::NodeStageVolumeResponse {})
    }

    fn unstage(
        &self,
        request: &pb::NodeUnstageVolumeRequest,
    ) -> Result<pb::NodeUnstageVolumeResponse, Status> {
        check(&[("volume_id", &request.volume_id), ("staging_target_path", &request.staging_target_path)])?;
        unmount(Path::new(&request.staging_target_path))?;
        self.detach(&request.volume_id)?;
        let _ = fs::remove_file(self.volume(&request.volume_id)?.join("staged"));
        Ok(pb::NodeUnstageVolumeResponse {})
    }

    fn publish(
        &self,
        request: &pb::NodePublishVolumeRequest,
    ) -> Result<pb::NodePublishVolumeResponse, Status> {
        check(&[("volume_id", &request.volume_id), ("target_path", &request.target_path)])?;
        let block = is_block(request.volume_capability.as_ref())?;
        let target = Path::new(&request.target_path);
        if !target.parent().is_some_and(Path::is_dir) {
            return Err(invalid("the folder of target_path does not exist"));
        }
        let is_inline =
            request.volume_context.get("csi.storage.k8s.io/ephemeral").is_some_and(|text| text == "true");
        if self.stages && !is_inline {
            check(&[("staging_target_path", &request.staging_target_path)])?;
            if !self.volume(&request.volume_id)?.join("staged").exists() {
                return Err(Status::failed_precondition("the volume is not staged"));
            }
        } else if !request.staging_target_path.is_empty() {
            return Err(invalid("staging_target_path of a volume that is not staged"));
        }
        if is_mounted(target)? {
            return Ok(pb::NodePublishVolumeResponse {});
        }
        if block {
            let device = self.device(&request.volume_id)?;
            fs::write(target, b"").map_err(|error| failed("create target_path", &error))?;
            self.bind(&device, target, false)?;
        } else {
            fs::create_dir_all(target).map_err(|error| failed("create target_path", &error))?;
            self.bind(&self.data(&request.volume_id)?, target, request.readonly)?;
        }
        Ok(pb::NodePublishVolumeResponse {})
    }

    fn unpublish(
        &self,
        request: &pb::NodeUnpublishVolumeRequest,
    ) -> Result<pb::NodeUnpublishVolumeResponse, Status> {
        check(&[("volume_id", &request.volume_id), ("target_path", &request.target_path)])?;
        let target = Path::new(&request.target_path);
        unmount(target)?;
        let removed = fs::remove_dir(target).or_else(|_| fs::remove_file(target));
        if let Err(error) = removed
            && error.kind() != std::io::ErrorKind::NotFound
        {
            return Err(failed("remove target_path", &error));
        }
        if !self.stages {
            self.detach(&request.volume_id)?;
        }
        Ok(pb::NodeUnpublishVolumeResponse {})
    }

    fn expand(&self, request: &pb::NodeExpandVolumeRequest) -> Result<pb::NodeExpandVolumeResponse, Status> {
        check(&[("volume_id", &request.volume_id), ("volume_path", &request.volume_path)])?;
        if !is_mounted(Path::new(&request.volume_path))? {
            return Err(Status::not_found("volume_path is not published"));
        }
        let bytes = request.capacity_range.as_ref().map_or(0, |range| range.required_bytes);
        let folder = self.volume(&request.volume_id)?;
        fs::write(folder.join("size"), bytes.to_string())
            .map_err(|error| failed("record the size", &error))?;
        let disk = folder.join("disk.img");
        if disk.exists() {
            let file = OpenOptions::new()
                .write(true)
                .open(&disk)
                .map_err(|error| failed("open the disk", &error))?;
            file.set_len(u64::try_from(bytes).unwrap_or(0))
                .map_err(|error| failed("grow the disk", &error))?;
            for device in loop_devices(&disk) {
                let status = Command::new("losetup").arg("--set-capacity").arg(&device).status();
                status.map_err(|error| failed("grow the loop device", &error))?;
            }
        }
        Ok(pb::NodeExpandVolumeResponse { capacity_bytes: bytes })
    }
}

/// What is used of a volume.
fn usage(request: &pb::NodeGetVolumeStatsRequest) -> Result<pb::NodeGetVolumeStatsResponse, Status> {
    use pb::volume_usage::Unit;
    check(&[("volume_id", &request.volume_id), ("volume_path", &request.volume_path)])?;
    let path = Path::new(&request.volume_path);
    let facts = fs::metadata(path).map_err(|_| Status::not_found("volume_path does not exist"))?;
    let number = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
    let entry = |unit: Unit, total: u64, available: u64| pb::VolumeUsage {
        available: number(available),
        total: number(total),
        used: number(total.saturating_sub(available)),
        unit: unit as i32,
    };
    let usage = if facts.is_dir() {
        let stat = rustix::fs::statvfs(path).map_err(|error| failed("measure the volume", &error))?;
        vec![
            entry(Unit::Bytes, stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize),
            entry(Unit::Inodes, stat.f_files, stat.f_ffree),
        ]
    } else {
        vec![entry(Unit::Bytes, DISK_BYTES, 0)]
    };
    let volume_condition = Some(pb::VolumeCondition { abnormal: false, message: "all is well".to_owned() });
    Ok(pb::NodeGetVolumeStatsResponse { usage, volume_condition })
}

fn is_mounted(path: &Path) -> Result<bool, Status> {
    let points = mount_points().map_err(|error| failed("read mountinfo", &error))?;
    Ok(points.iter().any(|point| point == path))
}

fn unmount(path: &Path) -> Result<(), Status> {
    while is_mounted(path)? {
        rustix::mount::unmount(path, UnmountFlags::empty()).map_err(|error| failed("unmount", &error))?;
    }
    Ok(())
}

type Reply<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl Node for Driver {
    async fn node_stage_volume(
        &self,
        request: Request<pb::NodeStageVolumeRequest>,
    ) -> Reply<pb::NodeStageVolumeResponse> {
        let request = request.into_inner();
        let json = json!({"volume_id": request.volume_id, "staging_target_path": request.staging_target_path,
            "publish_context": request.publish_context, "volume_context": shown(&request.volume_context),
            "secrets": keys(&request.secrets), "volume_capability": capability_json(request.volume_capability.as_ref())});
        self.handle("NodeStageVolume", json, |driver| driver.stage(&request)).await
    }

    async fn node_unstage_volume(
        &self,
        request: Request<pb::NodeUnstageVolumeRequest>,
    ) -> Reply<pb::NodeUnstageVolumeResponse> {
        let request = request.into_inner();
        let json =
            json!({"volume_id": request.volume_id, "staging_target_path": request.staging_target_path});
        self.handle("NodeUnstageVolume", json, |driver| driver.unstage(&request)).await
    }

    async fn node_publish_volume(
        &self,
        request: Request<pb::NodePublishVolumeRequest>,
    ) -> Reply<pb::NodePublishVolumeResponse> {
        let request = request.into_inner();
        let json = json!({"volume_id": request.volume_id, "target_path": request.target_path,
            "staging_target_path": request.staging_target_path, "publish_context": request.publish_context,
            "volume_context": shown(&request.volume_context), "secrets": keys(&request.secrets),
            "volume_capability": capability_json(request.volume_capability.as_ref()), "readonly": request.readonly});
        self.handle("NodePublishVolume", json, |driver| driver.publish(&request)).await
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<pb::NodeUnpublishVolumeRequest>,
    ) -> Reply<pb::NodeUnpublishVolumeResponse> {
        let request = request.into_inner();
        let json = json!({"volume_id": request.volume_id, "target_path": request.target_path});
        self.handle("NodeUnpublishVolume", json, |driver| driver.unpublish(&request)).await
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<pb::NodeGetVolumeStatsRequest>,
    ) -> Reply<pb::NodeGetVolumeStatsResponse> {
        let request = request.into_inner();
        let json = json!({"volume_id": request.volume_id, "volume_path": request.volume_path});
        self.handle("NodeGetVolumeStats", json, |_| usage(&request)).await
    }

    async fn node_expand_volume(
        &self,
        request: Request<pb::NodeExpandVolumeRequest>,
    ) -> Reply<pb::NodeExpandVolumeResponse> {
        let request = request.into_inner();
        let bytes = request.capacity_range.as_ref().map_or(0, |range| range.required_bytes);
        let json = json!({"volume_id": request.volume_id, "volume_path": request.volume_path, "required_bytes": bytes,
            "staging_target_path": request.staging_target_path, "secrets": keys(&request.secrets)});
        self.handle("NodeExpandVolume", json, |driver| driver.expand(&request)).await
    }

    async fn node_get_capabilities(
        &self,
        _: Request<pb::NodeGetCapabilitiesRequest>,
    ) -> Reply<pb::NodeGetCapabilitiesResponse> {
        use pb::node_service_capability::{Rpc, Type};
        let capability =
            |number: &i32| pb::NodeServiceCapability { r#type: Some(Type::Rpc(Rpc { r#type: *number })) };
        self.handle("NodeGetCapabilities", json!({}), |driver| {
            let capabilities = driver.capabilities.iter().map(capability).collect();
            Ok(pb::NodeGetCapabilitiesResponse { capabilities })
        })
        .await
    }

    async fn node_get_info(&self, _: Request<pb::NodeGetInfoRequest>) -> Reply<pb::NodeGetInfoResponse> {
        self.handle("NodeGetInfo", json!({}), |driver| {
            let segments = driver.topology.clone();
            Ok(pb::NodeGetInfoResponse {
                node_id: driver.node_id.clone(),
                max_volumes_per_node: driver.max_volumes,
                accessible_topology: (!segments.is_empty()).then_some(pb::Topology { segments }),
            })
        })
        .await
    }
}

#[tonic::async_trait]
impl Identity for Driver {
    async fn get_plugin_info(
        &self,
        _: Request<pb::GetPluginInfoRequest>,
    ) -> Reply<pb::GetPluginInfoResponse> {
        self.handle("GetPluginInfo", json!({}), |driver| {
            let (name, vendor_version) = (driver.name.clone(), driver.version.clone());
            Ok(pb::GetPluginInfoResponse { name, vendor_version, manifest: HashMap::new() })
        })
        .await
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<pb::GetPluginCapabilitiesRequest>,
    ) -> Reply<pb::GetPluginCapabilitiesResponse> {
        self.handle("GetPluginCapabilities", json!({}), |_| Ok(pb::GetPluginCapabilitiesResponse::default()))
            .await
    }

    async fn probe(&self, _: Request<pb::ProbeRequest>) -> Reply<pb::ProbeResponse> {
        self.handle("Probe", json!({}), |_| Ok(pb::ProbeResponse { ready: Some(true) })).await
    }
}

#[tonic::async_trait]
impl Registration for Driver {
    async fn get_info(&self, _: Request<reg::InfoRequest>) -> Reply<reg::PluginInfo> {
        self.handle("GetInfo", json!({}), |driver| {
            Ok(reg::PluginInfo {
                r#type: "CSIPlugin".to_owned(),
                name: driver.name.clone(),
                endpoint: driver.endpoint.to_string_lossy().into_owned(),
                supported_versions: vec![driver.version.clone()],
            })
        })
        .await
    }

    async fn notify_registration_status(
        &self,
        request: Request<reg::RegistrationStatus>,
    ) -> Reply<reg::RegistrationStatusResponse> {
        let request = request.into_inner();
        let json = json!({"plugin_registered": request.plugin_registered, "error": request.error});
        self.handle("NotifyRegistrationStatus", json, |_| Ok(reg::RegistrationStatusResponse {})).await
    }
}

/// A service whose answers may be replaced by [`Garbage`].
#[derive(Debug, Clone)]
struct Garbling<S>(S);

impl<S: NamedService> NamedService for Garbling<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<http::Request<Body>> for Garbling<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, cx: &mut TaskContext<'_>) -> Poll<Result<(), Infallible>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let answer = self.0.call(request);
        Box::pin(async move {
            let response = answer.await?;
            let garbage = response.extensions().get::<Garbage>().copied();
            Ok(garbage.map_or(response, answer_with))
        })
    }
}

fn answer_with(garbage: Garbage) -> http::Response<Body> {
    // Each message of gRPC begins with a zero byte and its length.
    let message = |length: u32, byte: u8| {
        let mut bytes = vec![0];
        bytes.extend(length.to_be_bytes());
        bytes.resize(bytes.len() + length as usize, byte);
        Body::new(http_body_util::Full::new(bytes::Bytes::from(bytes)))
    };
    let body = match garbage {
        Garbage::Empty => Body::empty(),
        Garbage::Broken => message(16, 0xff),
        Garbage::Large => message(8 << 20, 0),
    };
    let mut response = http::Response::new(body);
    response.headers_mut().insert("content-type", http::HeaderValue::from_static("application/grpc"));
    response
}
