//! Observed state of the pods: read after an event, after an own call, and by a slow relist.
//!
//! Events are only hints; a new read of the pod decides. Reads of one pod never overtake each other: a read that began
//! before the one that was published last is dropped. The order is by the boot clock: the node's clock may be set back,
//! and then every read would be dropped until the clock has caught up.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use k8s_cri::v1 as cri;
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_service_kit::WatchHub;
use tokio::sync::Notify;
use tokio::time::Instant;
use tonic::Status;

use crate::clock::{Clock, Reading};
use crate::cri::Cri;
use crate::files::Files;
use crate::labels;
use crate::read_metrics::ReadMetrics;

/// Maximum number of pods whose statuses are read at the same time.
const MAX_CONCURRENT_READS: usize = 8;
/// Delays between reads after an exit event, while the runtime still shows the container as running: the runtime's
/// state may lag behind its events.
const SETTLE_MS: [u64; 12] = [0, 3, 10, 30, 80, 160, 320, 640, 1_250, 2_500, 5_000, 10_000];
/// After this time the exit is left to the relist.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(30);
/// How long the disappearance of a pod is remembered: no read takes longer.
const GONE_RETENTION_NANOS: i64 = 120 * 1_000_000_000;

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

#[derive(Debug, Default)]
struct Index {
    /// Owners by container or sandbox id.
    owner: HashMap<String, Owner>,
    /// When the last published read of each pod began, nanoseconds since the boot. Pods that no longer exist are kept
    /// for a short time.
    observed: HashMap<String, i64>,
    /// Pods that are being read because of a hint, and whether another hint has arrived meanwhile.
    refreshing: HashMap<String, bool>,
    /// Pods with an exit event that the runtime's state does not show yet.
    settling: HashMap<String, Settling>,
    /// Pods that the runtime lists but cannot describe, with the runtime's error.
    unreadable: HashMap<String, String>,
}

/// The pod that an id belongs to.
#[derive(Debug)]
struct Owner {
    uid: String,
    /// When the owner was recorded, or when the read that shows it began, nanoseconds since the boot. Older reads do not
    /// count.
    since: i64,
}

#[derive(Debug, Default)]
struct Settling {
    /// Containers and sandboxes that have exited.
    ids: HashSet<String>,
    /// Notified of a further exit.
    more_exits: Arc<Notify>,
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
        self.index().owner.get(id).map(|owner| owner.uid.clone())
    }

    /// Whether the runtime listed the pod at the last read, even if it could not be described.
    pub fn knows(&self, uid: &str) -> bool {
        self.cached(uid).is_some() || self.index().unreadable.contains_key(uid)
    }

    /// Records which pod a new sandbox or container belongs to.
    pub fn record_owner(&self, id: &str, uid: &str) {
        let owner = Owner { uid: uid.to_owned(), since: self.0.clock.read().boot_nanos };
        self.index().owner.insert(id.to_owned(), owner);
    }

    /// Reads one pod and publishes the result before returning it.
    ///
    /// # Errors
    /// The runtime's error.
    pub async fn read(&self, uid: &str) -> Result<Arc<pb::RuntimePod>, Status> {
        let (began, started_at) = (self.0.clock.read(), Instant::now());
        let (sandboxes, containers) = self.0.cri.list(Some(uid)).await?;
        let pod = self.assemble(uid, began, sandboxes, containers).await?;
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
        tokio::spawn(async move {
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

    /// Handles an exit event: reads the pod until the runtime's state shows the exit. There is one task per pod, which
    /// handles further exits as well.
    pub fn exited(&self, id: String) {
        let Some(uid) = self.owner_of(&id) else { return };
        let more_exits = {
            let mut index = self.index();
            if let Some(settling) = index.settling.get_mut(&uid) {
                settling.ids.insert(id);
                settling.more_exits.notify_one();
                return;
            }
            let settling = index.settling.entry(uid.clone()).or_default();
            settling.ids.insert(id);
            Arc::clone(&settling.more_exits)
        };
        tokio::spawn(self.clone().settle(uid, more_exits));
    }

    /// Reads until no exited object is shown as running, then once more: statuses are read after the list, so a read may
    /// show an exit that a later read does not. The last read takes precedence over all earlier ones.
    async fn settle(self, uid: String, more_exits: Arc<Notify>) {
        let (mut delays, mut until) = (SETTLE_MS.iter(), Instant::now() + SETTLE_TIMEOUT);
        let mut confirming = false;
        loop {
            let delay = delays.next().or(SETTLE_MS.last()).copied().unwrap_or_default();
            // Cancel-safe: a notification that is not taken here is kept for the next iteration.
            tokio::select! {
                () = tokio::time::sleep(Duration::from_millis(delay)) => {}
                () = more_exits.notified() => (delays, until) = (SETTLE_MS.iter(), Instant::now() + SETTLE_TIMEOUT),
            }
            let read = self.read(&uid).await;
            if let Err(status) = &read {
                tracing::debug!(uid, error = status.message(), "cannot read a pod after an exit event");
            }
            let mut index = self.index();
            let Some(settling) = index.settling.get_mut(&uid) else { return };
            if let Ok(pod) = &read {
                settling.ids.retain(|id| shows_alive(pod, id));
            }
            let all_shown = settling.ids.is_empty();
            if (all_shown && confirming) || Instant::now() >= until {
                index.settling.remove(&uid);
                return;
            }
            if all_shown != confirming {
                // The confirming read follows at once; if it does not confirm, the delays start over.
                (confirming, delays) = (all_shown, SETTLE_MS.iter());
            }
        }
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
        let (sandboxes, containers) = self.0.cri.list(None).await?;
        let mut pods: BTreeMap<String, (Vec<cri::PodSandbox>, Vec<cri::Container>)> = BTreeMap::new();
        for sandbox in sandboxes {
            if let Some(uid) = sandbox.labels.get(labels::UID).cloned() {
                pods.entry(uid).or_default().0.push(sandbox);
            }
        }
        for container in containers {
            if let Some(uid) = container.labels.get(labels::UID).cloned() {
                pods.entry(uid).or_default().1.push(container);
            }
        }
        let listed: HashSet<String> = pods.keys().cloned().collect();
        let mut reads = stream::iter(pods)
            .map(|(uid, (s, c))| async move {
                let read = self.assemble(&uid, began, s, c).await;
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
        let mut index = self.index();
        index.unreadable.retain(|uid, _| listed.contains(uid));
        let recent = |since: i64| since > began.boot_nanos - GONE_RETENTION_NANOS;
        index.observed.retain(|uid, since| known.contains(uid) || recent(*since));
        index.owner.retain(|_, owner| known.contains(&owner.uid) || recent(owner.since));
    }

    /// Builds a pod from the runtime's list. Reads the status only of objects whose listed state differs from the
    /// published one.
    async fn assemble(
        &self,
        uid: &str,
        began: Reading,
        sandboxes: Vec<cri::PodSandbox>,
        containers: Vec<cri::Container>,
    ) -> Result<pb::RuntimePod, Status> {
        let before = self.cached(uid);
        let mut pod = empty_pod(uid.to_owned(), began);
        let named = sandboxes.iter().map(|s| &s.labels).chain(containers.iter().map(|c| &c.labels)).next();
        if let Some(found) = named {
            pod.namespace = found.get(labels::NAMESPACE).cloned().unwrap_or_default();
            pod.name = found.get(labels::NAME).cloned().unwrap_or_default();
        }
        for sandbox in sandboxes {
            let ready = sandbox.state == cri::PodSandboxState::SandboxReady as i32;
            let known = before.as_ref().and_then(|b| {
                b.sandboxes.iter().find(|k| k.id == sandbox.id && k.ready == ready && has_known_addresses(k))
            });
            match known {
                Some(known) => pod.sandboxes.push(known.clone()),
                None => pod.sandboxes.extend(self.sandbox(sandbox, ready).await?),
            }
        }
        for container in containers {
            let state = state_of(container.state);
            let known = before
                .as_ref()
                .and_then(|b| b.containers.iter().find(|k| k.id == container.id && k.state == state as i32));
            match known {
                Some(known) => pod.containers.push(known.clone()),
                None => pod.containers.extend(self.container(container).await?),
            }
        }
        pod.sandboxes.sort_by_key(|s| std::cmp::Reverse((s.attempt, s.created_unix_nanos)));
        pod.containers.sort_by_key(|c| std::cmp::Reverse(c.created_unix_nanos));
        Ok(pod)
    }

    async fn sandbox(&self, listed: cri::PodSandbox, ready: bool) -> Result<Option<pb::Sandbox>, Status> {
        let Some(status) = self.0.cri.sandbox_status(&listed.id).await? else { return Ok(None) };
        Ok(Some(sandbox_message(status, ready)))
    }

    async fn container(&self, listed: cri::Container) -> Result<Option<pb::Container>, Status> {
        let Some(status) = self.0.cri.container_status(&listed.id).await? else { return Ok(None) };
        let message = match state_of(status.state) {
            pb::ContainerState::Exited => self.0.files.termination_message(&status),
            _ => String::new(),
        };
        Ok(Some(container_message(status, listed.pod_sandbox_id, message)))
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
        let ids = || pod.sandboxes.iter().map(|s| &s.id).chain(pod.containers.iter().map(|c| &c.id));
        index.owner.retain(|id, owner| owner.uid != uid || owner.since > began || ids().any(|i| i == id));
        for id in ids() {
            index.owner.entry(id.clone()).or_insert_with(|| Owner { uid: uid.clone(), since: began });
        }
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

/// Whether the pod shows an exited object as alive. A container that exits at once may still be shown as created; the
/// runtime then shows it as running, and finally as exited.
fn shows_alive(pod: &pb::RuntimePod, id: &str) -> bool {
    let alive =
        |c: &pb::Container| matches!(c.state(), pb::ContainerState::Created | pb::ContainerState::Running);
    pod.sandboxes.iter().any(|s| s.id == id && s.ready)
        || pod.containers.iter().any(|c| c.id == id && alive(c))
}

/// Whether two reads differ only in their time.
fn same_content(a: &pb::RuntimePod, b: &pb::RuntimePod) -> bool {
    a.sandboxes == b.sandboxes && a.containers == b.containers && a.name == b.name
}

pub(crate) fn state_of(state: i32) -> pb::ContainerState {
    match cri::ContainerState::try_from(state) {
        Ok(cri::ContainerState::ContainerCreated) => pb::ContainerState::Created,
        Ok(cri::ContainerState::ContainerRunning) => pb::ContainerState::Running,
        Ok(cri::ContainerState::ContainerExited) => pb::ContainerState::Exited,
        Ok(cri::ContainerState::ContainerUnknown) | Err(_) => pb::ContainerState::Unknown,
    }
}

fn sandbox_message(status: cri::PodSandboxStatus, ready: bool) -> pb::Sandbox {
    let options = status.linux.as_ref().and_then(|l| l.namespaces.as_ref()).and_then(|n| n.options.as_ref());
    let host_network = options.is_some_and(|o| o.network == cri::NamespaceMode::Node as i32);
    let ips = status.network.map(|n| {
        std::iter::once(n.ip)
            .chain(n.additional_ips.into_iter().map(|i| i.ip))
            .filter(|ip| ip.parse::<std::net::IpAddr>().is_ok())
            .collect()
    });
    pb::Sandbox {
        id: status.id,
        attempt: status.metadata.map_or(0, |m| m.attempt),
        ready,
        created_unix_nanos: status.created_at,
        ips: ips.unwrap_or_default(),
        host_network,
        pid: 0,
    }
}

fn container_message(status: cri::ContainerStatus, sandbox_id: String, message: String) -> pb::Container {
    let annotation = |key: &str| status.annotations.get(key).cloned();
    pb::Container {
        name: status.labels.get(labels::CONTAINER).cloned().unwrap_or_default(),
        sandbox_id,
        attempt: status.metadata.as_ref().map_or(0, |m| m.attempt),
        state: state_of(status.state) as i32,
        created_unix_nanos: status.created_at,
        started_unix_nanos: status.started_at,
        finished_unix_nanos: status.finished_at,
        exit_code: status.exit_code,
        reason: status.reason.clone(),
        message: status.message.clone(),
        image: status.image.as_ref().map(|i| i.image.clone()).unwrap_or_default(),
        image_ref: status.image_ref.clone(),
        hash: annotation(labels::HASH).unwrap_or_default(),
        restart_count: annotation(labels::RESTART_COUNT).and_then(|v| v.parse().ok()).unwrap_or(0),
        termination_grace_seconds: annotation(labels::GRACE).and_then(|v| v.parse().ok()),
        log_path: status.log_path.clone(),
        termination_message: message,
        user: status.user.and_then(|user| user.linux).map(|user| pb::ContainerUser {
            uid: user.uid,
            gid: user.gid,
            supplemental_groups: user.supplemental_groups,
        }),
        id: status.id,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{Answer, FakeRuntime, until};
    use tonic::Code;

    const RUNNING: cri::ContainerState = cri::ContainerState::ContainerRunning;
    const EXITED: cri::ContainerState = cri::ContainerState::ContainerExited;

    fn pod_with(uid: &str, container: Option<&str>, began: i64) -> pb::RuntimePod {
        let containers = container.map(|id| pb::Container { id: id.into(), ..Default::default() });
        pb::RuntimePod {
            uid: uid.into(),
            containers: containers.into_iter().collect(),
            observed_boot_nanos: began,
            ..Default::default()
        }
    }

    fn state(observer: &Observer, uid: &str) -> Option<pb::ContainerState> {
        observer.cached(uid)?.containers.first().map(pb::Container::state)
    }

    #[test]
    fn container_user_is_shown_if_the_runtime_reports_it() {
        let user_of = |user: Option<cri::ContainerUser>| {
            let status = cri::ContainerStatus { user, ..Default::default() };
            container_message(status, "s".into(), String::new()).user
        };
        let linux = cri::LinuxContainerUser { uid: 1000, gid: 3000, supplemental_groups: vec![3000, 4000] };
        let shown = pb::ContainerUser { uid: 1000, gid: 3000, supplemental_groups: vec![3000, 4000] };
        assert_eq!(user_of(Some(cri::ContainerUser { linux: Some(linux) })), Some(shown));
        let root = cri::ContainerUser { linux: Some(cri::LinuxContainerUser::default()) };
        assert_eq!(user_of(Some(root)), Some(pb::ContainerUser::default()));
        assert_eq!(user_of(Some(cri::ContainerUser { linux: None })), None);
        assert_eq!(user_of(None), None);
    }

    #[tokio::test]
    async fn unreadable_pod_keeps_its_last_state_and_others_are_published() {
        let fake = FakeRuntime::start().await;
        fake.container("c-a", "a", RUNNING);
        fake.container("c-b", "b", RUNNING);
        fake.observer.relist().await.unwrap();
        fake.container("c-a", "a", EXITED);
        fake.container("c-b", "b", EXITED);
        fake.container("c-c", "c", RUNNING);
        fake.answer("ContainerStatus c-a", Answer::Fail(usize::MAX, Code::Unknown));
        assert_eq!(fake.observer.relist().await.unwrap(), 3);
        assert_eq!(state(&fake.observer, "a"), Some(pb::ContainerState::Running));
        assert_eq!(state(&fake.observer, "b"), Some(pb::ContainerState::Exited));
        assert_eq!(state(&fake.observer, "c"), Some(pb::ContainerState::Running));
    }

    #[tokio::test]
    async fn pod_with_incomplete_responses_keeps_its_last_state() {
        let fake = FakeRuntime::start().await;
        fake.container("c-a", "a", RUNNING);
        fake.observer.relist().await.unwrap();
        fake.container("hollow", "a", RUNNING);
        let error = fake.observer.read("a").await.unwrap_err();
        assert!(error.message().contains("container hollow lacks metadata.name, created_at"), "{error:?}");
        assert_eq!(fake.observer.cached("a").unwrap().containers.len(), 1);
    }

    #[tokio::test]
    async fn pod_never_read_is_known_and_a_failed_list_is_an_error() {
        let fake = FakeRuntime::start().await;
        fake.sandbox("s-a", "a", true);
        fake.answer("PodSandboxStatus", Answer::Fail(1, Code::Unknown));
        fake.observer.relist().await.unwrap();
        assert!(fake.observer.knows("a") && fake.observer.cached("a").is_none());
        fake.answer("ListContainers", Answer::Fail(1, Code::Unavailable));
        assert!(fake.observer.relist().await.is_err());
        fake.observer.relist().await.unwrap();
        assert!(fake.observer.cached("a").is_some());
    }

    #[tokio::test]
    async fn older_read_does_not_restore_a_removed_pod() {
        let observer = FakeRuntime::start().await.observer;
        let now = Clock::System.read().boot_nanos;
        observer.publish(pod_with("a", Some("c"), now));
        observer.publish(pod_with("a", None, now + 20));
        let published = observer.publish(pod_with("a", Some("c"), now + 10));
        assert!(observer.cached("a").is_none());
        assert!(published.containers.is_empty());
        observer.publish(pod_with("a", Some("c"), now + 30));
        assert!(observer.cached("a").is_some());
    }

    #[tokio::test]
    async fn exit_is_observed_after_the_clock_was_set_back() {
        let fake = FakeRuntime::start().await;
        let clock = Clock::stopped();
        let observer = Observer::with_clock(fake.cri.clone(), fake.files.clone(), clock.clone());
        fake.container("c-a", "a", RUNNING);
        fake.container("c-b", "b", RUNNING);
        observer.relist().await.unwrap();
        clock.advance(1, -7_200);
        fake.container("c-a", "a", EXITED);
        observer.read("a").await.unwrap();
        assert_eq!(state(&observer, "a"), Some(pb::ContainerState::Exited));
        fake.container("c-b", "b", EXITED);
        observer.relist().await.unwrap();
        assert_eq!(state(&observer, "b"), Some(pb::ContainerState::Exited));
        let pod = observer.cached("b").unwrap();
        assert_eq!(pod.observed_boot_nanos, clock.read().boot_nanos);
        assert_eq!(pod.observed_unix_nanos, clock.read().unix_nanos);
    }

    #[tokio::test]
    async fn owner_recorded_after_a_read_began_is_kept() {
        let observer = FakeRuntime::start().await.observer;
        let began = Clock::System.read().boot_nanos;
        observer.record_owner("new", "a");
        observer.publish(pod_with("a", None, began - 1));
        observer.publish(pod_with("a", Some("old"), began - 1));
        assert_eq!(observer.owner_of("new").as_deref(), Some("a"));
        observer.publish(pod_with("a", None, Clock::System.read().boot_nanos + 1));
        assert_eq!(observer.owner_of("new"), None);
    }

    #[tokio::test]
    async fn observed_exit_is_confirmed_by_one_more_read() {
        let fake = FakeRuntime::start().await;
        fake.container("c1", "a", RUNNING);
        fake.observer.relist().await.unwrap();
        let lists = fake.calls("ListContainers").len();
        fake.container("c1", "a", EXITED);
        fake.observer.exited("c1".into());
        until("the pod has settled", || fake.observer.index().settling.is_empty()).await;
        assert_eq!(fake.calls("ListContainers").len(), lists + 2);
    }

    #[tokio::test]
    async fn exit_event_before_the_start_is_shown_is_not_lost() {
        let fake = FakeRuntime::start().await;
        fake.container("c1", "a", cri::ContainerState::ContainerCreated);
        fake.observer.relist().await.unwrap();
        let lists = fake.calls("ListContainers").len();
        fake.observer.exited("c1".into());
        fake.wait_for_calls("ListContainers", lists + 3).await;
        fake.container("c1", "a", RUNNING);
        fake.wait_for_calls("ListContainers", lists + 5).await;
        assert_eq!(state(&fake.observer, "a"), Some(pb::ContainerState::Running));
        fake.container("c1", "a", EXITED);
        until("the pod has settled", || fake.observer.index().settling.is_empty()).await;
        assert_eq!(state(&fake.observer, "a"), Some(pb::ContainerState::Exited));
    }

    #[tokio::test]
    async fn exit_is_read_again_after_errors_by_one_task_per_pod() {
        let fake = FakeRuntime::start().await;
        fake.container("c1", "a", RUNNING);
        fake.container("c2", "a", RUNNING);
        fake.observer.relist().await.unwrap();
        let lists = fake.calls("ListContainers").len();
        fake.answer("ListContainers", Answer::Fail(2, Code::Unavailable));
        fake.observer.exited("c1".into());
        fake.observer.exited("c2".into());
        assert_eq!(fake.observer.index().settling.len(), 1);
        fake.wait_for_calls("ListContainers", lists + 4).await;
        fake.container("c1", "a", EXITED);
        fake.container("c2", "a", EXITED);
        until("the pod has settled", || fake.observer.index().settling.is_empty()).await;
        let pod = fake.observer.cached("a").unwrap();
        assert!(pod.containers.iter().all(|c| c.state() == pb::ContainerState::Exited));
    }
}
