//! Which lines are logged: the filter of levels, and the verbosity of single files (`vmodule`).

use std::str::FromStr as _;

use tracing::level_filters::LevelFilter;
use tracing::subscriber::Interest;
use tracing::{Level, Metadata};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::{Context, Filter};

use crate::TelemetryError;

/// The prefix of the targets of all Keelson crates.
const OWN_TARGETS: &str = "keelson";
/// What dependencies log unless the filter names them: at debug, HTTP/2 alone writes several lines for each request.
const DEPENDENCY_LEVEL: LevelFilter = LevelFilter::WARN;

/// The verbosity of the source files whose name matches a pattern (node-and-api.md §2.6).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileVerbosity {
    /// Matches the name of the file without folder and suffix, such as `worker`; with a `/`, the whole path without suffix. `*` and
    /// `?` do not match a `/`.
    pub pattern: String,
    /// As klog's: details from 4 on, every step from 6 on.
    pub verbosity: i32,
}

/// The verbosity at which klog would log lines of this level.
pub(crate) fn verbosity_of(level: Level) -> i32 {
    match level {
        Level::ERROR | Level::WARN | Level::INFO => 0,
        Level::DEBUG => 4,
        Level::TRACE => 6,
    }
}

/// Decides which lines are logged.
#[derive(Debug, Clone)]
pub(crate) struct LineFilter {
    targets: Targets,
    files: Vec<FileVerbosity>,
}

impl LineFilter {
    pub(crate) fn new(levels: &str, files: &[FileVerbosity]) -> Result<Self, TelemetryError> {
        Ok(Self { targets: parse_filter(levels)?, files: files.to_vec() })
    }

    /// As with klog, the verbosity of a file adds lines and never removes any. It applies to Keelson's own files.
    fn is_enabled(&self, metadata: &Metadata<'_>) -> bool {
        self.targets.would_enable(metadata.target(), metadata.level())
            || metadata.target().starts_with(OWN_TARGETS)
                && metadata.file().is_some_and(|file| self.is_verbose(file, verbosity_of(*metadata.level())))
    }

    /// Whether the first pattern that matches the file has at least this verbosity.
    fn is_verbose(&self, file: &str, verbosity: i32) -> bool {
        let path = file.rsplit_once('.').map_or(file, |(path, _)| path);
        let name = path.rsplit('/').next().unwrap_or(path);
        let matches = |one: &&FileVerbosity| {
            let text = if one.pattern.contains('/') { path } else { name };
            matches_glob(&one.pattern, text)
        };
        self.files.iter().find(matches).is_some_and(|one| verbosity <= one.verbosity)
    }
}

impl<S> Filter<S> for LineFilter {
    fn enabled(&self, metadata: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        self.is_enabled(metadata)
    }

    fn callsite_enabled(&self, metadata: &'static Metadata<'static>) -> Interest {
        if self.is_enabled(metadata) { Interest::always() } else { Interest::never() }
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        let of_targets = Filter::<S>::max_level_hint(&self.targets);
        let of_files = self.files.iter().map(|one| match one.verbosity {
            ..4 => LevelFilter::INFO,
            4..6 => LevelFilter::DEBUG,
            6.. => LevelFilter::TRACE,
        });
        of_targets.map(|level| of_files.fold(level, Ord::max))
    }
}

fn parse_filter(text: &str) -> Result<Targets, TelemetryError> {
    let targets = Targets::from_str(text).map_err(|_| TelemetryError::Filter { text: text.to_owned() })?;
    let Some(level) = targets.default_level().filter(|level| *level > DEPENDENCY_LEVEL) else {
        return Ok(targets);
    };
    let names_all_own = targets.iter().any(|(target, _)| target == OWN_TARGETS);
    let targets = targets.with_default(DEPENDENCY_LEVEL);
    Ok(if names_all_own { targets } else { targets.with_target(OWN_TARGETS, level) })
}

/// Whether a pattern with `*`, `?` and `[…]` matches all of `text`. A malformed pattern matches nothing.
fn matches_glob(pattern: &str, text: &str) -> bool {
    let mut rest = pattern.chars();
    let Some(first) = rest.next() else { return text.is_empty() };
    match first {
        '*' => {
            let ends = text.char_indices().map(|(index, _)| index).chain([text.len()]);
            let segment = text.find('/').unwrap_or(text.len());
            ends.take_while(|end| *end <= segment).any(|end| matches_glob(rest.as_str(), &text[end..]))
        }
        '[' => {
            let (Some(c), Some((class, rest))) = (text.chars().next(), rest.as_str().split_once(']')) else {
                return false;
            };
            c != '/' && is_in_class(c, class) && matches_glob(rest, &text[c.len_utf8()..])
        }
        first => {
            let Some(c) = text.chars().next() else { return false };
            let is_match = if first == '?' { c != '/' } else { c == first };
            is_match && matches_glob(rest.as_str(), &text[c.len_utf8()..])
        }
    }
}

/// Whether a class such as `a-z_` or `^0-9` contains the character.
fn is_in_class(c: char, class: &str) -> bool {
    let (negated, class) = class.strip_prefix('^').map_or((false, class), |class| (true, class));
    let chars: Vec<char> = class.chars().collect();
    let mut index = 0;
    let mut found = false;
    while index < chars.len() {
        let low = chars[index];
        let is_range = chars.get(index + 1) == Some(&'-') && index + 2 < chars.len();
        let high = if is_range { chars[index + 2] } else { low };
        found |= (low..=high).contains(&c);
        index += if is_range { 3 } else { 1 };
    }
    found != negated
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_level_applies_to_own_targets_and_dependencies_stay_at_warn() {
        for (text, target, level, enabled) in [
            ("debug", "keelson_pod_sync::turn::worker", Level::DEBUG, true),
            ("debug", "keelson_pod_sync", Level::TRACE, false),
            ("trace", "h2::codec::framed_write", Level::INFO, false),
            ("trace", "h2::codec::framed_write", Level::WARN, true),
            ("error", "h2", Level::WARN, false),
            ("error", "keelson_cli", Level::WARN, false),
            ("debug,h2=trace", "h2::codec", Level::TRACE, true),
            ("debug,h2=trace", "hyper", Level::DEBUG, false),
            ("info,keelson_pod_sync=debug", "keelson_pod_sync", Level::DEBUG, true),
            ("info,keelson_pod_sync=debug", "keelson_init", Level::DEBUG, false),
            ("info,keelson_pod_sync=debug", "keelson_init", Level::INFO, true),
            ("trace,keelson=info", "keelson_init", Level::DEBUG, false),
            ("h2=debug", "keelson_init", Level::ERROR, false),
        ] {
            let filter = parse_filter(text).unwrap();
            assert_eq!(filter.would_enable(target, &level), enabled, "{text}: {target} at {level}");
        }
    }

    #[test]
    fn an_invalid_log_filter_is_refused_with_its_text() {
        let error = parse_filter("info,keelson=loudly").unwrap_err();
        assert!(error.to_string().contains("keelson=loudly"));
    }

    #[test]
    fn vmodule_pattern_matches_the_name_of_a_file_or_with_a_slash_its_path() {
        let path = "services/pod-sync/src/turn/worker.rs";
        for (pattern, verbosity, level, enabled) in [
            ("worker", 4, Level::DEBUG, true),
            ("worker", 4, Level::TRACE, false),
            ("worker", 6, Level::TRACE, true),
            ("worker", 3, Level::DEBUG, false),
            ("work*", 4, Level::DEBUG, true),
            ("*", 9, Level::TRACE, true),
            ("w?rker", 4, Level::DEBUG, true),
            ("[a-w]ork[^0-9]r", 4, Level::DEBUG, true),
            ("[x-z]orker", 4, Level::DEBUG, false),
            ("worker.rs", 4, Level::DEBUG, false),
            ("work", 4, Level::DEBUG, false),
            ("Worker", 4, Level::DEBUG, false),
            ("[worker", 4, Level::DEBUG, false),
            ("services/*/src/turn/*", 4, Level::DEBUG, true),
            ("services/*", 4, Level::DEBUG, false),
            ("turn/worker", 4, Level::DEBUG, false),
        ] {
            let files = [FileVerbosity { pattern: pattern.into(), verbosity }];
            let filter = LineFilter::new("info", &files).unwrap();
            assert_eq!(
                filter.is_verbose(path, verbosity_of(level)),
                enabled,
                "{pattern}={verbosity} at {level}"
            );
        }
    }

    #[test]
    fn first_matching_vmodule_pattern_decides() {
        let one = |pattern: &str, verbosity| FileVerbosity { pattern: pattern.into(), verbosity };
        let filter = LineFilter::new("info", &[one("work*", 0), one("*", 6)]).unwrap();
        assert!(!filter.is_verbose("src/worker.rs", 4));
        assert!(filter.is_verbose("src/other.rs", 6));
    }
}
