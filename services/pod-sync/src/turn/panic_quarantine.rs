//! A pod whose worker panics is quarantined: other pods are not affected, and its worker is restarted with back-off.

use std::any::Any;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use keelson_pod_sync_core::explain::{Cause, StepName};
use keelson_service_kit::{Backoff, ObjectRef, now_unix_nanos, panic_message};

use crate::effects::Effects;
use crate::publish::objects::pod_object;
use crate::state::pod_state::PodState;

/// The longest first wait after a panic.
const FIRST: Duration = Duration::from_secs(10);
/// The longest wait. A worker that has run for longer starts with the first wait again.
const LONGEST: Duration = Duration::from_secs(300);
/// The most bytes of a panic's message that are reported.
const TEXT_BYTES: usize = 300;

/// Runs the worker of one incarnation of a UID, and restarts it when it panics.
pub async fn supervise<Run, Work>(effects: Arc<Effects>, uid: Arc<str>, incarnation: u64, run: Run)
where
    Run: Fn(Arc<Effects>, Arc<str>, u64) -> Work,
    Work: Future<Output = ()> + Send + 'static,
{
    let mut backoff = Backoff::new(FIRST, LONGEST);
    let mut has_panicked = false;
    loop {
        let began = Instant::now();
        let work = run(Arc::clone(&effects), Arc::clone(&uid), incarnation);
        let (registry, name) = (Arc::clone(&effects.registry), Arc::clone(&uid));
        #[expect(clippy::disallowed_methods, reason = "the quarantine reports the panic, with its pod")]
        let worker = tokio::spawn(Box::pin(async move {
            if has_panicked {
                // It may have panicked before the desired state of the pod was set.
                registry.update_desired_state_of(&name, incarnation);
            }
            work.await;
        }));
        let Err(error) = worker.await else { return };
        let Ok(panic) = error.try_into_panic() else { return };
        if began.elapsed() > LONGEST {
            backoff.reset();
        }
        has_panicked = true;
        let (text, delay) = (message_of(&*panic), backoff.next_delay());
        // Boxed, because panics are rare and every pod has a supervisor.
        if !Box::pin(quarantine(&effects, &uid, incarnation, &text, delay)).await {
            return;
        }
    }
}

/// Reports the panic and waits until the worker may be restarted: after the delay, when the pod has changed or has to end, or when an
/// operator asks for it. Returns false if it may not.
async fn quarantine(
    effects: &Arc<Effects>,
    uid: &str,
    incarnation: u64,
    text: &str,
    delay: Duration,
) -> bool {
    let at = effects.registry.moment();
    let next = now_unix_nanos().saturating_add(i64::try_from(delay.as_nanos()).unwrap_or(i64::MAX));
    let message = format!("the worker of the pod panicked: {text}");
    let cause = Cause::failed("Panicked", &message, "pod-sync").retried_at(next);
    let known = effects.registry.with_incarnation(uid, incarnation, |state| {
        state.steps.set(StepName::Worker, "", cause, &at);
        state.inbox.quarantine();
        // The panic may have interrupted anything.
        state.runtime.freshness.invalidate();
        (object_of(state, uid), state.inbox.waker())
    });
    let Some((object, wake)) = known else { return false };
    report(effects, object, text, delay);
    let deadline = tokio::time::sleep(delay);
    tokio::pin!(deadline);
    loop {
        // Cancel-safe: what decides is in the state of the pod.
        let is_over = tokio::select! {
            () = effects.context.shutdown.cancelled() => return false,
            () = wake.notified() => false,
            () = &mut deadline => true,
        };
        let still = effects.registry.with_incarnation(uid, incarnation, |state| {
            if is_over {
                state.inbox.end_quarantine();
            }
            state.inbox.is_quarantined()
        });
        match still {
            None => return false,
            Some(true) => {}
            Some(false) => return true,
        }
    }
}

/// Does something with a pod in a loop that a panic would end for all pods. A panic is reported as an event of the pod; `None`.
pub fn guard<T>(effects: &Arc<Effects>, object: ObjectRef, act: impl FnOnce() -> T) -> Option<T> {
    match catch_unwind(AssertUnwindSafe(act)) {
        Ok(value) => Some(value),
        Err(panic) => {
            let (uid, text) = (object.uid.clone(), message_of(&*panic));
            effects.context.events.warning(object, "FailedSync", format!("error accepting the pod: {text}"));
            tracing::error!(uid, text, "accepting a pod panicked; other pods are not affected");
            None
        }
    }
}

fn report(effects: &Effects, object: ObjectRef, text: &str, delay: Duration) {
    let pod = format!("{}/{}", object.namespace, object.name);
    let (uid, retry_ms) = (object.uid.clone(), delay.as_millis() as u64);
    effects.context.events.warning(
        object,
        "FailedSync",
        format!("error syncing the pod: its worker panicked: {text}"),
    );
    tracing::error!(pod, uid, retry_ms, text, "the worker of a pod panicked; the pod is quarantined");
}

fn object_of(state: &PodState, uid: &str) -> ObjectRef {
    match &state.desired {
        Some(desired) => pod_object(&desired.pod),
        None => ObjectRef::pod(&state.runtime.observed.namespace, &state.runtime.observed.name, uid),
    }
}

fn message_of(panic: &(dyn Any + Send)) -> String {
    let text = panic_message(panic);
    let end = (0..=TEXT_BYTES.min(text.len())).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    text[..end].to_owned()
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
    use crate::state::pod_state::DesiredPod;

    fn desired() -> Arc<DesiredPod> {
        let json = serde_json::json!({
            "metadata": {"name": "web", "namespace": "default", "uid": "u"},
            "spec": {"containers": [{"name": "main", "image": "i:1"}]},
        });
        let pod: Pod = serde_json::from_value(json).unwrap();
        Arc::new(DesiredPod {
            pod: Arc::new(pod),
            raw: bytes::Bytes::new(),
            source: "file".into(),
            traceparent: String::new(),
            revision: 1,
            added_unix_nanos: 0,
        })
    }

    /// With one pod, whose own worker is not started.
    fn with_pod() -> (Arc<Effects>, u64) {
        let effects = Effects::new(Context::detached(ServiceName::PodSync, Config::default()), None);
        let mut state = PodState::new("u", Default::default());
        state.inbox.claim_worker();
        effects.registry.insert("u", state);
        effects.registry.set_desired(&desired(), UpdateKind::Update, None);
        let incarnation = effects.registry.with("u", |e| e.incarnation).unwrap();
        (effects, incarnation)
    }

    async fn events(effects: &Effects) -> Vec<Event> {
        let request = tonic::Request::new(ListEventsRequest::default());
        effects.context.events.list_events(request).await.unwrap().into_inner().events
    }

    fn cause(effects: &Effects) -> Option<Cause> {
        effects.registry.with("u", |e| e.steps.get(StepName::Worker, "").cloned()).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn a_worker_that_panics_is_reported_and_restarted_with_back_off() {
        let (effects, incarnation) = with_pod();
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
        let supervisor = tokio::spawn(supervise(Arc::clone(&effects), "u".into(), incarnation, run));
        let first = begins.recv().await.unwrap();
        let second = begins.recv().await.unwrap();
        let shown = cause(&effects).unwrap();
        assert_eq!((&*shown.owner, &*shown.kind), ("pod-sync", "Panicked"));
        assert_eq!(shown.message, "the worker of the pod panicked: index out of bounds");
        assert!(shown.next_retry_unix_nanos > now_unix_nanos());
        let third = begins.recv().await.unwrap();
        assert!(
            second - first >= FIRST / 2 && third - second >= FIRST,
            "{:?} {:?}",
            second - first,
            third - second
        );
        supervisor.await.unwrap();
        let events = events(&effects).await;
        assert_eq!(
            (events[0].r#type.as_str(), events[0].reason.as_str(), events[0].count),
            ("Warning", "FailedSync", 2)
        );
        assert_eq!(events[0].message, "error syncing the pod: its worker panicked: index out of bounds");
        assert!(effects.context.config.node_name.is_empty() && !effects.context.shutdown.is_cancelled());
    }

    #[tokio::test(start_paused = true)]
    async fn a_quarantine_ends_early_on_removal_or_request_not_on_observations() {
        for shortens in [false, true] {
            let (effects, incarnation) = with_pod();
            let (begun, mut begins) = mpsc::channel(8);
            let run = move |_, _, _| {
                let begun = begun.clone();
                async move {
                    begun.send(tokio::time::Instant::now()).await.unwrap();
                    panic!("poison");
                }
            };
            let supervisor = tokio::spawn(supervise(Arc::clone(&effects), "u".into(), incarnation, run));
            let first = begins.recv().await.unwrap();
            while effects.registry.with("u", |e| e.inbox.is_quarantined()) != Some(true) {
                tokio::task::yield_now().await;
            }
            if shortens {
                effects.registry.retry("u")
            } else {
                effects.registry.wake("u")
            }
            let second = begins.recv().await.unwrap();
            assert_eq!(second - first < FIRST / 2, shortens);
            while effects.registry.with("u", |e| e.inbox.is_quarantined()) != Some(true) {
                tokio::task::yield_now().await;
            }
            effects.registry.forget("u", incarnation, || ());
            supervisor.await.unwrap();
        }
    }

    #[tokio::test]
    async fn a_panic_while_a_pod_is_accepted_is_an_event_of_that_pod() {
        let (effects, _) = with_pod();
        let object = ObjectRef::pod("default", "poison", "p");
        assert_eq!(guard(&effects, object.clone(), || 7), Some(7));
        assert_eq!(guard(&effects, object, || -> u8 { panic!("no {}", "way") }), None);
        let events = events(&effects).await;
        assert_eq!(
            (events[0].name.as_str(), events[0].message.as_str()),
            ("poison", "error accepting the pod: no way")
        );
    }
}
