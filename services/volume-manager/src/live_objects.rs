//! Objects as they are now, read through pod-config: claims, PersistentVolumes, VolumeAttachments and so on.

use std::time::Duration;

use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_proto::keelson::pod_config::v1::pod_config_client::PodConfigClient;
use keelson_service_kit::Peer;
use serde::de::DeserializeOwned;
use tonic::{Code, Request};

/// The timeout of a read: a little longer than pod-config waits for the API server.
const TIMEOUT: Duration = Duration::from_secs(35);

/// Reads objects. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct LiveObjects {
    pod_config: Peer,
}

impl LiveObjects {
    pub(crate) fn new(pod_config: Peer) -> Self {
        Self { pod_config }
    }

    /// Reads an object; `None` if it does not exist. `namespace` is empty for a cluster-wide object.
    ///
    /// # Errors
    /// Why it could not be read.
    pub(crate) async fn get<T: DeserializeOwned>(
        &self,
        kind: &str,
        namespace: &str,
        name: &str,
    ) -> Result<Option<T>, String> {
        let message = pb::GetLiveRequest {
            kind: kind.to_owned(),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        };
        let mut request = Request::new(message);
        request.set_timeout(TIMEOUT);
        let mut client = PodConfigClient::new(self.pod_config.channel());
        match client.get_live(request).await {
            Ok(response) => {
                let json = response.into_inner().object_json;
                let object = serde_json::from_slice(&json);
                object.map(Some).map_err(|error| format!("cannot read the {kind} {name}: {error}"))
            }
            Err(status) if status.code() == Code::NotFound => Ok(None),
            Err(status) => Err(status.message().to_owned()),
        }
    }
}
