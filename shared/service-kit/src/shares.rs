//! Places that nobody can use up: whoever comes with few finds one.
//!
//! A holder gets a place as long as it has fewer than a multiple of those that are still free (the dynamic threshold of Choudhury
//! and Hahne, 1998). Alone, a pod can so have half of the places, and two pods a third each; the more holders there are, the less
//! each may have, and some places are always free for one that has none. Nothing is taken from anybody.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What a holder is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum HolderKind {
    /// A pod: as many as are free.
    Pod,
    /// A namespace: twice as many as are free.
    Namespace,
    /// Who asks: four times as many as are free.
    User,
    /// From where somebody asks: four times as many as are free.
    Address,
}

impl HolderKind {
    const fn factor(self) -> usize {
        match self {
            Self::Pod => 1,
            Self::Namespace => 2,
            Self::User | Self::Address => 4,
        }
    }

    const fn as_str(self) -> &'static str {
        match self {
            Self::Pod => "pod",
            Self::Namespace => "namespace",
            Self::User => "user",
            Self::Address => "address",
        }
    }
}

/// Who has places.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Holder {
    /// What it is.
    pub kind: HolderKind,
    /// Its name.
    pub name: Arc<str>,
}

impl Holder {
    /// One of this kind and name.
    pub fn new(kind: HolderKind, name: impl Into<Arc<str>>) -> Self {
        Self { kind, name: name.into() }
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind.as_str(), self.name)
    }
}

/// Places, with who has them.
#[derive(Debug)]
pub struct Shares {
    places: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    taken: usize,
    by: BTreeMap<Holder, usize>,
}

/// A place, free again when this is dropped.
#[derive(Debug)]
pub struct SharedPlace {
    shares: Arc<Shares>,
    holders: Vec<Holder>,
}

/// Why there is no place.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoPlace {
    /// This holder has its share.
    #[error("{holder} has {count} of {places}, and gets no more while {free} are free")]
    Share {
        /// Who has it.
        holder: Holder,
        /// How many it has.
        count: usize,
        /// How many are free.
        free: usize,
        /// How many there are.
        places: usize,
    },
    /// None is free.
    #[error("all {places} are taken, {count} of them by {holder}")]
    Full {
        /// Who has most.
        holder: Holder,
        /// How many it has.
        count: usize,
        /// How many there are.
        places: usize,
    },
}

impl Shares {
    /// So many places, all free.
    pub fn new(places: usize) -> Arc<Self> {
        Arc::new(Self { places: places.max(1), state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many there are.
    pub fn places(&self) -> usize {
        self.places
    }

    /// How many are taken.
    pub fn taken(&self) -> usize {
        self.state().taken
    }

    /// The holder with most of them, and how many.
    pub fn most(&self) -> Option<(Holder, usize)> {
        self.state().most()
    }

    /// A place for somebody who is all of `holders`.
    ///
    /// # Errors
    /// None is free, or one of `holders` has its share.
    pub fn take(self: &Arc<Self>, holders: Vec<Holder>) -> Result<SharedPlace, NoPlace> {
        let mut state = self.state();
        let (places, free) = (self.places, self.places - state.taken);
        if free == 0 {
            let (holder, count) =
                state.most().unwrap_or_else(|| (Holder::new(HolderKind::User, "nobody known"), 0));
            return Err(NoPlace::Full { holder, count, places });
        }
        for holder in &holders {
            let count = state.by.get(holder).copied().unwrap_or(0);
            if count >= free.saturating_mul(holder.kind.factor()) {
                return Err(NoPlace::Share { holder: holder.clone(), count, free, places });
            }
        }
        state.taken += 1;
        for holder in &holders {
            *state.by.entry(holder.clone()).or_default() += 1;
        }
        drop(state);
        Ok(SharedPlace { shares: Arc::clone(self), holders })
    }
}

impl State {
    fn most(&self) -> Option<(Holder, usize)> {
        // Among equals the first kind, which is the narrowest.
        let most = self.by.iter().rev().max_by_key(|(_, count)| **count);
        most.map(|(holder, count)| (holder.clone(), *count))
    }
}

impl Drop for SharedPlace {
    fn drop(&mut self) {
        let mut state = self.shares.state();
        state.taken -= 1;
        for holder in &self.holders {
            if let Some(count) = state.by.get_mut(holder) {
                *count -= 1;
                if *count == 0 {
                    state.by.remove(holder);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(namespace: &str, name: &str, user: &str) -> Vec<Holder> {
        vec![
            Holder::new(HolderKind::Pod, format!("{namespace}/{name}")),
            Holder::new(HolderKind::Namespace, namespace),
            Holder::new(HolderKind::User, user),
        ]
    }

    /// Takes as many as it gets.
    fn fill(shares: &Arc<Shares>, holders: &[Holder]) -> Vec<SharedPlace> {
        std::iter::from_fn(|| shares.take(holders.to_vec()).ok()).collect()
    }

    #[test]
    fn a_pod_gets_half_two_a_third_each_and_one_that_has_none_always_gets_one() {
        let shares = Shares::new(128);
        let first = fill(&shares, &pod("a", "greedy", "api"));
        assert_eq!(first.len(), 64);
        let second = fill(&shares, &pod("b", "greedy", "api"));
        assert_eq!(second.len(), 32);
        drop(shares.take(pod("c", "modest", "admin")).unwrap());
        assert_eq!(
            shares.take(pod("a", "greedy", "admin")).unwrap_err().to_string(),
            "pod a/greedy has 64 of 128, and gets no more while 32 are free"
        );
        drop(first);
        assert_eq!(shares.taken(), 32);
        drop(second);
        assert_eq!((shares.taken(), shares.most()), (0, None));
        assert!(shares.state().by.is_empty(), "nothing is kept of who has none");
    }

    #[test]
    fn a_tenant_with_many_pods_leaves_places_to_others_and_so_does_a_user() {
        let shares = Shares::new(128);
        let pods: Vec<_> = (0..100).map(|n| pod("tenant", &format!("p{n}"), "api")).collect();
        let mut held = Vec::new();
        for _ in 0..3 {
            held.extend(pods.iter().filter_map(|pod| shares.take(pod.clone()).ok()));
        }
        assert_eq!(held.len(), 86, "two of three");
        let robot: Vec<_> =
            (0..100).filter_map(|n| shares.take(pod(&format!("n{n}"), "p", "robot")).ok()).collect();
        assert_eq!(robot.len(), 34);
        assert_eq!(shares.places() - shares.taken(), 8);
        drop(shares.take(pod("kube-system", "dns", "admin")).unwrap());
    }

    #[test]
    fn whoever_comes_finds_a_place_until_all_are_taken_by_as_many() {
        let shares = Shares::new(4);
        let mut held = Vec::new();
        for n in 0..4 {
            held.push(shares.take(vec![Holder::new(HolderKind::Address, format!("192.0.2.{n}"))]).unwrap());
        }
        let refused = shares.take(vec![Holder::new(HolderKind::Address, "192.0.2.9")]).unwrap_err();
        assert_eq!(refused.to_string(), "all 4 are taken, 1 of them by address 192.0.2.0");
        held.pop();
        assert_eq!(shares.taken(), 3);
        drop(shares.take(vec![Holder::new(HolderKind::Address, "192.0.2.9")]).unwrap());
        let one = Shares::new(0);
        assert_eq!(one.places(), 1);
        drop(one.take(Vec::new()).unwrap());
    }
}
