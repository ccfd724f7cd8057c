//! Requests over HTTP and their responses.

use keelson_testkit::fakes::StreamAnswer;
use serde_json::Value;
use tonic::Code;

use crate::fake::{World, get, log_line, peer_error, request, soon, try_request};

#[tokio::test]
async fn pods_lists_the_unparsed_documents_of_pod_sync() {
    let world = World::start().await;
    let api = world.api().await;
    let empty = get(api, "/pods").await;
    assert_eq!(empty.headers["content-type"], "application/json");
    assert_eq!(
        empty.text().await.unwrap(),
        r#"{"kind":"PodList","apiVersion":"v1","metadata":{},"items":null}"#
    );
    // Order and spacing show that the pod was not parsed.
    let unusual = r#"{"z": 1,"metadata":{"name":"b"},"unknown":{"kept":[1, 2]}}"#;
    world.pod("default", "a", r#"{"metadata":{"name":"a"}}"#);
    world.pod("default", "b", unusual);
    let text = get(api, "/pods").await.text().await.unwrap();
    assert!(text.contains(unusual), "{text}");
    let list: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((list["kind"].as_str(), list["apiVersion"].as_str()), (Some("PodList"), Some("v1")));
    let names: Vec<_> = list["items"].as_array().unwrap().iter().map(|p| &p["metadata"]["name"]).collect();
    assert_eq!(names, ["a", "b"]);
}

#[tokio::test]
async fn interrupted_pod_list_aborts_the_connection() {
    let world = World::start().await;
    world.running_pod("web");
    let pods = world.pods.lock().unwrap().clone();
    world.pod_sync.list_pods.answer_with(move |_| {
        Ok(StreamAnswer::items(pods.clone()).then_fail(peer_error(Code::Unavailable, "gone")))
    });
    let list = async {
        let reply = try_request(world.api().await, "GET", "/pods", &[]).await?;
        assert_eq!(reply.status, 200);
        reply.text().await
    };
    assert!(soon(list).await.is_err());
}

#[tokio::test]
async fn logs_are_forwarded_with_their_options() {
    let world = World::start().await;
    world.running_pod("other");
    world.running_pod("web");
    world.write_log(&["one\n", "two\n", "three\n"]);
    let api = world.api().await;
    let path = "/containerLogs/default/web/c";
    let reply = get(api, path).await;
    assert_eq!(
        (reply.status.as_u16(), &reply.headers["content-type"]),
        (200, &"text/plain".parse().unwrap())
    );
    assert_eq!(reply.headers["transfer-encoding"], "chunked");
    assert_eq!(reply.text().await.unwrap(), "one\ntwo\nthree\n");
    let query = "tailLines=2&limitBytes=99&timestamps=true&sinceTime=1970-01-01T00:00:01Z";
    let tail = get(api, &format!("{path}?{query}")).await.text().await.unwrap();
    assert_eq!(tail, "two\nthree\n");
    let request = world.runtime.read_logs.requests().last().unwrap();
    assert_eq!((request.pod_uid.as_str(), request.container.as_str()), ("uid-of-web", "c"));
    assert_eq!((request.tail_lines, request.limit_bytes), (Some(2), Some(99)));
    assert_eq!(
        (request.timestamps, request.previous, request.since_unix_nanos),
        (true, false, 1_000_000_000)
    );
}

#[tokio::test]
async fn followed_log_streams_and_is_cancelled_when_the_client_disconnects() {
    let world = World::start().await;
    world.running_pod("web");
    let api = world.api().await;
    // The headers arrive although nothing has been written yet.
    let mut reply = soon(get(api, "/containerLogs/default/web/c?follow=true")).await;
    assert_eq!(reply.status, 200);
    for line in ["one\n", "two\n"] {
        world.runtime.read_logs.push(log_line(line));
        assert_eq!(soon(reply.piece()).await.as_deref(), Some(line));
    }
    drop(reply);
    soon(world.runtime.read_logs.until_open(|open| open == 0)).await;
}

#[tokio::test]
async fn a_followed_log_ends_with_its_container() {
    let world = World::start().await;
    world.running_pod("web");
    let mut reply = soon(get(world.api().await, "/containerLogs/default/web/c?follow=true")).await;
    world.runtime.read_logs.end_streams();
    assert_eq!(soon(reply.piece()).await, None);
}

#[tokio::test]
async fn log_request_errors_have_the_kubelets_status_and_message() {
    let world = World::start().await;
    world.running_pod("web");
    let api = world.api().await;
    for (path, status, text) in [
        ("default/none/c", 404, r#"pod "none" does not exist"#),
        ("other/web/c", 404, r#"pod "web" does not exist"#),
        ("default/web/x", 404, r#"container "x" not found in pod "web""#),
        ("default/web/d", 400, r#"container "d" in pod "web" is waiting to start: image can't be pulled"#),
        ("default/web/c?previous=true", 400, r#"previous terminated container "c" in pod "web" not found"#),
        ("default/web/c?tailLines=x", 400, r#"{"message": "Unable to decode query."}"#),
        ("default/web/c?tailLines=-1", 422, r#"{"message": "Invalid request."}"#),
    ] {
        let reply = get(api, &format!("/containerLogs/{path}")).await;
        assert_eq!(reply.status.as_u16(), status, "{path}");
        assert_eq!(reply.text().await.unwrap(), text);
    }
    let path = "/containerLogs/default/web/c";
    for (code, status) in [(Code::NotFound, 400), (Code::Unavailable, 503), (Code::Internal, 500)] {
        world.runtime.read_logs.fail(peer_error(code, "runtime-shim has no such log"));
        let reply = get(api, path).await;
        assert_eq!(reply.status.as_u16(), status, "{code:?}");
        assert!(reply.text().await.unwrap().contains("runtime-shim has no such log"));
    }
}

#[tokio::test]
async fn running_pod_is_preferred_over_a_finished_one_of_the_same_name() {
    let world = World::start().await;
    for uid in ["old", "new"] {
        world.running_pod("web");
        let mut pods = world.pods.lock().unwrap();
        let pod = pods.last_mut().unwrap();
        (pod.uid, pod.finished) = (uid.into(), uid == "old");
    }
    let api = world.api().await;
    get(api, "/containerLogs/default/web/c").await.text().await.unwrap();
    assert_eq!(world.runtime.read_logs.requests().all()[0].pod_uid, "new");
    world.pods.lock().unwrap().pop();
    get(api, "/containerLogs/default/web/c").await.text().await.unwrap();
    assert_eq!(world.runtime.read_logs.requests().all()[1].pod_uid, "old");
}

#[tokio::test]
async fn unreachable_service_is_named_in_the_response() {
    let world = World::without_peers();
    let api = world.api().await;
    for path in ["/pods", "/containerLogs/default/web/c"] {
        let reply = get(api, path).await;
        assert_eq!(reply.status, 503, "{path}");
        let text = reply.text().await.unwrap();
        assert!(text.contains("pod-sync is not reachable"), "{text}");
    }
    let reply = get(api, "/healthz").await;
    assert_eq!(reply.status, 500);
    let text = reply.text().await.unwrap();
    assert_eq!(text, "[+]ping ok\n[+]log ok\n[-]syncloop failed: reason withheld\nhealthz check failed\n");
    let text = get(api, "/healthz/syncloop").await.text().await.unwrap();
    assert!(text.starts_with("internal server error: pod-sync does not answer"), "{text}");
    let text = get(api, "/metrics").await.text().await.unwrap();
    assert!(text.contains("keelson_service_up{keelson_service=\"pod-sync\"} 0\n"), "{text}");
    assert!(text.contains("keelson_service_up{keelson_service=\"node-api\"} 1\n"), "{text}");
}

#[tokio::test]
async fn syncloop_check_reports_stuck_loops_of_pod_sync() {
    let world = World::start().await;
    let api = world.api().await;
    let reply = get(api, "/healthz?verbose").await;
    assert_eq!(reply.headers["x-content-type-options"], "nosniff");
    let text = reply.text().await.unwrap();
    assert_eq!(text, "[+]ping ok\n[+]log ok\n[+]syncloop ok\nhealthz check passed\n");
    for path in ["/healthz", "/healthz/ping", "/healthz/log", "/healthz/syncloop"] {
        assert_eq!(get(api, path).await.text().await.unwrap(), "ok", "{path}");
    }
    world.set_silent_ms(31_000);
    assert_eq!(get(api, "/healthz").await.status, 500);
    assert_eq!(get(api, "/healthz?exclude=syncloop").await.status, 200);
    let text = get(api, "/healthz/syncloop").await.text().await.unwrap();
    assert_eq!(text, "internal server error: the loop workers of pod-sync has made no progress for 31 s\n");

    let health = world.listen(keelson_node_api::health_router(&world.slis)).await;
    assert_eq!(
        get(health, "/healthz?verbose").await.text().await.unwrap(),
        "[+]ping ok\nhealthz check passed\n"
    );
    assert_eq!(get(health, "/healthz/ping").await.status, 200);
    for path in ["/healthz/syncloop", "/pods", "/metrics"] {
        assert_eq!(get(health, path).await.status, 404, "{path}");
    }
}

#[tokio::test]
async fn unknown_paths_are_404_and_wrong_methods_405() {
    let world = World::start().await;
    let api = world.api().await;
    for path in
        ["/", "/nothing", "/livez", "/containerLogs/default/web", "/healthz/nothing", "/stats", "/spec"]
    {
        assert_eq!(get(api, path).await.status, 404, "{path}");
    }
    for path in [
        "/pods",
        "/metrics",
        "/healthz",
        "/containerLogs/default/web/c",
        "/stats/summary",
        "/metrics/cadvisor",
        "/metrics/probes",
        "/metrics/resource",
        "/runningpods/",
        "/configz",
        "/statusz",
        "/flagz",
    ] {
        let reply = request(api, "DELETE", path).await;
        assert_eq!(reply.status, 405, "{path}");
        assert!(reply.headers.contains_key("allow"));
    }
    let reply = request(api, "PUT", "/metrics/slis").await;
    assert_eq!((reply.status.as_u16(), reply.headers["allow"].to_str().unwrap()), (405, "GET,HEAD,DELETE"));
}

#[tokio::test]
async fn plain_http_answers_401_for_every_way_into_a_container() {
    let world = World::start().await;
    world.running_pod("web");
    let api = world.api().await;
    for path in [
        "/exec/default/web/c?command=id&output=1",
        "/exec/default/web/uid-of-web/c?command=id&output=1",
        "/exec/default/none/c",
        "/attach/default/web/c?output=1",
        "/attach/default/web/uid-of-web/c?output=1",
        "/portForward/default/web?port=80",
        "/portForward/default/web/uid-of-web",
        "/run/default/web/c?cmd=id",
        "/run/default/web/uid-of-web/c?cmd=id",
    ] {
        for method in ["GET", "POST", "PUT", "DELETE", "OPTIONS"] {
            let reply = request(api, method, path).await;
            assert_eq!(reply.status, 401, "{method} {path}");
            assert_eq!(reply.text().await.unwrap(), "Unauthorized", "{method} {path}");
        }
    }
    for path in ["/exec", "/exec/", "/exec/default/web", "/portForward/default", "/run/a/b/c/d/e"] {
        assert_eq!(get(api, path).await.status, 404, "{path}");
    }
}

#[tokio::test]
async fn probe_metrics_are_separate_and_keep_the_kubelets_labels() {
    let world = World::start().await;
    world.set_metrics(
        "# HELP kubelet_running_pods Pods.\n\
        # TYPE kubelet_running_pods gauge\nkubelet_running_pods 5\n\
        # HELP prober_probe Probes.\n# TYPE prober_probe counter\nprober_probe_total{result=\"failed\"} 1\n# EOF\n",
    );
    let api = world.api().await;
    let reply = get(api, "/metrics/probes").await;
    assert_eq!(reply.headers["content-type"], "text/plain; version=0.0.4; charset=utf-8");
    assert_eq!(
        reply.text().await.unwrap(),
        "# HELP prober_probe_total Probes.\n# TYPE prober_probe_total counter\n\
        prober_probe_total{result=\"failed\"} 1\n\
        # HELP keelson_service_up Whether the service has answered for its metrics\n\
        # TYPE keelson_service_up gauge\nkeelson_service_up{keelson_service=\"pod-sync\"} 1\n"
    );
    let all = get(api, "/metrics").await.text().await.unwrap();
    assert!(all.contains("kubelet_running_pods") && !all.contains("prober_"), "{all}");
}

#[tokio::test]
async fn metrics_of_all_services_parse_as_one_text() {
    let world = World::start().await;
    world.set_metrics(
        "# HELP kubelet_running_pods Pods.\n\
        # TYPE kubelet_running_pods gauge\nkubelet_running_pods 5\n\
        # HELP keelson_x X.\n# TYPE keelson_x counter\nkeelson_x_total{a=\"b\"} 1\n# EOF\n",
    );
    let reply = get(world.api().await, "/metrics").await;
    assert_eq!(reply.headers["content-type"], "text/plain; version=0.0.4; charset=utf-8");
    let text = reply.text().await.unwrap();
    let (mut types, mut series) = (Vec::new(), Vec::new());
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            types.push(rest.split_once(' ').unwrap().0);
        } else if !line.starts_with('#') {
            let (name, value) = line.rsplit_once(' ').unwrap();
            value.parse::<f64>().unwrap();
            let family = name.split('{').next().unwrap();
            assert!(types.last().is_some_and(|t| family.starts_with(t)), "{line} is not below its TYPE");
            series.push(name);
        }
    }
    for (what, mut list) in [("TYPE", types), ("series", series.clone())] {
        let before = list.len();
        list.sort_unstable();
        list.dedup();
        assert_eq!(list.len(), before, "a {what} appears twice in {text}");
    }
    assert!(!text.contains("# EOF"));
    for service in ["pod-sync", "runtime-shim"] {
        let expected = format!("keelson_x_total{{keelson_service=\"{service}\",a=\"b\"}}");
        assert!(series.contains(&expected.as_str()), "{text}");
    }
}

#[tokio::test]
async fn trailing_slash_changes_nothing() {
    let world = World::start().await;
    let api = world.api().await;
    for path in ["/pods", "/stats/summary", "/configz", "/runningpods"] {
        let (plain, slash) = (get(api, path).await, get(api, &format!("{path}/")).await);
        assert_eq!(plain.status, slash.status, "{path}");
        assert_ne!(slash.status, 404, "{path}/");
    }
}
