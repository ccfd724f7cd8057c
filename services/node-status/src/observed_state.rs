//! The last data of the machine, the runtime, its images, the volumes in use and the CSI drivers.

use std::sync::Arc;

use keelson_kube_model::ContainerImage;
use keelson_node_status_core::{CsiDrivers, Machine, RuntimeState};

/// The last data of resource-manager, runtime-shim and volume-manager. It stays in effect while they are down, which the watchdog
/// reports.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct ObservedState {
    pub(crate) machine: Option<Machine>,
    pub(crate) runtime: Option<RuntimeState>,
    /// Since when runtime-shim has had no answer of the runtime, after an earlier one.
    pub(crate) runtime_unknown_since_ms: Option<u64>,
    /// The runtime's images that the Node lists; `None` before the first answer. Only the first list wakes watchers.
    pub(crate) images: Option<Arc<[ContainerImage]>>,
    /// The attachable volumes that this node uses, sorted; `None` before volume-manager has reported.
    pub(crate) volumes_in_use: Option<Arc<[String]>>,
    /// The CSI drivers that the Node shows.
    pub(crate) csi_drivers: Arc<CsiDrivers>,
}

impl ObservedState {
    /// Stores a state of the runtime. While the runtime does not answer, or a restarted runtime-shim has not asked it yet, the
    /// last answer stays in effect; only the time since when is stored.
    pub(crate) fn store_runtime(&mut self, state: RuntimeState, now_ms: u64) {
        let unknown = state.unreachable || state.name.is_empty();
        if unknown && self.runtime.as_ref().is_some_and(|known| !known.name.is_empty()) {
            self.runtime_unknown_since_ms.get_or_insert(now_ms);
        } else {
            self.runtime = Some(state);
            self.runtime_unknown_since_ms = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(name: &str, ready: bool, unreachable: bool) -> RuntimeState {
        let name = name.to_owned();
        RuntimeState { name, ready, network_ready: ready, unreachable, ..RuntimeState::default() }
    }

    #[test]
    fn the_last_runtime_state_is_kept_while_the_runtime_is_unreachable() {
        let (good, bad) = (state("containerd", true, false), state("containerd", false, false));
        let (away, unasked) = (state("containerd", false, true), state("", false, false));
        let mut observed = ObservedState::default();
        for (now, taken, expected, since) in [
            (0, &unasked, &unasked, None),
            (1, &good, &good, None),
            (2, &unasked, &good, Some(2)),
            (3, &away, &good, Some(2)),
            (4, &bad, &bad, None),
            (5, &away, &bad, Some(5)),
            (6, &good, &good, None),
        ] {
            observed.store_runtime(taken.clone(), now);
            assert_eq!(observed.runtime.as_ref(), Some(expected), "at {now}");
            assert_eq!(observed.runtime_unknown_since_ms, since, "at {now}");
        }
    }
}
