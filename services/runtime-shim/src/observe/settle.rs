//! Reads after exit events: the runtime's state may lag behind its events.

use std::sync::Arc;
use std::time::Duration;

use keelson_proto::keelson::runtime::v1 as pb;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::Observer;

/// Delays between reads after an exit event, while the runtime still shows the container as running: the runtime's
/// state may lag behind its events.
const SETTLE_MS: [u64; 12] = [0, 3, 10, 30, 80, 160, 320, 640, 1_250, 2_500, 5_000, 10_000];
/// After this time the exit is left to the relist.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(30);

impl Observer {
    /// Handles an exit event: reads the pod until the runtime's state shows the exit. There is one task per pod, which
    /// handles further exits as well.
    pub fn exited(&self, id: String) {
        let Some(uid) = self.owner_of(&id) else { return };
        let more_exits = {
            let mut index = self.index();
            if let Some(settling) = index.settling.get_mut(&uid) {
                settling.ids.insert(id);
                settling.more_exits.notify_one();
                return;
            }
            let settling = index.settling.entry(uid.clone()).or_default();
            settling.ids.insert(id);
            Arc::clone(&settling.more_exits)
        };
        keelson_service_kit::spawn("settle exits", self.clone().settle(uid, more_exits));
    }

    /// Reads until no exited object is shown as running, then once more: statuses are read after the list, so a read may
    /// show an exit that a later read does not. The last read takes precedence over all earlier ones.
    async fn settle(self, uid: String, more_exits: Arc<Notify>) {
        let (mut delays, mut until) = (SETTLE_MS.iter(), Instant::now() + SETTLE_TIMEOUT);
        let mut confirming = false;
        loop {
            let delay = delays.next().or(SETTLE_MS.last()).copied().unwrap_or_default();
            // Cancel-safe: a notification that is not taken here is kept for the next iteration.
            tokio::select! {
                () = tokio::time::sleep(Duration::from_millis(delay)) => {}
                () = more_exits.notified() => (delays, until) = (SETTLE_MS.iter(), Instant::now() + SETTLE_TIMEOUT),
            }
            let read = self.read(&uid).await;
            if let Err(status) = &read {
                tracing::debug!(uid, error = status.message(), "cannot read a pod after an exit event");
            }
            let mut index = self.index();
            let Some(settling) = index.settling.get_mut(&uid) else { return };
            if let Ok(pod) = &read {
                settling.ids.retain(|id| shows_alive(pod, id));
            }
            let all_shown = settling.ids.is_empty();
            if (all_shown && confirming) || Instant::now() >= until {
                index.settling.remove(&uid);
                return;
            }
            if all_shown != confirming {
                // The confirming read follows at once; if it does not confirm, the delays start over.
                (confirming, delays) = (all_shown, SETTLE_MS.iter());
            }
        }
    }
}

/// Whether the pod shows an exited object as alive. A container that exits at once may still be shown as created; the
/// runtime then shows it as running, and finally as exited.
fn shows_alive(pod: &pb::RuntimePod, id: &str) -> bool {
    let alive =
        |c: &pb::Container| matches!(c.state(), pb::ContainerState::Created | pb::ContainerState::Running);
    pod.sandboxes.iter().any(|s| s.id == id && s.ready)
        || pod.containers.iter().any(|c| c.id == id && alive(c))
}
