//! `keelson drain` and `keelson uncordon`.

use std::sync::Mutex;

use keelson_proto::keelson::common::v1::PodRef;
use keelson_proto::keelson::resource_manager::v1 as pb;
use keelson_service_kit::status::error;
use tonic::{Code, Status};

use crate::fake::{Fake, World};
use crate::keelson;

fn running(name: &str, ending: bool) -> pb::RunningPod {
    let pod = PodRef { uid: name.into(), namespace: "default".into(), name: name.into() };
    pb::RunningPod { pod: Some(pod), priority: 0, ending, grace_period_seconds: 30 }
}

fn state(pods: Vec<pb::RunningPod>) -> pb::GetDrainResponse {
    pb::GetDrainResponse {
        node_name: "edge".into(),
        drained: true,
        since_unix_nanos: 1,
        stop_pods: true,
        pods,
    }
}

/// A node that drains, and shows these states one after the other; the last one stays.
fn drained(was_drained: bool, states: Vec<Result<pb::GetDrainResponse, Status>>) -> Fake {
    let fake = Fake::start(World::default());
    let service = &fake.services.resource_manager;
    service.drain.answer_with(move |request| {
        let node_name = "edge".into();
        Ok(pb::DrainResponse { node_name, was_drained, stop_pods: request.stop_pods || was_drained })
    });
    let states = Mutex::new(states);
    service.get_drain.answer_with(move |_| {
        let mut states = states.lock().unwrap();
        if states.len() > 1 { states.remove(0) } else { states[0].clone() }
    });
    fake
}

#[test]
fn drain_cordons_and_stops_pods_only_when_asked() {
    let fake = drained(false, vec![Ok(state(Vec::new()))]);
    assert_eq!(keelson(&fake.run_dir, &["drain"]).ok(), "node/edge cordoned\n");
    let asked = fake.services.resource_manager.drain.requests().all();
    assert_eq!(asked.iter().map(|request| request.stop_pods).collect::<Vec<_>>(), [false]);
    assert_eq!(
        keelson(&fake.run_dir, &["drain", "--stop-pods"]).ok(),
        "node/edge cordoned\nnode/edge drained\n"
    );
    let fake = drained(true, vec![Ok(state(Vec::new()))]);
    let again = keelson(&fake.run_dir, &["drain"]);
    assert!(again.err.contains("its pods are ended, as an earlier"), "{again:?}");
    assert_eq!(again.ok(), "node/edge already cordoned\n");
}

#[test]
fn drain_shows_the_end_of_each_pod_and_waits_through_a_restart() {
    let unavailable = || Err(error(Code::Unavailable, "PODS_NOT_KNOWN", "not yet".to_owned()));
    let fake = drained(
        false,
        vec![
            Ok(state(vec![running("low", true), running("high", false)])),
            unavailable(),
            Ok(state(vec![running("high", true)])),
            Ok(state(Vec::new())),
        ],
    );
    let text = keelson(&fake.run_dir, &["drain", "--stop-pods", "--timeout", "1m"]).ok();
    let expected = "node/edge cordoned\nstopping pod default/low: grace period 30 s\npod default/low stopped\n\
                    stopping pod default/high: grace period 30 s\npod default/high stopped\nnode/edge drained\n";
    assert_eq!(text, expected);
}

#[test]
fn drain_that_takes_too_long_exits_with_75_and_continues() {
    let fake = drained(false, vec![Ok(state(vec![running("slow", true)]))]);
    let result = keelson(&fake.run_dir, &["drain", "--stop-pods", "--timeout", "300ms"]);
    let (error, hint) = result.failed(75);
    assert!(error.contains("1 left: default/slow"), "{result:?}");
    assert!(hint.contains("the node stays drained and continues"), "{result:?}");
}

#[test]
fn drain_that_is_undone_while_it_waits_fails() {
    let undone =
        pb::GetDrainResponse { stop_pods: false, drained: false, ..state(vec![running("a", false)]) };
    let fake = drained(false, vec![Ok(state(vec![running("a", true)])), Ok(undone)]);
    let result = keelson(&fake.run_dir, &["drain", "--stop-pods"]);
    assert!(result.failed(1).0.contains("the drain was undone"), "{result:?}");
}

#[test]
fn drain_of_a_node_with_an_api_server_names_kubectl() {
    let fake = Fake::start(World::default());
    let text = "the node belongs to a cluster: use kubectl drain edge";
    let refused = error(Code::FailedPrecondition, "HAS_API_SERVER", text.to_owned());
    fake.services.resource_manager.drain.fail(refused);
    let result = keelson(&fake.run_dir, &["drain", "--stop-pods"]);
    assert!(result.failed(1).0.contains("kubectl drain edge"), "{result:?}");
}

#[test]
fn uncordon_undoes_a_drain_and_says_when_there_was_none() {
    let fake = Fake::start(World::default());
    for (was_drained, expected) in
        [(true, "node/edge uncordoned\n"), (false, "node/edge already uncordoned\n")]
    {
        let answer = pb::UncordonResponse { node_name: "edge".into(), was_drained };
        fake.services.resource_manager.uncordon.answer(answer);
        assert_eq!(keelson(&fake.run_dir, &["uncordon"]).ok(), expected);
        assert_eq!(keelson(&fake.run_dir, &["drain", "--undo"]).ok(), expected);
    }
    let result = keelson(&fake.run_dir, &["uncordon", "-o", "json"]);
    assert!(result.failed(64).0.contains("uncordon"), "{result:?}");
}
