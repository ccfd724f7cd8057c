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
use keelson_service_kit::status::error;
use keelson_testkit::fakes::{FakePodConfig, FakeServer};
use pb::review_token_response::Result as ReviewResult;
use tonic::Code;
use tonic::service::Routes;

use crate::fake::soon;
use crate::secured_node::{Authority, Pair, Secured};

/// What the API server answers.
#[derive(Default)]
struct Cluster {
    /// The user of each token.
    tokens: Mutex<HashMap<&'static str, &'static str>>,
    /// The error with which unknown tokens are rejected.
    token_error: Mutex<&'static str>,
    /// What is allowed: user, verb, subresource.
    allowed: Mutex<Vec<(&'static str, &'static str, &'static str)>>,
}

impl Cluster {
    fn review_token(&self, token: &str) -> pb::ReviewTokenResponse {
        let known = self.tokens.lock().unwrap().get(token).copied();
        let result = match known {
            Some(name) => ReviewResult::User(pb::User {
                name: name.into(),
                uid: "1".into(),
                groups: vec!["g".into()],
                extra: [("k".to_owned(), pb::ExtraValues { values: vec!["v".into()] })].into(),
            }),
            None => ReviewResult::Rejected((*self.token_error.lock().unwrap()).to_owned()),
        };
        pb::ReviewTokenResponse { result: Some(result) }
    }

    fn review_access(&self, review: pb::ReviewAccessRequest) -> pb::ReviewAccessResponse {
        let user = review.user.unwrap();
        let matches = |(name, verb, subresource): &(&str, &str, &str)| {
            *name == user.name && *verb == review.verb && *subresource == review.subresource
        };
        let allowed = self.allowed.lock().unwrap().iter().any(matches);
        pb::ReviewAccessResponse { allowed, reason: String::new() }
    }
}

/// A fake pod-config that forwards reviews to `cluster`.
fn pod_config(cluster: &Arc<Cluster>) -> FakePodConfig {
    let fake = FakePodConfig::default();
    let answering = Arc::clone(cluster);
    fake.review_token.answer_with(move |request| Ok(answering.review_token(&request.token)));
    let answering = Arc::clone(cluster);
    fake.review_access.answer_with(move |review| Ok(answering.review_access(review)));
    fake
}

/// A node with token and access reviews, and the fake API server.
struct Reviewed {
    node: Secured,
    cluster: Arc<Cluster>,
    pod_config: FakePodConfig,
    /// `None`: it was stopped.
    pod_config_server: Option<FakeServer>,
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
        let cluster = Arc::<Cluster>::default();
        let pod_config = pod_config(&cluster);
        let routes = Routes::new(pod_config.server());
        let pod_config_server = Some(node.world.serve(ServiceName::PodConfig, routes).await);
        Self { node, cluster, pod_config, pod_config_server }
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
        (self.pod_config.review_token.requests().len(), self.pod_config.review_access.requests().len())
    }

    fn first_access_review(&self) -> pb::ReviewAccessRequest {
        self.pod_config.review_access.requests().all().swap_remove(0)
    }

    async fn stop_pod_config(&mut self) {
        if let Some(server) = self.pod_config_server.take() {
            server.stop().await.unwrap();
        }
    }

    /// Fails later reviews.
    fn stop_api_server(&self) {
        let status = error(Code::Unavailable, "CONTROL_PLANE_AWAY", "the API server does not answer");
        self.pod_config.review_token.fail(status.clone());
        self.pod_config.review_access.fail(status);
    }
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
    let first = node.first_access_review();
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
async fn logs_checkpoints_and_verbosity_each_require_their_right() {
    let node = Reviewed::start_with(|api| api.handlers.system_log_query = true).await;
    let world = &node.node.world;
    world.running_pod("web");
    world.runtime.read_node_logs.list([]);
    world.runtime.checkpoint_container.answer(Default::default());
    world.admin.set_verbosity.answer(Default::default());
    let calls = || {
        let runtime = &world.runtime;
        let logs = runtime.read_node_logs.requests().len();
        logs + runtime.checkpoint_container.requests().len() + world.admin.set_verbosity.requests().len()
    };
    let requests = [
        ("GET", "/logs", "get", "log"),
        ("GET", "/logs/syslog", "get", "log"),
        ("GET", "/logs/?query=kubelet", "get", "log"),
        ("POST", "/checkpoint/default/web/c", "create", "checkpoint"),
        ("PUT", "/debug/flags/v", "update", "proxy"),
    ];
    // Rights to something else do not count.
    node.allow(&[("jane", "get", "proxy"), ("jane", "create", "proxy"), ("jane", "get", "checkpoint")]);
    node.allow(&[("jane", "update", "log"), ("jane", "create", "log"), ("jane", "update", "checkpoint")]);
    for (method, path, verb, subresource) in requests {
        let (status, _, text) = node.node.request_as_jane(method, path, &[]).await;
        let refused =
            format!("Forbidden (user=jane, verb={verb}, resource=nodes, subresource(s)=[{subresource}])");
        assert_eq!((status, text), (403, refused), "{path}");
    }
    assert_eq!(calls(), 0, "no service was asked");
    for (method, path, verb, subresource) in requests {
        node.cluster.allowed.lock().unwrap().push(("bob", verb, subresource));
        let bob = Some(node.node.clients.sign("bob"));
        assert_ne!(node.node.request(bob, method, path, &[]).await.status(), 403, "{path}");
    }
}

#[tokio::test]
async fn system_masters_are_reviewed_like_every_user() {
    let node = Reviewed::start().await;
    let master = node.node.clients.sign_with_groups("root", &["system:masters"]);
    assert_eq!(node.get(Some(master), "/exec/default/web/c?command=a", &[]).await.0, 403);
    let groups = node.first_access_review().user.unwrap().groups;
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
    let user = node.first_access_review().user.unwrap();
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
    let start = node.node.world.stream_starts().remove(0);
    let protocol = start.headers.iter().find(|header| header.name == "sec-websocket-protocol").unwrap();
    assert_eq!(protocol.value, "v4.channel.k8s.io");
}

#[tokio::test]
async fn made_up_tokens_do_not_block_reviews_of_other_addresses() {
    let node = Reviewed::start().await;
    node.allow(&[("scraper", "get", "metrics")]);
    node.cluster.tokens.lock().unwrap().insert("good", "scraper");
    let _held = node.pod_config.review_token.hold();
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
            _ = node.pod_config.review_token.requests().until(|reviews| reviews.len() == 52) => {}
        }
    };
    soon(in_progress).await;
    // Later reviews pass; those in progress still wait.
    node.pod_config.review_token.hold().open();
    let good = [("authorization", "Bearer good")];
    let from = async |address: [u8; 4]| {
        soon(node.node.request_from(address.into(), None, "GET", "/metrics", &good)).await.status().as_u16()
    };
    assert_eq!(from([127, 0, 0, 1]).await, 401);
    assert_eq!(node.review_counts().0, 52, "no review was sent");
    assert_eq!(from([127, 0, 0, 2]).await, 200);
    drop(flood);
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
    let mut node = Reviewed::start().await;
    node.cluster.tokens.lock().unwrap().insert("good", "scraper");
    node.allow(&[("scraper", "get", "metrics")]);
    assert_eq!(node.get_with_token("good", "/metrics").await.0, 200);
    node.stop_api_server();
    for round in ["the API server is down", "pod-config is down"] {
        let started = Instant::now();
        assert_eq!(node.get_with_token("good", "/metrics").await.0, 200, "{round}");
        let error = "Authorization error (user=scraper, verb=get, resource=nodes, subresource=pods)";
        assert_eq!(node.get_with_token("good", "/pods").await, (500, error.to_owned()), "{round}");
        let error = "Authorization error (user=jane, verb=get, resource=nodes, subresource=proxy)";
        assert_eq!(node.get(node.jane(), "/run/a/b/c", &[]).await, (500, error.to_owned()), "{round}");
        assert_eq!(node.get_with_token("unknown", "/metrics").await.0, 401, "{round}");
        assert!(started.elapsed() < Duration::from_secs(15), "{round}: {:?}", started.elapsed());
        node.stop_pod_config().await;
    }
}

#[tokio::test]
async fn hanging_review_ends_at_its_deadline() {
    let node = Reviewed::start().await;
    let _held = (node.pod_config.review_token.hold(), node.pod_config.review_access.hold());
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
    node.stop_api_server();
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
