use std::sync::Barrier;

use bytes::Bytes;
use keelson_config::{Config, ServiceName};
use keelson_pod_sync_core::backoff::BackoffKey;
use keelson_pod_sync_core::moment::SECOND;
use keelson_pod_sync_core::worker::WorkerState;

use super::*;

fn wanted() -> Wanted {
    let json = serde_json::json!({
        "metadata": {"name": "web", "namespace": "default", "uid": "u"},
        "spec": {"terminationGracePeriodSeconds": 5, "containers": [{"name": "main", "image": "i:1"}]},
    });
    Wanted {
        raw: Bytes::from(json.to_string()),
        pod: Arc::new(serde_json::from_value(json).unwrap()),
        source: "file".into(),
        origin: String::new(),
        traceparent: String::new(),
        revision: 1,
        added_unix_nanos: 0,
    }
}

/// An agent whose workers end after their first turn.
fn agent(store: Option<Store>) -> Arc<Agent> {
    let context = Context::detached(ServiceName::PodSync, Config::default());
    context.shutdown.cancel();
    Agent::new(context, store)
}

fn life(agent: &Agent) -> u64 {
    agent.with("u", |e| e.life).unwrap()
}

fn phase(agent: &Agent) -> WorkerPhase {
    agent.with("u", |e| e.state.phase).unwrap()
}

/// A pod that was removed while its containers were being started has not ended because the start is done.
#[tokio::test]
async fn the_outcome_of_a_start_says_nothing_about_the_end_that_was_asked_for_meanwhile() {
    let agent = agent(None);
    let pod = wanted().pod;
    agent.apply("u", &Input::Update { kind: UpdateKind::Create, pod: &pod, observed: None });
    agent.apply("u", &Input::Started);
    agent.apply("u", &Input::Removed { pod: Some(&pod) });
    assert_eq!(phase(&agent), WorkerPhase::Terminating);
    agent.apply_outcome("u", (life(&agent), WorkerPhase::Sync), SyncOutcome::Done, Some(&pod));
    assert_eq!(phase(&agent), WorkerPhase::Terminating);
    agent.apply_outcome("u", (life(&agent), WorkerPhase::Terminating), SyncOutcome::Done, Some(&pod));
    assert_eq!(phase(&agent), WorkerPhase::Terminated);
}

#[tokio::test]
async fn what_an_earlier_life_came_to_does_not_touch_the_present_one() {
    let agent = agent(None);
    agent.named(&wanted(), UpdateKind::Create, None);
    let earlier = life(&agent);
    agent.forget("u", earlier);
    agent.named(&wanted(), UpdateKind::Create, None);
    agent.forget("u", earlier);
    assert_eq!(agent.apply_outcome("u", (earlier, WorkerPhase::Sync), SyncOutcome::Terminal, None), None);
    assert_eq!(phase(&agent), WorkerPhase::Sync);
}

/// Both at the same time, over and over: `first`, and `second` as soon as it may.
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
async fn a_uid_that_is_named_while_its_earlier_life_is_forgotten_keeps_what_is_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let agent = agent(Some(Store::open(dir.path()).unwrap()));
    let record = dir.path().join("pods/u.json");
    let old = Mutex::new(0);
    race(
        300,
        || {
            agent.named(&wanted(), UpdateKind::Create, None);
            crate::worker::publish_first(&agent, "u");
            *lock(&old) = life(&agent);
        },
        || agent.forget("u", *lock(&old)),
        || {
            while agent.with("u", |_| ()).is_some() {
                std::hint::spin_loop();
            }
            agent.named(&wanted(), UpdateKind::Create, None);
            crate::worker::publish_first(&agent, "u");
        },
        || {
            assert_ne!(life(&agent), *lock(&old));
            assert!(agent.desired.runtime.get("u").is_some(), "its desires are gone");
            assert!(agent.documents.get(&"u".to_owned()).is_some(), "its document is gone");
            assert!(record.exists(), "its record is gone");
        },
    );
}

#[tokio::test]
async fn a_removal_at_the_moment_at_which_a_uid_begins_again_is_not_lost() {
    let agent = agent(None);
    race(
        300,
        || {
            let mut entry = Entry::waiting("u", wanted(), &agent.moment());
            entry.worker = true;
            agent.insert("u", entry);
        },
        || {
            let life = agent.with("u", |e| e.life);
            agent.begin_again("u", life.unwrap_or_default());
        },
        || crate::manager::removed(&agent, "u"),
        || {
            let left = agent.with("u", |e| (e.state.desired, e.state.phase));
            assert!(left.is_none() || left == Some((false, WorkerPhase::Terminating)), "{left:?}");
        },
    );
}

#[tokio::test]
async fn a_uid_of_which_nothing_is_left_begins_at_once() {
    let agent = agent(None);
    assert!(!agent.waits_for_removal(&wanted()), "never heard of");
    agent.named(&wanted(), UpdateKind::Create, None);
    assert!(!agent.waits_for_removal(&wanted()), "not at its end");
    agent.forget("u", life(&agent));
    assert!(!agent.waits_for_removal(&wanted()), "it left nothing");
}

#[tokio::test]
async fn back_offs_and_failed_starts_are_what_the_next_process_begins_with() {
    let dir = tempfile::tempdir().unwrap();
    let store = || Store::open(dir.path()).unwrap();
    let first = agent(Some(store()));
    first.named(&wanted(), UpdateKind::Create, None);
    let key = BackoffKey::of(&wanted().pod, &wanted().pod.spec.containers[0]);
    let failure = ("CreateContainerError".to_owned(), "no space".to_owned());
    first.with("u", |e| e.reasons.insert("main".into(), failure.clone()));
    let finished = first.moment().now_unix_nanos - SECOND;
    for _ in 0..3 {
        first.backoff().advance(&key, finished, &first.moment());
    }
    first.keep_backoff("u");

    let second = agent(None);
    store().load().into_iter().for_each(|record| second.restore(record));
    assert_eq!(second.backoff().get(&key).map(|e| e.delay_seconds), Some(40));
    assert_eq!(second.with("u", |e| e.reasons["main"].clone()), Some(failure));

    first.retry("u");
    let third = agent(None);
    store().load().into_iter().for_each(|record| third.restore(record));
    assert_eq!(third.backoff().get(&key), None, "a person ended it");
}

#[tokio::test]
async fn a_start_that_advances_no_back_off_writes_no_record() {
    let dir = tempfile::tempdir().unwrap();
    let agent = agent(Some(Store::open(dir.path()).unwrap()));
    agent.named(&wanted(), UpdateKind::Create, None);
    let record = dir.path().join("pods/u.json");
    std::fs::remove_file(&record).unwrap();
    agent.keep_backoff("u");
    assert!(!record.exists());
    assert_eq!(
        agent.with("u", |e| e.state.clone()),
        Some(WorkerState { desired: true, started: true, ..Default::default() })
    );
}

/// The report of a pod's end makes its object go. Its own status comes back as an update of the pod in the same moment, and who
/// reads the documents may miss the one in between.
#[tokio::test]
async fn a_pod_whose_end_was_published_stays_ended_when_its_source_tells_of_it_once_more() {
    use crate::worker::{Facts, publish, publish_first};
    let agent = agent(None);
    let wanted = wanted();
    agent.named(&wanted, UpdateKind::Create, None);
    publish_first(&agent, "u");
    let shown = || agent.documents.get(&"u".to_owned()).map(|shown| (shown.stopped, shown.finished));
    assert_eq!(shown(), Some((false, false)));
    agent.apply("u", &Input::Started);
    agent.apply("u", &Input::Removed { pod: Some(&wanted.pod) });
    let again = || {
        agent.named(&wanted, UpdateKind::Update, None);
        publish_first(&agent, "u");
    };
    publish(&agent, "u", &Facts { pod_is_terminal: true, ..Facts::default() });
    assert_eq!((phase(&agent), shown()), (WorkerPhase::Terminating, Some((true, false))));
    again();
    assert_eq!((phase(&agent), shown()), (WorkerPhase::Terminating, Some((true, false))));

    agent.apply_outcome("u", (life(&agent), WorkerPhase::Terminating), SyncOutcome::Done, Some(&wanted.pod));
    publish(&agent, "u", &Facts { pod_is_terminal: true, finished: true, ..Facts::default() });
    assert_eq!((phase(&agent), shown()), (WorkerPhase::Terminated, Some((true, true))));
    again();
    assert_eq!((phase(&agent), shown()), (WorkerPhase::Terminated, Some((true, true))));
}
