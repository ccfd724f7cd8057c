//! The metrics of image volumes (volumes.md §10.7).

use keelson_service_kit::Metrics as Registry;
use prometheus_client::metrics::counter::Counter;

/// Image volumes of containers that are created. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct ImageVolumeMetrics {
    requested: Counter,
    mounted: Counter,
    failed: Counter,
}

impl ImageVolumeMetrics {
    /// Registers all of them.
    pub fn register(registry: &Registry) -> Self {
        let metrics = Self::default();
        for (name, help, counter) in [
            (
                "kubelet_image_volume_requested",
                "Image volumes that were to be mounted into containers",
                metrics.requested.clone(),
            ),
            (
                "kubelet_image_volume_mounted_succeed",
                "Image volumes of containers that were created",
                metrics.mounted.clone(),
            ),
            (
                "kubelet_image_volume_mounted_errors",
                "Image volumes of containers that the runtime did not create because it could not mount one",
                metrics.failed.clone(),
            ),
        ] {
            registry.register(name, help, counter);
        }
        metrics
    }

    /// A container with this number of image volumes is about to be created.
    pub fn requested(&self, volumes: u64) {
        self.requested.inc_by(volumes);
    }

    /// It was created.
    pub fn mounted(&self, volumes: u64) {
        self.mounted.inc_by(volumes);
    }

    /// The runtime could not mount one of them.
    pub fn failed(&self, volumes: u64) {
        self.failed.inc_by(volumes);
    }
}
