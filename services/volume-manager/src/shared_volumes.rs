//! The volumes of plugins: one task knows which pods want which, what is attached and mounted, and which operations run
//! (volumes.md §3.3 to §3.16). The decisions are in the core's `world`; this module carries them out.
//!
//! Operations run in tasks of their own. One that hangs holds up nothing but its own volume.

mod claims;
mod expansion;
mod labels;
mod operation;
mod records;
mod reports;
mod restore;
mod status;
mod task;
#[cfg(test)]
mod tests;
mod unknown;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use keelson_service_kit::CancellationToken;
use keelson_volume_manager_core::csi::paths::DriverName;
use keelson_volume_manager_core::desire::PodRef;
use keelson_volume_manager_core::operations::VolumeName;
use tokio::sync::{mpsc, oneshot, watch};

pub(crate) use self::claims::ClaimSet;
pub(crate) use self::records::{ForeignFolder, ResolvedSpec};
pub(crate) use self::restore::{PluginFolder, find_volumes};
pub(crate) use self::status::PodStatus;
pub(crate) use self::task::{Environment, SharedVolumesTask};
use crate::csi::drivers::{Counts, Drivers};

/// What other tasks ask for.
#[derive(Debug)]
enum Command {
    /// A pod wants a volume. A repeated request updates what is known of it.
    Want(Box<ResolvedSpec>),
    /// A pod is about to use these claims of its namespace.
    WantClaims { pod: PodRef, names: BTreeSet<String>, reply: oneshot::Sender<u64> },
    /// The pod is being stopped: nothing more is set up for it.
    Stop(String),
    /// Nothing of the pod runs: its volumes may be torn down.
    Release { uid: String, done: oneshot::Sender<()> },
    /// A sync of the pod: volumes whose plugin asks for it are set up again.
    RequireRemounts(String),
    /// The set of pods is complete, with all sources ready.
    Populated,
    /// A folder of a plugin that this version does not have was removed.
    ForeignRemoved(ForeignFolder),
    /// A CSI driver has registered: what has failed without it is tried at once.
    DriverRegistered(DriverName),
}

/// The handle of the task. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct SharedVolumes {
    commands: mpsc::UnboundedSender<Command>,
    pods: Pods,
    in_use: watch::Receiver<Option<Vec<VolumeName>>>,
    claims: watch::Receiver<ClaimSet>,
}

/// The published status of each pod.
#[derive(Debug, Clone, Default)]
struct Pods(Arc<Mutex<BTreeMap<String, watch::Sender<PodStatus>>>>);

impl Pods {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, watch::Sender<PodStatus>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SharedVolumes {
    /// A handle, and what the task needs to answer it.
    pub(crate) fn new() -> (Self, Inbox) {
        let (commands, receiver) = mpsc::unbounded_channel();
        let (in_use_sender, in_use) = watch::channel(None);
        let (claims_sender, claims) = watch::channel(ClaimSet::default());
        let pods = Pods::default();
        let inbox =
            Inbox { commands: receiver, pods: pods.clone(), in_use: in_use_sender, claims: claims_sender };
        (Self { commands, pods, in_use, claims }, inbox)
    }

    /// A pod wants a volume.
    pub(crate) fn want(&self, resolved: ResolvedSpec) {
        self.send(Command::Want(Box::new(resolved)));
    }

    /// A pod is about to use these claims of its namespace, and no others. The answer is the revision of a set of claims in use
    /// that has them, as each later one until the pod is stopped or released.
    pub(crate) fn want_claims(&self, pod: &PodRef, names: BTreeSet<String>) -> oneshot::Receiver<u64> {
        let (reply, revision) = oneshot::channel();
        self.send(Command::WantClaims { pod: pod.clone(), names, reply });
        revision
    }

    /// The claims in use, and their changes.
    pub(crate) fn claims(&self) -> watch::Receiver<ClaimSet> {
        self.claims.clone()
    }

    /// A pod is being stopped: what is, or may be, mounted stays, and nothing more is set up for it.
    pub(crate) fn stop(&self, uid: &str) {
        self.send(Command::Stop(uid.to_owned()));
    }

    /// Nothing of a pod runs any more, so its volumes are torn down. When this returns, the status of the pod shows what is left,
    /// and nothing is set up for it any more.
    pub(crate) async fn release(&self, uid: &str) {
        let (done, released) = oneshot::channel();
        self.send(Command::Release { uid: uid.to_owned(), done });
        // The task ends only with the service.
        let _ = released.await;
    }

    /// A pod is synced: volumes that are set up with each sync are set up again.
    pub(crate) fn require_remounts(&self, uid: &str) {
        self.send(Command::RequireRemounts(uid.to_owned()));
    }

    /// Every source of pods is ready, and all their pods are known.
    pub(crate) fn set_populated(&self) {
        self.send(Command::Populated);
    }

    /// A folder of a plugin that this version does not have was removed, so its PersistentVolume is no longer in use.
    pub(crate) fn foreign_removed(&self, uid: &str, inner_name: &str) {
        self.send(Command::ForeignRemoved((uid.into(), inner_name.to_owned())));
    }

    /// Has what backs off be tried at once when its CSI driver has registered, until `shutdown`.
    pub(crate) async fn follow_drivers(self, drivers: Drivers, shutdown: CancellationToken) {
        let mut registrations = drivers.registrations();
        registrations.mark_changed();
        let mut seen = Counts::new();
        // Cancel-safe: a registration stays marked until it is read.
        while let Some(Ok(())) = shutdown.run_until_cancelled(registrations.changed()).await {
            let counts = registrations.borrow_and_update().clone();
            let is_new = |(driver, count): &(&DriverName, &u64)| seen.get(driver) != Some(count);
            for (driver, _) in counts.iter().filter(is_new) {
                self.send(Command::DriverRegistered(driver.clone()));
            }
            seen = counts;
        }
    }

    /// The status of a pod's volumes, and its changes.
    pub(crate) fn watch_pod(&self, uid: &str) -> watch::Receiver<PodStatus> {
        self.pods.lock().entry(uid.to_owned()).or_default().subscribe()
    }

    /// The attachable volumes in use; `None` until the volumes found at startup are known.
    pub(crate) fn in_use(&self) -> watch::Receiver<Option<Vec<VolumeName>>> {
        self.in_use.clone()
    }

    fn send(&self, command: Command) {
        // The task ends with the service.
        let _ = self.commands.send(command);
    }
}

/// The task's side of [`SharedVolumes`].
#[derive(Debug)]
pub(crate) struct Inbox {
    commands: mpsc::UnboundedReceiver<Command>,
    pods: Pods,
    in_use: watch::Sender<Option<Vec<VolumeName>>>,
    claims: watch::Sender<ClaimSet>,
}
