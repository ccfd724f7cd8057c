//! The agent behind its sockets: the only module that calls a service.

use std::fs;
use std::future::Future;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use futures_util::future::join_all;
use keelson_config::{Config, Paths, ServiceName};
use keelson_proto::keelson::admin::v1::admin_client::AdminClient;
use keelson_proto::keelson::admin::v1::{
    GetProgressRequest, GetProgressResponse, GetUsageRequest, GetUsageResponse, ListSpansRequest,
    ListSpansResponse,
};
use keelson_proto::keelson::events::v1::events_client::EventsClient;
use keelson_proto::keelson::events::v1::{Event, ListEventsRequest};
use keelson_proto::keelson::node_status::v1::GetNodeRequest;
use keelson_proto::keelson::node_status::v1::node_status_client::NodeStatusClient;
use keelson_proto::keelson::pod_config::v1::pod_config_client::PodConfigClient;
use keelson_proto::keelson::pod_config::v1::{ListSourcesRequest, Source};
use keelson_proto::keelson::pod_sync::v1::pod_sync_client::PodSyncClient;
use keelson_proto::keelson::pod_sync::v1::{
    ExplainPodRequest, ExplainPodResponse, ListPodsRequest, PodDocument,
};
use keelson_proto::keelson::resource_manager::v1::resource_manager_client::ResourceManagerClient;
use keelson_proto::keelson::resource_manager::v1::{
    NodeStatsRequest, NodeStatsResponse, PodStatsRequest, PodStatsResponse,
};
use keelson_proto::keelson::runtime::v1::runtime_client::RuntimeClient;
use keelson_proto::keelson::runtime::v1::{ListImagesRequest, RuntimeImage};
use keelson_proto::keelson::supervisor::v1::supervisor_client::SupervisorClient;
use keelson_proto::keelson::supervisor::v1::{ListServicesRequest, Service};
use keelson_proto::keelson::volume_manager::v1::volume_manager_client::VolumeManagerClient;
use keelson_proto::keelson::volume_manager::v1::watch_pod_volumes_response::Item as VolumesItem;
use keelson_proto::keelson::volume_manager::v1::{PodVolumes, WatchPodVolumesRequest};
use keelson_service_kit::server::OUTSIDE_REASON;
use keelson_service_kit::status::reason;
use keelson_service_kit::{Peer, PeerChannel};
use serde_json::{Map, Value};
use tonic::{Code, Request, Status};

use crate::error::Failure;
use crate::machine::{self, Group};

/// An event and the service that told it.
#[derive(Debug, Clone)]
pub(crate) struct ToldEvent {
    pub(crate) service: ServiceName,
    pub(crate) event: Event,
}

/// The agent of one run folder.
#[derive(Debug, Clone)]
pub(crate) struct Agent {
    run_dir: PathBuf,
    timeout: Duration,
}

impl Agent {
    /// The agent whose sockets lie below `run_dir`; a service may take `timeout` to answer.
    pub(crate) fn new(run_dir: PathBuf, timeout: Duration) -> Self {
        Self { run_dir, timeout }
    }

    /// The same agent, where no service may take longer than `most`.
    pub(crate) fn within(&self, most: Duration) -> Self {
        Self { run_dir: self.run_dir.clone(), timeout: self.timeout.min(most) }
    }

    /// The socket of a service.
    pub(crate) fn socket(&self, service: ServiceName) -> PathBuf {
        Paths::socket_below(&self.run_dir, service)
    }

    /// The file that whoever resolved the configuration has left for the services.
    ///
    /// # Errors
    /// There is none, it is closed to this user, or it is no configuration.
    pub(crate) fn resolved_configuration(&self) -> Result<Map<String, Value>, Failure> {
        let path = Paths { run_dir: self.run_dir.clone(), ..Config::default().paths }.config_file();
        let bytes = match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(Failure::NotFound {
                    what: format!("no agent has left its configuration at {}", path.display()),
                    hint: "`keelson up` starts one; --run-dir names the folder of another".into(),
                });
            }
            read => read.map_err(|source| Failure::Read { path: path.clone(), source })?,
        };
        serde_json::from_slice(&bytes)
            .map_err(|error| Failure::Manifest { path, reason: format!("this is no configuration: {error}") })
    }

    /// The way to a service.
    pub(crate) fn channel(&self, service: ServiceName) -> PeerChannel {
        Peer::service(&self.run_dir, service).channel()
    }

    /// A request with the deadline that the person chose.
    pub(crate) fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        request.set_timeout(self.timeout);
        request
    }

    /// A client of init.
    pub(crate) fn supervisor(&self) -> SupervisorClient<PeerChannel> {
        SupervisorClient::new(self.channel(ServiceName::Init))
    }

    /// A client of pod-config.
    pub(crate) fn pod_config(&self) -> PodConfigClient<PeerChannel> {
        PodConfigClient::new(self.channel(ServiceName::PodConfig))
    }

    /// A client of pod-sync.
    pub(crate) fn pod_sync(&self) -> PodSyncClient<PeerChannel> {
        PodSyncClient::new(self.channel(ServiceName::PodSync))
    }

    /// A client of runtime-shim.
    pub(crate) fn runtime(&self) -> RuntimeClient<PeerChannel> {
        RuntimeClient::new(self.channel(ServiceName::RuntimeShim))
    }

    /// A client of volume-manager.
    pub(crate) fn volume_manager(&self) -> VolumeManagerClient<PeerChannel> {
        VolumeManagerClient::new(self.channel(ServiceName::VolumeManager))
    }

    /// A client of the events of a service.
    pub(crate) fn events_of(&self, service: ServiceName) -> EventsClient<PeerChannel> {
        EventsClient::new(self.channel(service))
    }

    /// A client of node-status.
    pub(crate) fn node_status(&self) -> NodeStatusClient<PeerChannel> {
        NodeStatusClient::new(self.channel(ServiceName::NodeStatus))
    }

    /// What init says about every service.
    pub(crate) async fn services(&self) -> Result<Vec<Service>, Failure> {
        let request = self.request(ListServicesRequest {});
        let answer = self.supervisor().list_services(request).await;
        Ok(answer.map_err(|s| self.failure(ServiceName::Init, s))?.into_inner().services)
    }

    /// What each service says about itself, asked side by side.
    pub(crate) async fn progress(&self) -> Vec<(ServiceName, Result<GetProgressResponse, Failure>)> {
        join_all(ServiceName::ALL.map(|service| async move { (service, self.progress_of(service).await) }))
            .await
    }

    /// What one service says about itself.
    pub(crate) async fn progress_of(&self, service: ServiceName) -> Result<GetProgressResponse, Failure> {
        let mut client = AdminClient::new(self.channel(service));
        let answer = client.get_progress(self.request(GetProgressRequest {})).await;
        answer.map(tonic::Response::into_inner).map_err(|s| self.failure(service, s))
    }

    /// What the process of a service uses.
    pub(crate) async fn usage(
        &self,
        service: ServiceName,
        with_pss: bool,
    ) -> Result<GetUsageResponse, Failure> {
        let mut client = AdminClient::new(self.channel(service));
        let answer = client.get_usage(self.request(GetUsageRequest { with_pss })).await;
        answer.map(tonic::Response::into_inner).map_err(|s| self.failure(service, s))
    }

    /// The spans that a service still has.
    pub(crate) async fn spans(
        &self,
        service: ServiceName,
        request: ListSpansRequest,
    ) -> Result<ListSpansResponse, Failure> {
        let mut client = AdminClient::new(self.channel(service));
        let answer = client.list_spans(self.request(request)).await;
        answer.map(tonic::Response::into_inner).map_err(|s| self.failure(service, s))
    }

    fn resource_manager(&self) -> ResourceManagerClient<PeerChannel> {
        ResourceManagerClient::new(self.channel(ServiceName::ResourceManager))
    }

    /// CPU and memory of each pod that runs.
    pub(crate) async fn pod_stats(&self) -> Result<Vec<PodStatsResponse>, Failure> {
        let fail = |s| self.failure(ServiceName::ResourceManager, s);
        let read = async {
            let request = self.request(PodStatsRequest { cpu_and_memory_only: true });
            let mut stream = self.resource_manager().pod_stats(request).await.map_err(fail)?.into_inner();
            let mut pods = Vec::new();
            while let Some(pod) = stream.message().await.map_err(fail)? {
                pods.push(pod);
            }
            Ok(pods)
        };
        self.in_time(ServiceName::ResourceManager, read).await
    }

    /// CPU and memory of the node.
    pub(crate) async fn node_stats(&self) -> Result<NodeStatsResponse, Failure> {
        let request = self.request(NodeStatsRequest { cpu_and_memory_only: true });
        let answer = self.resource_manager().node_stats(request).await;
        answer.map(tonic::Response::into_inner).map_err(|s| self.failure(ServiceName::ResourceManager, s))
    }

    /// Every pod with its status.
    pub(crate) async fn pods(&self) -> Result<Vec<PodDocument>, Failure> {
        let fail = |s| self.failure(ServiceName::PodSync, s);
        let read = async {
            let mut stream =
                self.pod_sync().list_pods(self.request(ListPodsRequest {})).await.map_err(fail)?.into_inner();
            let mut pods = Vec::new();
            while let Some(pod) = stream.message().await.map_err(fail)? {
                pods.push(pod);
            }
            Ok(pods)
        };
        self.in_time(ServiceName::PodSync, read).await
    }

    /// A whole stream within the time that the person gives.
    async fn in_time<T>(
        &self,
        service: ServiceName,
        read: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        let limit = self.timeout + Duration::from_secs(1);
        tokio::time::timeout(limit, read).await.unwrap_or_else(|_| Err(self.too_slow(service)))
    }

    /// The steps of a pod's life.
    pub(crate) async fn explain(&self, uid: &str) -> Result<ExplainPodResponse, Failure> {
        let request = ExplainPodRequest { uid: uid.to_owned(), ..ExplainPodRequest::default() };
        let answer = self.pod_sync().explain_pod(self.request(request)).await;
        Ok(answer.map_err(|s| self.failure(ServiceName::PodSync, s))?.into_inner())
    }

    /// The images that the container runtime has.
    pub(crate) async fn images(&self) -> Result<Vec<RuntimeImage>, Failure> {
        let answer = self.runtime().list_images(self.request(ListImagesRequest {})).await;
        Ok(answer.map_err(|s| self.failure(ServiceName::RuntimeShim, s))?.into_inner().images)
    }

    /// The volumes of every pod that has some.
    pub(crate) async fn volumes(&self) -> Result<Vec<PodVolumes>, Failure> {
        let fail = |s| self.failure(ServiceName::VolumeManager, s);
        let read = async {
            let request = self.request(WatchPodVolumesRequest {});
            let mut stream =
                self.volume_manager().watch_pod_volumes(request).await.map_err(fail)?.into_inner();
            let mut pods = Vec::new();
            while let Some(message) = stream.message().await.map_err(fail)? {
                match message.item {
                    Some(VolumesItem::Pod(pod)) => pods.push(pod),
                    Some(VolumesItem::Synced(_)) => return Ok(pods),
                    Some(VolumesItem::GoneUid(_)) | None => {}
                }
            }
            Err(fail(Status::unavailable("volume-manager has ended its answer")))
        };
        self.in_time(ServiceName::VolumeManager, read).await
    }

    /// The sources of pods with what they refuse.
    pub(crate) async fn sources(&self) -> Result<Vec<Source>, Failure> {
        let answer = self.pod_config().list_sources(self.request(ListSourcesRequest {})).await;
        Ok(answer.map_err(|s| self.failure(ServiceName::PodConfig, s))?.into_inner().sources)
    }

    /// The Node object as JSON.
    pub(crate) async fn node(&self) -> Result<serde_json::Value, Failure> {
        let answer = self.node_status().get_node(self.request(GetNodeRequest {})).await;
        let bytes = answer.map_err(|s| self.failure(ServiceName::NodeStatus, s))?.into_inner().node_json;
        serde_json::from_slice(&bytes).map_err(|e| Failure::Answer {
            message: format!("node-status sent a Node that is no JSON: {e}"),
            hint: None,
        })
    }

    /// The events of every service, oldest first, and the services that did not tell theirs.
    ///
    /// # Errors
    /// No service answers.
    pub(crate) async fn events(&self) -> Result<(Vec<ToldEvent>, Vec<Failure>), Failure> {
        let answers = join_all(ServiceName::ALL.map(|service| async move {
            let mut client = self.events_of(service);
            let answer = client.list_events(self.request(ListEventsRequest::default())).await;
            (service, answer.map_err(|s| self.failure(service, s)))
        }))
        .await;
        let (mut events, mut failures, mut answered) = (Vec::new(), Vec::new(), false);
        for (service, answer) in answers {
            match answer {
                Ok(list) => {
                    answered = true;
                    events.extend(
                        list.into_inner().events.into_iter().map(|event| ToldEvent { service, event }),
                    );
                }
                Err(failure) => failures.push((service, failure)),
            }
        }
        if !answered && !failures.is_empty() {
            return Err(failures.swap_remove(0).1);
        }
        // Under systemd and compose there is no init, and nobody misses its events.
        let failures =
            failures.into_iter().filter(|(service, _)| *service != ServiceName::Init).map(|(_, f)| f);
        let failures = failures.collect();
        events.sort_by_key(|told| (told.event.last_unix_nanos, told.event.sequence));
        Ok((events, failures))
    }

    /// What a failed call means for the person: looks at the socket to tell why nothing answered.
    pub(crate) fn failure(&self, service: ServiceName, status: Status) -> Failure {
        let message = status.message().to_owned();
        match status.code() {
            Code::Unavailable => self.away(service, message),
            Code::DeadlineExceeded => Failure::Silent { service, message },
            // Its user or its group changes nothing.
            Code::PermissionDenied if reason(&status).as_deref() == Some(OUTSIDE_REASON) => Failure::Answer {
                message: format!("{service} refuses: {message}"),
                hint: Some(
                    "run it in a shell of the node itself, not in a container (docs/security.md)".into(),
                ),
            },
            Code::PermissionDenied => {
                let group = Group::of_socket(&self.socket(service));
                Failure::Refused { service, message, group }
            }
            Code::Unimplemented => Failure::Answer {
                message: format!("{service} does not know this call; it is older than this command"),
                hint: Some("`keelson version` shows both".into()),
            },
            _ => Failure::Answer { message, hint: None },
        }
    }

    fn away(&self, service: ServiceName, message: String) -> Failure {
        let socket = self.socket(service);
        match UnixStream::connect(&socket) {
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
                let group = Group::of_socket(&socket);
                Failure::Forbidden { socket, group }
            }
            Err(_) if ServiceName::ALL.into_iter().any(|s| UnixStream::connect(self.socket(s)).is_ok()) => {
                Failure::ServiceAway { service, socket }
            }
            Err(_) => Failure::NotRunning { socket, others: machine::run_dirs() },
            Ok(_) => Failure::Silent { service, message },
        }
    }

    fn too_slow(&self, service: ServiceName) -> Failure {
        let message = format!("{service} did not finish its answer within {} s", self.timeout.as_secs_f32());
        Failure::Silent { service, message }
    }
}
