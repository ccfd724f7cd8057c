//! Writes what the Node shows of CSI drivers (volumes.md §11.1).

use std::sync::Arc;

use keelson_kube_api::{KubeError, Object, Patch, Resource};
use keelson_service_kit::status::chain;

use super::KubernetesWriter;

/// The condition that says whether the Node shows all drivers.
const CONDITION: &str = "csi-drivers";

impl KubernetesWriter {
    /// Has the server's Node `live` show the CSI drivers, each with a patch of its own: a label that the server refuses, or that
    /// contradicts another one, keeps neither the other drivers nor the Node's status back. It is tried again with the next
    /// write of the Node.
    pub(super) async fn write_csi_drivers(&self, mut live: Object) -> Result<(), KubeError> {
        let drivers = Arc::clone(&self.cache().csi_drivers);
        let mut errors = Vec::new();
        for change in drivers.changes() {
            let patch = match change.patch(&live.0) {
                Ok(None) => continue,
                Ok(Some(patch)) => patch,
                Err(error) => {
                    errors.push(error.to_string());
                    continue;
                }
            };
            let patch = (Patch::Strategic, &patch);
            match self.heartbeat.patch(Resource::NODE, None, &self.node_name, Some("status"), patch).await {
                Ok(now) => live = now,
                // Such as a label that nodes must not set themselves.
                Err(error) if matches!(error.code(), Some(400 | 403 | 422)) => {
                    let text = "the API server does not let the Node show the CSI driver";
                    errors.push(format!("{text} {}: {}", change.name(), chain(&error)));
                }
                Err(error) => return Err(error),
            }
        }
        let state = if errors.is_empty() { Ok(()) } else { Err(errors.join("; ")) };
        self.ctx.progress.condition(CONDITION, state);
        Ok(())
    }
}
