//! Which images the Node lists.

use std::cmp::Reverse;

use keelson_kube_model::ContainerImage;

/// The most names shown of an image (node-and-api.md §9.4).
const MAX_NAMES: usize = 5;

/// An image that the container runtime has.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RuntimeImage {
    /// The runtime's ID of it.
    pub id: String,
    /// `repository@digest`.
    pub digests: Vec<String>,
    /// `repository:tag`.
    pub tags: Vec<String>,
    /// Size in bytes, as the runtime reports it.
    pub size_bytes: u64,
}

/// The images of a Node's status: the `most` largest (`None`: all), largest first, each with its digests and then its tags up to
/// five names, in the runtime's order. Of images of one size the one with the higher id comes first, so that the order of the
/// runtime's list makes no difference.
///
/// Parity: node-and-api.md §9.4.
pub fn listed_images(mut images: Vec<RuntimeImage>, most: Option<usize>) -> Vec<ContainerImage> {
    images.sort_unstable_by(|a, b| Reverse((a.size_bytes, &a.id)).cmp(&Reverse((b.size_bytes, &b.id))));
    images.truncate(most.unwrap_or(usize::MAX));
    images.into_iter().map(listed).collect()
}

fn listed(image: RuntimeImage) -> ContainerImage {
    ContainerImage {
        names: image.digests.into_iter().chain(image.tags).take(MAX_NAMES).collect(),
        // A size of zero is not written (Kubernetes API).
        size_bytes: i64::try_from(image.size_bytes).ok().filter(|bytes| *bytes > 0),
    }
}
