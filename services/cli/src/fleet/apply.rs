//! `keelson apply --etcd`.

use std::path::{Path, PathBuf};

use keelson_etcd::{Expect, Operation, Written};
use serde::Serialize;
use serde_json::json;

use super::objects::{self, Wanted};
use super::{Fleet, Nodes, failure};
use crate::cmd::manifests::{self, ObjectKind};
use crate::cmd::{Session, delete};
use crate::error::Failure;
use crate::output;

/// Tries against writers that are faster.
const TRIES: usize = 8;

/// An object that stands under its key now.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Stored {
    kind: ObjectKind,
    namespace: String,
    name: String,
    node: String,
    result: &'static str,
    resource_version: String,
}

/// Stores each file; a file that is refused does not keep the others back.
pub(crate) async fn run(session: &Session, fleet: &Fleet, files: &[PathBuf]) -> Result<(), Failure> {
    let paths = manifests::paths(files)?;
    let (mut items, mut failures) = (Vec::new(), Vec::new());
    let mut nodes = None;
    for path in &paths {
        match apply(fleet, path, &mut nodes, session, &mut items).await {
            Ok(()) => {}
            Err(failure) if failure.is_unreachable() => return Err(failure),
            Err(failure) => failures.push(failure),
        }
    }
    if output::is_document(session.format()) {
        output::print_document(session.format(), &json!({"items": items}))?;
    }
    delete::all_or_some(session, failures, paths.len())
}

async fn apply(
    fleet: &Fleet,
    path: &Path,
    nodes: &mut Option<Nodes>,
    session: &Session,
    items: &mut Vec<Stored>,
) -> Result<(), Failure> {
    let file = manifests::read(path)?;
    let wrong = |reason: String| Failure::Manifest { path: file.path.clone(), reason };
    let wanted = objects::wanted(&manifests::documents(&file)?).map_err(wrong)?;
    if wanted.is_empty() {
        return Err(wrong("no Pod, Secret or ConfigMap in this manifest".into()));
    }
    for object in &wanted {
        let node = fleet.target(&object.node, nodes).await?;
        let stored = store(fleet, object, &node).await?;
        if !output::is_document(session.format()) {
            let label = object.kind.label(&object.name);
            output::print(&format!("{label} {} on {node}\n", stored.result))?;
        }
        items.push(stored);
    }
    Ok(())
}

/// Puts an object where it stands. What another writer has changed since its author has read it is not overwritten.
async fn store(fleet: &Fleet, object: &Wanted, node: &str) -> Result<Stored, Failure> {
    let key = object.key(node);
    let value = object.value.to_string().into_bytes();
    let stored = |result, revision: i64| Stored {
        kind: object.kind,
        namespace: object.namespace.clone(),
        name: object.name.clone(),
        node: node.to_owned(),
        result,
        resource_version: revision.to_string(),
    };
    let label = object.kind.label(&object.name);
    for _ in 0..TRIES {
        let now = fleet.etcd.get(&key).await.map_err(failure)?;
        let revision = now.as_ref().map(|entry| entry.mod_revision);
        if let Some(read) = object.revision
            && Some(read) != revision
        {
            let found = revision.map_or_else(|| "it is gone".to_owned(), |now| format!("it is {now} now"));
            return Err(Failure::Answer {
                message: format!(
                    "{label} on {node} has changed since it was read: resourceVersion was {read}, {found}"
                ),
                hint: Some(format!(
                    "`keelson get {} -o yaml --etcd …` again and carry your change over, or leave metadata.resourceVersion out to overwrite it",
                    label.replacen('/', " ", 1)
                )),
            });
        }
        if let Some(entry) = &now
            && entry.value == value
        {
            return Ok(stored("unchanged", entry.mod_revision));
        }
        let expect = revision.map_or(Expect::Absent, Expect::Revision);
        let put = Operation::Put { key: key.clone(), value: value.clone(), lease: 0 };
        match fleet.etcd.write(&[(key.clone(), expect)], &[put]).await.map_err(failure)? {
            Written::Done(new) => {
                return Ok(stored(if revision.is_some() { "changed" } else { "created" }, new));
            }
            Written::Conflict(_) => {}
        }
    }
    Err(Failure::Answer {
        message: format!("{label} on {node} changes faster than it can be written"),
        hint: Some("find out who else writes it".into()),
    })
}
