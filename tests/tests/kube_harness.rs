//! The API server of the whole-agent tests: nodes have the permissions that they have in a cluster, a killed server keeps its
//! data, and a dropped one leaves nothing.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::net::TcpListener;
use std::path::Path;
use std::process::Output;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use keelson_testkit::process::{self, ProcessId};
use keelson_testkit::{BUSYBOX_IMAGE, KubeApiServer, KubeOptions, Scratch};
use rcgen::{CertificateParams, DnType, KeyPair};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(30);

fn start(scratch: &Scratch) -> KubeApiServer {
    KubeApiServer::start(&scratch.path().join("k"), KubeOptions::default()).unwrap()
}

/// Runs a command that must succeed; its standard output.
fn expect_success(output: anyhow::Result<Output>) -> String {
    let output = output.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Runs a command that must fail; its standard error.
fn expect_failure(output: anyhow::Result<Output>) -> String {
    let output = output.unwrap();
    assert!(!output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8(output.stderr).unwrap()
}

fn node(name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
}

fn secret(name: &str) -> Value {
    let metadata = json!({"name": name, "namespace": "apps"});
    json!({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"key": name}})
}

/// A pod in the namespace `apps` that is bound to `node` and mounts a secret.
fn pod(name: &str, node: &str, secret: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "apps"},
        "spec": {
            "nodeName": node,
            "containers": [{
                "name": "main", "image": BUSYBOX_IMAGE,
                "volumeMounts": [{"name": "key", "mountPath": "/key"}],
            }],
            "volumes": [{"name": "key", "secret": {"secretName": secret}}],
        },
    })
}

#[test]
#[ignore = "an API server is built the first time, which takes minutes; cargo xtask test --long runs it"]
fn a_node_does_what_its_own_certificate_allows() {
    let scratch = Scratch::new().unwrap();
    let server = start(&scratch);
    expect_success(server.kubectl(&["get", "nodes"]));
    assert_eq!(server.kubectl_json(&["get", "nodes"]).unwrap()["items"], json!([]));

    server.namespace("apps").unwrap();
    let objects = [
        node("one"),
        node("two"),
        secret("of-one"),
        secret("of-two"),
        pod("a", "one", "of-one"),
        pod("b", "two", "of-two"),
    ];
    objects.iter().for_each(|object| server.apply(object).unwrap());
    let stored = server.kubectl_json(&["get", "pod", "a", "-n", "apps"]).unwrap();
    assert_eq!(stored["spec"]["nodeName"], "one");
    // As in a current cluster: no Secret, but a token and the CA certificate.
    let volumes = stored["spec"]["volumes"].as_array().unwrap();
    let sources: Vec<&Value> =
        volumes.iter().filter_map(|v| v["projected"]["sources"].as_array()).flatten().collect();
    assert!(sources.iter().any(|source| source["serviceAccountToken"]["path"] == "token"), "{stored:#}");
    let authority = server.kubectl_json(&["get", "configmap", "kube-root-ca.crt", "-n", "apps"]).unwrap();
    assert_eq!(authority["data"]["ca.crt"], std::fs::read_to_string(server.ca_file()).unwrap());

    let one = server.node_kubeconfig("one").unwrap();
    let as_one = |args: &[&str]| server.kubectl_as(&one, args);
    assert_eq!(expect_success(as_one(&["get", "node", "one", "-o", "name"])), "node/one\n");
    // The node authorizer's graph is updated after the writes.
    let deadline = Instant::now() + LIMIT;
    let own = ["get", "secret", "of-one", "-n", "apps", "-o", "name"];
    while !as_one(&own).unwrap().status.success() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(expect_success(as_one(&own)), "secret/of-one\n");
    let stderr = expect_failure(as_one(&["get", "secret", "of-two", "-n", "apps"]));
    assert!(stderr.contains("Forbidden"), "{stderr}");
    expect_success(as_one(&["label", "node", "one", "example.com/colour=blue"]));
    let stderr = expect_failure(as_one(&["label", "node", "two", "example.com/colour=blue"]));
    assert!(stderr.contains("Forbidden"), "{stderr}");

    let nobody = server.kubeconfig_for("nobody", &["somewhere", "else"]).unwrap();
    let stderr = expect_failure(server.kubectl_as(&nobody, &["get", "node", "one"]));
    assert!(stderr.contains("User \"nobody\""), "{stderr}");
}

/// A certificate signing request for `node`, and its key.
fn request(node: &str) -> (Value, KeyPair) {
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::OrganizationName, "system:nodes");
    params.distinguished_name.push(DnType::CommonName, format!("system:node:{node}"));
    let key = KeyPair::generate().unwrap();
    let pem = params.serialize_request(&key).unwrap().pem().unwrap();
    let request = json!({
        "apiVersion": "certificates.k8s.io/v1",
        "kind": "CertificateSigningRequest",
        "metadata": {"name": format!("node-csr-{node}")},
        "spec": {
            "request": STANDARD.encode(pem),
            "signerName": "kubernetes.io/kube-apiserver-client-kubelet",
            "usages": ["digital signature", "client auth"],
        },
    });
    (request, key)
}

#[test]
#[ignore = "an API server is built the first time, which takes minutes; cargo xtask test --long runs it"]
fn a_bootstrap_token_gets_a_node_certificate() {
    let scratch = Scratch::new().unwrap();
    let server = start(&scratch);
    server.apply(&node("one")).unwrap();
    let bearer = server.bootstrap_kubeconfig().unwrap();
    expect_success(server.kubectl_as(&bearer, &["get", "node", "one"]));
    let stderr = expect_failure(server.kubectl_as(&bearer, &["get", "pods", "-A"]));
    assert!(stderr.contains("User \"system:bootstrap:"), "{stderr}");

    let file = |name: &str, text: &str| {
        let path = scratch.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let (wanted, key) = request("one");
    let wanted = file("csr.json", &wanted.to_string());
    expect_success(server.kubectl_as(&bearer, &["create", "--validate=false", "-f", &wanted]));
    server.sign_csr("node-csr-one").unwrap();
    let signed = server.kubectl_json(&["get", "csr", "node-csr-one"]).unwrap();
    assert_eq!(signed["status"]["conditions"][0]["type"], "Approved", "{signed:#}");
    let cert = STANDARD.decode(signed["status"]["certificate"].as_str().unwrap()).unwrap();
    let (cert, key) =
        (file("node.crt", &String::from_utf8(cert).unwrap()), file("node.key", &key.serialize_pem()));
    let ca = server.ca_file().display().to_string();
    let url = server.url();
    let connection = [
        "--server",
        &url,
        "--certificate-authority",
        &ca,
        "--client-certificate",
        &cert,
        "--client-key",
        &key,
    ];
    let as_node = |args: &[&str]| {
        let nothing = Path::new("/dev/null");
        server.kubectl_as(nothing, &[&connection[..], args].concat())
    };
    expect_success(as_node(&["label", "node", "one", "example.com/colour=blue"]));

    // A request that a controller manager would refuse gets no certificate.
    let (mut refused, _) = request("two");
    refused["spec"]["usages"] = json!(["digital signature", "server auth"]);
    server.apply(&refused).unwrap();
    let error = format!("{:#}", server.sign_csr("node-csr-two").unwrap_err());
    assert!(error.contains("usages"), "{error}");
    let left = server.kubectl_json(&["get", "csr", "node-csr-two"]).unwrap();
    assert_eq!(left["status"]["certificate"], Value::Null, "{left:#}");
}

/// Every process with `dir` in its arguments.
fn processes_of(dir: &Path) -> Vec<ProcessId> {
    process::all().iter().filter(|process| process.mentions(dir)).map(|process| process.id).collect()
}

#[test]
#[ignore = "an API server is built the first time, which takes minutes; cargo xtask test --long runs it"]
fn a_killed_server_keeps_its_data_and_a_dropped_one_leaves_nothing() {
    let scratch = Scratch::new().unwrap();
    let mut server = start(&scratch);
    let (url, first) = (server.url(), server.process().unwrap());
    server.apply(&node("one")).unwrap();
    let uid = |server: &KubeApiServer| {
        server.kubectl_json(&["get", "node", "one"]).unwrap()["metadata"]["uid"].clone()
    };
    let before = uid(&server);
    assert!(before.is_string(), "{before}");

    server.kill();
    assert!(!first.is_alive());
    expect_failure(server.kubectl(&["get", "nodes"]));
    server.restart().unwrap();
    assert_eq!((server.url(), uid(&server)), (url.clone(), before.clone()));

    server.stop().unwrap();
    assert_eq!(server.process(), None);
    server.restart().unwrap();
    assert_eq!((server.url(), uid(&server)), (url.clone(), before));

    server.freeze().unwrap();
    expect_failure(server.kubectl(&["get", "nodes", "--request-timeout=2s"]));
    server.thaw().unwrap();
    expect_success(server.kubectl(&["get", "nodes"]));

    let relay = server.relay().unwrap();
    let through = server.kubeconfig_via(relay.address(), "somebody", &["system:masters"]).unwrap();
    expect_success(server.kubectl_as(&through, &["get", "nodes"]));
    relay.cut();
    expect_failure(server.kubectl_as(&through, &["get", "nodes", "--request-timeout=2s"]));

    let dir = scratch.path().join("k");
    // The server and its etcd.
    assert_eq!(processes_of(&dir).len(), 2);
    let addresses: Vec<String> = server
        .etcd()
        .endpoints()
        .into_iter()
        .chain([url])
        .map(|url| url.split_once("://").unwrap().1.to_owned())
        .collect();
    assert!(addresses.iter().all(|address| TcpListener::bind(address).is_err()), "{addresses:?}");
    drop(server);
    assert_eq!(processes_of(&dir), []);
    assert!(addresses.iter().all(|address| TcpListener::bind(address).is_ok()), "{addresses:?}");
    assert!(!dir.exists());
}
