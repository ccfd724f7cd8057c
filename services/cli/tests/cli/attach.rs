//! `keelson attach` to containers whose main process prints its input.

use std::io::Write as _;

use serde_json::json;

use crate::fake::Fake;
use crate::running::Running;
use crate::{keelson, world};

/// The pod `web` with a container that has standard input.
fn fake() -> Fake {
    let mut world = world();
    let pod = world.pods.iter_mut().find(|pod| pod.name == "web-edge").unwrap();
    let mut json: serde_json::Value = serde_json::from_slice(&pod.pod_json).unwrap();
    json["spec"]["containers"][0]["stdin"] = json!(true);
    pod.pod_json = serde_json::to_vec(&json).unwrap().into();
    Fake::start(world)
}

#[test]
fn attach_passes_input_to_the_main_process_until_it_ends() {
    let fake = fake();
    let mut running = Running::start(&fake.run_dir, &["attach", "-i", "web", "-c", "app"]);
    let mut stdin = running.stdin.take().unwrap();
    stdin.write_all(b"one\n").unwrap();
    assert_eq!(running.line(), "one");
    drop(stdin);
    assert_eq!(running.end(), (Some(0), vec!["[end]".to_owned()], Vec::new()));
    assert_eq!(fake.world.calls.all()[0], "exec /u1/app tty=false stdin=true ");
}

#[test]
fn attach_with_input_needs_a_container_with_stdin() {
    let fake = fake();
    let refused = keelson(&fake.run_dir, &["attach", "-i", "web", "-c", "proxy"]);
    let (error, hint) = refused.failed(1);
    assert!(error.contains("the container proxy was started without standard input"), "{refused:?}");
    assert!(hint.contains("`stdin: true`"), "{refused:?}");
    assert!(fake.world.calls.all().is_empty());
    keelson(&fake.run_dir, &["attach"]).failed(64);
}
