//! The open streams of a method.

use std::pin::Pin;
use std::time::Duration;

use tokio::sync::{broadcast, mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::Status;

/// A stream of messages that may end with an error.
pub type MessageStream<Item> = Pin<Box<dyn Stream<Item = Result<Item, Status>> + Send>>;

/// Pushed messages that a stream may be behind.
const BACKLOG: usize = 1024;
/// How long a test waits for streams before it fails.
const LIMIT: Duration = Duration::from_secs(60);

/// A message from the test to all open streams.
#[derive(Debug, Clone)]
enum Push<Item> {
    Message(Item),
    Break(Status),
    End,
}

/// The behaviour of a stream after its first messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Afterwards {
    End,
    StayOpen,
}

/// Sends messages to all open streams of a method.
#[derive(Debug)]
pub(super) struct StreamHub<Item> {
    pushes: broadcast::Sender<Push<Item>>,
    open: watch::Sender<usize>,
}

impl<Item: Clone> Default for StreamHub<Item> {
    fn default() -> Self {
        Self { pushes: broadcast::Sender::new(BACKLOG), open: watch::Sender::new(0) }
    }
}

impl<Item> StreamHub<Item> {
    pub(super) fn push(&self, item: Item) {
        assert!(self.pushes.send(Push::Message(item)).is_ok(), "no stream is open");
    }

    pub(super) fn break_streams(&self, status: Status) {
        // An error means that no stream is open.
        let _ = self.pushes.send(Push::Break(status));
    }

    pub(super) fn end_streams(&self) {
        // An error means that no stream is open.
        let _ = self.pushes.send(Push::End);
    }

    pub(super) fn open_streams(&self) -> usize {
        *self.open.borrow()
    }

    /// Waits until the number of open streams satisfies `predicate`.
    pub(super) async fn until_open(&self, predicate: impl Fn(usize) -> bool) {
        let mut open = self.open.subscribe();
        let found = open.wait_for(|count| predicate(*count));
        let in_time = tokio::time::timeout(LIMIT, found).await.is_ok();
        assert!(in_time, "{} streams are open after {LIMIT:?}", self.open_streams());
    }
}

impl<Item: Clone + Send + 'static> StreamHub<Item> {
    /// A stream of `first` and of what is pushed while it is open. It counts as open until the reader leaves or it ends.
    pub(super) fn stream(&self, first: MessageStream<Item>, afterwards: Afterwards) -> MessageStream<Item> {
        let (answers, stream) = mpsc::channel(16);
        let pushes = self.pushes.subscribe();
        let open = OpenStream::count(&self.open);
        tokio::spawn(async move {
            // Cancel-safe: a reader that has left needs no message.
            tokio::select! {
                () = answers.closed() => {}
                () = forward(first, pushes, afterwards, &answers) => {}
            }
            drop(open);
        });
        Box::pin(ReceiverStream::new(stream))
    }
}

/// Sends `first`, then what is pushed; what is pushed earlier waits while `first` has messages ready.
async fn forward<Item: Clone>(
    mut first: MessageStream<Item>,
    mut pushes: broadcast::Receiver<Push<Item>>,
    afterwards: Afterwards,
    answers: &mpsc::Sender<Result<Item, Status>>,
) {
    let mut first_is_open = true;
    loop {
        // Cancel-safe: a stream and a broadcast lose nothing between two polls.
        let (message, ends) = tokio::select! {
            biased;
            item = first.next(), if first_is_open => match item {
                Some(item) => {
                    let failed = item.is_err();
                    (item, failed)
                }
                None if afterwards == Afterwards::End => return,
                None => {
                    first_is_open = false;
                    continue;
                }
            },
            push = pushes.recv() => match push {
                Ok(Push::Message(item)) => (Ok(item), false),
                Ok(Push::Break(status)) => (Err(status), true),
                Ok(Push::End) | Err(broadcast::error::RecvError::Closed) => return,
                Err(broadcast::error::RecvError::Lagged(lost)) => {
                    (Err(Status::data_loss(format!("the stream has missed {lost} messages"))), true)
                }
            },
        };
        if answers.send(message).await.is_err() || ends {
            return;
        }
    }
}

/// Counts as one open stream until it is dropped.
struct OpenStream(watch::Sender<usize>);

impl OpenStream {
    fn count(open: &watch::Sender<usize>) -> Self {
        open.send_modify(|count| *count += 1);
        Self(open.clone())
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}
