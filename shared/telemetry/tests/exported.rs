//! With a collector, buffered spans have the ids under which they are exported.

use keelson_telemetry::{Options, TRACE_TARGET, init, set_parent, traceparent_of};
use tracing::info_span;

#[tokio::test]
async fn buffered_spans_have_the_ids_of_the_exported_ones() {
    // Nothing listens at this address: the exported spans are lost, their ids are not.
    let otlp = Some(("http://127.0.0.1:9", 1_000_000));
    let options =
        Options { service: "test", node: "n", format: "text", level: "error", otlp, ..Options::default() };
    let telemetry = init(&options).unwrap();
    let root = info_span!(target: TRACE_TARGET, parent: None, "pod seen", k8s.pod.uid = "u1");
    let traceparent = traceparent_of(&root).unwrap();
    assert!(traceparent.ends_with("-01"), "{traceparent}");
    drop(root);
    let sync = info_span!(target: TRACE_TARGET, "sync pod");
    set_parent(&sync, &traceparent);
    let inside = traceparent_of(&sync).unwrap();
    drop(sync);
    let traces = telemetry.spans().traces(&[], "u1");
    let [root, sync] = traces[0].spans.as_slice() else { panic!("{traces:?}") };
    assert_eq!(traceparent, format!("00-{:032x}-{:016x}-01", traces[0].id, root.id));
    assert_eq!(inside, format!("00-{:032x}-{:016x}-01", traces[0].id, sync.id));
    assert_eq!(sync.parent, root.id);
}
