//! What a client of a control plane implements.

use std::fmt::Display;

use crate::state::{DelayBounds, RetryDelay};

/// A list and watch of one range, with the position in it.
///
/// The position is the version up to which all changes are reported. `list` and `read` advance it, and an `Expired` discards
/// it.
pub trait ListWatch: Send {
    /// The client that makes the calls.
    type Client;
    /// A set of objects.
    type Range;
    /// An object in a list.
    type Item: Send;
    /// The changes in one message of a watch.
    type Changes: Send;
    /// An open watch.
    type Watch: Send;
    /// The error of a call.
    type Error: Display + Send;

    /// The bounds of the back-off.
    const DELAYS: DelayBounds;
    /// Whether the server has answered when `open` returns. If not, its first message says so.
    const OPEN_IS_CONTACT: bool;

    /// A position before the first list.
    fn new(client: Self::Client, range: Self::Range) -> Self;

    /// Lists the range and sets the position to the version of the list.
    fn list(&mut self) -> impl Future<Output = Result<Vec<Self::Item>, Self::Error>> + Send;

    /// Opens a watch from the position.
    fn open(&mut self) -> impl Future<Output = Result<Self::Watch, OpenError<Self::Error>>> + Send;

    /// Reads the next message of a watch. Must be cancel-safe.
    fn read(
        &mut self,
        watch: &mut Self::Watch,
    ) -> impl Future<Output = Read<Self::Changes, Self::Error>> + Send;

    /// Closes a watch after [`Read::Interrupted`].
    fn interrupted(&mut self, watch: Self::Watch) -> impl Future<Output = ()> + Send {
        drop(watch);
        std::future::ready(())
    }

    /// When to retry after an error.
    fn retry_delay(_error: &Self::Error) -> RetryDelay {
        RetryDelay::BACK_OFF
    }
}

/// Why a watch was not opened.
#[derive(Debug)]
pub enum OpenError<E> {
    /// The server no longer has the changes since the position.
    Expired,
    /// Another error.
    Failed(E),
}

/// What reading a watch has yielded.
#[derive(Debug)]
pub enum Read<C, E> {
    /// Changes.
    Changed(C),
    /// The server has confirmed that there are no changes up to a version.
    Contact,
    /// Nothing to report; the watch is read on.
    Nothing,
    /// The watch must be opened again, for example with new credentials.
    Replaced,
    /// The server has ended the watch, as it does after a while.
    Ended,
    /// The server no longer has the changes since the position, or it has other ones.
    Expired,
    /// The connection broke; another server may continue the watch.
    Interrupted(E),
    /// Another error.
    Failed(E),
}
