//! node-api: serves the kubelet API.
//!
//! It keeps no state: other services answer each request, and their responses are forwarded as they arrive. If a service does not
//! answer, the response is 503 with its name. With TLS the kubelet API authenticates clients by certificates and tokens
//! ([`access`]); without, it listens on loopback only and refuses all ways into containers.
//!
//! | port | path | response |
//! |---|---|---|
//! | kubelet API | `/healthz`, `/healthz/{ping,log,syncloop}` | [`health`] |
//! | | `/pods` | [`pods`]: a PodList, streamed from pod-sync |
//! | | `/containerLogs/{namespace}/{pod}/{container}` | [`logs`]: streamed from runtime-shim |
//! | | `/metrics` | [`metrics`]: the metrics of all services, merged, and those of claims from [`volume_statistics`] |
//! | | `/metrics/resource`, `/metrics/cadvisor`, `/stats/summary` | usage statistics from resource-manager; claims of volumes from volume-manager |
//! | | `/metrics/slis` | [`slis`]: results of the checks of `/healthz` |
//! | | `/runningpods/` | a PodList of the running pods, from runtime-shim |
//! | | `/configz` | the KubeletConfiguration in effect, from the file that init writes |
//! | | `/statusz`, `/flagz` | [`statusz`], [`flagz`]: version and uptime of this process, the flags of init |
//! | | `/logs/…` | [`node_logs`]: files below `/var/log` and the journal, from runtime-shim |
//! | | `/checkpoint/…` | [`checkpoint`]: an archive of a container, written by the runtime |
//! | | `/debug/flags/v` | [`debug_flags`]: the verbosity of the logs of all services |
//! | | `/exec/…`, `/attach/…`, `/portForward/…`, `/run/…` | [`streams`]: streams between client and runtime |
//! | read-only | `/healthz…`, `/metrics…`, `/pods`, `/stats/summary` | the same; debugging paths are [`disabled`] |
//! | health | `/healthz`, `/healthz/ping` | whether this process is running |
//!
//! Settings disable debugging paths ([`disabled`]). [`request_metrics`] counts the requests of the kubelet API. On its socket the
//! service has the common RPCs of all services and none of its own.

pub mod access;
mod api_error;
mod cadvisor;
mod checkpoint;
mod configz;
pub mod connection_limits;
mod debug_flags;
mod disabled;
mod flagz;
mod gzip;
pub mod health;
pub mod listen;
mod log_target;
pub mod logs;
pub mod metrics;
mod metrics_text;
mod node_logs;
pub mod pods;
mod refusal_log;
mod request_metrics;
mod resource_metrics;
mod running_pods;
mod self_signed;
pub mod serving;
mod slis;
mod statistics;
mod statusz;
mod streams;
mod summary;
mod tls_parameters;
mod unauthorized_slots;
mod volume_statistics;
mod zpages;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use axum::Router;
use axum::http::StatusCode;
use axum::middleware::from_fn_with_state;
use axum::routing::get;
use jiff::Timestamp;
use keelson_config::{Config, ServiceName};
use keelson_service_kit::{CancellationToken, Context, Peer};
use tonic::service::Routes;

pub use access::Access;
pub use request_metrics::RequestMetrics;
pub use serving::Serving;
pub use slis::Slis;

use request_metrics::{ServerMetrics, WebSocketMetrics};

/// Why the listen addresses of the configuration are invalid.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum SettingError {
    /// The value is not an IP address.
    #[error("{field} is {value:?}, which is not an IP address such as 127.0.0.1")]
    NotAnAddress {
        /// The setting.
        field: &'static str,
        /// Its value.
        value: String,
    },
    /// The kubelet API would be open to the network without authentication.
    #[error(
        "api.address is {address}, but without TLS the kubelet API cannot authenticate clients and may only listen on a loopback \
         address; set it to 127.0.0.1 or ::1, set authentication.x509.clientCAFile or tlsCertFile, or disable the API with \
         port 0"
    )]
    NotLoopback {
        /// The address.
        address: IpAddr,
    },
    /// Two listeners have the same address.
    #[error(
        "two of the kubelet API, its read-only port and the health port have the address {address}; configure different ports"
    )]
    SamePort {
        /// The common address.
        address: SocketAddr,
    },
}

/// The listen addresses; `None` disables a listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Addresses {
    /// The kubelet API.
    pub api: Option<SocketAddr>,
    /// The read-only port of the kubelet API, without authentication.
    pub read_only: Option<SocketAddr>,
    /// The health port.
    pub health: Option<SocketAddr>,
}

impl Addresses {
    /// The addresses of the configuration; port 0 disables a listener.
    ///
    /// # Errors
    /// An address is invalid or used twice, or the kubelet API would be open to the network without TLS.
    pub fn from_config(config: &Config) -> Result<Self, SettingError> {
        let socket = |field, address: &str, port: u16| {
            if port == 0 {
                return Ok(None);
            }
            let ip: IpAddr = address
                .parse()
                .map_err(|_| SettingError::NotAnAddress { field, value: address.to_owned() })?;
            Ok(Some(SocketAddr::new(ip, port)))
        };
        let api = socket("api.address", &config.api.address, config.api.port)?;
        let read_only = socket("api.address", &config.api.address, config.api.read_only_port)?;
        let health = socket("api.healthzAddress", &config.api.healthz_address, config.api.healthz_port)?;
        let is_open = |address: &SocketAddr| !address.ip().is_loopback() && config.api.tls.is_none();
        if let Some(open) = [api, read_only].into_iter().flatten().find(is_open) {
            return Err(SettingError::NotLoopback { address: open.ip() });
        }
        for (one, other) in [(api, read_only), (api, health), (read_only, health)] {
            if let Some(address) = one.filter(|_| one == other) {
                return Err(SettingError::SamePort { address });
            }
        }
        Ok(Self { api, read_only, health })
    }
}

/// The state shared by all handlers.
#[derive(Clone)]
pub(crate) struct App {
    ctx: Context,
    peers: Arc<[(ServiceName, Peer)]>,
    slis: Slis,
    websockets: WebSocketMetrics,
    started: Timestamp,
}

impl App {
    fn new(ctx: &Context, slis: &Slis, websockets: WebSocketMetrics) -> Self {
        let peers = ctx.service.callees().iter().map(|name| (*name, ctx.peer(*name))).collect();
        Self { ctx: ctx.clone(), peers, slis: slis.clone(), websockets, started: Timestamp::now() }
    }

    /// A service that this one may call; all requests share the channel to it.
    pub(crate) fn peer(&self, name: ServiceName) -> Peer {
        let found = self.peers.iter().find(|(service, _)| *service == name);
        found.map_or_else(|| self.ctx.peer(name), |(_, peer)| peer.clone())
    }

    /// The counter of streams over WebSocket.
    pub(crate) fn websockets(&self) -> &WebSocketMetrics {
        &self.websockets
    }

    /// Cancelled when the service shuts down.
    pub(crate) fn shutdown(&self) -> CancellationToken {
        self.ctx.shutdown.clone()
    }
}

/// Builds the service and starts its listeners.
///
/// # Errors
/// See [`Addresses::from_config`].
pub async fn build(ctx: Context) -> anyhow::Result<Routes> {
    let addresses = Addresses::from_config(&ctx.config)?;
    let slis = Slis::default();
    statusz::register_build(&ctx.metrics, &ctx.config.own_processes.kubelet_version);
    statusz::register_gates(&ctx.metrics, &ctx.config.paths.config_file());
    let requests = RequestMetrics::register(&ctx.metrics);
    if let Some(address) = addresses.api {
        let tls = ctx.config.api.tls.clone();
        let serving = tls.as_ref().map(|tls| Serving::start(&ctx, tls));
        let access = Access::new(&ctx, serving.as_ref(), tls.as_ref());
        let router = api_router(&ctx, &slis, &requests, access);
        ctx.spawn("kubelet API", listen::run(ctx.clone(), "kubelet API", address, router, serving));
    }
    if let Some(address) = addresses.read_only {
        let router = read_only_router(&ctx, &slis, &requests);
        ctx.spawn("read-only port", listen::run(ctx.clone(), "read-only port", address, router, None));
    }
    if let Some(address) = addresses.health {
        let router = health_router(&slis);
        ctx.spawn("health port", listen::run(ctx.clone(), "health port", address, router, None));
    }
    Ok(Routes::default())
}

/// The paths of both ports of the kubelet API.
fn common_paths() -> Router<App> {
    Router::new()
        .route("/healthz", get(health::all))
        .route("/healthz/{check}", get(health::one))
        // A kubelet also accepts some of these with a trailing slash.
        .route("/pods", get(pods::list))
        .route("/pods/", get(pods::list))
        .route("/metrics", gzip::on_request(get(metrics::all)))
        .route("/metrics/probes", gzip::on_request(get(metrics::probes)))
        .route("/metrics/cadvisor", gzip::on_request(get(cadvisor::get)))
        .route("/metrics/resource", gzip::on_request(get(resource_metrics::get)))
        .route("/metrics/slis", gzip::on_request(get(slis::get)).delete(slis::reset))
        .route("/stats/summary", get(summary::get).post(summary::get))
        .route("/stats/summary/", get(summary::get).post(summary::get))
}

/// The debugging paths: logs, ways into containers, running pods.
fn debugging_paths() -> Router<App> {
    Router::new()
        .route("/containerLogs/{namespace}/{pod}/{container}", get(logs::read))
        .route("/runningpods", get(running_pods::list))
        .route("/runningpods/", get(running_pods::list))
        .merge(streams::router())
}

/// All paths of the kubelet API, protected by `access`. This router and [`health_router`] record the checks of `/healthz` in
/// `slis`.
pub fn api_router(ctx: &Context, slis: &Slis, requests: &RequestMetrics, access: Access) -> Router {
    let handlers = ctx.config.api.handlers;
    let debugging = if handlers.debugging {
        debugging_paths()
            .merge(node_logs::router(handlers))
            .merge(debug_flags::router(handlers))
            .merge(disabled::individual_paths(handlers))
    } else {
        disabled::all_debugging_paths()
    };
    let paths = Router::new()
        .route("/configz", get(configz::get))
        .route("/configz/", get(configz::get))
        .route("/statusz", get(statusz::get))
        .route("/flagz", get(flagz::get))
        .merge(checkpoint::router(handlers))
        .merge(debugging);
    with_middleware(paths, ctx, slis, requests.for_server("readwrite"), access)
}

/// The paths of the read-only port, without authentication and without debugging paths.
pub fn read_only_router(ctx: &Context, slis: &Slis, requests: &RequestMetrics) -> Router {
    with_middleware(
        disabled::all_debugging_paths(),
        ctx,
        slis,
        requests.for_server("readonly"),
        Access::Unauthenticated,
    )
}

fn with_middleware(
    paths: Router<App>,
    ctx: &Context,
    slis: &Slis,
    requests: ServerMetrics,
    access: Access,
) -> Router {
    common_paths()
        .merge(paths)
        .method_not_allowed_fallback(method_not_allowed)
        .fallback(not_found)
        .with_state(App::new(ctx, slis, requests.websockets()))
        .layer(from_fn_with_state(access, access::guard))
        .layer(from_fn_with_state(requests, request_metrics::count))
}

/// The paths of the health port: whether this process is running. The kubelet API reports the health of the node.
pub fn health_router(slis: &Slis) -> Router {
    Router::new()
        .route("/healthz", get(health::ping_all))
        .route("/healthz/ping", get(health::ping))
        .method_not_allowed_fallback(method_not_allowed)
        .fallback(not_found)
        .with_state(slis.clone())
}

async fn not_found() -> (StatusCode, &'static str) {
    (StatusCode::NOT_FOUND, "404 page not found\n")
}

async fn method_not_allowed() -> (StatusCode, &'static str) {
    (StatusCode::METHOD_NOT_ALLOWED, "405: Method Not Allowed")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(address: &str, port: u16, healthz_port: u16) -> Config {
        let mut config = Config::default();
        config.api.address = address.into();
        config.api.port = port;
        config.api.healthz_port = healthz_port;
        config
    }

    #[test]
    fn without_tls_the_kubelet_api_accepts_only_loopback_addresses() {
        for (address, is_accepted) in
            [("127.0.0.1", true), ("127.1.2.3", true), ("::1", true), ("0.0.0.0", false), ("10.0.0.1", false)]
        {
            assert_eq!(Addresses::from_config(&config(address, 10250, 0)).is_ok(), is_accepted, "{address}");
        }
        let error = Addresses::from_config(&config("0.0.0.0", 10250, 0)).unwrap_err();
        assert!(error.to_string().contains("api.address is 0.0.0.0"));
    }

    #[test]
    fn port_zero_disables_a_listener() {
        let off = Addresses { api: None, read_only: None, health: None };
        assert_eq!(Addresses::from_config(&config("0.0.0.0", 0, 0)).unwrap(), off);
    }

    #[test]
    fn read_only_port_needs_loopback_without_tls_and_its_own_port() {
        let addresses = |address: &str, port: u16, healthz: u16| {
            let mut config = config(address, 10250, healthz);
            config.api.read_only_port = port;
            Addresses::from_config(&config)
        };
        let read_only = addresses("127.0.0.1", 10255, 10248).unwrap().read_only;
        assert_eq!(read_only, Some("127.0.0.1:10255".parse().unwrap()));
        for refused in [addresses("127.0.0.1", 10250, 0), addresses("127.0.0.1", 10248, 10248)] {
            assert!(matches!(refused, Err(SettingError::SamePort { .. })), "{refused:?}");
        }
        let mut open = config("0.0.0.0", 0, 0);
        open.api.read_only_port = 10255;
        assert!(matches!(Addresses::from_config(&open), Err(SettingError::NotLoopback { .. })));
        open.api.tls = Some(keelson_config::ApiTls::with_client_ca("/ca".into()));
        assert!(
            Addresses::from_config(&open).is_ok(),
            "with TLS the read-only port may be open, as in a kubelet"
        );
    }

    #[test]
    fn host_names_and_duplicate_ports_are_configuration_errors() {
        let error = Addresses::from_config(&config("localhost", 1, 2)).unwrap_err();
        assert!(error.to_string().contains("\"localhost\""));
        let error = Addresses::from_config(&config("127.0.0.1", 7, 7)).unwrap_err();
        assert!(error.to_string().contains("127.0.0.1:7"));
    }
}
