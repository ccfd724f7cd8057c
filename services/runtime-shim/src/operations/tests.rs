use std::process::Command;
use std::time::Duration;

use futures_util::{FutureExt as _, stream};
use http_body_util::{BodyExt as _, Full, StreamBody};
use k8s_cri::v1 as cri;
use k8s_cri::v1::runtime_service_client::RuntimeServiceClient;
use keelson_testkit::fakes::cut_off;
use tonic::Code;

use super::*;
use crate::cri_objects::SandboxEntry;
use crate::proxy::{Proxy, RuntimeService};
use crate::tests::fake_runtime::{FakeRuntime, refusal};

const VERSION: &str = "/runtime.v1.RuntimeService/Version";
const EVENTS: &str = "/runtime.v1.RuntimeService/GetContainerEvents";

/// This series exists from the start.
const NO_PULL_HAS_FAILED: &str = "kubelet_runtime_operations_errors_total{operation_type=\"pull_image\"} 0";

/// The metrics of `operations` without buckets and sums, and without [`NO_PULL_HAS_FAILED`].
fn shown(operations: &Operations) -> Vec<String> {
    let metrics = Metrics::new();
    operations.register(&metrics);
    let seconds = |line: &&str| line.contains("_bucket{") || line.contains("_sum{");
    let text = metrics.text();
    let mut lines: Vec<String> = text
        .lines()
        .filter(|line| line.starts_with("kubelet_") && !seconds(line) && *line != NO_PULL_HAS_FAILED)
        .map(|line| line.replacen("kubelet_", "", 1).replace("runtime_operations", "ops"))
        .collect();
    lines.sort_unstable();
    lines
}

fn of(fake: &FakeRuntime) -> Vec<String> {
    shown(&fake.cri.channel().operations)
}

fn through_the_proxy(fake: &FakeRuntime) -> RuntimeServiceClient<Proxy<RuntimeService>> {
    RuntimeServiceClient::new(Proxy::new(fake.cri.channel(), fake.observer.clone(), fake.files.clone()))
}

fn sandbox(runtime_handler: &str) -> cri::RunPodSandboxRequest {
    cri::RunPodSandboxRequest { runtime_handler: runtime_handler.into(), ..Default::default() }
}

#[test]
fn failed_pulls_metric_exists_from_the_start() {
    let metrics = Metrics::new();
    Operations::new().register(&metrics);
    assert!(metrics.text().lines().any(|line| line == NO_PULL_HAS_FAILED), "{}", metrics.text());
}

#[tokio::test]
async fn own_runtime_calls_and_their_errors_are_counted() {
    let fake = FakeRuntime::start().await;
    assert_eq!(of(&fake), [""; 0]);
    fake.sandbox("s", "u", true);
    let listed = |id: &str| SandboxEntry { id: id.into(), ..SandboxEntry::default() };
    assert!(fake.cri.sandbox_status(&listed("s")).await.unwrap().is_some());
    assert!(fake.cri.sandbox_status(&listed("other")).await.unwrap().is_none());
    let images = cri::ListImagesRequest { filter: None };
    fake.cri.images().list_images(fake.cri.quick(images)).await.unwrap();
    assert_eq!(
        of(&fake),
        [
            r#"ops_duration_seconds_count{operation_type="list_images"} 1"#,
            r#"ops_duration_seconds_count{operation_type="podsandbox_status"} 2"#,
            r#"ops_errors_total{operation_type="podsandbox_status"} 1"#,
            r#"ops_total{operation_type="list_images"} 1"#,
            r#"ops_total{operation_type="podsandbox_status"} 2"#,
        ]
    );
}

#[tokio::test]
async fn passed_through_calls_are_counted_and_sandboxes_by_runtime_handler() {
    let fake = FakeRuntime::start().await;
    let mut neighbour = through_the_proxy(&fake);
    neighbour.version(cri::VersionRequest::default()).await.unwrap();
    neighbour.exec_sync(cri::ExecSyncRequest::default()).await.unwrap_err();
    neighbour.start_container(cri::StartContainerRequest::default()).await.unwrap();
    neighbour.run_pod_sandbox(sandbox("")).await.unwrap();
    fake.runtime.run_pod_sandbox.answer_once(Err(refusal(Code::Unknown)));
    neighbour.run_pod_sandbox(sandbox("runsc")).await.unwrap_err();
    fake.runtime.run_pod_sandbox.fail(cut_off());
    neighbour.run_pod_sandbox(sandbox("runsc")).await.unwrap_err();
    assert_eq!(
        of(&fake),
        [
            r#"ops_duration_seconds_count{operation_type="exec_sync"} 1"#,
            r#"ops_duration_seconds_count{operation_type="run_podsandbox"} 3"#,
            r#"ops_duration_seconds_count{operation_type="start_container"} 1"#,
            r#"ops_duration_seconds_count{operation_type="version"} 1"#,
            r#"ops_errors_total{operation_type="exec_sync"} 1"#,
            r#"ops_errors_total{operation_type="run_podsandbox"} 2"#,
            r#"ops_total{operation_type="exec_sync"} 1"#,
            r#"ops_total{operation_type="run_podsandbox"} 3"#,
            r#"ops_total{operation_type="start_container"} 1"#,
            r#"ops_total{operation_type="version"} 1"#,
            r#"run_podsandbox_duration_seconds_count{runtime_handler=""} 1"#,
            r#"run_podsandbox_duration_seconds_count{runtime_handler="runsc"} 2"#,
            r#"run_podsandbox_errors_total{runtime_handler="runsc"} 2"#,
        ]
    );
}

#[tokio::test]
async fn calls_to_an_unavailable_runtime_and_image_endpoint_are_counted() {
    let fake = FakeRuntime::start().await;
    let dead = fake.dir.path().join("dead.sock");
    let apart = fake.cri.clone().with_image_endpoint(dead.to_str()).unwrap();
    let request = apart.quick(cri::ListImagesRequest { filter: None });
    apart.images().list_images(request).await.unwrap_err();
    assert_eq!(
        of(&fake),
        [
            r#"ops_duration_seconds_count{operation_type="list_images"} 1"#,
            r#"ops_errors_total{operation_type="list_images"} 1"#,
            r#"ops_total{operation_type="list_images"} 1"#,
        ]
    );
}

#[tokio::test]
async fn cancelled_call_is_an_error_and_a_closed_event_stream_is_not() {
    let fake = FakeRuntime::start().await;
    let _held = [fake.runtime.get_container_events.hold(), fake.runtime.version.hold()];
    let mut runtime = fake.cri.runtime();
    let events = runtime.get_container_events(fake.cri.unbounded(cri::GetEventsRequest::default()));
    let mut events = Box::pin(events);
    assert!((&mut events).now_or_never().is_none());
    let begun = [r#"ops_total{operation_type="get_container_events"} 1"#];
    assert_eq!(of(&fake), begun);
    drop(events);
    assert_eq!(of(&fake), begun);
    assert!(runtime.version(cri::VersionRequest::default()).now_or_never().is_none());
    assert_eq!(
        of(&fake),
        [
            r#"ops_duration_seconds_count{operation_type="version"} 1"#,
            r#"ops_errors_total{operation_type="version"} 1"#,
            begun[0],
            r#"ops_total{operation_type="version"} 1"#,
        ]
    );
}

#[tokio::test]
async fn calls_to_other_services_of_the_runtime_are_not_counted() {
    use keelson_proto::containerd::services::content::v1 as content;
    let fake = FakeRuntime::start().await;
    fake.set_blobs(&[("a", 1)]);
    let mut client = content::content_client::ContentClient::new(fake.cri.image_channel());
    client.list_statuses(content::ListStatusesRequest::default()).await.unwrap();
    assert_eq!(of(&fake), [""; 0]);
}

/// A response with this HTTP status and body, and with a gRPC status in its headers.
fn response_with(status: u16, grpc_status: Option<&str>, body: Body) -> Response<Body> {
    let mut response = Response::builder().status(status);
    if let Some(value) = grpc_status {
        response = response.header("grpc-status", value);
    }
    response.body(body).unwrap()
}

/// A body with a message and these trailers.
fn ending_with(trailers: Option<&[(&'static str, &str)]>) -> Body {
    let trailers = trailers
        .map(|pairs| Ok(pairs.iter().map(|(k, v)| (k.parse().unwrap(), v.parse().unwrap())).collect()));
    Body::new(Full::new(Bytes::from("message")).with_trailers(std::future::ready(trailers)))
}

fn broken() -> Body {
    Body::new(StreamBody::new(stream::iter([Err::<Frame<Bytes>, _>(Status::unavailable("it has died"))])))
}

/// Number of errors counted for a call with this response.
async fn errors_of(path: &str, response: Response<Body>) -> u64 {
    let operations = Arc::new(Operations::new());
    let call = Call::begin(&operations, path, None).unwrap();
    let kind = OperationLabels { operation_type: call.operation.name() };
    // As the proxying server consumes it; the counters show how it ended.
    let _ = count_response(response, Some(call)).into_body().into_body().collect().await;
    assert_eq!(operations.calls.get_or_create(&kind).get(), 1);
    operations.errors.get_or_create(&kind).get()
}

#[tokio::test]
async fn grpc_status_is_read_from_headers_and_trailers() {
    let with = |status| ending_with(Some(&[("grpc-status", status)]));
    for path in [VERSION, EVENTS] {
        for (what, response, errors) in [
            ("well, in the trailers", response_with(200, None, with("0")), 0),
            ("an error in the trailers", response_with(200, None, with("5")), 1),
            ("trailers without status", response_with(200, None, ending_with(Some(&[("x", "0")]))), 1),
            ("no trailers", response_with(200, None, ending_with(None)), 1),
            ("a stream that breaks", response_with(200, None, broken()), 1),
            ("well, in the headers", response_with(200, Some("0"), Body::empty()), 0),
            ("an error in the headers", response_with(200, Some("13"), Body::empty()), 1),
            ("no gRPC", response_with(503, None, with("0")), 1),
        ] {
            assert_eq!(errors_of(path, response).await, errors, "{path}: {what}");
        }
    }
    assert_eq!(errors_of(VERSION, response_with(200, None, Body::empty())).await, 1);
}

#[tokio::test]
async fn call_duration_lasts_until_the_end_of_the_response() {
    let operations = Arc::new(Operations::new());
    let handler = Some(HandlerLabels { runtime_handler: "runsc".into() });
    let path = "/runtime.v1.RuntimeService/RunPodSandbox";
    let mut call = Call::begin(&operations, path, handler).unwrap();
    call.begun -= Duration::from_secs(7);
    let well = ending_with(Some(&[("grpc-status", "0")]));
    let response = count_response(response_with(200, None, well), Some(call));
    assert_eq!(shown(&operations), [""; 0]);
    response.into_body().collect().await.unwrap();
    let metrics = Metrics::new();
    operations.register(&metrics);
    let text = metrics.text();
    for line in [
        r#"runtime_operations_duration_seconds_bucket{le="3.0517578125",operation_type="run_podsandbox"} 0"#,
        r#"runtime_operations_duration_seconds_bucket{le="19.073486328125",operation_type="run_podsandbox"} 1"#,
        r#"run_podsandbox_duration_seconds_bucket{le="5.0",runtime_handler="runsc"} 0"#,
        r#"run_podsandbox_duration_seconds_bucket{le="10.0",runtime_handler="runsc"} 1"#,
    ] {
        assert!(text.lines().any(|l| l.strip_prefix("kubelet_") == Some(line)), "{line}\n{text}");
    }
}

#[test]
fn operation_buckets_are_fourteen_from_5_ms_by_factor_2_5() {
    let bounds: Vec<f64> = call_seconds().collect();
    assert_eq!(bounds[..5], [0.005, 0.0125, 0.03125, 0.078125, 0.1953125]);
    assert_eq!((bounds.len(), bounds[13].floor()), (14, 745.0));
}

/// A method of a newer protocol version must get a name; otherwise it would not be counted.
#[test]
fn every_method_of_the_cri_protocol_has_an_operation_type() {
    let metadata = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version=1", "--offline", "--filter-platform=x86_64-unknown-linux-gnu"])
        .args(["--manifest-path", concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")])
        .output()
        .unwrap();
    assert!(metadata.status.success(), "{}", String::from_utf8_lossy(&metadata.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&metadata.stdout).unwrap();
    let package = metadata["packages"].as_array().unwrap().iter().find(|p| p["name"] == "k8s-cri").unwrap();
    let manifest = std::path::Path::new(package["manifest_path"].as_str().unwrap());
    let proto = std::fs::read_to_string(manifest.with_file_name("proto").join("v1.proto")).unwrap();
    let (mut service, mut methods) = ("", 0);
    for line in proto.lines().map(str::trim) {
        if let Some(rest) = line.strip_prefix("service ") {
            service = rest.trim_end_matches('{').trim();
        } else if let Some((method, _)) = line.strip_prefix("rpc ").and_then(|rest| rest.split_once('(')) {
            let path = format!("/runtime.v1.{service}/{}", method.trim());
            assert!(Operation::from_path(&path).is_some(), "{path}");
            methods += 1;
        }
    }
    assert!(methods >= 34, "{methods}");
}
