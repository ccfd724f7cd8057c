//! Tracks the pods of one `keelson run --once` from pod-sync's stream.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use keelson_kube_model::Pod;
use keelson_proto::keelson::pod_sync::v1::PodDocument;

use super::outcome::{self, PodProgress, Report, WaitEnd};

/// An update from pod-sync's stream.
#[derive(Debug)]
pub(super) enum PodUpdate {
    /// A stream has been opened and replays all pods.
    Opened,
    Pod(Box<PodDocument>),
    Gone(String),
    Synced,
}

#[derive(Debug)]
struct Row {
    pod: Pod,
    /// Since when no container of it runs.
    idle_since: Option<Instant>,
    first_seen: Instant,
    settled: bool,
}

/// The last known state of the pods.
#[derive(Debug)]
pub(super) struct PodTracker {
    /// How long a pod may take to start.
    start_timeout: Duration,
    rows: BTreeMap<String, Row>,
    replayed: BTreeSet<String>,
    synced: bool,
}

impl PodTracker {
    pub(super) fn new(start_timeout: Duration) -> Self {
        Self { start_timeout, rows: BTreeMap::new(), replayed: BTreeSet::new(), synced: false }
    }

    /// Applies an update received at `now`.
    pub(super) fn apply(&mut self, update: PodUpdate, now: Instant) {
        match update {
            PodUpdate::Opened => self.replayed.clear(),
            PodUpdate::Pod(document) => {
                self.replayed.insert(document.uid.clone());
                // pod-sync sends only Pods; anything else is ignored.
                if let Ok(pod) = serde_json::from_slice::<Pod>(&document.pod_json) {
                    self.update(document.uid, pod, now);
                }
            }
            PodUpdate::Gone(uid) => {
                self.rows.remove(&uid);
            }
            PodUpdate::Synced => {
                // Pods that were deleted between two streams are not in the replay.
                self.rows.retain(|uid, _| self.replayed.contains(uid));
                self.synced = true;
            }
        }
    }

    fn update(&mut self, uid: String, pod: Pod, now: Instant) {
        let progress = outcome::progress(&pod);
        let row = self.rows.entry(uid).or_insert_with(|| Row {
            pod: Pod::default(),
            idle_since: None,
            first_seen: now,
            settled: false,
        });
        row.idle_since = (progress == PodProgress::Idle).then(|| row.idle_since.unwrap_or(now));
        row.settled |= matches!(progress, PodProgress::Up | PodProgress::Over);
        row.pod = pod;
    }

    fn timed_out(&self, row: &Row, now: Instant) -> bool {
        let since = if outcome::ends(&row.pod) { row.idle_since } else { Some(row.first_seen) };
        !row.settled && since.is_some_and(|since| now.duration_since(since) >= self.start_timeout)
    }

    /// Whether all pods are known and have settled or timed out.
    pub(super) fn is_decided(&self, now: Instant) -> bool {
        self.synced && self.rows.values().all(|row| row.settled || self.timed_out(row, now))
    }

    /// Whether all pods are gone.
    pub(super) fn is_empty(&self) -> bool {
        self.synced && self.rows.is_empty()
    }

    /// The report of each pod, sorted by namespace and name.
    pub(super) fn reports(&self, now: Instant, interrupted: bool) -> Vec<Report> {
        let one = |row: &Row| {
            let ending = if interrupted && !row.settled {
                WaitEnd::Interrupted
            } else if self.timed_out(row, now) {
                WaitEnd::TimedOut(self.start_timeout.as_secs())
            } else {
                WaitEnd::Settled
            };
            outcome::report(&row.pod, ending)
        };
        let mut reports: Vec<Report> = self.rows.values().map(one).collect();
        reports.sort_by(|a, b| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
        reports
    }

    /// The UIDs of the remaining pods.
    pub(super) fn uids(&self) -> BTreeSet<String> {
        self.rows.keys().cloned().collect()
    }

    /// The names of the remaining pods.
    pub(super) fn names(&self) -> Vec<String> {
        self.rows.values().map(|row| row.pod.metadata.name.clone()).collect()
    }

    /// The longest grace period of the remaining pods.
    pub(super) fn longest_grace(&self) -> Duration {
        let seconds = self.rows.values().map(|row| row.pod.termination_grace()).max().unwrap_or(0);
        Duration::from_secs(u64::try_from(seconds).unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::outcome::Outcome;
    use super::*;

    fn document(name: &str, policy: &str, phase: &str, state: serde_json::Value) -> PodUpdate {
        let pod = json!({
            "metadata": {"name": name, "namespace": "default", "uid": name},
            "spec": {"restartPolicy": policy, "terminationGracePeriodSeconds": 7, "containers": [{"name": "c"}]},
            "status": {"phase": phase, "containerStatuses": [{"name": "c", "ready": true, "state": state}]},
        });
        PodUpdate::Pod(Box::new(PodDocument {
            uid: name.into(),
            pod_json: pod.to_string().into(),
            ..PodDocument::default()
        }))
    }

    fn outcomes(tracker: &PodTracker, now: Instant, interrupted: bool) -> Vec<Outcome> {
        tracker.reports(now, interrupted).into_iter().map(|report| report.result).collect()
    }

    #[test]
    fn run_once_waits_for_the_synced_message() {
        let (mut tracker, now) = (PodTracker::new(Duration::from_secs(10)), Instant::now());
        tracker.apply(PodUpdate::Opened, now);
        tracker.apply(document("job", "Never", "Succeeded", json!({"terminated": {"exitCode": 0}})), now);
        assert!(!tracker.is_decided(now));
        tracker.apply(PodUpdate::Synced, now);
        assert!(tracker.is_decided(now) && !tracker.is_empty());
        assert_eq!(tracker.longest_grace(), Duration::from_secs(7));
        tracker.apply(PodUpdate::Gone("job".into()), now);
        assert!(tracker.is_empty());
    }

    #[test]
    fn run_once_timeout_applies_to_starting_pods_only() {
        let (mut tracker, now) = (PodTracker::new(Duration::from_secs(10)), Instant::now());
        let later = now + Duration::from_secs(11);
        tracker.apply(document("job", "Never", "Running", json!({"running": {}})), now);
        tracker.apply(
            document("stuck", "Never", "Pending", json!({"waiting": {"reason": "ErrImagePull"}})),
            now,
        );
        tracker.apply(PodUpdate::Synced, now);
        assert!(!tracker.is_decided(later), "the job runs");
        tracker.apply(document("job", "Never", "Failed", json!({"terminated": {"exitCode": 1}})), later);
        assert!(!tracker.is_decided(now + Duration::from_secs(9)));
        assert!(tracker.is_decided(later));
        assert_eq!(outcomes(&tracker, later, false), [Outcome::Failed, Outcome::Failed]);
    }

    #[test]
    fn always_restarting_pod_is_decided_when_up_and_failed_when_it_breaks() {
        let (mut tracker, now) = (PodTracker::new(Duration::from_secs(10)), Instant::now());
        tracker.apply(PodUpdate::Synced, now);
        tracker.apply(document("web", "Always", "Running", json!({"running": {}})), now);
        assert!(tracker.is_decided(now));
        assert_eq!(outcomes(&tracker, now, false), [Outcome::Running]);
        tracker.apply(document("web", "Always", "Running", json!({"terminated": {"exitCode": 1}})), now);
        assert!(tracker.is_decided(now));
        assert_eq!(outcomes(&tracker, now, false), [Outcome::Failed]);
    }

    #[test]
    fn interrupted_is_the_result_of_pods_that_had_not_settled() {
        let (mut tracker, now) = (PodTracker::new(Duration::from_secs(10)), Instant::now());
        tracker.apply(document("done", "Never", "Succeeded", json!({"terminated": {"exitCode": 0}})), now);
        tracker.apply(document("job", "Never", "Running", json!({"running": {}})), now);
        tracker.apply(PodUpdate::Synced, now);
        assert_eq!(outcomes(&tracker, now, true), [Outcome::Succeeded, Outcome::Interrupted]);
    }

    #[test]
    fn pods_deleted_between_two_streams_are_removed() {
        let (mut tracker, now) = (PodTracker::new(Duration::from_secs(10)), Instant::now());
        tracker.apply(document("old", "Never", "Running", json!({"running": {}})), now);
        tracker.apply(PodUpdate::Opened, now);
        tracker.apply(PodUpdate::Synced, now);
        assert!(tracker.is_empty());
    }
}
