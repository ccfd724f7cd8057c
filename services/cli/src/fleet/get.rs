//! `keelson get pods --etcd` and `keelson get node --etcd`.

use std::collections::BTreeMap;

use keelson_etcd::keys::Named;
use keelson_etcd::{Entry, NodeKeys, Range};
use keelson_kube_model::{Node, Pod};
use keelson_proto::keelson::pod_sync::v1::PodDocument;
use serde_json::{Value, json};

use super::{Fleet, Nodes, configuration, failure, objects};
use crate::cmd::{Session, get_node};
use crate::error::Failure;
use crate::human;
use crate::output;
use crate::pods::{PodEntry, bare_name};
use crate::status::summarise;
use crate::table::Table;

/// A pod that is wanted or is still there.
struct Found {
    node: String,
    namespace: String,
    name: String,
    /// As it is wanted; `None` for one that is on its way out.
    wanted: Option<Entry>,
    /// As its node tells it; `None` before it does.
    told: Option<Entry>,
}

impl Found {
    /// As it is; as it is wanted where its node has not told of it yet.
    fn json(&self) -> Value {
        let entry = self.told.as_ref().or(self.wanted.as_ref());
        let value = entry.and_then(|entry| serde_json::from_slice(&entry.value).ok()).unwrap_or_default();
        match &self.wanted {
            Some(wanted) => objects::shown(wanted, value),
            None => value,
        }
    }
}

/// Shows the pods of the fleet, or those that are named.
pub(crate) async fn pods(session: &Session, fleet: &Fleet, names: &[String]) -> Result<(), Failure> {
    let nodes = fleet.chosen().await?;
    let scope = session.scope();
    let mut found = Vec::new();
    for node in nodes.names() {
        found.extend(of_node(fleet, &node).await?.into_iter().filter(|pod| scope.holds(&pod.namespace)));
    }
    for name in names.iter().map(|name| bare_name(name)) {
        if !found.iter().any(|pod| pod.name == name) {
            return Err(Failure::NotFound {
                what: format!("there is no pod {name:?} on {}", place(fleet)),
                hint: "`keelson get pods -A --etcd …` lists all pods".into(),
            });
        }
    }
    found.retain(|pod| names.is_empty() || names.iter().any(|name| bare_name(name) == pod.name));
    if output::is_document(session.format()) {
        let items: Vec<Value> = found.iter().map(Found::json).collect();
        if let ([one], 1) = (items.as_slice(), names.len()) {
            return output::print_document(session.format(), one);
        }
        let list = json!({"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": items});
        return output::print_document(session.format(), &list);
    }
    if found.is_empty() {
        output::notice(&format!("No pods found on {}.", place(fleet)));
        return Ok(());
    }
    output::print(&table(session, &nodes, &found).render(0))
}

fn place(fleet: &Fleet) -> String {
    fleet.node.as_ref().map_or_else(|| "any node".into(), |node| format!("the node {node}"))
}

async fn of_node(fleet: &Fleet, node: &str) -> Result<Vec<Found>, Failure> {
    let keys = NodeKeys::new(node);
    let wanted =
        fleet.etcd.list(&Range::prefix(&format!("{}pods/", keys.prefix()))).await.map_err(failure)?;
    let told = fleet.etcd.list(&keys.pod_statuses()).await.map_err(failure)?;
    let mut pods: BTreeMap<(String, String), Found> = BTreeMap::new();
    for entry in wanted.entries.into_iter().chain(told.entries) {
        let (namespace, name, is_wanted) = match keys.named(&entry.key) {
            Some(Named::Pod { namespace, name }) => (namespace.to_owned(), name.to_owned(), true),
            Some(Named::PodStatus { namespace, name }) => (namespace.to_owned(), name.to_owned(), false),
            _ => continue,
        };
        let found = pods.entry((namespace.clone(), name.clone())).or_insert_with(|| Found {
            node: node.to_owned(),
            namespace,
            name,
            wanted: None,
            told: None,
        });
        *(if is_wanted { &mut found.wanted } else { &mut found.told }) = Some(entry);
    }
    Ok(pods.into_values().collect())
}

fn table(session: &Session, nodes: &Nodes, found: &[Found]) -> Table {
    let mut header = vec!["NAME", "READY", "STATUS", "RESTARTS", "AGE", "NODE"];
    if session.global.all_namespaces {
        header.insert(0, "NAMESPACE");
    }
    let mut table = Table::with_header(header.into_iter().map(ToOwned::to_owned).collect());
    for pod in found {
        let json = pod.json();
        let typed: Option<Pod> = serde_json::from_value(json.clone()).ok();
        let mut cells = Vec::new();
        if session.global.all_namespaces {
            cells.push(pod.namespace.clone());
        }
        cells.push(pod.name.clone());
        match &typed {
            Some(typed) => {
                let summary = summarise(typed);
                cells.push(format!("{}/{}", summary.ready, summary.total));
                cells.push(if nodes.is_alive(&pod.node) { summary.status.clone() } else { "Unknown".into() });
                cells.push(summary.restarts_text(session.now));
            }
            None => cells.extend(["?/?".into(), "Unreadable".into(), "?".into()]),
        }
        let document =
            PodDocument { pod_json: json.to_string().into_bytes().into(), ..PodDocument::default() };
        cells.push(human::since(PodEntry::new(document).created(), session.now));
        cells.push(pod.node.clone());
        table.row(cells);
    }
    table
}

/// Shows the nodes, or the one that is named.
pub(crate) async fn nodes(session: &Session, fleet: &Fleet, name: Option<&str>) -> Result<(), Failure> {
    let nodes = fleet.chosen().await?;
    if let Some(name) = name
        && !nodes.alive.contains_key(name)
    {
        return Err(Failure::NotFound {
            what: format!("there is no node {name:?} in this etcd"),
            hint: nodes.meant(name),
        });
    }
    let mut found = Vec::new();
    for node in nodes.names().into_iter().filter(|node| name.is_none_or(|name| name == node)) {
        let entry = fleet.etcd.get(&NodeKeys::new(&node).node()).await.map_err(failure)?;
        let json = entry.and_then(|entry| serde_json::from_slice::<Value>(&entry.value).ok());
        let unknown = || json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}});
        found.push((nodes.is_alive(&node), json.unwrap_or_else(unknown)));
    }
    if output::is_document(session.format()) {
        let items: Vec<Value> = found.into_iter().map(|(_, json)| json).collect();
        if let ([one], Some(_)) = (items.as_slice(), name) {
            return output::print_document(session.format(), one);
        }
        let list = json!({"apiVersion": "v1", "kind": "NodeList", "metadata": {}, "items": items});
        return output::print_document(session.format(), &list);
    }
    if found.is_empty() {
        output::notice("No node has a key in this etcd.");
        return Ok(());
    }
    let mut header = vec!["NAME", "STATUS", "ROLES", "AGE", "VERSION"];
    if session.is_wide() {
        header.push("CONFIG");
    }
    let mut table = Table::with_header(header.into_iter().map(ToOwned::to_owned).collect());
    for (alive, json) in found {
        let node: Node = get_node::read(json)?;
        let created = human::nanos_of(node.metadata.creation_timestamp.as_deref());
        let version = &node.status.node_info.kubelet_version;
        let mut cells = vec![
            node.metadata.name.clone(),
            if alive { get_node::status(&node) } else { "NotReady".into() },
            get_node::roles(&node),
            human::since(created, session.now),
            if version.is_empty() { "<none>".into() } else { version.clone() },
        ];
        if session.is_wide() {
            cells.push(configuration::state(fleet, &node.metadata.name).await?);
        }
        table.row(cells);
    }
    output::print(&table.render(0))
}
