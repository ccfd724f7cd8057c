//! Which claims are in use on this node, and by what (volumes.md §3.4): a deleted claim in use stays.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::{Bindings, ClaimKey};

/// What volume-manager has reported about the claims in use.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Reports {
    /// It never reports: it is of an earlier release. Then the claims of the desired pods are in use.
    #[default]
    Never,
    /// It reports, and has not done so since it or this service started: every bound claim counts as in use.
    Awaited,
    /// Its last complete report.
    Known(Report),
}

/// A complete report of volume-manager. The values name what uses the claim, for people.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// The claims whose volumes are mounted or may be.
    pub claims: BTreeMap<ClaimKey, String>,
    /// The PersistentVolumes that are mounted or may be, by name, where volume-manager does not know the claim: those of a pod
    /// that nobody knows any more.
    pub volumes: BTreeMap<String, String>,
}

/// What uses a claim. The text is a sentence part: `the claim is held by …`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Holder {
    /// A pod of the sources names it.
    DesiredPod,
    /// What volume-manager has reported.
    Reported(String),
    /// Perhaps something: volume-manager has not reported yet.
    NotReported,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DesiredPod => f.write_str("a pod of this node that names it"),
            Self::Reported(user) => f.write_str(user),
            Self::NotReported => {
                f.write_str("volume-manager, which has not reported yet what it has mounted")
            }
        }
    }
}

/// What uses each claim. `by_pods` are the claims that desired pods name; what is mounted goes before that, as it stays longer.
pub fn holders(
    by_pods: &BTreeSet<ClaimKey>,
    reports: &Reports,
    bindings: &Bindings,
) -> BTreeMap<ClaimKey, Holder> {
    let bound = || bindings.iter().filter(|(_, binding)| !binding.released);
    let mut holders: BTreeMap<ClaimKey, Holder> = match reports {
        Reports::Never => BTreeMap::new(),
        Reports::Awaited => {
            bound().map(|(_, binding)| (ClaimKey::of(&binding.claim), Holder::NotReported)).collect()
        }
        Reports::Known(Report { claims, volumes }) => {
            let of_volume = |(name, binding): (&String, &super::Binding)| {
                Some((ClaimKey::of(&binding.claim), Holder::Reported(volumes.get(name)?.clone())))
            };
            let named = claims.iter().map(|(key, user)| (key.clone(), Holder::Reported(user.clone())));
            bound().filter_map(of_volume).chain(named).collect()
        }
    };
    for key in by_pods {
        holders.entry(key.clone()).or_insert(Holder::DesiredPod);
    }
    holders
}
