//! `keelson apply --etcd`.

use std::path::{Path, PathBuf};

use keelson_etcd::{Entry, Expect, NodeKeys, Operation, Written};
use serde::Serialize;
use serde_json::json;

use super::objects::{self, Wanted};
use super::{Fleet, Nodes, configuration, failure};
use crate::cmd::manifests;
use crate::cmd::{Session, apply, delete};
use crate::error::Failure;
use crate::output;

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
    apply::without_namespace(session)?;
    let paths = manifests::paths(files)?;
    let (mut items, mut failures) = (Vec::new(), Vec::new());
    let mut nodes = None;
    for path in &paths {
        match store(fleet, path, &mut nodes, session, &mut items).await {
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

async fn store(
    fleet: &Fleet,
    path: &Path,
    nodes: &mut Option<Nodes>,
    session: &Session,
    items: &mut Vec<Stored>,
) -> Result<(), Failure> {
    let file = manifests::read(path)?;
    let wrong = |reason: String| Failure::Manifest { path: file.path.clone(), reason };
    let documents = manifests::documents(&file)?;
    if let Some(assigned) = configuration::in_manifest(&file, &documents).map_err(wrong)? {
        let node = fleet.target("", nodes).await?;
        configuration::is_taken(fleet, &node).await?;
        let (key, label) = (NodeKeys::new(&node).config(), "config".to_owned());
        let put = Put { key, value: assigned.text, label, read: assigned.read, node };
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
        if !object.ignored.is_empty() {
            output::notice(&format!(
                "warning: {}: {}/{}: only a control plane writes these fields, and they are not stored: {}",
                file.path.display(),
                object.namespace,
                object.name,
                object.ignored.join(", ")
            ));
        }
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

    /// Puts it where it stands. What another writer has changed since its author has read it, or since this command has, is
    /// not overwritten. What came of it, and the revision.
    async fn run(&self, fleet: &Fleet) -> Result<(&'static str, i64), Failure> {
        let now = fleet.etcd.get(&self.key).await.map_err(failure)?;
        self.over(fleet, now).await
    }

    /// Puts it over what has been read. It is tried once: after an answer that was lost, a try may have been made and
    /// overwritten by somebody who has read it, and would be put over what he wrote.
    async fn over(&self, fleet: &Fleet, now: Option<Entry>) -> Result<(&'static str, i64), Failure> {
        let Self { key, value, .. } = self;
        let revision = now.as_ref().map(|entry| entry.mod_revision);
        if self.read.is_some() && self.read != revision {
            return Err(self.changed(revision));
        }
        if let Some(entry) = now.filter(|entry| entry.value == *value) {
            return Ok(("unchanged", entry.mod_revision));
        }
        let expect = revision.map_or(Expect::Absent, Expect::Revision);
        let put = Operation::Put { key: key.clone(), value: value.clone(), lease: 0 };
        match fleet.etcd.write(&[(key.clone(), expect)], &[put]).await.map_err(failure)? {
            Written::Done(new) => Ok((if revision.is_some() { "changed" } else { "created" }, new)),
            Written::Conflict(found) => match found.into_iter().next().flatten() {
                Some(entry) if entry.value == *value => Ok(("unchanged", entry.mod_revision)),
                found => Err(self.changed(found.map(|entry| entry.mod_revision))),
            },
        }
    }

    fn changed(&self, now: Option<i64>) -> Failure {
        let Self { label, node, .. } = self;
        let found = now.map_or_else(|| "it is gone".to_owned(), |now| format!("it is {now} now"));
        let (message, hint) = match (self.read, label.split_once('/')) {
            (None, _) => (
                format!("{label} on {node} was changed by somebody else while it was applied"),
                "look at it, then apply again".to_owned(),
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
                    configuration::REVISION.trim_end()
                ),
            ),
        };
        Failure::Answer { message, hint: Some(hint) }
    }
}

#[cfg(test)]
mod tests {
    use keelson_config::Etcd as Settings;
    use keelson_etcd::Etcd;
    use keelson_testkit::{EtcdCluster, Scratch};

    use super::*;

    #[tokio::test]
    async fn what_somebody_has_written_since_it_was_read_is_not_overwritten_by_a_second_try() {
        let scratch = Scratch::new().unwrap();
        let cluster = EtcdCluster::start(&scratch.path().join("e"), 1).unwrap();
        let fleet = Fleet { etcd: Etcd::new(Settings::plain(cluster.endpoints())), node: None };
        let put = |value: &str| Put {
            key: NodeKeys::new("n1").pod("default", "web"),
            value: value.into(),
            label: "pod/web".into(),
            read: None,
            node: "n1".into(),
        };
        let now = async || fleet.etcd.get(&put("").key).await.unwrap();
        let mine = put("mine");
        for seen in [None, Some("first")] {
            if let Some(first) = seen {
                put(first).run(&fleet).await.unwrap();
            }
            let read = now().await;
            // Made, but its answer was lost; then somebody reads it and writes over it.
            mine.over(&fleet, read.clone()).await.unwrap();
            let (result, theirs) = put("theirs").run(&fleet).await.unwrap();
            assert_eq!(result, "changed");
            let failure = mine.over(&fleet, read.clone()).await.unwrap_err();
            assert_eq!(
                failure.to_string(),
                "pod/web on n1 was changed by somebody else while it was applied"
            );
            assert_eq!(failure.hint().unwrap(), "look at it, then apply again");
            let entry = now().await.unwrap();
            assert_eq!((entry.value.as_slice(), entry.mod_revision), (&b"theirs"[..], theirs));
            // Who wrote the same has done no harm.
            let (result, revision) = put("theirs").over(&fleet, read).await.unwrap();
            assert_eq!((result, revision), ("unchanged", theirs));
        }
    }
}
