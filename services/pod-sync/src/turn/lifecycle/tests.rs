use std::sync::{Barrier, Mutex};

use bytes::Bytes;
use keelson_config::{Config, ServiceName};
use keelson_pod_sync_core::backoff::BackoffKey;
use keelson_pod_sync_core::moment::SECOND;
use keelson_pod_sync_core::worker::{SyncOutcome, WorkerPhase, WorkerState};
use keelson_service_kit::Context;

use super::*;
use crate::publish::StatusFacts;
use crate::state::registry::AfterCleanup;
use crate::state::store::Store;
use crate::turn::leftover_cleanup;

fn desired() -> Arc<DesiredPod> {
    let json = serde_json::json!({
        "metadata": {"name": "web", "namespace": "default", "uid": "u"},
        "spec": {"terminationGracePeriodSeconds": 5, "containers": [{"name": "main", "image": "i:1"}]},
    });
    Arc::new(DesiredPod {
        raw: Bytes::from(json.to_string()),
        pod: Arc::new(serde_json::from_value(json).unwrap()),
        source: "file".into(),
        traceparent: String::new(),
        revision: 1,
        added_unix_nanos: 0,
    })
}

/// With workers that end after their first turn.
fn effects(store: Option<Store>) -> Arc<Effects> {
    let context = Context::detached(ServiceName::PodSync, Config::default());
    context.shutdown.cancel();
    Effects::new(context, store)
}

fn incarnation(effects: &Effects) -> u64 {
    effects.registry.with("u", |e| e.incarnation).unwrap()
}

fn phase(effects: &Effects) -> WorkerPhase {
    effects.registry.with("u", |e| e.worker.phase).unwrap()
}

/// A pod that was removed while its containers were being started has not ended because the start is done.
#[tokio::test]
async fn the_outcome_of_a_start_does_not_end_a_pod_that_was_removed_meanwhile() {
    let effects = effects(None);
    let pod = Arc::clone(&desired().pod);
    apply(&effects, "u", &Input::Update { kind: UpdateKind::Create, pod: &pod, observed: None });
    apply(&effects, "u", &Input::Started);
    apply(&effects, "u", &Input::Removed { pod: Some(&pod) });
    assert_eq!(phase(&effects), WorkerPhase::Terminating);
    effects.registry.apply_outcome(
        "u",
        (incarnation(&effects), WorkerPhase::Sync),
        SyncOutcome::Done,
        Some(&pod),
    );
    assert_eq!(phase(&effects), WorkerPhase::Terminating);
    effects.registry.apply_outcome(
        "u",
        (incarnation(&effects), WorkerPhase::Terminating),
        SyncOutcome::Done,
        Some(&pod),
    );
    assert_eq!(phase(&effects), WorkerPhase::Terminated);
}

#[tokio::test]
async fn the_outcome_of_an_earlier_incarnation_is_ignored() {
    let effects = effects(None);
    set_desired(&effects, &desired(), UpdateKind::Create, None);
    let earlier = incarnation(&effects);
    forget(&effects, "u", earlier);
    set_desired(&effects, &desired(), UpdateKind::Create, None);
    forget(&effects, "u", earlier);
    assert_eq!(
        effects.registry.apply_outcome("u", (earlier, WorkerPhase::Sync), SyncOutcome::Terminal, None),
        None
    );
    assert_eq!(phase(&effects), WorkerPhase::Sync);
}

/// Runs both at the same time, repeatedly: `first`, and `second` as soon as possible.
fn race(
    rounds: usize,
    mut prepare: impl FnMut(),
    first: impl Fn() + Sync,
    second: impl Fn() + Sync,
    check: impl Fn(),
) {
    for _ in 0..rounds {
        prepare();
        let start = Barrier::new(2);
        let runtime = tokio::runtime::Handle::current();
        std::thread::scope(|scope| {
            for act in [&first as &(dyn Fn() + Sync), &second] {
                let (start, runtime) = (&start, runtime.clone());
                scope.spawn(move || {
                    let _inside = runtime.enter();
                    start.wait();
                    act();
                });
            }
        });
        check();
    }
}

#[tokio::test]
async fn forget_keeps_the_desired_state_and_record_of_a_uid_that_was_sent_again() {
    let dir = tempfile::tempdir().unwrap();
    let effects = effects(Some(Store::open(dir.path()).unwrap()));
    let record = dir.path().join("pods/u.json");
    let old = Mutex::new(0);
    race(
        300,
        || {
            set_desired(&effects, &desired(), UpdateKind::Create, None);
            effects.publisher.publish_first("u");
            *old.lock().unwrap() = incarnation(&effects);
        },
        || forget(&effects, "u", *old.lock().unwrap()),
        || {
            while effects.registry.with("u", |_| ()).is_some() {
                std::hint::spin_loop();
            }
            set_desired(&effects, &desired(), UpdateKind::Create, None);
            effects.publisher.publish_first("u");
        },
        || {
            assert_ne!(incarnation(&effects), *old.lock().unwrap());
            assert!(
                effects.registry.desired_state.sets.runtime.get("u").is_some(),
                "its desired state is gone"
            );
            assert!(effects.publisher.documents.get(&"u".to_owned()).is_some(), "its document is gone");
            assert!(record.exists(), "its record is gone");
        },
    );
}

#[tokio::test]
async fn a_removal_during_restart_after_cleanup_is_not_lost() {
    let effects = effects(None);
    race(
        300,
        || {
            let mut state = PodState::awaiting_cleanup("u", &desired(), &effects.registry.moment());
            state.inbox.claim_worker();
            effects.registry.insert("u", state);
        },
        || {
            let incarnation = effects.registry.with("u", |e| e.incarnation).unwrap_or_default();
            if leftover_cleanup::restart(&effects, "u", incarnation) == AfterCleanup::Forget {
                forget(&effects, "u", incarnation);
            }
        },
        || remove(&effects, "u"),
        || {
            let left = effects.registry.with("u", |e| (e.worker.desired, e.worker.phase));
            assert!(left.is_none() || left == Some((false, WorkerPhase::Terminating)), "{left:?}");
        },
    );
}

#[tokio::test]
async fn a_uid_without_leftovers_does_not_wait_for_cleanup() {
    let effects = effects(None);
    assert!(!await_cleanup(&effects, &desired()), "never heard of");
    set_desired(&effects, &desired(), UpdateKind::Create, None);
    assert!(!await_cleanup(&effects, &desired()), "not at its end");
    forget(&effects, "u", incarnation(&effects));
    assert!(!await_cleanup(&effects, &desired()), "it left nothing");
}

#[tokio::test]
async fn back_offs_and_start_errors_survive_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let store = || Store::open(dir.path()).unwrap();
    let first = effects(Some(store()));
    set_desired(&first, &desired(), UpdateKind::Create, None);
    let key = BackoffKey::of(&desired().pod, &desired().pod.spec.containers[0]);
    let failure = ("CreateContainerError".to_owned(), "no space".to_owned());
    first.registry.with("u", |e| e.start.errors.insert("main".into(), failure.clone()));
    let finished = first.registry.moment().now_unix_nanos - SECOND;
    for _ in 0..3 {
        first.registry.backoff().advance(&key, finished, &first.registry.moment());
    }
    first.registry.save_backoff("u");

    let second = effects(None);
    store().load().into_iter().for_each(|record| second.registry.restore(record));
    assert_eq!(second.registry.backoff().get(&key).map(|e| e.delay_seconds), Some(40));
    assert_eq!(second.registry.with("u", |e| e.start.errors["main"].clone()), Some(failure));

    first.registry.retry("u");
    let third = effects(None);
    store().load().into_iter().for_each(|record| third.registry.restore(record));
    assert_eq!(third.registry.backoff().get(&key), None, "a person ended it");
}

#[tokio::test]
async fn a_start_without_back_off_writes_no_record() {
    let dir = tempfile::tempdir().unwrap();
    let effects = effects(Some(Store::open(dir.path()).unwrap()));
    set_desired(&effects, &desired(), UpdateKind::Create, None);
    let record = dir.path().join("pods/u.json");
    std::fs::remove_file(&record).unwrap();
    effects.registry.save_backoff("u");
    assert!(!record.exists());
    assert_eq!(
        effects.registry.with("u", |e| e.worker.clone()),
        Some(WorkerState { desired: true, started: true, ..Default::default() })
    );
}

#[tokio::test]
async fn a_back_off_is_stored_once_for_each_advance() {
    let dir = tempfile::tempdir().unwrap();
    let effects = effects(Some(Store::open(dir.path()).unwrap()));
    set_desired(&effects, &desired(), UpdateKind::Create, None);
    let record = dir.path().join("pods/u.json");
    let lines = || std::fs::read_to_string(&record).unwrap().lines().count();
    let key = BackoffKey::of(&desired().pod, &desired().pod.spec.containers[0]);
    let before = lines();
    for advance in 1..=2 {
        let mut at = effects.registry.moment();
        at.now_unix_nanos += advance;
        effects.registry.backoff().advance(&key, at.now_unix_nanos, &at);
        effects.registry.save_backoff("u");
        effects.registry.save_backoff("u");
    }
    assert_eq!(lines(), before + 2);
}

/// Reporting a pod's end removes its object. Its own status returns as an update of the pod at the same time, and readers of
/// the documents may miss the one in between.
#[tokio::test]
async fn a_published_end_is_not_taken_back_by_an_update_from_the_source() {
    let effects = effects(None);
    let desired = desired();
    set_desired(&effects, &desired, UpdateKind::Create, None);
    effects.publisher.publish_first("u");
    let shown =
        || effects.publisher.documents.get(&"u".to_owned()).map(|shown| (shown.stopped, shown.finished));
    assert_eq!(shown(), Some((false, false)));
    apply(&effects, "u", &Input::Started);
    apply(&effects, "u", &Input::Removed { pod: Some(&desired.pod) });
    let again = || {
        set_desired(&effects, &desired, UpdateKind::Update, None);
        effects.publisher.publish_first("u");
    };
    effects.publisher.publish("u", &StatusFacts { pod_is_terminal: true, ..StatusFacts::default() });
    assert_eq!((phase(&effects), shown()), (WorkerPhase::Terminating, Some((true, false))));
    again();
    assert_eq!((phase(&effects), shown()), (WorkerPhase::Terminating, Some((true, false))));

    effects.registry.apply_outcome(
        "u",
        (incarnation(&effects), WorkerPhase::Terminating),
        SyncOutcome::Done,
        Some(&desired.pod),
    );
    effects
        .publisher
        .publish("u", &StatusFacts { pod_is_terminal: true, finished: true, ..StatusFacts::default() });
    assert_eq!((phase(&effects), shown()), (WorkerPhase::Terminated, Some((true, true))));
    again();
    assert_eq!((phase(&effects), shown()), (WorkerPhase::Terminated, Some((true, true))));
}
