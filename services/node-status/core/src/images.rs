//! Which images the Node lists.

use std::cmp::Reverse;

use keelson_kube_model::ContainerImage;

/// Names that are shown of an image (node-and-api.md §9.4).
const MOST_NAMES: usize = 5;

/// An image that the container runtime has.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RuntimeImage {
    /// As the runtime names it.
    pub id: String,
    /// `repository@digest`.
    pub digests: Vec<String>,
    /// `repository:tag`.
    pub tags: Vec<String>,
    /// As the runtime counts it.
    pub size_bytes: u64,
}

/// The images of a Node's status: the largest first, `most` of them (`None`: all), each with its digests and then its
/// tags as far as five names go, in the order of the runtime. Of images of one size the one with the higher id is
/// first, so that the order of the runtime's list makes no difference.
///
/// Parity: node-and-api.md §9.4.
pub fn listed_images(mut images: Vec<RuntimeImage>, most: Option<usize>) -> Vec<ContainerImage> {
    images.sort_unstable_by(|a, b| Reverse((a.size_bytes, &a.id)).cmp(&Reverse((b.size_bytes, &b.id))));
    images.truncate(most.unwrap_or(usize::MAX));
    images.into_iter().map(listed).collect()
}

fn listed(image: RuntimeImage) -> ContainerImage {
    ContainerImage {
        names: image.digests.into_iter().chain(image.tags).take(MOST_NAMES).collect(),
        // A size of zero is not written (Kubernetes API).
        size_bytes: i64::try_from(image.size_bytes).ok().filter(|bytes| *bytes > 0),
    }
}
