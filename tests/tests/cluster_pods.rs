//! What pods of a cluster get besides their ConfigMaps and Secrets: a token of their service account, the service variables of
//! their namespace, and a runtime class.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::path::Path;

use keelson_config::ServiceName;
use keelson_testkit::process::Signal;
use keelson_testkit::{Scratch, eventually};
use keelson_tests::cluster::{Cluster, LIMIT, NAMESPACE, sleeper};
use keelson_tests::{running, text};
use serde_json::{Value, json};

/// Where a container finds the token of its service account.
const TOKEN: &str = "/var/run/secrets/kubernetes.io/serviceaccount/token";

/// A pod with a service account token, as the server adds it by default.
fn pod_with_token(name: &str) -> Value {
    let mut pod = sleeper(name);
    pod["spec"].as_object_mut().unwrap().remove("automountServiceAccountToken");
    pod
}

/// The output of a command in the pod.
async fn command_output(cluster: &Cluster, pod: &str, command: &[&str]) -> String {
    let args = [&["exec", "-n", NAMESPACE, pod, "--"], command].concat();
    text(&cluster.agent.keelson(&args).await.unwrap()).trim().to_owned()
}

/// The API server's TokenReview of a token.
fn review_token(cluster: &Cluster, scratch: &Path, token: &str) -> Value {
    let file = scratch.join("review.json");
    let review_token =
        json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}});
    std::fs::write(&file, review_token.to_string()).unwrap();
    cluster.server.kubectl_json(&["create", "-f", file.to_str().unwrap()]).unwrap()["status"].clone()
}

#[tokio::test]
#[ignore = "an API server is built the first time, which takes minutes; cargo xtask test --long runs it"]
async fn a_pod_gets_a_valid_service_account_token_and_service_variables() {
    let scratch = Scratch::new().unwrap();
    let cluster = Cluster::start(&scratch, |_| ()).await;
    create_services_and_runtime_class(&cluster);
    let mut web = pod_with_token("web");
    web["spec"]["runtimeClassName"] = "plain".into();
    cluster.run(&web);
    cluster.until("the pod is Ready", || cluster.is_ready("web")).await;

    let token = command_output(&cluster, "web", &["cat", TOKEN]).await;
    let status = review_token(&cluster, scratch.path(), &token);
    assert_eq!(status["authenticated"], true, "{status:#}");
    assert_eq!(status["user"]["username"], format!("system:serviceaccount:{NAMESPACE}:default"));
    let bound = &status["user"]["extra"]["authentication.kubernetes.io/pod-name"];
    assert_eq!(*bound, json!(["web"]));
    let uid = cluster.pod("web").unwrap()["metadata"]["uid"].as_str().unwrap().to_owned();
    let mounts = command_output(&cluster, "web", &["cat", "/proc/mounts"]).await;
    let at = TOKEN.trim_end_matches("/token");
    assert!(mounts.lines().any(|line| line.starts_with(&format!("tmpfs {at} "))), "{mounts}");
    let authority = command_output(&cluster, "web", &["cat", &format!("{at}/ca.crt")]).await;
    assert_eq!(authority, std::fs::read_to_string(cluster.server.ca_file()).unwrap().trim());

    assert_service_variables(&cluster).await;

    // Kills of services change nothing: the token file is the same, and the container is unaffected.
    let before = running(&cluster.agent).await.unwrap();
    for service in [ServiceName::VolumeManager, ServiceName::PodConfig] {
        let process = cluster.agent.service(service).unwrap();
        process.signal(Signal::KILL);
        eventually(LIMIT, format!("{service} runs again"), async || {
            cluster.agent.service(service).is_some_and(|now| now != process)
        })
        .await
        .unwrap();
    }
    let mut alone = pod_with_token("alone");
    alone["spec"]["enableServiceLinks"] = false.into();
    cluster.run(&alone);
    cluster.until("a pod comes after it", || cluster.is_ready("alone")).await;
    let after = running(&cluster.agent).await.unwrap();
    for (name, process) in &before {
        assert_eq!(after.get(name), Some(process), "{name} has noticed nothing");
    }
    assert_eq!(command_output(&cluster, "web", &["cat", TOKEN]).await, token);
    let environment = command_output(&cluster, "alone", &["env"]).await;
    assert!(environment.contains("KUBERNETES_SERVICE_HOST=") && !environment.contains("DATA_BASE_"));
    assert_ne!(command_output(&cluster, "alone", &["cat", TOKEN]).await, token);

    // The token is valid only as long as the pod exists.
    cluster.kubectl(&["delete", "pod", "web", "--timeout=60s"]);
    let folder = cluster.agent.spec().root_dir.join("pods").join(&uid);
    eventually(LIMIT, "the pod's folder is gone", async || !folder.exists()).await.unwrap();
    cluster
        .until("the token is refused", || {
            review_token(&cluster, scratch.path(), &token)["authenticated"] != true
        })
        .await;
    let after = running(&cluster.agent).await.unwrap();
    assert!(after.keys().all(|key| before.contains_key(key) || key.starts_with("alone/")), "{after:?}");
    cluster.agent.end().unwrap();
}

/// Creates the service `data-base`, one without an address, and the runtime class `plain`.
fn create_services_and_runtime_class(cluster: &Cluster) {
    let metadata = |name: &str| json!({"name": name, "namespace": NAMESPACE});
    let ports = json!([{"name": "sql", "port": 5432}]);
    for (name, spec) in
        [("data-base", json!({"ports": ports})), ("headless", json!({"clusterIP": "None", "ports": ports}))]
    {
        let service =
            json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata(name), "spec": spec});
        cluster.server.apply(&service).unwrap();
    }
    let class = json!({"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "plain"}, "handler": "runc"});
    cluster.server.apply(&class).unwrap();
}

/// The pod `web` has the variables of the services that have an address.
async fn assert_service_variables(cluster: &Cluster) {
    let environment = command_output(cluster, "web", &["env"]).await;
    let address = |name: &str, namespace: &str| {
        let service = cluster.server.kubectl_json(&["-n", namespace, "get", "service", name]).unwrap();
        service["spec"]["clusterIP"].as_str().unwrap().to_owned()
    };
    let (api, base) = (address("kubernetes", "default"), address("data-base", NAMESPACE));
    for line in [
        format!("KUBERNETES_SERVICE_HOST={api}"),
        "KUBERNETES_SERVICE_PORT=443".to_owned(),
        "KUBERNETES_SERVICE_PORT_HTTPS=443".to_owned(),
        format!("DATA_BASE_SERVICE_HOST={base}"),
        "DATA_BASE_SERVICE_PORT_SQL=5432".to_owned(),
        format!("DATA_BASE_PORT_5432_TCP=tcp://{base}:5432"),
    ] {
        assert!(environment.lines().any(|l| l == line), "{line} is not in {environment}");
    }
    assert!(!environment.contains("HEADLESS_"), "{environment}");
}

#[tokio::test]
#[ignore = "an API server is built the first time, which takes minutes; cargo xtask test --long runs it"]
async fn a_pod_waits_for_the_token_of_a_missing_service_account_and_reports_it() {
    let scratch = Scratch::new().unwrap();
    let cluster = Cluster::start(&scratch, |_| ()).await;
    let metadata = json!({"name": "worker", "namespace": NAMESPACE});
    let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata});
    cluster.server.apply(&account).unwrap();
    // The server rejects pods of a missing account, so the account is deleted before the node sees the pod.
    let pod_config = cluster.agent.service(ServiceName::PodConfig).unwrap();
    pod_config.signal(Signal::STOP);
    let mut web = pod_with_token("web");
    web["spec"]["serviceAccountName"] = "worker".into();
    cluster.run(&web);
    cluster.kubectl(&["delete", "serviceaccount", "worker"]);
    pod_config.signal(Signal::CONT);
    eventually(LIMIT, "the wait is explained", async || {
        let explained = cluster.agent.keelson(&["explain", "pod", "-n", NAMESPACE, "web"]).await.unwrap();
        let explained = text(&explained);
        explained.contains("token of the service account \"worker\"") && explained.contains("not found")
    })
    .await
    .unwrap_or_else(|error| panic!("{error:#}\n{}", cluster.agent.log_tail()));
    cluster.server.apply(&account).unwrap();
    cluster.until("the pod is Ready", || cluster.is_ready("web")).await;
    let status =
        review_token(&cluster, scratch.path(), &command_output(&cluster, "web", &["cat", TOKEN]).await);
    assert_eq!(status["user"]["username"], format!("system:serviceaccount:{NAMESPACE}:worker"));
    cluster.agent.end().unwrap();
}
