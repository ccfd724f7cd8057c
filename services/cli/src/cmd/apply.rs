//! `keelson apply`.

use std::path::{Path, PathBuf};

use keelson_config::ServiceName;
use keelson_proto::keelson::pod_config::v1::ApplyManifestRequest;
use serde::Serialize;
use serde_json::json;

use super::manifests::ObjectKind;
use super::{Session, manifests};
use crate::error::Failure;
use crate::output;

/// An object that is stored now.
#[derive(Debug, Serialize)]
struct Stored {
    kind: ObjectKind,
    namespace: String,
    name: String,
    uid: Option<String>,
    result: String,
}

/// Stores each file; a file that is refused does not keep the others back.
pub(crate) async fn run(session: &Session, files: &[PathBuf]) -> Result<(), Failure> {
    without_namespace(session)?;
    let paths = manifests::paths(files)?;
    let (mut items, mut failures) = (Vec::new(), Vec::new());
    for path in &paths {
        match apply(session, path).await {
            Ok(stored) if output::is_document(session.format()) => items.extend(stored),
            Ok(stored) => {
                for object in &stored {
                    output::print(&format!("{} {}\n", object.kind.label(&object.name), object.result))?;
                }
            }
            Err(failure) if failure.is_unreachable() => return Err(failure),
            Err(failure) => failures.push(failure),
        }
    }
    if output::is_document(session.format()) {
        output::print_document(session.format(), &json!({"items": items}))?;
    }
    super::delete::all_or_some(session, failures, paths.len())
}

/// Manifests say themselves where their objects are.
///
/// # Errors
/// `-n` or `-A` would change nothing.
pub(crate) fn without_namespace(session: &Session) -> Result<(), Failure> {
    if session.global.all_namespaces || session.global.namespace != "default" {
        return Err(Failure::Usage {
            message: "`keelson apply` has no namespace of its own".into(),
            hint: "write `metadata.namespace` into the manifest".into(),
        });
    }
    Ok(())
}

async fn apply(session: &Session, path: &Path) -> Result<Vec<Stored>, Failure> {
    let file = manifests::read(path)?;
    // The answer names the pods alone.
    let others =
        manifests::objects(&file).unwrap_or_default().into_iter().filter(|o| o.kind != ObjectKind::Pod);
    let request = ApplyManifestRequest { manifest: file.bytes, name_hint: file.path.display().to_string() };
    let answer = session.agent.pod_config().apply_manifest(session.agent.request(request)).await;
    let pods = answer.map_err(|s| session.agent.failure(ServiceName::PodConfig, s))?.into_inner().pods;
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
    let pods = pods.into_iter().map(|pod| Stored {
        kind: ObjectKind::Pod,
        namespace: pod.namespace,
        name: pod.name,
        uid: Some(pod.uid),
        result: pod.result,
    });
    let others = others.map(|object| Stored {
        kind: object.kind,
        namespace: object.namespace,
        name: object.name,
        uid: None,
        result: "stored".into(),
    });
    Ok(pods.chain(others).collect())
}
