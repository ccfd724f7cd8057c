//! Node allocatable: the resources reserved from pods (`kubeReserved` + `systemReserved` + the hard eviction thresholds), and
//! where the limits are enforced (node-and-api.md §2.5, §4.5).

mod amounts;
mod cpus;
mod enforcement;

use std::collections::BTreeMap;

use keelson_kube_model::Quantity;

use crate::document::Sourced;
use crate::outcome::{Level, Outcome};
use crate::reader::Reader;
use crate::settings::{Files, Settings};
use amounts::{Amounts, Capacity};
use enforcement::Enforcement;

/// The fields; `None` without a KubeletConfiguration.
#[derive(Debug)]
pub(crate) struct Reserved {
    amounts: Option<Amounts>,
    enforcement: Enforcement,
}

impl Settings for Reserved {
    fn read(files: &mut Files<'_>) -> Self {
        Self {
            amounts: files.has_kubelet.then(|| Amounts::read(&mut files.kubelet)),
            enforcement: Enforcement::read(&mut files.kubelet),
        }
    }

    fn check(kubelet: &mut Reader<'_>) {
        cpus::check_cgroups(kubelet);
        enforcement::check_cgroups_per_qos(kubelet);
    }

    fn resolve(self, out: &mut Outcome<'_>) {
        if let Some(amounts) = self.amounts {
            resolve_amounts(amounts, out);
        }
        self.enforcement.resolve(out);
    }
}

/// Applies the reservations and the hard thresholds. All have the origins of all fields that reserve something.
fn resolve_amounts(amounts: Amounts, out: &mut Outcome<'_>) {
    if out.with_file && !amounts.dropped.is_empty() {
        out.note(
            Level::Warn,
            format!(
                "evictionHard ({}) sets some thresholds and so drops the defaults of {}; set them too, or set \
                 mergeDefaultEvictionSettings",
                amounts.origin,
                amounts.dropped.join(", ")
            ),
        );
    }
    cpus::check_online(out, amounts.cpus.as_ref());
    let capacity = Capacity {
        memory: out.host.memory_bytes,
        nodefs: out.host.nodefs_bytes,
        reserves_thresholds: !out.flags.is_on("experimental-allocatable-ignore-eviction"),
    };
    let sums = amounts.sums(capacity);
    out.errors.extend(amounts.above(&sums, capacity));
    let text = |quantities: &BTreeMap<String, Quantity>| -> Sourced<BTreeMap<String, String>> {
        let texts = quantities.iter().map(|(key, amount)| (key.clone(), amount.to_string()));
        amounts.sourced(texts.collect())
    };
    let (kube, system, sums) = (text(&amounts.kube), text(&amounts.system), text(&sums));
    out.set("resources.nodeAllocatable.kubeReserved", Some(kube), |c, v| {
        c.resources.node_allocatable.kube_reserved = v;
    });
    out.set("resources.nodeAllocatable.systemReserved", Some(system), |c, v| {
        c.resources.node_allocatable.system_reserved = v;
    });
    out.set("resources.reserved", Some(sums), |c, v| c.resources.reserved = v);
    let hard = amounts.sourced(amounts.hard.clone());
    out.set("resources.eviction.hard", Some(hard), |c, v| c.resources.eviction.hard = v);
}

#[cfg(test)]
mod tests;
