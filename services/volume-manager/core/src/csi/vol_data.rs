//! What `vol_data.json` contains: the file next to a volume's mount that says which driver unmounts it (volumes.md §2,
//! §11.5 to §11.7).
//!
//! The kubelet writes the same files and reads ours, so the names of the fields are fixed. A file is one JSON object
//! whose values are all strings.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::LifecycleMode;
use super::paths::{DriverName, NameError};

const SPEC_VOLUME_ID: &str = "specVolID";
const VOLUME_HANDLE: &str = "volumeHandle";
const DRIVER_NAME: &str = "driverName";
const NODE_NAME: &str = "nodeName";
const ATTACHMENT_ID: &str = "attachmentID";
const LIFECYCLE_MODE: &str = "volumeLifecycleMode";
const SELINUX_CONTEXT: &str = "seLinuxMountContext";

/// What is written when a filesystem volume is staged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageData {
    /// The volume's id for the driver; not empty.
    pub volume_handle: String,
    /// The driver.
    pub driver: DriverName,
    /// The SELinux label of the mount, without `context=`.
    pub selinux_context: Option<String>,
}

impl StageData {
    /// The content of the file.
    pub fn to_json(&self) -> Vec<u8> {
        let context = self.selinux_context.as_deref().map(|context| (SELINUX_CONTEXT, context));
        let fields = [(VOLUME_HANDLE, self.volume_handle.as_str()), (DRIVER_NAME, self.driver.as_str())];
        to_json(fields.into_iter().chain(context))
    }
}

/// What is written when a filesystem volume is published to a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublishData {
    /// The inner name: that of the PersistentVolume or of the inline volume.
    pub spec_volume_id: String,
    /// The volume's id for the driver; not empty.
    pub volume_handle: String,
    /// The driver.
    pub driver: DriverName,
    /// The node.
    pub node: String,
    /// The name of the VolumeAttachment, whether there is one or not.
    pub attachment_id: String,
    /// How long the volume lives.
    pub lifecycle: LifecycleMode,
    /// The SELinux label of the mount, without `context=`.
    pub selinux_context: Option<String>,
}

impl PublishData {
    /// The content of the file.
    pub fn to_json(&self) -> Vec<u8> {
        let context = self.selinux_context.as_deref().map(|context| (SELINUX_CONTEXT, context));
        let fields = [
            (SPEC_VOLUME_ID, self.spec_volume_id.as_str()),
            (VOLUME_HANDLE, self.volume_handle.as_str()),
            (DRIVER_NAME, self.driver.as_str()),
            (NODE_NAME, self.node.as_str()),
            (ATTACHMENT_ID, self.attachment_id.as_str()),
            (LIFECYCLE_MODE, self.lifecycle.as_str()),
        ];
        to_json(fields.into_iter().chain(context))
    }
}

/// What is written when a block volume is first mapped. Inline volumes are never block volumes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockData {
    /// The name of the PersistentVolume.
    pub spec_volume_id: String,
    /// The volume's id for the driver; not empty.
    pub volume_handle: String,
    /// The driver.
    pub driver: DriverName,
    /// The node.
    pub node: String,
    /// The name of the VolumeAttachment, whether there is one or not.
    pub attachment_id: String,
}

impl BlockData {
    /// The content of the file.
    pub fn to_json(&self) -> Vec<u8> {
        to_json([
            (SPEC_VOLUME_ID, self.spec_volume_id.as_str()),
            (VOLUME_HANDLE, self.volume_handle.as_str()),
            (DRIVER_NAME, self.driver.as_str()),
            (NODE_NAME, self.node.as_str()),
            (ATTACHMENT_ID, self.attachment_id.as_str()),
        ])
    }
}

/// The fields, sorted by name, and a newline.
fn to_json<'a>(fields: impl IntoIterator<Item = (&'a str, &'a str)>) -> Vec<u8> {
    let sorted: BTreeMap<&str, &str> = fields.into_iter().collect();
    let object: Map<String, Value> =
        sorted.into_iter().map(|(name, value)| (name.to_owned(), Value::from(value))).collect();
    format!("{}\n", Value::Object(object)).into_bytes()
}

/// What a file says, whoever has written it: enough to unmount the volume. Fields with other names are ignored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavedVolume {
    /// The driver.
    pub driver: DriverName,
    /// The volume's id for the driver; not empty.
    pub volume_handle: String,
    /// The inner name; a staged volume has none.
    pub spec_volume_id: Option<String>,
    /// The node that the volume was published on.
    pub node: Option<String>,
    /// The name of the VolumeAttachment.
    pub attachment_id: Option<String>,
    /// How long the volume lives; persistent if the file does not say it.
    pub lifecycle: LifecycleMode,
    /// The SELinux label of the mount.
    pub selinux_context: Option<String>,
}

/// A file that does not say which driver unmounts which volume.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{path} {fault}; unmount the volume by hand, then delete the file and the empty folders around it")]
pub struct DataError {
    /// The file.
    pub path: String,
    /// What is wrong with it.
    pub fault: DataFileError,
}

/// What is wrong with a file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DataFileError {
    /// The agent or the node stopped before anything was written.
    #[error("is empty")]
    Empty,
    /// The agent or the node stopped while it was written.
    #[error("ends in the middle of the JSON object")]
    CutOff,
    /// It is something else.
    #[error("is not JSON: {why}")]
    NotJson {
        /// What the parser says.
        why: String,
    },
    /// It is JSON, and no object.
    #[error("is not a JSON object")]
    NotAnObject,
    /// A field is not a string.
    #[error("has the field {field}, which is not a string")]
    NotAString {
        /// The field.
        field: &'static str,
    },
    /// A field that is needed is missing or empty.
    #[error("lacks the field {field}")]
    Missing {
        /// The field.
        field: &'static str,
    },
    /// The driver's name is not valid.
    #[error("has a wrong field {DRIVER_NAME}: {0}")]
    Driver(NameError),
    /// The lifecycle mode is unknown.
    #[error("has {mode:?} in the field {LIFECYCLE_MODE}, which is neither Persistent nor Ephemeral")]
    LifecycleMode {
        /// The mode.
        mode: String,
    },
}

/// Reads the file at `path`, whose content is `bytes`.
pub fn read(path: &str, bytes: &[u8]) -> Result<SavedVolume, DataError> {
    parse(bytes).map_err(|fault| DataError { path: path.to_owned(), fault })
}

fn parse(bytes: &[u8]) -> Result<SavedVolume, DataFileError> {
    if bytes.iter().all(|byte| byte.is_ascii_whitespace() || *byte == 0) {
        return Err(DataFileError::Empty);
    }
    let object = match serde_json::from_slice(bytes) {
        Ok(Value::Object(object)) => object,
        Ok(_) => return Err(DataFileError::NotAnObject),
        Err(error) if error.is_eof() => return Err(DataFileError::CutOff),
        Err(error) => return Err(DataFileError::NotJson { why: error.to_string() }),
    };
    let driver = required(&object, DRIVER_NAME)?;
    let lifecycle = match optional(&object, LIFECYCLE_MODE)? {
        None => LifecycleMode::Persistent,
        Some(mode) => LifecycleMode::parse(&mode).ok_or(DataFileError::LifecycleMode { mode })?,
    };
    Ok(SavedVolume {
        driver: DriverName::parse(&driver).map_err(DataFileError::Driver)?,
        volume_handle: required(&object, VOLUME_HANDLE)?,
        spec_volume_id: optional(&object, SPEC_VOLUME_ID)?,
        node: optional(&object, NODE_NAME)?,
        attachment_id: optional(&object, ATTACHMENT_ID)?,
        lifecycle,
        selinux_context: optional(&object, SELINUX_CONTEXT)?,
    })
}

fn required(object: &Map<String, Value>, field: &'static str) -> Result<String, DataFileError> {
    optional(object, field)?.ok_or(DataFileError::Missing { field })
}

/// An empty string is a missing field, as for the kubelet.
fn optional(object: &Map<String, Value>, field: &'static str) -> Result<Option<String>, DataFileError> {
    match object.get(field) {
        None => Ok(None),
        Some(Value::String(text)) => Ok((!text.is_empty()).then(|| text.clone())),
        Some(_) => Err(DataFileError::NotAString { field }),
    }
}

#[cfg(test)]
mod tests {
    use keelson_testkit::Reached;
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    const PATH: &str = "/var/lib/kubelet/pods/u/volumes/kubernetes.io~csi/pv/vol_data.json";

    fn driver() -> DriverName {
        DriverName::parse("csi.example.com").unwrap()
    }

    fn publish() -> PublishData {
        PublishData {
            spec_volume_id: "pv".into(),
            volume_handle: "a/b".into(),
            driver: driver(),
            node: "n1".into(),
            attachment_id: "csi-00".into(),
            lifecycle: LifecycleMode::Ephemeral,
            selinux_context: None,
        }
    }

    fn text(bytes: Vec<u8>) -> String {
        String::from_utf8(bytes).unwrap()
    }

    fn fault(bytes: &[u8]) -> DataFileError {
        read(PATH, bytes).unwrap_err().fault
    }

    #[test]
    fn files_have_exactly_the_fields_of_the_kubelet() {
        let stage =
            StageData { volume_handle: "h\"1".into(), driver: driver(), selinux_context: Some("s:t".into()) };
        assert_eq!(
            text(stage.to_json()),
            "{\"driverName\":\"csi.example.com\",\"seLinuxMountContext\":\"s:t\",\"volumeHandle\":\"h\\\"1\"}\n"
        );
        let expected = "{\"attachmentID\":\"csi-00\",\"driverName\":\"csi.example.com\",\"nodeName\":\"n1\",\
                        \"specVolID\":\"pv\",\"volumeHandle\":\"a/b\",\"volumeLifecycleMode\":\"Ephemeral\"}\n";
        assert_eq!(text(publish().to_json()), expected);
        let labelled = PublishData { selinux_context: Some("s:t".into()), ..publish() };
        assert!(text(labelled.to_json()).contains("\"seLinuxMountContext\":\"s:t\""));
        let block = BlockData {
            spec_volume_id: "pv".into(),
            volume_handle: "a/b".into(),
            driver: driver(),
            node: "n1".into(),
            attachment_id: "csi-00".into(),
        };
        let expected = "{\"attachmentID\":\"csi-00\",\"driverName\":\"csi.example.com\",\"nodeName\":\"n1\",\
                        \"specVolID\":\"pv\",\"volumeHandle\":\"a/b\"}\n";
        assert_eq!(text(block.to_json()), expected);
    }

    #[test]
    fn a_file_of_a_kubelet_is_read_whole_and_unknown_fields_are_ignored() {
        let file = json!({
            "attachmentID": "csi-00", "driverName": "csi.example.com", "nodeName": "n1", "specVolID": "pv",
            "volumeHandle": "a/b", "volumeLifecycleMode": "Ephemeral", "seLinuxMountContext": "s:t", "new": [1],
        });
        let expected = SavedVolume {
            driver: driver(),
            volume_handle: "a/b".into(),
            spec_volume_id: Some("pv".into()),
            node: Some("n1".into()),
            attachment_id: Some("csi-00".into()),
            lifecycle: LifecycleMode::Ephemeral,
            selinux_context: Some("s:t".into()),
        };
        assert_eq!(read(PATH, file.to_string().as_bytes()), Ok(expected));
    }

    #[test]
    fn a_file_without_optional_fields_is_of_a_persistent_volume() {
        for file in [
            json!({"driverName": "d", "volumeHandle": "h"}),
            json!({"driverName": "d", "volumeHandle": "h", "volumeLifecycleMode": "", "seLinuxMountContext": ""}),
        ] {
            let saved = read(PATH, file.to_string().as_bytes()).unwrap();
            assert_eq!(saved.lifecycle, LifecycleMode::Persistent);
            assert_eq!((saved.spec_volume_id, saved.node, saved.attachment_id), (None, None, None));
            assert_eq!(saved.selinux_context, None);
        }
    }

    #[test]
    fn a_foreign_file_is_refused_and_the_error_names_what_is_wrong() {
        for empty in ["", "\n", " \n\t", "\0\0\0\0"] {
            assert_eq!(fault(empty.as_bytes()), DataFileError::Empty, "{empty:?}");
        }
        for no_object in ["[]", "\"text\"", "7", "null", "true"] {
            assert_eq!(fault(no_object.as_bytes()), DataFileError::NotAnObject, "{no_object}");
        }
        for garbage in ["driverName=d", "{]", "{\"a\":1}}", "\u{7f}", "{\"driverName\":\"d\"}\0"] {
            assert!(matches!(fault(garbage.as_bytes()), DataFileError::NotJson { .. }), "{garbage:?}");
        }
        assert!(matches!(fault(b"{\"driverName\":\"\xff\"}"), DataFileError::NotJson { .. }));
        let fault_of = |file: Value| fault(file.to_string().as_bytes());
        let missing = |field| DataFileError::Missing { field };
        assert_eq!(fault_of(json!({})), missing("driverName"));
        assert_eq!(fault_of(json!({"volumeHandle": "h", "driverName": ""})), missing("driverName"));
        assert_eq!(fault_of(json!({"driverName": "d"})), missing("volumeHandle"));
        assert_eq!(fault_of(json!({"driverName": "d", "volumeHandle": ""})), missing("volumeHandle"));
        let wrong_mode = json!({"driverName": "d", "volumeHandle": "h", "volumeLifecycleMode": "Other"});
        assert_eq!(fault_of(wrong_mode), DataFileError::LifecycleMode { mode: "Other".into() });
        let outside = fault_of(json!({"driverName": "../d", "volumeHandle": "h"}));
        assert!(matches!(outside, DataFileError::Driver(NameError::Driver { .. })), "{outside:?}");
    }

    #[test]
    fn each_known_field_has_to_be_a_string() {
        let names =
            ["driverName", "volumeHandle", "specVolID", "nodeName", "attachmentID", "volumeLifecycleMode"];
        for field in names.into_iter().chain(["seLinuxMountContext"]) {
            for wrong in [json!(null), json!(7), json!(["x"]), json!({"x": "y"}), json!(true)] {
                let mut file = json!({"driverName": "d", "volumeHandle": "h"});
                file[field] = wrong;
                assert_eq!(fault(file.to_string().as_bytes()), DataFileError::NotAString { field });
            }
        }
    }

    #[test]
    fn the_error_names_the_file_the_fault_and_the_way_out() {
        let error = read(PATH, b"{\"driverName\":\"d\"").unwrap_err().to_string();
        assert!(error.starts_with(PATH), "{error}");
        assert!(
            error.contains("ends in the middle of the JSON object; unmount the volume by hand"),
            "{error}"
        );
        let error = read(PATH, b"{\"driverName\":\"d\"}").unwrap_err().to_string();
        assert!(error.contains("lacks the field volumeHandle"), "{error}");
    }

    #[test]
    fn what_is_written_is_read_back_and_a_cut_off_file_never_is() {
        let reached = &Reached::default();
        let words =
            || prop_oneof![3 => "[a-zA-Z0-9/_#.-]{1,12}", 2 => "\\PC{1,6}", 1 => "[\\x00-\\x7f]{1,6}"];
        let label = || prop::option::of(words());
        let strategy = (words(), words(), words(), label(), any::<bool>());
        proptest!(ProptestConfig::with_cases(512), |((id, handle, node, label, inline) in strategy)| {
            let lifecycle = if inline { LifecycleMode::Ephemeral } else { LifecycleMode::Persistent };
            let data = PublishData {
                spec_volume_id: id.clone(), volume_handle: handle.clone(), node: node.clone(), lifecycle,
                selinux_context: label.clone(), ..publish()
            };
            let bytes = data.to_json();
            let saved = read(PATH, &bytes).unwrap();
            prop_assert_eq!((saved.spec_volume_id, saved.volume_handle), (Some(id), handle.clone()));
            prop_assert_eq!((saved.node, saved.selinux_context), (Some(node), label.clone()));
            prop_assert_eq!(saved.lifecycle, lifecycle);
            for end in 1..bytes.len() - 1 {
                let fault = fault(&bytes[..end]);
                let cut_in_a_letter = std::str::from_utf8(&bytes[..end]).is_err();
                prop_assert!(fault == DataFileError::CutOff || cut_in_a_letter, "{end}: {fault:?}");
            }
            reached.case([
                ("a label", label.is_some()),
                ("inline", inline),
                ("a handle with an escape", serde_json::to_string(&handle).unwrap().contains('\\')),
                ("a handle beyond ASCII", !handle.is_ascii()),
            ]);
        });
        // The rarest: "a handle with an escape", in about one case of 8.
        reached.assert_each();
    }
}
