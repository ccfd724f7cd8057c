//! The error messages of a failed start. Each line begins with the words of a kubelet, which tools look for (node-and-api.md
//! §1.1).

use crate::document::{ConfigError, Document};
use crate::gates;

/// The configuration files.
#[derive(Debug, Clone, Copy, Default)]
pub struct ConfigFiles<'a> {
    /// `--config`.
    pub kubelet: Option<&'a Document>,
    /// `--config-dir`.
    pub folder: Option<&'a str>,
    /// The files in it.
    pub drop_ins: &'a [Document],
    /// `--keelson-config`.
    pub keelson: Option<&'a Document>,
}

/// The message for a `--config` file that cannot be read.
pub fn load_error(path: &str, error: &str) -> String {
    format!("failed to load kubelet config file, path: {path}, error: {error}")
}

/// The message for a `--config-dir` that cannot be read; `error` names the folder.
pub fn merge_error(error: &str) -> String {
    format!("failed to merge kubelet configs: {error}")
}

/// The line that reports an error of the configuration.
pub fn startup_error(error: &ConfigError, files: ConfigFiles<'_>) -> String {
    let names_file = |file: &&Document| {
        error
            .origin
            .strip_prefix(file.file.as_str())
            .is_some_and(|rest| rest.is_empty() || rest.starts_with([':', ';']))
    };
    if files.keelson.filter(names_file).is_some() {
        return error.to_string();
    }
    if error.field.starts_with("--") {
        return format!("failed to validate kubelet flags: {error}");
    }
    let is_gate =
        error.field.strip_prefix(gates::FIELD).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
    if is_gate && !error.undecodable {
        return format!("failed to set feature gates from initial flags-based config: {error}");
    }
    let (file, drop_in) = (files.kubelet.filter(names_file), files.drop_ins.iter().find(names_file));
    match (file, drop_in) {
        (_, Some(drop_in)) if error.undecodable => {
            let folder = files.folder.unwrap_or_default();
            merge_error(&format!(
                "failed to walk through kubelet dropin directory {folder:?}: failed to load kubelet dropin file, path: {}, {error}",
                drop_in.file
            ))
        }
        (Some(file), _) if error.undecodable => load_error(&file.file, &error.to_string()),
        (_, Some(file)) | (Some(file), _) => {
            format!("failed to validate kubelet configuration, error: {error}, path: {}", file.file)
        }
        (None, None) => format!("failed to validate kubelet configuration, error: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::flags;
    use crate::inputs::{Flags, Host, Inputs};
    use crate::resolve::resolve;
    use crate::testing::{host, keelson, kubelet};

    fn lines(
        main: Value,
        drop_in: Value,
        keelson_fields: Value,
        arguments: &[&str],
        host: &Host,
    ) -> Vec<String> {
        let arguments: Vec<String> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        let others = [("cloud-provider", "aws".to_owned())].into();
        let flags =
            Flags { fields: flags::parse(&arguments, "/srv").unwrap().fields, others, ..Flags::default() };
        let (main, keelson_fields) = (kubelet(main), keelson(keelson_fields));
        let drop_ins = [Document { file: "/k.d/10.conf".to_owned(), ..kubelet(drop_in) }];
        let inputs = Inputs {
            flags: &flags,
            kubelet: Some(&main),
            drop_ins: &drop_ins,
            keelson: Some(&keelson_fields),
            host,
        };
        let files = ConfigFiles {
            kubelet: Some(&main),
            folder: Some("/k.d"),
            drop_ins: &drop_ins,
            keelson: Some(&keelson_fields),
        };
        resolve(inputs).unwrap_err().iter().map(|error| startup_error(error, files)).collect()
    }

    #[test]
    fn each_startup_error_begins_like_a_kubelets() {
        let found = lines(
            json!({"maxPods": "many", "podsPerCore": -1, "registerWithTaints": [{"key": "a", "value": true}], "featureGates": {"NoSuchGate": true}, "failSwapOn": true}),
            json!({"eventBurst": true, "eventRecordQPS": -1}),
            json!({"uidBase": 0}),
            &["--image-gc-high-threshold=101"],
            &Host { swap: vec!["/swap".to_owned()], ..host() },
        );
        for expected in [
            "failed to load kubelet config file, path: kubelet.yaml, error: invalid configuration: maxPods = \"many\"",
            "failed to validate kubelet configuration, error: invalid configuration: podsPerCore = -1 (kubelet.yaml:",
            "failed to load kubelet config file, path: kubelet.yaml, error: invalid configuration: registerWithTaints[0].value = true",
            "failed to set feature gates from initial flags-based config: invalid configuration: featureGates.NoSuchGate",
            "failed to merge kubelet configs: failed to walk through kubelet dropin directory \"/k.d\": failed to load kubelet \
             dropin file, path: /k.d/10.conf, invalid configuration: eventBurst = true (/k.d/10.conf:",
            "failed to validate kubelet configuration, error: invalid configuration: eventRecordQPS = -1 (/k.d/10.conf:",
            "invalid configuration: uidBase = 0 (keelson.yaml:",
            "failed to validate kubelet configuration, error: invalid configuration: imageGCHighThresholdPercent = 101 (--image-gc",
            "failed to validate kubelet flags: invalid configuration: --cloud-provider = \"aws\"",
        ] {
            let beginning = found.iter().filter(|line| line.starts_with(expected)).count();
            assert_eq!(beginning, 1, "{expected}: {found:#?}");
        }
        let swap =
            "running with swap on is not supported, please disable swap or set --fail-swap-on flag to false";
        assert!(found.iter().any(|line| line.contains(swap)), "{found:#?}");
        assert_eq!(found.len(), 10, "{found:#?}");
        assert!(found.iter().any(|line| line.ends_with(", path: kubelet.yaml")), "{found:#?}");
    }
}
