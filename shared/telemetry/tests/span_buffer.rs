//! Spans of a trace are buffered without a collector, with their position in the trace.

use keelson_telemetry::{Options, TRACE_TARGET, current_traceparent, init, set_parent, traceparent_of};
use tracing::{info, info_span};

#[test]
fn a_trace_is_buffered_across_local_and_remote_parents() {
    let options =
        Options { service: "test", node: "n", format: "text", level: "error", ..Options::default() };
    let telemetry = init(&options).unwrap();
    assert_eq!(current_traceparent(), None, "no span");
    assert_eq!(traceparent_of(&info_span!(target: TRACE_TARGET, "of no trace")), None);

    let root =
        info_span!(target: TRACE_TARGET, parent: None, "pod seen", k8s.pod.uid = "u1", source = "file");
    let traceparent = traceparent_of(&root).unwrap();
    assert!(traceparent.starts_with("00-") && traceparent.ends_with("-00"), "{traceparent}");
    drop(root);

    // As another process would.
    let outer = info_span!(target: TRACE_TARGET, "sync pod");
    set_parent(&outer, "");
    set_parent(&outer, "nonsense");
    set_parent(&outer, &traceparent);
    let inside = outer.in_scope(|| {
        info!("a line of the log is no span");
        let call = info_span!(target: TRACE_TARGET, "rpc", otel.name = "a.B/C", ready = true);
        call.in_scope(current_traceparent).unwrap()
    });
    drop(outer);

    let traces = telemetry.spans().traces(&[], "u1");
    assert_eq!(traces.len(), 1);
    assert_eq!(telemetry.spans().traces(&[traces[0].id], ""), traces);
    let spans = &traces[0].spans;
    let names: Vec<&str> = spans.iter().map(|s| s.name).collect();
    assert_eq!(names, ["pod seen", "a.B/C", "sync pod"]);
    assert_eq!(spans[0].detail.as_deref(), Some("source=file"));
    assert_eq!(spans[1].detail.as_deref(), Some("ready=true"));
    assert_eq!((spans[0].parent, spans[2].parent, spans[1].parent), (0, spans[0].id, spans[2].id));
    assert_eq!(traceparent, format!("00-{:032x}-{:016x}-00", traces[0].id, spans[0].id));
    assert_eq!(inside, format!("00-{:032x}-{:016x}-00", traces[0].id, spans[1].id));
    let (call, sync) = (&spans[1], &spans[2]);
    assert!(call.start_unix_nanos >= sync.start_unix_nanos && call.duration_nanos <= sync.duration_nanos);
}
