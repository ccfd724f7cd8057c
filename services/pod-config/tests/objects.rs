//! `WatchObjects` and `GetObject`: ConfigMaps and Secrets from manifests.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod common;

use std::fs;

use common::{Node, Service, TIMEOUT, replace};
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_proto::keelson::pod_config::v1::watch_objects_response::Item;
use tonic::{Code, Streaming};

/// A `WatchObjects` stream, with the sender of its requests.
struct ObjectWatch {
    sender: tokio::sync::mpsc::Sender<pb::WatchObjectsRequest>,
    answers: Streaming<pb::WatchObjectsResponse>,
}

fn reference(kind: &str, name: &str) -> pb::ObjectReference {
    pb::ObjectReference { kind: kind.into(), namespace: "default".into(), name: name.into() }
}

impl ObjectWatch {
    async fn open(service: &Service, watch: &[(&str, &str)]) -> Self {
        let (sender, mut receiver) = tokio::sync::mpsc::channel(8);
        let requests = futures_util::stream::poll_fn(move |cx| receiver.poll_recv(cx));
        let watch = watch.iter().map(|(kind, name)| reference(kind, name)).collect();
        sender.send(pb::WatchObjectsRequest { watch, unwatch: Vec::new() }).await.unwrap();
        let answers = service.client().watch_objects(requests).await.unwrap().into_inner();
        Self { sender, answers }
    }

    async fn request(&self, watch: &[(&str, &str)], unwatch: &[(&str, &str)]) {
        let list = |names: &[(&str, &str)]| names.iter().map(|(kind, name)| reference(kind, name)).collect();
        let request = pb::WatchObjectsRequest { watch: list(watch), unwatch: list(unwatch) };
        self.sender.send(request).await.unwrap();
    }

    async fn next(&mut self) -> Item {
        let next = tokio::time::timeout(TIMEOUT, self.answers.message()).await.expect("an item is received");
        next.unwrap().expect("the stream continues").item.unwrap()
    }

    /// Name and JSON of the next object.
    async fn object(&mut self) -> (String, Option<serde_json::Value>) {
        match self.next().await {
            Item::Object(state) => {
                let json = state.object_json.map(|json| serde_json::from_slice(&json).unwrap());
                (state.reference.unwrap().name, json)
            }
            Item::Synced(_) => panic!("synced was sent too early"),
        }
    }

    async fn synced(&mut self) {
        assert!(matches!(self.next().await, Item::Synced(_)));
    }
}

fn config_map(name: &str, value: &str) -> String {
    format!("apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {name}\ndata:\n  key: \"{value}\"\n")
}

fn value(json: Option<serde_json::Value>) -> serde_json::Value {
    json.unwrap()["data"]["key"].clone()
}

#[tokio::test]
async fn watched_objects_are_replayed_then_synced_then_followed() {
    let node = Node::new();
    node.write_backdated("conf.yaml", &config_map("conf", "1"));
    node.write_backdated("other.yaml", &config_map("other", "1"));
    let secret = "apiVersion: v1\nkind: Secret\nmetadata:\n  name: key\nstringData:\n  key: x\n";
    node.write_backdated("key.yaml", secret);
    let service = node.start();
    let mut objects =
        ObjectWatch::open(&service, &[("ConfigMap", "conf"), ("Secret", "key"), ("ConfigMap", "none")]).await;
    let mut replay = vec![objects.object().await, objects.object().await, objects.object().await];
    objects.synced().await;
    replay.sort_by(|a, b| a.0.cmp(&b.0));
    let replay: Vec<_> =
        replay.into_iter().map(|(name, json)| (name, json.map(|j| j["data"]["key"].clone()))).collect();
    let wanted = [
        ("conf".to_owned(), Some("1".into())),
        ("key".to_owned(), Some("eA==".into())),
        ("none".to_owned(), None),
    ];
    assert_eq!(replay, wanted);

    // Objects that are not watched, or have not changed, are not sent.
    replace(&node.manifest("other.yaml"), &config_map("other", "2"));
    replace(&node.manifest("conf.yaml"), &config_map("conf", "2"));
    let (name, json) = objects.object().await;
    assert_eq!((name.as_str(), value(json)), ("conf", "2".into()));
    node.write("none.yaml", &config_map("none", "3"));
    let (name, json) = objects.object().await;
    assert_eq!((name.as_str(), value(json)), ("none", "3".into()));

    objects.request(&[("ConfigMap", "other")], &[("ConfigMap", "conf")]).await;
    let (name, json) = objects.object().await;
    assert_eq!((name.as_str(), value(json)), ("other", "2".into()));
    replace(&node.manifest("conf.yaml"), &config_map("conf", "4"));
    fs::remove_file(node.manifest("other.yaml")).unwrap();
    assert_eq!(objects.object().await, ("other".to_owned(), None));
}

#[tokio::test]
async fn no_state_is_sent_for_an_object_that_an_unread_source_may_have() {
    let node = Node::new();
    node.write_backdated("conf.yaml", &config_map("conf", "1"));
    // This file is still being written, so the source is not settled.
    let open = fs::File::create(node.manifest("late.yaml")).unwrap();
    let service = node.start();
    let mut objects = ObjectWatch::open(&service, &[("ConfigMap", "conf"), ("ConfigMap", "late")]).await;
    assert_eq!(objects.object().await.0, "conf");
    fs::write(node.manifest("late.yaml"), config_map("late", "2")).unwrap();
    drop(open);
    let (name, json) = objects.object().await;
    assert_eq!((name.as_str(), value(json)), ("late", "2".into()));
    objects.synced().await;
}

#[tokio::test]
async fn an_empty_watch_request_is_synced_at_once_and_one_without_a_kind_is_rejected() {
    let node = Node::new();
    let service = node.start();
    let mut objects = ObjectWatch::open(&service, &[]).await;
    objects.synced().await;
    objects.request(&[("ConfigMap", "none")], &[]).await;
    assert_eq!(objects.object().await, ("none".to_owned(), None));
    objects.request(&[("", "none")], &[]).await;
    let status = tokio::time::timeout(TIMEOUT, objects.answers.message()).await.unwrap().unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
}

#[tokio::test]
async fn a_broken_manifest_keeps_its_object_and_streams_end_with_the_service() {
    let node = Node::new();
    node.write_backdated("conf.yaml", &config_map("conf", "1"));
    let service = node.start();
    let mut objects = ObjectWatch::open(&service, &[("ConfigMap", "conf")]).await;
    objects.object().await;
    objects.synced().await;
    replace(&node.manifest("conf.yaml"), "kind: [");
    while service.problems().await.is_empty() {
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    replace(&node.manifest("conf.yaml"), &config_map("conf", "2"));
    assert_eq!(value(objects.object().await.1), "2");
    assert_eq!(service.end(), Some(0));
    assert!(matches!(objects.answers.message().await, Ok(None) | Err(_)));
}
