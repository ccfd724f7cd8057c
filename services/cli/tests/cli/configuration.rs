//! `keelson config show`.

use keelson_config::{Beside, Config};
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
    let beside = Beside { kubelet_configuration: kubelet.as_object(), ..Beside::default() };
    config.store_with(&dir.path().join("config.json"), beside).unwrap();
    dir
}

#[test]
fn each_value_is_shown_with_the_default_file_drop_in_or_flag_that_it_is_from() {
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
fn as_json_and_yaml_the_values_keep_their_types() {
    let dir = folder();
    let shown = keelson(dir.path(), &["config", "show", "-o", "json"]).json();
    assert_eq!(shown["items"].as_array().unwrap().len(), 4);
    let first = json!({"field": "maxPods", "value": 70, "from": "/etc/kubelet.d/20.conf:3"});
    assert_eq!(shown["items"][0], first);
    let yaml = keelson(dir.path(), &["config", "show", "-o", "yaml"]).ok();
    assert_eq!(serde_saphyr::from_str::<Value>(&yaml).unwrap(), shown);
}

#[test]
fn without_a_configuration_the_way_out_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let said = keelson(dir.path(), &["config", "show"]);
    assert_eq!(said.code, Some(1));
    assert!(said.err.contains("config.json") && said.err.contains("try: "), "{}", said.err);
    std::fs::write(dir.path().join("config.json"), "[]").unwrap();
    let said = keelson(dir.path(), &["config", "show"]);
    assert!(said.code != Some(0) && said.err.contains("this is no configuration"), "{}", said.err);
}
