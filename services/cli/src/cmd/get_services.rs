//! `keelson get services`.

use keelson_config::ServiceName;
use keelson_proto::keelson::admin::v1::GetProgressResponse;
use keelson_proto::keelson::supervisor::v1::{Service, WatchServicesRequest, watch_services_response::Item};
use keelson_service_kit::Signal;
use serde::Serialize;
use serde_json::Value;

use crate::agent::Agent;
use crate::args::WatchArgs;
use crate::error::CliError;
use crate::human;
use crate::output;
use crate::row_tracker::{Row, RowTracker};
use crate::session::Session;
use crate::suggest::similar_names;
use crate::table::Table;
use crate::watch::{self, Printer};

/// A service as `-o json` shows it; `null` is an unknown value.
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
    /// The name of the service.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The process id, as init sees it; `None` without a process or without init.
    pub(crate) fn pid(&self) -> Option<u32> {
        self.pid
    }

    /// The state, in the words of the Supervisor API.
    pub(crate) fn state(&self) -> &str {
        &self.state
    }

    /// How often init has restarted it.
    pub(crate) fn restarts(&self) -> Option<u32> {
        self.restarts
    }

    /// Proportional set size in bytes, from init.
    pub(crate) fn pss_bytes(&self) -> Option<u64> {
        self.pss_kib.filter(|kib| *kib > 0).map(|kib| kib * 1024)
    }

    /// Why it is not `running`.
    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// Start of its process in nanoseconds since 1970; 0: unknown.
    pub(crate) fn started(&self) -> i64 {
        self.started
    }

    /// Whether it has a process, as far as is known.
    pub(crate) fn may_answer(&self) -> bool {
        !matches!(self.state.as_str(), "stopped" | "stuck" | "backing-off" | "failed")
    }

    /// The row of a service from its own progress, where init does not answer.
    fn from_progress(name: ServiceName, answer: Result<GetProgressResponse, CliError>) -> Self {
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
                (row.state, row.message) = state_from_progress(&progress);
            }
            Err(error) => (row.state, row.message) = state_from_error(&error),
        }
        row
    }
}

/// State and message of a service from its progress, in the words of the Supervisor API.
fn state_from_progress(progress: &GetProgressResponse) -> (String, String) {
    if let Some(stuck) = progress.loops.iter().find(|l| l.silent_ms > l.stuck_after_ms) {
        let message = format!("the loop {} has been silent for {} s", stuck.name, stuck.silent_ms / 1000);
        return ("stuck".into(), message);
    }
    match progress.conditions.iter().find(|c| !c.ok) {
        Some(condition) => ("degraded".into(), format!("{}: {}", condition.name, condition.message)),
        None => ("running".into(), String::new()),
    }
}

/// State and message of a service that did not answer; `unknown` if it could not be called.
fn state_from_error(error: &CliError) -> (String, String) {
    match error {
        CliError::NotRunning { socket, .. } | CliError::ServiceNotRunning { socket, .. } => {
            ("stopped".into(), format!("nothing answers at {}", socket.display()))
        }
        CliError::ServiceTimeout { .. } => ("stuck".into(), error.to_string()),
        _ => ("unknown".into(), error.to_string()),
    }
}

/// Shows the services, or the named ones. Where none runs, all are shown as stopped, and the command fails.
pub(crate) async fn run(session: &Session, names: &[String], args: WatchArgs) -> Result<(), CliError> {
    for name in names {
        parse_name(name)?;
    }
    if args.watch {
        return follow(session, names, args).await;
    }
    let (mut items, error) = match session.agent.services().await {
        Ok(services) => (services.into_iter().map(ServiceRow::from).collect(), None),
        Err(error) if error.is_unreachable() => match query_each_with_notice(session, &error).await {
            (items, true) => (items, None),
            (items, false) if matches!(error, CliError::NotRunning { .. }) => (items, Some(error)),
            _ => return Err(error),
        },
        Err(error) => return Err(error),
    };
    items.retain(|row: &ServiceRow| names.is_empty() || names.contains(&row.name));
    if output::is_document(session.format()) {
        output::print_document(session.format(), &Items { items })?;
    } else {
        output::print(&table(session, &items).render(0))?;
    }
    error.map_or(Ok(()), Err)
}

/// Parses the name of a service.
pub(crate) fn parse_name(name: &str) -> Result<ServiceName, CliError> {
    name.parse().map_err(|e: keelson_config::UnknownService| CliError::NotFound {
        what: e.to_string(),
        hint: match similar_names(name, ServiceName::ALL.map(ServiceName::as_str)).as_slice() {
            [] => "`keelson get services` lists them".into(),
            names => format!("did you mean {}?", names.join(" or ")),
        },
    })
}

/// Like [`query_each`], with a notice that says why init was not used, if any service answered.
async fn query_each_with_notice(session: &Session, error: &CliError) -> (Vec<ServiceRow>, bool) {
    let (rows, any) = query_each(&session.agent).await;
    if any {
        output::notice(&format!(
            "{error}; each service was queried directly: process ids, restarts and memory are unknown"
        ));
    }
    (rows, any)
}

/// A row for each service from its own progress, and whether any service answered.
pub(crate) async fn query_each(agent: &Agent) -> (Vec<ServiceRow>, bool) {
    let answers = agent.progress().await;
    let any = answers.iter().any(|(_, answer)| answer.is_ok());
    (answers.into_iter().map(|(name, answer)| ServiceRow::from_progress(name, answer)).collect(), any)
}

fn table(session: &Session, items: &[ServiceRow]) -> Table {
    let mut table = Table::with_header(header(session, true));
    for item in items {
        table.row(cells(session, item, true, session.now));
    }
    table
}

fn header(session: &Session, with_memory: bool) -> Vec<String> {
    let mut header = vec!["NAME", "STATE", "PID", "RESTARTS"];
    if with_memory {
        header.push("MEMORY");
    }
    header.push("AGE");
    if session.is_wide() {
        header.extend(["USER", "NEXT START"]);
    }
    header.push("MESSAGE");
    header.into_iter().map(ToOwned::to_owned).collect()
}

fn cells(session: &Session, item: &ServiceRow, with_memory: bool, now: i64) -> Vec<String> {
    let or_unknown = |text: Option<String>| text.unwrap_or_else(|| "<unknown>".into());
    let mut cells = vec![
        item.name.clone(),
        item.state.clone(),
        item.pid.map_or_else(|| "-".into(), |p| p.to_string()),
        or_unknown(item.restarts.map(|r| r.to_string())),
    ];
    if with_memory {
        cells.push(item.pss_kib.map_or_else(|| "-".into(), human::mebibytes));
    }
    cells.push(if item.started == 0 { "-".into() } else { human::since(item.started, now) });
    if session.is_wide() {
        cells.push(or_unknown(item.uid.map(|u| u.to_string())));
        let next = human::until(item.next_start, now);
        cells.push(if next.is_empty() { "-".into() } else { next });
    }
    cells.push(item.message.clone());
    cells
}

/// A service as a watch shows it: without its memory, which changes all the time and is not in
/// init's watch.
fn row(session: &Session, mut item: ServiceRow) -> Result<Row, CliError> {
    item.pss_kib = None;
    if output::is_document(session.format()) {
        let document = serde_json::to_value(&item).map_err(|e| CliError::Encode { reason: e.to_string() })?;
        return Ok(Row { mark: document.to_string(), cells: Vec::new(), document });
    }
    let now = keelson_service_kit::now_unix_nanos();
    // At time 0 all ages are equal; a restarted service has another process id.
    let mark = cells(session, &item, false, 0).join("\0");
    Ok(Row { mark, cells: cells(session, &item, false, now), document: Value::Null })
}

/// Shows each change of the services, from init, or without init by polling each of them.
async fn follow(session: &Session, names: &[String], args: WatchArgs) -> Result<(), CliError> {
    let mut printer = Printer::new(session.format(), args, header(session, false), "STATE");
    let mut tracker = RowTracker::default();
    let mut show = |printer: &mut Printer, item: ServiceRow| {
        if !names.is_empty() && !names.contains(&item.name) {
            return Ok(());
        }
        let name = item.name.clone();
        let row = row(session, item)?;
        tracker.set(&name, &row).map_or(Ok(()), |change| printer.show(change, row))
    };
    match session.agent.services().await {
        Ok(_) => {}
        Err(error) if error.is_unreachable() => {
            let (first, true) = query_each_with_notice(session, &error).await else { return Err(error) };
            let mut first = Some(first);
            let request = async || match first.take() {
                Some(rows) => Ok(rows),
                None => Ok(query_each(&session.agent).await.0),
            };
            let end = watch::poll(ServiceName::Init, request, |items| {
                printer.hold();
                for item in items {
                    show(&mut printer, item)?;
                }
                printer.release()
            });
            return end.await.map(|never| match never {});
        }
        Err(error) => return Err(error),
    }
    let open = || {
        let request = session.agent.request(WatchServicesRequest {});
        let mut client = session.agent.supervisor();
        async move { client.watch_services(request).await }
    };
    let end = watch::stream(&session.agent, ServiceName::Init, open, |signal| match signal {
        Signal::Opened => {
            printer.hold();
            Ok(())
        }
        // Print what was read before; a replay comes next.
        Signal::Lost(_) => printer.release(),
        Signal::Message(message) => match message.item {
            Some(Item::Service(service)) => show(&mut printer, ServiceRow::from(service)),
            Some(Item::Synced(_)) => printer.release(),
            None => Ok(()),
        },
    });
    Err(end.await)
}

#[cfg(test)]
mod tests {
    use keelson_proto::keelson::admin::v1::{Condition, Loop};

    use super::*;

    #[test]
    fn silent_loop_takes_precedence_over_a_failed_condition() {
        let mut progress = GetProgressResponse::default();
        assert_eq!(state_from_progress(&progress), ("running".into(), String::new()));
        progress.conditions.push(Condition {
            name: "runtime".into(),
            message: "no answer".into(),
            ..Condition::default()
        });
        assert_eq!(state_from_progress(&progress), ("degraded".into(), "runtime: no answer".into()));
        progress.loops.push(Loop { name: "pleg".into(), silent_ms: 31_000, stuck_after_ms: 30_000 });
        assert_eq!(state_from_progress(&progress).0, "stuck");
    }

    #[test]
    fn service_that_cannot_be_called_is_unknown_and_not_stopped() {
        let (service, socket) = (ServiceName::Init, std::path::PathBuf::from("/run/k/init/init.sock"));
        let group = crate::host::Group::of_socket(&socket);
        for (error, state, message) in [
            (
                CliError::ServiceNotRunning { service, socket: socket.clone() },
                "stopped",
                "nothing answers at /run/k/init",
            ),
            (
                CliError::NotRunning { socket: socket.clone(), others: Vec::new() },
                "stopped",
                "nothing answers at /run/k/init",
            ),
            (CliError::ServiceTimeout { service, message: "init hangs".into() }, "stuck", "init hangs"),
            (CliError::SocketForbidden { socket, group }, "unknown", "permission denied"),
        ] {
            let row = ServiceRow::from_progress(service, Err(error));
            assert_eq!((row.name(), row.state()), ("init", state));
            assert!(row.message().starts_with(message), "{}", row.message());
        }
    }

    #[test]
    fn service_without_a_process_has_no_pid_and_no_memory() {
        let row = ServiceRow::from(Service {
            name: "pod-sync".into(),
            state: "backing-off".into(),
            ..Service::default()
        });
        let json = serde_json::to_value(&row).unwrap();
        assert!(json["pid"].is_null() && json["pss_kib"].is_null() && json["restarts"] == 0);
    }
}
