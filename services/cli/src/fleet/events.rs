//! `keelson get events --etcd`: the events that the nodes reported in the last hour, once or as a watch.

use std::collections::BTreeMap;

use keelson_etcd::{Entry, NodeKeys};
use keelson_proto::keelson::events::v1::Event;
use serde_json::{Value, json};

use super::etcd_error::from_etcd_error;
use super::get::place;
use super::nodes::Fleet;
use super::watch::{self, Keys, View};
use crate::args::WatchArgs;
use crate::cmd::get_events::{self, EventFilter};
use crate::error::CliError;
use crate::human;
use crate::output;
use crate::row_tracker::Row;
use crate::session::Session;
use crate::table::Table;
use crate::watch::Printer;

/// The last report of an event by its node.
#[derive(Debug, Clone, PartialEq)]
struct ReportedEvent {
    node: String,
    event: Event,
    /// The service that reported it.
    source: String,
    document: Value,
}

impl ReportedEvent {
    /// Reads an event; `None` if the entry is not one.
    fn parse(node: &str, entry: &Entry) -> Option<Self> {
        let document: Value = serde_json::from_slice(&entry.value).ok()?;
        let (last, _) = entry.key.rsplit('/').next()?.split_once('-')?;
        let at = |pointer: &str| document.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
        let text = |pointer: &str| at(pointer).to_owned();
        let event = Event {
            r#type: text("/type"),
            reason: text("/reason"),
            message: text("/message"),
            kind: text("/involvedObject/kind"),
            namespace: text("/involvedObject/namespace"),
            name: text("/involvedObject/name"),
            uid: text("/involvedObject/uid"),
            field_path: text("/involvedObject/fieldPath"),
            first_unix_nanos: human::nanos_of(Some(at("/firstTimestamp"))),
            last_unix_nanos: last.parse().ok()?,
            count: document["count"].as_u64().and_then(|count| count.try_into().ok()).unwrap_or(1),
            ..Event::default()
        };
        let source = text("/source/component");
        Some(Self { node: node.to_owned(), event, source, document })
    }

    /// The identity of the event, which all its repetitions share.
    fn id(&self) -> String {
        let Event { r#type, reason, message, kind, namespace, name, uid, field_path, .. } = &self.event;
        let first = self.event.first_unix_nanos.to_string();
        [&self.source, r#type, reason, message, kind, namespace, name, uid, field_path, &first]
            .map(String::as_str)
            .join("\0")
    }

    fn cells(&self, session: &Session, now: i64) -> Vec<String> {
        let mut cells = get_events::cells(session, &self.event, &self.source, now);
        cells.insert(cells.len() - 1, self.node.clone());
        cells
    }

    /// The event as a watch shows it.
    fn row(&self, session: &Session) -> Row {
        let mark = format!("{} {}", self.event.count, self.event.last_unix_nanos);
        if output::is_document(session.format()) {
            return Row { mark, cells: Vec::new(), document: self.document.clone() };
        }
        let now = keelson_service_kit::now_unix_nanos();
        Row { mark, cells: self.cells(session, now), document: Value::Null }
    }
}

/// Shows the events of the fleet, oldest first.
pub(crate) async fn run(
    session: &Session,
    fleet: &Fleet,
    about: Option<&str>,
    args: WatchArgs,
) -> Result<(), CliError> {
    let filter = EventFilter::new(session, about)?;
    if args.watch {
        return follow(session, fleet, &filter, args).await;
    }
    let mut events = Vec::new();
    for node in fleet.selected_nodes().await?.names() {
        let entries = fleet.etcd.list(&NodeKeys::new(&node).events()).await.map_err(from_etcd_error)?.entries;
        events.extend(events_of(&node, &filter, entries.iter()));
    }
    events.sort_by_key(|reported| reported.event.last_unix_nanos);
    if output::is_document(session.format()) {
        let items: Vec<Value> = events.into_iter().map(|reported| reported.document).collect();
        let list = json!({"apiVersion": "v1", "kind": "EventList", "metadata": {}, "items": items});
        return output::print_document(session.format(), &list);
    }
    if events.is_empty() {
        output::notice(&format!("No events found on {}.", place(fleet)));
        return Ok(());
    }
    let mut table = Table::with_header(header(session));
    for reported in &events {
        table.row(reported.cells(session, session.now));
    }
    output::print(&table.render(0))
}

/// The selected events of a node, sorted by time. A node writes each occurrence of an event under a key
/// of its own; the last one covers all.
fn events_of<'a>(
    node: &str,
    filter: &EventFilter,
    entries: impl Iterator<Item = &'a Entry>,
) -> Vec<ReportedEvent> {
    let mut last: BTreeMap<String, ReportedEvent> = BTreeMap::new();
    for reported in entries.filter_map(|entry| ReportedEvent::parse(node, entry)) {
        if filter.matches(&reported.event, Some(node)) {
            last.insert(reported.id(), reported);
        }
    }
    let mut all: Vec<ReportedEvent> = last.into_values().collect();
    all.sort_by_key(|reported| reported.event.last_unix_nanos);
    all
}

/// The header for events of this machine, with the node.
fn header(session: &Session) -> Vec<String> {
    let mut header = get_events::header(session);
    header.insert(header.len() - 1, "NODE".to_owned());
    header
}

async fn follow(
    session: &Session,
    fleet: &Fleet,
    filter: &EventFilter,
    args: WatchArgs,
) -> Result<(), CliError> {
    let rows = |node: &str, keys: &Keys| {
        let events = events_of(node, filter, keys.values());
        Ok(events.iter().map(|reported| (reported.id(), reported.row(session))).collect())
    };
    let printer = Printer::new(session.format(), args, header(session), "TYPE");
    watch::follow(fleet, View { printer, range: NodeKeys::events, rows, is_of_events: true }).await
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::agent::Agent;
    use crate::args::{Cli, Command, GetWhat};
    use crate::output::Colour;

    const MINUTE: i64 = 60_000_000_000;

    /// The session and the filter of a command line.
    fn session_and_filter(args: &[&str]) -> (Session, EventFilter) {
        let cli = Cli::try_parse_from(["keelson", "get", "events"].iter().chain(args)).unwrap();
        let Command::Get(get) = cli.command else { panic!("{:?}", cli.command) };
        let GetWhat::Events { about, .. } = get.what else { panic!("{:?}", get.what) };
        let agent = Agent::new("/nowhere".into(), cli.global.request_timeout);
        let session =
            Session { agent, colour: Colour::for_stdout(true), now: 60 * MINUTE, global: cli.global };
        let filter = EventFilter::new(&session, about.as_deref()).unwrap();
        (session, filter)
    }

    /// An entry as node-status writes it.
    fn entry(minute: i64, sequence: u64, count: u32, namespace: &str, name: &str, reason: &str) -> Entry {
        let kind = if namespace.is_empty() { "Node" } else { "Pod" };
        let value = json!({
            "kind": "Event", "type": "Warning", "reason": reason, "message": "it falls", "count": count,
            "involvedObject": {"kind": kind, "namespace": namespace, "name": name, "uid": "u", "fieldPath": ""},
            "firstTimestamp": "1970-01-01T00:01:00Z",
            "source": {"component": "pod-sync", "host": "n1"},
        });
        Entry {
            key: NodeKeys::new("n1").event(minute * MINUTE, "pod-sync", sequence),
            value: value.to_string().into_bytes(),
            create_revision: 1,
            mod_revision: 1,
            lease: 7,
        }
    }

    #[test]
    fn repeated_event_is_listed_once_and_other_objects_are_left_out() {
        let entries = [
            entry(1, 1, 1, "default", "web", "BackOff"),
            entry(2, 2, 1, "", "n1", "Rebooted"),
            entry(3, 3, 1, "other", "web", "BackOff"),
            entry(4, 4, 2, "default", "web", "BackOff"),
            entry(5, 5, 1, "default", "db-n1", "BackOff"),
            Entry { value: b"no event".to_vec(), ..entry(6, 6, 1, "", "", "") },
        ];
        for (args, expected) in [
            (&[][..], &["Rebooted n1 1", "BackOff web 2", "BackOff db-n1 1"][..]),
            (&["-A"], &["Rebooted n1 1", "BackOff web 1", "BackOff web 2", "BackOff db-n1 1"]),
            (&["--for", "pod/web"], &["BackOff web 2"]),
            (&["--for", "pod/db"], &["BackOff db-n1 1"]),
            (&["--for", "node/n1"], &["Rebooted n1 1"]),
            (&["--for", "pod/n1"], &[]),
        ] {
            let (_, filter) = session_and_filter(args);
            let events = events_of("n1", &filter, entries.iter());
            let shown: Vec<String> = events
                .iter()
                .map(|reported| {
                    let event = &reported.event;
                    format!("{} {} {}", event.reason, event.name, event.count)
                })
                .collect();
            assert_eq!(shown, expected, "{args:?}");
        }
    }

    #[test]
    fn fleet_event_row_has_the_node_before_the_message() {
        for (args, names, values) in [
            (
                &[][..],
                "LAST SEEN|TYPE|REASON|OBJECT|COUNT|NODE|MESSAGE",
                "20m|Warning|BackOff|pod/web|3|n1|it falls",
            ),
            (
                &["-A", "-o", "wide"],
                "NAMESPACE|LAST SEEN|TYPE|REASON|OBJECT|COUNT|SUBOBJECT|SOURCE|FIRST SEEN|NODE|MESSAGE",
                "default|20m|Warning|BackOff|pod/web|3||pod-sync|59m|n1|it falls",
            ),
        ] {
            let (session, filter) = session_and_filter(args);
            let events = events_of("n1", &filter, [entry(40, 9, 3, "default", "web", "BackOff")].iter());
            assert_eq!(header(&session).join("|"), names);
            assert_eq!(events[0].cells(&session, session.now).join("|"), values);
        }
    }
}
