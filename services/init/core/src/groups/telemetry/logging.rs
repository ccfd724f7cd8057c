//! Log output, from the flags and both files.

use keelson_config::VModule;
use keelson_kube_model::Quantity;
use serde_json::Value;

use crate::document::Sourced;
use crate::durations::signed_nanos;
use crate::inputs::given;
use crate::outcome::Outcome;
use crate::reader::Reader;
use crate::settings::Files;

const LEVELS: &[&str] = &["off", "error", "warn", "info", "debug", "trace"];

/// The fields; `None` where the files do not set them.
#[derive(Debug, Default)]
pub(super) struct Logging {
    kubelet_format: Option<Sourced<String>>,
    verbosity: Option<Sourced<u32>>,
    vmodule: Option<Sourced<Vec<VModule>>>,
    flush_ms: Option<Sourced<u64>>,
    text: StreamOptions,
    json: StreamOptions,
    keelson_format: Option<Sourced<String>>,
    level: Option<Sourced<String>>,
}

/// The options of one format.
#[derive(Debug, Default)]
struct StreamOptions {
    split_stream: Option<Sourced<bool>>,
    info_buffer_bytes: Option<Sourced<u64>>,
}

impl StreamOptions {
    fn read(kubelet: &mut Reader<'_>, format: &str) -> Self {
        let path = format!("logging.options.{format}");
        if !kubelet.object("logging.options") || !kubelet.object(&path) {
            return Self::default();
        }
        Self {
            split_stream: kubelet.boolean(&format!("{path}.splitStream")),
            info_buffer_bytes: buffer_bytes(kubelet, &format!("{path}.infoBufferSize")),
        }
    }
}

/// A buffer size; [`super::checks`] reports one that is not a quantity.
fn buffer_bytes(kubelet: &mut Reader<'_>, path: &str) -> Option<Sourced<u64>> {
    let bytes = match kubelet.get(path)? {
        Value::String(text) => Quantity::parse(text).ok()?.value(),
        other => other.as_i64()?,
    };
    Some(kubelet.sourced(path, u64::try_from(bytes).unwrap_or(0)))
}

/// The milliseconds of `logging.flushFrequency`, at least one; `None` for zero, which means the default, and for a value that
/// [`super::checks`] reports.
fn flush_ms(kubelet: &mut Reader<'_>) -> Option<Sourced<u64>> {
    const FIELD: &str = "logging.flushFrequency";
    let nanos = match kubelet.get(FIELD)? {
        Value::String(text) => signed_nanos(text)?,
        other => i128::from(other.as_i64()?),
    };
    let millis = u64::try_from(nanos).ok().filter(|nanos| *nanos > 0)?.div_ceil(1_000_000);
    Some(kubelet.sourced(FIELD, millis))
}

/// The entries of `logging.vmodule`; [`super::checks`] reports those of another shape.
fn vmodule(kubelet: &mut Reader<'_>) -> Option<Sourced<Vec<VModule>>> {
    const FIELD: &str = "logging.vmodule";
    let list = kubelet.get(FIELD)?.as_array()?;
    let entry = |entry: &Value| {
        let file_pattern = entry.get("filePattern")?.as_str()?.to_owned();
        let verbosity = entry.get("verbosity").map_or(Some(0), Value::as_i64)?;
        Some(VModule { file_pattern, verbosity: i32::try_from(verbosity).ok()? })
    };
    let entries = list.iter().filter_map(entry).collect();
    Some(kubelet.sourced(FIELD, entries))
}

impl Logging {
    pub(super) fn read(files: &mut Files<'_>) -> Self {
        let mut logging = Self::default();
        let (kubelet, keelson) = (&mut files.kubelet, &mut files.keelson);
        if kubelet.object("logging") {
            logging.kubelet_format = kubelet.choice_field("logging.format");
            logging.verbosity = kubelet.u32_field("logging.verbosity");
            logging.vmodule = vmodule(kubelet);
            logging.flush_ms = flush_ms(kubelet);
            logging.text = StreamOptions::read(kubelet, "text");
            logging.json = StreamOptions::read(kubelet, "json");
        }
        if keelson.object("logging") {
            logging.keelson_format = keelson.choice("logging.format", &["text", "json"]);
            logging.level = keelson.string("logging.level");
        }
        logging
    }

    /// Applies the settings: a flag overrides the KubeletConfiguration, which overrides the KeelsonConfiguration.
    pub(super) fn resolve(self, out: &mut Outcome<'_>) {
        // The checks of the fields have refused a vmodule next to the format json in the KubeletConfiguration.
        let is_checked = self.kubelet_format.as_ref().is_some_and(|format| format.value == "json");
        let flag = given("--log-format", out.flags.log_format.as_ref());
        let format = flag.or(self.kubelet_format).or(self.keelson_format);
        if let Some(format) = format.as_ref().filter(|f| !["text", "json"].contains(&f.value.as_str())) {
            out.refuse(format, "this must be one of: text, json");
        }
        let is_json = format.as_ref().is_some_and(|format| format.value == "json");
        if let Some(vmodule) =
            self.vmodule.as_ref().filter(|list| is_json && !is_checked && !list.value.is_empty())
        {
            out.refuse(vmodule, "this applies to text only; remove it, or set the format of the log to text");
        }
        out.set("logging.format", format, |c, v| c.logging.format = v);
        out.set("logging.vmodule", self.vmodule, |c, v| c.logging.vmodule = v);
        let options = if is_json { self.json } else { self.text };
        let is_split = options.split_stream.as_ref().is_some_and(|split| split.value);
        if let Some(size) = options.info_buffer_bytes.as_ref().filter(|size| size.value > 0 && !is_split) {
            let text =
                format!("{} has no effect without splitStream: only split lines are buffered", size.field);
            out.note_without_effect(text);
        }
        out.set("logging.output.splitStream", options.split_stream, |c, v| c.logging.output.split_stream = v);
        let buffer = options.info_buffer_bytes;
        out.set("logging.output.infoBufferBytes", buffer, |c, v| c.logging.output.info_buffer_bytes = v);
        out.set("logging.output.flushMs", self.flush_ms, |c, v| c.logging.output.flush_ms = v);
        let verbosity = self.verbosity.filter(|v| v.value > 0).map(|v| v.map(level_of));
        let level = given("--log-level", out.flags.log_level.as_ref()).or(verbosity).or(self.level);
        if let Some(level) = level.as_ref().filter(|level| !is_filter(&level.value)) {
            out.refuse(
                level,
                format!(
                    "this must be one of {}, or a list such as info,keelson_pod_sync=debug",
                    LEVELS.join(", ")
                ),
            );
        }
        out.set("logging.level", level, |c, v| c.logging.level = v);
    }
}

fn level_of(verbosity: u32) -> String {
    let verbosity = i32::try_from(verbosity).unwrap_or(i32::MAX);
    keelson_config::Logging::level_of_verbosity(verbosity).to_owned()
}

/// Whether this is a level, or a list of `level` and `target=level`.
fn is_filter(text: &str) -> bool {
    !text.is_empty()
        && text.split(',').all(|part| {
            let (target, level) = part.split_once('=').map_or((None, part), |(t, l)| (Some(t), l));
            target != Some("") && LEVELS.contains(&level.to_ascii_lowercase().as_str())
        })
}
