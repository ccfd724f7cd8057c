//! The source `http`: manifests that stand at a URL (pod-lifecycle.md §2.3).
//!
//! It is asked every `httpCheckFrequency`. What it says is read like one file; while it says nothing, or nothing good, the last
//! good answer goes on, also over a restart.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::time::Duration;

use keelson_config::ServiceName;
use keelson_pod_config_core::files::SourceFiles;
use keelson_pod_config_core::static_pod::StaticRules;
use keelson_pod_config_core::{ManifestError, Why, parse_file};

use keelson_service_kit::{Context, LoopHandle, status};
use tokio::time::Instant;

use crate::checkpoint::Checkpoint;
use crate::control_plane::static_rules;
use crate::desired::{Desired, HTTP};
use crate::fetch::{Fetch, FetchError};

/// How often in a row an answer must be empty before its pods go.
const EMPTY_ANSWERS: u32 = 2;
/// After an empty answer that takes nothing away yet.
const AGAIN: Duration = Duration::from_secs(1);
const CONDITION: &str = "static-pod-url";

/// Whether a row of the checkpoint is of a URL; rows of files are absolute paths.
pub fn is_url(key: &str) -> bool {
    ["http://", "https://"].iter().any(|scheme| key.starts_with(scheme))
}

/// The source and all that it knows.
#[derive(Debug)]
pub struct UrlSource {
    ctx: Context,
    turn: LoopHandle,
    url: String,
    period: Duration,
    rules: StaticRules,
    desired: Desired,
    checkpoint: Checkpoint,
    /// What an earlier run of the service left, until the URL has answered once.
    remembered: Option<Vec<u8>>,
    answer: SourceFiles,
    fetch: Fetch,
    last: Option<Last>,
    empty: u32,
    settled: bool,
}

/// What came of the last request.
#[derive(Debug, PartialEq, Eq)]
enum Last {
    /// An answer, by its hash.
    Answer(u64),
    /// None, and why.
    Nothing(String),
}

impl UrlSource {
    /// A source at `url`; `remembered` is of the checkpoint of an earlier run.
    pub fn new(
        ctx: &Context,
        url: String,
        desired: Desired,
        checkpoint: Checkpoint,
        remembered: Option<Vec<u8>>,
    ) -> Self {
        Self {
            ctx: ctx.clone(),
            turn: ctx.progress.register("url-source"),
            period: Duration::from_millis(ctx.config.sources.http_check_ms.max(100)),
            rules: static_rules(&ctx.config).of_url(),
            desired,
            checkpoint,
            remembered,
            answer: SourceFiles::default(),
            fetch: Fetch::new(url.clone(), ctx.config.paths.credentials(ServiceName::PodConfig)),
            url,
            last: None,
            empty: 0,
            settled: false,
        }
    }

    /// Asks until the service ends.
    pub async fn run(mut self) {
        let shutdown = self.ctx.shutdown.clone();
        let mut ask_at = Instant::now();
        loop {
            self.turn.tick();
            let now = Instant::now();
            if now >= ask_at {
                // Cancel-safe: the service ends.
                let answer = tokio::select! {
                    () = shutdown.cancelled() => return,
                    answer = self.fetch.get() => answer,
                };
                ask_at = now + self.take(answer);
                self.turn.tick();
            }
            let wake = ask_at.min(Instant::now() + LoopHandle::HEARTBEAT);
            // Cancel-safe: nothing is taken while waiting.
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = tokio::time::sleep_until(wake) => {}
            }
        }
    }

    /// Takes what came of a request. In how long to ask again.
    fn take(&mut self, answer: Result<Vec<u8>, FetchError>) -> Duration {
        match answer {
            Ok(body) if body.is_empty() => return self.take_empty(),
            Ok(body) => self.take_body(&body),
            Err(error) => self.take_error(status::chain(&error)),
        }
        self.empty = 0;
        self.period
    }

    fn take_body(&mut self, body: &[u8]) {
        let mut hasher = DefaultHasher::new();
        body.hash(&mut hasher);
        let answer = Some(Last::Answer(hasher.finish()));
        if self.last == answer {
            return;
        }
        self.last = answer;
        match parse_file(body, &self.url, &self.rules) {
            Ok(mut content) => {
                match std::mem::take(&mut content.checkpoint) {
                    none if none.is_empty() => self.checkpoint.remove(&self.url),
                    some => self.checkpoint.put(&self.url, some),
                }
                self.answer.read(&self.url, Ok(content));
                self.has_answered();
                self.ctx.progress.condition(CONDITION, Ok(()));
            }
            Err(errors) => self.refuse(errors),
        }
        self.publish();
    }

    /// The kubelet lets its pods go at once; a server that is being set up says nothing as well.
    fn take_empty(&mut self) -> Duration {
        self.empty = self.empty.saturating_add(1);
        self.recall();
        let known = self.answer.content(&self.url);
        let something = known.is_some_and(|known| !known.pods.is_empty() || !known.objects.is_empty());
        if something && self.empty < EMPTY_ANSWERS {
            self.take_error("the answer is empty; if the next one is as well, its pods end".to_owned());
            return AGAIN.min(self.period);
        }
        self.checkpoint.remove(&self.url);
        self.answer.remove(&self.url);
        self.has_answered();
        self.take_error(
            "the answer is empty; write an empty PodList where there are to be no pods".to_owned(),
        );
        self.period
    }

    fn take_error(&mut self, why: String) {
        let nothing = Some(Last::Nothing(why));
        if self.last == nothing {
            return;
        }
        if let Some(Last::Nothing(why)) = &nothing {
            self.refuse(vec![ManifestError::file(Why::Unreadable, why)]);
        }
        self.last = nothing;
        self.publish();
    }

    /// The last good answer goes on.
    fn refuse(&mut self, errors: Vec<ManifestError>) {
        self.answer.read(&self.url, Err(errors));
        self.recall();
        let text = format!("{} has no good manifests; `keelson get sources` says why", self.url);
        self.ctx.progress.condition(CONDITION, Err(text));
    }

    /// Brings back what an earlier run has heard last.
    fn recall(&mut self) {
        let Some(bytes) = self.remembered.take() else { return };
        match parse_file(&bytes, &self.url, &self.rules) {
            Ok(content) => {
                tracing::info!(url = self.url, "what was good before the restart goes on");
                self.answer.remember(&self.url, content);
            }
            Err(errors) => {
                tracing::warn!(url = self.url, error = %errors[0], "what is remembered is not valid any more");
            }
        }
    }

    fn has_answered(&mut self) {
        self.settled = true;
        self.remembered = None;
    }

    fn publish(&mut self) {
        self.desired.publish(HTTP, self.answer.assemble(), self.settled);
    }
}
