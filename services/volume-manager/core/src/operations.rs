//! Pending operations (volumes.md §3.7): which operations may run at the same time, and when a failed one is retried.
//!
//! Moments are milliseconds of a clock of the caller that never goes back.

use std::collections::BTreeMap;
use std::fmt;

#[cfg(test)]
mod tests;

/// Milliseconds that an operation backs off after its first error.
pub const INITIAL_BACK_OFF: u64 = 500;
/// Milliseconds that an operation backs off at most: 2 min 2 s.
pub const MAX_BACK_OFF: u64 = 122_000;

/// The unique name of a volume on this node (volumes.md §1), such as `kubernetes.io/csi/<driver>^<handle>`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VolumeName(String);

/// The UID of a pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodUid(String);

impl VolumeName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl PodUid {
    /// The UID as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for VolumeName {
    fn from(name: &str) -> Self {
        Self(name.to_owned())
    }
}

impl From<String> for VolumeName {
    fn from(name: String) -> Self {
        Self(name)
    }
}

impl From<&str> for PodUid {
    fn from(uid: &str) -> Self {
        Self(uid.to_owned())
    }
}

impl From<String> for PodUid {
    fn from(uid: String) -> Self {
        Self(uid)
    }
}

impl fmt::Display for VolumeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for PodUid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What an operation does. A volume in block mode has the same kinds: its device is set up, then mapped for each pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum OperationKind {
    /// Check with the API server that the volume is attached.
    VerifyAttached,
    /// Attach the volume to this node.
    Attach,
    /// Detach the volume from this node.
    Detach,
    /// Mount the device that all pods share.
    MountDevice,
    /// Set up the volume for a pod.
    SetUp,
    /// Grow the volume.
    Resize,
    /// Remove the volume from a pod.
    TearDown,
    /// Unmount the shared device.
    UnmountDevice,
}

impl OperationKind {
    /// Whether it gives a volume to pods. The others take it away.
    pub const fn is_for_pods(self) -> bool {
        match self {
            Self::VerifyAttached | Self::Attach | Self::MountDevice | Self::SetUp | Self::Resize => true,
            Self::Detach | Self::TearDown | Self::UnmountDevice => false,
        }
    }
}

impl fmt::Display for OperationKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::VerifyAttached => "the attachment check",
            Self::Attach => "the attachment",
            Self::Detach => "the detachment",
            Self::MountDevice => "the device mount",
            Self::SetUp => "the set-up",
            Self::Resize => "the expansion",
            Self::TearDown => "the teardown",
            Self::UnmountDevice => "the device unmount",
        })
    }
}

/// What an operation works on. Two operations whose keys [match](Self::matches) never run at the same time.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct OperationKey {
    /// The volume. `None` matches nothing.
    pub volume: Option<VolumeName>,
    /// The pod. `None` matches every pod of the volume.
    pub pod: Option<PodUid>,
    /// The node. `None` matches every node.
    pub node: Option<String>,
    /// The pod for which an operation on the whole volume runs. It has no part in matching.
    pub on_behalf_of: Option<PodUid>,
}

impl OperationKey {
    /// An operation on a whole volume, over all of its pods.
    pub fn whole(volume: VolumeName, on_behalf_of: Option<PodUid>) -> Self {
        Self { volume: Some(volume), pod: None, node: None, on_behalf_of }
    }

    /// An operation on a volume of one pod.
    pub fn of_pod(volume: VolumeName, pod: PodUid) -> Self {
        Self { volume: Some(volume), pod: Some(pod), node: None, on_behalf_of: None }
    }

    /// Whether operations with these keys exclude each other.
    pub fn matches(&self, other: &Self) -> bool {
        fn overlap<T: PartialEq>(left: Option<&T>, right: Option<&T>) -> bool {
            left.zip(right).is_none_or(|(left, right)| left == right)
        }
        self.volume.is_some()
            && self.volume == other.volume
            && overlap(self.pod.as_ref(), other.pod.as_ref())
            && overlap(self.node.as_ref(), other.node.as_ref())
    }
}

/// Why an operation does not start. It belongs into the log alone.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// A matching operation runs.
    #[error("{kind} of volume {volume} is still running")]
    Running {
        /// The volume.
        volume: VolumeName,
        /// What runs.
        kind: OperationKind,
    },
    /// The same operation has failed a short time ago.
    #[error(
        "{kind} of volume {volume} failed; no retry is permitted until {until} ms, {left} ms from now: {error}"
    )]
    BackOff {
        /// The volume.
        volume: VolumeName,
        /// What failed.
        kind: OperationKind,
        /// The moment of the next retry.
        until: u64,
        /// Milliseconds until then.
        left: u64,
        /// The last error.
        error: String,
    },
}

/// The operations that run, and those that have failed and are to be retried.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Operations(BTreeMap<VolumeName, Vec<Record>>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Record {
    key: OperationKey,
    kind: OperationKind,
    /// How long the last error made the operation back off, in milliseconds; 0 without one.
    back_off: u64,
    state: State,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    Running,
    Failed { until: u64, error: String },
}

impl Operations {
    /// Records that an operation starts at `now`, or says why it must not. An error of another kind on a matching key
    /// is forgotten with its back-off.
    pub fn start(&mut self, key: &OperationKey, kind: OperationKind, now: u64) -> Result<(), Refusal> {
        if let Some(refusal) = self.refusal(key, kind, now) {
            return Err(refusal);
        }
        let Some(volume) = &key.volume else { return Ok(()) };
        let records = self.0.entry(volume.clone()).or_default();
        let mut back_off = 0;
        records.retain(|record| {
            let is_replaced = record.key.matches(key);
            if is_replaced && record.kind == kind {
                back_off = back_off.max(record.back_off);
            }
            !is_replaced
        });
        records.push(Record { key: key.clone(), kind, back_off, state: State::Running });
        Ok(())
    }

    /// Why an operation must not start at `now`; `None` if it may.
    pub fn refusal(&self, key: &OperationKey, kind: OperationKind, now: u64) -> Option<Refusal> {
        if let Some(running) = self.running(key) {
            return Some(running);
        }
        let back_offs = self.matching(key).filter(|record| record.kind == kind).filter_map(|record| {
            let State::Failed { until, error } = &record.state else { return None };
            (now < *until).then_some((*until, error))
        });
        let (until, error) = back_offs.max_by_key(|(until, _)| *until)?;
        let (volume, error) = (key.volume.clone()?, error.clone());
        Some(Refusal::BackOff { volume, kind, until, left: until.saturating_sub(now), error })
    }

    /// The matching operation that runs.
    pub fn running(&self, key: &OperationKey) -> Option<Refusal> {
        let record = self.matching(key).find(|record| record.state == State::Running)?;
        Some(Refusal::Running { volume: key.volume.clone()?, kind: record.kind })
    }

    /// The volumes on which an operation of this kind runs, sorted.
    pub fn volumes_with(&self, kind: OperationKind) -> impl Iterator<Item = &VolumeName> {
        let runs = move |record: &Record| record.kind == kind && record.state == State::Running;
        self.0.iter().filter(move |(_, records)| records.iter().any(runs)).map(|(volume, _)| volume)
    }

    /// Records how the operation that was started with `key` ended at `now`: success, or an error after which it backs
    /// off. An operation that does not run is ignored.
    pub fn finish(&mut self, key: &OperationKey, result: Result<(), String>, now: u64) {
        let Some(volume) = &key.volume else { return };
        let Some(records) = self.0.get_mut(volume) else { return };
        let is_it = |record: &Record| record.key == *key && record.state == State::Running;
        let Some(index) = records.iter().position(is_it) else { return };
        match result {
            Ok(()) => {
                records.remove(index);
            }
            Err(error) => {
                let record = &mut records[index];
                record.back_off = next_back_off(record.back_off);
                record.state = State::Failed { until: now.saturating_add(record.back_off), error };
            }
        }
        if records.is_empty() {
            self.0.remove(volume);
        }
    }

    /// The pod for which an operation on the whole volume has failed.
    pub fn failed_for(&self, volume: &VolumeName) -> Option<&PodUid> {
        let failed = |record: &&Record| matches!(record.state, State::Failed { .. });
        self.0.get(volume)?.iter().filter(failed).find_map(|record| record.key.on_behalf_of.as_ref())
    }

    /// Forgets the errors of every volume that `keep` does not name. Operations that run stay.
    pub fn retain(&mut self, keep: impl Fn(&VolumeName) -> bool) {
        self.0.retain(|volume, records| {
            if !keep(volume) {
                records.retain(|record| record.state == State::Running);
            }
            !records.is_empty()
        });
    }

    fn matching<'a>(&'a self, key: &'a OperationKey) -> impl Iterator<Item = &'a Record> {
        let records = key.volume.as_ref().and_then(|volume| self.0.get(volume));
        records.into_iter().flatten().filter(|record| record.key.matches(key))
    }
}

/// The back-off after one more error.
pub(crate) fn next_back_off(last: u64) -> u64 {
    last.saturating_mul(2).clamp(INITIAL_BACK_OFF, MAX_BACK_OFF)
}
