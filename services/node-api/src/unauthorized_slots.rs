//! Slots for connections without an authorized request yet. A new connection always gets a slot, and may displace
//! an older one.
//!
//! Each source address has a share of the slots, so an address that opens thousands of connections displaces its own. If all
//! slots are taken, the address with the most slots loses its oldest connection. Some slots are reserved for addresses from which
//! a request was authorized before, so a flood from many addresses does not lock out regular clients.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use keelson_service_kit::CancellationToken;

/// How many known addresses are remembered.
const MAX_KNOWN_SOURCES: usize = 1024;

/// A client's IPv4 address, or the first 64 bits of its IPv6 address: a host chooses the other bits freely.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SourceAddress(IpAddr);

impl SourceAddress {
    pub(crate) fn new(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V6(address) => Self(IpAddr::V6((address.to_bits() & !u128::from(u64::MAX)).into())),
            v4 @ IpAddr::V4(_) => Self(v4),
        }
    }
}

impl std::fmt::Display for SourceAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            IpAddr::V6(_) => write!(f, "{}/64", self.0),
            IpAddr::V4(_) => self.0.fmt(f),
        }
    }
}

#[derive(Debug)]
struct Connection {
    source: SourceAddress,
    /// A request from this address was authorized before.
    is_known: bool,
    displaced: CancellationToken,
}

#[derive(Debug, Default)]
struct State {
    /// By number, the oldest first.
    connections: BTreeMap<u64, Connection>,
    counts: BTreeMap<SourceAddress, usize>,
    /// How many of the connections are from known addresses.
    known: usize,
    next_number: u64,
    displaced: u64,
    /// Addresses from which a request was authorized, the least recent first.
    known_sources: VecDeque<SourceAddress>,
}

/// All slots of a port.
#[derive(Debug)]
pub(crate) struct UnauthorizedSlots {
    /// How many slots there are.
    slots: usize,
    /// How many of them one address may have.
    share: usize,
    /// How many of [`UnauthorizedSlots::slots`] are reserved for known addresses.
    reserve: usize,
    state: Mutex<State>,
}

/// A slot, freed when this is dropped.
#[derive(Debug)]
pub(crate) struct UnauthorizedSlot {
    slots: Arc<UnauthorizedSlots>,
    number: u64,
    source: SourceAddress,
    displaced: CancellationToken,
}

impl UnauthorizedSlots {
    /// The share of an address and the reserve are an eighth of `slots` each.
    pub(crate) fn new(slots: usize) -> Self {
        let slots = slots.max(1);
        let (share, reserve) = ((slots / 8).max(1), slots / 8);
        Self { slots, share, reserve, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A slot for a new connection from `address`; may displace another connection.
    pub(crate) fn acquire(self: &Arc<Self>, address: IpAddr) -> UnauthorizedSlot {
        let source = SourceAddress::new(address);
        let mut state = self.state();
        let is_known = state.known_sources.contains(&source);
        let unknown = state.connections.len() - state.known;
        if state.counts.get(&source).is_some_and(|count| *count >= self.share) {
            state.displace_oldest(|connection| connection.source == source);
        } else if !is_known && unknown >= self.slots - self.reserve {
            state.displace_from_top_source(false);
        } else if state.connections.len() >= self.slots {
            // A known address displaces connections from unknown ones first, as long as there are any.
            state.displace_from_top_source(!is_known || unknown == 0);
        }
        let (number, displaced) = (state.next_number, CancellationToken::new());
        state.next_number += 1;
        *state.counts.entry(source).or_default() += 1;
        state.known += usize::from(is_known);
        state.connections.insert(number, Connection { source, is_known, displaced: displaced.clone() });
        drop(state);
        UnauthorizedSlot { slots: Arc::clone(self), number, source, displaced }
    }

    pub(crate) fn stats(&self) -> SlotStats {
        let state = self.state();
        let top_source =
            state.counts.iter().max_by_key(|(_, count)| **count).map(|(source, count)| (*source, *count));
        SlotStats { taken: state.connections.len(), displaced: state.displaced, top_source }
    }
}

/// How the slots are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SlotStats {
    pub(crate) taken: usize,
    /// Connections displaced since the start.
    pub(crate) displaced: u64,
    /// The address with the most slots, and their number.
    pub(crate) top_source: Option<(SourceAddress, usize)>,
}

impl State {
    /// Displaces the oldest connection that matches.
    fn displace_oldest(&mut self, matches: impl Fn(&Connection) -> bool) {
        let oldest =
            self.connections.iter().find(|(_, connection)| matches(connection)).map(|(number, _)| *number);
        if let Some(connection) = oldest.and_then(|number| self.remove(number)) {
            connection.displaced.cancel();
            self.displaced += 1;
        }
    }

    /// Displaces the oldest connection of the address with the most slots, among known or among unknown addresses.
    fn displace_from_top_source(&mut self, is_known: bool) {
        let mut counts: BTreeMap<SourceAddress, usize> = BTreeMap::new();
        for connection in self.connections.values().filter(|connection| connection.is_known == is_known) {
            *counts.entry(connection.source).or_default() += 1;
        }
        let top = counts.iter().max_by_key(|(_, count)| **count).map(|(source, _)| *source);
        self.displace_oldest(|connection| connection.is_known == is_known && Some(connection.source) == top);
    }

    fn remove(&mut self, number: u64) -> Option<Connection> {
        let connection = self.connections.remove(&number)?;
        self.known -= usize::from(connection.is_known);
        if let Some(count) = self.counts.get_mut(&connection.source) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&connection.source);
            }
        }
        Some(connection)
    }
}

impl UnauthorizedSlot {
    /// The address of the client.
    pub(crate) fn source(&self) -> SourceAddress {
        self.source
    }

    /// Cancelled when a newer connection takes the slot.
    pub(crate) fn displaced(&self) -> CancellationToken {
        self.displaced.clone()
    }

    /// Remembers that a request from this address was authorized.
    pub(crate) fn remember_source(&self) {
        let mut state = self.slots.state();
        state.known_sources.retain(|known| *known != self.source);
        state.known_sources.push_back(self.source);
        if state.known_sources.len() > MAX_KNOWN_SOURCES {
            state.known_sources.pop_front();
        }
    }
}

impl Drop for UnauthorizedSlot {
    fn drop(&mut self) {
        self.slots.state().remove(self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn is_displaced(slot: &UnauthorizedSlot) -> bool {
        slot.displaced().is_cancelled()
    }

    #[test]
    fn flooding_address_displaces_only_its_own_oldest_connections() {
        let slots = Arc::new(UnauthorizedSlots::new(64));
        let other = slots.acquire(address("192.0.2.9"));
        let flood: Vec<_> = (0..1000).map(|_| slots.acquire(address("192.0.2.1"))).collect();
        assert!(!is_displaced(&other));
        let displaced = flood.iter().filter(|slot| is_displaced(slot)).count();
        assert_eq!(displaced, 1000 - 8, "an eighth is its share");
        assert!(
            flood[..992].iter().all(is_displaced) && !flood[992..].iter().any(is_displaced),
            "the oldest are displaced first"
        );
        let stats = slots.stats();
        assert_eq!((stats.taken, stats.displaced), (9, 992));
        assert_eq!(stats.top_source, Some((SourceAddress::new(address("192.0.2.1")), 8)));
        drop(flood);
        assert_eq!(slots.stats().taken, 1, "dropping a displaced slot frees nothing twice");
    }

    #[test]
    fn full_slots_displace_the_oldest_connection_of_the_top_address() {
        let slots = Arc::new(UnauthorizedSlots::new(16));
        let many: Vec<_> = (0..2).map(|_| slots.acquire(address("192.0.2.1"))).collect();
        let each: Vec<_> = (2..14).map(|n| slots.acquire(address(&format!("192.0.2.{n}")))).collect();
        assert_eq!(slots.stats().taken, 14);
        let new = slots.acquire(address("192.0.2.200"));
        assert!(is_displaced(&many[0]) && !is_displaced(&many[1]) && !is_displaced(&new));
        assert!(!each.iter().any(is_displaced));
    }

    #[test]
    fn reserved_slots_are_for_addresses_that_were_authorized_before() {
        let slots = Arc::new(UnauthorizedSlots::new(16));
        let known = slots.acquire(address("198.51.100.1"));
        known.remember_source();
        drop(known);
        let crowd: Vec<_> = (0..40).map(|n| slots.acquire(address(&format!("192.0.2.{n}")))).collect();
        assert_eq!(slots.stats().taken, 14);
        let reserved = [slots.acquire(address("198.51.100.1")), slots.acquire(address("198.51.100.1"))];
        assert_eq!(slots.stats().taken, 16, "no connection was displaced");
        assert_eq!(crowd.iter().filter(|slot| is_displaced(slot)).count(), 26);
        // More unknown addresses displace each other, not the connections in reserved slots.
        let more: Vec<_> = (100..140).map(|n| slots.acquire(address(&format!("192.0.2.{n}")))).collect();
        assert!(!reserved.iter().any(is_displaced));
        assert_eq!(slots.stats().taken, 16);
        drop(more);
    }

    #[test]
    fn ipv6_source_address_is_its_64_bit_prefix() {
        let source = |text: &str| SourceAddress::new(address(text));
        assert_eq!(source("2001:db8:1:2:3:4:5:6"), source("2001:db8:1:2::1"));
        assert_ne!(source("2001:db8:1:2::1"), source("2001:db8:1:3::1"));
        assert_eq!(source("::ffff:192.0.2.1"), source("192.0.2.1"));
        assert_eq!(source("2001:db8:1:2:3::").to_string(), "2001:db8:1:2::/64");
        assert_eq!(source("192.0.2.1").to_string(), "192.0.2.1");
    }

    #[test]
    fn single_slot_goes_to_the_newest_connection() {
        let slots = Arc::new(UnauthorizedSlots::new(1));
        let first = slots.acquire(address("192.0.2.1"));
        let second = slots.acquire(address("192.0.2.2"));
        assert!(is_displaced(&first) && !is_displaced(&second));
    }

    #[test]
    fn remembered_addresses_are_bounded() {
        let slots = Arc::new(UnauthorizedSlots::new(8));
        for n in 0..=MAX_KNOWN_SOURCES {
            let n = u32::try_from(n).unwrap();
            slots.acquire(IpAddr::V4((0x0A00_0000 + n).into())).remember_source();
        }
        let state = slots.state();
        assert_eq!(state.known_sources.len(), MAX_KNOWN_SOURCES);
        assert!(!state.known_sources.contains(&SourceAddress::new(address("10.0.0.0"))));
    }
}
