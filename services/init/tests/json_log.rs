//! `--log-format json`: init and its services write one JSON object per line, and nothing else.
#![allow(clippy::unwrap_used, reason = "tests and their helpers")]

mod common;

use std::fs::{self, File};

use common::{Scene, find};
use keelson_config::ServiceName;
use keelson_testkit::json_lines;
use rustix::process::Signal;
use serde_json::Value;

#[tokio::test]
async fn init_and_services_log_one_json_object_per_line() {
    let scene = Scene::new();
    // Notes on the configuration are logged before any service runs; and one service fails to start.
    let kubelet = fs::read_to_string(scene.path("kubelet.yaml")).unwrap();
    fs::write(scene.path("kubelet.yaml"), format!("{kubelet}'no \"such\" field': 1\n")).unwrap();
    let reason = "no \"good\" reason: \u{1b}[31mé\\";
    scene.behave(ServiceName::NodeApi, &format!("fail {reason}"));
    let log = scene.path("log");
    let mut command = scene.command();
    command.args(["--log-format", "json"]).stderr(File::create(&log).unwrap());
    let mut init = scene.start_as(command);
    scene
        .wait("all but one run", |services| {
            let running = services.iter().filter(|service| service.state == "running").count();
            let failed = || find(services, ServiceName::NodeApi).message.contains("no \"good\" reason");
            services.len() == ServiceName::ALL.len() && running == services.len() - 1 && failed()
        })
        .await;
    init.signal(Signal::TERM);
    assert_eq!(init.ended().await, Some(0));

    let text = fs::read_to_string(&log).unwrap();
    let lines = json_lines(&text).unwrap();
    let says = |level: &str, part: &str| {
        lines.iter().any(|l| l["level"] == level && l["msg"].as_str().is_some_and(|m| m.contains(part)))
    };
    for service in ServiceName::ALL.into_iter().filter(|service| *service != ServiceName::NodeApi) {
        let is_ready = |l: &Value| {
            l["level"] == "INFO" && l["event"] == "service_ready" && l["service"] == service.as_str()
        };
        assert!(lines.iter().any(is_ready), "{service}\n{text}");
    }
    assert!(says("WARN", "no field no \"such\" field"), "{text}");
    assert!(says("ERROR", &format!("cannot start: {reason}")), "{text}");
}
