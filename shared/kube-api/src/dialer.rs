//! Opens connections to the server of a kubeconfig.

use std::fmt;
use std::time::Duration;

use hyper_rustls::{FixedServerNameResolver, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use kube::client::{Body, ConfigExt as _};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use tower::ServiceBuilder;

use crate::metrics::{CountedService, RestMetrics, host_of};
use crate::proxy::{Environment, Way, proxy_of};
use crate::refusal::Refusals;

/// How long the server may take to accept a connection (node-and-api.md §5 has 30 s, which would use up a call).
const CONNECT: Duration = Duration::from_secs(10);
/// The interval of HTTP/2 keepalive pings on a silent connection.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(30);
/// The timeout of a keepalive ping.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(15);

/// Creates clients of one server. With HTTP/2 each has one connection; with HTTP/1.1 it opens connections per request.
pub(crate) struct Dialer {
    config: Config,
    connector: HttpsConnector<Way>,
    metrics: RestMetrics,
}

impl fmt::Debug for Dialer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dialer").field("server", &self.server()).finish_non_exhaustive()
    }
}

impl Dialer {
    /// Parses a kubeconfig; the error says what is invalid.
    pub(crate) async fn new(kubeconfig: &str, metrics: &RestMetrics) -> Result<Self, String> {
        let file = Kubeconfig::from_yaml(kubeconfig).map_err(|error| error.to_string())?;
        // The kubeconfig contains only the cluster of its current context.
        let named = file.clusters.iter().find_map(|cluster| cluster.cluster.as_ref()?.proxy_url.clone());
        let options = KubeConfigOptions::default();
        let config = Config::from_custom_kubeconfig(file, &options).await;
        let config = config.map_err(|error| error.to_string())?;
        let proxy = proxy_of(named.as_deref(), &Environment::of_this_process(), &config.cluster_url)?;
        let tls = config.rustls_client_config().map_err(|error| error.to_string())?;
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(Some(CONNECT));
        tcp.set_keepalive(Some(KEEPALIVE_INTERVAL));
        let way = Way::new(tcp, proxy, &tls);
        let mut builder = HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http();
        if let Some(name) = config.tls_server_name.clone() {
            let name = name.try_into().map_err(|_| "tls-server-name is no name of a server".to_owned())?;
            builder = builder.with_server_name_resolver(FixedServerNameResolver::new(name));
        }
        let connector = builder.enable_all_versions().wrap_connector(way);
        Ok(Self { config, connector, metrics: metrics.clone() })
    }

    /// The address of the server.
    pub(crate) fn server(&self) -> String {
        self.config.cluster_url.to_string().trim_end_matches('/').to_owned()
    }

    /// Its host and port, as in metrics.
    pub(crate) fn host(&self) -> String {
        host_of(&self.config.cluster_url)
    }

    /// Creates a client. It connects with its first request and reconnects when the connection is lost.
    pub(crate) fn client(&self) -> Result<Client, String> {
        let http = hyper_util::client::legacy::Client::builder(TokioExecutor::new())
            .timer(TokioTimer::new())
            .pool_timer(TokioTimer::new())
            .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
            .http2_keep_alive_timeout(KEEPALIVE_TIMEOUT)
            .build::<_, Body>(self.connector.clone());
        let auth = self.config.auth_layer().map_err(|error| error.to_string())?;
        let http = CountedService { inner: http, metrics: self.metrics.clone() };
        let service = ServiceBuilder::new()
            .layer(self.config.base_uri_layer())
            .option_layer(auth)
            .map_err(tower::BoxError::from)
            .service(http);
        Ok(Client::new(Refusals(service), self.config.default_namespace.clone()))
    }
}
