//! EnsureImage: inspects the image, decides, and returns the image or pulls it ([`crate::pull`]).
//!
//! A pod may use a present image if the pod could pull it, as far as the records tell ([`crate::pull_records`]).
//!
//! If the runtime is down, the call fails with UNAVAILABLE, without event and back-off, because that is not an error of
//! the image. The same applies while the pod's Secrets cannot be read.

use std::collections::BTreeSet;
use std::time::SystemTime;

use keelson_config::Config;
use keelson_proto::keelson::common::v1::PodRef;
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_proto::keelson::runtime::v1::ensure_image_response::Item;
use keelson_runtime_shim_core::image::{ImageDecision, PullPolicy, decide, with_default_tag};
use keelson_runtime_shim_core::keyring::repository_of;
use keelson_runtime_shim_core::pull_record::Access;
use keelson_service_kit::status::{chain, is_cut};
use keelson_service_kit::{EventRing, Metrics, ObjectRef};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use tonic::Status;

use crate::credentials::{Credentials, FoundCredentials};
use crate::cri::Cri;
use crate::ensure_response::{EnsureImageError, Progress, image_done, unavailable};
use crate::present_images::PresentImages;
use crate::pull::{Pull, Puller};
use crate::pull_records::RecordError;

/// Ensures that images are present.
#[derive(Debug, Clone)]
pub struct Images {
    puller: Puller,
    events: EventRing,
    requests: Family<RequestLabels, Counter>,
    access_checks: Family<CheckLabels, Counter>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    pull_policy: String,
    present_locally: String,
    pull_required: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CheckLabels {
    result: &'static str,
}

/// Whether a pod may use a present image.
enum Usable {
    /// The pod may use it; `verified` says that its credential was verified.
    Yes {
        verified: bool,
    },
    No,
}

impl Images {
    /// Pulls at most `parallel` images at a time, without credentials and without records.
    pub fn new(cri: Cri, events: EventRing, parallel: u32) -> Self {
        Self {
            puller: Puller::new(cri, events.clone(), parallel),
            events,
            requests: Family::default(),
            access_checks: Family::default(),
        }
    }

    /// Adds the limits of the configuration, credentials, and the records of earlier pulls.
    #[must_use]
    pub fn configured(mut self, config: &Config, credentials: Credentials, metrics: &Metrics) -> Self {
        self.puller = self.puller.configured(config, credentials, metrics);
        let help =
            "Requests to ensure an image, by policy and whether the image was present and had to be pulled";
        metrics.register("kubelet_image_manager_ensure_image_requests", help, self.requests.clone());
        let help = "Checks whether a pod may use a present image, by result";
        metrics.register("kubelet_imagemanager_image_mustpull_checks", help, self.access_checks.clone());
        self
    }

    /// The images that the runtime has.
    pub(crate) const fn present(&self) -> &PresentImages {
        &self.puller.present
    }

    /// Forgets the pull failures of a pod that no longer exists.
    pub fn forget(&self, uid: &str) {
        self.puller.backoff().clear(uid, None);
    }

    /// Resolves pulls that were interrupted by the end of an earlier process.
    ///
    /// # Errors
    /// The runtime does not tell whether an image is present; the caller retries.
    pub async fn resolve_interrupted_pulls(&self) -> Result<(), Status> {
        let interrupted =
            self.puller.with_records(|records| Ok(records.interrupted())).await.unwrap_or_default();
        for reference in interrupted {
            let image = self.present().inspect(&reference).await?;
            let resolved = self.puller.with_records(move |records| {
                records.resolve_interrupted(&reference, image.as_ref().map(|i| i.id.as_str()))
            });
            if let Err(error) = resolved.await {
                tracing::warn!(error = chain(&error), "cannot resolve an interrupted pull");
            }
        }
        Ok(())
    }

    /// Removes the records of images that the runtime did not list at `listed_at`. An error is logged; the next call
    /// retries.
    pub(crate) async fn prune_records(&self, listed: BTreeSet<String>, listed_at: SystemTime) {
        let _ = self.puller.with_records(move |records| Ok(records.prune(&listed, listed_at))).await;
    }

    /// Serves one request. The last message is `done` or `failed`, or the stream ends with UNAVAILABLE because the runtime
    /// or pod-config is not reachable.
    pub async fn ensure(&self, request: pb::EnsureImageRequest, progress: Progress) {
        let pod = request.pod.clone().unwrap_or_default();
        let object = ObjectRef::pod(&pod.namespace, &pod.name, &pod.uid);
        let list = if request.spec_list.is_empty() { "containers" } else { &request.spec_list };
        let object = match request.container.as_str() {
            "" => object,
            container => object.container(list, container),
        };
        let end = match self.try_ensure(&pod, &request, &object, &progress).await {
            Ok(done) => Ok(Item::Done(done)),
            Err(EnsureImageError::Failed(failed)) => Ok(Item::Failed(failed)),
            Err(EnsureImageError::Unavailable(status)) => {
                tracing::debug!(
                    image = request.image,
                    error = status.message(),
                    "an image cannot be ensured: a peer is not available"
                );
                Err(status)
            }
            Err(EnsureImageError::CallerLeft) => return,
        };
        let _ = progress.send(end.map(|item| pb::EnsureImageResponse { item: Some(item) })).await;
    }

    async fn try_ensure(
        &self,
        pod: &PodRef,
        request: &pb::EnsureImageRequest,
        object: &ObjectRef,
        progress: &Progress,
    ) -> Result<pb::ImageDone, EnsureImageError> {
        let reference = with_default_tag(&request.image)
            .map_err(|error| self.failed(object, "InspectFailed", "InvalidImageName", error.to_string()))?;
        let present = self.present().reserve(&reference).await.map_err(|status| {
            let message = format!("Failed to inspect image {:?}: {}", request.image, status.message());
            if is_cut(&status) {
                return unavailable(message);
            }
            self.failed(object, "InspectFailed", "ImageInspectError", message)
        })?;
        let policy = PullPolicy::parse(&request.pull_policy, &reference);
        let repository = repository_of(&reference);
        let pull = Pull { pod, request, reference: &reference, repository: &repository, object, progress };
        let usable = match (&present, decide(policy, present.is_some())) {
            (Some(image), ImageDecision::Use) => self.check_access(pull, &image.id).await?,
            _ => Usable::No,
        };
        let pull_required = matches!(usable, Usable::No) && policy != PullPolicy::Never;
        self.count(policy, present.is_some(), pull_required);
        match (present, usable) {
            (Some(image), Usable::Yes { verified }) => {
                let suffix = if verified { " and can be accessed by the pod" } else { "" };
                let message =
                    format!("Container image {:?} already present on machine{suffix}", request.image);
                Ok(pb::ImageDone { message, ..image_done(image, &reference, false) })
            }
            _ if pull_required => self.puller.pull(pull).await,
            (present, _) => {
                let why = if present.is_some() {
                    "is present with pull policy of Never, and the pod has shown no credentials that it could be pulled with"
                } else {
                    "is not present with pull policy of Never"
                };
                let message = format!("Container image {:?} {why}", request.image);
                Err(self.failed(object, "ErrImageNeverPull", "ErrImageNeverPull", message))
            }
        }
    }

    /// Checks whether the pod may use a present image, and counts the result.
    async fn check_access(&self, pull: Pull<'_>, id: &str) -> Result<Usable, EnsureImageError> {
        let found = self.access_of_pod(pull, id).await;
        let result = match &found {
            Ok(Usable::Yes { verified: false }) => "credentialPolicyAllowed",
            Ok(Usable::Yes { verified: true }) => "credentialRecordFound",
            Ok(Usable::No) => "mustAuthenticate",
            Err(_) => "error",
        };
        self.access_checks.get_or_create(&CheckLabels { result }).inc();
        found
    }

    /// Checks whether the pod may use a present image. Its Secrets are read only if the decision depends on them.
    async fn access_of_pod(&self, pull: Pull<'_>, id: &str) -> Result<Usable, EnsureImageError> {
        let check = |credentials: FoundCredentials| {
            let (reference, repository) = (pull.reference.to_owned(), pull.repository.to_owned());
            let id = id.to_owned();
            self.puller.with_records(move |records| {
                Ok(records.access(&reference, &repository, &id, &credentials.list))
            })
        };
        let records_error = |error: RecordError| unavailable(chain(&error));
        match check(FoundCredentials::default()).await.map_err(records_error)? {
            Access::Open => return Ok(Usable::Yes { verified: false }),
            Access::Verified { .. } => return Ok(Usable::Yes { verified: true }),
            Access::Unknown => {}
        }
        let found = self
            .puller
            .credentials
            .pod_credentials(pull.pod, &pull.request.pull_secrets, pull.repository)
            .await;
        let found = found.map_err(|error| unavailable(error.to_string()))?;
        let Access::Verified { to_record } = check(found).await.map_err(records_error)? else {
            return Ok(Usable::No);
        };
        if let Some(used) = to_record {
            let (repository, id) = (pull.repository.to_owned(), id.to_owned());
            let recorded =
                self.puller.with_records(move |records| records.add(&repository, &id, Some(&used)));
            if let Err(error) = recorded.await {
                tracing::warn!(error = chain(&error), "cannot record that a Secret is valid for an image");
            }
        }
        Ok(Usable::Yes { verified: true })
    }

    fn count(&self, policy: PullPolicy, present: bool, pull_required: bool) {
        let policy = match policy {
            PullPolicy::Always => "always",
            PullPolicy::IfNotPresent => "ifnotpresent",
            PullPolicy::Never => "never",
        };
        let labels = RequestLabels {
            pull_policy: policy.to_owned(),
            present_locally: present.to_string(),
            pull_required: pull_required.to_string(),
        };
        self.requests.get_or_create(&labels).inc();
    }

    fn failed(&self, object: &ObjectRef, event: &str, reason: &str, message: String) -> EnsureImageError {
        self.events.warning(object.clone(), event, message.clone());
        EnsureImageError::Failed(pb::ImageFailed {
            reason: reason.to_owned(),
            message,
            next_retry_unix_nanos: 0,
        })
    }
}

#[cfg(test)]
mod tests;
