//! The kubelet API of node-api on a real agent, and where it listens.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddr};

use keelson_config::ServiceName;
use keelson_testkit::process::Signal;
use keelson_testkit::{Agent, BUSYBOX_IMAGE, Scratch, eventually};
use keelson_tests::{LIMIT, http, pods, sleeper, until_ready};
use serde_json::Value;
use tokio::net::TcpStream;

/// `GET url`: status, content type and body.
async fn get(url: &str) -> (u16, String, String) {
    http::get(url).await.unwrap()
}

/// The body of an answer with status 200.
async fn get_ok(url: &str) -> String {
    http::get_ok(url).await.unwrap()
}

/// A pod that writes five lines.
fn logging_pod() -> String {
    sleeper("talker").replace("echo hello from talker", "for i in 1 2 3 4 5; do echo line $i; done")
}

#[tokio::test]
async fn pods_logs_metrics_and_health_have_the_kubelets_format() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let api = agent.api_url();
    let none: Value = serde_json::from_str(&get_ok(&format!("{api}/pods")).await).unwrap();
    assert_eq!((&none["kind"], &none["items"]), (&"PodList".into(), &Value::Null), "{none}");

    agent.write_manifest("talker.yaml", &logging_pod()).unwrap();
    until_ready(&agent, &["talker"]).await.unwrap();
    let name = format!("talker-{}", agent.spec().node_name);
    let (status, kind, body) = get(&format!("{api}/pods")).await;
    assert_eq!((status, kind.as_str()), (200, "application/json"), "{body}");
    let list: Value = serde_json::from_str(&body).unwrap();
    assert_eq!((&list["kind"], &list["apiVersion"]), (&"PodList".into(), &"v1".into()), "{list}");
    let items = list["items"].as_array().unwrap();
    assert_eq!(items.len(), 1, "{list}");
    let shown = &pods(&agent).await.unwrap()[&name];
    for part in ["metadata", "spec", "status"] {
        assert_eq!(items[0][part], shown[part], "{part}");
    }
    assert_eq!(items[0]["spec"]["containers"][0]["image"], BUSYBOX_IMAGE);

    logs(&agent, &name).await;
    metrics(&agent).await;
    health(&agent).await;
    agent.end().unwrap();
}

async fn logs(agent: &Agent, pod: &str) {
    let url = format!("{}/containerLogs/default/{pod}", agent.api_url());
    let all = "line 1\nline 2\nline 3\nline 4\nline 5\n";
    let whole =
        eventually(LIMIT, "the whole log is there", async || get_ok(&format!("{url}/main")).await == all);
    whole.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    assert_eq!(get_ok(&format!("{url}/main?tailLines=2")).await, "line 4\nline 5\n");
    assert_eq!(get_ok(&format!("{url}/main?tailLines=0")).await, "");
    assert_eq!(get_ok(&format!("{url}/main?limitBytes=9")).await, "line 1\nli");
    let stamped = get_ok(&format!("{url}/main?tailLines=1&timestamps=true")).await;
    let (stamp, line) = stamped.split_once(' ').unwrap();
    assert!(stamp.contains('T') && line == "line 5\n", "{stamped}");
    for (path, code, part) in [
        (format!("{url}/other"), 404, "other"),
        (format!("{}/containerLogs/default/nobody/main", agent.api_url()), 404, "nobody"),
        (format!("{url}/main?tailLines=-1"), 422, "Invalid request"),
        (format!("{url}/main?previous=true"), 400, "previous"),
    ] {
        let (status, _, body) = get(&path).await;
        assert!(status == code && body.contains(part), "{path}: {status} {body}");
    }
}

async fn metrics(agent: &Agent) {
    let (status, kind, text) = get(&format!("{}/metrics", agent.api_url())).await;
    assert_eq!(status, 200, "{text}");
    assert!(kind.starts_with("text/plain; version=0.0.4"), "{kind}");
    // Not init: no other service may read its metrics.
    for service in ServiceName::supervised() {
        let label = format!("keelson_service=\"{service}\"");
        let up = format!("keelson_service_up{{{label}}} 1");
        assert!(text.lines().any(|line| line == up), "no {up}:\n{text}");
        let own = text.lines().any(|l| l.contains(&label) && !l.starts_with("keelson_service_up"));
        assert!(own, "no series of {service}:\n{text}");
    }
}

async fn health(agent: &Agent) {
    let (api, port) = (agent.api_url(), agent.healthz_url());
    for url in [format!("{api}/healthz"), format!("{port}/healthz"), format!("{port}/healthz/ping")] {
        assert_eq!(get_ok(&url).await, "ok", "{url}");
    }
    assert!(get_ok(&format!("{api}/healthz?verbose")).await.contains("[+]syncloop ok"));
    // The health port serves nothing else.
    assert_eq!(get(&format!("{port}/pods")).await.0, 404);

    let pod_sync = agent.service(ServiceName::PodSync).unwrap();
    assert!(pod_sync.signal(Signal::STOP));
    let sick = get(&format!("{api}/healthz")).await;
    let alive = get(&format!("{port}/healthz")).await;
    let list = get(&format!("{api}/pods")).await;
    assert!(pod_sync.signal(Signal::CONT));
    assert!(sick.0 == 500 && sick.2.contains("[-]syncloop failed"), "{sick:?}");
    assert_eq!((alive.0, alive.2.as_str()), (200, "ok"));
    assert!(list.0 == 503 && list.2.contains("pod-sync"), "{list:?}");
    let well =
        eventually(LIMIT, "all checks are ok again", async || get(&format!("{api}/healthz")).await.0 == 200);
    well.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
}

/// The listening TCP sockets of this network namespace (proc(5), `/proc/net/tcp`): address and port by inode.
fn listeners() -> BTreeMap<u64, String> {
    const LISTEN: &str = "0A";
    let mut found = BTreeMap::new();
    for file in ["/proc/net/tcp", "/proc/net/tcp6"] {
        let table = std::fs::read_to_string(file).unwrap_or_default();
        for line in table.lines().skip(1) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            if fields.get(3) == Some(&LISTEN) {
                found.insert(fields[9].parse().unwrap(), fields[1].to_owned());
            }
        }
    }
    found
}

/// The inodes of the sockets that a process has open.
fn sockets_of(pid: u32) -> BTreeSet<u64> {
    let files = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let targets = files.filter_map(|file| std::fs::read_link(file.path()).ok());
    targets.filter_map(|t| t.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()).collect()
}

#[tokio::test]
async fn only_node_api_listens_and_only_on_loopback() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    agent.write_manifest("web.yaml", &sleeper("web")).unwrap();
    until_ready(&agent, &["web"]).await.unwrap();
    get_ok(&format!("{}/healthz", agent.api_url())).await;
    get_ok(&format!("{}/healthz", agent.healthz_url())).await;

    let listeners = listeners();
    let mut open = BTreeSet::new();
    for service in ServiceName::ALL {
        let own = sockets_of(agent.service_pid(service).unwrap());
        open.extend(
            own.iter().filter_map(|inode| Some((service.to_string(), listeners.get(inode)?.clone()))),
        );
    }
    // The address is in the machine's byte order, the port is not.
    let loopback = u32::from_ne_bytes(Ipv4Addr::LOCALHOST.octets());
    let spec = agent.spec();
    let wanted = [spec.port, spec.healthz_port]
        .map(|port| (ServiceName::NodeApi.to_string(), format!("{loopback:08X}:{port:04X}")));
    assert_eq!(open, BTreeSet::from(wanted));

    // The bridge of the pods has an address of this machine that is not loopback.
    let gateway = agent.containerd().network().subnet.gateway();
    for port in [spec.port, spec.healthz_port] {
        let refused = TcpStream::connect(SocketAddr::from((gateway, port))).await.unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused, "{gateway}:{port}");
    }
    agent.end().unwrap();
}
