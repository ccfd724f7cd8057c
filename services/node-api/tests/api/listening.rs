//! The ports of node-api.

use std::time::Duration;

use crate::fake::{World, get, soon};
use keelson_node_api::{build, health_router, listen};
use tokio::net::TcpListener;

#[tokio::test]
async fn a_busy_port_is_a_condition_until_it_is_free() {
    let world = World::without_neighbours();
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
async fn an_api_open_to_the_network_is_refused_at_the_start() {
    let mut world = World::without_neighbours();
    let mut config = (*world.ctx.config).clone();
    config.api.address = "0.0.0.0".into();
    world.ctx.config = config.into();
    let error = build(world.ctx.clone()).await.map(drop).unwrap_err();
    assert!(error.to_string().contains("authentication.x509.clientCAFile"), "{error}");
}

#[tokio::test]
async fn the_read_only_port_has_figures_and_pods_and_nothing_of_what_pods_say_or_do() {
    let world = World::start();
    world.pod("default", "web", r#"{"metadata":{"name":"web"}}"#);
    let port = world.read_only().await;
    assert!(get(port, "/pods").await.text().await.unwrap().contains("\"web\""));
    for path in ["/healthz/ping", "/metrics", "/metrics/resource"] {
        assert_eq!(get(port, path).await.status, 200, "{path}");
    }
    // Here there is nobody who could tell figures.
    assert_eq!(get(port, "/stats/summary").await.status, 500);
    for path in
        ["/containerLogs/default/web/c", "/exec/default/web/c", "/run/", "/runningpods/", "/logs/syslog"]
    {
        let reply = get(port, path).await;
        assert_eq!(reply.status, 405, "{path}");
        assert_eq!(reply.text().await.unwrap(), "Debug endpoints are disabled.\n");
    }
    for path in ["/configz", "/flagz", "/statusz", "/"] {
        assert_eq!(get(port, path).await.status, 404, "{path}");
    }
    let counted = "path=\"pods\",server_type=\"readonly\",long_running=\"false\"} 1";
    assert!(world.ctx.metrics.text().contains(counted));
}

#[tokio::test]
async fn ports_that_are_off_are_not_bound() {
    let mut world = World::without_neighbours();
    let mut config = (*world.ctx.config).clone();
    (config.api.port, config.api.healthz_port) = (0, 0);
    world.ctx.config = config.into();
    build(world.ctx.clone()).await.map(drop).unwrap();
    assert!(world.ctx.progress.report("").loops.is_empty());
}
