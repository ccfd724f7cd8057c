//! The node's lease: a key that exists while the node is alive.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use keelson_etcd::{Entry, Etcd, EtcdError, Expect, Listing, NodeKeys, Operation, Range, Written};
use keelson_kube_model::time;
use keelson_service_kit::now_unix_nanos;
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio::time::timeout;

use crate::etcd::write_error;
use crate::writer::WriteError;

/// Timeout of a renewal; then it is retried.
const RENEWAL_TIMEOUT: Duration = Duration::from_secs(10);

/// The node's lease, as this agent sees it.
pub(super) struct Lease {
    etcd: Etcd,
    key: String,
    node: String,
    identity: String,
    seconds: u32,
    state: Mutex<State>,
    acquired: Notify,
}

#[derive(Default)]
struct State {
    /// The ID of the lease, while this agent holds it.
    held: Option<i64>,
    /// See [`Lease::term`].
    term: u64,
    /// The cluster and its revision when they were last read.
    store: Option<(u64, i64)>,
}

impl Lease {
    /// Not held yet. `identity` distinguishes this agent from any other.
    pub(super) fn new(etcd: Etcd, keys: &NodeKeys, node: &str, identity: String, seconds: u32) -> Self {
        Self {
            etcd,
            key: keys.lease(),
            node: node.to_owned(),
            identity,
            seconds,
            state: Mutex::default(),
            acquired: Notify::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The ID of the lease, while this agent holds it.
    pub(super) fn held(&self) -> Option<i64> {
        self.lock().held
    }

    /// Counts how often the lease was acquired or etcd was restored to an earlier state; 0: never. What is cached of the node's
    /// keys in one term may be wrong in the next.
    pub(super) fn term(&self) -> u64 {
        self.lock().term
    }

    /// Another agent has the node, or nobody has.
    fn clear_held(&self) {
        self.lock().held = None;
    }

    /// A write under `lease` has failed because the node's key is not on it any more. Another lease may have been acquired since.
    pub(super) fn clear_held_if(&self, lease: i64) {
        let mut state = self.lock();
        if state.held == Some(lease) {
            state.held = None;
        }
    }

    /// Returns when a lease has been acquired.
    pub(super) async fn acquired(&self) {
        self.acquired.notified().await;
    }

    /// Renews the lease, or acquires it if nobody holds it.
    ///
    /// # Errors
    /// etcd does not answer, or another agent has the node.
    pub(super) async fn renew(&self) -> Result<(), WriteError> {
        let what = "the node's lease";
        let timed_out = |_| WriteError::Unreachable {
            what: what.to_owned(),
            message: format!("no answer within {} s", RENEWAL_TIMEOUT.as_secs()),
        };
        timeout(RENEWAL_TIMEOUT, self.renew_once())
            .await
            .map_err(timed_out)?
            .map_err(|error| write_error(what, &error))
    }

    async fn renew_once(&self) -> Result<(), EtcdError> {
        let listing = self.etcd.list(&Range::key(self.key.clone())).await?;
        self.check_store(&listing);
        let Some(entry) = listing.entries.first() else { return self.acquire(Expect::Absent, None).await };
        if !self.is_ours(entry) {
            self.clear_held();
            return Err(self.held_by_other(entry));
        }
        // Ours, perhaps from an earlier run, and perhaps with another duration.
        let is_alive = entry.lease != 0 && self.etcd.keep_alive(entry.lease).await?;
        if is_alive && seconds_of(entry) == Some(self.seconds) {
            self.hold(entry.lease);
            return Ok(());
        }
        self.acquire(Expect::Revision(entry.mod_revision), is_alive.then_some(entry.lease)).await
    }

    /// Starts a new term when the store's revision went back or its cluster is another: etcd was restored, and the restored data
    /// may contain the lease.
    fn check_store(&self, listing: &Listing) {
        let mut state = self.lock();
        let before = state.store.replace((listing.cluster, listing.revision));
        let Some((cluster, revision)) = before else { return };
        if cluster != listing.cluster || listing.revision < revision {
            state.term += 1;
            self.acquired.notify_one();
        }
    }

    /// Acquires the node with a new lease. `before` is the one that its key is on now; it is revoked.
    async fn acquire(&self, expect: Expect, before: Option<i64>) -> Result<(), EtcdError> {
        self.clear_held();
        let lease = self.etcd.grant(self.seconds).await?;
        let operation = Operation::Put { key: self.key.clone(), value: self.value(), lease };
        let written = self.etcd.write(&[(self.key.clone(), expect)], &[operation]).await;
        if let Ok(Written::Done(_)) = written {
            tracing::info!(node = self.node, lease, "this agent has acquired the lease of the node");
            self.hold(lease);
            if let Some(before) = before {
                // It has no keys any more and would expire by itself, too.
                let _ = self.etcd.revoke(before).await;
            }
            return Ok(());
        }
        // It would expire by itself, but an operator who lists leases should not find a leftover.
        let _ = self.etcd.revoke(lease).await;
        if let Written::Conflict(found) = written?
            && let Some(Some(entry)) = found.first()
        {
            return Err(self.held_by_other(entry));
        }
        let message = "the lease of the node changed while this agent was acquiring it".to_owned();
        Err(EtcdError::Unreachable { endpoints: self.etcd.endpoints(), message })
    }

    fn hold(&self, lease: i64) {
        let mut state = self.lock();
        if state.held.replace(lease) != Some(lease) {
            state.term += 1;
            self.acquired.notify_one();
        }
    }

    /// The value of the key: a `coordination.k8s.io/v1` Lease without the times of renewals, which only etcd knows.
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

    fn held_by_other(&self, entry: &Entry) -> EtcdError {
        let holder = holder_of(entry).unwrap_or_else(|| "a holder without an identity".to_owned());
        let what = format!("this agent the node {}", self.node);
        let message = format!(
            "another agent has it ({holder}); give one of the two another name, or wait {} s if the other has ended",
            self.seconds
        );
        EtcdError::Refused { what, message }
    }
}

/// The duration for which the lease was requested.
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
    fn a_failed_write_under_an_old_lease_keeps_the_new_one() {
        let lease = lease();
        lease.hold(1);
        lease.hold(2);
        lease.clear_held_if(1);
        assert_eq!(lease.held(), Some(2));
        lease.clear_held_if(2);
        assert_eq!(lease.held(), None);
    }

    #[test]
    fn a_term_begins_with_each_acquired_lease_and_each_etcd_restore() {
        let lease = lease();
        let see = |cluster, revision| {
            lease.check_store(&Listing { entries: Vec::new(), revision, cluster });
            lease.hold(1);
            lease.term()
        };
        assert_eq!(lease.term(), 0);
        assert_eq!([see(7, 5), see(7, 5), see(7, 9)], [1, 1, 1]);
        assert_eq!([see(7, 8), see(7, 8), see(6, 9), see(6, 10)], [2, 2, 3, 3]);
        lease.clear_held();
        assert_eq!(see(6, 10), 4);
    }
}
