//! The images of a runtime, as runtime-shim passes them on.

use std::sync::Mutex;

use k8s_cri::v1 as cri;
use keelson_testkit::fakes::FakeCriImages;
use tonic::Status;

/// The listed images; the list fails until there is one.
pub struct FakeImages {
    pub(super) service: FakeCriImages,
    listed: Mutex<Vec<cri::Image>>,
}

impl Default for FakeImages {
    fn default() -> Self {
        let service = FakeCriImages::default();
        service.list_images.fail(Status::unknown("the runtime does not list"));
        Self { service, listed: Mutex::default() }
    }
}

impl FakeImages {
    /// Adds an image with one tag.
    pub fn add(&self, tag: &str, digest: &str, size: u64) {
        let image = cri::Image {
            id: format!("sha256:{tag}"),
            repo_tags: vec![tag.to_owned()],
            repo_digests: vec![digest.to_owned()],
            size,
            ..cri::Image::default()
        };
        let mut listed = self.listed.lock().unwrap();
        listed.push(image);
        self.service.list_images.answer(cri::ListImagesResponse { images: listed.clone() });
    }
}
