//! `keelson services`.

use keelson_config::ServiceName;
use keelson_proto::keelson::supervisor::v1::RestartServiceRequest;

use super::{Session, get_services};
use crate::error::Failure;
use crate::output;

/// Restarts the named services.
pub(crate) async fn restart(session: &Session, names: &[String]) -> Result<(), Failure> {
    let services = names.iter().map(|n| get_services::known(n)).collect::<Result<Vec<_>, _>>()?;
    for service in services {
        let request = session.agent.request(RestartServiceRequest { name: service.to_string() });
        let answer = session.agent.supervisor().restart_service(request).await;
        answer.map_err(|s| session.agent.failure(ServiceName::Init, s))?;
        output::print(&format!("service/{service} restarted\n"))?;
    }
    Ok(())
}
