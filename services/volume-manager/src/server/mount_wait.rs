//! One `MountPod` call: waits until the volumes of a pod are mounted.

use std::sync::Arc;
use std::time::Duration;

use keelson_pod_reconciler::{DESIRED_TIMEOUT, View as _, not_desired_error};
use keelson_proto::keelson::volume_manager::v1 as pb;
use keelson_service_kit::status::error;
use keelson_volume_manager_core::desire::Want;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tonic::{Code, Status};

use crate::plugins::csi::Csi;
use crate::shared_volumes::SharedVolumes;
use crate::store::Store;
use crate::view::{Phase, PodView};
use crate::wire;

/// One `MountPod` call.
pub(super) struct MountWait {
    pub(super) uid: String,
    pub(super) revision: u64,
    pub(super) store: Arc<Store>,
    pub(super) view: watch::Receiver<PodView>,
    /// The caller's deadline. For a stream, tonic only applies it to the first headers, so this service enforces it.
    pub(super) deadline: Instant,
    pub(super) responses: mpsc::Sender<Result<pb::MountPodResponse, Status>>,
    pub(super) shared: SharedVolumes,
    pub(super) csi: Arc<Csi>,
}

/// How long before the deadline it is checked whether the node has no room for a volume that is not attached.
const LIMIT_CHECK: Duration = Duration::from_secs(5);
/// How long that check may take.
const LIMIT_CHECKED_WITHIN: Duration = Duration::from_secs(4);

/// The `owner` of a wait that the user can end.
const OWNER_USER: &str = "you";

fn waiting_for(what: &str) -> pb::MountProgress {
    pb::MountProgress { waiting_for: what.to_owned(), next_try_unix_nanos: 0, owner: String::new() }
}

/// The state of a `MountPod` call.
enum MountState {
    Waiting(pb::MountProgress),
    NotNamed,
    Ready(pb::MountsReady),
    Failed(Status),
}

impl MountWait {
    pub(super) async fn run(mut self) {
        let mut last = pb::MountProgress::default();
        let mut not_named_since = Instant::now();
        let mut is_limit_checked = false;
        loop {
            let state = self.state();
            if !matches!(state, MountState::NotNamed) {
                not_named_since = Instant::now();
            }
            let progress = match state {
                MountState::Waiting(progress) => progress,
                MountState::NotNamed => waiting_for("pod-sync to name the pod"),
                MountState::Ready(ready) => return self.finish(Ok(ready)).await,
                MountState::Failed(status) => return self.finish(Err(status)).await,
            };
            if progress != last {
                last.clone_from(&progress);
                let item = pb::mount_pod_response::Item::Progress(progress);
                if self.responses.send(Ok(pb::MountPodResponse { item: Some(item) })).await.is_err() {
                    return;
                }
            }
            // Cancel-safe: `changed` marks nothing as seen unless it returns; the other futures have no state.
            tokio::select! {
                changed = self.view.changed() => if changed.is_err() {
                    return self.finish(Err(not_desired_error(&self.uid, self.revision))).await;
                },
                () = self.responses.closed() => return,
                () = tokio::time::sleep_until(self.deadline - LIMIT_CHECK), if !is_limit_checked => {
                    is_limit_checked = true;
                    if let Some(why) = self.attach_limit().await {
                        let status = error(Code::ResourceExhausted, "VOLUME_ATTACHMENT_LIMIT_EXCEEDED", why);
                        return self.finish(Err(status)).await;
                    }
                }
                () = tokio::time::sleep_until(self.deadline) => {
                    return self.finish(Err(self.deadline_status(&last))).await;
                }
                () = tokio::time::sleep_until(not_named_since + DESIRED_TIMEOUT), if self.is_not_named() => {
                    return self.finish(Err(not_desired_error(&self.uid, self.revision))).await;
                }
            }
        }
    }

    /// Why the node has no room for a volume of the pod (volumes.md §3.14).
    async fn attach_limit(&self) -> Option<String> {
        let unattached = self.shared.watch_pod(&self.uid).borrow().unattached.clone();
        let check = self.csi.attach_limit(&unattached);
        tokio::time::timeout(LIMIT_CHECKED_WITHIN, check).await.ok().flatten()
    }

    /// The status at the caller's deadline. `FAILED_PRECONDITION` only if the user has to fix an object.
    fn deadline_status(&self, last: &pb::MountProgress) -> Status {
        if last.owner == OWNER_USER {
            return error(Code::FailedPrecondition, "OBJECT_NOT_USABLE", last.waiting_for.clone());
        }
        let text = format!("pod {} still waits for {}", self.uid, last.waiting_for);
        error(Code::DeadlineExceeded, "NOT_MOUNTED", text)
    }

    fn is_not_named(&self) -> bool {
        self.view.borrow().wanted(self.revision).is_none()
    }

    fn state(&mut self) -> MountState {
        let view = self.view.borrow_and_update();
        let Some(want) = view.wanted(self.revision) else { return MountState::NotNamed };
        if want != Want::Run {
            return MountState::Failed(error(
                Code::FailedPrecondition,
                "NOT_WANTED",
                format!("pod {} is not meant to run; its volumes are not mounted", self.uid),
            ));
        }
        if view.revision < self.revision {
            return MountState::Waiting(waiting_for("volumes to be set up"));
        }
        let status = &view.status;
        match status.phase {
            Phase::Mounted => MountState::Ready(pb::MountsReady {
                volumes: wire::mounts(status.mounts.clone()),
                pod_dir: self.store.pod_folder(&self.uid).to_string_lossy().into_owned(),
                user_namespace: self.store.user_namespaces().of_pod(&self.uid).map(wire::id_range),
            }),
            Phase::Failed if view.permanent => MountState::Failed(error(
                Code::FailedPrecondition,
                "VOLUME_NOT_USABLE",
                status.message.clone(),
            )),
            Phase::Failed => MountState::Waiting(pb::MountProgress {
                next_try_unix_nanos: view.next_try_unix_nanos,
                owner: if view.user_can_fix { OWNER_USER.to_owned() } else { view.owner.clone() },
                ..waiting_for(&status.message)
            }),
            Phase::Pending if !status.message.is_empty() => MountState::Waiting(pb::MountProgress {
                owner: view.owner.clone(),
                ..waiting_for(&status.message)
            }),
            Phase::Unknown | Phase::Pending | Phase::Unmounting | Phase::Unmounted => {
                MountState::Waiting(waiting_for("volumes to be set up"))
            }
        }
    }

    async fn finish(&self, result: Result<pb::MountsReady, Status>) {
        let item = result
            .map(|ready| pb::MountPodResponse { item: Some(pb::mount_pod_response::Item::Ready(ready)) });
        let _ = self.responses.send(item).await;
    }
}
