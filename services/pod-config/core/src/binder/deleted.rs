//! Claims that are deleted while they are in use.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::{ClaimKey, DeletedClaim, Records};
use crate::manifest::Kind;
use crate::object::{ObjectKey, StoredObject};

/// The objects of the manifests.
type Objects = BTreeMap<ObjectKey, Arc<StoredObject>>;

/// The deleted claims that stay until they are no longer in `used`, the claims in use on this node, as the protection of claims in
/// use has it (volumes.md §3.4). `before` and `now` are the objects of the last decision and of this one, `time` is the present.
///
/// A claim that is not bound goes at once. Before all sources were read (`complete`) none goes.
pub fn deleted_claims(
    known: &Records,
    before: &Objects,
    now: &Objects,
    used: &BTreeSet<ClaimKey>,
    complete: bool,
    time: &str,
) -> Vec<DeletedClaim> {
    let bound = known.bindings.values().filter(|binding| !binding.released);
    let bound: BTreeSet<ClaimKey> = bound.map(|binding| ClaimKey::of(&binding.claim)).collect();
    let stays = |key: &ClaimKey| {
        let ClaimKey { namespace, name } = key.clone();
        let is_back = now.contains_key(&ObjectKey { kind: Kind::PersistentVolumeClaim, namespace, name });
        !is_back && bound.contains(key) && (used.contains(key) || !complete)
    };
    let earlier = known.deleted.iter().filter(|claim| stays(&claim.key())).cloned();
    let new = before.iter().filter(|(key, _)| key.kind == Kind::PersistentVolumeClaim).filter_map(
        |(key, object)| {
            let (namespace, name) = (key.namespace.clone(), key.name.clone());
            let object = stays(&ClaimKey { namespace: namespace.clone(), name: name.clone() })
                .then(|| serde_json::from_slice(&object.json).ok())??;
            Some(DeletedClaim { namespace, name, since: time.to_owned(), object })
        },
    );
    earlier.chain(new).collect()
}
