//! The service as a process, to kill it.

use std::process::{Child, Command, Stdio};

use keelson_config::ServiceName;
use keelson_proto::keelson::resource_manager::v1 as pb;
use keelson_proto::keelson::resource_manager::v1::resource_manager_client::ResourceManagerClient;
use keelson_proto::keelson::resource_manager::v1::watch_evictions_response::Item;
use keelson_service_kit::Peer;
use keelson_testkit::logind::soon;
use tonic::Streaming;

use crate::support::{Client, World, until_some};

/// The service as a process.
pub struct Process {
    child: Child,
    pub client: Client,
}

impl Process {
    /// Starts it, and waits until it answers.
    pub async fn start(world: &World) -> Self {
        let file = world.config.paths.config_file();
        keelson_service_kit::store_config(&file, &world.config, Default::default()).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_keelson-resource-manager"));
        command.arg("--config").arg(file);
        let child = command.stdin(Stdio::null()).spawn().unwrap();
        let peer = Peer::service(&world.config.paths.run_dir, ServiceName::ResourceManager);
        let client = ResourceManagerClient::new(peer.channel());
        until_some("the service answers", || {
            let mut client = client.clone();
            async move { client.watch_machine(pb::WatchMachineRequest {}).await.ok() }
        })
        .await;
        Self { child, client }
    }

    /// Waits until the machine shuts down, or no longer does.
    pub async fn until_shutting_down(&mut self) {
        let mut stream = self.client.watch_machine(pb::WatchMachineRequest {}).await.unwrap().into_inner();
        while !soon(stream.message()).await.unwrap().unwrap().shutting_down {}
    }

    /// The orders to end pods.
    pub async fn orders(&mut self) -> Streaming<pb::WatchEvictionsResponse> {
        self.client.watch_evictions(pb::WatchEvictionsRequest {}).await.unwrap().into_inner()
    }

    /// Kills it (SIGKILL).
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The next order of a stream.
pub async fn next_order(orders: &mut Streaming<pb::WatchEvictionsResponse>) -> pb::Eviction {
    loop {
        match soon(orders.message()).await.unwrap().unwrap().item.unwrap() {
            Item::Eviction(order) => return order,
            Item::GoneUid(_) | Item::Synced(_) => {}
        }
    }
}
