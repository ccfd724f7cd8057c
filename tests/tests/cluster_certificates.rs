//! A node that joins a cluster with a bootstrap token, rotates its certificates, and serves one that the cluster has signed.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use keelson_config::ServiceName;
use keelson_testkit::process::Signal;
use keelson_testkit::{Agent, KubeApiServer, KubeOptions, Scratch, eventually, lines_with_event};
use keelson_tests::cluster::{Cluster, LIMIT, NAMESPACE, sleeper};
use serde_json::{Value, json};

/// The certificates of this test begin five minutes before they are signed, so one of this validity is rotated 15 to 105
/// seconds from then.
const SHORT: Duration = Duration::from_secs(150);
/// Long enough to join and to be stopped.
const BRIEF: Duration = Duration::from_secs(45);
const LONG: Duration = Duration::from_secs(24 * 3600);

/// A node that has only a bootstrap token.
async fn join_node(scratch: &Scratch, options: KubeOptions, fields: &Value) -> Cluster {
    let node = format!("test-{:08x}", std::process::id());
    let server = KubeApiServer::start(&scratch.path().join("k"), options).unwrap();
    server.namespace(NAMESPACE).unwrap();
    let bootstrap = server.bootstrap_kubeconfig().unwrap();
    let alone = sleeper("alone").to_string();
    let agent = Agent::builder(scratch.path())
        .node_name(&node)
        .kubeconfig(kubeconfig(scratch))
        .flag(format!("--bootstrap-kubeconfig={}", bootstrap.display()))
        .flag(format!("--cert-dir={}", pki(scratch).display()))
        .fields(fields)
        .manifest("alone.yaml", &alone)
        .start()
        .await
        .unwrap();
    Cluster::of(agent, server, node)
}

fn kubeconfig(scratch: &Scratch) -> PathBuf {
    scratch.path().join("kubelet.conf")
}

fn pki(scratch: &Scratch) -> PathBuf {
    scratch.path().join("pki")
}

/// The certificate signing requests for a signer, oldest first, with their users.
fn requests(cluster: &Cluster, signer: &str) -> Vec<(String, String)> {
    let all = cluster.server.kubectl_json(&["get", "csr", "--sort-by=.metadata.creationTimestamp"]).unwrap();
    let all = all["items"].as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    all.iter()
        .filter(|request| request["spec"]["signerName"] == format!("kubernetes.io/{signer}"))
        .map(|request| (text(&request["metadata"]["name"]), text(&request["spec"]["username"])))
        .collect()
}

const CLIENT: &str = "kube-apiserver-client-kubelet";

/// Waits for the request with this number, counted from 1; its name and its user.
async fn until_request(cluster: &Cluster, signer: &str, number: usize) -> (String, String) {
    let limit = LIMIT + SHORT;
    let what = format!("there are {number} requests for {signer}");
    let result = eventually(limit, &what, async || requests(cluster, signer).len() >= number);
    result.await.unwrap_or_else(|error| panic!("{error:#}\n{}", cluster.agent.log_tail()));
    requests(cluster, signer)[number - 1].clone()
}

fn current_certificate(scratch: &Scratch, prefix: &str) -> Option<PathBuf> {
    fs::read_link(pki(scratch).join(format!("{prefix}-current.pem"))).ok()
}

async fn until_switched(cluster: &Cluster, scratch: &Scratch, prefix: &str, before: Option<&Path>) {
    cluster
        .until("another certificate is in force", || {
            current_certificate(scratch, prefix).is_some_and(|now| Some(now.as_path()) != before)
        })
        .await;
}

async fn node_status_says(cluster: &Cluster, text: &str) {
    eventually(LIMIT, text, async || {
        let output = cluster.agent.keelson(&["get", "services", "-o", "json"]).await.unwrap();
        String::from_utf8_lossy(&output.stdout).contains(text)
    })
    .await
    .unwrap_or_else(|error| panic!("{error:#}\n{}", cluster.agent.log_tail()));
}

#[tokio::test]
#[ignore = "an API server is built the first time, which takes minutes; cargo xtask test --long runs it"]
async fn a_node_joins_by_bootstrap_token_and_rotates_its_client_certificate() {
    let scratch = Scratch::new().unwrap();
    let fields = json!({"rotateCertificates": true});
    let mut cluster = join_node(&scratch, KubeOptions::default(), &fields).await;
    // Without the cluster the static pods run, and nothing ends.
    let runs = async || keelson_tests::running(&cluster.agent).await.is_ok_and(|all| all.len() == 1);
    eventually(LIMIT, "the static pod runs", runs).await.unwrap();
    node_status_says(&cluster, "waits for its approval").await;
    let (first, maker) = until_request(&cluster, CLIENT, 1).await;
    assert!(maker.starts_with("system:bootstrap:"), "{maker}");
    cluster.agent.service(ServiceName::NodeStatus).unwrap().signal(Signal::KILL);
    node_status_says(&cluster, &format!("{first} waits for its approval")).await;
    cluster.agent.kill_init();
    cluster.agent.start().await.unwrap();
    node_status_says(&cluster, &format!("{first} waits for its approval")).await;
    assert_eq!(requests(&cluster, CLIENT).len(), 1);

    cluster.server.sign_csr_for(&first, SHORT).unwrap();
    let signed = Instant::now();
    cluster.until("the node is Ready", || cluster.node_is_ready()).await;
    let kept = current_certificate(&scratch, "kubelet-client").unwrap();
    assert!(fs::read_to_string(kubeconfig(&scratch)).unwrap().contains("kubelet-client-current.pem"));
    let waiting = scratch.path().join("a/state/node-status/certificates/client.pem");
    cluster.until("nothing is left where it was issued", || !waiting.exists()).await;
    cluster.run(&sleeper("web"));
    cluster.until("the pod is Ready", || cluster.is_ready("web")).await;

    let (second, maker) = until_request(&cluster, CLIENT, 2).await;
    assert_eq!(maker, format!("system:node:{}", cluster.node), "by its own certificate");
    cluster.server.sign_csr_for(&second, LONG).unwrap();
    until_switched(&cluster, &scratch, "kubelet-client", Some(&kept)).await;
    // The first certificate expires, and connections that use it end.
    let ended = eventually(SHORT + LIMIT, "the first one has ended", async || signed.elapsed() > SHORT);
    ended.await.unwrap();
    cluster.agent.restart().await.unwrap();
    cluster.run(&sleeper("later"));
    cluster.until("the pod is Ready", || cluster.is_ready("later")).await;
    assert!(cluster.node_is_ready());
    assert_eq!(requests(&cluster, CLIENT).len(), 2, "a valid certificate is reused over restarts");
    cluster.agent.end().unwrap();
}

#[tokio::test]
#[ignore = "an API server is built the first time, which takes minutes; cargo xtask test --long runs it"]
async fn a_node_with_an_expired_certificate_rejoins_by_bootstrap_token() {
    let scratch = Scratch::new().unwrap();
    let mut cluster = join_node(&scratch, KubeOptions::default(), &json!({})).await;
    let (first, _) = until_request(&cluster, CLIENT, 1).await;
    cluster.server.sign_csr_for(&first, BRIEF).unwrap();
    let signed = Instant::now();
    cluster.until("the node is registered", || cluster.get("node", &cluster.node).is_some()).await;
    let kept = current_certificate(&scratch, "kubelet-client").unwrap();
    cluster.agent.stop().await.unwrap();
    // Without rotation no new certificate is requested before it has expired; the agent is stopped meanwhile.
    assert_eq!(requests(&cluster, CLIENT).len(), 1);
    let ended = eventually(BRIEF + LIMIT, "it has ended", async || signed.elapsed() > BRIEF);
    ended.await.unwrap();
    cluster.agent.start().await.unwrap();
    let (second, maker) = until_request(&cluster, CLIENT, 2).await;
    assert!(maker.starts_with("system:bootstrap:"), "{maker}");
    cluster.server.sign_csr_for(&second, LONG).unwrap();
    until_switched(&cluster, &scratch, "kubelet-client", Some(&kept)).await;
    cluster.run(&sleeper("web"));
    cluster.until("the pod is Ready", || cluster.is_ready("web")).await;
    cluster.agent.end().unwrap();
}

#[tokio::test]
#[ignore = "an API server is built the first time, which takes minutes; cargo xtask test --long runs it"]
async fn the_kubelet_api_serves_a_certificate_that_the_cluster_signed() {
    let scratch = Scratch::new().unwrap();
    let authority = scratch.path().join("k/ca.crt");
    let checks = vec![format!("--kubelet-certificate-authority={}", authority.display())];
    let fields = json!({
        "rotateCertificates": true, "serverTLSBootstrap": true, "address": "0.0.0.0",
        "authentication": {"x509": {"clientCAFile": authority}, "webhook": {"enabled": true}},
        "authorization": {"mode": "Webhook"},
    });
    let cluster = join_node(&scratch, KubeOptions { arguments: checks }, &fields).await;
    let (client, _) = until_request(&cluster, CLIENT, 1).await;
    cluster.server.sign_csr_for(&client, LONG).unwrap();
    cluster.until("the node is Ready", || cluster.node_is_ready()).await;
    cluster.run(&sleeper("web"));
    cluster.until("the pod is Ready", || cluster.is_ready("web")).await;
    let (serving, maker) = until_request(&cluster, "kubelet-serving", 1).await;
    assert_eq!(maker, format!("system:node:{}", cluster.node));
    node_status_says(&cluster, &format!("{serving} waits for its approval")).await;
    let logs = || cluster.server.kubectl(&["-n", NAMESPACE, "logs", "web"]).unwrap();
    assert!(!logs().status.success(), "there is no certificate to show yet");
    assert!(!lines_with_event(&cluster.agent.log(), "no_serving_certificate").is_empty());
    cluster.server.sign_csr_for(&serving, LONG).unwrap();
    let is_read = || String::from_utf8_lossy(&logs().stdout).contains("hello from web");
    cluster.until("its log is read over a certificate that is checked", is_read).await;
    assert!(current_certificate(&scratch, "kubelet-server").is_some());
    cluster.agent.end().unwrap();
}
