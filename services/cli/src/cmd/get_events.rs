//! `keelson get events`.

use std::collections::BTreeMap;

use futures_util::future::join_all;
use keelson_config::ServiceName;
use keelson_proto::keelson::events::v1::events_client::EventsClient;
use keelson_proto::keelson::events::v1::{Event, ListEventsRequest};
use keelson_service_kit::PeerChannel;
use serde_json::{Value, json};

use super::Session;
use crate::agent::ToldEvent;
use crate::args::WatchArgs;
use crate::error::Failure;
use crate::human;
use crate::output;
use crate::pods::{Scope, bare_name};
use crate::seen::{Change, Row};
use crate::table::Table;
use crate::watch::{Absences, POLL, Printer};

/// The namespace in which Kubernetes keeps events about objects without one.
const CLUSTER_WIDE: &str = "default";

/// Shows the events of all services, oldest first.
pub(crate) async fn run(session: &Session, about: Option<&str>, args: WatchArgs) -> Result<(), Failure> {
    let choice = Choice::of(session, about)?;
    if args.watch {
        return follow(session, &choice, args).await;
    }
    let (events, failures) = session.agent.events().await?;
    for failure in &failures {
        output::notice(&format!("{failure}; its events are missing"));
    }
    let node = choice.node(session).await;
    let chosen: Vec<&ToldEvent> =
        events.iter().filter(|told| choice.holds(&told.event, node.as_deref())).collect();
    if output::is_document(session.format()) {
        let items: Vec<Value> = chosen.iter().map(|told| document(told)).collect();
        let list = json!({"apiVersion": "v1", "kind": "EventList", "metadata": {}, "items": items});
        return output::print_document(session.format(), &list);
    }
    if chosen.is_empty() {
        output::notice("No events found.");
        return Ok(());
    }
    output::print(&table(session, &chosen).render(0))
}

/// The name of the node, which is the suffix of pods from manifests; `None` when nobody tells.
async fn node_name(session: &Session) -> Option<String> {
    if let Ok(node) = session.agent.node().await {
        return node["metadata"]["name"].as_str().map(ToOwned::to_owned);
    }
    let pods = crate::pods::list(&session.agent).await.ok()?;
    pods.into_iter().filter_map(|p| p.pod).map(|p| p.spec.node_name).find(|n| !n.is_empty())
}

fn namespace_of(event: &Event) -> &str {
    if event.namespace.is_empty() { CLUSTER_WIDE } else { &event.namespace }
}

/// The events that are shown.
pub(crate) struct Choice {
    scope: Scope,
    about: Option<About>,
}

impl Choice {
    /// What the flags of namespaces and `--for` name.
    ///
    /// # Errors
    /// `--for` names no type that has events.
    pub(crate) fn of(session: &Session, about: Option<&str>) -> Result<Self, Failure> {
        Ok(Self { scope: session.scope(), about: about.map(About::parse).transpose()? })
    }

    /// Whether this event of a node is among them; a node without a name is one that nobody can tell.
    pub(crate) fn holds(&self, event: &Event, node: Option<&str>) -> bool {
        self.scope.holds(namespace_of(event))
            && self.about.as_ref().is_none_or(|about| about.is_about(event, node))
    }

    /// The name of this node, where it takes part in the choice.
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
    fn parse(text: &str) -> Result<Self, Failure> {
        let (kind, name) = text.split_once('/').unwrap_or(("pod", text));
        let kind = match kind {
            "pod" | "pods" | "po" => "Pod",
            "node" | "nodes" | "no" => "Node",
            _ => {
                return Err(Failure::Usage {
                    message: format!("--for {text:?} names no type that has events"),
                    hint: "pod/NAME or node/NAME".into(),
                });
            }
        };
        Ok(Self { kind, name: name.to_owned() })
    }

    fn is_about(&self, event: &Event, node: Option<&str>) -> bool {
        // A pod of a manifest has the node's name behind its own.
        let of_a_manifest = |node: &str| event.name == format!("{}-{node}", bare_name(&self.name));
        event.kind == self.kind
            && (event.name == self.name
                || event.uid == self.name
                || (self.kind == "Pod" && node.is_some_and(of_a_manifest)))
    }
}

fn table(session: &Session, chosen: &[&ToldEvent]) -> Table {
    let mut table = Table::with_header(header(session));
    for told in chosen {
        table.row(cells(session, &told.event, told.service.as_str(), session.now));
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

/// An event that `source` has told, as a row below [`header`].
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

/// How far the events of a service are read.
struct Cursor {
    service: ServiceName,
    client: EventsClient<PeerChannel>,
    ring_id: String,
    after_sequence: u64,
}

/// Shows the events so far, then each as it is told; one that happens again is shown again, with its count.
async fn follow(session: &Session, choice: &Choice, args: WatchArgs) -> Result<(), Failure> {
    let node = choice.node(session).await;
    let mut printer = Printer::new(session.format(), args, header(session), "TYPE");
    let mut cursors: Vec<Cursor> = ServiceName::ALL
        .into_iter()
        .map(|service| {
            let client = session.agent.events_of(service);
            Cursor { service, client, ring_id: String::new(), after_sequence: 0 }
        })
        .collect();
    let (mut absences, mut first) = (Absences::default(), true);
    loop {
        let answers = join_all(cursors.iter_mut().map(|cursor| news(session, cursor))).await;
        let nobody = answers.iter().all(|(_, answer)| answer.is_err());
        let mut events = Vec::new();
        for (service, answer) in answers {
            match answer {
                Ok(news) => {
                    absences.back(service);
                    events.extend(news);
                }
                Err(failure) if nobody && first => return Err(failure),
                // Under systemd and compose there is no init, and nobody misses its events.
                Err(_) if service == ServiceName::Init => {}
                Err(failure) => absences.lost(service, || failure),
            }
        }
        first = false;
        events.sort_by_key(|told| (told.event.last_unix_nanos, told.event.sequence));
        printer.hold();
        for told in events {
            if choice.holds(&told.event, node.as_deref()) {
                let change = if told.event.count > 1 { Change::Modified } else { Change::Added };
                printer.show(change, row(session, &told))?;
            }
        }
        printer.release()?;
        tokio::time::sleep(POLL).await;
    }
}

/// The events of a service that have not been read yet.
async fn news(session: &Session, cursor: &mut Cursor) -> (ServiceName, Result<Vec<ToldEvent>, Failure>) {
    let service = cursor.service;
    let request =
        ListEventsRequest { ring_id: cursor.ring_id.clone(), after_sequence: cursor.after_sequence };
    let list = match cursor.client.list_events(session.agent.request(request)).await {
        Ok(answer) => answer.into_inner(),
        Err(status) => return (service, Err(session.agent.failure(service, status))),
    };
    if list.lost > 0 && list.ring_id == cursor.ring_id {
        output::notice(&format!("{} events of {service} were overwritten before they were read", list.lost));
    }
    cursor.ring_id = list.ring_id;
    cursor.after_sequence = list.last_sequence;
    (service, Ok(list.events.into_iter().map(|event| ToldEvent { service, event }).collect()))
}

/// An event as a watch shows it.
fn row(session: &Session, told: &ToldEvent) -> Row {
    let now = keelson_service_kit::now_unix_nanos();
    if output::is_document(session.format()) {
        return Row { document: document(told), ..Row::default() };
    }
    Row { cells: cells(session, &told.event, told.service.as_str(), now), ..Row::default() }
}

/// The event as a Kubernetes v1 Event.
fn document(told: &ToldEvent) -> Value {
    let event = &told.event;
    let component = format!("keelson-{}", told.service);
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

/// The rows of a `describe`: events about one object.
pub(crate) fn rows_about(
    events: &[ToldEvent],
    kind: &str,
    name: &str,
    uid: &str,
    now: i64,
) -> Option<String> {
    let mut table = Table::new(["Type", "Reason", "Age", "From", "Message"]);
    let about = |told: &&ToldEvent| {
        let e = &told.event;
        e.kind == kind && e.name == name && (uid.is_empty() || e.uid.is_empty() || e.uid == uid)
    };
    for told in events.iter().filter(about) {
        let event = &told.event;
        let mut seen = human::since(event.last_unix_nanos, now);
        if event.count > 1 {
            seen = format!("{seen} (x{} over {})", event.count, human::since(event.first_unix_nanos, now));
        }
        table.row(vec![
            event.r#type.clone(),
            event.reason.clone(),
            seen,
            told.service.to_string(),
            event.message.clone(),
        ]);
    }
    (!table.is_empty()).then(|| table.render(2))
}
