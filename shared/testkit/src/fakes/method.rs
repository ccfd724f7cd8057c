//! The kinds of methods: one answer, or a stream of messages.

use std::fmt;
use std::future::Future;
use std::sync::Arc;

use tokio_stream::{Stream, StreamExt as _};
use tonic::{Request, Response, Status};

use super::gate::Gate;
use super::hub::{Afterwards, MessageStream, StreamHub};
use super::recorder::Recorder;
use super::script::Script;

/// A method with one request and one response. Without an answer it is UNIMPLEMENTED. Clones share the script.
pub struct Unary<Req, Resp>(Arc<Script<Req, Resp>>);

impl<Req, Resp> Unary<Req, Resp> {
    pub(super) fn new(method: &'static str) -> Self {
        Self(Arc::new(Script::new(method)))
    }

    /// The requests so far, in order, also of calls that wait or have failed. A request is recorded before its answer is
    /// made. To see what the answer changes, wait for [`Unary::answered`].
    pub fn requests(&self) -> &Recorder<Req> {
        self.0.requests()
    }

    /// The requests whose answers have been made, in the order of the answers.
    pub fn answered(&self) -> &Recorder<Req> {
        self.0.answered()
    }

    /// Holds later calls back until the gate is opened or dropped.
    pub fn hold(&self) -> Gate {
        self.0.hold()
    }

    /// Answers one later call. Queued answers are used in order, before the standing one.
    pub fn answer_once(&self, answer: Result<Resp, Status>) {
        self.0.queue(answer);
    }

    /// Answers each call by an async function of its request.
    pub fn answer_async<F>(&self, handler: impl Fn(Req) -> F + Send + Sync + 'static)
    where
        F: Future<Output = Result<Resp, Status>> + Send + 'static,
    {
        self.0.answer_async(handler);
    }
}

impl<Req: Clone, Resp: Clone + Send + Sync + 'static> Unary<Req, Resp> {
    /// Answers each call with this response.
    pub fn answer(&self, response: Resp) {
        self.answer_with(move |_| Ok(response.clone()));
    }

    /// Fails each call with this status.
    pub fn fail(&self, status: Status) {
        self.answer_with(move |_| Err(status.clone()));
    }

    /// Answers each call by a function of its request.
    pub fn answer_with(&self, handler: impl Fn(Req) -> Result<Resp, Status> + Send + Sync + 'static) {
        self.0.answer_with(handler);
    }

    pub(super) async fn call(&self, request: Request<Req>) -> Result<Response<Resp>, Status> {
        self.0.call(request.into_inner()).await.map(Response::new)
    }
}

/// The answer to a call of a method that streams: its first messages, and whether it ends after them.
pub struct StreamAnswer<Item> {
    first: MessageStream<Item>,
    afterwards: Afterwards,
}

impl<Item: Send + 'static> StreamAnswer<Item> {
    /// These messages; then the stream ends.
    pub fn items(items: impl IntoIterator<Item = Item>) -> Self {
        let items: Vec<_> = items.into_iter().map(Ok).collect();
        Self::stream(tokio_stream::iter(items))
    }

    /// This stream; it ends as this one ends.
    pub fn stream(stream: impl Stream<Item = Result<Item, Status>> + Send + 'static) -> Self {
        Self { first: Box::pin(stream), afterwards: Afterwards::End }
    }

    /// The stream stays open after these messages, for what the test pushes.
    #[must_use]
    pub fn then_open(mut self) -> Self {
        self.afterwards = Afterwards::StayOpen;
        self
    }

    /// The stream ends with this error.
    #[must_use]
    pub fn then_fail(self, status: Status) -> Self {
        Self::stream(self.first.chain(tokio_stream::once(Err(status))))
    }
}

/// A method with one request and a stream of messages. Without an answer it is UNIMPLEMENTED. Clones share the script.
pub struct ServerStream<Req, Item>(Arc<StreamScript<Req, Item>>);

struct StreamScript<Req, Item> {
    script: Script<Req, StreamAnswer<Item>>,
    hub: StreamHub<Item>,
}

impl<Req, Item: Clone> ServerStream<Req, Item> {
    pub(super) fn new(method: &'static str) -> Self {
        Self(Arc::new(StreamScript { script: Script::new(method), hub: StreamHub::default() }))
    }

    /// The requests so far, in order, also of calls that wait or have failed.
    pub fn requests(&self) -> &Recorder<Req> {
        self.0.script.requests()
    }

    /// Holds later calls back until the gate is opened or dropped.
    pub fn hold(&self) -> Gate {
        self.0.script.hold()
    }

    /// Answers one later call. Queued answers are used in order, before the standing one.
    pub fn answer_once(&self, answer: Result<StreamAnswer<Item>, Status>) {
        self.0.script.queue(answer);
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

    /// Ends every open stream.
    pub fn end_streams(&self) {
        self.0.hub.end_streams();
    }

    /// How many streams are open.
    pub fn open_streams(&self) -> usize {
        self.0.hub.open_streams()
    }

    /// Waits until the number of open streams satisfies `predicate`.
    ///
    /// # Panics
    /// It does not within 60 s.
    pub async fn until_open(&self, predicate: impl Fn(usize) -> bool) {
        self.0.hub.until_open(predicate).await;
    }
}

impl<Req: Clone, Item: Clone + Send + Sync + 'static> ServerStream<Req, Item> {
    /// Answers each call with these messages; then its stream ends.
    pub fn list(&self, items: impl IntoIterator<Item = Item>) {
        let items: Vec<Item> = items.into_iter().collect();
        self.answer_with(move |_| Ok(StreamAnswer::items(items.clone())));
    }

    /// Answers each call with these messages; its stream stays open for what the test pushes.
    pub fn replay(&self, items: impl IntoIterator<Item = Item>) {
        let items: Vec<Item> = items.into_iter().collect();
        self.answer_with(move |_| Ok(StreamAnswer::items(items.clone()).then_open()));
    }

    /// Answers each call by a function of its request.
    pub fn answer_with(
        &self,
        handler: impl Fn(Req) -> Result<StreamAnswer<Item>, Status> + Send + Sync + 'static,
    ) {
        self.0.script.answer_with(handler);
    }

    /// Fails each call with this status.
    pub fn fail(&self, status: Status) {
        self.answer_with(move |_| Err(status.clone()));
    }

    pub(super) async fn call(&self, request: Request<Req>) -> Result<Response<MessageStream<Item>>, Status> {
        let answer = self.0.script.call(request.into_inner()).await?;
        Ok(Response::new(self.0.hub.stream(answer.first, answer.afterwards)))
    }
}

impl<Req, Resp> Clone for Unary<Req, Resp> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<Req, Item> Clone for ServerStream<Req, Item> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<Req, Resp> fmt::Debug for Unary<Req, Resp> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.method())
    }
}

impl<Req, Item> fmt::Debug for ServerStream<Req, Item> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.script.method())
    }
}

impl<Item> fmt::Debug for StreamAnswer<Item> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamAnswer").field("afterwards", &self.afterwards).finish_non_exhaustive()
    }
}
