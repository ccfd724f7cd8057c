//! CRI clients of a private containerd. The kit is the world outside the agent, so it dials by itself.

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use k8s_cri::v1::image_service_client::ImageServiceClient;
use k8s_cri::v1::runtime_service_client::RuntimeServiceClient;
use k8s_cri::v1::{StatusRequest, VersionRequest};
use tonic::transport::{Channel, Endpoint};

use crate::{Options, PrivateContainerd, eventually};

const READY_LIMIT: Duration = Duration::from_secs(30);

impl PrivateContainerd {
    /// Starts one in the folder `dir` with [`PrivateContainerd::launch`], imports the standard images and
    /// waits until CRI answers `Version` and says that runtime and network are ready.
    pub async fn start(dir: &Path, options: Options) -> anyhow::Result<Self> {
        let dir = dir.to_owned();
        let launched = tokio::task::spawn_blocking(move || {
            let containerd = Self::launch(&dir, options)?;
            containerd.import_standard_images()?;
            anyhow::Ok(containerd)
        });
        let containerd = launched.await.context("starting containerd panicked")??;
        containerd.wait_ready().await?;
        Ok(containerd)
    }

    /// Waits until CRI answers `Version` and says that runtime and network are ready.
    pub async fn wait_ready(&self) -> anyhow::Result<()> {
        let channel = self.channel();
        eventually(READY_LIMIT, "CRI says that runtime and network are ready", || {
            let mut runtime = RuntimeServiceClient::new(channel.clone());
            async move {
                let Ok(_) = runtime.version(VersionRequest::default()).await else { return false };
                let Ok(answer) = runtime.status(StatusRequest::default()).await else { return false };
                let conditions = answer.into_inner().status.unwrap_or_default().conditions;
                !conditions.is_empty() && conditions.iter().all(|condition| condition.status)
            }
        })
        .await
        .with_context(|| format!("the end of containerd's log:\n{}", self.log_tail()))
    }

    /// A channel to its socket, connected when first used and again after a restart.
    pub fn channel(&self) -> Channel {
        let endpoint = format!("unix:{}", self.socket().display());
        // The path was checked when the socket's length was.
        let endpoint = Endpoint::try_from(endpoint).expect("an absolute path makes a valid unix: endpoint");
        endpoint.connect_lazy()
    }

    /// A client of CRI's runtime service.
    pub fn runtime(&self) -> RuntimeServiceClient<Channel> {
        RuntimeServiceClient::new(self.channel()).max_decoding_message_size(16 << 20)
    }

    /// A client of CRI's image service.
    pub fn images(&self) -> ImageServiceClient<Channel> {
        ImageServiceClient::new(self.channel())
    }
}
