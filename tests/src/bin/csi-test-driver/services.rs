//! The services of CSI and of the registration.

use std::collections::{BTreeMap, HashMap};

use keelson_proto::csi::v1 as pb;
use keelson_proto::csi::v1::identity_server::Identity;
use keelson_proto::csi::v1::node_server::Node;
use keelson_proto::pluginregistration as reg;
use keelson_proto::pluginregistration::registration_server::Registration;
use serde_json::{Value, json};
use tonic::{Request, Response, Status};

use crate::driver::Driver;
use crate::volumes::usage;

/// The keys of secrets, sorted.
fn keys(secrets: &HashMap<String, String>) -> Vec<&String> {
    let mut keys: Vec<&String> = secrets.keys().collect();
    keys.sort();
    keys
}

/// The volume context, without the tokens in it.
fn shown(context: &HashMap<String, String>) -> BTreeMap<&str, &str> {
    let hide = |key: &str| key == "csi.storage.k8s.io/serviceAccount.tokens";
    context.iter().map(|(key, value)| (key.as_str(), if hide(key) { "<masked>" } else { value })).collect()
}

fn capability_json(capability: Option<&pb::VolumeCapability>) -> Value {
    use pb::volume_capability::AccessType;
    let Some(capability) = capability else { return Value::Null };
    let mode = capability.access_mode.as_ref().map_or(0, |mode| mode.mode);
    match &capability.access_type {
        Some(AccessType::Block(_)) => json!({"block": {}, "mode": mode}),
        Some(AccessType::Mount(mount)) => json!({"mode": mode, "mount": {"fs_type": mount.fs_type,
            "mount_flags": mount.mount_flags, "volume_mount_group": mount.volume_mount_group}}),
        None => json!({"mode": mode}),
    }
}

type Reply<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl Node for Driver {
    async fn node_stage_volume(
        &self,
        request: Request<pb::NodeStageVolumeRequest>,
    ) -> Reply<pb::NodeStageVolumeResponse> {
        let request = request.into_inner();
        let json = json!({"volume_id": request.volume_id, "staging_target_path": request.staging_target_path,
            "publish_context": request.publish_context, "volume_context": shown(&request.volume_context),
            "secrets": keys(&request.secrets), "volume_capability": capability_json(request.volume_capability.as_ref())});
        self.handle("NodeStageVolume", json, |driver| driver.stage(&request)).await
    }

    async fn node_unstage_volume(
        &self,
        request: Request<pb::NodeUnstageVolumeRequest>,
    ) -> Reply<pb::NodeUnstageVolumeResponse> {
        let request = request.into_inner();
        let json =
            json!({"volume_id": request.volume_id, "staging_target_path": request.staging_target_path});
        self.handle("NodeUnstageVolume", json, |driver| driver.unstage(&request)).await
    }

    async fn node_publish_volume(
        &self,
        request: Request<pb::NodePublishVolumeRequest>,
    ) -> Reply<pb::NodePublishVolumeResponse> {
        let request = request.into_inner();
        let json = json!({"volume_id": request.volume_id, "target_path": request.target_path,
            "staging_target_path": request.staging_target_path, "publish_context": request.publish_context,
            "volume_context": shown(&request.volume_context), "secrets": keys(&request.secrets),
            "volume_capability": capability_json(request.volume_capability.as_ref()), "readonly": request.readonly});
        self.handle("NodePublishVolume", json, |driver| driver.publish(&request)).await
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<pb::NodeUnpublishVolumeRequest>,
    ) -> Reply<pb::NodeUnpublishVolumeResponse> {
        let request = request.into_inner();
        let json = json!({"volume_id": request.volume_id, "target_path": request.target_path});
        self.handle("NodeUnpublishVolume", json, |driver| driver.unpublish(&request)).await
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<pb::NodeGetVolumeStatsRequest>,
    ) -> Reply<pb::NodeGetVolumeStatsResponse> {
        let request = request.into_inner();
        let json = json!({"volume_id": request.volume_id, "volume_path": request.volume_path});
        self.handle("NodeGetVolumeStats", json, |_| usage(&request)).await
    }

    async fn node_expand_volume(
        &self,
        request: Request<pb::NodeExpandVolumeRequest>,
    ) -> Reply<pb::NodeExpandVolumeResponse> {
        let request = request.into_inner();
        let bytes = request.capacity_range.as_ref().map_or(0, |range| range.required_bytes);
        let json = json!({"volume_id": request.volume_id, "volume_path": request.volume_path, "required_bytes": bytes,
            "staging_target_path": request.staging_target_path, "secrets": keys(&request.secrets)});
        self.handle("NodeExpandVolume", json, |driver| driver.expand(&request)).await
    }

    async fn node_get_capabilities(
        &self,
        _: Request<pb::NodeGetCapabilitiesRequest>,
    ) -> Reply<pb::NodeGetCapabilitiesResponse> {
        use pb::node_service_capability::{Rpc, Type};
        let capability =
            |number: &i32| pb::NodeServiceCapability { r#type: Some(Type::Rpc(Rpc { r#type: *number })) };
        self.handle("NodeGetCapabilities", json!({}), |driver| {
            let capabilities = driver.capabilities.iter().map(capability).collect();
            Ok(pb::NodeGetCapabilitiesResponse { capabilities })
        })
        .await
    }

    async fn node_get_info(&self, _: Request<pb::NodeGetInfoRequest>) -> Reply<pb::NodeGetInfoResponse> {
        self.handle("NodeGetInfo", json!({}), |driver| {
            let segments = driver.topology.clone();
            Ok(pb::NodeGetInfoResponse {
                node_id: driver.node_id.clone(),
                max_volumes_per_node: driver.max_volumes,
                accessible_topology: (!segments.is_empty()).then_some(pb::Topology { segments }),
            })
        })
        .await
    }
}

#[tonic::async_trait]
impl Identity for Driver {
    async fn get_plugin_info(
        &self,
        _: Request<pb::GetPluginInfoRequest>,
    ) -> Reply<pb::GetPluginInfoResponse> {
        self.handle("GetPluginInfo", json!({}), |driver| {
            let (name, vendor_version) = (driver.name.clone(), driver.version.clone());
            Ok(pb::GetPluginInfoResponse { name, vendor_version, manifest: HashMap::new() })
        })
        .await
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<pb::GetPluginCapabilitiesRequest>,
    ) -> Reply<pb::GetPluginCapabilitiesResponse> {
        self.handle("GetPluginCapabilities", json!({}), |_| Ok(pb::GetPluginCapabilitiesResponse::default()))
            .await
    }

    async fn probe(&self, _: Request<pb::ProbeRequest>) -> Reply<pb::ProbeResponse> {
        self.handle("Probe", json!({}), |_| Ok(pb::ProbeResponse { ready: Some(true) })).await
    }
}

#[tonic::async_trait]
impl Registration for Driver {
    async fn get_info(&self, _: Request<reg::InfoRequest>) -> Reply<reg::PluginInfo> {
        self.handle("GetInfo", json!({}), |driver| {
            Ok(reg::PluginInfo {
                r#type: "CSIPlugin".to_owned(),
                name: driver.name.clone(),
                endpoint: driver.endpoint.to_string_lossy().into_owned(),
                supported_versions: vec![driver.version.clone()],
            })
        })
        .await
    }

    async fn notify_registration_status(
        &self,
        request: Request<reg::RegistrationStatus>,
    ) -> Reply<reg::RegistrationStatusResponse> {
        let request = request.into_inner();
        let json = json!({"plugin_registered": request.plugin_registered, "error": request.error});
        self.handle("NotifyRegistrationStatus", json, |_| Ok(reg::RegistrationStatusResponse {})).await
    }
}
