//! What nodes may do, as docs/node-requests.md lists it, and what they may not.

use serde_json::{Value, json};

use super::objects::{Denied, Objects};
use super::request::{Request, Target, fields};
use super::{Lists, User, answer::answer};

const UNRELATED: &str = "no relationship found between node 'n1' and this object";
const N1: User<'_> = User::Node("n1");

/// Verb, path, body, and the code and a part of the message of a refusal.
type Change = (&'static str, String, Value, Option<(u16, &'static str)>);

fn request(verb: &'static str, path: &str, selector: &str, body: Value) -> Request {
    Request { verb, target: Target::of(path).unwrap(), fields: fields(selector).unwrap(), body }
}

fn ask(
    objects: &mut Objects,
    user: User<'_>,
    verb: &'static str,
    path: &str,
    selector: &str,
    body: Value,
) -> Result<Value, Denied> {
    let lists = if verb == "patch" { Lists::Merged } else { Lists::Replaced };
    answer(user, &request(verb, path, selector, body), lists, objects).map(|(_, object)| object)
}

fn made(objects: &mut Objects, collection: &str, object: Value) -> Value {
    ask(objects, User::Admin, "create", collection, "", object).unwrap()
}

fn pod(name: &str, node: &str, spec: Value) -> Value {
    let mut pod = json!({"metadata": {"name": name, "labels": {"a": "b"}}, "spec": spec});
    pod["spec"]["nodeName"] = node.into();
    pod
}

/// Pods of two nodes, with what they name.
fn objects() -> Objects {
    let mut objects = Objects::default();
    for node in ["n1", "n2"] {
        made(&mut objects, "/api/v1/nodes", json!({"metadata": {"name": node}}));
    }
    let own = json!({
        "serviceAccountName": "app",
        "containers": [{"name": "c", "envFrom": [{"configMapRef": {"name": "env"}}]}],
        "imagePullSecrets": [{"name": "pull"}],
        "volumes": [
            {"name": "a", "secret": {"secretName": "mounted"}},
            {"name": "b", "projected": {"sources": [
                {"configMap": {"name": "projected"}}, {"serviceAccountToken": {"path": "token"}},
                {"serviceAccountToken": {"path": "vault", "audience": "vault"}},
            ]}},
        ],
    });
    made(&mut objects, "/api/v1/namespaces/default/pods", pod("own", "n1", own));
    let other = json!({"volumes": [{"name": "a", "secret": {"secretName": "others"}}]});
    made(&mut objects, "/api/v1/namespaces/default/pods", pod("other", "n2", other));
    let mut mirror =
        pod("mirror", "n1", json!({"volumes": [{"name": "a", "secret": {"secretName": "of-mirror"}}]}));
    mirror["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": "x"});
    made(&mut objects, "/api/v1/namespaces/default/pods", mirror);
    for name in ["mounted", "pull", "others", "of-mirror"] {
        made(&mut objects, "/api/v1/namespaces/default/secrets", json!({"metadata": {"name": name}}));
    }
    for name in ["env", "projected"] {
        made(&mut objects, "/api/v1/namespaces/default/configmaps", json!({"metadata": {"name": name}}));
    }
    made(&mut objects, "/api/v1/namespaces/default/serviceaccounts", json!({"metadata": {"name": "app"}}));
    objects
}

#[test]
fn node_authorizer_allows_reads_of_related_objects_only() {
    let below = |path: &str| format!("/api/v1/namespaces/default/{path}");
    let lease = |name: &str| format!("/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{name}");
    let certificates = "/apis/certificates.k8s.io/v1beta1/namespaces/default/podcertificaterequests";
    let cases: [(&'static str, String, &str, Option<&str>); 40] = [
        ("get", "/api/v1/nodes/n1".into(), "", None),
        ("get", "/api/v1/nodes/n2".into(), "", Some("its own Node alone")),
        ("list", "/api/v1/nodes".into(), "", Some("its own Node alone")),
        ("list", "/api/v1/nodes".into(), "metadata.name=n1", None),
        ("watch", "/api/v1/nodes".into(), "metadata.name=n2", Some("its own Node alone")),
        ("delete", "/api/v1/nodes/n1".into(), "", Some("no delete of nodes")),
        ("get", below("pods/own"), "", None),
        ("get", below("pods/mirror"), "", None),
        ("get", below("pods/other"), "", Some(UNRELATED)),
        ("get", below("pods/none"), "", Some(UNRELATED)),
        ("list", "/api/v1/pods".into(), "spec.nodeName=n1", None),
        ("list", "/api/v1/pods".into(), "spec.nodeName=n2", Some("only with spec.nodeName")),
        ("list", "/api/v1/pods".into(), "", Some("only with spec.nodeName")),
        ("list", below("pods"), "metadata.name=own", None),
        ("list", below("pods"), "metadata.name=other", Some("only with spec.nodeName")),
        ("get", below("secrets/mounted"), "", None),
        ("get", below("secrets/pull"), "", None),
        ("get", below("secrets/others"), "", Some(UNRELATED)),
        ("get", below("secrets/of-mirror"), "", Some(UNRELATED)),
        ("get", below("secrets/none"), "", Some(UNRELATED)),
        ("list", below("secrets"), "metadata.name=mounted", None),
        ("list", below("secrets"), "", Some(UNRELATED)),
        ("get", "/api/v1/namespaces/kube-system/secrets/mounted".into(), "", Some(UNRELATED)),
        ("get", below("configmaps/env"), "", None),
        ("get", below("configmaps/projected"), "", None),
        ("get", below("configmaps/mounted"), "", Some(UNRELATED)),
        ("create", below("secrets"), "", Some("no create of secrets")),
        ("list", "/api/v1/services".into(), "", None),
        ("list", "/api/v1/namespaces".into(), "", Some("no list of namespaces")),
        ("list", "/apis/node.k8s.io/v1/runtimeclasses".into(), "", None),
        ("delete", "/apis/node.k8s.io/v1/runtimeclasses/a".into(), "", Some("no delete of runtimeclasses")),
        ("get", lease("n1"), "", Some("not found")),
        ("get", lease("n2"), "", Some("no get of leases")),
        ("get", below("pods/own/log"), "", Some("no get of pods/log")),
        ("create", below("pods/own/exec"), "", Some("no create of pods/exec")),
        ("get", below("serviceaccounts/app"), "", None),
        ("get", below("serviceaccounts/none"), "", Some(UNRELATED)),
        ("list", certificates.into(), "metadata.name=a,spec.nodeName=n1", None),
        ("list", certificates.into(), "metadata.name=a", Some("only with spec.nodeName")),
        ("watch", certificates.into(), "spec.nodeName=n2", Some("only with spec.nodeName")),
    ];
    let mut objects = objects();
    for (verb, path, selector, expected) in cases {
        // A watch is authorized as a list is.
        let result = match verb {
            "watch" => super::answer::authorize(N1, &request(verb, &path, selector, Value::Null), &objects)
                .map(|()| Value::Null),
            _ => ask(&mut objects, N1, verb, &path, selector, Value::Null),
        };
        match (&result, expected) {
            (Ok(_), None) => {}
            (Err(denied), Some(part)) if denied.message.contains(part) => {}
            _ => panic!("{verb} {path} {selector}: {result:?}"),
        }
    }
    assert_refusal_names_user_and_object(&mut objects);
}

fn assert_refusal_names_user_and_object(objects: &mut Objects) {
    let denied =
        ask(objects, N1, "get", "/api/v1/namespaces/default/pods/none", "", Value::Null).unwrap_err();
    assert_eq!(denied.code, 403);
    assert_eq!(
        denied.message,
        format!(
            "pods \"none\" is forbidden: User \"system:node:n1\" cannot get resource \"pods\" in API group \"\" in the \
             namespace \"default\": {UNRELATED}"
        )
    );
}

#[test]
fn node_restriction_limits_writes_to_own_pods_and_node() {
    let mut objects = objects();
    let below = |path: &str| format!("/api/v1/namespaces/default/{path}");
    let running = || json!({"status": {"phase": "Running"}});
    let cases: [Change; 14] = [
        ("patch", below("pods/own/status"), running(), None),
        (
            "patch",
            below("pods/other/status"),
            running(),
            Some((403, "pods with spec.nodeName set to itself")),
        ),
        ("patch", below("pods/none/status"), running(), Some((404, "not found"))),
        ("patch", below("pods/own/status"), json!({"metadata": {"uid": "x"}}), Some((409, "UID"))),
        (
            "patch",
            below("pods/own/status"),
            json!({"metadata": {"labels": {"a": "c"}}}),
            Some((403, "labels")),
        ),
        ("patch", below("pods/own"), running(), Some((403, "no patch of pods"))),
        ("delete", below("pods/other"), json!({}), Some((403, "pods with spec.nodeName set to itself"))),
        ("delete", below("pods/none"), json!({}), Some((404, "not found"))),
        ("delete", below("pods/own"), json!({"preconditions": {"uid": "x"}}), Some((409, "UID"))),
        (
            "patch",
            "/api/v1/nodes/n1/status".into(),
            json!({"status": {"conditions": [{"type": "Ready"}]}}),
            None,
        ),
        (
            "patch",
            "/api/v1/nodes/n1".into(),
            json!({"spec": {"taints": [{"key": "a"}]}}),
            Some((403, "taints")),
        ),
        (
            "patch",
            "/api/v1/nodes/n1".into(),
            json!({"metadata": {"labels": {"kubernetes.io/os": "linux", "node.kubernetes.io/x": "", "own.example/a": ""}}}),
            None,
        ),
        (
            "patch",
            "/api/v1/nodes/n1".into(),
            json!({"metadata": {"labels": {"node-role.kubernetes.io/control-plane": ""}}}),
            Some((403, "node-role.kubernetes.io/control-plane")),
        ),
        ("patch", "/api/v1/nodes/n2/status".into(), running(), Some((403, "no other Node"))),
    ];
    for (verb, path, body, expected) in cases {
        let result = ask(&mut objects, N1, verb, &path, "", body.clone());
        match (&result, expected) {
            (Ok(_), None) => {}
            (Err(denied), Some((code, part))) if denied.code == code && denied.message.contains(part) => {}
            _ => panic!("{verb} {path} {body}: {result:?}"),
        }
    }
}

#[test]
fn node_restriction_limits_created_pods_to_owned_mirrors() {
    let mut objects = objects();
    let uid = objects.core("nodes", "", "n1").unwrap()["metadata"]["uid"].clone();
    let good = json!({
        "metadata": {
            "name": "web-n1",
            "annotations": {"kubernetes.io/config.mirror": "1"},
            "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": uid, "controller": true}],
        },
        "spec": {"nodeName": "n1", "containers": []},
    });
    let with = |at: &str, value: Value| {
        let mut pod = good.clone();
        let (parent, field) = at.rsplit_once('/').unwrap();
        pod.pointer_mut(parent).unwrap()[field] = value;
        pod
    };
    let cases = [
        (with("/metadata/annotations", json!({})), "only mirrors"),
        (with("/spec/nodeName", json!("n2")), "can only create pods with spec.nodeName set to itself"),
        (with("/metadata/ownerReferences", json!([])), "one owner"),
        (with("/metadata/ownerReferences/0/uid", json!("x")), "one owner"),
        (with("/metadata/ownerReferences/0/controller", json!(false)), "one owner"),
        (with("/spec/serviceAccountName", json!("app")), "service account"),
        (with("/spec/volumes", json!([{"name": "a", "secret": {"secretName": "s"}}])), "secrets: s"),
        (with("/spec/containers", json!([{"envFrom": [{"configMapRef": {"name": "c"}}]}])), "configmaps: c"),
        (
            with("/spec/volumes", json!([{"persistentVolumeClaim": {"claimName": "p"}}])),
            "persistentvolumeclaims: p",
        ),
        (with("/spec/volumes", json!([{"projected": {"sources": [{"serviceAccountToken": {}}]}}])), "tokens"),
    ];
    let collection = "/api/v1/namespaces/default/pods";
    for (pod, part) in cases {
        let denied = ask(&mut objects, N1, "create", collection, "", pod.clone()).unwrap_err();
        assert!(denied.code == 403 && denied.message.contains(part), "{pod}: {denied:?}");
    }
    ask(&mut objects, N1, "create", collection, "", good.clone()).unwrap();
    assert_eq!(ask(&mut objects, N1, "create", collection, "", good).unwrap_err().code, 409);
}

#[test]
fn tokens_are_bound_to_a_pod_of_the_node_and_its_audiences() {
    let mut objects = objects();
    let uid = |name: &str| objects.core("pods", "default", name).unwrap()["metadata"]["uid"].clone();
    let (own, other) = (uid("own"), uid("other"));
    let wanted = |name: &str, uid: &Value, audiences: &[&str]| {
        json!({"spec": {"audiences": audiences, "expirationSeconds": 600,
            "boundObjectRef": {"kind": "Pod", "apiVersion": "v1", "name": name, "uid": uid}}})
    };
    let path = "/api/v1/namespaces/default/serviceaccounts/app/token";
    let cases = [
        (wanted("own", &own, &[]), None),
        (wanted("own", &own, &["vault"]), None),
        (wanted("own", &own, &["elsewhere"]), Some("audience")),
        (wanted("own", &other, &[]), Some("UID")),
        (wanted("own", &Value::Null, &[]), Some("bound to a pod")),
        (wanted("other", &other, &[]), Some("bound to a pod scheduled on a different node")),
        (wanted("none", &own, &[]), Some("not found")),
        (json!({"spec": {}}), Some("bound to a pod")),
    ];
    for (body, expected) in cases {
        let result = ask(&mut objects, N1, "create", path, "", body.clone());
        match (&result, expected) {
            (Ok(answer), None) => assert!(answer["status"]["token"].is_string(), "{answer}"),
            (Err(denied), Some(part)) if denied.code == 403 && denied.message.contains(part) => {}
            _ => panic!("{body}: {result:?}"),
        }
    }
    let elsewhere = "/api/v1/namespaces/default/serviceaccounts/other/token";
    let denied = ask(&mut objects, N1, "create", elsewhere, "", wanted("own", &own, &[])).unwrap_err();
    assert!(denied.message.contains("no relationship found"), "{denied:?}");
}

#[test]
fn deleting_a_bound_pod_waits_for_a_delete_with_grace_zero() {
    let mut objects = objects();
    let path = "/api/v1/namespaces/default/pods/own";
    let ending =
        ask(&mut objects, User::Admin, "delete", path, "", json!({"gracePeriodSeconds": 5})).unwrap();
    assert!(ending["metadata"]["deletionTimestamp"].as_str().unwrap().ends_with('Z'), "{ending}");
    assert_eq!(ending["metadata"]["deletionGracePeriodSeconds"], 5);
    assert!(objects.core("pods", "default", "own").is_some());
    ask(&mut objects, N1, "delete", path, "", json!({"gracePeriodSeconds": 0})).unwrap();
    assert!(objects.core("pods", "default", "own").is_none());
}

/// A pod of `n1` with a claim, an ephemeral volume and a CSI volume, and what the claims are bound to; a claim of `n2`; a volume
/// without a claim; an attachment for each node.
fn objects_with_volumes() -> Objects {
    let mut objects = objects();
    let (pods, claims) =
        ("/api/v1/namespaces/default/pods", "/api/v1/namespaces/default/persistentvolumeclaims");
    let own = json!({"volumes": [
        {"name": "a", "persistentVolumeClaim": {"claimName": "data"}},
        {"name": "scratch", "ephemeral": {"volumeClaimTemplate": {}}},
        {"name": "inline", "csi": {"driver": "d", "nodePublishSecretRef": {"name": "of-inline"}}},
    ]});
    made(&mut objects, pods, pod("db", "n1", own));
    let other = json!({"volumes": [{"name": "a", "persistentVolumeClaim": {"claimName": "other-data"}}]});
    made(&mut objects, pods, pod("other-db", "n2", other.clone()));
    let mut mirror = pod("other-mirror", "n1", other);
    mirror["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": "x"});
    made(&mut objects, pods, mirror);
    for name in ["data", "db-scratch", "other-data", "unused"] {
        let claim = json!({"metadata": {"name": name}, "spec": {"volumeName": format!("pv-{name}")}});
        made(&mut objects, claims, claim);
        let secret = |of: &str| json!({"namespace": "storage", "name": format!("{of}-{name}")});
        let volume = json!({"metadata": {"name": format!("pv-{name}")}, "spec": {
            "claimRef": {"namespace": "default", "name": name},
            "csi": {"nodeStageSecretRef": secret("stage"), "controllerPublishSecretRef": secret("controller")},
            "iscsi": {"secretRef": {"name": format!("chap-{name}")}},
        }});
        made(&mut objects, "/api/v1/persistentvolumes", volume);
        for of in ["stage", "controller"] {
            let secret = json!({"metadata": {"name": format!("{of}-{name}")}});
            made(&mut objects, "/api/v1/namespaces/storage/secrets", secret);
        }
        let secret = json!({"metadata": {"name": format!("chap-{name}")}});
        made(&mut objects, "/api/v1/namespaces/default/secrets", secret);
    }
    made(&mut objects, "/api/v1/persistentvolumes", json!({"metadata": {"name": "free"}, "spec": {}}));
    made(&mut objects, "/api/v1/namespaces/default/secrets", json!({"metadata": {"name": "of-inline"}}));
    for node in ["n1", "n2"] {
        let attachment = json!({"metadata": {"name": format!("csi-{node}")}, "spec": {"nodeName": node}});
        made(&mut objects, "/apis/storage.k8s.io/v1/volumeattachments", attachment);
        made(&mut objects, "/apis/storage.k8s.io/v1/csinodes", json!({"metadata": {"name": node}}));
    }
    made(&mut objects, "/apis/storage.k8s.io/v1/csidrivers", json!({"metadata": {"name": "d"}}));
    objects
}

#[test]
fn a_node_gets_the_claims_of_its_pods_and_what_they_are_bound_to() {
    let claim = |name: &str| format!("/api/v1/namespaces/default/persistentvolumeclaims/{name}");
    let volume = |name: &str| format!("/api/v1/persistentvolumes/{name}");
    let secret = |path: &str| format!("/api/v1/namespaces/{path}");
    let storage = |path: &str| format!("/apis/storage.k8s.io/v1/{path}");
    let cases: [(&'static str, String, Option<&str>); 36] = [
        ("get", claim("data"), None),
        ("get", claim("db-scratch"), None),
        ("get", claim("other-data"), Some(UNRELATED)),
        ("get", claim("unused"), Some(UNRELATED)),
        ("get", claim("none"), Some(UNRELATED)),
        ("list", claim(""), Some("no list of persistentvolumeclaims")),
        ("watch", claim(""), Some("no watch of persistentvolumeclaims")),
        ("delete", claim("data"), Some("no delete of persistentvolumeclaims")),
        ("update", claim("data"), Some("no update of persistentvolumeclaims")),
        ("get", claim("data/status"), Some("no get of persistentvolumeclaims/status")),
        ("get", volume("pv-data"), None),
        ("get", volume("pv-db-scratch"), None),
        ("get", volume("pv-other-data"), Some(UNRELATED)),
        ("get", volume("pv-unused"), Some(UNRELATED)),
        ("get", volume("free"), Some(UNRELATED)),
        ("list", volume(""), Some("no list of persistentvolumes")),
        ("watch", volume(""), Some("no watch of persistentvolumes")),
        ("patch", volume("pv-data"), Some("no patch of persistentvolumes")),
        ("get", secret("storage/secrets/stage-data"), None),
        ("get", secret("storage/secrets/controller-data"), Some(UNRELATED)),
        ("get", secret("storage/secrets/stage-other-data"), Some(UNRELATED)),
        ("get", secret("default/secrets/chap-data"), None),
        ("get", secret("default/secrets/chap-unused"), Some(UNRELATED)),
        ("get", secret("default/secrets/of-inline"), None),
        ("get", storage("volumeattachments/csi-n1"), None),
        ("get", storage("volumeattachments/csi-n2"), Some(UNRELATED)),
        ("get", storage("volumeattachments/none"), Some(UNRELATED)),
        ("list", storage("volumeattachments"), Some("no list of volumeattachments")),
        ("create", storage("volumeattachments"), Some("no create of volumeattachments")),
        ("get", storage("csidrivers/d"), None),
        ("list", storage("csidrivers"), None),
        ("watch", storage("csidrivers"), None),
        ("delete", storage("csidrivers/d"), Some("no delete of csidrivers")),
        ("get", storage("csinodes/n1"), None),
        ("get", storage("csinodes/n2"), Some("no get of csinodes")),
        ("list", storage("csinodes"), Some("no list of csinodes")),
    ];
    let mut objects = objects_with_volumes();
    for (verb, path, expected) in cases {
        let result = match verb {
            "watch" => super::answer::authorize(N1, &request(verb, &path, "", Value::Null), &objects)
                .map(|()| Value::Null),
            _ => ask(&mut objects, N1, verb, &path, "", Value::Null),
        };
        match (&result, expected) {
            (Ok(_), None) => {}
            (Err(denied), Some(part)) if denied.code == 403 && denied.message.contains(part) => {}
            _ => panic!("{verb} {path}: {result:?}"),
        }
    }
}

#[test]
fn a_node_writes_its_own_csinode_and_the_expansion_of_related_claims() {
    let mut objects = objects_with_volumes();
    let claim = |name: &str| format!("/api/v1/namespaces/default/persistentvolumeclaims/{name}/status");
    let csinodes = |name: &str| format!("/apis/storage.k8s.io/v1/csinodes{name}");
    let expanded = || {
        json!({"status": {
            "capacity": {"storage": "2Gi"}, "allocatedResources": {"storage": "2Gi"},
            "allocatedResourceStatuses": {"storage": "NodeResizePending"}, "conditions": [{"type": "Resizing"}],
        }})
    };
    let other = json!({"metadata": {"name": "n2"}});
    let refused = |part: &'static str| Some((403, part));
    let cases: [Change; 12] = [
        ("patch", claim("data"), expanded(), None),
        ("patch", claim("other-data"), expanded(), refused(UNRELATED)),
        ("patch", claim("none"), expanded(), refused(UNRELATED)),
        ("patch", claim("data"), json!({"status": {"phase": "Lost"}}), refused("a claim's status")),
        ("patch", claim("data"), json!({"metadata": {"labels": {"a": "b"}}}), refused("a claim's status")),
        ("patch", claim("data"), json!({"metadata": {"finalizers": ["a"]}}), refused("a claim's status")),
        ("create", csinodes(""), other.clone(), refused("its own name")),
        ("patch", csinodes("/n1"), json!({"spec": {"drivers": []}}), None),
        ("patch", csinodes("/n2"), json!({"spec": {"drivers": []}}), refused("no patch of csinodes")),
        ("update", csinodes("/n2"), other, refused("no update of csinodes")),
        ("delete", csinodes("/n2"), json!({}), refused("no delete of csinodes")),
        ("delete", csinodes("/n1"), json!({}), None),
    ];
    for (verb, path, body, expected) in cases {
        let result = ask(&mut objects, N1, verb, &path, "", body.clone());
        match (&result, expected) {
            (Ok(_), None) => {}
            (Err(denied), Some((code, part))) if denied.code == code && denied.message.contains(part) => {}
            _ => panic!("{verb} {path} {body}: {result:?}"),
        }
    }
    ask(&mut objects, N1, "create", &csinodes(""), "", json!({"metadata": {"name": "n1"}})).unwrap();
    let data = objects.core("persistentvolumeclaims", "default", "data").unwrap();
    assert_eq!(data["status"]["capacity"]["storage"], "2Gi");
    assert_eq!(data["spec"]["volumeName"], "pv-data");
}

#[test]
fn node_restriction_limits_certificate_requests_to_own_pods_with_their_uids() {
    let mut objects = objects();
    let volumes =
        json!([{"name": "tls", "projected": {"sources": [{"podCertificate": {"signerName": "x/y"}}]}}]);
    let spec = json!({"serviceAccountName": "app", "volumes": volumes});
    made(&mut objects, "/api/v1/namespaces/default/pods", pod("web", "n1", spec));
    let uid = |resource: &str, namespace: &str, name: &str| {
        objects.core(resource, namespace, name).unwrap()["metadata"]["uid"].clone()
    };
    let spec = json!({
        "signerName": "x/y", "podName": "web", "podUID": uid("pods", "default", "web"),
        "serviceAccountName": "app", "serviceAccountUID": uid("serviceaccounts", "default", "app"),
        "nodeName": "n1", "nodeUID": uid("nodes", "", "n1"),
    });
    for (field, value, expected) in [
        ("signerName", "x/y", None),
        ("nodeName", "n2", Some("spec.nodeName set to itself")),
        ("podName", "none", Some("not found")),
        ("podName", "other", Some("not bound to node")),
        ("podName", "mirror", Some("is a mirror")),
        ("serviceAccountName", "default", Some("is not \"default\"")),
        ("podUID", "x", Some("spec.podUID")),
        ("serviceAccountUID", "x", Some("spec.serviceAccountUID")),
        ("nodeUID", "x", Some("spec.nodeUID")),
        ("signerName", "x/z", Some("names the signer")),
    ] {
        let mut spec = spec.clone();
        spec[field] = value.into();
        let object = json!({"metadata": {"generateName": "req-"}, "spec": spec});
        let path = "/apis/certificates.k8s.io/v1beta1/namespaces/default/podcertificaterequests";
        match (ask(&mut objects, N1, "create", path, "", object), expected) {
            (Ok(made), None) => assert!(made["metadata"]["name"].as_str().unwrap().starts_with("req-")),
            (Err(denied), Some(part)) if denied.message.contains(part) => {}
            (result, _) => panic!("{field} {value}: {result:?}"),
        }
    }
}
