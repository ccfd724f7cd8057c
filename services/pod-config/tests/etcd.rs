//! etcd as the source of pods, with a real etcd.

#![allow(clippy::unwrap_used)] // A failed unwrap fails the test.

mod common;

use common::fleet::{Fleet, object};
use common::{Service, image};
use keelson_etcd::NodeKeys;
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_proto::keelson::pod_config::v1::watch_pods_response::Item;
use serde_json::json;

#[tokio::test]
async fn pods_and_objects_under_the_nodes_etcd_keys_are_desired_and_followed() {
    let fleet = Fleet::new();
    fleet.put_pod("web", "i:1").await;
    fleet.put(&NodeKeys::new("n2").pod("default", "other"), &common::pod("other", "i")).await;
    let secret =
        json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "stringData": {"k": "v"}});
    fleet.put(&fleet.keys.object("Secret", "default", "s"), &secret.to_string()).await;

    let node = fleet.node();
    let service = node.start();
    let mut watch = service.watch().await;
    let (pods, sources) = watch.replay().await;
    assert_eq!(
        pods.iter().map(|p| (p.name.as_str(), p.source.as_str())).collect::<Vec<_>>(),
        [("web", "etcd")]
    );
    assert!(sources.contains(&"etcd".to_owned()), "{sources:?}");
    assert_eq!(object(&service, "Secret", "s").await.unwrap()["data"]["k"], "dg==");
    assert_eq!(object(&service, "Secret", "nope").await, None);

    // A new image does not change the UID.
    fleet.put_pod("web", "i:2").await;
    let changed = watch.pod().await;
    assert_eq!((changed.uid.as_str(), image(&changed).as_str()), (pods[0].uid.as_str(), "\"i:2\""));
    // A recreated key is another pod.
    fleet.delete(&fleet.keys.pod("default", "web")).await;
    assert_eq!(watch.removed_uid().await, changed.uid);
    fleet.put_pod("web", "i:2").await;
    assert_ne!(watch.pod().await.uid, changed.uid);
}

#[tokio::test]
async fn an_invalid_etcd_value_is_reported_by_key_and_the_last_good_one_stays() {
    let fleet = Fleet::new();
    fleet.put_pod("web", "i:1").await;
    let node = fleet.node();
    let service = node.start();
    let mut watch = service.watch().await;
    assert_eq!(watch.replay().await.0.len(), 1);
    let key = fleet.keys.pod("default", "web");
    fleet
        .put(
            &key,
            "apiVersion: v1\nkind: Pod\nmetadata:\n  name: db\nspec: {containers: [{name: a, image: i}]}\n",
        )
        .await;
    fleet.put(&fleet.keys.object("Deployment", "default", "x"), "{}").await;
    fleet.put_pod("next", "i").await;
    assert_eq!(watch.pod().await.name, "next", "the pod of the invalid value was not sent again");
    let problems = service.problems().await;
    let about =
        |origin: &str| problems.iter().find(|p| p.origin == origin).unwrap_or_else(|| panic!("{problems:?}"));
    let renamed = about(&key);
    assert!(renamed.message.contains("metadata.name: the key is for the Pod default/web"), "{renamed:?}");
    assert_eq!(renamed.kept_pods, ["default/web"]);
    let kind = about(&fleet.keys.object("Deployment", "default", "x"));
    assert!(kind.message.contains("none for \"Deployment\""), "{kind:?}");

    fleet.put_pod("web", "i:3").await;
    assert_eq!(image(&watch.pod().await), "\"i:3\"");
    assert_eq!(service.problems().await.len(), 1);
}

#[tokio::test]
async fn a_restart_while_etcd_is_down_changes_and_removes_no_pods() {
    let mut fleet = Fleet::new();
    fleet.put_pod("web", "i:1").await;
    fleet.put_pod("db", "i:1").await;
    let node = fleet.node();
    let mut service = node.start();
    let before = replayed(&service).await;
    // Two values and two pods.
    service.wait_for_rows(4);
    service.kill();
    fleet.cluster.kill(0);

    let mut service = node.start();
    service.wait_for_event("offline_state_restored");
    let mut watch = service.watch().await;
    let mut after = Vec::new();
    while after.len() < 2 {
        if let Item::Pod(pod) = watch.next().await {
            after.push(pod);
        }
    }
    after.sort_by(|a, b| a.name.cmp(&b.name));
    assert_eq!(after, before);
    let source = service.sources().await.into_iter().find(|s| s.name == "etcd").unwrap();
    assert!(!source.ready, "only etcd settles its source: {source:?}");
    let message = tokio::time::timeout(common::TIMEOUT, async {
        loop {
            if let Some(condition) = service.condition("control-plane").await
                && !condition.message.is_empty()
            {
                return condition.message;
            }
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    });
    let message = message.await.expect("the condition says that etcd is away");
    assert!(message.contains(&fleet.cluster.endpoints()[0]), "{message}");

    // etcd returns with one pod less.
    fleet.cluster.restart(0).unwrap();
    fleet.delete(&fleet.keys.pod("default", "db")).await;
    let gone = before.iter().find(|pod| pod.name == "db").unwrap().uid.clone();
    loop {
        match watch.next().await {
            Item::GoneUid(uid) => {
                assert_eq!(uid, gone);
                break;
            }
            Item::SourceReady(_) | Item::Synced(_) => {}
            Item::Pod(pod) => panic!("{} was sent again", pod.name),
        }
    }
}

async fn replayed(service: &Service) -> Vec<pb::DesiredPod> {
    let mut pods = service.watch().await.replay().await.0;
    pods.sort_by(|a, b| a.name.cmp(&b.name));
    pods
}
