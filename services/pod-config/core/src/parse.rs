//! From a file's bytes to what stands in it, checked.

use crate::error::ManifestError;
use crate::manifest::{Document, Kind, located, read_answer, read_manifest, text_of};
use crate::object::{self, StoredObject};
use crate::static_pod::{self, StaticPod, StaticRules};

/// Errors that one file reports; a person mends no more at once.
const MAX_ERRORS: usize = 20;

/// The good content of one file.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct FileContent {
    /// Its pods in their order.
    pub pods: Vec<StaticPod>,
    /// Its Secrets and ConfigMaps in their order.
    pub objects: Vec<StoredObject>,
    /// What may be written down for the time after a restart: the text itself, or, when a Secret stands in it,
    /// the other objects as JSON. Reading it again gives the same pods with the same UIDs.
    pub checkpoint: Vec<u8>,
}

/// Reads and checks every object of a file. One bad object refuses the whole file, so that what runs is always
/// one version of it.
pub fn parse_file(bytes: &[u8], path: &str, rules: &StaticRules) -> Result<FileContent, Vec<ManifestError>> {
    let read = if rules.url { read_answer } else { read_manifest };
    let documents = read(bytes).map_err(|error| vec![error])?;
    let mut content = FileContent::default();
    let mut errors = Vec::new();
    for document in &documents {
        match document.kind {
            Kind::Pod => match static_pod::prepare(document, path, rules) {
                Ok(pod) => content.pods.push(pod),
                Err(found) => errors.extend(found.into_iter().map(|error| on_node(error, rules))),
            },
            Kind::Secret | Kind::ConfigMap => match object::prepare(document) {
                Ok(object) => content.objects.push(object),
                Err(found) => errors.extend(found),
            },
        }
    }
    if !errors.is_empty() {
        errors.truncate(MAX_ERRORS);
        let text = text_of(bytes).map_err(|error| vec![error])?;
        return Err(located(&text, errors));
    }
    content.checkpoint = checkpoint(bytes, &documents);
    Ok(content)
}

/// The pod of the error under the name that it would have here.
fn on_node(mut error: ManifestError, rules: &StaticRules) -> ManifestError {
    if let Some(pod) = &mut error.pod {
        pod.name = rules.name_on_node(&pod.name);
    }
    error
}

fn checkpoint(bytes: &[u8], documents: &[Document]) -> Vec<u8> {
    if documents.iter().all(|document| document.kind != Kind::Secret) {
        return bytes.to_vec();
    }
    let open = documents.iter().filter(|document| document.kind != Kind::Secret);
    open.flat_map(|document| {
        let mut value = document.value.clone();
        // Items of a PodList need not say what they are.
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
