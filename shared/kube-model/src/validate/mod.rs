//! The checks of pod creation, for manifests that no API server has seen.
//!
//! Whatever the API server refuses is refused here with the same field and kind of error, so that a manifest cannot work on
//! a node and fail in a cluster. Unknown values are refused. Pods from the API are not validated again.

mod affinity;
mod claim_volume;
mod container;
mod fields;
mod json_fields;
mod meta;
mod names;
mod network;
mod plugin_volume;
mod probes;
mod references;
mod resources;
mod scheduling;
mod security;
mod volume;

use std::collections::BTreeSet;
use std::fmt;

pub use references::{AllowedReferences, static_pod_api_references};
use serde_json::Value;

use self::resources::Level;
use crate::pod_ext::ContainerKind;
use crate::types::{Pod, PodSpec, RestartPolicy};

/// A validation error of a pod. Displays as `field: message`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FieldError {
    /// Path of the field as one would write it in a manifest: `spec.containers[0].image`.
    pub field: String,
    /// Kind of error, the value where there is one, and what is expected.
    pub message: String,
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.message)
    }
}

impl std::error::Error for FieldError {}

/// Collects errors in the order in which they are found.
#[derive(Default)]
struct Findings(Vec<FieldError>);

impl Findings {
    fn push(&mut self, field: impl Into<String>, message: String) {
        self.0.push(FieldError { field: field.into(), message });
    }

    fn required(&mut self, field: impl Into<String>, detail: &str) {
        let tail = if detail.is_empty() { String::new() } else { format!(": {detail}") };
        self.push(field, format!("Required value{tail}"));
    }

    /// `value` is shown with `Debug`: text in quotes, numbers plain.
    fn invalid(&mut self, field: impl Into<String>, value: impl fmt::Debug, detail: &str) {
        self.push(field, format!("Invalid value: {value:?}: {detail}"));
    }

    fn duplicate(&mut self, field: impl Into<String>, value: impl fmt::Debug) {
        self.push(field, format!("Duplicate value: {value:?}"));
    }

    fn unsupported(&mut self, field: impl Into<String>, value: &str, supported: &[&str]) {
        let list: Vec<String> = supported.iter().map(|word| format!("{word:?}")).collect();
        self.push(field, format!("Unsupported value: {value:?}: supported values: {}", list.join(", ")));
    }

    fn forbidden(&mut self, field: impl Into<String>, detail: &str) {
        self.push(field, format!("Forbidden: {detail}"));
    }

    fn not_found(&mut self, field: impl Into<String>, value: &str) {
        self.push(field, format!("Not found: {value:?}"));
    }

    /// Refuses a value that is not in the list; empty text counts as unset and passes.
    fn one_of(&mut self, field: &str, value: &str, supported: &[&str]) {
        if !value.is_empty() && !supported.contains(&value) {
            self.unsupported(field, value, supported);
        }
    }

    fn not_negative(&mut self, field: &str, value: Option<i64>) {
        if let Some(value) = value.filter(|value| *value < 0) {
            self.invalid(field, value, "must be greater than or equal to 0");
        }
    }

    /// Reports text that a check in [`names`] refuses.
    fn name(&mut self, field: impl Into<String>, value: &str, check: impl Fn(&str) -> Option<&'static str>) {
        if let Some(detail) = check(value) {
            self.invalid(field, value, detail);
        }
    }
}

/// Validates a defaulted pod as for creation on a node that is already chosen. Returns the errors in the order of the spec;
/// empty when the pod is valid.
///
/// Ephemeral containers and scheduling gates are refused, as no static pod may have them.
pub fn validate_pod(pod: &Pod) -> Vec<FieldError> {
    let mut found = Findings::default();
    meta::check_metadata(&mut found, &pod.metadata);
    check_volumes_and_containers(&mut found, pod);
    check_spec(&mut found, &pod.spec);
    resources::check_pod_amounts(&mut found, pod);
    security::check_pod_security(&mut found, pod);
    found.0
}

/// Validates the source with the wire name `kind` of a PersistentVolume, at the field `at`. These are the rules for the same source
/// in a pod; a kind that is no plugin's has none.
pub fn validate_plugin_source(at: &str, kind: &str, source: &Value) -> Vec<FieldError> {
    let mut found = Findings::default();
    plugin_volume::check_source(&mut found, at, kind, source);
    found.0
}

/// Validates the fields in which an unknown or contradictory value could weaken security or corrupt a file: security
/// contexts, user namespaces, volume mounts, names for `/etc/hosts` and `resolv.conf`. Empty when all are valid.
///
/// Part of [`validate_pod`], for pods of an API server that may be older than these rules. Containers of all kinds are checked.
pub fn unsafe_fields(pod: &Pod) -> Vec<FieldError> {
    let mut found = Findings::default();
    let spec = &pod.spec;
    let host_users = spec.host_users != Some(false);
    let lists = [
        (ContainerKind::Init, &spec.init_containers),
        (ContainerKind::Regular, &spec.containers),
        (ContainerKind::Ephemeral, &spec.ephemeral_containers),
    ];
    for (kind, containers) in lists {
        for (index, container) in containers.iter().enumerate() {
            let field = format!("spec.{}[{index}]", kind.spec_field());
            security::check_container_security(&mut found, &field, container, host_users);
            container::check_mount_modes(&mut found, &field, container);
        }
    }
    security::check_pod_security(&mut found, pod);
    network::check_network(&mut found, spec);
    found.0
}

fn check_volumes_and_containers(found: &mut Findings, pod: &Pod) {
    let spec = &pod.spec;
    let mut volumes = BTreeSet::new();
    for (index, volume) in spec.volumes.iter().enumerate() {
        let field = format!("spec.volumes[{index}]");
        volume::check_volume(found, &field, volume);
        if !volume.name.is_empty() && !volumes.insert(volume.name.as_str()) {
            found.duplicate(format!("{field}.name"), &volume.name);
        }
    }
    claim_volume::check_claim_names(found, &pod.metadata.name, &spec.volumes);
    if spec.containers.is_empty() {
        found.required("spec.containers", "");
    }
    if !spec.ephemeral_containers.is_empty() {
        found.forbidden("spec.ephemeralContainers", "not allowed on a pod that is being created");
    }
    container::check_containers(found, spec);
}

/// The hostname that a pod's processes see instead of one made from the pod's name. Linux allows 64 characters.
fn check_hostname_override(found: &mut Findings, spec: &PodSpec) {
    const LONGEST: usize = 64;
    let Some(name) = spec.hostname_override.as_deref() else { return };
    let field = "spec.hostnameOverride";
    if spec.host_network == Some(true) {
        found.forbidden(field, "may not be specified when `hostNetwork` is true");
    }
    if spec.set_hostname_as_fqdn == Some(true) {
        found.forbidden("spec.setHostnameAsFQDN", "may not be true when `hostnameOverride` is set");
    }
    if name.len() > LONGEST {
        found.invalid(field, name, "must be no more than 64 characters");
    } else {
        found.name(field, name, names::dns_subdomain);
    }
}

fn check_spec(found: &mut Findings, spec: &PodSpec) {
    if RestartPolicy::parse(&spec.restart_policy).is_none() {
        found.unsupported("spec.restartPolicy", &spec.restart_policy, &["Always", "OnFailure", "Never"]);
    }
    found.not_negative("spec.terminationGracePeriodSeconds", spec.termination_grace_period_seconds);
    if let Some(seconds) = spec.active_deadline_seconds
        && !(1..=i64::from(i32::MAX)).contains(&seconds)
    {
        found.invalid("spec.activeDeadlineSeconds", seconds, "must be between 1 and 2147483647, inclusive");
    }
    network::check_network(found, spec);
    scheduling::check_scheduling(found, spec);
    affinity::check_affinity(found, spec);
    if !spec.scheduling_gates.is_empty() {
        found.forbidden("spec.schedulingGates", "not allowed on a pod whose node is already chosen");
    }
    for (field, name) in [("spec.hostname", &spec.hostname), ("spec.subdomain", &spec.subdomain)] {
        if !name.is_empty() {
            found.name(field, name, names::dns_label);
        }
    }
    for (field, name) in
        [("spec.nodeName", &spec.node_name), ("spec.serviceAccountName", &spec.service_account_name)]
    {
        if !name.is_empty() {
            found.name(field, name, names::dns_subdomain);
        }
    }
    if spec.host_pid == Some(true) && spec.share_process_namespace == Some(true) {
        found.invalid(
            "spec.shareProcessNamespace",
            true,
            "ShareProcessNamespace and HostPID cannot both be enabled",
        );
    }
    check_hostname_override(found, spec);
    if let Some(os) = &spec.os {
        match os.name.as_str() {
            "" => found.required("spec.os.name", ""),
            "linux" | "windows" => {}
            other => found.unsupported("spec.os.name", other, &["linux", "windows"]),
        }
    }
    if let Some(resources) = &spec.resources {
        found.resources("spec.resources", resources, Level::Pod);
    }
    found.overhead("spec.overhead", &spec.overhead);
    for (index, gate) in spec.readiness_gates.iter().enumerate() {
        let field = format!("spec.readinessGates[{index}].conditionType");
        found.name(field, &gate.condition_type, names::qualified_name);
    }
}
