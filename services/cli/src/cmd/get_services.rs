//! `keelson get services`.

use keelson_config::ServiceName;
use keelson_proto::keelson::admin::v1::GetProgressResponse;
use keelson_proto::keelson::supervisor::v1::Service;
use serde::Serialize;

use super::Session;
use crate::error::Failure;
use crate::human;
use crate::output;
use crate::table::Table;

/// A service as `-o json` shows it; `null` is what nobody knows.
#[derive(Debug, Serialize)]
pub(crate) struct ServiceRow {
    name: String,
    pid: Option<u32>,
    state: String,
    restarts: Option<u32>,
    pss_kib: Option<u64>,
    message: String,
    started_at: Option<String>,
    next_start_at: Option<String>,
    uid: Option<u32>,
    #[serde(skip)]
    started: i64,
    #[serde(skip)]
    next_start: i64,
}

#[derive(Debug, Serialize)]
struct Items {
    items: Vec<ServiceRow>,
}

impl From<Service> for ServiceRow {
    fn from(service: Service) -> Self {
        let runs = service.pid != 0;
        Self {
            pid: runs.then_some(service.pid),
            restarts: Some(service.restarts),
            pss_kib: runs.then_some(service.pss_kib),
            started_at: human::rfc3339(service.started_unix_nanos),
            next_start_at: human::rfc3339(service.next_start_unix_nanos),
            uid: Some(service.uid),
            started: service.started_unix_nanos,
            next_start: service.next_start_unix_nanos,
            name: service.name,
            state: service.state,
            message: service.message,
        }
    }
}

impl ServiceRow {
    /// What a service says about itself, where init does not tell.
    fn asked(name: ServiceName, answer: Result<GetProgressResponse, Failure>) -> Self {
        let mut row = Self {
            name: name.to_string(),
            pid: None,
            state: String::new(),
            restarts: None,
            pss_kib: None,
            message: String::new(),
            started_at: None,
            next_start_at: None,
            uid: None,
            started: 0,
            next_start: 0,
        };
        match answer {
            Ok(progress) => {
                row.started = progress.started_unix_nanos;
                row.started_at = human::rfc3339(progress.started_unix_nanos);
                (row.state, row.message) = judge(&progress);
            }
            Err(failure) => {
                let state = if matches!(failure, Failure::Silent { .. }) { "stuck" } else { "stopped" };
                row.state = state.into();
                row.message = failure.to_string();
            }
        }
        row
    }
}

/// The words of the Supervisor API for what `GetProgress` says.
fn judge(progress: &GetProgressResponse) -> (String, String) {
    if let Some(stuck) = progress.loops.iter().find(|l| l.silent_ms > l.stuck_after_ms) {
        let message = format!("the loop {} has been silent for {} s", stuck.name, stuck.silent_ms / 1000);
        return ("stuck".into(), message);
    }
    match progress.conditions.iter().find(|c| !c.ok) {
        Some(condition) => ("degraded".into(), format!("{}: {}", condition.name, condition.message)),
        None => ("running".into(), String::new()),
    }
}

/// Shows the services, or those that are named.
pub(crate) async fn run(session: &Session, names: &[String]) -> Result<(), Failure> {
    for name in names {
        known(name)?;
    }
    let mut items = match session.agent.services().await {
        Ok(services) => services.into_iter().map(ServiceRow::from).collect(),
        Err(failure) if failure.is_unreachable() => asked_one_by_one(session, failure).await?,
        Err(failure) => return Err(failure),
    };
    items.retain(|row: &ServiceRow| names.is_empty() || names.contains(&row.name));
    if output::is_document(session.format()) {
        return output::print_document(session.format(), &Items { items });
    }
    output::print(&table(session, &items).render(0))
}

/// Checks the name of a service.
pub(crate) fn known(name: &str) -> Result<ServiceName, Failure> {
    name.parse().map_err(|e: keelson_config::UnknownService| Failure::NotFound {
        what: e.to_string(),
        hint: "`keelson get services` lists them".into(),
    })
}

async fn asked_one_by_one(session: &Session, failure: Failure) -> Result<Vec<ServiceRow>, Failure> {
    let answers = session.agent.progress().await;
    if answers.iter().all(|(_, answer)| answer.is_err()) {
        return Err(failure);
    }
    output::notice(&format!(
        "{failure}; each service was asked itself: process ids, restarts and memory are not known"
    ));
    Ok(answers.into_iter().map(|(name, answer)| ServiceRow::asked(name, answer)).collect())
}

fn table(session: &Session, items: &[ServiceRow]) -> Table {
    let or_unknown = |text: Option<String>| text.unwrap_or_else(|| "<unknown>".into());
    let mut header = vec!["NAME", "STATE", "PID", "RESTARTS", "MEMORY", "AGE"];
    if session.is_wide() {
        header.extend(["USER", "NEXT START"]);
    }
    header.push("MESSAGE");
    let mut table = Table::with_header(header.into_iter().map(ToOwned::to_owned).collect());
    for item in items {
        let mut cells = vec![
            item.name.clone(),
            item.state.clone(),
            item.pid.map_or_else(|| "-".into(), |p| p.to_string()),
            or_unknown(item.restarts.map(|r| r.to_string())),
            item.pss_kib.map_or_else(|| "-".into(), human::mebibytes),
            if item.started == 0 { "-".into() } else { human::since(item.started, session.now) },
        ];
        if session.is_wide() {
            cells.push(or_unknown(item.uid.map(|u| u.to_string())));
            let next = human::until(item.next_start, session.now);
            cells.push(if next.is_empty() { "-".into() } else { next });
        }
        cells.push(item.message.clone());
        table.row(cells);
    }
    table
}

#[cfg(test)]
mod tests {
    use keelson_proto::keelson::admin::v1::{Condition, Loop};

    use super::*;

    #[test]
    fn a_silent_loop_outweighs_a_missing_neighbour() {
        let mut progress = GetProgressResponse::default();
        assert_eq!(judge(&progress), ("running".into(), String::new()));
        progress.conditions.push(Condition {
            name: "runtime".into(),
            message: "no answer".into(),
            ..Condition::default()
        });
        assert_eq!(judge(&progress), ("degraded".into(), "runtime: no answer".into()));
        progress.loops.push(Loop { name: "pleg".into(), silent_ms: 31_000, stuck_after_ms: 30_000 });
        assert_eq!(judge(&progress).0, "stuck");
    }

    #[test]
    fn a_service_without_a_process_has_no_pid_and_no_memory() {
        let row = ServiceRow::from(Service {
            name: "pod-sync".into(),
            state: "backing-off".into(),
            ..Service::default()
        });
        let json = serde_json::to_value(&row).unwrap();
        assert!(json["pid"].is_null() && json["pss_kib"].is_null() && json["restarts"] == 0);
    }
}
