//! Work on files that blocks, on threads of which only so many may hang: threads are left for the rest of the service.

use std::io;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};

use super::state::DEADLINE;

/// The number of threads for such work, hanging ones included. tokio has 512 threads for all.
const MAX_THREADS: usize = 64;

static THREADS: Semaphore = Semaphore::const_new(MAX_THREADS);

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
    /// It panicked.
    #[error("it ended unexpectedly")]
    Panicked(#[source] tokio::task::JoinError),
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
    blocking_in(&THREADS, DEADLINE, work).await
}

async fn blocking_in<T: Send + 'static>(
    threads: &'static Semaphore,
    deadline: Duration,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, ThreadError> {
    let give_up = Instant::now() + deadline;
    let thread = timeout_at(give_up, threads.acquire()).await;
    let thread = thread.ok().and_then(Result::ok).ok_or(ThreadError::NoThread)?;
    let work = tokio::task::spawn_blocking(move || {
        let result = work();
        drop(thread);
        result
    });
    match timeout_at(give_up, work).await {
        Ok(Ok(result)) => result.map_err(ThreadError::Failed),
        Ok(Err(error)) => Err(ThreadError::Panicked(error)),
        Err(_) => Err(ThreadError::Deadline(deadline)),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    const SHORT: Duration = Duration::from_millis(50);
    const LONG: Duration = Duration::from_secs(20);

    #[tokio::test]
    async fn work_that_hangs_keeps_its_own_thread_and_only_so_many_threads_hang() {
        static TWO: Semaphore = Semaphore::const_new(2);
        let hang = |end: Receiver<()>| move || end.recv().map_err(io::Error::other);
        let mut ends: Vec<Sender<()>> = Vec::new();
        for _ in 0..2 {
            assert_eq!(blocking_in(&TWO, LONG, || Ok(7)).await.unwrap(), 7);
            let (end, ended) = channel();
            ends.push(end);
            let error = blocking_in(&TWO, SHORT, hang(ended)).await.unwrap_err();
            assert_eq!(error.to_string(), "the node has not answered within 0.05 s");
        }
        let error = blocking_in(&TWO, SHORT, || Ok(7)).await.unwrap_err();
        assert!(matches!(error, ThreadError::NoThread), "{error}");
        // Other threads of the runtime are not affected.
        assert_eq!(tokio::task::spawn_blocking(|| 8).await.unwrap(), 8);
        ends.pop();
        assert_eq!(blocking_in(&TWO, LONG, || Ok(7)).await.unwrap(), 7);
    }

    #[tokio::test]
    async fn the_error_of_the_work_keeps_its_kind() {
        let error = blocking(|| Err::<(), _>(io::ErrorKind::NotFound.into())).await.unwrap_err();
        assert_eq!(io::Error::from(error).kind(), io::ErrorKind::NotFound);
    }
}
