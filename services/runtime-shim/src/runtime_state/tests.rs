use k8s_cri::v1 as cri;
use keelson_config::{Config, ServiceName};
use keelson_service_kit::{Subscription, WatchItem};
use keelson_testkit::fakes::cut_off;

use super::*;
use crate::tests::fake_runtime::{FakeRuntime, refusal};

#[test]
fn runtime_connection_error_names_endpoint_and_remedy() {
    for (status, part) in [
        (Status::unimplemented(""), "unix:///r.sock is a server that does not speak CRI v1"),
        (Status::unavailable("no such file"), "unix:///r.sock does not answer: no such file"),
        (Status::new(Code::Internal, ""), "unix:///r.sock answers with the error Internal"),
    ] {
        let text = connection_error_message("unix:///r.sock", &status);
        assert!(text.contains(part) && text.contains("containerRuntimeEndpoint"), "{text}");
    }
}

fn connect_to(fake: &FakeRuntime) -> Connection {
    Connection::new(fake.cri.clone(), fake.observer.clone())
}

fn context() -> Context {
    Context::detached(ServiceName::RuntimeShim, Config::default())
}

async fn next_state(states: &mut Subscription<WatchKey, WatchValue>) -> pb::RuntimeState {
    loop {
        if let WatchItem::Set(_, WatchValue::State(state)) = states.next().await {
            return *state;
        }
    }
}

#[tokio::test]
async fn late_refusal_of_events_switches_to_the_next_event_source() {
    let fake = FakeRuntime::start().await;
    let held = fake.runtime.get_container_events.hold();
    let mut states = fake.observer.hub().subscribe();
    let (context, cri, observer) = (context(), fake.cri.clone(), fake.observer.clone());
    let shutdown = context.shutdown.clone();
    let runs = tokio::spawn(run(context, cri, observer));
    let first = next_state(&mut states).await;
    assert_eq!((first.ready, first.observed_by.as_str()), (true, "cri-events"));
    held.open();
    let second = next_state(&mut states).await;
    assert_eq!((second.unreachable, second.observed_by.as_str()), (false, "relist"));
    shutdown.cancel();
    runs.await.unwrap();
}

#[tokio::test]
async fn runtime_handlers_and_features_are_published_if_reported() {
    let fake = FakeRuntime::start().await;
    let state = async || {
        connect(&connect_to(&fake)).await.map(|source| source.kind).unwrap();
        match fake.observer.hub().get(&WatchKey::State) {
            Some(WatchValue::State(state)) => *state,
            other => panic!("{other:?}"),
        }
    };
    let silent = state().await;
    assert_eq!((silent.handlers, silent.supplemental_groups_policy), (Vec::new(), None));
    fake.set_features(&[("runc", true), ("", false)], true);
    let reported = state().await;
    let handlers: Vec<_> = reported
        .handlers
        .iter()
        .map(|h| (h.name.as_str(), h.recursive_read_only_mounts, h.user_namespaces))
        .collect();
    assert_eq!(handlers, [("", false, true), ("runc", true, true)]);
    assert_eq!(reported.supplemental_groups_policy, Some(true));
}

#[tokio::test]
async fn cgroup_driver_is_queried_per_connection_and_kept_while_the_runtime_is_down() {
    let fake = FakeRuntime::start().await;
    let connection = connect_to(&fake);
    let state = || match fake.observer.hub().get(&WatchKey::State) {
        Some(WatchValue::State(state)) => *state,
        other => panic!("{other:?}"),
    };
    for (driver, reported) in [(None, ""), (Some(0), "systemd"), (Some(1), "cgroupfs")] {
        if driver.is_some() {
            fake.set_cgroup_driver(driver);
        }
        connect(&connection).await.map(|source| source.kind).unwrap();
        assert_eq!((state().name.as_str(), state().cgroup_driver.as_str()), ("fake", reported));
    }
    set_state(&fake.observer, |state| state.unreachable = true);
    fake.runtime.runtime_config.answer_once(Err(refusal(Code::Unavailable)));
    assert!(connect(&connection).await.is_err(), "without the cgroup driver there is no connection");
    assert_eq!((state().unreachable, state().cgroup_driver.as_str()), (true, "cgroupfs"));
    assert_eq!(fake.runtime.runtime_config.requests().len(), 4);
}

#[tokio::test]
async fn refused_and_broken_event_streams_are_counted() {
    let fake = FakeRuntime::start().await;
    let (context, connection) = (context(), connect_to(&fake));
    connection.events.register(&context.metrics);
    let count = |name: &str| -> u32 {
        let name = format!("kubelet_evented_pleg_connection_{name} ");
        let text = context.metrics.text();
        let line = text.lines().find_map(|line| line.strip_prefix(&name));
        line.unwrap_or_else(|| panic!("{text}")).parse().unwrap()
    };
    // Neither CRI's nor containerd's.
    let source = EventSource::open(&connection.cri, &connection.events, EventSourceKind::Cri).await;
    assert_eq!((source.kind, count("success_count"), count("error_count")), (EventSourceKind::Relist, 0, 2));
    fake.runtime.get_container_events.fail(cut_off());
    let source = EventSource::open(&connection.cri, &connection.events, EventSourceKind::Cri).await;
    assert_eq!((source.kind, count("success_count"), count("error_count")), (EventSourceKind::Cri, 1, 2));
    follow(&context, &connection, &context.progress.register("runtime"), source).await;
    assert_eq!((count("success_count"), count("error_count")), (1, 3));
    assert_eq!(count("latency_seconds_count"), 0);
    connection.events.observe_latency(now_unix_nanos() - 2_000_000_000);
    connection.events.observe_latency(0);
    assert_eq!(count("latency_seconds_count"), 1);
    let sum = context.metrics.text();
    let sum =
        sum.lines().find_map(|l| l.strip_prefix("kubelet_evented_pleg_connection_latency_seconds_sum "));
    assert!(sum.unwrap().parse::<f64>().unwrap() >= 2.0, "{sum:?}");
}

#[tokio::test]
async fn unreadable_pod_does_not_make_the_runtime_unreachable() {
    let fake = FakeRuntime::start().await;
    fake.container("c", "u", cri::ContainerState::ContainerRunning);
    fake.runtime.container_status.fail(refusal(Code::Unknown));
    connect(&connect_to(&fake)).await.map(|source| source.kind).unwrap();
    let state = fake.observer.hub().get(&WatchKey::State);
    assert!(matches!(state, Some(WatchValue::State(state)) if state.ready && !state.unreachable));
}

#[tokio::test]
async fn runtime_and_network_not_ready_are_two_errors_in_brackets() {
    let fake = FakeRuntime::start().await;
    fake.set_not_ready();
    let status = fake.cri.status().await.unwrap();
    let expected = "[container runtime not ready: RuntimeReady=false reason:R message:M, \
                    container runtime network not ready: NetworkReady=false reason:R message:M]";
    assert_eq!(status.readiness.message, expected);
}
