//! Lifecycle hooks (pod-lifecycle.md §10).

use std::time::Duration;

use k8s_cri::v1 as cri;
use keelson_kube_model::{Container, HttpGetAction, LifecycleHandler, Pod};
use tokio::time::Instant;

use crate::effects::Effects;
use crate::effects::clients::bounded;
use crate::effects::endpoint::{endpoint, is_https, pod_address};
use crate::effects::http::{Get, get};
use crate::publish::metrics::Metrics;
use crate::publish::objects::named_container_object;

/// The `User-Agent` of HTTP hooks.
const USER_AGENT: &str = "kube-lifecycle/1.36";
/// How much longer than the hook's own time the call of the runtime may take.
const EXEC_SLACK: Duration = Duration::from_secs(120);
/// How far apart two timers may fire that end at the same time.
const TIMER_SLACK: Duration = Duration::from_millis(50);

/// The container that runs a hook.
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
/// The hook failed; the text says why.
pub async fn run(
    effects: &Effects,
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
        let answer = effects.clients.cri().exec_sync(bounded(request, bound + EXEC_SLACK)).await;
        let answer = answer.map_err(|s| s.message().to_owned())?.into_inner();
        return match answer.exit_code {
            0 => Ok(()),
            code => Err(format!("command exited with {code}")),
        };
    }
    if let Some(http) = &hook.http_get {
        return http_hook(effects, subject, http, bound).await;
    }
    if let Some(sleep) = &hook.sleep {
        let whole = Duration::from_secs(u64::try_from(sleep.seconds).unwrap_or(0));
        let _sleeping =
            Sleeping { metrics: &effects.publisher.metrics, until: Instant::now().checked_add(whole) };
        tokio::time::sleep(whole.min(bound)).await;
    }
    Ok(())
}

/// A sleep hook. It is counted when it ends before its time.
struct Sleeping<'a> {
    metrics: &'a Metrics,
    /// `None`: later than the clock can express.
    until: Option<Instant>,
}

impl Drop for Sleeping<'_> {
    fn drop(&mut self) {
        if self.until.is_none_or(|until| Instant::now() + TIMER_SLACK < until) {
            self.metrics.sleep_cut();
        }
    }
}

/// Any answer is a success, whatever its status. If a server answers a TLS request in plain HTTP, the request is sent once more without TLS
/// and without credentials.
async fn http_hook(
    effects: &Effects,
    subject: &Subject<'_>,
    http: &HttpGetAction,
    bound: Duration,
) -> Result<(), String> {
    let uid = subject.pod.metadata.uid.as_str();
    let own = effects
        .registry
        .with(uid, |e| pod_address(&effects.registry.node, &effects.context.config, e, subject.pod))
        .unwrap_or_default();
    let (host, port) = endpoint(&http.host, &own, &http.port, subject.container)?;
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
    effects.publisher.metrics.http_fallback();
    effects.context.events.warning(
        named_container_object(subject.pod, &subject.container.name),
        "LifecycleHTTPFallback",
        format!("{}; the same request without TLS succeeded: use scheme HTTP", failed.text),
    );
    Ok(())
}
