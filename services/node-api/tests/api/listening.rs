//! The ports of node-api.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::net::SocketAddr;
use std::time::Duration;

use crate::fake::{World, get, request, soon};
use crate::secured_node::Secured;
use keelson_config::ApiHandlers;
use keelson_node_api::{build, health_router, listen};
use tokio::net::TcpListener;

#[tokio::test]
async fn a_busy_port_is_a_condition_until_it_is_free() {
    let world = World::without_peers();
    let holder = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = holder.local_addr().unwrap();
    let ctx = world.ctx.clone();
    tokio::spawn(listen::run(ctx.clone(), "health port", address, health_router(&world.slis), None));
    let name = format!("port {}", address.port());
    let condition = |ok: bool| {
        let (ctx, name) = (ctx.clone(), name.clone());
        async move {
            loop {
                let report = ctx.progress.report("");
                if let Some(found) = report.conditions.iter().find(|c| c.name == name && c.ok == ok) {
                    return found.message.clone();
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    };
    let message = soon(condition(false)).await;
    assert!(
        message.contains(&format!("port {} is taken, perhaps by a kubelet", address.port())),
        "{message}"
    );
    drop(holder);
    soon(condition(true)).await;
    assert_eq!(get(address, "/healthz").await.text().await.unwrap(), "ok");
    ctx.shutdown.cancel();
}

#[tokio::test]
async fn non_loopback_address_without_tls_fails_at_startup() {
    let mut world = World::without_peers();
    let mut config = (*world.ctx.config).clone();
    config.api.address = "0.0.0.0".into();
    world.ctx.config = config.into();
    let error = build(world.ctx.clone()).await.map(drop).unwrap_err();
    assert!(error.to_string().contains("authentication.x509.clientCAFile"), "{error}");
}

#[tokio::test]
async fn read_only_port_serves_metrics_and_pods_but_no_debugging_paths() {
    let world = World::start().await;
    world.pod("default", "web", r#"{"metadata":{"name":"web"}}"#);
    let port = world.read_only().await;
    assert!(get(port, "/pods").await.text().await.unwrap().contains("\"web\""));
    for path in ["/healthz/ping", "/metrics", "/metrics/resource"] {
        assert_eq!(get(port, path).await.status, 200, "{path}");
    }
    // The fake resource-manager has no statistics.
    assert_eq!(get(port, "/stats/summary").await.status, 500);
    for path in
        ["/containerLogs/default/web/c", "/exec/default/web/c", "/run/", "/runningpods/", "/logs/syslog"]
    {
        assert_eq!(request_text(port, "GET", path).await, (405, DISABLED.to_owned()), "{path}");
    }
    for path in ["/configz", "/flagz", "/statusz", "/"] {
        assert_eq!(get(port, path).await.status, 404, "{path}");
    }
    let counted = "path=\"pods\",server_type=\"readonly\",long_running=\"false\"} 1";
    assert!(world.ctx.metrics.text().contains(counted));
}

const DISABLED: &str = "Debug endpoints are disabled.\n";

/// Sends a request: the status and text of the response.
async fn request_text(port: SocketAddr, method: &str, path: &str) -> (u16, String) {
    let reply = request(port, method, path).await;
    let status = reply.status.as_u16();
    (status, reply.text().await.unwrap())
}

/// A node with other switches for debugging paths.
async fn with_handlers(change: impl FnOnce(&mut ApiHandlers)) -> World {
    let mut world = World::start().await;
    let mut config = (*world.ctx.config).clone();
    change(&mut config.api.handlers);
    world.ctx.config = config.into();
    world.running_pod("web");
    world
}

#[tokio::test]
async fn disabled_debugging_handlers_answer_405() {
    // The other switches have no effect then.
    let world = with_handlers(|handlers| {
        (handlers.debugging, handlers.system_log, handlers.debug_flags) = (false, false, false);
    })
    .await;
    let port = world.api().await;
    for path in [
        "/run/default/web/c?cmd=id",
        "/exec/default/web/c?command=id&output=1",
        "/exec/default/web/uid-of-web/c",
        "/attach/default/web/c",
        "/portForward/default/web",
        "/containerLogs/default/web/c",
        "/containerLogs/",
        "/runningpods",
        "/runningpods/",
        "/debug/pprof/",
        "/debug/pprof/heap",
        "/logs/",
        "/logs/syslog",
    ] {
        for method in ["GET", "POST", "PUT"] {
            assert_eq!(request_text(port, method, path).await, (405, DISABLED.to_owned()), "{method} {path}");
        }
    }
    let headers = get(port, "/exec/default/web/c").await.headers;
    assert_eq!(headers["content-type"], "text/plain; charset=utf-8");
    assert_eq!(headers["x-content-type-options"], "nosniff");
    assert!(world.runtime.read_logs.requests().is_empty(), "no log was read");
    for (path, status) in [
        ("/healthz", 200),
        ("/pods", 200),
        ("/metrics", 200),
        ("/statusz", 200),
        ("/debug/flags/v", 404),
        ("/debug", 404),
        ("/execute", 404),
    ] {
        assert_eq!(request_text(port, "GET", path).await.0, status, "{path}");
    }
    assert_ne!(request_text(port, "GET", "/configz").await.0, 405);
    let counted = "method=\"PUT\",path=\"exec\",server_type=\"readwrite\",long_running=\"true\"} 2";
    assert!(world.ctx.metrics.text().contains(counted), "{}", world.ctx.metrics.text());
}

#[tokio::test]
async fn individual_debugging_handlers_can_be_disabled() {
    let logs = (&["/logs", "/logs/", "/logs/syslog"][..], "logs endpoint is disabled.\n");
    let profiles = (&["/debug/pprof/", "/debug/pprof/heap"][..], "profiling endpoint is disabled.\n");
    let flags = (&["/debug/flags/v"][..], "flags endpoint is disabled.\n");
    let switches: [fn(&mut ApiHandlers); 3] = [
        |handlers| handlers.system_log = false,
        |handlers| handlers.profiling = false,
        |handlers| handlers.debug_flags = false,
    ];
    for (switch, disabled) in switches.into_iter().zip([logs, profiles, flags]) {
        let world = with_handlers(switch).await;
        let port = world.api().await;
        for (paths, text) in [logs, profiles, flags] {
            // Enabled, they need an authenticated user; profiles are unknown paths.
            let enabled =
                if text == profiles.1 { (404, "404 page not found\n") } else { (401, "Unauthorized") };
            let expected = if text == disabled.1 { (405, text) } else { enabled };
            for path in paths {
                let (status, text) = request_text(port, "GET", path).await;
                assert_eq!((status, text.as_str()), expected, "{path}, disabled: {}", disabled.1);
                let is_disabled = request_text(port, "PUT", path).await == (405, disabled.1.to_owned());
                assert_eq!(is_disabled, expected.0 == 405, "PUT {path}, disabled: {}", disabled.1);
            }
        }
        for path in ["/containerLogs/default/web/c", "/runningpods/"] {
            assert_eq!(request_text(port, "GET", path).await.0, 200, "{path}, disabled: {}", disabled.1);
        }
        assert_eq!(
            request_text(port, "GET", "/exec/default/web/c").await.0,
            401,
            "without TLS it is always 401"
        );
    }
}

#[tokio::test]
async fn disabled_paths_still_require_authentication() {
    let node = Secured::start_with(|api| api.handlers.debugging = false).await;
    node.world.running_pod("web");
    for path in ["/exec/default/web/c?output=1", "/logs/", "/debug/pprof/heap"] {
        assert_eq!(node.get(None, path).await, 401, "{path}");
        let (status, _, text) = node.request_as_jane("GET", path, &[]).await;
        assert_eq!((status, text.as_str()), (405, DISABLED), "{path}");
    }
    assert_eq!(node.request_as_jane("GET", "/healthz/ping", &[]).await.0, 200);
    assert!(node.world.stream_starts().is_empty(), "the runtime was not asked");
}

#[tokio::test]
async fn disabled_ports_are_not_bound() {
    let mut world = World::without_peers();
    let mut config = (*world.ctx.config).clone();
    (config.api.port, config.api.healthz_port) = (0, 0);
    world.ctx.config = config.into();
    build(world.ctx.clone()).await.map(drop).unwrap();
    assert!(world.ctx.progress.report("").loops.is_empty());
}
