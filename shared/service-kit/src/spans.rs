//! Converts buffered spans to their wire types.

use keelson_proto::keelson::admin::v1 as pb;
use keelson_telemetry::{BufferedSpan, BufferedTrace};

/// Parses trace ids.
///
/// # Errors
/// The first text that is not a trace id.
pub(crate) fn trace_ids(texts: &[String]) -> Result<Vec<u128>, String> {
    let id = |text: &String| {
        let digits = text.len() == 32 && text.bytes().all(|b| b.is_ascii_hexdigit());
        u128::from_str_radix(text, 16).ok().filter(|_| digits).ok_or_else(|| text.clone())
    };
    texts.iter().map(id).collect()
}

/// A trace.
pub(crate) fn trace(kept: BufferedTrace) -> pb::Trace {
    pb::Trace {
        trace_id: format!("{:032x}", kept.id),
        pod_uid: kept.pod_uid,
        spans: kept.spans.into_iter().map(span).collect(),
        left_out: kept.left_out,
    }
}

fn span(kept: BufferedSpan) -> pb::Span {
    pb::Span {
        span_id: format!("{:016x}", kept.id),
        parent_span_id: if kept.parent == 0 { String::new() } else { format!("{:016x}", kept.parent) },
        name: kept.name.to_owned(),
        detail: kept.detail.map(String::from).unwrap_or_default(),
        start_unix_nanos: kept.start_unix_nanos,
        duration_nanos: kept.duration_nanos,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_32_hexadecimal_digits() {
        assert_eq!(trace_ids(&["0000000000000000000000000000000f".into()]), Ok(vec![15]));
        for text in ["f", "+000000000000000000000000000000f", "g0000000000000000000000000000000"] {
            assert_eq!(trace_ids(&[text.to_owned()]), Err(text.to_owned()));
        }
    }

    #[test]
    fn the_first_span_of_a_trace_has_no_parent() {
        let of = |parent| BufferedSpan {
            id: 1,
            parent,
            name: "s",
            detail: None,
            start_unix_nanos: 5,
            duration_nanos: 6,
        };
        let kept = BufferedTrace { id: 255, pod_uid: "u".into(), spans: vec![of(0), of(16)], left_out: 3 };
        let converted = trace(kept);
        assert_eq!(converted.trace_id, "000000000000000000000000000000ff");
        let parents: Vec<&str> = converted.spans.iter().map(|s| s.parent_span_id.as_str()).collect();
        assert_eq!(parents, ["", "0000000000000010"]);
    }
}
