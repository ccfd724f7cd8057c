//! The Node object and the requests to the control plane.

use super::FieldKind::{Bool, Choice, Int, Period, Taints, Text};
use super::GateCondition::On;
use super::{KubeletField, MAX_I32, field};
use crate::ServiceName::NodeStatus;

pub(super) const FIELDS: &[KubeletField] = &[
    field(
        "configMapAndSecretChangeDetectionStrategy",
        Choice(&["Get", "Cache", "Watch"]),
        "How changes of ConfigMaps and Secrets are detected: Get, Cache or Watch.",
    )
    .default_text("Watch")
    .empty_is_default()
    .sets(&["controlPlane.kubernetes.objectsBy"]),
    field("contentType", Text, "The content type of requests to the API server.")
        .flag("kube-api-content-type")
        .default_text("application/vnd.kubernetes.protobuf")
        .empty_is_default()
        .checked_by_type(),
    field("enableControllerAttachDetach", Bool, "Let the attach/detach controller attach volumes.")
        .flag("enable-controller-attach-detach")
        .default_bool(true)
        .sets(&["nodeStatus.controllerAttachDetach"])
        .restarts(&[NodeStatus]),
    field("eventBurst", Int(0, MAX_I32), "Events recorded in a burst; 0 means 10.")
        .flag("event-burst")
        .default_int(100)
        .empty_is_default_in_files()
        .sets(&["nodeStatus.eventBurst"])
        .restarts(&[NodeStatus]),
    field("eventRecordQPS", Int(0, MAX_I32), "Events recorded per second; 0 means 5.")
        .flag("event-qps")
        .default_int(50)
        .sets(&["nodeStatus.eventQps"])
        .restarts(&[NodeStatus]),
    field("kubeAPIBurst", Int(0, MAX_I32), "Requests to the API server in a burst; 0 means 10.")
        .flag("kube-api-burst")
        .default_int(100)
        .empty_is_default_in_files()
        .sets(&["controlPlane.kubernetes.burst"]),
    field("kubeAPIQPS", Int(0, MAX_I32), "Requests to the API server per second; 0 means 5.")
        .flag("kube-api-qps")
        .default_int(50)
        .sets(&["controlPlane.kubernetes.qps"]),
    field("nodeLeaseDurationSeconds", Int(0, MAX_I32), "The duration of the node's lease in seconds.")
        .default_int(40)
        .empty_is_default()
        .sets(&["controlPlane.kubernetes.leaseSeconds", "controlPlane.etcd.leaseSeconds"]),
    field("nodeStatusMaxImages", Int(-1, MAX_I32), "How many images the status of the node lists; -1: all.")
        .flag("node-status-max-images")
        .default_int(50)
        .sets(&["nodeStatus.maxImages"])
        .live(&[NodeStatus]),
    field("nodeStatusReportFrequency", Period, "How often an unchanged status of the node is reported.")
        .default_text("5m0s")
        .empty_is_default()
        .sets(&["nodeStatus.statusReportMs"])
        .restarts(&[NodeStatus]),
    field("nodeStatusUpdateFrequency", Period, "How often the status of the node is computed.")
        .flag("node-status-update-frequency")
        .default_text("10s")
        .empty_is_default()
        .sets(&["nodeStatus.statusUpdateMs"])
        .restarts(&[NodeStatus]),
    field("providerID", Text, "The ID of this machine at its cloud provider.")
        .current_flag("provider-id")
        .empty_is_unset()
        .sets(&["controlPlane.kubernetes.providerId"]),
    field("registerNode", Bool, "Register the node with the API server.")
        .flag("register-node")
        .default_bool(true)
        .sets(&["controlPlane.kubernetes.registerNode"]),
    field("registerWithTaints", Taints, "Taints that the node registers with.")
        .flag("register-with-taints")
        .sets(&["controlPlane.kubernetes.taints"]),
    field("rotateCertificates", Bool, "Ask for a new client certificate before the old one ends.")
        .flag("rotate-certificates")
        .default_bool(false)
        .sets(&["controlPlane.kubernetes.certificates.rotate"]),
    field(
        "serverTLSBootstrap",
        Bool,
        "Ask the API server for the certificate of the kubelet API, and again before it ends.",
    )
    .flag("rotate-server-certificates")
    .default_bool(false)
    .sets(&["controlPlane.kubernetes.certificates.serving"])
    .gate("RotateKubeletServerCertificate", On),
];
