//! What is held of one UID.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use keelson_kube_model::{Pod, PodStatus};
use keelson_pod_sync_core::Moment;
use keelson_pod_sync_core::admission::{held_ports, holder_of};
use keelson_pod_sync_core::allocation::Allocation;
use keelson_pod_sync_core::backoff::BackoffBook;
use keelson_pod_sync_core::conditions::RESIZE_PENDING;
use keelson_pod_sync_core::explain::{Cause, Ledger, StepName};
use keelson_pod_sync_core::measure::FirstStart;
use keelson_pod_sync_core::observation::PodObservation;
use keelson_pod_sync_core::worker::{WorkerPhase, WorkerState};
use keelson_service_kit::CancellationToken;
use tokio::sync::Notify;

use crate::news::News;
use crate::observed::Observed;
use crate::probes::Probes;
use crate::store::{Record, StoredBackoff, StoredProbe};

/// A desired pod as pod-config sent it.
#[derive(Debug, Clone)]
pub struct Wanted {
    /// What the decisions work on.
    pub pod: Arc<Pod>,
    /// The whole object, unknown fields included.
    pub raw: Bytes,
    /// `file`, `manifest`, `api`…
    pub source: String,
    /// Where it was read.
    pub origin: String,
    /// Trace of the change.
    pub traceparent: String,
    /// Grows with each change of this UID.
    pub revision: u64,
    /// When its source has added it, as pod-config says; 0: nobody knows.
    pub added_unix_nanos: i64,
}

/// One UID.
#[derive(Debug)]
pub struct Entry {
    /// Tells this life of the UID from an earlier and a later one. Unique in this process.
    pub life: u64,
    /// Where its worker stands.
    pub state: WorkerState,
    /// The pod; `None` for what only the runtime knows.
    pub wanted: Option<Wanted>,
    /// Where nothing is known of the pod itself, a pod that holds the same ports of the node.
    pub holder: Option<Arc<Pod>>,
    /// What the runtime holds, as far as it was read.
    pub observed: Observed,
    /// The status that was published last.
    pub status: Arc<PodStatus>,
    /// Counts the published documents.
    pub version: u64,
    /// What each step of its life waits for.
    pub ledger: Ledger,
    /// Per container why its last start failed: waiting reason and message.
    pub reasons: BTreeMap<String, (String, String)>,
    /// Its probes.
    pub probes: Probes,
    /// resource-manager has admitted it.
    pub admitted: bool,
    /// What it was admitted with.
    pub allocation: Option<Allocation>,
    /// Its source asks for other resources than that, which it does not get.
    pub resize_refused: bool,
    /// That is not told yet.
    pub resize_news: bool,
    /// A worker task exists.
    pub worker: bool,
    /// Read back from an earlier process; no source has spoken of it yet.
    pub restored: bool,
    /// Whether the next turn begins with a fresh read.
    pub freshness: Freshness,
    /// runtime-shim has said that nothing of it is left, and has shown nothing of it since.
    pub gone: bool,
    /// None of its containers runs or will be started, as was published.
    pub stopped: bool,
    /// Everything of it is released, as was published: no later document takes that back.
    pub released: bool,
    /// It begins when runtime-shim has removed what is left of an earlier life of the UID.
    pub again: bool,
    /// Its worker has panicked and waits before it tries again.
    pub aside: bool,
    /// It was refused, and its status says why; no other status follows.
    pub rejected: bool,
    /// Why it is not admitted yet, where that is not final: reason and message.
    pub held: Option<(String, String)>,
    /// How far its beginning has come, as it is measured.
    pub start: FirstStart,
    /// When pulls for it began and ended, until it has started.
    pub pulls: Vec<(i64, i64)>,
    /// Containers whose image was pulled for their next start: that it is there is no news then.
    pub pulled: BTreeSet<String>,
    /// The event that says why its volumes are not there, if that was told.
    pub mount_told: Option<String>,
    /// What its worker was told, as the turn that answers it is measured.
    pub news: News,
    /// When a back-off of it was last advanced, as it is stored.
    pub kept_advance: Option<i64>,
    /// Wakes the worker.
    pub wake: Arc<Notify>,
    /// Ends what the worker is waiting for.
    pub cancel: CancellationToken,
}

/// Whether what is known of the runtime may be wrong. A reason to read that comes while a read is on its way is
/// not answered by that read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Freshness {
    asked: u64,
    answered: u64,
}

impl Freshness {
    /// What is known may be wrong from now on.
    pub fn ask(&mut self) {
        self.asked += 1;
    }

    /// What a read that begins now will answer; `None` when none is due.
    pub fn due(self) -> Option<u64> {
        (self.asked != self.answered).then_some(self.asked)
    }

    /// A read that began when [`Freshness::due`] gave this has come back.
    pub fn answered(&mut self, due: u64) {
        self.answered = self.answered.max(due);
    }
}

/// What the runtime is able to do now.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RuntimeView {
    /// `containerd`…
    pub name: String,
    /// As the runtime tells it.
    pub version: String,
    /// Sandboxes and containers can be made.
    pub ready: bool,
    /// Pods with a network of their own can be made.
    pub network_ready: bool,
    /// Why not.
    pub message: String,
    /// Its default handler has recursive read-only mounts.
    pub recursive_read_only: bool,
}

impl Entry {
    /// An entry of which only the state is known.
    pub fn new(uid: &str, state: WorkerState) -> Self {
        static LIVES: AtomicU64 = AtomicU64::new(1);
        Self {
            life: LIVES.fetch_add(1, Ordering::Relaxed),
            state,
            wanted: None,
            holder: None,
            observed: Arc::new(PodObservation { uid: uid.into(), ..PodObservation::default() }),
            status: Arc::default(),
            version: 0,
            ledger: Ledger::default(),
            reasons: BTreeMap::new(),
            probes: Probes::default(),
            admitted: false,
            allocation: None,
            resize_refused: false,
            resize_news: false,
            worker: false,
            restored: false,
            freshness: Freshness::default(),
            gone: false,
            stopped: false,
            released: false,
            again: false,
            aside: false,
            rejected: false,
            held: None,
            start: FirstStart::default(),
            pulls: Vec::new(),
            pulled: BTreeSet::new(),
            mount_told: None,
            news: News::default(),
            kept_advance: None,
            wake: Arc::default(),
            cancel: CancellationToken::new(),
        }
    }

    /// A UID that is named anew while the runtime still holds something of its earlier life. As it is stored, a
    /// restarted service waits as well: see [`WorkerState::restart_requested`].
    pub fn waiting(uid: &str, mut wanted: Wanted, at: &Moment) -> Self {
        // Without the resources of the earlier life, which it may have been held to.
        if let Ok(pod) = serde_json::from_slice::<Pod>(&wanted.raw) {
            wanted.pod = Arc::new(pod);
        }
        let state = WorkerState {
            phase: WorkerPhase::Finished,
            started: true,
            desired: true,
            restart_requested: true,
            ..WorkerState::default()
        };
        let mut entry = Self { wanted: Some(wanted), again: true, ..Self::new(uid, state) };
        let text = "what is left of the pod's earlier run is removed first";
        entry.ledger.set(StepName::Source, "", Cause::waiting("Leftovers", text, "runtime-shim"), at);
        entry
    }

    /// What an earlier process stored. Whether it is desired is for its source to say, and what runs of it for
    /// the runtime.
    pub fn restored(record: Record) -> Self {
        let mut entry = Self::new(&record.uid, record.state.read_back());
        entry.start = match record.start {
            Some(start) => start.restored(),
            None => FirstStart::adopted(record.status.phase()),
        };
        entry.status = Arc::new(record.status);
        entry.reasons = record.failed_starts;
        entry.probes.book = record.probes.into_iter().map(StoredProbe::entry).collect();
        entry.kept_advance = record.backoffs.iter().map(|b| b.entry.last_advanced_unix_nanos).max();
        entry.allocation = record.allocation;
        if let Some(value) = record.pod {
            let raw = Bytes::from(value.to_string());
            if let Ok(pod) = serde_json::from_slice::<Pod>(&raw) {
                entry.want(Wanted {
                    pod: Arc::new(pod),
                    raw,
                    source: record.source,
                    origin: String::new(),
                    traceparent: String::new(),
                    revision: 0,
                    added_unix_nanos: 0,
                });
            }
        }
        if !record.host_ports.is_empty() {
            entry.holder = Some(Arc::new(holder_of(record.host_ports)));
        }
        entry.state.desired = false;
        entry.restored = true;
        entry.freshness.ask();
        entry
    }

    /// What is stored of it; the pod itself only once it is ending, because its source may no longer have it.
    pub fn record(&mut self, uid: &str, book: &BackoffBook) -> Record {
        let mut record = Record::new(uid, self.state.clone(), (*self.status).clone());
        if self.state.phase != WorkerPhase::Sync
            && let Some(wanted) = &self.wanted
        {
            record.pod = serde_json::from_slice(&wanted.raw).ok();
            record.source.clone_from(&wanted.source);
        }
        if let Some(wanted) = &self.wanted {
            record.host_ports = held_ports(&wanted.pod);
        } else if let Some(holder) = &self.holder {
            record.host_ports = held_ports(holder);
        }
        record.allocation = self.allocation.clone().filter(|allocation| *allocation != Allocation::default());
        record.failed_starts = self.reasons.clone();
        record.probes = StoredProbe::all(&self.probes.book);
        record.start = Some(self.start);
        let stored = |(key, entry): (&_, &_)| StoredBackoff::of(key, entry);
        record.backoffs = book.of_pod(&uid.into()).map(stored).collect();
        self.kept_advance = book.last_advanced_unix_nanos(&uid.into());
        record
    }

    /// Its source names it. It keeps the resources that it was admitted with; where it is named anew while it ends, so does what
    /// is left of its earlier life, and nothing is refused.
    pub fn want(&mut self, mut wanted: Wanted) {
        let mut pod = Arc::clone(&wanted.pod);
        let is_other =
            self.allocation.as_ref().is_some_and(|allocation| allocation.hold(Arc::make_mut(&mut pod)));
        self.resize_refused = is_other && !self.state.restart_requested;
        if self.resize_refused {
            let told = self.status.condition(RESIZE_PENDING).map(|condition| condition.observed_generation);
            self.resize_news = told != Some(pod.metadata.generation);
        }
        if is_other {
            wanted.pod = pod;
        }
        self.wanted = Some(wanted);
    }

    /// It is admitted as `pod`, whatever its source has asked for meanwhile.
    pub fn admit(&mut self, pod: &Pod) {
        self.admitted = true;
        self.allocation.get_or_insert_with(|| Allocation::of(pod));
        if let Some(wanted) = self.wanted.take() {
            self.want(wanted);
        }
    }

    /// It was admitted, or found running, and what it was given is not free yet.
    pub fn has_its_place(&self) -> bool {
        let given = self.admitted || self.observed.any_sandbox_ready();
        given
            && match self.state.phase {
                WorkerPhase::Sync => !self.status.phase().is_terminal(),
                WorkerPhase::Terminating => true,
                WorkerPhase::Terminated | WorkerPhase::Finished => false,
            }
    }

    /// The pod as others are judged against it.
    pub fn as_judged(&self) -> Option<Arc<Pod>> {
        self.wanted.as_ref().map(|wanted| &wanted.pod).or(self.holder.as_ref()).map(Arc::clone)
    }

    /// The runtime is known to hold something of it.
    pub fn leaves_something(&self) -> bool {
        !self.gone && (!self.observed.sandboxes.is_empty() || !self.observed.containers.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_reason_to_read_that_comes_during_a_read_is_not_answered_by_it() {
        let mut freshness = Freshness::default();
        assert_eq!(freshness.due(), None);
        freshness.ask();
        let due = freshness.due().unwrap();
        freshness.ask();
        freshness.answered(due);
        let due = freshness.due().expect("the second reason is still open");
        freshness.answered(due);
        assert_eq!(freshness.due(), None);
    }
    fn wanted(cpu: &str, generation: i64) -> Wanted {
        let pod = json!({
            "metadata": {"name": "web", "uid": "u", "generation": generation},
            "spec": {"containers": [{"name": "main", "resources": {"requests": {"cpu": cpu}}}]},
        });
        Wanted {
            pod: Arc::new(serde_json::from_value(pod.clone()).unwrap()),
            raw: Bytes::from(pod.to_string()),
            source: "file".into(),
            origin: String::new(),
            traceparent: String::new(),
            revision: 1,
            added_unix_nanos: 0,
        }
    }

    fn cpu(entry: &Entry) -> String {
        entry.wanted.as_ref().unwrap().pod.spec.containers[0].resources.requests["cpu"].to_string()
    }

    #[test]
    fn a_uid_that_is_named_anew_while_it_ends_begins_with_its_own_resources() {
        let mut entry = Entry::new("u", WorkerState::default());
        entry.want(wanted("1", 1));
        entry.admit(&wanted("1", 1).pod);
        entry.state.phase = WorkerPhase::Terminating;
        entry.state.restart_requested = true;
        entry.want(wanted("2", 2));
        // What ends keeps what it has, and nobody is told that anything was refused.
        assert_eq!((cpu(&entry).as_str(), entry.resize_refused, entry.resize_news), ("1", false, false));
        let at = Moment { now_unix_nanos: 1, agent_started_unix_nanos: 0 };
        let next = Entry::waiting("u", entry.wanted.unwrap(), &at);
        assert_eq!(cpu(&next), "2");
    }

    #[test]
    fn a_pod_that_ends_keeps_what_it_was_admitted_with_over_a_restart() {
        let mut entry =
            Entry::new("u", WorkerState { phase: WorkerPhase::Terminating, ..WorkerState::default() });
        entry.want(wanted("1", 1));
        entry.admit(&wanted("1", 1).pod);
        entry.want(wanted("2", 2));
        assert!(entry.resize_refused);
        let restored = Entry::restored(entry.record("u", &BackoffBook::default()));
        assert_eq!((cpu(&restored).as_str(), restored.resize_refused), ("1", true));
    }

    #[test]
    fn a_change_of_resources_during_admission_is_refused_and_told() {
        let mut entry = Entry::new("u", WorkerState::default());
        entry.want(wanted("2", 2));
        entry.admit(&wanted("1", 1).pod);
        assert_eq!((cpu(&entry).as_str(), entry.resize_refused, entry.resize_news), ("1", true, true));
    }
}
