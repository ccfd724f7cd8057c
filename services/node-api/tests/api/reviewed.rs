//! The kubelet API where an API server is asked who somebody is and what they may do.

#![allow(clippy::unwrap_used)] // A test fails where it stands.

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
use pb::review_token_response::Result as Told;
use tokio_stream::Empty as NoStream;
use tonic::service::Routes;
use tonic::{Code, Request, Response, Status, Streaming};

use crate::fake::{World, soon};
use crate::secured::{Authority, Pair, Secured};

type Answer<T> = Result<Response<T>, Status>;

/// What the API server would say, and what it was asked.
#[derive(Default)]
struct Cluster {
    /// Whose each token is.
    tokens: Mutex<HashMap<&'static str, &'static str>>,
    /// What an unknown token is rejected with.
    trouble: Mutex<&'static str>,
    /// Who may do what: name, verb, subresource.
    rights: Mutex<Vec<(&'static str, &'static str, &'static str)>>,
    /// Neither is answered.
    away: Mutex<bool>,
    /// Nothing is said at all.
    hangs: Mutex<bool>,
    asked_tokens: Mutex<Vec<String>>,
    asked: Mutex<Vec<pb::ReviewAccessRequest>>,
}

#[derive(Clone)]
struct Fake(Arc<Cluster>);

impl Fake {
    async fn answers(&self) -> Result<(), Status> {
        if *self.0.hangs.lock().unwrap() {
            std::future::pending::<()>().await;
        }
        let away = || error(Code::Unavailable, "CONTROL_PLANE_AWAY", "the API server does not answer");
        if *self.0.away.lock().unwrap() { Err(away()) } else { Ok(()) }
    }
}

fn absent<T>() -> Answer<T> {
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
        self.0.asked_tokens.lock().unwrap().push(token.clone());
        self.answers().await?;
        let known = self.0.tokens.lock().unwrap().get(token.as_str()).copied();
        let result = match known {
            Some(name) => {
                let extra = [("k".to_owned(), pb::ExtraValues { values: vec!["v".into()] })].into();
                Told::User(pb::User { name: name.into(), uid: "1".into(), groups: vec!["g".into()], extra })
            }
            None => Told::Rejected((*self.0.trouble.lock().unwrap()).to_owned()),
        };
        Ok(Response::new(pb::ReviewTokenResponse { result: Some(result) }))
    }

    async fn review_access(
        &self,
        request: Request<pb::ReviewAccessRequest>,
    ) -> Answer<pb::ReviewAccessResponse> {
        let asked = request.into_inner();
        self.0.asked.lock().unwrap().push(asked.clone());
        self.answers().await?;
        let user = asked.user.unwrap();
        let is_it = |(name, verb, part): &(&str, &str, &str)| {
            *name == user.name && *verb == asked.verb && *part == asked.subresource
        };
        let allowed = self.0.rights.lock().unwrap().iter().any(is_it);
        Ok(Response::new(pb::ReviewAccessResponse { allowed, reason: String::new() }))
    }

    async fn watch_pods(&self, _: Request<pb::WatchPodsRequest>) -> Answer<Self::WatchPodsStream> {
        absent()
    }

    async fn watch_node(&self, _: Request<pb::WatchNodeRequest>) -> Answer<Self::WatchNodeStream> {
        absent()
    }

    async fn get_object(&self, _: Request<pb::GetObjectRequest>) -> Answer<pb::GetObjectResponse> {
        absent()
    }

    async fn watch_objects(
        &self,
        _: Request<Streaming<pb::WatchObjectsRequest>>,
    ) -> Answer<Self::WatchObjectsStream> {
        absent()
    }

    async fn apply_manifest(
        &self,
        _: Request<pb::ApplyManifestRequest>,
    ) -> Answer<pb::ApplyManifestResponse> {
        absent()
    }

    async fn delete_manifest(
        &self,
        _: Request<pb::DeleteManifestRequest>,
    ) -> Answer<pb::DeleteManifestResponse> {
        absent()
    }

    async fn get_service_env(
        &self,
        _: Request<pb::GetServiceEnvRequest>,
    ) -> Answer<pb::GetServiceEnvResponse> {
        absent()
    }

    async fn mutate(&self, _: Request<pb::MutateRequest>) -> Answer<pb::MutateResponse> {
        absent()
    }

    async fn create_token(&self, _: Request<pb::CreateTokenRequest>) -> Answer<pb::CreateTokenResponse> {
        absent()
    }

    async fn list_sources(&self, _: Request<pb::ListSourcesRequest>) -> Answer<pb::ListSourcesResponse> {
        absent()
    }
}

/// A node that asks, and the answers.
struct Reviewed {
    node: Secured,
    cluster: Arc<Cluster>,
    /// Ends pod-config.
    end: CancellationToken,
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
        let (cluster, end) = (Arc::<Cluster>::default(), CancellationToken::new());
        serve(&node.world, Fake(Arc::clone(&cluster)), end.clone()).await;
        Self { node, cluster, end }
    }

    fn allow(&self, rights: &[(&'static str, &'static str, &'static str)]) {
        self.cluster.rights.lock().unwrap().extend(rights);
    }

    fn jane(&self) -> Option<Pair> {
        Some(self.node.clients.of("jane"))
    }

    async fn ask(&self, own: Option<Pair>, path: &str, headers: &[(&str, &str)]) -> (u16, String) {
        let (head, body) = self.node.ask(own, "GET", path, headers).await.into_parts();
        let text = soon(body.collect()).await.unwrap().to_bytes();
        (head.status.as_u16(), String::from_utf8(text.to_vec()).unwrap())
    }

    /// `GET` with a token.
    async fn with_token(&self, token: &str, path: &str) -> (u16, String) {
        self.ask(None, path, &[("authorization", &format!("Bearer {token}"))]).await
    }

    fn questions(&self) -> (usize, usize) {
        (self.cluster.asked_tokens.lock().unwrap().len(), self.cluster.asked.lock().unwrap().len())
    }
}

async fn serve(world: &World, fake: Fake, end: CancellationToken) {
    let ctx = world.context(ServiceName::PodConfig);
    std::fs::create_dir_all(ctx.config.paths.socket_dir(ServiceName::PodConfig)).unwrap();
    let routes = Routes::new(PodConfigServer::new(fake));
    let socket = ctx.config.paths.socket(ServiceName::PodConfig);
    let stack = StackLayer::new(CallerPolicy::new(&ctx.config), ctx.metrics.clone());
    let (is_bound, bound) = tokio::sync::oneshot::channel();
    tokio::spawn(async move {
        server::serve(&socket, routes, stack, end, move || is_bound.send(()).unwrap()).await.unwrap();
    });
    soon(bound).await.unwrap();
}

const PING: &str = "/healthz/ping";

#[tokio::test]
async fn a_certificate_lets_in_whom_the_review_allows_and_the_refusal_says_what_was_asked() {
    let node = Reviewed::start().await;
    node.allow(&[("jane", "get", "metrics"), ("jane", "get", "proxy")]);
    assert_eq!(node.ask(node.jane(), "/metrics", &[]).await.0, 200);
    assert_eq!(node.ask(node.jane(), PING, &[]).await.0, 200, "the second subresource is enough");
    assert_eq!(node.ask(node.jane(), "/nothing", &[]).await.0, 404);
    let refused = node.ask(node.jane(), "/stats/summary", &[]).await;
    let text = "Forbidden (user=jane, verb=get, resource=nodes, subresource(s)=[stats])";
    assert_eq!(refused, (403, text.to_owned()));
    let bob = node.node.clients.of("bob");
    let text = "Forbidden (user=bob, verb=get, resource=nodes, subresource(s)=[healthz proxy])";
    assert_eq!(node.ask(Some(bob), PING, &[]).await, (403, text.to_owned()));
    let first = node.cluster.asked.lock().unwrap()[0].clone();
    let told = &first.user.as_ref().unwrap().extra["authentication.kubernetes.io/credential-id"].values[0];
    assert!(told.strip_prefix("X509SHA256=").is_some_and(|digest| digest.len() == 64), "{told}");
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
async fn administrators_of_the_cluster_are_reviewed_like_everybody() {
    let node = Reviewed::start().await;
    let master = node.node.clients.of_groups("root", &["system:masters"]);
    assert_eq!(node.ask(Some(master), "/exec/default/web/c?command=a", &[]).await.0, 403);
    let groups = node.cluster.asked.lock().unwrap()[0].user.clone().unwrap().groups;
    assert_eq!(groups, ["system:masters", "system:authenticated"]);
}

#[tokio::test]
async fn a_token_is_whom_the_server_knows_it_of_and_a_wrong_one_is_nobody() {
    let node = Reviewed::start_with(|api| api.tls.as_mut().unwrap().anonymous = true).await;
    node.cluster.tokens.lock().unwrap().insert("good", "scraper");
    node.allow(&[("scraper", "get", "metrics"), ("system:anonymous", "get", "healthz")]);
    assert_eq!(node.with_token("good", "/metrics").await.0, 200);
    assert_eq!(node.with_token("good", "/containerLogs/default/web/c").await.0, 403);
    let nobody = (401, "Unauthorized".to_owned());
    assert_eq!(node.with_token("bad", PING).await, nobody, "not made anonymous");
    assert_eq!(node.ask(Some(Authority::new("x").of("jane")), PING, &[]).await, nobody);
    assert_eq!(node.ask(None, PING, &[]).await.0, 200, "nothing was shown");
    let text = "Forbidden (user=system:anonymous, verb=get, resource=nodes, subresource(s)=[metrics])";
    assert_eq!(node.ask(None, "/metrics", &[]).await, (403, text.to_owned()));
    // The first that is recognised counts, whatever came before it.
    let with_both =
        node.ask(Some(Authority::new("x").of("jane")), "/metrics", &[("authorization", "Bearer good")]);
    assert_eq!(with_both.await.0, 200);
    let user = node.cluster.asked.lock().unwrap()[0].user.clone().unwrap();
    assert_eq!((user.uid.as_str(), user.groups.len(), user.extra["k"].values[0].as_str()), ("1", 2, "v"));
}

#[tokio::test]
async fn a_websocket_shows_its_token_as_a_subprotocol_and_the_runtime_does_not_see_it() {
    let node = Reviewed::start().await;
    node.cluster.tokens.lock().unwrap().insert("a.b?", "jane");
    node.node.world.running_pod("web");
    node.allow(&[("jane", "get", "proxy")]);
    let protocols = "v4.channel.k8s.io, base64url.bearer.authorization.k8s.io.YS5iPw";
    let headers =
        [("connection", "Upgrade"), ("upgrade", "websocket"), ("sec-websocket-protocol", protocols)];
    let path = "/exec/default/web/c?command=cat&output=1";
    let (code, _) = node.ask(None, path, &headers).await;
    assert!(![401, 403, 404].contains(&code), "{code}");
    let asked = node.node.world.shared.connected.lock().unwrap().remove(0);
    let told = asked.headers.iter().find(|header| header.name == "sec-websocket-protocol").unwrap();
    assert_eq!(told.value, "v4.channel.k8s.io");
}

#[tokio::test]
async fn tokens_that_somebody_makes_up_keep_nobody_elses_from_being_looked_at() {
    let node = Reviewed::start().await;
    node.allow(&[("scraper", "get", "metrics")]);
    node.cluster.tokens.lock().unwrap().insert("good", "scraper");
    *node.cluster.hangs.lock().unwrap() = true;
    let made_up: Vec<String> = (0..60).map(|n| format!("made-up-{n}")).collect();
    let mut flood: FuturesUnordered<_> =
        made_up.iter().map(|token| node.with_token(token, "/metrics")).collect();
    // Of 64 questions that may be open one address has 52; the others are answered at once.
    for _ in 52..60 {
        assert_eq!(soon(flood.next()).await.unwrap().0, 401);
    }
    let asked = async {
        tokio::select! {
            answer = flood.next() => panic!("{answer:?}"),
            () = until(|| node.questions().0 == 52) => {}
        }
    };
    soon(asked).await;
    *node.cluster.hangs.lock().unwrap() = false;
    let good = [("authorization", "Bearer good")];
    let from = async |address: [u8; 4]| {
        soon(node.node.ask_from(address.into(), None, "GET", "/metrics", &good)).await.status().as_u16()
    };
    assert_eq!(from([127, 0, 0, 1]).await, 401);
    assert_eq!(node.questions().0, 52, "nobody was asked");
    assert_eq!(from([127, 0, 0, 2]).await, 200);
    drop(flood);
}

/// Waits until something is so that another task does.
async fn until(is_so: impl Fn() -> bool) {
    while !is_so() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn without_tokens_or_reviews_nobody_is_asked() {
    let only_certificates = |api: &mut Api| {
        let tls = api.tls.as_mut().unwrap();
        (tls.tokens, tls.reviews) = (false, false);
    };
    let node = Reviewed::start_with(only_certificates).await;
    node.cluster.tokens.lock().unwrap().insert("good", "scraper");
    assert_eq!(node.with_token("good", PING).await.0, 401);
    assert_eq!(node.ask(node.jane(), PING, &[]).await.0, 200);
    assert_eq!(node.questions(), (0, 0));
}

#[tokio::test]
async fn answers_are_remembered_and_trouble_is_not() {
    let node = Reviewed::start().await;
    node.cluster.tokens.lock().unwrap().insert("good", "scraper");
    node.allow(&[("scraper", "get", "metrics")]);
    for _ in 0..3 {
        assert_eq!(node.with_token("good", "/metrics").await.0, 200);
        assert_eq!(node.with_token("good", "/stats/summary").await.0, 403);
        assert_eq!(node.with_token("bad", "/metrics").await.0, 401);
    }
    assert_eq!(node.questions(), (2, 2));
    let long = format!("/metrics/{}", "x".repeat(10_000));
    for _ in 0..2 {
        assert_eq!(node.with_token("good", &long).await.0, 404);
    }
    assert_eq!(node.questions(), (2, 4), "what is asked at such a length is not remembered");
    *node.cluster.trouble.lock().unwrap() = "the keys cannot be fetched";
    for _ in 0..2 {
        assert_eq!(node.with_token("other", "/metrics").await.0, 401);
    }
    assert_eq!(node.questions().0, 4);
}

#[tokio::test]
async fn what_is_remembered_goes_on_while_nobody_answers_and_the_rest_is_an_error() {
    let node = Reviewed::start().await;
    node.cluster.tokens.lock().unwrap().insert("good", "scraper");
    node.allow(&[("scraper", "get", "metrics")]);
    assert_eq!(node.with_token("good", "/metrics").await.0, 200);
    *node.cluster.away.lock().unwrap() = true;
    for round in ["the API server is away", "pod-config is away"] {
        let begun = Instant::now();
        assert_eq!(node.with_token("good", "/metrics").await.0, 200, "{round}");
        let error = "Authorization error (user=scraper, verb=get, resource=nodes, subresource=pods)";
        assert_eq!(node.with_token("good", "/pods").await, (500, error.to_owned()), "{round}");
        let error = "Authorization error (user=jane, verb=get, resource=nodes, subresource=proxy)";
        assert_eq!(node.ask(node.jane(), "/run/a/b/c", &[]).await, (500, error.to_owned()), "{round}");
        assert_eq!(node.with_token("unknown", "/metrics").await.0, 401, "{round}");
        assert!(begun.elapsed() < Duration::from_secs(15), "{round}: {:?}", begun.elapsed());
        node.end.cancel();
    }
}

#[tokio::test]
async fn nobody_waits_longer_than_the_deadline_for_a_review_that_hangs() {
    let node = Reviewed::start().await;
    *node.cluster.hangs.lock().unwrap() = true;
    let begun = Instant::now();
    let (of_token, of_access) =
        tokio::join!(node.with_token("good", "/metrics"), node.ask(node.jane(), "/metrics", &[]));
    assert_eq!(of_token.0, 401);
    assert_eq!(of_access.0, 500);
    assert!(begun.elapsed() < Duration::from_secs(13), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn for_how_long_is_a_setting_and_nothing_is_remembered_for_no_time() {
    let node = Reviewed::start_with(|api| {
        let tls = api.tls.as_mut().unwrap();
        (tls.token_cache_ms, tls.allowed_cache_ms, tls.denied_cache_ms) = (0, 0, 0);
    })
    .await;
    node.cluster.tokens.lock().unwrap().insert("good", "scraper");
    node.allow(&[("scraper", "get", "metrics")]);
    for _ in 0..2 {
        assert_eq!(node.with_token("good", "/metrics").await.0, 200);
    }
    assert_eq!(node.questions(), (2, 2));
    node.cluster.tokens.lock().unwrap().clear();
    assert_eq!(node.with_token("good", "/metrics").await.0, 401, "a token that is taken back");
}

#[tokio::test]
async fn with_strict_verbs_who_may_only_read_gets_into_no_container() {
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
            let (code, text) = node.ask(node.jane(), path, &upgrade).await;
            assert_eq!(code == 403, strict, "{path}: {code} {text}");
            let told = "Forbidden (user=jane, verb=create, resource=nodes, subresource(s)=[proxy])";
            assert!(!strict || text == told, "{text}");
        }
        assert_eq!(node.ask(node.jane(), PING, &[]).await.0, 200, "what only shows something is read");
        // A right that comes later counts for what is asked then.
        let node = Reviewed::start_with(|api| api.strict_verbs = strict).await;
        node.node.world.running_pod("web");
        node.allow(&[("jane", "create", "proxy")]);
        let (code, _) = node.ask(node.jane(), paths[0], &upgrade).await;
        assert_eq!(code == 403, !strict, "{code}");
    }
}

#[tokio::test]
async fn remembered_tokens_are_counted_as_a_kubelet_counts_them() {
    let node = Reviewed::start().await;
    node.cluster.tokens.lock().unwrap().insert("good", "scraper");
    node.allow(&[("scraper", "get", "metrics")]);
    for _ in 0..2 {
        assert_eq!(node.with_token("bad", "/metrics").await.0, 401);
        assert_eq!(node.with_token("good", "/metrics").await.0, 200);
    }
    *node.cluster.away.lock().unwrap() = true;
    assert_eq!(node.with_token("other", "/metrics").await.0, 401);
    let (_, text) = node.with_token("good", "/metrics").await;
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
