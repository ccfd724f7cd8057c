//! The checks that the table of fields alone decides: the types of fields that have no effect here yet, and the fields that
//! require a feature gate (node-and-api.md §2.5, §2.6).
//!
//! Fields with an effect are checked by the groups that read them. A field that is only checked here still counts as one
//! without effect.

use keelson_config::{FieldEffect, FieldKind, GateCondition, kubelet_fields};
use keelson_kube_model::Quantity;
use serde_json::Value;

use crate::durations::signed_nanos;
use crate::gates::{self, FeatureGates};
use crate::reader::Reader;

/// Checks the types of the fields without effect.
pub(crate) fn check_types(reader: &mut Reader<'_>) {
    for field in kubelet_fields().iter().filter(|field| field.effect == FieldEffect::CheckedByType) {
        reader.check_type(field);
    }
}

/// Refuses each field whose feature gate is off, or cannot be on; `gates` are those in force.
///
/// `AllAlpha` may switch on a gate that cannot be on by name, since it asks for no single feature. The field asks for it.
pub(crate) fn check_gates(reader: &mut Reader<'_>, gates: &FeatureGates) {
    for field in kubelet_fields() {
        let Some(gate) = field.gate else { continue };
        let name = gate.name;
        let remedy = match gates::why_it_cannot_be_on(name) {
            Some(why) => {
                format!("this requires the feature gate {name}, which cannot be on: {why}; remove this field")
            }
            None if gates.is_on(name) => continue,
            None => format!("this requires the feature gate {name}; enable it, or remove this field"),
        };
        if let Some(value) = reader.peek(field.path).filter(|value| is_met(field.kind, gate.condition, value))
        {
            reader.report(field.path, value, remedy);
        }
    }
}

/// Whether a value requires the feature gate.
fn is_met(kind: FieldKind, condition: GateCondition, value: &Value) -> bool {
    match condition {
        GateCondition::Set => true,
        GateCondition::On => *value == Value::Bool(true),
        GateCondition::NotEmpty => match value {
            Value::String(text) => !text.is_empty(),
            Value::Array(list) => !list.is_empty(),
            Value::Object(map) => !map.is_empty(),
            _ => false,
        },
        GateCondition::NotZero => value.as_str().is_some_and(|text| is_amount(kind, text)),
        GateCondition::TextIs(text) => value == text,
        GateCondition::DurationOtherThan(duration) => {
            value.as_str().is_some_and(|text| signed_nanos(text) != signed_nanos(duration))
        }
    }
}

/// Whether this is a duration or a quantity other than zero, according to the type of the field.
fn is_amount(kind: FieldKind, text: &str) -> bool {
    if kind.is_duration() {
        signed_nanos(text).is_some_and(|nanos| nanos != 0)
    } else {
        Quantity::parse(text).is_ok_and(|amount| !amount.is_zero())
    }
}

#[cfg(test)]
#[path = "field_checks_tests.rs"]
mod tests;
