//! `keelson config show`.

use keelson_config::{Config, ConfigExtras};
use serde_json::{Value, json};

use crate::keelson;

/// A run folder with a resolved configuration.
fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut config = Config { node_name: "edge".into(), ..Config::default() };
    for (path, origin) in [
        ("nodeName", "--hostname-override"),
        ("kubeletConfiguration.maxPods", "/etc/kubelet.d/20.conf:3"),
        ("kubeletConfiguration.port", "/etc/kubelet.yaml:4"),
        ("kubeletConfiguration.v", "--v"),
    ] {
        config.provenance.insert(path.into(), origin.into());
    }
    let kubelet = json!({"maxPods": 70, "port": 1234, "syncFrequency": "1m0s", "v": 2});
    let beside = ConfigExtras { kubelet_configuration: kubelet.as_object(), ..ConfigExtras::default() };
    keelson_service_kit::store_config(&dir.path().join("config.json"), &config, beside).unwrap();
    dir
}

#[test]
fn config_show_names_the_origin_of_each_value() {
    let dir = folder();
    assert_eq!(
        keelson(dir.path(), &["config", "show"]).ok(),
        "FIELD           VALUE   FROM\n\
         maxPods         70      /etc/kubelet.d/20.conf:3\n\
         port            1234    /etc/kubelet.yaml:4\n\
         syncFrequency   1m0s    default\n\
         v               2       --v\n"
    );
    let resolved = keelson(dir.path(), &["config", "show", "--resolved"]).ok();
    let line = |field: &str| {
        let words = resolved.lines().find(|line| line.split(' ').next() == Some(field)).unwrap();
        words.split_whitespace().collect::<Vec<_>>()
    };
    assert_eq!(line("nodeName"), ["nodeName", "edge", "--hostname-override"]);
    assert_eq!(line("api.healthzPort"), ["api.healthzPort", "10248", "default"]);
    assert!(!resolved.contains("provenance") && !resolved.contains("kubeletConfiguration"), "{resolved}");
}

#[test]
fn config_show_as_json_and_yaml_keeps_the_types() {
    let dir = folder();
    let shown = keelson(dir.path(), &["config", "show", "-o", "json"]).json();
    assert_eq!(shown["items"].as_array().unwrap().len(), 4);
    let first = json!({"field": "maxPods", "value": 70, "from": "/etc/kubelet.d/20.conf:3"});
    assert_eq!(shown["items"][0], first);
    let yaml = keelson(dir.path(), &["config", "show", "-o", "yaml"]).ok();
    assert_eq!(serde_saphyr::from_str::<Value>(&yaml).unwrap(), shown);
}

#[test]
fn config_show_without_a_configuration_prints_a_hint() {
    let dir = tempfile::tempdir().unwrap();
    let result = keelson(dir.path(), &["config", "show"]);
    assert_eq!(result.code, Some(1));
    assert!(result.err.contains("config.json") && result.err.contains("try: "), "{}", result.err);
    std::fs::write(dir.path().join("config.json"), "[]").unwrap();
    let result = keelson(dir.path(), &["config", "show"]);
    assert!(result.code != Some(0) && result.err.contains("not a configuration"), "{}", result.err);
}
