//! ClusterTrustBundles of a server.

use std::sync::{Arc, Mutex};

use keelson_config::{Config, ServiceName};
use keelson_service_kit::Context;

use super::*;
use crate::checkpoint::Checkpoint;
use crate::fake_api::{FakeApi, refusal};
use crate::kubernetes_objects::ObjectCache;

fn wanted(kind: &str, name: &str) -> ObjectRequest {
    ObjectRequest { kind: kind.to_owned(), namespace: String::new(), name: name.to_owned() }
}

fn bundle(name: &str, text: &str) -> Value {
    json!({"metadata": {"name": name, "resourceVersion": "5", "managedFields": [{}]}, "spec": {"trustBundle": text}})
}

/// A server with these bundles in one version. Each watch is refused as expired after a list, so that the next list shows
/// the changes.
async fn server(folder: &std::path::Path, version: &'static str) -> (FakeApi, Arc<Mutex<Vec<Value>>>) {
    let bundles = Arc::new(Mutex::new(Vec::new()));
    let items = Arc::clone(&bundles);
    let server = FakeApi::start(folder, move |request| {
        if !request.path.starts_with(&format!("/apis/certificates.k8s.io/{version}/clustertrustbundles")) {
            return Some(refusal(404));
        }
        if request.path.contains("watch=1") {
            return Some(refusal(410));
        }
        let items = items.lock().unwrap().clone();
        Some((
            200,
            json!({"kind": "ClusterTrustBundleList", "metadata": {"resourceVersion": "5"}, "items": items}),
        ))
    })
    .await;
    (server, bundles)
}

fn cache(folder: &std::path::Path, server: &FakeApi, rows: &mut BTreeMap<String, Vec<u8>>) -> ObjectCache {
    let mut config = Config::default();
    config.paths.run_dir = folder.join("run");
    let ctx = Context::detached(ServiceName::PodConfig, config);
    ObjectCache::new(&ctx, server.api.clone(), Checkpoint::default(), rows)
}

/// The object once it is as `is_expected` says.
async fn until(
    cache: &ObjectCache,
    wanted: &ObjectRequest,
    is_expected: impl Fn(Option<&Value>) -> bool,
) -> Option<Value> {
    let mut changes = cache.changes();
    loop {
        if let Ok(found) = cache.get(wanted.clone()).await {
            let found: Option<Value> = found.map(|json| serde_json::from_slice(&json).unwrap());
            if is_expected(found.as_ref()) {
                return found;
            }
        }
        tokio::time::timeout(Duration::from_secs(30), changes.changed()).await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn bundles_of_a_signer_are_followed_as_one_list_and_a_named_one_alone() {
    let folder = tempfile::tempdir().unwrap();
    let (server, bundles) = server(folder.path(), "v1beta1").await;
    let cache = cache(folder.path(), &server, &mut BTreeMap::new());
    let (one, all) = (wanted(TRUST_BUNDLE, "a"), wanted(TRUST_BUNDLES, "example.com/ca"));
    cache.retain(&one, true);
    cache.retain(&all, true);
    assert_eq!(until(&cache, &one, |found| found.is_none()).await, None);
    let items = |list: Option<&Value>, count| {
        list.is_some_and(|list| list["items"].as_array().unwrap().len() == count)
    };
    until(&cache, &all, |list| items(list, 0)).await;
    *bundles.lock().unwrap() = vec![bundle("a", "1"), bundle("b", "2")];
    let list = until(&cache, &all, |list| items(list, 2)).await.unwrap();
    assert_eq!(
        (&list["kind"], &list["items"][1]["spec"]["trustBundle"]),
        (&json!(TRUST_BUNDLES), &json!("2"))
    );
    assert_eq!(list["items"][0]["metadata"]["managedFields"], Value::Null);
    let single = until(&cache, &one, |found| found.is_some()).await.unwrap();
    assert_eq!((&single["kind"], &single["spec"]["trustBundle"]), (&json!(TRUST_BUNDLE), &json!("1")));
    *bundles.lock().unwrap() = vec![bundle("a", "3")];
    until(&cache, &one, |found| found.is_some_and(|found| found["spec"]["trustBundle"] == "3")).await;
    let paths: Vec<String> = server.requests().into_iter().map(|request| request.path).collect();
    for selector in ["metadata.name", "spec.signerName"] {
        assert!(paths.iter().any(|path| path.contains(selector)), "{selector}: {paths:?}");
    }
}

#[tokio::test]
async fn a_server_with_the_older_version_only_is_asked_in_it() {
    let folder = tempfile::tempdir().unwrap();
    let (server, bundles) = server(folder.path(), "v1alpha1").await;
    bundles.lock().unwrap().push(bundle("a", "1"));
    let cache = cache(folder.path(), &server, &mut BTreeMap::new());
    let one = wanted(TRUST_BUNDLE, "a");
    cache.retain(&one, true);
    until(&cache, &one, |found| found.is_some()).await;
    assert!(server.requests()[0].path.contains("/v1beta1/"), "{:?}", server.requests());
}

#[tokio::test]
async fn a_server_without_bundles_is_an_error_and_not_a_missing_bundle() {
    let folder = tempfile::tempdir().unwrap();
    let (server, _) = server(folder.path(), "none").await;
    let cache = cache(folder.path(), &server, &mut BTreeMap::new());
    let one = wanted(TRUST_BUNDLE, "a");
    assert!(cache.get(one.clone()).await.is_err(), "it is not followed");
    let mut changes = cache.changes();
    cache.retain(&one, true);
    changes.changed().await.unwrap();
    assert!(cache.get(one).await.is_err());
    assert_eq!(server.requests().len(), 2, "each version once: {:?}", server.requests());
}

#[tokio::test]
async fn bundles_are_restored_after_a_restart_without_the_server() {
    let folder = tempfile::tempdir().unwrap();
    let all = wanted(TRUST_BUNDLES, "example.com/ca");
    let key = crate::followed_objects::checkpoint_key(&all);
    assert_eq!(crate::followed_objects::parse_checkpoint_key(&key), Some(all.clone()));
    let silent = FakeApi::start(folder.path(), |_| None).await;
    let cache = cache(folder.path(), &silent, &mut [(key, b"{\"items\":[]}".to_vec())].into());
    cache.retain(&all, true);
    assert_eq!(cache.get(all).await.unwrap().as_deref(), Some(&b"{\"items\":[]}"[..]));
}
