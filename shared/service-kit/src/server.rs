//! The server stack: it checks the caller, bounds the load, enforces deadlines, and turns panics into INTERNAL.

use std::convert::Infallible;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use futures_util::FutureExt as _;
use http::{Request, Response};
use keelson_config::{Config, ServiceName};
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::service::Routes;
use tonic::{Code, Status};
use tower::{Layer, Service};
use tracing::Instrument as _;

use crate::flow::{CONNECTION_WINDOW, STREAM_WINDOW};
use crate::metrics::Metrics;
use crate::shares::{Holder, HolderKind, Shares};
use crate::status::error;
use crate::uds::{Incoming, PeerIdentity, bind};

/// Limit of concurrent calls, of which each user has a share; further calls get RESOURCE_EXHAUSTED.
const CONCURRENCY: usize = 1024;

/// Allowed callers of foreign APIs, by path prefix; the first match counts. This is CRI on the socket of runtime-shim,
/// where node-status may only list images. `Exec`, `Attach` and `PortForward` return URLs that give anyone who has them
/// access to a container, so they are for root only.
const FOREIGN: &[(&str, &[&str])] = &[
    ("/runtime.v1.RuntimeService/ExecSync", &["pod-sync"]),
    ("/runtime.v1.RuntimeService/Exec", &[]),
    ("/runtime.v1.RuntimeService/Attach", &[]),
    ("/runtime.v1.RuntimeService/PortForward", &[]),
    ("/runtime.v1.RuntimeService/", &["pod-sync"]),
    ("/runtime.v1.ImageService/ListImages", &["pod-sync", "node-status"]),
    ("/runtime.v1.ImageService/", &["pod-sync"]),
    ("/grpc.health.v1.Health/", ANY_SERVICE),
    ("/grpc.reflection.v1.ServerReflection/", ANY_SERVICE),
];
const ANY_SERVICE: &[&str] = &[
    "init",
    "pod-config",
    "runtime-shim",
    "volume-manager",
    "resource-manager",
    "pod-sync",
    "node-status",
    "node-api",
    "cli",
];

/// `ErrorInfo` reason for callers that are not processes of the node itself.
pub const OUTSIDE_REASON: &str = "CALLER_OUTSIDE_THE_NODE";

/// Maps the users of this node to callers.
#[derive(Debug, Clone)]
pub struct CallerPolicy {
    services: Vec<(u32, &'static str)>,
    operator_gid: u32,
    own_uid: u32,
}

impl CallerPolicy {
    /// Builds the policy from the users of the configuration.
    pub fn new(config: &Config) -> Self {
        let services = ServiceName::ALL
            .into_iter()
            .filter_map(|name| config.uid_of(name).map(|uid| (uid, name.as_str())))
            .collect();
        Self {
            services,
            operator_gid: config.users.operator_gid,
            own_uid: rustix::process::geteuid().as_raw(),
        }
    }

    /// The services that `peer` may be: several when they share a user, none for a person who is not root.
    pub fn may_be(&self, peer: &PeerIdentity) -> Vec<&'static str> {
        if peer.outside.is_some() {
            return Vec::new();
        }
        let without = peer.uid == 0 || (self.services.is_empty() && peer.uid == self.own_uid);
        let of_uid = |name: &&'static str| {
            let user = self.services.iter().find(|(_, service)| service == name).map(|(uid, _)| *uid);
            user.map_or(without, |uid| uid == peer.uid)
        };
        ServiceName::ALL.into_iter().map(ServiceName::as_str).filter(of_uid).collect()
    }

    /// The name of a user, for messages.
    fn name_of(&self, peer: &PeerIdentity) -> String {
        let service =
            self.services.iter().find(|(uid, _)| *uid == peer.uid).map(|(_, name)| (*name).to_owned());
        service.unwrap_or_else(|| format!("with uid {}", peer.uid))
    }

    /// Checks whether `peer` may call the method at `path`. uid 0 always may; when no service has a configured user, so may
    /// every process of the same user. A process in a pod or another namespace never may, whatever its user.
    ///
    /// # Errors
    /// PERMISSION_DENIED that names the method and who may call it.
    pub fn check(&self, path: &str, peer: &PeerIdentity) -> Result<(), Box<Status>> {
        if let Some(outside) = &peer.outside {
            let message = format!("uid {} may not call {path}: {outside}", peer.uid);
            return Err(Box::new(error(Code::PermissionDenied, OUTSIDE_REASON, message)));
        }
        if peer.uid == 0 || (self.services.is_empty() && peer.uid == self.own_uid) {
            return Ok(());
        }
        let allowed = callers_of(path).unwrap_or(&[]);
        let service = self.services.iter().find(|(uid, _)| *uid == peer.uid).map(|(_, name)| *name);
        let permitted = match service {
            Some(name) => allowed.contains(&name),
            None => allowed.contains(&"cli") && peer.in_group(self.operator_gid),
        };
        if permitted {
            return Ok(());
        }
        let who = service.map_or_else(|| format!("uid {}", peer.uid), ToOwned::to_owned);
        Err(Box::new(error(
            Code::PermissionDenied,
            "CALLER_NOT_ALLOWED",
            format!("{who} may not call {path}; root may{}", hint(allowed, self.operator_gid)),
        )))
    }
}

fn hint(allowed: &[&str], operator_gid: u32) -> String {
    if allowed.contains(&"cli") {
        format!(", and members of the operator group (gid {operator_gid})")
    } else {
        String::new()
    }
}

/// The callers that the proto (or [`FOREIGN`], for foreign APIs) allows for a method path.
pub fn callers_of(path: &str) -> Option<&'static [&'static str]> {
    if let Ok(i) = keelson_proto::CALLERS.binary_search_by(|(p, _)| (*p).cmp(path)) {
        return Some(keelson_proto::CALLERS[i].1);
    }
    FOREIGN.iter().find(|(prefix, _)| path.starts_with(prefix)).map(|(_, callers)| *callers)
}

/// The stack as a tower layer.
#[derive(Debug, Clone)]
pub struct StackLayer {
    policy: Arc<CallerPolicy>,
    metrics: Metrics,
    calls: Arc<Shares>,
}

impl StackLayer {
    /// The stack with the limits of every service.
    pub fn new(policy: CallerPolicy, metrics: Metrics) -> Self {
        Self { policy: Arc::new(policy), metrics, calls: Shares::new(CONCURRENCY) }
    }
}

impl<S> Layer<S> for StackLayer {
    type Service = Stack<S>;

    fn layer(&self, inner: S) -> Stack<S> {
        Stack { inner, layer: self.clone() }
    }
}

/// See [`StackLayer`].
#[derive(Debug, Clone)]
pub struct Stack<S> {
    inner: S,
    layer: StackLayer,
}

type BoxedAnswer = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

impl<S> Service<Request<Body>> for Stack<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxedAnswer;

    fn poll_ready(&mut self, cx: &mut TaskContext<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> BoxedAnswer {
        let path = request.uri().path().to_owned();
        let metrics = self.layer.metrics.clone();
        let refuse = |status: Status| -> BoxedAnswer {
            metrics.handled(&path, status.code() as i32);
            Box::pin(std::future::ready(Ok(status.into_http())))
        };
        let peer = request.extensions().get::<PeerIdentity>().cloned().unwrap_or(PeerIdentity {
            uid: u32::MAX,
            gid: u32::MAX,
            pid: None,
            groups: Vec::new(),
            outside: None,
        });
        if let Err(status) = self.layer.policy.check(&path, &peer) {
            tracing::warn!(
                uid = peer.uid,
                pid = peer.pid,
                method = path,
                why = status.message(),
                "refused a caller"
            );
            return refuse(*status);
        }
        let caller = Holder::new(HolderKind::User, self.layer.policy.name_of(&peer));
        let place = match self.layer.calls.take(vec![caller]) {
            Ok(place) => place,
            Err(why) => {
                let message = format!("too many calls at the same time: {why}; try again");
                return refuse(error(Code::ResourceExhausted, "TOO_MANY_CALLS", message));
            }
        };
        let span = span_of(&path, &request);
        let answer = AssertUnwindSafe(self.inner.call(request)).catch_unwind();
        let metrics = self.layer.metrics.clone();
        Box::pin(
            async move {
                let response = answer.await.unwrap_or_else(|_| {
                    tracing::error!(method = path, "the handler panicked");
                    Ok(error(Code::Internal, "PANIC", format!("the handler of {path} panicked")).into_http())
                });
                drop(place);
                if let Ok(response) = &response {
                    metrics.handled(&path, code_of(response));
                }
                response
            }
            .instrument(span),
        )
    }
}

/// A span for a call that belongs to a trace; disabled for other calls.
fn span_of(path: &str, request: &Request<Body>) -> tracing::Span {
    let Some(parent) = request.headers().get("traceparent").and_then(|v| v.to_str().ok()) else {
        return tracing::Span::none();
    };
    let span = tracing::info_span!(target: keelson_telemetry::TRACE_TARGET, "rpc", otel.name = path.trim_start_matches('/'), otel.kind = "server");
    keelson_telemetry::set_parent(&span, parent);
    span
}

fn code_of(response: &Response<Body>) -> i32 {
    response
        .headers()
        .get("grpc-status")
        .and_then(|v| v.to_str().ok())
        .and_then(|v| v.parse().ok())
        .unwrap_or(0)
}

/// Binds `socket` and serves `routes` through the stack until `shutdown`, then drains for at most 2 s.
/// `bound` is called once the socket is in place.
///
/// # Errors
/// The socket cannot be bound, or accepting has failed for good.
pub async fn serve(
    socket: &Path,
    routes: Routes,
    stack: StackLayer,
    shutdown: CancellationToken,
    bound: impl FnOnce(),
) -> anyhow::Result<()> {
    let listener = bind(socket)?;
    bound();
    let stop = shutdown.clone();
    let server = tonic::transport::Server::builder()
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .http2_keepalive_interval(Some(Duration::from_secs(30)))
        .http2_keepalive_timeout(Some(Duration::from_secs(20)))
        .layer(stack)
        .add_routes(routes)
        .serve_with_incoming_shutdown(Incoming(listener), async move { stop.cancelled().await });
    tokio::pin!(server);
    // Cancel-safe: `server` is pinned outside and polled again below.
    tokio::select! {
        end = &mut server => return end.map_err(Into::into),
        () = shutdown.cancelled() => {}
    }
    match tokio::time::timeout(Duration::from_secs(2), server).await {
        Ok(end) => end.map_err(Into::into),
        Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Outside;

    fn policy() -> CallerPolicy {
        let mut config = Config::default();
        for (i, name) in ServiceName::ALL.into_iter().enumerate() {
            config.users.uids.insert(name.to_string(), 5000 + u32::try_from(i).unwrap());
        }
        config.users.operator_gid = 700;
        CallerPolicy::new(&config)
    }

    fn peer(uid: u32, groups: &[u32]) -> PeerIdentity {
        PeerIdentity { uid, gid: uid, pid: None, groups: groups.to_vec(), outside: None }
    }

    fn uid_of(service: &str) -> u32 {
        5000 + u32::try_from(ServiceName::ALL.iter().position(|n| n.as_str() == service).unwrap()).unwrap()
    }

    /// Proof 11: every method against every service, an operator, a stranger and root.
    #[test]
    fn only_the_callers_that_the_proto_names_may_call() {
        let policy = policy();
        for (path, callers) in keelson_proto::CALLERS {
            for service in ServiceName::ALL {
                let allowed = callers.contains(&service.as_str());
                let result = policy.check(path, &peer(uid_of(service.as_str()), &[700]));
                assert_eq!(result.is_ok(), allowed, "{service} calls {path}");
            }
            assert_eq!(policy.check(path, &peer(1000, &[700])).is_ok(), callers.contains(&"cli"), "{path}");
            assert!(policy.check(path, &peer(1000, &[])).is_err(), "a stranger calls {path}");
            assert!(policy.check(path, &peer(0, &[])).is_ok(), "root calls {path}");
        }
    }

    #[test]
    fn callers_in_a_pod_or_another_namespace_are_refused_even_as_root() {
        let policy = policy();
        for outside in [
            Outside::Pod { pid: 7, cgroup: "/kubepods/pod1/c1".into() },
            Outside::PidNamespace,
            Outside::UserNamespace(7),
        ] {
            for uid in [0, uid_of("pod-sync"), 1000] {
                let caller = PeerIdentity { outside: Some(outside.clone()), ..peer(uid, &[700]) };
                assert!(policy.may_be(&caller).is_empty());
                for (path, _) in keelson_proto::CALLERS {
                    let status = policy.check(path, &caller).unwrap_err();
                    assert_eq!(status.code(), Code::PermissionDenied);
                    assert!(status.message().contains(&outside.to_string()), "{status:?}");
                }
            }
        }
    }

    #[test]
    fn a_uid_maps_to_its_service_and_root_to_each_without_a_user() {
        let mut config = Config::default();
        for name in ServiceName::ALL.into_iter().filter(|name| !name.needs_root()) {
            config.users.uids.insert(name.to_string(), uid_of(name.as_str()));
        }
        let policy = CallerPolicy::new(&config);
        assert_eq!(policy.may_be(&peer(uid_of("node-api"), &[])), ["node-api"]);
        let mut root = policy.may_be(&peer(0, &[]));
        root.sort_unstable();
        assert_eq!(root, ["init", "resource-manager", "runtime-shim", "volume-manager"]);
        assert!(policy.may_be(&peer(1000, &[700])).is_empty());
        let shared = CallerPolicy::new(&Config::default());
        let own = rustix::process::geteuid().as_raw();
        assert_eq!(shared.may_be(&peer(own, &[])).len(), ServiceName::ALL.len());
        assert!(shared.may_be(&peer(own + 1, &[])).is_empty());
    }

    #[test]
    fn cri_is_for_root_and_pod_sync() {
        let policy = policy();
        let path = "/runtime.v1.RuntimeService/RunPodSandbox";
        assert!(policy.check(path, &peer(uid_of("pod-sync"), &[])).is_ok());
        assert!(policy.check(path, &peer(uid_of("node-api"), &[])).is_err());
        assert!(policy.check(path, &peer(1000, &[700])).is_err());
    }

    #[test]
    fn node_status_may_call_only_list_images_of_cri() {
        let policy = policy();
        let may = |service: &str, path: &str| policy.check(path, &peer(uid_of(service), &[])).is_ok();
        let list = "/runtime.v1.ImageService/ListImages";
        for service in ServiceName::ALL.map(ServiceName::as_str) {
            assert_eq!(may(service, list), ["pod-sync", "node-status"].contains(&service), "{service}");
        }
        for method in ["ImageService/ImageStatus", "ImageService/RemoveImage", "RuntimeService/Version"] {
            assert!(!may("node-status", &format!("/runtime.v1.{method}")), "{method}");
        }
    }

    #[test]
    fn exec_attach_and_port_forward_urls_are_for_root_only() {
        let policy = policy();
        let path = |method: &str| format!("/runtime.v1.RuntimeService/{method}");
        assert!(policy.check(&path("ExecSync"), &peer(uid_of("pod-sync"), &[])).is_ok());
        for method in ["Exec", "Attach", "PortForward"] {
            assert!(policy.check(&path(method), &peer(0, &[])).is_ok(), "{method}");
            for service in ServiceName::ALL {
                let caller = peer(uid_of(service.as_str()), &[700]);
                assert!(policy.check(&path(method), &caller).is_err(), "{service} calls {method}");
            }
            assert!(policy.check(&path(method), &peer(1000, &[700])).is_err(), "an operator calls {method}");
        }
    }

    #[test]
    fn a_method_without_listed_callers_is_for_root_only() {
        let status = policy().check("/other.v1.Api/Call", &peer(uid_of("init"), &[700])).unwrap_err();
        assert_eq!(status.code(), Code::PermissionDenied);
    }
}
