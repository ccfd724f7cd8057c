//! The images of a runtime, as runtime-shim passes them on.

use std::sync::{Arc, Mutex};

use k8s_cri::v1 as cri;
use k8s_cri::v1::image_service_server::ImageService;
use tonic::{Request, Response, Status};

use super::Answer;

/// The listed images; `None`: the list fails.
#[derive(Clone, Default)]
pub struct FakeImages(Arc<Mutex<Option<Vec<cri::Image>>>>);

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
        self.0.lock().unwrap().get_or_insert_default().push(image);
    }
}

#[tonic::async_trait]
impl ImageService for FakeImages {
    async fn list_images(&self, _: Request<cri::ListImagesRequest>) -> Answer<cri::ListImagesResponse> {
        let images = self.0.lock().unwrap().clone();
        let images = images.ok_or_else(|| Status::unknown("the runtime does not list"))?;
        Ok(Response::new(cri::ListImagesResponse { images }))
    }

    async fn image_status(&self, _: Request<cri::ImageStatusRequest>) -> Answer<cri::ImageStatusResponse> {
        Err(Status::unimplemented("not faked"))
    }

    async fn pull_image(&self, _: Request<cri::PullImageRequest>) -> Answer<cri::PullImageResponse> {
        Err(Status::unimplemented("not faked"))
    }

    async fn remove_image(&self, _: Request<cri::RemoveImageRequest>) -> Answer<cri::RemoveImageResponse> {
        Err(Status::unimplemented("not faked"))
    }

    async fn image_fs_info(&self, _: Request<cri::ImageFsInfoRequest>) -> Answer<cri::ImageFsInfoResponse> {
        Err(Status::unimplemented("not faked"))
    }
}
