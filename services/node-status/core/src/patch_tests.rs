use super::*;

/// The status of a Pod.
fn status_of(pod: &Value) -> OwnStatus {
    OwnStatus { host_network: pod["spec"]["hostNetwork"] == true, fields: pod["status"].clone() }
}

fn pod_status_patch(live: &Value, ours: &Value, stopped: bool) -> Option<Value> {
    super::pod_status_patch(live, &status_of(ours), stopped)
}

fn add_host_addresses(pod: &mut Value, node: &Value) {
    let mut ours = status_of(pod);
    super::add_host_addresses(&mut ours, &node["status"]["addresses"]);
    pod["status"] = ours.fields;
}

fn decide_mirror(live: Option<&Value>, ours: &Value) -> Mirror {
    let metadata = &ours["metadata"];
    let ending = !metadata["deletionTimestamp"].is_null();
    super::decide_mirror(live, metadata["annotations"][annotations::CONFIG_HASH].as_str(), ending)
}

fn node() -> Value {
    json!({
        "metadata": {"name": "n", "uid": "n", "labels": {"kubernetes.io/os": "linux", "rack": "7"}, "annotations": {"a": "b"}},
        "status": {
            "capacity": {"cpu": "4", "memory": "8Ki"},
            "addresses": [{"type": "InternalIP", "address": "10.0.0.1"}, {"type": "Hostname", "address": "n"}],
            "conditions": [{"type": "Ready", "status": "True", "lastHeartbeatTime": "2026-01-01T00:00:10Z"}],
            "nodeInfo": {"kubeletVersion": "v1.36.2"},
        },
    })
}

/// As the server has it after the registration.
fn registered() -> Value {
    let mut node = new_node(&node(), &json!({}));
    node["metadata"]["uid"] = "u-1".into();
    node
}

#[test]
fn a_node_is_registered_without_the_fields_that_the_server_sets() {
    let spec = json!({"taints": [{"key": "a", "effect": "NoSchedule"}], "providerID": "cloud://7"});
    let new = new_node(&node(), &spec);
    assert_eq!(new["spec"], spec);
    assert_eq!(new["metadata"].get("uid"), None);
    assert_eq!(new["metadata"]["labels"]["rack"], "7");
    assert_eq!(new["metadata"]["annotations"], json!({"a": "b"}));
    assert_eq!((&new["kind"], &new["status"]), (&json!("Node"), &node()["status"]));
}

#[test]
fn an_unchanged_node_needs_no_patch() {
    assert_eq!(node_patch(&registered(), &node(), false), None);
}

#[test]
fn own_labels_are_restored_and_labels_of_users_are_left_alone() {
    let mut live = registered();
    live["metadata"]["labels"] = json!({"kubernetes.io/os": "plan9", "rack": "8"});
    live["metadata"]["annotations"] = json!({"other": "1"});
    let patch = node_patch(&live, &node(), false).unwrap();
    assert_eq!(
        patch,
        json!({"metadata": {"labels": {"kubernetes.io/os": "linux"}, "annotations": {"a": "b"}}})
    );
}

#[test]
fn only_changed_status_fields_are_sent_and_conditions_of_others_stay() {
    let mut live = registered();
    live["status"]["conditions"] = json!([
        {"type": "NetworkUnavailable", "status": "False"},
        {"type": "Ready", "status": "False", "lastHeartbeatTime": "2026-01-01T00:00:00Z"},
    ]);
    live["status"]["capacity"] = json!({"cpu": "2", "memory": "8Ki", "example.com/gpu": "1"});
    live["status"]["addresses"] = json!([{"type": "InternalIP", "address": "10.9.9.9"}]);
    live["status"]["images"] = json!([{"names": ["a"]}]);
    live["status"]["declaredFeatures"] = json!(["A"]);
    let patch = node_patch(&live, &node(), false).unwrap();
    assert_eq!(
        patch,
        json!({"status": {
            "capacity": {"cpu": "4"},
            "addresses": [
                {"type": "InternalIP", "address": "10.0.0.1"}, {"type": "Hostname", "address": "n"},
                {"$patch": "replace"},
            ],
            "conditions": node()["status"]["conditions"],
            "images": null,
            "declaredFeatures": null,
        }})
    );
    live["status"]["addresses"] = json!([]);
    let patch = node_patch(&live, &node(), false).unwrap();
    assert_eq!(patch["status"]["addresses"], node()["status"]["addresses"]);
}

fn pod(phase: &str) -> Value {
    json!({
        "metadata": {"name": "web", "uid": "u"},
        "spec": {},
        "status": {"phase": phase, "qosClass": "Burstable",
            "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:05Z"}]},
    })
}

#[test]
fn a_pod_status_patch_has_the_uid_and_only_changed_fields() {
    let live = json!({"metadata": {"uid": "u"}, "status": {"phase": "Pending", "qosClass": "Burstable",
        "conditions": [{"type": "PodScheduled", "status": "True"}], "nominatedNodeName": "x"}});
    let mut ours = pod("Running");
    ours["status"]["podIPs"] = json!([{"ip": "10.1.0.2"}]);
    ours["status"]["startTime"] = "2026-01-01T00:00:00Z".into();
    assert_eq!(
        pod_status_patch(&live, &ours, true).unwrap(),
        json!({"metadata": {"uid": "u"}, "status": {
            "phase": "Running", "podIPs": [{"ip": "10.1.0.2"}], "startTime": "2026-01-01T00:00:00Z",
            "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:05Z"}]}})
    );
    assert_eq!(pod_status_patch(&ours, &ours, true), None);
}

#[test]
fn a_terminal_phase_is_kept_and_fields_no_longer_reported_are_removed() {
    let mut live = pod("Failed");
    live["status"]["reason"] = "Evicted".into();
    live["status"]["podIP"] = "10.1.0.2".into();
    live["status"]["podIPs"] = json!([{"ip": "10.1.0.2"}]);
    let patch = pod_status_patch(&live, &pod("Running"), true).unwrap();
    assert_eq!(patch["status"], json!({"podIP": null, "podIPs": null}));

    let mut live = pod("Running");
    live["status"]["reason"] = "Old".into();
    live["status"]["podIPs"] = json!([{"ip": "10.1.0.2"}]);
    let mut ours = pod("Running");
    ours["status"]["podIPs"] = json!([{"ip": "10.1.0.3"}]);
    let patch = pod_status_patch(&live, &ours, true).unwrap();
    assert_eq!(
        patch["status"],
        json!({"reason": null, "podIPs": [{"ip": "10.1.0.3"}, {"$patch": "replace"}]})
    );
}

#[test]
fn an_unchanged_condition_keeps_its_time_and_transient_ones_are_removed() {
    let mut live = pod("Running");
    live["status"]["conditions"] = json!([
        {"type": "Ready", "status": "True", "lastTransitionTime": "2025-12-31T00:00:00Z", "message": ""},
        {"type": "PodResizePending", "status": "True"},
        {"type": "example.com/gate", "status": "True"},
    ]);
    let patch = pod_status_patch(&live, &pod("Running"), true).unwrap();
    assert_eq!(patch["status"], json!({"conditions": [{"type": "PodResizePending", "$patch": "delete"}]}));
    let mut ours = pod("Running");
    ours["status"]["conditions"][0]["status"] = "False".into();
    let patch = pod_status_patch(&live, &ours, true).unwrap();
    let changed = json!({"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-01T00:00:05Z"});
    assert_eq!(patch["status"]["conditions"][0], changed);
}

#[test]
fn a_pod_is_deleted_once_requested_terminal_and_finished_on_the_node() {
    for (phase, asked, finished, expected) in [
        ("Failed", true, true, true),
        ("Succeeded", true, true, true),
        ("Running", true, true, false),
        ("Failed", false, true, false),
        ("Failed", true, false, false),
    ] {
        let mut live = pod(phase);
        if asked {
            live["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
        }
        assert_eq!(may_be_deleted(&live, finished), expected, "{phase} {asked} {finished}");
    }
}

fn static_pod(hash: &str) -> Value {
    json!({"metadata": {"name": "s-n", "namespace": "d", "uid": hash,
        "annotations": {annotations::CONFIG_HASH: hash, annotations::CONFIG_SOURCE: "file"}},
        "spec": {}, "status": {"phase": "Running"}})
}

#[test]
fn a_mirror_pod_is_created_if_missing_and_replaced_if_its_hash_differs() {
    let mirror = mirror_of(static_pod("h1"), "n", "u-n");
    assert_eq!(mirror["metadata"]["annotations"][annotations::CONFIG_MIRROR], "h1");
    assert_eq!(mirror["metadata"]["ownerReferences"][0]["uid"], "u-n");
    assert_eq!(mirror.get("status"), None);
    assert_eq!(decide_mirror(None, &static_pod("h1")), Mirror::Create { replace: false });
    assert_eq!(decide_mirror(Some(&mirror), &static_pod("h1")), Mirror::UpToDate);
    assert_eq!(decide_mirror(Some(&mirror), &static_pod("h2")), Mirror::Create { replace: true });
    let mut going = mirror.clone();
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
    assert_eq!(decide_mirror(Some(&going), &static_pod("h1")), Mirror::Create { replace: true });
    assert_eq!(decide_mirror(Some(&pod("Running")), &static_pod("h1")), Mirror::Foreign);
    let mut ending = static_pod("h1");
    ending["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
    assert_eq!(decide_mirror(None, &ending), Mirror::NotNeeded);
    assert_eq!(decide_mirror(Some(&mirror), &ending), Mirror::UpToDate);
    assert_eq!(decide_mirror(Some(&mirror_of(static_pod("h0"), "n", "u")), &ending), Mirror::NotNeeded);
}

#[test]
fn pods_report_the_addresses_of_their_node() {
    let mut web = pod("Running");
    add_host_addresses(&mut web, &node());
    assert_eq!((&web["status"]["hostIP"], &web["status"]["podIP"]), (&json!("10.0.0.1"), &Value::Null));
    let mut host = pod("Running");
    host["spec"]["hostNetwork"] = true.into();
    add_host_addresses(&mut host, &node());
    assert_eq!(host["status"]["podIPs"], json!([{"ip": "10.0.0.1"}]));

    let mut of_a_cloud = node();
    of_a_cloud["status"]["addresses"] = json!([
        {"type": "ExternalIP", "address": "192.0.2.7"},
        {"type": "InternalIP", "address": "10.0.0.1"},
        {"type": "InternalIP", "address": "10.0.0.2"},
        {"type": "InternalIP", "address": "fd00::1"},
    ]);
    let mut host = pod("Running");
    host["spec"]["hostNetwork"] = true.into();
    add_host_addresses(&mut host, &of_a_cloud);
    let both = json!([{"ip": "10.0.0.1"}, {"ip": "fd00::1"}]);
    assert_eq!((&host["status"]["hostIPs"], &host["status"]["podIPs"]), (&both, &both));
}

#[test]
fn a_host_network_pod_keeps_its_pod_ips_and_may_gain_the_other_family() {
    for (before, now, expected) in [
        ("", "10.0.0.1 fd00::1", Some("10.0.0.1 fd00::1")),
        ("10.0.0.1", "10.0.0.1", None),
        ("10.0.0.1", "10.0.0.2", None),
        ("10.0.0.1", "", None),
        ("10.0.0.1", "10.0.0.2 fd00::1", Some("10.0.0.1 fd00::1")),
        ("10.0.0.1", "fd00::1 10.0.0.1", Some("10.0.0.1 fd00::1")),
        ("10.0.0.1 fd00::1", "fd00::2 10.0.0.2", None),
        ("10.0.0.1 fd00::1", "10.0.0.1", None),
        ("fd00::1", "10.0.0.1", Some("fd00::1 10.0.0.1")),
    ] {
        let patch = pod_status_patch(&on_the_nodes_network(before), &on_the_nodes_network(now), true);
        let list = patch.map(|patch| patch["status"]["podIPs"].clone());
        let found = list.as_ref().map(|list| texts(list).join(" "));
        assert_eq!(found.as_deref(), expected, "{before:?} before, {now:?} now");
    }
}

#[test]
fn a_host_network_mirror_pod_follows_the_addresses_of_its_node() {
    let mut live = on_the_nodes_network("10.0.0.1 fd00::1");
    live["metadata"]["annotations"] = json!({annotations::CONFIG_MIRROR: "hash"});
    let patch = pod_status_patch(&live, &on_the_nodes_network("10.0.0.2"), true).unwrap();
    assert_eq!(
        (&patch["status"]["podIP"], texts(&patch["status"]["podIPs"])),
        (&json!("10.0.0.2"), vec!["10.0.0.2"])
    );
}

/// A pod with these addresses, the first one as `podIP`.
fn on_the_nodes_network(ips: &str) -> Value {
    let mut pod = pod("Running");
    pod["spec"]["hostNetwork"] = true.into();
    if let Some(first) = ips.split_whitespace().next() {
        pod["status"]["podIP"] = first.into();
        pod["status"]["podIPs"] = ips.split_whitespace().map(|ip| json!({"ip": ip})).collect();
    }
    pod
}

/// The addresses of a list, without the replace directive.
fn texts(list: &Value) -> Vec<&str> {
    list.as_array().into_iter().flatten().filter_map(|entry| entry["ip"].as_str()).collect()
}

#[test]
fn unsupported_hugepages_sizes_are_removed_and_resources_of_others_stay() {
    let (mut live, mut ours) = (registered(), node());
    live["status"]["capacity"] = json!({"cpu": "4", "memory": "8Ki", "hugepages-1Gi": "2Gi", "hugepages-2Mi": "0", "example.com/gpu": "1"});
    ours["status"]["capacity"]["hugepages-2Mi"] = "0".into();
    let patch = node_patch(&live, &ours, false).unwrap();
    assert_eq!(patch, json!({"status": {"capacity": {"hugepages-1Gi": null}}}));
}

#[test]
fn the_transition_time_of_a_condition_follows_the_servers_status() {
    let with = |status: &str, since: &str, heartbeat: &str| {
        let mut node = registered();
        node["status"]["conditions"] = json!([{
            "type": "Ready", "status": status, "lastTransitionTime": since, "lastHeartbeatTime": heartbeat,
        }]);
        node
    };
    let (noon, one, two) = ("2026-01-01T12:00:00Z", "2026-01-01T13:00:00Z", "2026-01-01T14:00:00Z");
    for (live, ours, expected) in [
        // The server has the time that we have lost.
        (with("True", noon, one), with("True", two, two), noon),
        // Set to Unknown by the node controller at one o'clock, and back at two.
        (with("Unknown", one, noon), with("True", noon, two), two),
        // It has changed here since.
        (with("False", noon, noon), with("True", one, two), one),
    ] {
        let patch = node_patch(&live, &ours, false).unwrap();
        let condition = &patch["status"]["conditions"][0];
        assert_eq!(condition["lastTransitionTime"], expected, "{live} {ours}");
        assert_eq!(condition["status"], ours["status"]["conditions"][0]["status"]);
    }
    let forgotten = with("True", two, one);
    assert!(!node_drifts(&with("True", noon, noon), &forgotten, false), "times alone are no drift");
    assert!(node_drifts(&with("Unknown", noon, noon), &forgotten, false));
}

#[test]
fn an_external_cloud_owns_addresses_and_stale_provided_node_ip_is_removed() {
    let (mut live, mut ours) = (registered(), node());
    live["status"]["addresses"] = json!([{"type": "ExternalIP", "address": "192.0.2.7"}]);
    assert_eq!(node_patch(&live, &ours, true), None);
    assert!(node_patch(&live, &ours, false).is_some());
    live["status"]["addresses"] = json!([]);
    assert_eq!(node_patch(&live, &ours, true).unwrap()["status"]["addresses"], node()["status"]["addresses"]);

    let mut live = registered();
    live["metadata"]["annotations"][PROVIDED_NODE_IP] = json!("10.0.0.1");
    let patch = node_patch(&live, &ours, false).unwrap();
    assert_eq!(patch, json!({"metadata": {"annotations": {(PROVIDED_NODE_IP): null}}}));
    ours["metadata"]["annotations"][PROVIDED_NODE_IP] = json!("10.0.0.1");
    assert_eq!(node_patch(&live, &ours, true), None);
}

#[test]
fn a_terminal_phase_is_held_back_until_the_pod_has_stopped() {
    let mut live = pod("Running");
    let mut ours = pod("Failed");
    (ours["status"]["reason"], ours["status"]["message"]) = ("Evicted".into(), "memory".into());
    ours["status"]["conditions"] = json!([
        {"type": "Ready", "status": "False"},
        {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"},
    ]);
    let waits = pod_status_patch(&live, &ours, false).unwrap();
    assert_eq!(waits["status"], json!({"conditions": [{"type": "Ready", "status": "False"}]}));
    let sent = pod_status_patch(&live, &ours, true).unwrap();
    assert_eq!(sent["status"]["phase"], "Failed");
    assert_eq!(sent["status"]["reason"], "Evicted");
    assert_eq!(sent["status"]["conditions"].as_array().map(Vec::len), Some(2));
    // A phase that the server has is not taken back.
    live["status"]["phase"] = "Failed".into();
    let after = pod_status_patch(&live, &ours, false).unwrap();
    assert_eq!(after["status"], json!({"conditions": [{"type": "Ready", "status": "False"}]}));
}

#[test]
fn a_pod_condition_of_others_stays_as_the_server_has_it() {
    let gate = |status: &str| json!({"type": "example.com/gate", "status": status});
    let ready = pod("Running")["status"]["conditions"][0].clone();
    for theirs in [json!([ready, gate("True")]), json!([ready])] {
        let (mut live, mut ours) = (pod("Running"), pod("Running"));
        live["status"]["conditions"] = theirs;
        ours["status"]["conditions"] = json!([ready, gate("False")]);
        assert_eq!(pod_status_patch(&live, &ours, true), None);
    }
}

#[test]
fn unknown_pod_addresses_are_kept() {
    let mut live = pod("Running");
    live["status"]["hostIP"] = "10.0.0.1".into();
    live["status"]["hostIPs"] = json!([{"ip": "10.0.0.1"}]);
    assert_eq!(pod_status_patch(&live, &pod("Running"), true), None);
    live["status"]["podIP"] = "10.0.0.1".into();
    live["status"]["podIPs"] = json!([{"ip": "10.0.0.1"}]);
    let mut on_the_nodes = pod("Running");
    on_the_nodes["spec"]["hostNetwork"] = true.into();
    assert_eq!(pod_status_patch(&live, &on_the_nodes, true), None);
    let lost = pod_status_patch(&live, &pod("Running"), true).unwrap();
    assert_eq!(lost["status"], json!({"podIP": null, "podIPs": null}));
}

#[test]
fn a_node_drifts_by_changes_of_other_clients_and_not_by_heartbeats() {
    let mut live = node();
    live["metadata"]["labels"] = node()["metadata"]["labels"].clone();
    let mut ours = node();
    for condition in ours["status"]["conditions"].as_array_mut().unwrap() {
        condition["lastHeartbeatTime"] = "2026-01-01T00:05:00Z".into();
    }
    live["status"]["nodeInfo"] = json!({});
    live["status"]["images"] = json!([{"names": ["a"]}]);
    live["status"]["declaredFeatures"] = json!(["A"]);
    assert!(!node_drifts(&live, &ours, false), "a server that does not know a field");
    let others = json!({"type": "NetworkUnavailable", "status": "False"});
    live["status"]["conditions"].as_array_mut().unwrap().insert(0, others);
    assert!(!node_drifts(&live, &ours, false), "a condition of others");
    let ready = live["status"]["conditions"].as_array_mut().unwrap().last_mut().unwrap();
    ready["status"] = "Unknown".into();
    assert!(node_drifts(&live, &ours, false), "the node controller has not heard of it for long");
}

#[test]
fn the_server_keeps_its_volumes_in_use_until_ours_are_known() {
    let with = |volumes: &[&str]| {
        let mut node = node();
        node["status"]["volumesInUse"] = json!(volumes);
        node
    };
    let mut live = registered();
    live["status"]["volumesInUse"] = json!(["a", "b"]);
    assert_eq!(node_patch(&live, &node(), false), None, "not known");
    assert_eq!(node_patch(&live, &with(&["a", "b"]), false), None);
    for (ours, sent) in [(with(&["b"]), json!(["b"])), (with(&[]), json!(null))] {
        let patch = json!({"status": {"volumesInUse": sent}});
        assert_eq!(node_patch(&live, &ours, false), Some(patch));
        assert!(node_drifts(&live, &ours, false), "another client has changed the list");
    }
    assert!(!node_drifts(&live, &node(), false), "not known");
    assert_eq!(node_patch(&registered(), &with(&[]), false), None, "absent and empty are the same");
}

#[test]
fn an_own_annotation_that_is_no_longer_reported_is_removed() {
    let mut live = registered();
    let attach = "volumes.kubernetes.io/controller-managed-attach-detach";
    live["metadata"]["annotations"][attach] = "true".into();
    let patch = node_patch(&live, &node(), false).unwrap();
    assert_eq!(patch, json!({"metadata": {"annotations": {attach: null}}}));
}

#[test]
fn a_condition_loses_the_reason_and_message_of_its_former_status() {
    let ready = |status: &str| json!({"type": "Ready", "status": status, "lastTransitionTime": "2026-01-01T00:00:05Z"});
    let mut live = pod("Running");
    live["status"]["conditions"] = json!([ready("False")]);
    live["status"]["conditions"][0]["reason"] = "ContainersNotReady".into();
    live["status"]["conditions"][0]["message"] = "containers with unready status: [main]".into();
    live["status"]["conditions"][0]["observedGeneration"] = 1.into();
    let ours = pod("Running");
    let patch = pod_status_patch(&live, &ours, true).unwrap();
    let mut expected = ready("True");
    for field in ["reason", "message", "observedGeneration"] {
        expected[field] = Value::Null;
    }
    assert_eq!(patch["status"]["conditions"], json!([expected]));
    live["status"]["conditions"] = json!([ready("True")]);
    assert_eq!(pod_status_patch(&live, &ours, true), None, "there is nothing left to remove");

    let mut live = node();
    live["status"]["conditions"][0]["status"] = "False".into();
    live["status"]["conditions"][0]["reason"] = "Former".into();
    let mut ours = node();
    ours["status"]["conditions"][0].as_object_mut().unwrap().remove("reason");
    let patch = node_patch(&live, &ours, false).unwrap();
    assert_eq!(patch["status"]["conditions"][0].get("reason"), Some(&Value::Null));
}

#[test]
fn a_removed_field_is_sent_as_null_and_a_nested_list_is_replaced() {
    let of = |status: Value| json!({"metadata": {"uid": "u"}, "status": status});
    let old = of(json!({"resources": {"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "1"}},
        "containerStatuses": [{"name": "a", "started": true}]}));
    let new = of(json!({"resources": {"limits": {"cpu": "1"}}, "containerStatuses": [{"name": "a"}]}));
    assert_eq!(
        pod_status_patch(&old, &new, false).unwrap()["status"],
        json!({"resources": {"limits": {"cpu": "1", "memory": null}, "requests": null},
            "containerStatuses": [{"name": "a"}]})
    );
    let node = |info: Value| json!({"status": {"nodeInfo": info}});
    let (with_swap, without) = (json!({"bootID": "b", "swap": {"capacity": 1}}), json!({"bootID": "b"}));
    let patch = node_patch(&node(with_swap), &node(without.clone()), false).unwrap();
    assert_eq!(patch["status"]["nodeInfo"], json!({"bootID": "b", "swap": null}));
    let live = node(json!({"bootID": "b", "kubeProxyVersion": ""}));
    assert_eq!(node_patch(&live, &node(without), false), None, "absent and empty are the same");
}

#[test]
fn a_rejected_pod_gets_no_host_addresses_and_a_failed_one_does() {
    let node = json!({"status": {"addresses": [{"type": "InternalIP", "address": "10.0.0.1"}]}});
    for (conditions, expected) in
        [(json!(null), json!(null)), (json!([{"type": "Ready", "status": "False"}]), json!("10.0.0.1"))]
    {
        let mut pod =
            json!({"spec": {"hostNetwork": true}, "status": {"phase": "Failed", "reason": "OutOfcpu"}});
        pod["status"]["conditions"] = conditions;
        add_host_addresses(&mut pod, &node);
        assert_eq!((&pod["status"]["hostIP"], &pod["status"]["podIP"]), (&expected, &expected));
    }
}
