//! `keelson get secrets --etcd` and likewise configmaps, persistentvolumes and persistentvolumeclaims: the objects under the keys
//! of the nodes.
//!
//! A table has no values of Secrets and ConfigMaps, and no status: the nodes do not report which claim is bound to which
//! PersistentVolume. A document is the object as its author wrote it, with the revision that `keelson apply` compares.

use keelson_etcd::keys::KeyKind;
use keelson_etcd::{Entry, NodeKeys, Range};
use serde_json::{Value, json};

use super::etcd_error::from_etcd_error;
use super::get::place;
use super::nodes::Fleet;
use super::objects;
use super::watch::{self, Keys, View};
use crate::args::WatchArgs;
use crate::cmd::manifests::ObjectKind;
use crate::cmd::volume_objects::{
    access_modes, bare_name_of, capacity, claim_of, class, reclaim_policy, request, volume_of,
};
use crate::error::CliError;
use crate::output;
use crate::row_tracker::Row;
use crate::session::Session;
use crate::table::Table;
use crate::watch::Printer;

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
    args: WatchArgs,
) -> Result<(), CliError> {
    let names: &[String] = &names.iter().map(|name| bare_name_of(kind, name).to_owned()).collect::<Vec<_>>();
    if args.watch && names.is_empty() {
        return follow(session, fleet, kind, names, args).await;
    }
    let mut found = Vec::new();
    for node in fleet.selected_nodes().await?.names() {
        let range = NodeKeys::new(&node).objects(kind.as_str());
        let entries = fleet.etcd.list(&range).await.map_err(from_etcd_error)?.entries;
        found.extend(selected(session, kind, names, &node, entries));
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
    if args.watch {
        return follow(session, fleet, kind, names, args).await;
    }
    if output::is_document(session.format()) {
        return documents(session, kind, names, &found);
    }
    if found.is_empty() {
        output::notice(&format!("No {plural} found on {}.", place(fleet)));
        return Ok(());
    }
    let mut table = Table::with_header(header(session, kind));
    for object in &found {
        table.row(cells(session, kind, object));
    }
    output::print(&table.render(0))
}

async fn follow(
    session: &Session,
    fleet: &Fleet,
    kind: ObjectKind,
    names: &[String],
    args: WatchArgs,
) -> Result<(), CliError> {
    let range: fn(&NodeKeys) -> Range = match kind {
        ObjectKind::PersistentVolume => |keys| keys.objects(ObjectKind::PersistentVolume.as_str()),
        ObjectKind::PersistentVolumeClaim => |keys| keys.objects(ObjectKind::PersistentVolumeClaim.as_str()),
        ObjectKind::Pod | ObjectKind::Secret | ObjectKind::ConfigMap => return Err(not_watched(kind)),
    };
    let rows = |node: &str, keys: &Keys| {
        let objects = selected(session, kind, names, node, keys.values().cloned());
        Ok(objects
            .map(|object| (format!("{}/{}", object.namespace, object.name), row(session, kind, &object)))
            .collect())
    };
    let printer = Printer::without_state(session.format(), args, header(session, kind));
    watch::follow(fleet, View { printer, range, rows, is_of_events: false }).await
}

fn not_watched(kind: ObjectKind) -> CliError {
    CliError::Usage {
        message: format!("`keelson get {}` takes no --watch", kind.plural()),
        hint: "leave --watch out".into(),
    }
}

/// An object as a watch shows it.
fn row(session: &Session, kind: ObjectKind, object: &FoundObject) -> Row {
    if output::is_document(session.format()) {
        let document = objects::to_document(&object.entry, kind, &object.namespace, &object.name);
        return Row { mark: document.to_string(), cells: Vec::new(), document };
    }
    let cells = cells(session, kind, object);
    Row { mark: cells.join("\0"), cells, document: Value::Null }
}

fn header(session: &Session, kind: ObjectKind) -> Vec<String> {
    let mut header = [&["NAME"], columns(kind), &["NODE"]].concat();
    if session.global.all_namespaces && kind.is_namespaced() {
        header.insert(0, "NAMESPACE");
    }
    header.into_iter().map(ToOwned::to_owned).collect()
}

/// The cells of [`header`].
fn cells(session: &Session, kind: ObjectKind, object: &FoundObject) -> Vec<String> {
    let mut cells = vec![object.name.clone()];
    match objects::read(&object.entry) {
        Some(value) => cells.extend(cells_of(kind, &value)),
        None => cells.extend(columns(kind).iter().map(|_| "?".to_owned())),
    }
    cells.push(object.node.clone());
    if session.global.all_namespaces && kind.is_namespaced() {
        cells.insert(0, object.namespace.clone());
    }
    cells
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

/// The selected objects among the keys of a node.
fn selected(
    session: &Session,
    kind: ObjectKind,
    names: &[String],
    node: &str,
    entries: impl IntoIterator<Item = Entry>,
) -> impl Iterator<Item = FoundObject> {
    let (keys, scope) = (NodeKeys::new(node), session.scope());
    let is_named = |name: &str| names.is_empty() || names.iter().any(|wanted| wanted == name);
    entries.into_iter().filter_map(move |entry| {
        let (namespace, name) = match keys.named(&entry.key)? {
            KeyKind::ClusterObject { name, .. } if !kind.is_namespaced() => ("", name),
            KeyKind::Object { namespace, name, .. } if kind.is_namespaced() && scope.contains(namespace) => {
                (namespace, name)
            }
            _ => return None,
        };
        let (namespace, name) = (namespace.to_owned(), name.to_owned());
        is_named(&name).then(|| FoundObject { node: node.to_owned(), namespace, name, entry })
    })
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
