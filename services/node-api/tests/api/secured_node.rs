//! A node with TLS, and clients with certificates.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body_util::{BodyExt as _, Empty, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::SendRequest;
use hyper_util::rt::TokioIo;
use keelson_config::{Api, ApiTls, ServiceName};
use keelson_node_api::connection_limits::{ConnectionLimiter, ConnectionLimits};
use keelson_node_api::{Access, RequestMetrics, Serving, api_router, listen};
use keelson_proto::keelson::runtime::v1 as rt;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::{TcpListener, TcpSocket};
use tokio_rustls::TlsConnector;

use crate::fake::{World, soon};

/// An authority for client certificates.
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

/// A certificate and its key.
pub type Pair = (CertificateDer<'static>, PrivateKeyDer<'static>);

impl Authority {
    pub fn new(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    pub fn sign(&self, name: &str) -> Pair {
        self.sign_with_groups(name, &[])
    }

    pub fn sign_with_groups(&self, name: &str, groups: &[&str]) -> Pair {
        self.sign_with(name, groups, |_| {})
    }

    /// Signs a certificate whose parameters `change` has changed.
    pub fn sign_with(
        &self,
        name: &str,
        groups: &[&str],
        change: impl FnOnce(&mut CertificateParams),
    ) -> Pair {
        let mut params = CertificateParams::default();
        change(&mut params);
        for group in groups {
            params.distinguished_name.push(DnType::OrganizationName, *group);
        }
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        (certificate.der().clone(), PrivateKeyDer::try_from(key.serialize_der()).unwrap())
    }
}

/// A node with one authority for client certificates.
pub struct Secured {
    pub world: World,
    pub clients: Authority,
    pub address: SocketAddr,
    /// The serving certificate, and the authority that signed it.
    pub serving_chain: Vec<CertificateDer<'static>>,
    _files: tempfile::TempDir,
}

impl Secured {
    pub async fn start(anonymous: bool) -> Self {
        Self::start_with(|api| api.tls.as_mut().unwrap().anonymous = anonymous).await
    }

    /// The same with other settings.
    pub async fn start_with(change: impl FnOnce(&mut Api)) -> Self {
        Self::start_within(ConnectionLimits::for_this_process(), change).await
    }

    /// The same with these connection limits.
    pub async fn start_within(limits: ConnectionLimits, change: impl FnOnce(&mut Api)) -> Self {
        let (mut world, files, clients) =
            (World::start().await, tempfile::tempdir().unwrap(), Authority::new("clients"));
        let ca = files.path().join("ca.pem");
        std::fs::write(&ca, clients.0.pem()).unwrap();
        let mut config = (*world.ctx.config).clone();
        config.api.tls = Some(ApiTls::with_client_ca(ca));
        change(&mut config.api);
        config.paths.state_dir = files.path().join("state");
        for folder in
            [config.paths.state(ServiceName::NodeApi), config.paths.socket_dir(ServiceName::NodeApi)]
        {
            std::fs::create_dir_all(folder).unwrap();
        }
        let published = config.paths.serving_certificate();
        let tls = config.api.tls.clone();
        world.ctx.config = config.into();
        let serving = Serving::start(&world.ctx, tls.as_ref().unwrap());
        let access = Access::new(&world.ctx, Some(&serving), tls.as_ref());
        let requests = RequestMetrics::register(&world.ctx.metrics);
        let router = api_router(&world.ctx, &world.slis, &requests, access);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let ctx = world.ctx.clone();
        tokio::spawn(async move {
            let handle = ctx.progress.register("test");
            let limiter = ConnectionLimiter::new("test port", limits);
            listen::serve(&ctx, &handle, listener, router, Some(serving), &limiter).await;
        });
        let serving_chain =
            CertificateDer::pem_file_iter(published).unwrap().collect::<Result<_, _>>().unwrap();
        Self { world, clients, address, serving_chain, _files: files }
    }

    /// Connects a client that trusts the authority of the node and expects the server name `name`.
    pub async fn connect(
        &self,
        name: &str,
        pair: Option<Pair>,
    ) -> std::io::Result<SendRequest<Empty<Bytes>>> {
        self.connect_from(Ipv4Addr::LOCALHOST, name, pair).await
    }

    /// The same from another client address.
    pub async fn connect_from(
        &self,
        from: Ipv4Addr,
        name: &str,
        pair: Option<Pair>,
    ) -> std::io::Result<SendRequest<Empty<Bytes>>> {
        self.connect_sending(from, name, pair).await
    }

    /// The same with requests that have another kind of body.
    async fn connect_sending<B>(
        &self,
        from: Ipv4Addr,
        name: &str,
        pair: Option<Pair>,
    ) -> std::io::Result<SendRequest<B>>
    where
        B: hyper::body::Body<Data = Bytes, Error = Infallible> + Send + Unpin + 'static,
    {
        let mut roots = RootCertStore::empty();
        roots.add(self.serving_chain[1].clone()).unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        let config = match pair {
            Some((certificate, key)) => {
                // The client does not check its certificate, so that the node has to.
                let key = ring::default_provider().key_provider.load_private_key(key).unwrap();
                let certified_key = CertifiedKey::new(vec![certificate], key);
                config.with_client_cert_resolver(Arc::new(SingleCertAndKey::from(certified_key)))
            }
            None => config.with_no_client_auth(),
        };
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((from, 0).into()).unwrap();
        let stream = socket.connect(self.address).await.unwrap();
        let name = ServerName::try_from(name.to_owned()).unwrap();
        let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
        let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection.with_upgrades());
        Ok(sender)
    }

    /// Sends a request on a connection of its own, with a client certificate.
    pub async fn request(
        &self,
        pair: Option<Pair>,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
    ) -> Response<Incoming> {
        self.request_from(Ipv4Addr::LOCALHOST, pair, method, path, headers).await
    }

    /// The same from another client address.
    pub async fn request_from(
        &self,
        from: Ipv4Addr,
        pair: Option<Pair>,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
    ) -> Response<Incoming> {
        let mut sender = self.connect_from(from, "127.0.0.1", pair).await.unwrap();
        let request = Request::builder().method(method).uri(path).header("host", "node");
        let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        soon(sender.send_request(request.body(Empty::new()).unwrap())).await.unwrap()
    }

    /// Sends a `PUT` request with a body as the user `jane`: the status and text of the response.
    pub async fn put_as_jane(&self, path: &str, body: impl Into<Bytes>) -> (u16, String) {
        let pair = Some(self.clients.sign("jane"));
        let mut sender =
            self.connect_sending::<Full<Bytes>>(Ipv4Addr::LOCALHOST, "127.0.0.1", pair).await.unwrap();
        let request = Request::builder().method("PUT").uri(path).header("host", "node");
        let request = request.body(Full::new(body.into())).unwrap();
        let (head, body) = soon(sender.send_request(request)).await.unwrap().into_parts();
        let text = soon(body.collect()).await.unwrap().to_bytes();
        (head.status.as_u16(), String::from_utf8(text.to_vec()).unwrap())
    }

    pub async fn get(&self, pair: Option<Pair>, path: &str) -> u16 {
        self.request(pair, "GET", path, &[]).await.status().as_u16()
    }

    /// Sends a request as the user `jane`: the status, headers and text of the response.
    pub async fn request_as_jane(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
    ) -> (u16, HeaderMap, String) {
        let (head, body) =
            self.request(Some(self.clients.sign("jane")), method, path, headers).await.into_parts();
        let text = soon(body.collect()).await.unwrap().to_bytes();
        (head.status.as_u16(), head.headers, String::from_utf8(text.to_vec()).unwrap())
    }
}

/// The head of the runtime's response to a stream request.
pub fn head(status: u32, headers: &[(&str, &str)]) -> rt::StreamHead {
    let headers = headers
        .iter()
        .map(|(name, value)| rt::HttpHeader { name: (*name).into(), value: (*value).into() })
        .collect();
    rt::StreamHead { status, headers }
}
