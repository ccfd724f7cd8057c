//! `iscsi.json`: what the node has to know to log out (volumes.md §10.4).
//!
//! The file is in the global folder of a disk and is covered by the disk's mount. It is written before the mount; an
//! error of that is an uncertain error of attaching.

use serde::{Deserialize, Serialize};

use crate::iscsi::disk::{Disk, own_interface};
use crate::iscsi::folder::GlobalFolder;
use crate::iscsi::portal;

/// The file's name.
pub const FILE: &str = "iscsi.json";

/// Why a file is not the record of the disk in whose folder it is.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// It is not JSON, or only a part of it, or a field has a wrong type.
    #[error("{FILE} of {folder} cannot be read")]
    Unreadable {
        /// The folder's name.
        folder: String,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
    /// A field is missing or belongs to another disk.
    #[error("{FILE} of {folder} has the {field} {found:?}, which is not that of the folder")]
    Foreign {
        /// The folder's name.
        folder: String,
        /// The field, as the file names it.
        field: &'static str,
        /// Its value; empty if it is missing.
        found: String,
    },
}

/// What the node has to know to log out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// The volume's inner name; empty if it is not known.
    pub volume: String,
    /// The portals with their ports, each once, the folder's first; never empty.
    pub portals: Vec<String>,
    /// The target's name.
    pub iqn: String,
    /// The number of the disk at the target.
    pub lun: u8,
    /// The interface that existed before; empty if it is not known.
    pub base_interface: String,
    /// The interface of the sessions.
    pub interface: String,
    /// The name under which the node logged in; empty: the interface's.
    pub initiator: String,
}

/// The file. Its fields and their order are the kubelet's.
#[derive(Default, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct File {
    vol_name: String,
    portals: Option<Vec<String>>,
    iqn: String,
    lun: String,
    init_iface: String,
    iface: String,
    initiator_name: String,
}

impl Record {
    /// The record of `disk`.
    pub fn of(disk: &Disk) -> Self {
        Self {
            volume: disk.volume().to_owned(),
            portals: disk.portals().to_vec(),
            iqn: disk.iqn().to_owned(),
            lun: disk.lun(),
            base_interface: disk.base_interface().to_owned(),
            interface: disk.interface(),
            initiator: disk.initiator().unwrap_or_default().to_owned(),
        }
    }

    /// What the name of a folder says, for a folder without a usable file. Portals other than the first and an
    /// interface of the volume's own stay behind.
    pub fn from_folder(folder: &GlobalFolder) -> Self {
        Self {
            volume: String::new(),
            portals: vec![folder.portal.clone()],
            iqn: folder.iqn.clone(),
            lun: folder.lun,
            base_interface: String::new(),
            interface: folder.interface.clone(),
            initiator: String::new(),
        }
    }

    /// The text of the file.
    pub fn to_json(&self) -> Result<String, serde_json::Error> {
        let file = File {
            vol_name: self.volume.clone(),
            portals: Some(self.portals.clone()),
            iqn: self.iqn.clone(),
            lun: self.lun.to_string(),
            init_iface: self.base_interface.clone(),
            iface: self.interface.clone(),
            initiator_name: self.initiator.clone(),
        };
        serde_json::to_string(&file).map(|text| text + "\n")
    }

    /// Reads the file in `folder`. One that the kubelet wrote may have more or fewer fields.
    pub fn read(folder: &GlobalFolder, text: &str) -> Result<Self, RecordError> {
        let file: File = serde_json::from_str(text)
            .map_err(|source| RecordError::Unreadable { folder: folder.name(), source })?;
        let portals = portal::all(file.portals.iter().flatten().map(String::as_str));
        let first = portals.first().cloned().unwrap_or_default();
        let lun = folder.lun.to_string();
        for (field, found, expected) in
            [("Portals", &first, &folder.portal), ("Iqn", &file.iqn, &folder.iqn), ("Lun", &file.lun, &lun)]
        {
            if found != expected {
                return Err(RecordError::Foreign { folder: folder.name(), field, found: found.clone() });
            }
        }
        Ok(Self {
            volume: file.vol_name,
            portals,
            iqn: file.iqn,
            lun: folder.lun,
            base_interface: file.init_iface,
            interface: if file.iface.is_empty() { folder.interface.clone() } else { file.iface },
            initiator: file.initiator_name,
        })
    }

    /// The first portal.
    pub fn first_portal(&self) -> &str {
        self.portals.first().map_or("", String::as_str)
    }

    /// Whether the interface was made for this volume, and is deleted with its last session.
    pub fn owns_interface(&self) -> bool {
        !self.initiator.is_empty()
            && !self.volume.is_empty()
            && self.interface == own_interface(self.first_portal(), &self.volume)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::global_folder::Tree;
    use crate::sources::IscsiSource;

    fn disk(initiator: &str) -> Disk {
        let source = IscsiSource {
            target_portal: "10.0.0.1".into(),
            portals: vec!["10.0.0.2:860".into()],
            iqn: "iqn.2001-04.com.example:a".into(),
            lun: 3,
            initiator_name: initiator.into(),
            ..IscsiSource::default()
        };
        Disk::new("pv", &source).unwrap()
    }

    fn folder() -> GlobalFolder {
        GlobalFolder::of(&disk(""), Tree::Mounts)
    }

    #[test]
    fn iscsi_json_has_the_kubelets_fields() {
        assert_eq!(
            Record::of(&disk("me")).to_json().unwrap(),
            concat!(
                r#"{"VolName":"pv","Portals":["10.0.0.1:3260","10.0.0.2:860"],"Iqn":"iqn.2001-04.com.example:a","#,
                r#""Lun":"3","InitIface":"default","Iface":"10.0.0.1:3260:pv","InitiatorName":"me"}"#,
                "\n"
            )
        );
    }

    #[test]
    fn a_record_is_read_back_as_it_was_written() {
        for initiator in ["", "iqn.2001-04.com.example:me"] {
            let disk = disk(initiator);
            let record = Record::of(&disk);
            let folder = GlobalFolder::of(&disk, Tree::BlockMaps);
            assert_eq!(Record::read(&folder, &record.to_json().unwrap()).unwrap(), record);
            assert_eq!(record.owns_interface(), !initiator.is_empty());
        }
    }

    #[test]
    fn a_file_of_a_kubelet_with_other_fields_is_understood() {
        let text = concat!(
            r#"{"VolName":"pv","Portals":["10.0.0.1:3260","10.0.0.1:3260"],"Iqn":"iqn.2001-04.com.example:a","#,
            r#""Lun":"3","Iface":"eth0","InitiatorName":"","MetricsProvider":null}"#,
            "\n"
        );
        let record = Record::read(&folder(), text).unwrap();
        assert_eq!((record.portals.len(), record.interface.as_str()), (1, "eth0"));
        assert_eq!(record.base_interface, "");
        assert!(!record.owns_interface());
    }

    #[test]
    fn only_an_interface_that_was_made_for_an_initiator_name_is_the_volumes_own() {
        let own = Record::of(&disk("me"));
        assert!(own.owns_interface());
        for other in [
            Record { initiator: String::new(), ..own.clone() },
            Record { volume: "pv2".into(), ..own.clone() },
            Record { interface: "default".into(), ..own.clone() },
            Record { interface: "10.0.0.1:3260:".into(), volume: String::new(), ..own.clone() },
            Record { portals: vec!["10.0.0.2:3260".into()], ..own },
        ] {
            assert!(!other.owns_interface(), "{other:?}");
        }
    }

    #[test]
    fn a_half_written_file_is_an_error_at_every_length() {
        let text = Record::of(&disk("")).to_json().unwrap();
        let text = text.trim_end();
        for length in 0..text.len() {
            let error = Record::read(&folder(), &text[..length]).unwrap_err();
            assert!(matches!(error, RecordError::Unreadable { .. }), "{length}");
        }
        let error = Record::read(&folder(), "\0\0\0").unwrap_err().to_string();
        assert_eq!(error, "iscsi.json of 10.0.0.1:3260-iqn.2001-04.com.example:a-lun-3 cannot be read");
    }

    #[test]
    fn the_file_of_another_disk_is_refused_with_its_field() {
        let good = Record::of(&disk("")).to_json().unwrap();
        for (from, to, field, found) in [
            ("10.0.0.1:3260", "10.0.0.9:3260", "Portals", "10.0.0.9:3260"),
            (r#"["10.0.0.1:3260","10.0.0.2:860"]"#, "null", "Portals", ""),
            (r#"["10.0.0.1:3260","10.0.0.2:860"]"#, r#"[""]"#, "Portals", ""),
            ("example:a", "example:b", "Iqn", "iqn.2001-04.com.example:b"),
            (r#""Lun":"3""#, r#""Lun":"4""#, "Lun", "4"),
            (r#""Lun":"3","#, "", "Lun", ""),
        ] {
            assert!(good.contains(from), "{from}");
            let error = Record::read(&folder(), &good.replace(from, to)).unwrap_err().to_string();
            assert!(error.contains(&format!("has the {field} {found:?}")), "{error}");
        }
        assert!(matches!(Record::read(&folder(), "{}"), Err(RecordError::Foreign { .. })));
        assert!(matches!(Record::read(&folder(), r#"{"Lun": 3}"#), Err(RecordError::Unreadable { .. })));
    }

    #[test]
    fn without_a_file_the_folder_names_the_first_portal_and_no_own_interface() {
        let record = Record::from_folder(&GlobalFolder::of(&disk("me"), Tree::Mounts));
        assert_eq!(record.portals, ["10.0.0.1:3260"]);
        assert_eq!((record.iqn.as_str(), record.lun), ("iqn.2001-04.com.example:a", 3));
        assert_eq!(record.interface, "10.0.0.1:3260:pv");
        assert!(!record.owns_interface());
    }
}
