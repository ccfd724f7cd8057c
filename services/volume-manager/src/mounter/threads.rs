//! Work on files that blocks, on threads of which only so many may hang: threads are left for the rest of the service.
//!
//! Work on the files of one volume names that volume: what hangs there keeps further work from that volume only.

use std::io;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout_at};

use super::gates::{Gates, Pass, Refusal};
use super::state::DEADLINE;

/// The number of threads for such work. Hanging ones count, except [`MAX_HUNG`] ones of volumes.
const MAX_THREADS: usize = 64;
/// The number of threads that hang in the work of volumes and no longer count as [`MAX_THREADS`]. tokio has 512 threads
/// for all.
const MAX_HUNG: usize = 192;

static THREADS: Threads =
    Threads { running: Semaphore::const_new(MAX_THREADS), hung: Semaphore::const_new(MAX_HUNG) };

/// The work of each volume.
static VOLUMES: LazyLock<Gates> = LazyLock::new(Gates::default);

/// The places for work.
#[derive(Debug)]
struct Threads {
    running: Semaphore,
    hung: Semaphore,
}

/// The place that a thread has, until it ends.
type Place = Arc<Mutex<Option<SemaphorePermit<'static>>>>;

/// Why work on a thread has no result.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ThreadError {
    /// A system call has failed.
    #[error(transparent)]
    Failed(io::Error),
    /// It has not ended within its deadline and keeps its thread until it ends.
    #[error("the node has not answered within {} s", .0.as_secs_f64())]
    Deadline(Duration),
    /// No thread was free within the deadline.
    #[error(
        "{MAX_THREADS} earlier accesses to files have not ended; find the file system that does not answer"
    )]
    NoThread,
    /// Earlier work for the same volume has not ended.
    #[error("{0}; find out why the file system does not answer")]
    Refused(VolumeRefusal),
    /// It panicked.
    #[error("it ended unexpectedly")]
    Panicked(#[source] tokio::task::JoinError),
}

/// Why no more work starts for a volume, in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct VolumeRefusal(Refusal);

impl std::fmt::Display for VolumeRefusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl From<ThreadError> for io::Error {
    fn from(error: ThreadError) -> Self {
        match error {
            ThreadError::Failed(error) => error,
            other => Self::other(other),
        }
    }
}

/// Does work that may block on a thread. At the deadline the work is abandoned: it keeps its thread until it ends.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, ThreadError> {
    THREADS.run(Instant::now() + DEADLINE, DEADLINE, Arc::default(), work).await
}

/// As [`blocking`], for the files of one volume. While its earlier work hangs, it is refused. `what` completes the sentence
/// "the earlier attempt to …".
pub(crate) async fn blocking_for<T: Send + 'static>(
    volume: &str,
    what: &str,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, ThreadError> {
    THREADS.run_for(&VOLUMES, DEADLINE, (volume, what), work).await
}

impl Threads {
    /// Does work in the place `place`, which is empty.
    async fn run<T: Send + 'static>(
        &'static self,
        give_up: Instant,
        deadline: Duration,
        place: Place,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> Result<T, ThreadError> {
        let permit = timeout_at(give_up, self.running.acquire()).await;
        let permit = permit.ok().and_then(Result::ok).ok_or(ThreadError::NoThread)?;
        set(&place, permit);
        let work = tokio::task::spawn_blocking(move || {
            let result = work();
            drop(place);
            result
        });
        match timeout_at(give_up, work).await {
            Ok(Ok(result)) => result.map_err(ThreadError::Failed),
            Ok(Err(error)) => Err(ThreadError::Panicked(error)),
            Err(_) => Err(ThreadError::Deadline(deadline)),
        }
    }

    async fn run_for<T: Send + 'static>(
        &'static self,
        volumes: &Gates,
        deadline: Duration,
        (volume, what): (&str, &str),
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> Result<T, ThreadError> {
        let give_up = Instant::now() + deadline;
        let pass = volumes.enter(volume, deadline).await;
        let pass = pass.map_err(|refusal| ThreadError::Refused(VolumeRefusal(refusal)))?;
        let pass = Arc::new(Mutex::new(pass));
        let (in_thread, started) = (Arc::clone(&pass), Instant::now());
        let place = Place::default();
        // The thread keeps the pass until it ends, also if nobody waits for it.
        let work = move || {
            let result = work();
            drop(in_thread);
            result
        };
        let result = self.run(give_up, deadline, Arc::clone(&place), work).await;
        if let Err(ThreadError::Deadline(_)) = &result {
            abandon(&pass, what, started);
            // Nothing more starts for this volume, and the others get the place.
            if let Ok(permit) = self.hung.try_acquire() {
                set(&place, permit);
            }
        }
        result
    }
}

fn set(place: &Place, permit: SemaphorePermit<'static>) {
    *place.lock().unwrap_or_else(PoisonError::into_inner) = Some(permit);
}

fn abandon(pass: &Mutex<Pass>, what: &str, started: Instant) {
    pass.lock().unwrap_or_else(PoisonError::into_inner).abandon(what.to_owned(), None, started);
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    const SHORT: Duration = Duration::from_millis(50);
    const LONG: Duration = Duration::from_secs(20);

    const fn threads(running: usize, hung: usize) -> Threads {
        Threads { running: Semaphore::const_new(running), hung: Semaphore::const_new(hung) }
    }

    fn hang(end: Receiver<()>) -> impl FnOnce() -> io::Result<i32> {
        move || end.recv().map(|()| 0).map_err(io::Error::other)
    }

    #[tokio::test]
    async fn work_that_hangs_keeps_its_own_thread_and_only_so_many_threads_hang() {
        static TWO: Threads = threads(2, 2);
        let run = |deadline, work: Box<dyn FnOnce() -> io::Result<i32> + Send>| {
            TWO.run(Instant::now() + deadline, deadline, Arc::default(), work)
        };
        let mut ends: Vec<Sender<()>> = Vec::new();
        for _ in 0..2 {
            assert_eq!(run(LONG, Box::new(|| Ok(7))).await.unwrap(), 7);
            let (end, ended) = channel();
            ends.push(end);
            let error = run(SHORT, Box::new(hang(ended))).await.unwrap_err();
            assert_eq!(error.to_string(), "the node has not answered within 0.05 s");
        }
        let error = run(SHORT, Box::new(|| Ok(7))).await.unwrap_err();
        assert!(matches!(error, ThreadError::NoThread), "{error}");
        // Other threads of the runtime are not affected.
        assert_eq!(tokio::task::spawn_blocking(|| 8).await.unwrap(), 8);
        ends.pop();
        assert_eq!(run(LONG, Box::new(|| Ok(7))).await.unwrap(), 7);
    }

    #[tokio::test]
    async fn volumes_that_hang_are_asked_once_and_hold_up_no_other_volume() {
        static TWO: Threads = threads(2, 8);
        let volumes = Gates::default();
        let mut ends: Vec<Sender<()>> = Vec::new();
        for volume in ["a", "b", "c"] {
            let (end, ended) = channel();
            ends.push(end);
            let hung = TWO.run_for(&volumes, SHORT, (volume, "list the folder"), hang(ended)).await;
            assert!(matches!(hung, Err(ThreadError::Deadline(_))), "{hung:?}");
            let error =
                TWO.run_for(&volumes, LONG, (volume, "read it"), || Ok(7)).await.unwrap_err().to_string();
            assert!(
                error.starts_with("the earlier attempt to list the folder has not ended for "),
                "{error}"
            );
        }
        assert_eq!(TWO.run_for(&volumes, LONG, ("e", "read it"), || Ok(7)).await.unwrap(), 7);
        ends.clear();
        let answered = async {
            while TWO.run_for(&volumes, LONG, ("a", "read it"), || Ok(7)).await.is_err() {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(LONG, answered).await.unwrap();
    }

    #[tokio::test]
    async fn the_threads_that_hang_for_volumes_are_limited_too() {
        static ONE: Threads = threads(1, 1);
        let volumes = Gates::default();
        let mut ends: Vec<Sender<()>> = Vec::new();
        for volume in ["a", "b"] {
            let (end, ended) = channel();
            ends.push(end);
            ONE.run_for(&volumes, SHORT, (volume, "x"), hang(ended)).await.unwrap_err();
        }
        let error = ONE.run_for(&volumes, SHORT, ("c", "x"), || Ok(7)).await.unwrap_err();
        assert!(matches!(error, ThreadError::NoThread), "{error}");
        ends.pop();
        assert_eq!(ONE.run_for(&volumes, LONG, ("c", "x"), || Ok(7)).await.unwrap(), 7);
    }

    #[tokio::test]
    async fn the_error_of_the_work_keeps_its_kind() {
        let error = blocking(|| Err::<(), _>(io::ErrorKind::NotFound.into())).await.unwrap_err();
        assert_eq!(io::Error::from(error).kind(), io::ErrorKind::NotFound);
    }
}
