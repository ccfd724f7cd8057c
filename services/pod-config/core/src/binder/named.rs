//! What is bound after the records of bindings were lost: only what the user names.

use super::{Claim, ClaimKey, Manifests};

/// The PersistentVolume that the claim names, or that names the claim.
///
/// # Errors
/// Nothing is named, or several different ones are; for people.
pub(super) fn check_named<'a>(
    key: &ClaimKey,
    claim: &'a Claim,
    manifests: &'a Manifests,
) -> Result<&'a str, String> {
    let wanted = claim.spec.volume_name.as_str();
    let reserved: Vec<&str> = manifests
        .volumes
        .iter()
        .filter(|(_, volume)| volume.spec.claim_ref.as_ref().is_some_and(|of| ClaimKey::of(of) == *key))
        .map(|(name, _)| name.as_str())
        .collect();
    match (wanted, &reserved[..]) {
        ("", []) => Err(format!(
            "{LOST}, so it is not known which PersistentVolume has the data of the claim {key}; write its name in \
             spec.volumeName of the claim, or the claim in its spec.claimRef"
        )),
        ("", [only]) => Ok(only),
        ("", _) => Err(format!(
            "{LOST}, and spec.claimRef of several PersistentVolumes names the claim {key}: {}; write the right one in \
             spec.volumeName of the claim",
            reserved.join(", ")
        )),
        (wanted, []) => match other_claim_of(key, wanted, manifests) {
            Some(other) => Err(format!(
                "{LOST}, and the claims {key} and {other} both name the PersistentVolume {wanted}; write the right one in \
                 spec.claimRef of the PersistentVolume"
            )),
            None => Ok(wanted),
        },
        (wanted, reserved) if reserved == [wanted] => Ok(wanted),
        (wanted, reserved) => Err(format!(
            "{LOST}, and spec.volumeName of the claim {key} is {wanted}, while spec.claimRef of other PersistentVolumes names \
             the claim: {}; correct what is wrong",
            reserved.iter().filter(|name| **name != wanted).copied().collect::<Vec<_>>().join(", ")
        )),
    }
}

const LOST: &str = "the records of bindings are lost on this node";

/// Another claim that names the PersistentVolume.
fn other_claim_of<'a>(key: &ClaimKey, volume: &str, manifests: &'a Manifests) -> Option<&'a ClaimKey> {
    let names_it = |(other, claim): &(&ClaimKey, &Claim)| *other != key && claim.spec.volume_name == volume;
    manifests.claims.iter().find(names_it).map(|(other, _)| other)
}
