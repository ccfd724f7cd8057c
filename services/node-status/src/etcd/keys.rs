//! Writes of single keys, each against the revision that is known of it.

use std::borrow::Cow;
use std::collections::BTreeMap;

use keelson_etcd::{Entry, EtcdError, Expect, Operation, Written};
use keelson_node_status_core::PodReport;
use serde::Deserialize;

use crate::etcd::EtcdWriter;

/// The last known state of the keys that this agent writes.
pub(super) type KeyCache = BTreeMap<String, CachedKey>;

/// The last known state of a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CachedKey {
    /// The revision of its last change; 0: the key does not exist.
    revision: i64,
    /// The pod in its value.
    pub(super) pod: Option<StoredPod>,
}

impl CachedKey {
    pub(super) fn of(entry: Option<&Entry>) -> Self {
        let revision = entry.map_or(0, |entry| entry.mod_revision);
        Self { revision, pod: entry.and_then(|entry| StoredPod::of(&entry.value)) }
    }
}

/// The pod that a stored status is of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StoredPod {
    pub(super) uid: Box<str>,
    /// When the agent first saw it, RFC 3339.
    pub(super) seen: Box<str>,
}

impl From<&PodReport> for StoredPod {
    fn from(report: &PodReport) -> Self {
        Self { uid: report.uid.as_str().into(), seen: report.pod.seen.clone() }
    }
}

impl StoredPod {
    /// `None` for a value that is not a pod.
    fn of(json: &[u8]) -> Option<Self> {
        #[derive(Deserialize)]
        struct Pod<'a> {
            #[serde(borrow)]
            metadata: Metadata<'a>,
        }
        #[derive(Deserialize)]
        struct Metadata<'a> {
            #[serde(borrow)]
            uid: Cow<'a, str>,
            #[serde(borrow, default)]
            annotations: Annotations<'a>,
        }
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct Annotations<'a> {
            #[serde(borrow, rename = "kubernetes.io/config.seen")]
            seen: Cow<'a, str>,
        }
        let Pod { metadata } = serde_json::from_slice(json).ok()?;
        Some(Self { uid: metadata.uid.into(), seen: metadata.annotations.seen.into() })
    }
}

/// The value to which a key is set.
#[derive(Debug, Default)]
pub(super) struct NewValue {
    /// The bytes; `None`: the key is deleted.
    pub(super) bytes: Option<Vec<u8>>,
    /// The pod in them.
    pub(super) pod: Option<StoredPod>,
}

impl NewValue {
    /// A value that is not a pod's.
    pub(super) fn without_pod(bytes: Option<&Vec<u8>>) -> Self {
        Self { bytes: bytes.cloned(), pod: None }
    }
}

impl EtcdWriter {
    /// Sets `key` to `value`, if `may` accepts the pod in its current value. Returns whether it was changed.
    pub(super) async fn write(
        &self,
        key: &str,
        value: NewValue,
        cache: &mut KeyCache,
        may: impl Fn(Option<&StoredPod>) -> bool,
    ) -> Result<bool, EtcdError> {
        // Once more for each change by another writer in between; there should be none.
        for _ in 0..8 {
            let Some(lease) = self.lease.held() else { return Err(self.lease_lost()) };
            let Some(before) = self.key_to_change(key, &value, cache).await? else { return Ok(false) };
            if !may(before.pod.as_ref()) || (value.bytes.is_none() && before.revision == 0) {
                return Ok(false);
            }
            let expect =
                if before.revision == 0 { Expect::Absent } else { Expect::Revision(before.revision) };
            let operation = match &value.bytes {
                Some(bytes) => Operation::Put { key: key.to_owned(), value: bytes.clone(), lease: 0 },
                None => Operation::Delete { key: key.to_owned() },
            };
            let expected = [(key.to_owned(), expect), (self.keys.lease(), Expect::Lease(lease))];
            match self.etcd.write(&expected, &[operation]).await? {
                Written::Done(revision) => {
                    match value.bytes {
                        Some(_) => {
                            cache.insert(key.to_owned(), CachedKey { revision, pod: value.pod });
                        }
                        None => drop(cache.remove(key)),
                    }
                    return Ok(true);
                }
                Written::Conflict(found) => {
                    cache.remove(key);
                    let holder = found.get(1).and_then(Option::as_ref).map_or(0, |entry| entry.lease);
                    if holder != lease {
                        // Another lease may have been acquired meanwhile.
                        self.lease.clear_held_if(lease);
                        continue;
                    }
                    tracing::warn!(
                        key,
                        "another writer has changed a key that this node reports; reading it again"
                    );
                }
            }
        }
        let message = format!(
            "{key} changes faster than this agent can write it; find out which other client writes it"
        );
        Err(EtcdError::Unreachable { endpoints: self.etcd.endpoints(), message })
    }

    /// The state of a key before it is changed, read if it is not known; `None`: it has the value already.
    async fn key_to_change(
        &self,
        key: &str,
        value: &NewValue,
        cache: &mut KeyCache,
    ) -> Result<Option<CachedKey>, EtcdError> {
        if let Some(known) = cache.get(key) {
            return Ok(Some(known.clone()));
        }
        let entry = self.etcd.get(key).await?;
        let before = CachedKey::of(entry.as_ref());
        cache.insert(key.to_owned(), before.clone());
        // After a start of this service, unchanged keys are not written.
        let is_unchanged = entry.is_some_and(|entry| Some(&entry.value) == value.bytes.as_ref());
        Ok((!is_unchanged).then_some(before))
    }
}
