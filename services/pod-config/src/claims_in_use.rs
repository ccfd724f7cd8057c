//! The claims in use, as volume-manager reports them.

use futures_util::Stream;
use keelson_pod_config_core::binder::{ClaimKey, Report};
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_service_kit::status::error;
use tonic::{Code, Status, Streaming};

use crate::desired_state::DesiredState;

/// Takes the reports of a stream, and confirms each.
pub fn confirmations(
    desired: DesiredState,
    requests: Streaming<pb::ReportClaimsInUseRequest>,
) -> impl Stream<Item = Result<pb::ReportClaimsInUseResponse, Status>> {
    let stream = desired.begin_claim_reports();
    tracing::debug!(
        event = "claim_reports_begun",
        stream,
        "volume-manager has begun to report claims in use"
    );
    let reporter = Reporter { desired, requests, stream, revision: 0, report: Report::default() };
    futures_util::stream::unfold(Some(reporter), |reporter| async move {
        let mut reporter = reporter?;
        match reporter.next().await {
            Ok(Some(revision)) => Some((Ok(pb::ReportClaimsInUseResponse { revision }), Some(reporter))),
            Ok(None) => None,
            Err(status) => Some((Err(status), None)),
        }
    })
}

struct Reporter {
    desired: DesiredState,
    requests: Streaming<pb::ReportClaimsInUseRequest>,
    /// The number of the stream.
    stream: u64,
    /// The revision of `report`.
    revision: u64,
    /// The set so far.
    report: Report,
}

impl Reporter {
    /// The revision of the next set, once it is confirmed; `None` when the caller has closed the stream.
    async fn next(&mut self) -> Result<Option<u64>, Status> {
        while let Some(request) = self.requests.message().await? {
            if request.revision != self.revision {
                self.report = Report::default();
                self.revision = request.revision;
            }
            for claim in request.claims {
                add(&mut self.report, claim)?;
            }
            if request.complete {
                return self.confirm().await.map(Some);
            }
        }
        Ok(None)
    }

    async fn confirm(&mut self) -> Result<u64, Status> {
        let report = std::mem::take(&mut self.report);
        let claims = report.claims.len() + report.volumes.len();
        if !self.desired.report_claims(self.stream, report) {
            return Err(error(Code::Aborted, "NEWER_STREAM", "a newer stream has replaced this one"));
        }
        self.desired.volume_objects().reports_recorded().await;
        tracing::debug!(
            event = "claims_in_use_reported",
            revision = self.revision,
            claims,
            "claims in use recorded"
        );
        Ok(self.revision)
    }
}

fn add(report: &mut Report, claim: pb::ClaimInUse) -> Result<(), Status> {
    let pb::ClaimInUse { namespace, name, persistent_volume, user } = claim;
    if !namespace.is_empty() && !name.is_empty() {
        report.claims.insert(ClaimKey { namespace, name }, user);
    } else if namespace.is_empty() && name.is_empty() && !persistent_volume.is_empty() {
        report.volumes.insert(persistent_volume, user);
    } else {
        let text = "namespace and name of a claim, or persistent_volume, must be given";
        return Err(error(Code::InvalidArgument, "NAME_MISSING", text));
    }
    Ok(())
}
