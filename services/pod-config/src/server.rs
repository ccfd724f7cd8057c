//! The gRPC API `PodConfig`.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;

use futures_util::{Stream, StreamExt as _};
use keelson_kube_api::KubeError;
use keelson_pod_config_core::manifest::Kind;
use keelson_pod_config_core::mutation::is_object_name;
use keelson_pod_config_core::object::ObjectKey;
use keelson_pod_config_core::token::TokenRequest;
use keelson_proto::keelson::common::v1::Synced;
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_proto::keelson::pod_config::v1::pod_config_server::PodConfig;
use keelson_proto::keelson::pod_config::v1::watch_pods_response::Item;
use keelson_service_kit::server::CallerPolicy;
use keelson_service_kit::status::{chain, error};
use keelson_service_kit::{CancellationToken, PeerIdentity, WatchHub, WatchItem};
use tonic::{Code, Request, Response, Status, Streaming};

use crate::claims_in_use;
use crate::cluster::{Cluster, TokenError};
use crate::control_plane::{ControlPlaneError, NodeState, ObjectRequest};
use crate::desired_state::{DesiredState, ObjectLookup, WatchKey, WatchValue};
use crate::live_objects::{self, LiveObjects};
use crate::manifest_store::{ManifestStore, ObjectName, StoreError};
use crate::mutations::{self, mutate};
use crate::objects::{self, Objects};
use crate::pod_certificates;
use crate::reviews::Reviewer;

/// Implements the RPCs.
pub struct Server {
    /// The merged pods and objects.
    pub desired: DesiredState,
    /// The Node object, under its only key.
    pub node: WatchHub<(), Arc<NodeState>>,
    /// Stores applied manifests.
    pub store: ManifestStore,
    /// Looks up the objects to which pods refer.
    pub objects: Objects,
    /// Reviews tokens and access; `None` without an API server.
    pub reviewer: Option<Reviewer>,
    /// Services and tokens; `None` without an API server.
    pub cluster: Option<Cluster>,
    /// Identifies callers.
    pub policy: CallerPolicy,
    /// Name of this node.
    pub node_name: String,
    /// Ends the streams.
    pub shutdown: CancellationToken,
}

type ResponseStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

impl Server {
    /// A stream that ends on shutdown, so that draining needs no time-out.
    fn until_shutdown<T: 'static>(
        &self,
        stream: impl Stream<Item = Result<T, Status>> + Send + 'static,
    ) -> ResponseStream<T> {
        Box::pin(stream.take_until(self.shutdown.clone().cancelled_owned()))
    }

    fn live_objects(&self) -> LiveObjects<'_> {
        LiveObjects {
            api: self.cluster.as_ref().map(Cluster::api),
            control_plane: self.objects.control_plane.name(),
            node_name: &self.node_name,
            manifests: self.desired.volume_objects(),
        }
    }

    /// The kind of a request for PersistentVolumes or claims of manifests.
    #[allow(clippy::result_large_err, reason = "a Status is what an RPC answers")]
    fn listed_kind(&self, kind: &str) -> Result<Kind, Status> {
        let Some(kind) = Kind::parse(kind).filter(|kind| kind.is_volume_object()) else {
            let text = format!("PersistentVolume and PersistentVolumeClaim are listed, not {kind:?}");
            return Err(error(Code::InvalidArgument, "KIND_NOT_LISTED", text));
        };
        if self.cluster.is_some() {
            let kind = kind.as_str();
            let text =
                format!("the {kind}s of this node are those of its API server; `kubectl get` shows them");
            return Err(error(Code::FailedPrecondition, "API_SERVER", text));
        }
        Ok(kind)
    }

    #[allow(clippy::result_large_err, reason = "a Status is what an RPC answers")]
    fn reviewer(&self) -> Result<&Reviewer, Status> {
        self.reviewer.as_ref().ok_or_else(|| {
            let name = self.objects.control_plane.name();
            error(
                Code::FailedPrecondition,
                "NO_API_SERVER",
                format!("reviews need an API server, and the control plane of this node is {name}"),
            )
        })
    }
}

#[tonic::async_trait]
impl PodConfig for Server {
    type WatchPodsStream = ResponseStream<pb::WatchPodsResponse>;
    type WatchNodeStream = ResponseStream<pb::WatchNodeResponse>;
    type WatchObjectsStream = ResponseStream<pb::WatchObjectsResponse>;
    type ReportClaimsInUseStream = ResponseStream<pb::ReportClaimsInUseResponse>;
    type ListVolumeObjectsStream = ResponseStream<pb::ListVolumeObjectsResponse>;
    type WatchVolumeObjectsStream = ResponseStream<pb::WatchVolumeObjectsResponse>;

    async fn watch_pods(
        &self,
        request: Request<pb::WatchPodsRequest>,
    ) -> Result<Response<Self::WatchPodsStream>, Status> {
        let pb::WatchPodsRequest { unannotated } = request.into_inner();
        let configured = self.desired.configured().to_vec();
        let to_item = move |item| watch_item(item, &configured, unannotated);
        let stream = self.desired.subscribe().into_stream(to_item);
        let stream = stream.filter_map(|item| std::future::ready(item.map(Ok)));
        Ok(Response::new(self.until_shutdown(stream)))
    }

    async fn watch_node(
        &self,
        _: Request<pb::WatchNodeRequest>,
    ) -> Result<Response<Self::WatchNodeStream>, Status> {
        let stream = self.node.subscribe().into_stream(|item| match item {
            WatchItem::Set((), node) => {
                Some(pb::WatchNodeResponse { node_json: node.json.clone(), registered: node.registered })
            }
            WatchItem::Gone(()) | WatchItem::Synced => None,
        });
        let stream = stream.filter_map(|item| std::future::ready(item.map(Ok)));
        Ok(Response::new(self.until_shutdown(stream)))
    }

    async fn get_live(
        &self,
        request: Request<pb::GetLiveRequest>,
    ) -> Result<Response<pb::GetLiveResponse>, Status> {
        let read = self.live_objects().read(&request.into_inner()).await;
        let object_json = read.map_err(|cause| live_objects::status(&cause))?;
        Ok(Response::new(pb::GetLiveResponse { object_json }))
    }

    async fn get_object(
        &self,
        request: Request<pb::GetObjectRequest>,
    ) -> Result<Response<pb::GetObjectResponse>, Status> {
        let pb::GetObjectRequest { kind, namespace, name } = request.into_inner();
        if kind.is_empty() || name.is_empty() {
            return Err(error(Code::InvalidArgument, "NAME_MISSING", "kind and name must be given"));
        }
        let wanted = ObjectRequest { kind: kind.clone(), namespace: namespace.clone(), name: name.clone() };
        match self.objects.find(&wanted).await {
            Ok(ObjectLookup::Object(json)) => {
                Ok(Response::new(pb::GetObjectResponse { object_json: json.to_vec() }))
            }
            Ok(ObjectLookup::SourcesNotRead) => Err(error(
                Code::Unavailable,
                "SOURCES_NOT_READ",
                format!(
                    "the sources have not been read yet; {kind} {namespace}/{name} may be in one of them"
                ),
            )),
            Ok(ObjectLookup::NotFound) => Err(error(
                Code::NotFound,
                "OBJECT_UNKNOWN",
                format!("{kind} {namespace}/{name} does not exist; add it to the manifests"),
            )),
            Err(cause @ ControlPlaneError::Unavailable { .. }) => {
                Err(error(Code::Unavailable, "CONTROL_PLANE_AWAY", cause.to_string()))
            }
        }
    }

    async fn watch_objects(
        &self,
        request: Request<Streaming<pb::WatchObjectsRequest>>,
    ) -> Result<Response<Self::WatchObjectsStream>, Status> {
        let stream = objects::watch_objects(self.objects.clone(), request.into_inner());
        Ok(Response::new(self.until_shutdown(stream)))
    }

    async fn report_claims_in_use(
        &self,
        request: Request<Streaming<pb::ReportClaimsInUseRequest>>,
    ) -> Result<Response<Self::ReportClaimsInUseStream>, Status> {
        if self.cluster.is_some() {
            let text = "the claims of this node are those of its API server, which protects them";
            return Err(error(Code::FailedPrecondition, "API_SERVER", text));
        }
        let stream = claims_in_use::confirmations(self.desired.clone(), request.into_inner());
        Ok(Response::new(self.until_shutdown(stream)))
    }

    async fn review_token(
        &self,
        request: Request<pb::ReviewTokenRequest>,
    ) -> Result<Response<pb::ReviewTokenResponse>, Status> {
        let token = request.into_inner().token;
        if token.is_empty() {
            return Err(error(Code::InvalidArgument, "TOKEN_MISSING", "a token must be given"));
        }
        self.reviewer()?.review_token(&token).await.map(Response::new).map_err(|e| review_status(&e))
    }

    async fn review_access(
        &self,
        request: Request<pb::ReviewAccessRequest>,
    ) -> Result<Response<pb::ReviewAccessResponse>, Status> {
        let request = request.into_inner();
        if request.user.as_ref().is_none_or(|user| user.name.is_empty()) || request.resource.is_empty() {
            return Err(error(Code::InvalidArgument, "NAME_MISSING", "user.name and resource must be given"));
        }
        self.reviewer()?.review_access(&request).await.map(Response::new).map_err(|e| review_status(&e))
    }

    async fn get_service_env(
        &self,
        request: Request<pb::GetServiceEnvRequest>,
    ) -> Result<Response<pb::GetServiceEnvResponse>, Status> {
        let pb::GetServiceEnvRequest { namespace, service_links, as_known } = request.into_inner();
        let variables = match &self.cluster {
            Some(cluster) => cluster.variables(&namespace, service_links, as_known).ok_or_else(|| {
                // The kubelet's message.
                let text = "services have not yet been read at least once, cannot construct envvars";
                error(Code::Unavailable, "SERVICES_NOT_READ", text)
            })?,
            None => BTreeMap::new(),
        };
        Ok(Response::new(pb::GetServiceEnvResponse { variables: variables.into_iter().collect() }))
    }

    async fn create_token(
        &self,
        request: Request<pb::CreateTokenRequest>,
    ) -> Result<Response<pb::CreateTokenResponse>, Status> {
        let wanted = token_request(request.into_inner())?;
        let Some(cluster) = &self.cluster else {
            let text = "tokens of service accounts need an API server, and this node runs without one";
            return Err(error(Code::FailedPrecondition, "NO_API_SERVER", text));
        };
        let token = cluster.create_token(&wanted).await.map_err(|cause| token_status(&cause))?;
        Ok(Response::new(pb::CreateTokenResponse {
            token: token.token,
            expires_unix_seconds: token.expires,
            lifetime_seconds: token.lifetime,
        }))
    }

    async fn request_pod_certificate(
        &self,
        request: Request<pb::RequestPodCertificateRequest>,
    ) -> Result<Response<pb::RequestPodCertificateResponse>, Status> {
        let wanted = pod_certificates::from_wire(request.into_inner())?;
        let api = self.cluster.as_ref().map(Cluster::api);
        let (control_plane, node) = (self.objects.control_plane.name(), self.node.get(&()));
        let node = (self.node_name.as_str(), node.as_deref());
        let name = pod_certificates::request((api, control_plane), node, &wanted).await;
        let name = name.map_err(|cause| pod_certificates::status(&cause))?;
        Ok(Response::new(pb::RequestPodCertificateResponse { name }))
    }

    async fn mutate(
        &self,
        request: Request<pb::MutateRequest>,
    ) -> Result<Response<pb::MutateResponse>, Status> {
        let peer = request.extensions().get::<PeerIdentity>();
        let callers = peer.map(|peer| self.policy.may_be(peer)).unwrap_or_default();
        let api = self.cluster.as_ref().map(Cluster::api);
        let (name, node) = (self.objects.control_plane.name(), self.node_name.as_str());
        let changed = mutate(api, name, &callers, node, request.into_inner()).await;
        let changed = changed.map_err(|cause| {
            let status = mutations::status(&cause);
            if status.code() == Code::PermissionDenied {
                tracing::warn!("denied a mutation: {}", status.message());
            }
            status
        })?;
        let object_json = changed.map(|object| object.0.to_string().into_bytes()).unwrap_or_default();
        Ok(Response::new(pb::MutateResponse { object_json }))
    }

    async fn apply_manifest(
        &self,
        request: Request<pb::ApplyManifestRequest>,
    ) -> Result<Response<pb::ApplyManifestResponse>, Status> {
        let pb::ApplyManifestRequest { manifest, name_hint } = request.into_inner();
        let pods = self.store.apply(manifest, name_hint).await.map_err(|e| store_status(&e))?;
        Ok(Response::new(pb::ApplyManifestResponse { pods }))
    }

    async fn delete_manifest(
        &self,
        request: Request<pb::DeleteManifestRequest>,
    ) -> Result<Response<pb::DeleteManifestResponse>, Status> {
        let pb::DeleteManifestRequest { namespace, name, kind } = request.into_inner();
        if name.is_empty() {
            return Err(error(Code::InvalidArgument, "NAME_MISSING", "the name of an object must be given"));
        }
        let object = ObjectName { kind: optional_kind(&kind)?, namespace, name };
        let uid = self.store.delete(object).await.map_err(|e| store_status(&e))?;
        Ok(Response::new(pb::DeleteManifestResponse { uid }))
    }

    async fn list_volume_objects(
        &self,
        request: Request<pb::ListVolumeObjectsRequest>,
    ) -> Result<Response<Self::ListVolumeObjectsStream>, Status> {
        let kind = self.listed_kind(&request.into_inner().kind)?;
        let objects = self.desired.volume_objects().list(kind).into_iter();
        let items = objects.map(|json| Ok(pb::ListVolumeObjectsResponse { object_json: json.to_vec() }));
        Ok(Response::new(self.until_shutdown(futures_util::stream::iter(items))))
    }

    async fn watch_volume_objects(
        &self,
        request: Request<pb::WatchVolumeObjectsRequest>,
    ) -> Result<Response<Self::WatchVolumeObjectsStream>, Status> {
        let kind = self.listed_kind(&request.into_inner().kind)?;
        let subscription = self.desired.volume_objects().subscribe();
        let stream = subscription.into_stream(move |item| volume_object_item(item, kind));
        let stream = stream.filter_map(|item| std::future::ready(item.map(Ok)));
        Ok(Response::new(self.until_shutdown(stream)))
    }

    async fn list_sources(
        &self,
        _: Request<pb::ListSourcesRequest>,
    ) -> Result<Response<pb::ListSourcesResponse>, Status> {
        Ok(Response::new(pb::ListSourcesResponse { sources: self.desired.sources() }))
    }
}

fn watch_item(
    item: WatchItem<WatchKey, WatchValue>,
    configured: &[String],
    unannotated: bool,
) -> Option<pb::WatchPodsResponse> {
    let item = match item {
        WatchItem::Set(WatchKey::Pod(_), WatchValue::Pod(pod)) => Item::Pod(pod.to_wire(unannotated)),
        WatchItem::Set(WatchKey::Source(source), WatchValue::Ready) => {
            Item::SourceReady(pb::SourceReady { source, configured: configured.to_vec() })
        }
        WatchItem::Gone(WatchKey::Pod(uid)) => Item::GoneUid(uid),
        WatchItem::Synced => Item::Synced(Synced {}),
        // A source never becomes unready, and keys and values always have the same kind.
        WatchItem::Gone(WatchKey::Source(_))
        | WatchItem::Set(WatchKey::Pod(_), WatchValue::Ready)
        | WatchItem::Set(WatchKey::Source(_), WatchValue::Pod(_)) => return None,
    };
    Some(pb::WatchPodsResponse { item: Some(item) })
}

/// An item about an object of this kind; `None` for one of another kind.
fn volume_object_item(
    item: WatchItem<ObjectKey, Arc<[u8]>>,
    wanted: Kind,
) -> Option<pb::WatchVolumeObjectsResponse> {
    use pb::watch_volume_objects_response::Item;
    let item = match item {
        WatchItem::Set(key, json) if key.kind == wanted => Item::ObjectJson(json.to_vec()),
        WatchItem::Gone(ObjectKey { kind, namespace, name }) if kind == wanted => {
            Item::Gone(pb::ObjectReference { kind: kind.as_str().to_owned(), namespace, name })
        }
        WatchItem::Set(..) | WatchItem::Gone(_) => return None,
        WatchItem::Synced => Item::Synced(Synced {}),
    };
    Some(pb::WatchVolumeObjectsResponse { item: Some(item) })
}

fn review_status(cause: &KubeError) -> Status {
    let (code, reason) = match cause {
        KubeError::Kubeconfig { .. } | KubeError::Awaited { .. } | KubeError::Unreachable { .. } => {
            (Code::Unavailable, "CONTROL_PLANE_AWAY")
        }
        KubeError::Refused { .. } => (Code::FailedPrecondition, "REVIEW_REFUSED"),
    };
    error(code, reason, chain(cause))
}

fn token_request(request: pb::CreateTokenRequest) -> Result<TokenRequest, Status> {
    let pb::CreateTokenRequest {
        namespace,
        service_account,
        pod_name,
        pod_uid,
        audiences,
        expiration_seconds,
    } = request;
    let fields = [
        ("namespace", &namespace),
        ("service_account", &service_account),
        ("pod_name", &pod_name),
        ("pod_uid", &pod_uid),
    ];
    // Each is part of a URL path or of the token's binding.
    if let Some((field, value)) = fields.iter().find(|(_, value)| !is_object_name(value)) {
        return Err(error(
            Code::InvalidArgument,
            "BAD_FIELD",
            format!("{field} {value:?} is not a valid name"),
        ));
    }
    Ok(TokenRequest { namespace, service_account, pod_name, pod_uid, audiences, expiration_seconds })
}

fn token_status(cause: &TokenError) -> Status {
    let (code, reason) = match cause {
        TokenError::Server(error) if error.is_not_found() => (Code::NotFound, "SERVICE_ACCOUNT_UNKNOWN"),
        TokenError::Server(error) => match error.code() {
            // Too many requests, or a server error.
            None | Some(408 | 429 | 500..) => (Code::Unavailable, "CONTROL_PLANE_AWAY"),
            Some(_) => (Code::FailedPrecondition, "TOKEN_REFUSED"),
        },
        TokenError::NoToken { .. } => (Code::FailedPrecondition, "TOKEN_REFUSED"),
    };
    error(code, reason, chain(cause))
}

/// The kind of a request; an empty one is none.
fn optional_kind(kind: &str) -> Result<Option<Kind>, Status> {
    let unknown = || {
        let text = format!(
            "kind {kind:?} is none of Pod, Secret, ConfigMap, PersistentVolumeClaim and PersistentVolume"
        );
        error(Code::InvalidArgument, "KIND_UNKNOWN", text)
    };
    if kind.is_empty() { Ok(None) } else { Kind::parse(kind).map(Some).ok_or_else(unknown) }
}

fn store_status(cause: &StoreError) -> Status {
    let (code, reason) = match cause {
        StoreError::Invalid(_) => (Code::InvalidArgument, "MANIFEST_INVALID"),
        StoreError::OwnedBySource { .. } => (Code::FailedPrecondition, "OTHER_SOURCE"),
        StoreError::Shared { .. } => (Code::FailedPrecondition, "FILE_SHARED"),
        StoreError::Unknown { kind: None | Some(Kind::Pod), .. } => (Code::NotFound, "POD_UNKNOWN"),
        StoreError::Unknown { .. } => (Code::NotFound, "OBJECT_UNKNOWN"),
        StoreError::Ambiguous { .. } => (Code::InvalidArgument, "KIND_AMBIGUOUS"),
        StoreError::NotRead { .. } => (Code::Unavailable, "FOLDER_NOT_READ"),
        StoreError::Write { source, .. } if source.kind() == std::io::ErrorKind::StorageFull => {
            (Code::ResourceExhausted, "DISK_FULL")
        }
        StoreError::Write { .. } => (Code::Internal, "WRITE_FAILED"),
        StoreError::ShuttingDown => (Code::Unavailable, "ENDING"),
    };
    error(code, reason, chain(cause))
}

#[cfg(test)]
mod tests;
