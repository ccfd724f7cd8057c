use std::sync::Arc;

use keelson_config::ServiceName;
use keelson_proto::keelson::admin::v1 as pb;
use keelson_proto::keelson::admin::v1::admin_server::Admin;
use keelson_telemetry::Telemetry;
use tonic::{Code, Request, Response, Status};

use crate::context::Context;
use crate::spans;
use crate::status::error;
use crate::usage;

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
        let config_json = serde_json::to_vec(&*self.context.live.now())
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

    async fn set_verbosity(
        &self,
        request: Request<pb::SetVerbosityRequest>,
    ) -> Result<Response<pb::SetVerbosityResponse>, Status> {
        // node-api calls this for clients of the network, and init serves no requests from there.
        if self.context.service == ServiceName::Init {
            let text = "init keeps its log level; change it with SetLogLevel";
            return Err(error(Code::FailedPrecondition, "LOG_FILTER", text));
        }
        let verbosity = request.into_inner().verbosity;
        self.context
            .set_log_verbosity(verbosity)
            .map_err(|e| error(Code::Internal, "LOG_FILTER", e.to_string()))?;
        Ok(Response::new(pb::SetVerbosityResponse {}))
    }

    async fn get_usage(
        &self,
        request: Request<pb::GetUsageRequest>,
    ) -> Result<Response<pb::GetUsageResponse>, Status> {
        let started = self.context.progress.started_unix_nanos();
        Ok(Response::new(usage::read(request.into_inner().with_pss, started)))
    }

    async fn list_spans(
        &self,
        request: Request<pb::ListSpansRequest>,
    ) -> Result<Response<pb::ListSpansResponse>, Status> {
        let request = request.into_inner();
        let ids = spans::trace_ids(&request.trace_ids).map_err(|text| {
            error(Code::InvalidArgument, "TRACE_ID", format!("trace_ids: {text:?} is no trace id"))
        })?;
        let traces = self.telemetry.spans().traces(&ids, &request.pod_uid);
        Ok(Response::new(pb::ListSpansResponse {
            traces: traces.into_iter().map(spans::trace).collect(),
            started_unix_nanos: self.context.progress.started_unix_nanos(),
        }))
    }
}
