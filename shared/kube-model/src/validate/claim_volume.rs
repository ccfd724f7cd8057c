//! Volumes through claims: the claim of an `ephemeral` volume, and the names of claims.

use std::collections::BTreeSet;

use serde_json::Value;

use super::json_fields::JsonFields;
use super::{Findings, names};
use crate::quantity::Quantity;
use crate::types::Volume;

const ACCESS_MODES: [&str; 4] = ["ReadOnlyMany", "ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"];

/// The claim of an `ephemeral` volume is called `<pod name>-<volume name>`: that must be a good name, and no other volume of
/// the pod may refer to the claim by it.
pub(super) fn check_claim_names(found: &mut Findings, pod_name: &str, volumes: &[Volume]) {
    let mut created = BTreeSet::new();
    for (index, volume) in volumes.iter().enumerate().filter(|(_, volume)| volume.ephemeral.is_some()) {
        if pod_name.is_empty() || volume.name.is_empty() {
            continue;
        }
        let claim = format!("{pod_name}-{}", volume.name);
        if let Some(detail) = names::dns_subdomain(&claim) {
            let field = format!("spec.volumes[{index}].name");
            found.invalid(field, &volume.name, &format!("PVC name {claim:?}: {detail}"));
        }
        created.insert(claim);
    }
    for (index, volume) in volumes.iter().enumerate() {
        if let Some(claim) = &volume.persistent_volume_claim
            && created.contains(&claim.claim_name)
        {
            let field = format!("spec.volumes[{index}].persistentVolumeClaim.claimName");
            let detail = "must not reference a PVC that gets created for an ephemeral volume";
            found.invalid(field, &claim.claim_name, detail);
        }
    }
}

/// Checks the value of `ephemeral`, which an API server creates a claim from.
pub(super) fn check_ephemeral(found: &mut Findings, at: &str, ephemeral: &Value) {
    let Some(fields) = JsonFields::read(found, at, ephemeral) else { return };
    let at = fields.path("volumeClaimTemplate");
    let Some(template) = fields.value("volumeClaimTemplate") else { return found.required(at, "") };
    let Some(template) = JsonFields::read(found, &at, template) else { return };
    if let Some(metadata) = template.value("metadata") {
        check_metadata(found, &template.path("metadata"), metadata);
    }
    let at = template.path("spec");
    match template.value("spec") {
        Some(spec) => check_claim(found, &at, spec),
        None => check_claim(found, &at, &Value::Object(serde_json::Map::new())),
    }
}

/// A template gives the claim labels and annotations, and nothing else.
fn check_metadata(found: &mut Findings, at: &str, metadata: &Value) {
    let Some(fields) = JsonFields::read(found, at, metadata) else { return };
    for name in fields.names() {
        if !["annotations", "creationTimestamp", "labels"].contains(&name) {
            found.forbidden(fields.path(name), "cannot be set for an ephemeral volume");
        }
    }
}

/// The spec of a claim, as far as it is the same for every class of storage.
fn check_claim(found: &mut Findings, at: &str, spec: &Value) {
    let Some(fields) = JsonFields::read(found, at, spec) else { return };
    let modes = fields.list(found, "accessModes");
    let at = fields.path("accessModes");
    if modes.is_empty() {
        found.required(&at, "at least 1 access mode is required");
    }
    let named: Vec<&str> = modes.iter().map(|mode| mode.as_str().unwrap_or_default()).collect();
    for mode in named.iter().filter(|mode| !ACCESS_MODES.contains(mode)) {
        found.unsupported(&at, mode, &ACCESS_MODES);
    }
    if named.len() > 1 && named.contains(&"ReadWriteOncePod") {
        found.forbidden(&at, "may not use ReadWriteOncePod with other access modes");
    }
    check_size(found, &fields);
    if let Some(class) = fields.text(found, "storageClassName").filter(|class| !class.is_empty()) {
        found.name(fields.path("storageClassName"), class, names::dns_subdomain);
    }
    fields.one_of(found, "volumeMode", &["Block", "Filesystem"]);
}

/// `resources.requests[storage]` of a claim is above zero.
fn check_size(found: &mut Findings, claim: &JsonFields<'_>) {
    let at = format!("{}[storage]", claim.path("resources.requests"));
    let size = claim.value("resources").and_then(|resources| resources.get("requests"));
    let Some(size) = size.and_then(|requests| requests.get("storage")).filter(|size| !size.is_null()) else {
        return found.required(at, "");
    };
    let text = size.as_str().map_or_else(|| size.to_string(), str::to_owned);
    match Quantity::parse(&text) {
        Ok(amount) if amount.value() > 0 => {}
        Ok(_) => found.invalid(at, text, "must be greater than zero"),
        Err(_) => found.invalid(at, text, "must be an amount of bytes, as 10Gi"),
    }
}
