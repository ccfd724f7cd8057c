//! `keelson describe node`.

use futures_util::future::join3;
use keelson_kube_model::resources::{amount, milli_cpu, pod_limits, pod_requests};
use keelson_kube_model::{Node, Quantity, ResourceList};
use keelson_proto::keelson::node_status::v1::GetReportStateRequest;

use super::{get_events, get_node};
use crate::describer::{Describer, map_lines, or_none};
use crate::error::CliError;
use crate::human;
use crate::output;
use crate::pods::{self, PodEntry};
use crate::session::Session;
use crate::table::Table;

/// Describes the node.
pub(crate) async fn run(session: &Session, name: Option<&str>) -> Result<(), CliError> {
    let json = session.agent.node().await?;
    get_node::check_name(&json, name)?;
    let node = get_node::read(json)?;
    // Only the node is required; pods, events and the report state are added where available.
    let (pods, events, control_plane) =
        join3(pods::list(&session.agent), session.agent.events(), control_plane(session)).await;
    let mut out = Describer::default();
    metadata(&mut out, &node, &control_plane);
    conditions(&mut out, &node);
    for (heading, list) in [("Capacity", &node.status.capacity), ("Allocatable", &node.status.allocatable)] {
        out.line(0, &format!("{heading}:"));
        let pairs: Vec<(&str, String)> = list.iter().map(|(k, v)| (k.as_str(), v.to_string())).collect();
        out.pairs(2, &pairs);
    }
    system(&mut out, &node);
    match pods {
        Ok(pods) => pods_table(&mut out, session, &node, &pods),
        Err(error) => out.line(0, &format!("Pods:  <unknown>: {error}")),
    }
    let rows = match &events {
        Ok((events, _)) => get_events::rows_about(events, "Node", &node.metadata.name, "", session.now),
        Err(error) => Some(format!("  <unknown>: {error}\n")),
    };
    out.block("Events", rows.as_deref());
    output::print(&out.finish())
}

async fn control_plane(session: &Session) -> String {
    let request = session.agent.request(GetReportStateRequest {});
    match session.agent.node_status().get_report_state(request).await {
        Ok(answer) => {
            let state = answer.into_inner();
            match (state.control_plane.as_str(), state.queued) {
                ("none" | "", _) => "none (standalone)".into(),
                (name, 0) => format!("{name}, everything is reported"),
                (name, queued) => {
                    format!("{name}, {queued} writes pending, the oldest for {} ms", state.oldest_age_ms)
                }
            }
        }
        Err(status) => format!("<unknown>: {}", status.message()),
    }
}

fn metadata(out: &mut Describer, node: &Node, control_plane: &str) {
    let taints: Vec<String> = node
        .spec
        .taints
        .iter()
        .map(|t| {
            let value = if t.value.is_empty() { String::new() } else { format!("={}", t.value) };
            format!("{}{value}:{}", t.key, t.effect)
        })
        .collect();
    let addresses: Vec<String> =
        node.status.addresses.iter().map(|a| format!("{}: {}", a.type_, a.address)).collect();
    out.pairs(
        0,
        &[
            ("Name", node.metadata.name.clone()),
            ("Status", get_node::status(node)),
            ("Roles", get_node::roles(node)),
            ("Control Plane", control_plane.to_owned()),
            ("Labels", map_lines(&node.metadata.labels, "=")),
            ("Annotations", map_lines(&node.metadata.annotations, ": ")),
            ("Created", or_none(node.metadata.creation_timestamp.as_deref().unwrap_or_default())),
            ("Taints", or_none(&taints.join("\n"))),
            ("Unschedulable", node.spec.unschedulable.unwrap_or(false).to_string()),
            ("Addresses", or_none(&addresses.join("\n"))),
        ],
    );
}

fn conditions(out: &mut Describer, node: &Node) {
    let mut table = Table::new(["Type", "Status", "Since", "Reason", "Message"]);
    for condition in &node.status.conditions {
        table.row(vec![
            condition.type_.clone(),
            condition.status.clone(),
            condition.last_transition_time.clone().unwrap_or_default(),
            condition.reason.clone(),
            condition.message.clone(),
        ]);
    }
    out.block("Conditions", (!table.is_empty()).then(|| table.render(2)).as_deref());
}

fn system(out: &mut Describer, node: &Node) {
    let info = &node.status.node_info;
    out.line(0, "System Info:");
    out.pairs(
        2,
        &[
            ("Machine ID", or_none(&info.machine_id)),
            ("System UUID", or_none(&info.system_uuid)),
            ("Boot ID", or_none(&info.boot_id)),
            ("Kernel Version", or_none(&info.kernel_version)),
            ("OS Image", or_none(&info.os_image)),
            ("Operating System", or_none(&info.operating_system)),
            ("Architecture", or_none(&info.architecture)),
            ("Container Runtime", or_none(&info.container_runtime_version)),
            ("Kubelet Version", or_none(&info.kubelet_version)),
        ],
    );
}

/// Requests and limits of CPU (millicores) and memory (bytes).
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct ResourceTotals {
    cpu_requests: i64,
    cpu_limits: i64,
    memory_requests: i64,
    memory_limits: i64,
}

impl ResourceTotals {
    fn of(requests: &ResourceList, limits: &ResourceList) -> Self {
        Self {
            cpu_requests: milli_cpu(requests),
            cpu_limits: milli_cpu(limits),
            memory_requests: amount(requests, "memory"),
            memory_limits: amount(limits, "memory"),
        }
    }

    fn add(&mut self, other: Self) {
        self.cpu_requests += other.cpu_requests;
        self.cpu_limits += other.cpu_limits;
        self.memory_requests += other.memory_requests;
        self.memory_limits += other.memory_limits;
    }

    fn cells(self, allocatable: &ResourceList) -> [String; 4] {
        let (cpu, memory) = (milli_cpu(allocatable), amount(allocatable, "memory"));
        let bytes = |b: i64| Quantity::from_bytes(u64::try_from(b).unwrap_or(0)).to_string();
        [
            with_percent(Quantity::from_milli(self.cpu_requests).to_string(), self.cpu_requests, cpu),
            with_percent(Quantity::from_milli(self.cpu_limits).to_string(), self.cpu_limits, cpu),
            with_percent(bytes(self.memory_requests), self.memory_requests, memory),
            with_percent(bytes(self.memory_limits), self.memory_limits, memory),
        ]
    }
}

fn with_percent(text: String, amount: i64, whole: i64) -> String {
    if whole <= 0 { text } else { format!("{text} ({}%)", i128::from(amount) * 100 / i128::from(whole)) }
}

fn pods_table(out: &mut Describer, session: &Session, node: &Node, pods: &[PodEntry]) {
    let allocatable = &node.status.allocatable;
    let mut total = ResourceTotals::default();
    let mut table = Table::new([
        "Namespace",
        "Name",
        "CPU Requests",
        "CPU Limits",
        "Memory Requests",
        "Memory Limits",
        "Age",
    ]);
    let mut count = 0;
    for entry in pods {
        let Some(pod) = entry.pod.as_ref().filter(|p| !p.status.phase().is_terminal()) else { continue };
        count += 1;
        let totals = ResourceTotals::of(&pod_requests(pod), &pod_limits(pod));
        total.add(totals);
        let mut cells = vec![entry.document.namespace.clone(), entry.document.name.clone()];
        cells.extend(totals.cells(allocatable));
        cells.push(human::since(entry.created(), session.now));
        table.row(cells);
    }
    let heading = format!("Pods that have not ended ({count})");
    out.block(&heading, (count > 0).then(|| table.render(2)).as_deref());
    let [cpu_requests, cpu_limits, memory_requests, memory_limits] = total.cells(allocatable);
    let mut sums = Table::new(["Resource", "Requests", "Limits"]);
    sums.row(vec!["cpu".into(), cpu_requests, cpu_limits]);
    sums.row(vec!["memory".into(), memory_requests, memory_limits]);
    out.block("Allocated", Some(&sums.render(2)));
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn resource_totals_are_shown_in_percent_of_allocatable() {
        let list = |value| serde_json::from_value::<ResourceList>(value).unwrap();
        let totals = ResourceTotals::of(
            &list(json!({"cpu": "250m", "memory": "64Mi"})),
            &list(json!({"memory": "128Mi"})),
        );
        assert_eq!(
            totals.cells(&list(json!({"cpu": "2", "memory": "1Gi"}))),
            ["250m (12%)", "0 (0%)", "64Mi (6%)", "128Mi (12%)"]
        );
        assert_eq!(totals.cells(&ResourceList::new())[0], "250m");
    }
}
