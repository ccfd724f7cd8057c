//! What every operation on a CSI volume needs.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use keelson_volume_manager_core::csi::CsiDriver;
use keelson_volume_manager_core::csi::LifecycleMode;
use keelson_volume_manager_core::csi::access_mode::NodeCapabilities;
use keelson_volume_manager_core::csi::attachment::{
    AttachedVolume, DriverLookup, is_attachable, publish_context,
};
use keelson_volume_manager_core::csi::error_class::{Code, FailedStep, error_class};
use keelson_volume_manager_core::csi::paths::{self, DriverName};
use keelson_volume_manager_core::sources::SecretReference;
use keelson_volume_manager_core::wait_owner::WaitOwner;

use super::driver_objects::DriverObjects;
use super::ports::Objects;
use super::tokens::TokenCache;
use super::volume::CsiVolume;
use crate::csi::client::{CallError, Operation};
use crate::csi::drivers::{Driver, Drivers};
use crate::plugins::PluginError;
use crate::plugins::host::Mounts;
use crate::plugins::secrets::{self, Secrets};

/// A map on the wire.
pub(super) type WireMap = HashMap<String, String>;

/// What every operation needs.
#[derive(Debug)]
pub(super) struct Context {
    /// The agent's root folder.
    pub(super) root: PathBuf,
    /// The node's name.
    pub(super) node: String,
    pub(super) drivers: Drivers,
    pub(super) mounts: Arc<dyn Mounts>,
    pub(super) secrets: Arc<dyn Secrets>,
    pub(super) objects: Arc<dyn Objects>,
    pub(super) driver_objects: DriverObjects,
    pub(super) tokens: TokenCache,
}

/// The calls of one operation on a volume, which share a deadline.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) driver: Driver,
    pub(super) operation: Operation,
}

/// An error of a driver, of the class that volumes.md §11.3 gives it.
pub(super) fn call_error(error: &CallError) -> PluginError {
    PluginError::new(error.to_string()).of_class(error.class())
}

impl Session {
    /// What the driver can do.
    pub(super) async fn capabilities(&self) -> Result<NodeCapabilities, PluginError> {
        self.driver.capabilities(&self.operation).await.map_err(|error| call_error(&error))
    }
}

impl Context {
    /// Begins an operation with the driver of a volume.
    ///
    /// # Errors
    /// The driver is not registered: nothing was started.
    pub(super) fn session_for(&self, volume: &CsiVolume<'_>) -> Result<Session, PluginError> {
        self.begin(&volume.driver, volume.spec.is_migrated)
    }

    /// Begins an operation on what is on disk, which does not say whether the volume has a legacy source. It counts as one that
    /// has none, as in the kubelet.
    ///
    /// # Errors
    /// As [`Self::session_for`].
    pub(super) fn session(&self, driver: &DriverName) -> Result<Session, PluginError> {
        self.begin(driver, false)
    }

    fn begin(&self, driver: &DriverName, is_migrated: bool) -> Result<Session, PluginError> {
        let driver = self.drivers.get(driver.as_str()).map_err(|error| {
            PluginError::new(error.to_string()).of_class(error_class(FailedStep::DriverLookup))
        })?;
        Ok(Session { driver, operation: Operation::new(is_migrated) })
    }

    /// An error of a call that sets a volume up. A driver without room on this node is asked again how many volumes the node can
    /// have (volumes.md §3.14).
    pub(super) fn set_up_error(&self, error: &CallError) -> PluginError {
        if error.code() == Some(Code::ResourceExhausted) {
            self.drivers.note_exhausted(&error.driver);
        }
        call_error(error)
    }

    /// A path below the root folder.
    pub(super) fn path(&self, relative: &Path) -> PathBuf {
        self.root.join(relative)
    }

    /// The `publish_context` of a volume: what its VolumeAttachment says, if it has to be attached (volumes.md §11.4).
    pub(super) async fn publish_context(&self, volume: &CsiVolume<'_>) -> Result<WireMap, PluginError> {
        if volume.lifecycle == LifecycleMode::Ephemeral || !self.is_attachable(&volume.driver).await?.0 {
            return Ok(WireMap::new());
        }
        let name = paths::attachment_name(&volume.id, &volume.driver, &self.node);
        let class = error_class(FailedStep::ApiObject);
        let object = self.objects.attachment(&name).await.map_err(|why| PluginError {
            owner: WaitOwner::ApiServer,
            ..PluginError::new(format!("cannot read the VolumeAttachment {name}: {why}")).of_class(class)
        })?;
        let attached = AttachedVolume { handle: &volume.id, attachment: &name, node: &self.node };
        let context = publish_context(attached, object.as_ref()).map_err(|error| {
            if error.is_limit() {
                self.drivers.note_exhausted(&volume.driver);
            }
            PluginError {
                owner: WaitOwner::AttachDetachController,
                ..PluginError::new(error.to_string()).of_class(class)
            }
        })?;
        Ok(context.into_iter().collect())
    }

    /// Whether volumes of a driver are attached, and its CSIDriver.
    pub(super) async fn is_attachable(
        &self,
        driver: &DriverName,
    ) -> Result<(bool, Option<Arc<CsiDriver>>), PluginError> {
        let object = self.driver_objects.get(driver).await?;
        let lookup = object.as_deref().map_or(DriverLookup::Missing, DriverLookup::Found);
        let is_attachable = is_attachable(driver, lookup).map_err(|error| {
            PluginError::new(error.to_string()).of_class(error_class(FailedStep::ApiObject))
        })?;
        Ok((is_attachable, object))
    }

    /// The values of a Secret of a volume; none without a reference. `field` is that of the reference.
    pub(super) async fn secret(
        &self,
        volume: &CsiVolume<'_>,
        reference: Option<&SecretReference>,
        field: &str,
    ) -> Result<WireMap, PluginError> {
        let Some(reference) = volume.secret_reference(reference, field)? else { return Ok(WireMap::new()) };
        let class = error_class(FailedStep::Secret);
        let read = secrets::read(&*self.secrets, &reference, &volume.spec.pod.namespace).await;
        let (name, secret) = read.map_err(|error| error.of_class(class))?;
        let texts = secret.texts().map_err(|why| {
            PluginError::new(format!("cannot use the Secret {name} ({field}): {why}"))
                .for_you()
                .of_class(class)
        })?;
        Ok(texts.into_iter().collect())
    }
}
