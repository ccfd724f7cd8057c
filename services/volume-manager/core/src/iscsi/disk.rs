//! The disk that an iscsi volume means (volumes.md §10.4).

use crate::iscsi::portal;
use crate::names;
use crate::sources::IscsiSource;

/// The plugin's name.
pub const PLUGIN: &str = "kubernetes.io/iscsi";
/// The interface of a source that does not name one.
const DEFAULT_INTERFACE: &str = "default";
/// What the name of a target begins with.
pub(super) const TARGET_TYPES: [&str; 3] = ["iqn.", "eui.", "naa."];

/// Why a source is not a disk.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DiskError {
    /// The source has no portal.
    #[error("iscsi volume {volume}: targetPortal is empty; set it in the volume's source")]
    NoPortal {
        /// The volume's inner name.
        volume: String,
    },
    /// The target's name has none of the known types.
    #[error(
        "iscsi volume {volume}: iqn {iqn:?} begins with none of iqn., eui. and naa.; correct it in the volume's source"
    )]
    UnknownTarget {
        /// The volume's inner name.
        volume: String,
        /// The name.
        iqn: String,
    },
    /// The API allows no such LUN.
    #[error("iscsi volume {volume}: lun {lun} is not between 0 and 255; correct it in the volume's source")]
    InvalidLun {
        /// The volume's inner name.
        volume: String,
        /// The LUN.
        lun: i64,
    },
    /// A folder of the volume cannot have the name that the source asks for.
    #[error(
        "iscsi volume {volume}: {name:?} cannot be the name of a folder; correct {fields} in the volume's source"
    )]
    UnsafeName {
        /// The volume's inner name.
        volume: String,
        /// The name.
        name: String,
        /// The fields that make the name.
        fields: &'static str,
    },
    /// A folder of the volume would have a name that no filesystem takes.
    #[error(
        "iscsi volume {volume}: the name of its folder would have {length} bytes, but file names have at most 255; \
         shorten {fields} in the volume's source"
    )]
    NameTooLong {
        /// The volume's inner name.
        volume: String,
        /// The length of the name in bytes.
        length: usize,
        /// The fields that make the name.
        fields: &'static str,
    },
    /// The source names the interface that is made for its initiator name.
    #[error(
        "iscsi volume {volume}: iscsiInterface {interface:?} is the interface that is made for initiatorName; \
         name another one"
    )]
    SameInterface {
        /// The volume's inner name.
        volume: String,
        /// The interface.
        interface: String,
    },
}

/// The disk of a volume. Its names are safe in paths.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    volume: String,
    portals: Vec<String>,
    iqn: String,
    lun: u8,
    base_interface: String,
    initiator: Option<String>,
}

impl Disk {
    /// The disk of the volume with the inner name `volume`.
    pub fn new(volume: &str, source: &IscsiSource) -> Result<Self, DiskError> {
        let owner = || volume.to_owned();
        if source.target_portal.is_empty() {
            return Err(DiskError::NoPortal { volume: owner() });
        }
        if !TARGET_TYPES.iter().any(|kind| source.iqn.len() > kind.len() && source.iqn.starts_with(kind)) {
            return Err(DiskError::UnknownTarget { volume: owner(), iqn: source.iqn.clone() });
        }
        let lun = u8::try_from(source.lun)
            .map_err(|_| DiskError::InvalidLun { volume: owner(), lun: source.lun })?;
        let others = source.portals.iter().map(String::as_str);
        let base = match source.iscsi_interface.as_str() {
            "" => DEFAULT_INTERFACE,
            named => named,
        };
        let disk = Self {
            volume: owner(),
            portals: portal::all([source.target_portal.as_str()].into_iter().chain(others)),
            iqn: source.iqn.clone(),
            lun,
            base_interface: base.to_owned(),
            initiator: (!source.initiator_name.is_empty()).then(|| source.initiator_name.clone()),
        };
        disk.check_names()?;
        Ok(disk)
    }

    fn check_names(&self) -> Result<(), DiskError> {
        if self.initiator.is_some() && self.interface() == self.base_interface {
            return Err(DiskError::SameInterface {
                volume: self.volume.clone(),
                interface: self.interface(),
            });
        }
        let folders = [
            (self.interface_folder(), "iscsiInterface or targetPortal"),
            (self.folder(), "targetPortal and iqn"),
        ];
        for (name, fields) in folders {
            if name.len() > names::MAX_COMPONENT {
                let (volume, length) = (self.volume.clone(), name.len());
                return Err(DiskError::NameTooLong { volume, length, fields });
            }
            if !names::is_path_component(&name) {
                return Err(DiskError::UnsafeName { volume: self.volume.clone(), name, fields });
            }
        }
        Ok(())
    }

    /// The volume's inner name.
    pub fn volume(&self) -> &str {
        &self.volume
    }

    /// Its portals with their ports, each once; never empty.
    pub fn portals(&self) -> &[String] {
        &self.portals
    }

    /// The portal that names its folders.
    pub fn first_portal(&self) -> &str {
        &self.portals[0]
    }

    /// The target's name.
    pub fn iqn(&self) -> &str {
        &self.iqn
    }

    /// The number of the disk at the target.
    pub fn lun(&self) -> u8 {
        self.lun
    }

    /// The interface that exists on the node already.
    pub fn base_interface(&self) -> &str {
        &self.base_interface
    }

    /// The name under which the node logs in, if the source sets one.
    pub fn initiator(&self) -> Option<&str> {
        self.initiator.as_deref()
    }

    /// The interface of its sessions: with an initiator name one of its own, `<first portal>:<inner name>`, else the
    /// base interface.
    pub fn interface(&self) -> String {
        match self.initiator {
            Some(_) => own_interface(self.first_portal(), &self.volume),
            None => self.base_interface.clone(),
        }
    }

    /// The name of the folder of its interface.
    pub(super) fn interface_folder(&self) -> String {
        format!("iface-{}", self.interface())
    }

    /// The name of its folder in that folder.
    pub(super) fn folder(&self) -> String {
        format!("{}-{}-lun-{}", self.first_portal(), self.iqn, self.lun)
    }
}

/// The name of an interface that is made for one volume.
pub(super) fn own_interface(first_portal: &str, volume: &str) -> String {
    format!("{first_portal}:{volume}")
}

/// The unique volume name of a source (volumes.md §1). It has the portal as written, because the controller that
/// attaches volumes names them so.
pub fn unique_name(source: &IscsiSource) -> String {
    name_of(&source.target_portal, &source.iqn, &source.lun.to_string())
}

/// The unique volume name of a disk.
pub(super) fn name_of(portal: &str, iqn: &str, lun: &str) -> String {
    format!("{PLUGIN}/{portal}:{iqn}:{lun}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const IQN: &str = "iqn.2001-04.com.example:storage.disk1";

    fn source(portal: &str, iqn: &str, lun: i64) -> IscsiSource {
        IscsiSource { target_portal: portal.into(), iqn: iqn.into(), lun, ..IscsiSource::default() }
    }

    #[test]
    fn a_source_with_defaults_is_a_disk_on_the_default_interface() {
        let disk = Disk::new("pv", &source("10.0.0.1", IQN, 0)).unwrap();
        assert_eq!(disk.portals(), ["10.0.0.1:3260"]);
        assert_eq!((disk.interface().as_str(), disk.base_interface()), ("default", "default"));
        assert_eq!((disk.initiator(), disk.lun(), disk.volume(), disk.iqn()), (None, 0, "pv", IQN));
    }

    #[test]
    fn an_initiator_name_gives_the_volume_an_interface_of_its_own() {
        let mut from = source("10.0.0.1", IQN, 1);
        from.initiator_name = "iqn.2001-04.com.example:me".into();
        from.iscsi_interface = "eth1".into();
        from.portals = vec!["10.0.0.2".into(), "10.0.0.1:3260".into()];
        let disk = Disk::new("pv", &from).unwrap();
        assert_eq!(disk.portals(), ["10.0.0.1:3260", "10.0.0.2:3260"]);
        assert_eq!((disk.interface().as_str(), disk.base_interface()), ("10.0.0.1:3260:pv", "eth1"));
        from.iscsi_interface = "10.0.0.1:3260:pv".into();
        assert!(matches!(Disk::new("pv", &from), Err(DiskError::SameInterface { .. })));
        from.initiator_name = String::new();
        assert_eq!(Disk::new("pv", &from).unwrap().interface(), "10.0.0.1:3260:pv");
    }

    #[test]
    fn a_source_that_is_no_disk_is_refused_with_its_field() {
        let long = format!("iqn.2001-04.com.example:{}", "x".repeat(255));
        for (portal, iqn, lun, expected) in [
            ("", IQN, 0, "targetPortal is empty"),
            ("10.0.0.1", "", 0, "begins with none of iqn., eui. and naa."),
            ("10.0.0.1", "iqn.", 0, "begins with none of"),
            ("10.0.0.1", "xiqn.2001", 0, "begins with none of"),
            ("10.0.0.1", IQN, -1, "lun -1 is not between 0 and 255"),
            ("10.0.0.1", IQN, 256, "lun 256 is not between 0 and 255"),
            ("../10.0.0.1", IQN, 0, "cannot be the name of a folder"),
            ("10.0.0.1", "iqn.2001-04.com.example:a/../b", 0, "cannot be the name of a folder"),
            ("10.0.0.1", "iqn.2001-04.com.example:a\0", 0, "cannot be the name of a folder"),
            (
                "10.0.0.1",
                &long,
                0,
                "would have 299 bytes, but file names have at most 255; shorten targetPortal and iqn",
            ),
        ] {
            let text = Disk::new("pv", &source(portal, iqn, lun)).unwrap_err().to_string();
            assert!(text.starts_with("iscsi volume pv: ") && text.contains(expected), "{text}");
        }
        let mut from = source("10.0.0.1", IQN, 0);
        from.iscsi_interface = "../../x".into();
        assert!(matches!(Disk::new("pv", &from), Err(DiskError::UnsafeName { .. })));
        from.iscsi_interface = "x".repeat(250);
        assert!(matches!(Disk::new("pv", &from), Err(DiskError::NameTooLong { length: 256, .. })));
        assert!(Disk::new("pv", &source("10.0.0.1", IQN, 255)).is_ok());
        assert!(Disk::new("pv", &source("10.0.0.1", "eui.02004567A425678D", 0)).is_ok());
        assert!(Disk::new("pv", &source("10.0.0.1", "naa.52004567BA64678D", 0)).is_ok());
    }

    #[test]
    fn a_name_of_the_longest_length_is_a_disk_and_a_longer_one_is_refused() {
        // "10.0.0.1:3260-" and "-lun-7"
        for (length, is_disk) in [(235, true), (236, false)] {
            let iqn = format!("iqn.{}", "x".repeat(length - 4));
            let made = Disk::new("pv", &source("10.0.0.1", &iqn, 7));
            assert_eq!(made.map(|disk| disk.folder().len()).ok(), is_disk.then_some(255), "{length}");
        }
    }

    #[test]
    fn the_unique_name_has_the_portal_as_written() {
        let name = unique_name(&source("10.0.0.1", IQN, 2));
        assert_eq!(name, format!("kubernetes.io/iscsi/10.0.0.1:{IQN}:2"));
    }
}
