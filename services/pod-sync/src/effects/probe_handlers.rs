//! One run of a probe (pod-lifecycle.md §13.3).

use std::sync::Arc;
use std::time::Duration;

use k8s_cri::v1 as cri;
use keelson_kube_model::{Container, ExecAction, GrpcAction, HttpGetAction, Pod, TcpSocketAction};
use keelson_pod_sync_core::config::expand;
use keelson_pod_sync_core::probe::{ProbeKind, ProbeTimes, cut};
use keelson_service_kit::{NoConnection, Turn, TurnsLook};
use tokio::net::TcpStream;
use tonic::Code;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::effects::Effects;
use crate::effects::clients::bounded;
use crate::effects::endpoint::{endpoint, is_https, no_address};
use crate::effects::http::{BODY_LIMIT, Get, get};
use crate::publish::objects::pod_name;

/// How often a probe that could not run is tried at once.
const ATTEMPTS: usize = 3;
/// The `User-Agent` of probes.
const USER_AGENT: &str = "kube-probe/1.36";
/// A wait for a turn that takes longer is shown.
const LONG_WAIT: Duration = Duration::from_secs(5);
/// How much longer than the probe's own timeout the call of the runtime may take.
const EXEC_SLACK: Duration = Duration::from_secs(120);
/// The outcome of a probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// It succeeded.
    Success,
    /// It succeeded, with a warning for the operator.
    Warning(String),
    /// It failed.
    Failure(String),
    /// It could not run, because of the manifest or the runtime.
    Error(String),
    /// It could not run because a service is unavailable.
    Unavailable(String),
    /// It was cancelled because other pods waited for their probes.
    Cut,
}

/// One probe of one container instance.
#[derive(Debug, Clone)]
pub struct Call {
    /// The pod.
    pub pod: Arc<Pod>,
    /// The container's name.
    pub container: String,
    /// Which of its probes.
    pub kind: ProbeKind,
    /// The instance.
    pub id: String,
    /// Its periods, timeout and thresholds.
    pub times: ProbeTimes,
    /// The pod's address; empty when it has none.
    pub address: String,
    /// It runs between the regular ones, while a container that has just started is not ready yet.
    pub early: bool,
}

/// Runs one probe, within the limit of probes at the same time. `note` gets a text when it has to wait long, and an empty one when the wait
/// is over.
pub async fn run(effects: &Effects, call: &Call, note: &(dyn Fn(&str) + Sync)) -> Outcome {
    let Some((_, container)) = call.pod.container(&call.container) else {
        return Outcome::Error("the pod has no such container".to_owned());
    };
    let exec = call.kind.of(container).is_some_and(|probe| probe.exec.is_some());
    let turn = turn_of(effects, call, exec, note).await;
    // Cancel-safe: a probe that is cut ends with its call or its connection.
    tokio::select! {
        outcome = tried(effects, call, container) => outcome,
        () = turn.cut() => Outcome::Cut,
    }
}

async fn tried(effects: &Effects, call: &Call, container: &Container) -> Outcome {
    let mut outcome = Outcome::Error(String::new());
    for _ in 0..ATTEMPTS {
        outcome = once(effects, call, container).await;
        if !matches!(outcome, Outcome::Error(_)) {
            break;
        }
    }
    outcome
}

/// Waits for a turn. A long wait is shown, with the pod that has most turns.
async fn turn_of(effects: &Effects, call: &Call, exec: bool, note: &(dyn Fn(&str) + Sync)) -> Turn {
    let (turns, what) = if exec {
        (&effects.probe_turns.exec, "commands")
    } else {
        (&effects.probe_turns.network, "connections")
    };
    let pod: Arc<str> = pod_name(&call.pod).into();
    let condition = format!("probes by {what}");
    let taken = turns.take(&pod);
    tokio::pin!(taken);
    // Cancel-safe: `taken` is pinned outside and continues below.
    tokio::select! {
        turn = &mut taken => return turn,
        () = tokio::time::sleep(LONG_WAIT) => {}
    }
    let text = describe_wait(&turns.look(), what);
    note(&text);
    effects.context.progress.condition(&condition, Err(text));
    let turn = taken.await;
    note("");
    let look = turns.look();
    let state = if look.longest >= LONG_WAIT { Err(describe_wait(&look, what)) } else { Ok(()) };
    effects.context.progress.condition(&condition, state);
    turn
}

fn describe_wait(look: &TurnsLook, what: &str) -> String {
    let most =
        look.most.as_ref().map(|(pod, count)| format!(", {count} of them by {pod}")).unwrap_or_default();
    format!(
        "{} probes wait for their turn, the longest for {} s: {} of {} {what} of probes run{most}; shorter timeoutSeconds there let \
         others come sooner",
        look.waiting,
        look.longest.as_secs(),
        look.taken,
        look.places,
    )
}

async fn once(effects: &Effects, call: &Call, container: &Container) -> Outcome {
    let Some(probe) = call.kind.of(container) else {
        return Outcome::Error("the container has no such probe".to_owned());
    };
    let bound = Duration::from_secs(u64::try_from(call.times.timeout_seconds).unwrap_or(1));
    if let Some(action) = &probe.exec {
        exec(effects, container, &call.id, action, bound).await
    } else if let Some(action) = &probe.http_get {
        http(container, &call.address, action, bound).await
    } else if let Some(action) = &probe.tcp_socket {
        tcp(container, &call.address, action, bound).await
    } else if let Some(action) = &probe.grpc {
        grpc(&call.address, action, bound).await
    } else {
        Outcome::Error("the probe has no handler: give it exec, httpGet, tcpSocket or grpc".to_owned())
    }
}

async fn exec(
    effects: &Effects,
    container: &Container,
    id: &str,
    action: &ExecAction,
    bound: Duration,
) -> Outcome {
    // Only literal values: no Secret is fetched for a probe.
    let literal = |name: &str| {
        let named = |e: &&keelson_kube_model::EnvVar| e.name == name && e.value_from.is_none();
        container.env.iter().rev().find(named).map(|e| e.value.clone())
    };
    let cmd: Vec<String> = action.command.iter().map(|word| expand(word, literal)).collect();
    let seconds = i64::try_from(bound.as_secs()).unwrap_or(i64::MAX);
    let request = cri::ExecSyncRequest { container_id: id.to_owned(), cmd: cmd.clone(), timeout: seconds };
    match effects.clients.cri().exec_sync(bounded(request, bound + EXEC_SLACK)).await {
        Ok(answer) => exec_outcome(&answer.into_inner()),
        Err(status) if status.code() == Code::DeadlineExceeded => {
            Outcome::Failure(format!("command {cmd:?} timed out after {seconds} s"))
        }
        Err(status) if keelson_service_kit::status::is_cut(&status) => {
            Outcome::Unavailable(status.message().to_owned())
        }
        Err(status) => Outcome::Error(status.message().to_owned()),
    }
}

/// The outcome of a command that has ended.
fn exec_outcome(answer: &cri::ExecSyncResponse) -> Outcome {
    if answer.exit_code == 0 {
        return Outcome::Success;
    }
    let mut output = String::from_utf8_lossy(&answer.stdout).into_owned();
    output.push_str(&String::from_utf8_lossy(&answer.stderr));
    if output.trim().is_empty() {
        return Outcome::Failure(format!("command exited with {}", answer.exit_code));
    }
    Outcome::Failure(cut(&output, BODY_LIMIT).to_owned())
}

async fn http(container: &Container, address: &str, action: &HttpGetAction, bound: Duration) -> Outcome {
    let (host, port) = match endpoint(&action.host, address, &action.port, container) {
        Ok(endpoint) => endpoint,
        Err(text) => return Outcome::Error(text),
    };
    let request = Get {
        tls: is_https(action),
        host,
        port,
        path: &action.path,
        headers: &action.http_headers,
        user_agent: USER_AGENT,
    };
    match get(&request, bound).await {
        Ok(answer) => match answer.status {
            200..300 => Outcome::Success,
            300..400 => {
                Outcome::Warning(format!("Probe terminated redirects, Response body: {}", answer.body))
            }
            status => Outcome::Failure(format!("HTTP probe failed with statuscode: {status}")),
        },
        Err(failed) => Outcome::Failure(failed.text),
    }
}

async fn tcp(container: &Container, address: &str, action: &TcpSocketAction, bound: Duration) -> Outcome {
    let (host, port) = match endpoint(&action.host, address, &action.port, container) {
        Ok(endpoint) => endpoint,
        Err(text) => return Outcome::Error(text),
    };
    match tokio::time::timeout(bound, TcpStream::connect((host, port))).await {
        Ok(Ok(_)) => Outcome::Success,
        Ok(Err(error)) => Outcome::Failure(format!("dial tcp {host} port {port}: {error}")),
        Err(_) => {
            Outcome::Failure(format!("dial tcp {host} port {port}: no answer within {} s", bound.as_secs()))
        }
    }
}

/// The same text wherever the connection broke, so that the events of several attempts are counted as one.
const BROKEN: &str = "error: health rpc probe failed: the connection broke before the answer";

async fn grpc(address: &str, action: &GrpcAction, bound: Duration) -> Outcome {
    let port = u16::try_from(action.port).unwrap_or(0);
    let Ok(ip) = address.parse::<std::net::IpAddr>() else { return Outcome::Error(no_address()) };
    let to = std::net::SocketAddr::new(ip, port);
    let seconds = bound.as_secs();
    let began = tokio::time::Instant::now();
    let channel = match tokio::time::timeout(bound, keelson_service_kit::connect_tcp(to, USER_AGENT)).await {
        Ok(Ok(channel)) => channel,
        Ok(Err(NoConnection::NotMade(text))) => {
            return Outcome::Failure(format!("error: failed to connect service \"{to}\": {text}"));
        }
        Ok(Err(NoConnection::Broken)) => return Outcome::Failure(BROKEN.to_owned()),
        Err(_) => {
            return Outcome::Failure(format!(
                "timeout: failed to connect service \"{to}\" within {seconds} s"
            ));
        }
    };
    let request = HealthCheckRequest { service: action.service.clone().unwrap_or_default() };
    let left = bound.saturating_sub(began.elapsed());
    let mut client = HealthClient::new(channel);
    let answer = match tokio::time::timeout(left, client.check(bounded(request, left))).await {
        Ok(answer) => answer,
        Err(_) => Err(tonic::Status::deadline_exceeded("")),
    };
    // The server's own deadline may pass a little earlier.
    let is_late = began.elapsed() + Duration::from_millis(50) >= bound;
    health(answer.map(|answer| answer.into_inner().status), is_late, seconds)
}

fn health(answer: Result<i32, tonic::Status>, is_late: bool, seconds: u64) -> Outcome {
    match answer {
        Ok(status) if status == ServingStatus::Serving as i32 => Outcome::Success,
        Ok(status) => {
            let word = ServingStatus::try_from(status).map_or("UNKNOWN", |status| status.as_str_name());
            Outcome::Failure(format!("service unhealthy (responded with {word:?})"))
        }
        Err(status) => Outcome::Failure(match status.code() {
            Code::Unimplemented => format!(
                "error: this server does not implement the grpc health protocol (grpc.health.v1.Health): {}",
                status.message()
            ),
            // tonic reports both a deadline that has passed here and a connection that ends as a cancelled call.
            Code::DeadlineExceeded => late(seconds),
            Code::Cancelled if is_late => late(seconds),
            // An error of the connection has a source; an answer of the server has none.
            _ if std::error::Error::source(&status).is_some() => BROKEN.to_owned(),
            _ => format!("error: health rpc probe failed: {}", status.message()),
        }),
    }
}

fn late(seconds: u64) -> String {
    format!("timeout: health rpc did not complete within {seconds} s")
}
