//! `keelson get pods`.

use serde_json::{Value, json};

use super::Session;
use crate::error::Failure;
use crate::human;
use crate::output;
use crate::pods::{self, PodEntry};
use crate::status::summarise;
use crate::table::Table;

/// Shows the pods of the namespace, or those that are named.
pub(crate) async fn run(session: &Session, names: &[String]) -> Result<(), Failure> {
    let all = pods::list(&session.agent).await?;
    let scope = session.scope();
    let mut chosen: Vec<&PodEntry> = Vec::new();
    for name in names {
        chosen.push(pods::resolve(&session.agent, &all, &scope, name).await?);
    }
    if names.is_empty() {
        chosen.extend(all.iter().filter(|p| scope.holds(&p.document.namespace)));
    }
    if output::is_document(session.format()) {
        return documents(session, &chosen, names.len() == 1);
    }
    if chosen.is_empty() {
        output::notice(&nothing(session, all.len()));
        return Ok(());
    }
    output::print(&table(session, &chosen).render(0))
}

fn nothing(session: &Session, elsewhere: usize) -> String {
    match &session.scope().namespace {
        None => "No pods found on this node.".into(),
        Some(namespace) if elsewhere == 0 => format!("No pods found in namespace {namespace}."),
        Some(namespace) => {
            format!("No pods found in namespace {namespace}; -A shows {elsewhere} in other namespaces.")
        }
    }
}

fn documents(session: &Session, chosen: &[&PodEntry], single: bool) -> Result<(), Failure> {
    let items = chosen.iter().map(|p| p.json()).collect::<Result<Vec<Value>, _>>()?;
    if single && let [one] = items.as_slice() {
        return output::print_document(session.format(), one);
    }
    let list = json!({"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": items});
    output::print_document(session.format(), &list)
}

fn table(session: &Session, chosen: &[&PodEntry]) -> Table {
    let all_namespaces = session.global.all_namespaces;
    let wide = session.is_wide();
    let mut header = vec!["NAME", "READY", "STATUS", "RESTARTS", "AGE"];
    if all_namespaces {
        header.insert(0, "NAMESPACE");
    }
    if wide {
        header.extend(["IP", "NODE", "SOURCE"]);
    }
    let mut table = Table::with_header(header.into_iter().map(ToOwned::to_owned).collect());
    for entry in chosen {
        let mut cells = Vec::with_capacity(9);
        if all_namespaces {
            cells.push(entry.document.namespace.clone());
        }
        cells.push(entry.document.name.clone());
        match &entry.pod {
            Some(pod) => {
                let summary = summarise(pod);
                cells.push(format!("{}/{}", summary.ready, summary.total));
                cells.push(summary.status.clone());
                cells.push(summary.restarts_text(session.now));
            }
            None => cells.extend(["?/?".into(), "Unreadable".into(), "?".into()]),
        }
        cells.push(human::since(entry.created(), session.now));
        if wide {
            let or_none = |text: Option<&str>| text.filter(|t| !t.is_empty()).unwrap_or("<none>").to_owned();
            let pod = entry.pod.as_ref();
            cells.push(or_none(pod.map(|p| p.status.pod_ip.as_str())));
            cells.push(or_none(pod.map(|p| p.spec.node_name.as_str())));
            cells.push(or_none(Some(&entry.document.source)));
        }
        table.row(cells);
    }
    table
}
