use k8s_cri::v1 as cri;
use tonic::Code;

use super::*;
use crate::tests::fake_runtime::{FakeRuntime, Fault, refusal, until};

const RUNNING: cri::ContainerState = cri::ContainerState::ContainerRunning;
const EXITED: cri::ContainerState = cri::ContainerState::ContainerExited;

fn pod_with(uid: &str, container: Option<&str>, began: i64) -> pb::RuntimePod {
    let containers = container.map(|id| pb::Container { id: id.into(), ..Default::default() });
    pb::RuntimePod {
        uid: uid.into(),
        containers: containers.into_iter().collect(),
        observed_boot_nanos: began,
        ..Default::default()
    }
}

fn state(observer: &Observer, uid: &str) -> Option<pb::ContainerState> {
    observer.cached(uid)?.containers.first().map(pb::Container::state)
}

#[tokio::test]
async fn unreadable_pod_keeps_its_last_state_and_others_are_published() {
    let fake = FakeRuntime::start().await;
    fake.container("c-a", "a", RUNNING);
    fake.container("c-b", "b", RUNNING);
    fake.observer.relist().await.unwrap();
    fake.container("c-a", "a", EXITED);
    fake.container("c-b", "b", EXITED);
    fake.container("c-c", "c", RUNNING);
    fake.set_fault("c-a", Fault::StatusFails);
    assert_eq!(fake.observer.relist().await.unwrap(), 3);
    assert_eq!(state(&fake.observer, "a"), Some(pb::ContainerState::Running));
    assert_eq!(state(&fake.observer, "b"), Some(pb::ContainerState::Exited));
    assert_eq!(state(&fake.observer, "c"), Some(pb::ContainerState::Running));
}

#[tokio::test]
async fn pod_with_incomplete_responses_keeps_its_last_state() {
    let fake = FakeRuntime::start().await;
    fake.container("c-a", "a", RUNNING);
    fake.observer.relist().await.unwrap();
    fake.container("hollow", "a", RUNNING);
    let error = fake.observer.read("a").await.unwrap_err();
    assert!(error.message().contains("container hollow lacks metadata.name, created_at"), "{error:?}");
    assert_eq!(fake.observer.cached("a").unwrap().containers.len(), 1);
}

#[tokio::test]
async fn pod_never_read_is_known_and_a_failed_list_is_an_error() {
    let fake = FakeRuntime::start().await;
    fake.sandbox("s-a", "a", true);
    fake.runtime.pod_sandbox_status.answer_once(Err(refusal(Code::Unknown)));
    fake.observer.relist().await.unwrap();
    assert!(fake.observer.knows("a") && fake.observer.cached("a").is_none());
    fake.runtime.list_containers.answer_once(Err(refusal(Code::Unavailable)));
    assert!(fake.observer.relist().await.is_err());
    fake.observer.relist().await.unwrap();
    assert!(fake.observer.cached("a").is_some());
}

#[tokio::test]
async fn older_read_does_not_restore_a_removed_pod() {
    let observer = FakeRuntime::start().await.observer;
    let now = Clock::System.read().boot_nanos;
    observer.publish(pod_with("a", Some("c"), now));
    observer.publish(pod_with("a", None, now + 20));
    let published = observer.publish(pod_with("a", Some("c"), now + 10));
    assert!(observer.cached("a").is_none());
    assert!(published.containers.is_empty());
    observer.publish(pod_with("a", Some("c"), now + 30));
    assert!(observer.cached("a").is_some());
}

#[tokio::test]
async fn exit_is_observed_after_the_clock_was_set_back() {
    let fake = FakeRuntime::start().await;
    let clock = Clock::stopped();
    let observer = Observer::with_clock(fake.cri.clone(), fake.files.clone(), clock.clone());
    fake.container("c-a", "a", RUNNING);
    fake.container("c-b", "b", RUNNING);
    observer.relist().await.unwrap();
    clock.advance(1, -7_200);
    fake.container("c-a", "a", EXITED);
    observer.read("a").await.unwrap();
    assert_eq!(state(&observer, "a"), Some(pb::ContainerState::Exited));
    fake.container("c-b", "b", EXITED);
    observer.relist().await.unwrap();
    assert_eq!(state(&observer, "b"), Some(pb::ContainerState::Exited));
    let pod = observer.cached("b").unwrap();
    assert_eq!(pod.observed_boot_nanos, clock.read().boot_nanos);
    assert_eq!(pod.observed_unix_nanos, clock.read().unix_nanos);
}

#[tokio::test]
async fn owner_recorded_after_a_read_began_is_kept() {
    let observer = FakeRuntime::start().await.observer;
    let began = Clock::System.read().boot_nanos;
    observer.record_owner("new", "a");
    observer.publish(pod_with("a", None, began - 1));
    observer.publish(pod_with("a", Some("old"), began - 1));
    assert_eq!(observer.owner_of("new").as_deref(), Some("a"));
    observer.publish(pod_with("a", None, Clock::System.read().boot_nanos + 1));
    assert_eq!(observer.owner_of("new"), None);
}

#[tokio::test]
async fn observed_exit_is_confirmed_by_one_more_read() {
    let fake = FakeRuntime::start().await;
    fake.container("c1", "a", RUNNING);
    fake.observer.relist().await.unwrap();
    let lists = fake.runtime.list_containers.requests().len();
    fake.container("c1", "a", EXITED);
    fake.observer.exited("c1".into());
    until("the pod has settled", || fake.observer.index().settling.is_empty()).await;
    assert_eq!(fake.runtime.list_containers.requests().len(), lists + 2);
}

#[tokio::test]
async fn exit_event_before_the_start_is_shown_is_not_lost() {
    let fake = FakeRuntime::start().await;
    fake.container("c1", "a", cri::ContainerState::ContainerCreated);
    fake.observer.relist().await.unwrap();
    let lists = fake.runtime.list_containers.requests().len();
    fake.observer.exited("c1".into());
    fake.runtime.list_containers.requests().until_len(lists + 3).await;
    fake.container("c1", "a", RUNNING);
    fake.runtime.list_containers.requests().until_len(lists + 5).await;
    assert_eq!(state(&fake.observer, "a"), Some(pb::ContainerState::Running));
    fake.container("c1", "a", EXITED);
    until("the pod has settled", || fake.observer.index().settling.is_empty()).await;
    assert_eq!(state(&fake.observer, "a"), Some(pb::ContainerState::Exited));
}

#[tokio::test]
async fn exit_is_read_again_after_errors_by_one_task_per_pod() {
    let fake = FakeRuntime::start().await;
    fake.container("c1", "a", RUNNING);
    fake.container("c2", "a", RUNNING);
    fake.observer.relist().await.unwrap();
    let lists = fake.runtime.list_containers.requests().len();
    for _ in 0..2 {
        fake.runtime.list_containers.answer_once(Err(refusal(Code::Unavailable)));
    }
    fake.observer.exited("c1".into());
    fake.observer.exited("c2".into());
    assert_eq!(fake.observer.index().settling.len(), 1);
    fake.runtime.list_containers.requests().until_len(lists + 4).await;
    fake.container("c1", "a", EXITED);
    fake.container("c2", "a", EXITED);
    until("the pod has settled", || fake.observer.index().settling.is_empty()).await;
    let pod = fake.observer.cached("a").unwrap();
    assert!(pod.containers.iter().all(|c| c.state() == pb::ContainerState::Exited));
}
