//! Which message each volume of a pod becomes.

use serde_json::json;

use super::*;

const TOKENS: ApiSources = ApiSources { tokens: true, trust_bundles: false, certificates: false };

fn pod(mounts: serde_json::Value, volumes: serde_json::Value) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": "web", "labels": {"tier": "front"}},
        "spec": {
            "containers": [{"name": "c", "volumeMounts": mounts}],
            "initContainers": [{"name": "i", "volumeMounts": [{"name": "early", "mountPath": "/e"}]}],
            "volumes": volumes
        }
    }))
    .unwrap()
}

fn only(mounts: serde_json::Value, volume: serde_json::Value) -> volume::FileVolume {
    let messages = messages(&pod(mounts, json!([volume])), &ResourceList::new(), ApiSources::default());
    match messages.into_iter().next().and_then(|volume| volume.source) {
        Some(Source::Files(files)) => files,
        other => panic!("{other:?}"),
    }
}

fn at(path: &str) -> serde_json::Value {
    json!([{"name": "v", "mountPath": path}])
}

#[test]
fn config_map_secret_and_downward_volumes_have_sources_modes_and_optional() {
    let files = only(
        at("/v"),
        json!({"name": "v", "configMap": {"name": "m", "defaultMode": 420, "optional": true,
            "items": [{"key": "k", "path": "p", "mode": 256}]}}),
    );
    assert_eq!((files.kind(), files.default_mode), (Kind::ConfigMap, Some(0o644)));
    let item = volume::KeyFile { key: "k".into(), path: "p".into(), mode: Some(0o400) };
    let object = |kind: &str, name: &str, items, optional| {
        let (kind, name) = (kind.to_owned(), name.to_owned());
        FileSource::Object(volume::ObjectFiles { kind, name, items, optional })
    };
    assert_eq!(files.sources[0].source, Some(object("ConfigMap", "m", vec![item], true)));
    let files = only(at("/v"), json!({"name": "v", "secret": {"secretName": "s"}}));
    assert_eq!((files.kind(), files.default_mode), (Kind::Secret, None));
    assert_eq!(files.sources[0].source, Some(object("Secret", "s", vec![], false)));
    let files = only(
        at("/v"),
        json!({"name": "v", "downwardAPI": {"items": [
            {"path": "tier", "fieldRef": {"fieldPath": "metadata.labels['tier']"}},
            {"path": "ip", "fieldRef": {"fieldPath": "status.podIP"}},
            {"path": "cpu", "resourceFieldRef": {"containerName": "c", "resource": "limits.cpu"}},
        ]}}),
    );
    assert_eq!(files.kind(), Kind::DownwardApi);
    let Some(FileSource::Downward(fields)) = &files.sources[0].source else { panic!("{files:?}") };
    use volume::downward_file::Value;
    assert_eq!(fields.files[0].value, Some(Value::Content(b"front".to_vec())));
    assert!(matches!(&fields.files[1].value, Some(Value::Error(why)) if why.contains("status.podIP")));
    assert!(
        matches!(&fields.files[2].value, Some(Value::WaitsFor(what)) if what.contains("resource-manager"))
    );
}

#[test]
fn projected_sources_keep_their_order_and_unsupported_ones_are_named() {
    let files = only(
        at("/v"),
        json!({"name": "v", "projected": {"defaultMode": 256, "sources": [
            {"secret": {"name": "s"}},
            {"serviceAccountToken": {"path": "token"}},
            {"downwardAPI": {"items": [{"path": "n", "fieldRef": {"fieldPath": "metadata.name"}}]}},
            {"clusterTrustBundle": {"path": "ca"}},
            {"configMap": {"name": "m"}},
            {"podCertificate": {"signerName": "x/y"}},
        ]}}),
    );
    assert_eq!((files.kind(), files.default_mode), (Kind::Projected, Some(0o400)));
    let names: Vec<String> = files
        .sources
        .into_iter()
        .map(|source| match source.source.unwrap() {
            FileSource::Object(object) => format!("{}/{}", object.kind, object.name),
            FileSource::Downward(_) => "downward".to_owned(),
            FileSource::Token(token) => format!("token {}", token.path),
            FileSource::TrustBundle(bundle) => format!("bundle {}", bundle.path),
            FileSource::PodCertificate(certificate) => certificate.signer_name,
            FileSource::Unsupported(field) => field,
        })
        .collect();
    let expected = [
        "Secret/s",
        "serviceAccountToken",
        "downward",
        "clusterTrustBundle",
        "ConfigMap/m",
        "podCertificate",
    ];
    assert_eq!(names, expected);
}

#[test]
fn a_projected_token_has_its_account_lifetime_and_mode() {
    let volume = json!({"name": "v", "projected": {"defaultMode": 420, "sources": [
        {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}},
        {"serviceAccountToken": {"path": "other", "audience": "vault"}},
    ]}});
    let mut pod = pod(at("/v"), json!([volume]));
    pod.spec.service_account_name = "web".into();
    let sources = |pod: &Pod| match messages(pod, &ResourceList::new(), TOKENS).remove(0).source {
        Some(Source::Files(files)) => files.sources.into_iter().filter_map(|source| source.source),
        other => panic!("{other:?}"),
    };
    let token = |audience: &str, expiration_seconds, path: &str, mode| {
        FileSource::Token(volume::ServiceAccountToken {
            service_account: "web".into(),
            audience: audience.into(),
            expiration_seconds,
            path: path.into(),
            mode,
            owner_uid: None,
        })
    };
    let both = |mode| vec![token("", 3607, "token", mode), token("vault", 3600, "other", mode)];
    assert_eq!(sources(&pod).collect::<Vec<_>>(), both(None));
    pod.spec.security_context = serde_json::from_value(json!({"fsGroup": 5})).unwrap();
    assert_eq!(sources(&pod).collect::<Vec<_>>(), both(Some(0o600)));
}

#[test]
fn trust_bundles_are_sent_with_their_gate_and_other_sources_still_named() {
    let volume = json!({"name": "v", "projected": {"sources": [
        {"clusterTrustBundle": {"name": "ca", "path": "a", "optional": true}},
        {"clusterTrustBundle": {"signerName": "x/y", "path": "b", "labelSelector": {"matchLabels": {"k": "v"}}}},
        {"clusterTrustBundle": {"signerName": "x/y", "path": "c"}},
        {"clusterTrustBundle": {"path": "d"}},
        {"podCertificate": {"signerName": "x/y"}},
    ]}});
    let mut pod = pod(at("/v"), json!([volume]));
    pod.spec.security_context = serde_json::from_value(json!({"runAsUser": 7})).unwrap();
    let sources = |api| match messages(&pod, &ResourceList::new(), api).remove(0).source {
        Some(Source::Files(files)) => {
            files.sources.into_iter().filter_map(|source| source.source).collect::<Vec<_>>()
        }
        other => panic!("{other:?}"),
    };
    let bundle = |name: &str, signer_name: &str, selector: Option<&str>, path: &str| {
        FileSource::TrustBundle(volume::ClusterTrustBundle {
            name: name.into(),
            signer_name: signer_name.into(),
            label_selector_json: selector.map(|json| json.as_bytes().to_vec()),
            optional: path == "a",
            path: path.into(),
            mode: Some(0o600),
            owner_uid: Some(7),
        })
    };
    let refused = |field: &str| FileSource::Unsupported(field.into());
    let expected = [
        bundle("ca", "", None, "a"),
        bundle("", "x/y", Some(r#"{"matchLabels":{"k":"v"}}"#), "b"),
        bundle("", "x/y", None, "c"),
        refused("clusterTrustBundle"),
        refused("podCertificate"),
    ];
    assert_eq!(sources(ApiSources { tokens: true, trust_bundles: true, certificates: false }), expected);
    assert!(sources(TOKENS)[..4].iter().all(|source| *source == refused("clusterTrustBundle")));
}

#[test]
fn certificates_of_pods_are_sent_with_their_gate_and_known_key_types_only() {
    let volume = json!({"name": "v", "projected": {"sources": [
        {"podCertificate": {"signerName": "x/y", "keyType": "ED25519", "credentialBundlePath": "a", "keyPath": "b",
            "certificateChainPath": "c", "maxExpirationSeconds": 3600, "userAnnotations": {"x/k": "v"}}},
        {"podCertificate": {"signerName": "x/y", "keyType": "RSA1024"}},
        {"podCertificate": {"keyType": "ED25519"}},
    ]}});
    let mut pod = pod(at("/v"), json!([volume]));
    pod.spec.security_context = serde_json::from_value(json!({"runAsUser": 7})).unwrap();
    let sources = |api| match messages(&pod, &ResourceList::new(), api).remove(0).source {
        Some(Source::Files(files)) => {
            files.sources.into_iter().filter_map(|source| source.source).collect::<Vec<_>>()
        }
        other => panic!("{other:?}"),
    };
    let refused = |field: &str| FileSource::Unsupported(field.into());
    let sent = FileSource::PodCertificate(volume::PodCertificate {
        signer_name: "x/y".into(),
        key_type: "ED25519".into(),
        max_expiration_seconds: Some(3600),
        credential_bundle_path: "a".into(),
        key_path: "b".into(),
        certificate_chain_path: "c".into(),
        user_annotations: [("x/k".to_owned(), "v".to_owned())].into(),
        mode: Some(0o600),
        owner_uid: Some(7),
    });
    let expected = [sent, refused("podCertificate with the keyType \"RSA1024\""), refused("podCertificate")];
    assert_eq!(sources(ApiSources { certificates: true, ..TOKENS }), expected);
    assert_eq!(sources(TOKENS), vec![refused("podCertificate"); 3]);
}

#[test]
fn volumes_that_no_container_mounts_are_left_out() {
    let map = |name: &str| json!({"name": name, "configMap": {"name": "m"}});
    let unused = [
        json!({"name": "none", "emptyDir": {}}),
        json!({"name": "host", "hostPath": {"path": "/none", "type": "Directory"}}),
        json!({"name": "claim", "persistentVolumeClaim": {"claimName": "none"}}),
    ];
    let mut volumes = vec![map("v"), map("early"), map("unused"), json!({"name": "disk", "emptyDir": {}})];
    volumes.extend(unused);
    let mut pod = pod(at("/v"), json!(volumes));
    let device = json!([{"name": "disk", "devicePath": "/dev/x"}]);
    pod.spec.containers[0].volume_devices = serde_json::from_value(device).unwrap();
    let names: Vec<String> = messages(&pod, &ResourceList::new(), ApiSources::default())
        .into_iter()
        .map(|volume| volume.name)
        .collect();
    assert_eq!(names, ["v", "early", "disk"]);
}

/// The message for the only volume of a pod, with this source.
fn message_of(source: &serde_json::Value) -> Source {
    let mut volume = source.clone();
    volume["name"] = json!("v");
    let pod = pod(at("/v"), json!([volume]));
    messages(&pod, &ResourceList::new(), TOKENS).remove(0).source.unwrap()
}

#[test]
fn claims_are_sent_by_name_and_ephemeral_ones_without() {
    let claim = |claim_name: &str, ephemeral, read_only| {
        Source::Claim(volume::ClaimVolume { claim_name: claim_name.into(), ephemeral, read_only })
    };
    for (source, expected) in [
        (json!({"persistentVolumeClaim": {"claimName": "d"}}), claim("d", false, false)),
        (json!({"persistentVolumeClaim": {"claimName": "d", "readOnly": false}}), claim("d", false, false)),
        (json!({"persistentVolumeClaim": {"claimName": "d", "readOnly": true}}), claim("d", false, true)),
        (
            json!({"ephemeral": {"volumeClaimTemplate": {"spec": {"accessModes": ["ReadWriteOnce"]}}}}),
            claim("", true, false),
        ),
    ] {
        assert_eq!(message_of(&source), expected, "{source}");
    }
}

#[test]
fn plugin_sources_are_sent_unchanged_with_unknown_fields() {
    let kinds: Vec<&str> = pod_sources().filter(|kind| goes_to_plugins(kind)).collect();
    assert_eq!(kinds.len(), 21);
    for kind in kinds {
        let value =
            json!({"server": "a", "readOnly": false, "empty": "", "none": null, "new": {"list": [1, {}]}});
        match message_of(&json!({ kind: value })) {
            Source::Plugin(plugin) => {
                assert_eq!(plugin.kind, kind);
                let sent: serde_json::Value = serde_json::from_slice(&plugin.source_json).unwrap();
                assert_eq!(sent, value, "{kind}");
            }
            other => panic!("{kind}: {other:?}"),
        }
    }
}

#[test]
fn an_image_volume_is_left_to_the_runtime() {
    let volumes = json!([{"name": "v", "image": {"reference": "i:1"}}]);
    assert_eq!(messages(&pod(at("/v"), volumes), &ResourceList::new(), ApiSources::default()), []);
    let both = json!({"image": {"reference": "i:1"}, "emptyDir": {}});
    assert_eq!(message_of(&both), Source::Unsupported("emptyDir and image".into()));
}

#[test]
fn novel_sources_are_unsupported_by_their_field() {
    assert_eq!(message_of(&json!({"novel": {}})), Source::Unsupported("novel".into()));
    assert_eq!(message_of(&json!({})), Source::Unsupported("no source".into()));
    assert_eq!(message_of(&json!({"nfs": null})), Source::Unsupported("no source".into()));
    // Only a PersistentVolume may be local.
    assert_eq!(message_of(&json!({"local": {"path": "/srv"}})), Source::Unsupported("local".into()));
}

#[test]
fn a_volume_with_two_sources_is_refused_with_both_names() {
    let both = json!({"emptyDir": {}, "nfs": {"server": "a", "path": "/"}});
    assert_eq!(message_of(&both), Source::Unsupported("emptyDir and nfs".into()));
}

#[test]
fn a_volume_says_whether_containers_mount_it_or_use_it_as_a_device() {
    let claim = |name: &str| json!({"name": name, "persistentVolumeClaim": {"claimName": name}});
    let mut pod = pod(at("/v"), json!([claim("v"), claim("disk"), claim("early")]));
    let device = json!([{"name": "disk", "devicePath": "/dev/x"}, {"name": "early", "devicePath": "/dev/y"}]);
    pod.spec.containers[0].volume_devices = serde_json::from_value(device).unwrap();
    let uses: Vec<(String, bool, bool)> = messages(&pod, &ResourceList::new(), ApiSources::default())
        .into_iter()
        .map(|volume| (volume.name, volume.mounted, volume.device))
        .collect();
    let uses: Vec<(&str, bool, bool)> = uses.iter().map(|(name, m, d)| (name.as_str(), *m, *d)).collect();
    assert_eq!(uses, [("v", true, false), ("disk", false, true), ("early", true, true)]);
}

#[test]
fn huge_page_sizes_are_those_requested_once_each() {
    let pod: Pod = serde_json::from_value(json!({
        "metadata": {"name": "web"},
        "spec": {
            "resources": {"requests": {"hugepages-64Ki": "64Ki"}},
            "containers": [
                {"name": "a", "resources": {"limits": {"hugepages-2Mi": "4Mi", "memory": "1Gi"}}},
                {"name": "b", "resources": {"requests": {"hugepages-2Mi": "2Mi", "hugepages-1Mi": "0"}}},
            ],
            "initContainers": [{"name": "i", "resources": {"limits": {"hugepages-1Gi": "1Gi"}}}],
        }
    }))
    .unwrap();
    assert_eq!(huge_page_sizes(&pod), [64 << 10, 2 << 20, 1 << 30]);
    let none: Pod = serde_json::from_value(json!({"metadata": {}, "spec": {"containers": []}})).unwrap();
    assert!(huge_page_sizes(&none).is_empty());
}

#[test]
fn nested_mount_points_are_the_outermost_ones_below_a_volume() {
    let mounts = json!([
        {"name": "v", "mountPath": "/etc/app/"},
        {"name": "a", "mountPath": "/etc/app/one"},
        {"name": "b", "mountPath": "/etc/app/one/two"},
        {"name": "c", "mountPath": "/etc/./app//deep/er"},
        {"name": "d", "mountPath": "/etc/application"},
        {"name": "e", "mountPath": "/etc"},
    ]);
    let files = only(mounts, json!({"name": "v", "secret": {"secretName": "s"}}));
    assert_eq!(files.nested, ["deep/er", "one"]);
}

#[test]
fn selinux_options_are_those_of_each_mounting_container_over_the_pods() {
    let mount = json!([{"name": "v", "mountPath": "/v"}]);
    let levels = |pods: serde_json::Value, own: &[serde_json::Value]| {
        let container = |(i, own): (usize, &serde_json::Value)| {
            let name = format!("c{i}");
            json!({"name": name, "securityContext": own, "volumeMounts": mount})
        };
        let containers: Vec<_> = own.iter().enumerate().map(container).collect();
        let other = json!({"name": "other", "securityContext": {"seLinuxOptions": {"level": "s0:c9"}}});
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "web"},
            "spec": {
                "securityContext": pods,
                "containers": containers,
                "initContainers": [other],
                "volumes": [{"name": "v", "emptyDir": {}}],
            },
        }))
        .unwrap();
        let messages = messages(&pod, &ResourceList::new(), ApiSources::default());
        let options = messages[0].se_linux_options.iter();
        options.map(|o| format!("{}:{}:{}", o.user, o.r#type, o.level)).collect::<Vec<_>>()
    };
    let label = |level: &str| json!({"seLinuxOptions": {"level": level}});
    let none = json!({});
    assert!(levels(none.clone(), &[none.clone(), none.clone()]).is_empty());
    assert_eq!(levels(label("s0:c1"), &[none.clone(), none.clone()]), ["::s0:c1"]);
    assert_eq!(levels(label("s0:c1"), &[label("s0:c2"), none.clone()]), ["::s0:c2", "::s0:c1"]);
    assert_eq!(levels(none.clone(), &[label("s0:c2"), none]), ["::s0:c2", "::"]);
    let whole = json!({"seLinuxOptions": {"user": "u", "type": "t"}});
    assert_eq!(levels(label("s0:c1"), &[whole]), ["u:t:"], "the options of a container replace the pod's");
}
