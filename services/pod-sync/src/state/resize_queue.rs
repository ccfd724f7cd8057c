//! What wakes the loop that decides on pending resizes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use tokio::sync::{Notify, watch};

/// Why pending resizes are decided on again, as `pod_deferred_accepted_resizes_total` counts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResizeTrigger {
    /// A source has changed the resources of a pod.
    PodUpdated,
    /// Every source has sent its pods.
    PodsAdded,
    /// A pod has ended.
    PodTerminated,
    /// A resize was completed.
    PodResized,
    /// Time has passed.
    Periodic,
}

impl ResizeTrigger {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::PodUpdated, Self::PodsAdded, Self::PodTerminated, Self::PodResized, Self::Periodic];

    /// The value of the label.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::PodUpdated => "pod_updated",
            Self::PodsAdded => "pods_added",
            Self::PodTerminated => "pod_terminated",
            Self::PodResized => "pod_resized",
            Self::Periodic => "periodic_retry",
        }
    }
}

/// Remembers that something has changed, however often it has.
#[derive(Debug, Default)]
pub struct ResizeQueue {
    is_open: AtomicBool,
    last: Mutex<Option<ResizeTrigger>>,
    changed: Notify,
    /// The number of accepted resizes.
    accepted: watch::Sender<u64>,
}

impl ResizeQueue {
    /// Every source has sent its pods: from now on resizes are decided on.
    pub fn open(&self) {
        if !self.is_open.swap(true, Ordering::Relaxed) {
            self.trigger(ResizeTrigger::PodsAdded);
        }
    }

    /// Something has changed that a pending resize may wait for.
    pub fn trigger(&self, trigger: ResizeTrigger) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(trigger);
        self.changed.notify_one();
    }

    /// A resize was accepted.
    pub fn accepted(&self) {
        self.accepted.send_modify(|count| *count += 1);
    }

    /// Changes when a resize is accepted.
    pub fn watch_accepted(&self) -> watch::Receiver<u64> {
        self.accepted.subscribe()
    }

    /// Waits until something has changed. Cancel-safe: a change is kept.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// What has changed last, once. `None`: nothing, or not every source has sent its pods yet.
    pub fn take(&self) -> Option<ResizeTrigger> {
        if !self.is_open.load(Ordering::Relaxed) {
            return None;
        }
        self.last.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_decided_before_every_source_has_sent_its_pods() {
        let queue = ResizeQueue::default();
        queue.trigger(ResizeTrigger::PodUpdated);
        assert_eq!(queue.take(), None);
        queue.open();
        assert_eq!((queue.take(), queue.take()), (Some(ResizeTrigger::PodsAdded), None));
        for _ in 0..1000 {
            queue.trigger(ResizeTrigger::PodUpdated);
        }
        assert_eq!((queue.take(), queue.take()), (Some(ResizeTrigger::PodUpdated), None));
    }
}
