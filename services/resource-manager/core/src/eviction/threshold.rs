//! When a signal is met, from the configuration's texts (runtime-and-resources.md §12.1).

use std::collections::BTreeMap;

use keelson_kube_model::Quantity;

use super::signal::{Layout, Observation, Signal};

/// An amount, or a share of what there is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Amount {
    /// So much.
    Quantity(Quantity),
    /// So many hundredths of the capacity.
    Percent(f64),
}

impl Amount {
    /// Reads `100Mi` or `10%`; none for what is neither or below zero.
    pub fn parse(text: &str) -> Option<Self> {
        if let Some(percent) = text.strip_suffix('%') {
            let percent: f64 = percent.parse().ok()?;
            return (0.0..=100.0).contains(&percent).then_some(Self::Percent(percent));
        }
        Quantity::parse(text).ok().filter(|amount| !amount.is_negative()).map(Self::Quantity)
    }

    /// What it is of this capacity.
    pub fn of(self, capacity: u64) -> Quantity {
        match self {
            Self::Quantity(quantity) => quantity,
            // Truncated as the kubelet does; the digits lost above 2^53 do not matter for a share.
            Self::Percent(percent) => Quantity::from_bytes((capacity as f64 * percent / 100.0) as u64),
        }
    }

    /// `0%` and `100%` turn a threshold off.
    fn is_off(self) -> bool {
        matches!(self, Self::Percent(percent) if percent <= 0.0 || percent >= 100.0)
    }
}

/// When a signal is met.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Threshold {
    /// What is watched.
    pub signal: Signal,
    /// Below this it is met.
    pub amount: Amount,
    /// Milliseconds for which it must be met before it is acted on; none for a hard threshold.
    pub grace_ms: Option<u64>,
    /// What must be left on top of the amount before it is no longer met.
    pub reclaim: Option<Amount>,
}

impl Threshold {
    /// Pods are ended at once.
    pub const fn is_hard(&self) -> bool {
        self.grace_ms.is_none()
    }

    /// Whether less is left than there must be; with `and_more` less than that and what is to be reclaimed.
    pub fn is_met(&self, seen: &Observation, and_more: bool) -> bool {
        let mut least = self.amount.of(seen.capacity);
        if let Some(reclaim) = self.reclaim.filter(|_| and_more) {
            least += reclaim.of(seen.capacity);
        }
        least > Quantity::from_bytes(seen.available)
    }
}

/// The configuration's texts, by the names of signals.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Texts {
    /// `evictionHard` in force.
    pub hard: BTreeMap<String, String>,
    /// `evictionSoft`.
    pub soft: BTreeMap<String, String>,
    /// `evictionSoftGracePeriod`, in milliseconds.
    pub soft_grace_ms: BTreeMap<String, u64>,
    /// `evictionMinimumReclaim`.
    pub minimum_reclaim: BTreeMap<String, String>,
}

/// Why thresholds cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ThresholdError {
    /// A name that is no signal's.
    #[error("{field} names {name:?}, and there is no such signal")]
    Signal {
        /// The field.
        field: &'static str,
        /// The name.
        name: String,
    },
    /// A text that is no amount.
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
    #[error("evictionSoft.{name} has no evictionSoftGracePeriod.{name}; name one such as 1m30s")]
    Grace {
        /// The signal.
        name: String,
    },
}

/// The thresholds in force, in the order of their signals, hard ones first.
///
/// What the texts say about `containerfs` is passed over: that follows from where layers lie, see [`with_derived`].
/// `pods_bound` says that all pods together have a limit: then that has the hard threshold of memory, too.
pub fn thresholds(texts: &Texts, pods_bound: bool) -> Result<Vec<Threshold>, ThresholdError> {
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
    if pods_bound {
        let of_memory = |t: &&Threshold| t.signal == Signal::MemoryAvailable && t.is_hard();
        let copy = list.iter().find(of_memory).copied();
        list.extend(copy.map(|t| Threshold { signal: Signal::AllocatableMemoryAvailable, ..t }));
    }
    list.sort_by_key(|threshold| (threshold.signal, !threshold.is_hard()));
    Ok(list)
}

/// The same with those of writable layers, which are those of the filesystem that layers lie on.
pub fn with_derived(thresholds: &[Threshold], layout: Layout) -> Vec<Threshold> {
    let mut list = thresholds.to_vec();
    for threshold in thresholds {
        let copied = match (layout, threshold.signal) {
            (Layout::One | Layout::Split, Signal::NodefsAvailable)
            | (Layout::Separate, Signal::ImagefsAvailable) => Signal::ContainerfsAvailable,
            (Layout::One | Layout::Split, Signal::NodefsInodesFree)
            | (Layout::Separate, Signal::ImagefsInodesFree) => Signal::ContainerfsInodesFree,
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
    fn thresholds_stand_in_the_order_of_their_signals_with_memory_first_and_hard_before_soft() {
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
        let bound = thresholds(&texts, true).unwrap();
        assert_eq!(names(&bound)[2], "allocatableMemory.available");
        assert_eq!(bound[2].amount, list[0].amount);
    }

    #[test]
    fn layers_have_the_thresholds_of_the_filesystem_that_they_lie_on() {
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
            (Layout::One, Amount::Percent(10.0), None),
            (Layout::Split, Amount::Percent(10.0), None),
            (Layout::Separate, Amount::Percent(15.0), Some(Amount::Percent(5.0))),
        ] {
            let list = with_derived(&list, layout);
            let of = |signal| list.iter().find(|t| t.signal == signal).map(|t| t.amount);
            assert_eq!(of(Signal::ContainerfsAvailable), Some(available), "{layout:?}");
            assert_eq!(of(Signal::ContainerfsInodesFree), inodes, "{layout:?}");
        }
    }

    #[test]
    fn what_cannot_be_used_is_named_with_the_way_out() {
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
    fn a_threshold_is_met_below_it_and_stays_met_until_more_is_reclaimed() {
        let threshold = Threshold {
            signal: Signal::NodefsAvailable,
            amount: Amount::Percent(10.0),
            grace_ms: None,
            reclaim: Some(Amount::Quantity(Quantity::from_bytes(50))),
        };
        for (available, met, and_more) in
            [(99, true, true), (100, false, true), (149, false, true), (150, false, false)]
        {
            let seen = Observation { capacity: 1000, available, taken: 0 };
            assert_eq!(threshold.is_met(&seen, false), met, "{available}");
            assert_eq!(threshold.is_met(&seen, true), and_more, "{available}");
        }
        assert_eq!(Amount::Percent(10.0).of(1005).to_string(), "100");
    }
}
