//! Generates docs/feature-gates.md from the tables of gates and fields.

use std::fmt::Write as _;

use keelson_config::kubelet_fields;

use super::effects::{Effect, OneWay, effect_of};
use super::{Stage, table};
use crate::outcome::Level;

const INTRODUCTION: &str = "\
# Feature gates

The feature gates of a kubelet 1.36 and what they do here: `featureGates` in a KubeletConfiguration, and `--feature-gates`.
Names, stages, defaults and locks are those of Kubernetes 1.36. An unknown gate, a locked one with another value, and one without
the gates that it depends on are errors; see [docs/parity/node.md](parity/node.md), section N3.

This page is generated from the tables in [services/init/core/src/gates](../services/init/core/src/gates):
`KEELSON_WRITE=1 cargo nextest run --workspace --test gates_reference` writes it, and the same test fails if it is out of date.
";

const ACTS: &str = "The agent acts on both values of these gates.";
const FIELDS: &str = "These gates decide which fields of a KubeletConfiguration may be set. If the gate is off, such a field is an error.";
const ONE_WAY: &str = "\
The agent has one way only, so one value of these gates has no effect. A gate that is set to that value is reported at startup: as a
warning (event `settings_without_effect`), or as an error where the node would be less safe than the gate promises, or would run pods
differently. `AllAlpha` and `AllBeta` ask for no single feature, so what they switch is never an error. A field that needs a
gate which cannot be on is an error with them, too.";
const ELSEWHERE: &str = "No part of a node decides on these gates.";
const LOCKED: &str = "Kubernetes 1.36 locks these gates to their default, so they cannot be changed.";
const OTHER: &str = "\
The names of the gates that only other components of Kubernetes use are accepted, since configuration files are shared. They have no
effect on a node.";

/// A gate that can be set, with its effect.
struct Row {
    name: &'static str,
    stage: Stage,
    on: bool,
    effect: Effect,
}

/// The whole page.
pub fn reference() -> String {
    let rows = rows();
    let mut page = INTRODUCTION.to_owned();
    section(&mut page, "Gates that the agent acts on", ACTS, "when it is on", &rows, |effect| match effect {
        Effect::Acts(what) => Some(what.to_owned()),
        _ => None,
    });
    fields(&mut page, &rows);
    one_way(&mut page, &rows);
    section(&mut page, "Gates of other components", ELSEWHERE, "who decides", &rows, |effect| match effect {
        Effect::Elsewhere(who) => Some(who.to_owned()),
        _ => None,
    });
    let _ = writeln!(page, "\n{OTHER}");
    locked(&mut page);
    page
}

/// All gates that can be set, sorted by name.
fn rows() -> Vec<Row> {
    let free = table::NODE.iter().filter(|group| !group.locked);
    let mut rows: Vec<Row> = free
        .flat_map(|group| group.names.iter().map(move |name| (group, *name)))
        .filter_map(|(group, name)| {
            Some(Row { name, stage: group.stage, on: group.on, effect: effect_of(name)? })
        })
        .collect();
    rows.sort_by_key(|row| row.name);
    rows
}

fn section(
    page: &mut String,
    title: &str,
    sentence: &str,
    last: &str,
    rows: &[Row],
    last_of: impl Fn(Effect) -> Option<String>,
) {
    let _ = write!(
        page,
        "\n## {title}\n\n{sentence}\n\n| gate | stage | default | {last} |\n|---|---|---|---|\n"
    );
    for Row { name, stage, on, effect } in rows {
        if let Some(text) = last_of(*effect) {
            let _ = writeln!(page, "| `{name}` | {} | {} | {text} |", stage_name(*stage), state(*on));
        }
    }
}

/// The gates that allow fields.
fn fields(page: &mut String, rows: &[Row]) {
    let title = "Gates that allow fields";
    let _ =
        write!(page, "\n## {title}\n\n{FIELDS}\n\n| gate | stage | default | fields |\n|---|---|---|---|\n");
    for Row { name, stage, on, effect } in rows {
        if *effect == Effect::Fields {
            let fields = gated_fields(name).map(|field| format!("`{field}`")).collect::<Vec<_>>().join(", ");
            let _ = writeln!(page, "| `{name}` | {} | {} | {fields} |", stage_name(*stage), state(*on));
        }
    }
}

/// The gates with one way only.
fn one_way(page: &mut String, rows: &[Row]) {
    let _ = write!(
        page,
        "\n## Gates with one way only\n\n{ONE_WAY}\n\n| gate | stage | default | reported if | as | because |\n\
         |---|---|---|---|---|---|\n"
    );
    for Row { name, stage, on, effect } in rows {
        let Effect::OneWay(OneWay { ignored, level, instead }) = effect else { continue };
        let (stage, on, ignored) = (stage_name(*stage), state(*on), state(*ignored));
        let level = if *level == Level::Error { "an error" } else { "a warning" };
        let _ = writeln!(page, "| `{name}` | {stage} | {on} | {ignored} | {level} | {instead} |");
    }
}

/// The locked gates.
fn locked(page: &mut String) {
    let _ = write!(page, "\n## Locked gates\n\n{LOCKED}\n\n");
    for on in [true, false] {
        let groups = table::NODE.iter().filter(|group| group.locked && group.on == on);
        let mut names: Vec<&str> = groups.flat_map(|group| group.names.iter().copied()).collect();
        names.sort_unstable();
        let list = names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        let _ = writeln!(page, "- {}: {list}.", state(on));
    }
}

/// The fields that need a gate, in the order of the table.
pub(super) fn gated_fields(name: &str) -> impl Iterator<Item = &'static str> {
    let needs = move |gate: &keelson_config::Gate| gate.name == name;
    kubelet_fields()
        .iter()
        .filter(move |field| field.gate.as_ref().is_some_and(needs))
        .map(|field| field.path)
}

const fn stage_name(stage: Stage) -> &'static str {
    match stage {
        Stage::Alpha => "alpha",
        Stage::Beta => "beta",
        Stage::Ga => "GA",
        Stage::Deprecated => "deprecated",
    }
}

const fn state(on: bool) -> &'static str {
    if on { "on" } else { "off" }
}
