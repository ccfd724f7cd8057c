//! The cache of the objects to which API pods refer.

use std::sync::atomic::{AtomicBool, Ordering};

use keelson_config::Config;
use serde_json::{Value, json};

use super::*;
use crate::fake_api::{FakeApi, refusal};
use crate::followed_objects::parse_checkpoint_key;

#[test]
fn checkpoint_keys_of_objects_round_trip() {
    let wanted =
        ObjectRequest { kind: "ConfigMap".to_owned(), namespace: "d".to_owned(), name: "a.b".to_owned() };
    assert_eq!(checkpoint_key(&wanted), "api:objects/ConfigMap/d/a.b");
    assert_eq!(parse_checkpoint_key(&checkpoint_key(&wanted)), Some(wanted));
    for other in ["api:pods/d/a", "api:objects/ConfigMap/d", "/keelson/v1/nodes/n/objects/ConfigMap/d/a"] {
        assert_eq!(parse_checkpoint_key(other), None, "{other}");
    }
}

fn runtime_class() -> ObjectRequest {
    ObjectRequest { kind: RUNTIME_CLASS.to_owned(), namespace: String::new(), name: "kata".to_owned() }
}

/// A cache that follows the RuntimeClass of a server; the flag deletes the class at the server.
async fn cache(folder: &std::path::Path, config: &Config) -> (FakeApi, ObjectCache, Arc<AtomicBool>) {
    let is_deleted = Arc::new(AtomicBool::new(false));
    let deleted = Arc::clone(&is_deleted);
    let server = FakeApi::start(folder, move |request| {
        let object = json!({"metadata": {"name": "kata", "resourceVersion": "5"}, "handler": "kata-qemu"});
        match (request.path.contains("watch=1"), request.path.contains('?')) {
            (true, _) => None,
            (false, true) => {
                let items = if deleted.load(Ordering::SeqCst) { json!([]) } else { json!([object]) };
                Some((
                    200,
                    json!({"kind": "RuntimeClassList", "metadata": {"resourceVersion": "5"}, "items": items}),
                ))
            }
            (false, false) if deleted.load(Ordering::SeqCst) => Some(refusal(404)),
            (false, false) => Some((200, object)),
        }
    })
    .await;
    let ctx = Context::detached(ServiceName::PodConfig, config.clone());
    let cache = ObjectCache::new(&ctx, server.api.clone(), Checkpoint::default(), &mut BTreeMap::new());
    (server, cache, is_deleted)
}

fn config(folder: &std::path::Path) -> Config {
    let mut config = Config::default();
    config.paths.run_dir = folder.join("run");
    config
}

#[tokio::test]
async fn a_runtime_class_is_read_once_and_cached_without_the_server_and_over_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path());
    let (server, cache, _) = cache(folder.path(), &config).await;
    let first = cache.get(runtime_class()).await.unwrap().unwrap();
    assert!(String::from_utf8_lossy(&first).contains("kata-qemu"));
    for _ in 0..3 {
        assert_eq!(cache.get(runtime_class()).await.unwrap().as_ref(), Some(&first));
    }
    let reads = server.requests().iter().filter(|request| !request.path.contains('?')).count();
    assert_eq!(reads, 1, "{:?}", server.requests());
    drop(server);
    assert_eq!(cache.get(runtime_class()).await.unwrap().as_ref(), Some(&first));

    assert_eq!(cache.0.checkpoint.paths(), [checkpoint_key(&runtime_class())]);
    let silent = FakeApi::start(folder.path(), |_| None).await;
    let ctx = Context::detached(ServiceName::PodConfig, config);
    let mut restored = [(checkpoint_key(&runtime_class()), first.clone())].into();
    let after = ObjectCache::new(&ctx, silent.api.clone(), Checkpoint::default(), &mut restored);
    for _ in 0..2 {
        assert_eq!(
            after.get(runtime_class()).await.unwrap().as_ref(),
            Some(&first),
            "no call waits for the server"
        );
    }
}

fn map() -> ObjectRequest {
    ObjectRequest { kind: "ConfigMap".to_owned(), namespace: "d".to_owned(), name: "words".to_owned() }
}

/// A cache with the given strategy; its server counts the reads and returns the count as the word.
async fn cache_with_strategy(folder: &std::path::Path, strategy: ObjectsBy) -> (FakeApi, ObjectCache) {
    let server = FakeApi::start(folder, {
        let mut reads = 0;
        move |request| {
            assert!(!request.path.contains("watch=1") && !request.path.contains('?'), "{request:?}");
            reads += 1;
            // The second read fails.
            let object = json!({"metadata": {"name": "words", "namespace": "d"}, "data": {"word": reads}});
            Some(if reads == 2 { refusal(503) } else { (200, object) })
        }
    })
    .await;
    let mut config = config(folder);
    let mut settings = keelson_config::Kubernetes::of("/none".into());
    settings.objects_by = strategy;
    config.control_plane = ControlPlane::Kubernetes(settings);
    let ctx = Context::detached(ServiceName::PodConfig, config);
    let cache = ObjectCache::new(&ctx, server.api.clone(), Checkpoint::default(), &mut BTreeMap::new());
    (server, cache)
}

async fn word(cache: &ObjectCache) -> i64 {
    let object: Value = serde_json::from_slice(&cache.get(map()).await.unwrap().unwrap()).unwrap();
    object["data"]["word"].as_i64().unwrap()
}

#[tokio::test]
async fn with_cache_strategy_an_object_is_reread_by_age_or_for_a_new_pod_and_not_watched() {
    let folder = tempfile::tempdir().unwrap();
    let (server, cache) = cache_with_strategy(folder.path(), ObjectsBy::Cache).await;
    let mut changes = cache.changes();
    cache.retain(&map(), true);
    changes.changed().await.unwrap();
    for _ in 0..3 {
        assert_eq!(word(&cache).await, 1);
    }
    assert_eq!(server.requests().len(), 1, "users get the cached version");
    // A new user: the first read fails and the cached version is returned meanwhile.
    *cache.0.ttl.lock().unwrap() = Duration::from_millis(50);
    cache.retain(&map(), true);
    assert_eq!(word(&cache).await, 1);
    changes.changed().await.unwrap();
    assert!(word(&cache).await >= 3);
    // Then it is read again because of its age alone.
    changes.changed().await.unwrap();
    assert!(word(&cache).await >= 4);
}

#[tokio::test]
async fn with_get_strategy_an_object_is_read_on_each_use_and_cached_for_outages() {
    let folder = tempfile::tempdir().unwrap();
    let (server, cache) = cache_with_strategy(folder.path(), ObjectsBy::Get).await;
    let mut changes = cache.changes();
    cache.retain(&map(), true);
    changes.changed().await.unwrap();
    assert_eq!(word(&cache).await, 1, "the second read is refused");
    assert_eq!(word(&cache).await, 3);
    changes.changed().await.unwrap();
    assert_eq!(word(&cache).await, 4);
    drop(server);
    assert_eq!(word(&cache).await, 4);
}

#[test]
fn cached_objects_live_a_minute_or_as_long_as_the_nodes_ttl_annotation_says() {
    let folder = tempfile::tempdir().unwrap();
    let ctx = Context::detached(ServiceName::PodConfig, config(folder.path()));
    let api = KubeApi::new("/none".into(), "test");
    let cache = ObjectCache::new(&ctx, api, Checkpoint::default(), &mut BTreeMap::new());
    for (annotation, seconds) in [(Some(300), 300), (Some(0), 60), (None, 60)] {
        cache.set_ttl_seconds(annotation);
        assert_eq!(cache.ttl(), Duration::from_secs(seconds), "{annotation:?}");
    }
}

#[tokio::test]
async fn a_deleted_runtime_class_is_forgotten_and_read_again() {
    let folder = tempfile::tempdir().unwrap();
    let (server, cache, deleted) = cache(folder.path(), &config(folder.path())).await;
    let known = cache.get(runtime_class()).await.unwrap().unwrap();
    deleted.store(true, Ordering::SeqCst);
    // The list of its follower may be from before the deletion.
    cache.update(&runtime_class(), None);
    assert!(cache.state().state(&runtime_class()).is_none());
    assert_eq!(cache.0.checkpoint.paths(), [""; 0]);
    assert_eq!(cache.get(runtime_class()).await.unwrap(), None);
    deleted.store(false, Ordering::SeqCst);
    assert_eq!(cache.get(runtime_class()).await.unwrap(), Some(known));
    drop(server);
}
