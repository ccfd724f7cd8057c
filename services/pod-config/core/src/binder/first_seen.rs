//! When each PersistentVolume and claim was first seen. A manifest has no time of creation.

use std::collections::BTreeMap;

use super::Manifests;

/// When each object was first seen, as `metadata.creationTimestamp` has it, by UID.
pub type FirstSeen = BTreeMap<String, String>;

/// When each object of `manifests` was first seen. `known` is from the last decision; `time` is the present.
///
/// An object that has gone is forgotten, so that one that is created again is new, but not before all sources were read. A removal
/// that was not stored does not count, as for a service that was killed meanwhile: `stored` is what the disk has.
pub fn first_seen(
    manifests: &Manifests,
    known: &FirstSeen,
    stored: Option<&FirstSeen>,
    time: &str,
) -> FirstSeen {
    let volumes = manifests.volumes.values().map(|volume| &volume.uid);
    let present = volumes.chain(manifests.claims.values().map(|claim| &claim.uid));
    let since = |uid: &String| {
        let earlier = known.get(uid).or_else(|| stored?.get(uid));
        (uid.clone(), earlier.map_or_else(|| time.to_owned(), Clone::clone))
    };
    let mut all = if manifests.complete { FirstSeen::new() } else { known.clone() };
    all.extend(present.map(since));
    all
}
