//! Lifecycle hooks (pod-lifecycle.md §10).

use std::sync::Arc;
use std::time::Duration;

use k8s_cri::v1 as cri;
use keelson_kube_model::{Container, HttpGetAction, LifecycleHandler, Pod};
use tokio::time::Instant;

use crate::agent::Agent;
use crate::clients::bounded;
use crate::http::{Get, get};
use crate::metrics::Metrics;
use crate::probes::address;
use crate::probes::handlers::{is_https, place};
use crate::sync::named_container_object;

/// What HTTP hooks call themselves.
const USER_AGENT: &str = "kube-lifecycle/1.36";
/// What the runtime may take beyond a hook's own time before the call is given up.
const EXEC_SLACK: Duration = Duration::from_secs(120);
/// How far apart two timers may be that are over at the same moment.
const TIMERS: Duration = Duration::from_millis(50);

/// The container that a hook is for.
#[derive(Debug, Clone, Copy)]
pub struct Subject<'a> {
    /// Its pod.
    pub pod: &'a Pod,
    /// Its entry in the spec.
    pub container: &'a Container,
    /// The instance.
    pub id: &'a str,
}

/// What keeps a hook from ever being carried out; `None` for one that can be. A container whose postStart is such a
/// hook is not begun, because without its hook it would have to be killed again.
pub fn impossible(hook: &LifecycleHandler) -> Option<String> {
    match hook {
        LifecycleHandler { exec: Some(_), .. }
        | LifecycleHandler { sleep: Some(_), .. }
        | LifecycleHandler { http_get: Some(_), .. } => None,
        LifecycleHandler { tcp_socket: Some(_), .. } => {
            Some("tcpSocket: no hook can be one, use exec, httpGet or sleep".to_owned())
        }
        _ => None,
    }
}

/// Runs a lifecycle hook.
///
/// # Errors
/// What went wrong, for people.
pub async fn run(
    agent: &Agent,
    subject: &Subject<'_>,
    hook: &LifecycleHandler,
    bound: Duration,
) -> Result<(), String> {
    if let Some(why) = impossible(hook) {
        return Err(why);
    }
    if let Some(exec) = &hook.exec {
        let request = cri::ExecSyncRequest {
            container_id: subject.id.to_owned(),
            cmd: exec.command.clone(),
            timeout: i64::try_from(bound.as_secs()).unwrap_or(i64::MAX),
        };
        let answer = agent.clients.cri().exec_sync(bounded(request, bound + EXEC_SLACK)).await;
        let answer = answer.map_err(|s| s.message().to_owned())?.into_inner();
        return match answer.exit_code {
            0 => Ok(()),
            code => Err(format!("command exited with {code}")),
        };
    }
    if let Some(http) = &hook.http_get {
        return http_hook(agent, subject, http, bound).await;
    }
    if let Some(sleep) = &hook.sleep {
        let whole = Duration::from_secs(u64::try_from(sleep.seconds).unwrap_or(0));
        let _asleep = Asleep { metrics: &agent.metrics, until: Instant::now().checked_add(whole) };
        tokio::time::sleep(whole.min(bound)).await;
    }
    Ok(())
}

/// A hook that sleeps. It is counted when it ends, or is given up, before its time is over.
struct Asleep<'a> {
    metrics: &'a Metrics,
    /// None: beyond any clock.
    until: Option<Instant>,
}

impl Drop for Asleep<'_> {
    fn drop(&mut self) {
        if self.until.is_none_or(|until| Instant::now() + TIMERS < until) {
            self.metrics.sleep_cut();
        }
    }
}

/// Any answer is a success, whatever its status. A server that was asked over TLS and speaks plain HTTP is asked once
/// more without, and without credentials.
async fn http_hook(
    agent: &Agent,
    subject: &Subject<'_>,
    http: &HttpGetAction,
    bound: Duration,
) -> Result<(), String> {
    let uid = subject.pod.metadata.uid.as_str();
    let own =
        agent.with(uid, |e| address(agent, e, subject.pod, &Arc::clone(&e.observed))).unwrap_or_default();
    let (host, port) = place(&http.host, &own, &http.port, subject.container)?;
    let (path, tls) = (&http.path, is_https(http));
    let request = Get { tls, host, port, path, headers: &http.http_headers, user_agent: USER_AGENT };
    let failed = match get(&request, bound).await {
        Ok(_) => return Ok(()),
        Err(failed) if failed.plain => failed,
        Err(failed) => return Err(failed.text),
    };
    let mut headers = http.http_headers.clone();
    headers.retain(|header| !header.name.eq_ignore_ascii_case("authorization"));
    get(&Get { tls: false, headers: &headers, ..request }, bound).await.map_err(|again| again.text)?;
    agent.metrics.http_fallback();
    agent.context.events.warning(
        named_container_object(subject.pod, &subject.container.name),
        "LifecycleHTTPFallback",
        format!("{}; asked again without TLS, it has answered: use scheme HTTP", failed.text),
    );
    Ok(())
}
