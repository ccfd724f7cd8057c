//! The PersistentVolumes and claims of the manifests, as they are bound to each other. For nodes without an API server.
//!
//! The binding is decided by [`bind`] whenever the manifests or the pods that use claims change. [`crate::binding_store`] stores
//! it, and only then is it served: what somebody has seen survives a crash, and a decision that is lost was seen by nobody.

mod served;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use keelson_config::Config;
use keelson_kube_model::time::format_seconds;
use keelson_pod_config_core::binder::{
    Binding, Bindings, Claim, ClaimKey, ClaimState, FirstSeen, Holder, Manifests, NodeFacts, Outcome,
    Records, Report, Reports, Volume, WAITS_FOR_STORAGE, bind, claim_warning, deleted_claims, first_seen,
    holders, published, unknown,
};
use keelson_pod_config_core::manifest::Kind;
use keelson_pod_config_core::node::standalone_node;
use keelson_pod_config_core::object::{ObjectKey, StoredObject};
use keelson_service_kit::{Subscription, WatchHub, now_unix_nanos};
use tokio::sync::{Notify, watch};

use self::served::{deleted, returned, with_creation_time};
use crate::binding_store::Opened;

/// The result of looking up an object in the sources.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ObjectLookup {
    /// The object as JSON.
    Object(Arc<[u8]>),
    /// All sources have been read, and none has the object.
    NotFound,
    /// No source has the object so far, and some have not been read yet.
    SourcesNotRead,
}

/// Messages about claims, by claim.
pub type ClaimMessages = BTreeMap<ObjectKey, String>;

/// The objects of the manifests.
pub type Objects = BTreeMap<ObjectKey, Arc<StoredObject>>;

/// What has to be done for the records.
#[derive(Debug)]
pub enum Unstored {
    /// Nothing.
    Nothing,
    /// They have not been read yet.
    Unknown,
    /// These have to be stored.
    Records(Records),
}

/// The PersistentVolumes and claims of all sources. Cheap to clone.
#[derive(Debug, Clone)]
pub struct VolumeObjects(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    node: NodeFacts,
    state: Mutex<State>,
    decided: Notify,
    /// The disk says that volume-manager reports the claims in use: a report holds its claims from then on, also over a restart.
    reports_recorded: watch::Sender<bool>,
}

#[derive(Debug)]
struct State {
    /// All sources have been read.
    complete: bool,
    /// What the manifests have.
    manifests: Objects,
    /// The claims that desired pods name.
    used: BTreeSet<ClaimKey>,
    /// The claims in use, as volume-manager reports them.
    reports: Reports,
    /// The number of the newest stream of reports; 0 before the first.
    report_stream: u64,
    /// What uses each claim, as of the last decision.
    holders: BTreeMap<ClaimKey, Holder>,
    /// The records of the last decision; why they are not known, for people.
    records: Result<Records, String>,
    /// The records on the disk; `None` if there are none, or while they are replaced.
    stored: Option<Records>,
    /// The bindings that may be seen: they are on the disk, and no decision has changed them since.
    seen: Bindings,
    /// The bindings that were logged.
    logged: Bindings,
    /// Why the last decision could not be stored.
    error: Option<String>,
    /// The last decision.
    outcome: Outcome,
    /// What it was about.
    decided: Manifests,
    /// The objects as they are returned. Complete once all sources have been read.
    objects: WatchHub<ObjectKey, Arc<[u8]>>,
}

impl VolumeObjects {
    /// Without objects; `opened` are the records of the run before the restart, or why they are not known.
    pub fn new(config: &Config, opened: Result<Opened, String>) -> Self {
        let node = standalone_node(&config.node_name, &config.resources.node_labels, std::env::consts::ARCH);
        let labels = serde_json::from_value(node["metadata"]["labels"].clone()).unwrap_or_default();
        let node = NodeFacts { name: config.node_name.clone(), labels };
        let mut state = State {
            complete: false,
            manifests: Objects::new(),
            used: BTreeSet::new(),
            reports: Reports::Never,
            report_stream: 0,
            holders: BTreeMap::new(),
            records: Err(String::new()),
            stored: None,
            seen: Bindings::new(),
            logged: Bindings::new(),
            error: None,
            outcome: Outcome::default(),
            decided: Manifests::default(),
            objects: WatchHub::incomplete(),
        };
        match opened {
            Ok(opened) => state.set_records(opened),
            Err(reason) => state.records = Err(reason),
        }
        let reports_recorded = watch::Sender::new(state.are_reports_recorded());
        Self(Arc::new(Inner { node, state: Mutex::new(state), decided: Notify::new(), reports_recorded }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks up a PersistentVolume or claim with its UID, its phase, and the object that it is bound to. `namespace` does not count
    /// for a PersistentVolume.
    pub fn get(&self, kind: &str, namespace: &str, name: &str) -> ObjectLookup {
        let state = self.state();
        let Some(kind) = Kind::parse(kind).filter(|kind| kind.is_volume_object()) else {
            return if state.complete { ObjectLookup::NotFound } else { ObjectLookup::SourcesNotRead };
        };
        let namespace = if kind.is_namespaced() { namespace.to_owned() } else { String::new() };
        match state.objects.get(&ObjectKey { kind, namespace, name: name.to_owned() }) {
            Some(json) => ObjectLookup::Object(json),
            None if state.complete => ObjectLookup::NotFound,
            None => ObjectLookup::SourcesNotRead,
        }
    }

    /// The PersistentVolumes or the claims, as [`Self::get`] returns them, sorted by namespace and name.
    pub fn list(&self, kind: Kind) -> Vec<Arc<[u8]>> {
        let all = self.state().objects.snapshot().into_iter();
        all.filter(|(key, _)| key.kind == kind).map(|(_, json)| json).collect()
    }

    /// Subscribes to the objects as [`Self::get`] returns them, and their changes.
    pub fn subscribe(&self) -> Subscription<ObjectKey, Arc<[u8]>> {
        self.state().objects.subscribe()
    }

    /// Whether pods use other claims than at the last decision.
    pub fn are_others_used(&self, used: &BTreeSet<ClaimKey>) -> bool {
        self.state().used != *used
    }

    /// Replaces the PersistentVolumes and claims of the manifests and the claims that pods use, and decides again. With `complete`
    /// all sources have been read. Returns what a person should know about the claims.
    pub fn update(&self, objects: Objects, used: BTreeSet<ClaimKey>, complete: bool) -> ClaimMessages {
        let mut state = self.state();
        let before = std::mem::replace(&mut state.manifests, objects);
        state.used = used;
        state.complete = complete;
        self.decide(&mut state, &before)
    }

    /// Takes records that could not be read before, and decides again.
    pub fn take_records(&self, opened: Opened) -> ClaimMessages {
        let mut state = self.state();
        state.set_records(opened);
        state.error = None;
        self.0.reports_recorded.send_replace(state.are_reports_recorded());
        self.decide(&mut state, &Objects::new())
    }

    /// Notes that a volume-manager has begun to report. Earlier streams do not count any more, and until its first report no claim
    /// that may be in use is released. Returns the number of its stream, and what a person should know about the claims.
    pub fn begin_reports(&self) -> (u64, ClaimMessages) {
        let mut state = self.state();
        state.report_stream += 1;
        state.reports = Reports::Awaited;
        let messages = self.decide(&mut state, &Objects::new());
        (state.report_stream, messages)
    }

    /// Takes a complete report of a stream. Returns what a person should know about the claims; `None` if there is a newer stream.
    pub fn take_report(&self, stream: u64, report: Report) -> Option<ClaimMessages> {
        let mut state = self.state();
        if state.report_stream != stream {
            return None;
        }
        state.reports = Reports::Known(report);
        Some(self.decide(&mut state, &Objects::new()))
    }

    /// Waits until the disk says that volume-manager reports the claims in use.
    pub async fn reports_recorded(&self) {
        // The sender lives as long as this object.
        drop(self.0.reports_recorded.subscribe().wait_for(|is_recorded| *is_recorded).await);
    }

    fn decide(&self, state: &mut State, before: &Objects) -> ClaimMessages {
        let time = format_seconds(now_unix_nanos() / 1_000_000_000).unwrap_or_default();
        state.decide(before, &self.0.node, &time);
        self.0.decided.notify_one();
        state.publish()
    }

    /// Waits until something was decided that was not looked at by [`Self::unstored`] yet.
    pub async fn decided(&self) {
        self.0.decided.notified().await;
    }

    /// What has to be stored.
    pub fn unstored(&self) -> Unstored {
        let mut state = self.state();
        let records = match &state.records {
            Err(_) => return Unstored::Unknown,
            Ok(records) if state.stored.as_ref() == Some(records) => return Unstored::Nothing,
            Ok(records) => records.clone(),
        };
        state.stored = None;
        Unstored::Records(records)
    }

    /// Records that the disk has these records now: what they say may be seen.
    pub fn stored(&self, records: Records) -> ClaimMessages {
        let mut state = self.state();
        log_changes(&state.logged, &records.bindings);
        state.logged.clone_from(&records.bindings);
        state.seen.clone_from(&records.bindings);
        state.hide_changed();
        state.stored = Some(records);
        state.error = None;
        self.0.reports_recorded.send_if_modified(|is_recorded| {
            let is_new = !*is_recorded && state.are_reports_recorded();
            *is_recorded |= is_new;
            is_new
        });
        state.publish()
    }

    /// Records why the last decision could not be stored, or the records not be read.
    pub fn failed(&self, error: &str) -> ClaimMessages {
        let mut state = self.state();
        state.error = Some(error.to_owned());
        if state.records.is_err() {
            state.records = Err(error.to_owned());
        }
        state.publish()
    }
}

impl State {
    fn set_records(&mut self, Opened { records, is_stored }: Opened) {
        if is_stored {
            self.seen.clone_from(&records.bindings);
            self.logged.clone_from(&records.bindings);
            self.stored = Some(records.clone());
        }
        if records.reported && self.reports == Reports::Never {
            self.reports = Reports::Awaited;
        }
        self.records = Ok(records);
    }

    /// Whether the last decision binds the same objects.
    fn has_bindings_of(&self, records: &Records) -> bool {
        self.records.as_ref().is_ok_and(|decided| decided.bindings == records.bindings)
    }

    fn are_reports_recorded(&self) -> bool {
        self.stored.as_ref().is_some_and(|records| records.reported)
    }

    /// Takes out of the bindings that may be seen those that the last decision has changed, even if a later one restores them: a
    /// write between the two may be under way.
    fn hide_changed(&mut self) {
        let Ok(records) = &self.records else { return };
        let is_same = |volume: &String, binding: &mut Binding| {
            records.bindings.get(volume).is_some_and(|decided| is_same_binding(binding, decided))
        };
        self.seen.retain(is_same);
    }

    /// Decides about the present manifests; `before` are the earlier ones.
    fn decide(&mut self, before: &Objects, node: &NodeFacts, time: &str) {
        let mut manifests = read(&self.manifests, self.complete);
        self.outcome = match &mut self.records {
            Ok(records) => {
                records.reported |= matches!(self.reports, Reports::Known(_));
                self.holders = holders(&self.used, &self.reports, &records.bindings);
                manifests.used = self.holders.keys().cloned().collect();
                records.deleted =
                    deleted_claims(records, before, &self.manifests, &manifests.used, self.complete, time);
                for claim in &records.deleted {
                    if let Some(read) = Claim::of(&claim.object) {
                        manifests.claims.insert(claim.key(), Claim { deleted: true, ..read });
                    }
                }
                let stored = self.stored.as_ref().map(|stored| &stored.first_seen);
                records.first_seen = first_seen(&manifests, &records.first_seen, stored, time);
                let outcome = bind(&manifests, records, node);
                records.bindings.clone_from(&outcome.bindings);
                outcome
            }
            Err(reason) => unknown(&manifests, reason),
        };
        match &self.stored {
            Some(stored) if self.has_bindings_of(stored) => self.seen.clone_from(&stored.bindings),
            Some(_) | None => self.hide_changed(),
        }
        self.decided = manifests;
    }

    /// Lets others see as much of the last decision as is stored. Returns what a person should know about the claims.
    fn publish(&mut self) -> ClaimMessages {
        let error = self.error.as_deref();
        let seen = match &self.records {
            Ok(_) => published(&self.outcome, &self.seen, error.unwrap_or(WAITS_FOR_STORAGE)),
            Err(reason) => unknown(&self.decided, reason),
        };
        let unknown = FirstSeen::new();
        let first_seen = self.records.as_ref().map_or(&unknown, |records| &records.first_seen);
        let deleted_claims = self.records.iter().flat_map(|records| &records.deleted);
        let deleted = deleted_claims.map(|claim| deleted(claim, &self.decided, &seen, &self.holders));
        let objects = self.manifests.values().filter_map(|object| returned(object, &self.decided, &seen));
        let with_time = |(key, value)| (key, with_creation_time(value, first_seen));
        self.replace_objects(objects.chain(deleted).map(with_time).collect());
        tracing::debug!(
            event = "volume_objects_updated",
            "the PersistentVolumes and claims have been updated"
        );
        let messages = seen.claims.iter().filter_map(|(key, state)| {
            // A binding that is being stored is nothing to know of, unless that fails.
            let is_storing = |state: &ClaimState| matches!(state, ClaimState::Pending { reason } if reason == WAITS_FOR_STORAGE);
            let message = claim_warning(key, self.decided.claims.get(key)?, state).filter(|_| !is_storing(state))?;
            Some((object_key(key), message))
        });
        messages.collect()
    }

    /// Lets others see these objects and no others.
    fn replace_objects(&self, objects: BTreeMap<ObjectKey, Arc<[u8]>>) {
        for key in self.objects.keys().iter().filter(|key| !objects.contains_key(*key)) {
            self.objects.remove(key);
        }
        for (key, json) in objects {
            self.objects.set_if_changed(key, json);
        }
        if self.complete {
            self.objects.complete();
        }
    }
}

fn object_key(ClaimKey { namespace, name }: &ClaimKey) -> ObjectKey {
    let (namespace, name) = (namespace.clone(), name.clone());
    ObjectKey { kind: Kind::PersistentVolumeClaim, namespace, name }
}

fn read(objects: &Objects, complete: bool) -> Manifests {
    let mut manifests = Manifests { complete, ..Manifests::default() };
    for (ObjectKey { kind, namespace, name }, object) in objects {
        let (namespace, name) = (namespace.clone(), name.clone());
        let is_read = match kind {
            Kind::PersistentVolume => {
                Volume::read(object).map(|volume| drop(manifests.volumes.insert(name, volume)))
            }
            Kind::PersistentVolumeClaim => {
                let key = ClaimKey { namespace, name };
                Claim::read(object).map(|claim| drop(manifests.claims.insert(key, claim)))
            }
            Kind::Pod | Kind::Secret | Kind::ConfigMap => Some(()),
        };
        if is_read.is_none() {
            // It was validated when it was read, with the same types.
            tracing::error!(object = %object.key, "a validated object cannot be read; it is not bound");
        }
    }
    manifests
}

/// Whether both are of the same claim in the same state.
fn is_same_binding(one: &Binding, other: &Binding) -> bool {
    one.released == other.released && ClaimKey::of(&one.claim) == ClaimKey::of(&other.claim)
}

/// Logs which PersistentVolumes were bound and released.
fn log_changes(before: &Bindings, after: &Bindings) {
    for (volume, binding) in after {
        let known = before.get(volume);
        let claim = &binding.claim;
        let is_same = known.is_some_and(|known| is_same_binding(known, binding));
        match (is_same, binding.released) {
            (true, _) => {}
            (false, false) => {
                tracing::info!(event = "claim_bound", volume, %claim, "claim bound to its PersistentVolume");
            }
            (false, true) => tracing::info!(
                event = "volume_released", volume, %claim,
                "the claim has gone; its PersistentVolume keeps the data"
            ),
        }
    }
    for volume in before.keys().filter(|volume| !after.contains_key(*volume)) {
        tracing::info!(event = "volume_freed", volume, "a released PersistentVolume was deleted");
    }
}
