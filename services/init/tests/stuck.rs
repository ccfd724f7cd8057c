//! The supervisor in the test process, with short limits.
#![allow(clippy::unwrap_used, reason = "tests and their helpers")]
#![allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Scene, is_alive, signal};
use keelson_config::{Config, ServiceName};
use keelson_init::launch::Launcher;
use keelson_init::supervisor::{Services, Supervisor, Timing};
use keelson_proto::keelson::supervisor::v1 as pb;
use keelson_service_kit::{CancellationToken, Context, WatchItem};
use rustix::process::Signal;

/// Waits until the service satisfies `good`.
async fn wait(services: &Services, name: ServiceName, good: impl Fn(&pb::Service) -> bool) -> pb::Service {
    let mut subscription = services.subscribe();
    let found = async {
        loop {
            if let WatchItem::Set(key, service) = subscription.next().await
                && key == name
                && good(&service)
            {
                return service;
            }
        }
    };
    tokio::time::timeout(common::PATIENCE, found)
        .await
        .unwrap_or_else(|_| panic!("{:#?}", services.snapshot()))
}

#[tokio::test]
async fn a_stopped_process_is_stuck_then_killed_and_restarted() {
    let scene = Scene::new();
    // An unhealthy service is polled often, so that this test need not wait for the next regular poll.
    scene.behave(ServiceName::PodSync, "degraded the runtime is down");
    let status = scene.command().arg("--resolve-only").status().unwrap();
    assert!(status.success());
    let config = Config::load(&scene.path("run/config.json")).unwrap();
    let mut context = Context::detached(ServiceName::Init, config.clone());
    context.config = Arc::new(config.clone());
    let (launcher, _lifeline) = Launcher::new(&config, false, 0).unwrap();
    let timing = Timing { stuck_limit: Duration::from_secs(1), stop_limit: Duration::from_millis(200) };
    let (supervisor, services, _commands) =
        Supervisor::new(&context, launcher, timing, CancellationToken::new()).unwrap();
    let running = tokio::spawn(supervisor.run());

    let degraded = wait(&services, ServiceName::PodSync, |s| s.state == "degraded").await;
    assert_eq!(degraded.message, "the runtime is down");
    signal(degraded.pid, Signal::STOP);
    let stuck = wait(&services, ServiceName::PodSync, |s| s.state == "stuck").await;
    assert!(stuck.message.contains("pod-sync"), "{}", stuck.message);
    let again = wait(&services, ServiceName::PodSync, |s| s.restarts == 1 && s.state == "degraded").await;
    assert_ne!(again.pid, degraded.pid);
    assert!(!is_alive(degraded.pid));

    context.shutdown.cancel();
    tokio::time::timeout(common::PATIENCE, running).await.unwrap().unwrap();
    assert!(services.snapshot().iter().all(|(_, service)| service.state == "stopped" && service.pid == 0));
    assert!(scene.processes().is_empty());
}
