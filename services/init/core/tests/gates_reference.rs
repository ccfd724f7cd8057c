//! Checks that docs/feature-gates.md matches the tables of gates.
//!
//! `KEELSON_WRITE=1 cargo nextest run --workspace --test gates_reference` writes it; without the variable the test compares.
#![allow(clippy::unwrap_used, reason = "tests and their helpers")]

use std::path::Path;

use keelson_init_core::feature_gates_page;

#[test]
fn docs_feature_gates_md_matches_the_tables_of_gates() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../docs/feature-gates.md");
    let page = feature_gates_page();
    if std::env::var_os("KEELSON_WRITE").is_some() {
        std::fs::write(&path, page).unwrap();
        return;
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        found == page,
        "docs/feature-gates.md does not match the tables of gates: KEELSON_WRITE=1 cargo nextest run --workspace --test gates_reference writes it"
    );
}
