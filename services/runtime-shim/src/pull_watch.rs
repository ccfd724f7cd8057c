//! Looks at a pull while it goes on: what has come is told to the caller, and a pull that stands still is given up.
//!
//! containerd's own content service, on the same socket, tells what is being fetched. A runtime without it tells nothing:
//! its pulls have no progress and no limit but its own.

use std::time::Duration;

use keelson_proto::containerd::services::content::v1 as content;
use keelson_proto::containerd::services::content::v1::content_client::ContentClient;
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_proto::keelson::runtime::v1::ensure_image_response::Item;
use keelson_runtime_shim_core::pull_progress::{Blob, Doing, PullWatch};
use keelson_service_kit::status::is_unanswered;
use tonic::metadata::MetadataValue;
use tonic::{Code, Status};

use crate::clock::Clock;
use crate::cri::Cri;
use crate::images::Progress;

/// Between two looks.
const PERIOD: Duration = Duration::from_secs(2);
/// How long a look may take.
const LOOK_WITHIN: Duration = Duration::from_secs(2);
/// The namespace in which CRI keeps its images.
const NAMESPACE: &str = "k8s.io";

/// Why a pull has to be given up.
#[derive(Debug)]
pub(crate) enum Stalled {
    /// Nothing has come for too long, as the text says.
    Still(String),
    /// The runtime does not answer any more.
    Away(Status),
}

/// Watches pulls.
#[derive(Debug, Clone)]
pub(crate) struct Watching {
    pub cri: Cri,
    pub clock: Clock,
    /// Nanoseconds without progress after which a pull is given up.
    pub limit: i64,
    pub period: Duration,
}

impl Watching {
    pub(crate) fn new(cri: Cri, clock: Clock, limit: Duration) -> Self {
        let limit = i64::try_from(limit.as_nanos()).unwrap_or(i64::MAX);
        Self { cri, clock, limit, period: PERIOD }
    }

    /// What there is before the pull begins; `None`: the runtime does not tell.
    pub(crate) async fn begin(&self) -> Option<PullWatch> {
        let mut watch = PullWatch::new(self.clock.read().boot_nanos);
        match self.blobs().await {
            Ok(blobs) => {
                watch.look(blobs, self.clock.read().boot_nanos);
                Some(watch)
            }
            Err(status) if status.code() == Code::Unimplemented => None,
            // What was there before is not known; the pull will say what is wrong with the runtime.
            Err(_) => Some(watch),
        }
    }

    /// Looks again and again; returns when the pull has to be given up.
    pub(crate) async fn run(&self, watch: Option<PullWatch>, progress: &Progress) -> Stalled {
        let Some(mut watch) = watch else { return std::future::pending().await };
        let mut told = String::new();
        let mut answered_at = self.clock.read().boot_nanos;
        loop {
            tokio::time::sleep(self.period).await;
            let looked = self.blobs().await;
            let now = self.clock.read().boot_nanos;
            let doing = match looked {
                Ok(blobs) => watch.look(blobs, now),
                Err(status) if is_unanswered(&status) || status.code() == Code::DeadlineExceeded => {
                    if now - answered_at >= self.limit {
                        return Stalled::Away(status);
                    }
                    continue;
                }
                Err(status) if status.code() == Code::Unimplemented => return std::future::pending().await,
                Err(status) => {
                    tracing::debug!(error = status.message(), "cannot see how a pull goes on");
                    continue;
                }
            };
            answered_at = now;
            if let Some(why) = watch.stalled(self.limit, now) {
                return Stalled::Still(why);
            }
            let text = format!("pulling: {}", doing.text());
            if text != told {
                tell(progress, message(&doing, &text));
                told = text;
            }
        }
    }

    async fn blobs(&self) -> Result<Vec<Blob>, Status> {
        let mut client = ContentClient::new(self.cri.image_channel()).max_decoding_message_size(16 << 20);
        let mut request = self.cri.within(LOOK_WITHIN, content::ListStatusesRequest::default());
        request.metadata_mut().insert("containerd-namespace", MetadataValue::from_static(NAMESPACE));
        let statuses = client.list_statuses(request).await?.into_inner().statuses;
        let count = |number: i64| u64::try_from(number).unwrap_or(0);
        let blob = |s: content::Status| Blob { name: s.r#ref, bytes: count(s.offset), total: count(s.total) };
        Ok(statuses.into_iter().map(blob).collect())
    }
}

fn message(doing: &Doing, text: &str) -> pb::ImageProgress {
    let (bytes, total_bytes) = match doing {
        Doing::Fetching { bytes, total, .. } => (*bytes, *total),
        Doing::Asking | Doing::Unpacking => (0, 0),
    };
    pb::ImageProgress { step: "pulling".to_owned(), bytes, total_bytes, detail: text.to_owned() }
}

/// Tells how far it is. A caller that does not read misses it: the pull does not wait for that.
pub(crate) fn tell(progress: &Progress, message: pb::ImageProgress) {
    let item = Some(Item::Progress(message));
    let _ = progress.try_send(Ok(pb::EnsureImageResponse { item }));
}
