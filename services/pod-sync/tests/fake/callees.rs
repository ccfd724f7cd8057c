//! pod-config, volume-manager and resource-manager: they always say yes.

use futures_util::{StreamExt as _, stream};
use keelson_proto::keelson::common::v1 as common;
use keelson_proto::keelson::pod_config::v1 as pc;
use keelson_proto::keelson::pod_config::v1::pod_config_server::{PodConfig, PodConfigServer};
use keelson_proto::keelson::resource_manager::v1 as rm;
use keelson_proto::keelson::resource_manager::v1::resource_manager_server::{
    ResourceManager, ResourceManagerServer,
};
use keelson_proto::keelson::volume_manager::v1 as vm;
use keelson_proto::keelson::volume_manager::v1::volume_manager_server::{VolumeManager, VolumeManagerServer};
use keelson_service_kit::{WatchHub, WatchItem};
use tonic::service::Routes;
use tonic::{Request, Response, Status, Streaming};

use super::shim::Answers;

type Answer<T> = Result<Response<T>, Status>;

fn one<T: Send + 'static>(item: T) -> Answers<T> {
    Box::pin(stream::iter([Ok(item)]))
}

fn absent<T>() -> Answer<T> {
    Err(Status::unimplemented("not faked"))
}

/// Acknowledges the end of each set.
macro_rules! acks {
    ($module:ident, $request:expr) => {
        Ok(Response::new(Box::pin($request.into_inner().filter_map(
            async |message| match message.ok()?.item? {
                $module::sync_request::Item::Complete(end) => Some(Ok(common::SyncAck { epoch: end.epoch })),
                _ => None,
            },
        )) as Answers<common::SyncAck>))
    };
}

pub fn pod_config(pods: WatchHub<String, pc::DesiredPod>) -> Routes {
    Routes::new(PodConfigServer::new(Source(pods)))
}

pub fn volume_manager() -> Routes {
    Routes::new(VolumeManagerServer::new(Yes))
}

pub fn resource_manager() -> Routes {
    Routes::new(ResourceManagerServer::new(Yes))
}

struct Source(WatchHub<String, pc::DesiredPod>);

#[tonic::async_trait]
impl PodConfig for Source {
    type WatchPodsStream = Answers<pc::WatchPodsResponse>;
    type WatchNodeStream = Answers<pc::WatchNodeResponse>;
    type WatchObjectsStream = Answers<pc::WatchObjectsResponse>;

    async fn watch_pods(&self, _: Request<pc::WatchPodsRequest>) -> Answer<Self::WatchPodsStream> {
        use pc::watch_pods_response::Item;
        let answer = |item| Ok(pc::WatchPodsResponse { item: Some(item) });
        let ready = pc::SourceReady { source: "file".into(), configured: vec!["file".into()] };
        let pods = self.0.subscribe().into_stream(move |item| match item {
            WatchItem::Set(_, pod) => answer(Item::Pod(pod)),
            WatchItem::Gone(uid) => answer(Item::GoneUid(uid)),
            WatchItem::Synced => answer(Item::Synced(common::Synced {})),
        });
        Ok(Response::new(Box::pin(stream::iter([answer(Item::SourceReady(ready))]).chain(pods))))
    }

    async fn watch_node(&self, _: Request<pc::WatchNodeRequest>) -> Answer<Self::WatchNodeStream> {
        absent()
    }

    async fn watch_objects(
        &self,
        _: Request<Streaming<pc::WatchObjectsRequest>>,
    ) -> Answer<Self::WatchObjectsStream> {
        absent()
    }

    async fn get_object(&self, _: Request<pc::GetObjectRequest>) -> Answer<pc::GetObjectResponse> {
        absent()
    }

    async fn apply_manifest(
        &self,
        _: Request<pc::ApplyManifestRequest>,
    ) -> Answer<pc::ApplyManifestResponse> {
        absent()
    }

    async fn delete_manifest(
        &self,
        _: Request<pc::DeleteManifestRequest>,
    ) -> Answer<pc::DeleteManifestResponse> {
        absent()
    }

    async fn list_sources(&self, _: Request<pc::ListSourcesRequest>) -> Answer<pc::ListSourcesResponse> {
        absent()
    }
}

struct Yes;

#[tonic::async_trait]
impl VolumeManager for Yes {
    type SyncStream = Answers<common::SyncAck>;
    type MountPodStream = Answers<vm::MountPodResponse>;
    type WatchPodVolumesStream = Answers<vm::WatchPodVolumesResponse>;

    async fn sync(&self, request: Request<Streaming<vm::SyncRequest>>) -> Answer<Self::SyncStream> {
        acks!(vm, request)
    }

    async fn mount_pod(&self, _: Request<vm::MountPodRequest>) -> Answer<Self::MountPodStream> {
        let ready = vm::mount_pod_response::Item::Ready(vm::MountsReady::default());
        Ok(Response::new(one(vm::MountPodResponse { item: Some(ready) })))
    }

    async fn unmount_pod(&self, _: Request<vm::UnmountPodRequest>) -> Answer<vm::UnmountPodResponse> {
        Ok(Response::new(vm::UnmountPodResponse {}))
    }

    async fn watch_pod_volumes(
        &self,
        _: Request<vm::WatchPodVolumesRequest>,
    ) -> Answer<Self::WatchPodVolumesStream> {
        absent()
    }
}

#[tonic::async_trait]
impl ResourceManager for Yes {
    type SyncStream = Answers<common::SyncAck>;
    type WatchMachineStream = Answers<rm::Machine>;
    type PodStatsStream = Answers<rm::PodStatsResponse>;

    async fn node_stats(&self, _: Request<rm::NodeStatsRequest>) -> Answer<rm::NodeStatsResponse> {
        absent()
    }

    async fn pod_stats(&self, _: Request<rm::PodStatsRequest>) -> Answer<Self::PodStatsStream> {
        absent()
    }

    async fn sync(&self, request: Request<Streaming<rm::SyncRequest>>) -> Answer<Self::SyncStream> {
        acks!(rm, request)
    }

    async fn admit_pod(&self, _: Request<rm::AdmitPodRequest>) -> Answer<rm::AdmitPodResponse> {
        let verdict = Some(rm::admit_pod_response::Verdict::Admitted(rm::Admitted {}));
        Ok(Response::new(rm::AdmitPodResponse { verdict }))
    }

    async fn prepare_pod(&self, _: Request<rm::PreparePodRequest>) -> Answer<rm::PreparePodResponse> {
        Ok(Response::new(rm::PreparePodResponse { cgroup_parent: "/kubepods/x".into() }))
    }

    async fn release_pod(&self, _: Request<rm::ReleasePodRequest>) -> Answer<rm::ReleasePodResponse> {
        Ok(Response::new(rm::ReleasePodResponse {}))
    }

    async fn watch_machine(&self, _: Request<rm::WatchMachineRequest>) -> Answer<Self::WatchMachineStream> {
        let capacity = [("cpu".to_owned(), 2000), ("memory".to_owned(), 1 << 30)].into();
        let machine = rm::Machine { capacity, cgroup_version: "v1".into(), ..rm::Machine::default() };
        Ok(Response::new(Box::pin(one(machine).chain(stream::pending()))))
    }
}
