//! `keelson get secrets --etcd` and likewise configmaps, persistentvolumes and persistentvolumeclaims: the objects under the keys
//! of the nodes.
//!
//! A table has no values of Secrets and ConfigMaps, and no status: the nodes do not report which claim is bound to which
//! PersistentVolume. A document is the object as its author wrote it, with the revision that `keelson apply` compares.

use keelson_etcd::keys::KeyKind;
use keelson_etcd::{Entry, NodeKeys};
use serde_json::{Value, json};

use super::etcd_error::from_etcd_error;
use super::get::place;
use super::nodes::Fleet;
use super::objects;
use crate::cmd::manifests::ObjectKind;
use crate::cmd::volume_objects::{
    access_modes, bare_name_of, capacity, claim_of, class, reclaim_policy, request, volume_of,
};
use crate::error::CliError;
use crate::output;
use crate::session::Session;
use crate::table::Table;

/// An object of a node.
struct FoundObject {
    node: String,
    namespace: String,
    name: String,
    entry: Entry,
}

/// Shows the objects of this kind in the fleet, or the named ones. No pods.
///
/// # Errors
/// A named object does not exist, or a single named object is on several nodes and is requested as a document.
pub(crate) async fn run(
    session: &Session,
    fleet: &Fleet,
    kind: ObjectKind,
    names: &[String],
) -> Result<(), CliError> {
    let names: &[String] = &names.iter().map(|name| bare_name_of(kind, name).to_owned()).collect::<Vec<_>>();
    let mut found = Vec::new();
    for node in fleet.selected_nodes().await?.names() {
        found.extend(of_node(session, fleet, kind, names, &node).await?);
    }
    let all = if kind.is_namespaced() { "-A " } else { "" };
    let plural = kind.plural();
    for name in names {
        if !found.iter().any(|object| object.name == *name) {
            return Err(CliError::NotFound {
                what: format!("there is no {} on {}", kind.label(name), place(fleet)),
                hint: format!("`keelson get {plural} {all}--etcd …` lists all {plural}"),
            });
        }
    }
    if output::is_document(session.format()) {
        return documents(session, kind, names, &found);
    }
    if found.is_empty() {
        output::notice(&format!("No {plural} found on {}.", place(fleet)));
        return Ok(());
    }
    let with_namespace = session.global.all_namespaces && kind.is_namespaced();
    let mut header = [&["NAME"], columns(kind), &["NODE"]].concat();
    if with_namespace {
        header.insert(0, "NAMESPACE");
    }
    let mut table = Table::with_header(header.into_iter().map(ToOwned::to_owned).collect());
    for object in found {
        let mut cells = vec![object.name];
        match objects::read(&object.entry) {
            Some(value) => cells.extend(cells_of(kind, &value)),
            None => cells.extend(columns(kind).iter().map(|_| "?".to_owned())),
        }
        cells.push(object.node);
        if with_namespace {
            cells.insert(0, object.namespace);
        }
        table.row(cells);
    }
    output::print(&table.render(0))
}

/// The columns between name and node.
fn columns(kind: ObjectKind) -> &'static [&'static str] {
    match kind {
        ObjectKind::Pod | ObjectKind::Secret | ObjectKind::ConfigMap => &["DATA"],
        ObjectKind::PersistentVolumeClaim => &["VOLUME", "REQUEST", "ACCESS MODES", "STORAGECLASS"],
        ObjectKind::PersistentVolume => {
            &["CAPACITY", "ACCESS MODES", "RECLAIM POLICY", "CLAIM", "STORAGECLASS"]
        }
    }
}

/// The cells of [`columns`].
fn cells_of(kind: ObjectKind, object: &Value) -> Vec<String> {
    let modes = || access_modes(object.pointer("/spec/accessModes"));
    match kind {
        ObjectKind::Pod | ObjectKind::Secret | ObjectKind::ConfigMap => {
            vec![count_keys(object).to_string()]
        }
        ObjectKind::PersistentVolumeClaim => {
            vec![volume_of(object), request(object), modes(), class(object)]
        }
        ObjectKind::PersistentVolume => {
            vec![capacity(object), modes(), reclaim_policy(object), claim_of(object), class(object)]
        }
    }
}

/// The selected objects of a node.
async fn of_node(
    session: &Session,
    fleet: &Fleet,
    kind: ObjectKind,
    names: &[String],
    node: &str,
) -> Result<Vec<FoundObject>, CliError> {
    let keys = NodeKeys::new(node);
    let entries = fleet.etcd.list(&keys.objects(kind.as_str())).await.map_err(from_etcd_error)?.entries;
    let selected = entries.into_iter().filter_map(|entry| match keys.named(&entry.key)? {
        KeyKind::ClusterObject { name, .. }
            if !kind.is_namespaced() && (names.is_empty() || names.iter().any(|n| n == name)) =>
        {
            let (namespace, name) = (String::new(), name.to_owned());
            Some(FoundObject { node: node.to_owned(), namespace, name, entry })
        }
        KeyKind::Object { namespace, name, .. }
            if kind.is_namespaced()
                && session.scope().contains(namespace)
                && (names.is_empty() || names.iter().any(|n| n == name)) =>
        {
            let (namespace, name) = (namespace.to_owned(), name.to_owned());
            Some(FoundObject { node: node.to_owned(), namespace, name, entry })
        }
        _ => None,
    });
    Ok(selected.collect())
}

/// Prints the named object, or a list that can be applied.
fn documents(
    session: &Session,
    kind: ObjectKind,
    names: &[String],
    found: &[FoundObject],
) -> Result<(), CliError> {
    if let ([name], [first, others @ ..]) = (names, found)
        && others.iter().any(|other| other.namespace == first.namespace)
    {
        let nodes: Vec<&str> = found.iter().map(|object| object.node.as_str()).collect();
        return Err(CliError::Usage {
            message: format!("{} is on several nodes: {}", kind.label(name), nodes.join(", ")),
            hint: "choose one with --node".into(),
        });
    }
    let to_document =
        |found: &FoundObject| objects::to_document(&found.entry, kind, &found.namespace, &found.name);
    let items: Vec<Value> = found.iter().map(to_document).collect();
    match (names, items.as_slice()) {
        ([_], [one]) => output::print_document(session.format(), one),
        _ => output::print_document(
            session.format(),
            &json!({"apiVersion": "v1", "kind": "List", "metadata": {}, "items": items}),
        ),
    }
}

/// The number of keys in the data of an object.
fn count_keys(object: &Value) -> usize {
    let of = |field: &str| object[field].as_object().into_iter().flat_map(|map| map.keys());
    let all: std::collections::BTreeSet<&String> =
        ["data", "binaryData", "stringData"].into_iter().flat_map(of).collect();
    all.len()
}
