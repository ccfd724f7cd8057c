//! The checks of pod creation, for manifests that no API server has seen.
//!
//! What the API server refuses is refused here with the same field and kind of error, so that a manifest does not
//! work on a node and fail in a cluster. Covered is what decides whether a node can run the pod sanely; the fields
//! that only a scheduler or an admission plugin reads are not looked at. Pods from the API are not validated again.

mod container;
mod meta;
mod names;
mod references;
mod volume;

use std::collections::BTreeSet;
use std::fmt;

pub use references::{AllowedReferences, static_pod_api_references};

use crate::types::{Pod, PodSpec, ResourceList, ResourceRequirements, RestartPolicy};

/// One thing that is wrong with a pod. Displays as `field: message`.
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

    /// Reports an amount below zero, and requests above their limits.
    fn resources(&mut self, field: &str, resources: &ResourceRequirements) {
        self.amounts(&format!("{field}.limits"), &resources.limits);
        self.amounts(&format!("{field}.requests"), &resources.requests);
        for (name, request) in &resources.requests {
            let Some(limit) = resources.limits.get(name) else { continue };
            let exact = !may_overcommit(name);
            if exact && request != limit {
                let detail = format!("must be equal to {name} limit of {limit}");
                self.invalid(format!("{field}.requests"), request.to_string(), &detail);
            } else if request > limit {
                let detail = format!("must be less than or equal to {name} limit of {limit}");
                self.invalid(format!("{field}.requests"), request.to_string(), &detail);
            }
        }
        for name in resources.requests.keys().filter(|name| !may_overcommit(name)) {
            if !resources.limits.contains_key(name) {
                self.required(
                    format!("{field}.limits"),
                    "must be set for resources that cannot be overcommitted",
                );
            }
        }
    }

    fn amounts(&mut self, field: &str, list: &ResourceList) {
        for (name, amount) in list {
            if amount.is_negative() {
                let detail = "must be greater than or equal to 0";
                self.invalid(format!("{field}[{name}]"), amount.to_string(), detail);
            }
        }
    }
}

/// CPU, memory and the like may be promised more often than they exist; huge pages and devices may not.
fn may_overcommit(resource: &str) -> bool {
    let native = !resource.contains('/') || resource.contains("kubernetes.io/");
    native && !resource.starts_with("hugepages-")
}

/// Checks a defaulted pod as for creation on a node that is already chosen: what is wrong, in the order of the
/// spec; empty when the pod is good.
///
/// Ephemeral containers and scheduling gates are refused, as no static pod may have them.
pub fn validate_pod(pod: &Pod) -> Vec<FieldError> {
    let mut found = Findings::default();
    meta::check_metadata(&mut found, &pod.metadata);
    check_volumes_and_containers(&mut found, &pod.spec);
    check_spec(&mut found, &pod.spec);
    found.0
}

fn check_volumes_and_containers(found: &mut Findings, spec: &PodSpec) {
    let mut volumes = BTreeSet::new();
    for (index, volume) in spec.volumes.iter().enumerate() {
        let field = format!("spec.volumes[{index}]");
        volume::check_volume(found, &field, volume);
        if !volume.name.is_empty() && !volumes.insert(volume.name.as_str()) {
            found.duplicate(format!("{field}.name"), &volume.name);
        }
    }
    if spec.containers.is_empty() {
        found.required("spec.containers", "");
    }
    if !spec.ephemeral_containers.is_empty() {
        found.forbidden("spec.ephemeralContainers", "not allowed on a pod that is being created");
    }
    container::check_containers(found, spec, &volumes);
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
    check_dns(found, spec);
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
        found.invalid("spec.shareProcessNamespace", true, "cannot be combined with hostPID");
    }
    if let Some(os) = &spec.os {
        found.one_of("spec.os.name", &os.name, &["linux", "windows"]);
    }
    if let Some(resources) = &spec.resources {
        found.resources("spec.resources", resources);
    }
    found.amounts("spec.overhead", &spec.overhead);
    for (index, gate) in spec.readiness_gates.iter().enumerate() {
        let field = format!("spec.readinessGates[{index}].conditionType");
        found.name(field, &gate.condition_type, names::qualified_name);
    }
}

fn check_dns(found: &mut Findings, spec: &PodSpec) {
    let policies = ["ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"];
    found.one_of("spec.dnsPolicy", &spec.dns_policy, &policies);
    let config = spec.dns_config.as_ref();
    let servers = config.map(|config| config.nameservers.as_slice()).unwrap_or_default();
    if spec.dns_policy == "None" && servers.is_empty() {
        found.required("spec.dnsConfig.nameservers", "a name server is needed when dnsPolicy is None");
    }
    if servers.len() > 3 {
        found.invalid("spec.dnsConfig.nameservers", servers, "must not have more than 3 entries");
    }
    for (index, server) in servers.iter().enumerate() {
        found.name(format!("spec.dnsConfig.nameservers[{index}]"), server, names::ip_address);
    }
    for (index, alias) in spec.host_aliases.iter().enumerate() {
        found.name(format!("spec.hostAliases[{index}].ip"), &alias.ip, names::ip_address);
    }
}
