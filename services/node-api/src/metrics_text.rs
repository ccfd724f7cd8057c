//! Metrics in text format 0.0.4, for families that are not registered.

use std::fmt::{Display, Write as _};

/// A metric family: name, type, help text.
pub(crate) type Family = (&'static str, &'static str, &'static str);

/// Escapes a label value. Names of API objects need no escaping; values from a runtime may.
pub(crate) fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// Writes a family, unless it has no samples. The timestamp of a sample is in milliseconds since 1970.
pub(crate) fn write_family<L: Display>(
    text: &mut String,
    (name, kind, help): &Family,
    samples: impl IntoIterator<Item = (L, f64, Option<i64>)>,
) {
    let mut is_first = true;
    for (labels, value, time) in samples {
        if std::mem::take(&mut is_first) {
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        }
        let _ = write!(text, "{name}{labels} {value}");
        let _ = match time {
            Some(millis) => writeln!(text, " {millis}"),
            None => writeln!(text),
        };
    }
}
