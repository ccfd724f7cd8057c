//! Garbage collection of images: which ones to remove (runtime-and-resources.md §6.7).

use std::collections::{BTreeMap, BTreeSet};

/// An image as the runtime lists it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ListedImage {
    /// Runtime id.
    pub id: String,
    /// Tags and digests.
    pub names: Vec<String>,
    /// Size in the runtime's list; layers shared with other images are counted for each of them.
    pub bytes: u64,
    /// Pinned by the runtime or the operator: never removed.
    pub pinned: bool,
}

impl ListedImage {
    /// Whether one of these ids, tags and digests refers to this image.
    fn is_among(&self, references: &BTreeSet<String>) -> bool {
        references.contains(&self.id) || self.names.iter().any(|name| references.contains(name))
    }
}

/// When images are removed. Ages are in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageGcPolicy {
    /// Usage in percent at which removal begins; 100: never.
    pub high_percent: u64,
    /// Usage in percent at which removal ends.
    pub low_percent: u64,
    /// An image is kept for this long after it was first seen.
    pub minimum_age: i64,
    /// An image is removed after this long without use; 0: never.
    pub maximum_age: i64,
}

impl ImageGcPolicy {
    /// Whether images are removed only on request.
    pub const fn is_off(&self) -> bool {
        self.high_percent == 100 && self.maximum_age == 0
    }
}

/// The file system of the images, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskSpace {
    /// Total size.
    pub capacity: u64,
    /// Free bytes.
    pub available: u64,
}

impl DiskSpace {
    /// Used space in percent, rounded up. A file system of size 0 counts as full.
    pub fn used_percent(&self) -> u64 {
        let free = u128::from(self.available.min(self.capacity)) * 100 / u128::from(self.capacity.max(1));
        100 - u64::try_from(free).unwrap_or(100).min(100)
    }

    /// The bytes that have to be freed; `None` below the high threshold.
    fn bytes_to_free(&self, policy: &ImageGcPolicy) -> Option<u64> {
        if policy.high_percent == 100 || self.used_percent() < policy.high_percent {
            return None;
        }
        let wanted = u128::from(self.capacity) * u128::from(100 - policy.low_percent.min(100)) / 100;
        let missing = wanted.saturating_sub(u128::from(self.available));
        Some(u64::try_from(missing).unwrap_or(u64::MAX))
    }
}

/// How much to remove.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Goal {
    /// Down to the low threshold, if the high one is reached.
    Thresholds(DiskSpace),
    /// Only images above the maximum age: the thresholds are off.
    Age,
    /// Images of this many bytes, by their listed sizes.
    Bytes(u64),
    /// Every image that may be removed.
    Everything,
}

/// When images were first seen and last used. Times are nanoseconds of one clock of the caller's.
#[derive(Debug, Default)]
pub struct ImageUsage {
    /// When the first list was recorded: use before that is unknown.
    first_listed_at: Option<i64>,
    known: BTreeMap<String, ImageRecord>,
}

#[derive(Debug, Clone)]
struct ImageRecord {
    listed: ListedImage,
    first_seen: i64,
    last_used: Option<i64>,
}

impl ImageUsage {
    /// Records a complete list of images; images that are not in it are forgotten.
    pub fn record_list(&mut self, images: Vec<ListedImage>, now: i64) {
        self.first_listed_at.get_or_insert(now);
        let mut previous = std::mem::take(&mut self.known);
        for listed in images {
            let known = previous.remove(&listed.id);
            let (first_seen, last_used) = known.map_or((now, None), |k| (k.first_seen, k.last_used));
            self.known.insert(listed.id.clone(), ImageRecord { listed, first_seen, last_used });
        }
    }

    /// Marks images as used now. `references` are ids, tags and digests.
    pub fn mark_used(&mut self, references: &BTreeSet<String>, now: i64) {
        for known in self.known.values_mut().filter(|known| known.listed.is_among(references)) {
            known.last_used = Some(now);
        }
    }
}

/// An image that may be removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// Runtime id.
    pub id: String,
    /// Bytes counted as freed.
    pub bytes: u64,
}

/// What to remove.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ImageGcPlan {
    /// Images above the maximum age: all of them are removed.
    pub expired: Vec<Candidate>,
    /// Images to remove for space, in this order, until `bytes_to_free` bytes are freed.
    pub for_space: Vec<Candidate>,
    /// Bytes that both lists together have to free.
    pub bytes_to_free: u64,
}

impl ImageGcPlan {
    /// Whether there is nothing to remove.
    pub fn is_empty(&self) -> bool {
        self.expired.is_empty() && self.bytes_to_free == 0
    }
}

/// Decides which images may be removed: the least recently used first; of equals, the one seen first.
///
/// `references` are the ids, tags and digests of images that containers use, dead ones included, and that pods want.
/// These and pinned images are never removed. An image that was never used counts as unused since it was first seen.
pub fn plan_image_gc(
    usage: &ImageUsage,
    references: &BTreeSet<String>,
    policy: &ImageGcPolicy,
    goal: Goal,
    now: i64,
) -> ImageGcPlan {
    let mut removable: Vec<&ImageRecord> =
        usage.known.values().filter(|k| !k.listed.pinned && !k.listed.is_among(references)).collect();
    removable.sort_by_key(|k| (k.last_used, k.first_seen));
    let observed_for = usage.first_listed_at.map_or(0, |first_listed_at| now - first_listed_at);
    let too_old = |k: &ImageRecord| {
        policy.maximum_age > 0
            && observed_for > policy.maximum_age
            && now - k.last_used.unwrap_or(k.first_seen) > policy.maximum_age
    };
    let (expired, removable): (Vec<&ImageRecord>, Vec<&ImageRecord>) =
        removable.into_iter().partition(|k| too_old(k));
    let bytes_to_free = match goal {
        Goal::Thresholds(space) => space.bytes_to_free(policy).unwrap_or(0),
        Goal::Age => 0,
        Goal::Bytes(bytes) => bytes,
        Goal::Everything => u64::MAX,
    };
    let candidate = |k: &ImageRecord| Candidate { id: k.listed.id.clone(), bytes: k.listed.bytes };
    let past_minimum_age = removable.into_iter().filter(|k| now - k.first_seen >= policy.minimum_age);
    ImageGcPlan {
        expired: expired.into_iter().map(candidate).collect(),
        for_space: if bytes_to_free == 0 { Vec::new() } else { past_minimum_age.map(candidate).collect() },
        bytes_to_free,
    }
}

#[cfg(test)]
mod tests;
