//! Live views for operators: `keelson top`, and a pod's start in `keelson trace pod`.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::collections::BTreeSet;
use std::time::Instant;

use keelson_config::ServiceName;
use keelson_testkit::process::Signal;
use keelson_testkit::{Agent, Scratch, eventually};
use keelson_tests::screen::Screen;
use keelson_tests::{LIMIT, sleeper, until_ready};
use serde_json::Value;

async fn agent_with(scratch: &Scratch, names: &[&str]) -> Agent {
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    for name in names {
        agent.write_manifest(&format!("{name}.yaml"), &sleeper(name)).unwrap();
    }
    until_ready(&agent, names).await.unwrap();
    agent
}

fn row<'a>(list: &'a Value, name: &str) -> &'a Value {
    let rows = list["items"].as_array().unwrap_or_else(|| panic!("{list:#}"));
    rows.iter().find(|row| row["name"] == name).unwrap_or_else(|| panic!("no {name}: {list:#}"))
}

async fn lines(agent: &Agent, args: &[&str]) -> Vec<String> {
    let output = agent.keelson(args).await.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().lines().map(ToOwned::to_owned).collect()
}

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

#[tokio::test]
async fn top_shows_pods_services_and_the_node_and_marks_a_dead_service() {
    let scratch = Scratch::new().unwrap();
    let agent = agent_with(&scratch, &["one", "two"]).await;
    let node = agent.spec().node_name.clone();

    let pods = lines(&agent, &["top", "pods", "--once", "--sort", "name"]).await;
    assert_eq!(words(&pods[0]), ["NAME", "CPU(cores)", "MEMORY(bytes)", "RESTARTS", "AGE"]);
    for (line, name) in pods[1..].iter().zip(["one", "two"]) {
        let cells = words(line);
        assert_eq!((cells[0], cells[3]), (format!("{name}-{node}").as_str(), "0"), "{pods:?}");
        assert!(cells[1].ends_with('m') && cells[2].ends_with("Mi") && cells[4].ends_with('s'), "{pods:?}");
    }
    assert_eq!(pods.len(), 3, "{pods:?}");
    let bare = lines(&agent, &["top", "pods", "--once", "--no-headers", "-n", "kube-system"]).await;
    assert_eq!(bare, Vec::<String>::new());

    let of_node = lines(&agent, &["top", "node", "--once"]).await;
    let cells = words(&of_node[1]);
    assert_eq!(cells[0], node, "{of_node:?}");
    assert!(cells[2].ends_with('%') && cells[4].ends_with('%'), "{of_node:?}");
    let all = lines(&agent, &["top", "--once"]).await;
    assert_eq!(all.iter().filter(|line| line.starts_with("NAME ")).count(), 3, "{all:?}");

    let mut last = Value::Null;
    let dead = eventually(
        LIMIT,
        "a service that is killed again and again is shown without a process",
        async || {
            if let Some(process) = agent.service(ServiceName::NodeApi) {
                process.signal(Signal::KILL);
            }
            last =
                agent.keelson_json(&["top", "services", "-o", "json", "--interval", "100ms"]).await.unwrap();
            let row = row(&last, "node-api");
            row["pid"].is_null() && row["state"] != "running" && row["cpuNanoCores"].is_null()
        },
    );
    dead.await.unwrap_or_else(|e| panic!("{e:#}\n{last:#}"));
    for service in ServiceName::ALL.into_iter().filter(|service| *service != ServiceName::NodeApi) {
        let row = row(&last, service.as_str());
        for figure in ["pid", "cpuNanoCores", "pssBytes", "rssBytes", "restarts"] {
            assert!(row[figure].is_u64(), "{figure} of {row:#}");
        }
        assert!(row["pssBytes"].as_u64() <= row["rssBytes"].as_u64(), "{row:#}");
    }
    agent.end().unwrap();
}

#[tokio::test]
async fn the_live_top_view_survives_kills_of_services() {
    let scratch = Scratch::new().unwrap();
    let agent = agent_with(&scratch, &["web"]).await;
    let mut command = agent.spec().cli();
    command.args(["top", "--interval", "200ms"]);
    let mut screen = Screen::start(command, 160, 40).unwrap();
    screen
        .until("services and pods", 0, |text| text.contains("pod-sync") && text.contains("web-"))
        .await
        .unwrap();
    for service in [ServiceName::PodSync, ServiceName::ResourceManager] {
        let process = agent.service(service).unwrap();
        process.signal(Signal::KILL);
        let from = screen.shown().len();
        let back =
            eventually(LIMIT, "it runs again", async || agent.service(service).is_some_and(|p| p != process));
        back.await.unwrap();
        let pid = agent.service_pid(service).unwrap().to_string();
        screen.until("its new process", from, |text| text.contains(&pid)).await.unwrap();
        let from = screen.shown().len();
        screen
            .until("the pod with figures", from, |text| {
                text.split("\r\n").any(|line| line.contains("web-") && line.contains("Mi"))
            })
            .await
            .unwrap();
    }
    screen.press("mq").unwrap();
    let mut code = None;
    let ends = eventually(LIMIT, "q ends it", async || {
        code = screen.child.try_wait().unwrap();
        code.is_some()
    });
    ends.await.unwrap();
    assert!(code.unwrap().success());
    // The screen and the cursor are restored.
    screen.until("the end", 0, |text| text.ends_with("\u{1b}[?25h\u{1b}[?1049l")).await.unwrap();
    agent.end().unwrap();
}

/// Waits until the trace of the pod says that it was ready.
async fn until_traced(agent: &Agent, name: &str) -> Value {
    let mut last = Value::Null;
    let traced = eventually(LIMIT, "the start is traced to its end", async || {
        last = agent.keelson_json(&["trace", "pod", name, "-o", "json"]).await.unwrap_or_default();
        last["ready"] == true
    });
    traced.await.unwrap_or_else(|e| panic!("{e:#}\n{last:#}\n{}", agent.log_tail()));
    last
}

/// Offset, time and depth of the first span whose name has this ending.
fn span<'a>(trace: &'a Value, end: &str) -> &'a Value {
    let spans = trace["spans"].as_array().unwrap();
    spans
        .iter()
        .find(|s| s["name"].as_str().unwrap().ends_with(end))
        .unwrap_or_else(|| panic!("no {end}: {trace:#}"))
}

fn offset(trace: &Value, end: &str) -> i64 {
    span(trace, end)["offsetNanos"].as_i64().unwrap()
}

#[tokio::test]
async fn trace_pod_shows_spans_of_every_service_except_a_killed_one() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let begun = Instant::now();
    agent.write_manifest("web.yaml", &sleeper("web")).unwrap();
    until_ready(&agent, &["web"]).await.unwrap();
    let trace = until_traced(&agent, "web").await;
    let took = i64::try_from(begun.elapsed().as_nanos()).unwrap();

    let spans = trace["spans"].as_array().unwrap();
    let services: BTreeSet<&str> = spans.iter().map(|s| s["service"].as_str().unwrap()).collect();
    let child =
        ["node-status", "pod-config", "pod-sync", "resource-manager", "runtime-shim", "volume-manager"];
    assert_eq!(services, child.into(), "{trace:#}");
    assert_eq!(
        (&trace["missing"], &trace["otherSpans"], &trace["lostSpans"]),
        (&Value::Array(Vec::new()), &0.into(), &0.into())
    );

    // A span that follows from another starts later.
    let order = [
        "pod seen",
        "sync pod",
        "/AdmitPod",
        "/MountPod",
        "/RunPodSandbox",
        "/CreateContainer",
        "/StartContainer",
        "pod runs",
    ];
    let offsets = order.map(|name| offset(&trace, name));
    assert!(offsets.is_sorted() && offsets[0] == 0, "{offsets:?} {trace:#}");
    for name in ["/PreparePod", "/EnsureImage", "report pod status"] {
        span(&trace, name);
    }
    assert_spans_nest(&trace, took);
    assert_waterfall(&agent).await;

    // A killed process loses its spans; those of the others stay.
    let process = agent.service(ServiceName::RuntimeShim).unwrap();
    process.signal(Signal::KILL);
    let mut last = Value::Null;
    let result = eventually(LIMIT, "the killed service has no spans", async || {
        last = agent.keelson_json(&["trace", "pod", "web", "-o", "json"]).await.unwrap_or_default();
        let missing = &last["missing"][0];
        missing["service"] == "runtime-shim"
            && missing["message"].as_str().unwrap().contains("was restarted after this start")
    });
    result.await.unwrap_or_else(|e| panic!("{e:#}\n{last:#}\n{}", agent.log_tail()));
    assert!(last["spans"].as_array().unwrap().iter().all(|s| s["service"] != "runtime-shim"), "{last:#}");
    span(&last, "sync pod");
    assert_eq!(last["traceId"], trace["traceId"]);
    // The trace of a later start is complete.
    agent.write_manifest("next.yaml", &sleeper("next")).unwrap();
    until_ready(&agent, &["web", "next"]).await.unwrap();
    let next = until_traced(&agent, "next").await;
    assert!(offset(&next, "/RunPodSandbox") > 0, "{next:#}");
    assert_ne!(next["traceId"], trace["traceId"]);
    agent.end().unwrap();
}

/// The spans are within the spans that they are parts of, and all of them within the time `took`, in nanoseconds.
fn assert_spans_nest(trace: &Value, took: i64) {
    let spans = trace["spans"].as_array().unwrap();
    // Child spans begin within the action, and the last one ends with it; 5 ms allow for the difference of two clocks.
    let slack = 5_000_000;
    let end = |s: &Value| s["offsetNanos"].as_i64().unwrap() + s["durationNanos"].as_i64().unwrap();
    let action = span(trace, "sync pod");
    let children: Vec<&Value> = spans.iter().filter(|s| s["parentSpanId"] == action["spanId"]).collect();
    assert!(children.len() >= 5, "{trace:#}");
    for child in children {
        let from = child["offsetNanos"].as_i64().unwrap();
        assert!(
            from + slack >= action["offsetNanos"].as_i64().unwrap() && end(child) <= end(action) + slack,
            "{child:#} {action:#}"
        );
        assert_eq!(child["depth"].as_i64(), action["depth"].as_i64().map(|depth| depth + 1), "{child:#}");
    }
    let total = trace["durationNanos"].as_i64().unwrap();
    assert!(total > 0 && total <= took, "{total} {took}");
    assert_eq!(spans.iter().map(end).max(), Some(total), "{trace:#}");
}

async fn assert_waterfall(agent: &Agent) {
    let drawn = agent.keelson(&["trace", "pod", "web"]).await.unwrap();
    let text = String::from_utf8(drawn.stdout).unwrap();
    assert!(text.lines().next().unwrap().contains("in default: ready after "), "{text}");
    assert!(
        text.lines().any(|line| line.starts_with("runtime-shim ")
            && line.contains("RunPodSandbox")
            && line.ends_with('█')),
        "{text}"
    );
}
