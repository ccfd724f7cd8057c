//! The gRPC service `keelson.supervisor.v1`.

use std::collections::BTreeSet;
use std::pin::Pin;
use std::time::Duration;

use futures_util::future::join_all;
use futures_util::{Stream, StreamExt as _};
use keelson_config::ServiceName;
use keelson_proto::keelson::supervisor::v1 as pb;
use keelson_proto::keelson::supervisor::v1::supervisor_server::Supervisor;
use keelson_service_kit::WatchItem;
use keelson_service_kit::status::error;
use tokio::sync::{mpsc, oneshot};
use tonic::{Code, Request, Response, Status};

use crate::host;
use crate::reload::Reload;
use crate::supervisor::{Command, Services};

/// A restart takes at most the time that a service has to end, and some more.
const RESTART_WITHIN: Duration = Duration::from_secs(8);

/// The API for the state in the supervisor.
#[derive(Debug)]
pub struct SupervisorService {
    services: Services,
    commands: mpsc::Sender<Command>,
    files: Option<Reload>,
}

impl SupervisorService {
    /// Serves `services`, including init itself, and sends `commands`.
    pub fn new(services: Services, commands: mpsc::Sender<Command>, started_unix_nanos: i64) -> Self {
        let own = pb::Service {
            name: ServiceName::Init.to_string(),
            pid: std::process::id(),
            state: "running".to_owned(),
            started_unix_nanos,
            uid: rustix::process::geteuid().as_raw(),
            ..pb::Service::default()
        };
        services.set(ServiceName::Init, own);
        Self { services, commands, files: None }
    }

    /// Lets a restart apply the pending changes of files for the service.
    #[must_use]
    pub(crate) fn with_files(self, files: Reload) -> Self {
        Self { files: Some(files), ..self }
    }

    /// Ends a service and starts it again.
    async fn restart(&self, service: ServiceName, why: &'static str) -> Result<(), Status> {
        let (done, result) = oneshot::channel();
        let ending = || error(Code::Unavailable, "INIT_ENDING", "init is ending");
        let restart = Command::Restart { service, why, done };
        self.commands.send(restart).await.map_err(|_| ending())?;
        match tokio::time::timeout(RESTART_WITHIN, result).await {
            Ok(Ok(Ok(()))) => Ok(()),
            Ok(Ok(Err(why))) => {
                Err(error(Code::FailedPrecondition, "SERVICE_NOT_STARTED", format!("{service}: {why}")))
            }
            Ok(Err(_)) => Err(ending()),
            Err(_) => Err(error(
                Code::DeadlineExceeded,
                "SERVICE_STILL_ENDING",
                format!("{service} has not ended within {} s", RESTART_WITHIN.as_secs()),
            )),
        }
    }
}

#[tonic::async_trait]
impl Supervisor for SupervisorService {
    async fn list_services(
        &self,
        _: Request<pb::ListServicesRequest>,
    ) -> Result<Response<pb::ListServicesResponse>, Status> {
        let known = self.services.clone();
        // Reading the memory map of another process may block on that process.
        let services = tokio::task::spawn_blocking(move || {
            let all = ServiceName::ALL.into_iter().filter_map(|name| known.get(&name));
            all.map(|mut service| {
                if service.pid != 0 {
                    service.pss_kib = host::pss_kib(service.pid).unwrap_or(0);
                }
                service
            })
            .collect()
        })
        .await
        .map_err(|cause| error(Code::Internal, "PSS", format!("cannot read memory figures: {cause}")))?;
        Ok(Response::new(pb::ListServicesResponse { services }))
    }

    type WatchServicesStream = Pin<Box<dyn Stream<Item = Result<pb::WatchServicesResponse, Status>> + Send>>;

    async fn watch_services(
        &self,
        _: Request<pb::WatchServicesRequest>,
    ) -> Result<Response<Self::WatchServicesStream>, Status> {
        use pb::watch_services_response::Item;
        let items = self.services.subscribe().into_stream(|item| match item {
            WatchItem::Set(_, service) => Some(Item::Service(service)),
            WatchItem::Synced => Some(Item::Synced(true)),
            // Services are never removed.
            WatchItem::Gone(_) => None,
        });
        let answers = items.filter_map(|item| {
            std::future::ready(item.map(|i| Ok(pb::WatchServicesResponse { item: Some(i) })))
        });
        Ok(Response::new(Box::pin(answers)))
    }

    async fn restart_service(
        &self,
        request: Request<pb::RestartServiceRequest>,
    ) -> Result<Response<pb::RestartServiceResponse>, Status> {
        let name = request.into_inner().name;
        let service = name
            .parse::<ServiceName>()
            .map_err(|unknown| error(Code::NotFound, "SERVICE_UNKNOWN", unknown.to_string()))?;
        if service == ServiceName::Init {
            let text = "init does not restart itself; restart its unit, or stop and start it";
            return Err(error(Code::InvalidArgument, "SERVICE_IS_INIT", text));
        }
        let others = match &self.files {
            Some(files) => files
                .apply_pending(service)
                .await
                .map_err(|why| error(Code::FailedPrecondition, "CONFIGURATION_NOT_WRITTEN", why))?,
            None => BTreeSet::new(),
        };
        // Restarts all readers of the changed values at once, so that they soon agree.
        let others = others.into_iter().map(|other| self.restart(other, "for another configuration"));
        let (own, others) = tokio::join!(self.restart(service, "on request"), join_all(others));
        own?;
        others.into_iter().collect::<Result<Vec<()>, Status>>()?;
        Ok(Response::new(pb::RestartServiceResponse {}))
    }
}
