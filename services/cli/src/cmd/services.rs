//! `keelson services`.

use std::time::{Duration, Instant};

use keelson_config::ServiceName;
use keelson_proto::keelson::supervisor::v1::{RestartServiceRequest, Service};

use super::get_services;
use crate::error::CliError;
use crate::output;
use crate::service_manager::ServiceManager;
use crate::session::Session;

/// The interval of polls until a service serves again.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Restarts the named services, or all but init, one after the other: each must serve again before the next restart, so
/// that at most one is down.
pub(crate) async fn restart(
    session: &Session,
    names: &[String],
    all: bool,
    timeout: Duration,
) -> Result<(), CliError> {
    let services = if all {
        ServiceName::supervised().collect()
    } else {
        names.iter().map(|n| get_services::parse_name(n)).collect::<Result<Vec<_>, _>>()?
    };
    for service in &services {
        let before = match session.agent.services().await {
            Ok(list) => pid(&list, *service),
            Err(error @ (CliError::ServiceNotRunning { .. } | CliError::NotRunning { .. })) => {
                return without_init(session, &services, error, timeout).await;
            }
            Err(error) => return Err(error),
        };
        let request = session.agent.request(RestartServiceRequest { name: service.to_string() });
        let answer = session.agent.supervisor().restart_service(request).await;
        answer.map_err(|s| session.agent.call_error(ServiceName::Init, s))?;
        wait_until_serving(session, *service, before, timeout).await?;
        output::print(&format!("service/{service} restarted\n"))?;
    }
    Ok(())
}

fn pid(services: &[Service], service: ServiceName) -> u32 {
    services.iter().find(|s| s.name == service.as_str()).map_or(0, |s| s.pid)
}

/// Restarts services without init, each by the service manager that runs it, and polls it until it serves again. Stops at the
/// first service without a known manager. `error` says why init did not answer.
async fn without_init(
    session: &Session,
    services: &[ServiceName],
    error: CliError,
    timeout: Duration,
) -> Result<(), CliError> {
    for (at, service) in services.iter().enumerate() {
        let Some(manager) = ServiceManager::of(*service, &session.agent.socket(*service)).await else {
            return Err(match error {
                CliError::ServiceNotRunning { socket, .. } => {
                    CliError::InitNotRunning { socket, services: services[at..].to_vec() }
                }
                other => other,
            });
        };
        let before =
            session.agent.progress_of(*service).await.ok().map(|progress| progress.started_unix_nanos);
        manager.restart().await?;
        wait_until_restarted(session, *service, before, timeout).await?;
        output::print(&format!("service/{service} restarted\n"))?;
    }
    Ok(())
}

/// Waits until a service answers whose start time is not `before`.
async fn wait_until_restarted(
    session: &Session,
    service: ServiceName,
    before: Option<i64>,
    timeout: Duration,
) -> Result<(), CliError> {
    let started_at = Instant::now();
    loop {
        let reason = match session.agent.progress_of(service).await {
            Ok(progress) if Some(progress.started_unix_nanos) != before => return Ok(()),
            Ok(_) => "its old process is still running".to_owned(),
            Err(error) => error.to_string(),
        };
        if started_at.elapsed() >= timeout {
            return Err(CliError::TimedOut {
                message: format!(
                    "{service} does not serve again after {} s: {reason}",
                    timeout.as_secs_f32()
                ),
                hint: "`keelson get services -w` shows its state".into(),
            });
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Waits until init reports that a process of the service other than `before` is serving.
async fn wait_until_serving(
    session: &Session,
    service: ServiceName,
    before: u32,
    timeout: Duration,
) -> Result<(), CliError> {
    let started_at = Instant::now();
    loop {
        let list = session.agent.services().await?;
        let Some(now) = list.into_iter().find(|s| s.name == service.as_str()) else {
            return Err(CliError::Failed {
                message: format!("init no longer lists {service}"),
                hint: Some("`keelson get services`".into()),
            });
        };
        let is_new = now.pid != 0 && now.pid != before;
        match now.state.as_str() {
            "running" if is_new => return Ok(()),
            // It serves; a failed condition is not a failure of the restart.
            "degraded" if is_new => {
                output::notice(&format!("{service} is degraded: {}", now.message));
                return Ok(());
            }
            "failed" => {
                return Err(CliError::Failed {
                    message: format!("{service} was restarted and has failed: {}", now.message),
                    hint: Some(format!("correct the cause, then `keelson services restart {service}`")),
                });
            }
            _ if started_at.elapsed() >= timeout => {
                return Err(CliError::TimedOut {
                    message: format!(
                        "{service} does not serve again after {} s: it is {}{}",
                        timeout.as_secs_f32(),
                        now.state,
                        if now.message.is_empty() { String::new() } else { format!(", {}", now.message) }
                    ),
                    hint: "`keelson get services -w` shows its state; init keeps trying".into(),
                });
            }
            _ => tokio::time::sleep(POLL_INTERVAL).await,
        }
    }
}
