//! Finds out what the volumes of a pod are that plugins provide: reads their claims and PersistentVolumes, and asks the plugin
//! (volumes.md §3.3, §3.4).
//!
//! Each pod with such volumes has a task that resolves them, retries what fails, and reads everything again with each sync of
//! the pod, since claims are not watched. So a claim that cannot be read holds up its own volume only.

use std::collections::{BTreeMap, BTreeSet};
use std::future::ready;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::{BoxFuture, Shared};
use futures_util::{FutureExt as _, StreamExt as _};
use keelson_service_kit::{Backoff, EventRing, ObjectRef, now_unix_nanos};
use keelson_volume_manager_core::claims::{
    self, ClaimRequest, ClaimSource, Fetched, ResolvedVolume, VolumeMode,
};
use keelson_volume_manager_core::desire::{PodDesire, Source, Volume, Want};
use keelson_volume_manager_core::objects::{PersistentVolume, PersistentVolumeClaim};
use keelson_volume_manager_core::selinux;
use keelson_volume_manager_core::wait_owner::WaitOwner;
use serde_json::{Map, Value};
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use crate::claims_in_use::{CONFIRMED_WITHIN, ClaimReports};
use crate::legacy;
use crate::live_objects::{LiveObjects, ReadError};
use crate::plugins::{Plugin, PluginError, Plugins, VolumeSpec};
use crate::quantities::storage;
use crate::selinux::{SeLinux, VolumeLabels};
use crate::shared_volumes::{ResolvedSpec, SharedVolumes};
use crate::view::VolumeWait;

/// The back-off of a volume that cannot be resolved.
const RETRY: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(10));
/// The time between two syncs of a pod, which is extended at random by up to a half (volumes.md §3.1).
const SYNC: Duration = Duration::from_secs(60);

/// How many volumes of a pod are resolved at the same time.
const CONCURRENT: usize = 8;

/// What resolving volumes needs. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Resolver {
    pub(crate) live: LiveObjects,
    pub(crate) plugins: Plugins,
    pub(crate) shared: SharedVolumes,
    pub(crate) selinux: SeLinux,
    pub(crate) events: EventRing,
    pub(crate) reports: ClaimReports,
}

/// The volumes that cannot be resolved now, and why.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Unresolved {
    /// By `spec.volumes[].name`.
    pub(crate) waits: BTreeMap<String, VolumeWait>,
    /// When they are tried again, in unix nanoseconds; 0 if there are none.
    pub(crate) next_try_unix_nanos: i64,
    /// pod-config has not confirmed that the claim of one of them is in use. They are tried again at once when it does.
    awaits_confirmation: bool,
}

/// Why a volume cannot be resolved now.
struct Failed {
    wait: VolumeWait,
    is_unconfirmed: bool,
}

/// Why the claims of a pod are not confirmed to be in use; `None` if they are.
type Confirmation<'a> = Shared<BoxFuture<'a, Option<String>>>;

/// The task that resolves the volumes of one pod. It ends when this is dropped, and asks for no volume after that.
#[derive(Debug)]
pub(crate) struct PodResolver {
    task: AbortHandle,
    gate: Gate,
}

/// Open as long as the pod wants its volumes.
type Gate = Arc<Mutex<bool>>;

fn lock(gate: &Gate) -> MutexGuard<'_, bool> {
    gate.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for PodResolver {
    fn drop(&mut self) {
        *lock(&self.gate) = false;
        self.task.abort();
    }
}

impl PodResolver {
    /// Starts resolving the plugins' volumes of a pod; `None` if it has none, or if the pod is not to run.
    pub(crate) fn start(
        resolver: &Resolver,
        desire: &Arc<PodDesire>,
        unresolved: watch::Sender<Unresolved>,
    ) -> Option<Self> {
        let has_volumes = desire.volumes.iter().any(Volume::has_plugin);
        if !has_volumes || desire.header.want != Want::Run {
            return None;
        }
        let (resolver, desire) = (resolver.clone(), Arc::clone(desire));
        let gate = Gate::new(Mutex::new(true));
        let gate_of_task = Arc::clone(&gate);
        let task = keelson_service_kit::spawn("volume resolver", async move {
            resolver.follow(&desire, &gate_of_task, &unresolved).await;
        });
        Some(Self { task: task.abort_handle(), gate })
    }
}

impl Resolver {
    /// Resolves the volumes of a pod again and again.
    async fn follow(&self, desire: &PodDesire, gate: &Gate, unresolved: &watch::Sender<Unresolved>) {
        let mut retry = RETRY;
        let mut last_event = String::new();
        let mut confirmations = self.reports.changes();
        let mut failed = self.resolve_all(desire, gate, None).await;
        loop {
            let is_complete = failed.waits.is_empty();
            let pause = if is_complete {
                retry.reset();
                SYNC + SYNC.mul_f64(fastrand::f64() / 2.0)
            } else {
                let delay = retry.next_delay();
                let nanos = i64::try_from(delay.as_nanos()).unwrap_or(i64::MAX);
                failed.next_try_unix_nanos = now_unix_nanos().saturating_add(nanos);
                delay
            };
            self.report(desire, &failed, &mut last_event);
            unresolved.send_if_modified(|old| {
                let is_new = *old != failed;
                old.clone_from(&failed);
                is_new
            });
            // Cancel-safe: nothing is consumed.
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = confirmations.changed(), if failed.awaits_confirmation => {}
            }
            confirmations.mark_unchanged();
            failed = if is_complete {
                self.shared.require_remounts(&desire.header.pod.uid);
                self.resolve_all(desire, gate, None).await
            } else {
                self.resolve_all(desire, gate, Some(&failed)).await
            };
        }
    }

    /// Resolves volumes, several at the same time, and hands each to the shared volumes: all, or those that have failed.
    async fn resolve_all(&self, desire: &PodDesire, gate: &Gate, only: Option<&Unresolved>) -> Unresolved {
        let is_asked = |volume: &&Volume| {
            volume.has_plugin() && only.is_none_or(|failed| failed.waits.contains_key(&volume.name))
        };
        let confirmation = self.confirmation(desire, gate);
        let mut volumes: Vec<&Volume> = desire.volumes.iter().filter(is_asked).collect();
        // Volumes with a claim may wait for pod-config, and the others do not wait for them.
        volumes.sort_by_key(|volume| claim_name(desire, volume).is_some());
        let asked: Vec<_> = volumes
            .into_iter()
            .map(|volume| self.resolve_one(desire, volume, gate, confirmation.clone()).boxed())
            .collect();
        let mut unresolved = Unresolved::default();
        let mut failed = futures_util::stream::iter(asked).buffer_unordered(CONCURRENT);
        while let Some(failed) = failed.next().await {
            let Some(Failed { wait, is_unconfirmed }) = failed else { continue };
            unresolved.awaits_confirmation |= is_unconfirmed;
            unresolved.waits.insert(wait.volume.clone(), wait);
        }
        unresolved
    }

    /// Adds the claims of a pod to those in use, and waits until pod-config has confirmed that. Only then are they read, so that what
    /// is read is a binding that pod-config keeps.
    fn confirmation(&self, desire: &PodDesire, gate: &Gate) -> Confirmation<'_> {
        let names: BTreeSet<String> =
            desire.volumes.iter().filter_map(|volume| claim_name(desire, volume)).collect();
        let is_open = lock(gate);
        if !*is_open || names.is_empty() {
            return ready(Some("the pod wants no claim any more".to_owned())).boxed().shared();
        }
        let revision = self.shared.want_claims(&desire.header.pod, names);
        drop(is_open);
        self.reports.unconfirmed(revision, Instant::now() + CONFIRMED_WITHIN).boxed().shared()
    }

    /// Resolves a volume and hands it to the shared volumes, or returns why that is not possible now.
    async fn resolve_one(
        &self,
        desire: &PodDesire,
        volume: &Volume,
        gate: &Gate,
        confirmation: Confirmation<'_>,
    ) -> Option<Failed> {
        let failed = |message, owner, is_unconfirmed| {
            Some(Failed { wait: VolumeWait { volume: volume.name.clone(), message, owner }, is_unconfirmed })
        };
        if let Some(claim) = claim_name(desire, volume)
            && let Some(why) = confirmation.await
        {
            let namespace = &desire.header.pod.namespace;
            let text = format!(
                "pod-config has not confirmed that the claim {namespace}/{claim} is in use; until then, its PersistentVolume could be \
                 given to another claim: {why}"
            );
            return failed(text, WaitOwner::PodConfig, true);
        }
        match self.resolve(desire, volume).await {
            Ok(resolved) => {
                let is_open = lock(gate);
                if *is_open {
                    self.shared.want(resolved);
                }
                None
            }
            Err(PluginError { owner, message, .. }) => failed(message, owner, false),
        }
    }

    /// Records new errors as an event of the pod (volumes.md §3.14).
    fn report(&self, desire: &PodDesire, failed: &Unresolved, last: &mut String) {
        if failed.waits.is_empty() {
            last.clear();
            return;
        }
        let names = failed.waits.keys().map(String::as_str).collect::<Vec<_>>().join(" ");
        let causes = failed.waits.values().map(|wait| wait.message.as_str()).collect::<Vec<_>>().join("; ");
        let text = format!(
            "Unable to attach or mount volumes: unmounted volumes=[{names}], unattached volumes=[], failed to process \
             volumes=[{names}]: {causes}"
        );
        if *last != text {
            let pod = &desire.header.pod;
            self.events.warning(
                ObjectRef::pod(&pod.namespace, &pod.name, &pod.uid),
                "FailedMount",
                text.clone(),
            );
            *last = text;
        }
    }

    async fn resolve(&self, desire: &PodDesire, volume: &Volume) -> Result<ResolvedSpec, PluginError> {
        let spec = match &volume.source {
            Source::Claim { name, read_only } => {
                self.resolve_claim(desire, volume, name.as_deref(), *read_only).await?
            }
            Source::Plugin { kind, json } => inline_spec(desire, volume, kind, json)?,
            _ => return Err(PluginError::new("the volume has no plugin").for_you()),
        };
        let spec = legacy::translate(spec)?;
        let plugin = self.plugin(&spec)?;
        let spec = with_mount_options(spec, &**plugin)?;
        check_abilities(&spec, &**plugin)?;
        let identity = plugin.identify(&spec).await?;
        let labels = self.labels_of(desire, volume, &spec, identity.supports_label).await?;
        Ok(ResolvedSpec { plugin: Arc::clone(plugin), identity, spec: Arc::new(spec), labels })
    }

    /// The SELinux labels of a volume (volumes.md §6). A block volume has no files.
    async fn labels_of(
        &self,
        desire: &PodDesire,
        volume: &Volume,
        spec: &VolumeSpec,
        supports_label: bool,
    ) -> Result<VolumeLabels, PluginError> {
        let access_modes = spec.persistent.as_ref().map(|volume| volume.spec.access_modes.as_slice());
        let volume_use = selinux::VolumeUse {
            name: &spec.inner_name,
            access_modes,
            supports_label: supports_label && spec.mode == VolumeMode::Filesystem,
            policy: desire.selinux_policy,
        };
        let options = desire.selinux_options.get(&volume.name).map(Vec::as_slice).unwrap_or_default();
        let pod = (desire.header.pod.uid.as_str(), volume.name.as_str());
        let labels = self.selinux.labels_of(&volume_use, options, pod).await;
        labels.map_err(|error| PluginError::new(error.to_string()).for_you())
    }

    fn plugin(&self, spec: &VolumeSpec) -> Result<&Arc<dyn Plugin>, PluginError> {
        self.plugins.for_field(&spec.field).ok_or_else(|| {
            let text = format!(
                "no volume plugin matched: this version has no plugin for {} of the volume {}",
                spec.field, spec.inner_name
            );
            PluginError::new(text).for_you()
        })
    }

    async fn resolve_claim(
        &self,
        desire: &PodDesire,
        volume: &Volume,
        name: Option<&str>,
        read_only: bool,
    ) -> Result<VolumeSpec, PluginError> {
        let pod = &desire.header.pod;
        let request = claim_request(desire, volume, name, read_only);
        let claim_name = request.claim_name();
        let claim: Result<Option<PersistentVolumeClaim>, ReadError> =
            self.live.read("PersistentVolumeClaim", &pod.namespace, &claim_name).await;
        let bound = claims::check_claim(&request, fetched(&claim)).map_err(|error| of_claim(&error))?;
        let persistent: Result<Option<PersistentVolume>, ReadError> =
            self.live.read("PersistentVolume", "", bound.volume_name()).await;
        let resolved =
            claims::check_volume(&bound, fetched(&persistent)).map_err(|error| of_claim(&error))?;
        resolved.check_use(&volume.name, volume.used).map_err(|error| of_claim(&error))?;
        let claim_size = claim.as_ref().ok().and_then(Option::as_ref).and_then(claim_size);
        persistent_spec(desire, volume, &resolved, (claim_name, claim_size))
    }
}

fn claim_request<'a>(
    desire: &'a PodDesire,
    volume: &'a Volume,
    name: Option<&'a str>,
    read_only: bool,
) -> ClaimRequest<'a> {
    let source =
        name.map_or(ClaimSource::Ephemeral, |claim_name| ClaimSource::Named { claim_name, read_only });
    ClaimRequest { pod: &desire.header.pod, volume: &volume.name, source }
}

/// The name of a volume's claim; `None` without one.
fn claim_name(desire: &PodDesire, volume: &Volume) -> Option<String> {
    let Source::Claim { name, read_only } = &volume.source else { return None };
    Some(claim_request(desire, volume, name.as_deref(), *read_only).claim_name())
}

/// An answer as the rules of claims want it.
fn fetched<T>(answer: &Result<Option<T>, ReadError>) -> Fetched<'_, T> {
    match answer {
        Ok(Some(object)) => Fetched::Found(object),
        Ok(None) => Fetched::Missing,
        Err(ReadError::NotVisible(_)) => Fetched::NotVisible,
        Err(error @ (ReadError::NoApiServer(_) | ReadError::EarlierRelease | ReadError::Failed(_))) => {
            Fetched::Failed(error.message())
        }
    }
}

fn of_claim(error: &claims::ClaimError) -> PluginError {
    PluginError { owner: error.wait_owner(), ..PluginError::new(error.to_string()) }
}

/// `status.capacity.storage` in bytes.
fn claim_size(claim: &PersistentVolumeClaim) -> Option<u64> {
    storage(claim.status.capacity.get("storage")?)
}

/// The spec of a volume whose source is in the pod.
fn inline_spec(
    desire: &PodDesire,
    volume: &Volume,
    kind: &str,
    json: &[u8],
) -> Result<VolumeSpec, PluginError> {
    claims::check_use(&volume.name, VolumeMode::Filesystem, volume.used)
        .map_err(|error| PluginError::new(error.to_string()).for_you())?;
    let source = serde_json::from_slice(json)
        .map_err(|error| PluginError::new(format!("cannot read {kind} of the volume: {error}")).for_you())?;
    Ok(VolumeSpec {
        inner_name: volume.name.clone(),
        field: kind.to_owned(),
        source,
        persistent: None,
        claim: None,
        claim_size: None,
        mode: VolumeMode::Filesystem,
        read_only: false,
        ..base_spec(desire, volume)
    })
}

/// The spec of a volume through a claim.
fn persistent_spec(
    desire: &PodDesire,
    volume: &Volume,
    resolved: &ResolvedVolume<'_>,
    (claim, claim_size): (String, Option<u64>),
) -> Result<VolumeSpec, PluginError> {
    let (field, source) = source_of(resolved.volume)?;
    Ok(VolumeSpec {
        inner_name: resolved.volume.metadata.name.clone(),
        field: field.to_owned(),
        source: source.clone(),
        persistent: Some(Arc::new(resolved.volume.clone())),
        claim: Some(claim),
        claim_size,
        mode: resolved.mode,
        read_only: resolved.read_only,
        ..base_spec(desire, volume)
    })
}

fn base_spec(desire: &PodDesire, volume: &Volume) -> VolumeSpec {
    VolumeSpec {
        pod: desire.header.pod.clone(),
        service_account: desire.service_account.clone(),
        outer_name: volume.name.clone(),
        inner_name: String::new(),
        field: String::new(),
        source: Value::Object(Map::new()),
        persistent: None,
        claim: None,
        claim_size: None,
        mode: VolumeMode::Filesystem,
        read_only: false,
        is_migrated: false,
        mount_options: Vec::new(),
        fs_group: desire.fs_group,
        fs_group_policy: desire.fs_group_policy,
    }
}

/// The source of a PersistentVolume: the one field that is an object (volumes.md §1).
fn source_of(volume: &PersistentVolume) -> Result<(&str, &Value), PluginError> {
    let name = &volume.metadata.name;
    let sources: Vec<(&String, &Value)> =
        volume.spec.other.iter().filter(|(_, value)| value.is_object()).collect();
    match sources[..] {
        [(field, source)] => Ok((field, source)),
        [] => Err(PluginError::new(format!("no volume plugin matched: PV {name} has no source")).for_you()),
        _ => {
            let fields = sources.iter().map(|(field, _)| field.as_str()).collect::<Vec<_>>().join(", ");
            let text =
                format!("multiple volume plugins matched: PV {name} has the sources {fields}; keep one");
            Err(PluginError::new(text).for_you())
        }
    }
}

/// The spec with the mount options of its PersistentVolume (volumes.md §3.9 step 4).
fn with_mount_options(mut spec: VolumeSpec, plugin: &dyn Plugin) -> Result<VolumeSpec, PluginError> {
    let Some(volume) = &spec.persistent else { return Ok(spec) };
    if spec.field == "csi" {
        spec.mount_options = volume.spec.mount_options.clone();
    } else if spec.mode == VolumeMode::Filesystem {
        spec.mount_options = claims::check_mount_options(volume, plugin.abilities().mount_options)
            .map_err(|error| PluginError::new(error.to_string()).for_you())?;
    }
    Ok(spec)
}

/// Checks that the plugin serves this kind of volume.
fn check_abilities(spec: &VolumeSpec, plugin: &dyn Plugin) -> Result<(), PluginError> {
    let abilities = plugin.abilities();
    let (field, inner) = (&spec.field, &spec.inner_name);
    let text = match &spec.persistent {
        None if !abilities.inline => {
            format!("a pod cannot use {field} without a claim; create a PersistentVolume and a claim")
        }
        Some(_) if !abilities.persistent => {
            format!("{field} cannot be the source of the PersistentVolume {inner}; use it in the pod itself")
        }
        _ if spec.mode == VolumeMode::Block && !abilities.block => {
            format!("{field} has no block volumes, but PV {inner} has volumeMode Block; use Filesystem")
        }
        _ => return Ok(()),
    };
    Err(PluginError { owner: WaitOwner::You, ..PluginError::new(text) })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::mounter::Mounter;
    use crate::mounter::testing::volume;
    use crate::plugins::host_path::HostPath;
    use crate::plugins::nfs::Nfs;

    #[test]
    fn block_volumes_of_plugins_without_them_are_refused_for_a_person() {
        let plugins: [Arc<dyn Plugin>; 2] = [
            Arc::new(Nfs::new("/root".into(), Mounter::default())),
            Arc::new(HostPath::new("/root".into(), "/run".into(), Mounter::default())),
        ];
        for plugin in plugins {
            let mut spec = volume("uid", plugin.field(), json!({}));
            check_abilities(&spec, &*plugin).unwrap();
            spec.mode = VolumeMode::Block;
            let error = check_abilities(&spec, &*plugin).unwrap_err();
            assert!(
                error.message.contains("has no block volumes, but PV pv has volumeMode Block"),
                "{error}"
            );
            assert_eq!(error.owner, WaitOwner::You);
        }
    }
}
