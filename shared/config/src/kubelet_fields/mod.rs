//! The fields of a KubeletConfiguration of 1.36 (node-and-api.md §2.5), one row each.
//!
//! A row says everything about a field except what it does: its type and range, its flag, its default, what an empty value
//! means, the value of the resolved configuration that it sets, and how a change takes effect. The flags and their help, the
//! defaults, the checks of types and feature gates, `/configz`, the provenance and the handling of changed files are derived from
//! it. What a field does is in its group in `services/init/core/src/groups`: a new setting needs a row here, its code in a group and
//! a test. A setting that may change at run time is also applied in [`crate::Config::take_live`].

mod api;
mod field;
mod host;
mod node;
mod pods;
mod resources;
mod runtime;

use std::collections::BTreeMap;
use std::sync::LazyLock;
use std::time::Duration;

use field::field;
pub use field::{
    DefaultValue, EmptyValue, FieldEffect, FieldKind, Gate, GateCondition, KubeletField, KubeletFlag,
};

/// The upper limit of most durations.
const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);
/// The upper limit of the ages and periods of garbage collection.
const CENTURY: Duration = YEAR.saturating_mul(100);
/// The upper limit of the kubelet's 32-bit numbers.
const MAX_I32: i64 = i32::MAX as i64;
/// An upper limit that no node reaches.
const MILLION: i64 = 1_000_000;

/// The hard eviction thresholds of a KubeletConfiguration that sets none.
pub const DEFAULT_THRESHOLDS: &[(&str, &str)] = &[
    ("imagefs.available", "15%"),
    ("imagefs.inodesFree", "5%"),
    ("memory.available", "100Mi"),
    ("nodefs.available", "10%"),
    ("nodefs.inodesFree", "5%"),
];

static ALL: LazyLock<Vec<KubeletField>> = LazyLock::new(|| {
    let groups = [api::FIELDS, host::FIELDS, node::FIELDS, pods::FIELDS, resources::FIELDS, runtime::FIELDS];
    let mut all = groups.concat();
    // Nested fields stay in the order of the table, below their top-level field.
    all.sort_by_key(KubeletField::top);
    all
});

static BY_PATH: LazyLock<BTreeMap<&'static str, &'static KubeletField>> =
    LazyLock::new(|| ALL.iter().map(|field| (field.path, field)).collect());

/// The names of all fields at the top level, sorted.
pub static KUBELET_FIELDS: LazyLock<Vec<&'static str>> =
    LazyLock::new(|| ALL.iter().map(|field| field.path).filter(|path| !path.contains('.')).collect());

/// All fields, sorted by the name of their top-level field, each nested field behind the object that contains it.
pub fn kubelet_fields() -> &'static [KubeletField] {
    &ALL
}

/// The field at a dotted path.
pub fn kubelet_field(path: &str) -> Option<&'static KubeletField> {
    BY_PATH.get(path).copied()
}

/// The field at a dotted path, then the fields that contain it, from the inside out.
pub fn enclosing_fields(path: &str) -> impl Iterator<Item = &'static KubeletField> {
    let ends = path.match_indices(['.', '[']).map(|(at, _)| at).chain([path.len()]);
    ends.rev().filter_map(|end| kubelet_field(&path[..end]))
}

#[cfg(test)]
mod tests;
