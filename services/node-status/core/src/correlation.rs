//! Which events an API server gets: similar ones as one, and only some of an object that has many (node-and-api.md §10).
//!
//! Parity: the limits are those of Kubernetes' own event clients. An event is judged by its own times, so that a retry gets the
//! same decision. A decision changes nothing until it is committed, which is when the event was written or dropped.

use std::collections::{BTreeMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher as _};

/// Prefix of the message of events that are written as one.
pub const COMBINED: &str = "(combined from similar events): ";
/// This many different messages of one object, type and reason are similar.
const SIMILAR: usize = 10;
/// Similar events are at most this far apart, in nanoseconds.
const SIMILAR_WITHIN: i64 = 600 * SECOND;
/// Events of one object in a burst.
const BURST: f64 = 25.0;
/// One more event is allowed in this many nanoseconds.
const REFILL: i64 = 300 * SECOND;
const SECOND: i64 = 1_000_000_000;
/// The most objects, and kinds of events, that are remembered: those with the latest events.
const REMEMBERED: usize = 1024;

/// The parts of an event that are compared.
#[derive(Debug, Clone, Copy)]
pub struct ComparedEvent<'a> {
    /// Kind, namespace, name and UID of the object.
    pub object: [&'a str; 4],
    /// `Normal` or `Warning`.
    pub kind: &'a str,
    /// Its reason.
    pub reason: &'a str,
    /// Its message.
    pub message: &'a str,
    /// When it last happened, in nanoseconds since 1970.
    pub at: i64,
}

/// What happens to an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventAction {
    /// It is written as it is.
    Single,
    /// It is one of many similar events, which are written as one.
    Combined {
        /// When the first of them happened, in nanoseconds since 1970.
        first: i64,
        /// How many they are.
        count: u32,
    },
    /// Its object has too many events.
    Drop,
}

/// The events that were written.
#[derive(Debug, Default)]
pub struct Correlation {
    groups: BTreeMap<u64, Group>,
    objects: BTreeMap<u64, Bucket>,
}

/// Events of one object, type and reason.
#[derive(Debug, Clone, Default)]
struct Group {
    at: i64,
    /// The last messages, oldest first; fewer than [`SIMILAR`].
    messages: VecDeque<u64>,
    /// The events written as one: when the first happened, and how many.
    combined: Option<(i64, u32)>,
}

#[derive(Debug, Clone, Copy)]
struct Bucket {
    at: i64,
    tokens: f64,
}

/// What happens to an event, and the state to store once that is done.
#[derive(Debug)]
pub struct EventDecision {
    /// What happens to it.
    pub action: EventAction,
    group: (u64, Group),
    object: (u64, Bucket),
}

impl Correlation {
    /// Decides what happens to an event. Depends only on what was committed before.
    pub fn decide(&self, event: &ComparedEvent<'_>) -> EventDecision {
        let key = digest(&(event.object, event.kind, event.reason));
        let before =
            self.groups.get(&key).filter(|group| event.at.saturating_sub(group.at) <= SIMILAR_WITHIN);
        let mut group = before.cloned().unwrap_or_default();
        group.at = group.at.max(event.at);
        let combined = group.add(digest(&event.message), event.at);

        let owner = digest(&event.object);
        let mut bucket = self.objects.get(&owner).copied().unwrap_or(Bucket { at: event.at, tokens: BURST });
        bucket.fill(event.at);
        let action = match combined {
            _ if bucket.tokens < 1.0 => EventAction::Drop,
            Some((first, count)) => EventAction::Combined { first, count },
            None => EventAction::Single,
        };
        if action != EventAction::Drop {
            bucket.tokens -= 1.0;
        }
        EventDecision { action, group: (key, group), object: (owner, bucket) }
    }

    /// Stores a decision whose event was written or dropped.
    pub fn commit(&mut self, decision: EventDecision) {
        let ((group, state), (object, bucket)) = (decision.group, decision.object);
        self.groups.insert(group, state);
        self.objects.insert(object, bucket);
        remove_oldest(&mut self.groups, |group| group.at);
        remove_oldest(&mut self.objects, |bucket| bucket.at);
    }
}

impl Group {
    /// Adds a message. If it is one of too many different ones, returns the combined event: when the first happened, and how
    /// many.
    fn add(&mut self, message: u64, at: i64) -> Option<(i64, u32)> {
        if !self.messages.contains(&message) {
            self.messages.push_back(message);
        }
        if self.messages.len() < SIMILAR {
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

/// Removes the entry with the oldest event when there are more than [`REMEMBERED`].
fn remove_oldest<T>(map: &mut BTreeMap<u64, T>, at: impl Fn(&T) -> i64) {
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

    fn event<'a>(name: &'a str, reason: &'a str, message: &'a str, seconds: i64) -> ComparedEvent<'a> {
        let object = ["Pod", "default", name, "u"];
        ComparedEvent { object, kind: "Warning", reason, message, at: START + seconds * SECOND }
    }

    fn decide_and_commit(correlation: &mut Correlation, event: &ComparedEvent<'_>) -> EventAction {
        let decision = correlation.decide(event);
        let action = decision.action;
        correlation.commit(decision);
        action
    }

    fn combined(seconds: i64, count: u32) -> EventAction {
        EventAction::Combined { first: START + seconds * SECOND, count }
    }

    #[test]
    fn similar_events_are_combined_from_the_tenth_message_in_ten_minutes() {
        use EventAction::Single;
        let mut correlation = Correlation::default();
        // Reason, message, second, verdict; of one object.
        let mut cases: Vec<(&str, String, i64, EventAction)> =
            (0..9).map(|n| ("Unhealthy", format!("m{n}"), n * 60, Single)).collect();
        cases.extend([
            ("Unhealthy", "m8".to_owned(), 500, Single),
            ("BackOff", "m9".to_owned(), 500, Single),
            ("Unhealthy", "m9".to_owned(), 500, combined(500, 1)),
            ("Unhealthy", "m10".to_owned(), 510, combined(500, 2)),
            // One of the last nine messages is not new.
            ("Unhealthy", "m10".to_owned(), 1100, Single),
            ("Unhealthy", "m11".to_owned(), 1700, combined(500, 3)),
            // Ten minutes without any.
            ("Unhealthy", "m12".to_owned(), 2301, Single),
        ]);
        for (reason, message, seconds, expected) in cases {
            let action = decide_and_commit(&mut correlation, &event("web", reason, &message, seconds));
            assert_eq!(action, expected, "{reason} {message} {seconds}");
        }
        assert_eq!(
            decide_and_commit(&mut correlation, &event("db", "Unhealthy", "m13", 2302)),
            EventAction::Single,
            "another object"
        );
    }

    #[test]
    fn an_object_has_a_burst_of_25_events_and_then_one_in_five_minutes() {
        let mut correlation = Correlation::default();
        for n in 0..25 {
            let (reason, message) = (format!("R{n}"), format!("m{n}"));
            assert_eq!(
                decide_and_commit(&mut correlation, &event("web", &reason, &message, 0)),
                EventAction::Single,
                "{n}"
            );
        }
        for (seconds, expected) in [
            (1, EventAction::Drop),
            (299, EventAction::Drop),
            (301, EventAction::Single),
            (302, EventAction::Drop),
            (901, EventAction::Single),
            (901, EventAction::Single),
            (902, EventAction::Drop),
        ] {
            let message = format!("at {seconds}");
            assert_eq!(
                decide_and_commit(&mut correlation, &event("web", "R0", &message, seconds)),
                expected,
                "{seconds}"
            );
            assert_ne!(
                decide_and_commit(&mut correlation, &event(&message, "R0", "m", seconds)),
                EventAction::Drop
            );
        }
    }

    #[test]
    fn an_uncommitted_event_decision_repeats_and_a_clock_step_back_adds_no_tokens() {
        let mut correlation = Correlation::default();
        for n in 0..9 {
            decide_and_commit(&mut correlation, &event("web", "R", &format!("m{n}"), 0));
        }
        let tenth = event("web", "R", "m9", 1);
        for _ in 0..3 {
            assert_eq!(correlation.decide(&tenth).action, combined(1, 1));
        }
        for n in 10..26 {
            decide_and_commit(&mut correlation, &event("web", "R", &format!("m{n}"), 1));
        }
        assert_eq!(decide_and_commit(&mut correlation, &event("web", "R", "m", -10_000)), EventAction::Drop);
        assert_eq!(decide_and_commit(&mut correlation, &event("web", "R", "m", 2)), EventAction::Drop);
    }

    #[test]
    fn event_correlation_is_bounded_and_drops_the_oldest_first() {
        let mut correlation = Correlation::default();
        for n in 0..2000 {
            decide_and_commit(&mut correlation, &event(&format!("pod{n}"), "R", "m", n));
        }
        assert_eq!((correlation.groups.len(), correlation.objects.len()), (REMEMBERED, REMEMBERED));
        let last = digest(&event("pod1999", "R", "m", 0).object);
        assert!(correlation.objects.contains_key(&last));
        let first = digest(&event("pod0", "R", "m", 0).object);
        assert!(!correlation.objects.contains_key(&first));
    }
}
