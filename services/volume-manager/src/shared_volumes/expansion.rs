//! Grows volumes on the node and writes the status of their claims (volumes.md §4). The decisions are in the core's
//! `expansion`. Without an API server nothing is written.

use keelson_kube_model::time::format_seconds;
use keelson_service_kit::{ObjectRef, now_unix_nanos};
use keelson_volume_manager_core::expansion::{
    ErrorClass, ExpandError, Expansion, Moment, Outcome, Size, Sizes, Step, decide, expanded_text, finish,
    read_only_text,
};
use keelson_volume_manager_core::objects::PersistentVolumeClaim;
use keelson_volume_manager_core::world::{FailureClass, Learned, MountStep};
use serde_json::Value;

use super::records::ResolvedSpec;
use super::task::Environment;
use crate::plugins::{PluginError, SetUpRequest};
use crate::quantities::storage;

const STORAGE: &str = "storage";

/// A volume that may have to grow.
pub(super) struct Growth<'a> {
    pub(super) env: &'a Environment,
    pub(super) resolved: &'a ResolvedSpec,
    /// As for the set-up of the volume.
    pub(super) request: SetUpRequest<'a>,
    /// The last expansion of the volume has ended with a final error.
    pub(super) had_final_error: bool,
}

/// A claim as it was just read, with its sizes and that of its PersistentVolume.
struct Read<'a> {
    claim: PersistentVolumeClaim,
    volume: &'a Size,
    allocated: Option<Size>,
}

impl Read<'_> {
    fn sizes(&self) -> Sizes<'_> {
        let bytes = |quantity: Option<&String>| quantity.and_then(|text| storage(text)).unwrap_or(0);
        Sizes {
            volume: self.volume,
            requested: bytes(self.claim.spec.resources.requests.get(STORAGE)),
            capacity: bytes(self.claim.status.capacity.get(STORAGE)),
            allocated: self.allocated.as_ref(),
        }
    }
}

/// A quantity with its value; `None` if it is not a positive number.
fn size(quantity: &str) -> Option<Size> {
    Some(Size { bytes: storage(quantity)?, text: quantity.to_owned() })
}

impl Growth<'_> {
    /// Grows a volume that was just set up for a pod, if its claim is smaller than its PersistentVolume.
    ///
    /// A volume that is set up again grows online.
    ///
    /// # Errors
    /// The volume was not grown; the pod must not use it yet.
    pub(super) async fn at_mount(&self) -> Result<Learned, PluginError> {
        if self.request.is_remount {
            return Ok(Learned::default());
        }
        let grown = self.grow(Moment::AtMount).await;
        grown.map_err(|error| error.of_class(FailureClass::Uncertain).at(MountStep::Expansion))
    }

    /// Grows a volume that is in use. `recorded`: the size that it is known to have, in bytes.
    ///
    /// # Errors
    /// The volume was not grown.
    pub(super) async fn online(&self, recorded: u64) -> Result<Learned, PluginError> {
        self.grow(Moment::Online { recorded }).await
    }

    async fn grow(&self, moment: Moment) -> Result<Learned, PluginError> {
        let Some(volume) = self.volume_size() else { return Ok(Learned::default()) };
        // Sizes of claims only grow, so the claim need not be read again.
        if let Some(size) = self.resolved.spec.claim_size.filter(|size| *size >= volume.bytes)
            && moment == Moment::AtMount
        {
            return Ok(of_size(size));
        }
        let claim = self.read_claim().await?;
        let allocated = claim.status.allocated_resources.get(STORAGE).and_then(|text| size(text));
        let read = Read { claim, volume: &volume, allocated };
        match decide(&read.claim, &read.sizes(), moment, self.resolved.spec.read_only) {
            Step::Done { recorded } => Ok(of_size(recorded)),
            Step::ReadOnly { recorded } => {
                let text = read_only_text(&self.resolved.spec.inner_name);
                for object in [self.pod(), claim_object(&read.claim)] {
                    self.env.events.warning(object, "FileSystemResizeFailed", text.clone());
                }
                Ok(of_size(recorded))
            }
            Step::Later { status } => {
                let (volume, claim) = (&self.resolved.spec.inner_name, &read.claim.metadata.name);
                tracing::info!(
                    event = "expansion_postponed",
                    volume,
                    claim,
                    "the resizer has to act before the volume grows: its status is {status:?}"
                );
                Ok(of_size(read.sizes().capacity))
            }
            Step::Expand(expansion) => self.expand(read, &expansion).await,
        }
    }

    /// The size of the PersistentVolume; `None` if the node never grows the volume.
    fn volume_size(&self) -> Option<Size> {
        let volume = self.resolved.spec.persistent.as_deref().filter(|_| self.resolved.is_expandable())?;
        size(volume.spec.capacity.get(STORAGE)?)
    }

    async fn read_claim(&self) -> Result<PersistentVolumeClaim, PluginError> {
        let (namespace, name) = self.claim_name();
        let read = self.env.live.get("PersistentVolumeClaim", namespace, name).await;
        let claim = read.map_err(|why| {
            PluginError::new(format!(
                "cannot read the claim {namespace}/{name} before the volume grows: {why}"
            ))
        })?;
        claim.ok_or_else(|| {
            PluginError::new(format!("the claim {namespace}/{name} of the volume does not exist any more"))
        })
    }

    async fn expand(&self, mut read: Read<'_>, expansion: &Expansion) -> Result<Learned, PluginError> {
        if let Some(patch) = &expansion.before
            && let Some(claim) = self.patch(patch).await?
        {
            read.claim = claim;
        }
        let ResolvedSpec { plugin, spec, .. } = self.resolved;
        let result = plugin.expand(spec, self.request, expansion.to.bytes).await;
        let now = format_seconds(now_unix_nanos() / 1_000_000_000).unwrap_or_default();
        let outcome = {
            let result = result.as_ref().map(drop).map_err(|error| expand_error(error, &now));
            finish(expansion, &read.claim, &read.sizes(), self.had_final_error, result)
        };
        self.conclude(&read.claim, outcome, result).await
    }

    /// Carries out what follows from the result of the driver.
    async fn conclude(
        &self,
        claim: &PersistentVolumeClaim,
        outcome: Outcome,
        result: Result<u64, PluginError>,
    ) -> Result<Learned, PluginError> {
        match (outcome, result) {
            (Outcome::Expanded { recorded, patch }, reported) => {
                let text = expanded_text(&self.resolved.spec.inner_name, &self.env.node_name);
                for object in [self.pod(), claim_object(claim)] {
                    self.env.events.normal(object, "FileSystemResizeSuccessful", text.clone());
                }
                if let Some(patch) = patch {
                    self.patch(&patch).await?;
                }
                Ok(after_expansion(Some(recorded.max(reported.unwrap_or(0))), false))
            }
            (Outcome::NotNeeded { recorded }, _) => Ok(after_expansion(Some(recorded), false)),
            (Outcome::Refused { recorded, is_final, patch }, result) => {
                self.try_patch(patch).await;
                let why = result.err().map(|error| error.message).unwrap_or_default();
                tracing::warn!(
                    event = "expansion_refused",
                    volume = self.resolved.spec.inner_name,
                    "the volume does not grow while it is in use: {why}"
                );
                Ok(Learned { is_expansion_refused: true, ..after_expansion(recorded, is_final) })
            }
            (Outcome::Failed { is_final, patch }, result) => {
                self.try_patch(patch).await;
                let error = result.err().unwrap_or_else(|| PluginError::new("the volume was not grown"));
                let class = if is_final { error.expansion_class() } else { ErrorClass::Unfinished };
                Err(error.of_expansion(class))
            }
        }
    }

    /// Patches the status of the claim. The claim after that; `None` without an API server.
    async fn patch(&self, patch: &Value) -> Result<Option<PersistentVolumeClaim>, PluginError> {
        if !self.env.has_api_server {
            return Ok(None);
        }
        let (namespace, name) = self.claim_name();
        let patched = self.env.live.patch_claim_status(namespace, name, patch).await;
        patched.map(Some).map_err(|why| {
            PluginError::new(format!("cannot write the status of the claim {namespace}/{name}: {why}"))
        })
    }

    /// As [`Self::patch`]; an error is only logged.
    async fn try_patch(&self, patch: Option<Value>) {
        let Some(patch) = patch else { return };
        if let Err(error) = self.patch(&patch).await {
            tracing::warn!(event = "claim_status_not_written", "{error}");
        }
    }

    /// Namespace and name.
    fn claim_name(&self) -> (&str, &str) {
        let spec = &self.resolved.spec;
        (&spec.pod.namespace, spec.claim.as_deref().unwrap_or_default())
    }

    fn pod(&self) -> ObjectRef {
        let pod = &self.resolved.spec.pod;
        ObjectRef::pod(&pod.namespace, &pod.name, &pod.uid)
    }
}

fn claim_object(claim: &PersistentVolumeClaim) -> ObjectRef {
    let claim = &claim.metadata;
    ObjectRef {
        kind: "PersistentVolumeClaim".to_owned(),
        namespace: claim.namespace.clone(),
        name: claim.name.clone(),
        uid: claim.uid.clone(),
        field_path: String::new(),
    }
}

fn expand_error<'a>(error: &'a PluginError, now: &'a str) -> ExpandError<'a> {
    ExpandError { class: error.expansion_class(), text: &error.message, now }
}

/// A size in bytes that was found without an expansion.
fn of_size(size: u64) -> Learned {
    Learned { size: Some(size), ..Learned::default() }
}

/// What an expansion that did not fail says.
fn after_expansion(size: Option<u64>, had_final_error: bool) -> Learned {
    Learned { size, had_final_expansion_error: Some(had_final_error), ..Learned::default() }
}
