//! Which PersistentVolume fits a claim.

use keelson_kube_model::persistent_volume::AccessMode;

use super::named::check_named;
use super::{Binding, Bindings, Claim, ClaimKey, Manifests, NodeFacts, Volume};

/// How many PersistentVolumes a reason names.
const MAX_NAMED: usize = 3;

/// The PersistentVolume for an unbound claim. With `records_lost` only one that is named.
///
/// # Errors
/// Why there is none, for people.
pub(super) fn choose<'a>(
    key: &ClaimKey,
    claim: &Claim,
    manifests: &'a Manifests,
    bindings: &Bindings,
    records_lost: bool,
    node: &NodeFacts,
) -> Result<(String, &'a Volume), String> {
    let volumes = &manifests.volumes;
    let wanted =
        if records_lost { check_named(key, claim, manifests)? } else { claim.spec.volume_name.as_str() };
    if !wanted.is_empty() && !volumes.contains_key(wanted) {
        return Err(format!(
            "spec.volumeName is {wanted}, and no manifest of this node has this PersistentVolume; add it, or correct the name"
        ));
    }
    if volumes.is_empty() {
        return Err("no manifest of this node has a PersistentVolume; add one".to_owned());
    }
    let mut reasons = Vec::new();
    let mut best = None;
    for (name, volume) in volumes.iter().filter(|(name, _)| wanted.is_empty() || *name == wanted) {
        match check(key, claim, volume, bindings.get(name), node) {
            Ok(is_reserved) => {
                let rank = (!is_reserved, volume.spec.capacity.get("storage"), name);
                if best.as_ref().is_none_or(|(other, _)| rank < *other) {
                    best = Some((rank, volume));
                }
            }
            Err(reason) => reasons.push(format!("{name}: {reason}")),
        }
    }
    match best {
        Some(((_, _, name), volume)) => Ok((name.clone(), volume)),
        None => Err(no_volume(&reasons)),
    }
}

fn no_volume(reasons: &[String]) -> String {
    let named = reasons.iter().take(MAX_NAMED).map(String::as_str).collect::<Vec<_>>().join("; ");
    let more = match reasons.len().saturating_sub(MAX_NAMED) {
        0 => String::new(),
        more => format!("; and {more} more"),
    };
    format!("no PersistentVolume fits ({named}{more})")
}

/// Checks that a claim may have the PersistentVolume, whose binding is `binding`. Returns whether it is reserved for the claim.
fn check(
    key: &ClaimKey,
    claim: &Claim,
    volume: &Volume,
    binding: Option<&Binding>,
    node: &NodeFacts,
) -> Result<bool, String> {
    let is_reserved = check_available(key, claim, volume, binding)?;
    check_request(claim, volume)?;
    let affinity = volume.spec.node_affinity.as_ref().and_then(|affinity| affinity.required.as_ref());
    if affinity.is_some_and(|required| !required.matches(&node.name, &node.labels)) {
        return Err(format!("its spec.nodeAffinity does not select this node, {}", node.name));
    }
    // As upstream, the selector does not count when claim and PersistentVolume name each other.
    let is_named = is_reserved || !claim.spec.volume_name.is_empty();
    if !is_named && (claim.spec.data_source.is_some() || claim.spec.data_source_ref.is_some()) {
        return Err("nobody fills it from the data source of the claim; fill it, and write its name in spec.volumeName of \
                    the claim"
            .to_owned());
    }
    match &claim.spec.selector {
        Some(selector) if !is_named && !selector.matches(&volume.labels) => {
            Err("its labels do not match spec.selector of the claim".to_owned())
        }
        Some(_) | None => Ok(is_reserved),
    }
}

/// Checks that no other claim has the PersistentVolume. Returns whether it is reserved for this one.
fn check_available(
    key: &ClaimKey,
    claim: &Claim,
    volume: &Volume,
    binding: Option<&Binding>,
) -> Result<bool, String> {
    let mut is_reserved = false;
    if let Some(reference) = &volume.spec.claim_ref {
        if ClaimKey::of(reference) != *key {
            return Err(format!("its spec.claimRef reserves it for the claim {reference}"));
        }
        if !reference.uid.is_empty() && reference.uid != claim.uid {
            return Err(format!(
                "its spec.claimRef reserves it for a claim {reference} with another UID; remove spec.claimRef.uid"
            ));
        }
        is_reserved = true;
    }
    match binding {
        Some(binding) if !binding.released => Err(format!("it is bound to the claim {}", binding.claim)),
        Some(binding) if ClaimKey::of(&binding.claim) == *key => Ok(true),
        Some(binding) if !is_reserved => Err(format!(
            "it holds the data of the claim {}, which is gone; to give it to another claim, write that claim in its \
             spec.claimRef, or delete the PersistentVolume and create it again",
            binding.claim
        )),
        Some(_) | None => Ok(is_reserved),
    }
}

/// Checks that the PersistentVolume is what the claim asks for.
fn check_request(claim: &Claim, volume: &Volume) -> Result<(), String> {
    let (asked, found) = (&claim.spec, &volume.spec);
    if claim.class != volume.class {
        let class = |class: &str| if class.is_empty() { "none".to_owned() } else { format!("{class:?}") };
        let (found, asked) = (class(&volume.class), class(&claim.class));
        return Err(format!("its storage class is {found}, and the claim asks for {asked}"));
    }
    let attributes = (&found.volume_attributes_class_name, &asked.volume_attributes_class_name);
    if attributes.0 != attributes.1 {
        return Err(format!(
            "its volumeAttributesClassName is {:?}, and that of the claim {:?}",
            attributes.0, attributes.1
        ));
    }
    if asked.volume_mode != found.volume_mode {
        return Err(format!(
            "its volumeMode is {}, and the claim asks for {}",
            found.volume_mode, asked.volume_mode
        ));
    }
    let is_missing = |mode: &&AccessMode| !found.access_modes.contains(mode);
    if let Some(mode) = asked.access_modes.iter().find(is_missing) {
        return Err(format!("it lacks the access mode {mode}"));
    }
    match (asked.resources.requests.get("storage"), found.capacity.get("storage")) {
        (Some(asked), Some(found)) if asked > found => {
            Err(format!("its capacity is {found}, and the claim requests {asked}"))
        }
        (Some(_), Some(_)) => Ok(()),
        (None, _) | (_, None) => Err("its capacity or the request is not known".to_owned()),
    }
}
