//! A node that an operator has drained: it starts no new pod, and can end those that run (docs/command.md, "Draining a node").

use std::collections::BTreeSet;

use crate::admit::Rejection;
use crate::desire::PodDesire;
use crate::eviction::order::{NODE_DRAIN, Order};
use crate::node_shutdown::groups::{Group, divide};
use crate::node_shutdown::periods::GracePeriods;

/// `status.reason` of a pod that a drain has ended.
pub const REASON: &str = "Drained";
/// `status.message` of such a pod, and the message of its condition `DisruptionTarget`.
pub const MESSAGE: &str = "Pod was stopped because the node was drained; `keelson uncordon` starts it again.";

/// The state of a drained node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Drain {
    /// When the drain began, in nanoseconds since 1970.
    pub since_unix_nanos: i64,
    /// Whether pods are ended; otherwise those of `pods` keep running, also over a reboot.
    pub stop_pods: bool,
    /// The UIDs of the pods that were admitted when the drain began: they are not new.
    pub pods: BTreeSet<String>,
}

impl Drain {
    /// Whether a pod that is not admitted may be. A pod that ran when the drain began starts again after a reboot, unless the
    /// drain ends pods.
    pub fn admits(&self, uid: &str) -> bool {
        !self.stop_pods && self.pods.contains(uid)
    }

    /// The drain after another request for one. A drain that ends pods continues to do so.
    #[must_use]
    pub fn requested_again(self, stop_pods: bool) -> Self {
        Self { stop_pods: self.stop_pods || stop_pods, ..self }
    }
}

/// The rejection of a new pod on a drained node. It is temporary: the pod waits until the drain is undone.
pub fn rejection() -> Rejection {
    Rejection {
        reason: "NodeDrained".to_owned(),
        message: "The node is drained and starts no new pods; `keelson uncordon` lets it start them."
            .to_owned(),
        temporary: true,
    }
}

/// Divides the pods that have not ended into groups by rising priority, as a shutdown does. Each pod has its own grace period.
/// The next group follows when all pods of a group have ended, or the longest of its orders is overdue.
pub fn groups<'a>(
    periods: &GracePeriods,
    pods: impl IntoIterator<Item = &'a PodDesire>,
    now_unix_nanos: i64,
) -> Vec<Group> {
    let mut groups = divide(periods, pods, |pod, _| order(pod, now_unix_nanos));
    for group in &mut groups {
        group.seconds = group.orders.iter().map(|order| order.expected_seconds(0)).max().unwrap_or(0);
    }
    groups
}

fn order(pod: &PodDesire, now_unix_nanos: i64) -> Order {
    Order {
        pod: pod.header.pod.clone(),
        reason: REASON.to_owned(),
        message: MESSAGE.to_owned(),
        grace_seconds: Some(pod.grace_seconds),
        condition_message: MESSAGE.to_owned(),
        signal: NODE_DRAIN.to_owned(),
        since_unix_nanos: now_unix_nanos,
        ..Order::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::desire::{Desire as _, PodRef, Want};
    use crate::eviction::order::OrderKind;
    use crate::node_shutdown::periods::Settings;

    #[test]
    fn a_drained_node_admits_only_pods_that_ran_before_and_none_when_it_ends_pods() {
        let pods = BTreeSet::from(["old".to_owned()]);
        let drain = Drain { since_unix_nanos: 7, stop_pods: false, pods };
        assert!(drain.admits("old") && !drain.admits("new"));
        let same = drain.clone().requested_again(false);
        assert_eq!(same, drain);
        let ending = same.requested_again(true);
        assert!(!ending.admits("old") && !ending.admits("new"));
        assert_eq!(ending.since_unix_nanos, 7);
        assert_eq!(ending.clone().requested_again(false), ending, "it does not start pods that it has ended");
    }

    #[test]
    fn a_drain_ends_pods_by_rising_priority_with_their_own_grace_periods() {
        let pod = |uid: &str, priority: i32, grace_seconds: i64, want: Want| {
            let reference = PodRef { uid: uid.into(), namespace: "ns".into(), name: uid.into() };
            let mut desire = PodDesire::forget(reference);
            desire.header.want = want;
            PodDesire { priority, grace_seconds, ..desire }
        };
        let pods = [
            pod("critical", 2_000_001_000, 5, Want::Run),
            pod("b", 0, 600, Want::Run),
            pod("a", -7, 30, Want::Stop),
            pod("gone", 0, 30, Want::Forget),
        ];
        let groups = groups(&GracePeriods::for_drain(&Settings::default()), &pods, 9);
        let shape: Vec<_> = groups
            .iter()
            .map(|group| {
                let graces = group.orders.iter().map(|order| (order.pod.uid.as_str(), order.grace_seconds));
                (group.seconds, graces.collect::<Vec<_>>())
            })
            .collect();
        let low = vec![("a", Some(30)), ("b", Some(600))];
        assert_eq!(shape, [(900, low), (10, vec![("critical", Some(5))])]);
        let order = &groups[0].orders[0];
        assert_eq!((order.kind(), order.reason.as_str()), (OrderKind::NodeDrain, "Drained"));
        assert_eq!((order.since_unix_nanos, order.message.as_str()), (9, MESSAGE));
    }

    #[test]
    fn a_new_pod_waits_on_a_drained_node_and_learns_how_to_undo_it() {
        let Rejection { reason, message, temporary } = rejection();
        assert_eq!((reason.as_str(), temporary), ("NodeDrained", true));
        assert!(message.contains("`keelson uncordon`"), "{message}");
    }
}
