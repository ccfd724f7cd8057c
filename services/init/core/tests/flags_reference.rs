//! docs/flags.md is as the table of flags.
//!
//! `KEELSON_WRITE=1 cargo nextest run --workspace --test flags_reference` writes it; without it the test compares.
#![allow(clippy::unwrap_used, reason = "tests and their helpers")]

use std::path::Path;

use keelson_init_core::flags::{flags, reference};

#[test]
fn the_page_of_flags_is_as_the_table() {
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
        "docs/flags.md is not as the table of flags: KEELSON_WRITE=1 cargo nextest run --workspace --test flags_reference writes it"
    );
}
