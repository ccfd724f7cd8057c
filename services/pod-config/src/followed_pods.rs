//! The pods of a control plane as a stream of complete sets: what the sources `api` and `etcd` have in common.
//!
//! The last good state is in the checkpoint. While the control plane is down, pods of this boot keep running over a restart of the
//! service; after a reboot those start that the offline policy allows. Only a response of the control plane settles the source, so
//! that an outage never removes pods.

use std::collections::BTreeMap;

use futures_util::stream::{self, BoxStream, StreamExt as _};
use keelson_config::{Config, Offline, ServiceName};
use keelson_list_watch::{Follower, ListWatch, WatchEvent};
use keelson_pod_config_core::desired_pod::DesiredPod;
use keelson_pod_config_core::files::SourceSet;
use keelson_pod_config_core::offline::{WaitReason, WaitingPod, contact_age, wait_reason};
use keelson_service_kit::Progress;
use keelson_service_kit::status::chain;

use crate::boot_state::BootState;
use crate::checkpoint::Checkpoint;
use crate::control_plane::ControlPlanePods;
use crate::last_contact::{LastContact, now_unix_seconds, waiting_suffix};

/// The condition for the connection to the control plane.
const CONDITION: &str = "control-plane";

/// State restored from the checkpoint.
#[derive(Debug, Default)]
pub struct RestoredState {
    /// Values by checkpoint key; no Secrets.
    pub values: BTreeMap<String, Vec<u8>>,
    /// The last contact with the control plane, in seconds since 1970; `None` if unknown.
    pub last_contact: Option<i64>,
}

/// What a control plane has of this node: how it is decoded, kept over a restart, and combined into a set.
pub trait PodStore: Send + 'static {
    /// Lists and watches it.
    type Watch: ListWatch<Error: std::error::Error + 'static> + 'static;

    /// The name of the source.
    const SOURCE: &'static str;
    /// How messages name the control plane.
    const CONTROL_PLANE: &'static str;

    /// Waits until the first list may be read.
    fn wait_until_listable(&mut self) -> impl Future<Output = ()> + Send {
        std::future::ready(())
    }

    /// Takes the restored state into use, except the pods that `start` holds back. Returns whether there is any.
    fn restore(&mut self, start: &mut OfflineStart<'_>) -> bool;

    /// Applies a complete list: what is not in it does not exist.
    fn apply_list(&mut self, items: Vec<<Self::Watch as ListWatch>::Item>);

    /// Applies the changes in one message.
    fn apply_changes(&mut self, changes: <Self::Watch as ListWatch>::Changes);

    /// The complete set, without waiting pods.
    fn set(&mut self) -> SourceSet;
}

/// Decides which restored pods start before the control plane answers.
#[derive(Debug)]
pub struct OfflineStart<'a> {
    /// Whether the control plane has answered in this boot: then its pods simply continue.
    same_boot: bool,
    offline: &'a Offline,
    /// The last contact before the restart, in seconds since 1970.
    last_contact: Option<i64>,
    boot: &'a BootState,
    waiting: Vec<WaitingPod>,
}

impl<'a> OfflineStart<'a> {
    /// At a start. `same_boot`: whether the control plane has answered in this boot. `last_contact` is that before the restart, in
    /// seconds since 1970.
    pub fn new(
        same_boot: bool,
        offline: &'a Offline,
        last_contact: Option<i64>,
        boot: &'a BootState,
    ) -> Self {
        Self { same_boot, offline, last_contact, boot, waiting: Vec::new() }
    }

    /// Why `pod` must wait for the control plane, which is then reported; `None` if it may start.
    pub fn hold_back(&mut self, pod: &DesiredPod) -> Option<WaitReason> {
        if self.same_boot {
            return None;
        }
        let age = contact_age(self.last_contact, self.boot.first_offline_check(now_unix_seconds()));
        let reason = wait_reason(pod.single_run.as_ref(), self.offline, age)?;
        self.waiting.push(WaitingPod {
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            origin: pod.origin.clone(),
            reason: reason.clone(),
        });
        Some(reason)
    }
}

/// Follows the pods of a control plane.
pub struct FollowedPods<S: PodStore> {
    store: S,
    follower: Follower<S::Watch>,
    progress: Progress,
    last_contact: LastContact,
    boot: BootState,
    offline: Offline,
    /// Pods that do not start before the control plane answers.
    waiting: Vec<WaitingPod>,
    settled: bool,
    started: bool,
}

impl<S: PodStore> FollowedPods<S> {
    /// Follows with `follower` into `store`. `last_contact` is that before the restart, in seconds since 1970.
    pub fn new(
        config: &Config,
        progress: Progress,
        checkpoint: Checkpoint,
        last_contact: Option<i64>,
        follower: Follower<S::Watch>,
        store: S,
    ) -> Self {
        let run_dir = config.paths.socket_dir(ServiceName::PodConfig);
        Self {
            store,
            follower,
            progress,
            last_contact: LastContact::new(S::SOURCE, last_contact, &config.offline, checkpoint),
            boot: BootState::new(&run_dir, S::SOURCE, &config.resources.identity_files.boot_id),
            offline: config.offline.clone(),
            waiting: Vec::new(),
            settled: false,
            started: false,
        }
    }

    /// The complete set after each change.
    pub fn into_stream(self) -> BoxStream<'static, ControlPlanePods> {
        stream::unfold(self, |mut pods| async move { Some((pods.next().await, pods)) }).boxed()
    }

    /// Waits for the next complete set.
    async fn next(&mut self) -> ControlPlanePods {
        if !std::mem::replace(&mut self.started, true) && self.restore() {
            return self.set();
        }
        if !self.settled {
            self.store.wait_until_listable().await;
        }
        loop {
            // Cancel-safe: a follower reads again what it did not return.
            let event = tokio::select! {
                event = self.follower.next() => event,
                () = self.last_contact.write_due() => {
                    self.last_contact.write_if_due();
                    continue;
                }
            };
            match event {
                WatchEvent::Listed(items) => {
                    self.record_contact();
                    self.apply_list(items);
                    return self.set();
                }
                WatchEvent::Changed(changes) => {
                    self.record_contact();
                    self.store.apply_changes(changes);
                    return self.set();
                }
                WatchEvent::Contact => self.record_contact(),
                WatchEvent::Lost(error) => self.record_loss(&error),
            }
        }
    }

    fn set(&mut self) -> ControlPlanePods {
        let set = SourceSet { waiting: self.waiting.clone(), ..self.store.set() };
        ControlPlanePods { set, settled: self.settled }
    }

    fn record_contact(&mut self) {
        self.progress.condition(CONDITION, Ok(()));
        self.last_contact.record_contact();
    }

    fn record_loss(&mut self, error: &(dyn std::error::Error + 'static)) {
        self.last_contact.record_loss();
        let waiting = waiting_suffix(self.waiting.len());
        let text = format!("{}; the last known state stays in effect{waiting}", chain(error));
        self.progress.condition(CONDITION, Err(text));
    }

    fn apply_list(&mut self, items: Vec<<S::Watch as ListWatch>::Item>) {
        self.store.apply_list(items);
        self.waiting.clear();
        if !std::mem::replace(&mut self.settled, true) {
            self.boot.record_contact();
        }
    }

    /// Restores the pods that may start now. Returns whether there is anything to publish.
    fn restore(&mut self) -> bool {
        let same_boot = self.boot.has_contact();
        let last_contact = self.last_contact.before_restart();
        let mut start = OfflineStart::new(same_boot, &self.offline, last_contact, &self.boot);
        let is_restored = self.store.restore(&mut start);
        self.waiting = start.waiting;
        if is_restored {
            tracing::info!(
                event = "offline_state_restored",
                same_boot,
                "the last known pods of {} stay in effect until it answers",
                S::CONTROL_PLANE
            );
        }
        is_restored || !self.waiting.is_empty()
    }
}
