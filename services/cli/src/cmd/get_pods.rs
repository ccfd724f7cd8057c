//! `keelson get pods`.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use keelson_config::ServiceName;
use keelson_proto::keelson::pod_config::v1::WaitingPod;
use keelson_proto::keelson::pod_sync::v1::{WatchPodsRequest, watch_pods_response::Item};
use keelson_service_kit::Signal;
use serde_json::{Value, json};

use crate::args::WatchArgs;
use crate::error::CliError;
use crate::human;
use crate::output;
use crate::pods::{self, PodEntry};
use crate::row_tracker::{Change, Row, RowTracker};
use crate::session::Session;
use crate::status::summarise;
use crate::table::Table;
use crate::watch::{self, Printer};

/// The timeout of the optional call to pod-config.
const SOURCES_TIMEOUT: Duration = Duration::from_millis(300);

/// Shows the pods of the namespace, or the named ones.
pub(crate) async fn run(session: &Session, names: &[String], args: WatchArgs) -> Result<(), CliError> {
    // Concurrently: pod-config's answer only adds a notice.
    let waiting = tokio::time::timeout(SOURCES_TIMEOUT, session.agent.sources());
    let (all, waiting) = futures_util::future::join(pods::list(&session.agent), waiting).await;
    let all = all?;
    let scope = session.scope();
    let mut chosen: Vec<&PodEntry> = Vec::new();
    for name in names {
        chosen.push(pods::resolve(&session.agent, &all, &scope, name).await?);
    }
    if args.watch {
        let full = |p: &&PodEntry| (p.document.namespace.clone(), p.document.name.clone());
        let wanted = (!names.is_empty()).then(|| chosen.iter().map(full).collect());
        return follow(session, wanted, args).await;
    }
    if names.is_empty() {
        chosen.extend(all.iter().filter(|p| scope.contains(&p.document.namespace)));
    }
    if output::is_document(session.format()) {
        return documents(session, &chosen, names.len() == 1);
    }
    if chosen.is_empty() {
        output::notice(&no_pods_notice(session, all.len()));
    } else {
        output::print(&table(session, &chosen).render(0))?;
    }
    if names.is_empty() {
        let sources = waiting.ok().and_then(Result::ok).unwrap_or_default();
        let pods = sources.iter().flat_map(|source| &source.waiting);
        let pods: Vec<&WaitingPod> = pods.filter(|pod| scope.contains(&pod.namespace)).collect();
        if let Some(first) = pods.first() {
            output::notice(&waiting_notice(first, pods.len()));
        }
    }
    Ok(())
}

/// The notice about pods that have not started since a reboot.
fn waiting_notice(first: &WaitingPod, count: usize) -> String {
    let (pods, wait) = if count == 1 { ("pod", "waits") } else { ("pods", "wait") };
    format!(
        "{count} {pods} more {wait} for the control plane since the reboot; `keelson explain pod {}` shows why, \
         `keelson get sources` lists all",
        first.name
    )
}

fn no_pods_notice(session: &Session, elsewhere: usize) -> String {
    match &session.scope().namespace {
        None => "No pods found on this node.".into(),
        Some(namespace) if elsewhere == 0 => format!("No pods found in namespace {namespace}."),
        Some(namespace) => {
            format!("No pods found in namespace {namespace}; -A shows {elsewhere} in other namespaces.")
        }
    }
}

fn documents(session: &Session, chosen: &[&PodEntry], single: bool) -> Result<(), CliError> {
    let items = chosen.iter().map(|p| p.json()).collect::<Result<Vec<Value>, _>>()?;
    if single && let [one] = items.as_slice() {
        return output::print_document(session.format(), one);
    }
    let list = json!({"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": items});
    output::print_document(session.format(), &list)
}

fn table(session: &Session, chosen: &[&PodEntry]) -> Table {
    let mut table = Table::with_header(header(session));
    for entry in chosen {
        table.row(cells(session, entry, session.now));
    }
    table
}

fn header(session: &Session) -> Vec<String> {
    let mut header = vec!["NAME", "READY", "STATUS", "RESTARTS", "AGE"];
    if session.global.all_namespaces {
        header.insert(0, "NAMESPACE");
    }
    if session.is_wide() {
        header.extend(["IP", "NODE", "SOURCE"]);
    }
    header.into_iter().map(ToOwned::to_owned).collect()
}

fn cells(session: &Session, entry: &PodEntry, now: i64) -> Vec<String> {
    let mut cells = Vec::with_capacity(9);
    if session.global.all_namespaces {
        cells.push(entry.document.namespace.clone());
    }
    cells.push(entry.document.name.clone());
    match &entry.pod {
        Some(pod) => {
            let summary = summarise(pod);
            cells.push(format!("{}/{}", summary.ready, summary.total));
            cells.push(summary.status.clone());
            cells.push(summary.restarts_text(now));
        }
        None => cells.extend(["?/?".into(), "Unreadable".into(), "?".into()]),
    }
    cells.push(human::since(entry.created(), now));
    if session.is_wide() {
        let or_none = |text: Option<&str>| text.filter(|t| !t.is_empty()).unwrap_or("<none>").to_owned();
        let pod = entry.pod.as_ref();
        cells.push(or_none(pod.map(|p| p.status.pod_ip.as_str())));
        cells.push(or_none(pod.map(|p| p.spec.node_name.as_str())));
        cells.push(or_none(Some(&entry.document.source)));
    }
    cells
}

/// A pod as a watch shows it.
fn row(session: &Session, entry: &PodEntry) -> Result<Row, CliError> {
    if output::is_document(session.format()) {
        let document = entry.json()?;
        return Ok(Row { mark: document.to_string(), cells: Vec::new(), document });
    }
    let now = keelson_service_kit::now_unix_nanos();
    // At time 0 all ages are equal.
    let mark = cells(session, entry, 0).join("\0");
    Ok(Row { mark, cells: cells(session, entry, now), document: Value::Null })
}

/// Namespace and name of each named pod; `None` for all of the namespace.
type NamedPods = Option<BTreeSet<(String, String)>>;

/// Shows each change of the pods.
async fn follow(session: &Session, wanted: NamedPods, args: WatchArgs) -> Result<(), CliError> {
    let scope = session.scope();
    let is_wanted = |entry: &PodEntry| match &wanted {
        Some(names) => names.contains(&(entry.document.namespace.clone(), entry.document.name.clone())),
        None => scope.contains(&entry.document.namespace),
    };
    let mut printer = Printer::new(session.format(), args, header(session), "STATUS");
    let mut tracker = RowTracker::default();
    // The pods of the current replay by UID. It is not sorted, but its rows are.
    let mut replay: Option<BTreeMap<String, PodEntry>> = None;
    let open = || {
        let request = session.agent.request(WatchPodsRequest::default());
        let mut client = session.agent.pod_sync();
        async move { client.watch_pods(request).await }
    };
    let end = watch::stream(&session.agent, ServiceName::PodSync, open, |signal| {
        let item = match signal {
            Signal::Opened => {
                tracker.begin_replay();
                replay = Some(BTreeMap::new());
                return Ok(());
            }
            Signal::Lost(_) => return Ok(()),
            Signal::Message(message) => message.item,
        };
        match item {
            Some(Item::Pod(document)) => {
                let entry = PodEntry::new(document);
                if !is_wanted(&entry) {
                    return Ok(());
                }
                if let Some(replay) = &mut replay {
                    replay.insert(entry.document.uid.clone(), entry);
                    return Ok(());
                }
                show(session, &mut printer, &mut tracker, &entry)
            }
            Some(Item::GoneUid(uid)) => {
                if let Some(replay) = &mut replay {
                    replay.remove(&uid);
                }
                tracker.remove(&uid).map_or(Ok(()), |row| printer.show(Change::Deleted, row))
            }
            Some(Item::Synced(_)) => {
                show_replay(session, &mut printer, &mut tracker, replay.take().unwrap_or_default())
            }
            None => Ok(()),
        }
    });
    Err(end.await)
}

/// Shows the pods of a complete replay, sorted by namespace and name, and those that are gone since the previous one.
fn show_replay(
    session: &Session,
    printer: &mut Printer,
    tracker: &mut RowTracker,
    pods: BTreeMap<String, PodEntry>,
) -> Result<(), CliError> {
    printer.hold();
    let mut entries: Vec<PodEntry> = pods.into_values().collect();
    entries.sort_by(|a, b| {
        (&a.document.namespace, &a.document.name).cmp(&(&b.document.namespace, &b.document.name))
    });
    for entry in &entries {
        show(session, printer, tracker, entry)?;
    }
    for row in tracker.end_replay() {
        printer.show(Change::Deleted, row)?;
    }
    printer.release()
}

fn show(
    session: &Session,
    printer: &mut Printer,
    tracker: &mut RowTracker,
    entry: &PodEntry,
) -> Result<(), CliError> {
    let row = row(session, entry)?;
    match tracker.set(&entry.document.uid, &row) {
        Some(change) => printer.show(change, row),
        None => Ok(()),
    }
}
