//! How much of the streams of pod-config and runtime-shim has arrived.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use keelson_proto::keelson::pod_config::v1 as config;

use crate::inputs::evictions::EvictionOrders;
use crate::node::RuntimeView;

/// How much of the two streams has arrived.
#[derive(Debug, Default)]
pub struct Sources {
    state: Mutex<State>,
    /// The orders to end pods, which a pod may arrive after.
    pub orders: Arc<EvictionOrders>,
}

#[derive(Debug, Default)]
pub(super) struct State {
    /// UIDs that pod-config has sent since the stream was opened.
    pub(super) sent: BTreeSet<String>,
    /// Sources that have reported all of their pods.
    pub(super) reported: BTreeSet<String>,
    /// All sources.
    pub(super) configured: BTreeSet<String>,
    /// Every source has reported.
    pub(super) complete: bool,
    /// Every source has reported, and its pods are in the registry.
    pub(super) ready: bool,
    /// Static pods that a kubelet may have started, by the UID of their source, until that is known.
    pub(super) held: BTreeMap<String, config::DesiredPod>,
    /// Those of them that are being compared with what runs.
    pub(super) comparing: BTreeSet<String>,
    /// The replay of runtime-shim is complete.
    pub(super) runtime_synced: bool,
    pub(super) runtime: RuntimeView,
    /// UIDs of that replay, until it is complete.
    pub(super) replayed: BTreeSet<String>,
}

impl Sources {
    /// Without anything received yet.
    pub fn new(orders: Arc<EvictionOrders>) -> Self {
        Self { state: Mutex::default(), orders }
    }

    /// Records a UID of runtime-shim's replay, until the replay is complete.
    pub(super) fn record_replayed(&self, uid: &str) {
        let mut state = self.state();
        if !state.runtime_synced {
            state.replayed.insert(uid.to_owned());
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether every source of pods has reported.
    pub fn ready(&self) -> bool {
        self.state().ready
    }
}
