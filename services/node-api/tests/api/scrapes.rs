//! Compression of metrics, and the metrics of health checks.

use std::io::Read as _;

use flate2::read::GzDecoder;

use crate::fake::{World, get, get_with, request, try_request};

#[tokio::test]
async fn only_metrics_are_compressed_with_gzip_on_request() {
    let world = World::start().await;
    world.set_metrics("# HELP kubelet_x X.\n# TYPE kubelet_x gauge\nkubelet_x{a=\"b\"} 1\n".repeat(2000));
    let api = world.api().await;
    get(api, "/healthz").await;
    for path in ["/metrics", "/metrics/probes", "/metrics/cadvisor", "/metrics/resource", "/metrics/slis"] {
        let plain = get(api, path).await;
        assert!(!plain.headers.contains_key("content-encoding"), "{path}");
        let plain_type = plain.headers["content-type"].clone();
        let plain = plain.text().await.unwrap();

        let compressed = get_with(api, path, &[("accept-encoding", "deflate, gzip;q=0.9")]).await;
        assert_eq!(compressed.status, 200, "{path}");
        assert_eq!(compressed.headers["content-encoding"], "gzip", "{path}");
        assert_eq!(compressed.headers["content-type"], plain_type, "{path}");
        let length: usize = compressed.headers["content-length"].to_str().unwrap().parse().unwrap();
        let compressed = compressed.bytes().await.unwrap();
        assert_eq!(compressed.len(), length, "{path}");
        let mut text = String::new();
        GzDecoder::new(&compressed[..]).read_to_string(&mut text).unwrap();
        // The metrics of the process and of its requests have changed in between.
        let stable = |text: &str| -> Vec<String> {
            let lines = text.lines().filter(|line| path != "/metrics" || line.contains("kubelet_x"));
            lines.map(str::to_owned).collect()
        };
        assert_eq!(stable(&text), stable(&plain), "{path}");
        assert!(path != "/metrics" || stable(&text).len() >= 2000, "{text}");
        if path == "/metrics" {
            assert!(compressed.len() * 10 < text.len(), "{} of {} bytes", compressed.len(), text.len());
        }
    }
    for path in ["/healthz", "/pods", "/stats/summary", "/configz", "/statusz"] {
        let reply = get_with(api, path, &[("accept-encoding", "gzip")]).await;
        assert!(!reply.headers.contains_key("content-encoding"), "{path}");
    }
    let reset = try_request(api, "DELETE", "/metrics/slis", &[("accept-encoding", "gzip")]).await.unwrap();
    assert_eq!(reset.text().await.unwrap(), "metrics reset\n");
}

#[tokio::test]
async fn slis_count_healthz_calls_until_reset() {
    let world = World::start().await;
    let api = world.api().await;
    let health = world.listen(keelson_node_api::health_router(&world.slis)).await;
    for path in ["/healthz/ping", "/healthz/syncloop", "/metrics/slis"] {
        get(api, path).await;
    }
    get(health, "/healthz/ping").await;
    let reply = get(api, "/metrics/slis").await;
    assert_eq!(reply.headers["content-type"], "text/plain; version=0.0.4; charset=utf-8");
    assert_eq!(reply.text().await.unwrap(), "", "a single check does not count");

    get(api, "/healthz").await;
    world.set_silent_ms(31_000);
    get(api, "/healthz?verbose&exclude=log").await;
    get(health, "/healthz").await;
    let text = get(api, "/metrics/slis").await.text().await.unwrap();
    let samples: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    assert_eq!(
        samples,
        [
            "kubernetes_healthcheck{name=\"log\",type=\"healthz\"} 1",
            "kubernetes_healthcheck{name=\"ping\",type=\"healthz\"} 1",
            "kubernetes_healthcheck{name=\"syncloop\",type=\"healthz\"} 0",
            "kubernetes_healthchecks_total{name=\"log\",status=\"success\",type=\"healthz\"} 1",
            "kubernetes_healthchecks_total{name=\"ping\",status=\"success\",type=\"healthz\"} 3",
            "kubernetes_healthchecks_total{name=\"syncloop\",status=\"error\",type=\"healthz\"} 1",
            "kubernetes_healthchecks_total{name=\"syncloop\",status=\"success\",type=\"healthz\"} 1",
        ]
    );

    let reply = request(api, "DELETE", "/metrics/slis").await;
    assert_eq!((reply.status.as_u16(), reply.text().await.unwrap().as_str()), (200, "metrics reset\n"));
    assert_eq!(get(api, "/metrics/slis").await.text().await.unwrap(), "");
}
