//! The lease of the node: a key that is there while the node lives.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use keelson_etcd::{Entry, Etcd, EtcdError, Expect, NodeKeys, Operation, Written};
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
    held: Mutex<Option<i64>>,
    taken: Notify,
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
            held: Mutex::default(),
            taken: Notify::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<i64>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lease, while this agent has it.
    pub(super) fn held(&self) -> Option<i64> {
        *self.lock()
    }

    /// Somebody else has the node, or nobody.
    pub(super) fn lost(&self) {
        *self.lock() = None;
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
        let entry = self.etcd.get(&self.key).await?;
        match entry {
            Some(entry) if !self.is_ours(&entry) => {
                self.lost();
                Err(self.other(&entry))
            }
            // Ours, perhaps of the run before.
            Some(entry) if entry.lease != 0 && self.etcd.keep_alive(entry.lease).await? => {
                self.hold(entry.lease);
                Ok(())
            }
            Some(entry) => self.take(Expect::Revision(entry.mod_revision)).await,
            None => self.take(Expect::Absent).await,
        }
    }

    async fn take(&self, expect: Expect) -> Result<(), EtcdError> {
        self.lost();
        let lease = self.etcd.grant(self.seconds).await?;
        let operation = Operation::Put { key: self.key.clone(), value: self.value(), lease };
        let written = self.etcd.write(&[(self.key.clone(), expect)], &[operation]).await;
        if let Ok(Written::Done(_)) = written {
            tracing::info!(node = self.node, lease, "this agent has the lease of the node");
            self.hold(lease);
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
        let before = self.lock().replace(lease);
        if before != Some(lease) {
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

fn holder_of(entry: &Entry) -> Option<String> {
    let lease: Value = serde_json::from_slice(&entry.value).ok()?;
    Some(lease.pointer("/spec/holderIdentity")?.as_str()?.to_owned())
}
