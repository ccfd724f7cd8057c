//! `keelson describe pod`.

mod containers;

use futures_util::future::join;
use keelson_kube_model::Pod;
use keelson_proto::keelson::pod_sync::v1::Step;
use serde_json::Value;

use super::{explain, get_events};
use crate::agent::ServiceEvent;
use crate::describer::{Describer, map_lines, or_none};
use crate::error::CliError;
use crate::output::{self, Colour};
use crate::pods::{self, PodEntry};
use crate::session::Session;
use crate::status::summarise;
use crate::table::Table;

/// Describes the named pods, or all of the namespace.
pub(crate) async fn run(session: &Session, names: &[String]) -> Result<(), CliError> {
    let all = pods::list(&session.agent).await?;
    let scope = session.scope();
    let mut chosen = Vec::new();
    for name in names {
        chosen.push(pods::resolve(&session.agent, &all, &scope, name).await?);
    }
    if names.is_empty() {
        chosen.extend(all.iter().filter(|p| scope.contains(&p.document.namespace)));
    }
    if chosen.is_empty() {
        output::notice("No pods found.");
        return Ok(());
    }
    let events = match session.agent.events().await {
        Ok((events, errors)) => {
            for error in &errors {
                output::notice(&format!("{error}; its events are missing"));
            }
            events
        }
        Err(error) => {
            output::notice(&format!("{error}; all events are missing"));
            Vec::new()
        }
    };
    for (index, entry) in chosen.into_iter().enumerate() {
        let (text, waits) = join(async { describe(session, entry, &events) }, waits(session, entry)).await;
        let gap = if index > 0 { "\n\n" } else { "" };
        output::print(&format!("{gap}{}{waits}", text?))?;
    }
    Ok(())
}

fn describe(session: &Session, entry: &PodEntry, events: &[ServiceEvent]) -> Result<String, CliError> {
    let pod = entry.typed()?;
    let mut out = Describer::default();
    metadata(&mut out, entry, pod);
    containers::describe(&mut out, pod);
    conditions(&mut out, pod);
    volumes(&mut out, &entry.json()?);
    let document = &entry.document;
    let rows = get_events::rows_about(events, "Pod", &document.name, &document.uid, session.now);
    out.block("Events", rows.as_deref());
    Ok(out.finish())
}

fn metadata(out: &mut Describer, entry: &PodEntry, pod: &Pod) {
    let (meta, spec, status) = (&pod.metadata, &pod.spec, &pod.status);
    let mut shown = summarise(pod).status;
    if !status.phase.is_empty() && shown != status.phase {
        shown = format!("{shown} (phase {})", status.phase);
    }
    let ips: Vec<String> = status.pod_ips.iter().map(|ip| ip.ip.clone()).collect();
    let ips = if ips.is_empty() { status.pod_ip.clone() } else { ips.join("\n") };
    let node = if status.host_ip.is_empty() {
        spec.node_name.clone()
    } else {
        format!("{}/{}", spec.node_name, status.host_ip)
    };
    let mut pairs = vec![
        ("Name", meta.name.clone()),
        ("Namespace", meta.namespace.clone()),
        ("UID", entry.document.uid.clone()),
        ("Source", or_none(&entry.document.source)),
        ("Node", or_none(&node)),
        ("Start Time", or_none(status.start_time.as_deref().unwrap_or_default())),
        ("Labels", map_lines(&meta.labels, "=")),
        ("Annotations", map_lines(&meta.annotations, ": ")),
        ("Status", shown),
    ];
    if let Some(at) = &meta.deletion_timestamp {
        let grace = meta.deletion_grace_period_seconds.unwrap_or_else(|| pod.termination_grace());
        pairs.push(("Deleted At", format!("{at} with a grace of {grace} s")));
    }
    if !status.reason.is_empty() {
        pairs.push(("Reason", status.reason.clone()));
    }
    if !status.message.is_empty() {
        pairs.push(("Message", status.message.clone()));
    }
    pairs.push(("IPs", or_none(&ips)));
    if !spec.priority_class_name.is_empty() {
        pairs.push(("Priority Class", spec.priority_class_name.clone()));
    }
    pairs.push(("QoS Class", or_none(&status.qos_class)));
    pairs.push(("Restart Policy", or_none(&spec.restart_policy)));
    out.pairs(0, &pairs);
}

fn conditions(out: &mut Describer, pod: &Pod) {
    let mut table = Table::new(["Type", "Status", "Since", "Reason", "Message"]);
    for condition in &pod.status.conditions {
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

/// Volumes of any kind, also unknown ones: the type and its fields.
fn volumes(out: &mut Describer, pod: &Value) {
    let volumes = pod["spec"]["volumes"].as_array().map(Vec::as_slice).unwrap_or_default();
    if volumes.is_empty() {
        out.line(0, "Volumes:  <none>");
        return;
    }
    out.line(0, "Volumes:");
    for volume in volumes {
        out.line(2, &format!("{}:", volume["name"].as_str().unwrap_or_default()));
        let kinds = volume.as_object().into_iter().flatten().filter(|(key, _)| *key != "name");
        for (kind, source) in kinds {
            let mut pairs = vec![("Type", kind.clone())];
            for (key, value) in source.as_object().into_iter().flatten() {
                let text = value.as_str().map_or_else(|| value.to_string(), ToOwned::to_owned);
                pairs.push((key, text));
            }
            out.pairs(4, &pairs);
        }
    }
}

/// What the pod waits for; unlike `keelson explain`, without the completed steps.
async fn waits(session: &Session, entry: &PodEntry) -> String {
    let mut out = Describer::default();
    out.line(0, "Why it waits:");
    match explain::explain(session, entry).await {
        Ok(answer) => {
            out.line(2, &answer.summary);
            let open = |step: &&Step| !matches!(step.state.as_str(), "done" | "not reached");
            let steps: Vec<&Step> = answer.steps.iter().filter(open).collect();
            if !steps.is_empty() {
                out.raw(&explain::steps_table(&steps, session.now, Colour::for_stdout(true), 2));
            }
        }
        Err(error) => out.line(2, &format!("<unknown>: {error}")),
    }
    out.finish()
}
