//! What calls read and write: entries, preconditions and operations of a write.

use etcd_client::{Compare, CompareOp, KeyValue, PutOptions, TxnOp};

/// A key with its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The key.
    pub key: String,
    /// The value.
    pub value: Vec<u8>,
    /// The revision that created the key; it changes when the key is deleted and created again.
    pub create_revision: i64,
    /// The revision of its last change.
    pub mod_revision: i64,
    /// The lease that the key expires with; 0: none.
    pub lease: i64,
}

impl From<&KeyValue> for Entry {
    fn from(kv: &KeyValue) -> Self {
        Self {
            key: String::from_utf8_lossy(kv.key()).into_owned(),
            value: kv.value().to_vec(),
            create_revision: kv.create_revision(),
            mod_revision: kv.mod_revision(),
            lease: kv.lease(),
        }
    }
}

/// A range at one revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listing {
    /// The entries, sorted by key.
    pub entries: Vec<Entry>,
    /// The revision of the store.
    pub revision: i64,
    /// The cluster id. It changes when the cluster is restored with new members or another token.
    pub cluster: u64,
}

/// A precondition of a write on a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expect {
    /// The key does not exist.
    Absent,
    /// The key was last changed at this revision.
    Revision(i64),
    /// The key expires with this lease.
    Lease(i64),
}

/// One operation of a write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operation {
    /// Sets a key.
    Put {
        /// The key.
        key: String,
        /// Its value.
        value: Vec<u8>,
        /// The lease that the key expires with; 0: none.
        lease: i64,
    },
    /// Removes a key.
    Delete {
        /// The key.
        key: String,
    },
}

/// The outcome of a write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Written {
    /// The write was made at this revision.
    Done(i64),
    /// A precondition failed. The current entries of the checked keys; `None` for a key that does not exist.
    Conflict(Vec<Option<Entry>>),
}

impl Operation {
    fn key(&self) -> &str {
        match self {
            Self::Put { key, .. } | Self::Delete { key } => key,
        }
    }

    pub(crate) fn what(&self) -> String {
        match self {
            Self::Put { key, .. } => format!("to write {key}"),
            Self::Delete { key } => format!("to remove {key}"),
        }
    }

    pub(crate) fn op(&self) -> TxnOp {
        match self {
            Self::Put { key, value, lease } => {
                TxnOp::put(key.as_str(), value.clone(), Some(PutOptions::new().with_lease(*lease)))
            }
            Self::Delete { key } => TxnOp::delete(key.as_str(), None),
        }
    }
}

/// The comparison that checks a precondition.
pub(crate) fn compare(key: &str, expect: Expect) -> Compare {
    match expect {
        Expect::Absent => Compare::version(key, CompareOp::Equal, 0),
        Expect::Revision(revision) => Compare::mod_revision(key, CompareOp::Equal, revision),
        Expect::Lease(lease) => Compare::lease(key, CompareOp::Equal, lease),
    }
}

/// The revision of an earlier attempt of a write, if every key that it writes was checked and matches the write.
pub(crate) fn made_before(
    expected: &[(String, Expect)],
    operations: &[Operation],
    found: &[Option<Entry>],
) -> Option<i64> {
    let mut revision = 0;
    for operation in operations {
        let at = expected.iter().position(|(key, _)| key == operation.key())?;
        match (operation, found.get(at)?) {
            (Operation::Put { value, .. }, Some(entry)) if entry.value == *value => {
                revision = revision.max(entry.mod_revision);
            }
            (Operation::Delete { .. }, None) => {}
            _ => return None,
        }
    }
    Some(revision)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(key: &str, value: &str, revision: i64) -> Option<Entry> {
        Some(Entry {
            key: key.into(),
            value: value.into(),
            create_revision: 1,
            mod_revision: revision,
            lease: 0,
        })
    }

    #[test]
    fn earlier_attempt_is_detected_when_all_keys_match_the_write() {
        let put = |key: &str, value: &str| Operation::Put { key: key.into(), value: value.into(), lease: 0 };
        let delete = |key: &str| Operation::Delete { key: key.into() };
        let expected = [("a".to_owned(), Expect::Revision(3)), ("b".to_owned(), Expect::Absent)];
        for (operations, found, made) in [
            (vec![put("a", "x")], [entry("a", "x", 7), None], Some(7)),
            (vec![put("a", "x")], [entry("a", "y", 7), None], None),
            (vec![put("a", "x")], [None, None], None),
            (vec![put("a", "x"), put("b", "z")], [entry("a", "x", 7), entry("b", "z", 7)], Some(7)),
            (vec![put("a", "x"), put("b", "z")], [entry("a", "x", 7), None], None),
            (vec![delete("a")], [None, None], Some(0)),
            (vec![delete("a")], [entry("a", "x", 7), None], None),
            // Its key was not checked.
            (vec![put("c", "x")], [entry("a", "x", 7), None], None),
        ] {
            assert_eq!(made_before(&expected, &operations, &found), made, "{operations:?} {found:?}");
        }
    }
}
