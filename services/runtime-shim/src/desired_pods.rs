//! The desired pods that pod-sync has sent.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use keelson_proto::keelson::common::v1::Want;
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_runtime_shim_core::container_gc::Wanted;
use tokio::sync::Notify;
use tonic::Status;

/// The pods that pod-sync wants, shared by the `Sync` stream and the collector.
#[derive(Debug, Clone, Default)]
pub struct DesiredPods(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// Number of the newest stream; messages of older streams are refused.
    stream: u64,
    /// The desired pods by UID.
    pods: BTreeMap<String, DesiredPod>,
    /// UIDs of the pods that the newest stream has sent so far, until its set is complete.
    incoming: BTreeSet<String>,
    replaying: bool,
    /// The newest stream has sent a complete set with all sources ready.
    complete: bool,
}

#[derive(Debug)]
struct DesiredPod {
    want: Wanted,
    /// Images of the pod, as written in its spec.
    images: Vec<String>,
}

impl State {
    fn want(&self, uid: &str) -> Option<Wanted> {
        self.pods.get(uid).map(|pod| pod.want)
    }
}

impl DesiredPods {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a new `Sync` stream and returns its number.
    pub fn begin(&self) -> u64 {
        let mut state = self.state();
        state.stream += 1;
        state.incoming.clear();
        state.replaying = true;
        state.complete = false;
        state.stream
    }

    /// Applies a message of stream `number`. Returns the epoch to acknowledge if the message completes a set.
    ///
    /// # Errors
    /// ABORTED: there is a newer stream.
    pub fn apply_message(&self, number: u64, item: pb::sync_request::Item) -> Result<Option<u64>, Status> {
        let mut state = self.state();
        if state.stream != number {
            return Err(Status::aborted("a newer Sync stream has taken over"));
        }
        let mut completed = None;
        match item {
            pb::sync_request::Item::Pod(pod) => {
                let uid = pod.pod.unwrap_or_default().uid;
                let want = match Want::try_from(pod.want) {
                    Ok(Want::Forget) => Wanted::Forget,
                    Ok(Want::Unmount) => Wanted::Ended,
                    _ => Wanted::Keep,
                };
                if state.replaying {
                    state.incoming.insert(uid.clone());
                }
                state.pods.insert(uid, DesiredPod { want, images: pod.images });
            }
            pb::sync_request::Item::DroppedUid(uid) => {
                state.pods.remove(&uid);
                state.incoming.remove(&uid);
            }
            pb::sync_request::Item::Complete(set) => {
                // A set that completes before every source has reported continues with the next message.
                if set.sources_ready && std::mem::take(&mut state.replaying) {
                    let incoming = std::mem::take(&mut state.incoming);
                    state.pods.retain(|uid, _| incoming.contains(uid));
                }
                state.complete = set.sources_ready;
                completed = Some(set.epoch);
            }
        }
        drop(state);
        self.0.changed.notify_one();
        Ok(completed)
    }

    /// Requests a collection soon.
    pub fn trigger(&self) {
        self.0.changed.notify_one();
    }

    /// Waits for a message or a trigger since the last wait.
    pub(crate) async fn changed(&self) {
        self.0.changed.notified().await;
    }

    /// Whether a complete set with all sources ready is known.
    pub fn is_complete(&self) -> bool {
        self.state().complete
    }

    /// The images of every pod that is desired or still terminating, as written in the specs. A terminated pod needs none.
    pub fn wanted_images(&self) -> BTreeSet<String> {
        let state = self.state();
        let kept = state.pods.values().filter(|pod| pod.want == Wanted::Keep);
        kept.flat_map(|pod| &pod.images).cloned().collect()
    }

    /// The desired pods by UID, and whether they are complete.
    pub(crate) fn snapshot(&self) -> (BTreeMap<String, Wanted>, bool) {
        let state = self.state();
        (state.pods.iter().map(|(uid, pod)| (uid.clone(), pod.want)).collect(), state.complete)
    }

    /// As [`Self::snapshot`], for one pod.
    pub(crate) fn snapshot_of(&self, uid: &str) -> (BTreeMap<String, Wanted>, bool) {
        let state = self.state();
        let wanted = state.want(uid).map(|want| (uid.to_owned(), want));
        (wanted.into_iter().collect(), state.complete)
    }

    /// Whether everything of the pod with this UID is to be removed.
    pub(crate) fn is_forgotten(&self, uid: &str) -> bool {
        let state = self.state();
        state.want(uid).map_or(state.complete, |want| want == Wanted::Forget)
    }

    /// Whether the pod with this UID is desired; before the first complete set, every pod is.
    pub(crate) fn is_desired(&self, uid: &str) -> bool {
        let state = self.state();
        !state.complete || state.want(uid).is_some_and(|want| want != Wanted::Forget)
    }
}

#[cfg(test)]
mod tests {
    use pb::sync_request::Item;

    use super::*;
    use crate::tests::sync_messages::{complete, pod, pod_with_images};

    #[test]
    fn new_sync_set_replaces_the_old_one_when_complete_with_all_sources_ready() {
        let desired = DesiredPods::default();
        let first = desired.begin();
        desired.apply_message(first, pod("old", Want::Run)).unwrap();
        assert_eq!(desired.apply_message(first, complete(true)).unwrap(), Some(7));
        let second = desired.begin();
        desired.apply_message(second, pod("new", Want::Run)).unwrap();
        assert!(desired.is_desired("old"), "every pod counts as desired while a set is incomplete");
        desired.apply_message(second, complete(true)).unwrap();
        assert!(!desired.is_desired("old"));
        assert!(desired.is_desired("new"));
    }

    #[test]
    fn every_pod_is_desired_until_all_sources_are_ready() {
        let desired = DesiredPods::default();
        let stream = desired.begin();
        desired.apply_message(stream, complete(false)).unwrap();
        assert!(desired.is_desired("anything"));
    }

    #[test]
    fn older_sync_stream_is_refused() {
        let desired = DesiredPods::default();
        let first = desired.begin();
        desired.begin();
        assert!(desired.apply_message(first, pod("u", Want::Run)).is_err());
    }

    #[test]
    fn sync_set_completed_before_sources_are_ready_applies_once_they_are() {
        let desired = DesiredPods::default();
        let first = desired.begin();
        desired.apply_message(first, pod("old", Want::Run)).unwrap();
        desired.apply_message(first, complete(true)).unwrap();
        let second = desired.begin();
        desired.apply_message(second, pod("new", Want::Run)).unwrap();
        desired.apply_message(second, pod("dropped", Want::Run)).unwrap();
        desired.apply_message(second, complete(false)).unwrap();
        desired.apply_message(second, Item::DroppedUid("dropped".into())).unwrap();
        desired.apply_message(second, complete(true)).unwrap();
        assert!(desired.is_desired("new"));
        assert!(!desired.is_desired("old"), "the set of the earlier stream was replaced");
        assert!(!desired.is_desired("dropped"), "a pod that was dropped during the replay is not desired");
    }

    #[test]
    fn images_of_desired_pods_are_wanted_until_forgotten_or_dropped() {
        let pod = |uid: &str, want: Want| pod_with_images(uid, want, &[&format!("{uid}:1")]);
        let images = |desired: &DesiredPods| desired.wanted_images().into_iter().collect::<Vec<_>>();
        let desired = DesiredPods::default();
        let first = desired.begin();
        for uid in ["a", "b", "c", "d"] {
            desired.apply_message(first, pod(uid, Want::Run)).unwrap();
        }
        assert!(!desired.is_complete());
        desired.apply_message(first, complete(true)).unwrap();
        assert!(desired.is_complete());
        desired.apply_message(first, pod("b", Want::Stop)).unwrap();
        desired.apply_message(first, pod("c", Want::Forget)).unwrap();
        desired.apply_message(first, Item::DroppedUid("d".into())).unwrap();
        assert_eq!(images(&desired), ["a:1", "b:1"]);
        let second = desired.begin();
        desired.apply_message(second, pod("e", Want::Run)).unwrap();
        assert_eq!(images(&desired), ["a:1", "b:1", "e:1"], "an incomplete set removes nothing");
        desired.apply_message(second, complete(true)).unwrap();
        assert_eq!(images(&desired), ["e:1"]);
    }
}
