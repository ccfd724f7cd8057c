//! The wire structs: what they read, what they write.
#![allow(clippy::unwrap_used)] // helpers outside #[test] functions may unwrap too

use keelson_kube_model::*;
use serde_json::json;

#[test]
fn acronyms_keep_the_spelling_of_the_api() {
    let json = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p", "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "n", "uid": "u"}]},
        "spec": {
            "containers": [{"name": "c", "image": "i", "ports": [{"containerPort": 1, "hostIP": "::1"}], "resources": {}}],
            "hostPID": true,
            "hostIPC": true,
            "setHostnameAsFQDN": true,
            "securityContext": {"seLinuxOptions": {"type": "t"}, "fsGroup": 1},
            "volumes": [{"name": "v", "downwardAPI": {"items": []}}],
        },
        "status": {
            "hostIP": "h", "hostIPs": [{"ip": "h"}], "podIP": "p", "podIPs": [{"ip": "p"}],
            "containerStatuses": [{
                "name": "c", "ready": false, "restartCount": 0, "image": "", "imageID": "", "containerID": "r://1",
                "state": {"terminated": {"exitCode": 0, "containerID": "r://1"}}, "lastState": {},
            }],
        },
    });
    let pod: Pod = serde_json::from_value(json.clone()).unwrap();
    assert_eq!(pod.spec.host_pid, Some(true));
    let mut written = serde_json::to_value(&pod).unwrap();
    // An empty list is not written.
    written["spec"]["volumes"][0]["downwardAPI"]["items"] = json!([]);
    assert_eq!(written, json);
}

#[test]
fn null_reads_as_absent() {
    let pod: Pod = serde_json::from_value(json!({
        "metadata": {"creationTimestamp": null, "labels": null, "name": null},
        "spec": {"containers": null, "volumes": [{"name": "v", "emptyDir": null}]},
        "status": null,
    }))
    .unwrap();
    assert_eq!(pod.metadata, ObjectMeta::default());
    assert_eq!(pod.status, PodStatus::default());
    assert_eq!(pod.spec.volumes[0].source_kind(), None);
}

#[test]
fn volume_sources_are_named_even_when_unknown() {
    let kind = |json| serde_json::from_value::<Volume>(json).unwrap().source_kind().map(str::to_owned);
    assert_eq!(kind(json!({"name": "v", "emptyDir": {}})).as_deref(), Some("emptyDir"));
    assert_eq!(kind(json!({"name": "v", "cephfs": {"monitors": []}})).as_deref(), Some("cephfs"));
    assert_eq!(kind(json!({"name": "v"})), None);
    let odd = json!({"name": "v", "hostPath": {"path": "/a"}, "rbd": {"image": "x"}});
    let volume: Volume = serde_json::from_value(odd.clone()).unwrap();
    assert_eq!(volume.source_kinds(), ["hostPath", "rbd"]);
    assert_eq!(serde_json::to_value(&volume).unwrap(), odd);
}

#[test]
fn ports_are_numbers_or_names() {
    let read = |text| serde_json::from_str::<IntOrString>(text);
    assert_eq!(read("80").unwrap(), IntOrString::Int(80));
    assert_eq!(read("\"web\"").unwrap(), IntOrString::Str("web".into()));
    assert_eq!(read("-1").unwrap(), IntOrString::Int(-1));
    assert!(read("99999999999").is_err() && read("-99999999999").is_err());
    let error = read("true").unwrap_err().to_string();
    assert!(error.contains("expected a 32-bit number or a string"), "{error}");
    assert_eq!(
        (IntOrString::Int(80).to_string(), IntOrString::Str("web".into()).to_string()),
        ("80".into(), "web".into())
    );
    assert_eq!(serde_json::to_string(&IntOrString::Int(80)).unwrap(), "80");
}

#[test]
fn lists_of_nodes_and_pods_are_read() {
    let list: NodeList = serde_json::from_value(json!({
        "metadata": {"resourceVersion": "7", "continue": "c"},
        "items": [{
            "metadata": {"name": "n"},
            "spec": {"podCIDR": "10.0.0.0/24", "providerID": "x", "taints": [{"key": "k", "effect": "NoExecute"}]},
            "status": {
                "capacity": {"cpu": "4", "memory": "1024Mi"},
                "daemonEndpoints": {"kubeletEndpoint": {"Port": 10250}},
                "nodeInfo": {"bootID": "b", "machineID": "m", "systemUUID": "s", "osImage": "o"},
            },
        }],
    }))
    .unwrap();
    let node = &list.items[0];
    assert_eq!((list.metadata.resource_version.as_str(), list.metadata.continue_token.as_str()), ("7", "c"));
    assert_eq!(node.status.capacity["memory"].to_string(), "1Gi");
    let written = serde_json::to_value(node).unwrap();
    assert_eq!(written["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"], 10250);
    assert_eq!(written["status"]["nodeInfo"]["systemUUID"], "s");
    assert!(serde_json::from_value::<PodList>(json!({"items": null})).unwrap().items.is_empty());
}

#[test]
fn a_bad_quantity_is_named_in_the_error() {
    let pod = json!({"spec": {"containers": [{"resources": {"limits": {"cpu": "lots"}}}]}});
    assert!(serde_json::from_value::<Pod>(pod).unwrap_err().to_string().contains("lots"));
}

#[test]
fn phases_and_policies_know_their_words() {
    for policy in [RestartPolicy::Always, RestartPolicy::OnFailure, RestartPolicy::Never] {
        assert_eq!(policy.as_str(), format!("{policy:?}"));
        assert_eq!(RestartPolicy::parse(policy.as_str()), Some(policy));
    }
    assert_eq!(RestartPolicy::parse(""), Some(RestartPolicy::Always));
    assert_eq!(RestartPolicy::parse("Sometimes"), None);
    for (phase, terminal) in [
        (PodPhase::Pending, false),
        (PodPhase::Running, false),
        (PodPhase::Succeeded, true),
        (PodPhase::Failed, true),
        (PodPhase::Unknown, false),
    ] {
        assert_eq!(phase.as_str(), format!("{phase:?}"));
        assert_eq!(PodPhase::parse(phase.as_str()), phase);
        assert_eq!(phase.is_terminal(), terminal, "{phase:?}");
    }
    assert_eq!(PodPhase::parse(""), PodPhase::Pending);
    assert_eq!(PullPolicy::parse("Never"), Some(PullPolicy::Never));
}

#[test]
fn a_status_is_asked_for_its_phase_and_its_conditions() {
    let status: PodStatus = serde_json::from_value(json!({
        "phase": "Running",
        "conditions": [
            {"type": "Ready", "status": "False"},
            {"type": "Initialized", "status": "True"},
            {"type": "Odd", "status": "Unknown"},
        ],
    }))
    .unwrap();
    assert_eq!(status.phase(), PodPhase::Running);
    let is_true = |type_| status.condition(type_).map(PodCondition::is_true);
    assert_eq!((is_true("Ready"), is_true("Initialized")), (Some(false), Some(true)));
    assert_eq!((is_true("Odd"), is_true("PodScheduled")), (Some(false), None));
}

#[test]
fn labels_and_annotations_are_written() {
    let json = json!({"metadata": {"labels": {"app": "web"}, "annotations": {"a": "b"}}});
    let pod: Pod = serde_json::from_value(json.clone()).unwrap();
    assert_eq!(serde_json::to_value(&pod).unwrap()["metadata"], json["metadata"]);
}
