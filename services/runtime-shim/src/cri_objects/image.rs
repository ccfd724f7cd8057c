//! The runtime's images.

use k8s_cri::v1 as cri;
use tonic::Status;

use super::response_checks;

/// An image that the runtime has.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Image {
    /// Runtime id.
    pub id: String,
    /// Its tags.
    pub repo_tags: Vec<String>,
    /// Its digests.
    pub repo_digests: Vec<String>,
    /// Size in bytes; layers shared with other images are counted for each of them.
    pub bytes: u64,
    /// Pinned by the runtime or the operator.
    pub pinned: bool,
    /// The numeric user of its configuration.
    pub uid: Option<i64>,
    /// The named user of its configuration; empty if it has none.
    pub username: String,
}

impl From<cri::Image> for Image {
    fn from(image: cri::Image) -> Self {
        Self {
            id: image.id,
            repo_tags: image.repo_tags,
            repo_digests: image.repo_digests,
            bytes: image.size,
            pinned: image.pinned,
            uid: image.uid.map(|uid| uid.value),
            username: image.username,
        }
    }
}

impl Image {
    /// Translates the status of the image `reference`.
    ///
    /// # Errors
    /// INTERNAL, with the names of the mandatory fields that are missing.
    pub fn parse(reference: &str, image: cri::Image) -> Result<Self, Status> {
        response_checks::check_image(reference, &image)?;
        Ok(image.into())
    }
}
