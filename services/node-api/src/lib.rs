//! node-api: answers the network.
//!
//! It holds nothing: every request is a question to a neighbour, and the answer passes through as it comes. A
//! neighbour that does not answer gives 503 with its name. With TLS the kubelet API asks who it is, by certificates and tokens
//! ([`access`]); without, it listens on loopback only and lets nobody into a container.
//!
//! | port | path | answer |
//! |---|---|---|
//! | kubelet API | `/healthz`, `/healthz/{ping,log,syncloop}` | [`health`] |
//! | | `/pods` | [`pods`]: a PodList, streamed from pod-sync |
//! | | `/containerLogs/{namespace}/{pod}/{container}` | [`logs`]: streamed from runtime-shim |
//! | | `/metrics` | [`metrics`]: those of every service, merged |
//! | | `/metrics/resource`, `/metrics/cadvisor`, `/stats/summary` | CPU, memory and the rest, as resource-manager reads them |
//! | | `/metrics/slis` | [`slis`]: how the checks of `/healthz` went |
//! | | `/runningpods/` | a PodList of what the runtime runs, from runtime-shim |
//! | | `/configz` | the KubeletConfiguration in force, from the file that init has written |
//! | | `/statusz`, `/flagz` | [`statusz`], [`flagz`]: version and age of this process, the flags that init has left |
//! | | `/exec/…`, `/attach/…`, `/portForward/…`, `/run/…` | [`streams`]: bytes between who asks and the runtime, and WebSockets that end here |
//! | read-only | `/healthz…`, `/metrics…`, `/pods`, `/stats/summary` | the same; those for debugging are [`disabled`] |
//! | health | `/healthz`, `/healthz/ping` | whether this process answers |
//!
//! Settings turn paths for debugging off ([`disabled`]). Requests of the kubelet API are counted ([`requests`]). On its socket it has the RPCs of every service and none of its own.

pub mod access;
mod cadvisor;
mod configz;
mod disabled;
mod failure;
mod flagz;
mod gzip;
pub mod health;
pub mod listen;
mod log_target;
pub mod logs;
pub mod metrics;
mod own_pair;
pub mod places;
pub mod pods;
mod refusals;
mod requests;
mod resource_metrics;
mod running_pods;
pub mod serving;
mod slis;
mod spoken;
mod statistics;
mod statusz;
mod strangers;
mod streams;
mod summary;
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
pub use requests::Requests;
pub use serving::Serving;
pub use slis::Slis;

use requests::{OfServer, WebSockets};

/// A setting that would make the service unsafe or deaf.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum SettingError {
    /// Not an IP address.
    #[error("{field} is {value:?}, which is not an IP address; 127.0.0.1 is one")]
    NotAnAddress {
        /// The setting.
        field: &'static str,
        /// Its value.
        value: String,
    },
    /// The API would be open to the network.
    #[error(
        "api.address is {address}, but without TLS nobody could tell who asks, so the kubelet API may only listen on a loopback \
         address; set it to 127.0.0.1 or ::1, set authentication.x509.clientCAFile or tlsCertFile, or turn the API off with \
         port 0"
    )]
    NotLoopback {
        /// The address.
        address: IpAddr,
    },
    /// Two listeners want one port.
    #[error(
        "two of the kubelet API, its read-only port and the health port are {address}; give them different ports"
    )]
    SamePort {
        /// The address of both.
        address: SocketAddr,
    },
}

/// Where to listen; `None` is off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Addresses {
    /// The kubelet API.
    pub api: Option<SocketAddr>,
    /// A part of it, for everybody who reaches it.
    pub read_only: Option<SocketAddr>,
    /// The health port.
    pub health: Option<SocketAddr>,
}

impl Addresses {
    /// The addresses of the configuration; port 0 is off.
    ///
    /// # Errors
    /// An address is none, or the kubelet API would be open to the network without TLS.
    pub fn of(config: &Config) -> Result<Self, SettingError> {
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

/// The neighbours, for the handlers.
#[derive(Clone)]
pub(crate) struct App {
    ctx: Context,
    peers: Arc<[(ServiceName, Peer)]>,
    slis: Slis,
    websockets: WebSockets,
    started: Timestamp,
}

impl App {
    fn new(ctx: &Context, slis: &Slis, websockets: WebSockets) -> Self {
        let peers = ctx.service.callees().iter().map(|name| (*name, ctx.peer(*name))).collect();
        Self { ctx: ctx.clone(), peers, slis: slis.clone(), websockets, started: Timestamp::now() }
    }

    /// A neighbour that this service may call; the channel to it is shared by all requests.
    pub(crate) fn peer(&self, name: ServiceName) -> Peer {
        let known = self.peers.iter().find(|(service, _)| *service == name);
        known.map_or_else(|| self.ctx.peer(name), |(_, peer)| peer.clone())
    }

    /// Counts streams over WebSocket.
    pub(crate) fn websockets(&self) -> &WebSockets {
        &self.websockets
    }

    /// Cancelled when the service ends.
    pub(crate) fn shutdown(&self) -> CancellationToken {
        self.ctx.shutdown.clone()
    }
}

/// Builds the service and starts its listeners.
///
/// # Errors
/// A setting that [`Addresses::of`] refuses.
pub async fn build(ctx: Context) -> anyhow::Result<Routes> {
    let addresses = Addresses::of(&ctx.config)?;
    let slis = Slis::default();
    statusz::register_build(&ctx.metrics, &ctx.config.own_processes.kubelet_version);
    statusz::register_gates(&ctx.metrics, &ctx.config.paths.config_file());
    let requests = Requests::register(&ctx.metrics);
    if let Some(address) = addresses.api {
        let tls = ctx.config.api.tls.clone();
        let serving = tls.as_ref().map(|tls| Serving::start(&ctx, tls));
        let access = Access::of(&ctx, serving.as_ref(), tls.as_ref());
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

/// What both ports of the kubelet API answer.
fn open_paths() -> Router<App> {
    Router::new()
        .route("/healthz", get(health::all))
        .route("/healthz/{check}", get(health::one))
        // A kubelet takes these with a slash at the end, too.
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

/// What is for debugging: what pods say, the ways into them, and what runs.
fn debugging_paths() -> Router<App> {
    Router::new()
        .route("/containerLogs/{namespace}/{pod}/{container}", get(logs::read))
        .route("/runningpods", get(running_pods::list))
        .route("/runningpods/", get(running_pods::list))
        .merge(streams::router())
}

/// Everything that the kubelet API answers, to those whom `access` lets in. `slis` are filled here and by
/// [`health_router`].
pub fn api_router(ctx: &Context, slis: &Slis, requests: &Requests, access: Access) -> Router {
    let handlers = ctx.config.api.handlers;
    let debugging = if handlers.debugging {
        debugging_paths().merge(disabled::of(handlers))
    } else {
        disabled::debugging()
    };
    let own = Router::new()
        .route("/configz", get(configz::get))
        .route("/configz/", get(configz::get))
        .route("/statusz", get(statusz::get))
        .route("/flagz", get(flagz::get))
        .merge(debugging);
    counted(own, ctx, slis, requests.of_server("readwrite"), access)
}

/// What the read-only port answers, to whoever reaches it: nothing of what pods say.
pub fn read_only_router(ctx: &Context, slis: &Slis, requests: &Requests) -> Router {
    counted(disabled::debugging(), ctx, slis, requests.of_server("readonly"), Access::Unasked)
}

fn counted(own: Router<App>, ctx: &Context, slis: &Slis, requests: OfServer, access: Access) -> Router {
    open_paths()
        .merge(own)
        .method_not_allowed_fallback(method_not_allowed)
        .fallback(not_found)
        .with_state(App::new(ctx, slis, requests.websockets()))
        .layer(from_fn_with_state(access, access::guard))
        .layer(from_fn_with_state(requests, requests::count))
}

/// What the health port answers: that this process runs. Whether the node works is the kubelet API's to say.
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
    fn only_loopback_is_taken_for_the_kubelet_api() {
        for (address, taken) in
            [("127.0.0.1", true), ("127.1.2.3", true), ("::1", true), ("0.0.0.0", false), ("10.0.0.1", false)]
        {
            assert_eq!(Addresses::of(&config(address, 10250, 0)).is_ok(), taken, "{address}");
        }
        let error = Addresses::of(&config("0.0.0.0", 10250, 0)).unwrap_err();
        assert!(error.to_string().contains("api.address is 0.0.0.0"));
    }

    #[test]
    fn port_zero_is_off_whatever_the_address() {
        let off = Addresses { api: None, read_only: None, health: None };
        assert_eq!(Addresses::of(&config("0.0.0.0", 0, 0)).unwrap(), off);
    }

    #[test]
    fn the_read_only_port_is_on_loopback_too_and_apart_from_the_others() {
        let with = |address: &str, port: u16, healthz: u16| {
            let mut config = config(address, 10250, healthz);
            config.api.read_only_port = port;
            Addresses::of(&config)
        };
        let taken = with("127.0.0.1", 10255, 10248).unwrap().read_only;
        assert_eq!(taken, Some("127.0.0.1:10255".parse().unwrap()));
        for refused in [with("127.0.0.1", 10250, 0), with("127.0.0.1", 10248, 10248)] {
            assert!(matches!(refused, Err(SettingError::SamePort { .. })), "{refused:?}");
        }
        let mut open = config("0.0.0.0", 0, 0);
        open.api.read_only_port = 10255;
        assert!(matches!(Addresses::of(&open), Err(SettingError::NotLoopback { .. })));
        open.api.tls = Some(keelson_config::ApiTls::with_client_ca("/ca".into()));
        assert!(Addresses::of(&open).is_ok(), "who asks for it has it, as of a kubelet");
    }

    #[test]
    fn a_name_is_no_address_and_one_port_is_not_enough_for_two() {
        let error = Addresses::of(&config("localhost", 1, 2)).unwrap_err();
        assert!(error.to_string().contains("\"localhost\""));
        let error = Addresses::of(&config("127.0.0.1", 7, 7)).unwrap_err();
        assert!(error.to_string().contains("127.0.0.1:7"));
    }
}
