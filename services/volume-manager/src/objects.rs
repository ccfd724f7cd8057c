//! The cache of ConfigMaps, Secrets, ClusterTrustBundles and PodCertificateRequests that pods' volumes refer to, watched in pod-config. An
//! object is kept in memory only, and only while a pod refers to it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::Stream;
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_proto::keelson::pod_config::v1::pod_config_client::PodConfigClient;
use keelson_proto::keelson::pod_config::v1::watch_objects_response::Item;
use keelson_service_kit::{CancellationToken, Peer, Progress, Signal, follow};
use keelson_volume_manager_core::payload::{ObjectData, ObjectKind, ObjectLookup, ObjectName};
use tokio::sync::watch;

/// The size limit of a message from pod-config in bytes. A message contains one object of a manifest.
const MAX_MESSAGE: usize = 64 << 20;

/// The objects that pods refer to. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct ObjectCache(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    state: Mutex<State>,
    /// Incremented with each change of the set of names.
    names_version: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct State {
    objects: BTreeMap<ObjectName, CachedObject>,
    subscriptions: BTreeMap<u64, watch::Sender<()>>,
    last_id: u64,
}

#[derive(Default)]
struct CachedObject {
    lookup: ObjectLookup,
    subscriptions: BTreeSet<u64>,
}

// Never shows the object: it may be a Secret.
impl std::fmt::Debug for CachedObject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CachedObject").field("subscriptions", &self.subscriptions).finish_non_exhaustive()
    }
}

/// The objects that one pod refers to. Dropping it ends the references.
#[derive(Debug)]
pub(crate) struct Subscription {
    cache: ObjectCache,
    id: u64,
    names: BTreeSet<ObjectName>,
    changes: watch::Receiver<()>,
}

impl ObjectCache {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates a subscription without objects.
    pub(crate) fn subscribe(&self) -> Subscription {
        let sender = watch::Sender::new(());
        let changes = sender.subscribe();
        let mut state = self.state();
        state.last_id += 1;
        let id = state.last_id;
        state.subscriptions.insert(id, sender);
        drop(state);
        Subscription { cache: self.clone(), id, names: BTreeSet::new(), changes }
    }

    /// Looks up an object in the cache.
    pub(crate) fn lookup(&self, name: &ObjectName) -> ObjectLookup {
        self.state().objects.get(name).map_or(ObjectLookup::Unknown, |object| object.lookup.clone())
    }

    fn names(&self) -> BTreeSet<ObjectName> {
        self.state().objects.keys().cloned().collect()
    }

    /// Stores what pod-config reports about an object, and notifies its subscriptions of a change.
    pub(crate) fn store(&self, name: &ObjectName, lookup: ObjectLookup) {
        let mut state = self.state();
        let State { objects, subscriptions, .. } = &mut *state;
        let Some(object) = objects.get_mut(name).filter(|object| object.lookup != lookup) else { return };
        object.lookup = lookup;
        for sender in object.subscriptions.iter().filter_map(|id| subscriptions.get(id)) {
            sender.send_replace(());
        }
    }

    fn update_subscription(&self, id: u64, old: &BTreeSet<ObjectName>, new: &BTreeSet<ObjectName>) {
        if old == new {
            return;
        }
        let mut state = self.state();
        for name in old.difference(new) {
            if let Some(object) = state.objects.get_mut(name) {
                object.subscriptions.remove(&id);
                if object.subscriptions.is_empty() {
                    state.objects.remove(name);
                }
            }
        }
        for name in new.difference(old) {
            state.objects.entry(name.clone()).or_default().subscriptions.insert(id);
        }
        drop(state);
        self.0.names_version.send_modify(|count| *count += 1);
    }

    /// Watches the objects in pod-config until `shutdown`. While pod-config is down, the last data received stays in effect.
    pub(crate) async fn follow(self, peer: Peer, progress: Progress, shutdown: CancellationToken) {
        let name = peer.name().to_owned();
        let cache = self.clone();
        let open = move || {
            let mut client = PodConfigClient::new(peer.channel()).max_decoding_message_size(MAX_MESSAGE);
            let requests = cache.requests();
            async move { client.watch_objects(requests).await }
        };
        let on_message = move |signal: Signal<pb::WatchObjectsResponse>| {
            if let Signal::Message(pb::WatchObjectsResponse { item: Some(Item::Object(state)) }) = signal
                && let Some((name, lookup)) = parse_state(state)
            {
                self.store(&name, lookup);
            }
            std::future::ready(())
        };
        follow(&name, &progress, &shutdown, open, on_message).await;
    }

    /// The requests of a watch stream: first the full set of names, then each change relative to what was sent before.
    fn requests(&self) -> impl Stream<Item = pb::WatchObjectsRequest> + Send + use<> {
        let changes = self.0.names_version.subscribe();
        let initial = (self.clone(), changes, None::<BTreeSet<ObjectName>>);
        futures_util::stream::unfold(initial, |(cache, mut changes, sent)| async move {
            loop {
                changes.borrow_and_update();
                let names = cache.names();
                if sent.as_ref() != Some(&names) {
                    let old = sent.unwrap_or_default();
                    let watch = names.difference(&old).map(object_reference).collect();
                    let unwatch = old.difference(&names).map(object_reference).collect();
                    let request = pb::WatchObjectsRequest { watch, unwatch };
                    return Some((request, (cache, changes, Some(names))));
                }
                changes.changed().await.ok()?;
            }
        })
    }
}

impl Subscription {
    /// Replaces the set of objects.
    pub(crate) fn set(&mut self, names: BTreeSet<ObjectName>) {
        self.cache.update_subscription(self.id, &self.names, &names);
        self.names = names;
    }

    /// Whether one of the objects has changed since the last call.
    pub(crate) fn has_changed(&mut self) -> bool {
        let changed = self.changes.has_changed().unwrap_or(false);
        self.changes.mark_unchanged();
        changed
    }

    /// Waits until [`Self::has_changed`] is true. Cancel-safe: it does not mark the change as seen.
    pub(crate) async fn changed(&self) -> bool {
        let mut changes = self.changes.clone();
        match changes.changed().await {
            Ok(()) => true,
            Err(_) => std::future::pending().await,
        }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.set(BTreeSet::new());
        self.cache.state().subscriptions.remove(&self.id);
    }
}

fn object_reference(name: &ObjectName) -> pb::ObjectReference {
    pb::ObjectReference {
        kind: name.kind.as_str().to_owned(),
        namespace: name.namespace.clone(),
        name: name.name.clone(),
    }
}

/// Reads a message about an object; `None` for a kind that is never requested.
fn parse_state(state: pb::ObjectState) -> Option<(ObjectName, ObjectLookup)> {
    let pb::ObjectReference { kind, namespace, name } = state.reference?;
    let name = ObjectName { kind: ObjectKind::parse(&kind)?, namespace, name };
    let lookup = match state.object_json {
        None => ObjectLookup::Missing,
        Some(json) => match parse_data(name.kind, &json) {
            Ok(data) => ObjectLookup::Present(Arc::new(data)),
            Err(why) => {
                tracing::warn!(object = %name, "cannot read the object: {why}");
                ObjectLookup::Unreadable(why)
            }
        },
    };
    Some((name, lookup))
}

/// The data of an object. Errors name keys but never values.
fn parse_data(kind: ObjectKind, json: &[u8]) -> Result<ObjectData, String> {
    let object: serde_json::Value = serde_json::from_slice(json)
        .map_err(|error| format!("it is not valid JSON: line {}", error.line()))?;
    let mut data = ObjectData::new();
    if !kind.has_keys() {
        return whole_objects(kind, object);
    }
    for (field, is_base64) in [("data", kind == ObjectKind::Secret), ("binaryData", true)] {
        if kind == ObjectKind::Secret && field == "binaryData" {
            continue;
        }
        let Some(pairs) = object[field].as_object() else { continue };
        for (key, value) in pairs {
            let text = value.as_str().ok_or_else(|| format!("{field}[{key}] is not a string"))?;
            let bytes = if is_base64 {
                keelson_kube_model::base64::decode(text)
                    .ok_or_else(|| format!("{field}[{key}] is not valid base64"))?
            } else {
                text.as_bytes().to_vec()
            };
            data.insert(key.clone(), bytes.into());
        }
    }
    Ok(data)
}

/// The JSON of each ClusterTrustBundle, or of the PodCertificateRequest, by name.
fn whole_objects(kind: ObjectKind, object: serde_json::Value) -> Result<ObjectData, String> {
    let list = match (kind, object) {
        (ObjectKind::ClusterTrustBundleList, mut list) => match list["items"].take() {
            serde_json::Value::Array(items) => items,
            _ => return Err("its items are not a list".to_owned()),
        },
        (_, one) => vec![one],
    };
    let one = |object: serde_json::Value| {
        let name = object["metadata"]["name"].as_str().ok_or("an object has no name")?.to_owned();
        Ok((name, object.to_string().into_bytes().into()))
    };
    list.into_iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use futures_util::StreamExt as _;

    use super::*;

    fn name(name: &str) -> ObjectName {
        ObjectName { kind: ObjectKind::ConfigMap, namespace: "ns".into(), name: name.into() }
    }

    fn names(list: &[&str]) -> BTreeSet<ObjectName> {
        list.iter().map(|n| name(n)).collect()
    }

    fn bytes(data: &ObjectData, key: &str) -> Vec<u8> {
        data[key].to_vec()
    }

    #[test]
    fn config_map_data_is_text_or_base64_and_secret_data_is_base64() {
        let map = br#"{"data": {"a": "x=="}, "binaryData": {"b": "/w==\n"}}"#;
        let map = parse_data(ObjectKind::ConfigMap, map).unwrap();
        assert_eq!((bytes(&map, "a"), bytes(&map, "b")), (b"x==".to_vec(), vec![0xff]));
        let secret = br#"{"data": {"a": "eA\r\n=="}, "binaryData": {"b": "eA=="}}"#;
        let secret = parse_data(ObjectKind::Secret, secret).unwrap();
        assert_eq!((bytes(&secret, "a"), secret.len()), (b"x".to_vec(), 1));
        assert!(parse_data(ObjectKind::Secret, br#"{"data": null}"#).unwrap().is_empty());
    }

    #[test]
    fn unreadable_object_data_is_reported_without_its_value() {
        for (json, text) in [
            (r#"{"data": {"a": "hunter2!"}}"#, "data[a] is not valid base64"),
            (r#"{"data": {"a": 5}}"#, "data[a] is not a string"),
            (r#"{"data": hunter2!}"#, "it is not valid JSON: line 1"),
        ] {
            assert_eq!(parse_data(ObjectKind::Secret, json.as_bytes()).unwrap_err(), text);
        }
    }

    #[test]
    fn bundles_are_kept_as_json_by_name() {
        let one = br#"{"metadata": {"name": "ca"}, "spec": {"trustBundle": "x"}}"#;
        let list = br#"{"items": [{"metadata": {"name": "a"}}, {"metadata": {"name": "b"}}]}"#;
        let (single, all) = (ObjectKind::ClusterTrustBundle, ObjectKind::ClusterTrustBundleList);
        let read = parse_data(single, one).unwrap();
        assert_eq!(
            serde_json::from_slice::<serde_json::Value>(&read["ca"]).unwrap()["spec"]["trustBundle"],
            "x"
        );
        assert_eq!(parse_data(all, list).unwrap().into_keys().collect::<Vec<_>>(), ["a", "b"]);
        assert!(parse_data(all, br#"{"items": []}"#).unwrap().is_empty());
        for (kind, json, why) in [
            (all, &b"{}"[..], "its items are not a list"),
            (all, br#"{"items": [{}]}"#, "an object has no name"),
            (single, br#"{"data": {}}"#, "an object has no name"),
        ] {
            assert_eq!(parse_data(kind, json).unwrap_err(), why);
        }
    }

    #[tokio::test]
    async fn only_subscribers_of_an_object_are_notified_of_its_changes() {
        let objects = ObjectCache::default();
        let (mut one, mut other) = (objects.subscribe(), objects.subscribe());
        one.set(names(&["a", "b"]));
        other.set(names(&["b"]));
        assert_eq!(objects.lookup(&name("a")), ObjectLookup::Unknown);
        objects.store(&name("a"), ObjectLookup::Missing);
        one.changed().await;
        assert!(one.has_changed() && !one.has_changed() && !other.has_changed());
        objects.store(&name("a"), ObjectLookup::Missing);
        assert!(!one.has_changed(), "nothing is new");
        objects.store(&name("b"), ObjectLookup::Missing);
        assert!(one.has_changed() && other.has_changed());
        objects.store(&name("c"), ObjectLookup::Missing);
        assert_eq!(objects.lookup(&name("c")), ObjectLookup::Unknown);
    }

    #[test]
    fn an_object_is_dropped_with_its_last_subscription() {
        let objects = ObjectCache::default();
        let (mut one, mut other) = (objects.subscribe(), objects.subscribe());
        one.set(names(&["a", "b"]));
        other.set(names(&["b"]));
        objects.store(&name("b"), ObjectLookup::Missing);
        drop(one);
        assert_eq!(objects.names(), names(&["b"]));
        assert_eq!(objects.lookup(&name("b")), ObjectLookup::Missing);
        other.set(BTreeSet::new());
        assert!(objects.names().is_empty());
        assert_eq!(objects.lookup(&name("b")), ObjectLookup::Unknown);
    }

    #[tokio::test]
    async fn an_object_watch_sends_the_full_set_first_and_then_changes() {
        let objects = ObjectCache::default();
        let mut subscription = objects.subscribe();
        let shown = |request: pb::WatchObjectsRequest| {
            let names = |list: Vec<pb::ObjectReference>| list.into_iter().map(|r| r.name).collect::<Vec<_>>();
            (names(request.watch), names(request.unwatch))
        };
        let mut stream = Box::pin(objects.requests());
        assert_eq!(shown(stream.next().await.unwrap()), (vec![], vec![]), "an empty set is sent, too");
        subscription.set(names(&["a", "b"]));
        subscription.set(names(&["b", "c"]));
        assert_eq!(shown(stream.next().await.unwrap()), (vec!["b".to_owned(), "c".to_owned()], vec![]));
        subscription.set(names(&["c"]));
        assert_eq!(shown(stream.next().await.unwrap()), (vec![], vec!["b".to_owned()]));
        let mut later = Box::pin(objects.requests());
        assert_eq!(shown(later.next().await.unwrap()), (vec!["c".to_owned()], vec![]));
    }
}
