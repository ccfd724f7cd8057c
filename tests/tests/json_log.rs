//! JSON logs: each line is an object, also when pods and services fail.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use keelson_config::ServiceName;
use keelson_testkit::process::Signal;
use keelson_testkit::{Agent, BUSYBOX_IMAGE, Scratch, eventually, json_lines};
use keelson_tests::{LIMIT, restarts, sleeper, until_cause, until_event, until_no_cause};
use serde_json::{Value, json};

#[tokio::test]
async fn every_json_log_line_has_time_level_message_and_target() {
    let scratch = Scratch::new().unwrap();
    let builder = Agent::builder(scratch.path()).configure(|spec| {
        spec.keelson.insert("logging".to_owned(), json!({"format": "json", "level": "info"}));
    });
    let mut agent = builder.start().await.unwrap();
    let missing = sleeper("missing").replace(BUSYBOX_IMAGE, "127.0.0.1:1/nowhere/image:1");
    agent.write_manifest("missing.yaml", &missing).unwrap();
    agent.write_manifest("a \"quoted\"\n.yaml", "kind: Pod\n\"\n: [").unwrap();
    agent.write_manifest("web.yaml", &sleeper("web")).unwrap();
    until_cause(&agent, "missing", "image", "you", "nowhere/image").await.unwrap();
    until_event(&agent, "InvalidManifest", "quoted").await.unwrap();
    until_no_cause(&agent, "web").await.unwrap();
    for service in [ServiceName::PodSync, ServiceName::RuntimeShim] {
        assert!(agent.service(service).unwrap().signal(Signal::KILL));
        let again = eventually(LIMIT, format!("{service} is started again"), async || {
            restarts(&agent).await.is_ok_and(|restarts| restarts.contains_key(service.as_str()))
        });
        again.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    }
    agent.stop().await.unwrap();

    let lines = json_lines(&agent.log()).unwrap();
    let says = |line: &Value, part: &str| line["msg"].as_str().is_some_and(|m| m.contains(part));
    for service in ServiceName::ALL {
        let own = format!("keelson_{}", service.as_str().replace('-', "_"));
        let ready_logged =
            lines.iter().any(|line| line["event"] == "service_ready" && line["service"] == service.as_str());
        let by_target = lines.iter().any(|line| line["logger"].as_str().is_some_and(|t| t.starts_with(&own)));
        assert!(ready_logged && by_target, "{service}: {ready_logged} {by_target}\n{}", agent.log_tail());
    }
    let refused =
        |line: &Value| line["level"] == "WARN" && line["event"] == "manifest_error" && says(line, "quoted");
    assert!(lines.iter().any(refused), "{}", agent.log_tail());
    agent.end().unwrap();
}
