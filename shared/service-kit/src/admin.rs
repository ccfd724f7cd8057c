use std::sync::Arc;

use keelson_proto::keelson::admin::v1 as pb;
use keelson_proto::keelson::admin::v1::admin_server::Admin;
use keelson_telemetry::Telemetry;
use tonic::{Code, Request, Response, Status};

use crate::context::Context;
use crate::status::error;

/// `keelson.admin.v1` of every service.
pub(crate) struct AdminService {
    pub(crate) context: Context,
    pub(crate) telemetry: Arc<Telemetry>,
}

#[tonic::async_trait]
impl Admin for AdminService {
    async fn get_progress(
        &self,
        _: Request<pb::GetProgressRequest>,
    ) -> Result<Response<pb::GetProgressResponse>, Status> {
        Ok(Response::new(self.context.progress.report(self.context.version)))
    }

    async fn get_metrics(
        &self,
        _: Request<pb::GetMetricsRequest>,
    ) -> Result<Response<pb::GetMetricsResponse>, Status> {
        Ok(Response::new(pb::GetMetricsResponse { text: self.context.metrics.text() }))
    }

    async fn get_config(
        &self,
        _: Request<pb::GetConfigRequest>,
    ) -> Result<Response<pb::GetConfigResponse>, Status> {
        let config_json = serde_json::to_vec(&*self.context.config)
            .map_err(|e| error(Code::Internal, "CONFIG_ENCODE", e.to_string()))?;
        Ok(Response::new(pb::GetConfigResponse { config_json }))
    }

    async fn set_log_level(
        &self,
        request: Request<pb::SetLogLevelRequest>,
    ) -> Result<Response<pb::SetLogLevelResponse>, Status> {
        let filter = request.into_inner().filter;
        let previous = self
            .telemetry
            .set_filter(&filter)
            .map_err(|e| error(Code::InvalidArgument, "LOG_FILTER", e.to_string()))?;
        tracing::info!(filter, previous, "log filter changed");
        Ok(Response::new(pb::SetLogLevelResponse { previous }))
    }
}
