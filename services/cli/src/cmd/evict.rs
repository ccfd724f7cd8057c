//! `keelson evict pod`.

use keelson_config::ServiceName;
use keelson_proto::keelson::pod_sync::v1::EvictPodRequest;

use crate::args::{EvictArgs, PodNames};
use crate::error::CliError;
use crate::output;
use crate::pods;
use crate::session::Session;

/// Evicts the named pods. Each name is resolved before the first pod is evicted; the eviction is stored when the command ends, and
/// the pods end after it.
pub(crate) async fn run(session: &Session, args: EvictArgs) -> Result<(), CliError> {
    let PodNames::Pod { names } = args.what;
    let all = pods::list(&session.agent).await?;
    let mut chosen = Vec::with_capacity(names.len());
    for name in &names {
        chosen.push(&pods::resolve(&session.agent, &all, &session.scope(), name).await?.document);
    }
    for pod in chosen {
        // By its UID: meanwhile another pod may have the name.
        let request = EvictPodRequest {
            uid: pod.uid.clone(),
            grace_period_seconds: args.grace_period.map(i64::from),
            message: args.message.clone(),
            ..EvictPodRequest::default()
        };
        let answer = session.agent.pod_sync().evict_pod(session.agent.request(request)).await;
        answer.map_err(|status| session.agent.call_error(ServiceName::PodSync, status))?;
        output::print(&format!("pod/{} is evicted\n", pod.name))?;
    }
    Ok(())
}
