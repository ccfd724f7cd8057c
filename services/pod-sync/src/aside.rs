//! A pod whose worker panics is set aside: the others go on, and it is tried again with back-off.

use std::any::Any;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use keelson_pod_sync_core::explain::{Cause, StepName};
use keelson_service_kit::{Backoff, ObjectRef, now_unix_nanos};

use crate::agent::{Agent, Entry, object_of};
use crate::desires;

/// The first wait after a panic, at most.
const FIRST: Duration = Duration::from_secs(10);
/// The longest wait; a worker that has gone on for longer is well.
const LONGEST: Duration = Duration::from_secs(300);
/// More of a panic's text is not told.
const TEXT_BYTES: usize = 300;

/// Runs the worker of one life of a UID, again and again should it panic.
pub async fn supervise<Run, Work>(agent: Arc<Agent>, uid: String, life: u64, run: Run)
where
    Run: Fn(Arc<Agent>, String, u64) -> Work,
    Work: Future<Output = ()> + Send + 'static,
{
    let mut backoff = Backoff::new(FIRST, LONGEST);
    let mut again = false;
    loop {
        let began = Instant::now();
        let work = run(Arc::clone(&agent), uid.clone(), life);
        let (of, name) = (Arc::clone(&agent), uid.clone());
        let worker = tokio::spawn(Box::pin(async move {
            if again {
                // The panic may have come before the callees were told of the pod.
                of.with_life(&name, life, |entry| desires::want(&of, entry));
            }
            work.await;
        }));
        let Err(error) = worker.await else { return };
        let Ok(panic) = error.try_into_panic() else { return };
        if began.elapsed() > LONGEST {
            backoff.reset();
        }
        again = true;
        if !set_aside(&agent, &uid, life, &text_of(&*panic), backoff.next_delay()).await {
            return;
        }
    }
}

/// Says what has happened, and waits for the next attempt: when its time has come, when the pod changed or is to
/// end, or when somebody asked for it. False: there is none.
async fn set_aside(agent: &Arc<Agent>, uid: &str, life: u64, text: &str, delay: Duration) -> bool {
    let at = agent.moment();
    let next = now_unix_nanos().saturating_add(i64::try_from(delay.as_nanos()).unwrap_or(i64::MAX));
    let message = format!("the worker of the pod panicked: {text}");
    let cause = Cause::failed("Panicked", &message, "pod-sync").retried_at(next);
    let known = agent.with_life(uid, life, |entry| {
        entry.ledger.set(StepName::Worker, "", cause, &at);
        entry.aside = true;
        // The panic may have cut anything short.
        entry.freshness.ask();
        (object(entry, uid), Arc::clone(&entry.wake))
    });
    let Some((object, wake)) = known else { return false };
    tell(agent, object, text, delay);
    let deadline = tokio::time::sleep(delay);
    tokio::pin!(deadline);
    loop {
        // Cancel-safe: what is looked at is in the entry.
        let over = tokio::select! {
            () = agent.context.shutdown.cancelled() => return false,
            () = wake.notified() => false,
            () = &mut deadline => true,
        };
        let still = agent.with_life(uid, life, |entry| {
            entry.aside &= !over;
            entry.aside
        });
        match still {
            None => return false,
            Some(true) => {}
            Some(false) => return true,
        }
    }
}

/// Does something with a pod where a panic would end more than this pod. Then its worker, if it has come to one,
/// tries again; `None`.
pub fn guard<T>(agent: &Arc<Agent>, object: ObjectRef, act: impl FnOnce() -> T) -> Option<T> {
    match catch_unwind(AssertUnwindSafe(act)) {
        Ok(value) => Some(value),
        Err(panic) => {
            let (uid, text) = (object.uid.clone(), text_of(&*panic));
            agent.context.events.warning(object, "FailedSync", format!("error taking the pod in: {text}"));
            tracing::error!(uid, text, "taking a pod in panicked, the others go on");
            agent.begin_worker(&uid);
            None
        }
    }
}

fn tell(agent: &Agent, object: ObjectRef, text: &str, delay: Duration) {
    let pod = format!("{}/{}", object.namespace, object.name);
    let (uid, retry_ms) = (object.uid.clone(), delay.as_millis() as u64);
    agent.context.events.warning(
        object,
        "FailedSync",
        format!("error syncing the pod: its worker panicked: {text}"),
    );
    tracing::error!(pod, uid, retry_ms, text, "the worker of a pod panicked, the pod is set aside");
}

fn object(entry: &Entry, uid: &str) -> ObjectRef {
    match &entry.wanted {
        Some(wanted) => object_of(&wanted.pod),
        None => ObjectRef::pod(&entry.observed.namespace, &entry.observed.name, uid),
    }
}

fn text_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let mut text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
    let end = (0..=TEXT_BYTES.min(text.len())).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    text.truncate(end);
    text
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use keelson_config::{Config, ServiceName};
    use keelson_kube_model::Pod;
    use keelson_pod_sync_core::worker::UpdateKind;
    use keelson_proto::keelson::events::v1::{Event, ListEventsRequest, events_server::Events as _};
    use keelson_service_kit::Context;
    use tokio::sync::mpsc;

    use super::*;
    use crate::agent::Wanted;

    fn wanted() -> Wanted {
        let json = serde_json::json!({
            "metadata": {"name": "web", "namespace": "default", "uid": "u"},
            "spec": {"containers": [{"name": "main", "image": "i:1"}]},
        });
        let pod: Pod = serde_json::from_value(json).unwrap();
        Wanted {
            pod: Arc::new(pod),
            raw: bytes::Bytes::new(),
            source: "file".into(),
            origin: String::new(),
            traceparent: String::new(),
            revision: 1,
            added_unix_nanos: 0,
        }
    }

    /// An agent with one pod, whose own worker is kept away.
    fn agent() -> (Arc<Agent>, u64) {
        let agent = Agent::new(Context::detached(ServiceName::PodSync, Config::default()), None);
        agent.insert("u", Entry { worker: true, ..Entry::new("u", Default::default()) });
        agent.named(&wanted(), UpdateKind::Update, None);
        let life = agent.with("u", |e| e.life).unwrap();
        (agent, life)
    }

    async fn told(agent: &Agent) -> Vec<Event> {
        let request = tonic::Request::new(ListEventsRequest::default());
        agent.context.events.list_events(request).await.unwrap().into_inner().events
    }

    fn cause(agent: &Agent) -> Option<Cause> {
        agent.with("u", |e| e.ledger.get(StepName::Worker, "").cloned()).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn a_worker_that_panics_is_told_of_waits_and_is_begun_again() {
        let (agent, life) = agent();
        let (begun, mut begins) = mpsc::channel(8);
        let attempts = Arc::new(AtomicUsize::new(0));
        let run = move |_, _, _| {
            let (begun, attempts) = (begun.clone(), Arc::clone(&attempts));
            async move {
                begun.send(tokio::time::Instant::now()).await.unwrap();
                if attempts.fetch_add(1, Ordering::Relaxed) < 2 {
                    panic!("index out of bounds");
                }
            }
        };
        let supervisor = tokio::spawn(supervise(Arc::clone(&agent), "u".into(), life, run));
        let first = begins.recv().await.unwrap();
        let second = begins.recv().await.unwrap();
        let said = cause(&agent).unwrap();
        assert_eq!((&*said.owner, &*said.kind), ("pod-sync", "Panicked"));
        assert_eq!(said.message, "the worker of the pod panicked: index out of bounds");
        assert!(said.next_retry_unix_nanos > now_unix_nanos());
        let third = begins.recv().await.unwrap();
        assert!(
            second - first >= FIRST / 2 && third - second >= FIRST,
            "{:?} {:?}",
            second - first,
            third - second
        );
        supervisor.await.unwrap();
        let events = told(&agent).await;
        assert_eq!(
            (events[0].r#type.as_str(), events[0].reason.as_str(), events[0].count),
            ("Warning", "FailedSync", 2)
        );
        assert_eq!(events[0].message, "error syncing the pod: its worker panicked: index out of bounds");
        assert!(agent.context.config.node_name.is_empty() && !agent.context.shutdown.is_cancelled());
    }

    #[tokio::test(start_paused = true)]
    async fn news_of_the_runtime_does_not_shorten_the_wait_and_a_removal_or_a_person_does() {
        for shortens in [false, true] {
            let (agent, life) = agent();
            let (begun, mut begins) = mpsc::channel(8);
            let run = move |_, _, _| {
                let begun = begun.clone();
                async move {
                    begun.send(tokio::time::Instant::now()).await.unwrap();
                    panic!("poison");
                }
            };
            let supervisor = tokio::spawn(supervise(Arc::clone(&agent), "u".into(), life, run));
            let first = begins.recv().await.unwrap();
            while agent.with("u", |e| e.aside) != Some(true) {
                tokio::task::yield_now().await;
            }
            if shortens {
                agent.retry("u")
            } else {
                agent.wake("u")
            }
            let second = begins.recv().await.unwrap();
            assert_eq!(second - first < FIRST / 2, shortens);
            while agent.with("u", |e| e.aside) != Some(true) {
                tokio::task::yield_now().await;
            }
            agent.forget("u", life);
            supervisor.await.unwrap();
        }
    }

    #[tokio::test]
    async fn a_panic_while_a_pod_is_taken_in_is_an_event_of_that_pod() {
        let (agent, _) = agent();
        let object = ObjectRef::pod("default", "poison", "p");
        assert_eq!(guard(&agent, object.clone(), || 7), Some(7));
        assert_eq!(guard(&agent, object, || -> u8 { panic!("no {}", "way") }), None);
        let events = told(&agent).await;
        assert_eq!(
            (events[0].name.as_str(), events[0].message.as_str()),
            ("poison", "error taking the pod in: no way")
        );
    }
}
