//! The ConfigMaps and Secrets that pods' volumes are made of, as pod-config tells them. Held in memory only, and
//! only while a pod refers to them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::Stream;
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_proto::keelson::pod_config::v1::pod_config_client::PodConfigClient;
use keelson_proto::keelson::pod_config::v1::watch_objects_response::Item;
use keelson_service_kit::{CancellationToken, Peer, Progress, Signal, follow};
use keelson_volume_manager_core::payload::{Data, Lookup, ObjectKind, ObjectName};
use tokio::sync::watch;

/// What a pod-config may send in one message: an object of a manifest.
const MAX_MESSAGE: usize = 64 << 20;

/// The objects that somebody refers to. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct Objects(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    state: Mutex<State>,
    /// Counts the changes of the set of names.
    names: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct State {
    entries: BTreeMap<ObjectName, Entry>,
    claims: BTreeMap<u64, watch::Sender<()>>,
    last_claim: u64,
}

#[derive(Default)]
struct Entry {
    found: Lookup,
    claims: BTreeSet<u64>,
}

// Never what was found: it may be a Secret.
impl std::fmt::Debug for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Entry").field("claims", &self.claims).finish_non_exhaustive()
    }
}

/// What one pod refers to; dropped, it refers to nothing.
#[derive(Debug)]
pub(crate) struct Claim {
    objects: Objects,
    id: u64,
    names: BTreeSet<ObjectName>,
    changes: watch::Receiver<()>,
}

impl Objects {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A claim on nothing yet.
    pub(crate) fn claim(&self) -> Claim {
        let sender = watch::Sender::new(());
        let changes = sender.subscribe();
        let mut state = self.state();
        state.last_claim += 1;
        let id = state.last_claim;
        state.claims.insert(id, sender);
        drop(state);
        Claim { objects: self.clone(), id, names: BTreeSet::new(), changes }
    }

    /// What is known of an object.
    pub(crate) fn look(&self, name: &ObjectName) -> Lookup {
        self.state().entries.get(name).map_or(Lookup::Unknown, |entry| entry.found.clone())
    }

    fn names(&self) -> BTreeSet<ObjectName> {
        self.state().entries.keys().cloned().collect()
    }

    /// Takes what pod-config says of an object; those who refer to it hear of a change.
    fn take(&self, name: &ObjectName, found: Lookup) {
        let mut state = self.state();
        let State { entries, claims, .. } = &mut *state;
        let Some(entry) = entries.get_mut(name).filter(|entry| entry.found != found) else { return };
        entry.found = found;
        for sender in entry.claims.iter().filter_map(|id| claims.get(id)) {
            sender.send_replace(());
        }
    }

    fn change(&self, id: u64, old: &BTreeSet<ObjectName>, new: &BTreeSet<ObjectName>) {
        if old == new {
            return;
        }
        let mut state = self.state();
        for name in old.difference(new) {
            if let Some(entry) = state.entries.get_mut(name) {
                entry.claims.remove(&id);
                if entry.claims.is_empty() {
                    state.entries.remove(name);
                }
            }
        }
        for name in new.difference(old) {
            state.entries.entry(name.clone()).or_default().claims.insert(id);
        }
        drop(state);
        self.0.names.send_modify(|count| *count += 1);
    }

    /// Follows the objects in pod-config until `shutdown`. While it is away, what it has told stands.
    pub(crate) async fn follow(self, peer: Peer, progress: Progress, shutdown: CancellationToken) {
        let name = peer.name().to_owned();
        let asking = self.clone();
        let open = move || {
            let mut client = PodConfigClient::new(peer.channel()).max_decoding_message_size(MAX_MESSAGE);
            let requests = asking.requests();
            async move { client.watch_objects(requests).await }
        };
        let on = move |signal: Signal<pb::WatchObjectsResponse>| {
            if let Signal::Message(pb::WatchObjectsResponse { item: Some(Item::Object(state)) }) = signal
                && let Some((name, found)) = read(state)
            {
                self.take(&name, found);
            }
            std::future::ready(())
        };
        follow(&name, &progress, &shutdown, open, on).await;
    }

    /// The set of names, and then its changes, each time against what this stream has sent.
    fn requests(&self) -> impl Stream<Item = pb::WatchObjectsRequest> + Send + use<> {
        let changes = self.0.names.subscribe();
        let begin = (self.clone(), changes, None::<BTreeSet<ObjectName>>);
        futures_util::stream::unfold(begin, |(objects, mut changes, sent)| async move {
            loop {
                changes.borrow_and_update();
                let names = objects.names();
                if sent.as_ref() != Some(&names) {
                    let old = sent.unwrap_or_default();
                    let watch = names.difference(&old).map(reference).collect();
                    let unwatch = old.difference(&names).map(reference).collect();
                    let request = pb::WatchObjectsRequest { watch, unwatch };
                    return Some((request, (objects, changes, Some(names))));
                }
                changes.changed().await.ok()?;
            }
        })
    }
}

impl Claim {
    /// Refers to these objects and no others from now on.
    pub(crate) fn set(&mut self, names: BTreeSet<ObjectName>) {
        self.objects.change(self.id, &self.names, &names);
        self.names = names;
    }

    /// Whether one of the objects has changed since this was asked last.
    pub(crate) fn has_changed(&mut self) -> bool {
        let changed = self.changes.has_changed().unwrap_or(false);
        self.changes.mark_unchanged();
        changed
    }

    /// Waits until [`Self::has_changed`]. Cancel-safe; it takes nothing away.
    pub(crate) async fn changed(&self) -> bool {
        let mut changes = self.changes.clone();
        match changes.changed().await {
            Ok(()) => true,
            Err(_) => std::future::pending().await,
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.set(BTreeSet::new());
        self.objects.state().claims.remove(&self.id);
    }
}

fn reference(name: &ObjectName) -> pb::ObjectReference {
    pb::ObjectReference {
        kind: name.kind.as_str().to_owned(),
        namespace: name.namespace.clone(),
        name: name.name.clone(),
    }
}

/// What a message says of which object; none for one that was not asked for.
fn read(state: pb::ObjectState) -> Option<(ObjectName, Lookup)> {
    let pb::ObjectReference { kind, namespace, name } = state.reference?;
    let name = ObjectName { kind: ObjectKind::parse(&kind)?, namespace, name };
    let found = match state.object_json {
        None => Lookup::Missing,
        Some(json) => match data(name.kind, &json) {
            Ok(data) => Lookup::Present(Arc::new(data)),
            Err(why) => {
                tracing::warn!(object = %name, "cannot be read: {why}");
                Lookup::Unreadable(why)
            }
        },
    };
    Some((name, found))
}

/// The bytes of each key. The texts of errors name keys and never values.
fn data(kind: ObjectKind, json: &[u8]) -> Result<Data, String> {
    let object: serde_json::Value =
        serde_json::from_slice(json).map_err(|error| format!("it is no JSON: line {}", error.line()))?;
    let mut data = Data::new();
    for (field, is_base64) in [("data", kind == ObjectKind::Secret), ("binaryData", true)] {
        if kind == ObjectKind::Secret && field == "binaryData" {
            continue;
        }
        let Some(pairs) = object[field].as_object() else { continue };
        for (key, value) in pairs {
            let text = value.as_str().ok_or_else(|| format!("{field}[{key}] is no text"))?;
            let bytes = if is_base64 {
                keelson_kube_model::base64::decode(text)
                    .ok_or_else(|| format!("{field}[{key}] is no base64"))?
            } else {
                text.as_bytes().to_vec()
            };
            data.insert(key.clone(), bytes.into());
        }
    }
    Ok(data)
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

    fn bytes(data: &Data, key: &str) -> Vec<u8> {
        data[key].to_vec()
    }

    #[test]
    fn the_data_of_a_config_map_is_text_and_bytes_and_that_of_a_secret_bytes() {
        let map = br#"{"data": {"a": "x=="}, "binaryData": {"b": "/w==\n"}}"#;
        let map = data(ObjectKind::ConfigMap, map).unwrap();
        assert_eq!((bytes(&map, "a"), bytes(&map, "b")), (b"x==".to_vec(), vec![0xff]));
        let secret = br#"{"data": {"a": "eA\r\n=="}, "binaryData": {"b": "eA=="}}"#;
        let secret = data(ObjectKind::Secret, secret).unwrap();
        assert_eq!((bytes(&secret, "a"), secret.len()), (b"x".to_vec(), 1));
        assert!(data(ObjectKind::Secret, br#"{"data": null}"#).unwrap().is_empty());
    }

    #[test]
    fn what_cannot_be_read_is_named_without_its_value() {
        for (json, text) in [
            (r#"{"data": {"a": "hunter2!"}}"#, "data[a] is no base64"),
            (r#"{"data": {"a": 5}}"#, "data[a] is no text"),
            (r#"{"data": hunter2!}"#, "it is no JSON: line 1"),
        ] {
            assert_eq!(data(ObjectKind::Secret, json.as_bytes()).unwrap_err(), text);
        }
    }

    #[tokio::test]
    async fn only_those_who_refer_to_an_object_hear_of_its_changes() {
        let objects = Objects::default();
        let (mut one, mut other) = (objects.claim(), objects.claim());
        one.set(names(&["a", "b"]));
        other.set(names(&["b"]));
        assert_eq!(objects.look(&name("a")), Lookup::Unknown);
        objects.take(&name("a"), Lookup::Missing);
        one.changed().await;
        assert!(one.has_changed() && !one.has_changed() && !other.has_changed());
        objects.take(&name("a"), Lookup::Missing);
        assert!(!one.has_changed(), "nothing is new");
        objects.take(&name("b"), Lookup::Missing);
        assert!(one.has_changed() && other.has_changed());
        objects.take(&name("c"), Lookup::Missing);
        assert_eq!(objects.look(&name("c")), Lookup::Unknown);
    }

    #[test]
    fn an_object_is_forgotten_with_the_last_pod_that_refers_to_it() {
        let objects = Objects::default();
        let (mut one, mut other) = (objects.claim(), objects.claim());
        one.set(names(&["a", "b"]));
        other.set(names(&["b"]));
        objects.take(&name("b"), Lookup::Missing);
        drop(one);
        assert_eq!(objects.names(), names(&["b"]));
        assert_eq!(objects.look(&name("b")), Lookup::Missing);
        other.set(BTreeSet::new());
        assert!(objects.names().is_empty());
        assert_eq!(objects.look(&name("b")), Lookup::Unknown);
    }

    #[tokio::test]
    async fn a_stream_sends_the_set_first_and_then_what_changes() {
        let objects = Objects::default();
        let mut claim = objects.claim();
        let shown = |request: pb::WatchObjectsRequest| {
            let names = |list: Vec<pb::ObjectReference>| list.into_iter().map(|r| r.name).collect::<Vec<_>>();
            (names(request.watch), names(request.unwatch))
        };
        let mut stream = Box::pin(objects.requests());
        assert_eq!(shown(stream.next().await.unwrap()), (vec![], vec![]), "an empty set is told too");
        claim.set(names(&["a", "b"]));
        claim.set(names(&["b", "c"]));
        assert_eq!(shown(stream.next().await.unwrap()), (vec!["b".to_owned(), "c".to_owned()], vec![]));
        claim.set(names(&["c"]));
        assert_eq!(shown(stream.next().await.unwrap()), (vec![], vec!["b".to_owned()]));
        let mut later = Box::pin(objects.requests());
        assert_eq!(shown(later.next().await.unwrap()), (vec!["c".to_owned()], vec![]));
    }
}
