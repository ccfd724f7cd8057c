//! Checks that docs/flags.md matches the table of flags.
//!
//! `KEELSON_WRITE=1 cargo nextest run --workspace --test flags_reference` writes it; without the variable the test compares.
#![allow(clippy::unwrap_used, reason = "tests and their helpers")]

use std::path::Path;

use keelson_init_core::flags::{flags, reference};

#[test]
fn docs_flags_md_matches_the_table_of_flags() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../docs/flags.md");
    let page = reference();
    for flag in flags() {
        let row = format!("| `--{}` | ", flag.name);
        assert_eq!(page.lines().filter(|line| line.starts_with(&row)).count(), 1, "{}", flag.name);
    }
    if std::env::var_os("KEELSON_WRITE").is_some() {
        std::fs::write(&path, page).unwrap();
        return;
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        found == page,
        "docs/flags.md does not match the table of flags: KEELSON_WRITE=1 cargo nextest run --workspace --test flags_reference writes it"
    );
}
