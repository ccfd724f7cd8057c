//! What an evicted pod is told to show, and how long orders stand (runtime-and-resources.md §12.2, §12.5, §12.7).

use keelson_kube_model::Quantity;

use crate::desire::{PodDesire, PodRef, Want};

use super::local::Breach;
use super::signal::{Observation, Resource};
use super::threshold::Threshold;
use super::usage::Candidate;

/// What a pod is granted that goes at once, in seconds.
const AT_ONCE_SECONDS: i64 = 1;
/// How long an order is waited for before the next one may come, in milliseconds.
pub const PATIENCE_MS: u64 = 30_000;

/// An order to end a pod; it does not change while it stands.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Order {
    /// The pod.
    pub pod: PodRef,
    /// `status.reason`.
    pub reason: String,
    /// `status.message`.
    pub message: String,
    /// Instead of the pod's own grace.
    pub grace_seconds: Option<i64>,
    /// The message of the condition.
    pub condition_message: String,
    /// What it is about: a signal, a kind of limit.
    pub signal: String,
    /// When it was given.
    pub since_unix_nanos: i64,
}

impl Order {
    fn evicted(desire: &PodDesire, message: String, signal: &str, grace: i64, now_unix_nanos: i64) -> Self {
        Self {
            pod: desire.pod.clone(),
            reason: "Evicted".to_owned(),
            condition_message: message.clone(),
            message,
            grace_seconds: Some(grace),
            signal: signal.to_owned(),
            since_unix_nanos: now_unix_nanos,
        }
    }

    /// For a pod that has exceeded a limit.
    pub fn for_breach(desire: &PodDesire, breach: Breach, now_unix_nanos: i64) -> Self {
        Self::evicted(desire, breach.message, breach.signal, AT_ONCE_SECONDS, now_unix_nanos)
    }

    /// For the pod that goes because the node is short of something. `max_grace_seconds` is
    /// `evictionMaxPodGracePeriod`, which bounds the pod's own grace when the threshold is a soft one.
    pub fn for_shortage(
        candidate: &Candidate<'_>,
        threshold: &Threshold,
        seen: &Observation,
        max_grace_seconds: i64,
        now_unix_nanos: i64,
    ) -> Self {
        let grace = match threshold.is_hard() {
            true => AT_ONCE_SECONDS,
            false => max_grace_seconds.min(candidate.desire.grace_seconds).max(0),
        };
        let message = shortage(candidate, threshold, seen);
        Self::evicted(candidate.desire, message, threshold.signal.name(), grace, now_unix_nanos)
    }

    /// For a pod that makes room for a critical one; it has its own grace.
    pub fn for_preemption(desire: &PodDesire, now_unix_nanos: i64) -> Self {
        Self {
            pod: desire.pod.clone(),
            reason: "Preempting".to_owned(),
            message: "Preempted in order to admit critical pod".to_owned(),
            grace_seconds: None,
            condition_message: "Pod was preempted by Kubelet to accommodate a critical pod.".to_owned(),
            signal: "preemption".to_owned(),
            since_unix_nanos: now_unix_nanos,
        }
    }

    /// Whether it is one of those that a shortage has brought about.
    pub fn is_for_shortage(&self) -> bool {
        super::signal::Signal::parse(&self.signal).is_some()
    }

    /// Whether the next one for a shortage is to wait for this one.
    pub fn is_waited_for(&self, now_unix_nanos: i64) -> bool {
        let patience = i64::try_from(PATIENCE_MS).unwrap_or(i64::MAX).saturating_mul(1_000_000);
        // A clock that was set back must not make it wait for longer.
        let waited = now_unix_nanos.saturating_sub(self.since_unix_nanos);
        self.is_for_shortage() && (0..patience).contains(&waited)
    }
}

/// The kubelet's text.
fn shortage(candidate: &Candidate<'_>, threshold: &Threshold, seen: &Observation) -> String {
    let resource = threshold.signal.resource();
    let name = resource.name();
    let quantity = threshold.amount.of(seen.capacity);
    let available = resource.quantity(seen.available);
    let mut text = format!(
        "The node was low on resource: {name}. Threshold quantity: {quantity}, available: {available}. "
    );
    let desire = candidate.desire;
    if let Some(request) = desire.pod_level_requests.get(name) {
        let usage = Quantity::from_bytes(candidate.usage.of(resource, None, super::signal::Layout::One));
        if usage > *request {
            text += &consumer("Pod", &desire.pod.name, usage, *request, name);
        }
        return text;
    }
    for share in &desire.containers {
        let request = share.requests.get(name).copied().unwrap_or(Quantity::ZERO);
        let found = candidate.usage.containers.get(&share.name);
        let usage = found.and_then(|found| match resource {
            Resource::Memory => found.memory,
            Resource::EphemeralStorage => Some(found.layer?.bytes.saturating_add(found.logs?.bytes)),
            Resource::Inodes | Resource::Pids => None,
        });
        if let Some(usage) = usage.map(Quantity::from_bytes).filter(|usage| *usage > request) {
            text += &consumer("Container", &share.name, usage, request, name);
        }
    }
    text
}

fn consumer(kind: &str, name: &str, usage: Quantity, request: Quantity, resource: &str) -> String {
    format!("{kind} {name} was using {usage}, request is {request}, has larger consumption of {resource}. ")
}

/// Whether an order still stands: until its pod is finished. `wants` is what is wanted of the pod; none when nobody
/// has named it yet since the start.
pub const fn stands(want: Option<Want>) -> bool {
    matches!(want, None | Some(Want::Run | Want::Stop))
}

#[cfg(test)]
mod tests {
    use super::super::signal::Signal;
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
        let container = |memory| ContainerUsage { memory: Some(memory), layer: space(900), logs: space(124) };
        PodUsage {
            memory: Some(memory + 1),
            containers: [("a".to_owned(), container(memory)), ("b".to_owned(), container(1 << 10))].into(),
            ..PodUsage::default()
        }
    }

    fn message(desire: &PodDesire, usage: &PodUsage, threshold: &Threshold, available: u64) -> String {
        let seen = Observation { capacity: 1 << 30, available, taken: 0 };
        Order::for_shortage(&Candidate { desire, usage }, threshold, &seen, 0, 7).message
    }

    #[test]
    fn the_message_names_the_shortage_and_each_container_that_takes_more_than_it_asked_for() {
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
    fn a_pod_with_a_request_of_its_own_is_named_as_a_whole() {
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
    fn a_hard_threshold_grants_a_second_and_a_soft_one_the_shorter_of_two_graces() {
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
        let breach = Breach { signal: "emptydirfs.limit", message: "m".into() };
        assert_eq!(Order::for_breach(&desire, breach, 7).grace_seconds, Some(1));
        let preempted = Order::for_preemption(&desire, 7);
        assert_eq!((preempted.reason.as_str(), preempted.grace_seconds), ("Preempting", None));
    }

    #[test]
    fn the_next_pod_goes_only_when_the_last_one_had_its_time() {
        let second = 1_000_000_000;
        let short =
            Order { signal: "memory.available".into(), since_unix_nanos: 100 * second, ..Order::default() };
        for (now, waits) in [(100, true), (129, true), (130, false), (99, false)] {
            assert_eq!(short.is_waited_for(now * second), waits, "{now}");
        }
        let limit = Order { signal: "emptydirfs.limit".into(), ..short };
        assert!(!limit.is_waited_for(100 * second));
    }

    #[test]
    fn an_order_stands_until_the_pod_is_finished() {
        for (want, stands_still) in [
            (None, true),
            (Some(Want::Run), true),
            (Some(Want::Stop), true),
            (Some(Want::Unmount), false),
            (Some(Want::Forget), false),
        ] {
            assert_eq!(stands(want), stands_still, "{want:?}");
        }
    }
}
