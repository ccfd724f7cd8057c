//! Carries out one action on a volume.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use keelson_service_kit::ObjectRef;
use keelson_volume_manager_core::claims::{self, VolumeMode};
use keelson_volume_manager_core::node_selector;
use keelson_volume_manager_core::operations::VolumeName;
use keelson_volume_manager_core::wait_owner::WaitOwner;
use keelson_volume_manager_core::world::{
    Action, FailureClass, Learned, MountLabel, MountStep, mapped_texts,
};
use serde_json::Value;

use super::expansion::Growth;
use super::records::ResolvedSpec;
use super::task::Environment;
use crate::block::{self, BlockPlace};
use crate::node_facts::{self, NodeFacts};
use crate::plugins::{DevicePlace, DeviceRequest, Plugin, PluginError, SetUpRequest, VolumePlace};
use crate::selinux::VolumeLabels;
use crate::walks::FsGroupWalks;

/// The device paths of attached volumes.
pub(super) type Attached = BTreeMap<VolumeName, String>;

/// What an operation works with, read when it starts.
#[derive(Debug, Clone)]
pub(super) struct Inputs {
    /// The spec whose pod it is done for.
    pub(super) resolved: Option<ResolvedSpec>,
    /// Where the volume is in the pod, for a teardown.
    pub(super) place: Option<(Arc<dyn Plugin>, VolumePlace)>,
    /// The device.
    pub(super) device: Option<(Arc<dyn Plugin>, DevicePlace)>,
    /// The path of the attached device.
    pub(super) device_path: Option<String>,
    /// Where the device is mounted.
    pub(super) device_mount_path: Option<String>,
    /// The size in bytes, as far as it is known.
    pub(super) size: Option<u64>,
    /// The last expansion has ended with a final error.
    pub(super) had_final_expansion_error: bool,
    pub(super) node: Option<NodeFacts>,
    pub(super) walks: Arc<FsGroupWalks>,
}

/// What a successful operation has done.
#[derive(Debug, Default)]
pub(super) struct Done {
    pub(super) learned: Learned,
    /// What containers get.
    pub(super) host_path: Option<PathBuf>,
    /// The files have SELinux labels that the runtime may change.
    pub(super) has_file_labels: bool,
}

impl Done {
    fn learned(learned: Learned) -> Self {
        Self { learned, ..Self::default() }
    }
}

/// Carries out an action. A missing input is an error, because the task gives each action what it needs.
pub(super) async fn carry_out(
    env: &Environment,
    action: &Action,
    inputs: &Inputs,
) -> Result<Done, PluginError> {
    let device_path = inputs.device_path.as_deref();
    let device_mount_path = inputs.device_mount_path.as_deref();
    match action {
        Action::MarkAttached { .. } | Action::Forget { .. } => Ok(Done::default()),
        Action::VerifyAttached { volume, .. } => {
            let node = read_node(env).await?;
            // A list that is older than the node's last report can still have a volume that is being detached.
            if !node.in_use.contains(volume) {
                let text = format!("the volume {volume} is not in the Node's status.volumesInUse");
                return Err(PluginError { owner: WaitOwner::NodeStatus, ..PluginError::new(text) });
            }
            let path = node.attached.get(volume).cloned().ok_or_else(|| {
                PluginError::new(format!("the volume {volume} is not in the Node's status.volumesAttached"))
            })?;
            Ok(Done::learned(Learned { device_path: Some(path), ..Learned::default() }))
        }
        Action::Attach { .. } => {
            let resolved = required(inputs.resolved.as_ref())?;
            resolved.plugin.attach(&resolved.spec).await.map(Done::learned)
        }
        Action::MountDevice { label, .. } => {
            let resolved = required(inputs.resolved.as_ref())?;
            check_node(env, resolved, inputs)?;
            let request = DeviceRequest { device_path, label };
            resolved.plugin.mount_device(&resolved.spec, request).await.map(Done::learned)
        }
        Action::SetUp { label, is_remount, is_reconstructed, .. } => {
            let resolved = required(inputs.resolved.as_ref())?;
            check_node(env, resolved, inputs)?;
            let request = SetUpRequest {
                device_path,
                device_mount_path,
                label,
                is_remount: *is_remount,
                is_reconstructed: *is_reconstructed,
                walks: &inputs.walks,
            };
            set_up(env, resolved, request, inputs.had_final_expansion_error).await
        }
        Action::Resize { .. } => grow_online(env, inputs).await,
        Action::TearDown { .. } => {
            let (plugin, place) = required(inputs.place.as_ref())?;
            tear_down(env, &**plugin, place).await.map(|()| Done::default())
        }
        Action::UnmountDevice { .. } => {
            let (plugin, place) = required(inputs.device.as_ref())?;
            plugin.unmount_device(place).await.map(|()| Done::default())
        }
        Action::Detach { .. } => {
            let (plugin, place) = required(inputs.device.as_ref())?;
            plugin.detach(place).await.map(|()| Done::default())
        }
    }
}

fn required<T>(input: Option<&T>) -> Result<&T, PluginError> {
    input.ok_or_else(|| {
        PluginError::new("what the operation needs is not known any more; it is planned again")
    })
}

/// What volumes depend on in the Node, as the API server has it now.
pub(super) async fn read_node(env: &Environment) -> Result<NodeFacts, PluginError> {
    let node: Option<Value> = env.live.get("Node", "", &env.node_name).await.map_err(|why| PluginError {
        owner: WaitOwner::ApiServer,
        ..PluginError::new(format!("cannot read the Node: {why}"))
    })?;
    let node = node.ok_or_else(|| PluginError::new(format!("the Node {} does not exist", env.node_name)))?;
    node_facts::parse(node.to_string().as_bytes(), true)
        .map_err(|error| PluginError::new(format!("cannot read the Node: {error}")))
}

/// Checks the node affinity of a PersistentVolume (volumes.md §3.9 step 2).
fn check_node(env: &Environment, resolved: &ResolvedSpec, inputs: &Inputs) -> Result<(), PluginError> {
    let Some(volume) = &resolved.spec.persistent else { return Ok(()) };
    let unknown = || PluginError::new("pod-config has not sent the Node yet").at(MountStep::NodeAffinity);
    let node = inputs.node.as_ref().ok_or_else(unknown)?;
    let facts = node_selector::NodeFacts { name: &env.node_name, labels: &node.labels };
    claims::check_node(volume, &facts).map_err(|error| PluginError {
        owner: error.wait_owner(),
        ..PluginError::new(error.to_string()).at(MountStep::NodeAffinity)
    })
}

async fn set_up(
    env: &Environment,
    resolved: &ResolvedSpec,
    request: SetUpRequest<'_>,
    had_final_error: bool,
) -> Result<Done, PluginError> {
    let (plugin, spec) = (&resolved.plugin, &resolved.spec);
    let ready = plugin.set_up(spec, request).await?;
    let host_path = match spec.mode {
        VolumeMode::Filesystem => ready.host_path,
        VolumeMode::Block => {
            let mapped = map(env, resolved, &ready.host_path, request.is_remount).await;
            mapped.map_err(|error| error.of_class(FailureClass::Uncertain).at(MountStep::MapDevice))?
        }
    };
    let has_file_labels = has_file_labels(resolved, &host_path).await?;
    let grown = Growth { env, resolved, request, had_final_error }.at_mount().await?;
    Ok(Done { learned: and_grown(ready.learned, grown), host_path: Some(host_path), has_file_labels })
}

/// Whether the runtime may change the SELinux labels of the files of a volume that is set up.
async fn has_file_labels(resolved: &ResolvedSpec, path: &Path) -> Result<bool, PluginError> {
    let VolumeLabels { node, labels } = &resolved.labels;
    let is_labelled = labels.mounted.is_some();
    if !node.is_enabled || is_labelled || resolved.spec.mode == VolumeMode::Block {
        return Ok(false);
    }
    let answer = resolved.plugin.has_file_labels(&resolved.spec, path).await;
    // The volume is mounted already.
    answer.map_err(|error| error.of_class(FailureClass::Uncertain))
}

/// What the set-up has learned, and then the expansion.
fn and_grown(set_up: Learned, grown: Learned) -> Learned {
    Learned { device_path: set_up.device_path, device_mount_path: set_up.device_mount_path, ..grown }
}

/// Gives the device to the pod (volumes.md §3.10); the link that its containers get.
async fn map(
    env: &Environment,
    resolved: &ResolvedSpec,
    device: &Path,
    is_remount: bool,
) -> Result<PathBuf, PluginError> {
    let (plugin, place) = (&*resolved.plugin, resolved.place());
    let block = block_place(env, plugin, &place).await?.ok_or_else(|| {
        let text = format!("{} has no block volumes, but {} is one", plugin.name(), place.inner_name);
        PluginError::new(text).for_you()
    })?;
    let link = block::map(&env.mounter, &block, device).await?;
    if !is_remount {
        let folder = |path: &Path| path.parent().unwrap_or(path).display().to_string();
        let pod = &resolved.spec.pod;
        for text in mapped_texts(&place.inner_name, &folder(&block.global), &folder(&block.link)) {
            let object = ObjectRef::pod(&pod.namespace, &pod.name, &pod.uid);
            env.events.normal(object, "SuccessfulMountVolume", text);
        }
    }
    Ok(link)
}

async fn grow_online(env: &Environment, inputs: &Inputs) -> Result<Done, PluginError> {
    let resolved = required(inputs.resolved.as_ref())?;
    let request = SetUpRequest {
        device_path: inputs.device_path.as_deref(),
        device_mount_path: inputs.device_mount_path.as_deref(),
        label: &MountLabel::Unlabelled,
        is_remount: true,
        is_reconstructed: false,
        walks: &inputs.walks,
    };
    let had_final_error = inputs.had_final_expansion_error;
    let growth = Growth { env, resolved, request, had_final_error };
    growth.online(inputs.size.unwrap_or_default()).await.map(Done::learned)
}

/// Removes the subPaths of the volume from the pod, then the volume (volumes.md §3.11).
pub(super) async fn tear_down(
    env: &Environment,
    plugin: &dyn Plugin,
    place: &VolumePlace,
) -> Result<(), PluginError> {
    let folder = env.root.join("pods").join(place.pod.as_str());
    env.mounter.remove_subpaths(&folder, Some(&place.inner_name)).await.map_err(|error| {
        let message = format!("a subPath of a container is still mounted: {}", error.message);
        PluginError { message, ..error }
    })?;
    if place.is_block {
        let block = match block_place(env, plugin, place).await? {
            Some(block) => Some(block),
            None => BlockPlace::find(&env.mounter, &env.root, place).await?,
        };
        if let Some(block) = block {
            block::unmap(&env.mounter, &block).await?;
        }
    }
    plugin.tear_down(place).await
}

/// Where the device of a volume is mapped for a pod.
async fn block_place(
    env: &Environment,
    plugin: &dyn Plugin,
    place: &VolumePlace,
) -> Result<Option<BlockPlace>, PluginError> {
    let folder = plugin.global_map_path(&place.inner_name).await?;
    Ok(folder.map(|folder| BlockPlace::new(&env.root, &folder, place)))
}
