//! Tasks of a service that report their panics. A bare `tokio::spawn` loses a panic when nothing awaits the task, so
//! clippy refuses it in product code.

use std::any::Any;
use std::future::Future;
use std::panic::{AssertUnwindSafe, resume_unwind};

use futures_util::FutureExt as _;
use tokio::task::JoinHandle;

/// Runs `work` as a task of its own. A panic is logged (event `task_panicked`, with `name` and the message of the panic)
/// and passed on to whatever awaits the handle. For a loop that has to run as long as the service, see
/// [`Context::spawn`](crate::Context::spawn).
pub fn spawn<F>(name: &'static str, work: F) -> JoinHandle<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    let reported = AssertUnwindSafe(work).catch_unwind().map(move |end| {
        end.unwrap_or_else(|panic| {
            let message = panic_message(&*panic);
            tracing::error!(event = "task_panicked", task = name, panic = message, "a task has panicked");
            resume_unwind(panic)
        })
    });
    #[expect(clippy::disallowed_methods, reason = "the one place that spawns tasks")]
    tokio::spawn(reported)
}

/// The text of a panic.
pub fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

#[cfg(test)]
mod tests {
    use std::fmt;
    use std::sync::{Arc, Mutex};

    use tracing::field::{Field, Visit};
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    use super::*;

    /// Keeps the fields of each log line, as `name=value`.
    #[derive(Debug, Clone, Default)]
    struct Lines(Arc<Mutex<Vec<String>>>);

    impl Subscriber for Lines {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }

        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }

        fn record(&self, _: &Id, _: &Record<'_>) {}

        fn record_follows_from(&self, _: &Id, _: &Id) {}

        fn event(&self, event: &Event<'_>) {
            let mut line = String::new();
            event.record(&mut Fields(&mut line));
            self.0.lock().unwrap().push(line);
        }

        fn enter(&self, _: &Id) {}

        fn exit(&self, _: &Id) {}
    }

    struct Fields<'a>(&'a mut String);

    impl Visit for Fields<'_> {
        fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
            self.0.push_str(&format!("{field}={value:?} "));
        }
    }

    #[tokio::test]
    async fn a_task_returns_its_output() {
        assert_eq!(spawn("sum", async { 1 + 1 }).await.unwrap(), 2);
    }

    #[tokio::test]
    async fn a_panic_is_logged_and_passed_on() {
        let lines = Lines::default();
        let _guard = tracing::subscriber::set_default(lines.clone());
        let table: Vec<u8> = Vec::new();
        let end = spawn("reader", async move { table[7] }).await.unwrap_err();
        assert!(panic_message(&*end.into_panic()).contains("index is 7"));
        let lines = lines.0.lock().unwrap();
        let [line] = &lines[..] else { panic!("{lines:?}") };
        for field in ["event=\"task_panicked\"", "task=\"reader\"", "index is 7"] {
            assert!(line.contains(field), "{field} in {line}");
        }
    }

    #[test]
    fn message_of_a_panic_without_text() {
        assert_eq!(panic_message(&7_u8), "no message");
    }
}
