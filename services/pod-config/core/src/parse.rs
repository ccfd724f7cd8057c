//! Parses and validates a manifest file.

use std::sync::Arc;

use keelson_kube_model::PodFullName;
use keelson_yaml::manifest::ConvertedKey;

use crate::desired_pod::DesiredPod;
use crate::error::ManifestError;
use crate::manifest::{Document, Kind, decode_text, read_http_body, read_manifest, with_positions};
use crate::object::{self, StoredObject};
use crate::static_pod::{self, StaticRules};
use crate::volume_object;

/// Maximum number of errors reported for one file.
const MAX_ERRORS: usize = 20;

/// The content of one valid file.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct FileContent {
    /// Its pods, in order.
    pub pods: Vec<Arc<DesiredPod>>,
    /// Its other objects, in order.
    pub objects: Vec<Arc<StoredObject>>,
    /// What is not used as it was written.
    pub warnings: Vec<ManifestWarning>,
    /// What the checkpoint stores: the text itself, or, if it contains a Secret, the other objects as JSON. Parsing it again
    /// gives the same pods with the same UIDs.
    pub checkpoint: Vec<u8>,
}

/// A part of a valid object that is not used as it was written.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ManifestWarning {
    /// Line in the file, 1-based.
    pub line: u32,
    /// The pod concerned; `None` for another object.
    pub pod: Option<PodFullName>,
    /// The message, for people.
    pub message: String,
}

/// Warnings about a part of the document at `line`; `pod` is its pod, if it is one.
fn warnings(line: u32, converted: Vec<ConvertedKey>, pod: Option<&DesiredPod>) -> Vec<ManifestWarning> {
    let warning = |line, message| ManifestWarning { line, pod: pod.map(DesiredPod::full_name), message };
    let mut found = Vec::new();
    if let Some(pod) = pod.filter(|pod| !pod.ignored.is_empty()) {
        let fields = pod.ignored.join(", ");
        let message = format!("these fields are ignored, because only a control plane writes them: {fields}");
        found.push(warning(line, message));
    }
    found.extend(converted.into_iter().map(|key| {
        let message = format!("the key {} is not text and is read as {:?}; quote it", key.written, key.text);
        warning(key.line, message)
    }));
    found
}

/// Parses and validates all objects of a file. One invalid object rejects the whole file, so that always one version of it is
/// running.
///
/// # Errors
/// Everything that is wrong with the file, up to 20 errors.
pub fn parse_file(bytes: &[u8], path: &str, rules: &StaticRules) -> Result<FileContent, Vec<ManifestError>> {
    let read = if rules.url { read_http_body } else { read_manifest };
    let documents = read(bytes).map_err(|error| vec![error])?;
    validate_documents(documents, bytes, path, rules)
}

/// Validates the objects that were read from the `bytes` of a file, as [`parse_file`] does.
///
/// # Errors
/// Everything that is wrong with them, up to 20 errors.
pub fn validate_documents(
    documents: Vec<Document>,
    bytes: &[u8],
    path: &str,
    rules: &StaticRules,
) -> Result<FileContent, Vec<ManifestError>> {
    let checkpoint = checkpoint(bytes, &documents);
    let mut content = FileContent { checkpoint, ..FileContent::default() };
    let mut errors = Vec::new();
    for mut document in documents {
        let (line, converted) = (document.line, std::mem::take(&mut document.converted));
        match document.kind {
            Kind::Pod => match static_pod::prepare(document, path, rules) {
                Ok(pod) => {
                    content.warnings.extend(warnings(line, converted, Some(&pod)));
                    content.pods.push(Arc::new(pod));
                }
                Err(found) => errors.extend(found.into_iter().map(|error| with_name_on_node(error, rules))),
            },
            Kind::Secret | Kind::ConfigMap => match object::prepare(document, path) {
                Ok(object) => {
                    content.warnings.extend(warnings(line, converted, None));
                    content.objects.push(Arc::new(object));
                }
                Err(found) => errors.extend(found),
            },
            Kind::PersistentVolume | Kind::PersistentVolumeClaim => {
                match volume_object::prepare(document, path, rules) {
                    Ok(prepared) => {
                        content.warnings.extend(warnings(line, converted, None));
                        let to_warning = |message| ManifestWarning { line, pod: None, message };
                        content.warnings.extend(prepared.warnings.into_iter().map(to_warning));
                        content.objects.push(Arc::new(prepared.object));
                    }
                    Err(found) => errors.extend(found),
                }
            }
        }
    }
    if !errors.is_empty() {
        errors.truncate(MAX_ERRORS);
        let text = decode_text(bytes).map_err(|error| vec![error])?;
        return Err(with_positions(&text, errors));
    }
    Ok(content)
}

/// Gives the pod of the error its name on this node.
fn with_name_on_node(mut error: ManifestError, rules: &StaticRules) -> ManifestError {
    if let Some(pod) = &mut error.pod {
        pod.name = rules.name_on_node(&pod.name);
    }
    error
}

/// What the checkpoint stores, see [`FileContent::checkpoint`].
fn checkpoint(bytes: &[u8], documents: &[Document]) -> Vec<u8> {
    if documents.iter().all(|document| document.kind != Kind::Secret) {
        return bytes.to_vec();
    }
    let open = documents.iter().filter(|document| document.kind != Kind::Secret);
    open.flat_map(|document| {
        let mut value = document.value.clone();
        // Items of a PodList may lack apiVersion and kind.
        if let Some(object) = value.as_object_mut() {
            object.entry("apiVersion").or_insert_with(|| "v1".into());
            object.entry("kind").or_insert_with(|| document.kind.as_str().into());
        }
        let mut line = value.to_string().into_bytes();
        line.push(b'\n');
        line
    })
    .collect()
}
