use keelson_config::{LogOutput, VModule};
use serde_json::{Value, json};

use crate::inputs::Flags;
use crate::outcome::WITHOUT_EFFECT;
use crate::resolve::Resolved;
use crate::testing::{assert_refused, errors_of, host, keelson, kubelet, run};

const ALL: u32 = 1_000_000;

fn with(kubelet_tracing: Option<Value>, keelson_tracing: Option<Value>) -> Resolved {
    let kubelet_tracing = kubelet_tracing.map(|tracing| kubelet(json!({"tracing": tracing})));
    let keelson_tracing = keelson_tracing.map(|tracing| keelson(json!({"tracing": tracing})));
    run(&Flags::default(), kubelet_tracing.as_ref(), keelson_tracing.as_ref(), &host()).unwrap()
}

fn sent(resolved: &Resolved) -> Option<(&str, u32)> {
    let tracing = resolved.config.tracing.as_ref()?;
    Some((tracing.endpoint.as_str(), tracing.sampling_rate_per_million))
}

#[test]
fn every_trace_endpoint_format_is_converted() {
    for (written, endpoint) in [
        (json!({}), "http://localhost:4317"),
        (json!({"endpoint": ""}), "http://localhost:4317"),
        (json!({"endpoint": "10.0.0.1:4317"}), "http://10.0.0.1:4317"),
        (json!({"endpoint": "[fd00::1]:4317"}), "http://[fd00::1]:4317"),
        (json!({"endpoint": "collector"}), "http://collector:443"),
        (json!({"endpoint": "dns:collector:4317"}), "http://collector:4317"),
        (json!({"endpoint": "dns:///collector:4317"}), "http://collector:4317"),
        (json!({"endpoint": "dns://10.0.0.53/collector:4317"}), "http://collector:4317"),
        (json!({"endpoint": "unix:///run/otel.sock"}), "unix:///run/otel.sock"),
        (json!({"endpoint": "unix:/run/otel.sock"}), "unix:///run/otel.sock"),
    ] {
        let resolved = with(Some(written.clone()), None);
        assert_eq!(sent(&resolved), Some((endpoint, 0)), "{written}");
        assert!(resolved.notes.iter().all(|note| note.event != Some(WITHOUT_EFFECT)), "{:?}", resolved.notes);
        assert!(resolved.config.provenance["tracing.endpoint"].starts_with("kubelet.yaml"), "{written}");
    }
    assert_eq!(sent(&with(None, None)), None);
    let abstract_socket = with(Some(json!({"endpoint": "unix-abstract:otel"})), None);
    assert_eq!(sent(&abstract_socket), None);
    assert!(
        abstract_socket.notes.iter().any(|note| note.text.contains("no traces are sent")),
        "{:?}",
        abstract_socket.notes
    );
}

#[test]
fn kubelet_tracing_overrides_keelson_tracing_field_by_field() {
    let (kubelet_tracing, keelson_tracing) =
        (json!({"endpoint": "a:1", "samplingRatePerMillion": 7}), json!({"endpoint": "http://b:2"}));
    assert_eq!(sent(&with(Some(kubelet_tracing), Some(keelson_tracing.clone()))), Some(("http://a:1", 7)));
    assert_eq!(sent(&with(None, Some(keelson_tracing.clone()))), Some(("http://b:2", ALL)));
    assert_eq!(
        sent(&with(Some(json!({"samplingRatePerMillion": 7})), Some(keelson_tracing))),
        Some(("http://b:2", 7))
    );
    let rate_alone = with(Some(json!({"samplingRatePerMillion": 1_000_000})), None);
    assert_eq!(sent(&rate_alone), Some(("http://localhost:4317", ALL)));
}

#[test]
fn invalid_trace_endpoints_are_refused() {
    for (endpoint, part) in [
        ("http://localhost:4317", "unsupported scheme: http.  Options are none, dns, unix, or unix-abstract"),
        ("unix:otel.sock", "an absolute path"),
        ("dns:///", "must name a host"),
    ] {
        let errors = errors_of(json!({"tracing": {"endpoint": endpoint}}));
        assert!(errors.len() == 1 && errors[0].contains(part), "{endpoint}: {errors:?}");
    }
}

#[test]
fn invalid_log_and_trace_fields_are_refused_with_a_remedy() {
    assert_refused(&[
        (json!({"logging": {"flushFrequency": -1}}), "logging.flushFrequency = -1", "above 0"),
        (json!({"logging": {"flushFrequency": "soon"}}), "logging.flushFrequency = \"soon\"", "above 0"),
        (json!({"logging": {"vmodule": {}}}), "logging.vmodule = {}", "a list"),
        (
            json!({"logging": {"vmodule": [{"filePattern": "a", "verbosity": 1}, {"filePattern": "b=c"}]}}),
            "logging.vmodule[1]",
            "without '=' and ','",
        ),
        (json!({"logging": {"vmodule": [{"filePattern": "a", "verbosity": -1}]}}), "vmodule[0]", "from 0 to"),
        (
            json!({"logging": {"format": "json", "vmodule": [{"filePattern": "a", "verbosity": 1}]}}),
            "logging.vmodule",
            "text only",
        ),
        (
            json!({"logging": {"options": {"text": {"infoBufferSize": "much"}}}}),
            "logging.options.text.infoBufferSize = \"much\"",
            "a quantity such as 1Mi",
        ),
        (json!({"showHiddenMetricsForVersion": "1.34"}), "\"1.34\"", "1.35"),
        (
            json!({"tracing": {"samplingRatePerMillion": -1}}),
            "samplingRatePerMillion = -1",
            "from 0 to 1000000",
        ),
    ]);
}

fn logging(fields: Value) -> Resolved {
    let document = kubelet(json!({"featureGates": {"LoggingAlphaOptions": true}, "logging": fields}));
    run(&Flags::default(), Some(&document), None, &host()).unwrap()
}

#[test]
fn log_options_are_those_of_the_format_in_use() {
    let options = json!({
        "text": {"splitStream": true, "infoBufferSize": "1Ki"},
        "json": {"splitStream": false, "infoBufferSize": 77},
    });
    for (format, split_stream, info_buffer_bytes) in [("text", true, 1024), ("json", false, 77)] {
        let resolved = logging(json!({"format": format, "options": options}));
        let output = LogOutput { split_stream, info_buffer_bytes, ..LogOutput::default() };
        assert_eq!(resolved.config.logging.output, output, "{format}");
    }
    assert_eq!(logging(json!({})).config.logging.output, LogOutput::default());
}

#[test]
fn flush_frequency_is_a_duration_or_nanoseconds_and_zero_is_the_default() {
    for (written, expected) in [
        (json!("10s"), 10_000),
        (json!(1_500_000_000), 1500),
        (json!(1), 1),
        (json!(0), 5000),
        (json!("0s"), 5000),
    ] {
        let resolved = logging(json!({"flushFrequency": written}));
        assert_eq!(resolved.config.logging.output.flush_ms, expected, "{written}");
        assert!(resolved.notes.iter().all(|note| note.event != Some(WITHOUT_EFFECT)), "{:?}", resolved.notes);
    }
}

#[test]
fn info_buffer_size_without_split_stream_is_reported_as_without_effect() {
    let reported = |text: Value| {
        let notes = logging(json!({"options": {"text": text}})).notes;
        notes.iter().any(|note| note.event == Some(WITHOUT_EFFECT) && note.text.contains("infoBufferSize"))
    };
    assert!(reported(json!({"infoBufferSize": "1Mi"})));
    assert!(!reported(json!({"infoBufferSize": "1Mi", "splitStream": true})));
    assert!(!reported(json!({"infoBufferSize": "0"})));
}

#[test]
fn vmodule_is_taken_over_and_refused_with_json_from_any_source() {
    let list = json!([{"filePattern": "worker", "verbosity": 4}, {"filePattern": "a/*", "verbosity": 6}]);
    let one = |pattern: &str, verbosity| VModule { file_pattern: pattern.into(), verbosity };
    let resolved = logging(json!({"vmodule": list}));
    assert_eq!(resolved.config.logging.vmodule, [one("worker", 4), one("a/*", 6)]);
    assert!(resolved.notes.iter().all(|note| note.event != Some(WITHOUT_EFFECT)), "{:?}", resolved.notes);
    let document = kubelet(json!({"logging": {"vmodule": list}}));
    let own = keelson(json!({"logging": {"format": "json"}}));
    let errors = run(&Flags::default(), Some(&document), Some(&own), &host()).unwrap_err();
    assert!(errors.iter().any(|error| error.to_string().contains("text only")), "{errors:?}");
}
