//! What the runtime runs, pod by pod: read when a hint comes or after an own act, and by a slow relist.
//!
//! Events are hints, a fresh read decides. Reads of one pod never overtake each other: a read that began
//! earlier than the one that was published last is dropped.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use k8s_cri::v1 as cri;
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_service_kit::{WatchHub, now_unix_nanos};
use tonic::Status;

use crate::cri::Cri;
use crate::files::Files;
use crate::labels;

/// Pods whose statuses are read at the same time.
const READS_AT_ONCE: usize = 8;
/// How often an exit event is read again while the runtime still shows the container running: the event and
/// the runtime's own state come from one source, but not at the same moment.
const SETTLE_MS: [u64; 8] = [0, 3, 10, 30, 80, 160, 320, 640];

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
    hub: WatchHub<WatchKey, WatchValue>,
    index: Mutex<Index>,
}

#[derive(Debug, Default)]
struct Index {
    /// Container or sandbox id to pod UID.
    owner: HashMap<String, String>,
    /// When the reads began that were published last.
    observed: HashMap<String, i64>,
    /// Pods that are being read because of a hint, and whether another hint came meanwhile.
    refreshing: HashMap<String, bool>,
}

impl Observer {
    /// An observer that has read nothing yet.
    pub fn new(cri: Cri, files: Files) -> Self {
        let hub = WatchHub::incomplete();
        Self(Arc::new(Inner { cri, files, hub, index: Mutex::default() }))
    }

    /// Where pods and the runtime's state are published.
    pub fn hub(&self) -> &WatchHub<WatchKey, WatchValue> {
        &self.0.hub
    }

    fn index(&self) -> std::sync::MutexGuard<'_, Index> {
        self.0.index.lock().unwrap_or_else(PoisonError::into_inner)
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
        self.index().owner.get(id).cloned()
    }

    /// Remembers which pod a new sandbox or container belongs to.
    pub fn learn(&self, id: &str, uid: &str) {
        self.index().owner.insert(id.to_owned(), uid.to_owned());
    }

    /// A fresh read of one pod, published before it is returned.
    ///
    /// # Errors
    /// What the runtime answers.
    pub async fn read(&self, uid: &str) -> Result<Arc<pb::RuntimePod>, Status> {
        let began = now_unix_nanos();
        let (sandboxes, containers) = self.0.cri.list(Some(uid)).await?;
        let pod = self.assemble(uid, began, sandboxes, containers).await?;
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

    /// A container or sandbox has exited, as an event says: reads its pod until the runtime agrees.
    pub fn exited(&self, id: String) {
        let Some(uid) = self.owner_of(&id) else { return };
        let observer = self.clone();
        tokio::spawn(async move {
            for delay in SETTLE_MS {
                tokio::time::sleep(Duration::from_millis(delay)).await;
                match observer.read(&uid).await {
                    Ok(pod) if !shows_alive(&pod, &id) => return,
                    Ok(_) => {}
                    Err(_) => return,
                }
            }
        });
    }

    /// Reads everything; pods that the runtime no longer knows are taken out.
    ///
    /// # Errors
    /// What the runtime answers; nothing is taken out then.
    pub async fn relist(&self) -> Result<usize, Status> {
        let began = now_unix_nanos();
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
        let read: Vec<Result<pb::RuntimePod, Status>> = stream::iter(pods)
            .map(|(uid, (s, c))| async move { self.assemble(&uid, began, s, c).await })
            .buffer_unordered(READS_AT_ONCE)
            .collect()
            .await;
        for pod in read {
            self.publish(pod?);
        }
        for key in self.0.hub.keys() {
            if let WatchKey::Pod(uid) = key
                && !listed.contains(&uid)
            {
                self.publish(pb::RuntimePod { uid, observed_unix_nanos: began, ..Default::default() });
            }
        }
        self.0.hub.complete();
        Ok(listed.len())
    }

    /// Makes a pod of what the runtime lists, with the status calls that the list makes necessary: those of
    /// objects whose listed state differs from the published one.
    async fn assemble(
        &self,
        uid: &str,
        began: i64,
        sandboxes: Vec<cri::PodSandbox>,
        containers: Vec<cri::Container>,
    ) -> Result<pb::RuntimePod, Status> {
        let before = self.cached(uid);
        let mut pod =
            pb::RuntimePod { uid: uid.to_owned(), observed_unix_nanos: began, ..pb::RuntimePod::default() };
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
        let key = WatchKey::Pod(pod.uid.clone());
        let mut index = self.index();
        if index.observed.get(&pod.uid).is_some_and(|last| *last > pod.observed_unix_nanos) {
            return self.cached(&pod.uid).unwrap_or_else(|| Arc::new(pod));
        }
        let before = self.cached(&pod.uid);
        let ids = |p: &pb::RuntimePod| -> Vec<String> {
            p.sandboxes
                .iter()
                .map(|s| s.id.clone())
                .chain(p.containers.iter().map(|c| c.id.clone()))
                .collect()
        };
        if pod.sandboxes.is_empty() && pod.containers.is_empty() {
            index.observed.remove(&pod.uid);
            index.owner.retain(|_, uid| *uid != pod.uid);
            self.0.hub.remove(&key);
            return Arc::new(pod);
        }
        index.observed.insert(pod.uid.clone(), pod.observed_unix_nanos);
        for gone in before.iter().flat_map(|b| ids(b)).filter(|id| !ids(&pod).contains(id)) {
            index.owner.remove(&gone);
        }
        for id in ids(&pod) {
            index.owner.insert(id, pod.uid.clone());
        }
        let pod = Arc::new(pod);
        if before.as_ref().is_none_or(|b| !same(b, &pod)) {
            self.0.files.link_logs(before.as_deref(), &pod);
            self.0.hub.set(key, WatchValue::Pod(Arc::clone(&pod)));
        }
        pod
    }
}

/// A sandbox whose address is known; a READY one without address is asked again.
fn settled_sandbox(sandbox: &pb::Sandbox) -> bool {
    !sandbox.ready || sandbox.host_network || !sandbox.ips.is_empty()
}

fn shows_alive(pod: &pb::RuntimePod, id: &str) -> bool {
    pod.sandboxes.iter().any(|s| s.id == id && s.ready)
        || pod.containers.iter().any(|c| c.id == id && c.state == pb::ContainerState::Running as i32)
}

/// Equal but for the moment of the read.
fn same(a: &pb::RuntimePod, b: &pb::RuntimePod) -> bool {
    a.sandboxes == b.sandboxes && a.containers == b.containers && a.name == b.name
}

fn state_of(state: i32) -> pb::ContainerState {
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
        id: status.id,
    }
}
