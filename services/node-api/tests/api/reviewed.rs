//! The kubelet API with token and access reviews by an API server.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use http_body_util::BodyExt as _;
use keelson_config::{Api, ServiceName};
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_proto::keelson::pod_config::v1::pod_config_server::{PodConfig, PodConfigServer};
use keelson_service_kit::CancellationToken;
use keelson_service_kit::server::{self, CallerPolicy, StackLayer};
use keelson_service_kit::status::error;
use pb::review_token_response::Result as ReviewResult;
use tokio_stream::Empty as NoStream;
use tonic::service::Routes;
use tonic::{Code, Request, Response, Status, Streaming};

use crate::fake::{World, soon};
use crate::secured_node::{Authority, Pair, Secured};

type Answer<T> = Result<Response<T>, Status>;

/// What the API server answers, and the reviews that it received.
#[derive(Default)]
struct Cluster {
    /// The user of each token.
    tokens: Mutex<HashMap<&'static str, &'static str>>,
    /// The error with which unknown tokens are rejected.
    token_error: Mutex<&'static str>,
    /// What is allowed: user, verb, subresource.
    allowed: Mutex<Vec<(&'static str, &'static str, &'static str)>>,
    /// Reviews fail as unavailable.
    down: Mutex<bool>,
    /// Reviews never get an answer.
    hangs: Mutex<bool>,
    token_reviews: Mutex<Vec<String>>,
    access_reviews: Mutex<Vec<pb::ReviewAccessRequest>>,
}

#[derive(Clone)]
struct Fake(Arc<Cluster>);

impl Fake {
    async fn wait_for_answer(&self) -> Result<(), Status> {
        if *self.0.hangs.lock().unwrap() {
            std::future::pending::<()>().await;
        }
        let unavailable = || error(Code::Unavailable, "CONTROL_PLANE_AWAY", "the API server does not answer");
        if *self.0.down.lock().unwrap() { Err(unavailable()) } else { Ok(()) }
    }
}

fn not_faked<T>() -> Answer<T> {
    Err(Status::unimplemented("not faked"))
}

#[tonic::async_trait]
impl PodConfig for Fake {
    type WatchPodsStream = NoStream<Result<pb::WatchPodsResponse, Status>>;
    type WatchNodeStream = NoStream<Result<pb::WatchNodeResponse, Status>>;
    type WatchObjectsStream = NoStream<Result<pb::WatchObjectsResponse, Status>>;

    async fn review_token(
        &self,
        request: Request<pb::ReviewTokenRequest>,
    ) -> Answer<pb::ReviewTokenResponse> {
        let token = request.into_inner().token;
        self.0.token_reviews.lock().unwrap().push(token.clone());
        self.wait_for_answer().await?;
        let known = self.0.tokens.lock().unwrap().get(token.as_str()).copied();
        let result = match known {
            Some(name) => {
                let extra = [("k".to_owned(), pb::ExtraValues { values: vec!["v".into()] })].into();
                ReviewResult::User(pb::User {
                    name: name.into(),
                    uid: "1".into(),
                    groups: vec!["g".into()],
                    extra,
                })
            }
            None => ReviewResult::Rejected((*self.0.token_error.lock().unwrap()).to_owned()),
        };
        Ok(Response::new(pb::ReviewTokenResponse { result: Some(result) }))
    }

    async fn review_access(
        &self,
        request: Request<pb::ReviewAccessRequest>,
    ) -> Answer<pb::ReviewAccessResponse> {
        let review = request.into_inner();
        self.0.access_reviews.lock().unwrap().push(review.clone());
        self.wait_for_answer().await?;
        let user = review.user.unwrap();
        let matches = |(name, verb, subresource): &(&str, &str, &str)| {
            *name == user.name && *verb == review.verb && *subresource == review.subresource
        };
        let allowed = self.0.allowed.lock().unwrap().iter().any(matches);
        Ok(Response::new(pb::ReviewAccessResponse { allowed, reason: String::new() }))
    }

    async fn watch_pods(&self, _: Request<pb::WatchPodsRequest>) -> Answer<Self::WatchPodsStream> {
        not_faked()
    }

    async fn watch_node(&self, _: Request<pb::WatchNodeRequest>) -> Answer<Self::WatchNodeStream> {
        not_faked()
    }

    async fn get_object(&self, _: Request<pb::GetObjectRequest>) -> Answer<pb::GetObjectResponse> {
        not_faked()
    }

    async fn watch_objects(
        &self,
        _: Request<Streaming<pb::WatchObjectsRequest>>,
    ) -> Answer<Self::WatchObjectsStream> {
        not_faked()
    }

    async fn apply_manifest(
        &self,
        _: Request<pb::ApplyManifestRequest>,
    ) -> Answer<pb::ApplyManifestResponse> {
        not_faked()
    }

    async fn delete_manifest(
        &self,
        _: Request<pb::DeleteManifestRequest>,
    ) -> Answer<pb::DeleteManifestResponse> {
        not_faked()
    }

    async fn get_service_env(
        &self,
        _: Request<pb::GetServiceEnvRequest>,
    ) -> Answer<pb::GetServiceEnvResponse> {
        not_faked()
    }

    async fn mutate(&self, _: Request<pb::MutateRequest>) -> Answer<pb::MutateResponse> {
        not_faked()
    }

    async fn create_token(&self, _: Request<pb::CreateTokenRequest>) -> Answer<pb::CreateTokenResponse> {
        not_faked()
    }

    async fn list_sources(&self, _: Request<pb::ListSourcesRequest>) -> Answer<pb::ListSourcesResponse> {
        not_faked()
    }
}

/// A node with token and access reviews, and the fake API server.
struct Reviewed {
    node: Secured,
    cluster: Arc<Cluster>,
    /// Stops pod-config.
    stop_pod_config: CancellationToken,
}

impl Reviewed {
    async fn start() -> Self {
        Self::start_with(|_| ()).await
    }

    async fn start_with(change: impl FnOnce(&mut Api)) -> Self {
        let node = Secured::start_with(|api| {
            let tls = api.tls.as_mut().unwrap();
            (tls.tokens, tls.reviews) = (true, true);
            change(api);
        })
        .await;
        let (cluster, stop_pod_config) = (Arc::<Cluster>::default(), CancellationToken::new());
        serve(&node.world, Fake(Arc::clone(&cluster)), stop_pod_config.clone()).await;
        Self { node, cluster, stop_pod_config }
    }

    fn allow(&self, allowed: &[(&'static str, &'static str, &'static str)]) {
        self.cluster.allowed.lock().unwrap().extend(allowed);
    }

    fn jane(&self) -> Option<Pair> {
        Some(self.node.clients.sign("jane"))
    }

    async fn get(&self, pair: Option<Pair>, path: &str, headers: &[(&str, &str)]) -> (u16, String) {
        let (head, body) = self.node.request(pair, "GET", path, headers).await.into_parts();
        let text = soon(body.collect()).await.unwrap().to_bytes();
        (head.status.as_u16(), String::from_utf8(text.to_vec()).unwrap())
    }

    /// Sends a `GET` request with a token.
    async fn get_with_token(&self, token: &str, path: &str) -> (u16, String) {
        self.get(None, path, &[("authorization", &format!("Bearer {token}"))]).await
    }

    /// The numbers of token and access reviews.
    fn review_counts(&self) -> (usize, usize) {
        (self.cluster.token_reviews.lock().unwrap().len(), self.cluster.access_reviews.lock().unwrap().len())
    }
}

async fn serve(world: &World, fake: Fake, stop: CancellationToken) {
    let ctx = world.context(ServiceName::PodConfig);
    std::fs::create_dir_all(ctx.config.paths.socket_dir(ServiceName::PodConfig)).unwrap();
    let routes = Routes::new(PodConfigServer::new(fake));
    let socket = ctx.config.paths.socket(ServiceName::PodConfig);
    let stack = StackLayer::new(CallerPolicy::new(&ctx.config), ctx.metrics.clone());
    let (is_bound, bound) = tokio::sync::oneshot::channel();
    tokio::spawn(async move {
        server::serve(&socket, routes, stack, stop, move || is_bound.send(()).unwrap()).await.unwrap();
    });
    soon(bound).await.unwrap();
}

const PING: &str = "/healthz/ping";

#[tokio::test]
async fn access_review_decides_and_the_403_names_its_attributes() {
    let node = Reviewed::start().await;
    node.allow(&[("jane", "get", "metrics"), ("jane", "get", "proxy")]);
    assert_eq!(node.get(node.jane(), "/metrics", &[]).await.0, 200);
    assert_eq!(node.get(node.jane(), PING, &[]).await.0, 200, "the second subresource is enough");
    assert_eq!(node.get(node.jane(), "/nothing", &[]).await.0, 404);
    let refused = node.get(node.jane(), "/stats/summary", &[]).await;
    let text = "Forbidden (user=jane, verb=get, resource=nodes, subresource(s)=[stats])";
    assert_eq!(refused, (403, text.to_owned()));
    let bob = node.node.clients.sign("bob");
    let text = "Forbidden (user=bob, verb=get, resource=nodes, subresource(s)=[healthz proxy])";
    assert_eq!(node.get(Some(bob), PING, &[]).await, (403, text.to_owned()));
    let first = node.cluster.access_reviews.lock().unwrap()[0].clone();
    let credential_id =
        &first.user.as_ref().unwrap().extra["authentication.kubernetes.io/credential-id"].values[0];
    assert!(
        credential_id.strip_prefix("X509SHA256=").is_some_and(|digest| digest.len() == 64),
        "{credential_id}"
    );
    let user = pb::User {
        name: "jane".into(),
        groups: vec!["system:authenticated".into()],
        extra: first.user.as_ref().unwrap().extra.clone(),
        ..pb::User::default()
    };
    let expected = pb::ReviewAccessRequest {
        user: Some(user),
        verb: "get".into(),
        resource: "nodes".into(),
        subresource: "metrics".into(),
        name: "n1".into(),
    };
    assert_eq!(first, expected);
}

#[tokio::test]
async fn system_masters_are_reviewed_like_every_user() {
    let node = Reviewed::start().await;
    let master = node.node.clients.sign_with_groups("root", &["system:masters"]);
    assert_eq!(node.get(Some(master), "/exec/default/web/c?command=a", &[]).await.0, 403);
    let groups = node.cluster.access_reviews.lock().unwrap()[0].user.clone().unwrap().groups;
    assert_eq!(groups, ["system:masters", "system:authenticated"]);
}

#[tokio::test]
async fn token_review_authenticates_and_a_wrong_token_is_not_anonymous() {
    let node = Reviewed::start_with(|api| api.tls.as_mut().unwrap().anonymous = true).await;
    node.cluster.tokens.lock().unwrap().insert("good", "scraper");
    node.allow(&[("scraper", "get", "metrics"), ("system:anonymous", "get", "healthz")]);
    assert_eq!(node.get_with_token("good", "/metrics").await.0, 200);
    assert_eq!(node.get_with_token("good", "/containerLogs/default/web/c").await.0, 403);
    let unauthorized = (401, "Unauthorized".to_owned());
    assert_eq!(node.get_with_token("bad", PING).await, unauthorized, "a wrong token is not anonymous");
    assert_eq!(node.get(Some(Authority::new("x").sign("jane")), PING, &[]).await, unauthorized);
    assert_eq!(node.get(None, PING, &[]).await.0, 200, "a client without credentials is anonymous");
    let text = "Forbidden (user=system:anonymous, verb=get, resource=nodes, subresource(s)=[metrics])";
    assert_eq!(node.get(None, "/metrics", &[]).await, (403, text.to_owned()));
    // A valid token counts even after an invalid certificate.
    let with_both =
        node.get(Some(Authority::new("x").sign("jane")), "/metrics", &[("authorization", "Bearer good")]);
    assert_eq!(with_both.await.0, 200);
    let user = node.cluster.access_reviews.lock().unwrap()[0].user.clone().unwrap();
    assert_eq!((user.uid.as_str(), user.groups.len(), user.extra["k"].values[0].as_str()), ("1", 2, "v"));
}

#[tokio::test]
async fn websocket_bearer_token_is_not_forwarded_to_the_runtime() {
    let node = Reviewed::start().await;
    node.cluster.tokens.lock().unwrap().insert("a.b?", "jane");
    node.node.world.running_pod("web");
    node.allow(&[("jane", "get", "proxy")]);
    let protocols = "v4.channel.k8s.io, base64url.bearer.authorization.k8s.io.YS5iPw";
    let headers =
        [("connection", "Upgrade"), ("upgrade", "websocket"), ("sec-websocket-protocol", protocols)];
    let path = "/exec/default/web/c?command=cat&output=1";
    let (code, _) = node.get(None, path, &headers).await;
    assert!(![401, 403, 404].contains(&code), "{code}");
    let start = node.node.world.shared.stream_starts.lock().unwrap().remove(0);
    let protocol = start.headers.iter().find(|header| header.name == "sec-websocket-protocol").unwrap();
    assert_eq!(protocol.value, "v4.channel.k8s.io");
}

#[tokio::test]
async fn made_up_tokens_do_not_block_reviews_of_other_addresses() {
    let node = Reviewed::start().await;
    node.allow(&[("scraper", "get", "metrics")]);
    node.cluster.tokens.lock().unwrap().insert("good", "scraper");
    *node.cluster.hangs.lock().unwrap() = true;
    let made_up: Vec<String> = (0..60).map(|n| format!("made-up-{n}")).collect();
    let mut flood: FuturesUnordered<_> =
        made_up.iter().map(|token| node.get_with_token(token, "/metrics")).collect();
    // One address gets 52 of the 64 reviews in progress; further ones fail at once.
    for _ in 52..60 {
        assert_eq!(soon(flood.next()).await.unwrap().0, 401);
    }
    let in_progress = async {
        tokio::select! {
            answer = flood.next() => panic!("{answer:?}"),
            () = until(|| node.review_counts().0 == 52) => {}
        }
    };
    soon(in_progress).await;
    *node.cluster.hangs.lock().unwrap() = false;
    let good = [("authorization", "Bearer good")];
    let from = async |address: [u8; 4]| {
        soon(node.node.request_from(address.into(), None, "GET", "/metrics", &good)).await.status().as_u16()
    };
    assert_eq!(from([127, 0, 0, 1]).await, 401);
    assert_eq!(node.review_counts().0, 52, "no review was sent");
    assert_eq!(from([127, 0, 0, 2]).await, 200);
    drop(flood);
}

/// Waits until another task has made the condition true.
async fn until(condition: impl Fn() -> bool) {
    while !condition() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn disabled_token_and_access_reviews_send_no_requests() {
    let only_certificates = |api: &mut Api| {
        let tls = api.tls.as_mut().unwrap();
        (tls.tokens, tls.reviews) = (false, false);
    };
    let node = Reviewed::start_with(only_certificates).await;
    node.cluster.tokens.lock().unwrap().insert("good", "scraper");
    assert_eq!(node.get_with_token("good", PING).await.0, 401);
    assert_eq!(node.get(node.jane(), PING, &[]).await.0, 200);
    assert_eq!(node.review_counts(), (0, 0));
}

#[tokio::test]
async fn reviews_are_cached_and_errors_are_not() {
    let node = Reviewed::start().await;
    node.cluster.tokens.lock().unwrap().insert("good", "scraper");
    node.allow(&[("scraper", "get", "metrics")]);
    for _ in 0..3 {
        assert_eq!(node.get_with_token("good", "/metrics").await.0, 200);
        assert_eq!(node.get_with_token("good", "/stats/summary").await.0, 403);
        assert_eq!(node.get_with_token("bad", "/metrics").await.0, 401);
    }
    assert_eq!(node.review_counts(), (2, 2));
    let long = format!("/metrics/{}", "x".repeat(10_000));
    for _ in 0..2 {
        assert_eq!(node.get_with_token("good", &long).await.0, 404);
    }
    assert_eq!(node.review_counts(), (2, 4), "reviews with such a long path are not cached");
    *node.cluster.token_error.lock().unwrap() = "the keys cannot be fetched";
    for _ in 0..2 {
        assert_eq!(node.get_with_token("other", "/metrics").await.0, 401);
    }
    assert_eq!(node.review_counts().0, 4);
}

#[tokio::test]
async fn cached_reviews_stay_in_effect_while_the_api_server_is_down() {
    let node = Reviewed::start().await;
    node.cluster.tokens.lock().unwrap().insert("good", "scraper");
    node.allow(&[("scraper", "get", "metrics")]);
    assert_eq!(node.get_with_token("good", "/metrics").await.0, 200);
    *node.cluster.down.lock().unwrap() = true;
    for round in ["the API server is down", "pod-config is down"] {
        let started = Instant::now();
        assert_eq!(node.get_with_token("good", "/metrics").await.0, 200, "{round}");
        let error = "Authorization error (user=scraper, verb=get, resource=nodes, subresource=pods)";
        assert_eq!(node.get_with_token("good", "/pods").await, (500, error.to_owned()), "{round}");
        let error = "Authorization error (user=jane, verb=get, resource=nodes, subresource=proxy)";
        assert_eq!(node.get(node.jane(), "/run/a/b/c", &[]).await, (500, error.to_owned()), "{round}");
        assert_eq!(node.get_with_token("unknown", "/metrics").await.0, 401, "{round}");
        assert!(started.elapsed() < Duration::from_secs(15), "{round}: {:?}", started.elapsed());
        node.stop_pod_config.cancel();
    }
}

#[tokio::test]
async fn hanging_review_ends_at_its_deadline() {
    let node = Reviewed::start().await;
    *node.cluster.hangs.lock().unwrap() = true;
    let started = Instant::now();
    let (token_review, access_review) =
        tokio::join!(node.get_with_token("good", "/metrics"), node.get(node.jane(), "/metrics", &[]));
    assert_eq!(token_review.0, 401);
    assert_eq!(access_review.0, 500);
    assert!(started.elapsed() < Duration::from_secs(13), "{:?}", started.elapsed());
}

#[tokio::test]
async fn review_cache_ttl_of_zero_disables_the_cache() {
    let node = Reviewed::start_with(|api| {
        let tls = api.tls.as_mut().unwrap();
        (tls.token_cache_ms, tls.allowed_cache_ms, tls.denied_cache_ms) = (0, 0, 0);
    })
    .await;
    node.cluster.tokens.lock().unwrap().insert("good", "scraper");
    node.allow(&[("scraper", "get", "metrics")]);
    for _ in 0..2 {
        assert_eq!(node.get_with_token("good", "/metrics").await.0, 200);
    }
    assert_eq!(node.review_counts(), (2, 2));
    node.cluster.tokens.lock().unwrap().clear();
    assert_eq!(node.get_with_token("good", "/metrics").await.0, 401, "the token was revoked");
}

#[tokio::test]
async fn strict_verbs_require_create_for_exec_attach_and_port_forward() {
    let upgrade = [
        ("connection", "Upgrade"),
        ("upgrade", "websocket"),
        ("sec-websocket-protocol", "v5.channel.k8s.io"),
    ];
    let paths = [
        "/exec/default/web/c?command=cat&output=1",
        "/attach/default/web/c?output=1",
        "/portForward/default/web?port=80",
    ];
    for strict in [false, true] {
        let node = Reviewed::start_with(|api| api.strict_verbs = strict).await;
        node.node.world.running_pod("web");
        node.allow(&[("jane", "get", "proxy")]);
        for path in paths {
            let (code, text) = node.get(node.jane(), path, &upgrade).await;
            assert_eq!(code == 403, strict, "{path}: {code} {text}");
            let forbidden = "Forbidden (user=jane, verb=create, resource=nodes, subresource(s)=[proxy])";
            assert!(!strict || text == forbidden, "{text}");
        }
        assert_eq!(node.get(node.jane(), PING, &[]).await.0, 200, "other paths keep the verb of the method");
        // With `create` alone, strict verbs allow what they otherwise refuse.
        let node = Reviewed::start_with(|api| api.strict_verbs = strict).await;
        node.node.world.running_pod("web");
        node.allow(&[("jane", "create", "proxy")]);
        let (code, _) = node.get(node.jane(), paths[0], &upgrade).await;
        assert_eq!(code == 403, !strict, "{code}");
    }
}

#[tokio::test]
async fn token_cache_metrics_match_the_kubelets() {
    let node = Reviewed::start().await;
    node.cluster.tokens.lock().unwrap().insert("good", "scraper");
    node.allow(&[("scraper", "get", "metrics")]);
    for _ in 0..2 {
        assert_eq!(node.get_with_token("bad", "/metrics").await.0, 401);
        assert_eq!(node.get_with_token("good", "/metrics").await.0, 200);
    }
    *node.cluster.down.lock().unwrap() = true;
    assert_eq!(node.get_with_token("other", "/metrics").await.0, 401);
    let (_, text) = node.get_with_token("good", "/metrics").await;
    for line in [
        "authentication_token_cache_request_total{status=\"hit\"} 3\n",
        "authentication_token_cache_request_total{status=\"miss\"} 3\n",
        "authentication_token_cache_request_duration_seconds_count{status=\"miss\"} 3\n",
        "authentication_token_cache_fetch_total{status=\"ok\"} 2\n",
        "authentication_token_cache_fetch_total{status=\"error\"} 1\n",
        "authentication_token_cache_active_fetch_count{status=\"in_flight\"} 0\n",
    ] {
        assert!(text.contains(line), "{line}{text}");
    }
}
