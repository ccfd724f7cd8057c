//! Mounts and block devices of a container (§3.5).

use std::collections::{BTreeMap, BTreeSet};

use keelson_kube_model::{Container, ImageVolumeSource, Pod, Volume, VolumeMount};

use super::expand::expand_with;
use super::inputs::{RuntimeFeatures, VolumeInputs};
use super::{ConfigError, DeviceSpec, ImageMount, MountSpec, Propagation, UserNamespace};
use crate::runtime_version::{ImageVolumeSupport, runtimes_with};

/// Where a volume is on the node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VolumePath {
    /// Path of the directory, file or device.
    pub host_path: String,
    /// The volume is read-only, even if the mount is not.
    pub read_only: bool,
    /// It is a block device: containers get it as a device, and never mount it.
    pub block_device: bool,
    /// The runtime has to label its files under SELinux, as volume-manager says of a volume of a plugin.
    pub selinux_relabel: bool,
}

/// A file that the agent puts into the container: /etc/hosts, the termination message.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileMount {
    /// Path in the container.
    pub container_path: String,
    /// Path on the node.
    pub host_path: String,
    /// No writes.
    pub read_only: bool,
}

/// A directory or file in a volume that must be prepared before the container is created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubPath {
    /// Index of the mount in the container's list.
    pub index: usize,
    /// The volume.
    pub volume: String,
    /// Path in the container.
    pub mount_path: String,
    /// Path in the volume, expanded and checked: relative, without `..`.
    pub path: String,
    /// The mount is read-only.
    pub read_only: bool,
}

/// The inputs of [`mounts`].
pub(super) struct MountInputs<'a> {
    pub(super) volumes: VolumeInputs<'a>,
    pub(super) runtime: RuntimeFeatures<'a>,
    /// SELinux is enabled.
    pub(super) selinux: bool,
    pub(super) users: Option<UserNamespace>,
}

/// The image volumes of a pod that a container mounts, by name, each once.
pub fn image_volumes<'a>(pod: &'a Pod, container: &Container) -> BTreeMap<&'a str, &'a ImageVolumeSource> {
    let is_mounted = |name: &str| container.volume_mounts.iter().any(|mount| mount.name == name);
    let images =
        pod.spec.volumes.iter().filter_map(|volume| Some((volume.name.as_str(), volume.image.as_ref()?)));
    images.filter(|(name, _)| is_mounted(name)).collect()
}

/// The subpaths of a container, with its environment for `subPathExpr`. The runtime handles those of image volumes.
pub fn subpaths(
    pod: &Pod,
    container: &Container,
    env: &[(String, String)],
) -> Result<Vec<SubPath>, ConfigError> {
    let mut found = Vec::new();
    let is_image =
        |name: &str| pod.spec.volumes.iter().any(|volume| volume.name == name && volume.image.is_some());
    for (index, mount) in container.volume_mounts.iter().enumerate() {
        let path = subpath_of(container, mount, env)?;
        if !path.is_empty() && !is_image(&mount.name) {
            found.push(SubPath {
                index,
                volume: mount.name.clone(),
                mount_path: mount.mount_path.clone(),
                path,
                read_only: mount.read_only == Some(true),
            });
        }
    }
    Ok(found)
}

fn subpath_of(
    container: &Container,
    mount: &VolumeMount,
    env: &[(String, String)],
) -> Result<String, ConfigError> {
    let error = |path: &str, detail: &str| ConfigError::SubPath {
        container: container.name.clone(),
        mount: mount.name.clone(),
        path: path.to_owned(),
        detail: detail.to_owned(),
    };
    let mut path = mount.sub_path.clone();
    if !mount.sub_path_expr.is_empty() {
        let mut missing = BTreeSet::new();
        let value = |name: &str| env.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone());
        // An empty value would give another directory than intended (volumes.md §8.3).
        let lookup = |name: &str| value(name).filter(|value| !value.is_empty());
        path = expand_with(&mount.sub_path_expr, lookup, |name| {
            missing.insert(name.to_owned());
        });
        if !missing.is_empty() {
            let names: Vec<String> = missing.into_iter().collect();
            return Err(error(&mount.sub_path_expr, &format!("missing value for {}", names.join(", "))));
        }
    }
    if path.starts_with('/') {
        return Err(error(&path, "it must be relative"));
    }
    if path.split('/').any(|part| part == "..") {
        return Err(error(&path, "it must not contain '..'"));
    }
    Ok(path)
}

/// Volume mounts in the order of the spec, then the agent's own files.
pub(super) fn mounts(
    pod: &Pod,
    container: &Container,
    env: &[(String, String)],
    inputs: &MountInputs<'_>,
) -> Result<Vec<MountSpec>, ConfigError> {
    let mut mounts = Vec::new();
    let mut relabelled = BTreeSet::new();
    for (index, mount) in container.volume_mounts.iter().enumerate() {
        let sub_path = subpath_of(container, mount, env)?;
        let volume = pod.spec.volumes.iter().find(|volume| volume.name == mount.name);
        let mut spec = match volume.and_then(|volume| volume.image.as_ref()) {
            Some(image) => of_image(pod, container, mount, image, sub_path, inputs)?,
            None => of_volume(container, index, mount, &sub_path, inputs)?,
        };
        spec.container_path = absolute(&mount.mount_path);
        spec.propagation = match mount.mount_propagation.as_deref() {
            None | Some("None") => Propagation::Private,
            Some("HostToContainer") => Propagation::HostToContainer,
            Some("Bidirectional") => Propagation::Bidirectional,
            Some(other) => return Err(unknown_mode(mount, "mountPropagation", other)),
        };
        spec.recursive_read_only = recursive(mount, spec.propagation, inputs)?;
        spec.users = inputs.users;
        let is_labelled_by_runtime = volume.is_some_and(is_managed)
            || inputs.volumes.paths.get(&mount.name).is_some_and(|path| path.selinux_relabel);
        spec.selinux_relabel =
            inputs.selinux && is_labelled_by_runtime && relabelled.insert(mount.name.as_str());
        mounts.push(spec);
    }
    for file in inputs.volumes.files {
        let taken = mounts.iter().any(|mount| mount.container_path == file.container_path);
        // A volume mount on /etc/hosts replaces the agent's file.
        if !(taken && file.container_path == "/etc/hosts") {
            mounts.push(MountSpec {
                container_path: file.container_path.clone(),
                host_path: file.host_path.clone(),
                readonly: file.read_only,
                users: inputs.users,
                selinux_relabel: inputs.selinux,
                ..MountSpec::default()
            });
        }
    }
    Ok(mounts)
}

/// Whether the agent has created the content of a volume, so that the runtime has to label it for the container (volumes.md §6).
/// The first mount of a volume requests that, as with a kubelet.
fn is_managed(volume: &Volume) -> bool {
    let Volume { empty_dir, config_map, secret, downward_api, projected, .. } = volume;
    let files = config_map.is_some() || secret.is_some() || downward_api.is_some() || projected.is_some();
    files || empty_dir.is_some()
}

fn absolute(path: &str) -> String {
    if path.starts_with('/') { path.to_owned() } else { format!("/{path}") }
}

fn of_volume(
    container: &Container,
    index: usize,
    mount: &VolumeMount,
    sub_path: &str,
    inputs: &MountInputs<'_>,
) -> Result<MountSpec, ConfigError> {
    let missing =
        || ConfigError::VolumeMissing { container: container.name.clone(), volume: mount.name.clone() };
    let is_mountable = |volume: &&VolumePath| !volume.block_device;
    let volume = inputs.volumes.paths.get(&mount.name).filter(is_mountable).ok_or_else(missing)?;
    let host_path = if sub_path.is_empty() {
        volume.host_path.clone()
    } else {
        inputs.volumes.subpaths.get(&index).cloned().ok_or_else(|| ConfigError::SubPathNotPrepared {
            container: container.name.clone(),
            mount: mount.name.clone(),
        })?
    };
    Ok(MountSpec {
        host_path,
        readonly: mount.read_only == Some(true) || volume.read_only,
        ..MountSpec::default()
    })
}

/// The mount of an image volume: always read-only, without a path on the node (volumes.md §10.7).
fn of_image(
    pod: &Pod,
    container: &Container,
    mount: &VolumeMount,
    image: &ImageVolumeSource,
    sub_path: String,
    inputs: &MountInputs<'_>,
) -> Result<MountSpec, ConfigError> {
    refuse_image(mount, &sub_path, &inputs.runtime)?;
    let missing =
        || ConfigError::VolumeMissing { container: container.name.clone(), volume: mount.name.clone() };
    let reference = inputs.volumes.images.get(&mount.name).ok_or_else(missing)?;
    let image = ImageMount {
        reference: reference.clone(),
        user_specified_image: image.reference.clone(),
        runtime_handler: inputs.volumes.runtime_handler.to_owned(),
        annotations: pod.metadata.annotations.clone(),
    };
    Ok(MountSpec { image: Some(image), image_sub_path: sub_path, readonly: true, ..MountSpec::default() })
}

/// Refuses an image volume that the runtime would leave out, or mount as a whole where only a part is asked for: it ignores fields that
/// it does not know, without an error (runtime-and-resources.md §1.6).
fn refuse_image(
    mount: &VolumeMount,
    sub_path: &str,
    runtime: &RuntimeFeatures<'_>,
) -> Result<(), ConfigError> {
    let needed =
        if sub_path.is_empty() { ImageVolumeSupport::WholeImages } else { ImageVolumeSupport::SubPaths };
    if runtime.image_volumes >= needed {
        return Ok(());
    }
    let named = format!("{} {}", runtime.name, runtime.version);
    let named = if runtime.name.is_empty() { "the container runtime" } else { named.trim_end() };
    let (volume, upgrade) = (&mount.name, runtimes_with(needed));
    let detail = if runtime.image_volumes == ImageVolumeSupport::None {
        format!(
            "volume {volume:?} is an image, which {named} cannot mount: use {upgrade}, or copy the files of the image into an \
             emptyDir with an init container"
        )
    } else {
        format!(
            "subPath {sub_path:?} of volume {volume:?} is in an image, which {named} would mount as a whole: use {upgrade}, or mount \
             the image without subPath"
        )
    };
    Err(ConfigError::ImageVolume { detail })
}

fn recursive(
    mount: &VolumeMount,
    propagation: Propagation,
    inputs: &MountInputs<'_>,
) -> Result<bool, ConfigError> {
    let fits = mount.read_only == Some(true) && propagation == Propagation::Private;
    match mount.recursive_read_only.as_deref() {
        Some("Enabled") if inputs.runtime.recursive_read_only && fits => Ok(true),
        Some("Enabled") => Err(ConfigError::RecursiveReadOnly { mount: mount.name.clone() }),
        Some("IfPossible") => Ok(inputs.runtime.recursive_read_only && fits),
        None | Some("Disabled") => Ok(false),
        Some(other) => Err(unknown_mode(mount, "recursiveReadOnly", other)),
    }
}

fn unknown_mode(mount: &VolumeMount, field: &str, value: &str) -> ConfigError {
    ConfigError::Unsafe {
        field: format!("volumeMounts[{}].{field}", mount.name),
        message: if field == "recursiveReadOnly" {
            format!("failed to resolve recursive read-only mode: unknown recursive read-only mode {value:?}")
        } else {
            format!("Unsupported value: {value:?}")
        },
    }
}

/// Block volumes as devices (volumes.md §8.1). A volume without a device or with a filesystem is an error.
///
/// Parity: a kubelet starts the container without the device.
pub(super) fn block_devices(
    container: &Container,
    volumes: &BTreeMap<String, VolumePath>,
) -> Result<Vec<DeviceSpec>, ConfigError> {
    let mut devices = Vec::new();
    for device in &container.volume_devices {
        let error = |detail| ConfigError::VolumeDevice {
            container: container.name.clone(),
            volume: device.name.clone(),
            path: device.device_path.clone(),
            detail,
        };
        if !device.device_path.starts_with('/') {
            return Err(error("devicePath must be an absolute path"));
        }
        let volume =
            volumes.get(&device.name).ok_or_else(|| error("volume-manager has not mapped its device"))?;
        if !volume.block_device {
            return Err(error("the volume is no block device; mount it with volumeMounts"));
        }
        devices.push(DeviceSpec {
            container_path: device.device_path.clone(),
            host_path: volume.host_path.clone(),
            permissions: if volume.read_only { "r" } else { "mrw" }.to_owned(),
        });
    }
    Ok(devices)
}
