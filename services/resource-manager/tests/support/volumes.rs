//! A fake volume-manager that reports the usage of volumes.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use keelson_config::{Config, ServiceName};
use keelson_pod_reconciler::testing::Service;
use keelson_proto::keelson::common::v1 as common;
use keelson_proto::keelson::volume_manager::v1 as pb;
use keelson_proto::keelson::volume_manager::v1::volume_manager_client::VolumeManagerClient;
use keelson_proto::keelson::volume_manager::v1::volume_manager_server::{VolumeManager, VolumeManagerServer};
use keelson_service_kit::Context;
use tokio_stream::Stream;
use tonic::service::Routes;
use tonic::{Request, Response, Status, Streaming};

/// The fake; clones share their state.
#[derive(Debug, Clone, Default)]
pub struct FakeVolumes {
    /// Bytes by pod and volume.
    usage: Arc<Mutex<BTreeMap<String, BTreeMap<String, u64>>>>,
}

impl FakeVolumes {
    pub async fn start(config: &Config) -> Self {
        let fake = Self::default();
        let routes = Routes::new(VolumeManagerServer::new(fake.clone()));
        let ctx = Context::detached(ServiceName::VolumeManager, config.clone());
        Service::start(ctx, routes, VolumeManagerClient::new).await;
        fake
    }

    /// Sets the usage of a pod's volume in bytes.
    pub fn holds(&self, uid: &str, volume: &str, bytes: u64) {
        self.usage.lock().unwrap().entry(uid.to_owned()).or_default().insert(volume.to_owned(), bytes);
    }
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn not_in_this_fake<T>() -> Result<T, Status> {
    Err(Status::unimplemented("not in this fake"))
}

#[tonic::async_trait]
impl VolumeManager for FakeVolumes {
    type SyncStream = Answers<common::SyncAck>;
    type MountPodStream = Answers<pb::MountPodResponse>;
    type WatchPodVolumesStream = Answers<pb::WatchPodVolumesResponse>;
    type PodVolumeStatsStream = Answers<pb::PodVolumeStatsResponse>;

    async fn pod_volume_stats(
        &self,
        _: Request<pb::PodVolumeStatsRequest>,
    ) -> Result<Response<Self::PodVolumeStatsStream>, Status> {
        let usage = self.usage.lock().unwrap().clone();
        let answers = usage.into_iter().map(|(uid, volumes)| {
            let volumes = volumes.into_iter().map(|(name, used_bytes)| pb::VolumeStats {
                name,
                used_bytes,
                measured_unix_nanos: 1,
                local_ephemeral: true,
                ..Default::default()
            });
            let pod = Some(common::PodRef { uid, ..Default::default() });
            Ok(pb::PodVolumeStatsResponse { pod, volumes: volumes.collect() })
        });
        Ok(Response::new(Box::pin(tokio_stream::iter(answers.collect::<Vec<_>>()))))
    }

    async fn sync(
        &self,
        _: Request<Streaming<pb::SyncRequest>>,
    ) -> Result<Response<Self::SyncStream>, Status> {
        not_in_this_fake()
    }

    async fn mount_pod(
        &self,
        _: Request<pb::MountPodRequest>,
    ) -> Result<Response<Self::MountPodStream>, Status> {
        not_in_this_fake()
    }

    async fn unmount_pod(
        &self,
        _: Request<pb::UnmountPodRequest>,
    ) -> Result<Response<pb::UnmountPodResponse>, Status> {
        not_in_this_fake()
    }

    async fn prepare_container(
        &self,
        _: Request<pb::PrepareContainerRequest>,
    ) -> Result<Response<pb::PrepareContainerResponse>, Status> {
        not_in_this_fake()
    }

    async fn watch_pod_volumes(
        &self,
        _: Request<pb::WatchPodVolumesRequest>,
    ) -> Result<Response<Self::WatchPodVolumesStream>, Status> {
        not_in_this_fake()
    }
}
