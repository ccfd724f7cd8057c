//! `/statusz` and `/flagz`.

use std::net::SocketAddr;

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::fake::{Reply, World, get, get_with};

const SEPARATORS: [&str; 4] = [":", ": ", "=", " "];

async fn get_accepting(api: SocketAddr, path: &str, accept: &str) -> Reply {
    get_with(api, path, &[("accept", accept)]).await
}

fn content_type(reply: &Reply) -> String {
    reply.headers["content-type"].to_str().expect("a media type is ASCII").to_owned()
}

#[tokio::test]
async fn statusz_is_text_or_a_versioned_object() {
    let world = World::without_peers();
    let before = Timestamp::now();
    let api = world.api().await;
    for reply in [get(api, "/statusz").await, get_accepting(api, "/statusz", "text/plain").await] {
        assert_eq!((reply.status.as_u16(), &*content_type(&reply)), (200, "text/plain; charset=utf-8"));
        assert!(!reply.headers.contains_key("warning"));
        let text = reply.text().await.unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[..2], ["", "kubelet statusz"], "{text}");
        assert!(lines[2].starts_with("Warning: "), "{text}");
        let of_paths = SEPARATORS.map(|s| format!("Paths{s} /configz /flagz /healthz /metrics"));
        assert!(of_paths.iter().any(|line| line == lines.last().unwrap()), "{text}");
    }
    let accept = "application/json;v=v1beta1;g=config.k8s.io;as=Statusz";
    let reply = get_accepting(api, "/statusz", accept).await;
    assert_eq!((reply.status.as_u16(), &*content_type(&reply)), (200, "application/json"));
    assert!(!reply.headers.contains_key("warning"));
    let shown: Value = serde_json::from_str(&reply.text().await.unwrap()).unwrap();
    assert_eq!(
        (&shown["kind"], &shown["apiVersion"], &shown["metadata"]),
        (&json!("Statusz"), &json!("config.k8s.io/v1beta1"), &json!({"name": "kubelet"}))
    );
    assert_eq!((&shown["goVersion"], &shown["emulationVersion"]), (&json!(""), &json!("1.36")));
    let started: Timestamp = shown["startTime"].as_str().unwrap().parse().unwrap();
    assert!(started.as_second() >= before.as_second() && started <= Timestamp::now(), "{shown}");
    assert!(shown["uptimeSeconds"].as_i64().unwrap() <= Timestamp::now().as_second() - before.as_second());
    for path in shown["paths"].as_array().unwrap() {
        let path = path.as_str().unwrap();
        assert_ne!(get(api, path).await.status, 404, "{path}");
    }
}

#[tokio::test]
async fn flagz_lists_the_flags_written_by_init_in_each_format() {
    let world = World::without_peers();
    let api = world.api().await;
    let reply = get(api, "/flagz").await;
    assert_eq!(reply.status, 500);
    assert!(reply.text().await.unwrap().contains("flags.json"));

    let file = world.ctx.config.paths.run_dir.join("flags.json");
    let flags = r#"{"v":"2","hostname-override":"n1","manifest-url-header":"CLASSIFIED"}"#;
    std::fs::write(file, flags).unwrap();
    let text = get(api, "/flagz").await.text().await.unwrap();
    let (heading, list) = text.split_at(text.find("hostname-override").unwrap());
    assert!(heading.starts_with("\nkubelet flagz\nWarning: "), "{text}");
    assert_eq!(heading.lines().count(), 3, "{text}");
    let expected =
        SEPARATORS.map(|s| format!("hostname-override{s}n1\nmanifest-url-header{s}CLASSIFIED\nv{s}2\n"));
    assert!(expected.iter().any(|expected| expected == list), "{text}");

    let reply = get_accepting(api, "/flagz", "application/json;v=v1beta1;g=config.k8s.io;as=Flagz").await;
    assert!(!reply.headers.contains_key("warning"));
    let shown: Value = serde_json::from_str(&reply.text().await.unwrap()).unwrap();
    let expected = json!({
        "kind": "Flagz", "apiVersion": "config.k8s.io/v1beta1", "metadata": {"name": "kubelet"},
        "flags": {"hostname-override": "n1", "manifest-url-header": "CLASSIFIED", "v": "2"},
    });
    assert_eq!(shown, expected);

    let reply = get_accepting(api, "/flagz", "application/yaml;v=v1alpha1;g=config.k8s.io;as=Flagz").await;
    assert_eq!(content_type(&reply), "application/yaml");
    let warning = reply.headers["warning"].to_str().unwrap();
    assert!(warning.starts_with("299 - \"") && warning.ends_with('"'), "{warning}");
    assert_eq!(
        reply.text().await.unwrap(),
        "kind: \"Flagz\"\napiVersion: \"config.k8s.io/v1alpha1\"\nmetadata:\n  name: \"kubelet\"\n\
        flags:\n  hostname-override: \"n1\"\n  manifest-url-header: \"CLASSIFIED\"\n  v: \"2\"\n"
    );
}

#[tokio::test]
async fn unsupported_accept_header_is_406() {
    let world = World::without_peers();
    let api = world.api().await;
    for (path, accept) in [
        ("/statusz", "application/json"),
        ("/statusz", "application/json;v=v1beta1;g=config.k8s.io;as=Flagz"),
        ("/flagz", "application/json;v=v1beta1;g=config.k8s.io;as=Statusz"),
        ("/flagz", "application/yaml;v=v1beta1;g=config.k8s.io"),
        ("/flagz", "text/html"),
    ] {
        let reply = get_accepting(api, path, accept).await;
        assert_eq!(reply.status, 406, "{path} {accept}");
        assert!(reply.text().await.unwrap().contains("g=config.k8s.io"), "{path} {accept}");
    }
}
