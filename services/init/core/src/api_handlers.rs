//! Which of its paths for debugging the kubelet API answers, as the KubeletConfiguration says it (node-and-api.md §8.1, §8.2).

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

/// Takes the fields into the configuration. Of those whose paths nobody answers yet `true` is told as what is not acted on.
pub(crate) fn resolve(resolver: &mut Resolver<'_>, kubelet: &mut KubeletFile) {
    let ApiHandlersFile { debugging, system_log, profiling, debug_flags } =
        std::mem::take(&mut kubelet.api_handlers);
    let idle = [&system_log, &profiling, &debug_flags].into_iter().flatten().filter(|on| on.value);
    kubelet.not_acted_on.extend(idle.map(|on| on.field.clone()));
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
        resolve(inputs).map_err(|problems| problems.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn each_switch_turns_off_its_own_and_all_are_on_by_themselves() {
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
            let told = resolved.notes.iter().any(|note| note.text.contains("not acted on"));
            assert!(!told, "{fields}: {:?}", resolved.notes);
        }
        let problems = with(json!({"enableProfilingHandler": "no"})).unwrap_err();
        assert!(problems[0].contains("enableProfilingHandler") && problems[0].contains("true or false"));
    }

    #[test]
    fn to_ask_for_what_nobody_answers_yet_is_told() {
        for field in ["enableSystemLogHandler", "enableProfilingHandler", "enableDebugFlagsHandler"] {
            let notes = with(json!({field: true})).unwrap().notes;
            let told = |text: &str| text.contains("not acted on yet") && text.contains(field);
            assert!(notes.iter().any(|note| told(&note.text)), "{field}: {notes:?}");
        }
    }
}
