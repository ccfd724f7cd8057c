//! API objects that a static pod refers to.

use keelson_kube_model::*;
use serde_json::{Value, json};

fn reference(spec: Value, allowed: AllowedReferences) -> Option<String> {
    let pod: Pod = serde_json::from_value(json!({ "spec": spec })).unwrap();
    static_pod_api_references(&pod, allowed)
}

fn in_container(fields: Value) -> Value {
    json!({"containers": [fields]})
}

fn in_volume(source: Value) -> Value {
    let mut volume = source;
    volume["name"] = json!("v");
    json!({"volumes": [volume]})
}

#[test]
fn static_pods_name_no_api_objects() {
    let secret_env =
        json!({"env": [{"name": "a", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]});
    let config_env =
        json!({"env": [{"name": "a", "valueFrom": {"configMapKeyRef": {"name": "s", "key": "k"}}}]});
    let projected = |source: Value| in_volume(json!({"projected": {"sources": [source]}}));
    let table = [
        (json!({"serviceAccountName": "a"}), "serviceaccounts"),
        (json!({"imagePullSecrets": [{"name": "a"}]}), "secrets"),
        (in_container(secret_env), "secrets"),
        (in_container(json!({"envFrom": [{"secretRef": {"name": "a"}}]})), "secrets"),
        (in_volume(json!({"secret": {"secretName": "a"}})), "secrets"),
        (projected(json!({"secret": {"name": "a"}})), "secrets"),
        (in_volume(json!({"cephfs": {"secretRef": {"name": "a"}}})), "secrets"),
        (in_volume(json!({"csi": {"driver": "a", "nodePublishSecretRef": {"name": "a"}}})), "secrets"),
        (in_container(config_env), "configmaps"),
        (json!({"initContainers": [{"envFrom": [{"configMapRef": {"name": "a"}}]}]}), "configmaps"),
        (in_volume(json!({"configMap": {"name": "a"}})), "configmaps"),
        (projected(json!({"configMap": {"name": "a"}})), "configmaps"),
        (json!({"resourceClaims": [{"name": "a"}]}), "resourceclaims"),
        (in_volume(json!({"csi": {"driver": "a"}})), "csidrivers (via CSI volumes)"),
        (in_volume(json!({"persistentVolumeClaim": {"claimName": "a"}})), "persistentvolumeclaims"),
        (in_volume(json!({"ephemeral": {}})), "persistentvolumeclaims (via ephemeral volumes)"),
        (in_volume(json!({"glusterfs": {}})), "endpoints (via glusterFS volumes)"),
        (in_volume(json!({"azureFile": {}})), "secrets (via azureFile volumes)"),
        (projected(json!({"serviceAccountToken": {"path": "t"}})), "serviceaccounts (via projected volumes)"),
        (projected(json!({"clusterTrustBundle": {"path": "t"}})), "clustertrustbundles"),
        (projected(json!({"podCertificate": {"signerName": "t"}})), "podcertificates"),
        (projected(json!({"novel": {}})), "objects of an unknown projected source"),
        (in_volume(json!({"novel": {}})), "objects of the unknown volume type \"novel\""),
    ];
    for (spec, expected) in table {
        assert_eq!(
            reference(spec.clone(), AllowedReferences::default()).as_deref(),
            Some(expected),
            "{spec}"
        );
    }
}

#[test]
fn static_pods_may_use_what_needs_no_api() {
    let downward = json!({"downwardAPI": {"items": []}});
    for source in [
        json!({"hostPath": {"path": "/"}}),
        json!({"emptyDir": {}}),
        downward.clone(),
        json!({"image": {"reference": "a"}}),
        json!({"nfs": {"server": "a", "path": "/"}}),
        json!({"rbd": {}}),
        json!({"projected": {"sources": [downward]}}),
    ] {
        assert_eq!(reference(in_volume(source.clone()), AllowedReferences::default()), None, "{source}");
    }
}

#[test]
fn secrets_and_config_maps_may_be_allowed_one_by_one() {
    let both = json!({"volumes": [
        {"name": "a", "secret": {"secretName": "a"}}, {"name": "b", "configMap": {"name": "a"}},
    ]});
    let allowed = |secrets, config_maps| reference(both.clone(), AllowedReferences { config_maps, secrets });
    assert_eq!(allowed(false, true).as_deref(), Some("secrets"));
    assert_eq!(allowed(true, false).as_deref(), Some("configmaps"));
    assert_eq!(allowed(true, true), None);
    let all = AllowedReferences { config_maps: true, secrets: true };
    for source in [json!({"secret": {"name": "a"}}), json!({"configMap": {"name": "a"}})] {
        assert_eq!(reference(in_volume(json!({"projected": {"sources": [source]}})), all), None);
    }
    assert_eq!(
        reference(in_container(json!({"env": [{"name": "a", "value": "1"}]})), AllowedReferences::default()),
        None
    );
    assert_eq!(reference(json!({"serviceAccountName": "a"}), all).as_deref(), Some("serviceaccounts"));
}
