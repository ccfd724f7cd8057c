//! A limited number of slots (places), shared so that no holder can use up all of them: a holder with few slots can always
//! get one.
//!
//! A holder gets a slot while it has fewer than a multiple of the free slots (the dynamic threshold of Choudhury and Hahne,
//! 1998). A single pod can thus have half of the slots, and two pods a third each. The more holders there are, the smaller
//! is each share, and some slots always stay free for a new holder. A slot that was given is never taken back.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The kind of a holder, which sets the size of its share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum HolderKind {
    /// A pod: as many slots as are free.
    Pod,
    /// A namespace: twice as many slots as are free.
    Namespace,
    /// The user who sends the request: four times as many slots as are free.
    User,
    /// The address that the request comes from: four times as many slots as are free.
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

/// A holder of slots.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Holder {
    /// What it is.
    pub kind: HolderKind,
    /// Its name.
    pub name: Arc<str>,
}

impl Holder {
    /// A holder of this kind and name.
    pub fn new(kind: HolderKind, name: impl Into<Arc<str>>) -> Self {
        Self { kind, name: name.into() }
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind.as_str(), self.name)
    }
}

/// The slots and their holders.
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

/// A slot. Dropping it frees the slot.
#[derive(Debug)]
pub struct SharedPlace {
    shares: Arc<Shares>,
    holders: Vec<Holder>,
}

/// Why a holder got no slot.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoPlace {
    /// This holder has its full share.
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
    /// No slot is free.
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
    /// Creates this number of slots, all free.
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

    /// Number of slots in use.
    pub fn taken(&self) -> usize {
        self.state().taken
    }

    /// The holder with the most slots, and their number.
    pub fn most(&self) -> Option<(Holder, usize)> {
        self.state().most()
    }

    /// Takes a slot in the name of all `holders` (for example a pod, its namespace and its user).
    ///
    /// # Errors
    /// No slot is free, or one of `holders` has its full share.
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
        // Among equals the first kind, the narrowest one.
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
    fn one_pod_gets_half_of_the_slots_two_a_third_each_and_a_newcomer_one() {
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
    fn a_namespace_or_user_with_many_pods_leaves_slots_to_others() {
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
    fn newcomers_get_a_slot_until_each_slot_has_a_different_holder() {
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
