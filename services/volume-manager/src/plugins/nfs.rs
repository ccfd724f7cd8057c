//! nfs volumes (volumes.md §10.3). Only mountinfo says whether one is mounted: the volume itself may hang, and
//! `root_squash` may forbid to look at it.

use std::path::PathBuf;
use std::sync::Arc;

use keelson_volume_manager_core::nfs::{FS_TYPE, NfsMount};
use keelson_volume_manager_core::sources::NfsSource;
use keelson_volume_manager_core::world::{FailureClass, Learned, MountLabel, Shape};

use super::disk::{is_read_only, options, pod_path, read_source, wrong_source};
use super::host::{FOLDER_MODE, Mounts, is_mount_point};
use super::{
    Abilities, Answer, FoundFolder, Identity, Plugin, PluginError, Reconstructed, SetUp, SetUpRequest,
    VolumePlace, VolumeSpec,
};
use crate::mounter::{MountRequest, Mounter, after_failure};

/// The name of the plugin.
const NAME: &str = "kubernetes.io/nfs";
/// Exit codes of mount(8) after which something may be mounted.
const PARTIAL_CODES: [i32; 2] = [16, 64];

/// The plugin.
#[derive(Debug)]
pub(crate) struct Nfs {
    root: PathBuf,
    mounter: Mounter,
    /// The same mounter.
    mounts: Arc<dyn Mounts>,
}

impl Nfs {
    /// The plugin. `root` is the agent's root folder.
    pub(crate) fn new(root: PathBuf, mounter: Mounter) -> Self {
        let mounts = Arc::new(mounter.clone());
        Self { root, mounter, mounts }
    }

    fn plan(&self, volume: &VolumeSpec) -> Result<(NfsMount, bool), PluginError> {
        let source: NfsSource = read_source(volume)?;
        let read_only = is_read_only(volume, source.read_only);
        let options = options(volume, read_only, &MountLabel::Unlabelled)?;
        let mount = NfsMount::new(&volume.inner_name, &source, &options, read_only).map_err(wrong_source)?;
        Ok((mount, read_only))
    }

    async fn mount(&self, volume: &VolumeSpec, keeps_folder: bool) -> Result<PathBuf, PluginError> {
        let (mount, _) = self.plan(volume)?;
        let target = pod_path(&self.root, NAME, &volume.pod.uid, &volume.inner_name);
        if is_mount_point(&self.mounts, &target).await? {
            return Ok(target);
        }
        self.mounter.create_folders(&target, FOLDER_MODE).await?;
        let request = MountRequest {
            source: &mount.source,
            target: &target,
            fs_type: FS_TYPE,
            options: &mount.options,
            sensitive: &[],
        };
        let error = match self.mounter.mount_for_output(request).await {
            Ok(output) if output.is_success() => return Ok(target),
            Ok(output) => {
                let is_certain = output.code.is_some_and(|code| !PARTIAL_CODES.contains(&code));
                let class = if is_certain { FailureClass::Final } else { FailureClass::Uncertain };
                let error = mount.failed(&volume.inner_name, output.code, &output.text());
                PluginError::new(error.to_string()).of_class(class)
            }
            Err(error) => error,
        };
        Err(after_failure(&self.mounter, &target, keeps_folder, error).await)
    }
}

impl Plugin for Nfs {
    fn name(&self) -> &'static str {
        NAME
    }

    fn field(&self) -> &'static str {
        "nfs"
    }

    fn abilities(&self) -> Abilities {
        Abilities { mount_options: true, block: false, inline: true, persistent: true }
    }

    fn identify<'a>(&'a self, volume: &'a VolumeSpec) -> Answer<'a, Identity> {
        Box::pin(async move {
            let (_, read_only) = self.plan(volume)?;
            Ok(Identity {
                shared_name: None,
                shape: Shape::PerPod,
                is_set_up_each_sync: false,
                supports_label: false,
                can_expand: false,
                read_only,
            })
        })
    }

    fn set_up<'a>(&'a self, volume: &'a VolumeSpec, request: SetUpRequest<'a>) -> Answer<'a, SetUp> {
        Box::pin(async move {
            let host_path = self.mount(volume, request.is_reconstructed).await?;
            Ok(SetUp { host_path, learned: Learned::default() })
        })
    }

    fn tear_down<'a>(&'a self, place: &'a VolumePlace) -> Answer<'a, ()> {
        Box::pin(async move {
            let target = pod_path(&self.root, NAME, place.pod.as_str(), &place.inner_name);
            self.mounter.clean_mount_point(&target, true).await
        })
    }

    fn reconstruct<'a>(&'a self, _: &'a FoundFolder) -> Answer<'a, Reconstructed> {
        Box::pin(async {
            Ok(Reconstructed {
                shared_name: None,
                has_device: false,
                device_mount_path: None,
                label: Some(MountLabel::Unlabelled),
            })
        })
    }
}

#[cfg(test)]
mod tests;
