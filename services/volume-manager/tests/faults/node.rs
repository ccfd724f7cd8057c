//! The service as a process of its own, which local volumes need: their mounts are made by its helper.

use std::fs;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use keelson_config::{ConfigExtras, ServiceName};
use keelson_proto::keelson::volume_manager::v1 as pb;
use keelson_proto::keelson::volume_manager::v1::volume_manager_client::VolumeManagerClient;
use keelson_service_kit::{Peer, store_config};
use keelson_testkit::fakes::{FakeRuntimeShim, FakeServer};
use rustix::mount::MountPropagationFlags;
use serde_json::json;

use crate::support::api::FakeApi;
use crate::support::{Client, World, until_some, volume};

/// A process that is killed at the end of the test.
struct Reaped(Child);

impl Drop for Reaped {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub struct Node {
    service: Option<Reaped>,
    pub world: World,
    pub api: FakeApi,
    _pod_config: FakeServer,
    _runtime: FakeRuntimeShim,
}

impl Node {
    /// As on a node that has run before: the root is a mount of its own, which is shared.
    pub async fn new() -> Self {
        Self::with_root(|root| {
            rustix::mount::mount_bind(root, root).unwrap();
            for kind in [MountPropagationFlags::PRIVATE, MountPropagationFlags::SHARED] {
                rustix::mount::mount_change(root, kind).unwrap();
            }
        })
        .await
    }

    /// The root is a folder on a private mount.
    pub async fn with_private_root() -> Self {
        Self::with_root(|root| {
            let base = root.parent().unwrap();
            rustix::mount::mount_bind(base, base).unwrap();
            rustix::mount::mount_change(base, MountPropagationFlags::PRIVATE).unwrap();
        })
        .await
    }

    async fn with_root(prepare: impl FnOnce(&std::path::Path)) -> Self {
        let (world, api) = (World::new(), FakeApi::default());
        let root = &world.config.paths.root_dir;
        fs::create_dir_all(root).unwrap();
        prepare(root);
        let (pod_config, runtime) = (api.serve(&world).await, world.start_runtime().await);
        Self { service: None, world, api, _pod_config: pod_config, _runtime: runtime }
    }

    /// Starts the service, and waits until it serves.
    pub async fn start(&mut self) -> Client {
        let base = self.world.config.paths.root_dir.parent().unwrap();
        let file = base.join("config.json");
        store_config(&file, &self.world.config, ConfigExtras::default()).unwrap();
        let log = fs::OpenOptions::new().create(true).append(true).open(base.join("log")).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_keelson-volume-manager"));
        command.arg("--config").arg(file).stdin(Stdio::null());
        command.stdout(log.try_clone().unwrap()).stderr(log);
        self.service = Some(Reaped(command.spawn().unwrap()));
        let socket = self.world.config.paths.socket(ServiceName::VolumeManager);
        until_some("the service", || std::future::ready(UnixStream::connect(&socket).ok())).await;
        let run_dir = &self.world.config.paths.run_dir;
        VolumeManagerClient::new(Peer::service(run_dir, ServiceName::VolumeManager).channel())
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        self.service = None;
    }

    /// Creates a folder of the node, with a file, and a bound claim and PersistentVolume for it.
    pub fn local_volume(&self, name: &str) -> std::path::PathBuf {
        let folder = self.world.config.paths.root_dir.parent().unwrap().join("disks").join(name);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("file"), name).unwrap();
        self.volume(name, &folder);
        self.claim(name);
        folder
    }

    fn volume(&self, name: &str, folder: &std::path::Path) {
        let volume = json!({
            "metadata": {"name": name, "uid": format!("pv-{name}")},
            "spec": {
                "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"}, "volumeMode": "Filesystem",
                "claimRef": {"namespace": "default", "name": name, "uid": format!("claim-{name}")},
                "local": {"path": folder},
            },
        });
        self.api.live("PersistentVolume", name, volume.to_string());
    }

    /// Creates the claim of a local volume.
    pub fn claim(&self, name: &str) {
        let claim = json!({
            "metadata": {"name": name, "namespace": "default", "uid": format!("claim-{name}")},
            "spec": {"accessModes": ["ReadWriteOnce"], "volumeName": name},
            "status": {"phase": "Bound", "capacity": {"storage": "1Gi"}},
        });
        self.api.live("PersistentVolumeClaim", name, claim.to_string());
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.service = None;
        if std::thread::panicking() {
            let log = self.world.config.paths.root_dir.parent().unwrap().join("log");
            println!("{}", fs::read_to_string(log).unwrap_or_default());
        }
    }
}

/// A volume of a pod through the claim of the same name.
pub fn claimed(name: &str) -> pb::Volume {
    let claim = pb::ClaimVolume { claim_name: name.into(), ephemeral: false, read_only: false };
    pb::Volume { mounted: true, ..volume(name, pb::volume::Source::Claim(claim)) }
}
