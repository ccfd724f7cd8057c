//! Feature gates: which there are in 1.36, and what a configuration makes of them (node-and-api.md §3).

mod table;

use std::collections::{BTreeMap, BTreeSet};

use keelson_config::FeatureGate;

use crate::document::{ConfigProblem, Sourced};
use crate::resolve::{Level, Note};

/// The field of the KubeletConfiguration; that of a gate is `featureGates.<name>`.
pub(crate) const FIELD: &str = "featureGates";
/// What sets every gate of a stage that is not set by its name.
const ALL: [(&str, Stage); 2] = [("AllAlpha", Stage::Alpha), ("AllBeta", Stage::Beta)];

/// How far a feature has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    Alpha,
    Beta,
    Ga,
    Deprecated,
}

impl Stage {
    /// As `kubernetes_feature_enabled` has it (§15.2).
    const fn label(self) -> &'static str {
        match self {
            Self::Alpha => "ALPHA",
            Self::Beta => "BETA",
            Self::Ga => "",
            Self::Deprecated => "DEPRECATED",
        }
    }
}

/// One gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Gate {
    stage: Stage,
    on: bool,
    locked: bool,
}

/// Every gate by its name.
fn gates() -> &'static BTreeMap<&'static str, Gate> {
    static GATES: std::sync::LazyLock<BTreeMap<&'static str, Gate>> = std::sync::LazyLock::new(|| {
        let groups = table::NODE.iter().chain(table::OTHER);
        let of = |group: &'static table::Group| {
            let gate = Gate { stage: group.stage, on: group.on, locked: group.locked };
            group.names.iter().map(move |name| (*name, gate))
        };
        groups.flat_map(of).collect()
    });
    &GATES
}

/// The gates in force.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FeatureGates {
    on: BTreeSet<&'static str>,
}

impl Default for FeatureGates {
    fn default() -> Self {
        Self { on: gates().iter().filter(|(_, gate)| gate.on).map(|(name, _)| *name).collect() }
    }
}

impl FeatureGates {
    /// Whether the gate of this name is on; one that there is not is off.
    pub(crate) fn is_on(&self, name: &str) -> bool {
        self.on.contains(name)
    }

    /// Every gate, those that stand for a stage among them, by name.
    pub(crate) fn all(&self) -> Vec<FeatureGate> {
        let stages = ALL.iter().map(|(name, stage)| (*name, *stage));
        let known = gates().iter().map(|(name, gate)| (*name, gate.stage));
        let mut all: Vec<FeatureGate> = stages
            .chain(known)
            .map(|(name, stage)| FeatureGate {
                name: name.into(),
                stage: stage.label().into(),
                enabled: self.is_on(name),
            })
            .collect();
        all.sort_by(|one, other| one.name.cmp(&other.name));
        all
    }
}

/// What a configuration sets, in its order; the field of each is `featureGates.<name>`.
pub(crate) type Given = Vec<Sourced<bool>>;

/// Lays what is given over the defaults.
///
/// Every gate that there is not, that is locked, or that lacks what it needs is a problem of its own, with the kubelet's text.
/// The notes warn of gates that a later release takes away, and name those that change nothing here.
pub(crate) fn judge(given: &[Sourced<bool>]) -> (FeatureGates, Vec<ConfigProblem>, Vec<Note>) {
    let (mut problems, mut notes) = (Vec::new(), Vec::new());
    let mut explicit: BTreeMap<&str, &Sourced<bool>> = BTreeMap::new();
    for one in given {
        let name = name_of(one);
        if ALL.iter().any(|(all, _)| *all == name) {
            explicit.insert(name, one);
            continue;
        }
        let Some(gate) = gates().get(name) else {
            problems.push(one.problem(format!("unrecognized feature gate: {name}; leave it out")));
            continue;
        };
        if gate.locked && one.value != gate.on {
            let (value, on) = (one.value, gate.on);
            let text =
                format!("cannot set feature gate {name} to {value}, feature is locked to {on}; leave it out");
            problems.push(one.problem(text));
            continue;
        }
        if let Some(stage) = going(gate.stage) {
            let text = format!(
                "{}: the feature gate {name} is {stage} and goes with a later release, which then does not start with it; \
                 leave it out",
                one.origin
            );
            notes.push(Note { level: Level::Warn, text });
        }
        explicit.insert(name, one);
    }
    notes.extend(idle(&explicit));
    let gates = FeatureGates { on: in_force(&explicit) };
    problems.extend(missing(&gates, &explicit));
    (gates, problems, notes)
}

fn name_of(given: &Sourced<bool>) -> &str {
    given.field.strip_prefix(FIELD).and_then(|rest| rest.strip_prefix('.')).unwrap_or(&given.field)
}

/// How a stage is told whose gates are to go.
fn going(stage: Stage) -> Option<&'static str> {
    match stage {
        Stage::Ga => Some("GA"),
        Stage::Deprecated => Some("deprecated"),
        Stage::Alpha | Stage::Beta => None,
    }
}

/// The names of those that are on: as they are set, else as all of their stage are, else by default.
fn in_force(explicit: &BTreeMap<&str, &Sourced<bool>>) -> BTreeSet<&'static str> {
    let all_of = |stage: Stage| {
        let (name, _) = ALL.iter().find(|(_, of)| *of == stage)?;
        explicit.get(name).map(|given| given.value)
    };
    let is_on = |name: &&'static str, gate: &Gate| {
        let set = explicit.get(name).map(|given| given.value);
        set.or_else(|| all_of(gate.stage).filter(|_| !gate.locked)).unwrap_or(gate.on)
    };
    let stages =
        ALL.iter().map(|(all, _)| *all).filter(|all| explicit.get(all).is_some_and(|given| given.value));
    gates().iter().filter(|(name, gate)| is_on(name, gate)).map(|(name, _)| *name).chain(stages).collect()
}

/// A problem for each gate that is on without what it needs. It names what was set of them: the gate, else what it needs, else
/// all of a stage.
fn missing(gates: &FeatureGates, explicit: &BTreeMap<&str, &Sourced<bool>>) -> Vec<ConfigProblem> {
    let one = |(name, needs): &(&'static str, &'static [&'static str])| {
        let off: Vec<&str> = needs.iter().copied().filter(|need| !gates.is_on(need)).collect();
        if off.is_empty() || !gates.is_on(name) {
            return None;
        }
        let whole = ALL.iter().map(|(all, _)| *all);
        let cause =
            std::iter::once(*name).chain(off.iter().copied()).chain(whole).find_map(|n| explicit.get(n))?;
        let text = format!(
            "{name} is enabled, but depends on features that are disabled: [{}]; switch it off too, or those on",
            off.join(" ")
        );
        Some(cause.problem(text))
    };
    table::NEEDS.iter().filter_map(one).collect()
}

/// Says which gates are set to something else than their default: but for what may be configured, nothing hangs on them yet.
fn idle(explicit: &BTreeMap<&str, &Sourced<bool>>) -> Option<Note> {
    let differs =
        |name: &str, given: &Sourced<bool>| gates().get(name).is_none_or(|gate| gate.on != given.value);
    let names: Vec<&str> =
        explicit.iter().filter(|(name, given)| differs(name, given)).map(|(name, _)| *name).collect();
    (!names.is_empty()).then(|| Note {
        level: Level::Info,
        text: format!("these feature gates change only what may be configured, yet: {}", names.join(", ")),
    })
}

#[cfg(test)]
mod tests;
