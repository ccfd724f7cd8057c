//! Observed state of the pods: read after an event, after an own call, and by a slow relist.
//!
//! Events are only hints; a new read of the pod decides. Reads of one pod never overtake each other: a read that began
//! before the one that was published last is dropped. The order is by the boot clock: the node's clock may be set back,
//! and then every read would be dropped until the clock has caught up.

mod index;
mod settle;

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::{StreamExt as _, stream};
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_service_kit::WatchHub;
use tokio::time::Instant;
use tonic::Status;

use crate::clock::{Clock, Reading};
use crate::cri::Cri;
use crate::cri_objects::{ContainerEntry, ContainerStatus, Listing};
use crate::files::Files;
use crate::read_metrics::ReadMetrics;
use index::Index;

/// Maximum number of pods whose statuses are read at the same time.
const MAX_CONCURRENT_READS: usize = 8;

/// A key of the watch; the runtime's state comes first in a replay.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum WatchKey {
    /// The runtime's state.
    State,
    /// A pod, by UID.
    Pod(String),
}

/// A value of the watch.
#[derive(Debug, Clone, PartialEq)]
pub enum WatchValue {
    /// The runtime's state.
    State(Box<pb::RuntimeState>),
    /// A pod.
    Pod(Arc<pb::RuntimePod>),
}

/// Reads pods and publishes them.
#[derive(Debug, Clone)]
pub struct Observer(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    cri: Cri,
    files: Files,
    clock: Clock,
    hub: WatchHub<WatchKey, WatchValue>,
    index: Mutex<Index>,
    /// Held while links are created and removed.
    links: Mutex<()>,
    reads: ReadMetrics,
}

impl Observer {
    /// Creates an observer that has read nothing yet.
    pub fn new(cri: Cri, files: Files) -> Self {
        Self::with_clock(cri, files, Clock::System)
    }

    /// As [`Self::new`], with the caller's clocks.
    pub fn with_clock(cri: Cri, files: Files, clock: Clock) -> Self {
        let hub = WatchHub::incomplete();
        let (index, links, reads) = (Mutex::default(), Mutex::default(), ReadMetrics::new());
        Self(Arc::new(Inner { cri, files, clock, hub, index, links, reads }))
    }

    /// Where pods and the runtime's state are published.
    pub fn hub(&self) -> &WatchHub<WatchKey, WatchValue> {
        &self.0.hub
    }

    fn index(&self) -> std::sync::MutexGuard<'_, Index> {
        self.0.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn reads(&self) -> &ReadMetrics {
        &self.0.reads
    }

    /// The last published state of a pod.
    pub fn cached(&self, uid: &str) -> Option<Arc<pb::RuntimePod>> {
        match self.0.hub.get(&WatchKey::Pod(uid.to_owned())) {
            Some(WatchValue::Pod(pod)) => Some(pod),
            _ => None,
        }
    }

    /// The last published state of every pod.
    pub fn all(&self) -> Vec<Arc<pb::RuntimePod>> {
        let pod = |(_, value)| match value {
            WatchValue::Pod(pod) => Some(pod),
            WatchValue::State(_) => None,
        };
        self.0.hub.snapshot().into_iter().filter_map(pod).collect()
    }

    /// The pod that a container or sandbox id belongs to.
    pub fn owner_of(&self, id: &str) -> Option<String> {
        self.index().owner_of(id).map(str::to_owned)
    }

    /// Whether the runtime listed the pod at the last read, even if it could not be described.
    pub fn knows(&self, uid: &str) -> bool {
        self.cached(uid).is_some() || self.index().unreadable.contains_key(uid)
    }

    /// Records which pod a new sandbox or container belongs to.
    pub fn record_owner(&self, id: &str, uid: &str) {
        self.index().record_owner(id, uid, self.0.clock.read().boot_nanos);
    }

    /// The resources of a container are being updated: from now on each read of its pod reads its status.
    pub fn record_update(&self, id: &str) {
        self.index().record_update(id);
    }

    /// Reads one pod and publishes the result before returning it.
    ///
    /// # Errors
    /// The runtime's error.
    pub async fn read(&self, uid: &str) -> Result<Arc<pb::RuntimePod>, Status> {
        let (began, started_at) = (self.0.clock.read(), Instant::now());
        let listed = self.0.cri.list(Some(uid)).await?;
        let pod = self.assemble(uid, began, listed).await?;
        self.0.reads.pod_read(started_at.elapsed());
        self.set_readable(uid, None);
        Ok(self.publish(pod))
    }

    /// Reads the pod in the background. Hints that arrive during a read cause one more read.
    pub fn refresh(&self, uid: String) {
        if let Some(read_again) = self.index().refreshing.get_mut(&uid) {
            *read_again = true;
            return;
        }
        self.index().refreshing.insert(uid.clone(), false);
        let observer = self.clone();
        keelson_service_kit::spawn("observe a pod", async move {
            loop {
                if let Err(status) = observer.read(&uid).await {
                    tracing::debug!(
                        uid,
                        error = status.message(),
                        "cannot read a pod; the next relist retries"
                    );
                }
                let mut index = observer.index();
                match index.refreshing.get_mut(&uid) {
                    Some(read_again) if *read_again => *read_again = false,
                    _ => {
                        index.refreshing.remove(&uid);
                        return;
                    }
                }
            }
        });
    }

    /// Reads all pods and removes pods that the runtime no longer lists. A pod that the runtime lists but cannot describe
    /// keeps its last state.
    ///
    /// # Errors
    /// The runtime's error for the lists; nothing is removed then.
    pub async fn relist(&self) -> Result<usize, Status> {
        let started_at = self.0.reads.relist_started();
        let listed = self.relist_all().await;
        self.0.reads.relist_ended(started_at.elapsed(), listed.is_ok());
        listed
    }

    async fn relist_all(&self) -> Result<usize, Status> {
        let began = self.0.clock.read();
        let pods = self.0.cri.list(None).await?.by_pod();
        let listed: HashSet<String> = pods.keys().cloned().collect();
        let mut reads = stream::iter(pods)
            .map(|(uid, listed)| async move {
                let read = self.assemble(&uid, began, listed).await;
                (uid, read)
            })
            .buffer_unordered(MAX_CONCURRENT_READS);
        while let Some((uid, read)) = reads.next().await {
            self.set_readable(&uid, read.as_ref().err());
            if let Ok(pod) = read {
                self.publish(pod);
            }
        }
        self.drop_unlisted(&listed, began);
        self.0.hub.complete();
        Ok(listed.len())
    }

    /// Logs once when a pod cannot be read, and when it can be read again.
    fn set_readable(&self, uid: &str, error: Option<&Status>) {
        let mut index = self.index();
        match error {
            Some(status) => {
                let error = status.message().to_owned();
                if index.unreadable.insert(uid.to_owned(), error.clone()).as_ref() != Some(&error) {
                    tracing::warn!(
                        uid,
                        error,
                        "the container runtime cannot describe a pod; its last observed state is kept"
                    );
                }
            }
            None if index.unreadable.remove(uid).is_some() => {
                tracing::info!(uid, "the container runtime can describe the pod again");
            }
            None => {}
        }
    }

    /// Removes pods and owners that are not in the list, which was requested at `began`.
    fn drop_unlisted(&self, listed: &HashSet<String>, began: Reading) {
        let mut known = HashSet::new();
        for key in self.0.hub.keys() {
            let WatchKey::Pod(uid) = key else { continue };
            if listed.contains(&uid) {
                known.insert(uid);
            } else {
                self.publish(empty_pod(uid, began));
            }
        }
        self.index().drop_unlisted(listed, &known, began.boot_nanos);
    }

    /// Builds a pod from the runtime's list. Reads the status only of objects whose listed state differs from the
    /// published one, and of containers whose resources were updated.
    async fn assemble(&self, uid: &str, began: Reading, listed: Listing) -> Result<pb::RuntimePod, Status> {
        let before = self.cached(uid);
        let mut pod = empty_pod(uid.to_owned(), began);
        if let Some(labels) = listed.pod() {
            pod.namespace.clone_from(&labels.namespace);
            pod.name.clone_from(&labels.name);
        }
        for sandbox in &listed.sandboxes {
            let is_current = |known: &&pb::Sandbox| {
                known.id == sandbox.id && known.ready == sandbox.ready && has_known_addresses(known)
            };
            match before.as_ref().and_then(|before| before.sandboxes.iter().find(is_current)) {
                Some(known) => pod.sandboxes.push(known.clone()),
                None => pod.sandboxes.extend(self.0.cri.sandbox_status(sandbox).await?),
            }
        }
        for container in &listed.containers {
            let is_updated = self.index().is_updated(&container.id);
            let is_current = |known: &&pb::Container| {
                known.id == container.id && known.state == container.state as i32 && !is_updated
            };
            match before.as_ref().and_then(|before| before.containers.iter().find(is_current)) {
                Some(known) => pod.containers.push(known.clone()),
                None => pod.containers.extend(self.container(container).await?),
            }
        }
        pod.sandboxes.sort_by_key(|s| std::cmp::Reverse((s.attempt, s.created_unix_nanos)));
        pod.containers.sort_by_key(|c| std::cmp::Reverse(c.created_unix_nanos));
        Ok(pod)
    }

    /// Reads a container's status, and its termination message if it has exited.
    async fn container(&self, listed: &ContainerEntry) -> Result<Option<pb::Container>, Status> {
        let Some(status) = self.0.cri.container_status(listed).await? else { return Ok(None) };
        let ContainerStatus { mut container, termination } = status;
        if container.state() == pb::ContainerState::Exited {
            container.termination_message = self.0.files.termination_message(&termination);
        }
        Ok(Some(container))
    }

    /// Publishes a read unless a later one was published. Returns the pod that is published now.
    fn publish(&self, pod: pb::RuntimePod) -> Arc<pb::RuntimePod> {
        let uid = pod.uid.clone();
        let key = WatchKey::Pod(uid.clone());
        let mut index = self.index();
        let began = pod.observed_boot_nanos;
        if let Some(last) = index.observed.get(&uid).copied().filter(|last| *last > began) {
            let unix_nanos = self.0.clock.read().unix_nanos_of(last);
            let gone = || empty_pod(uid.clone(), Reading { unix_nanos, boot_nanos: last });
            return self.cached(&uid).unwrap_or_else(|| Arc::new(gone()));
        }
        index.observed.insert(uid.clone(), began);
        let before = self.cached(&uid);
        index.update_owners(&pod);
        let pod = Arc::new(pod);
        let empty = pod.sandboxes.is_empty() && pod.containers.is_empty();
        let changed = before.as_ref().is_none_or(|b| !same_content(b, &pod));
        if empty {
            self.0.hub.remove(&key);
        } else if changed {
            self.0.hub.set(key, WatchValue::Pod(Arc::clone(&pod)));
        }
        drop(index);
        if changed && (!empty || before.is_some()) {
            self.link_logs(uid, before);
        }
        pod
    }

    /// Updates the links to logs in the background. Updates run one after the other, so the last one sees the last state.
    fn link_logs(&self, uid: String, before: Option<Arc<pb::RuntimePod>>) {
        let observer = self.clone();
        tokio::task::spawn_blocking(move || {
            let _guard = observer.0.links.lock().unwrap_or_else(PoisonError::into_inner);
            let now = observer.cached(&uid).unwrap_or_default();
            observer.0.files.link_logs(before.as_deref(), &now);
        });
    }
}

/// A pod without sandboxes and containers, from a read that began at `began`.
fn empty_pod(uid: String, began: Reading) -> pb::RuntimePod {
    pb::RuntimePod {
        uid,
        observed_unix_nanos: began.unix_nanos,
        observed_boot_nanos: began.boot_nanos,
        ..Default::default()
    }
}

/// Whether the sandbox's addresses are known; the status of a READY sandbox without addresses is read again.
fn has_known_addresses(sandbox: &pb::Sandbox) -> bool {
    !sandbox.ready || sandbox.host_network || !sandbox.ips.is_empty()
}

/// Whether two reads differ only in their time.
fn same_content(a: &pb::RuntimePod, b: &pb::RuntimePod) -> bool {
    a.sandboxes == b.sandboxes && a.containers == b.containers && a.name == b.name
}

#[cfg(test)]
mod tests;
