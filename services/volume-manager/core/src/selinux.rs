//! SELinux labels of volumes (volumes.md §6): which label a volume has for all containers that use it, whether it is a
//! mount option, when a difference is an error, and which volumes the runtime relabels.

use std::collections::BTreeSet;
use std::fmt;

use crate::mount_options;

/// The access mode of a volume that only one pod of the cluster may use.
const READ_WRITE_ONCE_POD: &str = "ReadWriteOncePod";
/// The plugin of CSI volumes.
const CSI: &str = "kubernetes.io/csi";

/// `seLinuxOptions` of a container or pod. An empty field is not set.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SeLinuxOptions {
    /// `user`.
    pub user: String,
    /// `role`, of processes only: files have the role of the system's default.
    pub role: String,
    /// `type`, of processes only: files have the type of the system's default.
    pub kind: String,
    /// `level`.
    pub level: String,
}

/// The label of a file: `user:role:type:level`. It contains nothing that would end a quoted mount option.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileLabel(String);

impl FileLabel {
    /// Reads a label, as vol_data.json has it.
    pub fn parse(text: &str) -> Result<Self, SeLinuxError> {
        let error = || SeLinuxError::InvalidLabel { label: text.to_owned() };
        let mut parts = text.splitn(4, ':');
        let mut part = || parts.next().unwrap_or_default();
        let names = [part(), part(), part()];
        if names.iter().all(|name| is_name(name)) && is_level(part()) {
            return Ok(Self(text.to_owned()));
        }
        Err(error())
    }

    /// The label.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The mount option, in double quotes because a level may contain commas.
    pub fn mount_option(&self) -> String {
        format!("context=\"{}\"", self.0)
    }
}

impl fmt::Display for FileLabel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn is_name(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.'))
}

fn is_level(text: &str) -> bool {
    !text.is_empty() && text.split([':', ',']).all(is_name)
}

/// Whether two labels are the same, also if their categories are written in different ways: the kernel shows `s0:c2,c1` as
/// `s0:c1,c2`, and `s0:c1,c2,c3` as `s0:c1.c3`. Levels with names for categories are compared as text.
pub fn is_same_label(one: &str, other: &str) -> bool {
    let parts = |label: &str| {
        let (rest, level) = label.match_indices(':').nth(2).map(|(at, _)| label.split_at(at))?;
        Some((rest.to_owned(), level_range(&level[1..])?))
    };
    one == other || parts(one).zip(parts(other)).is_some_and(|(one, other)| one == other)
}

/// A sensitivity and its categories.
type Level = (String, BTreeSet<u16>);

/// The lowest and the highest level of `s0`, `s0:c1,c3.c5` or `s0-s0:c1`.
fn level_range(text: &str) -> Option<(Level, Level)> {
    match text.split_once('-') {
        Some((low, high)) => Some((level(low)?, level(high)?)),
        None => level(text).map(|level| (level.clone(), level)),
    }
}

fn level(text: &str) -> Option<Level> {
    let (sensitivity, categories) = text.split_once(':').unwrap_or((text, ""));
    let number = |category: &str| category.strip_prefix('c')?.parse::<u16>().ok();
    let mut found = BTreeSet::new();
    for part in categories.split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('.').unwrap_or((part, part));
        let (first, last) = (number(first)?, number(last)?);
        if last < first {
            return None;
        }
        found.extend(first..=last);
    }
    Some((sensitivity.to_owned(), found))
}

/// The type of the policy when `/etc/selinux/config` names none (selinux_config(5)).
const DEFAULT_TYPE: &str = "targeted";

/// The name of the policy's folder below `/etc/selinux`: `SELINUXTYPE` of `/etc/selinux/config` (selinux_config(5)).
pub fn policy_type(config: &str) -> Result<&str, SeLinuxError> {
    let lines = config.lines().map(str::trim).filter_map(|line| line.strip_prefix("SELINUXTYPE"));
    let value = lines.filter_map(|rest| rest.trim_start().strip_prefix('=')).map(str::trim).next_back();
    let name = value.unwrap_or(DEFAULT_TYPE);
    if is_name(name) && !name.starts_with('.') {
        Ok(name)
    } else {
        Err(SeLinuxError::InvalidPolicy { name: name.to_owned() })
    }
}

/// The system's label of files in containers, without its level.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileContext {
    user: String,
    role: String,
    kind: String,
}

impl FileContext {
    /// Reads the line `file = "user:role:type:level"` of the policy's file `contexts/lxc_contexts`
    /// (selinux_lxc_contexts(5)).
    pub fn from_lxc_contexts(text: &str) -> Result<Self, SeLinuxError> {
        let value =
            text.lines().filter_map(|line| line.split_once('=')).find(|(key, _)| key.trim() == "file");
        let (_, value) = value.ok_or(SeLinuxError::NoDefault)?;
        let value = value.trim();
        let label = value.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).unwrap_or(value);
        let label = FileLabel::parse(label)?.0;
        let mut parts = label.splitn(4, ':').map(str::to_owned);
        let mut part = || parts.next().unwrap_or_default();
        Ok(Self { user: part(), role: part(), kind: part() })
    }

    /// The label that files have for a container with these options. `None` without a level: then the runtime gives
    /// each container a level of its own, and no label is fixed.
    pub fn file_label(&self, options: Option<&SeLinuxOptions>) -> Result<Option<FileLabel>, SeLinuxError> {
        let Some(options) = options.filter(|options| !options.level.is_empty()) else {
            return Ok(None);
        };
        let user = if options.user.is_empty() { &self.user } else { &options.user };
        let level = &options.level;
        // A user with a colon would shift the other parts.
        if !is_name(user) {
            let label = format!("{user}:{}:{}:{level}", self.role, self.kind);
            return Err(SeLinuxError::InvalidLabel { label });
        }
        FileLabel::parse(&format!("{user}:{}:{}:{level}", self.role, self.kind)).map(Some)
    }
}

/// Why a pod cannot use a volume under SELinux.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SeLinuxError {
    /// A label is not one.
    #[error(
        "the SELinux label {label:?} is not valid; correct user and level in seLinuxOptions, such as level: s0:c1,c2"
    )]
    InvalidLabel {
        /// The label.
        label: String,
    },
    /// The policy has no label for files of containers.
    #[error(
        "the SELinux policy of this node has no label of container files in contexts/lxc_contexts; install container-selinux"
    )]
    NoDefault,
    /// The configuration names a policy that cannot be the name of a folder.
    #[error("SELINUXTYPE in /etc/selinux/config is {name:?}; write the name of the policy, such as targeted")]
    InvalidPolicy {
        /// The name.
        name: String,
    },
    /// A file of the policy cannot be read.
    #[error("cannot read the SELinux policy of this node: {path}: {why}")]
    Unreadable {
        /// The file.
        path: String,
        /// The error.
        why: String,
    },
    /// The API has no such policy.
    #[error("unknown seLinuxChangePolicy {policy:?}; it is MountOption or Recursive")]
    UnknownPolicy {
        /// The policy as written.
        policy: String,
    },
    /// Containers of one pod need the volume with different labels.
    #[error(
        "the volume {volume} is used with different SELinux labels in the same pod: {labels}; \
         give its containers the same seLinuxOptions"
    )]
    ContainersDiffer {
        /// The inner name of the volume.
        volume: String,
        /// The labels, sorted, separated by commas and a space.
        labels: String,
    },
    /// Another pod wants the volume with another label.
    #[error(
        "conflicting SELinux labels of volume {volume}: {first:?} and {second:?}; give both pods the same seLinuxOptions.level"
    )]
    PodsDiffer {
        /// The inner name of the volume.
        volume: String,
        /// The label that the first pod asked for; empty: none.
        first: String,
        /// The label that this pod asks for; empty: none.
        second: String,
    },
}

/// `seLinuxChangePolicy` of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangePolicy {
    /// Label by mount option where possible.
    MountOption,
    /// Let the runtime label each file.
    Recursive,
}

impl ChangePolicy {
    /// Reads the field; absent or empty means [`ChangePolicy::MountOption`].
    pub fn parse(field: Option<&str>) -> Result<Self, SeLinuxError> {
        match field.unwrap_or_default() {
            "" | "MountOption" => Ok(Self::MountOption),
            "Recursive" => Ok(Self::Recursive),
            other => Err(SeLinuxError::UnknownPolicy { policy: other.to_owned() }),
        }
    }
}

/// What the node supports; by default nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NodeSupport {
    /// SELinux is enabled, enforcing or permissive.
    pub is_enabled: bool,
    /// The feature gate SELinuxMount: volumes of every access mode are labelled by mount option.
    pub labels_all_modes: bool,
}

/// A volume as one pod uses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VolumeUse<'a> {
    /// The inner name of the volume.
    pub name: &'a str,
    /// The access modes of the PersistentVolume; `None` for an inline volume.
    pub access_modes: Option<&'a [String]>,
    /// The plugin supports the mount option: iscsi and fc do, CSI if the CSIDriver says `seLinuxMount`.
    pub supports_label: bool,
    /// The pod's policy.
    pub policy: ChangePolicy,
}

/// The labels of a volume.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Labels {
    /// The label that all containers share and that the plugin could mount with. Labels of other pods are compared
    /// with it, see [`check_second_pod`]. A volume that has one counts in [`ADMITTED_METRIC`].
    pub wanted: Option<FileLabel>,
    /// The label for the mount option, and the label of the volume in the desired and actual state.
    pub mounted: Option<FileLabel>,
}

/// A difference of labels, or a label that cannot be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Finding {
    /// The pod uses the volume all the same, without the mount option. It would not with the feature gate SELinuxMount.
    Warning(SeLinuxError),
    /// The pod cannot use the volume.
    Refusal(SeLinuxError),
}

/// The gauge of volumes with a label that all containers share.
pub const ADMITTED_METRIC: &str = "volume_manager_selinux_volumes_admitted_total";

impl Finding {
    /// What an error means for a volume with these access modes; `None` for an inline volume.
    pub fn new(node: NodeSupport, access_modes: Option<&[String]>, error: SeLinuxError) -> Self {
        if labels_by_mount(node, access_modes) { Self::Refusal(error) } else { Self::Warning(error) }
    }

    /// The error.
    pub const fn error(&self) -> &SeLinuxError {
        match self {
            Self::Warning(error) | Self::Refusal(error) => error,
        }
    }

    /// The gauge that counts the finding.
    pub const fn metric(&self) -> &'static str {
        let is_warning = matches!(self, Self::Warning(_));
        match (self.error(), is_warning) {
            (SeLinuxError::ContainersDiffer { .. }, true) => {
                "volume_manager_selinux_pod_context_mismatch_warnings_total"
            }
            (SeLinuxError::ContainersDiffer { .. }, false) => {
                "volume_manager_selinux_pod_context_mismatch_errors_total"
            }
            (SeLinuxError::PodsDiffer { .. }, true) => {
                "volume_manager_selinux_volume_context_mismatch_warnings_total"
            }
            (SeLinuxError::PodsDiffer { .. }, false) => {
                "volume_manager_selinux_volume_context_mismatch_errors_total"
            }
            (
                SeLinuxError::InvalidLabel { .. }
                | SeLinuxError::NoDefault
                | SeLinuxError::InvalidPolicy { .. }
                | SeLinuxError::Unreadable { .. }
                | SeLinuxError::UnknownPolicy { .. },
                true,
            ) => "volume_manager_selinux_container_warnings_total",
            (
                SeLinuxError::InvalidLabel { .. }
                | SeLinuxError::NoDefault
                | SeLinuxError::InvalidPolicy { .. }
                | SeLinuxError::Unreadable { .. }
                | SeLinuxError::UnknownPolicy { .. },
                false,
            ) => "volume_manager_selinux_container_errors_total",
        }
    }
}

/// Whether volumes with these access modes are labelled by mount option: those whose only mode is ReadWriteOncePod,
/// or with the feature gate SELinuxMount all PersistentVolumes.
fn labels_by_mount(node: NodeSupport, access_modes: Option<&[String]>) -> bool {
    access_modes.is_some_and(|modes| node.labels_all_modes || modes == [READ_WRITE_ONCE_POD])
}

/// Whether a volume can have labels at all: otherwise its containers may differ, and the policy's default is not needed.
pub fn can_label(node: NodeSupport, volume: &VolumeUse<'_>) -> bool {
    node.is_enabled && volume.supports_label && volume.policy == ChangePolicy::MountOption
}

/// Decides the labels of a volume from the effective options of every container of the pod that uses it; `None` in
/// `containers` is a container without options.
///
/// A container without a fixed label differs from one with a label, because the runtime gives it a label of its own.
pub fn decide(
    node: NodeSupport,
    volume: &VolumeUse<'_>,
    containers: &[Option<&SeLinuxOptions>],
    default: &FileContext,
) -> Result<Labels, Finding> {
    if !can_label(node, volume) {
        return Ok(Labels::default());
    }
    let finding = |error| Finding::new(node, volume.access_modes, error);
    let labels = containers.iter().map(|options| default.file_label(*options));
    let labels: BTreeSet<Option<FileLabel>> = labels.collect::<Result<_, _>>().map_err(finding)?;
    if labels.len() > 1 {
        let shown: Vec<&str> =
            labels.iter().map(|label| label.as_ref().map_or("none", FileLabel::as_str)).collect();
        let (volume, labels) = (volume.name.to_owned(), shown.join(", "));
        return Err(finding(SeLinuxError::ContainersDiffer { volume, labels }));
    }
    let wanted = labels.into_iter().next().flatten();
    let mounted = wanted.clone().filter(|_| labels_by_mount(node, volume.access_modes));
    Ok(Labels { wanted, mounted })
}

/// Compares the label that a further pod wants with the one that the first pod wanted.
pub fn check_second_pod(
    node: NodeSupport,
    volume: &VolumeUse<'_>,
    first: Option<&FileLabel>,
    wanted: Option<&FileLabel>,
) -> Result<(), Finding> {
    if !node.is_enabled || !volume.supports_label || first == wanted {
        return Ok(());
    }
    let text = |label: Option<&FileLabel>| label.map_or_else(String::new, FileLabel::to_string);
    let volume_name = volume.name.to_owned();
    let error = SeLinuxError::PodsDiffer { volume: volume_name, first: text(first), second: text(wanted) };
    Err(Finding::new(node, volume.access_modes, error))
}

/// The value of the label `access_mode` of the metrics: the widest access mode, `inline` for a volume that is not a
/// PersistentVolume, empty for modes that the API does not have.
pub fn access_mode_label(access_modes: Option<&[String]>) -> &'static str {
    let Some(modes) = access_modes else {
        return "inline";
    };
    let known = [
        ("ReadWriteMany", "RWX"),
        ("ReadOnlyMany", "ROX"),
        ("ReadWriteOnce", "RWO"),
        (READ_WRITE_ONCE_POD, "RWOP"),
    ];
    known.iter().find(|(mode, _)| modes.iter().any(|m| m == mode)).map_or("", |(_, label)| label)
}

/// The value of the label `volume_plugin` of the metrics: the name of the plugin, for CSI with the driver.
pub fn plugin_label(plugin: &str, csi_driver: &str) -> String {
    if plugin == CSI { format!("{plugin}/{csi_driver}") } else { plugin.to_owned() }
}

/// Whether the agent manages a volume, as far as labels go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Managed {
    /// configMap, secret, downwardAPI, projected and emptyDir.
    Always,
    /// CSI, local, iscsi, fc and flexvolume: unless the volume is read-only.
    UnlessReadOnly,
    /// hostPath, nfs and image.
    Never,
}

/// Whether the runtime is to relabel the files of a volume (`selinux_relabel` of CRI).
///
/// `supports_labels`: the plugin, or for CSI the mount (see [`shows_seclabel`]), has labels of single files.
/// `mounted`: the label that the volume is mounted with; it already holds for all files.
pub fn wants_relabel(
    managed: Managed,
    is_read_only: bool,
    supports_labels: bool,
    mounted: Option<&FileLabel>,
) -> bool {
    let is_managed = match managed {
        Managed::Always => true,
        Managed::UnlessReadOnly => !is_read_only,
        Managed::Never => false,
    };
    is_managed && supports_labels && mounted.is_none()
}

/// Whether the options of a mount, as mountinfo has them, say that its files have labels.
pub fn shows_seclabel(options: &str) -> bool {
    mount_options::split(options).contains(&"seclabel")
}

#[cfg(test)]
mod tests;
