//! Methods with a stream in both directions.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use keelson_proto::keelson::common::v1::SyncAck;
use keelson_proto::keelson::{resource_manager, runtime, volume_manager};
use tokio::sync::mpsc;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::gate::{Gate, GateWaiter};
use super::hub::{Afterwards, MessageStream, StreamHub};
use super::recorder::Recorder;
use super::script::not_scripted;

type HandlerFuture = Pin<Box<dyn Future<Output = Result<(), Status>> + Send>>;
type Handler<Req, Item> = Arc<dyn Fn(Conversation<Req, Item>) -> HandlerFuture + Send + Sync>;
type Check<Req> = Arc<dyn Fn(&Req) -> Result<(), Status> + Send + Sync>;

/// A method with a stream in both directions. Without a handler it is UNIMPLEMENTED. Clones share the script.
pub struct Bidi<Req, Item>(Arc<BidiScript<Req, Item>>);

struct BidiScript<Req, Item> {
    method: &'static str,
    messages: Recorder<Req>,
    hub: StreamHub<Item>,
    state: Mutex<State<Req, Item>>,
}

struct State<Req, Item> {
    handler: Option<Handler<Req, Item>>,
    check: Option<Check<Req>>,
    gate: GateWaiter,
}

/// Both streams of one call.
pub struct Conversation<Req, Item> {
    /// The message that was read before the call was accepted.
    first: Option<Req>,
    requests: Streaming<Req>,
    messages: Recorder<Req>,
    answers: mpsc::Sender<Result<Item, Status>>,
}

impl<Req: Clone, Item> Conversation<Req, Item> {
    /// The next message of the caller; `None` when its stream has ended or is broken.
    pub async fn next(&mut self) -> Option<Req> {
        if let Some(first) = self.first.take() {
            return Some(first);
        }
        let message = self.requests.next().await?.ok()?;
        self.messages.record(message.clone());
        Some(message)
    }

    /// Sends a message to the caller. A caller that has left is ignored.
    pub async fn send(&self, item: Item) {
        let _ = self.answers.send(Ok(item)).await;
    }
}

impl<Req, Item: Clone> Bidi<Req, Item> {
    pub(super) fn new(method: &'static str) -> Self {
        let state = State { handler: None, check: None, gate: GateWaiter::default() };
        Self(Arc::new(BidiScript {
            method,
            messages: Recorder::default(),
            hub: StreamHub::default(),
            state: Mutex::new(state),
        }))
    }

    fn state(&self) -> MutexGuard<'_, State<Req, Item>> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The messages of all callers that a handler has read, in order.
    pub fn messages(&self) -> &Recorder<Req> {
        &self.0.messages
    }

    /// Holds later calls back until the gate is opened or dropped.
    pub fn hold(&self) -> Gate {
        let (gate, waiter) = Gate::closed();
        self.state().gate = waiter;
        gate
    }

    /// Handles each call by an async function. The stream ends when the function returns, with its error if it has
    /// one. When the caller leaves, [`Conversation::next`] returns `None`.
    pub fn handle<F>(&self, handler: impl Fn(Conversation<Req, Item>) -> F + Send + Sync + 'static)
    where
        F: Future<Output = Result<(), Status>> + Send + 'static,
    {
        self.state().handler = Some(Arc::new(move |conversation| Box::pin(handler(conversation))));
    }

    /// Reads the first message of each call before the call is accepted; an error of `check` fails the call.
    pub fn check_first(&self, check: impl Fn(&Req) -> Result<(), Status> + Send + Sync + 'static) {
        self.state().check = Some(Arc::new(check));
    }

    /// Sends a message to every open stream.
    ///
    /// # Panics
    /// No stream is open.
    pub fn push(&self, item: Item) {
        self.0.hub.push(item);
    }

    /// Ends every open stream with an error.
    pub fn break_streams(&self, status: Status) {
        self.0.hub.break_streams(status);
    }

    /// Waits until the number of open streams satisfies `predicate`.
    ///
    /// # Panics
    /// It does not within 60 s.
    pub async fn until_open(&self, predicate: impl Fn(usize) -> bool) {
        self.0.hub.until_open(predicate).await;
    }
}

impl<Req: Clone + Send + Sync + 'static, Item: Clone + Send + Sync + 'static> Bidi<Req, Item> {
    pub(super) async fn call(
        &self,
        request: Request<Streaming<Req>>,
    ) -> Result<Response<MessageStream<Item>>, Status> {
        let gate = self.state().gate.clone();
        gate.pass().await;
        let (handler, check) = {
            let state = self.state();
            (state.handler.clone(), state.check.clone())
        };
        let handler = handler.ok_or_else(|| not_scripted(self.0.method))?;
        let (answers, stream) = mpsc::channel(16);
        let (requests, messages) = (request.into_inner(), self.0.messages.clone());
        let errors = answers.clone();
        let mut conversation = Conversation { first: None, requests, messages, answers };
        if let Some(check) = check {
            let first = conversation.next().await;
            let first = first.ok_or_else(|| Status::invalid_argument("the first message is missing"))?;
            check(&first)?;
            conversation.first = Some(first);
        }
        let handling = handler(conversation);
        tokio::spawn(async move {
            if let Err(status) = handling.await {
                // A caller that has left is ignored.
                let _ = errors.send(Err(status)).await;
            }
        });
        let stream = Box::pin(ReceiverStream::new(stream));
        Ok(Response::new(self.0.hub.stream(stream, Afterwards::End)))
    }
}

/// A message of a `Sync` stream.
pub trait SyncMessage {
    /// The desired state of a pod.
    type Desire;

    /// The UID of the pod that this message is about, and what is desired of it; `None` if the sender has dropped it.
    fn into_desire(self) -> Option<(String, Option<Self::Desire>)>;

    /// The epoch of the set that this message completes.
    fn completed_epoch(&self) -> Option<u64>;
}

macro_rules! sync_message {
    ($($package:ident),*) => {$(
        impl SyncMessage for $package::v1::SyncRequest {
            type Desire = $package::v1::PodDesire;

            fn into_desire(self) -> Option<(String, Option<Self::Desire>)> {
                match self.item? {
                    $package::v1::sync_request::Item::Pod(desire) => Some((desire.pod.clone()?.uid, Some(desire))),
                    $package::v1::sync_request::Item::DroppedUid(uid) => Some((uid, None)),
                    $package::v1::sync_request::Item::Complete(_) => None,
                }
            }

            fn completed_epoch(&self) -> Option<u64> {
                match &self.item {
                    Some($package::v1::sync_request::Item::Complete(set)) => Some(set.epoch),
                    _ => None,
                }
            }
        }
    )*};
}
sync_message!(runtime, volume_manager, resource_manager);

impl<Message: SyncMessage + Clone> Recorder<Message> {
    /// The last desired state of a pod; `None` before the first message about it and after its sender has dropped it.
    pub fn last_desire(&self, uid: &str) -> Option<Message::Desire> {
        let mut newest_first = self.all().into_iter().rev().filter_map(Message::into_desire);
        newest_first.find(|(pod, _)| pod == uid)?.1
    }
}

impl<Req: SyncMessage + Clone + Send + Sync + 'static> Bidi<Req, SyncAck> {
    /// Acknowledges each set when it is complete, and records its messages.
    pub fn acknowledge_sets(&self) {
        self.handle(|mut conversation: Conversation<Req, SyncAck>| async move {
            while let Some(message) = conversation.next().await {
                if let Some(epoch) = message.completed_epoch() {
                    conversation.send(SyncAck { epoch }).await;
                }
            }
            Ok(())
        });
    }
}

impl<Req, Item> Clone for Bidi<Req, Item> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<Req, Item> fmt::Debug for Bidi<Req, Item> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.method)
    }
}

impl<Req, Item> fmt::Debug for Conversation<Req, Item> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Conversation").finish_non_exhaustive()
    }
}
