//! Eviction thresholds, from the configuration (runtime-and-resources.md §12.1).

use std::collections::BTreeMap;

use keelson_kube_model::Quantity;

use super::signal::{FsLayout, Observation, Signal};

/// A quantity, or a percentage of the capacity.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Amount {
    /// An absolute quantity.
    Quantity(Quantity),
    /// A percentage of the capacity.
    Percent(f64),
}

impl Amount {
    /// Parses `100Mi` or `10%`; none for other texts and negative amounts.
    pub fn parse(text: &str) -> Option<Self> {
        if let Some(percent) = text.strip_suffix('%') {
            let percent: f64 = percent.parse().ok()?;
            return (0.0..=100.0).contains(&percent).then_some(Self::Percent(percent));
        }
        Quantity::parse(text).ok().filter(|amount| !amount.is_negative()).map(Self::Quantity)
    }

    /// The quantity for this capacity.
    pub fn of(self, capacity: u64) -> Quantity {
        match self {
            Self::Quantity(quantity) => quantity,
            // Truncated as the kubelet does; the digits lost above 2^53 do not matter for a percentage.
            Self::Percent(percent) => Quantity::from_bytes((capacity as f64 * percent / 100.0) as u64),
        }
    }

    /// `0%` and `100%` disable a threshold.
    fn is_off(self) -> bool {
        matches!(self, Self::Percent(percent) if percent <= 0.0 || percent >= 100.0)
    }
}

/// An eviction threshold.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Threshold {
    /// The observed signal.
    pub signal: Signal,
    /// The threshold is met when less than this is available.
    pub amount: Amount,
    /// Milliseconds that it must be met before pods are evicted; none for a hard threshold.
    pub grace_ms: Option<u64>,
    /// What must be available on top of the amount before it is resolved.
    pub reclaim: Option<Amount>,
}

impl Threshold {
    /// Whether it is a hard threshold: pods are evicted at once.
    pub const fn is_hard(&self) -> bool {
        self.grace_ms.is_none()
    }

    /// Whether less than the amount is available; `with_reclaim` adds the minimum reclaim to the amount.
    pub fn is_met(&self, observed: &Observation, with_reclaim: bool) -> bool {
        let mut required = self.amount.of(observed.capacity);
        if let Some(reclaim) = self.reclaim.filter(|_| with_reclaim) {
            required += reclaim.of(observed.capacity);
        }
        required > Quantity::from_bytes(observed.available)
    }
}

/// The texts of the configuration, by the names of signals.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Texts {
    /// `evictionHard`, with defaults applied.
    pub hard: BTreeMap<String, String>,
    /// `evictionSoft`.
    pub soft: BTreeMap<String, String>,
    /// `evictionSoftGracePeriod`, in milliseconds.
    pub soft_grace_ms: BTreeMap<String, u64>,
    /// `evictionMinimumReclaim`.
    pub minimum_reclaim: BTreeMap<String, String>,
}

/// An invalid threshold in the configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ThresholdError {
    /// An unknown signal.
    #[error("{field} names {name:?}, which is not an eviction signal")]
    Signal {
        /// The field.
        field: &'static str,
        /// The name.
        name: String,
    },
    /// An invalid amount.
    #[error("{field}.{name} is {text:?}; write a quantity such as 100Mi or a percentage from 0% to 100%")]
    Amount {
        /// The field.
        field: &'static str,
        /// The signal.
        name: String,
        /// The text.
        text: String,
    },
    /// A soft threshold without its grace period.
    #[error("evictionSoft.{name} has no evictionSoftGracePeriod.{name}; set one such as 1m30s")]
    Grace {
        /// The signal.
        name: String,
    },
}

/// The enabled thresholds, in the order of their signals, hard ones first.
///
/// Thresholds for `containerfs` are ignored: they follow from where layers are stored, see [`with_derived`].
/// `pods_limited` means that all pods together have a memory limit: then the hard memory threshold applies to it, too.
pub fn thresholds(texts: &Texts, pods_limited: bool) -> Result<Vec<Threshold>, ThresholdError> {
    let mut list = Vec::new();
    for (field, map) in [("evictionHard", &texts.hard), ("evictionSoft", &texts.soft)] {
        for (name, text) in map {
            let signal = parse_signal(field, name)?;
            let amount = parse_amount(field, name, text)?;
            let grace_ms = match field {
                "evictionSoft" => {
                    let grace = texts.soft_grace_ms.get(name).copied();
                    Some(grace.ok_or_else(|| ThresholdError::Grace { name: name.clone() })?)
                }
                _ => None,
            };
            let reclaim = match texts.minimum_reclaim.get(name) {
                Some(text) => Some(parse_amount("evictionMinimumReclaim", name, text)?),
                None => None,
            };
            if !amount.is_off() && !is_derived(signal) {
                list.push(Threshold { signal, amount, grace_ms, reclaim });
            }
        }
    }
    for name in texts.minimum_reclaim.keys() {
        parse_signal("evictionMinimumReclaim", name)?;
    }
    if pods_limited {
        let is_hard_memory = |t: &&Threshold| t.signal == Signal::MemoryAvailable && t.is_hard();
        let copy = list.iter().find(is_hard_memory).copied();
        list.extend(copy.map(|t| Threshold { signal: Signal::AllocatableMemoryAvailable, ..t }));
    }
    list.sort_by_key(|threshold| (threshold.signal, !threshold.is_hard()));
    Ok(list)
}

/// Adds the thresholds of writable layers, which are those of the filesystem that stores them.
pub fn with_derived(thresholds: &[Threshold], layout: FsLayout) -> Vec<Threshold> {
    let mut list = thresholds.to_vec();
    for threshold in thresholds {
        let copied = match (layout, threshold.signal) {
            (FsLayout::One | FsLayout::Split, Signal::NodefsAvailable)
            | (FsLayout::Separate, Signal::ImagefsAvailable) => Signal::ContainerfsAvailable,
            (FsLayout::One | FsLayout::Split, Signal::NodefsInodesFree)
            | (FsLayout::Separate, Signal::ImagefsInodesFree) => Signal::ContainerfsInodesFree,
            _ => continue,
        };
        list.push(Threshold { signal: copied, ..*threshold });
    }
    list.sort_by_key(|threshold| (threshold.signal, !threshold.is_hard()));
    list
}

const fn is_derived(signal: Signal) -> bool {
    matches!(
        signal,
        Signal::ContainerfsAvailable | Signal::ContainerfsInodesFree | Signal::AllocatableMemoryAvailable
    )
}

fn parse_signal(field: &'static str, name: &str) -> Result<Signal, ThresholdError> {
    Signal::parse(name).ok_or_else(|| ThresholdError::Signal { field, name: name.to_owned() })
}

fn parse_amount(field: &'static str, name: &str, text: &str) -> Result<Amount, ThresholdError> {
    Amount::parse(text).ok_or_else(|| ThresholdError::Amount {
        field,
        name: name.to_owned(),
        text: text.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(list: &[(&str, &str)]) -> BTreeMap<String, String> {
        list.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect()
    }

    fn names(list: &[Threshold]) -> Vec<String> {
        list.iter().map(|t| format!("{}{}", t.signal.name(), if t.is_hard() { "" } else { "~" })).collect()
    }

    #[test]
    fn thresholds_are_sorted_by_signal_with_hard_before_soft() {
        let texts = Texts {
            hard: map(&[
                ("pid.available", "5"),
                ("memory.available", "100Mi"),
                ("nodefs.available", "10%"),
                ("imagefs.available", "0%"),
                ("nodefs.inodesFree", "100%"),
                ("containerfs.available", "50%"),
            ]),
            soft: map(&[("memory.available", "1Gi")]),
            soft_grace_ms: [("memory.available".to_owned(), 90_000)].into(),
            minimum_reclaim: map(&[("memory.available", "50Mi")]),
        };
        let list = thresholds(&texts, false).unwrap();
        assert_eq!(
            names(&list),
            ["memory.available", "memory.available~", "nodefs.available", "pid.available"]
        );
        assert_eq!(list[1].grace_ms, Some(90_000));
        assert_eq!(list[0].reclaim, Amount::parse("50Mi"));
        assert_eq!(list[2].reclaim, None);
        let limited = thresholds(&texts, true).unwrap();
        assert_eq!(names(&limited)[2], "allocatableMemory.available");
        assert_eq!(limited[2].amount, list[0].amount);
    }

    #[test]
    fn containerfs_thresholds_follow_the_filesystem_of_writable_layers() {
        let texts = Texts {
            hard: map(&[
                ("nodefs.available", "10%"),
                ("imagefs.available", "15%"),
                ("imagefs.inodesFree", "5%"),
            ]),
            ..Texts::default()
        };
        let list = thresholds(&texts, false).unwrap();
        for (layout, available, inodes) in [
            (FsLayout::One, Amount::Percent(10.0), None),
            (FsLayout::Split, Amount::Percent(10.0), None),
            (FsLayout::Separate, Amount::Percent(15.0), Some(Amount::Percent(5.0))),
        ] {
            let list = with_derived(&list, layout);
            let of = |signal| list.iter().find(|t| t.signal == signal).map(|t| t.amount);
            assert_eq!(of(Signal::ContainerfsAvailable), Some(available), "{layout:?}");
            assert_eq!(of(Signal::ContainerfsInodesFree), inodes, "{layout:?}");
        }
    }

    #[test]
    fn invalid_thresholds_are_reported_with_a_remedy() {
        let hard = |name: &str, text: &str| Texts { hard: map(&[(name, text)]), ..Texts::default() };
        let soft = Texts { soft: map(&[("memory.available", "1Gi")]), ..Texts::default() };
        let reclaim = Texts { minimum_reclaim: map(&[("disk", "1Gi")]), ..Texts::default() };
        for (texts, part) in [
            (hard("memory.free", "1Gi"), "\"memory.free\""),
            (hard("memory.available", "lots"), "evictionHard.memory.available is \"lots\""),
            (hard("memory.available", "-1"), "percentage"),
            (hard("memory.available", "101%"), "101%"),
            (soft, "evictionSoftGracePeriod.memory.available"),
            (reclaim, "evictionMinimumReclaim names \"disk\""),
        ] {
            let error = thresholds(&texts, false).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn a_threshold_is_met_below_its_amount_plus_the_minimum_reclaim() {
        let threshold = Threshold {
            signal: Signal::NodefsAvailable,
            amount: Amount::Percent(10.0),
            grace_ms: None,
            reclaim: Some(Amount::Quantity(Quantity::from_bytes(50))),
        };
        for (available, met, met_with_reclaim) in
            [(99, true, true), (100, false, true), (149, false, true), (150, false, false)]
        {
            let observed = Observation { capacity: 1000, available, taken: 0 };
            assert_eq!(threshold.is_met(&observed, false), met, "{available}");
            assert_eq!(threshold.is_met(&observed, true), met_with_reclaim, "{available}");
        }
        assert_eq!(Amount::Percent(10.0).of(1005).to_string(), "100");
    }
}
