//! Resources: which names are allowed where, and which amounts.

use std::collections::BTreeSet;

use serde_json::Value;

use super::{Findings, names};
use crate::pod_ext::is_pod_level_resource;
use crate::quantity::Quantity;
use crate::resources::container_requests;
use crate::types::{
    Container, Pod, PodSpec, ResourceFieldSelector, ResourceList, ResourceRequirements, RestartPolicy,
};

const HUGE_PAGES: &str = "hugepages-";
/// Resources that a container may request on every node.
const OF_CONTAINERS: [&str; 3] = ["cpu", "memory", "ephemeral-storage"];
/// What `resizePolicy` may name.
const RESIZABLE: [&str; 2] = ["cpu", "memory"];
/// Divisors of memory and the like.
const BYTES: [&str; 13] = ["1", "1k", "1M", "1G", "1T", "1P", "1E", "1Ki", "1Mi", "1Gi", "1Ti", "1Pi", "1Ei"];

/// The object that the resources belong to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Level {
    Pod,
    Container,
}

impl Findings {
    /// Reports names that are not allowed, invalid amounts, and requests above their limits.
    pub(super) fn resources(&mut self, field: &str, resources: &ResourceRequirements, level: Level) {
        // A request that defaulting has copied from its limit is refused there.
        let is_own = |(name, amount): &(&String, &Quantity)| resources.limits.get(*name) != Some(*amount);
        let own_requests =
            resources.requests.iter().filter(is_own).map(|(name, amount)| (name.clone(), *amount));
        for (part, list) in [("limits", &resources.limits), ("requests", &own_requests.collect())] {
            let field = format!("{field}.{part}");
            for name in list.keys() {
                self.resource_name(&format!("{field}[{name}]"), name, level);
            }
            self.amounts(&field, list);
        }
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
        let has = |wanted: fn(&str) -> bool| {
            resources.limits.keys().chain(resources.requests.keys()).any(|name| wanted(name))
        };
        if has(|name| name.starts_with(HUGE_PAGES)) && !has(|name| RESIZABLE.contains(&name)) {
            self.forbidden(field, "HugePages require cpu or memory");
        }
    }

    /// Reports invalid content of a pod's overhead, which is checked like a container of its own.
    pub(super) fn overhead(&mut self, field: &str, list: &ResourceList) {
        for name in list.keys() {
            self.resource_name(&format!("{field}[{name}]"), name, Level::Container);
        }
        self.amounts(field, list);
    }

    fn resource_name(&mut self, field: &str, name: &str, level: Level) {
        let detail = match level {
            Level::Pod if is_pod_level_resource(name) => return self.page_size(field, name),
            Level::Pod => "must be a resource that a pod has as a whole: cpu, memory or hugepages-<size>",
            Level::Container if !name.contains('/') => {
                if OF_CONTAINERS.contains(&name) || name.starts_with(HUGE_PAGES) {
                    return self.page_size(field, name);
                }
                "must be a standard resource for containers: cpu, memory, ephemeral-storage or hugepages-<size>; \
                 others have a domain, as example.com/gpu"
            }
            Level::Container => match names::qualified_name(name) {
                Some(detail) => detail,
                // Quotas name it with this prefix.
                None if name.starts_with("requests.") => "doesn't follow extended resource name standard",
                None => return,
            },
        };
        self.invalid(field, name, detail);
    }

    fn page_size(&mut self, field: &str, name: &str) {
        let Some(size) = name.strip_prefix(HUGE_PAGES) else { return };
        if !Quantity::parse(size).is_ok_and(|size| size.value() > 0) {
            self.invalid(field, name, "must name a size of pages, as hugepages-2Mi");
        }
    }

    pub(super) fn amounts(&mut self, field: &str, list: &ResourceList) {
        for (name, amount) in list {
            let field = format!("{field}[{name}]");
            if amount.is_negative() {
                self.invalid(field, amount.to_string(), "must be greater than or equal to 0");
            } else if !may_overcommit(name) && amount.nanos() % 1_000_000_000 != 0 {
                self.invalid(field, amount.to_string(), "must be an integer");
            }
        }
    }
}

/// CPU, memory and the like can be overcommitted; huge pages and devices cannot.
fn may_overcommit(resource: &str) -> bool {
    let native = !resource.contains('/') || resource.contains("kubernetes.io/");
    native && !resource.starts_with(HUGE_PAGES)
}

/// A container may only use claims of its pod.
pub(super) fn check_claims(found: &mut Findings, field: &str, container: &Container, spec: &PodSpec) {
    let mut seen = BTreeSet::new();
    for (index, claim) in container.resources.claims.iter().enumerate() {
        let field = format!("{field}.resources.claims[{index}]");
        if claim.name.is_empty() {
            found.required(field, "");
        } else if !spec.resource_claims.iter().any(|known| known.name == claim.name) {
            found.not_found(field, &claim.name);
        } else if !seen.insert((claim.name.as_str(), claim.request.as_str())) {
            found.duplicate(field, &claim.name);
        }
    }
}

/// Checks that the pod-level resources cover the requests of its containers and the limit of each regular container.
pub(super) fn check_pod_amounts(found: &mut Findings, pod: &Pod) {
    let spec = &pod.spec;
    let Some(resources) = &spec.resources else { return };
    let sum = container_requests(pod);
    for (name, amount) in &resources.requests {
        if let Some(needed) = sum.get(name).filter(|needed| *needed > amount) {
            let detail = format!("must be greater than or equal to aggregate container requests of {needed}");
            found.invalid(format!("spec.resources.requests[{name}]"), amount.to_string(), &detail);
        }
    }
    for (index, container) in spec.containers.iter().enumerate() {
        for (name, limit) in &container.resources.limits {
            if let Some(most) = resources.limits.get(name).filter(|most| limit > *most) {
                let field = format!("spec.containers[{index}].resources.limits[{name}]");
                let detail = format!("must be less than or equal to pod limits of {most}");
                found.invalid(field, limit.to_string(), &detail);
            }
        }
    }
}

/// Checks `resizePolicy`, whose entries are `{resourceName, restartPolicy}`.
pub(super) fn check_resize_policy(
    found: &mut Findings,
    field: &str,
    container: &Container,
    pod_policy: Option<RestartPolicy>,
) {
    let Some(policies) = &container.resize_policy else { return };
    let field = format!("{field}.resizePolicy");
    let Some(entries) = policies.as_array() else {
        return found
            .push(field, "Invalid value: must be a list of resourceName and restartPolicy".to_owned());
    };
    let text = |entry: &Value, name: &str| entry[name].as_str().unwrap_or_default().to_owned();
    let mut seen = Vec::new();
    for (index, entry) in entries.iter().enumerate() {
        let field = format!("{field}[{index}]");
        let (resource, policy) = (text(entry, "resourceName"), text(entry, "restartPolicy"));
        match resource.as_str() {
            "" => found.required(format!("{field}.resourceName"), ""),
            name if !RESIZABLE.contains(&name) => {
                found.unsupported(format!("{field}.resourceName"), name, &RESIZABLE);
            }
            name if seen.contains(&name.to_owned()) => found.duplicate(&field, name),
            name => seen.push(name.to_owned()),
        }
        match policy.as_str() {
            "" => found.required(format!("{field}.restartPolicy"), ""),
            "NotRequired" => {}
            "RestartContainer" if pod_policy == Some(RestartPolicy::Never) => {
                let detail = "must be 'NotRequired' when `restartPolicy` is 'Never'";
                found.invalid(format!("{field}.restartPolicy"), policy, detail);
            }
            "RestartContainer" => {}
            other => {
                found.unsupported(
                    format!("{field}.restartPolicy"),
                    other,
                    &["NotRequired", "RestartContainer"],
                );
            }
        }
    }
}

/// Checks a reference to a resource of a container. `needs_container`: the reference is outside of a container.
pub(super) fn check_resource_field(
    found: &mut Findings,
    field: &str,
    selector: &ResourceFieldSelector,
    needs_container: bool,
) {
    if needs_container && selector.container_name.is_empty() {
        found.required(format!("{field}.containerName"), "");
    }
    if selector.resource.is_empty() {
        return found.required(format!("{field}.resource"), "");
    }
    let name = selector.resource.strip_prefix("limits.").or(selector.resource.strip_prefix("requests."));
    let Some(name) = name.filter(|name| OF_CONTAINERS.contains(name) || name.starts_with(HUGE_PAGES)) else {
        let known = [
            "limits.cpu",
            "limits.ephemeral-storage",
            "limits.hugepages-<size>",
            "limits.memory",
            "requests.cpu",
            "requests.ephemeral-storage",
            "requests.hugepages-<size>",
            "requests.memory",
        ];
        return found.unsupported(format!("{field}.resource"), &selector.resource, &known);
    };
    let Some(divisor) = selector.divisor.filter(|divisor| !divisor.is_zero()) else { return };
    let (known, detail): (&[&str], &str) = match name {
        "cpu" => (&["1m", "1"], "only divisor's values 1m and 1 are supported with the cpu resource"),
        _ => (
            &BYTES,
            "only divisor's values 1, 1k, 1M, 1G, 1T, 1P, 1E, 1Ki, 1Mi, 1Gi, 1Ti, 1Pi, 1Ei are supported with this resource",
        ),
    };
    if !known.iter().any(|text| Quantity::parse(text).is_ok_and(|known| known == divisor)) {
        found.invalid(format!("{field}.divisor"), divisor.to_string(), detail);
    }
}
