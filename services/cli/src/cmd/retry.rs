//! `keelson retry pod`.

use keelson_config::ServiceName;
use keelson_proto::keelson::pod_sync::v1::RetryPodRequest;

use crate::error::CliError;
use crate::output;
use crate::pods;
use crate::session::Session;

/// Ends the back-offs of the named pods.
pub(crate) async fn run(session: &Session, names: &[String]) -> Result<(), CliError> {
    let all = pods::list(&session.agent).await?;
    for name in names {
        let pod = &pods::resolve(&session.agent, &all, &session.scope(), name).await?.document;
        let request = RetryPodRequest { namespace: pod.namespace.clone(), name: pod.name.clone() };
        let answer = session.agent.pod_sync().retry_pod(session.agent.request(request)).await;
        answer.map_err(|s| session.agent.call_error(ServiceName::PodSync, s))?;
        output::print(&format!("pod/{} is retried now\n", pod.name))?;
    }
    Ok(())
}
