//! Desired state for runtime-shim, volume-manager and resource-manager: a set each, sent as a whole whenever a
//! stream begins and then change by change (architecture §2).

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

/// What one callee is to hold. The entries are replaced as a whole; taking one out means that nothing of the
/// pod is to remain there.
#[derive(Debug, Clone)]
pub struct Set<D> {
    hub: WatchHub<String, D>,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    sources_ready: AtomicBool,
    epoch: AtomicU64,
    again: Notify,
}

impl<D: Clone> Default for Set<D> {
    fn default() -> Self {
        Self { hub: WatchHub::new(), shared: Arc::default() }
    }
}

/// The messages of one callee's `Sync` stream.
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

impl<D: Desire> Set<D> {
    /// Wants this of a pod.
    pub fn want(&self, uid: &str, desire: D) {
        self.hub.set_if_changed(uid.to_owned(), desire);
    }

    /// Wants nothing of a pod any more.
    pub fn drop_pod(&self, uid: &str) {
        self.hub.remove(&uid.to_owned());
    }

    /// What is wanted of a pod now.
    pub fn get(&self, uid: &str) -> Option<D> {
        self.hub.get(&uid.to_owned())
    }

    /// Every source has reported: the callee may sweep what the set does not name.
    pub fn sources_are_ready(&self) {
        if !self.shared.sources_ready.swap(true, Ordering::Relaxed) {
            self.shared.again.notify_one();
        }
    }

    /// Holds the stream to one callee for ever; `open` makes the call.
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
            let text = format!("cannot tell {peer} what is wanted, retrying: {}", lost.message());
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

    /// Sends the set, its end, and then the changes, until the stream is gone.
    async fn feed(&self, sender: mpsc::Sender<D::Message>) -> Status {
        // Whether the set that is replayed now is a whole one is known before the replay begins: what comes
        // meanwhile may be only a part of what a source has to say.
        let ready = self.shared.sources_ready.load(Ordering::Relaxed);
        let mut subscription = self.hub.subscribe();
        loop {
            let message = self.next(&mut subscription, ready).await;
            if sender.send(message).await.is_err() {
                // `read_acks` knows why the stream ended; it is given the time to say so.
                tokio::time::sleep(Duration::from_millis(100)).await;
                return Status::unavailable("the stream ended");
            }
        }
    }

    async fn next(&self, subscription: &mut Subscription<String, D>, ready: bool) -> D::Message {
        // Both arms are cancel-safe. In this order, because the set is whole only when nothing waits to be sent.
        let (item, ready) = tokio::select! {
            biased;
            item = subscription.next() => (item, ready),
            // The sources became ready after the replay began: the set is completed once more.
            () = self.shared.again.notified() => (WatchItem::Synced, true),
        };
        match item {
            WatchItem::Set(_, desire) => desire.pod(),
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
pub struct Desired {
    /// runtime-shim.
    pub runtime: Set<runtime::PodDesire>,
    /// volume-manager.
    pub volumes: Set<volume::PodDesire>,
    /// resource-manager.
    pub resources: Set<resource::PodDesire>,
}

impl Desired {
    /// Nothing of the pod is to remain anywhere.
    pub fn forget(&self, uid: &str) {
        self.runtime.drop_pod(uid);
        self.volumes.drop_pod(uid);
        self.resources.drop_pod(uid);
    }

    /// See [`Set::sources_are_ready`].
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
    async fn a_stream_begins_with_the_whole_set_and_its_end() {
        let set: Set<runtime::PodDesire> = Set::default();
        set.want("a", desire("a"));
        let mut subscription = set.hub.subscribe();
        assert!(matches!(set.next(&mut subscription, false).await.item, Some(Item::Pod(_))));
        let Some(Item::Complete(end)) = set.next(&mut subscription, false).await.item else {
            panic!("no end")
        };
        assert!(!end.sources_ready);
        set.drop_pod("a");
        assert!(
            matches!(set.next(&mut subscription, false).await.item, Some(Item::DroppedUid(uid)) if uid == "a")
        );
    }

    #[tokio::test]
    async fn when_the_sources_become_ready_the_set_is_completed_again() {
        let set: Set<runtime::PodDesire> = Set::default();
        let mut subscription = set.hub.subscribe();
        let _ = set.next(&mut subscription, false).await;
        // A burst: pods and the end of the replay at the same moment.
        for uid in ["a", "b", "c"] {
            set.want(uid, desire(uid));
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
