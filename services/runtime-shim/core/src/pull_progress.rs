//! Whether a pull goes on or stands still, from what the runtime tells of the blobs that it is fetching.
//!
//! CRI tells nothing of a pull before its end. containerd's content service lists every blob that is being written, of
//! all pulls together and with those that an earlier pull left half-written. So this is what can be said:
//! - bytes that have arrived of the blobs that move, of all pulls that run now;
//! - a pull stands still when no blob has moved for a while. One that moves keeps other pulls beside it;
//! - containerd writes a blob in steps of 1 MiB, so that one which takes longer than the limit for that stands still;
//! - with nothing to fetch any more the layers are being unpacked, which is the node's own work and has no limit;
//! - when blobs that have not moved are all that is left, they may be the remains of an earlier pull, so that the limit
//!   is [`DOUBTFUL`] times as long.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::size_text::size;

/// How much longer the limit is while nobody can tell a pull that stands still from one that unpacks beside remains.
const DOUBTFUL: i64 = 10;

/// A blob that is being written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blob {
    /// The runtime's name for it.
    pub name: String,
    /// Bytes that have arrived.
    pub bytes: u64,
    /// Bytes that it will have; 0: unknown.
    pub total: u64,
}

/// What a pull is doing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Doing {
    /// The registry is asked; nothing has come yet.
    Asking,
    /// Blobs are coming.
    Fetching {
        /// Bytes of them that are here.
        bytes: u64,
        /// Bytes of them in all; 0: unknown.
        total: u64,
        /// How many they are.
        blobs: usize,
    },
    /// Everything is here.
    Unpacking,
}

impl Doing {
    /// For people, as it stands behind `pulling: `.
    pub fn text(&self) -> String {
        match self {
            Self::Asking => "the registry is asked".to_owned(),
            Self::Unpacking => "unpacking".to_owned(),
            Self::Fetching { bytes, total, blobs } => {
                let of = if *total == 0 { String::new() } else { format!(" of {}", size(*total)) };
                let way = if *blobs == 1 { "layer on its way" } else { "layers on their way" };
                format!("{}{of} ({blobs} {way})", size(*bytes))
            }
        }
    }
}

/// One pull, looked at again and again. Moments are nanoseconds of one clock of the caller's.
#[derive(Debug)]
pub struct PullWatch {
    /// Blobs at the first look: `None` before it.
    before: Option<BTreeMap<String, u64>>,
    last: BTreeMap<String, Blob>,
    moved_at: i64,
    /// Whether a blob has come or moved since the first look.
    moved: bool,
}

impl PullWatch {
    /// A pull that begins now.
    pub const fn new(now: i64) -> Self {
        Self { before: None, last: BTreeMap::new(), moved_at: now, moved: false }
    }

    /// Takes in what is being written now.
    pub fn look(&mut self, blobs: Vec<Blob>, now: i64) -> Doing {
        let seen: BTreeMap<String, Blob> = blobs.into_iter().map(|blob| (blob.name.clone(), blob)).collect();
        if let Some(before) = &mut self.before {
            let news = seen.values().any(|b| self.last.get(&b.name).is_none_or(|last| last.bytes != b.bytes));
            // One that is gone is whole.
            let gone = self.last.keys().any(|name| !seen.contains_key(name));
            if news || gone {
                self.moved_at = now;
                self.moved = true;
            }
            before.retain(|name, bytes| seen.get(name).is_some_and(|blob| blob.bytes == *bytes));
        } else {
            self.before = Some(seen.iter().map(|(name, blob)| (name.clone(), blob.bytes)).collect());
        }
        self.last = seen;
        self.doing()
    }

    fn coming(&self) -> impl Iterator<Item = &Blob> {
        let before = self.before.as_ref();
        self.last.values().filter(move |blob| before.is_none_or(|before| !before.contains_key(&blob.name)))
    }

    fn doing(&self) -> Doing {
        let (mut bytes, mut total, mut blobs) = (0_u64, 0_u64, 0);
        for blob in self.coming() {
            bytes = bytes.saturating_add(blob.bytes);
            total = total.saturating_add(blob.total);
            blobs += 1;
        }
        match (blobs, self.moved) {
            (0, false) => Doing::Asking,
            (0, true) => Doing::Unpacking,
            _ => Doing::Fetching { bytes, total, blobs },
        }
    }

    /// Why the pull has to be given up: it has not moved for `limit` nanoseconds.
    pub fn stalled(&self, limit: i64, now: i64) -> Option<String> {
        let doing = self.doing();
        let limit = match doing {
            Doing::Asking | Doing::Fetching { .. } => limit,
            Doing::Unpacking if self.last.is_empty() => return None,
            Doing::Unpacking => limit.saturating_mul(DOUBTFUL),
        };
        if now - self.moved_at < limit {
            return None;
        }
        let limit = Duration::from_nanos(u64::try_from(limit).unwrap_or(0));
        let far = match doing {
            Doing::Asking => "the registry has not answered".to_owned(),
            other => other.text(),
        };
        let limit = crate::image::go_duration(limit);
        Some(format!("no progress within {limit}: {far}; the pull was given up and will be tried again"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: i64 = 60;

    fn blob(name: &str, bytes: u64) -> Blob {
        Blob { name: name.into(), bytes, total: 4 << 20 }
    }

    /// A pull that was looked at once before anything came.
    fn begun(left: &[Blob]) -> PullWatch {
        let mut watch = PullWatch::new(0);
        assert_eq!(watch.look(left.to_vec(), 0), Doing::Asking);
        watch
    }

    #[test]
    fn a_slow_pull_goes_on_for_ever() {
        let mut watch = begun(&[]);
        for n in 1..1_000 {
            let now = i64::try_from(n).unwrap() * (LIMIT - 1);
            assert!(matches!(watch.look(vec![blob("a", n)], now), Doing::Fetching { blobs: 1, .. }));
            assert_eq!(watch.stalled(LIMIT, now + LIMIT - 1), None);
        }
    }

    #[test]
    fn a_pull_whose_blobs_stand_still_is_given_up_and_says_how_far_it_came() {
        let mut watch = begun(&[]);
        watch.look(vec![blob("a", 1 << 20), blob("b", 1 << 19)], 5);
        let doing = watch.look(vec![blob("a", 1 << 20), blob("b", 1 << 19)], 30);
        assert_eq!(doing, Doing::Fetching { bytes: 3 << 19, total: 8 << 20, blobs: 2 });
        assert_eq!(watch.stalled(LIMIT, 64), None);
        let text = watch.stalled(LIMIT, 65).unwrap();
        assert!(text.contains("1.5 MiB of 8.0 MiB (2 layers on their way)"), "{text}");
    }

    #[test]
    fn a_registry_that_never_answers_is_given_up() {
        let mut watch = begun(&[]);
        assert_eq!(watch.look(vec![], 59), Doing::Asking);
        assert_eq!(watch.stalled(LIMIT, 59), None);
        assert!(watch.stalled(LIMIT, 60).unwrap().contains("the registry has not answered"));
    }

    #[test]
    fn unpacking_has_no_limit() {
        let mut watch = begun(&[]);
        watch.look(vec![blob("a", 1)], 1);
        assert_eq!(watch.look(vec![], 2), Doing::Unpacking);
        assert_eq!(watch.stalled(LIMIT, i64::MAX), None);
    }

    #[test]
    fn what_an_earlier_pull_left_is_no_progress_until_it_moves() {
        let mut watch = begun(&[blob("left", 7)]);
        assert_eq!(watch.look(vec![blob("left", 7)], 10), Doing::Asking);
        assert!(watch.stalled(LIMIT, LIMIT).is_some());
        // It is gone on with.
        let doing = watch.look(vec![blob("left", 8)], 20);
        assert_eq!(doing, Doing::Fetching { bytes: 8, total: 4 << 20, blobs: 1 });
        assert_eq!(watch.stalled(LIMIT, 20 + LIMIT - 1), None);
        assert!(watch.stalled(LIMIT, 20 + LIMIT).is_some());
    }

    #[test]
    fn beside_what_an_earlier_pull_left_unpacking_has_a_longer_limit() {
        let mut watch = begun(&[blob("left", 7)]);
        watch.look(vec![blob("left", 7), blob("a", 1)], 1);
        assert_eq!(watch.look(vec![blob("left", 7)], 2), Doing::Unpacking);
        assert_eq!(watch.stalled(LIMIT, 2 + 10 * LIMIT - 1), None);
        assert!(watch.stalled(LIMIT, 2 + 10 * LIMIT).is_some());
    }

    #[test]
    fn what_a_pull_is_doing_is_said_in_words() {
        let fetching = |bytes, total, blobs| Doing::Fetching { bytes, total, blobs }.text();
        assert_eq!(fetching(1_536, 4 << 20, 1), "1.5 KiB of 4.0 MiB (1 layer on its way)");
        assert_eq!(fetching(10, 0, 3), "10.0 B (3 layers on their way)");
        assert_eq!(fetching(10, 0, 11), "10.0 B (11 layers on their way)");
        assert_eq!(
            (Doing::Asking.text(), Doing::Unpacking.text()),
            ("the registry is asked".into(), "unpacking".into())
        );
    }
}
