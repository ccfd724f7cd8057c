//! docs/flags.md: every flag, from the table that reads them.

use std::fmt::Write as _;

use super::{FlagSpec, Meaning, flags};

const HEAD: &str = "\
# Flags

The command line of `keelson-init`, which under the name `kubelet` is that of a kubelet 1.36. Flags go before the files of
`--config-dir`, those before `--config`, and that before the defaults; [services/init](../services/init) has the rest.

This page is made from the table that reads the command line ([services/init/core/src/flags](../services/init/core/src/flags)):
`KEELSON_WRITE=1 cargo nextest run --workspace --test flags_reference` writes it, and the same test fails when it is not as the
table. Names may have `_` for `-`, values stand behind `=` or a blank, those of truths behind `=` alone.
";

/// The whole page.
pub fn reference() -> String {
    let mut page = HEAD.to_owned();
    let of = |wanted: fn(&FlagSpec) -> bool| flags().iter().filter(move |flag| wanted(flag));
    let field = |flag: &FlagSpec| match flag.meaning {
        Meaning::Field { path, .. } => format!("`{path}`"),
        _ => String::new(),
    };
    let why = |flag: &FlagSpec| flag.deprecation().unwrap_or_default();
    table(
        &mut page,
        "Flags without a field",
        "They are read by their names; no file has them.",
        "",
        of(|flag| flag.meaning == Meaning::Own),
        |_| String::new(),
    );
    table(
        &mut page,
        "Flags that are twins of fields",
        "Each sets the field of the KubeletConfiguration that stands behind it.",
        "field",
        of(|flag| matches!(flag.meaning, Meaning::Field { deprecated: false, .. })),
        field,
    );
    table(
        &mut page,
        "Twins of fields that are deprecated",
        "As above; their use is told on the standard error, and the file of `--config` is the place for them.",
        "field",
        of(|flag| matches!(flag.meaning, Meaning::Field { deprecated: true, .. })),
        field,
    );
    table(
        &mut page,
        "Other deprecated flags",
        "They do what they say, and their use is told on the standard error.",
        "why deprecated",
        of(|flag| matches!(flag.meaning, Meaning::OwnDeprecated(_))),
        why,
    );
    table(
        &mut page,
        "Flags without effect",
        "They are read, so that command lines that have them go on to work, and nothing comes of them.",
        "why",
        of(|flag| matches!(flag.meaning, Meaning::Unused(_))),
        why,
    );
    page
}

fn table<'a>(
    page: &mut String,
    title: &str,
    sentence: &str,
    last: &str,
    rows: impl Iterator<Item = &'a FlagSpec>,
    last_of: impl Fn(&FlagSpec) -> String,
) {
    let _ = write!(page, "\n## {title}\n\n{sentence}\n\n| flag | value | default | |");
    let _ = writeln!(page, "{}", if last.is_empty() { String::new() } else { format!(" {last} |") });
    let _ = writeln!(page, "|---|---|---|---|{}", if last.is_empty() { "" } else { "---|" });
    for flag in rows {
        let value = match flag.kind.placeholder() {
            "" => "`true` or `false`".to_owned(),
            placeholder => format!("`{}`", escaped(placeholder)),
        };
        let default = match flag.shown_default() {
            text if text.is_empty() => String::new(),
            text => format!("`{}`", escaped(&text)),
        };
        let _ = write!(page, "| `--{}` | {value} | {default} | {} |", flag.name, escaped(flag.help));
        if !last.is_empty() {
            let _ = write!(page, " {} |", escaped(&last_of(flag)));
        }
        page.push('\n');
    }
}

/// A cell of a table.
fn escaped(text: &str) -> String {
    text.replace('|', "\\|")
}
