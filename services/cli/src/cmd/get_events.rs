//! `keelson get events`.

use std::collections::BTreeMap;

use futures_util::future::join_all;
use keelson_config::ServiceName;
use keelson_proto::keelson::events::v1::events_client::EventsClient;
use keelson_proto::keelson::events::v1::{Event, ListEventsRequest};
use keelson_service_kit::PeerChannel;
use serde_json::{Value, json};

use crate::agent::ServiceEvent;
use crate::args::WatchArgs;
use crate::error::CliError;
use crate::human;
use crate::output;
use crate::pods::{Scope, bare_name};
use crate::row_tracker::{Change, Row};
use crate::session::Session;
use crate::table::Table;
use crate::watch::{OutageNotices, POLL_INTERVAL, Printer};

/// The namespace of events about cluster-scoped objects, as in Kubernetes.
const CLUSTER_SCOPED_NAMESPACE: &str = "default";

/// Shows the events of all services, oldest first.
pub(crate) async fn run(session: &Session, about: Option<&str>, args: WatchArgs) -> Result<(), CliError> {
    let filter = EventFilter::new(session, about)?;
    if args.watch {
        return follow(session, &filter, args).await;
    }
    let (events, errors) = session.agent.events().await?;
    for error in &errors {
        output::notice(&format!("{error}; its events are missing"));
    }
    let node = filter.node(session).await;
    let chosen: Vec<&ServiceEvent> =
        events.iter().filter(|entry| filter.matches(&entry.event, node.as_deref())).collect();
    if output::is_document(session.format()) {
        let items: Vec<Value> = chosen.iter().map(|entry| document(entry)).collect();
        let list = json!({"apiVersion": "v1", "kind": "EventList", "metadata": {}, "items": items});
        return output::print_document(session.format(), &list);
    }
    if chosen.is_empty() {
        output::notice("No events found.");
        return Ok(());
    }
    output::print(&table(session, &chosen).render(0))
}

/// The name of the node, which is the suffix of pods from manifests; `None` when it is unknown.
async fn node_name(session: &Session) -> Option<String> {
    if let Ok(node) = session.agent.node().await {
        return node["metadata"]["name"].as_str().map(ToOwned::to_owned);
    }
    let pods = crate::pods::list(&session.agent).await.ok()?;
    pods.into_iter().filter_map(|p| p.pod).map(|p| p.spec.node_name).find(|n| !n.is_empty())
}

fn namespace_of(event: &Event) -> &str {
    if event.namespace.is_empty() { CLUSTER_SCOPED_NAMESPACE } else { &event.namespace }
}

/// Selects the events to show.
pub(crate) struct EventFilter {
    scope: Scope,
    about: Option<About>,
}

impl EventFilter {
    /// The filter of the namespace flags and `--for`.
    ///
    /// # Errors
    /// `--for` names a type without events.
    pub(crate) fn new(session: &Session, about: Option<&str>) -> Result<Self, CliError> {
        Ok(Self { scope: session.scope(), about: about.map(About::parse).transpose()? })
    }

    /// Whether the event of a node is selected. `node`: the node's name, if it is known.
    pub(crate) fn matches(&self, event: &Event, node: Option<&str>) -> bool {
        self.scope.contains(namespace_of(event))
            && self.about.as_ref().is_none_or(|about| about.matches(event, node))
    }

    /// The name of this node, if the filter needs it.
    async fn node(&self, session: &Session) -> Option<String> {
        if self.about.is_some() { node_name(session).await } else { None }
    }
}

/// The object that `--for` names.
struct About {
    kind: &'static str,
    name: String,
}

impl About {
    fn parse(text: &str) -> Result<Self, CliError> {
        let (kind, name) = text.split_once('/').unwrap_or(("pod", text));
        let kind = match kind {
            "pod" | "pods" | "po" => "Pod",
            "node" | "nodes" | "no" => "Node",
            _ => {
                return Err(CliError::Usage {
                    message: format!("--for {text:?} names a type without events"),
                    hint: "use pod/NAME or node/NAME".into(),
                });
            }
        };
        Ok(Self { kind, name: name.to_owned() })
    }

    fn matches(&self, event: &Event, node: Option<&str>) -> bool {
        // The name of a pod from a manifest ends with the node's name.
        let is_static_pod = |node: &str| event.name == format!("{}-{node}", bare_name(&self.name));
        event.kind == self.kind
            && (event.name == self.name
                || event.uid == self.name
                || (self.kind == "Pod" && node.is_some_and(is_static_pod)))
    }
}

fn table(session: &Session, chosen: &[&ServiceEvent]) -> Table {
    let mut table = Table::with_header(header(session));
    for entry in chosen {
        table.row(cells(session, &entry.event, entry.service.as_str(), session.now));
    }
    table
}

/// The names of the columns.
pub(crate) fn header(session: &Session) -> Vec<String> {
    let mut header = vec!["LAST SEEN", "TYPE", "REASON", "OBJECT", "COUNT"];
    if session.global.all_namespaces {
        header.insert(0, "NAMESPACE");
    }
    if session.is_wide() {
        header.extend(["SUBOBJECT", "SOURCE", "FIRST SEEN"]);
    }
    header.push("MESSAGE");
    header.into_iter().map(ToOwned::to_owned).collect()
}

/// An event that `source` reported, as a row below [`header`].
pub(crate) fn cells(session: &Session, event: &Event, source: &str, now: i64) -> Vec<String> {
    let mut cells = Vec::with_capacity(10);
    if session.global.all_namespaces {
        cells.push(namespace_of(event).to_owned());
    }
    cells.extend([
        human::since(event.last_unix_nanos, now),
        event.r#type.clone(),
        event.reason.clone(),
        format!("{}/{}", event.kind.to_lowercase(), event.name),
        event.count.max(1).to_string(),
    ]);
    if session.is_wide() {
        cells.push(event.field_path.clone());
        cells.push(source.to_owned());
        cells.push(human::since(event.first_unix_nanos, now));
    }
    cells.push(event.message.clone());
    cells
}

/// The position up to which the events of a service have been read.
struct Cursor {
    service: ServiceName,
    client: EventsClient<PeerChannel>,
    ring_id: String,
    after_sequence: u64,
}

/// Shows the past events, then each new one; an event that happens again is shown again, with its count.
async fn follow(session: &Session, filter: &EventFilter, args: WatchArgs) -> Result<(), CliError> {
    let node = filter.node(session).await;
    let mut printer = Printer::new(session.format(), args, header(session), "TYPE");
    let mut cursors: Vec<Cursor> = ServiceName::ALL
        .into_iter()
        .map(|service| {
            let client = session.agent.events_of(service);
            Cursor { service, client, ring_id: String::new(), after_sequence: 0 }
        })
        .collect();
    let (mut outages, mut first) = (OutageNotices::default(), true);
    loop {
        let answers = join_all(cursors.iter_mut().map(|cursor| new_events(session, cursor))).await;
        let all_failed = answers.iter().all(|(_, answer)| answer.is_err());
        let mut events = Vec::new();
        for (service, answer) in answers {
            match answer {
                Ok(new) => {
                    outages.back(service);
                    events.extend(new);
                }
                Err(error) if all_failed && first => return Err(error),
                // Under systemd and Docker Compose there is no init, so its events are not missing.
                Err(_) if service == ServiceName::Init => {}
                Err(error) => outages.lost(service, || error),
            }
        }
        first = false;
        events.sort_by_key(|entry| (entry.event.last_unix_nanos, entry.event.sequence));
        printer.hold();
        for entry in events {
            if filter.matches(&entry.event, node.as_deref()) {
                let change = if entry.event.count > 1 { Change::Modified } else { Change::Added };
                printer.show(change, row(session, &entry))?;
            }
        }
        printer.release()?;
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Reads the events of a service since the cursor, and advances it.
async fn new_events(
    session: &Session,
    cursor: &mut Cursor,
) -> (ServiceName, Result<Vec<ServiceEvent>, CliError>) {
    let service = cursor.service;
    let request =
        ListEventsRequest { ring_id: cursor.ring_id.clone(), after_sequence: cursor.after_sequence };
    let list = match cursor.client.list_events(session.agent.request(request)).await {
        Ok(answer) => answer.into_inner(),
        Err(status) => return (service, Err(session.agent.call_error(service, status))),
    };
    if list.lost > 0 && list.ring_id == cursor.ring_id {
        output::notice(&format!("{} events of {service} were overwritten before they were read", list.lost));
    }
    cursor.ring_id = list.ring_id;
    cursor.after_sequence = list.last_sequence;
    (service, Ok(list.events.into_iter().map(|event| ServiceEvent { service, event }).collect()))
}

/// An event as a watch shows it.
fn row(session: &Session, entry: &ServiceEvent) -> Row {
    let now = keelson_service_kit::now_unix_nanos();
    if output::is_document(session.format()) {
        return Row { document: document(entry), ..Row::default() };
    }
    Row { cells: cells(session, &entry.event, entry.service.as_str(), now), ..Row::default() }
}

/// The event as a Kubernetes v1 Event.
fn document(entry: &ServiceEvent) -> Value {
    let event = &entry.event;
    let component = format!("keelson-{}", entry.service);
    let mut object = json!({
        "apiVersion": "v1",
        "kind": event.kind,
        "name": event.name,
        "uid": event.uid,
    });
    if !event.namespace.is_empty() {
        object["namespace"] = json!(event.namespace);
    }
    if !event.field_path.is_empty() {
        object["fieldPath"] = json!(event.field_path);
    }
    let mut metadata = json!({
        "name": format!("{}.{:x}-{:x}", event.name, event.first_unix_nanos, event.sequence),
        "namespace": namespace_of(event),
        "creationTimestamp": human::rfc3339(event.first_unix_nanos),
    });
    if !event.annotations.is_empty() {
        metadata["annotations"] = json!(event.annotations.iter().collect::<BTreeMap<_, _>>());
    }
    json!({
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": metadata,
        "involvedObject": object,
        "reason": event.reason,
        "message": event.message,
        "source": {"component": component},
        "firstTimestamp": human::rfc3339(event.first_unix_nanos),
        "lastTimestamp": human::rfc3339(event.last_unix_nanos),
        "count": event.count.max(1),
        "type": event.r#type,
        "eventTime": null,
        "reportingComponent": component,
        "reportingInstance": "",
    })
}

/// The events about one object, as a table for `describe`.
pub(crate) fn rows_about(
    events: &[ServiceEvent],
    kind: &str,
    name: &str,
    uid: &str,
    now: i64,
) -> Option<String> {
    let mut table = Table::new(["Type", "Reason", "Age", "From", "Message"]);
    let about = |entry: &&ServiceEvent| {
        let e = &entry.event;
        e.kind == kind && e.name == name && (uid.is_empty() || e.uid.is_empty() || e.uid == uid)
    };
    for entry in events.iter().filter(about) {
        let event = &entry.event;
        let mut age = human::since(event.last_unix_nanos, now);
        if event.count > 1 {
            age = format!("{age} (x{} over {})", event.count, human::since(event.first_unix_nanos, now));
        }
        table.row(vec![
            event.r#type.clone(),
            event.reason.clone(),
            age,
            entry.service.to_string(),
            event.message.clone(),
        ]);
    }
    (!table.is_empty()).then(|| table.render(2))
}
