//! Clients for the services of one agent. No other module calls a service.

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
use keelson_proto::keelson::pod_config::v1::{ListSourcesRequest, ListVolumeObjectsRequest, Source};
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
use keelson_proto::keelson::volume_manager::v1::{
    ListOrphansRequest, OrphanedPod, PodVolumes, WatchPodVolumesRequest,
};
use keelson_service_kit::server::OUTSIDE_REASON;
use keelson_service_kit::status::reason;
use keelson_service_kit::{Peer, PeerChannel};
use serde_json::{Map, Value};
use tonic::{Code, Request, Status};

use crate::error::CliError;
use crate::host::{self, Group};

/// A PersistentVolume or claim as pod-config sends it.
pub(crate) fn read_volume_object(kind: &str, json: &[u8]) -> Result<Value, CliError> {
    serde_json::from_slice(json).map_err(|e| CliError::Failed {
        message: format!("pod-config sent a {kind} that is not JSON: {e}"),
        hint: None,
    })
}

/// An event and the service that reported it.
#[derive(Debug, Clone)]
pub(crate) struct ServiceEvent {
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
    /// The agent with its sockets below `run_dir`; `timeout` is the deadline of each call.
    pub(crate) fn new(run_dir: PathBuf, timeout: Duration) -> Self {
        Self { run_dir, timeout }
    }

    /// The same agent with a call deadline of at most `limit`.
    pub(crate) fn with_deadline(&self, limit: Duration) -> Self {
        Self { run_dir: self.run_dir.clone(), timeout: self.timeout.min(limit) }
    }

    /// The socket of a service.
    pub(crate) fn socket(&self, service: ServiceName) -> PathBuf {
        Paths::socket_below(&self.run_dir, service)
    }

    /// The resolved configuration, from the file that the services read.
    ///
    /// # Errors
    /// The file does not exist, this user may not read it, or it is not a configuration.
    pub(crate) fn resolved_configuration(&self) -> Result<Map<String, Value>, CliError> {
        let path = Paths { run_dir: self.run_dir.clone(), ..Config::default().paths }.config_file();
        let bytes = match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(CliError::NotFound {
                    what: format!("no agent has written its configuration to {}", path.display()),
                    hint: "start an agent with `keelson up`, or name the folder of another with --run-dir"
                        .into(),
                });
            }
            read => read.map_err(|source| CliError::Read { path: path.clone(), source })?,
        };
        serde_json::from_slice(&bytes)
            .map_err(|error| CliError::Manifest { path, reason: format!("not a configuration: {error}") })
    }

    /// The gRPC channel to a service.
    pub(crate) fn channel(&self, service: ServiceName) -> PeerChannel {
        Peer::service(&self.run_dir, service).channel()
    }

    /// A request with the deadline of `--request-timeout`.
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

    /// A client of the Events API of a service.
    pub(crate) fn events_of(&self, service: ServiceName) -> EventsClient<PeerChannel> {
        EventsClient::new(self.channel(service))
    }

    /// A client of node-status.
    pub(crate) fn node_status(&self) -> NodeStatusClient<PeerChannel> {
        NodeStatusClient::new(self.channel(ServiceName::NodeStatus))
    }

    /// The state of every service, from init.
    pub(crate) async fn services(&self) -> Result<Vec<Service>, CliError> {
        let request = self.request(ListServicesRequest {});
        let answer = self.supervisor().list_services(request).await;
        Ok(answer.map_err(|s| self.call_error(ServiceName::Init, s))?.into_inner().services)
    }

    /// The progress of each service, requested concurrently.
    pub(crate) async fn progress(&self) -> Vec<(ServiceName, Result<GetProgressResponse, CliError>)> {
        join_all(ServiceName::ALL.map(|service| async move { (service, self.progress_of(service).await) }))
            .await
    }

    /// The progress of one service.
    pub(crate) async fn progress_of(&self, service: ServiceName) -> Result<GetProgressResponse, CliError> {
        let mut client = AdminClient::new(self.channel(service));
        let answer = client.get_progress(self.request(GetProgressRequest {})).await;
        answer.map(tonic::Response::into_inner).map_err(|s| self.call_error(service, s))
    }

    /// CPU and memory that the process of a service uses.
    pub(crate) async fn usage(
        &self,
        service: ServiceName,
        with_pss: bool,
    ) -> Result<GetUsageResponse, CliError> {
        let mut client = AdminClient::new(self.channel(service));
        let answer = client.get_usage(self.request(GetUsageRequest { with_pss })).await;
        answer.map(tonic::Response::into_inner).map_err(|s| self.call_error(service, s))
    }

    /// The spans that a service still keeps.
    pub(crate) async fn spans(
        &self,
        service: ServiceName,
        request: ListSpansRequest,
    ) -> Result<ListSpansResponse, CliError> {
        let mut client = AdminClient::new(self.channel(service));
        let answer = client.list_spans(self.request(request)).await;
        answer.map(tonic::Response::into_inner).map_err(|s| self.call_error(service, s))
    }

    /// The client of resource-manager.
    pub(crate) fn resource_manager(&self) -> ResourceManagerClient<PeerChannel> {
        ResourceManagerClient::new(self.channel(ServiceName::ResourceManager))
    }

    /// CPU and memory of each pod that runs.
    pub(crate) async fn pod_stats(&self) -> Result<Vec<PodStatsResponse>, CliError> {
        let to_error = |s| self.call_error(ServiceName::ResourceManager, s);
        let read = async {
            let request = self.request(PodStatsRequest { cpu_and_memory_only: true });
            let mut stream = self.resource_manager().pod_stats(request).await.map_err(to_error)?.into_inner();
            let mut pods = Vec::new();
            while let Some(pod) = stream.message().await.map_err(to_error)? {
                pods.push(pod);
            }
            Ok(pods)
        };
        self.with_timeout(ServiceName::ResourceManager, read).await
    }

    /// CPU and memory of the node.
    pub(crate) async fn node_stats(&self) -> Result<NodeStatsResponse, CliError> {
        let request = self.request(NodeStatsRequest { cpu_and_memory_only: true });
        let answer = self.resource_manager().node_stats(request).await;
        answer.map(tonic::Response::into_inner).map_err(|s| self.call_error(ServiceName::ResourceManager, s))
    }

    /// Every pod with its status.
    pub(crate) async fn pods(&self) -> Result<Vec<PodDocument>, CliError> {
        let to_error = |s| self.call_error(ServiceName::PodSync, s);
        let read = async {
            let mut stream = self
                .pod_sync()
                .list_pods(self.request(ListPodsRequest {}))
                .await
                .map_err(to_error)?
                .into_inner();
            let mut pods = Vec::new();
            while let Some(pod) = stream.message().await.map_err(to_error)? {
                pods.push(pod);
            }
            Ok(pods)
        };
        self.with_timeout(ServiceName::PodSync, read).await
    }

    /// Reads a whole stream, at most one second longer than the deadline of a call.
    async fn with_timeout<T>(
        &self,
        service: ServiceName,
        read: impl Future<Output = Result<T, CliError>>,
    ) -> Result<T, CliError> {
        let limit = self.timeout + Duration::from_secs(1);
        tokio::time::timeout(limit, read).await.unwrap_or_else(|_| Err(self.timeout_error(service)))
    }

    /// The steps of a pod's start or end.
    pub(crate) async fn explain(&self, uid: &str) -> Result<ExplainPodResponse, CliError> {
        let request = ExplainPodRequest { uid: uid.to_owned(), ..ExplainPodRequest::default() };
        let answer = self.pod_sync().explain_pod(self.request(request)).await;
        Ok(answer.map_err(|s| self.call_error(ServiceName::PodSync, s))?.into_inner())
    }

    /// The images that the container runtime has.
    pub(crate) async fn images(&self) -> Result<Vec<RuntimeImage>, CliError> {
        let answer = self.runtime().list_images(self.request(ListImagesRequest {})).await;
        Ok(answer.map_err(|s| self.call_error(ServiceName::RuntimeShim, s))?.into_inner().images)
    }

    /// The volumes of every pod that has any.
    pub(crate) async fn volumes(&self) -> Result<Vec<PodVolumes>, CliError> {
        let to_error = |s| self.call_error(ServiceName::VolumeManager, s);
        let read = async {
            let request = self.request(WatchPodVolumesRequest {});
            let mut stream =
                self.volume_manager().watch_pod_volumes(request).await.map_err(to_error)?.into_inner();
            let mut pods = Vec::new();
            while let Some(message) = stream.message().await.map_err(to_error)? {
                match message.item {
                    Some(VolumesItem::Pod(pod)) => pods.push(pod),
                    Some(VolumesItem::Synced(_)) => return Ok(pods),
                    Some(VolumesItem::GoneUid(_)) | None => {}
                }
            }
            Err(to_error(Status::unavailable("volume-manager ended the stream early")))
        };
        self.with_timeout(ServiceName::VolumeManager, read).await
    }

    /// The pods that have a directory, although no source names them and nothing of them runs.
    pub(crate) async fn orphans(&self) -> Result<Vec<OrphanedPod>, CliError> {
        let answer = self.volume_manager().list_orphans(self.request(ListOrphansRequest {})).await;
        Ok(answer.map_err(|s| self.call_error(ServiceName::VolumeManager, s))?.into_inner().pods)
    }

    /// The pod sources, with the manifests that they refuse.
    pub(crate) async fn sources(&self) -> Result<Vec<Source>, CliError> {
        let answer = self.pod_config().list_sources(self.request(ListSourcesRequest {})).await;
        Ok(answer.map_err(|s| self.call_error(ServiceName::PodConfig, s))?.into_inner().sources)
    }

    /// The PersistentVolumes or the claims of the manifests with their statuses, sorted by namespace and name.
    pub(crate) async fn volume_objects(&self, kind: &str) -> Result<Vec<Value>, CliError> {
        let to_error = |s| self.call_error(ServiceName::PodConfig, s);
        let read = async {
            let request = self.request(ListVolumeObjectsRequest { kind: kind.to_owned() });
            let mut stream =
                self.pod_config().list_volume_objects(request).await.map_err(to_error)?.into_inner();
            let mut objects = Vec::new();
            while let Some(message) = stream.message().await.map_err(to_error)? {
                objects.push(read_volume_object(kind, &message.object_json)?);
            }
            Ok(objects)
        };
        self.with_timeout(ServiceName::PodConfig, read).await
    }

    /// Whether pod-config deletes the object of the kind that a request names; one of an older release ignores the kind.
    pub(crate) async fn deletes_by_kind(&self) -> Result<bool, CliError> {
        // It knows both since the same release.
        let request = self.request(ListVolumeObjectsRequest { kind: "PersistentVolume".to_owned() });
        match self.pod_config().list_volume_objects(request).await {
            Err(status) if status.code() == Code::Unimplemented => Ok(false),
            // A node with an API server refuses to list them, and knows the call.
            Err(status) if status.code() == Code::FailedPrecondition => Ok(true),
            answer => answer.map(|_| true).map_err(|s| self.call_error(ServiceName::PodConfig, s)),
        }
    }

    /// The Node object as JSON.
    pub(crate) async fn node(&self) -> Result<serde_json::Value, CliError> {
        let answer = self.node_status().get_node(self.request(GetNodeRequest {})).await;
        let bytes = answer.map_err(|s| self.call_error(ServiceName::NodeStatus, s))?.into_inner().node_json;
        serde_json::from_slice(&bytes).map_err(|e| CliError::Failed {
            message: format!("node-status sent a Node that is not JSON: {e}"),
            hint: None,
        })
    }

    /// The events of all services, oldest first, and an error for each service that did not answer.
    ///
    /// # Errors
    /// No service answers.
    pub(crate) async fn events(&self) -> Result<(Vec<ServiceEvent>, Vec<CliError>), CliError> {
        let answers = join_all(ServiceName::ALL.map(|service| async move {
            let mut client = self.events_of(service);
            let answer = client.list_events(self.request(ListEventsRequest::default())).await;
            (service, answer.map_err(|s| self.call_error(service, s)))
        }))
        .await;
        let (mut events, mut errors, mut answered) = (Vec::new(), Vec::new(), false);
        for (service, answer) in answers {
            match answer {
                Ok(list) => {
                    answered = true;
                    events.extend(
                        list.into_inner().events.into_iter().map(|event| ServiceEvent { service, event }),
                    );
                }
                Err(error) => errors.push((service, error)),
            }
        }
        if !answered && !errors.is_empty() {
            return Err(errors.swap_remove(0).1);
        }
        // Under systemd and Docker Compose there is no init, so its events are not missing.
        let errors = errors.into_iter().filter(|(service, _)| *service != ServiceName::Init).map(|(_, f)| f);
        let errors = errors.collect();
        events.sort_by_key(|entry| (entry.event.last_unix_nanos, entry.event.sequence));
        Ok((events, errors))
    }

    /// The error for a failed call; probes the socket to find out why nothing answered.
    pub(crate) fn call_error(&self, service: ServiceName, status: Status) -> CliError {
        let message = status.message().to_owned();
        match status.code() {
            Code::Unavailable => self.unavailable_error(service, message),
            Code::DeadlineExceeded => CliError::ServiceTimeout { service, message },
            // Another user or group would not help.
            Code::PermissionDenied if reason(&status).as_deref() == Some(OUTSIDE_REASON) => {
                CliError::Failed {
                    message: format!("{service} refuses: {message}"),
                    hint: Some(
                        "run it in a shell of the node itself, not in a container (docs/security.md)".into(),
                    ),
                }
            }
            Code::PermissionDenied => {
                let group = Group::of_socket(&self.socket(service));
                CliError::CallRefused { service, message, group }
            }
            Code::Unimplemented => CliError::Failed {
                message: format!("{service} does not know this call: it is older than this command"),
                hint: Some("`keelson version` shows both".into()),
            },
            _ => CliError::Failed { message, hint: None },
        }
    }

    fn unavailable_error(&self, service: ServiceName, message: String) -> CliError {
        let socket = self.socket(service);
        match UnixStream::connect(&socket) {
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
                let group = Group::of_socket(&socket);
                CliError::SocketForbidden { socket, group }
            }
            Err(_) if ServiceName::ALL.into_iter().any(|s| UnixStream::connect(self.socket(s)).is_ok()) => {
                CliError::ServiceNotRunning { service, socket }
            }
            Err(_) => CliError::NotRunning { socket, others: host::run_dirs() },
            Ok(_) => CliError::ServiceTimeout { service, message },
        }
    }

    fn timeout_error(&self, service: ServiceName) -> CliError {
        let message = format!("{service} did not finish its answer within {} s", self.timeout.as_secs_f32());
        CliError::ServiceTimeout { service, message }
    }
}
