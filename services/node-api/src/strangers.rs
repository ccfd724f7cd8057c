//! The places of clients that nobody knows yet: whoever comes gets one, and the one that has had its place longest makes room.
//!
//! An address has a share of the places, so that one that opens thousands of connections displaces its own. When all are taken, the
//! address that has most of them loses its oldest. A part of the places is kept for addresses from which somebody was let in before,
//! so that a flood from many addresses does not keep out those who come every day.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use keelson_service_kit::CancellationToken;

/// How many addresses are remembered from which somebody was let in.
const REMEMBERED: usize = 1024;

/// A client's address as far as it is its own: of IPv6 the first 64 bits, the rest of which a host chooses freely.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Source(IpAddr);

impl Source {
    pub(crate) fn of(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V6(address) => Self(IpAddr::V6((address.to_bits() & !u128::from(u64::MAX)).into())),
            v4 @ IpAddr::V4(_) => Self(v4),
        }
    }
}

impl std::fmt::Display for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            IpAddr::V6(_) => write!(f, "{}/64", self.0),
            IpAddr::V4(_) => self.0.fmt(f),
        }
    }
}

#[derive(Debug)]
struct Stranger {
    source: Source,
    /// Somebody was let in from there before.
    is_known: bool,
    leave: CancellationToken,
}

#[derive(Debug, Default)]
struct State {
    /// By the order in which they came.
    held: BTreeMap<u64, Stranger>,
    counts: BTreeMap<Source, usize>,
    /// How many of them are of known addresses.
    known: usize,
    next: u64,
    displaced: u64,
    /// Addresses from which somebody was let in, the one that was longest ago first.
    let_in: VecDeque<Source>,
}

/// All the places.
#[derive(Debug)]
pub(crate) struct Strangers {
    /// Of all addresses.
    places: usize,
    /// Of one address.
    share: usize,
    /// Those of [`Strangers::places`] that only addresses have which are known.
    reserve: usize,
    state: Mutex<State>,
}

/// A place, free again when this is dropped.
#[derive(Debug)]
pub(crate) struct StrangerPlace {
    strangers: Arc<Strangers>,
    number: u64,
    source: Source,
    leave: CancellationToken,
}

impl Strangers {
    /// So many places: an eighth of them for one address, and as many in reserve.
    pub(crate) fn new(places: usize) -> Self {
        let places = places.max(1);
        let (share, reserve) = ((places / 8).max(1), places / 8);
        Self { places, share, reserve, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for whoever comes from `address`; somebody else may lose it.
    pub(crate) fn take(self: &Arc<Self>, address: IpAddr) -> StrangerPlace {
        let source = Source::of(address);
        let mut state = self.state();
        let is_known = state.let_in.contains(&source);
        let unknown = state.held.len() - state.known;
        if state.counts.get(&source).is_some_and(|count| *count >= self.share) {
            state.displace(|stranger| stranger.source == source);
        } else if !is_known && unknown >= self.places - self.reserve {
            state.displace_of_most(false);
        } else if state.held.len() >= self.places {
            // Who is unknown makes room first, as far as they have more than what is theirs.
            state.displace_of_most(!is_known || unknown == 0);
        }
        let (number, leave) = (state.next, CancellationToken::new());
        state.next += 1;
        *state.counts.entry(source).or_default() += 1;
        state.known += usize::from(is_known);
        state.held.insert(number, Stranger { source, is_known, leave: leave.clone() });
        drop(state);
        StrangerPlace { strangers: Arc::clone(self), number, source, leave }
    }

    /// How many are taken, how many were displaced since the start, and the address that has most.
    pub(crate) fn look(&self) -> Look {
        let state = self.state();
        let most =
            state.counts.iter().max_by_key(|(_, count)| **count).map(|(source, count)| (*source, *count));
        Look { taken: state.held.len(), displaced: state.displaced, most }
    }
}

/// How the places stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Look {
    pub(crate) taken: usize,
    pub(crate) displaced: u64,
    pub(crate) most: Option<(Source, usize)>,
}

impl State {
    /// The oldest of whom `is_meant` is to leave.
    fn displace(&mut self, is_meant: impl Fn(&Stranger) -> bool) {
        let oldest = self.held.iter().find(|(_, stranger)| is_meant(stranger)).map(|(number, _)| *number);
        if let Some(stranger) = oldest.and_then(|number| self.forget(number)) {
            stranger.leave.cancel();
            self.displaced += 1;
        }
    }

    /// The oldest of the address that has most places, among known addresses or the others.
    fn displace_of_most(&mut self, is_known: bool) {
        let mut counts: BTreeMap<Source, usize> = BTreeMap::new();
        for stranger in self.held.values().filter(|stranger| stranger.is_known == is_known) {
            *counts.entry(stranger.source).or_default() += 1;
        }
        let most = counts.iter().max_by_key(|(_, count)| **count).map(|(source, _)| *source);
        self.displace(|stranger| stranger.is_known == is_known && Some(stranger.source) == most);
    }

    fn forget(&mut self, number: u64) -> Option<Stranger> {
        let stranger = self.held.remove(&number)?;
        self.known -= usize::from(stranger.is_known);
        if let Some(count) = self.counts.get_mut(&stranger.source) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&stranger.source);
            }
        }
        Some(stranger)
    }
}

impl StrangerPlace {
    /// Where the client comes from.
    pub(crate) fn source(&self) -> Source {
        self.source
    }

    /// Cancelled when somebody else has the place now.
    pub(crate) fn leave(&self) -> CancellationToken {
        self.leave.clone()
    }

    /// Somebody was let in from there.
    pub(crate) fn remember(&self) {
        let mut state = self.strangers.state();
        state.let_in.retain(|known| *known != self.source);
        state.let_in.push_back(self.source);
        if state.let_in.len() > REMEMBERED {
            state.let_in.pop_front();
        }
    }
}

impl Drop for StrangerPlace {
    fn drop(&mut self) {
        self.strangers.state().forget(self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn has_left(place: &StrangerPlace) -> bool {
        place.leave().is_cancelled()
    }

    #[test]
    fn an_address_that_floods_displaces_its_own_oldest_and_nobody_else() {
        let strangers = Arc::new(Strangers::new(64));
        let other = strangers.take(address("192.0.2.9"));
        let flood: Vec<_> = (0..1000).map(|_| strangers.take(address("192.0.2.1"))).collect();
        assert!(!has_left(&other));
        let left = flood.iter().filter(|place| has_left(place)).count();
        assert_eq!(left, 1000 - 8, "an eighth is its share");
        assert!(
            flood[..992].iter().all(has_left) && !flood[992..].iter().any(has_left),
            "the oldest goes first"
        );
        let look = strangers.look();
        assert_eq!((look.taken, look.displaced), (9, 992));
        assert_eq!(look.most, Some((Source::of(address("192.0.2.1")), 8)));
        drop(flood);
        assert_eq!(strangers.look().taken, 1, "who has left and is dropped frees nothing twice");
    }

    #[test]
    fn when_all_places_are_taken_the_address_with_most_of_them_loses_one() {
        let strangers = Arc::new(Strangers::new(16));
        let many: Vec<_> = (0..2).map(|_| strangers.take(address("192.0.2.1"))).collect();
        let each: Vec<_> = (2..14).map(|n| strangers.take(address(&format!("192.0.2.{n}")))).collect();
        assert_eq!(strangers.look().taken, 14);
        let new = strangers.take(address("192.0.2.200"));
        assert!(has_left(&many[0]) && !has_left(&many[1]) && !has_left(&new));
        assert!(!each.iter().any(has_left));
    }

    #[test]
    fn a_part_of_the_places_is_for_addresses_that_somebody_was_let_in_from() {
        let strangers = Arc::new(Strangers::new(16));
        let known = strangers.take(address("198.51.100.1"));
        known.remember();
        drop(known);
        let crowd: Vec<_> = (0..40).map(|n| strangers.take(address(&format!("192.0.2.{n}")))).collect();
        assert_eq!(strangers.look().taken, 14);
        let back = [strangers.take(address("198.51.100.1")), strangers.take(address("198.51.100.1"))];
        assert_eq!(strangers.look().taken, 16, "nobody had to make room");
        assert_eq!(crowd.iter().filter(|place| has_left(place)).count(), 26);
        // More from the crowd take places of the crowd's: who came in reserve stays.
        let more: Vec<_> = (100..140).map(|n| strangers.take(address(&format!("192.0.2.{n}")))).collect();
        assert!(!back.iter().any(has_left));
        assert_eq!(strangers.look().taken, 16);
        drop(more);
    }

    #[test]
    fn a_host_has_one_share_whatever_it_chooses_of_its_address() {
        let source = |text: &str| Source::of(address(text));
        assert_eq!(source("2001:db8:1:2:3:4:5:6"), source("2001:db8:1:2::1"));
        assert_ne!(source("2001:db8:1:2::1"), source("2001:db8:1:3::1"));
        assert_eq!(source("::ffff:192.0.2.1"), source("192.0.2.1"));
        assert_eq!(source("2001:db8:1:2:3::").to_string(), "2001:db8:1:2::/64");
        assert_eq!(source("192.0.2.1").to_string(), "192.0.2.1");
    }

    #[test]
    fn one_place_is_enough_for_one_at_a_time() {
        let strangers = Arc::new(Strangers::new(1));
        let first = strangers.take(address("192.0.2.1"));
        let second = strangers.take(address("192.0.2.2"));
        assert!(has_left(&first) && !has_left(&second));
    }

    #[test]
    fn only_so_many_addresses_are_remembered() {
        let strangers = Arc::new(Strangers::new(8));
        for n in 0..=REMEMBERED {
            let n = u32::try_from(n).unwrap();
            strangers.take(IpAddr::V4((0x0A00_0000 + n).into())).remember();
        }
        let state = strangers.state();
        assert_eq!(state.let_in.len(), REMEMBERED);
        assert!(!state.let_in.contains(&Source::of(address("10.0.0.0"))));
    }
}
