//! The streams that tell runtime-shim, volume-manager and resource-manager what to hold: one set each, sent as a whole when a stream
//! begins and then change by change (architecture §2).

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use keelson_proto::keelson::common::v1::{SetComplete, SyncAck};
use keelson_proto::keelson::resource_manager::v1 as resource;
use keelson_proto::keelson::runtime::v1 as runtime;
use keelson_proto::keelson::volume_manager::v1 as volume;
use keelson_service_kit::{Backoff, Context, Subscription, WatchHub, WatchItem};
use tokio::sync::{Notify, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

/// What one service is to hold. An element is replaced as a whole; removing it means that nothing of the pod is to remain there.
#[derive(Debug, Clone)]
pub struct SyncSet<D> {
    // Shared, because each stream sends the same message.
    hub: WatchHub<String, Arc<D>>,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    sources_ready: AtomicBool,
    epoch: AtomicU64,
    complete_again: Notify,
}

impl<D: Clone> Default for SyncSet<D> {
    fn default() -> Self {
        Self { hub: WatchHub::new(), shared: Arc::default() }
    }
}

/// The messages of one service's `Sync` stream.
pub trait Desire: Clone + PartialEq + Send + Sync + 'static {
    /// The request message.
    type Message: Send + 'static;
    /// A pod of the set.
    fn pod(self) -> Self::Message;
    /// A pod that left the set.
    fn dropped(uid: String) -> Self::Message;
    /// The end of a set.
    fn complete(set: SetComplete) -> Self::Message;
}

macro_rules! desire {
    ($module:ident) => {
        impl Desire for $module::PodDesire {
            type Message = $module::SyncRequest;

            fn pod(self) -> Self::Message {
                $module::SyncRequest { item: Some($module::sync_request::Item::Pod(self)) }
            }

            fn dropped(uid: String) -> Self::Message {
                $module::SyncRequest { item: Some($module::sync_request::Item::DroppedUid(uid)) }
            }

            fn complete(set: SetComplete) -> Self::Message {
                $module::SyncRequest { item: Some($module::sync_request::Item::Complete(set)) }
            }
        }
    };
}
desire!(runtime);
desire!(volume);
desire!(resource);

impl<D: Desire> SyncSet<D> {
    /// Sets what the service is to hold of a pod.
    pub fn set(&self, uid: &str, desire: D) {
        self.hub.set_if_changed(uid.to_owned(), Arc::new(desire));
    }

    /// Removes a pod from the set.
    pub fn remove(&self, uid: &str) {
        self.hub.remove(&uid.to_owned());
    }

    /// What the service is to hold of a pod now.
    pub fn get(&self, uid: &str) -> Option<Arc<D>> {
        self.hub.get(&uid.to_owned())
    }

    /// Every source has reported: the service may remove what the set does not contain.
    pub fn sources_are_ready(&self) {
        if !self.shared.sources_ready.swap(true, Ordering::Relaxed) {
            self.shared.complete_again.notify_one();
        }
    }

    /// Keeps the stream to one service open until the shutdown; `open` makes the call.
    pub async fn run<Open, Call>(self, context: Context, peer: &'static str, open: Open)
    where
        Open: Fn(ReceiverStream<D::Message>) -> Call,
        Call: Future<Output = Result<tonic::Response<Streaming<SyncAck>>, Status>>,
    {
        let condition = format!("{peer} sync");
        let mut backoff = Backoff::reconnect();
        while !context.shutdown.is_cancelled() {
            let (sender, receiver) = mpsc::channel(64);
            // Cancel-safe: the next stream begins with the whole set.
            let lost = tokio::select! {
                () = context.shutdown.cancelled() => return,
                status = self.feed(sender) => status,
                status = self.read_acks(&context, &condition, &mut backoff, open(ReceiverStream::new(receiver))) => status,
            };
            let text = format!("cannot tell {peer} what is desired, retrying: {}", lost.message());
            context.progress.condition(&condition, Err(text));
            tokio::time::sleep(backoff.next_delay()).await;
        }
    }

    async fn read_acks<Call>(
        &self,
        context: &Context,
        condition: &str,
        backoff: &mut Backoff,
        call: Call,
    ) -> Status
    where
        Call: Future<Output = Result<tonic::Response<Streaming<SyncAck>>, Status>>,
    {
        let mut acks = match call.await {
            Ok(response) => response.into_inner(),
            Err(status) => return status,
        };
        loop {
            match acks.message().await {
                Ok(Some(_)) => {
                    backoff.reset();
                    context.progress.condition(condition, Ok(()));
                }
                Ok(None) => return Status::unavailable("the stream ended"),
                Err(status) => return status,
            }
        }
    }

    /// Sends the set, its end, and then the changes, until the stream ends.
    async fn feed(&self, sender: mpsc::Sender<D::Message>) -> Status {
        // Whether the replayed set is complete is decided before the replay: what a source adds during it may be only a part of its pods.
        let ready = self.shared.sources_ready.load(Ordering::Relaxed);
        let mut subscription = self.hub.subscribe();
        loop {
            let message = self.next(&mut subscription, ready).await;
            if sender.send(message).await.is_err() {
                // `read_acks` knows why the stream ended; it gets the time to return that.
                tokio::time::sleep(Duration::from_millis(100)).await;
                return Status::unavailable("the stream ended");
            }
        }
    }

    async fn next(&self, subscription: &mut Subscription<String, Arc<D>>, ready: bool) -> D::Message {
        // Both arms are cancel-safe. The order matters: the set is complete only when nothing waits to be sent.
        let (item, ready) = tokio::select! {
            biased;
            item = subscription.next() => (item, ready),
            // The sources became ready after the replay began: the set is completed once more.
            () = self.shared.complete_again.notified() => (WatchItem::Synced, true),
        };
        match item {
            WatchItem::Set(_, desire) => Arc::unwrap_or_clone(desire).pod(),
            WatchItem::Gone(uid) => D::dropped(uid),
            WatchItem::Synced => D::complete(SetComplete {
                epoch: self.shared.epoch.fetch_add(1, Ordering::Relaxed) + 1,
                sources_ready: ready,
            }),
        }
    }
}

/// The three sets.
#[derive(Debug, Clone, Default)]
pub struct SyncSets {
    /// runtime-shim.
    pub runtime: SyncSet<runtime::PodDesire>,
    /// volume-manager.
    pub volumes: SyncSet<volume::PodDesire>,
    /// resource-manager.
    pub resources: SyncSet<resource::PodDesire>,
}

impl SyncSets {
    /// Removes a pod from all three.
    pub fn forget(&self, uid: &str) {
        self.runtime.remove(uid);
        self.volumes.remove(uid);
        self.resources.remove(uid);
    }

    /// See [`SyncSet::sources_are_ready`].
    pub fn sources_are_ready(&self) {
        self.runtime.sources_are_ready();
        self.volumes.sources_are_ready();
        self.resources.sources_are_ready();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use runtime::sync_request::Item;

    fn desire(uid: &str) -> runtime::PodDesire {
        runtime::PodDesire {
            pod: Some(keelson_proto::keelson::common::v1::PodRef { uid: uid.into(), ..Default::default() }),
            ..Default::default()
        }
    }

    #[tokio::test]
    async fn a_sync_stream_begins_with_the_whole_set() {
        let set: SyncSet<runtime::PodDesire> = SyncSet::default();
        set.set("a", desire("a"));
        let mut subscription = set.hub.subscribe();
        assert!(matches!(set.next(&mut subscription, false).await.item, Some(Item::Pod(_))));
        let Some(Item::Complete(end)) = set.next(&mut subscription, false).await.item else {
            panic!("no end")
        };
        assert!(!end.sources_ready);
        set.remove("a");
        assert!(
            matches!(set.next(&mut subscription, false).await.item, Some(Item::DroppedUid(uid)) if uid == "a")
        );
    }

    #[tokio::test]
    async fn the_sync_set_is_completed_again_when_the_sources_are_ready() {
        let set: SyncSet<runtime::PodDesire> = SyncSet::default();
        let mut subscription = set.hub.subscribe();
        let _ = set.next(&mut subscription, false).await;
        // A burst: pods and the end of the replay at the same moment.
        for uid in ["a", "b", "c"] {
            set.set(uid, desire(uid));
        }
        set.sources_are_ready();
        for _ in 0..3 {
            assert!(matches!(set.next(&mut subscription, false).await.item, Some(Item::Pod(_))));
        }
        let Some(Item::Complete(end)) = set.next(&mut subscription, false).await.item else {
            panic!("no end")
        };
        assert!(end.sources_ready);
        assert_eq!(end.epoch, 2);
    }
}
