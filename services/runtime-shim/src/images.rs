//! EnsureImage: inspect, decide, pull with a bounded number of slots, back off after failures.
//!
//! A pull has no limit of its own: CRI tells nothing about its progress, and an image may be of any size. A
//! runtime gives up a pull without progress itself (containerd: `image_pull_progress_timeout`); until then the
//! slot is taken. A pull that nobody waits for any more is given up.
//!
//! A runtime that is away is no fault of an image: the call fails with UNAVAILABLE, without event and back-off.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use k8s_cri::v1 as cri;
use keelson_proto::keelson::common::v1::PodRef;
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_proto::keelson::runtime::v1::ensure_image_response::Item;
use keelson_runtime_shim_core::image::{
    ImageDecision, PullBook, PullPolicy, decide, go_duration, with_default_tag,
};
use keelson_service_kit::status::{error, is_cut, is_unanswered};
use keelson_service_kit::{EventRing, ObjectRef};
use tokio::sync::{Notify, Semaphore, mpsc};
use tonic::{Code, Status};

use crate::clock::Clock;
use crate::cri::Cri;

/// Makes images present.
#[derive(Debug, Clone)]
pub struct Images {
    cri: Cri,
    events: EventRing,
    book: Arc<Mutex<PullBook>>,
    slots: Arc<Semaphore>,
    clock: Clock,
    claims: Arc<Claims>,
}

/// What keeps an image from being removed between the answer that it is there and its first container.
#[derive(Debug, Default)]
struct Claims {
    state: Mutex<ClaimState>,
    /// A removal has ended.
    ended: Notify,
}

#[derive(Debug, Default)]
struct ClaimState {
    /// When an image was last said to be there, nanoseconds since the boot.
    promised: HashMap<String, i64>,
    removing: HashSet<String>,
}

/// Where progress goes; closed when the caller has left.
pub type Progress = mpsc::Sender<Result<pb::EnsureImageResponse, Status>>;

/// Why there is no image.
#[derive(Debug)]
enum NoImage {
    /// It cannot be had now.
    Failed(pb::ImageFailed),
    /// The runtime is away, and nobody knows: neither a failure nor an event.
    Away(Status),
    /// The caller has left: neither a failure nor an event, and nobody to tell.
    Left,
}

impl Images {
    /// Pulls at most `parallel` images at the same time.
    pub fn new(cri: Cri, events: EventRing, parallel: u32) -> Self {
        let slots = Arc::new(Semaphore::new(parallel.max(1) as usize));
        Self { cri, events, book: Arc::default(), slots, clock: Clock::System, claims: Arc::default() }
    }

    fn claims(&self) -> std::sync::MutexGuard<'_, ClaimState> {
        self.claims.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins the removal of an image, unless somebody was told within `spare` nanoseconds that it is there. Whoever
    /// asks for it from now on waits for [`Self::end_removal`].
    pub(crate) fn begin_removal(&self, id: &str, spare: i64) -> bool {
        let now = self.clock.read().boot_nanos;
        let mut claims = self.claims();
        claims.promised.retain(|_, at| now - *at < spare);
        !claims.promised.contains_key(id) && claims.removing.insert(id.to_owned())
    }

    /// The removal is over, whatever has come of it.
    pub(crate) fn end_removal(&self, id: &str) {
        self.claims().removing.remove(id);
        self.claims.ended.notify_waiters();
    }

    /// The image, if it is there, and from now on it stays for a while.
    async fn claim(&self, reference: &str) -> Result<Option<cri::Image>, Status> {
        loop {
            let ended = self.claims.ended.notified();
            let Some(image) = self.inspect(reference).await? else { return Ok(None) };
            {
                let mut claims = self.claims();
                if !claims.removing.contains(&image.id) {
                    claims.promised.insert(image.id.clone(), self.clock.read().boot_nanos);
                    return Ok(Some(image));
                }
            }
            ended.await;
        }
    }

    fn book(&self) -> std::sync::MutexGuard<'_, PullBook> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets the failures of a pod that is gone.
    pub fn forget(&self, uid: &str) {
        self.book().clear(uid, None);
    }

    /// Carries out one request; the last message is `done` or `failed`, or UNAVAILABLE ends the answer because
    /// the runtime is away.
    pub async fn ensure(&self, request: pb::EnsureImageRequest, progress: Progress) {
        let pod = request.pod.clone().unwrap_or_default();
        let list = if request.spec_list.is_empty() { "containers" } else { &request.spec_list };
        let object = ObjectRef::pod(&pod.namespace, &pod.name, &pod.uid).container(list, &request.container);
        let end = match self.ensure_inner(&pod, &request, &object, &progress).await {
            Ok(done) => Ok(Item::Done(done)),
            Err(NoImage::Failed(failed)) => Ok(Item::Failed(failed)),
            Err(NoImage::Away(status)) => {
                tracing::debug!(image = request.image, error = status.message(), "the runtime is away");
                Err(status)
            }
            Err(NoImage::Left) => return,
        };
        let _ = progress.send(end.map(|item| pb::EnsureImageResponse { item: Some(item) })).await;
    }

    async fn ensure_inner(
        &self,
        pod: &PodRef,
        request: &pb::EnsureImageRequest,
        object: &ObjectRef,
        progress: &Progress,
    ) -> Result<pb::ImageDone, NoImage> {
        let reference = with_default_tag(&request.image)
            .map_err(|error| self.failed(object, "InspectFailed", "InvalidImageName", error.to_string()))?;
        let present = self.claim(&reference).await.map_err(|status| {
            let message = format!("Failed to inspect image {:?}: {}", request.image, status.message());
            if is_cut(&status) {
                return away(message);
            }
            self.failed(object, "InspectFailed", "ImageInspectError", message)
        })?;
        match decide(PullPolicy::parse(&request.pull_policy, &reference), present.is_some()) {
            ImageDecision::Use => {
                let image = present.unwrap_or_default();
                let text = format!("Container image {:?} already present on machine", request.image);
                self.events.normal(object.clone(), "Pulled", text);
                Ok(done(image, &reference, false))
            }
            ImageDecision::NeverPull => {
                let message =
                    format!("Container image {:?} is not present with pull policy of Never", request.image);
                Err(self.failed(object, "ErrImageNeverPull", "ErrImageNeverPull", message))
            }
            ImageDecision::Pull => self.pull(pod, request, &reference, object, progress).await,
        }
    }

    async fn pull(
        &self,
        pod: &PodRef,
        request: &pb::EnsureImageRequest,
        reference: &str,
        object: &ObjectRef,
        progress: &Progress,
    ) -> Result<pb::ImageDone, NoImage> {
        let now = self.clock.read();
        let waits = {
            let book = self.book();
            let waits = book.waits_until(&pod.uid, reference, now.boot_nanos);
            waits.map(|(until, error)| (now.unix_nanos_of(until), error.to_owned()))
        };
        if let Some((until, error)) = waits {
            let text = format!("Back-off pulling image {:?}", request.image);
            self.events.normal(object.clone(), "BackOff", text.clone());
            return Err(NoImage::Failed(pb::ImageFailed {
                reason: "ImagePullBackOff".into(),
                message: format!("{text}: {error}"),
                next_retry_unix_nanos: until,
            }));
        }
        let asked = Instant::now();
        step(progress, "waiting").await;
        // Cancel-safe: a slot that is not taken stays free. The slots are never closed.
        let _slot = tokio::select! {
            () = progress.closed() => return Err(NoImage::Left),
            slot = self.slots.acquire() => slot,
        };
        step(progress, "pulling").await;
        self.events.normal(object.clone(), "Pulling", format!("Pulling image {:?}", request.image));
        let begun = Instant::now();
        // Cancel-safe: the runtime drops a pull whose call is cut, and keeps what it has got.
        let pulled = tokio::select! {
            biased;
            pulled = self.pull_image(reference) => pulled,
            () = progress.closed() => return Err(NoImage::Left),
        };
        match pulled {
            Ok(image) => {
                self.book().clear(&pod.uid, Some(reference));
                let text = format!(
                    "Successfully pulled image {:?} in {} ({} including waiting). Image size: {} bytes.",
                    request.image,
                    go_duration(begun.elapsed()),
                    go_duration(asked.elapsed()),
                    image.size
                );
                self.events.normal(object.clone(), "Pulled", text);
                Ok(done(image, reference, true))
            }
            Err(status) => {
                let text = format!("Failed to pull image {:?}: {}", request.image, status.message());
                // What the runtime itself answers is about the image or its registry, whatever the code.
                if is_unanswered(&status) {
                    return Err(away(text));
                }
                let reason = pull_reason(&status);
                self.events.warning(object.clone(), "Failed", text.clone());
                let last = format!("{reason}: {}", status.message());
                let now = self.clock.read();
                let until = self.book().failed(&pod.uid, reference, &last, now.boot_nanos);
                let next_retry_unix_nanos = now.unix_nanos_of(until);
                let failed =
                    pb::ImageFailed { reason: reason.to_owned(), message: text, next_retry_unix_nanos };
                Err(NoImage::Failed(failed))
            }
        }
    }

    async fn pull_image(&self, reference: &str) -> Result<cri::Image, Status> {
        let request = cri::PullImageRequest {
            image: Some(cri::ImageSpec { image: reference.to_owned(), ..Default::default() }),
            ..Default::default()
        };
        let pulled = self.cri.images().pull_image(self.cri.unbounded(request)).await?.into_inner();
        let known = self.claim(reference).await?;
        Ok(known.unwrap_or(cri::Image { id: pulled.image_ref, ..Default::default() }))
    }

    /// What the runtime knows of a reference; `None`: the image is not there.
    pub(crate) async fn inspect(&self, reference: &str) -> Result<Option<cri::Image>, Status> {
        let request = cri::ImageStatusRequest {
            image: Some(cri::ImageSpec { image: reference.to_owned(), ..Default::default() }),
            verbose: false,
        };
        match self.cri.images().image_status(self.cri.quick(request)).await {
            Ok(response) => Ok(response.into_inner().image),
            Err(status) if status.code() == Code::NotFound => Ok(None),
            Err(status) => Err(status),
        }
    }

    fn failed(&self, object: &ObjectRef, event: &str, reason: &str, message: String) -> NoImage {
        self.events.warning(object.clone(), event, message.clone());
        NoImage::Failed(pb::ImageFailed { reason: reason.to_owned(), message, next_retry_unix_nanos: 0 })
    }
}

/// The runtime is away, as `message` says.
fn away(message: String) -> NoImage {
    NoImage::Away(error(Code::Unavailable, "RUNTIME_UNAVAILABLE", message))
}

async fn step(progress: &Progress, step: &str) {
    let item = Item::Progress(pb::ImageProgress { step: step.to_owned(), bytes: 0 });
    let _ = progress.send(Ok(pb::EnsureImageResponse { item: Some(item) })).await;
}

fn done(image: cri::Image, reference: &str, pulled: bool) -> pb::ImageDone {
    let image_ref = if image.id.is_empty() { reference.to_owned() } else { image.id };
    pb::ImageDone { image_ref, uid: image.uid.map(|u| u.value), username: image.username, pulled }
}

/// Texts that the runtime puts in front of its message for these two reasons
/// (runtime-and-resources.md §1.3).
fn pull_reason(status: &Status) -> &'static str {
    ["RegistryUnavailable", "SignatureValidationFailed"]
        .into_iter()
        .find(|reason| status.message().starts_with(reason))
        .unwrap_or("ErrImagePull")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{Answer, FakeRuntime};
    use keelson_proto::keelson::events::v1 as events;
    use keelson_proto::keelson::events::v1::events_server::Events as _;

    fn images(fake: &FakeRuntime) -> Images {
        let images = Images::new(fake.cri.clone(), EventRing::default(), 1);
        Images { clock: Clock::standing(), ..images }
    }

    /// How an answer that a broken call ends comes to its end.
    async fn broken(images: &Images, request: pb::EnsureImageRequest) -> Status {
        let (progress, mut messages) = mpsc::channel(8);
        images.ensure(request, progress).await;
        let mut last = None;
        while let Some(message) = messages.recv().await {
            last = Some(message);
        }
        last.unwrap().unwrap_err()
    }

    fn request(policy: &str) -> pb::EnsureImageRequest {
        pb::EnsureImageRequest {
            pod: Some(PodRef { uid: "u".into(), namespace: "default".into(), name: "web".into() }),
            container: "c".into(),
            image: "busybox:1".into(),
            pull_policy: policy.into(),
            spec_list: "initContainers".into(),
        }
    }

    async fn told(images: &Images) -> Vec<events::Event> {
        let request = tonic::Request::new(events::ListEventsRequest::default());
        images.events.list_events(request).await.unwrap().into_inner().events
    }

    /// The last message of a request that is carried out to its end.
    async fn end(images: &Images, request: pb::EnsureImageRequest) -> Item {
        let (progress, mut messages) = mpsc::channel(8);
        images.ensure(request, progress).await;
        let mut last = None;
        while let Some(message) = messages.recv().await {
            last = message.unwrap().item;
        }
        last.unwrap()
    }

    fn failure(item: Item) -> pb::ImageFailed {
        match item {
            Item::Failed(failed) => failed,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn a_pull_that_nobody_waits_for_any_more_is_no_failure() {
        let fake = FakeRuntime::start().await;
        let images = images(&fake);
        let _never = fake.hold("PullImage");
        let (progress, messages) = mpsc::channel(8);
        let pull = tokio::spawn({
            let images = images.clone();
            async move { images.ensure(request("Always"), progress).await }
        });
        fake.called("PullImage", 1).await;
        // A second one waits for the only slot.
        let (progress, waits) = mpsc::channel(8);
        let waiting = tokio::spawn({
            let images = images.clone();
            async move { images.ensure(request("Always"), progress).await }
        });
        fake.called("ImageStatus", 2).await;
        drop(waits);
        waiting.await.unwrap();
        drop(messages);
        pull.await.unwrap();
        assert_eq!(images.book().waits_until("u", "busybox:1", images.clock.read().boot_nanos), None);
        assert!(told(&images).await.iter().all(|e| e.reason == "Pulling"));
    }

    #[tokio::test]
    async fn a_failed_pull_is_told_in_the_kubelets_words_and_repeated_while_it_backs_off() {
        let fake = FakeRuntime::start().await;
        let images = images(&fake);
        fake.answer("PullImage", Answer::Fail(1, Code::Unknown));
        let first = failure(end(&images, request("Always")).await);
        assert_eq!(first.reason, "ErrImagePull");
        assert_eq!(first.message, "Failed to pull image \"busybox:1\": as the test wants it");
        let second = failure(end(&images, request("Always")).await);
        assert_eq!(second.reason, "ImagePullBackOff");
        let expected = "Back-off pulling image \"busybox:1\": ErrImagePull: as the test wants it";
        assert_eq!(second.message, expected);
        assert_eq!(second.next_retry_unix_nanos, first.next_retry_unix_nanos);
        let told = told(&images).await;
        let texts: Vec<_> =
            told.iter().map(|e| (e.r#type.as_str(), e.reason.as_str(), e.message.as_str())).collect();
        let expected = [
            ("Normal", "Pulling", "Pulling image \"busybox:1\""),
            ("Warning", "Failed", first.message.as_str()),
            ("Normal", "BackOff", "Back-off pulling image \"busybox:1\""),
        ];
        assert_eq!(texts, expected);
        assert!(told.iter().all(|e| e.field_path == "spec.initContainers{c}"), "{told:?}");
    }

    #[tokio::test]
    async fn a_runtime_that_is_away_is_no_fault_of_the_image() {
        let fake = FakeRuntime::start().await;
        let images = images(&fake);
        let dead = fake.dir.path().join("dead.sock");
        let timeout = std::time::Duration::from_secs(5);
        let cri = Cri::new(dead.to_str().unwrap(), timeout).unwrap();
        let unreached = Images { cri, ..images.clone() };
        let status = broken(&unreached, request("IfNotPresent")).await;
        assert_eq!(status.code(), Code::Unavailable);
        assert!(status.message().contains("the container runtime is not reachable"), "{status:?}");
        assert!(told(&images).await.is_empty());

        fake.answer("PullImage", Answer::CutOff);
        let status = broken(&images, request("Always")).await;
        assert_eq!(status.code(), Code::Unavailable);
        fake.answer("PullImage", Answer::Fail(0, Code::Unknown));
        assert!(matches!(end(&images, request("Always")).await, Item::Done(_)));
        assert!(told(&images).await.iter().all(|e| e.r#type == "Normal" && e.reason != "BackOff"));
    }

    #[tokio::test]
    async fn what_the_runtime_answers_about_a_pull_is_a_fault_of_the_image_whatever_the_code() {
        let fake = FakeRuntime::start().await;
        for code in [Code::Unavailable, Code::Cancelled, Code::DeadlineExceeded] {
            let images = images(&fake);
            fake.answer("PullImage", Answer::Fail(1, code));
            assert_eq!(failure(end(&images, request("Always")).await).reason, "ErrImagePull", "{code:?}");
        }
    }

    #[tokio::test]
    async fn a_clock_that_is_set_back_does_not_lengthen_a_back_off() {
        let fake = FakeRuntime::start().await;
        let images = images(&fake);
        fake.answer("PullImage", Answer::Fail(1, Code::Unknown));
        failure(end(&images, request("Always")).await);
        images.clock.pass(9, -7_200);
        let waits = failure(end(&images, request("Always")).await);
        assert_eq!(waits.next_retry_unix_nanos, images.clock.read().unix_nanos + 1_000_000_000);
        images.clock.pass(1, 0);
        assert!(matches!(end(&images, request("Always")).await, Item::Done(_)));
    }

    #[tokio::test]
    async fn an_image_that_is_there_and_one_that_was_pulled_are_told() {
        let fake = FakeRuntime::start().await;
        let images = images(&fake);
        assert!(matches!(end(&images, request("IfNotPresent")).await, Item::Done(done) if done.pulled));
        fake.image("busybox:1");
        assert!(matches!(end(&images, request("IfNotPresent")).await, Item::Done(done) if !done.pulled));
        let told = told(&images).await;
        assert!(told[1].message.starts_with("Successfully pulled image \"busybox:1\" in "), "{told:?}");
        assert_eq!(told[2].message, "Container image \"busybox:1\" already present on machine");
        assert_eq!(told[2].reason, "Pulled");
    }
}
