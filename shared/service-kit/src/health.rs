//! `--health`: a service's binary asks the running service for its health and reports it by exit code.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use keelson_config::ServiceName;
use tonic::{Request, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::peer::connect_unix;

/// EX_UNAVAILABLE of sysexits(3).
const EX_UNAVAILABLE: u8 = 69;
/// A healthy service answers at once.
const LIMIT: Duration = Duration::from_secs(5);

/// Asks the service at `socket`, and prints the reason when it is not healthy.
pub(crate) fn ask(name: ServiceName, socket: &Path) -> ExitCode {
    let answer = tokio::runtime::Builder::new_current_thread().enable_all().build().map_or_else(
        |error| Err(format!("cannot start the async runtime: {error}")),
        |runtime| {
            runtime
                .block_on(async { check(name, socket).await.map_err(|status| status.message().to_owned()) })
        },
    );
    let reason = match answer {
        Ok(ServingStatus::Serving) => return ExitCode::SUCCESS,
        Ok(status) => format!("its health status is {}", status.as_str_name()),
        Err(message) => message,
    };
    eprintln!("keelson-{name}: not healthy: {reason}");
    ExitCode::from(EX_UNAVAILABLE)
}

/// The service's own health (grpc.health.v1).
async fn check(name: ServiceName, socket: &Path) -> Result<ServingStatus, Status> {
    let mut request = Request::new(HealthCheckRequest::default());
    request.set_timeout(LIMIT);
    let mut client = HealthClient::new(connect_unix(name.as_str(), socket));
    Ok(client.check(request).await?.into_inner().status())
}

#[cfg(test)]
mod tests {
    use tokio_util::sync::CancellationToken;
    use tonic::service::Routes;

    use super::*;
    use crate::metrics::Metrics;
    use crate::server::{CallerPolicy, StackLayer, serve};

    #[tokio::test]
    async fn health_check_reports_the_status_and_names_an_unreachable_service() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("pod-sync.sock");
        let away = check(ServiceName::PodSync, &socket).await.unwrap_err();
        assert!(away.message().contains("pod-sync"), "{away}");

        let (reporter, service) = tonic_health::server::health_reporter();
        let stack = StackLayer::new(CallerPolicy::new(&keelson_config::Config::default()), Metrics::new());
        let (end, bound) = (CancellationToken::new(), CancellationToken::new());
        let (path, until, ready) = (socket.clone(), end.clone(), bound.clone());
        let server = crate::task::spawn("health", async move {
            serve(&path, Routes::new(service), stack, until, || ready.cancel()).await
        });
        bound.cancelled().await;
        for (status, expected) in [
            (tonic_health::ServingStatus::Serving, ServingStatus::Serving),
            (tonic_health::ServingStatus::NotServing, ServingStatus::NotServing),
        ] {
            reporter.set_service_status("", status).await;
            assert_eq!(check(ServiceName::PodSync, &socket).await.unwrap(), expected);
        }
        end.cancel();
        server.await.unwrap().unwrap();
    }
}
