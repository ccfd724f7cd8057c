//! Polls the health of a service.

use std::time::Duration;

use keelson_init_core::{ConditionReport, LoopReport, Poll, Report};
use keelson_proto::keelson::admin::v1::admin_client::AdminClient;
use keelson_proto::keelson::admin::v1::{GetProgressRequest, GetProgressResponse};
use keelson_service_kit::{Peer, status};
use tonic::Request;

/// A service that takes longer to answer counts as stuck.
const DEADLINE: Duration = Duration::from_secs(2);

/// Calls `GetProgress`.
pub(crate) async fn poll(peer: Peer) -> Poll {
    let mut request = Request::new(GetProgressRequest {});
    request.set_timeout(DEADLINE);
    match AdminClient::new(peer.channel()).get_progress(request).await {
        Ok(answer) => Poll::Answer(report(answer.into_inner())),
        Err(error) if status::is_cut(&error) => Poll::NoAnswer(error.message().to_owned()),
        Err(error) => Poll::Error(error.message().to_owned()),
    }
}

fn report(answer: GetProgressResponse) -> Report {
    Report {
        loops: answer
            .loops
            .into_iter()
            .map(|one| LoopReport {
                name: one.name,
                stalled: Duration::from_millis(one.silent_ms),
                stuck_after: Duration::from_millis(one.stuck_after_ms),
            })
            .collect(),
        conditions: answer
            .conditions
            .into_iter()
            .map(|one| ConditionReport { name: one.name, error: (!one.ok).then_some(one.message) })
            .collect(),
    }
}
