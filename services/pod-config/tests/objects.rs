//! `WatchObjects` and `GetObject`: ConfigMaps and Secrets that stand beside the pods.

#![allow(clippy::unwrap_used, reason = "a test fails where it stands")]

mod common;

use std::fs;

use common::{Node, PATIENCE, Service, replace};
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_proto::keelson::pod_config::v1::watch_objects_response::Item;
use tonic::{Code, Streaming};

/// A `WatchObjects` stream, with the sending end of its requests.
struct Objects {
    sender: tokio::sync::mpsc::Sender<pb::WatchObjectsRequest>,
    answers: Streaming<pb::WatchObjectsResponse>,
}

fn reference(kind: &str, name: &str) -> pb::ObjectReference {
    pb::ObjectReference { kind: kind.into(), namespace: "default".into(), name: name.into() }
}

impl Objects {
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
        let next = tokio::time::timeout(PATIENCE, self.answers.message()).await.expect("something is told");
        next.unwrap().expect("the stream goes on").item.unwrap()
    }

    /// Name and JSON of the next object.
    async fn object(&mut self) -> (String, Option<serde_json::Value>) {
        match self.next().await {
            Item::Object(state) => {
                let json = state.object_json.map(|json| serde_json::from_slice(&json).unwrap());
                (state.reference.unwrap().name, json)
            }
            Item::Synced(_) => panic!("synced comes too early"),
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
async fn objects_are_replayed_then_synced_then_each_change_of_those_that_are_watched() {
    let node = Node::new();
    node.write_rested("conf.yaml", &config_map("conf", "1"));
    node.write_rested("other.yaml", &config_map("other", "1"));
    let secret = "apiVersion: v1\nkind: Secret\nmetadata:\n  name: key\nstringData:\n  key: x\n";
    node.write_rested("key.yaml", secret);
    let service = node.start();
    let mut objects =
        Objects::open(&service, &[("ConfigMap", "conf"), ("Secret", "key"), ("ConfigMap", "none")]).await;
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

    // What is not watched is not told, and neither is what did not change.
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
async fn nothing_is_said_of_an_object_that_a_source_may_still_have() {
    let node = Node::new();
    node.write_rested("conf.yaml", &config_map("conf", "1"));
    // Somebody is still writing this one: the source has not been read to its end.
    let open = fs::File::create(node.manifest("late.yaml")).unwrap();
    let service = node.start();
    let mut objects = Objects::open(&service, &[("ConfigMap", "conf"), ("ConfigMap", "late")]).await;
    assert_eq!(objects.object().await.0, "conf");
    fs::write(node.manifest("late.yaml"), config_map("late", "2")).unwrap();
    drop(open);
    let (name, json) = objects.object().await;
    assert_eq!((name.as_str(), value(json)), ("late", "2".into()));
    objects.synced().await;
}

#[tokio::test]
async fn an_empty_request_is_synced_at_once_and_a_nameless_one_is_refused() {
    let node = Node::new();
    let service = node.start();
    let mut objects = Objects::open(&service, &[]).await;
    objects.synced().await;
    objects.request(&[("ConfigMap", "none")], &[]).await;
    assert_eq!(objects.object().await, ("none".to_owned(), None));
    objects.request(&[("", "none")], &[]).await;
    let status = tokio::time::timeout(PATIENCE, objects.answers.message()).await.unwrap().unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
}

#[tokio::test]
async fn a_broken_manifest_leaves_its_object_and_a_stream_ends_with_the_service() {
    let node = Node::new();
    node.write_rested("conf.yaml", &config_map("conf", "1"));
    let service = node.start();
    let mut objects = Objects::open(&service, &[("ConfigMap", "conf")]).await;
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
