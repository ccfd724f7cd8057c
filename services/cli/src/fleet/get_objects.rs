//! `keelson get secrets --etcd` and `keelson get configmaps --etcd`: the objects under the keys of the nodes.
//!
//! A table has no values. A document is the object as its author wrote it, with the revision that `keelson apply` compares.

use keelson_etcd::keys::KeyKind;
use keelson_etcd::{Entry, NodeKeys, Range};
use serde_json::{Value, json};

use super::etcd_error::from_etcd_error;
use super::get::place;
use super::nodes::Fleet;
use super::objects;
use crate::cmd::manifests::ObjectKind;
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

/// Shows the Secrets or ConfigMaps of the fleet, or the named ones.
///
/// # Errors
/// A named object does not exist, or a single named object is on several nodes and is requested as a document.
pub(crate) async fn run(
    session: &Session,
    fleet: &Fleet,
    kind: ObjectKind,
    names: &[String],
) -> Result<(), CliError> {
    let mut found = Vec::new();
    for node in fleet.selected_nodes().await?.names() {
        found.extend(of_node(session, fleet, kind, names, &node).await?);
    }
    let what = kind.as_str().to_lowercase();
    for name in names {
        if !found.iter().any(|object| object.name == *name) {
            return Err(CliError::NotFound {
                what: format!("there is no {} on {}", kind.label(name), place(fleet)),
                hint: format!("`keelson get {what}s -A --etcd …` lists all {what}s"),
            });
        }
    }
    if output::is_document(session.format()) {
        return documents(session, kind, names, &found);
    }
    if found.is_empty() {
        output::notice(&format!("No {what}s found on {}.", place(fleet)));
        return Ok(());
    }
    let mut header = vec!["NAME", "DATA", "NODE"];
    if session.global.all_namespaces {
        header.insert(0, "NAMESPACE");
    }
    let mut table = Table::with_header(header.into_iter().map(ToOwned::to_owned).collect());
    for object in found {
        let data = objects::read(&object.entry)
            .map_or_else(|| "?".to_owned(), |value| count_keys(&value).to_string());
        let mut cells = vec![object.name, data, object.node];
        if session.global.all_namespaces {
            cells.insert(0, object.namespace);
        }
        table.row(cells);
    }
    output::print(&table.render(0))
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
    let range = Range::prefix(&format!("{}objects/{}/", keys.prefix(), kind.as_str()));
    let entries = fleet.etcd.list(&range).await.map_err(from_etcd_error)?.entries;
    let selected = entries.into_iter().filter_map(|entry| match keys.named(&entry.key)? {
        KeyKind::Object { namespace, name, .. }
            if session.scope().contains(namespace)
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
