//! Which debugging handlers the kubelet API serves (node-and-api.md §8.1, §8.2).

use serde_json::Value;

use crate::document::Sourced;
use crate::outcome::Outcome;
use crate::reader::Reader;

/// The fields; `None` where the file does not set them.
#[derive(Debug)]
pub(super) struct Handlers {
    debugging: Option<Sourced<bool>>,
    system_log: Option<Sourced<bool>>,
    system_log_query: Option<Sourced<bool>>,
    profiling: Option<Sourced<bool>>,
    debug_flags: Option<Sourced<bool>>,
}

impl Handlers {
    pub(super) fn read(reader: &mut Reader<'_>) -> Self {
        Self {
            debugging: reader.boolean("enableDebuggingHandlers"),
            system_log: reader.boolean("enableSystemLogHandler"),
            system_log_query: reader.boolean("enableSystemLogQuery"),
            profiling: reader.boolean("enableProfilingHandler"),
            debug_flags: reader.boolean("enableDebugFlagsHandler"),
        }
    }

    /// Applies the fields to the configuration. A handler that is not implemented yet is reported as without effect if it is
    /// enabled.
    pub(super) fn resolve(self, out: &mut Outcome<'_>) {
        let Self { debugging, system_log, system_log_query, profiling, debug_flags } = self;
        let enabled = profiling.iter().filter(|on| on.value);
        out.without_effect.extend(enabled.map(|on| on.field.clone()));
        out.set_field(debugging, |c, v| c.api.handlers.debugging = v);
        out.set_field(system_log, |c, v| c.api.handlers.system_log = v);
        out.set_field(system_log_query, |c, v| c.api.handlers.system_log_query = v);
        out.set_field(profiling, |c, v| c.api.handlers.profiling = v);
        out.set_field(debug_flags, |c, v| c.api.handlers.debug_flags = v);
    }
}

/// Queries of logs are a part of the handler for logs.
pub(super) fn check_log_query(reader: &mut Reader<'_>) {
    if reader.peek("enableSystemLogHandler") == Some(&Value::Bool(false)) {
        let remedy = "this requires enableSystemLogHandler: true";
        reader.refuse_if("enableSystemLogQuery", |value| *value == Value::Bool(true), remedy);
    }
}

#[cfg(test)]
mod tests {
    use keelson_config::ApiHandlers;
    use serde_json::{Map, Value, json};

    use crate::document::Document;
    use crate::inputs::{Flags, Host, Inputs};
    use crate::outcome::WITHOUT_EFFECT;
    use crate::resolve::{Resolved, resolve};

    fn with(fields: Value) -> Result<Resolved, Vec<String>> {
        let mut root = Map::new();
        root.insert("apiVersion".into(), "kubelet.config.k8s.io/v1beta1".into());
        root.insert("kind".into(), "KubeletConfiguration".into());
        root.extend(fields.as_object().unwrap().clone());
        let document = Document { file: "k.yaml".into(), folder: "/".into(), root, ..Document::default() };
        let host = Host { hostname: "n1".into(), exe_dir: "/usr/libexec".into(), ..Host::default() };
        let flags = Flags::default();
        let inputs =
            Inputs { flags: &flags, kubelet: Some(&document), drop_ins: &[], keelson: None, host: &host };
        resolve(inputs).map_err(|errors| errors.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn each_api_handler_switch_disables_its_handler_and_all_default_to_on() {
        let all = ApiHandlers::default();
        assert!(all.debugging && all.system_log && all.profiling && all.debug_flags);
        assert!(!all.system_log_query, "queries are off by default");
        for (fields, expected) in [
            (json!({}), all),
            (json!({"enableDebuggingHandlers": true}), all),
            (json!({"enableDebuggingHandlers": false}), ApiHandlers { debugging: false, ..all }),
            (json!({"enableSystemLogHandler": false}), ApiHandlers { system_log: false, ..all }),
            (json!({"enableSystemLogHandler": true, "enableDebugFlagsHandler": true}), all),
            (json!({"enableSystemLogQuery": true}), ApiHandlers { system_log_query: true, ..all }),
            (json!({"enableSystemLogQuery": false}), all),
            (json!({"enableProfilingHandler": false}), ApiHandlers { profiling: false, ..all }),
            (json!({"enableDebugFlagsHandler": false}), ApiHandlers { debug_flags: false, ..all }),
            (json!({"enableDebugFlagsHandler": null}), all),
        ] {
            let resolved = with(fields.clone()).unwrap();
            assert_eq!(resolved.config.api.handlers, expected, "{fields}");
            let reported = resolved.notes.iter().any(|note| note.event == Some(WITHOUT_EFFECT));
            assert!(!reported, "{fields}: {:?}", resolved.notes);
        }
        let errors = with(json!({"enableProfilingHandler": "no"})).unwrap_err();
        assert!(errors[0].contains("enableProfilingHandler") && errors[0].contains("true or false"));
    }

    #[test]
    fn enabling_an_unimplemented_api_handler_is_reported() {
        let field = "enableProfilingHandler";
        let notes = with(json!({field: true})).unwrap().notes;
        let is_reported =
            notes.iter().any(|note| note.event == Some(WITHOUT_EFFECT) && note.text.contains(field));
        assert!(is_reported, "{notes:?}");
    }
}
