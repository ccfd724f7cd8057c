//! The services of the agent: their state, usage, versions and restarts.

use keelson_config::ServiceName;
use keelson_proto::keelson::admin::v1::{GetProgressResponse, GetUsageResponse};
use keelson_proto::keelson::supervisor::v1::Service;
use serde_json::{Value, json};

use crate::fake::{Fake, World};
use crate::{keelson, now, world};

#[test]
fn get_services_shows_the_services_of_init() {
    let fake = Fake::start(world());
    assert_eq!(
        keelson(&fake.run_dir, &["get", "services"]).ok(),
        "NAME       STATE         PID    RESTARTS   MEMORY   AGE   MESSAGE\n\
         pod-sync   running       4242   2          5.2Mi    30m\n\
         node-api   backing-off   -      5          -        -     ended with exit code 70\n"
    );
    let list = keelson(&fake.run_dir, &["get", "svc", "-o", "json"]).json();
    assert_eq!(list.as_object().unwrap().keys().collect::<Vec<_>>(), ["items"]);
    let item = &list["items"][0];
    assert_eq!(
        (&item["name"], &item["pid"], &item["state"]),
        (&json!("pod-sync"), &json!(4242), &json!("running"))
    );
    assert_eq!((&item["restarts"], &item["pss_kib"]), (&json!(2), &json!(5427)));
    let one = keelson(&fake.run_dir, &["get", "services", "node-api", "-o", "json"]).json();
    assert_eq!(one["items"].as_array().unwrap().len(), 1);
    assert!(one["items"][0]["pid"].is_null());
}

#[test]
fn get_services_without_init_queries_each_service() {
    let services: Vec<ServiceName> =
        ServiceName::supervised().filter(|s| *s != ServiceName::NodeApi).collect();
    let world = World {
        progress: GetProgressResponse { started_unix_nanos: now(), ..Default::default() },
        ..world()
    };
    let fake = Fake::start_some(world, &services, &Default::default());
    let result = keelson(&fake.run_dir, &["get", "services", "-o", "json"]);
    assert!(result.err.contains("init is not running") && result.err.contains("unknown"), "{}", result.err);
    let list = result.json();
    let find =
        |name: &str| list["items"].as_array().unwrap().iter().find(|i| i["name"] == name).unwrap().clone();
    let (running, stopped) = (find("pod-sync"), find("node-api"));
    assert_eq!(running["state"], "running");
    assert!(running["pid"].is_null() && running["pss_kib"].is_null() && running["restarts"].is_null());
    assert_eq!(stopped["state"], "stopped");
    assert!(stopped["message"].as_str().unwrap().contains("node-api.sock"), "{stopped}");

    let table = keelson(&fake.run_dir, &["get", "services"]).out;
    let rows: Vec<&str> = table.lines().collect();
    assert_eq!(rows.len(), 1 + ServiceName::ALL.len(), "{table}");
    let init: Vec<&str> = rows[1].split_whitespace().collect();
    assert_eq!(init[..6], ["init", "stopped", "-", "<unknown>", "-", "-"], "{table}");
    assert!(rows[1].contains("nothing answers at ") && rows[1].ends_with("init.sock"), "{table}");
    let pod_sync = rows.iter().find(|row| row.starts_with("pod-sync")).unwrap();
    assert!(pod_sync.contains("running"), "{table}");
    let init = keelson(&fake.run_dir, &["get", "services", "init"]);
    assert_eq!((init.code, init.out.lines().count()), (Some(0), 2), "{}", init.out);
}

#[test]
fn top_without_a_terminal_shows_services_once() {
    let usage = GetUsageResponse { rss_bytes: 8 << 20, pid: 7, ..Default::default() };
    let fake = Fake::start(World { usage, ..world() });
    let result = keelson(&fake.run_dir, &["top", "services", "--interval", "100ms"]).ok();
    assert_eq!(
        result,
        "NAME       STATE         PID    CPU(%)   PSS     RSS     RESTARTS   UPTIME   MESSAGE\n\
         node-api   backing-off   -      -        -       -       5          -        ended with exit code 70\n\
         pod-sync   running       4242   -        5.2Mi   8.0Mi   2          30m\n"
    );
    let bare = keelson(
        &fake.run_dir,
        &["top", "svc", "--once", "--no-headers", "--interval", "100ms", "--sort", "memory"],
    );
    assert!(bare.ok().starts_with("pod-sync"), "who uses most comes first");
    let items = keelson(&fake.run_dir, &["top", "services", "--interval", "100ms", "-o", "json"]).json();
    assert_eq!((&items["items"][1]["rssBytes"], &items["items"][0]["pid"]), (&json!(8 << 20), &Value::Null));
}

#[test]
fn top_services_works_without_init() {
    let usage =
        GetUsageResponse { rss_bytes: 8 << 20, pss_bytes: Some(4 << 20), pid: 7, ..Default::default() };
    let world = World {
        usage,
        progress: GetProgressResponse { started_unix_nanos: now(), ..Default::default() },
        ..world()
    };
    let services: Vec<ServiceName> =
        ServiceName::supervised().filter(|s| *s != ServiceName::NodeApi).collect();
    let fake = Fake::start_some(world, &services, &Default::default());
    let items = keelson(&fake.run_dir, &["top", "services", "--interval", "100ms", "-o", "json"]).json();
    let find =
        |name: &str| items["items"].as_array().unwrap().iter().find(|i| i["name"] == name).unwrap().clone();
    let (running, stopped) = (find("pod-sync"), find("node-api"));
    assert_eq!(
        (&running["pid"], &running["pssBytes"], &running["restarts"]),
        (&json!(7), &json!(4 << 20), &Value::Null)
    );
    assert_eq!((&stopped["state"], &stopped["pid"]), (&json!("stopped"), &Value::Null));
}

#[test]
fn retry_and_services_restart_call_the_services() {
    let fake = Fake::start(world());
    assert_eq!(
        keelson(&fake.run_dir, &["retry", "pod", "dns", "-n", "system"]).ok(),
        "pod/dns-edge is retried now\n"
    );
    assert_eq!(
        keelson(&fake.run_dir, &["services", "restart", "pod-sync"]).ok(),
        "service/pod-sync restarted\n"
    );
    assert_eq!(fake.world.calls.all(), ["retry system/dns-edge", "restart pod-sync"]);
    let result = keelson(&fake.run_dir, &["services", "restart", "kubelet"]);
    assert!(result.failed(1).0.contains("there is no service \"kubelet\""));
}

#[test]
fn evict_names_the_pods_by_uid_after_all_names_were_resolved() {
    let fake = Fake::start(world());
    let evicted = keelson(&fake.run_dir, &["evict", "pod", "dns", "-n", "system"]);
    assert_eq!(evicted.ok(), "pod/dns-edge is evicted\n");
    let args =
        ["evict", "pod/dns", "-n", "system", "--grace-period", "5", "--message", "for \"maintenance\""];
    assert_eq!(keelson(&fake.run_dir, &args).ok(), "pod/dns-edge is evicted\n");
    let calls = fake.world.calls.all();
    let uid = calls[0].strip_prefix("evict ").unwrap().split(' ').next().unwrap();
    assert!(!uid.is_empty());
    let with_options = format!("evict {uid} Some(5) {:?}", "for \"maintenance\"");
    assert_eq!(calls, [format!("evict {uid} None \"\""), with_options]);
    keelson(&fake.run_dir, &["evict", "pod", "dns", "nobody", "-n", "system"]).failed(1);
    keelson(&fake.run_dir, &["evict", "pod", "dns", "-n", "system", "--grace-period", "-1"]).failed(64);
    keelson(&fake.run_dir, &["evict", "pod"]).failed(64);
    assert_eq!(fake.world.calls.all().len(), 2, "nothing is evicted if one name is wrong");
}

fn serving(name: ServiceName, state: &str) -> Service {
    Service {
        name: name.to_string(),
        pid: 100,
        state: state.into(),
        message: "why".into(),
        ..Service::default()
    }
}

#[test]
fn services_restart_all_restarts_one_after_the_other() {
    let services = ServiceName::supervised().map(|name| serving(name, "running")).collect();
    let fake = Fake::start(World { services, ..world() });
    let result = keelson(&fake.run_dir, &["services", "restart", "--all"]).ok();
    let names: Vec<String> = ServiceName::supervised().map(|name| name.to_string()).collect();
    let lines =
        |prefix: &str, suffix: &str| names.iter().map(|n| format!("{prefix}{n}{suffix}")).collect::<Vec<_>>();
    assert_eq!(result.lines().collect::<Vec<_>>(), lines("service/", " restarted"));
    assert_eq!(fake.world.calls.all(), lines("restart ", ""));
}

#[test]
fn services_restart_reports_a_service_that_does_not_serve() {
    let name = ServiceName::PodSync;
    let restart = |state: &str| {
        let fake = Fake::start(World { services: vec![serving(name, state)], ..world() });
        keelson(&fake.run_dir, &["services", "restart", "pod-sync", "--timeout", "50ms"])
    };
    let result = restart("starting");
    let (error, hint) = result.failed(75);
    assert!(error.contains("it is starting, why") && hint.contains("init keeps trying"), "{result:?}");
    let result = restart("failed");
    assert!(result.failed(1).0.contains("has failed: why"), "{result:?}");
    let result = restart("degraded");
    assert_eq!(result.err, "pod-sync is degraded: why\n");
    assert_eq!(result.ok(), "service/pod-sync restarted\n");
}

#[test]
fn version_shows_client_and_services() {
    let world =
        World { progress: GetProgressResponse { version: "9.9.9".into(), ..Default::default() }, ..world() };
    let fake = Fake::start(world);
    let text = keelson(&fake.run_dir, &["version"]).ok();
    assert!(text.starts_with(concat!("keelson ", env!("CARGO_PKG_VERSION"), "\n")), "{text}");
    assert!(text.contains("pod-sync           9.9.9\n"), "{text}");
    let json = keelson(&fake.run_dir, &["version", "-o", "json"]).json();
    assert_eq!(json["client"]["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(json["services"].as_array().unwrap().len(), ServiceName::ALL.len());
    assert_eq!(json["services"][0], json!({"name": "init", "version": "9.9.9"}));
}

#[test]
fn completion_and_help_need_no_agent() {
    let nowhere = std::path::Path::new("/nonexistent");
    for shell in ["bash", "zsh", "fish"] {
        assert!(keelson(nowhere, &["completions", shell]).ok().contains("keelson"), "{shell}");
    }
    let help = keelson(nowhere, &["--help"]).ok();
    assert!(help.contains("Exit codes:") && help.contains("69"), "{help}");
    assert!(keelson(nowhere, &["version", "--client"]).ok().starts_with("keelson "));
}
