//! Where a PersistentVolume can be reached, in terms of the labels of a CSI driver.

use std::collections::BTreeSet;

use crate::objects::{
    NodeSelectorRequirement, NodeSelectorTerm, PersistentVolume, Strings, VolumeNodeAffinity,
};

/// The label of a zone.
pub(super) const ZONE: &str = "topology.kubernetes.io/zone";
/// The label of a zone before Kubernetes 1.17.
pub(super) const BETA_ZONE: &str = "failure-domain.beta.kubernetes.io/zone";
/// The label of a region.
const REGION: &str = "topology.kubernetes.io/region";
/// The label of a region before Kubernetes 1.17.
const BETA_REGION: &str = "failure-domain.beta.kubernetes.io/region";
/// Separates the zones in the label of a PersistentVolume.
pub(super) const ZONE_SEPARATOR: &str = "__";

/// The labels that a driver gives to nodes.
pub(super) struct TopologyKeys {
    /// The label of the zone.
    pub(super) zone: &'static str,
    /// The label of the region, if the driver has one.
    pub(super) region: Option<&'static str>,
}

impl TopologyKeys {
    /// The node affinity of `volume` with the driver's labels. What the affinity says takes precedence over the labels
    /// of the PersistentVolume. If the driver has no label for regions, the beta label becomes the current one, because
    /// new nodes have only that.
    pub(super) fn rewrite(&self, volume: &PersistentVolume) -> Option<VolumeNodeAffinity> {
        let mut affinity = volume.spec.node_affinity.clone();
        let labels = &volume.metadata.labels;
        replace_or_add(&mut affinity, [ZONE, BETA_ZONE], self.zone, labels);
        match self.region {
            Some(region) => replace_or_add(&mut affinity, [REGION, BETA_REGION], region, labels),
            None => {
                replace(&mut affinity, &[BETA_REGION], REGION);
            }
        }
        affinity
    }
}

/// Replaces the keys `old` by `new`; if there are none, requires the values of the label with the first of these keys.
fn replace_or_add(affinity: &mut Option<VolumeNodeAffinity>, old: [&str; 2], new: &str, labels: &Strings) {
    if replace(affinity, &old, new) {
        return;
    }
    let values =
        old.iter().find_map(|key| labels.get(*key)).map(|label| values_of(label)).unwrap_or_default();
    if values.is_empty() {
        return;
    }
    let required = affinity.get_or_insert_default().required.get_or_insert_default();
    if required.node_selector_terms.is_empty() {
        required.node_selector_terms.push(NodeSelectorTerm::default());
    }
    for term in &mut required.node_selector_terms {
        term.match_expressions.push(NodeSelectorRequirement {
            key: new.to_owned(),
            operator: "In".to_owned(),
            values: values.clone(),
        });
    }
}

/// Replaces the keys `old` by `new` in every term. Returns whether there was one.
fn replace(affinity: &mut Option<VolumeNodeAffinity>, old: &[&str], new: &str) -> bool {
    let terms = affinity
        .iter_mut()
        .flat_map(|affinity| &mut affinity.required)
        .flat_map(|required| &mut required.node_selector_terms);
    let mut replaced = false;
    for requirement in terms.flat_map(|term| &mut term.match_expressions) {
        if old.contains(&requirement.key.as_str()) {
            new.clone_into(&mut requirement.key);
            replaced = true;
        }
    }
    replaced
}

/// The values in a label, sorted, each once.
fn values_of(label: &str) -> Vec<String> {
    let values: BTreeSet<&str> =
        label.split(ZONE_SEPARATOR).map(str::trim).filter(|value| !value.is_empty()).collect();
    values.into_iter().map(str::to_owned).collect()
}
