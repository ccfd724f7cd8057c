//! Hashes that give containers and static pods their identity.

use serde_json::{Map, Value};

/// 32-bit FNV-1a.
fn fnv1a_32(bytes: impl IntoIterator<Item = u8>) -> u32 {
    bytes.into_iter().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

/// 128-bit FNV-1a, fed in pieces.
struct Fnv128(u128);

impl Fnv128 {
    const OFFSET: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;

    fn new() -> Self {
        Self(Self::OFFSET)
    }

    fn write(&mut self, text: &str) {
        for byte in text.bytes() {
            self.0 = (self.0 ^ u128::from(byte)).wrapping_mul(Self::PRIME);
        }
    }
}

/// The hash that a running container carries in the annotation `io.kubernetes.container.hash`: lower-case hex
/// without leading zeros.
///
/// Only image and name count, so that no other change of the spec restarts a container. The value is identical to the
/// kubelet's: 32-bit FNV-1a over the Go dump of the bytes of a small JSON object. Containers that
/// a kubelet started are therefore adopted without a restart, and the other way round.
pub fn container_hash(name: &str, image: &str) -> String {
    format!("{:x}", container_hash_value(name, image))
}

/// The number behind [`container_hash`].
pub fn container_hash_value(name: &str, image: &str) -> u32 {
    let json = format!("{{\"image\":{},\"name\":{}}}", go_json_string(image), go_json_string(name));
    let mut dump = String::from("([]uint8)[");
    for (index, byte) in json.bytes().enumerate() {
        if index > 0 {
            dump.push(' ');
        }
        dump.push_str(&byte.to_string());
    }
    dump.push(']');
    fnv1a_32(dump.bytes())
}

/// A string as Go encodes it in JSON, with HTML characters escaped too.
fn go_json_string(text: &str) -> String {
    let mut json = String::from("\"");
    for c in text.chars() {
        match c {
            '"' => json.push_str("\\\""),
            '\\' => json.push_str("\\\\"),
            '\n' => json.push_str("\\n"),
            '\r' => json.push_str("\\r"),
            '\t' => json.push_str("\\t"),
            '\u{8}' => json.push_str("\\b"),
            '\u{c}' => json.push_str("\\f"),
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' | '\0'..='\u{1f}' => {
                json.push_str(&format!("\\u{:04x}", u32::from(c)));
            }
            _ => json.push(c),
        }
    }
    json.push('"');
    json
}

/// Where a static pod was read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodOrigin<'a> {
    /// Full path of the manifest; the node's name counts as well.
    File(&'a str),
    /// URL of the manifest; the node's name does not count, as with the kubelet.
    Url(&'a str),
    /// The node's own key in etcd. A recreated key gives a new pod, and so does a change of an immutable field; a change of
    /// a mutable field such as an image does not.
    Stored {
        /// The key, which has the node's name in it.
        key: &'a str,
        /// The revision of the store that made the key.
        create_revision: i64,
    },
}

/// Fields of `spec` that an update of a running pod may change (pod-lifecycle.md §2.6).
const CHANGEABLE: [&str; 4] =
    ["activeDeadlineSeconds", "ephemeralContainers", "terminationGracePeriodSeconds", "tolerations"];
/// Fields of `spec` that the agent fills in: an object that is published with them is still the same.
const OURS: [&str; 2] = ["nodeName", "priority"];
/// And those of its containers.
const CHANGEABLE_OF_CONTAINERS: [&str; 2] = ["image", "resources"];

/// `spec` without what may change while the pod runs.
fn lasting_spec(pod: &Value) -> Value {
    let mut spec = pod.get("spec").cloned().unwrap_or_default();
    let Some(fields) = spec.as_object_mut() else { return spec };
    for field in CHANGEABLE.iter().chain(&OURS) {
        fields.remove(*field);
    }
    for list in ["containers", "initContainers"] {
        let containers = fields.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten();
        for container in containers.filter_map(Value::as_object_mut) {
            for field in CHANGEABLE_OF_CONTAINERS {
                container.remove(field);
            }
        }
    }
    spec
}

/// The UID of a static pod whose manifest names none: 32 hex digits of a 128-bit FNV-1a over the defaulted pod,
/// the node's name and the origin.
///
/// The same input gives the same UID; any changed field gives another. The order of keys does not matter. The
/// value differs from the kubelet's, which hashes a dump of its own structs.
pub fn static_pod_uid(defaulted_pod: &Value, node_name: &str, origin: PodOrigin<'_>) -> String {
    let mut hash = Fnv128::new();
    match origin {
        PodOrigin::Stored { .. } => write_canonical(&mut hash, &lasting_spec(defaulted_pod)),
        PodOrigin::File(_) | PodOrigin::Url(_) => write_canonical(&mut hash, defaulted_pod),
    }
    match origin {
        PodOrigin::File(path) => {
            hash.write(&format!("host:{node_name}"));
            hash.write(&format!("file:{path}"));
        }
        PodOrigin::Url(url) => hash.write(&format!("url:{url}")),
        PodOrigin::Stored { key, create_revision } => {
            hash.write(&format!("key:{key}"));
            hash.write(&format!("revision:{create_revision}"));
        }
    }
    format!("{:032x}", hash.0)
}

/// Hashes JSON with sorted keys and without white space.
fn write_canonical(hash: &mut Fnv128, value: &Value) {
    match value {
        Value::Array(items) => {
            hash.write("[");
            for item in items {
                write_canonical(hash, item);
                hash.write(",");
            }
            hash.write("]");
        }
        Value::Object(map) => write_canonical_object(hash, map),
        scalar => hash.write(&scalar.to_string()),
    }
}

fn write_canonical_object(hash: &mut Fnv128, map: &Map<String, Value>) {
    let mut entries: Vec<_> = map.iter().collect();
    entries.sort_by_key(|(key, _)| key.as_str());
    hash.write("{");
    for (key, value) in entries {
        hash.write(&Value::from(key.as_str()).to_string());
        hash.write(":");
        write_canonical(hash, value);
        hash.write(",");
    }
    hash.write("}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn container_hash_is_the_kubelets() {
        assert_eq!(container_hash("test_container", "foo/image:v1"), "8e45cbd0");
    }

    #[test]
    fn static_uid_from_etcd_is_kept_across_mutable_fields() {
        let uid = |pod: &Value, create_revision| {
            static_pod_uid(pod, "n1", PodOrigin::Stored { key: "/n1/web", create_revision })
        };
        let pod = json!({
            "metadata": {"name": "web"},
            "spec": {"containers": [{"name": "c", "image": "a:1"}], "hostNetwork": true},
        });
        let own = uid(&pod, 7);
        let changed = |pointer: &str, value: Value| {
            let mut other = pod.clone();
            let (parent, field) = pointer.rsplit_once('/').unwrap();
            other.pointer_mut(parent).unwrap()[field] = value;
            uid(&other, 7)
        };
        for (pointer, value) in [
            ("/spec/containers/0/image", json!("a:2")),
            ("/spec/containers/0/resources", json!({"limits": {"cpu": "1"}})),
            ("/spec/activeDeadlineSeconds", json!(5)),
            ("/spec/nodeName", json!("n1")),
            ("/spec/priority", json!(7)),
            ("/spec/terminationGracePeriodSeconds", json!(5)),
            ("/spec/tolerations", json!([{"operator": "Exists"}])),
            ("/metadata/labels", json!({"a": "b"})),
            ("/status", json!({"phase": "Running"})),
        ] {
            assert_eq!(changed(pointer, value), own, "{pointer}");
        }
        for (pointer, value) in [
            ("/spec/containers/0/command", json!(["sh"])),
            ("/spec/hostNetwork", json!(false)),
            ("/spec/initContainers", json!([{"name": "i"}])),
        ] {
            assert_ne!(changed(pointer, value), own, "{pointer}");
        }
        assert_ne!(uid(&pod, 8), own, "a key that was made anew");
    }

    #[test]
    fn fnv_matches_its_published_vectors() {
        assert_eq!(fnv1a_32("foobar".bytes()), 0xbf9c_f968);
        let hashed = |text: &str| {
            let mut hash = Fnv128::new();
            hash.write(text);
            hash.0
        };
        assert_eq!(hashed(""), 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d);
        assert_eq!(hashed("a"), 0xd228_cb69_6f1a_8caf_7891_2b70_4e4a_8964);
    }

    #[test]
    fn go_json_escapes_html_characters() {
        assert_eq!(go_json_string("a<b>&\"\\\n\u{1}é"), "\"a\\u003cb\\u003e\\u0026\\\"\\\\\\n\\u0001é\"");
        assert_eq!(go_json_string("\r\t\u{8}\u{c}"), "\"\\r\\t\\b\\f\"");
    }

    #[test]
    fn static_uid_ignores_the_order_of_keys() {
        let one: Value = serde_json::from_str(r#"{"a":{"x":1,"y":[1,2]},"b":2}"#).unwrap();
        let two: Value = serde_json::from_str(r#"{"b":2,"a":{"y":[1,2],"x":1}}"#).unwrap();
        let origin = PodOrigin::File("/etc/kubernetes/manifests/a.yaml");
        assert_eq!(static_pod_uid(&one, "n", origin), static_pod_uid(&two, "n", origin));
    }

    #[test]
    fn static_uid_changes_with_every_field_with_the_node_and_with_the_file() {
        let pod = json!({"spec": {"containers": [{"name": "a"}, {"name": "b"}]}});
        let swapped = json!({"spec": {"containers": [{"name": "b"}, {"name": "a"}]}});
        let more = json!({"spec": {"containers": [{"name": "a"}, {"name": "b", "tty": true}]}});
        let uids = [
            static_pod_uid(&pod, "n1", PodOrigin::File("/m/a.yaml")),
            static_pod_uid(&swapped, "n1", PodOrigin::File("/m/a.yaml")),
            static_pod_uid(&more, "n1", PodOrigin::File("/m/a.yaml")),
            static_pod_uid(&pod, "n2", PodOrigin::File("/m/a.yaml")),
            static_pod_uid(&pod, "n1", PodOrigin::File("/m/b.yaml")),
            static_pod_uid(&pod, "n1", PodOrigin::Url("http://example/pod")),
        ];
        for (index, uid) in uids.iter().enumerate() {
            assert!(uid.len() == 32 && uid.bytes().all(|b| b.is_ascii_hexdigit()), "{uid}");
            assert!(!uids[..index].contains(uid), "{uid} twice");
        }
    }

    #[test]
    fn static_uid_from_a_url_is_the_same_on_every_node() {
        let origin = PodOrigin::Url("http://example/pod");
        assert_eq!(static_pod_uid(&json!({}), "n1", origin), static_pod_uid(&json!({}), "n2", origin));
    }
}
