//! The grace periods of a shutdown by priority of pods (node-and-api.md §11).

use keelson_kube_model::pod_ext::SYSTEM_CRITICAL_PRIORITY;

/// The lowest priority that the period of non-critical pods is for: that of pods without a priority class.
const DEFAULT_PRIORITY: i32 = 0;
const SECOND: i64 = 1_000_000_000;

/// The grace period of pods from a priority on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GracePeriod {
    /// The lowest priority of its pods.
    pub priority: i32,
    /// Seconds, at least 0.
    pub seconds: i64,
}

/// The configuration of a graceful node shutdown. Its feature gates are not part of it: without them a configuration with a grace
/// period is refused.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Settings {
    /// `shutdownGracePeriod` in nanoseconds: the time of all pods together.
    pub total_nanos: i64,
    /// `shutdownGracePeriodCriticalPods` in nanoseconds: the part of it that is for critical pods.
    pub critical_nanos: i64,
    /// `shutdownGracePeriodByPodPriority`, in any order.
    pub by_priority: Vec<GracePeriod>,
}

/// The grace periods in rising order of priority; never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GracePeriods(Vec<GracePeriod>);

impl GracePeriods {
    /// The grace periods of a configuration; none when pods are not ended before a shutdown.
    ///
    /// The list by priority takes precedence. Without it, the total is divided into a period of non-critical pods and one of
    /// critical pods. Fractions of a second are cut off. A part for critical pods that exceeds the total configures nothing.
    pub fn from_settings(settings: &Settings) -> Option<Self> {
        let mut periods = match settings.by_priority.is_empty() {
            true => divided(settings.total_nanos, settings.critical_nanos),
            false => settings.by_priority.clone(),
        };
        periods.sort_by_key(|period| period.priority);
        (!periods.is_empty()).then_some(Self(periods))
    }

    /// The priorities by which a drained node ends its pods in turn: those of a configuration, else critical pods after all
    /// others. Their seconds do not limit the grace periods of pods.
    pub fn for_drain(settings: &Settings) -> Self {
        let default = || {
            let of = |priority| GracePeriod { priority, seconds: 0 };
            Self(vec![of(DEFAULT_PRIORITY), of(SYSTEM_CRITICAL_PRIORITY)])
        };
        Self::from_settings(settings).unwrap_or_else(default)
    }

    /// The seconds by which a shutdown is delayed at most: the sum of all periods.
    pub fn total_seconds(&self) -> i64 {
        self.0.iter().fold(0, |sum, period| sum.saturating_add(period.seconds))
    }

    /// The periods, in rising order of priority.
    pub fn in_order(&self) -> &[GracePeriod] {
        &self.0
    }

    /// The index in [`Self::in_order`] of the period of a pod with this priority: the period with the highest priority that is
    /// not above the pod's, and the first period for a pod below all. Of several periods with exactly the pod's priority it is
    /// the first.
    pub fn index_of(&self, priority: i32) -> usize {
        let not_below = self.0.partition_point(|period| period.priority < priority);
        match self.0.get(not_below) {
            Some(period) if period.priority == priority => not_below,
            Some(_) | None => not_below.saturating_sub(1),
        }
    }
}

fn divided(total_nanos: i64, critical_nanos: i64) -> Vec<GracePeriod> {
    if total_nanos <= 0 || !(0..=total_nanos).contains(&critical_nanos) {
        return Vec::new();
    }
    let period = |priority, nanos: i64| GracePeriod { priority, seconds: nanos / SECOND };
    vec![
        period(DEFAULT_PRIORITY, total_nanos - critical_nanos),
        period(SYSTEM_CRITICAL_PRIORITY, critical_nanos),
    ]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CRITICAL: i32 = SYSTEM_CRITICAL_PRIORITY;

    fn by_priority(list: &[(i32, i64)]) -> Vec<GracePeriod> {
        list.iter().map(|&(priority, seconds)| GracePeriod { priority, seconds }).collect()
    }

    fn periods(settings: &Settings) -> Option<Vec<(i32, i64)>> {
        let periods = GracePeriods::from_settings(settings)?;
        Some(periods.in_order().iter().map(|period| (period.priority, period.seconds)).collect())
    }

    #[test]
    fn the_total_is_divided_between_critical_and_other_pods() {
        for (total_ms, critical_ms, expected) in [
            (30_000, 10_000, Some([(0, 20), (CRITICAL, 10)])),
            (30_000, 0, Some([(0, 30), (CRITICAL, 0)])),
            (30_000, 30_000, Some([(0, 0), (CRITICAL, 30)])),
            // Each part loses its fraction.
            (10_500, 1_200, Some([(0, 9), (CRITICAL, 1)])),
            (0, 0, None),
            (0, 10_000, None),
            (10_000, 10_001, None),
            (10_000, -1, None),
            (-10_000, -20_000, None),
        ] {
            let (total_nanos, critical_nanos) = (total_ms * 1_000_000, critical_ms * 1_000_000);
            let settings = Settings { total_nanos, critical_nanos, ..Settings::default() };
            assert_eq!(periods(&settings), expected.map(Vec::from), "{total_ms} {critical_ms}");
        }
    }

    #[test]
    fn the_list_by_priority_takes_precedence_and_is_sorted() {
        let settings = Settings {
            total_nanos: 30 * SECOND,
            by_priority: by_priority(&[(100, 10), (-5, 1), (10, 0)]),
            ..Settings::default()
        };
        assert_eq!(periods(&settings), Some(vec![(-5, 1), (10, 0), (100, 10)]));
        let empty = Settings { by_priority: Vec::new(), ..settings };
        assert_eq!(periods(&empty), Some(vec![(0, 30), (CRITICAL, 0)]));
    }

    fn of(list: &[(i32, i64)]) -> GracePeriods {
        let by_priority = by_priority(list);
        let settings = Settings { by_priority, ..Settings::default() };
        GracePeriods::from_settings(&settings).unwrap()
    }

    #[test]
    fn a_drain_ends_critical_pods_last_unless_priorities_are_configured() {
        let of = |settings: &Settings| {
            let periods = GracePeriods::for_drain(settings);
            periods.in_order().iter().map(|period| period.priority).collect::<Vec<_>>()
        };
        assert_eq!(of(&Settings::default()), [0, CRITICAL]);
        let by_priority = by_priority(&[(10, 1), (-5, 1)]);
        assert_eq!(of(&Settings { by_priority, ..Settings::default() }), [-5, 10]);
    }

    #[test]
    fn the_delay_is_the_sum_of_all_periods() {
        assert_eq!(of(&[(0, 20), (10, 0), (CRITICAL, 10)]).total_seconds(), 30);
        assert_eq!(of(&[(0, i64::MAX), (10, 5)]).total_seconds(), i64::MAX);
    }

    #[test]
    fn a_pod_has_the_period_with_the_highest_priority_not_above_its_own() {
        let periods = of(&[(0, 1), (10, 2), (10, 3), (CRITICAL, 4)]);
        for (priority, index) in [
            (i32::MIN, 0),
            (-1, 0),
            (0, 0),
            (9, 0),
            (10, 1),
            (11, 2),
            (CRITICAL - 1, 2),
            (CRITICAL, 3),
            (i32::MAX, 3),
        ] {
            assert_eq!(periods.index_of(priority), index, "{priority}");
        }
        assert_eq!(of(&[(7, 1)]).index_of(-7), 0);
    }

    proptest! {
        /// A pod never ends before a pod of lower priority.
        #[test]
        fn a_higher_priority_never_has_an_earlier_period(
            list in prop::collection::vec((-9i32..9, 0i64..9), 1..6),
            (low, high) in (-12i32..12, -12i32..12),
        ) {
            let periods = of(&list);
            let (low, high) = (low.min(high), low.max(high));
            prop_assert!(periods.index_of(low) <= periods.index_of(high));
            prop_assert!(periods.index_of(high) < list.len());
        }
    }
}
