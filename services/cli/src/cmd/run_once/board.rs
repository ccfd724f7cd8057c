//! The pods of one `keelson run --once`, as pod-sync tells of them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use keelson_kube_model::Pod;
use keelson_proto::keelson::pod_sync::v1::PodDocument;

use super::verdict::{self, Ending, Report, Stand};

/// One thing that pod-sync's stream says.
#[derive(Debug)]
pub(super) enum Heard {
    /// A stream begins with everything that there is.
    Opened,
    Pod(Box<PodDocument>),
    Gone(String),
    Synced,
}

#[derive(Debug)]
struct Row {
    pod: Pod,
    /// Since when nothing of it runs.
    idle_since: Option<Instant>,
    seen: Instant,
    settled: bool,
}

/// What is known of the pods.
#[derive(Debug)]
pub(super) struct Board {
    /// How long a pod may take until it runs.
    patience: Duration,
    rows: BTreeMap<String, Row>,
    replayed: BTreeSet<String>,
    synced: bool,
}

impl Board {
    pub(super) fn new(patience: Duration) -> Self {
        Self { patience, rows: BTreeMap::new(), replayed: BTreeSet::new(), synced: false }
    }

    /// Takes in what was heard at `now`.
    pub(super) fn hear(&mut self, heard: Heard, now: Instant) {
        match heard {
            Heard::Opened => self.replayed.clear(),
            Heard::Pod(document) => {
                self.replayed.insert(document.uid.clone());
                // What is no Pod cannot be judged; pod-sync sends none.
                if let Ok(pod) = serde_json::from_slice::<Pod>(&document.pod_json) {
                    self.take(document.uid, pod, now);
                }
            }
            Heard::Gone(uid) => {
                self.rows.remove(&uid);
            }
            Heard::Synced => {
                // What went while nobody listened is not in the replay.
                self.rows.retain(|uid, _| self.replayed.contains(uid));
                self.synced = true;
            }
        }
    }

    fn take(&mut self, uid: String, pod: Pod, now: Instant) {
        let stand = verdict::stand(&pod);
        let row = self.rows.entry(uid).or_insert_with(|| Row {
            pod: Pod::default(),
            idle_since: None,
            seen: now,
            settled: false,
        });
        row.idle_since = (stand == Stand::Idle).then(|| row.idle_since.unwrap_or(now));
        row.settled |= matches!(stand, Stand::Up | Stand::Over);
        row.pod = pod;
    }

    fn timed_out(&self, row: &Row, now: Instant) -> bool {
        let since = if verdict::ends(&row.pod) { row.idle_since } else { Some(row.seen) };
        !row.settled && since.is_some_and(|since| now.duration_since(since) >= self.patience)
    }

    /// Every source has been read, and there is nothing left to wait for.
    pub(super) fn is_decided(&self, now: Instant) -> bool {
        self.synced && self.rows.values().all(|row| row.settled || self.timed_out(row, now))
    }

    /// Nothing is left of any pod.
    pub(super) fn is_empty(&self) -> bool {
        self.synced && self.rows.is_empty()
    }

    /// What each pod came to, by namespace and name.
    pub(super) fn reports(&self, now: Instant, interrupted: bool) -> Vec<Report> {
        let one = |row: &Row| {
            let ending = if interrupted && !row.settled {
                Ending::Interrupted
            } else if self.timed_out(row, now) {
                Ending::TimedOut(self.patience.as_secs())
            } else {
                Ending::Settled
            };
            verdict::report(&row.pod, ending)
        };
        let mut reports: Vec<Report> = self.rows.values().map(one).collect();
        reports.sort_by(|a, b| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
        reports
    }

    /// The UIDs of the pods that are left.
    pub(super) fn uids(&self) -> BTreeSet<String> {
        self.rows.keys().cloned().collect()
    }

    /// Their names, for people.
    pub(super) fn names(&self) -> Vec<String> {
        self.rows.values().map(|row| row.pod.metadata.name.clone()).collect()
    }

    /// The longest time that one of them may take to end.
    pub(super) fn longest_grace(&self) -> Duration {
        let seconds = self.rows.values().map(|row| row.pod.termination_grace()).max().unwrap_or(0);
        Duration::from_secs(u64::try_from(seconds).unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::verdict::Outcome;
    use super::*;

    fn document(name: &str, policy: &str, phase: &str, state: serde_json::Value) -> Heard {
        let pod = json!({
            "metadata": {"name": name, "namespace": "default", "uid": name},
            "spec": {"restartPolicy": policy, "terminationGracePeriodSeconds": 7, "containers": [{"name": "c"}]},
            "status": {"phase": phase, "containerStatuses": [{"name": "c", "ready": true, "state": state}]},
        });
        Heard::Pod(Box::new(PodDocument {
            uid: name.into(),
            pod_json: pod.to_string().into(),
            ..PodDocument::default()
        }))
    }

    fn outcomes(board: &Board, now: Instant, interrupted: bool) -> Vec<Outcome> {
        board.reports(now, interrupted).into_iter().map(|report| report.result).collect()
    }

    #[test]
    fn nothing_is_decided_before_everything_is_told() {
        let (mut board, now) = (Board::new(Duration::from_secs(10)), Instant::now());
        board.hear(Heard::Opened, now);
        board.hear(document("job", "Never", "Succeeded", json!({"terminated": {"exitCode": 0}})), now);
        assert!(!board.is_decided(now));
        board.hear(Heard::Synced, now);
        assert!(board.is_decided(now) && !board.is_empty());
        assert_eq!(board.longest_grace(), Duration::from_secs(7));
        board.hear(Heard::Gone("job".into()), now);
        assert!(board.is_empty());
    }

    #[test]
    fn a_job_has_as_long_as_it_runs_and_what_does_not_come_to_run_has_not() {
        let (mut board, now) = (Board::new(Duration::from_secs(10)), Instant::now());
        let later = now + Duration::from_secs(11);
        board.hear(document("job", "Never", "Running", json!({"running": {}})), now);
        board
            .hear(document("stuck", "Never", "Pending", json!({"waiting": {"reason": "ErrImagePull"}})), now);
        board.hear(Heard::Synced, now);
        assert!(!board.is_decided(later), "the job runs");
        board.hear(document("job", "Never", "Failed", json!({"terminated": {"exitCode": 1}})), later);
        assert!(!board.is_decided(now + Duration::from_secs(9)));
        assert!(board.is_decided(later));
        assert_eq!(outcomes(&board, later, false), [Outcome::Failed, Outcome::Failed]);
    }

    #[test]
    fn a_server_is_decided_once_it_is_up_and_failed_when_it_broke_afterwards() {
        let (mut board, now) = (Board::new(Duration::from_secs(10)), Instant::now());
        board.hear(Heard::Synced, now);
        board.hear(document("web", "Always", "Running", json!({"running": {}})), now);
        assert!(board.is_decided(now));
        assert_eq!(outcomes(&board, now, false), [Outcome::Running]);
        board.hear(document("web", "Always", "Running", json!({"terminated": {"exitCode": 1}})), now);
        assert!(board.is_decided(now));
        assert_eq!(outcomes(&board, now, false), [Outcome::Failed]);
    }

    #[test]
    fn an_interruption_is_the_result_of_what_had_not_settled() {
        let (mut board, now) = (Board::new(Duration::from_secs(10)), Instant::now());
        board.hear(document("done", "Never", "Succeeded", json!({"terminated": {"exitCode": 0}})), now);
        board.hear(document("job", "Never", "Running", json!({"running": {}})), now);
        board.hear(Heard::Synced, now);
        assert_eq!(outcomes(&board, now, true), [Outcome::Succeeded, Outcome::Interrupted]);
    }

    #[test]
    fn what_went_while_nobody_listened_is_gone() {
        let (mut board, now) = (Board::new(Duration::from_secs(10)), Instant::now());
        board.hear(document("old", "Never", "Running", json!({"running": {}})), now);
        board.hear(Heard::Opened, now);
        board.hear(Heard::Synced, now);
        assert!(board.is_empty());
    }
}
