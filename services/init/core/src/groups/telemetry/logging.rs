//! Log output, from the flags and both files.

use crate::document::Sourced;
use crate::inputs::given;
use crate::outcome::Outcome;
use crate::settings::Files;

const LEVELS: &[&str] = &["off", "error", "warn", "info", "debug", "trace"];

/// The fields; `None` where the files do not set them.
#[derive(Debug)]
pub(super) struct Logging {
    kubelet_format: Option<Sourced<String>>,
    verbosity: Option<Sourced<u32>>,
    keelson_format: Option<Sourced<String>>,
    level: Option<Sourced<String>>,
}

impl Logging {
    pub(super) fn read(files: &mut Files<'_>) -> Self {
        let mut logging = Self { kubelet_format: None, verbosity: None, keelson_format: None, level: None };
        let (kubelet, keelson) = (&mut files.kubelet, &mut files.keelson);
        if kubelet.object("logging") {
            logging.kubelet_format = kubelet.choice_field("logging.format");
            logging.verbosity = kubelet.u32_field("logging.verbosity");
        }
        if keelson.object("logging") {
            logging.keelson_format = keelson.choice("logging.format", &["text", "json"]);
            logging.level = keelson.string("logging.level");
        }
        logging
    }

    /// Applies the settings: a flag overrides the KubeletConfiguration, which overrides the KeelsonConfiguration.
    pub(super) fn resolve(self, out: &mut Outcome<'_>) {
        let flag = given("--log-format", out.flags.log_format.as_ref());
        let format = flag.or(self.kubelet_format).or(self.keelson_format);
        if let Some(format) = format.as_ref().filter(|f| !["text", "json"].contains(&f.value.as_str())) {
            out.refuse(format, "this must be one of: text, json");
        }
        out.set("logging.format", format, |c, v| c.logging.format = v);
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

/// The log level for a kubelet's verbosity: details from 4 on, every step from 6 on.
fn level_of(verbosity: u32) -> String {
    match verbosity {
        0..=3 => "info",
        4..=5 => "debug",
        6.. => "trace",
    }
    .to_owned()
}

/// Whether this is a level, or a list of `level` and `target=level`.
fn is_filter(text: &str) -> bool {
    !text.is_empty()
        && text.split(',').all(|part| {
            let (target, level) = part.split_once('=').map_or((None, part), |(t, l)| (Some(t), l));
            target != Some("") && LEVELS.contains(&level.to_ascii_lowercase().as_str())
        })
}
