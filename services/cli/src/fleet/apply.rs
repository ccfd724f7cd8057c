//! `keelson apply --etcd`.

use std::path::{Path, PathBuf};

use keelson_etcd::{Expect, NodeKeys, Operation, Written};
use serde::Serialize;
use serde_json::json;

use super::objects::{self, Wanted};
use super::{Fleet, Nodes, configuration, failure};
use crate::cmd::manifests;
use crate::cmd::{Session, delete};
use crate::error::Failure;
use crate::output;

/// Tries against writers that are faster.
const TRIES: usize = 8;

/// An object that stands under its key now.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Stored {
    kind: &'static str,
    #[serde(skip_serializing_if = "String::is_empty")]
    namespace: String,
    name: String,
    node: String,
    result: &'static str,
    resource_version: String,
    /// How messages name it.
    #[serde(skip)]
    label: String,
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
    let documents = manifests::documents(&file)?;
    if let Some(value) = configuration::in_manifest(&file, &documents).map_err(wrong)? {
        let node = fleet.target("", nodes).await?;
        configuration::is_taken(fleet, &node).await?;
        let (key, label) = (NodeKeys::new(&node).config(), "config".to_owned());
        let put = Put { key, value, label, read: None, node };
        let (result, revision) = put.run(fleet).await?;
        return tell(
            session,
            items,
            put.stored(keelson_config::KUBELET_KIND, "", "config", result, revision),
        );
    }
    let wanted = objects::wanted(&documents).map_err(wrong)?;
    if wanted.is_empty() {
        return Err(wrong("no Pod, Secret, ConfigMap or KubeletConfiguration in this manifest".into()));
    }
    for object in &wanted {
        let node = fleet.target(&object.node, nodes).await?;
        let put = Put::of(object, node);
        let (result, revision) = put.run(fleet).await?;
        let (kind, namespace) = (object.kind.as_str(), &*object.namespace);
        tell(session, items, put.stored(kind, namespace, &object.name, result, revision))?;
    }
    Ok(())
}

fn tell(session: &Session, items: &mut Vec<Stored>, stored: Stored) -> Result<(), Failure> {
    if !output::is_document(session.format()) {
        let Stored { label, result, node, .. } = &stored;
        output::print(&format!("{label} {result} on {node}\n"))?;
    }
    items.push(stored);
    Ok(())
}

/// A value for a key of a node.
struct Put {
    key: String,
    value: Vec<u8>,
    /// How messages name it.
    label: String,
    /// The change that its author has read.
    read: Option<i64>,
    node: String,
}

impl Put {
    fn of(object: &Wanted, node: String) -> Self {
        Self {
            key: object.key(&node),
            value: object.value.to_string().into_bytes(),
            label: object.kind.label(&object.name),
            read: object.revision,
            node,
        }
    }

    fn stored(
        &self,
        kind: &'static str,
        namespace: &str,
        name: &str,
        result: &'static str,
        revision: i64,
    ) -> Stored {
        Stored {
            kind,
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            node: self.node.clone(),
            result,
            resource_version: revision.to_string(),
            label: self.label.clone(),
        }
    }

    /// Puts it where it stands. What another writer has changed since its author has read it is not overwritten. What came
    /// of it, and the revision.
    async fn run(&self, fleet: &Fleet) -> Result<(&'static str, i64), Failure> {
        let Self { key, value, label, node, .. } = self;
        for _ in 0..TRIES {
            let now = fleet.etcd.get(key).await.map_err(failure)?;
            let revision = now.as_ref().map(|entry| entry.mod_revision);
            if self.read.is_some() && self.read != revision {
                return Err(self.changed(revision));
            }
            if let Some(entry) = &now
                && entry.value == *value
            {
                return Ok(("unchanged", entry.mod_revision));
            }
            let expect = revision.map_or(Expect::Absent, Expect::Revision);
            let put = Operation::Put { key: key.clone(), value: value.clone(), lease: 0 };
            match fleet.etcd.write(&[(key.clone(), expect)], &[put]).await.map_err(failure)? {
                Written::Done(new) => {
                    return Ok((if revision.is_some() { "changed" } else { "created" }, new));
                }
                Written::Conflict(_) => {}
            }
        }
        Err(Failure::Answer {
            message: format!("{label} on {node} changes faster than it can be written"),
            hint: Some("find out who else writes it".into()),
        })
    }

    fn changed(&self, now: Option<i64>) -> Failure {
        let Self { label, node, .. } = self;
        let read = self.read.unwrap_or_default();
        let found = now.map_or_else(|| "it is gone".to_owned(), |now| format!("it is {now} now"));
        Failure::Answer {
            message: format!(
                "{label} on {node} has changed since it was read: resourceVersion was {read}, {found}"
            ),
            hint: Some(format!(
                "`keelson get {} -o yaml --etcd …` again and carry your change over, or leave metadata.resourceVersion out to overwrite it",
                label.replacen('/', " ", 1)
            )),
        }
    }
}
