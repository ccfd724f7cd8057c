//! `keelson explain pod`.

use keelson_config::ServiceName;
use keelson_proto::keelson::common::v1::PodRef;
use keelson_proto::keelson::pod_config::v1::{Source, SourceProblem, SourceWarning};
use keelson_proto::keelson::pod_sync::v1::{ExplainPodResponse, Step};
use serde_json::{Value, json};

use crate::error::CliError;
use crate::human;
use crate::output::{self, Colour};
use crate::pods::{self, PodEntry, bare_name};
use crate::session::Session;
use crate::sources::{effect, location, warning_location};
use crate::table::Table;

/// The owner of a step that needs a person.
const OPERATOR: &str = "you";

/// Explains the named pods.
pub(crate) async fn run(session: &Session, names: &[String]) -> Result<(), CliError> {
    let all = pods::list(&session.agent).await?;
    let mut documents = Vec::new();
    for (index, name) in names.iter().enumerate() {
        let answer = match pods::find(&all, &session.scope(), name) {
            Ok(entry) => explain(session, entry).await?,
            Err(error @ CliError::NotFound { .. }) => match explain_waiting(session, name).await {
                Some(answer) => answer,
                None => return explain_missing(session, name, error).await,
            },
            Err(error) => return Err(error),
        };
        if output::is_document(session.format()) {
            documents.push(document(&answer));
        } else {
            let gap = if index > 0 { "\n" } else { "" };
            output::print(&format!("{gap}{}", text(&answer, session.now, session.colour)))?;
        }
    }
    match documents.as_slice() {
        [] => Ok(()),
        [one] => output::print_document(session.format(), one),
        several => output::print_document(session.format(), &json!({"items": several})),
    }
}

/// The steps from pod-sync, preceded by errors and warnings of pod-config about the pod's manifest.
pub(crate) async fn explain(session: &Session, entry: &PodEntry) -> Result<ExplainPodResponse, CliError> {
    // Concurrently: pod-config completes the answer but is not needed for it.
    let (answer, sources) =
        futures_util::future::join(session.agent.explain(&entry.document.uid), session.agent.sources()).await;
    let mut answer = answer?;
    let full = format!("{}/{}", entry.document.namespace, entry.document.name);
    let first: Vec<Step> = match sources {
        Ok(sources) => {
            let problems = sources.iter().flat_map(|s| &s.problems);
            let warnings = sources.iter().flat_map(|s| &s.warnings);
            let refusals = problems.filter(|p| p.kept_pods.contains(&full)).map(refusal);
            refusals.chain(warnings.filter(|w| w.pod == full).map(warning)).collect()
        }
        Err(error) => pod_config_down(session, &error).await.into_iter().collect(),
    };
    answer.steps.splice(0..0, first);
    Ok(answer)
}

/// A step that says that pod-config does not read manifests. `None` if it answered with an error, so that it is running.
async fn pod_config_down(session: &Session, error: &CliError) -> Option<Step> {
    if !matches!(error, CliError::ServiceNotRunning { .. } | CliError::ServiceTimeout { .. }) {
        return None;
    }
    // init knows since when the service is down, unless it has not noticed yet or is down as well.
    let services = session.agent.services().await.unwrap_or_default();
    let own = services.into_iter().find(|service| service.name == ServiceName::PodConfig.as_str());
    let own = own.unwrap_or_default();
    Some(Step {
        name: "source".into(),
        state: "waiting".into(),
        subject: String::new(),
        message: format!("{error}; until it answers, new and changed manifests are not read"),
        owner: ServiceName::PodConfig.to_string(),
        since_unix_nanos: own.not_running_since_unix_nanos,
        next_retry_unix_nanos: own.next_start_unix_nanos,
    })
}

fn refusal(problem: &SourceProblem) -> Step {
    Step {
        name: "source".into(),
        state: "failed".into(),
        subject: String::new(),
        message: format!("{}: {}; {}", location(problem), problem.message, effect(problem)),
        owner: OPERATOR.into(),
        since_unix_nanos: problem.since_unix_nanos,
        next_retry_unix_nanos: 0,
    }
}

/// A step for a part of the pod's manifest that is ignored; it does not block the pod.
fn warning(warning: &SourceWarning) -> Step {
    Step {
        name: "source".into(),
        state: "done".into(),
        subject: "warning".into(),
        message: format!("{}{}", warning_location(warning), warning.message),
        owner: OPERATOR.into(),
        since_unix_nanos: warning.since_unix_nanos,
        next_retry_unix_nanos: 0,
    }
}

/// The steps of a pod that waits for the control plane after a reboot.
async fn explain_waiting(session: &Session, name: &str) -> Option<ExplainPodResponse> {
    let (sources, scope) = (session.agent.sources().await.ok()?, session.scope());
    let mut pods = sources.into_iter().flat_map(|source| source.waiting);
    let pod = pods.find(|pod| pod.name == bare_name(name) && scope.contains(&pod.namespace))?;
    let step = Step {
        name: "source".into(),
        state: "waiting".into(),
        subject: String::new(),
        message: format!("{}: {}", pod.origin, pod.message),
        owner: ServiceName::PodConfig.to_string(),
        since_unix_nanos: pod.since_unix_nanos,
        next_retry_unix_nanos: 0,
    };
    Some(ExplainPodResponse {
        pod: Some(PodRef { uid: String::new(), namespace: pod.namespace, name: pod.name }),
        phase: "Pending".into(),
        summary: "Waits for the control plane since the reboot.".into(),
        steps: vec![step],
    })
}

/// For a pod that does not exist: shows the refused manifests that may contain it, or that pod-config does not read
/// manifests at present.
async fn explain_missing(session: &Session, name: &str, error: CliError) -> Result<(), CliError> {
    let (steps, summary, error) = match session.agent.sources().await {
        Ok(sources) => {
            let steps = suspects(&sources, bare_name(name));
            let manifests = match steps.len() {
                0 => return Err(error),
                1 => "a manifest is refused".to_owned(),
                count => format!("{count} manifests are refused"),
            };
            let summary = format!("There is no such pod, but {manifests} that may contain it.");
            let hint = "correct the manifest; it is read again at once".into();
            (steps, summary, CliError::NotFound { what: error.to_string(), hint })
        }
        Err(source_error) => match pod_config_down(session, &source_error).await {
            None => return Err(error),
            Some(step) => {
                let summary =
                    "There is no such pod so far, and the service that reads manifests does not answer.";
                (vec![step], summary.to_owned(), source_error)
            }
        },
    };
    let answer = ExplainPodResponse {
        pod: Some(PodRef {
            uid: String::new(),
            namespace: session.global.namespace.clone(),
            name: bare_name(name).to_owned(),
        }),
        phase: "Unknown".into(),
        summary,
        steps,
    };
    if output::is_document(session.format()) {
        output::print_document(session.format(), &document(&answer))?;
    } else {
        output::print(&text(&answer, session.now, session.colour))?;
    }
    Err(error)
}

/// The refused manifests that mention the pod, or all of them if none does.
fn suspects(sources: &[Source], name: &str) -> Vec<Step> {
    let problems: Vec<&SourceProblem> = sources.iter().flat_map(|s| &s.problems).collect();
    let named: Vec<&SourceProblem> =
        problems.iter().copied().filter(|p| p.origin.contains(name) || p.message.contains(name)).collect();
    let chosen = if named.is_empty() { problems } else { named };
    chosen.into_iter().map(refusal).collect()
}

/// The summary and the steps as text.
pub(crate) fn text(answer: &ExplainPodResponse, now: i64, colour: Colour) -> String {
    let pod = answer.pod.clone().unwrap_or_default();
    let mut text =
        format!("pod/{} in {} ({}): {}\n\n", pod.name, pod.namespace, answer.phase, answer.summary);
    let steps: Vec<&Step> = answer.steps.iter().collect();
    text.push_str(&steps_table(&steps, now, colour, 2));
    text
}

/// A table of steps, each with a coloured mark for its state.
pub(crate) fn steps_table(steps: &[&Step], now: i64, colour: Colour, indent: usize) -> String {
    let mut table = Table::new(["", "STEP", "SUBJECT", "STATE", "SINCE", "OWNER", "NEXT RETRY", "MESSAGE"]);
    for step in steps {
        let since =
            if step.since_unix_nanos == 0 { String::new() } else { human::since(step.since_unix_nanos, now) };
        table.row(vec![
            mark(&step.state).0.into(),
            step.name.clone(),
            step.subject.clone(),
            step.state.clone(),
            since,
            step.owner.clone(),
            human::until(step.next_retry_unix_nanos, now),
            step.message.clone(),
        ]);
    }
    let plain = table.render(indent);
    let mut lines = plain.lines();
    let mut text = lines.next().map(|header| format!("{header}\n")).unwrap_or_default();
    for (line, step) in lines.zip(steps) {
        let (mark, sgr) = mark(&step.state);
        text.push_str(&line.replacen(mark, &colour.paint(sgr, mark), 1));
        text.push('\n');
    }
    text
}

/// The mark of a step's state and its colour.
fn mark(state: &str) -> (&'static str, &'static str) {
    match state {
        "done" => ("✓", "32"),
        "working" => ("▸", "36"),
        "waiting" => ("…", "33"),
        "failed" => ("✗", "31"),
        _ => ("·", "2"),
    }
}

fn document(answer: &ExplainPodResponse) -> Value {
    let pod = answer.pod.clone().unwrap_or_default();
    let steps: Vec<Value> = answer
        .steps
        .iter()
        .map(|s| {
            json!({
                "name": s.name,
                "state": s.state,
                "subject": s.subject,
                "message": s.message,
                "owner": s.owner,
                "since": human::rfc3339(s.since_unix_nanos),
                "next_retry": human::rfc3339(s.next_retry_unix_nanos),
            })
        })
        .collect();
    json!({
        "pod": {"uid": pod.uid, "namespace": pod.namespace, "name": pod.name},
        "phase": answer.phase,
        "summary": answer.summary,
        "steps": steps,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(name: &str, state: &str, owner: &str) -> Step {
        Step { name: name.into(), state: state.into(), owner: owner.into(), ..Step::default() }
    }

    #[test]
    fn explain_table_marks_each_step_with_its_state() {
        let answer = ExplainPodResponse {
            pod: Some(PodRef { uid: "u1".into(), namespace: "default".into(), name: "web-edge".into() }),
            phase: "Pending".into(),
            summary: "Waits for the image.".into(),
            steps: vec![
                step("source", "done", "pod-config"),
                Step {
                    subject: "app".into(),
                    message: "no such\nimage".into(),
                    since_unix_nanos: 10 * human::SECOND,
                    next_retry_unix_nanos: 32 * human::SECOND,
                    ..step("image", "waiting", "runtime-shim")
                },
                step("container", "not reached", "pod-sync"),
            ],
        };
        assert_eq!(
            text(&answer, 20 * human::SECOND, Colour::for_stdout(true)),
            "pod/web-edge in default (Pending): Waits for the image.\n\n\
             \u{20}     STEP        SUBJECT   STATE         SINCE   OWNER          NEXT RETRY   MESSAGE\n\
             \u{20} ✓   source                done                  pod-config\n\
             \u{20} …   image       app       waiting       10s     runtime-shim   in 12s       no such image\n\
             \u{20} ·   container             not reached           pod-sync\n"
        );
    }

    #[test]
    fn refused_manifests_that_mention_the_pod_are_preferred() {
        let problem = |origin: &str| SourceProblem {
            origin: origin.into(),
            line: 3,
            message: "bad".into(),
            ..SourceProblem::default()
        };
        let sources = [Source {
            problems: vec![problem("/m/web.yaml"), problem("/m/other.yaml")],
            ..Source::default()
        }];
        let messages = |name| suspects(&sources, name).into_iter().map(|s| s.message).collect::<Vec<_>>();
        assert_eq!(messages("web"), ["/m/web.yaml:3: bad; none of its pods run"]);
        assert_eq!(messages("db").len(), 2);
    }
}
