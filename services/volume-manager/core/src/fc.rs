//! fc volumes (volumes.md §10.5): names, links of disks, and which device is mounted.

use std::collections::BTreeSet;

use crate::global_folder::Tree;
use crate::multipath::{self, Mapping, Step};
use crate::names;
use crate::sources::FcSource;

/// The plugin's name.
pub const PLUGIN: &str = "kubernetes.io/fc";
/// The folder of the links of disks at targets.
const BY_PATH: &str = "/dev/disk/by-path";
/// The folder of the links of identified disks.
const BY_ID: &str = "/dev/disk/by-id";
/// The plugin's folder, relative to the agent's root folder.
const ROOT: &str = "plugins/kubernetes.io/fc/";
/// The folder of block maps in the plugin's folder.
const BLOCK: &str = "volumeDevices/";
/// A detach that fails is retried after this many seconds.
pub const DETACH_RETRY_SECONDS: u32 = 10;
/// A detach that fails is given up after this many seconds.
pub const DETACH_LIMIT_SECONDS: u32 = 120;
/// What is written to the scan file of every SCSI host: all channels, targets and LUNs.
pub const SCAN_ALL: &str = "- - -";

/// Why an fc volume cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FcError {
    /// The source names no disk.
    #[error(
        "fc volume {volume}: neither targetWWNs with lun nor wwids are set; set them in the volume's source"
    )]
    NoDisk {
        /// The volume's inner name.
        volume: String,
    },
    /// The API allows no such LUN.
    #[error("fc volume {volume}: lun {lun} is not between 0 and 255; correct it in the volume's source")]
    InvalidLun {
        /// The volume's inner name.
        volume: String,
        /// The LUN.
        lun: i64,
    },
    /// The folder of the disk cannot have the name that the source asks for.
    #[error(
        "fc volume {volume}: {name:?} cannot be the name of a folder; \
         correct targetWWNs or wwids in the volume's source"
    )]
    UnsafeName {
        /// The volume's inner name.
        volume: String,
        /// The name.
        name: String,
    },
    /// The folder of the disk would have a name that no filesystem takes.
    #[error(
        "fc volume {volume}: the name of its folder would have {length} bytes, but file names have at most 255; \
         name fewer targetWWNs or wwids in the volume's source"
    )]
    NameTooLong {
        /// The volume's inner name.
        volume: String,
        /// The length of the name in bytes.
        length: usize,
    },
    /// The node sees no such disk.
    #[error(
        "fc volume {volume}: no fc disk found in {folder} for {ids}; check that the target serves this node"
    )]
    NotFound {
        /// The volume's inner name.
        volume: String,
        /// The folder of links.
        folder: &'static str,
        /// The identifiers, separated by commas.
        ids: String,
    },
    /// The path does not name a disk.
    #[error("{path} is not the global folder of an fc disk: {problem}")]
    NotADisk {
        /// The path.
        path: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A device to detach is not a device node.
    #[error("fc device {device} is not a device node in /dev; it stays attached")]
    NotADevice {
        /// Its path.
        device: String,
    },
}

/// How a disk is identified.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Ids {
    /// By the targets that serve it, and its number there.
    Targets(Vec<String>, u8),
    /// By identifiers of its own, with `_` for each space.
    Disks(Vec<String>),
}

/// The disk of an fc volume. The name of its folder is safe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    ids: Ids,
}

/// A link in the folder [`Disk::links`] of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// The link's name.
    pub name: String,
    /// The device node that it leads to, such as `/dev/sda`.
    pub device: String,
}

/// The result of a search.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// This multipath device.
    Multipath(String),
    /// This disk, without a multipath device over it.
    Single(String),
    /// No multipath device yet: write [`SCAN_ALL`] to every SCSI host's scan file and search again.
    Rescan,
}

/// Whether the SCSI hosts were scanned for this search.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Search {
    /// Not yet.
    First,
    /// They were.
    AfterScan,
}

impl Disk {
    /// The disk of the volume with the inner name `volume`. Targets with a LUN win over identifiers of the disk.
    pub fn new(volume: &str, source: &FcSource) -> Result<Self, FcError> {
        let owner = || volume.to_owned();
        let ids = match source.lun {
            Some(lun) if !source.target_wwns.is_empty() => {
                let lun = u8::try_from(lun).map_err(|_| FcError::InvalidLun { volume: owner(), lun })?;
                Ids::Targets(source.target_wwns.clone(), lun)
            }
            _ if !source.wwids.is_empty() => {
                Ids::Disks(source.wwids.iter().map(|id| id.replace(' ', "_")).collect())
            }
            _ => return Err(FcError::NoDisk { volume: owner() }),
        };
        let disk = Self { ids };
        let name = disk.folder();
        if name.len() > names::MAX_COMPONENT {
            return Err(FcError::NameTooLong { volume: owner(), length: name.len() });
        }
        if disk.ids().iter().any(String::is_empty)
            || !names::is_path_component(&name)
            || name == "volumeDevices"
        {
            return Err(FcError::UnsafeName { volume: owner(), name });
        }
        Ok(disk)
    }

    fn ids(&self) -> &[String] {
        match &self.ids {
            Ids::Targets(ids, _) | Ids::Disks(ids) => ids,
        }
    }

    /// The name of the disk's folder.
    pub fn folder(&self) -> String {
        match &self.ids {
            Ids::Targets(wwns, lun) => format!("{}-lun-{lun}", wwns.join("-")),
            Ids::Disks(wwids) => wwids.join("-"),
        }
    }

    /// The path of the disk's folder, relative to the agent's root folder.
    pub fn path(&self, tree: Tree) -> String {
        let block = match tree {
            Tree::Mounts => "",
            Tree::BlockMaps => BLOCK,
        };
        format!("{ROOT}{block}{}", self.folder())
    }

    /// Reads a path back. What precedes the plugin's folder does not matter, because a mount is visible through other
    /// prefixes, too. An identifier that contains `-` comes back as several, and `_` may have been a space: compare
    /// [`Disk::folder`], not the identifiers.
    pub fn parse(path: &str) -> Result<(Self, Tree), FcError> {
        let refuse = |problem| FcError::NotADisk { path: path.to_owned(), problem };
        let inside = path
            .rmatch_indices(ROOT)
            .find(|(start, _)| *start == 0 || path[..*start].ends_with('/'))
            .map(|(start, _)| &path[start + ROOT.len()..])
            .ok_or_else(|| refuse("it is not in the plugin's folder"))?;
        let (tree, name) = match inside.strip_prefix(BLOCK) {
            Some(name) => (Tree::BlockMaps, name),
            None => (Tree::Mounts, inside),
        };
        if !names::is_path_component(name) || name == "volumeDevices" {
            return Err(refuse("its name is not that of a folder"));
        }
        let parts: Vec<String> = name.split('-').map(str::to_owned).collect();
        if parts.iter().any(String::is_empty) {
            return Err(refuse("its name has an empty identifier"));
        }
        let ids = match parts.as_slice() {
            [wwns @ .., word, lun] if word == "lun" => {
                let number: u8 = lun.parse().map_err(|_| refuse("its LUN is not between 0 and 255"))?;
                if wwns.is_empty() {
                    return Err(refuse("its name has no target"));
                }
                if number.to_string() != *lun {
                    return Err(refuse("its LUN is not written as a plain number"));
                }
                Ids::Targets(wwns.to_vec(), number)
            }
            wwids => Ids::Disks(wwids.to_vec()),
        };
        Ok((Self { ids }, tree))
    }

    /// The folder with the disk's links.
    pub fn links(&self) -> &'static str {
        match self.ids {
            Ids::Targets(..) => BY_PATH,
            Ids::Disks(_) => BY_ID,
        }
    }

    /// Whether a link of this name leads to the disk.
    fn is_link(&self, name: &str, id: &str) -> bool {
        match &self.ids {
            Ids::Targets(_, lun) => name.strip_suffix(&format!("-0x{id}-lun-{lun}")).is_some_and(|bus| {
                bus == "fc" || bus.strip_prefix("pci-").is_some_and(|rest| rest.strip_suffix("-fc").is_some())
            }),
            Ids::Disks(_) => name.strip_prefix("scsi-") == Some(id),
        }
    }

    /// Which device of `volume` is mounted, with the links of [`Disk::links`] in order and the node's device-mapper
    /// devices. A multipath device over any path wins; without one the SCSI hosts are scanned once.
    ///
    /// Parity: without a multipath device the kubelet uses the last identifier alone, and fails if that one has no
    /// link.
    pub fn search(
        &self,
        volume: &str,
        links: &[Link],
        mappings: &[Mapping],
        search: Search,
    ) -> Result<Found, FcError> {
        let devices: Vec<&str> = self
            .ids()
            .iter()
            .filter_map(|id| links.iter().find(|link| self.is_link(&link.name, id)))
            .map(|link| link.device.as_str())
            .collect();
        let mapped = devices
            .iter()
            .filter_map(|device| multipath::kernel_name(device))
            .find_map(|name| multipath::over(name, mappings));
        match (mapped, search, devices.first()) {
            (Some(mapping), _, _) => Ok(Found::Multipath(mapping.device())),
            (None, Search::First, _) => Ok(Found::Rescan),
            (None, Search::AfterScan, Some(device)) => Ok(Found::Single((*device).to_owned())),
            (None, Search::AfterScan, None) => Err(FcError::NotFound {
                volume: volume.to_owned(),
                folder: self.links(),
                ids: self.ids().join(", "),
            }),
        }
    }
}

/// The unique volume name of a source (volumes.md §1). It has the identifiers as written, because the controller that
/// attaches volumes names them so.
pub fn unique_name(volume: &str, source: &FcSource) -> Result<String, FcError> {
    match source.lun {
        Some(lun) if !source.target_wwns.is_empty() => {
            Ok(format!("{PLUGIN}/[{}]:{lun}", source.target_wwns.join(" ")))
        }
        _ if !source.wwids.is_empty() => Ok(format!("{PLUGIN}/[{}]", source.wwids.join(" "))),
        _ => Err(FcError::NoDisk { volume: volume.to_owned() }),
    }
}

/// Whether the disk of the volume with this unique name may have the folder `folder`. What separates identifiers in the name
/// of the folder may have been a part of them.
pub fn is_folder_of(folder: &str, unique_name: &str) -> bool {
    let plain = |text: &str| text.replace([' ', '_'], "-");
    let ids_and_lun = unique_name
        .strip_prefix(PLUGIN)
        .and_then(|rest| rest.strip_prefix("/["))
        .and_then(|rest| rest.rsplit_once(']'));
    let wanted = match ids_and_lun {
        Some((ids, "")) => plain(ids),
        Some((ids, lun)) => match lun.strip_prefix(':') {
            Some(lun) => format!("{}-lun-{lun}", plain(ids)),
            None => return false,
        },
        None => return false,
    };
    plain(folder) == wanted
}

/// The steps that detach the mounted `device`, with symlinks already followed: a disk, or the multipath device over
/// several. An error of [`Step::FlushMap`] ends the attempt.
pub fn detach(device: &str, mappings: &[Mapping]) -> Result<Vec<Step>, FcError> {
    let name =
        multipath::kernel_name(device).ok_or_else(|| FcError::NotADevice { device: device.to_owned() })?;
    let mapping = mappings.iter().find(|m| m.name == name).or_else(|| multipath::over(name, mappings));
    let (map, disks) = match mapping {
        Some(mapping) => (Some(Step::FlushMap(mapping.device())), mapping.slaves.iter().cloned().collect()),
        None => (None, BTreeSet::from([name.to_owned()])),
    };
    let remove =
        disks.into_iter().flat_map(|disk| [Step::FlushBuffers(format!("/dev/{disk}")), Step::Delete(disk)]);
    Ok(map.into_iter().chain(remove).collect())
}

#[cfg(test)]
mod tests;
