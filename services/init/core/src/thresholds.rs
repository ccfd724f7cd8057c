//! Eviction thresholds: amounts by signal.

use std::collections::BTreeMap;

use keelson_kube_model::Quantity;

use crate::document::Sourced;
use crate::reader::Reader;

/// The signals of eviction thresholds.
pub(crate) const SIGNALS: &[&str] = &[
    "memory.available",
    "nodefs.available",
    "nodefs.inodesFree",
    "imagefs.available",
    "imagefs.inodesFree",
    "containerfs.available",
    "containerfs.inodesFree",
    "pid.available",
    "allocatableMemory.available",
];

/// Quantities or percentages by signal; an invalid entry is reported and left out.
pub(crate) fn thresholds_by_signal(
    reader: &mut Reader<'_>,
    field: &str,
) -> Option<Sourced<BTreeMap<String, String>>> {
    let mut map = reader.map(field)?;
    let given = map.clone();
    map.value.retain(|signal, text| {
        let one = given.entry(signal, text);
        if !SIGNALS.contains(&signal.as_str()) {
            reader.refuse(&one, format!("there is no such signal; the signals are {}", SIGNALS.join(", ")));
            return false;
        }
        let good = threshold(text, 0).is_some();
        if !good {
            reader.refuse(&one, "this must be a quantity such as 100Mi or a percentage from 0% to 100%");
        }
        good
    });
    Some(map)
}

/// A threshold as a quantity; a percentage refers to `whole` bytes.
pub(crate) fn threshold(text: &str, whole: u64) -> Option<Quantity> {
    if let Some(percent) = text.strip_suffix('%') {
        let percent: f64 = percent.parse().ok().filter(|p| (0.0..=100.0).contains(p))?;
        // Truncated, as by the kubelet; the lost digits above 2^53 bytes do not matter here.
        return Some(Quantity::from_bytes((whole as f64 * percent / 100.0) as u64));
    }
    Quantity::parse(text).ok().filter(|amount| !amount.is_negative())
}
