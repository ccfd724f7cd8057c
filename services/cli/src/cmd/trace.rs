//! `keelson trace pod`.

use futures_util::future::join_all;
use keelson_config::ServiceName;
use keelson_proto::keelson::admin::v1::{ListSpansRequest, ListSpansResponse};
use serde_json::{Value, json};

use crate::error::CliError;
use crate::human;
use crate::output;
use crate::pods::{self, PodEntry};
use crate::session::Session;
use crate::terminal;
use crate::waterfall::{self, LastStart, ServiceSpan};

/// The services that take part in the start of a pod.
const SERVICES: [ServiceName; 6] = [
    ServiceName::PodConfig,
    ServiceName::PodSync,
    ServiceName::ResourceManager,
    ServiceName::VolumeManager,
    ServiceName::RuntimeShim,
    ServiceName::NodeStatus,
];

/// What a service answered.
type Answer = (ServiceName, Result<ListSpansResponse, CliError>);

/// Shows the last start of each named pod.
pub(crate) async fn run(session: &Session, names: &[String]) -> Result<(), CliError> {
    let all = pods::list(&session.agent).await?;
    let mut documents = Vec::new();
    for (index, name) in names.iter().enumerate() {
        let entry = pods::resolve(&session.agent, &all, &session.scope(), name).await?;
        let (start, details) = gather(session, entry).await;
        let start = start.ok_or_else(|| no_spans_error(entry, &details))?;
        if output::is_document(session.format()) {
            documents.push(document(entry, &start, &details));
            continue;
        }
        let gap = if index > 0 { "\n" } else { "" };
        let width = terminal::size().map(|size| usize::try_from(size.width).unwrap_or(usize::MAX));
        let drawn = waterfall::draw(&start, width);
        output::print(&format!("{gap}{}\n\n{drawn}{}", heading(entry, &start), footing(&start, &details)))?;
    }
    match documents.as_slice() {
        [] => Ok(()),
        [one] => output::print_document(session.format(), one),
        several => output::print_document(session.format(), &json!({"items": several})),
    }
}

/// The trace's id and what is missing from it.
#[derive(Debug, Default)]
struct TraceDetails {
    trace_id: String,
    /// Services whose spans are missing or incomplete, and why.
    missing: Vec<(ServiceName, String)>,
    /// Spans that services dropped because the trace was too long.
    left_out: u32,
}

/// Reads the spans of all services and selects the newest trace that contains a start. A pod has a trace for each of its
/// changes; the id of the latest is in its document, and pod-config and pod-sync find others by the pod's UID.
async fn gather(session: &Session, entry: &PodEntry) -> (Option<LastStart>, TraceDetails) {
    let mut ids: Vec<String> =
        entry.document.traceparent.split('-').nth(1).map(ToOwned::to_owned).into_iter().collect();
    let by_pod = ListSpansRequest { trace_ids: ids.clone(), pod_uid: entry.document.uid.clone() };
    for (_, answer) in list_spans(session, &by_pod).await {
        ids.extend(answer.into_iter().flat_map(|answer| answer.traces).map(|trace| trace.trace_id));
    }
    ids.sort_unstable();
    ids.dedup();
    let answers =
        list_spans(session, &ListSpansRequest { trace_ids: ids.clone(), pod_uid: String::new() }).await;
    let newest = ids.iter().max_by_key(|id| {
        let steps = steps(&answers, id);
        let begin = steps.iter().map(ServiceSpan::start).min();
        (steps.iter().any(ServiceSpan::is_start), begin)
    });
    let Some(id) = newest.cloned() else {
        return (None, TraceDetails { missing: errors_of(&answers), ..TraceDetails::default() });
    };
    let left_out = traces(&answers, &id).map(|(_, trace)| trace.left_out).sum();
    let start = waterfall::last_start(steps(&answers, &id));
    let mut missing = errors_of(&answers);
    if let Some(start) = &start {
        missing.extend(restarted_since(&answers, start));
    }
    (start, TraceDetails { trace_id: id, missing, left_out })
}

async fn list_spans(session: &Session, request: &ListSpansRequest) -> Vec<Answer> {
    join_all(
        SERVICES.map(|service| async move { (service, session.agent.spans(service, request.clone()).await) }),
    )
    .await
}

fn traces<'a>(
    answers: &'a [Answer],
    id: &'a str,
) -> impl Iterator<Item = (ServiceName, &'a keelson_proto::keelson::admin::v1::Trace)> {
    let answered = answers.iter().filter_map(|(service, answer)| Some((*service, answer.as_ref().ok()?)));
    answered.flat_map(move |(service, answer)| {
        answer.traces.iter().filter(move |trace| trace.trace_id == id).map(move |trace| (service, trace))
    })
}

fn steps(answers: &[Answer], id: &str) -> Vec<ServiceSpan> {
    let of = |(service, trace): (ServiceName, &keelson_proto::keelson::admin::v1::Trace)| {
        let step = move |span| ServiceSpan { service: service.to_string(), span };
        trace.spans.clone().into_iter().map(step)
    };
    traces(answers, id).flat_map(of).collect()
}

fn errors_of(answers: &[Answer]) -> Vec<(ServiceName, String)> {
    let failed =
        answers.iter().filter_map(|(service, answer)| Some((*service, answer.as_ref().err()?.to_string())));
    failed.collect()
}

/// Services that were started after the start began: the earlier spans of their processes are lost.
fn restarted_since(answers: &[Answer], start: &LastStart) -> Vec<(ServiceName, String)> {
    let late = answers.iter().filter_map(|(service, answer)| {
        let began = answer.as_ref().ok()?.started_unix_nanos;
        let text = if began > start.end {
            format!("{service} was restarted after this start and has no spans of it")
        } else if began > start.begin {
            let after = waterfall::time(began - start.begin);
            format!("{service} was started {after} into this start; its earlier spans are lost")
        } else {
            return None;
        };
        Some((*service, text))
    });
    late.collect()
}

fn no_spans_error(entry: &PodEntry, details: &TraceDetails) -> CliError {
    let why = match details.missing.as_slice() {
        [] => "each service keeps only the last starts since its own process began".to_owned(),
        missing => missing.iter().map(|(_, text)| text.as_str()).collect::<Vec<_>>().join("; "),
    };
    CliError::NotFound {
        what: format!(
            "no service has kept spans of the start of {}/{}",
            entry.document.namespace, entry.document.name
        ),
        hint: format!("{why}; `keelson explain pod {}` shows the state of the pod", entry.document.name),
    }
}

fn heading(entry: &PodEntry, start: &LastStart) -> String {
    let took = waterfall::time(start.end - start.begin);
    let end = if start.ready { format!("ready after {took}") } else { format!("not ready, {took} so far") };
    let when = human::rfc3339(start.begin).unwrap_or_default();
    format!("pod/{} in {}: {end}, since {when}", entry.document.name, entry.document.namespace)
}

fn footing(start: &LastStart, details: &TraceDetails) -> String {
    let mut text = String::new();
    let mut line = |sentence: &str| {
        text.push_str(if text.is_empty() { "\n" } else { "" });
        text.push_str(sentence);
        text.push('\n');
    };
    for (_, why) in &details.missing {
        line(why);
    }
    if start.others > 0 {
        line(&format!("{} spans before and after this start are not shown.", start.others));
    }
    if details.left_out > 0 {
        line(&format!("{} spans are lost: the trace had too many.", details.left_out));
    }
    line(&format!("Trace {}.", details.trace_id));
    text
}

fn document(entry: &PodEntry, start: &LastStart, details: &TraceDetails) -> Value {
    let spans = start.rows.iter().map(|(depth, step)| {
        json!({
            "service": step.service,
            "name": step.span.name,
            "detail": step.span.detail,
            "depth": depth,
            "spanId": step.span.span_id,
            "parentSpanId": step.span.parent_span_id,
            "offsetNanos": step.start() - start.begin,
            "durationNanos": step.span.duration_nanos,
        })
    });
    json!({
        "pod": {
            "namespace": entry.document.namespace,
            "name": entry.document.name,
            "uid": entry.document.uid,
        },
        "traceId": details.trace_id,
        "startUnixNanos": start.begin,
        "durationNanos": start.end - start.begin,
        "ready": start.ready,
        "spans": spans.collect::<Vec<_>>(),
        "missing": details.missing.iter().map(|(service, why)| json!({"service": service.as_str(), "message": why})).collect::<Vec<_>>(),
        "otherSpans": start.others,
        "lostSpans": details.left_out,
    })
}
