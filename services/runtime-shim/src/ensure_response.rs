//! The responses of `EnsureImage`: its progress, the image, and why it could not be ensured.

use keelson_proto::keelson::runtime::v1 as pb;
use keelson_proto::keelson::runtime::v1::ensure_image_response::Item;
use keelson_service_kit::status::error;
use tokio::sync::mpsc;
use tonic::{Code, Status};

use crate::cri_objects::Image;

/// Responses to the caller; closed when the caller has left.
pub(crate) type Progress = mpsc::Sender<Result<pb::EnsureImageResponse, Status>>;

/// Why an image could not be ensured.
#[derive(Debug)]
pub(crate) enum EnsureImageError {
    /// It cannot be used or pulled now.
    Failed(pb::ImageFailed),
    /// The runtime or pod-config does not answer. Not a failure of the image: no event, no back-off.
    Unavailable(Status),
    /// The caller has left: no failure, no event, no response.
    CallerLeft,
}

/// Sends progress to the caller. A caller that does not read misses it, because the pull does not wait.
pub(crate) fn send_progress(progress: &Progress, message: pb::ImageProgress) {
    let item = Some(Item::Progress(message));
    let _ = progress.try_send(Ok(pb::EnsureImageResponse { item }));
}

pub(crate) fn send_step(progress: &Progress, step: &str, detail: &str) {
    let (step, detail) = (step.to_owned(), detail.to_owned());
    send_progress(progress, pb::ImageProgress { step, detail, ..Default::default() });
}

/// The error for a runtime or pod-config that does not answer.
pub(crate) fn unavailable(message: String) -> EnsureImageError {
    EnsureImageError::Unavailable(error(Code::Unavailable, "RUNTIME_UNAVAILABLE", message))
}

pub(crate) fn image_done(image: Image, reference: &str, pulled: bool) -> pb::ImageDone {
    let image_ref = if image.id.is_empty() { reference.to_owned() } else { image.id };
    pb::ImageDone { image_ref, uid: image.uid, username: image.username, pulled, message: String::new() }
}
