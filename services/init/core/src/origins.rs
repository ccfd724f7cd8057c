//! The origin of each value of the KubeletConfiguration in force, for `keelson config show`.

use std::collections::BTreeMap;

use keelson_config::{Config, KUBELET_CONFIGURATION, leaves};
use keelson_kube_model::parse_go_duration;
use serde_json::{Map, Value};

use crate::document::Document;

/// The one value that the agent's own flags and files set too.
const LOG_FORMAT: &str = "logging.format";

/// The origin of each value of `whole` that `document` sets, by its dotted path below `kubeletConfiguration`; a missing value
/// is a default. `config` is the configuration that `whole` was made with.
pub(crate) fn origins(
    document: Option<&Document>,
    whole: &Map<String, Value>,
    config: &Config,
) -> BTreeMap<String, String> {
    let mut origins = BTreeMap::new();
    for (names, value) in leaves(whole) {
        let path = names.join(".");
        let origin = if path == LOG_FORMAT {
            config.provenance.get(LOG_FORMAT).cloned()
        } else {
            document
                .filter(|document| is_set_by(document, &names, value))
                .map(|document| document.origin(&path))
        };
        if let Some(origin) = origin.filter(|origin| !origin.is_empty()) {
            origins.insert(format!("{KUBELET_CONFIGURATION}.{path}"), origin);
        }
    }
    origins
}

/// Whether the value in force comes from the document, and is not the default of an empty value.
fn is_set_by(document: &Document, names: &[&str], in_force: &Value) -> bool {
    let (first, rest) = names.split_first().map_or(("", names), |(first, rest)| (*first, rest));
    let there = rest.iter().try_fold(document.root.get(first), |value, name| Some(value?.get(name)));
    match there.flatten() {
        None | Some(Value::Null) => false,
        Some(value) => value == in_force || !is_empty_value(value),
    }
}

/// Whether this is what a program writes for an unset field.
fn is_empty_value(value: &Value) -> bool {
    match value {
        Value::String(text) => {
            text.is_empty() || parse_go_duration(text).is_some_and(|duration| duration.is_zero())
        }
        other => other.as_i64() == Some(0),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::inputs::{Flags, Inputs};
    use crate::resolve::resolve;
    use crate::testing::{host, kubelet};
    use crate::{Document, flags};

    fn flags(arguments: &[&str]) -> Flags {
        let arguments: Vec<String> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        Flags { fields: flags::parse(&arguments, "/srv").unwrap().fields, ..Flags::default() }
    }

    #[test]
    fn provenance_names_the_file_drop_in_or_flag_of_each_value() {
        let file = kubelet(json!({
            "maxPods": 50, "syncFrequency": "0s", "eventBurst": 9, "healthzPort": 0,
            "kubeReserved": {"cpu": "1", "memory": "1Gi"}, "clusterDNS": ["10.0.0.10"],
        }));
        let drop_in =
            Document { file: "20.conf".into(), ..kubelet(json!({"eventBurst": 10, "podPidsLimit": 9})) };
        let drop_in = Document { lines: [("eventBurst".to_owned(), 4)].into(), ..drop_in };
        let flags = Flags {
            log_format: Some("json".into()),
            ..flags(&["--max-pods=7", "--eviction-hard=memory.available<1Gi"])
        };
        let (flags, host) = (&flags, &host());
        let resolved =
            resolve(Inputs { flags, kubelet: Some(&file), drop_ins: &[drop_in], keelson: None, host })
                .unwrap();
        let of = |path: &str| {
            resolved.config.provenance.get(&format!("kubeletConfiguration.{path}")).map(String::as_str)
        };
        assert_eq!(of("maxPods"), Some("--max-pods"));
        assert_eq!(of("evictionHard.memory.available"), Some("--eviction-hard"));
        assert_eq!(of("eventBurst"), Some("20.conf:4"));
        assert_eq!(of("kubeReserved.cpu"), Some("kubelet.yaml"));
        assert!(of("clusterDNS").unwrap().starts_with("kubelet.yaml:"));
        assert!(of("healthzPort").unwrap().starts_with("kubelet.yaml:"), "0 turns it off");
        assert_eq!(of("logging.format"), Some("--log-format"));
        assert_eq!(
            (of("syncFrequency"), of("port"), of("authentication.webhook.cacheTTL")),
            (None, None, None)
        );
    }

    #[test]
    fn without_flags_and_files_the_provenance_is_empty() {
        let (flags, host) = (&Flags::default(), &host());
        let resolved = resolve(Inputs { flags, kubelet: None, drop_ins: &[], keelson: None, host }).unwrap();
        assert!(resolved.config.provenance.is_empty(), "{:?}", resolved.config.provenance);
    }
}
