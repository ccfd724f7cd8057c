//! Which debugging handlers the kubelet API serves, from the KubeletConfiguration (node-and-api.md §8.1, §8.2).

use keelson_config::ApiHandlers;

use crate::document::{Reader, Sourced};
use crate::kubelet_file::KubeletFile;
use crate::resolve::Resolver;

/// The fields; `None` where the file does not set them.
#[derive(Debug, Default)]
pub(crate) struct ApiHandlersFile {
    debugging: Option<Sourced<bool>>,
    system_log: Option<Sourced<bool>>,
    profiling: Option<Sourced<bool>>,
    debug_flags: Option<Sourced<bool>>,
}

impl ApiHandlersFile {
    pub(crate) fn read(reader: &mut Reader<'_>) -> Self {
        Self {
            debugging: reader.boolean("enableDebuggingHandlers"),
            system_log: reader.boolean("enableSystemLogHandler"),
            profiling: reader.boolean("enableProfilingHandler"),
            debug_flags: reader.boolean("enableDebugFlagsHandler"),
        }
    }
}

/// Applies the fields to the configuration. A handler that is not implemented yet is reported as unsupported if it is
/// enabled.
pub(crate) fn resolve(resolver: &mut Resolver<'_>, kubelet: &mut KubeletFile) {
    let ApiHandlersFile { debugging, system_log, profiling, debug_flags } =
        std::mem::take(&mut kubelet.api_handlers);
    let unsupported_fields =
        [&system_log, &profiling, &debug_flags].into_iter().flatten().filter(|on| on.value);
    kubelet.unsupported.extend(unsupported_fields.map(|on| on.field.clone()));
    let mut take = |name: &str, value, apply: fn(&mut ApiHandlers, bool)| {
        resolver.set(&format!("api.handlers.{name}"), value, |config, value| {
            apply(&mut config.api.handlers, value);
        });
    };
    take("debugging", debugging, |handlers, v| handlers.debugging = v);
    take("systemLog", system_log, |handlers, v| handlers.system_log = v);
    take("profiling", profiling, |handlers, v| handlers.profiling = v);
    take("debugFlags", debug_flags, |handlers, v| handlers.debug_flags = v);
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, Value, json};

    use super::*;
    use crate::document::Document;
    use crate::resolve::{Flags, Host, Inputs, Resolved, resolve};

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
        for (fields, expected) in [
            (json!({}), all),
            (json!({"enableDebuggingHandlers": true}), all),
            (json!({"enableDebuggingHandlers": false}), ApiHandlers { debugging: false, ..all }),
            (json!({"enableSystemLogHandler": false}), ApiHandlers { system_log: false, ..all }),
            (json!({"enableProfilingHandler": false}), ApiHandlers { profiling: false, ..all }),
            (json!({"enableDebugFlagsHandler": false}), ApiHandlers { debug_flags: false, ..all }),
            (json!({"enableDebugFlagsHandler": null}), all),
        ] {
            let resolved = with(fields.clone()).unwrap();
            assert_eq!(resolved.config.api.handlers, expected, "{fields}");
            let reported = resolved.notes.iter().any(|note| note.text.contains("no effect yet"));
            assert!(!reported, "{fields}: {:?}", resolved.notes);
        }
        let errors = with(json!({"enableProfilingHandler": "no"})).unwrap_err();
        assert!(errors[0].contains("enableProfilingHandler") && errors[0].contains("true or false"));
    }

    #[test]
    fn enabling_an_unimplemented_api_handler_is_reported() {
        for field in ["enableSystemLogHandler", "enableProfilingHandler", "enableDebugFlagsHandler"] {
            let notes = with(json!({field: true})).unwrap().notes;
            let reports = |text: &str| text.contains("no effect yet") && text.contains(field);
            assert!(notes.iter().any(|note| reports(&note.text)), "{field}: {notes:?}");
        }
    }
}
