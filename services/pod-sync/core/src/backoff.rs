//! Crash-loop back-off: how long a container that keeps terminating waits before it is restarted (pod-lifecycle.md §9.8).

use std::collections::BTreeMap;
use std::fmt;

use keelson_kube_model::{Container, Pod, PodUid};
use serde::{Deserialize, Serialize};

use crate::moment::{Moment, SECOND, duration_text};

/// First delay after an immediate restart unless configured otherwise, seconds.
pub const INITIAL_SECONDS: i64 = 10;
/// Longest delay unless configured otherwise, seconds.
pub const MAX_SECONDS: i64 = 300;
/// An entry expires when the container terminated this long after the entry was last advanced, seconds.
pub const FORGET_SECONDS: i64 = 600;

/// Identifies one container with one image and resources. With another image or other resources the back-off starts anew.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct BackoffKey {
    /// The pod.
    pub uid: PodUid,
    /// The container's name.
    pub container: String,
    /// FNV-1a over the pod's full name, the image and the resources.
    pub shape: u64,
}

impl BackoffKey {
    /// The key of a container of a pod.
    pub fn of(pod: &Pod, container: &Container) -> Self {
        let resources = serde_json::to_string(&container.resources).unwrap_or_default();
        let parts = [&pod.metadata.namespace, &pod.metadata.name, &container.image, &resources];
        Self {
            uid: pod.uid(),
            container: container.name.clone(),
            shape: fnv(parts.iter().map(|part| part.as_str())),
        }
    }
}

impl fmt::Display for BackoffKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{:016x}", self.uid, self.container, self.shape)
    }
}

fn fnv<'a>(parts: impl Iterator<Item = &'a str>) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in parts.flat_map(|part| part.bytes().chain([0])) {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    hash
}

/// One container's back-off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackoffEntry {
    /// Seconds to wait after the container terminated.
    pub delay_seconds: i64,
    /// When a start last advanced this entry, unix nanoseconds.
    pub last_advanced_unix_nanos: i64,
}

/// The back-offs of all containers. The caller stores the entries for a restart of the service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backoffs {
    initial_seconds: i64,
    max_seconds: i64,
    entries: BTreeMap<BackoffKey, BackoffEntry>,
}

impl Default for Backoffs {
    fn default() -> Self {
        Self::new(INITIAL_SECONDS, MAX_SECONDS)
    }
}

impl Backoffs {
    /// No back-offs yet, with the configured first and longest delay in seconds, at least 1; a maximum below the first delay
    /// lowers that too.
    pub fn new(initial_seconds: i64, max_seconds: i64) -> Self {
        let max_seconds = max_seconds.max(1);
        Self { initial_seconds: initial_seconds.clamp(1, max_seconds), max_seconds, entries: BTreeMap::new() }
    }

    /// Restores a stored entry, clamped to the present limits: the maximum may have changed, and the clock may have been set
    /// back.
    pub fn restore(&mut self, key: BackoffKey, stored: BackoffEntry, at: &Moment) {
        let entry = BackoffEntry {
            delay_seconds: stored.delay_seconds.clamp(self.initial_seconds, self.max_seconds),
            last_advanced_unix_nanos: stored.last_advanced_unix_nanos.min(at.now_unix_nanos),
        };
        self.entries.insert(key, entry);
    }

    /// The entries of one pod, for storing.
    pub fn of_pod<'a>(&'a self, uid: &'a PodUid) -> impl Iterator<Item = (&'a BackoffKey, &'a BackoffEntry)> {
        let first = BackoffKey { uid: uid.clone(), container: String::new(), shape: 0 };
        self.entries.range(first..).take_while(move |(key, _)| key.uid == *uid)
    }

    /// When a start last advanced any entry of a pod, unix nanoseconds; `None` for a pod without entries. If it changes, the
    /// entries must be stored again.
    pub fn last_advanced_unix_nanos(&self, uid: &PodUid) -> Option<i64> {
        self.of_pod(uid).map(|(_, entry)| entry.last_advanced_unix_nanos).max()
    }

    /// The entry of a key.
    pub fn get(&self, key: &BackoffKey) -> Option<BackoffEntry> {
        self.entries.get(key).copied()
    }

    fn is_expired(entry: &BackoffEntry, finished_unix_nanos: i64) -> bool {
        finished_unix_nanos.saturating_sub(entry.last_advanced_unix_nanos) > FORGET_SECONDS * SECOND
    }

    /// Until when a container that terminated at that time has to wait, unix nanoseconds, and the delay in seconds; `None` if
    /// it may start.
    pub fn waits_until(&self, key: &BackoffKey, finished_unix_nanos: i64, at: &Moment) -> Option<(i64, i64)> {
        let entry = self.get(key).filter(|entry| !Self::is_expired(entry, finished_unix_nanos))?;
        let until = finished_unix_nanos.saturating_add(entry.delay_seconds * SECOND);
        // If the end is in the future, the clock was set back, and the real end is not known.
        (finished_unix_nanos <= at.now_unix_nanos && at.now_unix_nanos < until)
            .then_some((until, entry.delay_seconds))
    }

    /// Records a start of a container that terminated at that time: the first one creates the entry, each later one doubles
    /// its delay. Returns the entry for storing.
    pub fn advance(&mut self, key: &BackoffKey, finished_unix_nanos: i64, at: &Moment) -> BackoffEntry {
        let delay_seconds = match self.get(key).filter(|entry| !Self::is_expired(entry, finished_unix_nanos))
        {
            Some(entry) => (entry.delay_seconds * 2).min(self.max_seconds),
            None => self.initial_seconds,
        };
        let entry = BackoffEntry { delay_seconds, last_advanced_unix_nanos: at.now_unix_nanos };
        self.entries.insert(key.clone(), entry);
        entry
    }

    /// Ends every back-off of a pod, because it was removed or because of `RetryPod`. True if there was one.
    pub fn forget_pod(&mut self, uid: &PodUid) -> bool {
        let before = self.entries.len();
        self.entries.retain(|key, _| key.uid != *uid);
        before != self.entries.len()
    }

    /// Removes the expired entries; returns their keys.
    pub fn remove_expired(&mut self, at: &Moment) -> Vec<BackoffKey> {
        let old: Vec<BackoffKey> = self
            .entries
            .iter()
            .filter(|(_, entry)| Self::is_expired(entry, at.now_unix_nanos))
            .map(|(key, _)| key.clone())
            .collect();
        for key in &old {
            self.entries.remove(key);
        }
        old
    }
}

/// The waiting message of a container in back-off.
pub fn waiting_message(pod: &Pod, container: &str, delay_seconds: i64) -> String {
    format!(
        "back-off {} restarting failed container={container} pod={}",
        duration_text(delay_seconds),
        pod_text(pod)
    )
}

/// The message of the Warning event `BackOff`.
pub fn event_message(pod: &Pod, container: &str) -> String {
    format!("Back-off restarting failed container {container} in pod {}", pod_text(pod))
}

/// `<name>_<namespace>(<uid>)`.
pub fn pod_text(pod: &Pod) -> String {
    format!("{}_{}({})", pod.metadata.name, pod.metadata.namespace, pod.metadata.uid)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::testing::{at, nanos, pod};

    fn key() -> BackoffKey {
        BackoffKey { uid: PodUid::from("u-1"), container: "a".to_owned(), shape: 1 }
    }

    #[test]
    fn crash_loop_back_off_doubles_from_10_s_to_300_s() {
        let mut backoffs = Backoffs::default();
        let (mut now, mut starts) = (0, vec![0]);
        while starts.len() < 9 {
            // It terminated when it was last started.
            let finished = nanos(now);
            while backoffs.waits_until(&key(), finished, &at(now)).is_some() {
                now += 1;
            }
            backoffs.advance(&key(), finished, &at(now));
            starts.push(now);
        }
        assert_eq!(starts, [0, 0, 10, 30, 70, 150, 310, 610, 910]);
    }

    #[test]
    fn back_off_expires_after_ten_minutes() {
        let mut backoffs = Backoffs::default();
        for _ in 0..4 {
            backoffs.advance(&key(), nanos(0), &at(0));
        }
        assert_eq!(backoffs.waits_until(&key(), nanos(600), &at(600)), Some((nanos(680), 80)));
        assert_eq!(backoffs.waits_until(&key(), nanos(601), &at(601)), None);
        assert_eq!(backoffs.advance(&key(), nanos(601), &at(601)).delay_seconds, INITIAL_SECONDS);
    }

    #[test]
    fn a_low_maximum_lowers_the_initial_delay_too() {
        let mut backoffs = Backoffs::new(INITIAL_SECONDS, 4);
        assert_eq!(backoffs.advance(&key(), nanos(0), &at(0)).delay_seconds, 4);
        assert_eq!(backoffs.advance(&key(), nanos(0), &at(0)).delay_seconds, 4);
        let mut longer = Backoffs::new(INITIAL_SECONDS, 15);
        assert_eq!(longer.advance(&key(), nanos(0), &at(0)).delay_seconds, 10);
        assert_eq!(longer.advance(&key(), nanos(0), &at(0)).delay_seconds, 15);
    }

    #[test]
    fn a_reduced_back_off_doubles_from_1_s_to_60_s() {
        let mut reduced = Backoffs::new(1, 60);
        let delays: Vec<i64> =
            (0..8).map(|_| reduced.advance(&key(), nanos(0), &at(0)).delay_seconds).collect();
        assert_eq!(delays, [1, 2, 4, 8, 16, 32, 60, 60]);
        reduced.restore(key(), BackoffEntry { delay_seconds: 300, last_advanced_unix_nanos: 0 }, &at(0));
        assert_eq!(reduced.get(&key()).unwrap().delay_seconds, 60, "stored before the gate was set");
        for invalid in [i64::MIN, 0, i64::MAX] {
            let mut clamped = Backoffs::new(invalid, 5);
            assert!((1..=5).contains(&clamped.advance(&key(), nanos(0), &at(0)).delay_seconds), "{invalid}");
        }
    }

    #[test]
    fn back_off_entries_are_stored_restored_and_removed() {
        let mut backoffs = Backoffs::default();
        backoffs.advance(&key(), nanos(0), &at(0));
        let mut other = Backoffs::default();
        for (key, entry) in backoffs.of_pod(&key().uid) {
            let json = serde_json::to_string(&(key, entry)).unwrap();
            let (key, entry) = serde_json::from_str(&json).unwrap();
            other.restore(key, entry, &at(0));
        }
        assert_eq!(other, backoffs);
        assert!(other.remove_expired(&at(600)).is_empty());
        assert_eq!(other.remove_expired(&at(601)), [key()]);
        assert!(backoffs.forget_pod(&PodUid::from("u-1")));
        assert!(!backoffs.forget_pod(&PodUid::from("u-1")));
    }

    #[test]
    fn restored_back_offs_are_clamped_to_the_limits() {
        let restored = |max, delay_seconds, last| {
            let mut backoffs = Backoffs::new(INITIAL_SECONDS, max);
            let stored = BackoffEntry { delay_seconds, last_advanced_unix_nanos: nanos(last) };
            backoffs.restore(key(), stored, &at(50));
            let entry = backoffs.get(&key()).unwrap();
            (entry.delay_seconds, entry.last_advanced_unix_nanos)
        };
        assert_eq!(restored(300, 40, 20), (40, nanos(20)));
        assert_eq!(restored(20, 40, 20), (20, nanos(20)), "a lower maximum");
        assert_eq!(restored(300, -1, 20), (INITIAL_SECONDS, nanos(20)), "a foreign number");
        assert_eq!(restored(300, 40, 90), (40, nanos(50)), "the clock was set back");
    }

    #[test]
    fn back_off_entries_are_listed_per_pod_with_the_last_advance() {
        let of = |uid: &str, container: &str| BackoffKey {
            uid: PodUid::from(uid),
            container: container.to_owned(),
            shape: 1,
        };
        let mut backoffs = Backoffs::default();
        for (uid, container, second) in [("u", "b", 7), ("u", "a", 5), ("t", "a", 9), ("u-1", "a", 9)] {
            backoffs.advance(&of(uid, container), nanos(0), &at(second));
        }
        let uid = PodUid::from("u");
        let names: Vec<&str> = backoffs.of_pod(&uid).map(|(key, _)| key.container.as_str()).collect();
        assert_eq!(names, ["a", "b"]);
        assert_eq!(backoffs.last_advanced_unix_nanos(&uid), Some(nanos(7)));
        backoffs.forget_pod(&uid);
        assert_eq!(backoffs.last_advanced_unix_nanos(&uid), None);
    }

    #[test]
    fn back_off_key_depends_on_image_and_resources_only() {
        let of = |container: serde_json::Value| {
            let pod = pod(json!({ "containers": [container] }));
            BackoffKey::of(&pod, &pod.spec.containers[0])
        };
        let base = of(json!({"name": "a", "image": "x"}));
        assert_eq!(base, of(json!({"name": "a", "image": "x", "args": ["y"]})));
        assert_ne!(base, of(json!({"name": "a", "image": "y"})));
        assert_ne!(base, of(json!({"name": "a", "image": "x", "resources": {"limits": {"cpu": "1"}}})));
        assert!(base.to_string().starts_with("u-1/a/"));
    }

    #[test]
    fn a_termination_in_the_future_has_no_back_off() {
        let mut backoffs = Backoffs::default();
        backoffs.advance(&key(), nanos(100), &at(100));
        assert!(backoffs.waits_until(&key(), nanos(100), &at(100)).is_some());
        assert_eq!(
            backoffs.waits_until(&key(), nanos(100), &at(40)),
            None,
            "the clock was set back by a minute"
        );
    }
}
