//! The order in which pods are ended before a shutdown (node-and-api.md §11, pod-lifecycle.md §15.2).

use crate::desire::{PodDesire, Want};
use crate::eviction::order::{NODE_SHUTDOWN, Order};

use super::periods::{GracePeriod, GracePeriods};

/// `status.reason` of a pod that was ended before a shutdown.
pub const REASON: &str = "Terminated";
/// `status.message` of such a pod, and the message of its condition `DisruptionTarget`.
pub const MESSAGE: &str = "Pod was terminated in response to imminent node shutdown.";

/// Pods that are ended at the same time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// The lowest priority of the group.
    pub priority: i32,
    /// The seconds after which the next group is ended, even if pods of this one still run.
    pub seconds: i64,
    /// An order per pod, in the order of their UIDs; never empty.
    pub orders: Vec<Order>,
}

/// Divides the pods that have not ended into groups, in the order in which they are ended: by rising priority. A period
/// without pods has no group, so that nothing waits for it.
///
/// The grace period of a pod is its own, and at most that of its group. Critical and static pods are ended like others.
pub fn groups<'a>(
    periods: &GracePeriods,
    pods: impl IntoIterator<Item = &'a PodDesire>,
    now_unix_nanos: i64,
) -> Vec<Group> {
    divide(periods, pods, |pod, period| order(pod, pod.grace_seconds.min(period.seconds), now_unix_nanos))
}

/// Divides the pods that have not ended into groups as [`groups`] does, with the order that `order` makes for each.
pub(crate) fn divide<'a>(
    periods: &GracePeriods,
    pods: impl IntoIterator<Item = &'a PodDesire>,
    order: impl Fn(&PodDesire, &GracePeriod) -> Order,
) -> Vec<Group> {
    let group = |period: &GracePeriod| Group {
        priority: period.priority,
        seconds: period.seconds,
        orders: Vec::new(),
    };
    let mut groups: Vec<Group> = periods.in_order().iter().map(group).collect();
    for pod in pods.into_iter().filter(|pod| is_active(pod.header.want)) {
        let index = periods.index_of(pod.priority);
        if let (Some(group), Some(period)) = (groups.get_mut(index), periods.in_order().get(index)) {
            group.orders.push(order(pod, period));
        }
    }
    groups.retain(|group| !group.orders.is_empty());
    for group in &mut groups {
        group.orders.sort_by(|one, other| one.pod.uid.cmp(&other.pod.uid));
    }
    groups
}

impl Group {
    /// The time in nanoseconds that the group still has. A group that was ordered to end before a restart of this agent,
    /// according to `earlier` orders, has what is left of its time.
    ///
    /// A clock that was set meanwhile gives it at most its whole time.
    pub fn left_nanos<'a>(&self, earlier: impl IntoIterator<Item = &'a Order>, now_unix_nanos: i64) -> u64 {
        let whole = self.seconds.max(0).saturating_mul(1_000_000_000);
        let is_own = |order: &&Order| self.orders.iter().any(|own| own.pod.uid == order.pod.uid);
        let kind = self.orders.first().map(Order::kind);
        let earlier = earlier.into_iter().filter(|order| Some(order.kind()) == kind);
        let since = earlier.filter(is_own).map(|order| order.since_unix_nanos).min();
        let passed = since.map_or(0, |since| now_unix_nanos.saturating_sub(since)).clamp(0, whole);
        u64::try_from(whole - passed).unwrap_or(0)
    }
}

fn order(pod: &PodDesire, grace_seconds: i64, now_unix_nanos: i64) -> Order {
    Order {
        pod: pod.header.pod.clone(),
        reason: REASON.to_owned(),
        message: MESSAGE.to_owned(),
        grace_seconds: Some(grace_seconds),
        condition_message: MESSAGE.to_owned(),
        signal: NODE_SHUTDOWN.to_owned(),
        since_unix_nanos: now_unix_nanos,
        ..Order::default()
    }
}

/// Whether processes of the pod may run: it is ended, also when it is ending already and has a longer grace period left.
const fn is_active(want: Want) -> bool {
    match want {
        Want::Run | Want::Stop => true,
        Want::Unmount | Want::Forget => false,
    }
}

/// Whether a group no longer waits for a pod: its processes have ended and its volumes are unmounted. `want` is the pod's
/// desired state; none when the complete set of pods does not name it.
pub const fn has_ended(want: Option<Want>) -> bool {
    match want {
        None | Some(Want::Forget) => true,
        Some(Want::Run | Want::Stop | Want::Unmount) => false,
    }
}

#[cfg(test)]
mod tests {
    use keelson_kube_model::pod_ext::SYSTEM_CRITICAL_PRIORITY;

    use super::super::periods::{GracePeriod, Settings};
    use super::*;
    use crate::desire::{Desire as _, PodRef};

    fn periods() -> GracePeriods {
        let period = |priority, seconds| GracePeriod { priority, seconds };
        let settings = Settings {
            by_priority: vec![period(0, 20), period(1000, 5), period(SYSTEM_CRITICAL_PRIORITY, 10)],
            ..Settings::default()
        };
        GracePeriods::from_settings(&settings).unwrap()
    }

    fn pod(uid: &str, priority: i32, grace_seconds: i64, want: Want) -> PodDesire {
        let reference = PodRef { uid: uid.into(), namespace: "ns".into(), name: uid.into() };
        let mut desire = PodDesire::forget(reference);
        desire.header.want = want;
        PodDesire { priority, grace_seconds, ..desire }
    }

    /// Priority and seconds of each group, with UID and grace period of its pods.
    type Shape<'a> = Vec<(i32, i64, Vec<(&'a str, i64)>)>;

    fn shape(groups: &[Group]) -> Shape<'_> {
        let end = |order: &'_ Order| order.grace_seconds.unwrap();
        let pods = |group: &'_ Group| group.orders.iter().map(end).collect::<Vec<_>>();
        groups
            .iter()
            .map(|group| {
                let uids = group.orders.iter().map(|order| order.pod.uid.as_str());
                (group.priority, group.seconds, uids.zip(pods(group)).collect())
            })
            .collect()
    }

    #[test]
    fn pods_end_by_rising_priority_with_the_shorter_grace_period() {
        let critical =
            PodDesire { critical: true, ..pod("critical", SYSTEM_CRITICAL_PRIORITY + 1000, 30, Want::Run) };
        let pods = [
            critical,
            pod("b", 0, 30, Want::Run),
            pod("a", -7, 20, Want::Run),
            pod("short", 999, 3, Want::Run),
            pod("zero", 0, 0, Want::Run),
        ];
        assert_eq!(
            shape(&groups(&periods(), &pods, 7)),
            [
                (0, 20, vec![("a", 20), ("b", 20), ("short", 3), ("zero", 0)]),
                (SYSTEM_CRITICAL_PRIORITY, 10, vec![("critical", 10)]),
            ],
            "the group from priority 1000 on is empty"
        );
        assert_eq!(groups(&periods(), &[], 7), []);
    }

    #[test]
    fn only_pods_whose_processes_may_run_are_ended() {
        for (want, ended) in
            [(Want::Run, true), (Want::Stop, true), (Want::Unmount, false), (Want::Forget, false)]
        {
            let found = groups(&periods(), &[pod("a", 0, 1, want)], 7);
            assert_eq!(!found.is_empty(), ended, "{want:?}");
        }
    }

    #[test]
    fn a_pod_that_a_shutdown_ends_has_the_kubelets_reason_and_message() {
        let found = groups(&periods(), &[pod("a", 0, 60, Want::Run)], 7);
        let order = &found[0].orders[0];
        assert_eq!(order.reason, "Terminated");
        assert_eq!(order.message, "Pod was terminated in response to imminent node shutdown.");
        assert_eq!(order.condition_message, order.message);
        assert_eq!((order.pod.uid.as_str(), order.since_unix_nanos), ("a", 7));
        assert!(!order.is_for_shortage() && !order.blocks_the_next(7), "an eviction need not wait for it");
    }

    #[test]
    fn a_group_that_was_ordered_to_end_before_has_the_rest_of_its_time() {
        const SECOND: i64 = 1_000_000_000;
        let group = &groups(&periods(), &[pod("a", 0, 60, Want::Stop), pod("b", 0, 60, Want::Run)], 0)[0];
        let order = |uid: &str, signal: &str, since_seconds: i64| Order {
            pod: PodRef { uid: uid.into(), ..PodRef::default() },
            signal: signal.into(),
            since_unix_nanos: since_seconds * SECOND,
            ..Order::default()
        };
        for (earlier, left_seconds) in [
            (vec![], 20),
            (vec![order("a", NODE_SHUTDOWN, 95)], 15),
            (vec![order("a", NODE_SHUTDOWN, 95), order("b", NODE_SHUTDOWN, 90)], 10),
            (vec![order("a", NODE_SHUTDOWN, 7)], 0),
            (vec![order("a", NODE_SHUTDOWN, 200)], 20),
            (vec![order("a", "memory.available", 95)], 20),
            (vec![order("of another group", NODE_SHUTDOWN, 95)], 20),
        ] {
            assert_eq!(group.left_nanos(&earlier, 100 * SECOND), left_seconds * 1_000_000_000, "{earlier:?}");
        }
    }

    #[test]
    fn a_group_waits_until_volumes_are_unmounted() {
        for (want, ended) in [
            (None, true),
            (Some(Want::Run), false),
            (Some(Want::Stop), false),
            (Some(Want::Unmount), false),
            (Some(Want::Forget), true),
        ] {
            assert_eq!(has_ended(want), ended, "{want:?}");
        }
    }
}
