//! `keelson apply --etcd`.

use std::path::{Path, PathBuf};

use keelson_etcd::{Entry, Expect, NodeKeys, Operation, Written};
use serde::Serialize;
use serde_json::json;

use super::configuration;
use super::etcd_error::from_etcd_error;
use super::nodes::{Fleet, Nodes};
use super::objects::{self, DesiredObject};
use crate::cmd::manifests::{self, KINDS};
use crate::cmd::{apply, delete};
use crate::error::CliError;
use crate::output;
use crate::session::Session;

/// A stored object.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct StoredObject {
    kind: &'static str,
    #[serde(skip_serializing_if = "String::is_empty")]
    namespace: String,
    name: String,
    node: String,
    result: &'static str,
    resource_version: String,
    /// The name in messages.
    #[serde(skip)]
    label: String,
}

/// Stores each file; a refused file does not stop the others.
pub(crate) async fn run(session: &Session, fleet: &Fleet, files: &[PathBuf]) -> Result<(), CliError> {
    apply::without_namespace(session)?;
    let paths = manifests::paths(files)?;
    let (mut items, mut errors) = (Vec::new(), Vec::new());
    let mut nodes = None;
    for path in &paths {
        match store(fleet, path, &mut nodes, session, &mut items).await {
            Ok(()) => {}
            Err(error) if error.is_unreachable() => return Err(error),
            Err(error) => errors.push(error),
        }
    }
    if output::is_document(session.format()) {
        output::print_document(session.format(), &json!({"items": items}))?;
    }
    delete::all_or_some(session, errors, paths.len())
}

async fn store(
    fleet: &Fleet,
    path: &Path,
    nodes: &mut Option<Nodes>,
    session: &Session,
    items: &mut Vec<StoredObject>,
) -> Result<(), CliError> {
    let file = manifests::read(path)?;
    let invalid = |reason: String| CliError::Manifest { path: file.path.clone(), reason };
    let documents = manifests::documents(&file)?;
    if let Some(assigned) = configuration::in_manifest(&file, &documents).map_err(invalid)? {
        let node = fleet.target_node("", nodes).await?;
        configuration::check_accepted(fleet, &node).await?;
        let (key, label) = (NodeKeys::new(&node).config(), "config".to_owned());
        let request = PutRequest { key, value: assigned.text, label, read: assigned.read, node };
        let (result, revision) = request.run(fleet).await?;
        return report(
            session,
            items,
            request.stored(keelson_config::KUBELET_KIND, "", "config", result, revision),
        );
    }
    let objects = objects::desired_objects(&documents).map_err(invalid)?;
    if objects.is_empty() {
        return Err(invalid(format!("no {KINDS}, and no KubeletConfiguration in this manifest")));
    }
    for object in &objects {
        if !object.ignored.is_empty() {
            output::notice(&format!(
                "warning: {}: {}{}: these fields are not stored, because only a control plane may write them: {}",
                file.path.display(),
                if object.namespace.is_empty() { String::new() } else { format!("{}/", object.namespace) },
                object.name,
                object.ignored.join(", ")
            ));
        }
        let node = fleet.target_node(&object.node, nodes).await?;
        let request = PutRequest::of(object, node);
        let (result, revision) = request.run(fleet).await?;
        let (kind, namespace) = (object.kind.as_str(), &*object.namespace);
        report(session, items, request.stored(kind, namespace, &object.name, result, revision))?;
    }
    Ok(())
}

fn report(session: &Session, items: &mut Vec<StoredObject>, stored: StoredObject) -> Result<(), CliError> {
    if !output::is_document(session.format()) {
        let StoredObject { label, result, node, .. } = &stored;
        output::print(&format!("{label} {result} on {node}\n"))?;
    }
    items.push(stored);
    Ok(())
}

/// A value to write to a key of a node.
struct PutRequest {
    key: String,
    value: Vec<u8>,
    /// The name in messages.
    label: String,
    /// The revision that the author of the value has read.
    read: Option<i64>,
    node: String,
}

impl PutRequest {
    fn of(object: &DesiredObject, node: String) -> Self {
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
    ) -> StoredObject {
        StoredObject {
            kind,
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            node: self.node.clone(),
            result,
            resource_version: revision.to_string(),
            label: self.label.clone(),
        }
    }

    /// Writes the value. A change by another writer since the author read the object, or since this command did, is not
    /// overwritten. Returns the result and the revision.
    async fn run(&self, fleet: &Fleet) -> Result<(&'static str, i64), CliError> {
        let now = fleet.etcd.get(&self.key).await.map_err(from_etcd_error)?;
        self.replace(fleet, now).await
    }

    /// Replaces the entry `now` that was read. It is tried only once: if the answer is lost, the write may have succeeded and
    /// have been overwritten by another writer, whose change a second try would overwrite.
    async fn replace(&self, fleet: &Fleet, now: Option<Entry>) -> Result<(&'static str, i64), CliError> {
        let Self { key, value, .. } = self;
        let revision = now.as_ref().map(|entry| entry.mod_revision);
        if self.read.is_some() && self.read != revision {
            return Err(self.conflict_error(revision));
        }
        if let Some(entry) = now.filter(|entry| entry.value == *value) {
            return Ok(("unchanged", entry.mod_revision));
        }
        let expect = revision.map_or(Expect::Absent, Expect::Revision);
        let request = Operation::Put { key: key.clone(), value: value.clone(), lease: 0 };
        match fleet.etcd.write(&[(key.clone(), expect)], &[request]).await.map_err(from_etcd_error)? {
            Written::Done(new) => Ok((if revision.is_some() { "changed" } else { "created" }, new)),
            Written::Conflict(found) => match found.into_iter().next().flatten() {
                Some(entry) if entry.value == *value => Ok(("unchanged", entry.mod_revision)),
                found => Err(self.conflict_error(found.map(|entry| entry.mod_revision))),
            },
        }
    }

    fn conflict_error(&self, now: Option<i64>) -> CliError {
        let Self { label, node, .. } = self;
        let found = now.map_or_else(|| "it is gone".to_owned(), |now| format!("it is {now} now"));
        let (message, hint) = match (self.read, label.split_once('/')) {
            (None, _) => (
                format!("{label} on {node} was changed by another writer during the apply"),
                "check the change, then apply again".to_owned(),
            ),
            (Some(read), Some((kind, name))) => (
                format!(
                    "{label} on {node} has changed since it was read: resourceVersion was {read}, {found}"
                ),
                format!(
                    "`keelson get {kind} {name} -o yaml --etcd …` again and carry your change over, or leave \
                     metadata.resourceVersion out to overwrite it"
                ),
            ),
            (Some(read), None) => (
                format!("{label} on {node} has changed since it was read: its revision was {read}, {found}"),
                format!(
                    "`keelson get {label} --etcd …` again and carry your change over, or leave the line \
                     \"{}\" out to overwrite it",
                    configuration::REVISION_PREFIX.trim_end()
                ),
            ),
        };
        CliError::Failed { message, hint: Some(hint) }
    }
}

#[cfg(test)]
mod tests {
    use keelson_config::Etcd as Settings;
    use keelson_etcd::Etcd;
    use keelson_testkit::{EtcdCluster, Scratch};

    use super::*;

    #[tokio::test]
    async fn apply_does_not_overwrite_a_change_made_since_its_read() {
        let scratch = Scratch::new().unwrap();
        let cluster = EtcdCluster::start(&scratch.path().join("e"), 1).unwrap();
        let fleet = Fleet { etcd: Etcd::new(Settings::plain(cluster.endpoints())), node: None };
        let request = |value: &str| PutRequest {
            key: NodeKeys::new("n1").pod("default", "web"),
            value: value.into(),
            label: "pod/web".into(),
            read: None,
            node: "n1".into(),
        };
        let now = async || fleet.etcd.get(&request("").key).await.unwrap();
        let mine = request("mine");
        for existing in [None, Some("first")] {
            if let Some(first) = existing {
                request(first).run(&fleet).await.unwrap();
            }
            let read = now().await;
            // The write succeeds, but its answer is lost; then another writer reads and replaces the value.
            mine.replace(&fleet, read.clone()).await.unwrap();
            let (result, theirs) = request("theirs").run(&fleet).await.unwrap();
            assert_eq!(result, "changed");
            let error = mine.replace(&fleet, read.clone()).await.unwrap_err();
            assert_eq!(error.to_string(), "pod/web on n1 was changed by another writer during the apply");
            assert_eq!(error.hint().unwrap(), "check the change, then apply again");
            let entry = now().await.unwrap();
            assert_eq!((entry.value.as_slice(), entry.mod_revision), (&b"theirs"[..], theirs));
            // Writing the value that is already there is no conflict.
            let (result, revision) = request("theirs").replace(&fleet, read).await.unwrap();
            assert_eq!((result, revision), ("unchanged", theirs));
        }
    }
}
