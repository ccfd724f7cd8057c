//! The lease of the node: a key that is there while the node lives.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use keelson_etcd::{Entry, Etcd, EtcdError, Expect, Listing, NodeKeys, Operation, Range, Written};
use keelson_kube_model::time;
use keelson_service_kit::now_unix_nanos;
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio::time::timeout;

use crate::etcd::in_words;
use crate::writer::WriteError;

/// How long a renewal may take; then it is tried again.
const RENEWAL: Duration = Duration::from_secs(10);

/// The node's lease, as far as this agent has it.
pub(super) struct Lease {
    etcd: Etcd,
    key: String,
    node: String,
    identity: String,
    seconds: u32,
    state: Mutex<State>,
    taken: Notify,
}

#[derive(Default)]
struct State {
    /// The lease, while this agent has it.
    held: Option<i64>,
    /// See [`Lease::term`].
    term: u64,
    /// The cluster and its revision as they were last seen.
    store: Option<(u64, i64)>,
}

impl Lease {
    /// Not held yet. `identity` tells this agent from any other.
    pub(super) fn new(etcd: Etcd, keys: &NodeKeys, node: &str, identity: String, seconds: u32) -> Self {
        Self {
            etcd,
            key: keys.lease(),
            node: node.to_owned(),
            identity,
            seconds,
            state: Mutex::default(),
            taken: Notify::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lease, while this agent has it.
    pub(super) fn held(&self) -> Option<i64> {
        self.lock().held
    }

    /// Counts how often the lease was taken or etcd was put back to a former state; 0: not taken yet. What was known of the
    /// node's keys in one term need not hold in the next.
    pub(super) fn term(&self) -> u64 {
        self.lock().term
    }

    /// Somebody else has the node, or nobody.
    fn lost(&self) {
        self.lock().held = None;
    }

    /// A write under `lease` has found that the node's key is not on it any more. Another one may have been taken since.
    pub(super) fn lost_if(&self, lease: i64) {
        let mut state = self.lock();
        if state.held == Some(lease) {
            state.held = None;
        }
    }

    /// Returns when the lease is taken.
    pub(super) async fn taken(&self) {
        self.taken.notified().await;
    }

    /// Renews the lease, or takes it where nobody has it.
    ///
    /// # Errors
    /// etcd does not answer, or another agent has the node.
    pub(super) async fn renew(&self) -> Result<(), WriteError> {
        let what = "the node's lease";
        let late = |_| WriteError::Unreachable {
            what: what.to_owned(),
            message: format!("no answer within {} s", RENEWAL.as_secs()),
        };
        timeout(RENEWAL, self.turn()).await.map_err(late)?.map_err(|error| in_words(what, &error))
    }

    async fn turn(&self) -> Result<(), EtcdError> {
        let listing = self.etcd.list(&Range::key(self.key.clone())).await?;
        self.look_at_store(&listing);
        let Some(entry) = listing.entries.first() else { return self.take(Expect::Absent, None).await };
        if !self.is_ours(entry) {
            self.lost();
            return Err(self.other(entry));
        }
        // Ours, perhaps of the run before, and perhaps of another length.
        let is_alive = entry.lease != 0 && self.etcd.keep_alive(entry.lease).await?;
        if is_alive && seconds_of(entry) == Some(self.seconds) {
            self.hold(entry.lease);
            return Ok(());
        }
        self.take(Expect::Revision(entry.mod_revision), is_alive.then_some(entry.lease)).await
    }

    /// A store whose revision goes back, or whose cluster is another, was restored: the lease may be in what it was restored
    /// from.
    fn look_at_store(&self, listing: &Listing) {
        let mut state = self.lock();
        let before = state.store.replace((listing.cluster, listing.revision));
        let Some((cluster, revision)) = before else { return };
        if cluster != listing.cluster || listing.revision < revision {
            state.term += 1;
            self.taken.notify_one();
        }
    }

    /// Takes the node with a new lease. `before` is the one that its key is on now; it is ended.
    async fn take(&self, expect: Expect, before: Option<i64>) -> Result<(), EtcdError> {
        self.lost();
        let lease = self.etcd.grant(self.seconds).await?;
        let operation = Operation::Put { key: self.key.clone(), value: self.value(), lease };
        let written = self.etcd.write(&[(self.key.clone(), expect)], &[operation]).await;
        if let Ok(Written::Done(_)) = written {
            tracing::info!(node = self.node, lease, "this agent has the lease of the node");
            self.hold(lease);
            if let Some(before) = before {
                // It has no key any more, and ends by itself, too.
                let _ = self.etcd.revoke(before).await;
            }
            return Ok(());
        }
        // It ends by itself, too; but who looks at leases should not wonder.
        let _ = self.etcd.revoke(lease).await;
        if let Written::Conflict(found) = written?
            && let Some(Some(entry)) = found.first()
        {
            return Err(self.other(entry));
        }
        let message = "the lease of the node changes while it is taken".to_owned();
        Err(EtcdError::Unreachable { endpoints: self.etcd.endpoints(), message })
    }

    fn hold(&self, lease: i64) {
        let mut state = self.lock();
        if state.held.replace(lease) != Some(lease) {
            state.term += 1;
            self.taken.notify_one();
        }
    }

    /// As `coordination.k8s.io/v1` has it, without the times of renewals: those are etcd's.
    fn value(&self) -> Vec<u8> {
        let now = i128::from(now_unix_nanos());
        json!({
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self.node, "namespace": "kube-node-lease"},
            "spec": {
                "holderIdentity": self.holder(),
                "leaseDurationSeconds": self.seconds,
                "acquireTime": time::format_micros(now).unwrap_or_default(),
            },
        })
        .to_string()
        .into_bytes()
    }

    fn holder(&self) -> String {
        format!("{}_{}", self.node, self.identity)
    }

    fn is_ours(&self, entry: &Entry) -> bool {
        holder_of(entry).is_some_and(|holder| holder == self.holder())
    }

    fn other(&self, entry: &Entry) -> EtcdError {
        let holder = holder_of(entry).unwrap_or_else(|| "nobody who says so".to_owned());
        let what = format!("this agent the node {}", self.node);
        let message = format!(
            "another agent has it ({holder}); give one of the two another name, or wait {} s if the other has ended",
            self.seconds
        );
        EtcdError::Refused { what, message }
    }
}

/// How long the lease was asked to be.
fn seconds_of(entry: &Entry) -> Option<u32> {
    let lease: Value = serde_json::from_slice(&entry.value).ok()?;
    u32::try_from(lease.pointer("/spec/leaseDurationSeconds")?.as_u64()?).ok()
}

fn holder_of(entry: &Entry) -> Option<String> {
    let lease: Value = serde_json::from_slice(&entry.value).ok()?;
    Some(lease.pointer("/spec/holderIdentity")?.as_str()?.to_owned())
}

#[cfg(test)]
mod tests {
    use keelson_config::Etcd as Settings;

    use super::*;

    fn lease() -> Lease {
        let etcd = Etcd::new(Settings::plain(Vec::new()));
        Lease::new(etcd, &NodeKeys::new("n1"), "n1", "a".to_owned(), 40)
    }

    #[test]
    fn a_write_under_a_former_lease_does_not_lose_the_one_that_was_taken_since() {
        let lease = lease();
        lease.hold(1);
        lease.hold(2);
        lease.lost_if(1);
        assert_eq!(lease.held(), Some(2));
        lease.lost_if(2);
        assert_eq!(lease.held(), None);
    }

    #[test]
    fn a_term_begins_with_each_taking_and_with_a_store_that_was_put_back() {
        let lease = lease();
        let see = |cluster, revision| {
            lease.look_at_store(&Listing { entries: Vec::new(), revision, cluster });
            lease.hold(1);
            lease.term()
        };
        assert_eq!(lease.term(), 0);
        assert_eq!([see(7, 5), see(7, 5), see(7, 9)], [1, 1, 1]);
        assert_eq!([see(7, 8), see(7, 8), see(6, 9), see(6, 10)], [2, 2, 3, 3]);
        lease.lost();
        assert_eq!(see(6, 10), 4);
    }
}
