//! Which events an API server is told of: those that are alike as one, and of an object that has many only some
//! (node-and-api.md §10).
//!
//! Parity: the limits are those of Kubernetes' own event clients. An event is judged by its own times, so that a second try
//! comes to the same end. A judgement changes nothing until it is kept, which is when the event was told or left out.

use std::collections::{BTreeMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher as _};

/// What stands before the message of events that are told as one.
pub const COMBINED: &str = "(combined from similar events): ";
/// So many different messages of one object, type and reason are alike.
const ALIKE: usize = 10;
/// As long as no more than this lies between two of them, in nanoseconds.
const ALIKE_WITHIN: i64 = 600 * SECOND;
/// Events of one object that may come at once.
const BURST: f64 = 25.0;
/// In so many nanoseconds there may be one more.
const REFILL: i64 = 300 * SECOND;
const SECOND: i64 = 1_000_000_000;
/// So many objects, and so many kinds of events, are remembered; those that were heard of last.
const REMEMBERED: usize = 1024;

/// An event, as far as it is compared.
#[derive(Debug, Clone, Copy)]
pub struct Seen<'a> {
    /// Kind, namespace, name and UID of the object.
    pub object: [&'a str; 4],
    /// `Normal` or `Warning`.
    pub kind: &'a str,
    /// Its reason.
    pub reason: &'a str,
    /// Its message.
    pub message: &'a str,
    /// When it happened last, in nanoseconds since 1970.
    pub at: i64,
}

/// What becomes of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It is told as it is.
    Own,
    /// It is one of many that are alike, which are told as one.
    Combined {
        /// When the first of them happened, in nanoseconds since 1970.
        first: i64,
        /// How many they are.
        count: u32,
    },
    /// Its object has too many.
    LeftOut,
}

/// What was told.
#[derive(Debug, Default)]
pub struct Correlation {
    groups: BTreeMap<u64, Group>,
    objects: BTreeMap<u64, Bucket>,
}

/// Events of one object, type and reason.
#[derive(Debug, Clone, Default)]
struct Group {
    at: i64,
    /// The last messages, oldest first; fewer than [`ALIKE`].
    messages: VecDeque<u64>,
    /// Those that are told as one: the first of them, and how many.
    combined: Option<(i64, u32)>,
}

#[derive(Debug, Clone, Copy)]
struct Bucket {
    at: i64,
    tokens: f64,
}

/// What becomes of an event, and what is remembered when that was done.
#[derive(Debug)]
pub struct Judgement {
    /// What becomes of it.
    pub verdict: Verdict,
    group: (u64, Group),
    object: (u64, Bucket),
}

impl Correlation {
    /// What becomes of an event. Depends on what was kept before, and on nothing else.
    pub fn judge(&self, event: &Seen<'_>) -> Judgement {
        let key = digest(&(event.object, event.kind, event.reason));
        let before = self.groups.get(&key).filter(|group| event.at.saturating_sub(group.at) <= ALIKE_WITHIN);
        let mut group = before.cloned().unwrap_or_default();
        group.at = group.at.max(event.at);
        let combined = group.takes(digest(&event.message), event.at);

        let owner = digest(&event.object);
        let mut bucket = self.objects.get(&owner).copied().unwrap_or(Bucket { at: event.at, tokens: BURST });
        bucket.fill(event.at);
        let verdict = match combined {
            _ if bucket.tokens < 1.0 => Verdict::LeftOut,
            Some((first, count)) => Verdict::Combined { first, count },
            None => Verdict::Own,
        };
        if verdict != Verdict::LeftOut {
            bucket.tokens -= 1.0;
        }
        Judgement { verdict, group: (key, group), object: (owner, bucket) }
    }

    /// Remembers an event that was judged, and told or left out since.
    pub fn keep(&mut self, judgement: Judgement) {
        let ((group, seen), (object, bucket)) = (judgement.group, judgement.object);
        self.groups.insert(group, seen);
        self.objects.insert(object, bucket);
        forget(&mut self.groups, |group| group.at);
        forget(&mut self.objects, |bucket| bucket.at);
    }
}

impl Group {
    /// Takes a message in; where it is one of too many different ones, what they are told as.
    fn takes(&mut self, message: u64, at: i64) -> Option<(i64, u32)> {
        if !self.messages.contains(&message) {
            self.messages.push_back(message);
        }
        if self.messages.len() < ALIKE {
            return None;
        }
        self.messages.pop_front();
        let (first, count) = self.combined.unwrap_or((at, 0));
        self.combined = Some((first, count.saturating_add(1)));
        self.combined
    }
}

impl Bucket {
    #[allow(clippy::cast_precision_loss, reason = "a bucket is full long before 2^52 ns are over")]
    fn fill(&mut self, now: i64) {
        let since = now.saturating_sub(self.at).max(0);
        self.tokens = (self.tokens + since as f64 / REFILL as f64).min(BURST);
        self.at = self.at.max(now);
    }
}

/// Drops what was heard of longest ago, where there is more than is remembered.
fn forget<T>(map: &mut BTreeMap<u64, T>, at: impl Fn(&T) -> i64) {
    if map.len() <= REMEMBERED {
        return;
    }
    if let Some(key) = map.iter().min_by_key(|(_, value)| at(value)).map(|(key, _)| *key) {
        map.remove(&key);
    }
}

fn digest(of: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: i64 = 1_767_225_600 * SECOND;

    fn event<'a>(name: &'a str, reason: &'a str, message: &'a str, seconds: i64) -> Seen<'a> {
        let object = ["Pod", "default", name, "u"];
        Seen { object, kind: "Warning", reason, message, at: START + seconds * SECOND }
    }

    fn tell(correlation: &mut Correlation, event: &Seen<'_>) -> Verdict {
        let judgement = correlation.judge(event);
        let verdict = judgement.verdict;
        correlation.keep(judgement);
        verdict
    }

    fn combined(seconds: i64, count: u32) -> Verdict {
        Verdict::Combined { first: START + seconds * SECOND, count }
    }

    #[test]
    fn the_tenth_different_message_within_ten_minutes_and_all_after_it_are_one_event() {
        use Verdict::Own;
        let mut known = Correlation::default();
        // Reason, message, second, verdict; of one object.
        let mut cases: Vec<(&str, String, i64, Verdict)> =
            (0..9).map(|n| ("Unhealthy", format!("m{n}"), n * 60, Own)).collect();
        cases.extend([
            ("Unhealthy", "m8".to_owned(), 500, Own),
            ("BackOff", "m9".to_owned(), 500, Own),
            ("Unhealthy", "m9".to_owned(), 500, combined(500, 1)),
            ("Unhealthy", "m10".to_owned(), 510, combined(500, 2)),
            // One of the last nine is known by itself.
            ("Unhealthy", "m10".to_owned(), 1100, Own),
            ("Unhealthy", "m11".to_owned(), 1700, combined(500, 3)),
            // Ten minutes without any.
            ("Unhealthy", "m12".to_owned(), 2301, Own),
        ]);
        for (reason, message, seconds, expected) in cases {
            let verdict = tell(&mut known, &event("web", reason, &message, seconds));
            assert_eq!(verdict, expected, "{reason} {message} {seconds}");
        }
        assert_eq!(tell(&mut known, &event("db", "Unhealthy", "m13", 2302)), Verdict::Own, "another object");
    }

    #[test]
    fn an_object_has_twenty_five_events_at_once_and_then_one_in_five_minutes_whatever_they_are() {
        let mut known = Correlation::default();
        for n in 0..25 {
            let (reason, message) = (format!("R{n}"), format!("m{n}"));
            assert_eq!(tell(&mut known, &event("web", &reason, &message, 0)), Verdict::Own, "{n}");
        }
        for (seconds, expected) in [
            (1, Verdict::LeftOut),
            (299, Verdict::LeftOut),
            (301, Verdict::Own),
            (302, Verdict::LeftOut),
            (901, Verdict::Own),
            (901, Verdict::Own),
            (902, Verdict::LeftOut),
        ] {
            let message = format!("at {seconds}");
            assert_eq!(tell(&mut known, &event("web", "R0", &message, seconds)), expected, "{seconds}");
            assert_ne!(tell(&mut known, &event(&message, "R0", "m", seconds)), Verdict::LeftOut);
        }
    }

    #[test]
    fn a_judgement_that_is_not_kept_is_the_same_again_and_time_that_runs_back_gives_nothing() {
        let mut known = Correlation::default();
        for n in 0..9 {
            tell(&mut known, &event("web", "R", &format!("m{n}"), 0));
        }
        let tenth = event("web", "R", "m9", 1);
        for _ in 0..3 {
            assert_eq!(known.judge(&tenth).verdict, combined(1, 1));
        }
        for n in 10..26 {
            tell(&mut known, &event("web", "R", &format!("m{n}"), 1));
        }
        assert_eq!(tell(&mut known, &event("web", "R", "m", -10_000)), Verdict::LeftOut);
        assert_eq!(tell(&mut known, &event("web", "R", "m", 2)), Verdict::LeftOut);
    }

    #[test]
    fn what_is_remembered_is_bounded_and_the_oldest_goes_first() {
        let mut known = Correlation::default();
        for n in 0..2000 {
            tell(&mut known, &event(&format!("pod{n}"), "R", "m", n));
        }
        assert_eq!((known.groups.len(), known.objects.len()), (REMEMBERED, REMEMBERED));
        let last = digest(&event("pod1999", "R", "m", 0).object);
        assert!(known.objects.contains_key(&last));
        let first = digest(&event("pod0", "R", "m", 0).object);
        assert!(!known.objects.contains_key(&first));
    }
}
