//! The Node object.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::Arc;

use keelson_kube_model::{ContainerImage, Node};
use keelson_node_status_core::{
    AddressInputs, Machine, NodeInputs, NodeReport, RuntimeHandler, RuntimeImage, RuntimeState, build_node,
    listed_images, report_after_ms, worth_reporting,
};
use serde_json::{Value, json};

fn machine() -> Machine {
    let amounts = |list: &[(&str, i64)]| list.iter().map(|(k, v)| ((*k).to_owned(), *v)).collect();
    Machine {
        capacity: amounts(&[
            ("cpu", 2000),
            ("memory", 8_340_684_800),
            ("ephemeral-storage", 20_616_232_960),
            ("hugepages-2Mi", 0),
            ("hugepages-1Gi", 1 << 30),
            ("pods", 110),
            ("pid", 32_768),
            ("example.com/gpu", 2000),
        ]),
        allocatable: amounts(&[
            ("cpu", 1500),
            ("memory", 8_235_827_200),
            ("ephemeral-storage", 18_554_609_664 + 1),
            ("pods", 110),
        ]),
        machine_id: "m".into(),
        system_uuid: "s".into(),
        boot_id: "b".into(),
        kernel_version: "6.1.0".into(),
        os_image: "Debian GNU/Linux 12 (bookworm)".into(),
        architecture: "x86_64".into(),
        ..Machine::default()
    }
}

fn runtime() -> RuntimeState {
    RuntimeState {
        name: "containerd".into(),
        version: "1.6.20~ds1".into(),
        ready: true,
        network_ready: true,
        message: String::new(),
        ..RuntimeState::default()
    }
}

struct Fixture {
    labels: BTreeMap<String, String>,
    machine: Option<Machine>,
    runtime: Option<RuntimeState>,
    images: Vec<ContainerImage>,
    volumes_in_use: Option<Vec<String>>,
    address: Option<&'static str>,
    name: &'static str,
    created: i64,
    now: i64,
    attach_detach: bool,
    declared: Vec<String>,
}

impl Fixture {
    fn good() -> Self {
        Self {
            labels: BTreeMap::new(),
            machine: Some(machine()),
            runtime: Some(runtime()),
            images: Vec::new(),
            volumes_in_use: None,
            address: Some("192.168.7.2"),
            name: "edge-1",
            created: 1_600_000_000,
            now: 1_700_000_000,
            attach_detach: true,
            declared: Vec::new(),
        }
    }

    fn node(&self) -> Node {
        build_node(
            &NodeInputs {
                node_name: self.name,
                labels: &self.labels,
                max_pods: 110,
                api_port: 10250,
                kubelet_version: "v1.36.2",
                controller_attach_detach: self.attach_detach,
                addresses: Some(AddressInputs {
                    default_address: self.address.map(|a| a.parse().unwrap()),
                    ..AddressInputs::default()
                }),
                machine: self.machine.as_ref(),
                runtime: self.runtime.as_ref(),
                images: &self.images,
                volumes_in_use: self.volumes_in_use.as_deref(),
                declared_features: &self.declared,
                service_errors: &[],
                created_unix_seconds: self.created,
                now_unix_seconds: self.now,
            },
            &[],
        )
    }

    fn json(&self) -> Value {
        serde_json::to_value(self.node()).unwrap()
    }
}

#[test]
fn the_node_has_a_creation_timestamp_if_it_is_known() {
    let created = |created| Fixture { created, ..Fixture::good() }.node().metadata.creation_timestamp;
    assert_eq!(created(1_600_000_000).as_deref(), Some("2020-09-13T12:26:40Z"));
    assert_eq!(created(0), None);
}

#[test]
fn resource_quantities_are_formatted_as_by_the_kubelet() {
    let node = Fixture::good().json();
    assert_eq!(
        node["status"]["capacity"],
        json!({
            "cpu": "2", "memory": "8145200Ki", "ephemeral-storage": "20133040Ki", "hugepages-2Mi": "0",
            "hugepages-1Gi": "1Gi", "pods": "110", "example.com/gpu": "2k"
        })
    );
    assert_eq!(
        node["status"]["allocatable"],
        json!({"cpu": "1500m", "memory": "8042800Ki", "ephemeral-storage": "18554609665", "pods": "110"})
    );
}

#[test]
fn node_info_has_the_machine_and_the_runtime() {
    let node = Fixture::good().json();
    assert_eq!(node["apiVersion"], "v1");
    assert_eq!(node["kind"], "Node");
    assert_eq!(node["metadata"]["name"], "edge-1");
    assert_eq!(
        node["metadata"]["annotations"],
        json!({"volumes.kubernetes.io/controller-managed-attach-detach": "true"})
    );
    assert_eq!(
        node["status"]["nodeInfo"],
        json!({
            "machineID": "m", "systemUUID": "s", "bootID": "b", "kernelVersion": "6.1.0",
            "osImage": "Debian GNU/Linux 12 (bookworm)",
            "containerRuntimeVersion": "containerd://1.6.20", "kubeletVersion": "v1.36.2",
            "operatingSystem": "linux", "architecture": "amd64"
        })
    );
    assert_eq!(node["status"]["daemonEndpoints"], json!({"kubeletEndpoint": {"Port": 10250}}));
    assert_eq!(node["status"]["conditions"][3]["status"], "True");
}

#[test]
fn runtime_handlers_and_features_are_in_the_node_status() {
    let silent = Fixture::good().json();
    assert_eq!(
        (&silent["status"]["runtimeHandlers"], &silent["status"]["features"]),
        (&Value::Null, &Value::Null)
    );
    let handler = |name: &str, recursive_read_only_mounts, user_namespaces| RuntimeHandler {
        name: name.into(),
        recursive_read_only_mounts,
        user_namespaces,
    };
    let handlers = vec![handler("", true, false), handler("runsc", false, true)];
    let runtime = RuntimeState { handlers, supplemental_groups_policy: Some(false), ..runtime() };
    let node = Fixture { runtime: Some(runtime), ..Fixture::good() }.json();
    assert_eq!(
        node["status"]["runtimeHandlers"],
        json!([
            {"features": {"recursiveReadOnlyMounts": true, "userNamespaces": false}},
            {"name": "runsc", "features": {"recursiveReadOnlyMounts": false, "userNamespaces": true}}
        ])
    );
    assert_eq!(node["status"]["features"], json!({"supplementalGroupsPolicy": false}));
}

#[test]
fn the_node_declares_the_features_of_the_configuration() {
    let without = Fixture::good().json();
    assert!(without["status"].get("declaredFeatures").is_none(), "{without}");
    let declared = vec!["ExtendWebSocketsToKubelet".to_owned()];
    let with = Fixture { declared, ..Fixture::good() }.json();
    assert_eq!(with["status"]["declaredFeatures"], json!(["ExtendWebSocketsToKubelet"]));
}

#[test]
fn images_and_swap_are_in_the_node_and_volumes_in_use_are_not() {
    let without = Fixture::good().json();
    let status = without["status"].as_object().unwrap();
    assert!(!status.contains_key("images") && !status.contains_key("volumesInUse"), "{status:?}");
    assert!(without["status"]["nodeInfo"].get("swap").is_none(), "a machine without swap has none of size 0");
    let images = vec![ContainerImage { names: vec!["a:1".into()], size_bytes: Some(7) }];
    let mut fixture = Fixture { images, ..Fixture::good() };
    fixture.machine.as_mut().unwrap().swap = 2 << 30;
    let node = fixture.json();
    assert_eq!(node["status"]["images"], json!([{"names": ["a:1"], "sizeBytes": 7}]));
    assert_eq!(node["status"]["nodeInfo"]["swap"], json!({"capacity": 2_147_483_648_i64}));
}

fn image(id: &str, size_bytes: u64, digests: &[&str], tags: &[&str]) -> RuntimeImage {
    let owned = |names: &[&str]| names.iter().map(ToString::to_string).collect();
    RuntimeImage { id: id.into(), size_bytes, digests: owned(digests), tags: owned(tags) }
}

#[test]
fn node_status_max_images_keeps_the_largest_images_first() {
    let images = || vec![image("a", 5, &[], &["a"]), image("c", 5, &[], &["c"]), image("b", 9, &[], &["b"])];
    let table: &[(Option<usize>, &[&str])] = &[
        (None, &["b", "c", "a"]),
        (Some(50), &["b", "c", "a"]),
        (Some(3), &["b", "c", "a"]),
        (Some(2), &["b", "c"]),
        (Some(0), &[]),
    ];
    for (most, expected) in table {
        for reversed in [false, true] {
            let mut images = images();
            if reversed {
                images.reverse();
            }
            let listed = listed_images(images, *most);
            let names: Vec<&str> = listed.iter().map(|image| image.names[0].as_str()).collect();
            assert_eq!(names, *expected, "{most:?}");
        }
    }
}

#[test]
fn an_image_lists_digests_then_tags_up_to_five_names() {
    let table: &[(&[&str], &[&str], &[&str])] = &[
        (&["d1"], &["t1", "t2"], &["d1", "t1", "t2"]),
        (&["d2", "d1"], &["t4", "t3", "t2", "t1"], &["d2", "d1", "t4", "t3", "t2"]),
        (&["d1", "d2", "d3", "d4", "d5", "d6"], &["t1"], &["d1", "d2", "d3", "d4", "d5"]),
        (&[], &[], &[]),
    ];
    for (digests, tags, names) in table {
        let listed = listed_images(vec![image("a", 1 << 40, digests, tags)], None);
        assert_eq!(listed[0].names, *names);
        assert_eq!(listed[0].size_bytes, Some(1 << 40));
    }
    let empty = listed_images(vec![image("a", 0, &[], &["t"]), image("b", u64::MAX, &[], &["t"])], None);
    assert_eq!(
        [empty[0].size_bytes, empty[1].size_bytes],
        [None, None],
        "what cannot be written is left out"
    );
}

#[test]
fn node_labels_of_the_configuration_override_our_own() {
    let mut fixture = Fixture::good();
    fixture.labels.insert("zone".into(), "a".into());
    fixture.labels.insert("kubernetes.io/os".into(), "other".into());
    assert_eq!(
        fixture.json()["metadata"]["labels"],
        json!({
            "kubernetes.io/hostname": "edge-1", "kubernetes.io/os": "other", "kubernetes.io/arch": "amd64",
            "beta.kubernetes.io/os": "linux", "beta.kubernetes.io/arch": "amd64", "zone": "a"
        })
    );
}

#[test]
fn architectures_have_the_names_of_go() {
    for (kernel, go) in [
        ("aarch64", "arm64"),
        ("armv7l", "arm"),
        ("i686", "386"),
        ("loongarch64", "loong64"),
        ("riscv64", "riscv64"),
        ("amd64", "amd64"),
    ] {
        let mut fixture = Fixture::good();
        fixture.machine.as_mut().unwrap().architecture = kernel.into();
        assert_eq!(fixture.json()["metadata"]["labels"]["kubernetes.io/arch"], go);
    }
}

#[test]
fn the_capacity_of_an_unknown_machine_is_only_max_pods() {
    let fixture = Fixture { machine: None, ..Fixture::good() };
    let node = fixture.json();
    assert_eq!(node["status"]["capacity"], json!({"cpu": "0", "memory": "0", "pods": "110"}));
    assert!(node["metadata"]["labels"].get("kubernetes.io/arch").is_none());
    let ready = &node["status"]["conditions"][3];
    assert_eq!(ready["message"], "missing node capacity for resources: ephemeral-storage");
}

#[test]
fn an_unknown_runtime_has_the_runtime_version_unknown() {
    for runtime in [None, Some(RuntimeState::default())] {
        let node = Fixture { runtime, ..Fixture::good() }.json();
        assert_eq!(node["status"]["nodeInfo"]["containerRuntimeVersion"], "Unknown");
    }
}

#[test]
fn node_addresses_are_one_usable_internal_ip_and_the_hostname() {
    type Row = (&'static str, Option<&'static str>, &'static [(&'static str, &'static str)]);
    let table: &[Row] = &[
        ("edge-1", Some("192.168.7.2"), &[("InternalIP", "192.168.7.2"), ("Hostname", "edge-1")]),
        ("edge-1", Some("2001:db8::7"), &[("InternalIP", "2001:db8::7"), ("Hostname", "edge-1")]),
        ("10.0.0.9", Some("192.168.7.2"), &[("InternalIP", "10.0.0.9"), ("Hostname", "10.0.0.9")]),
        ("127.0.0.1", Some("192.168.7.2"), &[("InternalIP", "192.168.7.2"), ("Hostname", "127.0.0.1")]),
        ("edge-1", Some("127.0.0.1"), &[("Hostname", "edge-1")]),
        ("edge-1", Some("169.254.1.1"), &[("Hostname", "edge-1")]),
        ("edge-1", Some("fe80::1"), &[("Hostname", "edge-1")]),
        ("edge-1", Some("0.0.0.0"), &[("Hostname", "edge-1")]),
        ("edge-1", None, &[("Hostname", "edge-1")]),
    ];
    for (name, address, expected) in table {
        let node = Fixture { name, address: *address, ..Fixture::good() }.node();
        let found: Vec<_> =
            node.status.addresses.iter().map(|a| (a.type_.as_str(), a.address.as_str())).collect();
        assert_eq!(found, *expected, "{name} {address:?}");
    }
}

#[test]
fn a_changed_heartbeat_time_alone_is_not_written_early() {
    let fixture = Fixture::good();
    let written = fixture.node();
    let later = Fixture { now: fixture.now + 10, ..Fixture::good() }.node();
    let mut later = later;
    for (new, old) in later.status.conditions.iter_mut().zip(&written.status.conditions) {
        new.last_transition_time.clone_from(&old.last_transition_time);
    }
    assert_ne!(written, later);
    let written = report(written, true);
    assert!(worth_reporting(None, &report(later.clone(), true)));
    assert!(!worth_reporting(Some(&written), &report(later.clone(), true)));
    assert!(worth_reporting(Some(&written), &report(later.clone(), false)), "whether the list is known");
    type Change = fn(&mut Node);
    let changes: [Change; 10] = [
        |n| n.metadata.labels.clear(),
        |n| n.spec.unschedulable = Some(true),
        |n| n.status.addresses.clear(),
        |n| n.status.capacity.clear(),
        |n| n.status.images.push(ContainerImage::default()),
        |n| n.status.volumes_in_use.push("v".into()),
        |n| n.status.node_info.boot_id.clear(),
        |n| n.status.features = Some(Default::default()),
        |n| n.status.conditions[3].message.clear(),
        |n| n.status.conditions[3].last_transition_time = None,
    ];
    for (at, change) in changes.iter().enumerate() {
        let mut changed = later.clone();
        change(&mut changed);
        assert!(worth_reporting(Some(&written), &report(changed, true)), "change {at}");
    }
    later.status.conditions.pop();
    assert!(worth_reporting(Some(&written), &report(later, true)));
}

fn report(node: Node, has_volumes_in_use: bool) -> NodeReport {
    NodeReport { node: Arc::new(node), has_volumes_in_use, csi_drivers: Arc::default() }
}

#[test]
fn volumes_in_use_are_absent_while_unknown_and_an_empty_list_if_there_are_none() {
    let volumes = |volumes_in_use: Option<&[&str]>| {
        let volumes_in_use = volumes_in_use.map(|names| names.iter().map(ToString::to_string).collect());
        let has_volumes_in_use = volumes_in_use.is_some();
        let node = Fixture { volumes_in_use, ..Fixture::good() }.node();
        report(node, has_volumes_in_use).to_json().unwrap()["status"].get("volumesInUse").cloned()
    };
    assert_eq!(volumes(None), None);
    assert_eq!(volumes(Some(&[])), Some(json!([])));
    assert_eq!(volumes(Some(&["a", "b"])), Some(json!(["a", "b"])));
}

#[test]
fn node_status_report_frequency_has_jitter_after_a_change() {
    for (changed, spread, after) in [(false, 0.9, 300_000), (true, 0.0, 150_000), (true, 1.0, 450_000)] {
        assert_eq!(report_after_ms(300_000, changed, spread), after, "{changed} {spread}");
    }
}

#[test]
fn the_attach_detach_annotation_needs_controller_attach_detach() {
    let own = Fixture { attach_detach: false, ..Fixture::good() };
    assert_eq!(own.json()["metadata"].get("annotations"), None);
}
