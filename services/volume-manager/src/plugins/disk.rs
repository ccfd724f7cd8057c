//! What the plugins of disks have in common: a disk is mounted once at a global path and bind-mounted for each pod
//! (volumes.md §10.4, §10.5).
//!
//! | module | has |
//! |---|---|
//! | `source` | what the source of a volume says |
//! | `mounts` | mounts of disks and their bind mounts in pods, and when they stay |
//! | `volume_file` | the file that says which volume a global folder belongs to |
//! | `folder` | what the path of a global folder says |
//! | `kind` | what differs between iscsi and fc |
//! | `plugin` | the plugin, for any kind |
//! | `locks` | locks by name |

mod folder;
mod kind;
mod locks;
mod mounts;
mod plugin;
mod source;
mod volume_file;

pub(super) use folder::DiskFolder;
pub(super) use kind::{DiskKind, Release, Wanted};
pub(super) use locks::Locks;
pub(super) use mounts::{mount_device, mounted_device, pod_path, refuse_busy, refuse_references, unmount};
pub(super) use plugin::DiskPlugin;
pub(super) use source::{is_read_only, options, read_source, wrong_source};
pub(super) use volume_file::VolumeFile;
