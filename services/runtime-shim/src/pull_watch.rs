//! Watches a running pull: reports its progress to the caller, and cancels a stalled pull.
//!
//! The progress comes from containerd's content service, on the same socket. A runtime without this service reports no
//! progress; its pulls have no limit but the runtime's own.

use std::time::Duration;

use keelson_proto::containerd::services::content::v1 as content;
use keelson_proto::containerd::services::content::v1::content_client::ContentClient;
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_runtime_shim_core::pull_progress::{Blob, ProgressTracker, PullPhase};
use keelson_service_kit::status::is_unanswered;
use tonic::metadata::MetadataValue;
use tonic::{Code, Status};

use crate::clock::Clock;
use crate::cri::Cri;
use crate::ensure_response::{Progress, send_progress};

/// Interval between two polls.
const PERIOD: Duration = Duration::from_secs(2);
/// Timeout of one poll.
const POLL_TIMEOUT: Duration = Duration::from_secs(2);
/// containerd's namespace of CRI.
const NAMESPACE: &str = "k8s.io";

/// Why a pull has to be cancelled.
#[derive(Debug)]
pub(crate) enum AbortReason {
    /// It made no progress for too long; the text has the details.
    NoProgress(String),
    /// The runtime stopped answering.
    RuntimeUnavailable(Status),
}

/// Watches running pulls.
#[derive(Debug, Clone)]
pub(crate) struct PullWatcher {
    pub cri: Cri,
    pub clock: Clock,
    /// Nanoseconds without progress after which a pull is cancelled.
    pub limit: i64,
    pub period: Duration,
}

impl PullWatcher {
    pub(crate) fn new(cri: Cri, clock: Clock, limit: Duration) -> Self {
        let limit = i64::try_from(limit.as_nanos()).unwrap_or(i64::MAX);
        Self { cri, clock, limit, period: PERIOD }
    }

    /// Records the blobs before the pull begins; `None`: the runtime reports no progress.
    pub(crate) async fn begin(&self) -> Option<ProgressTracker> {
        let mut tracker = ProgressTracker::new(self.clock.read().boot_nanos);
        match self.blobs().await {
            Ok(blobs) => {
                tracker.observe(blobs, self.clock.read().boot_nanos);
                Some(tracker)
            }
            Err(status) if status.code() == Code::Unimplemented => None,
            // The earlier blobs are unknown; the pull itself will report the runtime's error.
            Err(_) => Some(tracker),
        }
    }

    /// Polls the progress until the pull has to be cancelled.
    pub(crate) async fn run(&self, tracker: Option<ProgressTracker>, progress: &Progress) -> AbortReason {
        let Some(mut tracker) = tracker else { return std::future::pending().await };
        let mut last_text = String::new();
        let mut answered_at = self.clock.read().boot_nanos;
        loop {
            tokio::time::sleep(self.period).await;
            let polled = self.blobs().await;
            let now = self.clock.read().boot_nanos;
            let phase = match polled {
                Ok(blobs) => tracker.observe(blobs, now),
                Err(status) if is_unanswered(&status) || status.code() == Code::DeadlineExceeded => {
                    if now - answered_at >= self.limit {
                        return AbortReason::RuntimeUnavailable(status);
                    }
                    continue;
                }
                Err(status) if status.code() == Code::Unimplemented => return std::future::pending().await,
                Err(status) => {
                    tracing::debug!(error = status.message(), "cannot read the progress of a pull");
                    continue;
                }
            };
            answered_at = now;
            if let Some(why) = tracker.stalled(self.limit, now) {
                return AbortReason::NoProgress(why);
            }
            let text = format!("pulling: {}", phase.text());
            if text != last_text {
                send_progress(progress, message(&phase, &text));
                last_text = text;
            }
        }
    }

    async fn blobs(&self) -> Result<Vec<Blob>, Status> {
        let mut client = ContentClient::new(self.cri.image_channel()).max_decoding_message_size(16 << 20);
        let mut request = self.cri.within(POLL_TIMEOUT, content::ListStatusesRequest::default());
        request.metadata_mut().insert("containerd-namespace", MetadataValue::from_static(NAMESPACE));
        let statuses = client.list_statuses(request).await?.into_inner().statuses;
        let count = |number: i64| u64::try_from(number).unwrap_or(0);
        let blob = |s: content::Status| Blob { name: s.r#ref, bytes: count(s.offset), total: count(s.total) };
        Ok(statuses.into_iter().map(blob).collect())
    }
}

fn message(phase: &PullPhase, text: &str) -> pb::ImageProgress {
    let (bytes, total_bytes) = match phase {
        PullPhase::Fetching { bytes, total, .. } => (*bytes, *total),
        PullPhase::Connecting | PullPhase::Unpacking => (0, 0),
    };
    pb::ImageProgress { step: "pulling".to_owned(), bytes, total_bytes, detail: text.to_owned() }
}
