//! The source `http`: manifests at a URL (pod-lifecycle.md §2.3).
//!
//! The URL is requested every `httpCheckFrequency`. A response is read like one file. After an error or an invalid response the
//! last good response stays in effect, also over a restart.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::time::Duration;

use keelson_config::ServiceName;
use keelson_pod_config_core::files::SourceFiles;
use keelson_pod_config_core::static_pod::StaticRules;
use keelson_pod_config_core::{ManifestError, ManifestErrorKind, parse_file};

use keelson_service_kit::{Context, LoopHandle, status};
use tokio::time::Instant;

use crate::checkpoint::Checkpoint;
use crate::control_plane::static_rules;
use crate::desired_state::{DesiredState, HTTP};
use crate::fetch::{FetchError, Fetcher};

/// Consecutive empty responses after which the pods are removed.
const EMPTY_RESPONSES: u32 = 2;
/// Delay after an empty response that removes no pods yet.
const EMPTY_RETRY_DELAY: Duration = Duration::from_secs(1);
const CONDITION: &str = "static-pod-url";

/// Whether a checkpoint key is a URL; the keys of files are absolute paths.
pub fn is_url(key: &str) -> bool {
    ["http://", "https://"].iter().any(|scheme| key.starts_with(scheme))
}

/// The loop of the source `http` and its state.
#[derive(Debug)]
pub struct UrlSource {
    ctx: Context,
    loop_handle: LoopHandle,
    url: String,
    period: Duration,
    rules: StaticRules,
    desired: DesiredState,
    checkpoint: Checkpoint,
    /// The restored response, until the URL has answered.
    restored: Option<Vec<u8>>,
    files: SourceFiles,
    fetcher: Fetcher,
    last_result: Option<LastResult>,
    empty_responses: u32,
    settled: bool,
}

/// The result of the last request.
#[derive(Debug, PartialEq, Eq)]
enum LastResult {
    /// Hash of the response.
    Response(u64),
    /// Why there was no response with manifests.
    Error(String),
}

impl UrlSource {
    /// A source at `url`; `restored` is from the checkpoint.
    pub fn new(
        ctx: &Context,
        url: String,
        desired: DesiredState,
        checkpoint: Checkpoint,
        restored: Option<Vec<u8>>,
    ) -> Self {
        Self {
            ctx: ctx.clone(),
            loop_handle: ctx.progress.register("url-source"),
            period: Duration::from_millis(ctx.config.sources.http_check_ms.max(100)),
            rules: static_rules(&ctx.config).for_url(),
            desired,
            checkpoint,
            restored,
            files: SourceFiles::default(),
            fetcher: Fetcher::new(url.clone(), ctx.config.paths.credentials(ServiceName::PodConfig)),
            url,
            last_result: None,
            empty_responses: 0,
            settled: false,
        }
    }

    /// Requests the URL until the service shuts down.
    pub async fn run(mut self) {
        let shutdown = self.ctx.shutdown.clone();
        let mut request_at = Instant::now();
        loop {
            self.loop_handle.tick();
            let now = Instant::now();
            if now >= request_at {
                // Cancel-safe: the service is shutting down.
                let result = tokio::select! {
                    () = shutdown.cancelled() => return,
                    result = self.fetcher.get() => result,
                };
                request_at = now + self.apply_result(result);
                self.loop_handle.tick();
            }
            let wake = request_at.min(Instant::now() + LoopHandle::HEARTBEAT);
            // Cancel-safe: neither arm holds state.
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = tokio::time::sleep_until(wake) => {}
            }
        }
    }

    /// Applies the result of a request. Returns the delay before the next request.
    fn apply_result(&mut self, result: Result<Vec<u8>, FetchError>) -> Duration {
        match result {
            Ok(body) if body.is_empty() => return self.apply_empty_response(),
            Ok(body) => self.apply_body(&body),
            Err(error) => self.apply_error(status::chain(&error)),
        }
        self.empty_responses = 0;
        self.period
    }

    fn apply_body(&mut self, body: &[u8]) {
        let mut hasher = DefaultHasher::new();
        body.hash(&mut hasher);
        let response = Some(LastResult::Response(hasher.finish()));
        if self.last_result == response {
            return;
        }
        self.last_result = response;
        match parse_file(body, &self.url, &self.rules) {
            Ok(mut content) => {
                match std::mem::take(&mut content.checkpoint) {
                    none if none.is_empty() => self.checkpoint.remove(&self.url),
                    some => self.checkpoint.put(&self.url, some),
                }
                self.files.update(&self.url, Ok(content));
                self.mark_settled();
                self.ctx.progress.condition(CONDITION, Ok(()));
            }
            Err(errors) => self.reject(errors),
        }
        self.publish();
    }

    /// The kubelet removes the pods at once; but a server that is being set up also returns an empty response.
    fn apply_empty_response(&mut self) -> Duration {
        self.empty_responses = self.empty_responses.saturating_add(1);
        self.restore();
        let known = self.files.content(&self.url);
        let has_content = known.is_some_and(|known| !known.pods.is_empty() || !known.objects.is_empty());
        if has_content && self.empty_responses < EMPTY_RESPONSES {
            self.apply_error(
                "the response is empty; if the next one is empty too, the pods are removed".to_owned(),
            );
            return EMPTY_RETRY_DELAY.min(self.period);
        }
        self.checkpoint.remove(&self.url);
        self.files.remove(&self.url);
        self.mark_settled();
        self.apply_error(
            "the response is empty; return an empty PodList if there are to be no pods".to_owned(),
        );
        self.period
    }

    fn apply_error(&mut self, message: String) {
        let result = Some(LastResult::Error(message));
        if self.last_result == result {
            return;
        }
        if let Some(LastResult::Error(message)) = &result {
            self.reject(vec![ManifestError::file(ManifestErrorKind::Unreadable, message)]);
        }
        self.last_result = result;
        self.publish();
    }

    /// Reports errors; the last good response stays in effect.
    fn reject(&mut self, errors: Vec<ManifestError>) {
        self.files.update(&self.url, Err(errors));
        self.restore();
        let text =
            format!("{} returned no valid manifests; `keelson get sources` shows the errors", self.url);
        self.ctx.progress.condition(CONDITION, Err(text));
    }

    /// Restores the last good response from the checkpoint.
    fn restore(&mut self) {
        let Some(bytes) = self.restored.take() else { return };
        match parse_file(&bytes, &self.url, &self.rules) {
            Ok(content) => {
                tracing::info!(
                    url = self.url,
                    "the last good response from before the restart stays in effect"
                );
                self.files.restore_content(&self.url, content);
            }
            Err(errors) => {
                tracing::warn!(event = "checkpoint_row_invalid", url = self.url, error = %errors[0], "the response in the checkpoint is no longer valid");
            }
        }
    }

    fn mark_settled(&mut self) {
        self.settled = true;
        self.restored = None;
    }

    fn publish(&mut self) {
        self.desired.publish(HTTP, self.files.assemble(), self.settled);
    }
}
