//! What the merge decides about each sent pod. The checkpoint stores it, so that a restart of the service sends the same pods as
//! the same bytes.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use serde::{Deserialize, Serialize};

/// When a pod was first seen, and the version of it that was sent last.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SentRecord {
    /// When the UID was first seen, nanoseconds since 1970.
    pub seen_unix_nanos: i64,
    /// The revision that was sent last.
    pub revision: u64,
    /// Digest of the version with this revision, see [`digest`].
    pub digest: u64,
    /// W3C trace context that was sent with it; empty if there was none.
    pub traceparent: String,
}

impl SentRecord {
    /// Encodes the record for the checkpoint.
    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Decodes a record; `None` if `bytes` are damaged.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let record: Self = serde_json::from_slice(bytes).ok()?;
        // Timestamps are positive, and the revision must have room to grow.
        (record.seen_unix_nanos > 0 && i64::try_from(record.revision).is_ok()).then_some(record)
    }
}

/// Hash that identifies one version of a pod, also over a restart: versions with the same digest are sent as the same bytes.
///
/// `origin` is where `source` has read the pod, and `json` the pod itself.
///
/// Another release may hash differently; then every pod gets a new revision once, and keeps the time at which it was first seen.
pub fn digest(source: &str, origin: &str, json: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    (source, origin, json).hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sent_record_round_trips_and_a_damaged_one_is_rejected() {
        let record =
            SentRecord { seen_unix_nanos: 5, revision: 7, digest: u64::MAX, traceparent: "00-a-b-01".into() };
        assert_eq!(SentRecord::decode(&record.encode()), Some(record.clone()));
        for seen_unix_nanos in [0, -1] {
            assert_eq!(SentRecord::decode(&SentRecord { seen_unix_nanos, ..record.clone() }.encode()), None);
        }
        assert_eq!(SentRecord::decode(&SentRecord { revision: u64::MAX, ..record.clone() }.encode()), None);
        let whole = record.encode();
        assert_eq!(SentRecord::decode(&whole[..whole.len() - 1]), None);
        assert_eq!(SentRecord::decode(b""), None);
    }
}
