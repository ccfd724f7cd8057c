//! Volumes of pods, from the KubeletConfiguration (node-and-api.md §2.5).

use std::path::PathBuf;
use std::time::Duration;

use keelson_kube_model::parse_go_duration;

use crate::document::Sourced;
use crate::durations::{YEAR, millis};
use crate::outcome::Outcome;
use crate::settings::{Files, Settings};

/// The fields; `None` where the file does not set them.
#[derive(Debug)]
pub(crate) struct Volumes {
    /// Zero turns the measurement off.
    stats_period: Option<Sourced<Duration>>,
    /// The folder of flexVolume drivers.
    plugin_dir: Option<Sourced<PathBuf>>,
}

impl Settings for Volumes {
    /// A negative period turns the measurement off, and zero means the default (node-and-api.md §2.5).
    fn read(files: &mut Files<'_>) -> Self {
        let plugin_dir = files.kubelet.path_field("volumePluginDir").map(|dir| dir.map(PathBuf::from));
        let none = Self { stats_period: None, plugin_dir };
        let Some(text) = files.kubelet.string("volumeStatsAggPeriod") else { return none };
        let (is_off, amount) = match text.value.strip_prefix('-') {
            Some(amount) => (true, amount),
            None => (false, text.value.as_str()),
        };
        let Some(period) = parse_go_duration(amount).filter(|period| *period <= YEAR) else {
            let remedy =
                "this is not a duration of at most a year; write one such as 1m, or -1s to turn it off";
            files.kubelet.refuse(&text, remedy);
            return none;
        };
        let period = (!period.is_zero()).then_some(if is_off { Duration::ZERO } else { period });
        Self { stats_period: period.map(|period| text.map(|_| period)), ..none }
    }

    fn resolve(self, out: &mut Outcome<'_>) {
        out.set_field(self.stats_period, |c, v| c.volumes.stats_period_ms = millis(v));
        out.set_field(self.plugin_dir, |c, v| c.volumes.plugin_dir = v);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::testing::{errors_of, with_kubelet};

    #[test]
    fn the_folder_of_flex_volume_drivers_can_be_set() {
        let default = "/usr/libexec/kubernetes/kubelet-plugins/volume/exec/";
        for (text, folder) in [("/opt/flex", "/opt/flex"), ("", default)] {
            let config = with_kubelet(json!({"volumePluginDir": text}));
            assert_eq!(config.volumes.plugin_dir.to_str(), Some(folder), "{text:?}");
        }
        assert_eq!(with_kubelet(json!({})).volumes.plugin_dir.to_str(), Some(default));
    }

    #[test]
    fn the_health_of_volumes_is_reported_only_with_its_gate() {
        for (gates, expected) in [(json!({}), false), (json!({"CSIVolumeHealth": true}), true)] {
            let config = with_kubelet(json!({"featureGates": gates}));
            assert_eq!(config.volumes.csi_volume_health, expected);
        }
    }

    #[test]
    fn volumes_of_every_access_mode_get_selinux_labels_only_with_the_gate() {
        for (gates, expected) in [(json!({}), false), (json!({"SELinuxMount": true}), true)] {
            let config = with_kubelet(json!({"featureGates": gates}));
            assert_eq!(config.volumes.selinux_mount, expected);
        }
    }

    #[test]
    fn trust_bundles_are_projected_only_with_both_gates() {
        let on = json!({"ClusterTrustBundle": true, "ClusterTrustBundleProjection": true});
        for (gates, expected) in
            [(json!({}), false), (json!({"ClusterTrustBundle": true}), false), (on, true)]
        {
            let config = with_kubelet(json!({"featureGates": gates}));
            assert_eq!(config.volumes.cluster_trust_bundles, expected, "{gates}");
        }
        let errors = errors_of(json!({"featureGates": {"ClusterTrustBundleProjection": true}}));
        assert!(errors.len() == 1 && errors[0].contains("[ClusterTrustBundle]"), "{errors:?}");
    }

    #[test]
    fn certificates_of_pods_are_projected_only_with_the_gate() {
        for (gates, expected) in [(json!({}), false), (json!({"PodCertificateRequest": true}), true)] {
            let config = with_kubelet(json!({"featureGates": gates}));
            assert_eq!(config.volumes.pod_certificates, expected, "{gates}");
        }
    }

    #[test]
    fn negative_volume_stats_period_means_off_and_zero_the_default() {
        for (text, millis) in [("10s", 10_000), ("-1s", 0), ("-1m30s", 0), ("0s", 60_000), ("0", 60_000)] {
            let config = with_kubelet(json!({"volumeStatsAggPeriod": text}));
            assert_eq!(config.volumes.stats_period_ms, millis, "{text}");
        }
        assert_eq!(with_kubelet(json!({})).volumes.stats_period_ms, 60_000);
        for text in ["soon", "", "--1s", "9000h"] {
            let errors = errors_of(json!({"volumeStatsAggPeriod": text}));
            assert!(errors.len() == 1 && errors[0].contains("volumeStatsAggPeriod"), "{text}: {errors:?}");
        }
    }
}
