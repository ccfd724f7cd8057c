//! `keelson get` of pods, the node, images and volumes.

use keelson_proto::keelson::common::v1::PodRef;
use keelson_proto::keelson::runtime::v1::{ContainerState, ImageUser, RuntimeImage};
use keelson_proto::keelson::volume_manager::v1::{PodVolumes, VolumeMount};
use serde_json::json;

use crate::fake::{Fake, World};
use crate::{document, keelson, world};

#[test]
fn get_pods_prints_a_table_of_the_namespace() {
    let fake = Fake::start(world());
    assert_eq!(
        keelson(&fake.run_dir, &["get", "pods"]).ok(),
        "NAME       READY   STATUS     RESTARTS   AGE\n\
         db-edge    0/1     Init:0/1   0          <unknown>\n\
         web-edge   2/2     Running    1          <unknown>\n"
    );
    assert_eq!(
        keelson(&fake.run_dir, &["get", "po", "web", "-o", "wide"]).ok(),
        "NAME       READY   STATUS    RESTARTS   AGE         IP          NODE   SOURCE\n\
         web-edge   2/2     Running   1          <unknown>   10.88.0.4   edge   file\n"
    );
    let all = keelson(&fake.run_dir, &["get", "pods", "-A"]).ok();
    assert!(all.starts_with("NAMESPACE   NAME"), "{all}");
    assert!(all.contains("system      dns-edge   2/2"), "{all}");
}

#[test]
fn get_pods_as_json_is_a_pod_list_of_unchanged_documents() {
    let fake = Fake::start(world());
    let list = keelson(&fake.run_dir, &["get", "pods", "-o", "json"]).json();
    assert_eq!(
        (&list["apiVersion"], &list["kind"], &list["metadata"]),
        (&json!("v1"), &json!("PodList"), &json!({}))
    );
    assert_eq!(list["items"].as_array().unwrap().len(), 2);
    let one = keelson(&fake.run_dir, &["get", "pod/web", "-o", "json"]).json();
    assert_eq!(one["kind"], "Pod");
    assert_eq!(one, serde_json::from_slice::<serde_json::Value>(&fake.world.pods[0].pod_json).unwrap());
    assert_eq!(one["spec"]["fromTheFuture"], json!({"z": 1, "a": [2]}));
    let two = keelson(&fake.run_dir, &["get", "pods", "web", "db-edge", "-o", "json"]).json();
    assert_eq!(two["items"][0]["metadata"]["name"], "web-edge");
}

#[test]
fn get_pods_as_yaml_equals_json() {
    let fake = Fake::start(world());
    let yaml = keelson(&fake.run_dir, &["get", "pods", "-A", "-o", "yaml"]).ok();
    let from_yaml: serde_json::Value = serde_saphyr::from_str(&yaml).unwrap();
    assert_eq!(from_yaml, keelson(&fake.run_dir, &["get", "pods", "-A", "-o", "json"]).json());
}

#[test]
fn get_pods_without_pods_prints_a_notice_or_an_empty_list() {
    let fake = Fake::start(world());
    let result = keelson(&fake.run_dir, &["get", "pods", "-n", "other"]);
    assert_eq!((result.code, result.out.as_str()), (Some(0), ""));
    assert_eq!(result.err, "No pods found in namespace other; -A shows 3 in other namespaces.\n");
    let list = keelson(&fake.run_dir, &["get", "pods", "-n", "other", "-o", "json"]).json();
    assert_eq!(list["items"], json!([]));
}

#[test]
fn get_node_shows_a_row_or_the_node_as_json() {
    let fake = Fake::start(world());
    assert_eq!(
        keelson(&fake.run_dir, &["get", "node"]).ok(),
        "NAME   STATUS   ROLES    AGE         VERSION\nedge   Ready    <none>   <unknown>   v1.36.0+keelson\n"
    );
    let mut old = world();
    old.node["metadata"]["creationTimestamp"] = json!("2001-01-01T00:00:00Z");
    let table = keelson(&Fake::start(old).run_dir, &["get", "node"]).ok();
    let age = table.lines().nth(1).unwrap().split_whitespace().nth(3).unwrap();
    let years: u32 = age.strip_suffix('y').unwrap().parse().unwrap();
    assert!(years > 20, "{table}");
    let node = keelson(&fake.run_dir, &["get", "nodes", "edge", "-o", "json"]).json();
    assert_eq!((&node["kind"], &node["metadata"]["name"]), (&json!("Node"), &json!("edge")));
    assert!(keelson(&fake.run_dir, &["get", "node", "other"]).failed(1).1.contains("\"edge\""));
}

pub(crate) fn world_with_images() -> World {
    let user = |namespace: &str, name: &str, container: &str| ImageUser {
        pod: Some(PodRef { uid: "u1".into(), namespace: namespace.into(), name: name.into() }),
        container: container.into(),
        container_id: "0123456789abcdef".into(),
        state: ContainerState::Running.into(),
    };
    let images = vec![
        RuntimeImage {
            id: "sha256:4c5f6a7b8c9d0e1f2a3b".into(),
            repo_tags: vec![
                "docker.io/library/busybox:1.36".into(),
                "docker.io/library/busybox:latest".into(),
            ],
            repo_digests: vec!["docker.io/library/busybox@sha256:aa".into()],
            size_bytes: 4_500_000,
            pinned: false,
            used_by: vec![user("default", "web-edge", "app"), user("default", "web-edge", "proxy")],
        },
        RuntimeImage {
            id: "sha256:99aabbccddeeff001122".into(),
            repo_digests: vec!["registry.example/old@sha256:bb".into()],
            size_bytes: 700,
            pinned: true,
            ..RuntimeImage::default()
        },
    ];
    World { images, ..world() }
}

#[test]
fn get_images_shows_the_pods_that_use_them() {
    let fake = Fake::start(world_with_images());
    assert_eq!(
        keelson(&fake.run_dir, &["get", "images"]).ok(),
        "IMAGE                       TAG      ID             SIZE    PINNED   USED BY\n\
         docker.io/library/busybox   1.36     4c5f6a7b8c9d   4.2Mi   false    web-edge\n\
         docker.io/library/busybox   latest   4c5f6a7b8c9d   4.2Mi   false    web-edge\n\
         registry.example/old        <none>   99aabbccddee   1Ki     true     -\n"
    );
    let one = keelson(&fake.run_dir, &["get", "image", "busybox", "-o", "json"]).json();
    assert_eq!(
        one["items"],
        json!([{
            "id": "sha256:4c5f6a7b8c9d0e1f2a3b",
            "tags": ["docker.io/library/busybox:1.36", "docker.io/library/busybox:latest"],
            "digests": ["docker.io/library/busybox@sha256:aa"],
            "size_bytes": 4_500_000,
            "pinned": false,
            "used_by": [
                {"namespace": "default", "pod": "web-edge", "uid": "u1", "container": "app",
                 "container_id": "0123456789abcdef", "state": "running"},
                {"namespace": "default", "pod": "web-edge", "uid": "u1", "container": "proxy",
                 "container_id": "0123456789abcdef", "state": "running"},
            ],
        }])
    );
    let wide = keelson(&fake.run_dir, &["get", "images", "99aabb", "-o", "wide"]).ok();
    assert!(wide.lines().nth(1).unwrap().ends_with("registry.example/old@sha256:bb"), "{wide}");
    let yaml = keelson(&fake.run_dir, &["get", "images", "-o", "yaml"]).ok();
    let from_yaml: serde_json::Value = serde_saphyr::from_str(&yaml).unwrap();
    assert_eq!(from_yaml, keelson(&fake.run_dir, &["get", "images", "-o", "json"]).json());
    let result = keelson(&fake.run_dir, &["get", "images", "nginx"]);
    assert!(result.failed(1).0.contains("no image \"nginx\""), "{result:?}");
}

#[test]
fn get_volumes_shows_volumes_of_unknown_pods_with_all_namespaces() {
    let orphan = PodVolumes { uid: "u99".into(), state: "unmounting".into(), ..PodVolumes::default() };
    let mount = VolumeMount {
        name: "data".into(),
        host_path: "/v/data".into(),
        read_only: true,
        claim: "disk".into(),
        persistent_volume: "pv-7".into(),
        ..Default::default()
    };
    let orphan = PodVolumes { volumes: vec![mount], ..orphan };
    let fake = Fake::start(World { volumes: vec![orphan], ..world() });
    let mine = keelson(&fake.run_dir, &["get", "volumes"]).ok();
    assert!(mine.contains("web-edge   data") && !mine.contains("u99"), "{mine}");
    let all = keelson(&fake.run_dir, &["get", "volumes", "-A", "-o", "wide"]).ok();
    let last: Vec<&str> = all.lines().last().unwrap().split_whitespace().collect();
    assert_eq!(
        last,
        [
            "<unknown>",
            "u99",
            "data",
            "<unknown>",
            "unmounting",
            "-",
            "-",
            "/v/data",
            "true",
            "disk",
            "pv-7",
            "u99"
        ]
    );
    let header = all.lines().next().unwrap();
    assert!(header.ends_with("READ ONLY   CLAIM   PV     UID"), "{header}");
    let result = keelson(&fake.run_dir, &["get", "volumes", "-n", "nowhere"]);
    assert_eq!((result.out.as_str(), result.err.as_str(), result.code), ("", "No volumes found.\n", Some(0)));
    assert!(keelson(&fake.run_dir, &["get", "volumes", "nope"]).failed(1).0.contains("no pod"));
}

#[test]
fn logs_passes_all_options_to_the_service() {
    let fake = Fake::start(world());
    let result = keelson(&fake.run_dir, &["logs", "web"]);
    assert_eq!((result.out.as_str(), result.code), ("first\nsecond\n", Some(0)));
    assert!(result.err.contains("app, proxy"), "{}", result.err);
    let all =
        ["logs", "pod/web-edge", "-c", "proxy", "-f", "-p", "--tail", "0", "--since", "5m", "--timestamps"];
    let result = keelson(&fake.run_dir, &[&all[..], &["--limit-bytes", "9"]].concat());
    assert_eq!(result.err, "");
    assert_eq!(result.ok(), "first\nsecond\n");
    assert_eq!(
        fake.world.calls.all(),
        [
            "logs u1/app follow=false previous=false timestamps=false tail=None bytes=None since=false",
            "logs u1/proxy follow=true previous=true timestamps=true tail=Some(0) bytes=Some(9) since=true",
        ]
    );
    let result = keelson(&fake.run_dir, &["logs", "web", "-c", "none"]);
    assert!(result.failed(1).1.contains("app, proxy"));
}

#[test]
fn grpc_call_accepts_a_long_answer() {
    let pod = json!({"kind": "Pod", "metadata": {"annotations": {"long": "x".repeat(5 << 20)}}});
    let fake = Fake::start(World { pods: vec![document("default", "web", "u", pod)], ..world() });
    let answer = keelson(&fake.run_dir, &["grpc", "call", "pod-sync", "ListPods"]).json();
    assert_eq!(answer["uid"], "u");
}
