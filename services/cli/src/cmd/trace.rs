//! `keelson trace pod`.

use futures_util::future::join_all;
use keelson_config::ServiceName;
use keelson_proto::keelson::admin::v1::{ListSpansRequest, ListSpansResponse};
use serde_json::{Value, json};

use super::Session;
use crate::error::Failure;
use crate::human;
use crate::output;
use crate::pods::{self, PodEntry};
use crate::terminal;
use crate::waterfall::{self, LastStart, Step};

/// The services that take part in the start of a pod.
const PART: [ServiceName; 6] = [
    ServiceName::PodConfig,
    ServiceName::PodSync,
    ServiceName::ResourceManager,
    ServiceName::VolumeManager,
    ServiceName::RuntimeShim,
    ServiceName::NodeStatus,
];

type Answer = (ServiceName, Result<ListSpansResponse, Failure>);

/// Shows the last start of each pod that is named.
pub(crate) async fn run(session: &Session, names: &[String]) -> Result<(), Failure> {
    let all = pods::list(&session.agent).await?;
    let mut documents = Vec::new();
    for (index, name) in names.iter().enumerate() {
        let entry = pods::resolve(&session.agent, &all, &session.scope(), name).await?;
        let (start, told) = gather(session, entry).await;
        let start = start.ok_or_else(|| nothing(entry, &told))?;
        if output::is_document(session.format()) {
            documents.push(document(entry, &start, &told));
            continue;
        }
        let gap = if index > 0 { "\n" } else { "" };
        let width = terminal::size().map(|size| usize::try_from(size.width).unwrap_or(usize::MAX));
        let drawn = waterfall::draw(&start, width);
        output::print(&format!("{gap}{}\n\n{drawn}{}", heading(entry, &start), footing(&start, &told)))?;
    }
    match documents.as_slice() {
        [] => Ok(()),
        [one] => output::print_document(session.format(), one),
        several => output::print_document(session.format(), &json!({"items": several})),
    }
}

/// What is said beside the spans.
#[derive(Debug, Default)]
struct Told {
    trace: String,
    /// Services that have nothing or not all to tell, and why.
    missing: Vec<(ServiceName, String)>,
    /// Spans that were given up.
    left_out: u32,
}

/// Asks every service, and chooses the newest trace with a start in it. A pod has a trace for each change that it has
/// seen; the one of the latest is in its document, and pod-config and pod-sync know others by the pod's UID.
async fn gather(session: &Session, entry: &PodEntry) -> (Option<LastStart>, Told) {
    let mut ids: Vec<String> =
        entry.document.traceparent.split('-').nth(1).map(ToOwned::to_owned).into_iter().collect();
    let by_pod = ListSpansRequest { trace_ids: ids.clone(), pod_uid: entry.document.uid.clone() };
    for (_, answer) in ask(session, &by_pod).await {
        ids.extend(answer.into_iter().flat_map(|answer| answer.traces).map(|trace| trace.trace_id));
    }
    ids.sort_unstable();
    ids.dedup();
    let answers = ask(session, &ListSpansRequest { trace_ids: ids.clone(), pod_uid: String::new() }).await;
    let newest = ids.iter().max_by_key(|id| {
        let steps = steps(&answers, id);
        let begin = steps.iter().map(Step::start).min();
        (steps.iter().any(Step::is_start), begin)
    });
    let Some(id) = newest.cloned() else {
        return (None, Told { missing: absent(&answers), ..Told::default() });
    };
    let left_out = traces(&answers, &id).map(|(_, trace)| trace.left_out).sum();
    let start = waterfall::last_start(steps(&answers, &id));
    let mut missing = absent(&answers);
    if let Some(start) = &start {
        missing.extend(begun_later(&answers, start));
    }
    (start, Told { trace: id, missing, left_out })
}

async fn ask(session: &Session, request: &ListSpansRequest) -> Vec<Answer> {
    join_all(
        PART.map(|service| async move { (service, session.agent.spans(service, request.clone()).await) }),
    )
    .await
}

fn traces<'a>(
    answers: &'a [Answer],
    id: &'a str,
) -> impl Iterator<Item = (ServiceName, &'a keelson_proto::keelson::admin::v1::Trace)> {
    let told = answers.iter().filter_map(|(service, answer)| Some((*service, answer.as_ref().ok()?)));
    told.flat_map(move |(service, answer)| {
        answer.traces.iter().filter(move |trace| trace.trace_id == id).map(move |trace| (service, trace))
    })
}

fn steps(answers: &[Answer], id: &str) -> Vec<Step> {
    let of = |(service, trace): (ServiceName, &keelson_proto::keelson::admin::v1::Trace)| {
        let step = move |span| Step { service: service.to_string(), span };
        trace.spans.clone().into_iter().map(step)
    };
    traces(answers, id).flat_map(of).collect()
}

fn absent(answers: &[Answer]) -> Vec<(ServiceName, String)> {
    let failed =
        answers.iter().filter_map(|(service, answer)| Some((*service, answer.as_ref().err()?.to_string())));
    failed.collect()
}

/// Services that began after the start had: what their processes did before is lost.
fn begun_later(answers: &[Answer], start: &LastStart) -> Vec<(ServiceName, String)> {
    let late = answers.iter().filter_map(|(service, answer)| {
        let began = answer.as_ref().ok()?.started_unix_nanos;
        let text = if began > start.end {
            format!("{service} was started anew after this start and has nothing to tell of it")
        } else if began > start.begin {
            let after = waterfall::time(began - start.begin);
            format!("{service} began {after} into this start; what it did before is lost")
        } else {
            return None;
        };
        Some((*service, text))
    });
    late.collect()
}

fn nothing(entry: &PodEntry, told: &Told) -> Failure {
    let why = match told.missing.as_slice() {
        [] => "each service keeps the last starts since its own process began".to_owned(),
        missing => missing.iter().map(|(_, text)| text.as_str()).collect::<Vec<_>>().join("; "),
    };
    Failure::NotFound {
        what: format!(
            "no service has kept anything of the start of {}/{}",
            entry.document.namespace, entry.document.name
        ),
        hint: format!("{why}; `keelson explain pod {}` says how the pod is now", entry.document.name),
    }
}

fn heading(entry: &PodEntry, start: &LastStart) -> String {
    let took = waterfall::time(start.end - start.begin);
    let end = if start.ready { format!("ready after {took}") } else { format!("not ready, {took} so far") };
    let when = human::rfc3339(start.begin).unwrap_or_default();
    format!("pod/{} in {}: {end}, since {when}", entry.document.name, entry.document.namespace)
}

fn footing(start: &LastStart, told: &Told) -> String {
    let mut text = String::new();
    let mut line = |told: &str| {
        text.push_str(if text.is_empty() { "\n" } else { "" });
        text.push_str(told);
        text.push('\n');
    };
    for (_, why) in &told.missing {
        line(why);
    }
    if start.others > 0 {
        line(&format!("{} spans of earlier starts and of what came later are not shown.", start.others));
    }
    if told.left_out > 0 {
        line(&format!("{} spans were too many and are lost.", told.left_out));
    }
    line(&format!("Trace {}.", told.trace));
    text
}

fn document(entry: &PodEntry, start: &LastStart, told: &Told) -> Value {
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
        "traceId": told.trace,
        "startUnixNanos": start.begin,
        "durationNanos": start.end - start.begin,
        "ready": start.ready,
        "spans": spans.collect::<Vec<_>>(),
        "missing": told.missing.iter().map(|(service, why)| json!({"service": service.as_str(), "message": why})).collect::<Vec<_>>(),
        "otherSpans": start.others,
        "lostSpans": told.left_out,
    })
}
