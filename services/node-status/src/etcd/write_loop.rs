//! The loop that empties the queue, one job at a time, and handles failed jobs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use keelson_etcd::EtcdError;
use keelson_node_status_core::{PodReport, configuration_event};
use keelson_service_kit::status::chain;
use keelson_service_kit::{Context, LoopHandle, NewEvent, ObjectRef};
use tokio::time::Instant;
use tracing::Instrument as _;

use crate::etcd::keys::{CachedKey, KeyCache, NewValue, StoredPod};
use crate::etcd::{EtcdWriter, configuration};
use crate::queue::{Job, Pending, PodJob, Slot};

/// The condition that says whether reports succeed.
const CONDITION: &str = "control-plane";
/// The pause after a failed write.
const RETRY_PAUSE: Duration = Duration::from_secs(1);
/// The pause after a refused write, since etcd checks the user for each.
const REFUSAL_PAUSE: Duration = Duration::from_millis(100);

/// The errors of jobs that wait or were left out, by slot.
type ErrorsBySlot = BTreeMap<Slot, String>;

impl EtcdWriter {
    pub(super) async fn run(self: Arc<Self>, ctx: Context) {
        let handle = ctx.progress.register("etcd-writer");
        let mut cache = KeyCache::new();
        let (mut errors, mut term) = (ErrorsBySlot::new(), 0);
        loop {
            handle.tick();
            let before = std::mem::replace(&mut term, self.lease.term());
            if before != term {
                cache.clear();
                // Before the first term everything is queued already.
                if before != 0 {
                    self.requeue_all();
                }
            }
            let is_held = self.lease.held().is_some();
            let (job, due) = if is_held { self.next_job() } else { (None, None) };
            let Some(pending) = job else {
                let heartbeat = Instant::now() + LoopHandle::HEARTBEAT;
                let next = due.map_or(heartbeat, |due| due.min(heartbeat));
                // Cancel-safe: both keep their notification.
                tokio::select! {
                    () = ctx.shutdown.cancelled() => return,
                    () = self.wake.notified() => continue,
                    () = self.lease.acquired() => continue,
                    () = tokio::time::sleep_until(next) => continue,
                }
            };
            let result = {
                let work = self.carry_out(&pending.job, &mut cache).instrument(pending.span.clone());
                // Cancel-safe: a write that the shutdown cuts off may have been made; the next start reads the key.
                tokio::select! {
                    () = ctx.shutdown.cancelled() => return,
                    result = handle.while_at(work) => result,
                }
            };
            let wait = self.handle_result(pending, result, &mut errors);
            let error = errors.values().next().cloned();
            ctx.progress.condition(CONDITION, error.map_or(Ok(()), Err));
            if let Some(wait) = wait {
                // Cancel-safe: neither arm holds anything.
                tokio::select! {
                    () = ctx.shutdown.cancelled() => return,
                    () = tokio::time::sleep(wait) => {}
                }
            }
        }
    }

    /// The next job now, and when the next deferred one is due.
    fn next_job(&self) -> (Option<Pending>, Option<Instant>) {
        let mut queue = self.queue();
        let job = queue.take();
        (job, queue.due())
    }

    /// Handles the result of a job: puts a failed one back, and stores its error in `errors`. Returns how long all jobs wait.
    fn handle_result(
        &self,
        pending: Pending,
        result: Result<(), EtcdError>,
        errors: &mut ErrorsBySlot,
    ) -> Option<Duration> {
        let (now, slot) = (Instant::now(), pending.job.slot());
        let before = match &result {
            Ok(()) => errors.remove(&slot),
            Err(error) => errors.insert(slot, chain(error)),
        };
        let wait = match result {
            Ok(()) => {
                self.queue().record_answer(now);
                None
            }
            Err(error @ EtcdError::TooLarge { .. }) => {
                self.queue().record_answer(now);
                if before != Some(chain(&error)) {
                    self.record_too_large(&pending.job, &error);
                }
                None
            }
            // Perhaps only this key, or until its permission is granted or the password is correct.
            Err(error @ EtcdError::Refused { .. }) => {
                if pending.refused == 0 {
                    tracing::warn!(error = chain(&error), "etcd refuses a report; it is retried");
                }
                let mut queue = self.queue();
                queue.record_answer(now);
                queue.put_last(pending, now);
                Some(REFUSAL_PAUSE)
            }
            Err(EtcdError::Unreachable { .. }) => {
                let hangs = self.queue().put_back_unanswered(pending, now);
                (!hangs).then_some(RETRY_PAUSE)
            }
            // No call is possible without it: all jobs keep their places.
            Err(EtcdError::Credential { .. } | EtcdError::Missing { .. } | EtcdError::Endpoint { .. }) => {
                self.queue().put_back(pending);
                Some(RETRY_PAUSE)
            }
        };
        let reports = self.reports();
        let queue = self.queue();
        errors.retain(|slot, _| match slot {
            Slot::Pod(uid) => reports.pods.contains_key(uid) || queue.has(slot),
            Slot::Node | Slot::Configuration | Slot::Retain => true,
        });
        wait
    }

    /// Records the event about a report that is too large: it would be refused again, so only its next state is tried.
    fn record_too_large(&self, job: &Job, error: &EtcdError) {
        let error = chain(error);
        tracing::warn!(
            error,
            "a report is larger than etcd accepts and is left out until it changes; raise etcd's --max-request-bytes"
        );
        let object = match job {
            Job::Pod(PodJob { report, .. }) => {
                ObjectRef::pod(&report.name.namespace, &report.name.name, &report.uid)
            }
            Job::Node(_) | Job::Configuration(_) | Job::RemovePod { .. } | Job::Retain(_) => {
                ObjectRef::node(&self.node)
            }
        };
        let message = format!("{error}; it is left out until it changes; raise etcd's --max-request-bytes");
        self.ring.warning(object, "ReportTooLarge", message);
    }

    async fn carry_out(&self, job: &Job, cache: &mut KeyCache) -> Result<(), EtcdError> {
        match job {
            Job::Node(json) => {
                let value = NewValue::without_pod(Some(json));
                self.write(&self.keys.node(), value, cache, |_| true).await.map(drop)
            }
            Job::Configuration(json) => {
                let key = self.keys.config_status();
                if self.write(&key, NewValue::without_pod(json.as_ref()), cache, |_| true).await? {
                    self.record_configuration(json.as_ref());
                }
                Ok(())
            }
            Job::Pod(PodJob { report, .. }) => self.write_one_pod(report, cache).await,
            Job::RemovePod { uid, name } => {
                let key = self.keys.pod_status(&name.namespace, &name.name);
                let is_same_pod =
                    |before: Option<&StoredPod>| before.is_some_and(|before| *before.uid == **uid);
                self.write(&key, NewValue::default(), cache, is_same_pod).await.map(drop)
            }
            Job::Retain(uids) => self.remove_stale_pods(uids, cache).await,
        }
    }

    async fn write_one_pod(&self, report: &PodReport, cache: &mut KeyCache) -> Result<(), EtcdError> {
        // The pod has gone since, and its key was removed as stale.
        if !self.reports().pods.contains_key(&report.uid) {
            return Ok(());
        }
        // This writer asks for the JSON of every pod, so every report has it.
        let Some(document) = report.document() else { return Ok(()) };
        let key = self.keys.pod_status(&report.name.namespace, &report.name.name);
        let value = NewValue { bytes: Some(document), pod: Some(report.into()) };
        // Of two pods of one name the later one is reported.
        let is_later = |before: Option<&StoredPod>| {
            before.is_none_or(|before| *before.uid == *report.uid || before.seen <= report.pod.seen)
        };
        self.write(&key, value, cache, is_later).await.map(drop)
    }

    /// Removes the statuses of all pods other than these and those that came since.
    async fn remove_stale_pods(
        &self,
        uids: &BTreeSet<String>,
        cache: &mut KeyCache,
    ) -> Result<(), EtcdError> {
        // A pod that came since may have been written already: its job is more urgent.
        let is_here = |uid: &str| uids.contains(uid) || self.reports().pods.contains_key(uid);
        let stale = |before: Option<&StoredPod>| before.is_none_or(|before| !is_here(&before.uid));
        let mut result = Ok(());
        for entry in self.etcd.list(&self.keys.pod_statuses()).await?.entries {
            let now = CachedKey::of(Some(&entry));
            if !stale(now.pod.as_ref()) {
                continue;
            }
            cache.insert(entry.key.clone(), now);
            match self.write(&entry.key, NewValue::default(), cache, stale).await {
                Ok(_) => {}
                // Perhaps only this key.
                Err(error @ EtcdError::Refused { .. }) => result = Err(error),
                Err(error) => return Err(error),
            }
        }
        result
    }

    /// Records the event of a new status. It is called only if the key had another value, so that each change is recorded once,
    /// over restarts, too.
    fn record_configuration(&self, json: Option<&Vec<u8>>) {
        let status = configuration::decode(json);
        let Some(event) = configuration_event(&self.node, status.as_ref()) else { return };
        self.ring.record(NewEvent {
            warning: event.warning,
            reason: event.reason.to_owned(),
            message: event.message,
            object: ObjectRef::node(&self.node),
        });
    }
}
