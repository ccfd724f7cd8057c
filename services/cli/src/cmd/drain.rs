//! `keelson drain` and `keelson uncordon`.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use keelson_config::ServiceName;
use keelson_proto::keelson::common::v1::PodRef;
use keelson_proto::keelson::resource_manager::v1::{
    DrainRequest, GetDrainRequest, GetDrainResponse, RunningPod, UncordonRequest,
};
use tonic::{Code, Status};

use crate::args::DrainArgs;
use crate::error::CliError;
use crate::output;
use crate::session::Session;

/// Between two reads of the state.
const POLL: Duration = Duration::from_millis(200);
/// How long resource-manager may be down: init restarts it.
const RESTART_TIMEOUT: Duration = Duration::from_secs(30);
/// The most names of pods in an error.
const NAMED: usize = 5;

/// Drains the node, and waits for the end of its pods if they are to be ended.
pub(crate) async fn run(session: &Session, args: &DrainArgs) -> Result<(), CliError> {
    let deadline = args.timeout.map(|timeout| Instant::now() + timeout);
    let request = DrainRequest { stop_pods: args.stop_pods };
    let answer = session.agent.resource_manager().drain(session.agent.request(request)).await;
    let answer = answer.map_err(|status| call_error(session, status))?.into_inner();
    let name = &answer.node_name;
    let already = if answer.was_drained { " already" } else { "" };
    output::print(&format!("node/{name}{already} cordoned\n"))?;
    if !args.stop_pods {
        if answer.stop_pods {
            output::notice("its pods are ended, as an earlier `keelson drain --stop-pods` has asked");
        }
        return Ok(());
    }
    wait(session, deadline).await?;
    output::print(&format!("node/{name} drained\n"))
}

/// Undoes a drain.
pub(crate) async fn uncordon(session: &Session) -> Result<(), CliError> {
    let request = session.agent.request(UncordonRequest {});
    let answer = session.agent.resource_manager().uncordon(request).await;
    let answer = answer.map_err(|status| call_error(session, status))?.into_inner();
    let already = if answer.was_drained { "" } else { " already" };
    output::print(&format!("node/{}{already} uncordoned\n", answer.node_name))
}

fn call_error(session: &Session, status: Status) -> CliError {
    session.agent.call_error(ServiceName::ResourceManager, status)
}

/// Waits until all pods have ended, and prints what happens to each.
async fn wait(session: &Session, deadline: Option<Instant>) -> Result<(), CliError> {
    let mut progress = Progress::default();
    let mut last_answer = Instant::now();
    let mut left: Vec<RunningPod> = Vec::new();
    loop {
        match read(session).await {
            Ok(state) if !state.stop_pods => return Err(undone()),
            Ok(state) => {
                last_answer = Instant::now();
                for line in progress.lines(&state.pods) {
                    output::print(&line)?;
                }
                if state.pods.is_empty() {
                    return Ok(());
                }
                left = state.pods;
            }
            // It restarts, or does not know all pods yet.
            Err(status) if is_temporary(&status) && last_answer.elapsed() < RESTART_TIMEOUT => {}
            Err(status) => return Err(call_error(session, status)),
        }
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Err(timed_out(&left));
        }
        tokio::time::sleep(POLL).await;
    }
}

async fn read(session: &Session) -> Result<GetDrainResponse, Status> {
    let request = session.agent.request(GetDrainRequest {});
    session.agent.resource_manager().get_drain(request).await.map(tonic::Response::into_inner)
}

fn is_temporary(status: &Status) -> bool {
    matches!(status.code(), Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled)
}

fn undone() -> CliError {
    CliError::Failed {
        message: "the drain was undone before all pods had ended".into(),
        hint: Some("repeat `keelson drain --stop-pods` if that was not intended".into()),
    }
}

fn timed_out(left: &[RunningPod]) -> CliError {
    let names: Vec<String> = left.iter().take(NAMED).filter_map(|pod| pod.pod.as_ref()).map(name).collect();
    let more = if left.len() > NAMED { ", …" } else { "" };
    CliError::TimedOut {
        message: format!("pods have not ended in time: {} left: {}{more}", left.len(), names.join(", ")),
        hint: "the node stays drained and continues to end them: `keelson drain --stop-pods` waits again, \
               `keelson explain pod` shows what a pod waits for"
            .into(),
    }
}

/// `default/web`.
fn name(pod: &PodRef) -> String {
    format!("{}/{}", pod.namespace, pod.name)
}

/// What was printed so far.
#[derive(Debug, Default)]
struct Progress {
    /// The pods that are ending.
    ending: BTreeSet<String>,
}

impl Progress {
    /// The lines that show the change to the pods that have not ended now.
    fn lines(&mut self, pods: &[RunningPod]) -> Vec<String> {
        let ending = |pod: &RunningPod| pod.pod.as_ref().filter(|_| pod.ending).map(name);
        let now: BTreeSet<String> = pods.iter().filter_map(ending).collect();
        let all: BTreeSet<String> = pods.iter().filter_map(|pod| pod.pod.as_ref()).map(name).collect();
        let ended = self.ending.iter().filter(|name| !all.contains(*name));
        let mut lines: Vec<String> = ended.map(|name| format!("pod {name} stopped\n")).collect();
        let begun = pods.iter().filter(|pod| ending(pod).is_some_and(|name| !self.ending.contains(&name)));
        lines.extend(begun.filter_map(|pod| {
            let name = pod.pod.as_ref().map(name)?;
            Some(format!("stopping pod {name}: grace period {} s\n", pod.grace_period_seconds))
        }));
        self.ending = now;
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(name: &str, ending: bool) -> RunningPod {
        let pod = PodRef { uid: name.into(), namespace: "default".into(), name: name.into() };
        RunningPod { pod: Some(pod), ending, grace_period_seconds: 30, priority: 0 }
    }

    #[test]
    fn progress_shows_each_pod_once_when_it_is_being_stopped_and_once_after() {
        let mut progress = Progress::default();
        let stopping = |name: &str| format!("stopping pod default/{name}: grace period 30 s\n");
        let stopped = |name: &str| format!("pod default/{name} stopped\n");
        let none: [String; 0] = [];
        assert_eq!(progress.lines(&[pod("low", false), pod("high", false)]), none);
        assert_eq!(progress.lines(&[pod("low", true), pod("high", false)]), [stopping("low")]);
        assert_eq!(progress.lines(&[pod("low", true), pod("high", false)]), none);
        assert_eq!(progress.lines(&[pod("high", true)]), [stopped("low"), stopping("high")]);
        assert_eq!(progress.lines(&[]), [stopped("high")]);
        assert_eq!(progress.lines(&[]), none);
    }

    #[test]
    fn a_timeout_names_the_first_pods_that_are_left_and_exits_with_75() {
        let left: Vec<RunningPod> = (0..7).map(|n| pod(&format!("p{n}"), true)).collect();
        let error = timed_out(&left);
        assert_eq!(error.exit_code(), 75);
        let text = error.to_string();
        assert!(text.contains("7 left: default/p0, ") && text.ends_with("default/p4, …"), "{text}");
        assert!(timed_out(&left[..1]).to_string().ends_with("1 left: default/p0"));
    }
}
