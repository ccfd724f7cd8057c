//! `keelson get node`.

use keelson_config::ServiceName;
use keelson_kube_model::Node;
use serde_json::Value;

use crate::args::WatchArgs;
use crate::error::CliError;
use crate::human;
use crate::output;
use crate::row_tracker::{Row, RowTracker};
use crate::session::Session;
use crate::table::Table;
use crate::watch::{self, Printer};

/// Shows the node.
pub(crate) async fn run(session: &Session, name: Option<&str>, args: WatchArgs) -> Result<(), CliError> {
    let json = session.agent.node().await?;
    check_name(&json, name)?;
    if args.watch {
        return follow(session, json, args).await;
    }
    if output::is_document(session.format()) {
        return output::print_document(session.format(), &json);
    }
    let node = read(json)?;
    let mut table = Table::with_header(header(session));
    table.row(cells(session, &node, session.now));
    output::print(&table.render(0))
}

fn header(session: &Session) -> Vec<String> {
    let mut header = vec!["NAME", "STATUS", "ROLES", "AGE", "VERSION"];
    if session.is_wide() {
        header.extend(["INTERNAL-IP", "OS-IMAGE", "KERNEL-VERSION", "CONTAINER-RUNTIME"]);
    }
    header.into_iter().map(ToOwned::to_owned).collect()
}

fn cells(session: &Session, node: &Node, now: i64) -> Vec<String> {
    let created = human::nanos_of(node.metadata.creation_timestamp.as_deref());
    let info = &node.status.node_info;
    let mut cells = vec![
        node.metadata.name.clone(),
        status(node),
        roles(node),
        human::since(created, now),
        or_none(&info.kubelet_version),
    ];
    if session.is_wide() {
        let ip = node.status.addresses.iter().find(|a| a.type_ == "InternalIP");
        cells.push(or_none(ip.map_or("", |a| a.address.as_str())));
        cells.push(or_none(&info.os_image));
        cells.push(or_none(&info.kernel_version));
        cells.push(or_none(&info.container_runtime_version));
    }
    cells
}

/// The node as a watch shows it.
fn row(session: &Session, json: Value) -> Result<Row, CliError> {
    if output::is_document(session.format()) {
        return Ok(Row {
            mark: without_heartbeats(json.clone()).to_string(),
            cells: Vec::new(),
            document: json,
        });
    }
    let node = read(json)?;
    let now = keelson_service_kit::now_unix_nanos();
    // At time 0 all ages are equal.
    let mark = cells(session, &node, 0).join("\0");
    Ok(Row { mark, cells: cells(session, &node, now), document: Value::Null })
}

/// Removes the heartbeat times, so that a heartbeat does not count as a change.
pub(crate) fn without_heartbeats(mut node: Value) -> Value {
    for condition in node["status"]["conditions"].as_array_mut().into_iter().flatten() {
        if let Some(condition) = condition.as_object_mut() {
            condition.remove("lastHeartbeatTime");
        }
    }
    node
}

/// Polls the node and shows each change.
async fn follow(session: &Session, first: Value, args: WatchArgs) -> Result<(), CliError> {
    let mut printer = Printer::new(session.format(), args, header(session), "STATUS");
    let mut tracker = RowTracker::default();
    let mut first = Some(first);
    let request = async || match first.take() {
        Some(node) => Ok(node),
        None => session.agent.node().await,
    };
    let end = watch::poll(ServiceName::NodeStatus, request, |json| {
        let row = row(session, json)?;
        tracker.set("node", &row).map_or(Ok(()), |change| printer.show(change, row))
    });
    end.await.map(|never| match never {})
}

/// Checks that `name`, if given, is the name of this node.
pub(crate) fn check_name(node: &serde_json::Value, name: Option<&str>) -> Result<(), CliError> {
    let own = node["metadata"]["name"].as_str().unwrap_or_default();
    match name {
        Some(name) if name != own => Err(CliError::NotFound {
            what: format!("there is no node {name:?} here"),
            hint: format!("this agent's node is {own:?}"),
        }),
        _ => Ok(()),
    }
}

/// Reads a Node.
pub(crate) fn read(json: serde_json::Value) -> Result<Node, CliError> {
    serde_json::from_value(json).map_err(|e| CliError::Failed {
        message: format!("node-status sent a document that is not a Node: {e}"),
        hint: Some("-o json shows the document unchanged".into()),
    })
}

/// `Ready`, `NotReady` or `Unknown`, and whether the node is unschedulable.
pub(crate) fn status(node: &Node) -> String {
    let ready = node.status.conditions.iter().find(|c| c.type_ == "Ready");
    let mut text = match ready.map(|c| c.status.as_str()) {
        Some("True") => "Ready".to_owned(),
        Some(_) => "NotReady".to_owned(),
        None => "Unknown".to_owned(),
    };
    if node.spec.unschedulable == Some(true) {
        text.push_str(",SchedulingDisabled");
    }
    text
}

/// The roles from the node's labels.
pub(crate) fn roles(node: &Node) -> String {
    let roles: Vec<&str> = node
        .metadata
        .labels
        .iter()
        .filter_map(|(key, value)| match key.strip_prefix("node-role.kubernetes.io/") {
            Some(role) => Some(role),
            None if key == "kubernetes.io/role" => Some(value.as_str()),
            None => None,
        })
        .filter(|role| !role.is_empty())
        .collect();
    or_none(&roles.join(","))
}

fn or_none(text: &str) -> String {
    if text.is_empty() { "<none>".into() } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn node_heartbeat_does_not_count_as_a_change() {
        let node = |heartbeat: &str, status: &str| {
            let conditions = json!([{"type": "Ready", "status": status, "lastHeartbeatTime": heartbeat}]);
            without_heartbeats(json!({"status": {"conditions": conditions}}))
        };
        assert_eq!(node("1", "True"), node("2", "True"));
        assert_ne!(node("1", "True"), node("1", "False"));
    }

    #[test]
    fn node_status_follows_the_ready_condition() {
        let with = |conditions: serde_json::Value, off: bool| {
            status(
                &read(json!({"spec": {"unschedulable": off}, "status": {"conditions": conditions}})).unwrap(),
            )
        };
        assert_eq!(with(json!([{"type": "Ready", "status": "True"}]), false), "Ready");
        assert_eq!(
            with(json!([{"type": "Ready", "status": "Unknown"}]), true),
            "NotReady,SchedulingDisabled"
        );
        assert_eq!(with(json!([]), false), "Unknown");
    }
}
