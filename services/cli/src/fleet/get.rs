//! `keelson get pods --etcd` and `keelson get node --etcd`, once or as a watch.

use std::collections::BTreeMap;

use keelson_etcd::keys::KeyKind;
use keelson_etcd::{Entry, NodeKeys, Range};
use keelson_kube_model::{Node, Pod};
use keelson_proto::keelson::pod_sync::v1::PodDocument;
use serde_json::{Value, json};

use super::etcd_error::from_etcd_error;
use super::nodes::Fleet;
use super::watch::{self, Keys, View};
use super::{configuration, objects};
use crate::args::WatchArgs;
use crate::cmd::get_node;
use crate::cmd::manifests::ObjectKind;
use crate::cmd::volume_objects::uses_claim;
use crate::error::CliError;
use crate::human;
use crate::output;
use crate::pods::{PodEntry, bare_name};
use crate::row_tracker::Row;
use crate::session::Session;
use crate::status::summarise;
use crate::table::Table;
use crate::watch::Printer;

/// A pod of a node, with its desired and its reported state.
pub(super) struct FleetPod {
    node: String,
    pub(super) namespace: String,
    pub(super) name: String,
    /// The desired pod; `None` for one that is terminating.
    desired: Option<Entry>,
    /// The pod as its node reports it; `None` before the first report.
    reported: Option<Entry>,
}

impl FleetPod {
    /// Whether the pod has a key, and is not only reported while it terminates.
    pub(super) fn is_desired(&self) -> bool {
        self.desired.is_some()
    }

    /// Whether the desired or the reported pod has a volume of this claim of its namespace.
    pub(super) fn uses_claim(&self, claim: &str) -> bool {
        let values = [&self.desired, &self.reported].into_iter().flatten().filter_map(objects::read);
        let mut pods = values.filter_map(|value| serde_json::from_value::<Pod>(value).ok());
        pods.any(|pod| uses_claim(&pod, claim))
    }

    /// The reported pod, or the desired one before the first report.
    fn reported_or_desired(&self) -> Value {
        self.reported.as_ref().or(self.desired.as_ref()).and_then(objects::read).unwrap_or_default()
    }

    /// The desired pod with its revision and the reported status. Applying the document again reverts nothing that
    /// the node has not done yet.
    fn document(&self) -> Value {
        let reported = self.reported.as_ref().and_then(objects::read);
        let Some(desired) = &self.desired else { return reported.unwrap_or_default() };
        let mut pod = objects::to_document(desired, ObjectKind::Pod, &self.namespace, &self.name);
        if let Some(spec) = pod["spec"].as_object_mut() {
            spec.entry("nodeName").or_insert_with(|| json!(self.node));
        }
        if let Some(pod) = pod.as_object_mut() {
            pod.remove("status");
        }
        let Some(mut reported) = reported else { return pod };
        for field in ["uid", "creationTimestamp"] {
            if let Some(value) = reported.pointer(&format!("/metadata/{field}")) {
                pod["metadata"][field] = value.clone();
            }
        }
        if reported["status"].is_object() {
            pod["status"] = reported["status"].take();
        }
        pod
    }
}

/// Shows the pods of the fleet, or the named ones.
pub(crate) async fn pods(
    session: &Session,
    fleet: &Fleet,
    names: &[String],
    args: WatchArgs,
) -> Result<(), CliError> {
    if args.watch && names.is_empty() {
        return follow_pods(session, fleet, names, args).await;
    }
    let nodes = fleet.selected_nodes().await?;
    let mut found = Vec::new();
    for node in nodes.names() {
        found.extend(of_node(fleet, &node).await?.into_iter().filter(|pod| is_selected(session, names, pod)));
    }
    for name in names.iter().map(|name| bare_name(name)) {
        if !found.iter().any(|pod| pod.name == name) {
            return Err(CliError::NotFound {
                what: format!("there is no pod {name:?} on {}", place(fleet)),
                hint: "`keelson get pods -A --etcd …` lists all pods".into(),
            });
        }
    }
    if args.watch {
        return follow_pods(session, fleet, names, args).await;
    }
    if output::is_document(session.format()) {
        let items: Vec<Value> = found.iter().map(FleetPod::document).collect();
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
    let mut table = Table::with_header(pod_header(session));
    for pod in &found {
        table.row(pod_cells(session, pod, nodes.is_alive(&pod.node), session.now));
    }
    output::print(&table.render(0))
}

/// Whether a pod is in the namespace of the command, and is one of the named ones.
fn is_selected(session: &Session, names: &[String], pod: &FleetPod) -> bool {
    session.scope().contains(&pod.namespace)
        && (names.is_empty() || names.iter().any(|name| bare_name(name) == pod.name))
}

/// The selected nodes, for messages.
pub(super) fn place(fleet: &Fleet) -> String {
    fleet.node.as_ref().map_or_else(|| "any node".into(), |node| format!("the node {node}"))
}

/// The pods of a node.
pub(super) async fn of_node(fleet: &Fleet, node: &str) -> Result<Vec<FleetPod>, CliError> {
    let keys = NodeKeys::new(node);
    let desired =
        fleet.etcd.list(&Range::prefix(&format!("{}pods/", keys.prefix()))).await.map_err(from_etcd_error)?;
    let reported = fleet.etcd.list(&keys.pod_statuses()).await.map_err(from_etcd_error)?;
    Ok(pods_of(node, desired.entries.into_iter().chain(reported.entries)))
}

/// The pods of a node with their desired and reported states.
fn pods_of(node: &str, entries: impl Iterator<Item = Entry>) -> Vec<FleetPod> {
    let keys = NodeKeys::new(node);
    let mut pods: BTreeMap<(String, String), FleetPod> = BTreeMap::new();
    for entry in entries {
        let (namespace, name, is_desired) = match keys.named(&entry.key) {
            Some(KeyKind::Pod { namespace, name }) => (namespace.to_owned(), name.to_owned(), true),
            Some(KeyKind::PodStatus { namespace, name }) => (namespace.to_owned(), name.to_owned(), false),
            _ => continue,
        };
        let found = pods.entry((namespace.clone(), name.clone())).or_insert_with(|| FleetPod {
            node: node.to_owned(),
            namespace,
            name,
            desired: None,
            reported: None,
        });
        *(if is_desired { &mut found.desired } else { &mut found.reported }) = Some(entry);
    }
    pods.into_values().collect()
}

fn pod_header(session: &Session) -> Vec<String> {
    let mut header = vec!["NAME", "READY", "STATUS", "RESTARTS", "AGE", "NODE"];
    if session.global.all_namespaces {
        header.insert(0, "NAMESPACE");
    }
    header.into_iter().map(ToOwned::to_owned).collect()
}

fn pod_cells(session: &Session, pod: &FleetPod, is_alive: bool, now: i64) -> Vec<String> {
    let json = pod.reported_or_desired();
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
            cells.push(if is_alive { summary.status.clone() } else { "Unknown".into() });
            cells.push(summary.restarts_text(now));
        }
        None => cells.extend(["?/?".into(), "Unreadable".into(), "?".into()]),
    }
    let document = PodDocument { pod_json: json.to_string().into_bytes().into(), ..PodDocument::default() };
    cells.push(human::since(PodEntry::new(document).created(), now));
    cells.push(pod.node.clone());
    cells
}

async fn follow_pods(
    session: &Session,
    fleet: &Fleet,
    names: &[String],
    args: WatchArgs,
) -> Result<(), CliError> {
    let rows = |node: &str, keys: &Keys| {
        let is_alive = keys.contains_key(&NodeKeys::new(node).lease());
        let pods = pods_of(node, keys.values().cloned());
        let selected = pods.iter().filter(|pod| is_selected(session, names, pod));
        Ok(selected
            .map(|pod| (format!("{}/{}", pod.namespace, pod.name), pod_row(session, pod, is_alive)))
            .collect())
    };
    let printer = Printer::new(session.format(), args, pod_header(session), "STATUS");
    watch::follow(fleet, View { printer, range: NodeKeys::desired_and_status, rows, is_of_events: false })
        .await
}

/// A pod as a watch shows it.
fn pod_row(session: &Session, pod: &FleetPod, is_alive: bool) -> Row {
    if output::is_document(session.format()) {
        let document = pod.document();
        return Row { mark: document.to_string(), cells: Vec::new(), document };
    }
    // At time 0 all ages are equal.
    let mark = pod_cells(session, pod, is_alive, 0).join("\0");
    let now = keelson_service_kit::now_unix_nanos();
    Row { mark, cells: pod_cells(session, pod, is_alive, now), document: Value::Null }
}

/// Shows the nodes, or the named one.
pub(crate) async fn nodes(
    session: &Session,
    fleet: &Fleet,
    name: Option<&str>,
    args: WatchArgs,
) -> Result<(), CliError> {
    let nodes = fleet.selected_nodes().await?;
    if let Some(node) = &fleet.node {
        let keys = Range::prefix(NodeKeys::new(node).prefix());
        if fleet.etcd.keys(&keys).await.map_err(from_etcd_error)?.is_empty() {
            return Err(CliError::NotFound {
                what: format!("there is no node {node:?} in this etcd"),
                hint: "`keelson get node --etcd …` without --node lists the nodes".into(),
            });
        }
    }
    if let Some(name) = name
        && !nodes.alive.contains_key(name)
    {
        return Err(CliError::NotFound {
            what: format!("there is no node {name:?} in this etcd"),
            hint: nodes.suggestion(name),
        });
    }
    if args.watch {
        return follow_nodes(session, fleet, name, args).await;
    }
    let mut found = Vec::new();
    for node in nodes.names().into_iter().filter(|node| name.is_none_or(|name| name == node)) {
        let entry = fleet.etcd.get(&NodeKeys::new(&node).node()).await.map_err(from_etcd_error)?;
        found.push((nodes.is_alive(&node), node_json(&node, entry.as_ref())));
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
    let mut header = node_header();
    if session.is_wide() {
        header.push("CONFIG".into());
    }
    let mut table = Table::with_header(header);
    for (is_alive, json) in found {
        let node = get_node::read(json)?;
        let mut cells = node_cells(&node, is_alive, session.now);
        if session.is_wide() {
            cells.push(configuration::state(fleet, &node.metadata.name).await?);
        }
        table.row(cells);
    }
    output::print(&table.render(0))
}

/// The Node that a node has reported, or one with only its name.
fn node_json(node: &str, entry: Option<&Entry>) -> Value {
    let reported = entry.and_then(|entry| serde_json::from_slice(&entry.value).ok());
    reported.unwrap_or_else(|| json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}}))
}

fn node_header() -> Vec<String> {
    ["NAME", "STATUS", "ROLES", "AGE", "VERSION"].map(ToOwned::to_owned).into()
}

fn node_cells(node: &Node, is_alive: bool, now: i64) -> Vec<String> {
    let created = human::nanos_of(node.metadata.creation_timestamp.as_deref());
    let version = &node.status.node_info.kubelet_version;
    vec![
        node.metadata.name.clone(),
        if is_alive { get_node::status(node) } else { "NotReady".into() },
        get_node::roles(node),
        human::since(created, now),
        if version.is_empty() { "<none>".into() } else { version.clone() },
    ]
}

async fn follow_nodes(
    session: &Session,
    fleet: &Fleet,
    name: Option<&str>,
    args: WatchArgs,
) -> Result<(), CliError> {
    let rows = |node: &str, keys: &Keys| {
        if name.is_some_and(|name| name != node) {
            return Ok(Vec::new());
        }
        let names = NodeKeys::new(node);
        let json = node_json(node, keys.get(&names.node()));
        Ok(vec![("node".to_owned(), node_row(session, json, keys.contains_key(&names.lease()))?)])
    };
    let printer = Printer::new(session.format(), args, node_header(), "STATUS");
    watch::follow(fleet, View { printer, range: NodeKeys::lease_and_node, rows, is_of_events: false }).await
}

/// A node as a watch shows it.
fn node_row(session: &Session, json: Value, is_alive: bool) -> Result<Row, CliError> {
    if output::is_document(session.format()) {
        let mark = get_node::without_heartbeats(json.clone()).to_string();
        return Ok(Row { mark, cells: Vec::new(), document: json });
    }
    let node = get_node::read(json)?;
    // At time 0 all ages are equal.
    let mark = node_cells(&node, is_alive, 0).join("\0");
    let now = keelson_service_kit::now_unix_nanos();
    Ok(Row { mark, cells: node_cells(&node, is_alive, now), document: Value::Null })
}
