//! The gRPC server.

use std::sync::Arc;

use keelson_kube_model::Node;
use keelson_proto::keelson::node_status::v1 as pb;
use keelson_proto::keelson::node_status::v1::node_status_server::NodeStatus;
use keelson_service_kit::status::error;
use tokio::sync::watch;
use tonic::{Code, Request, Response, Status};

use crate::writer::ControlPlaneWriter;

pub(crate) struct Server {
    pub(crate) node: watch::Receiver<Option<Arc<Node>>>,
    pub(crate) writer: Arc<dyn ControlPlaneWriter>,
}

#[tonic::async_trait]
impl NodeStatus for Server {
    async fn get_report_state(
        &self,
        _: Request<pb::GetReportStateRequest>,
    ) -> Result<Response<pb::GetReportStateResponse>, Status> {
        let state = self.writer.state();
        Ok(Response::new(pb::GetReportStateResponse {
            control_plane: self.writer.control_plane().to_owned(),
            queued: state.queued,
            oldest_age_ms: state.oldest_age_ms,
            throttled_seconds: state.throttled_seconds,
        }))
    }

    async fn get_node(
        &self,
        _: Request<pb::GetNodeRequest>,
    ) -> Result<Response<pb::GetNodeResponse>, Status> {
        // The first Node exists within a few seconds of the start.
        let mut seen = self.node.clone();
        let node = seen
            .wait_for(Option::is_some)
            .await
            .ok()
            .and_then(|node| node.clone())
            .ok_or_else(|| error(Code::Unavailable, "ENDING", "node-status is shutting down; retry"))?;
        let node_json = serde_json::to_vec(&*node)
            .map_err(|source| error(Code::Internal, "NODE_ENCODE", source.to_string()))?;
        Ok(Response::new(pb::GetNodeResponse { node_json }))
    }
}
