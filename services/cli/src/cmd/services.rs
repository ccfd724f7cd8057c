//! `keelson services`.

use std::time::{Duration, Instant};

use keelson_config::ServiceName;
use keelson_proto::keelson::supervisor::v1::{RestartServiceRequest, Service};

use super::{Session, get_services};
use crate::error::Failure;
use crate::keeper::Keeper;
use crate::output;

/// How often it is asked whether a service serves again.
const PAUSE: Duration = Duration::from_millis(50);

/// Restarts the named services, or all but init, one after the other: each serves again before the next one goes, so
/// that no more of the agent is away than must be.
pub(crate) async fn restart(
    session: &Session,
    names: &[String],
    all: bool,
    timeout: Duration,
) -> Result<(), Failure> {
    let services = if all {
        ServiceName::supervised().collect()
    } else {
        names.iter().map(|n| get_services::known(n)).collect::<Result<Vec<_>, _>>()?
    };
    for service in &services {
        let before = match session.agent.services().await {
            Ok(list) => pid(&list, *service),
            Err(failure @ (Failure::ServiceAway { .. } | Failure::NotRunning { .. })) => {
                return without_init(session, &services, failure, timeout).await;
            }
            Err(failure) => return Err(failure),
        };
        let request = session.agent.request(RestartServiceRequest { name: service.to_string() });
        let answer = session.agent.supervisor().restart_service(request).await;
        answer.map_err(|s| session.agent.failure(ServiceName::Init, s))?;
        until_it_serves(session, *service, before, timeout).await?;
        output::print(&format!("service/{service} restarted\n"))?;
    }
    Ok(())
}

fn pid(services: &[Service], service: ServiceName) -> u32 {
    services.iter().find(|s| s.name == service.as_str()).map_or(0, |s| s.pid)
}

/// There is no init, as `failure` says: each service is restarted by whoever keeps it running, and asked itself whether it
/// serves again. One that nobody known keeps stays as it is, and so do those after it.
async fn without_init(
    session: &Session,
    services: &[ServiceName],
    failure: Failure,
    timeout: Duration,
) -> Result<(), Failure> {
    for (at, service) in services.iter().enumerate() {
        let Some(keeper) = Keeper::of(*service, &session.agent.socket(*service)).await else {
            return Err(match failure {
                Failure::ServiceAway { socket, .. } => {
                    Failure::NoInit { socket, services: services[at..].to_vec() }
                }
                nothing_runs => nothing_runs,
            });
        };
        let before = session.agent.progress_of(*service).await.ok().map(|told| told.started_unix_nanos);
        keeper.restart().await?;
        until_it_answers(session, *service, before, timeout).await?;
        output::print(&format!("service/{service} restarted\n"))?;
    }
    Ok(())
}

/// Waits until a service answers that has started at another moment than `before`.
async fn until_it_answers(
    session: &Session,
    service: ServiceName,
    before: Option<i64>,
    timeout: Duration,
) -> Result<(), Failure> {
    let begun = Instant::now();
    loop {
        let fault = match session.agent.progress_of(service).await {
            Ok(told) if Some(told.started_unix_nanos) != before => return Ok(()),
            Ok(_) => "it has not ended yet".to_owned(),
            Err(failure) => failure.to_string(),
        };
        if begun.elapsed() >= timeout {
            return Err(Failure::TimedOut {
                message: format!("{service} does not serve again after {} s: {fault}", timeout.as_secs_f32()),
                hint: "`keelson get services -w`".into(),
            });
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Waits until another process of the service than `before` has answered init.
async fn until_it_serves(
    session: &Session,
    service: ServiceName,
    before: u32,
    timeout: Duration,
) -> Result<(), Failure> {
    let begun = Instant::now();
    loop {
        let list = session.agent.services().await?;
        let Some(now) = list.into_iter().find(|s| s.name == service.as_str()) else {
            return Err(Failure::Answer {
                message: format!("init does not list {service} any more"),
                hint: Some("`keelson get services`".into()),
            });
        };
        let is_new = now.pid != 0 && now.pid != before;
        match now.state.as_str() {
            "running" if is_new => return Ok(()),
            // It serves; what it misses is another's fault.
            "degraded" if is_new => {
                output::notice(&format!("{service} misses something: {}", now.message));
                return Ok(());
            }
            "failed" => {
                return Err(Failure::Answer {
                    message: format!("{service} was started again and has failed: {}", now.message),
                    hint: Some(format!("mend what it names, then `keelson services restart {service}`")),
                });
            }
            _ if begun.elapsed() >= timeout => {
                return Err(Failure::TimedOut {
                    message: format!(
                        "{service} does not serve again after {} s: it is {}{}",
                        timeout.as_secs_f32(),
                        now.state,
                        if now.message.is_empty() { String::new() } else { format!(", {}", now.message) }
                    ),
                    hint: "`keelson get services -w`; init goes on trying".into(),
                });
            }
            _ => tokio::time::sleep(PAUSE).await,
        }
    }
}
