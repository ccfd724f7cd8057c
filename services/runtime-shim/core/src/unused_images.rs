//! Which images to remove (runtime-and-resources.md §6.7).

use std::collections::{BTreeMap, BTreeSet};

/// An image as the runtime lists it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ListedImage {
    /// Runtime id.
    pub id: String,
    /// Tags and digests.
    pub names: Vec<String>,
    /// What it is listed with; layers that other images share are counted by each.
    pub bytes: u64,
    /// The runtime or the operator wants it kept.
    pub pinned: bool,
}

impl ListedImage {
    /// Whether one of these ids, tags and digests means this image.
    fn is_among(&self, references: &BTreeSet<String>) -> bool {
        references.contains(&self.id) || self.names.iter().any(|name| references.contains(name))
    }
}

/// When images are removed. Ages are in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// Usage in percent at which removal begins; 100: never.
    pub high_percent: u64,
    /// Usage in percent that is to be reached.
    pub low_percent: u64,
    /// For so long after it was first seen an image stays.
    pub minimum_age: i64,
    /// After so long without use an image goes; 0: never.
    pub maximum_age: i64,
}

impl Policy {
    /// Whether nothing is ever removed without an order.
    pub const fn is_off(&self) -> bool {
        self.high_percent == 100 && self.maximum_age == 0
    }
}

/// The file system of the images, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Space {
    /// Its size.
    pub capacity: u64,
    /// What is free of it.
    pub available: u64,
}

impl Space {
    /// How much of it is used, in percent, rounded up. An empty file system is full.
    pub fn used_percent(&self) -> u64 {
        let free = u128::from(self.available.min(self.capacity)) * 100 / u128::from(self.capacity.max(1));
        100 - u64::try_from(free).unwrap_or(100).min(100)
    }

    /// The bytes that have to be freed, `None` below the high threshold.
    fn needed(&self, policy: &Policy) -> Option<u64> {
        if policy.high_percent == 100 || self.used_percent() < policy.high_percent {
            return None;
        }
        let wanted = u128::from(self.capacity) * u128::from(100 - policy.low_percent.min(100)) / 100;
        let missing = wanted.saturating_sub(u128::from(self.available));
        Some(u64::try_from(missing).unwrap_or(u64::MAX))
    }
}

/// How much is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Demand {
    /// What the thresholds say.
    Thresholds(Space),
    /// Only what is too old: the thresholds are off.
    Age,
    /// Images of so many bytes, as they are listed.
    Bytes(u64),
    /// Every image that may go.
    Everything,
}

/// When images were seen and used. Every moment is nanoseconds of one clock of the caller's.
#[derive(Debug, Default)]
pub struct ImageBook {
    /// When the first look was: what happened before is not known.
    began: Option<i64>,
    known: BTreeMap<String, Known>,
}

#[derive(Debug, Clone)]
struct Known {
    listed: ListedImage,
    first_seen: i64,
    last_used: Option<i64>,
}

impl ImageBook {
    /// Takes in a whole list of images; those that it does not name are forgotten.
    pub fn list(&mut self, images: Vec<ListedImage>, now: i64) {
        self.began.get_or_insert(now);
        let mut before = std::mem::take(&mut self.known);
        for listed in images {
            let known = before.remove(&listed.id);
            let (first_seen, last_used) = known.map_or((now, None), |k| (k.first_seen, k.last_used));
            self.known.insert(listed.id.clone(), Known { listed, first_seen, last_used });
        }
    }

    /// What is used now, as ids, tags and digests.
    pub fn used(&mut self, references: &BTreeSet<String>, now: i64) {
        for known in self.known.values_mut().filter(|known| known.listed.is_among(references)) {
            known.last_used = Some(now);
        }
    }
}

/// An image that may go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// Runtime id.
    pub id: String,
    /// What is counted as freed.
    pub bytes: u64,
}

/// What to remove.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ImagePlan {
    /// Unused for too long: all of them.
    pub old: Vec<Candidate>,
    /// For space: in this order, until `needed` bytes are freed.
    pub spare: Vec<Candidate>,
    /// Bytes that have to be freed by both.
    pub needed: u64,
}

impl ImagePlan {
    /// Whether nothing is asked for.
    pub fn is_empty(&self) -> bool {
        self.old.is_empty() && self.needed == 0
    }
}

/// Decides which images may go, the least recently used first, and of those the one that was seen first.
///
/// `references` are the ids, tags and digests of what containers use, dead ones included, and of what pods want;
/// none of these goes, and nothing that is pinned. An image that was never used counts as unused since it was seen.
pub fn plan_images(
    book: &ImageBook,
    references: &BTreeSet<String>,
    policy: &Policy,
    demand: Demand,
    now: i64,
) -> ImagePlan {
    let mut free: Vec<&Known> =
        book.known.values().filter(|k| !k.listed.pinned && !k.listed.is_among(references)).collect();
    free.sort_by_key(|k| (k.last_used, k.first_seen));
    let watched = book.began.map_or(0, |began| now - began);
    let too_old = |k: &Known| {
        policy.maximum_age > 0
            && watched > policy.maximum_age
            && now - k.last_used.unwrap_or(k.first_seen) > policy.maximum_age
    };
    let (old, free): (Vec<&Known>, Vec<&Known>) = free.into_iter().partition(|k| too_old(k));
    let needed = match demand {
        Demand::Thresholds(space) => space.needed(policy).unwrap_or(0),
        Demand::Age => 0,
        Demand::Bytes(bytes) => bytes,
        Demand::Everything => u64::MAX,
    };
    let candidate = |k: &Known| Candidate { id: k.listed.id.clone(), bytes: k.listed.bytes };
    let grown = free.into_iter().filter(|k| now - k.first_seen >= policy.minimum_age);
    ImagePlan {
        old: old.into_iter().map(candidate).collect(),
        spare: if needed == 0 { Vec::new() } else { grown.map(candidate).collect() },
        needed,
    }
}

#[cfg(test)]
mod tests;
