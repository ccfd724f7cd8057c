//! `keelson get events`.

use serde_json::{Value, json};

use super::Session;
use crate::agent::ToldEvent;
use crate::error::Failure;
use crate::human;
use crate::output;
use crate::pods::{Scope, bare_name};
use crate::table::Table;

/// The namespace in which Kubernetes keeps events about objects without one.
const CLUSTER_WIDE: &str = "default";

/// Shows the events of all services, oldest first.
pub(crate) async fn run(session: &Session, about: Option<&str>) -> Result<(), Failure> {
    let (events, failures) = session.agent.events().await?;
    for failure in &failures {
        output::notice(&format!("{failure}; its events are missing"));
    }
    let about = match about {
        Some(text) => Some(About::parse(text, node_name(session).await)?),
        None => None,
    };
    let scope = session.scope();
    let chosen: Vec<&ToldEvent> = events
        .iter()
        .filter(|told| in_scope(&scope, told) && about.as_ref().is_none_or(|a| a.is_about(told)))
        .collect();
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

fn namespace_of(told: &ToldEvent) -> &str {
    if told.event.namespace.is_empty() { CLUSTER_WIDE } else { &told.event.namespace }
}

fn in_scope(scope: &Scope, told: &ToldEvent) -> bool {
    scope.holds(namespace_of(told))
}

/// The object that `--for` names.
struct About {
    kind: String,
    names: Vec<String>,
}

impl About {
    fn parse(text: &str, node: Option<String>) -> Result<Self, Failure> {
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
        let mut names = vec![name.to_owned()];
        if kind == "Pod" {
            names.extend(node.map(|node| format!("{}-{node}", bare_name(name))));
        }
        Ok(Self { kind: kind.to_owned(), names })
    }

    fn is_about(&self, told: &ToldEvent) -> bool {
        told.event.kind == self.kind
            && (self.names.contains(&told.event.name) || self.names.contains(&told.event.uid))
    }
}

fn table(session: &Session, chosen: &[&ToldEvent]) -> Table {
    let mut header = vec!["LAST SEEN", "TYPE", "REASON", "OBJECT", "COUNT"];
    if session.global.all_namespaces {
        header.insert(0, "NAMESPACE");
    }
    if session.is_wide() {
        header.extend(["SUBOBJECT", "SOURCE", "FIRST SEEN"]);
    }
    header.push("MESSAGE");
    let mut table = Table::with_header(header.into_iter().map(ToOwned::to_owned).collect());
    for told in chosen {
        let event = &told.event;
        let mut cells = Vec::with_capacity(10);
        if session.global.all_namespaces {
            cells.push(namespace_of(told).to_owned());
        }
        cells.extend([
            human::since(event.last_unix_nanos, session.now),
            event.r#type.clone(),
            event.reason.clone(),
            format!("{}/{}", event.kind.to_lowercase(), event.name),
            event.count.max(1).to_string(),
        ]);
        if session.is_wide() {
            cells.push(event.field_path.clone());
            cells.push(told.service.to_string());
            cells.push(human::since(event.first_unix_nanos, session.now));
        }
        cells.push(event.message.clone());
        table.row(cells);
    }
    table
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
    json!({
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": format!("{}.{:x}-{:x}", event.name, event.first_unix_nanos, event.sequence),
            "namespace": namespace_of(told),
            "creationTimestamp": human::rfc3339(event.first_unix_nanos),
        },
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
