//! CRI `CreateContainer` with the field of mounts that `k8s_cri` lacks: the directory of an image to mount (`image_sub_path`).
//!
//! The messages here have the wire format of CRI. In protobuf, an embedded message is a field of bytes, and a message that is followed by
//! fields that it lacks is the message with these fields.

use std::collections::BTreeMap;

use k8s_cri::v1 as cri;
use prost::Message;
use tonic::{Request, Status};
use tonic_prost::ProstCodec;

use crate::effects::clients::Clients;

const PATH: &str = "/runtime.v1.RuntimeService/CreateContainer";

/// The configuration of a container.
#[derive(Debug)]
pub struct ContainerRequest {
    /// All of it that `k8s_cri` has.
    pub config: cri::ContainerConfig,
    /// The directories of images to mount, by index of the mount. The other mounts have none.
    pub image_sub_paths: BTreeMap<usize, String>,
}

impl ContainerRequest {
    /// The number of its mounts that are images.
    pub fn image_mounts(&self) -> u64 {
        self.config.mounts.iter().map(|mount| u64::from(mount.image.is_some())).sum()
    }

    /// CRI `ContainerConfig`.
    fn into_wire(self) -> Vec<u8> {
        let Self { mut config, mut image_sub_paths } = self;
        let mounts = std::mem::take(&mut config.mounts).into_iter().enumerate();
        let mounts = mounts.map(|(index, mount)| {
            let mut wire = mount.encode_to_vec();
            let image_sub_path = image_sub_paths.remove(&index).unwrap_or_default();
            wire.extend(OtherMountFields { image_sub_path }.encode_to_vec());
            wire
        });
        let mounts = Mounts { mounts: mounts.collect() };
        let mut wire = config.encode_to_vec();
        wire.extend(mounts.encode_to_vec());
        wire
    }
}

/// CRI `Mount`, the fields that `k8s_cri` lacks.
#[derive(Clone, PartialEq, Message)]
struct OtherMountFields {
    #[prost(string, tag = "10")]
    image_sub_path: String,
}

/// CRI `ContainerConfig`, its mounts only.
#[derive(Clone, PartialEq, Message)]
struct Mounts {
    #[prost(bytes = "vec", repeated, tag = "7")]
    mounts: Vec<Vec<u8>>,
}

/// CRI `CreateContainerRequest`.
#[derive(Clone, PartialEq, Message)]
struct CreateContainerRequest {
    #[prost(string, tag = "1")]
    pod_sandbox_id: String,
    #[prost(bytes = "vec", tag = "2")]
    config: Vec<u8>,
    #[prost(message, optional, tag = "3")]
    sandbox_config: Option<cri::PodSandboxConfig>,
}

/// Creates a container in a sandbox. Returns its id.
///
/// # Errors
/// The runtime cannot create it, or does not answer.
pub async fn create_container(
    clients: &Clients,
    sandbox_id: &str,
    sandbox_config: &cri::PodSandboxConfig,
    request: ContainerRequest,
) -> Result<String, Status> {
    let message = CreateContainerRequest {
        pod_sandbox_id: sandbox_id.to_owned(),
        config: request.into_wire(),
        sandbox_config: Some(sandbox_config.clone()),
    };
    let mut call = Request::new(message);
    call.set_timeout(clients.cri_timeout);
    let mut client = tonic::client::Grpc::new(clients.runtime_channel());
    client.ready().await?;
    let codec = ProstCodec::<CreateContainerRequest, cri::CreateContainerResponse>::default();
    let created = client.unary(call, http::uri::PathAndQuery::from_static(PATH), codec).await?;
    Ok(created.into_inner().container_id)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // A panic fails the test.

    use super::*;

    /// What a runtime reads that knows the field.
    #[derive(Clone, PartialEq, Message)]
    struct NewRuntimesConfig {
        #[prost(message, repeated, tag = "7")]
        mounts: Vec<OtherMountFields>,
    }

    #[test]
    fn a_container_request_has_every_field_and_the_subpaths_of_images_on_the_wire() {
        let mount = |path: &str| cri::Mount { container_path: path.into(), ..Default::default() };
        let config = cri::ContainerConfig {
            metadata: Some(cri::ContainerMetadata { name: "main".into(), attempt: 3 }),
            log_path: "main/3.log".into(),
            mounts: vec![mount("/a"), mount("/b"), mount("/c")],
            ..Default::default()
        };
        let image_sub_paths = BTreeMap::from([(1, "d/e".to_owned())]);
        let wire = ContainerRequest { config: config.clone(), image_sub_paths }.into_wire();
        let known = cri::ContainerConfig::decode(wire.as_slice()).unwrap();
        assert_eq!(known, config);
        let others = NewRuntimesConfig::decode(wire.as_slice()).unwrap().mounts;
        let others: Vec<&str> = others.iter().map(|mount| mount.image_sub_path.as_str()).collect();
        assert_eq!(others, ["", "d/e", ""]);
        let message = CreateContainerRequest {
            pod_sandbox_id: "s".into(),
            config: wire,
            sandbox_config: Some(cri::PodSandboxConfig { hostname: "web".into(), ..Default::default() }),
        };
        let known = cri::CreateContainerRequest::decode(message.encode_to_vec().as_slice()).unwrap();
        let sandbox = known.sandbox_config.unwrap();
        assert_eq!((known.pod_sandbox_id.as_str(), sandbox.hostname.as_str()), ("s", "web"));
        assert_eq!(known.config, Some(config));
    }
}
