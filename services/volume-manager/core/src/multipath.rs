//! Multipath devices over the paths of a disk, and the steps that remove a disk from the node (volumes.md §10.4,
//! §10.5).

use std::fmt;

/// What the UUID of a multipath device begins with, as opposed to that of LVM or dm-crypt.
const MULTIPATH: &str = "mpath-";

/// A device of device-mapper, as `/sys/block/dm-*` shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    /// Its name, such as `dm-0`.
    pub name: String,
    /// The content of `dm/uuid`.
    pub uuid: String,
    /// The names in `slaves`, such as `sda`.
    pub slaves: Vec<String>,
}

impl Mapping {
    /// The path of its device node.
    pub fn device(&self) -> String {
        format!("/dev/{}", self.name)
    }
}

/// The multipath device over the disk `name`, such as `sda`. A disk that LVM or dm-crypt uses has none.
///
/// Parity: the kubelet takes every device-mapper device over the disk for a multipath device.
pub fn over<'m>(name: &str, mappings: &'m [Mapping]) -> Option<&'m Mapping> {
    mappings.iter().find(|m| m.uuid.starts_with(MULTIPATH) && m.slaves.iter().any(|slave| slave == name))
}

/// The name of the device node `/dev/<name>`, with symlinks already followed. `None` for every other path.
pub fn kernel_name(device: &str) -> Option<&str> {
    device.strip_prefix("/dev/").filter(|name| crate::names::is_path_component(name))
}

/// One step that removes a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Write what is still cached for the device node. An error is ignored.
    FlushBuffers(String),
    /// Remove the multipath device with this device node.
    FlushMap(String),
    /// Make the kernel forget the disk with this name.
    Delete(String),
}

/// How a [`Step`] is carried out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Act {
    /// Run a program with these arguments.
    Run(&'static str, Vec<String>),
    /// Write this text to a file that may be missing.
    Write(String, &'static str),
}

impl Step {
    /// The program to run or the file to write.
    pub fn act(&self) -> Act {
        match self {
            Self::FlushBuffers(device) => {
                Act::Run("blockdev", vec!["--flushbufs".to_owned(), device.clone()])
            }
            Self::FlushMap(device) => Act::Run("multipath", vec!["-f".to_owned(), device.clone()]),
            Self::Delete(name) => Act::Write(format!("/sys/block/{name}/device/delete"), "1"),
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::FlushBuffers(device) => write!(f, "flush the buffers of {device}"),
            Self::FlushMap(device) => write!(f, "flush the multipath map {device}"),
            Self::Delete(name) => write!(f, "delete the disk {name}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping(name: &str, uuid: &str, slaves: &[&str]) -> Mapping {
        Mapping {
            name: name.into(),
            uuid: uuid.into(),
            slaves: slaves.iter().map(|s| (*s).to_owned()).collect(),
        }
    }

    #[test]
    fn only_a_multipath_device_over_exactly_that_disk_is_found() {
        let mappings = [
            mapping("dm-0", "LVM-abc", &["sda"]),
            mapping("dm-1", "CRYPT-LUKS2-x", &["sdb"]),
            mapping("dm-2", "mpath-3600", &["sda", "sdc"]),
            mapping("dm-3", "part1-mpath-3600", &["sdd"]),
        ];
        let found = |name| over(name, &mappings).map(Mapping::device);
        assert_eq!(found("sda").as_deref(), Some("/dev/dm-2"));
        assert_eq!(found("sdc").as_deref(), Some("/dev/dm-2"));
        for name in ["sdb", "sd", "sdaa", "sdd", ""] {
            assert_eq!(found(name), None, "{name}");
        }
    }

    #[test]
    fn only_a_device_node_directly_in_dev_has_a_kernel_name() {
        assert_eq!(kernel_name("/dev/sda"), Some("sda"));
        assert_eq!(kernel_name("/dev/dm-0"), Some("dm-0"));
        for path in ["/dev/disk/by-path/x", "sda", "/dev/", "/dev/..", "/sys/sda", "/dev//sda"] {
            assert_eq!(kernel_name(path), None, "{path}");
        }
    }

    #[test]
    fn each_step_names_its_program_or_file() {
        let run = |program, args: &[&str]| Act::Run(program, args.iter().map(|a| (*a).to_owned()).collect());
        assert_eq!(
            Step::FlushBuffers("/dev/sda".into()).act(),
            run("blockdev", &["--flushbufs", "/dev/sda"])
        );
        assert_eq!(Step::FlushMap("/dev/dm-0".into()).act(), run("multipath", &["-f", "/dev/dm-0"]));
        assert_eq!(Step::Delete("sda".into()).act(), Act::Write("/sys/block/sda/device/delete".into(), "1"));
        assert_eq!(Step::Delete("sda".into()).to_string(), "delete the disk sda");
        assert_eq!(Step::FlushMap("/dev/dm-0".into()).to_string(), "flush the multipath map /dev/dm-0");
        assert_eq!(Step::FlushBuffers("/dev/sda".into()).to_string(), "flush the buffers of /dev/sda");
    }
}
