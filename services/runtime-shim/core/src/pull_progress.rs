//! Whether a pull makes progress or is stalled, from the blobs that the runtime is fetching.
//!
//! CRI reports nothing about a pull before its end. containerd's content service lists every blob that is being
//! written: those of all pulls together, and those that an earlier pull left incomplete. From that follows:
//! - The bytes received are those of the blobs that grow, of all current pulls.
//! - A pull is stalled when no blob has grown for a while. A blob of one pull counts as progress of all of them.
//! - containerd writes a blob in steps of 1 MiB, so a blob that takes longer than the limit for one step is stalled.
//! - When there is nothing left to fetch, the layers are being unpacked. That is the node's own work and has no limit.
//! - When only blobs remain that have not grown, they may be leftovers of an earlier pull. The limit is then
//!   [`AMBIGUOUS_FACTOR`] times as long.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::size_text::format_size;

/// Factor of the limit while a stalled pull and one that unpacks next to leftovers look the same.
const AMBIGUOUS_FACTOR: i64 = 10;

/// A blob that is being written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blob {
    /// The runtime's name of the blob.
    pub name: String,
    /// Bytes received.
    pub bytes: u64,
    /// Size in bytes; 0: unknown.
    pub total: u64,
}

/// The phase of a pull.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PullPhase {
    /// Waiting for the registry; nothing was received yet.
    Connecting,
    /// Receiving blobs.
    Fetching {
        /// Bytes received.
        bytes: u64,
        /// Bytes of these blobs in total; 0: unknown.
        total: u64,
        /// Number of these blobs.
        blobs: usize,
    },
    /// Everything was received.
    Unpacking,
}

impl PullPhase {
    /// Text for people, shown after `pulling: `.
    pub fn text(&self) -> String {
        match self {
            Self::Connecting => "waiting for the registry".to_owned(),
            Self::Unpacking => "unpacking".to_owned(),
            Self::Fetching { bytes, total, blobs } => {
                let of = if *total == 0 { String::new() } else { format!(" of {}", format_size(*total)) };
                let noun = if *blobs == 1 { "layer on its way" } else { "layers on their way" };
                format!("{}{of} ({blobs} {noun})", format_size(*bytes))
            }
        }
    }
}

/// Tracks the progress of one pull. Times are nanoseconds of one clock of the caller's.
#[derive(Debug)]
pub struct ProgressTracker {
    /// Blobs of the first observation that have not grown since; `None` before it.
    initial: Option<BTreeMap<String, u64>>,
    last: BTreeMap<String, Blob>,
    progressed_at: i64,
    /// Whether a blob has appeared or grown since the first observation.
    progressed: bool,
}

impl ProgressTracker {
    /// A pull that begins now.
    pub const fn new(now: i64) -> Self {
        Self { initial: None, last: BTreeMap::new(), progressed_at: now, progressed: false }
    }

    /// Records the blobs that are being written now.
    pub fn observe(&mut self, blobs: Vec<Blob>, now: i64) -> PullPhase {
        let listed: BTreeMap<String, Blob> =
            blobs.into_iter().map(|blob| (blob.name.clone(), blob)).collect();
        if let Some(initial) = &mut self.initial {
            let grown =
                listed.values().any(|b| self.last.get(&b.name).is_none_or(|last| last.bytes != b.bytes));
            // A blob that is no longer listed is complete.
            let completed = self.last.keys().any(|name| !listed.contains_key(name));
            if grown || completed {
                self.progressed_at = now;
                self.progressed = true;
            }
            initial.retain(|name, bytes| listed.get(name).is_some_and(|blob| blob.bytes == *bytes));
        } else {
            self.initial = Some(listed.iter().map(|(name, blob)| (name.clone(), blob.bytes)).collect());
        }
        self.last = listed;
        self.phase()
    }

    fn own_blobs(&self) -> impl Iterator<Item = &Blob> {
        let initial = self.initial.as_ref();
        self.last.values().filter(move |blob| initial.is_none_or(|initial| !initial.contains_key(&blob.name)))
    }

    fn phase(&self) -> PullPhase {
        let (mut bytes, mut total, mut blobs) = (0_u64, 0_u64, 0);
        for blob in self.own_blobs() {
            bytes = bytes.saturating_add(blob.bytes);
            total = total.saturating_add(blob.total);
            blobs += 1;
        }
        match (blobs, self.progressed) {
            (0, false) => PullPhase::Connecting,
            (0, true) => PullPhase::Unpacking,
            _ => PullPhase::Fetching { bytes, total, blobs },
        }
    }

    /// The message for a pull that has to be cancelled: it made no progress for `limit` nanoseconds.
    pub fn stalled(&self, limit: i64, now: i64) -> Option<String> {
        let phase = self.phase();
        let limit = match phase {
            PullPhase::Connecting | PullPhase::Fetching { .. } => limit,
            PullPhase::Unpacking if self.last.is_empty() => return None,
            PullPhase::Unpacking => limit.saturating_mul(AMBIGUOUS_FACTOR),
        };
        if now - self.progressed_at < limit {
            return None;
        }
        let limit = Duration::from_nanos(u64::try_from(limit).unwrap_or(0));
        let progress = match phase {
            PullPhase::Connecting => "the registry has not answered".to_owned(),
            other => other.text(),
        };
        let limit = crate::image::go_duration(limit);
        Some(format!("no progress within {limit}: {progress}; the pull was cancelled and will be retried"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: i64 = 60;

    fn blob(name: &str, bytes: u64) -> Blob {
        Blob { name: name.into(), bytes, total: 4 << 20 }
    }

    /// A pull that was observed once before anything was received.
    fn started(leftovers: &[Blob]) -> ProgressTracker {
        let mut watch = ProgressTracker::new(0);
        assert_eq!(watch.observe(leftovers.to_vec(), 0), PullPhase::Connecting);
        watch
    }

    #[test]
    fn slow_pull_with_progress_is_never_cancelled() {
        let mut watch = started(&[]);
        for n in 1..1_000 {
            let now = i64::try_from(n).unwrap() * (LIMIT - 1);
            assert!(matches!(watch.observe(vec![blob("a", n)], now), PullPhase::Fetching { blobs: 1, .. }));
            assert_eq!(watch.stalled(LIMIT, now + LIMIT - 1), None);
        }
    }

    #[test]
    fn stalled_pull_is_cancelled_and_reports_its_progress() {
        let mut watch = started(&[]);
        watch.observe(vec![blob("a", 1 << 20), blob("b", 1 << 19)], 5);
        let phase = watch.observe(vec![blob("a", 1 << 20), blob("b", 1 << 19)], 30);
        assert_eq!(phase, PullPhase::Fetching { bytes: 3 << 19, total: 8 << 20, blobs: 2 });
        assert_eq!(watch.stalled(LIMIT, 64), None);
        let text = watch.stalled(LIMIT, 65).unwrap();
        assert!(text.contains("1.5 MiB of 8.0 MiB (2 layers on their way)"), "{text}");
    }

    #[test]
    fn pull_is_cancelled_when_the_registry_never_answers() {
        let mut watch = started(&[]);
        assert_eq!(watch.observe(vec![], 59), PullPhase::Connecting);
        assert_eq!(watch.stalled(LIMIT, 59), None);
        assert!(watch.stalled(LIMIT, 60).unwrap().contains("the registry has not answered"));
    }

    #[test]
    fn unpacking_has_no_limit() {
        let mut watch = started(&[]);
        watch.observe(vec![blob("a", 1)], 1);
        assert_eq!(watch.observe(vec![], 2), PullPhase::Unpacking);
        assert_eq!(watch.stalled(LIMIT, i64::MAX), None);
    }

    #[test]
    fn leftover_blob_is_no_progress_until_it_grows() {
        let mut watch = started(&[blob("left", 7)]);
        assert_eq!(watch.observe(vec![blob("left", 7)], 10), PullPhase::Connecting);
        assert!(watch.stalled(LIMIT, LIMIT).is_some());
        // This pull continues the leftover blob.
        let phase = watch.observe(vec![blob("left", 8)], 20);
        assert_eq!(phase, PullPhase::Fetching { bytes: 8, total: 4 << 20, blobs: 1 });
        assert_eq!(watch.stalled(LIMIT, 20 + LIMIT - 1), None);
        assert!(watch.stalled(LIMIT, 20 + LIMIT).is_some());
    }

    #[test]
    fn unpacking_next_to_leftover_blobs_has_a_longer_limit() {
        let mut watch = started(&[blob("left", 7)]);
        watch.observe(vec![blob("left", 7), blob("a", 1)], 1);
        assert_eq!(watch.observe(vec![blob("left", 7)], 2), PullPhase::Unpacking);
        assert_eq!(watch.stalled(LIMIT, 2 + 10 * LIMIT - 1), None);
        assert!(watch.stalled(LIMIT, 2 + 10 * LIMIT).is_some());
    }

    #[test]
    fn pull_phases_have_texts() {
        let fetching = |bytes, total, blobs| PullPhase::Fetching { bytes, total, blobs }.text();
        assert_eq!(fetching(1_536, 4 << 20, 1), "1.5 KiB of 4.0 MiB (1 layer on its way)");
        assert_eq!(fetching(10, 0, 3), "10.0 B (3 layers on their way)");
        assert_eq!(fetching(10, 0, 11), "10.0 B (11 layers on their way)");
        assert_eq!(
            (PullPhase::Connecting.text(), PullPhase::Unpacking.text()),
            ("waiting for the registry".into(), "unpacking".into())
        );
    }
}
