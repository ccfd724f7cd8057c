//! `keelson get sources`.

use keelson_proto::keelson::pod_config::v1::Source;
use serde_json::{Value, json};

use crate::error::CliError;
use crate::human;
use crate::output;
use crate::session::Session;
use crate::sources::{effect, location, warning_location};
use crate::table::{Table, printable};

/// Shows the pod sources and the manifests that they refuse.
pub(crate) async fn run(session: &Session) -> Result<(), CliError> {
    let sources = session.agent.sources().await?;
    if output::is_document(session.format()) {
        let items: Vec<Value> = sources.iter().map(document).collect();
        return output::print_document(session.format(), &json!({"items": items}));
    }
    if sources.is_empty() {
        output::notice("No source of pods is configured.");
        return Ok(());
    }
    let mut table = Table::new(["NAME", "READY", "PODS", "PROBLEMS", "LOCATION"]);
    for source in &sources {
        table.row(vec![
            source.name.clone(),
            source.ready.to_string(),
            source.pods.to_string(),
            source.problems.len().to_string(),
            source.location.clone(),
        ]);
    }
    let mut text = table.render(0);
    let problems = sources.iter().flat_map(|s| &s.problems);
    for problem in problems {
        text.push_str(&format!(
            "\n{}: {}\n  for {}; {}\n",
            location(problem),
            printable(&problem.message),
            human::since(problem.since_unix_nanos, session.now),
            effect(problem)
        ));
    }
    for warning in sources.iter().flat_map(|s| &s.warnings) {
        text.push_str(&format!(
            "\n{}{}\n  for {}; the rest of it is used\n",
            warning_location(warning),
            printable(&warning.message),
            human::since(warning.since_unix_nanos, session.now),
        ));
    }
    for pod in sources.iter().flat_map(|s| &s.waiting) {
        text.push_str(&format!(
            "\n{}: pod {}/{}\n  {}\n  for {}; the pod does not run\n",
            pod.origin,
            pod.namespace,
            pod.name,
            printable(&pod.message),
            human::since(pod.since_unix_nanos, session.now)
        ));
    }
    output::print(&text)
}

fn document(source: &Source) -> Value {
    let problems: Vec<Value> = source
        .problems
        .iter()
        .map(|p| {
            json!({
                "origin": p.origin,
                "line": (p.line != 0).then_some(p.line),
                "column": (p.column != 0).then_some(p.column),
                "message": p.message,
                "since": human::rfc3339(p.since_unix_nanos),
                "kept_pods": p.kept_pods,
            })
        })
        .collect();
    let warnings: Vec<Value> = source
        .warnings
        .iter()
        .map(|w| {
            json!({
                "origin": w.origin,
                "line": (w.line != 0).then_some(w.line),
                "pod": (!w.pod.is_empty()).then_some(&w.pod),
                "message": w.message,
                "since": human::rfc3339(w.since_unix_nanos),
            })
        })
        .collect();
    let waiting: Vec<Value> = source
        .waiting
        .iter()
        .map(|p| {
            json!({
                "origin": p.origin,
                "namespace": p.namespace,
                "name": p.name,
                "message": p.message,
                "since": human::rfc3339(p.since_unix_nanos),
            })
        })
        .collect();
    json!({
        "name": source.name,
        "location": source.location,
        "ready": source.ready,
        "pods": source.pods,
        "problems": problems,
        "warnings": warnings,
        "waiting": waiting,
    })
}
