//! How often the node's status is reported, and the limits of requests and events, from the KubeletConfiguration
//! (node-and-api.md §2.5, §5).

use std::time::Duration;

use keelson_config::{ControlPlane, Kubernetes};
use keelson_kube_model::parse_go_duration;
use serde_json::Value;

use crate::document::{Document, Reader, Sourced};
use crate::effective::is_zero;
use crate::kubelet_file::{KubeletFile, period};
use crate::resolve::{Resolver, millis};

const UPDATE: &str = "nodeStatusUpdateFrequency";
const REPORT: &str = "nodeStatusReportFrequency";
/// The default requests per second and burst of a client of a kubelet, for 0.
const CLIENT_QPS: u32 = 5;
const CLIENT_BURST: u32 = 10;
const MAX: u32 = i32::MAX.unsigned_abs();

/// The fields; `None` where the file does not set them.
#[derive(Debug, Default)]
pub(crate) struct NodeStatusFile {
    update: Option<Sourced<Duration>>,
    report: Option<Sourced<Duration>>,
    event_qps: Option<Sourced<u32>>,
    event_burst: Option<Sourced<u32>>,
    api_qps: Option<Sourced<u32>>,
    api_burst: Option<Sourced<u32>>,
    attach_detach: Option<Sourced<bool>>,
}

impl NodeStatusFile {
    pub(crate) fn read(reader: &mut Reader<'_>) -> Self {
        Self {
            update: period(reader, UPDATE),
            report: period(reader, REPORT),
            event_qps: reader.u32("eventRecordQPS", 0..=MAX).map(qps),
            event_burst: burst(reader, "eventBurst"),
            api_qps: reader.u32("kubeAPIQPS", 0..=MAX).map(qps),
            api_burst: burst(reader, "kubeAPIBurst"),
            attach_detach: reader.boolean("enableControllerAttachDetach"),
        }
    }
}

fn qps(given: Sourced<u32>) -> Sourced<u32> {
    given.map(|number| if number == 0 { CLIENT_QPS } else { number })
}

/// Zero means the default in a file, and the client's default in a flag.
fn burst(reader: &mut Reader<'_>, path: &str) -> Option<Sourced<u32>> {
    let given = reader.u32(path, 0..=MAX)?;
    match given.value {
        0 if given.is_from_flag() => Some(given.map(|_| CLIENT_BURST)),
        0 => None,
        _ => Some(given),
    }
}

/// Makes the report frequency follow the update frequency of the same files if they do not set it. A flag for the latter does
/// not change the former (§2.3).
pub(crate) fn report_follows_update(files: &mut Document) {
    let set_value =
        |name: &str| files.root.get(name).filter(|value| !value.is_null() && !is_zero(value)).cloned();
    let is_length = |value: &Value| value.as_str().and_then(parse_go_duration).is_some();
    if let (Some(update), None) = (set_value(UPDATE).filter(is_length), set_value(REPORT)) {
        let origin = files.origin(UPDATE);
        files.set(REPORT, &update, &origin, false);
    }
}

/// Applies the fields to the configuration; call it after the control plane is resolved.
pub(crate) fn resolve(resolver: &mut Resolver<'_>, kubelet: &mut KubeletFile) {
    let file = std::mem::take(&mut kubelet.node_status);
    resolver.set("nodeStatus.statusUpdateMs", file.update, |c, v| c.node_status.status_update_ms = millis(v));
    resolver.set("nodeStatus.statusReportMs", file.report, |c, v| c.node_status.status_report_ms = millis(v));
    resolver.set("nodeStatus.eventQps", file.event_qps, |c, v| c.node_status.event_qps = v);
    resolver.set("nodeStatus.eventBurst", file.event_burst, |c, v| c.node_status.event_burst = v);
    resolver.set("nodeStatus.controllerAttachDetach", file.attach_detach, |c, v| {
        c.node_status.controller_attach_detach = v;
    });
    set_client_limit(resolver, "controlPlane.kubernetes.qps", file.api_qps, |api, v| api.qps = v);
    set_client_limit(resolver, "controlPlane.kubernetes.burst", file.api_burst, |api, v| api.burst = v);
}

/// Applies a request limit, if there is an API server.
fn set_client_limit(
    resolver: &mut Resolver<'_>,
    path: &str,
    value: Option<Sourced<u32>>,
    apply: impl FnOnce(&mut Kubernetes, u32),
) {
    if !matches!(resolver.config.control_plane, ControlPlane::Kubernetes(_)) {
        return;
    }
    resolver.set(path, value, |config, value| {
        if let ControlPlane::Kubernetes(api) = &mut config.control_plane {
            apply(api, value);
        }
    });
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::flags;
    use crate::resolve::tests::{errors_of, host, kubelet, run};
    use crate::resolve::{Flags, Resolved};

    fn with(fields: Value, arguments: &[&str]) -> Resolved {
        let arguments: Vec<String> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        let others = [("kubeconfig", "/etc/k/kubelet.conf".to_owned())].into();
        let fields_of_flags = flags::parse(&arguments, "/srv").unwrap().fields;
        let flags = Flags { fields: fields_of_flags, others, ..Flags::default() };
        let resolved = run(&flags, Some(&kubelet(fields)), None, &host()).unwrap();
        assert!(
            resolved.notes.iter().all(|note| !note.text.contains("no effect yet")),
            "{:?}",
            resolved.notes
        );
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
            assert_eq!(
                resolved.kubelet_configuration["nodeStatusReportFrequency"], shown,
                "{fields} {flags:?}"
            );
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
}
