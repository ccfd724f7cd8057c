//! Pods that wait for the control plane since a reboot.

use keelson_proto::keelson::pod_config::v1::{Source, WaitingPod};

use crate::fake::{Fake, World};
use crate::keelson;

fn world() -> World {
    let waiting = WaitingPod {
        namespace: "default".into(),
        name: "shop".into(),
        origin: "/keelson/v1/nodes/n1/pods/default/shop".into(),
        message: "since the reboot the pod waits for etcd".into(),
        since_unix_nanos: 1,
    };
    World {
        sources: vec![Source { name: "etcd".into(), waiting: vec![waiting], ..Source::default() }],
        ..World::default()
    }
}

#[test]
fn pod_that_waits_for_the_control_plane_is_explained() {
    let fake = Fake::start(world());
    let text = keelson(&fake.run_dir, &["explain", "pod", "shop"]).ok();
    assert!(text.starts_with("pod/shop in default (Pending): Waits for the control plane since"), "{text}");
    let line = text.lines().find(|line| line.contains("source")).unwrap_or_default();
    for part in ["…", "waiting", "pod-config", "pods/default/shop: since the reboot"] {
        assert!(line.contains(part), "{text}");
    }
    let json = keelson(&fake.run_dir, &["explain", "pod", "shop", "-o", "json"]).json();
    assert_eq!((&json["phase"], &json["pod"]["name"]), (&"Pending".into(), &"shop".into()));
    let text = keelson(&fake.run_dir, &["get", "sources"]).ok();
    assert!(text.contains("/pods/default/shop: pod default/shop\n  since the reboot"), "{text}");
    let json = keelson(&fake.run_dir, &["get", "sources", "-o", "json"]).json();
    assert_eq!(json["items"][0]["waiting"][0]["name"], "shop");
    let result = keelson(&fake.run_dir, &["get", "pods"]);
    assert!(result.err.contains("1 pod more waits for the control plane since the reboot"), "{result:?}");
    let result = keelson(&fake.run_dir, &["get", "pod", "shop"]);
    assert!(result.failed(1).1.contains("`keelson explain pod shop`"), "{result:?}");
    let result = keelson(&fake.run_dir, &["explain", "pod", "shop", "-n", "other"]);
    assert!(result.failed(1).0.contains("there is no pod"), "{result:?}");
}
