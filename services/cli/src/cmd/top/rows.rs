//! The rows of `keelson top`, and the calls that fill them.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use futures_util::future::{join, join_all};
use keelson_config::ServiceName;
use keelson_kube_model::Node;
use keelson_proto::keelson::admin::v1::GetUsageResponse;
use keelson_proto::keelson::resource_manager::v1::{PodStatsResponse, Usage};
use serde_json::{Value, json};

use crate::agent::Agent;
use crate::cmd::get_services::{self, ServiceRow as ServiceState};
use crate::error::CliError;
use crate::human;
use crate::metrics::{self, CpuRates, CpuSample, Sort};
use crate::pods::{self, PodEntry, Scope};
use crate::status::summarise;

/// CPU and memory of a row, with its key and name.
#[derive(Debug, Default)]
pub(super) struct ResourceUse {
    /// The key, unique among all rows.
    pub(super) key: String,
    /// The name, for sorting.
    name: String,
    sample: Option<CpuSample>,
    /// Nanoseconds of CPU per second.
    cpu: Option<u64>,
    /// Bytes: the working set of a pod or the node, the PSS of a service, or its RSS where that is unknown.
    memory: Option<u64>,
}

impl ResourceUse {
    fn of(key: String, name: String, usage: Option<&Usage>) -> Self {
        let sample = usage.and_then(|u| Some(CpuSample { nanos: u.cpu_nanos?, taken: u.taken_unix_nanos }));
        let memory = usage.and_then(|u| u.memory.as_ref()).map(|memory| memory.working_set);
        // resource-manager's own rate is used until there are two samples.
        Self { key, name, sample, cpu: usage.and_then(|u| u.cpu_nano_cores), memory }
    }

    /// Replaces the CPU rate by that since the previous sample.
    pub(super) fn apply_rate(&mut self, rates: &mut CpuRates) {
        if let Some(sample) = self.sample {
            self.cpu = rates.rate(&self.key, sample).or(self.cpu);
        }
    }

    pub(super) fn compare(&self, other: &Self, sort: Sort) -> Ordering {
        let values =
            |by| if by == Sort::Memory { (self.memory, other.memory) } else { (self.cpu, other.cpu) };
        metrics::order(sort, values, (&self.name, &other.name))
    }
}

/// The node.
#[derive(Debug)]
pub(super) struct NodeRow {
    name: String,
    pub(super) used: ResourceUse,
    /// CPU in nanoseconds per second, and memory in bytes, that pods may use; `None`: unknown.
    allocatable: (Option<u64>, Option<u64>),
}

/// Reads the usage of the node.
pub(super) async fn node(agent: &Agent) -> Result<NodeRow, CliError> {
    let (stats, node) = join(agent.node_stats(), agent.node()).await;
    let stats = stats?;
    let node = node.ok().and_then(|json| serde_json::from_value::<Node>(json).ok());
    let name = node.as_ref().map_or_else(|| "<unknown>".to_owned(), |node| node.metadata.name.clone());
    let of = |resource: &str| node.as_ref()?.status.allocatable.get(resource).copied();
    let cpu = of("cpu").and_then(|q| u64::try_from(q.nanos()).ok());
    let memory = of("memory").and_then(|q| u64::try_from(q.value()).ok());
    let used = ResourceUse::of("node".into(), name.clone(), stats.usage.as_ref());
    Ok(NodeRow { name, used, allocatable: (cpu, memory) })
}

impl NodeRow {
    pub(super) const HEADER: [&'static str; 5] =
        ["NAME", "CPU(cores)", "CPU(%)", "MEMORY(bytes)", "MEMORY(%)"];

    pub(super) fn cells(&self) -> Vec<String> {
        vec![
            self.name.clone(),
            metrics::cores(self.used.cpu),
            metrics::percent(self.used.cpu, self.allocatable.0),
            metrics::mebibytes(self.used.memory),
            metrics::percent(self.used.memory, self.allocatable.1),
        ]
    }

    pub(super) fn document(&self) -> Value {
        json!({"name": self.name, "cpuNanoCores": self.used.cpu, "memoryBytes": self.used.memory})
    }
}

/// A service with its usage.
#[derive(Debug)]
pub(super) struct ServiceRow {
    service: ServiceState,
    rss: Option<u64>,
    pid: Option<u32>,
    pss: Option<u64>,
    pub(super) used: ResourceUse,
}

/// Reads the services from init, or without init from each of them, and then the usage of each running one. A service
/// that does not answer still has a row.
pub(super) async fn services(agent: &Agent) -> Result<Vec<ServiceRow>, CliError> {
    let (services, with_pss) = match agent.services().await {
        Ok(services) => (services.into_iter().map(ServiceState::from).collect::<Vec<_>>(), false),
        Err(error) if error.is_unreachable() => {
            let (services, answered) = get_services::query_each(agent).await;
            if !answered {
                return Err(error);
            }
            (services, true)
        }
        Err(error) => return Err(error),
    };
    let rows = services.into_iter().map(|state| async move {
        let service = state.name().parse::<ServiceName>().ok().filter(|_| state.may_answer());
        let usage = match service {
            Some(service) => agent.usage(service, with_pss).await.ok(),
            None => None,
        };
        service_row(state, usage)
    });
    Ok(join_all(rows).await)
}

fn service_row(service: ServiceState, usage: Option<GetUsageResponse>) -> ServiceRow {
    let sample = usage.map(|u| CpuSample { nanos: u.cpu_nanos, taken: u.taken_unix_nanos });
    let pss = service.pss_bytes().or(usage.and_then(|u| u.pss_bytes));
    let rss = usage.map(|u| u.rss_bytes);
    // init reports the process id in the host's namespace.
    let pid = service.pid().or(usage.map(|u| u.pid));
    let name = service.name().to_owned();
    let used = ResourceUse { key: format!("service/{name}"), name, sample, cpu: None, memory: pss.or(rss) };
    ServiceRow { service, rss, pid, pss, used }
}

impl ServiceRow {
    pub(super) const HEADER: [&'static str; 9] =
        ["NAME", "STATE", "PID", "CPU(%)", "PSS", "RSS", "RESTARTS", "UPTIME", "MESSAGE"];

    pub(super) fn cells(&self, now: i64) -> Vec<String> {
        let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".into());
        let size = |bytes: Option<u64>| or_none(bytes.map(|bytes| human::mebibytes(bytes / 1024)));
        let started = self.service.started();
        vec![
            self.service.name().to_owned(),
            self.service.state().to_owned(),
            or_none(self.pid.map(|pid| pid.to_string())),
            metrics::percent_of_core(self.used.cpu),
            size(self.pss),
            size(self.rss),
            self.service.restarts().map_or_else(|| "<unknown>".into(), |n| n.to_string()),
            if started == 0 || !self.service.may_answer() { "-".into() } else { human::since(started, now) },
            self.service.message().to_owned(),
        ]
    }

    pub(super) fn document(&self) -> Value {
        json!({
            "name": self.service.name(),
            "state": self.service.state(),
            "pid": self.pid,
            "restarts": self.service.restarts(),
            "message": self.service.message(),
            "cpuNanoCores": self.used.cpu,
            "pssBytes": self.pss,
            "rssBytes": self.rss,
            "startedAt": human::rfc3339(self.service.started()),
        })
    }
}

/// A pod.
#[derive(Debug)]
pub(super) struct PodRow {
    namespace: String,
    name: String,
    /// `None`: unknown.
    restarts: Option<i32>,
    created: i64,
    pub(super) used: ResourceUse,
}

/// Reads the pods from pod-sync and their usage from resource-manager. If one of them fails, the rows lack its values,
/// and its error is returned with them.
pub(super) async fn pods(agent: &Agent, scope: &Scope) -> Result<(Vec<PodRow>, Option<CliError>), CliError> {
    let (stats, known) = join(agent.pod_stats(), pods::list(agent)).await;
    match (stats, known) {
        (Ok(stats), Ok(known)) => Ok((pod_rows(stats, known, scope), None)),
        (Ok(stats), Err(error)) => Ok((pod_rows(stats, Vec::new(), scope), Some(error))),
        (Err(error), Ok(known)) => Ok((pod_rows(Vec::new(), known, scope), Some(error))),
        (Err(error), Err(_)) => Err(error),
    }
}

/// A row for each pod that has not finished.
fn pod_rows(stats: Vec<PodStatsResponse>, known: Vec<PodEntry>, scope: &Scope) -> Vec<PodRow> {
    let mut rows = BTreeMap::new();
    for entry in known {
        let is_terminal = entry.pod.as_ref().is_some_and(|pod| pod.status.phase().is_terminal());
        if is_terminal || entry.document.finished {
            continue;
        }
        let name = format!("{}/{}", entry.document.namespace, entry.document.name);
        let row = PodRow {
            namespace: entry.document.namespace.clone(),
            name: entry.document.name.clone(),
            restarts: entry.pod.as_ref().map(|pod| summarise(pod).restarts),
            created: entry.created(),
            used: ResourceUse::of(entry.document.uid.clone(), name, None),
        };
        rows.insert(entry.document.uid, row);
    }
    for stats in stats {
        let Some(pod) = stats.pod else { continue };
        let name = format!("{}/{}", pod.namespace, pod.name);
        let used = ResourceUse::of(pod.uid.clone(), name, stats.usage.as_ref());
        let row = rows.entry(pod.uid).or_insert_with(|| PodRow {
            namespace: pod.namespace,
            name: pod.name,
            restarts: None,
            created: stats.started_unix_nanos,
            used: ResourceUse::default(),
        });
        row.used = used;
    }
    rows.into_values().filter(|row| scope.contains(&row.namespace)).collect()
}

impl PodRow {
    pub(super) fn header(with_namespace: bool) -> Vec<&'static str> {
        let mut header = vec!["NAME", "CPU(cores)", "MEMORY(bytes)", "RESTARTS", "AGE"];
        if with_namespace {
            header.insert(0, "NAMESPACE");
        }
        header
    }

    pub(super) fn cells(&self, with_namespace: bool, now: i64) -> Vec<String> {
        let mut cells = vec![
            self.name.clone(),
            metrics::cores(self.used.cpu),
            metrics::mebibytes(self.used.memory),
            self.restarts.map_or_else(|| "-".into(), |restarts| restarts.to_string()),
            human::since(self.created, now),
        ];
        if with_namespace {
            cells.insert(0, self.namespace.clone());
        }
        cells
    }

    pub(super) fn document(&self) -> Value {
        json!({
            "namespace": self.namespace,
            "name": self.name,
            "cpuNanoCores": self.used.cpu,
            "memoryBytes": self.used.memory,
            "restarts": self.restarts,
            "createdAt": human::rfc3339(self.created),
        })
    }
}

#[cfg(test)]
mod tests {
    use keelson_proto::keelson::common::v1::PodRef;
    use keelson_proto::keelson::pod_sync::v1::PodDocument;
    use keelson_proto::keelson::resource_manager::v1::MemoryUsage;

    use super::*;

    fn entry(uid: &str, name: &str, phase: &str) -> PodEntry {
        let status = json!({"phase": phase, "containerStatuses": [{"name": "c", "restartCount": 3, "state": {"running": {}}}]});
        PodEntry::new(PodDocument {
            uid: uid.into(),
            namespace: "default".into(),
            name: name.into(),
            pod_json:
                json!({"metadata": {"name": name}, "spec": {"containers": [{"name": "c"}]}, "status": status})
                    .to_string()
                    .into(),
            ..PodDocument::default()
        })
    }

    fn stats(uid: &str, name: &str, namespace: &str) -> PodStatsResponse {
        let memory = MemoryUsage { working_set: 5 << 20, ..MemoryUsage::default() };
        PodStatsResponse {
            pod: Some(PodRef { uid: uid.into(), namespace: namespace.into(), name: name.into() }),
            started_unix_nanos: 7,
            usage: Some(Usage {
                cpu_nanos: Some(1_000_000_000),
                cpu_nano_cores: Some(2_000_000),
                memory: Some(memory),
                ..Usage::default()
            }),
            ..PodStatsResponse::default()
        }
    }

    fn cells(stats: Vec<PodStatsResponse>, known: Vec<PodEntry>, scope: Option<&str>) -> Vec<String> {
        let scope = Scope { namespace: scope.map(ToOwned::to_owned) };
        pod_rows(stats, known, &scope)
            .iter()
            .map(|row| row.cells(false, 120 * human::SECOND)[..4].join(" "))
            .collect()
    }

    #[test]
    fn running_pods_have_usage_and_pending_pods_have_none() {
        let known = vec![
            entry("u1", "web", "Running"),
            entry("u2", "db", "Pending"),
            entry("u3", "job", "Succeeded"),
        ];
        assert_eq!(cells(vec![stats("u1", "web", "default")], known, None), ["web 2m 5Mi 3", "db - - 3"]);
    }

    #[test]
    fn pod_rows_need_only_one_of_both_services() {
        assert_eq!(cells(vec![stats("u1", "web", "default")], Vec::new(), Some("default")), ["web 2m 5Mi -"]);
        assert_eq!(cells(Vec::new(), vec![entry("u1", "web", "Running")], Some("default")), ["web - - 3"]);
        assert_eq!(
            cells(vec![stats("u1", "web", "system")], Vec::new(), Some("default")),
            Vec::<String>::new()
        );
    }

    #[test]
    fn dead_service_has_a_row_without_usage() {
        let service = keelson_proto::keelson::supervisor::v1::Service {
            name: "node-api".into(),
            state: "backing-off".into(),
            restarts: 5,
            message: "ended with exit code 70".into(),
            started_unix_nanos: 5,
            ..Default::default()
        };
        let row = service_row(service.into(), None);
        assert!(!row.service.may_answer());
        let wanted = ["node-api", "backing-off", "-", "-", "-", "-", "5", "-", "ended with exit code 70"];
        assert_eq!(row.cells(9), wanted);
    }

    #[test]
    fn usage_from_the_service_completes_the_state_from_init() {
        let state = ServiceState::from(keelson_proto::keelson::supervisor::v1::Service {
            name: "pod-sync".into(),
            state: "running".into(),
            pid: 42,
            pss_kib: 2048,
            started_unix_nanos: human::SECOND,
            ..Default::default()
        });
        let usage = |nanos, taken| GetUsageResponse {
            cpu_nanos: nanos,
            taken_unix_nanos: taken * human::SECOND,
            rss_bytes: 6 << 20,
            pss_bytes: None,
            started_unix_nanos: 0,
            pid: 7,
        };
        let mut rates = CpuRates::default();
        let mut row = service_row(state, Some(usage(0, 10)));
        row.used.apply_rate(&mut rates);
        row.used.sample = Some(CpuSample { nanos: 150_000_000, taken: 11 * human::SECOND });
        row.used.apply_rate(&mut rates);
        let wanted = ["pod-sync", "running", "42", "15.0%", "2.0Mi", "6.0Mi", "0", "10s", ""];
        assert_eq!(row.cells(11 * human::SECOND), wanted);
    }
}
