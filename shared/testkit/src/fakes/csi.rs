//! The fakes of CSI drivers: the API `Node`, and the API by which plugins register.

use keelson_proto::csi::v1 as csi;
use keelson_proto::csi::v1::node_server::{Node, NodeServer};
use keelson_proto::pluginregistration as registration;
use keelson_proto::pluginregistration::registration_server::{Registration, RegistrationServer};

use super::define::fake_service;

fake_service! {
    /// A fake of the API `Node` of a CSI driver.
    FakeCsiNode implements Node, served by NodeServer:
    unary {
        node_stage_volume(csi::NodeStageVolumeRequest) -> csi::NodeStageVolumeResponse;
        node_unstage_volume(csi::NodeUnstageVolumeRequest) -> csi::NodeUnstageVolumeResponse;
        node_publish_volume(csi::NodePublishVolumeRequest) -> csi::NodePublishVolumeResponse;
        node_unpublish_volume(csi::NodeUnpublishVolumeRequest) -> csi::NodeUnpublishVolumeResponse;
        node_get_volume_stats(csi::NodeGetVolumeStatsRequest) -> csi::NodeGetVolumeStatsResponse;
        node_expand_volume(csi::NodeExpandVolumeRequest) -> csi::NodeExpandVolumeResponse;
        node_get_capabilities(csi::NodeGetCapabilitiesRequest) -> csi::NodeGetCapabilitiesResponse;
        node_get_info(csi::NodeGetInfoRequest) -> csi::NodeGetInfoResponse;
    }
    streams {}
    bidi {}
}

fake_service! {
    /// A fake of the API `Registration` of a plugin.
    FakePluginRegistration implements Registration, served by RegistrationServer:
    unary {
        get_info(registration::InfoRequest) -> registration::PluginInfo;
        notify_registration_status(registration::RegistrationStatus) -> registration::RegistrationStatusResponse;
    }
    streams {}
    bidi {}
}
