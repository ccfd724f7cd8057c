//! The driver: makes the calls that the state machine asks for.

use std::fmt;
use std::time::Duration;

use tokio::time::Instant;

use crate::source::{ListWatch, OpenError, Read};
use crate::state::{FollowState, Next};

/// A change of one object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change<T, D> {
    /// The object was created or updated.
    Put(T),
    /// The object was deleted; what is known of it.
    Deleted(D),
}

/// What a [`Follower`] reports, of objects `T`, changes `C` and errors `E`.
#[derive(Debug)]
pub enum WatchEvent<T, C, E> {
    /// The whole range: an object that is not in the list does not exist.
    Listed(Vec<T>),
    /// What has changed since.
    Changed(C),
    /// The watch is open and nothing has changed.
    Contact,
    /// The watch has failed; it is retried.
    Lost(E),
}

type EventOf<S> = WatchEvent<<S as ListWatch>::Item, <S as ListWatch>::Changes, <S as ListWatch>::Error>;

/// Lists and watches a range. It never ends and eventually reports the latest state of every object.
pub struct Follower<S: ListWatch> {
    source: S,
    state: FollowState,
    /// The open watch.
    watch: Option<S::Watch>,
    /// When to make the next call; `None`: at once.
    retry: Option<Instant>,
}

impl<S: ListWatch + fmt::Debug> fmt::Debug for Follower<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Follower")
            .field("source", &self.source)
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

impl<S: ListWatch> Follower<S> {
    /// A follower that lists `range` first.
    pub fn new(client: S::Client, range: S::Range) -> Self {
        Self { source: S::new(client, range), state: FollowState::new(S::DELAYS), watch: None, retry: None }
    }

    /// The next event. Cancel-safe: a cancelled call loses nothing; the next call reports it or reads it again.
    pub async fn next(&mut self) -> EventOf<S> {
        loop {
            if let Some(at) = self.retry {
                tokio::time::sleep_until(at).await;
                self.retry = None;
            }
            let event = match self.state.next() {
                Next::List => Some(self.list().await),
                Next::Open => self.open().await,
                Next::Read => self.read().await,
            };
            if let Some(event) = event {
                return event;
            }
        }
    }

    async fn list(&mut self) -> EventOf<S> {
        match self.source.list().await {
            Ok(items) => {
                self.state.listed();
                WatchEvent::Listed(items)
            }
            Err(error) => self.lost(error),
        }
    }

    async fn open(&mut self) -> Option<EventOf<S>> {
        match self.source.open().await {
            Ok(watch) => {
                self.watch = Some(watch);
                self.state.opened();
                S::OPEN_IS_CONTACT.then_some(WatchEvent::Contact)
            }
            Err(OpenError::Expired) => {
                self.state.expired();
                None
            }
            Err(OpenError::Failed(error)) => Some(self.lost(error)),
        }
    }

    async fn read(&mut self) -> Option<EventOf<S>> {
        let read = match &mut self.watch {
            Some(watch) => self.source.read(watch).await,
            None => Read::Replaced,
        };
        match read {
            Read::Changed(changes) => {
                self.state.progressed();
                Some(WatchEvent::Changed(changes))
            }
            Read::Contact => {
                self.state.progressed();
                Some(WatchEvent::Contact)
            }
            Read::Nothing => None,
            Read::Replaced => {
                self.watch = None;
                self.state.replaced();
                None
            }
            Read::Ended => {
                self.watch = None;
                let delay = self.state.ended(fastrand::f64());
                self.retry_in(delay);
                None
            }
            Read::Expired => {
                self.watch = None;
                self.state.expired();
                None
            }
            Read::Interrupted(error) => self.resume(error).await,
            Read::Failed(error) => Some(self.lost(error)),
        }
    }

    /// Continues an interrupted watch on another server. The loss of one server is not reported while another one answers.
    async fn resume(&mut self, error: S::Error) -> Option<EventOf<S>> {
        if let Some(watch) = self.watch.take() {
            self.source.interrupted(watch).await;
        }
        if !self.state.interrupted() {
            return Some(self.lost(error));
        }
        tracing::debug!(%error, "the watch has ended; resuming it on another member");
        None
    }

    fn lost(&mut self, error: S::Error) -> EventOf<S> {
        self.watch = None;
        let delay = self.state.failed(S::retry_delay(&error), fastrand::f64());
        self.retry_in(delay);
        WatchEvent::Lost(error)
    }

    fn retry_in(&mut self, delay: Duration) {
        self.retry = Some(Instant::now() + delay);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;
    use crate::state::{DelayBounds, RetryDelay};

    /// Answers of a server in their order.
    enum Answer {
        List(Result<Vec<u32>, &'static str>),
        Open(Result<(), OpenError<&'static str>>),
        Read(Read<u32, &'static str>),
    }

    /// A server that gives each answer once, and the calls that it has got.
    struct Script {
        answers: VecDeque<Answer>,
        calls: Vec<&'static str>,
    }

    impl Script {
        fn take(&mut self, call: &'static str) -> Option<Answer> {
            self.calls.push(call);
            self.answers.pop_front()
        }
    }

    impl ListWatch for Script {
        type Client = Vec<Answer>;
        type Range = ();
        type Item = u32;
        type Changes = u32;
        type Watch = ();
        type Error = &'static str;

        const DELAYS: DelayBounds =
            DelayBounds { first: Duration::from_millis(100), longest: Duration::from_secs(1) };
        const OPEN_IS_CONTACT: bool = false;

        fn new(answers: Vec<Answer>, (): ()) -> Self {
            Self { answers: answers.into(), calls: Vec::new() }
        }

        async fn list(&mut self) -> Result<Vec<u32>, &'static str> {
            match self.take("list") {
                Some(Answer::List(answer)) => answer,
                _ => panic!("a list was not expected"),
            }
        }

        async fn open(&mut self) -> Result<(), OpenError<&'static str>> {
            match self.take("open") {
                Some(Answer::Open(answer)) => answer,
                _ => panic!("a watch was not expected"),
            }
        }

        async fn read(&mut self, (): &mut ()) -> Read<u32, &'static str> {
            match self.take("read") {
                Some(Answer::Read(answer)) => answer,
                _ => panic!("a read was not expected"),
            }
        }

        async fn interrupted(&mut self, (): ()) {
            self.calls.push("interrupted");
        }

        fn retry_delay(error: &&'static str) -> RetryDelay {
            match *error {
                "awaited" => RetryDelay::Fixed(Duration::from_secs(9)),
                _ => RetryDelay::BACK_OFF,
            }
        }
    }

    async fn events(follower: &mut Follower<Script>, count: usize) -> Vec<String> {
        let mut events = Vec::new();
        for _ in 0..count {
            events.push(match follower.next().await {
                WatchEvent::Listed(items) => format!("listed {items:?}"),
                WatchEvent::Changed(change) => format!("changed {change}"),
                WatchEvent::Contact => "contact".to_owned(),
                WatchEvent::Lost(error) => format!("lost {error}"),
            });
        }
        events
    }

    #[tokio::test(start_paused = true)]
    async fn expired_versions_are_listed_again_and_ended_watches_are_resumed() {
        let mut follower: Follower<Script> = Follower::new(
            vec![
                Answer::List(Ok(vec![1])),
                Answer::Open(Err(OpenError::Expired)),
                Answer::List(Ok(vec![1, 2])),
                Answer::Open(Ok(())),
                Answer::Read(Read::Changed(3)),
                Answer::Read(Read::Ended),
                Answer::Open(Ok(())),
                Answer::Read(Read::Replaced),
                Answer::Open(Ok(())),
                Answer::Read(Read::Nothing),
                Answer::Read(Read::Contact),
                Answer::Read(Read::Expired),
                Answer::List(Ok(Vec::new())),
            ],
            (),
        );
        let expected = ["listed [1]", "listed [1, 2]", "changed 3", "contact", "listed []"];
        assert_eq!(events(&mut follower, 5).await, expected);
        assert!(follower.source.answers.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn errors_are_reported_and_retried_after_their_delay() {
        let mut follower: Follower<Script> = Follower::new(
            vec![
                Answer::List(Err("awaited")),
                Answer::List(Ok(vec![1])),
                Answer::Open(Err(OpenError::Failed("refused"))),
                Answer::Open(Ok(())),
                Answer::Read(Read::Failed("broken")),
                Answer::Open(Ok(())),
                Answer::Read(Read::Changed(2)),
            ],
            (),
        );
        let begin = Instant::now();
        assert_eq!(events(&mut follower, 2).await, ["lost awaited", "listed [1]"]);
        assert_eq!(begin.elapsed(), Duration::from_secs(9));
        assert_eq!(events(&mut follower, 3).await, ["lost refused", "lost broken", "changed 2"]);
        let waited = begin.elapsed() - Duration::from_secs(9);
        assert!(waited >= Duration::from_millis(150) && waited <= Duration::from_millis(310), "{waited:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn one_interrupted_watch_is_resumed_without_a_report() {
        let mut follower: Follower<Script> = Follower::new(
            vec![
                Answer::List(Ok(Vec::new())),
                Answer::Open(Ok(())),
                Answer::Read(Read::Interrupted("first")),
                Answer::Open(Ok(())),
                Answer::Read(Read::Interrupted("second")),
                Answer::Open(Ok(())),
                Answer::Read(Read::Contact),
            ],
            (),
        );
        assert_eq!(events(&mut follower, 3).await, ["listed []", "lost second", "contact"]);
        let calls = ["list", "open", "read", "interrupted", "open", "read", "interrupted", "open", "read"];
        assert_eq!(follower.source.calls, calls);
    }
}
