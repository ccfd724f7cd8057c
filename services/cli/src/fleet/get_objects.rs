//! `keelson get secrets --etcd` and `keelson get configmaps --etcd`: what stands under the keys of the nodes.
//!
//! A table has no values. A document is the object as its owner wants it, with the revision that `keelson apply` compares.

use keelson_etcd::keys::Named;
use keelson_etcd::{Entry, NodeKeys, Range};
use serde_json::{Value, json};

use super::get::place;
use super::{Fleet, failure, objects};
use crate::cmd::Session;
use crate::cmd::manifests::ObjectKind;
use crate::error::Failure;
use crate::output;
use crate::table::Table;

/// An object of a node.
struct Found {
    node: String,
    namespace: String,
    name: String,
    entry: Entry,
}

/// Shows the Secrets or ConfigMaps of the fleet, or those that are named.
///
/// # Errors
/// One that is named is not there; or it is on several nodes, and a document of it would not say whose it is.
pub(crate) async fn run(
    session: &Session,
    fleet: &Fleet,
    kind: ObjectKind,
    names: &[String],
) -> Result<(), Failure> {
    let mut found = Vec::new();
    for node in fleet.chosen().await?.names() {
        found.extend(of_node(session, fleet, kind, names, &node).await?);
    }
    let what = kind.as_str().to_lowercase();
    for name in names {
        if !found.iter().any(|object| object.name == *name) {
            return Err(Failure::NotFound {
                what: format!("there is no {} on {}", kind.label(name), place(fleet)),
                hint: format!("`keelson get {what}s -A --etcd …` lists all"),
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
        let data =
            objects::read(&object.entry).map_or_else(|| "?".to_owned(), |value| keys(&value).to_string());
        let mut cells = vec![object.name, data, object.node];
        if session.global.all_namespaces {
            cells.insert(0, object.namespace);
        }
        table.row(cells);
    }
    output::print(&table.render(0))
}

/// Those of a node that are meant.
async fn of_node(
    session: &Session,
    fleet: &Fleet,
    kind: ObjectKind,
    names: &[String],
    node: &str,
) -> Result<Vec<Found>, Failure> {
    let keys = NodeKeys::new(node);
    let range = Range::prefix(&format!("{}objects/{}/", keys.prefix(), kind.as_str()));
    let entries = fleet.etcd.list(&range).await.map_err(failure)?.entries;
    let meant = entries.into_iter().filter_map(|entry| match keys.named(&entry.key)? {
        Named::Object { namespace, name, .. }
            if session.scope().holds(namespace) && (names.is_empty() || names.iter().any(|n| n == name)) =>
        {
            let (namespace, name) = (namespace.to_owned(), name.to_owned());
            Some(Found { node: node.to_owned(), namespace, name, entry })
        }
        _ => None,
    });
    Ok(meant.collect())
}

/// The one that is named, or a list that can be applied.
fn documents(session: &Session, kind: ObjectKind, names: &[String], found: &[Found]) -> Result<(), Failure> {
    if let ([name], [first, others @ ..]) = (names, found)
        && others.iter().any(|other| other.namespace == first.namespace)
    {
        let nodes: Vec<&str> = found.iter().map(|object| object.node.as_str()).collect();
        return Err(Failure::Usage {
            message: format!("{} is on several nodes: {}", kind.label(name), nodes.join(", ")),
            hint: "--node says which is meant".into(),
        });
    }
    let shown = |found: &Found| objects::shown(&found.entry, kind, &found.namespace, &found.name);
    let items: Vec<Value> = found.iter().map(shown).collect();
    match (names, items.as_slice()) {
        ([_], [one]) => output::print_document(session.format(), one),
        _ => output::print_document(
            session.format(),
            &json!({"apiVersion": "v1", "kind": "List", "metadata": {}, "items": items}),
        ),
    }
}

/// How many keys with values an object has.
fn keys(object: &Value) -> usize {
    let of = |field: &str| object[field].as_object().into_iter().flat_map(|map| map.keys());
    let all: std::collections::BTreeSet<&String> =
        ["data", "binaryData", "stringData"].into_iter().flat_map(of).collect();
    all.len()
}
