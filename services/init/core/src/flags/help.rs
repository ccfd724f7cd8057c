//! The help text, in the format of a kubelet's (node-and-api.md §1.1).

use std::fmt::Write as _;

use serde_json::Value;

use super::{Effect, FlagSpec, Kind, flags};
use crate::defaults::default_at;

/// The help under the name `program`.
pub fn help(program: &str) -> String {
    let mut text = format!(
        "{program} is the node agent: it runs the pods that the API server, etcd, files or URLs assign to this node,\n\
         and starts and supervises the services. Flags override the files of --config-dir, those override\n\
         --config, and that overrides the defaults.\n\nUsage:\n  {program} [flags]\n\nFlags:\n"
    );
    let left: Vec<String> = flags().iter().map(left).collect();
    let width = left.iter().map(String::len).max().unwrap_or_default();
    for (flag, left) in flags().iter().zip(left) {
        let default = flag.shown_default();
        let quoted = matches!(flag.kind, Kind::Text | Kind::Path);
        let default = match default.as_str() {
            "" | "false" | "[]" => String::new(),
            default if quoted => format!(" (default {default:?})"),
            default => format!(" (default {default})"),
        };
        let deprecated = flag.deprecation().map_or_else(String::new, |why| format!(" (DEPRECATED: {why})"));
        let _ = writeln!(text, "{left:width$}   {}{default}{deprecated}", flag.help);
    }
    text
}

fn left(flag: &FlagSpec) -> String {
    let shorthand = match flag.name {
        "help" => "-h, ",
        "v" => "-v, ",
        _ => "    ",
    };
    let placeholder = match flag.kind {
        Kind::Version => "[=true|raw]".to_owned(),
        kind if kind.placeholder().is_empty() => String::new(),
        kind => format!(" {}", kind.placeholder()),
    };
    format!("  {shorthand}--{}{placeholder}", flag.name)
}

impl FlagSpec {
    /// The default as text.
    pub fn shown_default(&self) -> String {
        let Effect::Field { path, .. } = self.effect else { return self.default.to_owned() };
        let between = if self.kind == Kind::Thresholds { '<' } else { '=' };
        default_at(path).map(|value| shown_value(&value, between)).unwrap_or_default()
    }
}

/// A value as text; `between` separates the keys of a map from their values.
pub(super) fn shown_value(value: &Value, between: char) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Array(list) => {
            let texts: Vec<&str> = list.iter().filter_map(Value::as_str).collect();
            texts.join(",")
        }
        Value::Object(map) => {
            let pair = |(key, value): (&String, &Value)| {
                let text = value.as_str().map_or_else(|| value.to_string(), ToOwned::to_owned);
                format!("{key}{between}{text}")
            };
            map.iter().map(pair).collect::<Vec<_>>().join(",")
        }
        other => other.to_string(),
    }
}
