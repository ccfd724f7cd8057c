//! Fields that require a feature gate.

use keelson_kube_model::Quantity;
use serde_json::Value;

use super::signed;
use crate::document::Reader;
use crate::gates::FeatureGates;

/// A field, the values that require the gate, and the gate.
type Need = (&'static str, fn(&Value) -> bool, &'static str);

const NEEDS: &[Need] = &[
    (
        "cpuCFSQuotaPeriod",
        |value| is_text(value, |text| signed(text) != Some(100_000_000)),
        "CustomCPUCFSQuotaPeriod",
    ),
    ("crashLoopBackOff.maxContainerRestartPeriod", |_| true, "KubeletCrashLoopBackOffMax"),
    ("imagePullCredentialsVerificationPolicy", is_some, "KubeletEnsureSecretPulledImages"),
    ("logging.options.json.infoBufferSize", is_amount, "LoggingAlphaOptions"),
    ("logging.options.json.splitStream", is_true, "LoggingAlphaOptions"),
    ("logging.options.text.infoBufferSize", is_amount, "LoggingAlphaOptions"),
    ("logging.options.text.splitStream", is_true, "LoggingAlphaOptions"),
    ("memoryReservationPolicy", |value| value == "TieredReservation", "MemoryQoS"),
    ("preloadedImagesVerificationAllowlist", is_some, "KubeletEnsureSecretPulledImages"),
    ("qosReserved", is_some, "QOSReserved"),
    ("serverTLSBootstrap", is_true, "RotateKubeletServerCertificate"),
    ("shutdownGracePeriod", is_time, "GracefulNodeShutdown"),
    ("shutdownGracePeriodByPodPriority", is_some, "GracefulNodeShutdownBasedOnPodPriority"),
    ("shutdownGracePeriodCriticalPods", is_time, "GracefulNodeShutdown"),
];

pub(super) fn check(reader: &mut Reader<'_>, gates: &FeatureGates) {
    for (path, needs_gate, gate) in NEEDS {
        if let Some(value) = reader.peek(path).filter(|value| needs_gate(value) && !gates.is_on(gate)) {
            let remedy = format!("this requires the feature gate {gate}; enable it, or remove this field");
            reader.report(path, value, remedy);
        }
    }
}

fn is_true(value: &Value) -> bool {
    *value == Value::Bool(true)
}

fn is_text(value: &Value, good: impl Fn(&str) -> bool) -> bool {
    value.as_str().is_some_and(good)
}

/// Whether this is a duration other than zero.
fn is_time(value: &Value) -> bool {
    is_text(value, |text| signed(text).is_some_and(|nanos| nanos != 0))
}

/// Whether this is a quantity other than zero.
fn is_amount(value: &Value) -> bool {
    is_text(value, |text| Quantity::parse(text).is_ok_and(|amount| !amount.is_zero()))
}

/// Whether this is not empty.
fn is_some(value: &Value) -> bool {
    match value {
        Value::String(text) => !text.is_empty(),
        Value::Array(list) => !list.is_empty(),
        Value::Object(map) => !map.is_empty(),
        _ => false,
    }
}
