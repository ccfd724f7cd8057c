//! Removes an fc disk from the node.

use std::time::Duration;

use keelson_volume_manager_core::fc::{self, DETACH_LIMIT_SECONDS, DETACH_RETRY_SECONDS};
use keelson_volume_manager_core::multipath::Step;
use tokio::time::Instant;

use super::FcDisks;
use crate::plugins::PluginError;
use crate::plugins::multipath;

impl FcDisks {
    /// Removes a disk from the node. What fails is tried again for a while.
    pub(super) async fn detach_disk(&self, node: &str, volume: &str) -> Result<(), PluginError> {
        let deadline = Instant::now() + Duration::from_secs(DETACH_LIMIT_SECONDS.into());
        loop {
            let Err(error) = self.try_detach(node, volume).await else { return Ok(()) };
            if Instant::now() >= deadline {
                return Err(error);
            }
            tracing::warn!(event = "fc_detach_failed", volume, %error, "cannot detach an fc disk yet");
            tokio::time::sleep(Duration::from_secs(DETACH_RETRY_SECONDS.into())).await;
        }
    }

    async fn try_detach(&self, node: &str, volume: &str) -> Result<(), PluginError> {
        let mappings =
            self.host.on_machine("read the multipath devices", |machine| machine.mappings()).await?;
        let steps = fc::detach(node, &mappings).map_err(|error| PluginError::new(error.to_string()))?;
        for step in &steps {
            let result = multipath::carry_out(&self.host, step).await;
            match (step, result) {
                (_, Ok(())) => {}
                (Step::FlushMap(_) | Step::Delete(_), Err(error)) => return Err(error),
                (Step::FlushBuffers(_), Err(error)) => {
                    tracing::warn!(event = "disk_removal_failed", volume, %error, "cannot {step}");
                }
            }
        }
        Ok(())
    }
}
