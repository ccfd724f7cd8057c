//! Eviction orders: the status of an evicted pod, and how long an order is in effect
//! (runtime-and-resources.md §12.2, §12.5, §12.7).

use std::collections::BTreeMap;

use keelson_kube_model::Quantity;

use crate::desire::{ContainerShare, PodDesire, PodRef, Want};

use super::local::{self, ExceededLimit};
use super::signal::{FsLayout, Observation, Resource, Signal};
use super::threshold::Threshold;
use super::usage::Candidate;

/// The grace period of an immediate eviction, in seconds.
const IMMEDIATE_GRACE_SECONDS: i64 = 1;
/// How long the next eviction for a shortage waits for the previous one, in milliseconds.
pub const NEXT_EVICTION_DELAY_MS: u64 = 30_000;
/// The minimum time that a pod is given to end, in seconds.
const MIN_EXPECTED_SECONDS: i64 = 10;

/// The signal of an order that preempts a pod for a critical one.
pub const PREEMPTION: &str = "preemption";

/// The signal of an order that ends a pod before a shutdown of the machine.
pub const NODE_SHUTDOWN: &str = "node-shutdown";

/// The signal of an order that ends a pod because an operator drains the node.
pub const NODE_DRAIN: &str = "node-drain";

/// The kind of an order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OrderKind {
    /// The node is short of a resource, or the pod has exceeded a local storage limit.
    Eviction,
    /// A critical pod needs its resources.
    Preemption,
    /// The machine shuts down.
    NodeShutdown,
    /// An operator drains the node. It is in effect until the drain is undone, also after the pod has ended.
    NodeDrain,
}

/// The signals of evictions.
pub fn eviction_signals() -> impl Iterator<Item = &'static str> {
    Signal::ALL.into_iter().map(Signal::name).chain(local::SIGNALS)
}

/// An order to end a pod. It does not change while it is in effect.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Order {
    /// The pod.
    pub pod: PodRef,
    /// `status.reason`.
    pub reason: String,
    /// `status.message`.
    pub message: String,
    /// The grace period in seconds, which overrides the pod's own.
    pub grace_seconds: Option<i64>,
    /// The message of the `DisruptionTarget` condition.
    pub condition_message: String,
    /// The cause: an eviction signal, a kind of limit, [`PREEMPTION`], [`NODE_SHUTDOWN`] or [`NODE_DRAIN`].
    pub signal: String,
    /// When it was issued, in nanoseconds since 1970.
    pub since_unix_nanos: i64,
    /// Annotations of its event: who uses more of the starved resource than requested. The event is recorded once, when the
    /// order is issued, so the annotations are neither checkpointed nor sent with the order.
    pub annotations: BTreeMap<String, String>,
}

impl Order {
    fn evicted(desire: &PodDesire, message: String, signal: &str, grace: i64, now_unix_nanos: i64) -> Self {
        Self {
            pod: desire.header.pod.clone(),
            reason: "Evicted".to_owned(),
            condition_message: message.clone(),
            message,
            grace_seconds: Some(grace),
            signal: signal.to_owned(),
            since_unix_nanos: now_unix_nanos,
            annotations: BTreeMap::new(),
        }
    }

    /// Evicts a pod that has exceeded a local storage limit.
    pub fn for_exceeded_limit(
        desire: &PodDesire,
        exceeded_limit: ExceededLimit,
        now_unix_nanos: i64,
    ) -> Self {
        Self::evicted(
            desire,
            exceeded_limit.message,
            exceeded_limit.signal,
            IMMEDIATE_GRACE_SECONDS,
            now_unix_nanos,
        )
    }

    /// Evicts a pod because the node is short of a resource. `max_grace_seconds` is `evictionMaxPodGracePeriod`, which limits
    /// the pod's own grace period when the threshold is soft.
    pub fn for_shortage(
        candidate: &Candidate<'_>,
        threshold: &Threshold,
        observed: &Observation,
        max_grace_seconds: i64,
        now_unix_nanos: i64,
    ) -> Self {
        let grace = match threshold.is_hard() {
            true => IMMEDIATE_GRACE_SECONDS,
            false => max_grace_seconds.min(candidate.desire.grace_seconds).max(0),
        };
        let offenders = Offenders::of(candidate, threshold.signal.resource());
        let message = shortage_message(&offenders, threshold, observed);
        let signal = threshold.signal.name();
        Self {
            annotations: offenders.annotations(),
            ..Self::evicted(candidate.desire, message, signal, grace, now_unix_nanos)
        }
    }

    /// Preempts a pod for a critical one; it keeps its own grace period.
    pub fn for_preemption(desire: &PodDesire, now_unix_nanos: i64) -> Self {
        Self {
            pod: desire.header.pod.clone(),
            reason: "Preempting".to_owned(),
            message: "Preempted in order to admit critical pod".to_owned(),
            grace_seconds: None,
            condition_message: "Pod was preempted by Kubelet to accommodate a critical pod.".to_owned(),
            signal: PREEMPTION.to_owned(),
            since_unix_nanos: now_unix_nanos,
            annotations: BTreeMap::new(),
        }
    }

    /// What kind of order it is, by its signal.
    pub fn kind(&self) -> OrderKind {
        match self.signal.as_str() {
            PREEMPTION => OrderKind::Preemption,
            NODE_SHUTDOWN => OrderKind::NodeShutdown,
            NODE_DRAIN => OrderKind::NodeDrain,
            _ => OrderKind::Eviction,
        }
    }

    /// Whether it is an eviction for a shortage, not for a limit, a preemption or a shutdown.
    pub fn is_for_shortage(&self) -> bool {
        Signal::parse(&self.signal).is_some()
    }

    /// The seconds within which its pod should end: 1.5 grace periods, and at least 10 s (pod-lifecycle.md §6.6).
    /// `own_grace_seconds` is the pod's own grace period, which counts when the order does not override it.
    pub fn expected_seconds(&self, own_grace_seconds: i64) -> i64 {
        let grace = self.grace_seconds.unwrap_or(own_grace_seconds).max(0);
        grace.saturating_add(grace / 2).max(MIN_EXPECTED_SECONDS)
    }

    /// Whether its pod should have ended by now.
    pub fn is_overdue(&self, own_grace_seconds: i64, now_unix_nanos: i64) -> bool {
        let expected = self.expected_seconds(own_grace_seconds).saturating_mul(1_000_000_000);
        now_unix_nanos.saturating_sub(self.since_unix_nanos) > expected
    }

    /// Whether the next eviction for a shortage waits for this one.
    pub fn blocks_the_next(&self, now_unix_nanos: i64) -> bool {
        let delay = i64::try_from(NEXT_EVICTION_DELAY_MS).unwrap_or(i64::MAX).saturating_mul(1_000_000);
        // A clock that was set back must not extend the wait.
        let waited = now_unix_nanos.saturating_sub(self.since_unix_nanos);
        self.is_for_shortage() && (0..delay).contains(&waited)
    }
}

/// Who uses more of the starved resource than requested: the pod when it has a pod-level request, else its containers.
struct Offenders<'a> {
    resource: Resource,
    whole_pod: bool,
    /// Name, usage, request.
    found: Vec<(&'a str, Quantity, Quantity)>,
}

impl<'a> Offenders<'a> {
    fn of(candidate: &Candidate<'a>, resource: Resource) -> Self {
        let (desire, name) = (candidate.desire, resource.name());
        if let Some(request) = desire.pod_level_requests.get(name) {
            let usage = Quantity::from_bytes(candidate.usage.of(resource, None, FsLayout::One));
            let pod = (desire.header.pod.name.as_str(), usage, *request);
            let found = (usage > *request).then_some(pod).into_iter().collect();
            return Self { resource, whole_pod: true, found };
        }
        let one = |share: &'a ContainerShare| {
            let request = share.requests.get(name).copied().unwrap_or(Quantity::ZERO);
            let found = candidate.usage.containers.get(&share.name)?;
            let usage = match resource {
                Resource::Memory => found.memory,
                Resource::EphemeralStorage => found.layer.and(found.logs).map(|_| found.local_storage()),
                Resource::Inodes | Resource::Pids => None,
            };
            let usage = Quantity::from_bytes(usage?);
            (usage > request).then_some((share.name.as_str(), usage, request))
        };
        Self { resource, whole_pod: false, found: desire.containers.iter().filter_map(one).collect() }
    }

    /// Comma-separated lists, empty when nobody uses more than requested.
    fn annotations(&self) -> BTreeMap<String, String> {
        let list = |part: fn(&(&str, Quantity, Quantity)) -> String| {
            self.found.iter().map(part).collect::<Vec<_>>().join(",")
        };
        let key = if self.whole_pod { "offending_pod" } else { "offending_containers" };
        BTreeMap::from([
            ("starved_resource".to_owned(), self.resource.name().to_owned()),
            (key.to_owned(), list(|(name, ..)| (*name).to_owned())),
            (format!("{key}_usage"), list(|(_, usage, _)| usage.to_string())),
        ])
    }
}

/// The kubelet's message for a shortage.
fn shortage_message(offenders: &Offenders<'_>, threshold: &Threshold, observed: &Observation) -> String {
    let name = offenders.resource.name();
    let quantity = threshold.amount.of(observed.capacity);
    let available = offenders.resource.quantity(observed.available);
    let mut text = format!(
        "The node was low on resource: {name}. Threshold quantity: {quantity}, available: {available}. "
    );
    let kind = if offenders.whole_pod { "Pod" } else { "Container" };
    for (who, usage, request) in &offenders.found {
        text += &format!(
            "{kind} {who} was using {usage}, request is {request}, has larger consumption of {name}. "
        );
    }
    text
}

/// Whether an order is in effect: until its pod is finished. `want` is the pod's desired state; none when no set has named
/// the pod since the start.
pub const fn is_in_effect(want: Option<Want>) -> bool {
    matches!(want, None | Some(Want::Run | Want::Stop))
}

#[cfg(test)]
mod tests {
    use super::super::threshold::Amount;
    use super::super::usage::{ContainerUsage, PodUsage, Space};
    use super::*;
    use crate::desire::{ContainerShare, Desire as _};

    fn threshold(signal: Signal, text: &str, grace_ms: Option<u64>) -> Threshold {
        Threshold { signal, amount: Amount::parse(text).unwrap(), grace_ms, reclaim: None }
    }

    fn pod(requests: &[(&str, &str)]) -> PodDesire {
        let share = |name: &str| ContainerShare {
            name: name.to_owned(),
            requests: requests
                .iter()
                .map(|(resource, text)| ((*resource).to_owned(), Quantity::parse(text).unwrap()))
                .collect(),
            ..ContainerShare::default()
        };
        let pod = PodRef { uid: "u".into(), namespace: "ns".into(), name: "web".into() };
        PodDesire { grace_seconds: 30, containers: vec![share("a"), share("b")], ..PodDesire::forget(pod) }
    }

    fn usage(memory: u64) -> PodUsage {
        let space = |bytes| Some(Space { bytes, inodes: 1 });
        let container = |memory| ContainerUsage {
            memory: Some(memory),
            layer: space(900),
            logs: space(100),
            termination_log: space(24),
        };
        PodUsage {
            memory: Some(memory + 1),
            containers: [("a".to_owned(), container(memory)), ("b".to_owned(), container(1 << 10))].into(),
            ..PodUsage::default()
        }
    }

    fn message(desire: &PodDesire, usage: &PodUsage, threshold: &Threshold, available: u64) -> String {
        let observed = Observation { capacity: 1 << 30, available, taken: 0 };
        Order::for_shortage(&Candidate { desire, usage }, threshold, &observed, 0, 7).message
    }

    #[test]
    fn eviction_messages_name_containers_that_use_more_than_requested() {
        let memory = threshold(Signal::MemoryAvailable, "100Mi", None);
        assert_eq!(
            message(&pod(&[("memory", "1Mi")]), &usage(8 << 20), &memory, 90 << 20),
            "The node was low on resource: memory. Threshold quantity: 100Mi, available: 90Mi. Container a was using \
             8Mi, request is 1Mi, has larger consumption of memory. "
        );
        let disk = threshold(Signal::NodefsAvailable, "10%", None);
        assert_eq!(
            message(&pod(&[("ephemeral-storage", "1Ki")]), &usage(1), &disk, 1 << 20),
            "The node was low on resource: ephemeral-storage. Threshold quantity: 107374182, available: 1Mi. "
        );
        assert_eq!(
            message(&pod(&[]), &usage(1), &disk, 1 << 20),
            "The node was low on resource: ephemeral-storage. Threshold quantity: 107374182, available: 1Mi. Container \
             a was using 1Ki, request is 0, has larger consumption of ephemeral-storage. Container b was using 1Ki, \
             request is 0, has larger consumption of ephemeral-storage. "
        );
        let pids = threshold(Signal::PidAvailable, "1k", None);
        assert_eq!(
            message(&pod(&[]), &usage(1), &pids, 12),
            "The node was low on resource: pids. Threshold quantity: 1k, available: 12. "
        );
    }

    #[test]
    fn eviction_messages_name_the_pod_when_it_has_pod_level_requests() {
        let mut desire = pod(&[]);
        desire.pod_level_requests.insert("memory".into(), Quantity::from_bytes(2 << 10));
        let memory = threshold(Signal::MemoryAvailable, "1Ki", None);
        assert_eq!(
            message(&desire, &usage((4 << 10) - 1), &memory, 0),
            "The node was low on resource: memory. Threshold quantity: 1Ki, available: 0. Pod web was using 4Ki, request \
             is 2Ki, has larger consumption of memory. "
        );
        assert!(!message(&desire, &usage(1), &memory, 0).contains("Pod web"));
    }

    #[test]
    fn eviction_annotations_list_offenders_and_their_usage() {
        let whole = |request: u64| {
            let mut desire = pod(&[]);
            desire.pod_level_requests.insert("memory".into(), Quantity::from_bytes(request));
            desire
        };
        let (containers, whole_pod) = ("offending_containers", "offending_pod");
        let cases = [
            (pod(&[("memory", "1Mi")]), Signal::MemoryAvailable, containers, "a", "8Mi"),
            (pod(&[]), Signal::AllocatableMemoryAvailable, containers, "a,b", "8Mi,1Ki"),
            (pod(&[]), Signal::ImagefsAvailable, containers, "a,b", "1Ki,1Ki"),
            (pod(&[("memory", "8Mi")]), Signal::MemoryAvailable, containers, "", ""),
            (pod(&[]), Signal::NodefsInodesFree, containers, "", ""),
            (pod(&[]), Signal::PidAvailable, containers, "", ""),
            (whole(2 << 10), Signal::MemoryAvailable, whole_pod, "web", "8388609"),
            (whole((8 << 20) + 1), Signal::MemoryAvailable, whole_pod, "", ""),
        ];
        for (desire, signal, key, names, usages) in cases {
            let threshold = threshold(signal, "1Ki", None);
            let candidate = Candidate { desire: &desire, usage: &usage(8 << 20) };
            let order = Order::for_shortage(&candidate, &threshold, &Observation::default(), 0, 7);
            let usage_key = format!("{key}_usage");
            let expected =
                [("starved_resource", signal.resource().name()), (key, names), (&usage_key, usages)];
            let expected = expected.map(|(key, value)| (key.to_owned(), value.to_owned()));
            assert_eq!(order.annotations, BTreeMap::from(expected), "{signal:?} {names}");
        }
    }

    #[test]
    fn only_evictions_for_a_shortage_have_annotations() {
        let exceeded_limit = ExceededLimit { signal: "emptydirfs.limit", message: "m".into() };
        assert_eq!(Order::for_exceeded_limit(&pod(&[]), exceeded_limit, 7).annotations, BTreeMap::new());
        assert_eq!(Order::for_preemption(&pod(&[]), 7).annotations, BTreeMap::new());
    }

    #[test]
    fn hard_thresholds_evict_within_a_second_and_soft_ones_after_the_shorter_grace() {
        let (desire, usage) = (pod(&[]), usage(1));
        let candidate = Candidate { desire: &desire, usage: &usage };
        for (grace_ms, max, granted) in [(None, 60, 1), (Some(1), 60, 30), (Some(1), 20, 20), (Some(1), 0, 0)]
        {
            let threshold = threshold(Signal::MemoryAvailable, "1Mi", grace_ms);
            let order = Order::for_shortage(&candidate, &threshold, &Observation::default(), max, 7);
            assert_eq!(order.grace_seconds, Some(granted), "{grace_ms:?} {max}");
            assert_eq!((order.reason.as_str(), order.signal.as_str()), ("Evicted", "memory.available"));
            assert_eq!(order.condition_message, order.message);
        }
        let exceeded_limit = ExceededLimit { signal: "emptydirfs.limit", message: "m".into() };
        assert_eq!(Order::for_exceeded_limit(&desire, exceeded_limit, 7).grace_seconds, Some(1));
        let preempted = Order::for_preemption(&desire, 7);
        assert_eq!((preempted.reason.as_str(), preempted.grace_seconds), ("Preempting", None));
    }

    #[test]
    fn the_signal_of_an_order_says_what_kind_it_is() {
        let kind = |signal: &str| Order { signal: signal.to_owned(), ..Order::default() }.kind();
        assert!(eviction_signals().all(|signal| kind(signal) == OrderKind::Eviction));
        assert_eq!(kind("preemption"), OrderKind::Preemption);
        assert_eq!(kind("node-shutdown"), OrderKind::NodeShutdown);
    }

    #[test]
    fn the_next_eviction_waits_until_the_last_one_had_its_time() {
        let second = 1_000_000_000;
        let short =
            Order { signal: "memory.available".into(), since_unix_nanos: 100 * second, ..Order::default() };
        for (now, waits) in [(100, true), (129, true), (130, false), (99, false)] {
            assert_eq!(short.blocks_the_next(now * second), waits, "{now}");
        }
        let limit = Order { signal: "emptydirfs.limit".into(), ..short };
        assert!(!limit.blocks_the_next(100 * second));
    }

    #[test]
    fn an_evicted_pod_has_one_and_a_half_grace_periods_but_at_least_ten_seconds() {
        for (grace, own, seconds) in [
            (Some(0), 600, 10),
            (Some(6), 600, 10),
            (Some(7), 600, 10),
            (Some(8), 600, 12),
            (Some(21), 600, 31),
            (None, 30, 45),
            (None, -1, 10),
        ] {
            let order = Order { grace_seconds: grace, since_unix_nanos: 5_000_000_000, ..Order::default() };
            assert_eq!(order.expected_seconds(own), seconds, "{grace:?} {own}");
            let at = |seconds: i64| 5_000_000_000 + seconds * 1_000_000_000;
            assert!(!order.is_overdue(own, at(seconds)) && order.is_overdue(own, at(seconds) + 1));
            assert!(!order.is_overdue(own, 0), "the clock was set back");
        }
    }

    #[test]
    fn an_eviction_order_is_in_effect_until_the_pod_is_finished() {
        for (want, in_effect) in [
            (None, true),
            (Some(Want::Run), true),
            (Some(Want::Stop), true),
            (Some(Want::Unmount), false),
            (Some(Want::Forget), false),
        ] {
            assert_eq!(is_in_effect(want), in_effect, "{want:?}");
        }
    }
}
