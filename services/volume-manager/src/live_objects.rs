//! Objects as they are now, read through pod-config: claims, PersistentVolumes, VolumeAttachments and so on.

use std::time::Duration;

use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_proto::keelson::pod_config::v1::mutate_request::Verb;
use keelson_proto::keelson::pod_config::v1::pod_config_client::PodConfigClient;
use keelson_service_kit::Peer;
use keelson_service_kit::status::reason;
use keelson_volume_manager_core::objects::PersistentVolumeClaim;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tonic::{Code, Request, Status};

/// The timeout of a read: a little longer than pod-config waits for the API server.
const TIMEOUT: Duration = Duration::from_secs(35);

/// The text of [`ReadError::EarlierRelease`].
const EARLIER_RELEASE: &str =
    "pod-config is of an earlier release, which cannot read objects of volumes; upgrade it";

/// Why an object was not read. The text is pod-config's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ReadError {
    /// This node has no API server, and no other source of the kind.
    #[error("{0}")]
    NoApiServer(String),
    /// The Node authorizer does not show the object to this node: it does not exist, or the authorizer has not seen yet that it
    /// belongs to a pod of this node. It answers the same in both cases.
    #[error("{0}")]
    NotVisible(String),
    /// pod-config is of an earlier release, which does not know the call; it is about to be upgraded.
    #[error("{}", EARLIER_RELEASE)]
    EarlierRelease,
    /// The API server or pod-config does not answer, or refuses.
    #[error("{0}")]
    Failed(String),
}

impl ReadError {
    /// The text.
    pub(crate) fn message(&self) -> &str {
        match self {
            Self::NoApiServer(text) | Self::NotVisible(text) | Self::Failed(text) => text,
            Self::EarlierRelease => EARLIER_RELEASE,
        }
    }

    fn of(status: &Status) -> Self {
        let message = status.message().to_owned();
        if status.code() == Code::Unimplemented {
            return Self::EarlierRelease;
        }
        match reason(status).as_deref() {
            Some("NO_API_SERVER") => Self::NoApiServer(message),
            Some("OBJECT_NOT_VISIBLE") => Self::NotVisible(message),
            _ => Self::Failed(message),
        }
    }
}

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
        self.read(kind, namespace, name).await.map_err(|error| error.to_string())
    }

    /// As [`Self::get`], with the kind of the error.
    ///
    /// # Errors
    /// It could not be read.
    pub(crate) async fn read<T: DeserializeOwned>(
        &self,
        kind: &str,
        namespace: &str,
        name: &str,
    ) -> Result<Option<T>, ReadError> {
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
                let invalid = |error| ReadError::Failed(format!("cannot read the {kind} {name}: {error}"));
                object.map(Some).map_err(invalid)
            }
            Err(status) if status.code() == Code::NotFound => Ok(None),
            Err(status) => Err(ReadError::of(&status)),
        }
    }

    /// Changes the status of a claim by a strategic merge patch. The claim after that.
    ///
    /// # Errors
    /// Why it was not changed. If the answer got lost, it may have been.
    pub(crate) async fn patch_claim_status(
        &self,
        namespace: &str,
        name: &str,
        patch: &Value,
    ) -> Result<PersistentVolumeClaim, String> {
        let message = pb::MutateRequest {
            kind: "PersistentVolumeClaim".to_owned(),
            subresource: "status".to_owned(),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            verb: Verb::StrategicPatch.into(),
            body_json: patch.to_string().into_bytes(),
            uid: String::new(),
        };
        let mut request = Request::new(message);
        request.set_timeout(TIMEOUT);
        let mut client = PodConfigClient::new(self.pod_config.channel());
        let answer = client.mutate(request).await.map_err(|status| status.message().to_owned())?;
        serde_json::from_slice(&answer.into_inner().object_json)
            .map_err(|error| format!("cannot read the claim {name} after its change: {error}"))
    }
}
