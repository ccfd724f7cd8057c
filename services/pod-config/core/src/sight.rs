//! What is kept of a pod over a restart of the service, so that a restart changes nothing of what is sent.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use serde::{Deserialize, Serialize};

use crate::merge::SourcePod;

/// When a pod was first seen, and as what it was last sent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sight {
    /// When the UID was first seen, nanoseconds since 1970.
    pub seen_unix_nanos: i64,
    /// The revision that was sent last.
    pub revision: u64,
    /// What the revision was sent for, see [`digest`].
    pub digest: u64,
    /// W3C trace context that was sent with it; empty without one.
    pub traceparent: String,
}

impl Sight {
    /// The bytes that go to the disk.
    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// What stands in `bytes`; `None` when it cannot be meant.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let sight: Self = serde_json::from_slice(bytes).ok()?;
        // Both are moments; the revision must be able to grow.
        (sight.seen_unix_nanos > 0 && i64::try_from(sight.revision).is_ok()).then_some(sight)
    }
}

/// Tells one version of a pod from another, also over a restart: two of one digest are sent as the same bytes.
///
/// Another release may hash in another way; then every pod gets a new revision once, and keeps its first sight.
pub fn digest(source: &str, pod: &SourcePod) -> u64 {
    let mut hasher = DefaultHasher::new();
    (source, &pod.origin, &pod.json).hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sight_survives_the_disk_and_what_is_damaged_does_not() {
        let sight =
            Sight { seen_unix_nanos: 5, revision: 7, digest: u64::MAX, traceparent: "00-a-b-01".into() };
        assert_eq!(Sight::decode(&sight.encode()), Some(sight.clone()));
        for seen_unix_nanos in [0, -1] {
            assert_eq!(Sight::decode(&Sight { seen_unix_nanos, ..sight.clone() }.encode()), None);
        }
        assert_eq!(Sight::decode(&Sight { revision: u64::MAX, ..sight.clone() }.encode()), None);
        let whole = sight.encode();
        assert_eq!(Sight::decode(&whole[..whole.len() - 1]), None);
        assert_eq!(Sight::decode(b""), None);
    }
}
