//! What a pod's worker does: decide, carry out, read again. [`worker`] runs the turns of one pod, [`sync`] and [`start`] bring it up,
//! [`stop`] ends it, [`admission`] asks whether it may run, [`probes`] run beside it, and [`lifecycle`] begins and ends workers.

pub mod admission;
pub mod adoption;
pub mod decide;
pub mod leftover_cleanup;
pub mod lifecycle;
mod node_inputs;
pub mod panic_quarantine;
mod permit;
pub mod probes;
pub mod resize;
pub mod start;
pub mod stop;
pub mod sync;
pub mod worker;

use std::sync::Arc;

use keelson_pod_sync_core::worker::{SyncOutcome, WorkerState};
use keelson_service_kit::CancellationToken;

use crate::effects::images::{ImageTask, PulledImages};
use crate::state::observed::Observed;
use crate::state::pod_state::DesiredPod;

/// What a turn works on: the state of its pod when the turn began.
#[derive(Debug, Clone)]
pub struct Job {
    /// Pod UID.
    pub uid: String,
    /// State of the worker.
    pub worker: WorkerState,
    /// The pod; `None` for an orphan.
    pub desired: Option<Arc<DesiredPod>>,
    /// The last observation of the runtime.
    pub observed: Observed,
    /// Cancelled when the turn is outdated.
    pub cancel: CancellationToken,
}

/// What a worker remembers from one turn to the next. Nothing else uses it.
#[derive(Debug, Default)]
pub struct Memory {
    /// The last error of the pod's mounts, so that the same one is not reported again; `None` once they are mounted.
    pub mount_error: Option<String>,
    /// Containers whose image was pulled for their next start.
    pub pulled: PulledImages,
    /// Images of volumes that no container mounts, which the last new sandbox began to pull.
    pub unused_images: Vec<ImageTask>,
}

/// How a turn ended, and when the next one is due if nothing triggers it earlier.
#[derive(Debug)]
pub struct TurnEnd {
    /// For the state machine.
    pub outcome: SyncOutcome,
    /// Unix nanoseconds; `None`: after the resync period.
    pub next_unix_nanos: Option<i64>,
}

impl TurnEnd {
    /// The next turn is due after the resync period.
    pub const fn of(outcome: SyncOutcome) -> Self {
        Self { outcome, next_unix_nanos: None }
    }
}
