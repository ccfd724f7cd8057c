//! The stream of pod-sync.

use std::time::Duration;

use keelson_proto::keelson::pod_sync::v1::{WatchPodsRequest, watch_pods_response::Item};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use super::tracker::PodUpdate;
use crate::agent::Agent;

/// The pause between two attempts to reach pod-sync.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// pod-sync's stream, read by a task that is aborted when this is dropped.
pub(super) struct PodWatch {
    pub(super) updates: mpsc::Receiver<PodUpdate>,
    task: AbortHandle,
}

impl Drop for PodWatch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl PodWatch {
    pub(super) fn start(agent: &Agent) -> Self {
        let (sender, updates) = mpsc::channel(64);
        let task =
            keelson_service_kit::spawn("pod updates", read_pod_updates(agent.clone(), sender)).abort_handle();
        Self { updates, task }
    }
}

/// Reads pod-sync's stream, and reopens it when it ends.
async fn read_pod_updates(agent: Agent, sender: mpsc::Sender<PodUpdate>) {
    loop {
        if let Ok(answer) = agent.pod_sync().watch_pods(agent.request(WatchPodsRequest::default())).await {
            let mut stream = answer.into_inner();
            let mut next = Some(PodUpdate::Opened);
            while let Some(update) = next {
                if sender.send(update).await.is_err() {
                    return;
                }
                next = match stream.message().await {
                    Ok(Some(message)) => match message.item {
                        Some(Item::Pod(pod)) => Some(PodUpdate::Pod(Box::new(pod))),
                        Some(Item::GoneUid(uid)) => Some(PodUpdate::Gone(uid)),
                        Some(Item::Synced(_)) => Some(PodUpdate::Synced),
                        None => None,
                    },
                    Ok(None) | Err(_) => None,
                };
            }
        }
        tokio::time::sleep(RETRY_INTERVAL).await;
    }
}
