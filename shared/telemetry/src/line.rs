//! The formats of a line of the log: klog's text and its JSON (node-and-api.md §14).
//!
//! Text: `I0102 15:04:05.000000    1234 worker.rs:42] "Message" key="value"`, in the time zone of the node. JSON: `ts` in
//! milliseconds since 1970, `caller`, `msg`, and `v`, which errors lack. Both have further fields by name; `error` is `err`, as the
//! kubelet calls it. JSON also has `level`, which klog leaves out, and `logger`, which klog
//! has in named loggers only.

use std::fmt::{self, Write as _};

use jiff::Timestamp;
use jiff::tz::TimeZone;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata};

use crate::verbosity::verbosity_of;

/// How lines are written.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Format {
    /// With the time zone of the times.
    Text(TimeZone),
    Json,
}

/// The target of lines whose message is not quoted in text, as those of klog without fields: the list of flags.
pub const UNSTRUCTURED_TARGET: &str = "keelson_unstructured";

/// Fields that have a meaning in JSON; others of the same name get a prefix.
const RESERVED: [&str; 7] = ["ts", "caller", "msg", "v", "err", "level", "logger"];

impl Format {
    /// Appends the line of an event, with its line feed.
    pub(crate) fn write(&self, event: &Event<'_>, at: Timestamp, pid: u32, line: &mut String) {
        let metadata = event.metadata();
        let mut fields = Fields { is_json: *self == Self::Json, ..Fields::default() };
        event.record(&mut fields);
        // Writing to a string does not fail.
        let _ = match self {
            Self::Text(zone) => text_head(line, metadata, at, zone, pid, &fields.message),
            Self::Json => json_head(line, metadata, at, &fields.message),
        };
        line.push_str(&fields.others);
        line.push_str(if *self == Self::Json { "}\n" } else { "\n" });
    }
}

fn text_head(
    line: &mut String,
    metadata: &Metadata<'_>,
    at: Timestamp,
    zone: &TimeZone,
    pid: u32,
    message: &str,
) -> fmt::Result {
    let severity = match *metadata.level() {
        Level::ERROR => 'E',
        Level::WARN => 'W',
        Level::INFO | Level::DEBUG | Level::TRACE => 'I',
    };
    let local = zone.to_datetime(at);
    let (date, time) = (local.date(), local.time());
    let file = metadata.file().and_then(|file| file.rsplit('/').next()).unwrap_or("???");
    write!(
        line,
        "{severity}{:02}{:02} {:02}:{:02}:{:02}.{:06} {pid:7} {file}:{}] ",
        date.month(),
        date.day(),
        time.hour(),
        time.minute(),
        time.second(),
        time.subsec_nanosecond() / 1000,
        metadata.line().unwrap_or(1),
    )?;
    if metadata.target() == UNSTRUCTURED_TARGET {
        line.extend(message.chars().map(|c| if is_printable(c) { c } else { ' ' }));
        return Ok(());
    }
    quote(line, message)
}

fn json_head(line: &mut String, metadata: &Metadata<'_>, at: Timestamp, message: &str) -> fmt::Result {
    let micros = at.as_microsecond();
    write!(line, "{{\"ts\":{}.{:03},\"caller\":", micros.div_euclid(1000), micros.rem_euclid(1000))?;
    // The folder and the name of the file.
    let file = metadata.file().unwrap_or("???");
    let begin = file.rmatch_indices('/').nth(1).map_or(0, |(slash, _)| slash + 1);
    quote_json(line, format_args!("{}:{}", &file[begin..], metadata.line().unwrap_or(1)))?;
    line.push_str(",\"msg\":");
    quote_json(line, message)?;
    if *metadata.level() != Level::ERROR {
        write!(line, ",\"v\":{}", verbosity_of(*metadata.level()))?;
    }
    write!(line, ",\"level\":\"{}\",\"logger\":", metadata.level())?;
    quote_json(line, metadata.target())
}

/// The message of an event, and its other fields as the end of the line.
#[derive(Debug, Default)]
struct Fields {
    is_json: bool,
    message: String,
    others: String,
}

impl Fields {
    fn key(&mut self, field: &Field) {
        let name = if field.name() == "error" { "err" } else { field.name() };
        let is_taken = RESERVED.contains(&field.name());
        let prefix = if self.is_json && is_taken { "field_" } else { "" };
        let _ = if self.is_json {
            write!(self.others, ",\"{prefix}{name}\":")
        } else {
            write!(self.others, " {name}=")
        };
    }

    fn bare(&mut self, field: &Field, value: impl fmt::Display) {
        self.key(field);
        let _ = write!(self.others, "{value}");
    }

    fn quoted(&mut self, field: &Field, value: &str) {
        if field.name() == "message" {
            value.clone_into(&mut self.message);
            return;
        }
        self.key(field);
        let _ =
            if self.is_json { quote_json(&mut self.others, value) } else { quote(&mut self.others, value) };
    }
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.quoted(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.bare(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.bare(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.bare(field, value);
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        if value.is_finite() {
            self.bare(field, value);
        } else {
            self.quoted(field, &value.to_string());
        }
    }

    fn record_error(&mut self, field: &Field, value: &(dyn std::error::Error + 'static)) {
        self.quoted(field, &value.to_string());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.quoted(field, &format!("{value:?}"));
    }
}

/// Writes a text in quotes, with the escapes of a Go string, so that a line has no line feeds and no characters that are not
/// printable: readers may split lines at U+2028, and show U+202E as another order of the text.
fn quote(line: &mut String, text: impl fmt::Display) -> fmt::Result {
    line.push('"');
    write!(Escaped { line, is_json: false }, "{text}")?;
    line.push('"');
    Ok(())
}

/// Writes a text as a JSON string.
fn quote_json(line: &mut String, text: impl fmt::Display) -> fmt::Result {
    line.push('"');
    write!(Escaped { line, is_json: true }, "{text}")?;
    line.push('"');
    Ok(())
}

struct Escaped<'a> {
    line: &'a mut String,
    is_json: bool,
}

impl fmt::Write for Escaped<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for c in text.chars() {
            match c {
                '"' => self.line.push_str("\\\""),
                '\\' => self.line.push_str("\\\\"),
                '\n' => self.line.push_str("\\n"),
                '\r' => self.line.push_str("\\r"),
                '\t' => self.line.push_str("\\t"),
                c if is_printable(c) => self.line.push(c),
                c if self.is_json => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        write!(self.line, "\\u{unit:04x}")?;
                    }
                }
                c => match u32::from(c) {
                    code @ ..=0x7f => write!(self.line, "\\x{code:02x}")?,
                    code @ ..=0xffff => write!(self.line, "\\u{code:04x}")?,
                    code => write!(self.line, "\\U{code:08x}")?,
                },
            }
        }
        Ok(())
    }
}

/// Whether a character is shown as itself: a letter, mark, number, punctuation, symbol or the ASCII space (Go's
/// `strconv.IsPrint`). Controls, formats, line separators and other spaces are not.
fn is_printable(c: char) -> bool {
    if c.is_ascii() {
        return !c.is_ascii_control();
    }
    // The standard library escapes what is not printable. It also escapes a mark at the beginning of a text, so one letter precedes.
    let mut text = [b'a'; 5];
    let length = 1 + c.encode_utf8(&mut text[1..]).len();
    std::str::from_utf8(&text[..length]).is_ok_and(|text| text.escape_debug().nth(1) == Some(c))
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use tracing::Subscriber;
    use tracing_subscriber::Layer;
    use tracing_subscriber::layer::{Context, SubscriberExt as _};

    use super::*;

    struct Lines(Format, Arc<Mutex<Vec<String>>>);

    impl<S: Subscriber> Layer<S> for Lines {
        fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
            let mut line = String::new();
            self.0.write(event, "2026-11-29T16:20:33.123456Z".parse().unwrap(), 1234, &mut line);
            self.1.lock().unwrap().push(line);
        }
    }

    fn lines(format: Format, events: impl FnOnce()) -> Vec<String> {
        let written = Arc::<Mutex<Vec<String>>>::default();
        let subscriber = tracing_subscriber::registry().with(Lines(format, Arc::clone(&written)));
        tracing::subscriber::with_default(subscriber, events);
        std::mem::take(&mut *written.lock().unwrap())
    }

    /// The line without the number of its source line.
    fn shape(line: &str) -> String {
        let (before, after) = line.split_once("line.rs:").unwrap();
        let end = after.find(|c: char| !c.is_ascii_digit()).unwrap();
        format!("{before}line.rs:N{}", &after[end..])
    }

    fn some_events() {
        let error = std::io::Error::other("no \"disk\"\nfound");
        tracing::info!(pod = "default/web", attempt = 2_u32, ready = true, ratio = 0.5, "Started a pod");
        tracing::warn!(error = &error as &dyn std::error::Error, "it has \\ and \u{1b}[31m");
        tracing::error!(%error, list = ?["a"], "failed é");
        tracing::debug!(pod = %"x", "details");
        tracing::trace!(ratio = f64::NAN, level = "x", v = 7, "step");
    }

    #[test]
    fn text_lines_have_the_header_and_quoting_of_klog() {
        let lines = lines(Format::Text(TimeZone::UTC), some_events);
        let shapes: Vec<String> = lines.iter().map(|line| shape(line)).collect();
        assert_eq!(
            shapes,
            [
                "I1129 16:20:33.123456    1234 line.rs:N] \"Started a pod\" pod=\"default/web\" attempt=2 ready=true \
                 ratio=0.5\n",
                "W1129 16:20:33.123456    1234 line.rs:N] \"it has \\\\ and \\x1b[31m\" err=\"no \\\"disk\\\"\\nfound\"\n",
                "E1129 16:20:33.123456    1234 line.rs:N] \"failed é\" err=\"no \\\"disk\\\"\\nfound\" \
                 list=\"[\\\"a\\\"]\"\n",
                "I1129 16:20:33.123456    1234 line.rs:N] \"details\" pod=\"x\"\n",
                "I1129 16:20:33.123456    1234 line.rs:N] \"step\" ratio=\"NaN\" level=\"x\" v=7\n",
            ]
        );
    }

    #[test]
    fn unstructured_text_line_is_not_quoted() {
        let lines = lines(Format::Text(TimeZone::UTC), || {
            tracing::info!(target: UNSTRUCTURED_TARGET, "FLAG: --v=\"1\"\n");
        });
        assert!(lines[0].ends_with("] FLAG: --v=\"1\" \n"), "{}", lines[0]);
    }

    #[test]
    fn text_times_are_those_of_the_time_zone() {
        let zone = TimeZone::fixed(jiff::tz::offset(-5));
        let lines = lines(Format::Text(zone), || tracing::info!("x"));
        assert!(lines[0].starts_with("I1129 11:20:33.123456 "), "{}", lines[0]);
    }

    #[test]
    fn json_lines_have_the_fields_of_klog() {
        let lines = lines(Format::Json, some_events);
        let shapes: Vec<String> = lines.iter().map(|line| shape(line)).collect();
        let head = "{\"ts\":1795969233123.456,\"caller\":\"src/line.rs:N\"";
        let logger = "\"logger\":\"keelson_telemetry::line::tests\"";
        assert_eq!(
            shapes,
            [
                format!(
                    "{head},\"msg\":\"Started a pod\",\"v\":0,\"level\":\"INFO\",{logger},\"pod\":\"default/web\",\
                     \"attempt\":2,\"ready\":true,\"ratio\":0.5}}\n"
                ),
                format!(
                    "{head},\"msg\":\"it has \\\\ and \\u001b[31m\",\"v\":0,\"level\":\"WARN\",{logger},\
                     \"err\":\"no \\\"disk\\\"\\nfound\"}}\n"
                ),
                format!(
                    "{head},\"msg\":\"failed é\",\"level\":\"ERROR\",{logger},\"err\":\"no \\\"disk\\\"\\nfound\",\
                     \"list\":\"[\\\"a\\\"]\"}}\n"
                ),
                format!("{head},\"msg\":\"details\",\"v\":4,\"level\":\"DEBUG\",{logger},\"pod\":\"x\"}}\n"),
                format!(
                    "{head},\"msg\":\"step\",\"v\":6,\"level\":\"TRACE\",{logger},\"ratio\":\"NaN\",\
                     \"field_level\":\"x\",\"field_v\":7}}\n"
                ),
            ]
        );
    }

    #[test]
    fn line_has_one_line_feed_whatever_is_logged() {
        let hostile = "a\nb\r\u{0}\u{85}\u{2028}\u{2029}\u{202e}\u{feff}\u{e0001}\u{7f}\"\\";
        for format in [Format::Text(TimeZone::UTC), Format::Json] {
            let lines =
                lines(format.clone(), || tracing::info!(value = hostile, other = ?hostile, "{hostile}"));
            let line = lines[0].strip_suffix('\n').unwrap();
            assert!(line.chars().all(|c| c == ' ' || c.is_ascii_graphic()), "{line:?}");
            let separator = if format == Format::Json { "\\u2028\\u2029\\u202e" } else { "\\u0085\\u2028" };
            assert_eq!(line.matches(separator).count(), 2, "in the message and the value: {line}");
        }
    }

    #[test]
    fn characters_that_are_not_printable_are_escaped_in_text_and_json() {
        for (c, text, json) in [
            ('\u{1b}', "\\x1b", "\\u001b"),
            ('\u{7f}', "\\x7f", "\\u007f"),
            ('\u{9f}', "\\u009f", "\\u009f"),
            ('\u{a0}', "\\u00a0", "\\u00a0"),
            ('\u{ad}', "\\u00ad", "\\u00ad"),
            ('\u{200b}', "\\u200b", "\\u200b"),
            ('\u{2028}', "\\u2028", "\\u2028"),
            ('\u{2029}', "\\u2029", "\\u2029"),
            ('\u{202e}', "\\u202e", "\\u202e"),
            ('\u{2066}', "\\u2066", "\\u2066"),
            ('\u{1d173}', "\\U0001d173", "\\ud834\\udd73"),
            ('é', "é", "é"),
            ('\u{301}', "\u{301}", "\u{301}"),
            ('本', "本", "本"),
            ('🐳', "🐳", "🐳"),
            (' ', " ", " "),
        ] {
            let (mut in_text, mut in_json) = (String::new(), String::new());
            quote(&mut in_text, c).unwrap();
            quote_json(&mut in_json, c).unwrap();
            assert_eq!((in_text, in_json), (format!("\"{text}\""), format!("\"{json}\"")), "{c:?}");
        }
        let line = lines(Format::Text(TimeZone::UTC), || {
            tracing::info!(target: UNSTRUCTURED_TARGET, "a\u{2028}b");
        });
        assert!(line[0].ends_with("] a b\n"), "{line:?}");
    }
}
