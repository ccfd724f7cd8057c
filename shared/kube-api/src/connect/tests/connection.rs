//! The connection: credentials, changes of the kubeconfig, streams.

use std::fs;
use std::path::Path;
use std::time::Duration;

use rcgen::ExtendedKeyUsagePurpose;
use serde_json::{Value, json};

use super::{Authority, encoded};
use crate::connect::KubeApi;
use crate::fake::{Answer, FakeApi};
use crate::metrics::RestMetrics;
use crate::resource::{Range, Resource};

#[tokio::test]
async fn http2_client_uses_the_kubeconfig_certificate_and_reconnects_on_change() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new();
    let node = json!({"metadata": {"name": "n"}});
    let server = FakeApi::with_tls(authority.server(), move |_| Answer::json(&node)).await;
    let cluster = json!({"certificate-authority-data": encoded(&authority.pem())});
    let api = KubeApi::new(folder.path().join("kubeconfig"), "kubelet/test");

    let missing = api.get(Resource::NODE, None, "n").await.unwrap_err().to_string();
    assert!(missing.starts_with("invalid kubeconfig: ") && missing.contains("No such file"), "{missing}");

    let (stranger, key) = Authority::new().signed(ExtendedKeyUsagePurpose::ClientAuth);
    let user = json!({"client-certificate-data": encoded(&stranger), "client-key-data": encoded(&key)});
    server.kubeconfig(folder.path(), &cluster, &user);
    let refused = api.get(Resource::NODE, None, "n").await.unwrap_err().to_string();
    assert!(refused.contains("does not answer nodes n"), "{refused}");

    let (certificate, key) = authority.signed(ExtendedKeyUsagePurpose::ClientAuth);
    let user = json!({"client-certificate-data": encoded(&certificate), "client-key-data": encoded(&key)});
    server.kubeconfig(folder.path(), &cluster, &user);
    let found = api.get(Resource::NODE, None, "n").await.unwrap().unwrap();
    assert_eq!(found.name(), "n");
    assert_eq!(server.asked().last().unwrap().version, http::Version::HTTP_2);

    api.give_up_connection();
    assert_eq!(api.server(), server.url, "the address is still known");
    api.get(Resource::NODE, None, "n").await.unwrap().unwrap();
    // An invalid file changes nothing.
    std::fs::write(folder.path().join("kubeconfig"), "clusters: [").unwrap();
    api.get(Resource::NODE, None, "n").await.unwrap().unwrap();
}

#[tokio::test]
async fn calls_are_answered_while_watches_use_every_stream_of_their_connection() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new();
    let server = FakeApi::with_few_streams(authority.server(), 2, |asked| {
        let is_watch = asked.path.contains("watch=1");
        if is_watch { Answer::Open(Vec::new()) } else { Answer::json(&json!({"metadata": {"name": "n"}})) }
    })
    .await;
    let (certificate, key) = authority.signed(ExtendedKeyUsagePurpose::ClientAuth);
    let user = json!({"client-certificate-data": encoded(&certificate), "client-key-data": encoded(&key)});
    let cluster = json!({"certificate-authority-data": encoded(&authority.pem())});
    let api = KubeApi::new(server.kubeconfig(folder.path(), &cluster, &user), "kubelet/test");
    let range = Range::all(Resource::NODE);
    let (_first, _) = api.watch(&range, "1").await.unwrap();
    let (_second, _) = api.watch(&range, "1").await.unwrap();
    let waits = tokio::spawn({
        let (api, range) = (api.clone(), range.clone());
        async move { api.watch(&range, "1").await.map(|_| ()) }
    });
    for _ in 0..10 {
        tokio::time::timeout(Duration::from_secs(20), api.get(Resource::NODE, None, "n"))
            .await
            .expect("a call waits for no watch")
            .unwrap();
    }
    assert!(!waits.is_finished());
    waits.abort();
}

#[tokio::test]
async fn server_certificate_of_another_ca_is_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let server = FakeApi::with_tls(Authority::new().server(), |_| Answer::Nothing).await;
    let cluster = json!({"certificate-authority-data": encoded(&Authority::new().pem())});
    let api = KubeApi::new(server.kubeconfig(folder.path(), &cluster, &json!({})), "kubelet/test");
    let error = api.get(Resource::NODE, None, "n").await.unwrap_err().to_string();
    assert!(error.contains("certificate"), "{error}");
}

#[tokio::test]
async fn missing_kubeconfig_is_awaited_and_a_removed_one_is_no_longer_used() {
    let folder = tempfile::tempdir().unwrap();
    let server = FakeApi::start(|_| Answer::json(&json!({"metadata": {"name": "n"}}))).await;
    let path = folder.path().join("kubeconfig");
    let api = KubeApi::awaiting(path.clone(), "kubelet/test", RestMetrics::default(), "init writes it");
    let ask = || api.get(Resource::NODE, None, "n");
    for _ in 0..2 {
        let error = ask().await.unwrap_err();
        assert!(error.is_awaited(), "{error}");
        assert_eq!(error.to_string(), "the API server cannot be called yet: init writes it");
        server.kubeconfig(folder.path(), &json!({}), &json!({"token": "t"}));
        ask().await.unwrap().unwrap();
        std::fs::remove_file(&path).unwrap();
    }
}

#[tokio::test]
async fn only_a_refused_exec_credential_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let server = FakeApi::start(|asked| match asked.path.contains("watch") {
        true => Answer::refusal(401, "Unauthorized", "Unauthorized"),
        false => Answer::refusal(403, "Forbidden", "no"),
    })
    .await;
    let kubeconfig = server.kubeconfig(folder.path(), &json!({}), &json!({"token": "t"}));
    let report = folder.path().join("refused-credential");
    let asked = async |path: &Path| {
        let api = KubeApi::new(path.to_owned(), "kubelet/test").reporting_refusals(report.clone());
        api.get(Resource::NODE, None, "n").await.unwrap_err();
        assert!(!report.exists(), "the server knows this node, and forbids something else");
        let range = Range::of_fields(Resource::NODE, "metadata.name=n".to_owned());
        assert!(api.watch(&range, "1").await.is_err());
    };
    asked(&kubeconfig).await;
    assert!(!report.exists(), "the token is from the kubeconfig itself");
    // As init writes it.
    let mut file: Value = serde_json::from_slice(&fs::read(&kubeconfig).unwrap()).unwrap();
    file["keelsonCredential"] = "17".into();
    fs::write(&kubeconfig, file.to_string()).unwrap();
    asked(&kubeconfig).await;
    assert_eq!(fs::read_to_string(&report).unwrap(), "17");
}
