//! Records how operations on volumes ended.

use std::time::Duration;

use keelson_volume_manager_core::operations::PodUid;
use keelson_volume_manager_core::world::Action;

use super::{Ended, SharedVolumesTask};
use crate::metrics::PluginLabel;
use crate::plugins::PluginError;
use crate::shared_volumes::operation::{Attached, Done};
use crate::shared_volumes::records::{PodVolume, Records, ResolvedSpec};
use crate::shared_volumes::reports::{operation_of, record_failure};

impl SharedVolumesTask {
    /// Records how something ended that ran beside the task.
    pub(super) fn finish(&mut self, ended: Option<Ended>) {
        match ended {
            Some(Ended::Operation { action, result, elapsed }) => {
                self.finish_operation(&action, result, elapsed)
            }
            Some(Ended::Forced { place, result }) => {
                let now = self.now();
                self.unknown.finish(&place, result, &self.env.totals, now);
            }
            Some(Ended::NodeRead(result)) => self.finish_node_read(result),
            None => {}
        }
    }

    fn finish_node_read(&mut self, result: Result<Attached, PluginError>) {
        self.is_node_read_running = false;
        match result {
            Ok(attached) => {
                self.node_retry.reset();
                self.actual.apply_node_status(&attached);
            }
            Err(error) => tracing::info!("the volumes found at startup wait for the Node: {error}"),
        }
    }

    fn finish_operation(&mut self, action: &Action, result: Result<Done, PluginError>, elapsed: Duration) {
        self.count(action, result.is_ok(), elapsed);
        let now = self.now();
        let key = action.pod().map(|pod| (action.volume().clone(), pod.clone()));
        match result {
            Ok(Done { learned, host_path, has_file_labels }) => {
                self.operations.finish(&action.key(), Ok(()), now);
                self.actual.record_success(action, learned);
                let Some(key) = key else { return };
                self.records.errors.remove(&key);
                match action {
                    Action::SetUp { .. } => {
                        if let Some(placed) = self.records.placed.get_mut(&key) {
                            placed.host_path = host_path;
                            placed.has_file_labels = has_file_labels;
                        }
                    }
                    Action::TearDown { .. } => {
                        if let Some(placed) = self.records.placed.remove(&key) {
                            self.unknown.forget(&placed.place);
                        }
                    }
                    _ => {}
                }
            }
            Err(error) => {
                self.report(action, &error);
                self.operations.finish(&action.key(), Err(error.message.clone()), now);
                self.actual.record_failure(action, error.class);
                if let Some(is_final) = error.is_final_expansion() {
                    self.actual.record_expansion_error(action.volume(), is_final);
                }
                let Some(key) = key else { return };
                let is_left =
                    self.actual.volume(&key.0).is_some_and(|volume| volume.pods.contains_key(&key.1));
                if matches!(action, Action::SetUp { .. }) && !is_left {
                    self.records.placed.remove(&key);
                }
                if self.records.specs.contains_key(&key) {
                    self.records.errors.insert(key, error);
                }
            }
        }
    }

    /// Logs an error, and records one of a mount or an expansion as an event of the pod (volumes.md §3.9, §3.10, §4).
    fn report(&self, action: &Action, error: &PluginError) {
        let (volume, pod) = (action.volume(), action.pod());
        let uid = pod.map(PodUid::as_str).unwrap_or_default();
        tracing::warn!(
            event = "volume_operation_failed",
            volume = volume.as_str(),
            uid,
            "{} of a volume failed: {error}",
            action.kind().map(|kind| kind.to_string()).unwrap_or_default()
        );
        let Some(resolved) = pod.and_then(|pod| self.records.spec(volume, pod)) else { return };
        record_failure(&self.env.events, &resolved.spec, action, error);
    }

    fn count(&self, action: &Action, succeeded: bool, elapsed: Duration) {
        let key = action.pod().map(|pod| (action.volume().clone(), pod.clone()));
        let Some(operation) = operation_of(action, self.is_block(action, key.as_ref())) else { return };
        let label = self.plugin_label(action, key.as_ref());
        self.env.metrics.ended(label, operation, succeeded, elapsed);
    }

    fn is_block(&self, action: &Action, key: Option<&PodVolume>) -> bool {
        let Records { specs, placed, devices, .. } = &self.records;
        let of_spec = key.and_then(|key| specs.get(key)).map(|resolved| resolved.place().is_block);
        let of_place = || key.and_then(|key| placed.get(key)).map(|placed| placed.place.is_block);
        let of_device = || devices.get(action.volume()).map(|device| device.is_block);
        of_spec.or_else(of_place).or_else(of_device).unwrap_or(false)
    }

    fn plugin_label(&self, action: &Action, key: Option<&PodVolume>) -> PluginLabel {
        let Records { specs, placed, devices, .. } = &self.records;
        let of_spec = key.and_then(|key| specs.get(key)).map(ResolvedSpec::label);
        let of_place = || key.and_then(|key| placed.get(key)).map(|placed| placed.label.clone());
        let of_device = || devices.get(action.volume()).map(|device| device.label.clone());
        of_spec.or_else(of_place).or_else(of_device).unwrap_or_default()
    }
}
