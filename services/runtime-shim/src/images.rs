//! EnsureImage: inspect, decide, pull with a bounded number of slots, back off after failures.

use std::sync::{Arc, Mutex, PoisonError};

use k8s_cri::v1 as cri;
use keelson_proto::keelson::common::v1::PodRef;
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_proto::keelson::runtime::v1::ensure_image_response::Item;
use keelson_runtime_shim_core::image::{ImageDecision, PullBook, PullPolicy, decide, with_default_tag};
use keelson_service_kit::{EventRing, ObjectRef, now_unix_nanos};
use tokio::sync::{Semaphore, mpsc};
use tonic::{Code, Status};

use crate::cri::Cri;

/// Makes images present.
#[derive(Debug, Clone)]
pub struct Images {
    cri: Cri,
    events: EventRing,
    book: Arc<Mutex<PullBook>>,
    slots: Arc<Semaphore>,
}

/// Where progress goes; the sender is dropped when the caller has left.
pub type Progress = mpsc::Sender<Result<pb::EnsureImageResponse, Status>>;

impl Images {
    /// Pulls at most `parallel` images at the same time.
    pub fn new(cri: Cri, events: EventRing, parallel: u32) -> Self {
        let slots = Arc::new(Semaphore::new(parallel.max(1) as usize));
        Self { cri, events, book: Arc::default(), slots }
    }

    fn book(&self) -> std::sync::MutexGuard<'_, PullBook> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets the failures of a pod that is gone.
    pub fn forget(&self, uid: &str) {
        self.book().clear(uid, None);
    }

    /// Carries out one request; the last message is `done` or `failed`.
    pub async fn ensure(&self, request: pb::EnsureImageRequest, progress: Progress) {
        let pod = request.pod.clone().unwrap_or_default();
        let object =
            ObjectRef::pod(&pod.namespace, &pod.name, &pod.uid).container("containers", &request.container);
        let end = match self.ensure_inner(&pod, &request, &object, &progress).await {
            Ok(done) => Item::Done(done),
            Err(failed) => Item::Failed(failed),
        };
        let _ = progress.send(Ok(pb::EnsureImageResponse { item: Some(end) })).await;
    }

    async fn ensure_inner(
        &self,
        pod: &PodRef,
        request: &pb::EnsureImageRequest,
        object: &ObjectRef,
        progress: &Progress,
    ) -> Result<pb::ImageDone, pb::ImageFailed> {
        let reference = with_default_tag(&request.image)
            .map_err(|error| self.failed(object, "InspectFailed", "InvalidImageName", error.to_string()))?;
        let present = self.inspect(&reference).await.map_err(|status| {
            let message = format!("Failed to inspect image {:?}: {}", request.image, status.message());
            self.failed(object, "InspectFailed", "ImageInspectError", message)
        })?;
        match decide(PullPolicy::parse(&request.pull_policy, &reference), present.is_some()) {
            ImageDecision::Use => {
                let image = present.unwrap_or_default();
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
    ) -> Result<pb::ImageDone, pb::ImageFailed> {
        let waits = {
            let book = self.book();
            let waits = book.waits_until(&pod.uid, reference, now_unix_nanos());
            waits.map(|(until, error)| (until, error.to_owned()))
        };
        if let Some((until, error)) = waits {
            let text = format!("Back-off pulling image {:?}", request.image);
            self.events.normal(object.clone(), "BackOff", text.clone());
            return Err(pb::ImageFailed {
                reason: "ImagePullBackOff".into(),
                message: format!("{text}: {error}"),
                next_retry_unix_nanos: until,
            });
        }
        step(progress, "waiting").await;
        // The slots are never closed.
        let _slot = self.slots.acquire().await;
        step(progress, "pulling").await;
        self.events.normal(object.clone(), "Pulling", format!("Pulling image {:?}", request.image));
        let begun = std::time::Instant::now();
        let pull = self.pull_image(reference);
        let pulled = tokio::select! {
            () = progress.closed() => Err(Status::cancelled("nobody waits for the image any more")),
            pulled = pull => pulled,
        };
        match pulled {
            Ok(image) => {
                self.book().clear(&pod.uid, Some(reference));
                let text = format!(
                    "Successfully pulled image {:?} in {:.3}s",
                    request.image,
                    begun.elapsed().as_secs_f64()
                );
                self.events.normal(object.clone(), "Pulled", text);
                Ok(done(image, reference, true))
            }
            Err(status) => {
                let message = format!("failed to pull image {:?}: {}", request.image, status.message());
                let next = self.book().failed(&pod.uid, reference, &message, now_unix_nanos());
                let mut failed = self.failed(object, "Failed", pull_reason(&status), message);
                failed.next_retry_unix_nanos = next;
                Err(failed)
            }
        }
    }

    async fn pull_image(&self, reference: &str) -> Result<cri::Image, Status> {
        let request = cri::PullImageRequest {
            image: Some(cri::ImageSpec { image: reference.to_owned(), ..Default::default() }),
            ..Default::default()
        };
        let pulled = self.cri.images().pull_image(self.cri.unbounded(request)).await?.into_inner();
        let known = self.inspect(reference).await?;
        Ok(known.unwrap_or(cri::Image { id: pulled.image_ref, ..Default::default() }))
    }

    async fn inspect(&self, reference: &str) -> Result<Option<cri::Image>, Status> {
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

    fn failed(&self, object: &ObjectRef, event: &str, reason: &str, message: String) -> pb::ImageFailed {
        self.events.warning(object.clone(), event, message.clone());
        pb::ImageFailed { reason: reason.to_owned(), message, next_retry_unix_nanos: 0 }
    }
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
