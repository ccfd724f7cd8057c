//! The feature gates of 1.36, and their values in a configuration (node-and-api.md §3).

mod acting;
mod effects;
mod reference;
mod table;

use std::collections::{BTreeMap, BTreeSet};

use keelson_config::FeatureGate;

use crate::document::{ConfigError, Sourced};
use crate::outcome::{Level, Note, WITHOUT_EFFECT};
pub(crate) use acting::apply;
use effects::{Effect, OneWay};
pub use reference::reference;

/// The field of the KubeletConfiguration; that of a gate is `featureGates.<name>`.
pub(crate) const FIELD: &str = "featureGates";
/// The gates that set every gate of a stage that is not set by name.
const ALL: [(&str, Stage); 2] = [("AllAlpha", Stage::Alpha), ("AllBeta", Stage::Beta)];

/// The maturity of a feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    Alpha,
    Beta,
    Ga,
    Deprecated,
}

impl Stage {
    /// The label of `kubernetes_feature_enabled` (§15.2).
    const fn label(self) -> &'static str {
        match self {
            Self::Alpha => "ALPHA",
            Self::Beta => "BETA",
            Self::Ga => "",
            Self::Deprecated => "DEPRECATED",
        }
    }
}

/// The properties of a gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Gate {
    stage: Stage,
    on: bool,
    locked: bool,
}

/// All gates by name.
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
    /// Whether this gate is on; an unknown gate is off.
    pub(crate) fn is_on(&self, name: &str) -> bool {
        self.on.contains(name)
    }

    /// All gates by name, including those for a stage.
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

/// The gates that a configuration sets, in its order; the field of each is `featureGates.<name>`.
pub(crate) type Given = Vec<Sourced<bool>>;

/// Applies the given gates to the defaults.
///
/// Each unknown or locked gate, and each gate without its dependencies, is an error with the kubelet's text. So is a gate whose
/// feature the node must not seem to have. The notes warn of gates that a later release removes, and of those without effect.
pub(crate) fn evaluate(given: &[Sourced<bool>]) -> (FeatureGates, Vec<ConfigError>, Vec<Note>) {
    let (mut errors, mut notes) = (Vec::new(), Vec::new());
    let mut explicit: BTreeMap<&str, &Sourced<bool>> = BTreeMap::new();
    for one in given {
        let name = name_of(one);
        if ALL.iter().any(|(all, _)| *all == name) {
            explicit.insert(name, one);
            continue;
        }
        let Some(gate) = gates().get(name) else {
            errors.push(one.error(format!("unrecognized feature gate: {name}; remove it")));
            continue;
        };
        if gate.locked && one.value != gate.on {
            let (value, on) = (one.value, gate.on);
            let text =
                format!("cannot set feature gate {name} to {value}, feature is locked to {on}; remove it");
            errors.push(one.error(text));
            continue;
        }
        if let Some(stage) = removal_stage(gate.stage) {
            let text = format!(
                "{}: the feature gate {name} is {stage}; a later release will remove it and then refuse to start with it; \
                 remove it",
                one.origin
            );
            notes.push(Note::new(Level::Warn, text));
        }
        explicit.insert(name, one);
    }
    let (refused, without_effect) = set_without_effect(&explicit);
    errors.extend(refused);
    notes.extend(without_effect);
    let gates = FeatureGates { on: in_force(&explicit) };
    errors.extend(missing_dependencies(&gates, &explicit));
    (gates, errors, notes)
}

fn name_of(given: &Sourced<bool>) -> &str {
    given.field.strip_prefix(FIELD).and_then(|rest| rest.strip_prefix('.')).unwrap_or(&given.field)
}

/// The name of a stage whose gates will be removed.
fn removal_stage(stage: Stage) -> Option<&'static str> {
    match stage {
        Stage::Ga => Some("GA"),
        Stage::Deprecated => Some("deprecated"),
        Stage::Alpha | Stage::Beta => None,
    }
}

/// The gates that are on: by their own setting, else by that of their stage, else by default.
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

/// An error for each gate that is on without its dependencies. It names the setting that causes this: that of the gate, else
/// that of a dependency, else that of a stage.
fn missing_dependencies(gates: &FeatureGates, explicit: &BTreeMap<&str, &Sourced<bool>>) -> Vec<ConfigError> {
    let one = |(name, needs): &(&'static str, &'static [&'static str])| {
        let off: Vec<&str> = needs.iter().copied().filter(|need| !gates.is_on(need)).collect();
        if off.is_empty() || !gates.is_on(name) {
            return None;
        }
        let whole = ALL.iter().map(|(all, _)| *all);
        let cause =
            std::iter::once(*name).chain(off.iter().copied()).chain(whole).find_map(|n| explicit.get(n))?;
        let text = format!(
            "{name} is enabled, but depends on features that are disabled: [{}]; switch it off, or those on",
            off.join(" ")
        );
        Some(cause.error(text))
    };
    table::NEEDS.iter().filter_map(one).collect()
}

/// The errors and warnings about gates that have one way only and are set the other way.
///
/// A gate that is set by name is refused where its row says so. `AllAlpha` and `AllBeta` ask for no single feature, so what they
/// switch is only reported. A field that needs such a gate is refused (`field_checks`).
fn set_without_effect(explicit: &BTreeMap<&str, &Sourced<bool>>) -> (Vec<ConfigError>, Vec<Note>) {
    let (mut errors, mut notes) = (Vec::new(), Vec::new());
    let in_force = in_force(explicit);
    for (name, effect) in effects::EFFECTS {
        let Effect::OneWay(OneWay { ignored, level, instead }) = effect else { continue };
        if in_force.contains(name) != *ignored {
            continue;
        }
        let state = if *ignored { "on" } else { "off" };
        if let Some(given) = explicit.get(name) {
            if *level == Level::Error {
                errors
                    .push(given.error(format!("this feature gate cannot be {state}: {instead}; remove it")));
            } else {
                let text = format!(
                    "{}: {FIELD}.{name} = {ignored} has no effect: {instead}; remove it",
                    given.origin
                );
                notes.push(Note { event: Some(WITHOUT_EFFECT), ..Note::new(Level::Warn, text) });
            }
            continue;
        }
        let Some((whole, given)) = stage_setting(name, explicit) else { continue };
        let (origin, other) = (&given.origin, !ignored);
        let text = format!(
            "{origin}: {whole} switches the feature gate {name} {state}, which has no effect: {instead}; set {name} to {other}"
        );
        notes.push(Note { event: Some(WITHOUT_EFFECT), ..Note::new(Level::Warn, text) });
    }
    (errors, notes)
}

/// Why a gate is refused when it is on by name; `None`: it is not.
pub(crate) fn why_it_cannot_be_on(name: &str) -> Option<&'static str> {
    effects::EFFECTS.iter().find_map(|(of, effect)| match effect {
        Effect::OneWay(OneWay { ignored: true, level: Level::Error, instead }) if *of == name => {
            Some(*instead)
        }
        _ => None,
    })
}

/// The setting of a whole stage that changes the default of a gate.
fn stage_setting<'a>(
    name: &str,
    explicit: &BTreeMap<&str, &'a Sourced<bool>>,
) -> Option<(&'static str, &'a Sourced<bool>)> {
    let gate = gates().get(name)?;
    let (whole, _) = ALL.iter().find(|(_, stage)| *stage == gate.stage)?;
    let given = explicit.get(whole).filter(|given| given.value != gate.on)?;
    Some((whole, given))
}

#[cfg(test)]
mod tests;
