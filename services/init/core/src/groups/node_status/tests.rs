use keelson_config::ControlPlane;
use serde_json::{Value, json};

use crate::flags;
use crate::inputs::Flags;
use crate::outcome::WITHOUT_EFFECT;
use crate::resolve::Resolved;
use crate::testing::{assert_refused, errors_of, host, kubelet, run, with_kubelet};

fn with(fields: Value, arguments: &[&str]) -> Resolved {
    let arguments: Vec<String> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
    let others = [("kubeconfig", "/etc/k/kubelet.conf".to_owned())].into();
    let fields_of_flags = flags::parse(&arguments, "/srv").unwrap().fields;
    let flags = Flags { fields: fields_of_flags, others, ..Flags::default() };
    let resolved = run(&flags, Some(&kubelet(fields)), None, &host()).unwrap();
    assert!(resolved.notes.iter().all(|note| note.event != Some(WITHOUT_EFFECT)), "{:?}", resolved.notes);
    resolved
}

fn api(resolved: &Resolved) -> (u32, u32) {
    match &resolved.config.control_plane {
        ControlPlane::Kubernetes(api) => (api.qps, api.burst),
        other => panic!("{other:?}"),
    }
}

#[test]
fn node_status_and_client_limits_are_applied_with_their_origin() {
    let resolved = with(
        json!({
            "nodeStatusUpdateFrequency": "4s", "nodeStatusReportFrequency": "1m", "eventRecordQPS": 7,
            "eventBurst": 8, "kubeAPIQPS": 9, "kubeAPIBurst": 10, "enableControllerAttachDetach": false,
        }),
        &["--event-qps=11"],
    );
    let own = &resolved.config.node_status;
    assert_eq!((own.status_update_ms, own.status_report_ms), (4_000, 60_000));
    assert_eq!((own.event_qps, own.event_burst, own.controller_attach_detach), (11, 8, false));
    assert_eq!(api(&resolved), (9, 10));
    let of = |path: &str| resolved.config.provenance[path].clone();
    assert_eq!(of("nodeStatus.eventQps"), "--event-qps");
    for path in [
        "nodeStatus.statusUpdateMs",
        "nodeStatus.statusReportMs",
        "nodeStatus.eventBurst",
        "nodeStatus.controllerAttachDetach",
        "controlPlane.kubernetes.qps",
        "controlPlane.kubernetes.burst",
    ] {
        assert!(of(path).starts_with("kubelet.yaml:"), "{path}: {}", of(path));
    }
}

#[test]
fn node_status_defaults_are_those_of_a_kubelet() {
    let zeros = json!({
        "nodeStatusUpdateFrequency": "0s", "nodeStatusReportFrequency": "0s", "eventBurst": 0, "kubeAPIBurst": 0,
    });
    for fields in [json!({}), zeros] {
        let resolved = with(fields, &[]);
        assert_eq!(resolved.config.node_status, keelson_config::NodeStatus::default());
        assert_eq!(api(&resolved), (50, 100));
        let whole = &resolved.kubelet_configuration;
        assert_eq!((&whole["eventBurst"], &whole["kubeAPIBurst"]), (&json!(100), &json!(100)));
    }
}

#[test]
fn an_explicit_zero_qps_or_burst_means_the_client_default() {
    let of_file = with(json!({"eventRecordQPS": 0, "kubeAPIQPS": 0}), &[]);
    assert_eq!((of_file.config.node_status.event_qps, api(&of_file).0), (5, 5));
    assert_eq!(of_file.kubelet_configuration["eventRecordQPS"], 0);
    let of_flags = with(json!({"eventBurst": 7}), &["--event-burst=0", "--kube-api-burst=0"]);
    assert_eq!((of_flags.config.node_status.event_burst, api(&of_flags).1), (10, 10));
    assert_eq!(of_flags.kubelet_configuration["eventBurst"], 0, "as given");
}

#[test]
fn report_frequency_follows_the_update_frequency_of_files_not_flags() {
    let flag = &["--node-status-update-frequency=20s"][..];
    for (fields, flags, update, report, shown) in [
        (json!({"nodeStatusUpdateFrequency": "4s"}), &[][..], 4_000, 4_000, "4s"),
        (json!({}), flag, 20_000, 300_000, "5m0s"),
        (json!({"nodeStatusUpdateFrequency": "4s"}), flag, 20_000, 4_000, "4s"),
        (json!({"nodeStatusUpdateFrequency": "0s"}), flag, 20_000, 300_000, "5m0s"),
        (json!({"nodeStatusReportFrequency": "1m"}), flag, 20_000, 60_000, "1m0s"),
    ] {
        let resolved = with(fields.clone(), flags);
        let own = &resolved.config.node_status;
        assert_eq!((own.status_update_ms, own.status_report_ms), (update, report), "{fields} {flags:?}");
        assert_eq!(resolved.kubelet_configuration["nodeStatusReportFrequency"], shown, "{fields} {flags:?}");
    }
}

#[test]
fn invalid_node_status_fields_are_refused() {
    for (fields, part) in [
        (json!({"nodeStatusUpdateFrequency": "often"}), "not a duration"),
        (json!({"nodeStatusReportFrequency": "-1s"}), "this must be from "),
        (json!({"eventRecordQPS": -1}), "from 0"),
        (json!({"kubeAPIBurst": "many"}), "whole number"),
        (json!({"enableControllerAttachDetach": 1}), "true or false"),
    ] {
        let errors = errors_of(fields.clone());
        assert!(errors.len() == 1 && errors[0].contains(part), "{fields}: {errors:?}");
    }
}

#[test]
fn node_status_max_images_is_applied_and_minus_one_means_all() {
    assert_eq!(with_kubelet(json!({})).node_status.max_images, 50);
    for most in [-1, 0, 1, 50, i64::from(i32::MAX)] {
        let config = with_kubelet(json!({"nodeStatusMaxImages": most}));
        assert_eq!(config.node_status.max_images, most);
        assert!(config.provenance.contains_key("nodeStatus.maxImages"), "{most}");
    }
    for wrong in [json!(-2), json!("all"), json!(1_u64 << 31)] {
        let errors = errors_of(json!({"nodeStatusMaxImages": wrong}));
        assert!(errors.len() == 1 && errors[0].contains("nodeStatusMaxImages"), "{wrong}: {errors:?}");
    }
}

#[test]
fn invalid_node_status_values_are_refused_with_a_remedy() {
    assert_refused(&[
        (json!({"eventBurst": -1}), "eventBurst = -1", "from 0 to 2147483647"),
        (json!({"eventRecordQPS": -1}), "eventRecordQPS = -1", "from 0 to 2147483647"),
        (json!({"nodeStatusUpdateFrequency": 10}), "nodeStatusUpdateFrequency = 10", "not a duration"),
    ]);
}
