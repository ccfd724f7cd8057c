//! Everything that a turn does outside of this process: calls of other services and of the runtime, images, volumes, hooks, and the
//! requests of probes.

pub mod cgroup;
pub mod clients;
pub mod cluster;
pub mod config_objects;
pub mod container_ids;
pub mod convert;
pub mod create_container;
pub mod endpoint;
pub mod hooks;
pub mod http;
pub mod images;
pub mod probe_handlers;
pub mod probe_turns;
pub mod resize;
pub mod volumes;

use std::sync::Arc;

use keelson_service_kit::Context;
use tokio::sync::Semaphore;

use crate::effects::clients::Clients;
use crate::effects::probe_turns::ProbeTurns;
use crate::error::SyncError;
use crate::publish::Publisher;
use crate::state::observed::Observed;
use crate::state::registry::PodRegistry;
use crate::state::store::Store;

/// Sandboxes that the runtime stops at the same time. Much of a stop is waiting (network plugin, unmounts), so it is more than the cores
/// of a small node; few, so that the first pods release their volumes while the last ones still wait.
const SANDBOX_STOP_PERMITS: usize = 8;

/// The state of the pods, its publisher, and the clients of the other services.
#[derive(Debug)]
pub struct Effects {
    /// Configuration, events, progress, shutdown.
    pub context: Context,
    /// The pods.
    pub registry: Arc<PodRegistry>,
    /// Status, events and metrics.
    pub publisher: Publisher,
    /// The other services.
    pub clients: Clients,
    /// Limits how many pods the runtime starts at the same time.
    pub start_permits: Semaphore,
    /// Limits how many sandboxes the runtime stops at the same time, first come, first served.
    pub sandbox_stop_permits: Semaphore,
    /// Limits how many probes run at the same time.
    pub probe_turns: ProbeTurns,
}

impl Effects {
    /// Without a pod yet.
    pub fn new(context: Context, store: Option<Store>) -> Arc<Self> {
        let registry = Arc::new(PodRegistry::new(context.clone(), store));
        Arc::new(Self {
            publisher: Publisher::new(context.clone(), Arc::clone(&registry)),
            registry,
            clients: Clients::new(&context),
            start_permits: Semaphore::new(context.config.runtime.start_parallelism.max(1) as usize),
            sandbox_stop_permits: Semaphore::new(SANDBOX_STOP_PERMITS),
            probe_turns: ProbeTurns::default(),
            context,
        })
    }

    /// Reads a pod from the runtime and records what is there.
    ///
    /// # Errors
    /// runtime-shim or the runtime does not answer.
    pub async fn read_pod(&self, uid: &str) -> Result<Observed, SyncError> {
        let read = self.clients.read_pod(uid).await;
        let observed =
            read.map_err(|s| SyncError::from_status("cannot read the pod from the runtime", &s))?;
        self.registry.record_observation(uid, Arc::clone(&observed));
        Ok(observed)
    }
}
