//! What the runtime runs, pod by pod: read when a hint comes or after an own act, and by a slow relist.
//!
//! Events are hints, a fresh read decides. Reads of one pod never overtake each other: a read that began
//! earlier than the one that was published last is dropped. Earlier is told by the clock of the boot: the node's own
//! clock may be set back, and every read would be dropped until it has caught up.

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
use crate::observe_metrics::ReadMetrics;

/// Pods whose statuses are read at the same time.
const READS_AT_ONCE: usize = 8;
/// How often an exit event is read again while the runtime still shows the container running: the event and
/// the runtime's own state come from one source, but not at the same moment.
const SETTLE_MS: [u64; 12] = [0, 3, 10, 30, 80, 160, 320, 640, 1_250, 2_500, 5_000, 10_000];
/// When the runtime still shows it running after this, the relist has to find out.
const SETTLE_WITHIN: Duration = Duration::from_secs(30);
/// How long it is remembered when a pod was found gone: no read takes longer.
const GONE_NANOS: i64 = 120 * 1_000_000_000;

/// A key of the watch; the runtime's own state comes first in a replay.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum WatchKey {
    /// The runtime.
    State,
    /// A pod, by UID.
    Pod(String),
}

/// A value of the watch.
#[derive(Debug, Clone, PartialEq)]
pub enum WatchValue {
    /// The runtime.
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
    /// Held while links are made and removed.
    links: Mutex<()>,
    reads: ReadMetrics,
}

#[derive(Debug, Default)]
struct Index {
    /// By container or sandbox id.
    owner: HashMap<String, Owner>,
    /// When the reads began that were published last, nanoseconds since the boot, also of pods that are gone
    /// since a short while.
    observed: HashMap<String, i64>,
    /// Pods that are being read because of a hint, and whether another hint came meanwhile.
    refreshing: HashMap<String, bool>,
    /// Pods of which the runtime still has to show that something has exited.
    settling: HashMap<String, Settling>,
    /// Pods that the runtime lists and cannot describe, and what it says instead.
    unreadable: HashMap<String, String>,
}

/// The pod that an id belongs to.
#[derive(Debug)]
struct Owner {
    uid: String,
    /// When it was learned, or when the read began that shows it, nanoseconds since the boot: an older read says
    /// nothing about it.
    since: i64,
}

#[derive(Debug, Default)]
struct Settling {
    /// What has exited.
    ids: HashSet<String>,
    /// One more has.
    more: Arc<Notify>,
}

impl Observer {
    /// An observer that has read nothing yet.
    pub fn new(cri: Cri, files: Files) -> Self {
        Self::with_clock(cri, files, Clock::System)
    }

    /// As [`Self::new`], by clocks of the caller's.
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

    /// The pod as it was published last.
    pub fn cached(&self, uid: &str) -> Option<Arc<pb::RuntimePod>> {
        match self.0.hub.get(&WatchKey::Pod(uid.to_owned())) {
            Some(WatchValue::Pod(pod)) => Some(pod),
            _ => None,
        }
    }

    /// Every pod as it was published last.
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

    /// Whether the runtime had something of the pod when it was asked last, even if it could not be read.
    pub fn knows(&self, uid: &str) -> bool {
        self.cached(uid).is_some() || self.index().unreadable.contains_key(uid)
    }

    /// Remembers which pod a new sandbox or container belongs to.
    pub fn learn(&self, id: &str, uid: &str) {
        let owner = Owner { uid: uid.to_owned(), since: self.0.clock.read().boot_nanos };
        self.index().owner.insert(id.to_owned(), owner);
    }

    /// A fresh read of one pod, published before it is returned.
    ///
    /// # Errors
    /// What the runtime answers.
    pub async fn read(&self, uid: &str) -> Result<Arc<pb::RuntimePod>, Status> {
        let (began, begun) = (self.0.clock.read(), Instant::now());
        let (sandboxes, containers) = self.0.cri.list(Some(uid)).await?;
        let pod = self.assemble(uid, began, sandboxes, containers).await?;
        self.0.reads.read_one(begun.elapsed());
        self.note_readable(uid, None);
        Ok(self.publish(pod))
    }

    /// Reads the pod soon, in the background. Hints that come during a read make one more read.
    pub fn refresh(&self, uid: String) {
        if let Some(again) = self.index().refreshing.get_mut(&uid) {
            *again = true;
            return;
        }
        self.index().refreshing.insert(uid.clone(), false);
        let observer = self.clone();
        tokio::spawn(async move {
            loop {
                if let Err(status) = observer.read(&uid).await {
                    tracing::debug!(uid, error = status.message(), "cannot read a pod; the next relist will");
                }
                let mut index = observer.index();
                match index.refreshing.get_mut(&uid) {
                    Some(again) if *again => *again = false,
                    _ => {
                        index.refreshing.remove(&uid);
                        return;
                    }
                }
            }
        });
    }

    /// A container or sandbox has exited, as an event says: reads its pod until the runtime agrees. There is
    /// one task per pod, which further exits join.
    pub fn exited(&self, id: String) {
        let Some(uid) = self.owner_of(&id) else { return };
        let more = {
            let mut index = self.index();
            if let Some(settling) = index.settling.get_mut(&uid) {
                settling.ids.insert(id);
                settling.more.notify_one();
                return;
            }
            let settling = index.settling.entry(uid.clone()).or_default();
            settling.ids.insert(id);
            Arc::clone(&settling.more)
        };
        tokio::spawn(self.clone().settle(uid, more));
    }

    /// Reads until nothing that has exited is shown alive, then once more: statuses are asked for after the list, so
    /// a read may show an exit that one which began later does not. Behind the last one all others stand back.
    async fn settle(self, uid: String, more: Arc<Notify>) {
        let (mut delays, mut until) = (SETTLE_MS.iter(), Instant::now() + SETTLE_WITHIN);
        let mut seen = false;
        loop {
            let delay = delays.next().or(SETTLE_MS.last()).copied().unwrap_or_default();
            // Cancel-safe: a notification that is not taken here stays for the next turn.
            tokio::select! {
                () = tokio::time::sleep(Duration::from_millis(delay)) => {}
                () = more.notified() => (delays, until) = (SETTLE_MS.iter(), Instant::now() + SETTLE_WITHIN),
            }
            let read = self.read(&uid).await;
            if let Err(status) = &read {
                tracing::debug!(uid, error = status.message(), "cannot read a pod of which something exited");
            }
            let mut index = self.index();
            let Some(settling) = index.settling.get_mut(&uid) else { return };
            if let Ok(pod) = &read {
                settling.ids.retain(|id| shows_alive(pod, id));
            }
            let settled = settling.ids.is_empty();
            if (settled && seen) || Instant::now() >= until {
                index.settling.remove(&uid);
                return;
            }
            if settled != seen {
                // The read that confirms comes at once; one that does not is followed as the first was.
                (seen, delays) = (settled, SETTLE_MS.iter());
            }
        }
    }

    /// Reads everything; pods that the runtime no longer knows are taken out. A pod that it lists and cannot
    /// describe keeps its last picture.
    ///
    /// # Errors
    /// What the runtime answers when it is asked for the lists; nothing is taken out then.
    pub async fn relist(&self) -> Result<usize, Status> {
        let begun = self.0.reads.begins();
        let listed = self.relist_all().await;
        self.0.reads.ended(begun.elapsed(), listed.is_ok());
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
            .buffer_unordered(READS_AT_ONCE);
        while let Some((uid, read)) = reads.next().await {
            self.note_readable(&uid, read.as_ref().err());
            if let Ok(pod) = read {
                self.publish(pod);
            }
        }
        self.drop_unlisted(&listed, began);
        self.0.hub.complete();
        Ok(listed.len())
    }

    /// Says once when a pod cannot be read, and when it can again.
    fn note_readable(&self, uid: &str, failure: Option<&Status>) {
        let mut index = self.index();
        match failure {
            Some(status) => {
                let error = status.message().to_owned();
                if index.unreadable.insert(uid.to_owned(), error.clone()).as_ref() != Some(&error) {
                    tracing::warn!(uid, error, "the runtime cannot describe a pod; its last picture stands");
                }
            }
            None if index.unreadable.remove(uid).is_some() => {
                tracing::info!(uid, "the runtime describes the pod again");
            }
            None => {}
        }
    }

    /// Takes out what a list that was asked for at `began` does not name.
    fn drop_unlisted(&self, listed: &HashSet<String>, began: Reading) {
        let mut known = HashSet::new();
        for key in self.0.hub.keys() {
            let WatchKey::Pod(uid) = key else { continue };
            if listed.contains(&uid) {
                known.insert(uid);
            } else {
                self.publish(nothing_of(uid, began));
            }
        }
        let mut index = self.index();
        index.unreadable.retain(|uid, _| listed.contains(uid));
        let recent = |since: i64| since > began.boot_nanos - GONE_NANOS;
        index.observed.retain(|uid, since| known.contains(uid) || recent(*since));
        index.owner.retain(|_, owner| known.contains(&owner.uid) || recent(owner.since));
    }

    /// Makes a pod of what the runtime lists, with the status calls that the list makes necessary: those of
    /// objects whose listed state differs from the published one.
    async fn assemble(
        &self,
        uid: &str,
        began: Reading,
        sandboxes: Vec<cri::PodSandbox>,
        containers: Vec<cri::Container>,
    ) -> Result<pb::RuntimePod, Status> {
        let before = self.cached(uid);
        let mut pod = nothing_of(uid.to_owned(), began);
        let named = sandboxes.iter().map(|s| &s.labels).chain(containers.iter().map(|c| &c.labels)).next();
        if let Some(found) = named {
            pod.namespace = found.get(labels::NAMESPACE).cloned().unwrap_or_default();
            pod.name = found.get(labels::NAME).cloned().unwrap_or_default();
        }
        for sandbox in sandboxes {
            let ready = sandbox.state == cri::PodSandboxState::SandboxReady as i32;
            let known = before.as_ref().and_then(|b| {
                b.sandboxes.iter().find(|k| k.id == sandbox.id && k.ready == ready && settled_sandbox(k))
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

    /// Publishes a read unless a later one has been published; returns what stands now.
    fn publish(&self, pod: pb::RuntimePod) -> Arc<pb::RuntimePod> {
        let uid = pod.uid.clone();
        let key = WatchKey::Pod(uid.clone());
        let mut index = self.index();
        let began = pod.observed_boot_nanos;
        if let Some(last) = index.observed.get(&uid).copied().filter(|last| *last > began) {
            let unix_nanos = self.0.clock.read().unix_nanos_of(last);
            let gone = || nothing_of(uid.clone(), Reading { unix_nanos, boot_nanos: last });
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
        let changed = before.as_ref().is_none_or(|b| !same(b, &pod));
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

    /// Brings the links to logs in line with what stands, in the background: one after the other, so the last
    /// one sees the last state.
    fn link_logs(&self, uid: String, before: Option<Arc<pb::RuntimePod>>) {
        let observer = self.clone();
        tokio::task::spawn_blocking(move || {
            let _in_turn = observer.0.links.lock().unwrap_or_else(PoisonError::into_inner);
            let now = observer.cached(&uid).unwrap_or_default();
            observer.0.files.link_logs(before.as_deref(), &now);
        });
    }
}

/// A pod of which the runtime knows nothing, as a read says that began then.
fn nothing_of(uid: String, began: Reading) -> pb::RuntimePod {
    pb::RuntimePod {
        uid,
        observed_unix_nanos: began.unix_nanos,
        observed_boot_nanos: began.boot_nanos,
        ..Default::default()
    }
}

/// A sandbox whose address is known; a READY one without address is asked again.
fn settled_sandbox(sandbox: &pb::Sandbox) -> bool {
    !sandbox.ready || sandbox.host_network || !sandbox.ips.is_empty()
}

/// Whether what has exited still stands there as if it had not. One that ends at once may have exited before the
/// runtime shows that it was started: it is shown running after that, and then as what it is.
fn shows_alive(pod: &pb::RuntimePod, id: &str) -> bool {
    let alive =
        |c: &pb::Container| matches!(c.state(), pb::ContainerState::Created | pb::ContainerState::Running);
    pod.sandboxes.iter().any(|s| s.id == id && s.ready)
        || pod.containers.iter().any(|c| c.id == id && alive(c))
}

/// Equal but for the moment of the read.
fn same(a: &pb::RuntimePod, b: &pb::RuntimePod) -> bool {
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

    fn picture(uid: &str, container: Option<&str>, began: i64) -> pb::RuntimePod {
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
    fn the_user_of_a_container_is_told_when_the_runtime_tells_it() {
        let told = |user: Option<cri::ContainerUser>| {
            let status = cri::ContainerStatus { user, ..Default::default() };
            container_message(status, "s".into(), String::new()).user
        };
        let linux = cri::LinuxContainerUser { uid: 1000, gid: 3000, supplemental_groups: vec![3000, 4000] };
        let shown = pb::ContainerUser { uid: 1000, gid: 3000, supplemental_groups: vec![3000, 4000] };
        assert_eq!(told(Some(cri::ContainerUser { linux: Some(linux) })), Some(shown));
        let root = cri::ContainerUser { linux: Some(cri::LinuxContainerUser::default()) };
        assert_eq!(told(Some(root)), Some(pb::ContainerUser::default()));
        assert_eq!(told(Some(cri::ContainerUser { linux: None })), None);
        assert_eq!(told(None), None);
    }

    #[tokio::test]
    async fn a_pod_that_cannot_be_read_keeps_its_last_picture_and_the_others_are_published() {
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
    async fn a_pod_whose_answers_are_not_whole_keeps_its_last_picture() {
        let fake = FakeRuntime::start().await;
        fake.container("c-a", "a", RUNNING);
        fake.observer.relist().await.unwrap();
        fake.container("hollow", "a", RUNNING);
        let told = fake.observer.read("a").await.unwrap_err();
        assert!(told.message().contains("container hollow lacks metadata.name, created_at"), "{told:?}");
        assert_eq!(fake.observer.cached("a").unwrap().containers.len(), 1);
    }

    #[tokio::test]
    async fn a_pod_that_was_never_read_is_known_and_a_failed_list_is_an_error() {
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
    async fn an_older_read_does_not_bring_back_a_pod_that_is_gone() {
        let observer = FakeRuntime::start().await.observer;
        let now = Clock::System.read().boot_nanos;
        observer.publish(picture("a", Some("c"), now));
        observer.publish(picture("a", None, now + 20));
        let stands = observer.publish(picture("a", Some("c"), now + 10));
        assert!(observer.cached("a").is_none());
        assert!(stands.containers.is_empty());
        observer.publish(picture("a", Some("c"), now + 30));
        assert!(observer.cached("a").is_some());
    }

    #[tokio::test]
    async fn an_exit_is_seen_though_the_clock_was_set_back_before_it() {
        let fake = FakeRuntime::start().await;
        let clock = Clock::standing();
        let observer = Observer::with_clock(fake.cri.clone(), fake.files.clone(), clock.clone());
        fake.container("c-a", "a", RUNNING);
        fake.container("c-b", "b", RUNNING);
        observer.relist().await.unwrap();
        clock.pass(1, -7_200);
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
    async fn what_was_learned_after_a_read_began_is_not_forgotten_by_it() {
        let observer = FakeRuntime::start().await.observer;
        let began = Clock::System.read().boot_nanos;
        observer.learn("new", "a");
        observer.publish(picture("a", None, began - 1));
        observer.publish(picture("a", Some("old"), began - 1));
        assert_eq!(observer.owner_of("new").as_deref(), Some("a"));
        observer.publish(picture("a", None, Clock::System.read().boot_nanos + 1));
        assert_eq!(observer.owner_of("new"), None);
    }

    #[tokio::test]
    async fn an_exit_that_was_seen_is_read_once_more() {
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
    async fn an_exit_that_comes_before_the_runtime_shows_the_start_is_not_forgotten() {
        let fake = FakeRuntime::start().await;
        fake.container("c1", "a", cri::ContainerState::ContainerCreated);
        fake.observer.relist().await.unwrap();
        let lists = fake.calls("ListContainers").len();
        fake.observer.exited("c1".into());
        fake.called("ListContainers", lists + 3).await;
        fake.container("c1", "a", RUNNING);
        fake.called("ListContainers", lists + 5).await;
        assert_eq!(state(&fake.observer, "a"), Some(pb::ContainerState::Running));
        fake.container("c1", "a", EXITED);
        until("the pod has settled", || fake.observer.index().settling.is_empty()).await;
        assert_eq!(state(&fake.observer, "a"), Some(pb::ContainerState::Exited));
    }

    #[tokio::test]
    async fn an_exit_is_read_again_after_errors_by_one_task_per_pod() {
        let fake = FakeRuntime::start().await;
        fake.container("c1", "a", RUNNING);
        fake.container("c2", "a", RUNNING);
        fake.observer.relist().await.unwrap();
        let lists = fake.calls("ListContainers").len();
        fake.answer("ListContainers", Answer::Fail(2, Code::Unavailable));
        fake.observer.exited("c1".into());
        fake.observer.exited("c2".into());
        assert_eq!(fake.observer.index().settling.len(), 1);
        fake.called("ListContainers", lists + 4).await;
        fake.container("c1", "a", EXITED);
        fake.container("c2", "a", EXITED);
        until("the pod has settled", || fake.observer.index().settling.is_empty()).await;
        let pod = fake.observer.cached("a").unwrap();
        assert!(pod.containers.iter().all(|c| c.state() == pb::ContainerState::Exited));
    }
}
