//! What is stored of a pod's resize, and how it changes.

use std::collections::BTreeSet;

use keelson_kube_model::Pod;
use serde::{Deserialize, Serialize};

use crate::allocation::Allocation;

/// Why a resize is pending.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PendingReason {
    /// The node has not enough free resources now; it is tried again.
    Deferred,
    /// This pod cannot have these resources on this node.
    Infeasible,
}

impl PendingReason {
    /// The reason in the condition `PodResizePending`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Deferred => "Deferred",
            Self::Infeasible => "Infeasible",
        }
    }
}

/// A resize that has not been accepted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PendingResize {
    /// Why.
    pub reason: PendingReason,
    /// For people.
    pub message: String,
    /// `metadata.generation` of the pod that asks for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<i64>,
    /// The resources that it asks for.
    pub wanted: Allocation,
    /// Since when it is pending for this reason, unix nanoseconds.
    pub since_unix_nanos: i64,
}

/// A resize that was accepted and is not completed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResizeInProgress {
    /// `metadata.generation` of the pod when it was accepted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<i64>,
    /// When it was accepted, unix nanoseconds.
    pub since_unix_nanos: i64,
    /// Why the last attempt to carry it out failed; empty if it did not.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub error: String,
}

/// What is stored of a pod's resize.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ResizeRecord {
    /// The resources that were last written to the runtime; `None`: those that are allocated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub actuated: Option<Allocation>,
    /// Running containers of which an update was begun: whether it was carried out is not known, so it is repeated.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub updating: BTreeSet<String>,
    /// A resize that has not been accepted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pending: Option<PendingResize>,
    /// A resize that is being carried out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_progress: Option<ResizeInProgress>,
}

impl ResizeRecord {
    /// A resize to the resources of `pod` is accepted; `before` was allocated until now.
    pub fn accept(&mut self, pod: &Pod, before: Allocation, now_unix_nanos: i64) {
        self.actuated.get_or_insert(before);
        self.pending = None;
        self.in_progress = Some(ResizeInProgress {
            generation: pod.metadata.generation,
            since_unix_nanos: now_unix_nanos,
            error: String::new(),
        });
    }

    /// A resize to the resources of `pod` is not accepted. Returns whether that is new and needs an event: the reason, the generation or
    /// the resources are others than before.
    pub fn deny(&mut self, pod: &Pod, reason: PendingReason, message: &str, now_unix_nanos: i64) -> bool {
        let (wanted, generation) = (Allocation::of(pod), pod.metadata.generation);
        let before = self.pending.as_ref();
        let same = before.filter(|old| old.reason == reason);
        let is_new = same.is_none_or(|old| old.generation != generation || old.wanted != wanted);
        let since_unix_nanos = same.map_or(now_unix_nanos, |old| old.since_unix_nanos);
        let message = message.to_owned();
        self.pending = Some(PendingResize { reason, message, generation, wanted, since_unix_nanos });
        is_new
    }

    /// An attempt to carry the resize out has failed. Returns whether the error is another one than before; another usage does not
    /// make it one, and the first stays.
    pub fn fail(&mut self, error: &str) -> bool {
        match &mut self.in_progress {
            Some(progress) if without_usage(&progress.error) != without_usage(error) => {
                error.clone_into(&mut progress.error);
                true
            }
            _ => false,
        }
    }

    /// The update of a running container begins.
    pub fn begin_update(&mut self, name: &str) {
        self.updating.insert(name.to_owned());
    }

    /// A container is about to be created with the resources in `pod`, or was updated to them.
    pub fn container_has(&mut self, name: &str, pod: &Pod) {
        let Some(actuated) = &mut self.actuated else { return };
        let resources = pod.container(name).map(|(_, container)| container.resources.clone());
        actuated.set_container(name, resources.unwrap_or_default());
        self.updating.remove(name);
    }

    /// Everything has its resources. Returns the resize that is completed.
    pub fn complete(&mut self) -> Option<ResizeInProgress> {
        self.actuated = None;
        self.updating.clear();
        self.in_progress.take()
    }

    /// Nothing of a resize is known.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// What a refused memory limit is compared with in an error; the usage follows, in bytes and parentheses. resource-manager uses the same
/// words.
pub const BELOW_USAGE: &str = " below current usage (";

/// The part of an error that is the same for each attempt.
fn without_usage(error: &str) -> &str {
    error.split_once(BELOW_USAGE).map_or(error, |(same, _)| same)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(cpu: &str, generation: i64) -> Pod {
        serde_json::from_value(json!({"metadata": {"generation": generation}, "spec": {"containers": [
            {"name": "a", "resources": {"requests": {"cpu": cpu}}}, {"name": "b"}]}}))
        .unwrap()
    }

    #[test]
    fn people_are_told_once_for_each_reason_generation_and_wish() {
        use PendingReason::{Deferred, Infeasible};
        let mut record = ResizeRecord::default();
        for (pod, reason, told, since) in [
            (pod("2", 1), Deferred, true, 10),
            (pod("2", 1), Deferred, false, 10),
            (pod("2", 2), Deferred, true, 10),
            (pod("3", 2), Deferred, true, 10),
            (pod("3", 2), Infeasible, true, 50),
            (pod("3", 2), Infeasible, false, 50),
        ] {
            let now = since.max(10);
            assert_eq!(record.deny(&pod, reason, "why", now), told);
            assert_eq!(record.pending.as_ref().map(|pending| pending.since_unix_nanos), Some(since));
        }
    }

    #[test]
    fn what_was_written_stays_known_over_several_accepted_resizes() {
        let (first, second) = (Allocation::of(&pod("1", 1)), Allocation::of(&pod("2", 2)));
        let mut record = ResizeRecord::default();
        record.deny(&pod("2", 2), PendingReason::Deferred, "why", 1);
        record.accept(&pod("2", 2), first.clone(), 2);
        assert_eq!((record.actuated.as_ref(), &record.pending), (Some(&first), &None));
        record.accept(&pod("3", 3), second, 3);
        assert_eq!(record.actuated, Some(first), "nothing was written in between");
        assert_eq!(record.in_progress.as_ref().and_then(|progress| progress.generation), Some(3));
        assert!(record.fail("below usage") && !record.fail("below usage"));
        record.begin_update("a");
        record.container_has("a", &pod("3", 3));
        assert!(record.updating.is_empty());
        assert_eq!(record.actuated, Some(Allocation::of(&pod("3", 3))));
        assert_eq!(record.complete().map(|progress| progress.since_unix_nanos), Some(3));
        assert!(record.is_empty());
    }

    #[test]
    fn another_usage_is_no_other_error_but_another_limit_is() {
        let refused = |limit: i64, usage: i64| {
            format!("attempting to set pod memory limit ({limit}){BELOW_USAGE}{usage})")
        };
        let mut record = ResizeRecord::default();
        record.accept(&pod("2", 2), Allocation::of(&pod("1", 1)), 5);
        for (error, told) in [
            (refused(10, 20), true),
            (refused(10, 21), false),
            (refused(11, 21), true),
            ("the runtime refuses it".to_owned(), true),
            (refused(11, 22), true),
        ] {
            assert_eq!(record.fail(&error), told, "{error}");
        }
    }

    #[test]
    fn a_resize_record_survives_serialization() {
        let mut record = ResizeRecord::default();
        record.accept(&pod("2", 2), Allocation::of(&pod("1", 1)), 5);
        record.fail("why");
        record.deny(&pod("9", 3), PendingReason::Infeasible, "why", 6);
        let text = serde_json::to_string(&record).unwrap();
        assert_eq!(serde_json::from_str::<ResizeRecord>(&text).unwrap(), record, "{text}");
        assert_eq!(serde_json::to_string(&ResizeRecord::default()).unwrap(), "{}");
    }
}
