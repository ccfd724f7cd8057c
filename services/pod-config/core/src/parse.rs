//! From a file's bytes to what stands in it, checked.

use keelson_kube_model::PodFullName;

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
    /// What is not used as it was written.
    pub warnings: Vec<ManifestWarning>,
    /// What may be written down for the time after a restart: the text itself, or, when a Secret stands in it,
    /// the other objects as JSON. Reading it again gives the same pods with the same UIDs.
    pub checkpoint: Vec<u8>,
}

/// Something that is not used as it was written, in an object that is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ManifestWarning {
    /// 1-based.
    pub line: u32,
    /// The pod that it is about; none when it is about another object.
    pub pod: Option<PodFullName>,
    /// For people.
    pub message: String,
}

fn warnings(document: &Document, pod: Option<&StaticPod>) -> Vec<ManifestWarning> {
    let warning = |line, message| ManifestWarning { line, pod: pod.map(StaticPod::full_name), message };
    let mut found = Vec::new();
    if let Some(pod) = pod.filter(|pod| !pod.ignored.is_empty()) {
        let fields = pod.ignored.join(", ");
        let message =
            format!("only a control plane writes these fields, and the pod runs without them: {fields}");
        found.push(warning(document.line, message));
    }
    found.extend(document.converted.iter().map(|key| {
        let message = format!("the key {} is no text and is read as {:?}; quote it", key.written, key.text);
        warning(key.line, message)
    }));
    found
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
                Ok(pod) => {
                    content.warnings.extend(warnings(document, Some(&pod)));
                    content.pods.push(pod);
                }
                Err(found) => errors.extend(found.into_iter().map(|error| on_node(error, rules))),
            },
            Kind::Secret | Kind::ConfigMap => match object::prepare(document) {
                Ok(object) => {
                    content.warnings.extend(warnings(document, None));
                    content.objects.push(object);
                }
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
