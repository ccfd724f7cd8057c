//! During an upgrade a service of this release starts with the configuration that the init of an earlier one has written
//! (architecture §9): every field that was added since then has a default.

#![allow(clippy::unwrap_used)]

use std::path::Path;

use keelson_config::Config;

#[test]
fn a_configuration_of_an_earlier_release_is_read() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/config-of-release-0.1.0.json");
    let config = Config::load(&file).unwrap();
    assert_eq!(config.node_name, "edge-1");
    assert_eq!(config.volumes, keelson_config::Volumes::default());
}
