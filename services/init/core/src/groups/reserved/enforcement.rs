//! Where node allocatable is enforced, and on which cgroups.

use serde_json::Value;

use crate::document::Sourced;
use crate::outcome::Outcome;
use crate::reader::Reader;

/// The values of `enforceNodeAllocatable`.
const ENFORCED: &[&str] = &[
    "pods",
    "kube-reserved",
    "system-reserved",
    "kube-reserved-compressible",
    "system-reserved-compressible",
    "none",
];

/// The fields; `None` where the file does not set them.
#[derive(Debug)]
pub(super) struct Enforcement {
    enforce: Option<Sourced<Vec<String>>>,
    kube_cgroup: Option<Sourced<String>>,
    system_cgroup: Option<Sourced<String>>,
}

impl Enforcement {
    pub(super) fn read(reader: &mut Reader<'_>) -> Self {
        Self {
            enforce: reader.strings("enforceNodeAllocatable"),
            kube_cgroup: reader.text_field("kubeReservedCgroup"),
            system_cgroup: reader.text_field("systemReservedCgroup"),
        }
    }

    pub(super) fn resolve(self, out: &mut Outcome<'_>) {
        let Self { enforce, kube_cgroup: kube, system_cgroup: system } = self;
        if let Some(enforce) = &enforce {
            let words = &enforce.value;
            let has = |word: &str| words.iter().any(|w| w == word);
            let named =
                |cgroup: &Option<Sourced<String>>| cgroup.as_ref().is_some_and(|c| !c.value.is_empty());
            let mut sorted = words.clone();
            sorted.sort();
            sorted.dedup();
            if words.iter().any(|word| !word.is_empty() && !ENFORCED.contains(&word.as_str())) {
                out.refuse(enforce, format!("the allowed values are {}", ENFORCED.join(", ")));
            } else if sorted.len() != words.len() {
                out.refuse(enforce, "each value may be listed only once");
            } else if has("none") && words.len() > 1 {
                out.refuse(enforce, "none must be the only value");
            }
            for (part, field, cgroup) in [
                ("kube-reserved", "kubeReservedCgroup", &kube),
                ("system-reserved", "systemReservedCgroup", &system),
            ] {
                let compressible = format!("{part}-compressible");
                if has(part) && has(&compressible) {
                    out.refuse(enforce, format!("{part} and {compressible} exclude each other"));
                }
                if (has(part) || has(&compressible)) && !named(cgroup) {
                    out.refuse(enforce, format!("{part} requires {field}, the cgroup to limit"));
                }
            }
        }
        out.set_field(enforce, |c, v| c.resources.node_allocatable.enforce = v);
        out.set_field(kube, |c, v| c.resources.node_allocatable.kube_reserved_cgroup = v);
        out.set_field(system, |c, v| c.resources.node_allocatable.system_reserved_cgroup = v);
    }
}

/// Enforcement requires cgroups; by default the limits of pods are enforced.
pub(super) fn check_cgroups_per_qos(reader: &mut Reader<'_>) {
    let enforced = match reader.peek("enforceNodeAllocatable") {
        None => true,
        Some(Value::Array(values)) => values.iter().any(|value| value != "none" && value != ""),
        Some(_) => false,
    };
    if enforced {
        let remedy = "this must be true unless enforceNodeAllocatable is none";
        reader.refuse_if("cgroupsPerQOS", |value| *value == Value::Bool(false), remedy);
    }
}
