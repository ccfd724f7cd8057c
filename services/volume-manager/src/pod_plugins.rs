//! The plugins' volumes of one pod, as its worker sees them.

use std::collections::BTreeMap;
use std::sync::Arc;

use keelson_volume_manager_core::desire::{PodDesire, Want};
use tokio::sync::watch;

use crate::resolver::{PodResolver, Resolver, Unresolved};
use crate::shared_volumes::PodStatus;
use crate::view::{MountedVolume, VolumeWait};

/// The plugins' volumes of one pod.
#[derive(Debug)]
pub(crate) struct PodPlugins {
    uid: String,
    resolver: Resolver,
    task: Option<PodResolver>,
    unresolved: watch::Sender<Unresolved>,
    unresolved_changes: watch::Receiver<Unresolved>,
    status: watch::Receiver<PodStatus>,
    /// Volumes were asked for since the last release.
    has_asked: bool,
}

/// What the worker has to know.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PluginStatus {
    /// The mounted volumes by name.
    pub(crate) mounted: BTreeMap<String, MountedVolume>,
    /// The others, by name.
    pub(crate) waits: Vec<VolumeWait>,
    /// Something has failed; otherwise it is being done, or someone else has to act first.
    pub(crate) has_failed: bool,
    /// When what has failed is tried again, in unix nanoseconds; 0: nothing has failed, or it is not known.
    pub(crate) next_try_unix_nanos: i64,
    /// Something of the pod is, or may be, mounted.
    pub(crate) may_have_mounts: bool,
    /// What holds up the teardown.
    pub(crate) teardown: String,
}

impl PluginStatus {
    /// The first retry counts.
    fn note_retry(&mut self, unix_nanos: i64) {
        let known = self.next_try_unix_nanos;
        if unix_nanos > 0 && (known == 0 || unix_nanos < known) {
            self.next_try_unix_nanos = unix_nanos;
        }
    }
}

impl PodPlugins {
    pub(crate) fn new(resolver: Resolver, uid: &str) -> Self {
        let unresolved = watch::Sender::new(Unresolved::default());
        let unresolved_changes = unresolved.subscribe();
        let status = resolver.shared.watch_pod(uid);
        Self {
            uid: uid.to_owned(),
            resolver,
            task: None,
            unresolved,
            unresolved_changes,
            status,
            has_asked: false,
        }
    }

    /// Resolves the volumes of a new desire. Those of a pod that is not to run any more stay as they are until
    /// [`Self::release`].
    pub(crate) fn set(&mut self, desire: &Arc<PodDesire>) {
        // The old one must end before the new one starts.
        self.task = None;
        self.unresolved.send_replace(Unresolved::default());
        self.task = PodResolver::start(&self.resolver, desire, self.unresolved.clone());
        self.has_asked |= self.task.is_some();
        if desire.header.want == Want::Stop && self.has_asked {
            self.resolver.shared.stop(&self.uid);
        }
    }

    /// Nothing of the pod runs: its volumes are torn down.
    pub(crate) async fn release(&mut self) {
        self.task = None;
        self.resolver.shared.release(&self.uid).await;
        self.has_asked = false;
    }

    /// Waits for a change of [`Self::status`]. Cancel-safe: it does not mark the change as seen.
    pub(crate) async fn changed(&self) -> bool {
        let (mut status, mut unresolved) = (self.status.clone(), self.unresolved_changes.clone());
        // Cancel-safe: neither branch consumes anything.
        tokio::select! {
            changed = status.changed() => if changed.is_ok() { return true },
            changed = unresolved.changed() => if changed.is_ok() { return true },
        }
        std::future::pending().await
    }

    /// The present status; its changes count from now on.
    pub(crate) fn status(&mut self, desire: &PodDesire) -> PluginStatus {
        let status = self.status.borrow_and_update().clone();
        let unresolved = self.unresolved_changes.borrow_and_update().clone();
        let mut result = PluginStatus {
            may_have_mounts: status.may_have_mounts || self.has_asked,
            teardown: status.teardown,
            ..PluginStatus::default()
        };
        if desire.header.want != Want::Run {
            return result;
        }
        for volume in desire.volumes.iter().filter(|volume| volume.has_plugin()) {
            let name = &volume.name;
            // A mounted volume stays usable while its claim cannot be read.
            if let Some(mounted) = status.mounted.get(name) {
                result.mounted.insert(name.clone(), mounted.clone());
            } else if let Some(wait) = unresolved.waits.get(name) {
                result.has_failed = true;
                result.note_retry(unresolved.next_try_unix_nanos);
                result.waits.push(wait.clone());
            } else if let Some(wait) = status.waits.get(name) {
                result.has_failed |= wait.is_error;
                result.note_retry(wait.next_try_unix_nanos);
                result.waits.push(wait.wait.clone());
            } else {
                result.waits.push(VolumeWait {
                    volume: name.clone(),
                    message: "its claim or source is being read".to_owned(),
                    owner: keelson_volume_manager_core::wait_owner::WaitOwner::VolumeManager,
                });
            }
        }
        result
    }
}
