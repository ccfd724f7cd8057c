//! `Debug` for the messages of CSI that have secrets, so that no log and no test output shows them.

use std::collections::HashMap;
use std::fmt;

use crate::csi::v1::{NodeExpandVolumeRequest, NodePublishVolumeRequest, NodeStageVolumeRequest};

/// Shows the keys of a map, but not the values.
struct Keys<'a>(&'a HashMap<String, String>);

impl fmt::Debug for Keys<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut keys: Vec<&String> = self.0.keys().collect();
        keys.sort();
        f.debug_map().entries(keys.into_iter().map(|key| (key, "…"))).finish()
    }
}

impl fmt::Debug for NodeStageVolumeRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeStageVolumeRequest")
            .field("volume_id", &self.volume_id)
            .field("publish_context", &Keys(&self.publish_context))
            .field("staging_target_path", &self.staging_target_path)
            .field("secrets", &Keys(&self.secrets))
            .field("volume_context", &Keys(&self.volume_context))
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for NodePublishVolumeRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodePublishVolumeRequest")
            .field("volume_id", &self.volume_id)
            .field("publish_context", &Keys(&self.publish_context))
            .field("staging_target_path", &self.staging_target_path)
            .field("target_path", &self.target_path)
            .field("readonly", &self.readonly)
            .field("secrets", &Keys(&self.secrets))
            .field("volume_context", &Keys(&self.volume_context))
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for NodeExpandVolumeRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeExpandVolumeRequest")
            .field("volume_id", &self.volume_id)
            .field("volume_path", &self.volume_path)
            .field("capacity_range", &self.capacity_range)
            .field("staging_target_path", &self.staging_target_path)
            .field("secrets", &Keys(&self.secrets))
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_output_of_csi_requests_has_no_secrets_or_tokens() {
        let map = || HashMap::from([("key".to_owned(), "hidden".to_owned())]);
        let mount = crate::csi::v1::volume_capability::MountVolume {
            mount_flags: vec!["password=hidden".into()],
            ..Default::default()
        };
        let volume_capability = Some(crate::csi::v1::VolumeCapability {
            access_type: Some(crate::csi::v1::volume_capability::AccessType::Mount(mount)),
            access_mode: None,
        });
        let stage = NodeStageVolumeRequest {
            volume_id: "v1".into(),
            secrets: map(),
            publish_context: map(),
            volume_context: map(),
            volume_capability: volume_capability.clone(),
            ..Default::default()
        };
        let publish = NodePublishVolumeRequest {
            volume_id: "v1".into(),
            secrets: map(),
            publish_context: map(),
            volume_context: map(),
            volume_capability: volume_capability.clone(),
            ..Default::default()
        };
        let expand = NodeExpandVolumeRequest {
            volume_id: "v1".into(),
            secrets: map(),
            volume_capability,
            ..Default::default()
        };
        for text in [format!("{stage:?}"), format!("{publish:#?}"), format!("{expand:?}")] {
            assert!(!text.contains("hidden") && text.contains("v1") && text.contains("key"), "{text}");
        }
    }
}
