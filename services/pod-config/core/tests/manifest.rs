//! Which manifests are accepted, and which errors others cause.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use keelson_pod_config_core::manifest::{Kind, read_manifest};
use keelson_pod_config_core::static_pod::StaticRules;
use keelson_pod_config_core::{FileContent, ManifestError, ManifestErrorKind, parse_file};
use serde_json::{Value, json};

const PATH: &str = "/m/web.yaml";

const POD: &str = "\
apiVersion: v1
kind: Pod
metadata:
  name: web
spec:
  containers:
  - name: main
    image: busybox:1.36
";

fn parse(text: &str) -> Result<FileContent, Vec<ManifestError>> {
    parse_file(text.as_bytes(), PATH, &StaticRules::standalone("node1"))
}

fn good(text: &str) -> FileContent {
    parse(text).unwrap_or_else(|errors| panic!("{errors:?}"))
}

fn bad(text: &str) -> Vec<ManifestError> {
    parse(text).map(|content| panic!("{content:?}")).unwrap_err()
}

fn only(text: &str) -> ManifestError {
    let mut errors = bad(text);
    assert_eq!(errors.len(), 1, "{errors:?}");
    errors.remove(0)
}

fn json_of(content: &FileContent, index: usize) -> Value {
    serde_json::from_slice(&content.pods[index].json).unwrap()
}

#[test]
fn a_pod_gets_its_name_namespace_node_uid_hash_toleration_and_phase() {
    let content = good(POD);
    let pod = &content.pods[0];
    assert_eq!((pod.namespace.as_str(), pod.name.as_str()), ("default", "web-node1"));
    let value = json_of(&content, 0);
    assert_eq!(value["metadata"]["name"], "web-node1");
    assert_eq!(value["metadata"]["namespace"], "default");
    assert_eq!(value["metadata"]["uid"], pod.uid.as_str());
    assert_eq!(value["metadata"]["annotations"]["kubernetes.io/config.hash"], pod.uid.as_str());
    assert_eq!(value["spec"]["nodeName"], "node1");
    assert_eq!(value["spec"]["tolerations"], json!([{"operator": "Exists", "effect": "NoExecute"}]));
    assert_eq!(value["spec"]["restartPolicy"], "Always");
    assert_eq!(value["status"]["phase"], "Pending");
    assert_eq!(pod.uid.len(), 32);
}

#[test]
fn a_uid_in_the_manifest_is_kept_and_used_as_config_hash() {
    let text = POD.replace("  name: web\n", "  name: web\n  uid: my-uid\n");
    let content = good(&text);
    assert_eq!(content.pods[0].uid, "my-uid");
    assert_eq!(json_of(&content, 0)["metadata"]["annotations"]["kubernetes.io/config.hash"], "my-uid");
}

#[test]
fn a_uid_with_path_characters_is_rejected() {
    for uid in ["../../etc", "a/b", ".", "..", "a b"] {
        let error = only(&POD.replace("  name: web\n", &format!("  name: web\n  uid: '{uid}'\n")));
        assert_eq!((error.field.as_str(), error.line), ("metadata.uid", 5), "{uid}");
    }
}

#[test]
fn the_uid_depends_on_the_content_the_node_and_the_file_but_not_on_the_notation() {
    let rules = StaticRules::standalone("node1");
    let uid = |text: &str, path, rules: &StaticRules| {
        parse_file(text.as_bytes(), path, rules).unwrap().pods[0].uid.clone()
    };
    let base = uid(POD, PATH, &rules);
    let as_json = json!({
        "kind": "Pod", "apiVersion": "v1",
        "spec": {"containers": [{"image": "busybox:1.36", "name": "main"}]},
        "metadata": {"name": "web"},
    });
    assert_eq!(uid(&as_json.to_string(), PATH, &rules), base);
    assert_ne!(uid(&POD.replace("1.36", "1.37"), PATH, &rules), base);
    assert_ne!(uid(POD, "/m/other.yaml", &rules), base);
    assert_ne!(uid(POD, PATH, &StaticRules::standalone("node2")), base);
}

#[test]
fn unknown_pod_fields_are_preserved() {
    let value = json_of(&good(&format!("{POD}  inventedLater: {{x: 1}}\n")), 0);
    assert_eq!(value["spec"]["inventedLater"]["x"], 1);
}

#[test]
fn one_file_may_hold_documents_lists_and_pod_lists() {
    let second = POD.replace("name: web", "name: two");
    let indented = POD.replace('\n', "\n    ").trim_end().to_owned();
    let list = format!("apiVersion: v1\nkind: List\nitems:\n  - {indented}\n");
    let pod_list = json!({"apiVersion": "v1", "kind": "PodList", "items": [
        {"metadata": {"name": "x"}, "spec": {"containers": [{"name": "c", "image": "i"}]}},
    ]});
    let cases = [
        (format!("{POD}---\n{second}"), vec!["web-node1", "two-node1"]),
        (format!("---\n# only a comment\n---\n{POD}...\n"), vec!["web-node1"]),
        (list, vec!["web-node1"]),
        (pod_list.to_string(), vec!["x-node1"]),
        (format!("{pod_list}\n{pod_list}"), vec!["x-node1", "x-node1"]),
        (format!("\u{feff}{POD}"), vec!["web-node1"]),
        (
            "{apiVersion: v1, kind: Pod, metadata: {name: f}, spec: {containers: [{name: c, image: i}]}}"
                .into(),
            vec!["f-node1"],
        ),
    ];
    for (text, names) in cases {
        let content = good(&text);
        assert_eq!(content.pods.iter().map(|p| p.name.as_str()).collect::<Vec<_>>(), names, "{text}");
    }
}

#[test]
fn broken_yaml_is_reported_with_line_and_document() {
    let error = only(&format!("{POD}---\n{}", POD.replace("  containers:\n", "  containers: [\n")));
    assert_eq!((error.kind, error.document), (ManifestErrorKind::Syntax, 2));
    assert!(error.line > 14, "{error:?}");
    assert!(error.at(PATH).starts_with(&format!("{PATH}:{}:", error.line)), "{}", error.at(PATH));
    let tab = only("apiVersion: v1\nkind: Pod\nmetadata:\n\tname: web\n");
    assert_eq!(tab.line, 4, "{tab:?}");
}

#[test]
fn a_truncated_manifest_is_an_error() {
    let json = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web"},
        "spec": {"containers": [{"name": "main", "image": "i"}]}})
    .to_string();
    for end in 0..json.len() {
        let error = only(&json[..end]);
        assert!(error.kind == ManifestErrorKind::Syntax, "{end}: {error:?}");
    }
    // YAML has no end mark: before the image there is no valid pod.
    let image = POD.find("image:").unwrap();
    for end in 0..image {
        bad(&POD[..end]);
    }
    let error = only(&json[..40]);
    assert_eq!(error.line, 1);
    assert!(error.message.contains("EOF"), "{error:?}");
}

#[test]
fn a_manifest_of_10_mib_is_refused_and_one_byte_less_is_accepted() {
    let mut bytes = POD.as_bytes().to_vec();
    bytes.extend(b"# ");
    bytes.resize(10 * 1024 * 1024 - 1, b'x');
    assert_eq!(read_manifest(&bytes).unwrap().len(), 1);
    bytes.push(b'x');
    let error = read_manifest(&bytes).unwrap_err();
    assert!(error.message.contains("10 MiB"), "{error:?}");
}

#[test]
fn an_object_of_more_than_3_mib_is_rejected() {
    let long = "x".repeat(3 << 20);
    let error = only(&format!("{POD}    command: [{long}]\n"));
    assert!(error.message.contains("3 MiB"), "{}", error.message.len());
    let error = only(&format!(
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: c, annotations: {{k: {long}}}}}\n"
    ));
    assert!(error.message.contains("3 MiB"), "{}", error.message.len());
}

#[test]
fn unsupported_kinds_are_rejected_by_name() {
    let deployment = only("apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: x}\n");
    assert!(deployment.message.contains("kind Deployment of apps/v1"), "{deployment:?}");
    let wrong_group = only(&POD.replace("apiVersion: v1", "apiVersion: v2"));
    assert!(wrong_group.message.contains("kind Pod of v2"), "{wrong_group:?}");
    let no_kind = only("apiVersion: v1\nmetadata: {name: x}\n");
    assert_eq!((no_kind.field.as_str(), no_kind.message.as_str()), ("kind", "Required value"));
    let in_list = only("apiVersion: v1\nkind: List\nitems:\n- apiVersion: v1\n  kind: Service\n");
    assert_eq!((in_list.field.as_str(), in_list.line), ("items[0]", 4));
    assert!(in_list.message.contains("kind Service"), "{in_list:?}");
    for text in ["", "\n# nothing\n", "---\n---\n"] {
        assert!(only(text).message.contains("no object"), "{text:?}");
    }
    for text in ["just text", "- a\n- b\n", "42"] {
        assert_eq!(only(text).kind, ManifestErrorKind::WrongKind, "{text:?}");
    }
    assert!(only("apiVersion: v1\nkind: PodList\n").message.contains("items"));
}

#[test]
fn invalid_utf8_is_reported_with_line_and_column() {
    let errors =
        parse_file(b"apiVersion: v1\nkind: \xff\n", PATH, &StaticRules::standalone("n")).unwrap_err();
    assert_eq!((errors[0].line, errors[0].column), (2, 7));
}

#[test]
fn all_invalid_fields_are_reported_with_lines_also_in_later_documents() {
    let broken = POD.replace("    image: busybox:1.36\n", "    ports:\n    - containerPort: 99999\n");
    let errors = bad(&format!("{POD}---\n{broken}"));
    let places: Vec<_> = errors.iter().map(|e| (e.document, e.field.as_str(), e.line)).collect();
    assert!(places.contains(&(2, "spec.containers[0].ports[0].containerPort", 18)), "{places:?}");
    assert!(places.contains(&(2, "spec.containers[0].image", 16)), "{places:?}");
    assert_eq!(errors[0].pod.as_ref().unwrap().name, "web-node1");
    assert!(errors[0].to_string().starts_with("document 2: spec.containers[0]"), "{}", errors[0]);
}

#[test]
fn a_field_of_the_wrong_type_is_reported_by_path() {
    let error = only(&POD.replace("image: busybox:1.36", "image: [busybox]"));
    assert_eq!((error.field.as_str(), error.line), ("spec.containers[0].image", 8));
    let error = only(&POD.replace("  name: web\n", "  name: web\n  labels: {a: 1}\n"));
    assert_eq!((error.field.as_str(), error.line), ("metadata.labels.a", 5));
    let error = only(&POD.replace("metadata:\n  name: web", "metadata: web"));
    assert_eq!(error.field, "metadata");
}

#[test]
fn errors_in_json_have_lines() {
    let text = "{\n \"apiVersion\": \"v1\", \"kind\": \"Pod\",\n \"metadata\": {\"name\": \"web\"},\n \"spec\": {\"containers\": [\n  {\"name\": \"UPPER\",\n   \"image\": \"i\"}]}\n}";
    let error = only(text);
    assert_eq!((error.field.as_str(), error.line), ("spec.containers[0].name", 5));
}

#[test]
fn a_pod_without_a_name_or_with_gates_or_ephemeral_containers_is_rejected() {
    let no_name = only(&POD.replace("  name: web\n", "  namespace: x\n"));
    assert_eq!(no_name.field, "metadata.name");
    let gates = only(&format!("{POD}  schedulingGates:\n  - name: g\n"));
    assert!(gates.field.starts_with("spec.schedulingGates"), "{gates:?}");
    let ephemeral = bad(&format!("{POD}  ephemeralContainers:\n  - name: e\n    image: i\n"));
    assert!(ephemeral.iter().any(|e| e.field.starts_with("spec.ephemeralContainers")), "{ephemeral:?}");
}

#[test]
fn references_to_api_objects_are_refused_by_kind() {
    let cases = [
        ("  serviceAccountName: robot\n", "serviceaccounts", true),
        ("  serviceAccount: robot\n", "serviceaccounts", true),
        ("  resourceClaims:\n  - name: gpu\n    resourceClaimName: c\n", "resourceclaims", true),
        (
            "  volumes:\n  - name: v\n    persistentVolumeClaim: {claimName: c}\n",
            "persistentvolumeclaims",
            false,
        ),
        (
            "  volumes:\n  - name: v\n    ephemeral: {volumeClaimTemplate: {spec: {accessModes: [ReadWriteOnce], \
             resources: {requests: {storage: 1Gi}}}}}\n",
            "persistentvolumeclaims",
            true,
        ),
        ("  volumes:\n  - name: v\n    csi: {driver: d}\n", "csidrivers", true),
        (
            "  volumes:\n  - name: v\n    projected:\n      sources:\n      - serviceAccountToken: {path: t}\n",
            "serviceaccounts",
            true,
        ),
        ("  imagePullSecrets:\n  - name: s\n", "secrets", false),
        ("  volumes:\n  - name: v\n    secret: {secretName: s}\n", "secrets", false),
        ("  volumes:\n  - name: v\n    configMap: {name: s}\n", "configmaps", false),
    ];
    for (tail, resource, also_standalone) in cases {
        let text = format!("{POD}{tail}");
        let strict = StaticRules::new("n", true);
        let errors = parse_file(text.as_bytes(), PATH, &strict).unwrap_err();
        assert!(errors.iter().any(|e| e.message.contains(resource)), "{tail}: {errors:?}");
        assert!(errors.iter().any(|e| e.message.contains("refuses its mirror")), "{tail}: {errors:?}");
        assert_eq!(parse(&text).is_err(), also_standalone, "{tail}");
    }
    for tail in
        ["  volumes:\n  - name: v\n    hostPath: {path: /x}\n", "  volumes:\n  - name: v\n    emptyDir: {}\n"]
    {
        good(&format!("{POD}{tail}"));
    }
}

#[test]
fn secrets_and_config_maps_in_a_manifest_are_returned_with_the_pods() {
    let text = format!(
        "{POD}---\napiVersion: v1\nkind: Secret\nmetadata: {{name: s}}\ndata: {{a: Zm9v}}\nstringData: {{b: foobar}}\n---\n\
         apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: c, namespace: other}}\ndata: {{k: v}}\n"
    );
    let content = good(&text);
    assert_eq!(content.pods.len(), 1);
    let [secret, map] = &content.objects[..] else { panic!("{content:?}") };
    assert_eq!((secret.key.kind, secret.key.namespace.as_str()), (Kind::Secret, "default"));
    let value: Value = serde_json::from_slice(&secret.json).unwrap();
    assert_eq!(value["data"], json!({"a": "Zm9v", "b": "Zm9vYmFy"}));
    assert_eq!(value["type"], "Opaque");
    assert!(value.get("stringData").is_none());
    assert_eq!((map.key.namespace.as_str(), map.document), ("other", 3));
}

#[test]
fn a_config_map_with_a_number_and_a_secret_without_base64_are_rejected_by_key() {
    let error = only("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\ndata:\n  a: x\n  port: 80\n");
    assert_eq!((error.field.as_str(), error.line), ("data[port]", 6));
    let error = only("apiVersion: v1\nkind: Secret\nmetadata: {name: c}\ndata:\n  k: not base64\n");
    assert_eq!((error.field.as_str(), error.line), ("data[k]", 5));
    let error = only("apiVersion: v1\nkind: Secret\nmetadata: {name: Bad_Name}\n");
    assert_eq!(error.field, "metadata.name");
}

#[test]
fn the_checkpoint_has_no_secrets_and_restores_the_same_pods() {
    let plain = good(POD);
    assert_eq!(plain.checkpoint, POD.as_bytes());
    let secret = "apiVersion: v1\nkind: Secret\nmetadata: {name: s}\nstringData: {b: geheim}\n";
    let content = good(&format!("{POD}---\n{secret}"));
    let text = String::from_utf8(content.checkpoint.clone()).unwrap();
    assert!(!text.contains("geheim") && !text.contains("Secret"), "{text}");
    let again = good(&text);
    assert_eq!(again.pods[0].uid, content.pods[0].uid);
    assert_eq!(again.pods[0].fingerprint, content.pods[0].fingerprint);
    assert!(good(secret).checkpoint.is_empty());
}

#[test]
fn a_manifest_of_many_small_documents_is_rejected_quickly() {
    // Each document was once counted from the first byte on, which took hours.
    let text = "{}".repeat((10 << 20) / 2 - 1);
    let error = read_manifest(text.as_bytes()).unwrap_err();
    assert!(error.message.contains("values in one file"), "{error:?}");
}

#[test]
fn json_has_the_same_depth_and_size_limits_as_yaml() {
    let nested = |depth: usize| format!("{{\"a\": {}{}}}", "[".repeat(depth), "]".repeat(depth));
    let deep = read_manifest(nested(100).as_bytes()).unwrap_err();
    assert!(deep.message.contains("deep"), "{deep:?}");
    // At the exact limit: the error is about the missing field.
    assert_eq!(read_manifest(nested(99).as_bytes()).unwrap_err().field, "apiVersion");
    assert_eq!(read_manifest(format!("---\n{}", nested(99)).as_bytes()).unwrap_err().field, "apiVersion");
    let many = format!("{{\"a\": [{}0]}}", "0,".repeat(250_000));
    assert!(read_manifest(many.as_bytes()).unwrap_err().message.contains("values in one file"));
}

#[test]
fn a_missing_field_is_reported_at_the_start_of_its_object() {
    let text = format!("{POD}---\n\n  kind: Pod\n");
    let error = read_manifest(text.as_bytes()).unwrap_err();
    assert_eq!((error.document, error.field.as_str()), (2, "apiVersion"));
    assert_eq!((error.line, error.column), (11, 3), "{error:?}");
}

#[test]
fn an_invalid_object_in_a_json_stream_is_reported_with_its_position() {
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web"}});
    let text = format!("{pod}\n  {{\"kind\": \"Pod\"}}\n");
    let error = read_manifest(text.as_bytes()).unwrap_err();
    assert_eq!((error.document, error.field.as_str()), (2, "apiVersion"));
    assert_eq!((error.line, error.column), (2, 3), "{error:?}");
}

#[test]
fn json_documents_on_one_or_several_lines_have_positions() {
    let pod = r#"{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a"}}"#;
    let text = format!("{pod} {pod}\n\n  {pod}");
    let places: Vec<_> =
        read_manifest(text.as_bytes()).unwrap().iter().map(|d| (d.number, d.line, d.column)).collect();
    assert_eq!(places, [(1, 1, 1), (2, 1, 2 + u32::try_from(pod.len()).unwrap()), (3, 3, 3)]);
}

#[test]
fn a_pod_with_a_float_has_the_same_uid_after_a_restore() {
    let limits = "    resources: {limits: {cpu: 0.12345890123456789}}\n";
    let secret = "---\napiVersion: v1\nkind: Secret\nmetadata: {name: s}\n";
    let content = good(&format!("{POD}{limits}{secret}"));
    let again = parse_file(&content.checkpoint, PATH, &StaticRules::standalone("node1")).unwrap();
    assert_eq!(content.pods[0].uid, again.pods[0].uid);
    assert_eq!(json_of(&content, 0), json_of(&again, 0));
}

fn from_url(text: &str, node: &str) -> Result<FileContent, Vec<ManifestError>> {
    parse_file(text.as_bytes(), "http://h/pods", &StaticRules::standalone(node).for_url())
}

#[test]
fn a_url_pod_has_a_uid_from_the_url_and_only_its_own_tolerations() {
    let (one, other) = (from_url(POD, "node1").unwrap(), from_url(POD, "node2").unwrap());
    assert_eq!(one.pods[0].uid, other.pods[0].uid, "the node's name does not count");
    assert_ne!(one.pods[0].uid, good(POD).pods[0].uid);
    let value = json_of(&one, 0);
    assert_eq!(value["metadata"]["name"], "web-node1");
    assert_eq!(value["metadata"]["annotations"]["kubernetes.io/config.hash"], one.pods[0].uid.as_str());
    assert_eq!(value["spec"]["nodeName"], "node1");
    assert_eq!(value["status"]["phase"], "Pending");
    assert!(value["spec"].get("tolerations").is_none_or(|list| *list == json!([])), "{value}");
}

#[test]
fn an_empty_list_is_valid_from_a_url_and_invalid_in_a_file() {
    for items in ["[]", "null"] {
        for kind in ["PodList", "List"] {
            let text = format!("{{\"apiVersion\": \"v1\", \"kind\": \"{kind}\", \"items\": {items}}}");
            assert_eq!(
                from_url(&text, "n").unwrap(),
                FileContent { checkpoint: text.clone().into(), ..FileContent::default() }
            );
            assert_eq!(only(&text).message, "the manifest contains no object");
        }
    }
    for nothing in ["# nothing", "---", "apiVersion: v1\nkind: PodList"] {
        assert!(from_url(nothing, "n").is_err(), "{nothing}");
    }
}

#[test]
fn text_in_utf_16_with_a_byte_order_mark_is_read() {
    let rules = StaticRules::standalone("node1");
    let text = POD.replace("name: web", "name: web\n  annotations: {note: \"héllo 😀\"}");
    let plain = parse_file(text.as_bytes(), PATH, &rules).unwrap().pods.remove(0);
    let coded = |mark: [u8; 2], unit: fn(u16) -> [u8; 2]| -> Vec<u8> {
        mark.into_iter().chain(text.encode_utf16().flat_map(unit)).collect()
    };
    for bytes in [
        coded([0xff, 0xfe], u16::to_le_bytes),
        coded([0xfe, 0xff], u16::to_be_bytes),
        [&[0xef, 0xbb, 0xbf], text.as_bytes()].concat(),
    ] {
        let content = parse_file(&bytes, PATH, &rules).unwrap();
        assert_eq!(content.pods[0].json, plain.json);
        // The checkpoint is read in the same way.
        assert_eq!(parse_file(&content.checkpoint, PATH, &rules).unwrap().pods[0].uid, plain.uid);
    }
    let mut cut = coded([0xff, 0xfe], u16::to_le_bytes);
    cut.pop();
    let error = parse_file(&cut, PATH, &rules).unwrap_err().remove(0);
    assert_eq!(error.message, "this is not UTF-16 text");
    let error = parse_file(&[0xff, 0xfe, 0, 0, b'a', 0, 0, 0], PATH, &rules).unwrap_err().remove(0);
    assert_eq!(error.message, "this is UTF-32 text; save it as UTF-8");
}

#[test]
fn control_plane_fields_are_removed_from_a_manifest_and_reported() {
    let exported = POD.replace(
        "  name: web\n",
        "  name: web\n  creationTimestamp: 2026-01-01T00:00:00Z\n  resourceVersion: '7'\n  \
         deletionTimestamp: 2026-01-01T00:00:00Z\n  deletionGracePeriodSeconds: 30\n  annotations: {kubernetes.io/config.mirror: abc, \
         kubernetes.io/config.source: api, own: kept}\n",
    ) + "status: {phase: Running, startTime: 2026-01-01T00:00:00Z}\n";
    let content = good(&exported);
    assert_eq!(
        content.pods[0].ignored,
        [
            "metadata.deletionGracePeriodSeconds",
            "metadata.deletionTimestamp",
            "metadata.annotations[kubernetes.io/config.mirror]",
            "metadata.annotations[kubernetes.io/config.source]",
            "status",
        ]
    );
    let value = json_of(&content, 0);
    assert_eq!(value["status"], json!({"phase": "Pending"}));
    assert_eq!(value["metadata"]["annotations"]["own"], "kept");
    assert!(value["metadata"]["annotations"].get("kubernetes.io/config.mirror").is_none());
    assert!(value["metadata"].get("deletionTimestamp").is_none());
    assert!(!content.pods[0].fingerprint.deleting);
    assert_eq!(good(POD).pods[0].ignored, [""; 0]);
}

/// As kubeadm and `kubectl --dry-run=client -o yaml` write manifests. The UID is that of the release before fields were removed:
/// another UID would restart every such pod on an upgrade.
#[test]
fn removed_control_plane_fields_do_not_change_the_uid() {
    let written = POD.replace("  name: web\n", "  creationTimestamp: null\n  name: web\n") + "status: {}\n";
    let content = good(&written);
    assert_eq!(content.pods[0].ignored, [""; 0], "their removal is not reported");
    assert_eq!(content.pods[0].uid, "aa3da5d3a924ee650f9c124d7db184fc");
    assert_ne!(content.pods[0].uid, good(POD).pods[0].uid);
}

#[test]
fn secret_base64_is_normalised_as_by_the_api_server() {
    let text = "apiVersion: v1\nkind: Secret\nmetadata: {name: s}\ndata:\n  token: |\n    c2VjcmV0LXZhbHVl\n    LW9uLXR3by1saW5lcw==\n";
    let content = good(text);
    let value: Value = serde_json::from_slice(&content.objects[0].json).unwrap();
    assert_eq!(value["data"]["token"], "c2VjcmV0LXZhbHVlLW9uLXR3by1saW5lcw==");
    let error = only(&text.replace("c2VjcmV0", "c2Vj cmV0"));
    assert_eq!((error.field.as_str(), error.line), ("data[token]", 5));
}

#[test]
fn null_in_a_map_or_list_becomes_the_zero_value_as_in_go() {
    let manifest = POD.replace("  name: web\n", "  name: web\n  labels: {a: null}\n  annotations: {b: ~}\n");
    let manifest = manifest.replace("spec:\n", "spec:\n  nodeSelector: {c: null}\n  volumes: null\n");
    let value = json_of(&good(&manifest), 0);
    assert_eq!(value["metadata"]["labels"], json!({"a": ""}));
    assert_eq!(value["metadata"]["annotations"]["b"], "");
    assert_eq!(value["spec"]["nodeSelector"], json!({"c": ""}));
    // Null becomes an empty container without a name, which is rejected.
    let refused = POD.replace("  containers:\n", "  containers:\n  - null\n");
    let errors = bad(&refused);
    assert!(errors.iter().any(|error| error.field == "spec.containers[0].name"), "{errors:?}");
    let object = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\ndata: {a: null}\n";
    let content = good(object);
    let value: Value = serde_json::from_slice(&content.objects[0].json).unwrap();
    assert_eq!(value["data"], json!({"a": ""}));
}

#[test]
fn converted_keys_and_removed_fields_are_warned_about_with_their_line() {
    let manifest = format!(
        "{}---\napiVersion: v1\nkind: ConfigMap\nmetadata: {{name: c}}\ndata:\n  on: \"1\"\n  \"off\": \"2\"\n",
        POD.replace(
            "  name: web\n",
            "  name: web\n  deletionGracePeriodSeconds: 5\n  labels:\n    0644: a\n"
        )
    );
    let warnings = good(&manifest).warnings;
    let found: Vec<_> =
        warnings.iter().map(|w| (w.pod.as_ref().map(|pod| pod.name.as_str()), w.message.as_str())).collect();
    let pod = Some("web-node1");
    assert_eq!(
        found,
        [
            (
                pod,
                "these fields are ignored, because only a control plane writes them: metadata.deletionGracePeriodSeconds"
            ),
            (pod, "the key 0644 is not text and is read as \"420\"; quote it"),
            (None, "the key on is not text and is read as \"true\"; quote it"),
        ]
    );
    let line = |text: &str| {
        u32::try_from(manifest.lines().position(|line| line.contains(text)).unwrap() + 1).unwrap()
    };
    assert_eq!((warnings[1].line, warnings[2].line), (line("0644"), line("  on:")));
    assert_eq!(good(POD).warnings, []);
}
