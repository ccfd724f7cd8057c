//! `keelson apply`.

use std::path::{Path, PathBuf};

use keelson_config::ServiceName;
use keelson_proto::keelson::pod_config::v1::ApplyManifestRequest;
use serde::Serialize;
use serde_json::json;

use super::manifests;
use super::manifests::ObjectKind;
use crate::error::CliError;
use crate::output;
use crate::session::Session;

/// A stored object.
#[derive(Debug, Serialize)]
struct StoredObject {
    kind: ObjectKind,
    #[serde(skip_serializing_if = "String::is_empty")]
    namespace: String,
    name: String,
    uid: Option<String>,
    result: String,
}

/// Stores each file; a refused file does not stop the others.
pub(crate) async fn run(session: &Session, files: &[PathBuf]) -> Result<(), CliError> {
    without_namespace(session)?;
    let paths = manifests::paths(files)?;
    let (mut items, mut errors) = (Vec::new(), Vec::new());
    for path in &paths {
        match apply(session, path).await {
            Ok(stored) if output::is_document(session.format()) => items.extend(stored),
            Ok(stored) => {
                for object in &stored {
                    output::print(&format!("{} {}\n", object.kind.label(&object.name), object.result))?;
                }
            }
            Err(error) if error.is_unreachable() => return Err(error),
            Err(error) => errors.push(error),
        }
    }
    if output::is_document(session.format()) {
        output::print_document(session.format(), &json!({"items": items}))?;
    }
    super::delete::all_or_some(session, errors, paths.len())
}

/// Refuses the namespace flags: the namespace of an object is in its manifest.
///
/// # Errors
/// `-n` or `-A` is given, which would have no effect.
pub(crate) fn without_namespace(session: &Session) -> Result<(), CliError> {
    if session.global.all_namespaces || session.global.namespace != "default" {
        return Err(CliError::Usage {
            message: "`keelson apply` takes no -n or -A".into(),
            hint: "write `metadata.namespace` into the manifest".into(),
        });
    }
    Ok(())
}

async fn apply(session: &Session, path: &Path) -> Result<Vec<StoredObject>, CliError> {
    let file = manifests::read(path)?;
    // The answer names only the pods.
    let others =
        manifests::objects(&file).unwrap_or_default().into_iter().filter(|o| o.kind != ObjectKind::Pod);
    let request = ApplyManifestRequest { manifest: file.bytes, name_hint: file.path.display().to_string() };
    let answer = session.agent.pod_config().apply_manifest(session.agent.request(request)).await;
    let pods = answer.map_err(|s| session.agent.call_error(ServiceName::PodConfig, s))?.into_inner().pods;
    for pod in &pods {
        for warning in &pod.warnings {
            output::notice(&format!(
                "warning: {}: pod {}/{}: {warning}",
                file.path.display(),
                pod.namespace,
                pod.name
            ));
        }
    }
    let pods = pods.into_iter().map(|pod| StoredObject {
        kind: ObjectKind::Pod,
        namespace: pod.namespace,
        name: pod.name,
        uid: Some(pod.uid),
        result: pod.result,
    });
    let others = others.map(|object| StoredObject {
        kind: object.kind,
        namespace: object.namespace,
        name: object.name,
        uid: None,
        result: "stored".into(),
    });
    Ok(pods.chain(others).collect())
}
