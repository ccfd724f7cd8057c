//! What the plugin needs of the control plane.

use std::fmt;

use futures_util::future::BoxFuture;
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_volume_manager_core::csi::attachment::VolumeAttachment;
use keelson_volume_manager_core::csi::{CsiDriver, CsiDriverSpec};
use keelson_volume_manager_core::desire::PodRef;
use keelson_volume_manager_core::token::{TokenName, Validity};

use crate::live_objects::{LiveObjects, ReadError};
use crate::tokens::TokenClient;

/// A read of an object: `None` if it does not exist, or why it cannot be read.
pub(super) type Read<'a, T> = BoxFuture<'a, Result<Option<T>, String>>;

/// Reads objects as they are now.
pub(crate) trait Objects: fmt::Debug + Send + Sync {
    /// The CSIDriver with this name.
    fn csi_driver<'a>(&'a self, name: &'a str) -> Read<'a, CsiDriver>;

    /// The VolumeAttachment with this name.
    fn attachment<'a>(&'a self, name: &'a str) -> Read<'a, VolumeAttachment>;
}

impl Objects for LiveObjects {
    fn csi_driver<'a>(&'a self, name: &'a str) -> Read<'a, CsiDriver> {
        Box::pin(self.get("CSIDriver", "", name))
    }

    fn attachment<'a>(&'a self, name: &'a str) -> Read<'a, VolumeAttachment> {
        Box::pin(async move {
            match self.read("VolumeAttachment", "", name).await {
                // Every VolumeAttachment of this node is visible to it as soon as it exists.
                Err(ReadError::NotVisible(_)) => Ok(None),
                result => result.map_err(|error| error.to_string()),
            }
        })
    }
}

/// A node without an API server: nobody attaches volumes there, so no driver needs that, and all else is as for a driver
/// without a CSIDriver.
#[derive(Debug)]
pub(crate) struct NoApiServer;

impl Objects for NoApiServer {
    fn csi_driver<'a>(&'a self, _: &'a str) -> Read<'a, CsiDriver> {
        let spec = CsiDriverSpec { attach_required: Some(false), ..CsiDriverSpec::default() };
        Box::pin(async { Ok(Some(CsiDriver { spec, ..CsiDriver::default() })) })
    }

    fn attachment<'a>(&'a self, _: &'a str) -> Read<'a, VolumeAttachment> {
        Box::pin(async { Ok(None) })
    }
}

/// A token that was just issued. Its `Debug` form does not show it.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct NewToken {
    /// The token.
    pub(crate) text: String,
    /// When it is valid.
    pub(crate) validity: Validity,
}

impl fmt::Debug for NewToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NewToken").field("validity", &self.validity).finish_non_exhaustive()
    }
}

/// Issues tokens of service accounts.
pub(crate) trait TokenIssuer: fmt::Debug + Send + Sync {
    /// A new token that is bound to the pod, or why there is none.
    fn issue<'a>(&'a self, pod: &'a PodRef, name: &'a TokenName) -> BoxFuture<'a, Result<NewToken, String>>;
}

impl TokenIssuer for TokenClient {
    fn issue<'a>(&'a self, pod: &'a PodRef, name: &'a TokenName) -> BoxFuture<'a, Result<NewToken, String>> {
        let message = pb::CreateTokenRequest {
            namespace: pod.namespace.clone(),
            service_account: name.service_account.clone(),
            pod_name: pod.name.clone(),
            pod_uid: pod.uid.clone(),
            audiences: Some(name.audience.clone())
                .filter(|audience| !audience.is_empty())
                .into_iter()
                .collect(),
            expiration_seconds: name.expiration_seconds,
        };
        Box::pin(async move {
            let issued = self.create_token(message).await.map_err(|status| status.message().to_owned())?;
            let validity = Validity::from_expiry(issued.expires_unix_seconds, issued.lifetime_seconds);
            Ok(NewToken { text: issued.token, validity })
        })
    }
}
