//! Generates docs/flags.md from the tables of flags and fields.

use std::fmt::Write as _;

use keelson_config::{FieldEffect, FieldKind, KubeletField, Takes, kubelet_fields, takes_of_field};

use super::help::shown_value;
use super::{Effect, FlagSpec, Kind, flags};

const INTRODUCTION: &str = "\
# Flags

The command line of `keelson-init`, which under the name `kubelet` is that of a kubelet 1.36. Flags override the files of
`--config-dir`, those override `--config`, and that overrides the defaults; see [services/init](../services/init).

This page is generated from the table that parses the command line ([services/init/core/src/flags](../services/init/core/src/flags))
and from the table of fields ([shared/config/src/kubelet_fields](../shared/config/src/kubelet_fields)):
`KEELSON_WRITE=1 cargo nextest run --workspace --test flags_reference` writes it, and the same test fails if it is out of date.
Names may have `_` for `-`. A value follows `=` or a space; that of a boolean flag follows `=` only. The gates of `--feature-gates`
are in [feature-gates.md](feature-gates.md).
";

/// The whole page.
pub fn reference() -> String {
    let mut page = INTRODUCTION.to_owned();
    let of = |wanted: fn(&FlagSpec) -> bool| flags().iter().filter(move |flag| wanted(flag));
    let field = |flag: &FlagSpec| match flag.effect {
        Effect::Field { path, .. } => format!("`{path}`"),
        _ => String::new(),
    };
    let why = |flag: &FlagSpec| flag.deprecation().unwrap_or_default();
    table(
        &mut page,
        "Flags without a field",
        "They have no field in a KubeletConfiguration.",
        "",
        of(|flag| flag.effect == Effect::Other),
        |_| String::new(),
    );
    table(
        &mut page,
        "Flags for fields",
        "Each sets the field of the KubeletConfiguration in its row.",
        "field",
        of(|flag| matches!(flag.effect, Effect::Field { deprecated: false, .. })),
        field,
    );
    table(
        &mut page,
        "Deprecated flags for fields",
        "As above; their use causes a warning on the standard error. Set the field in the file of `--config` instead.",
        "field",
        of(|flag| matches!(flag.effect, Effect::Field { deprecated: true, .. })),
        field,
    );
    table(
        &mut page,
        "Other deprecated flags",
        "They have an effect, and their use causes a warning on the standard error.",
        "why deprecated",
        of(|flag| matches!(flag.effect, Effect::OtherDeprecated(_))),
        why,
    );
    table(
        &mut page,
        "Flags without effect",
        "They are accepted, so that existing command lines keep working, and have no effect.",
        "why",
        of(|flag| matches!(flag.effect, Effect::Unused(_))),
        why,
    );
    fields_without_flag(&mut page);
    page
}

/// The fields that only a file can set.
fn fields_without_flag(page: &mut String) {
    page.push_str(
        "\n## Fields without a flag\n\nOnly a file can set these fields of a KubeletConfiguration.\n\n\
         | field | value | default | | a change needs |\n|---|---|---|---|---|\n",
    );
    // `--seccomp-default` is a flag of its own, which can only turn the field on.
    let has_other_flag = |field: &KubeletField| field.path == "seccompDefault";
    let is_listed = |field: &&KubeletField| {
        field.flag.is_none() && field.kind != FieldKind::Object && !has_other_flag(field)
    };
    for field in kubelet_fields().iter().filter(is_listed) {
        let default = field.default.json().map(|value| shown_value(&value, '=')).unwrap_or_default();
        let default = if default.is_empty() { default } else { format!("`{}`", escaped(&default)) };
        let needs = match takes_of_field(field.path) {
            _ if field.effect != FieldEffect::Full => "",
            Takes::Live => "nothing",
            Takes::Services => "a restart of services",
            Takes::Agent => "a restart of the agent",
        };
        let (path, value, doc) = (field.path, shown_kind(field.kind), escaped(field.doc));
        let effect = if field.effect == FieldEffect::Full { "" } else { " Without effect yet." };
        let _ = writeln!(page, "| `{path}` | {value} | {default} | {doc}{effect} | {needs} |");
    }
}

/// The format of a field's value.
fn shown_kind(kind: FieldKind) -> String {
    match (kind, Kind::of_field(kind)) {
        (FieldKind::Choice(choices), _) => {
            let choices: Vec<String> = choices
                .iter()
                .filter(|choice| !choice.is_empty())
                .map(|choice| format!("`{choice}`"))
                .collect();
            choices.join(", ")
        }
        (FieldKind::Factor, _) => "`number`".to_owned(),
        (FieldKind::Numbers, _) => "`ints`".to_owned(),
        (_, Some(Kind::Bool)) => "`true` or `false`".to_owned(),
        (_, Some(kind)) => format!("`{}`", kind.placeholder()),
        (_, None) => "a list of objects".to_owned(),
    }
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

/// Escapes a table cell.
fn escaped(text: &str) -> String {
    text.replace('|', "\\|")
}
