//! The settings that gates decide.

use keelson_config::{Config, ControlPlane, NodeStatus, Pods};

use super::FeatureGates;

/// The value of the configuration that `crashLoopBackOff.maxContainerRestartPeriod` sets.
const MAX_RESTART_BACKOFF: &str = "pods.maxRestartBackoffMs";

/// Applies the gates in force to a configuration with all other settings.
pub(crate) fn apply(gates: &FeatureGates, config: &mut Config) {
    config.volumes.csi_volume_health = gates.is_on("CSIVolumeHealth");
    config.volumes.selinux_mount = gates.is_on("SELinuxMount");
    config.volumes.cluster_trust_bundles = gates.is_on("ClusterTrustBundleProjection");
    config.volumes.pod_certificates = gates.is_on("PodCertificateRequest");
    config.api.handlers.checkpoint = gates.is_on("ContainerCheckpoint");
    config.pods.ready_to_start_condition = gates.is_on("PodReadyToStartContainersCondition");
    config.node_status.declared_features = declared_features(gates);
    if gates.is_on("ReduceDefaultCrashLoopBackOffDecay") {
        reduce_restart_backoff(config);
    }
    if !gates.is_on("KubeletEnsureSecretPulledImages") {
        config.image_pulls.credentials_verification = "NeverVerify".to_owned();
    }
    if let ControlPlane::Kubernetes(api) = &mut config.control_plane {
        api.certificates.serving_by_name = gates.is_on("AllowDNSOnlyNodeCSR");
    }
}

/// The features that the Node declares (§9.7): those that the agent has and whose gate is on.
fn declared_features(gates: &FeatureGates) -> Vec<String> {
    let is_declared = |feature: &&str| gates.is_on("NodeDeclaredFeatures") && gates.is_on(feature);
    NodeStatus::DECLARABLE_FEATURES.into_iter().filter(is_declared).map(str::to_owned).collect()
}

/// A maximum that is set in a file stays, and lowers the first delay if it is shorter (pod-lifecycle.md §9.8).
fn reduce_restart_backoff(config: &mut Config) {
    config.pods.initial_restart_backoff_ms = Pods::REDUCED_INITIAL_RESTART_BACKOFF_MS;
    if !config.provenance.contains_key(MAX_RESTART_BACKOFF) {
        config.pods.max_restart_backoff_ms = Pods::REDUCED_MAX_RESTART_BACKOFF_MS;
    }
}

#[cfg(test)]
mod tests {
    use keelson_config::{Config, ControlPlane};
    use serde_json::{Value, json};

    use crate::inputs::Flags;
    use crate::testing::{host, kubelet, run, with_kubelet};

    fn with_gate(name: &str, on: bool) -> Config {
        with_kubelet(json!({"featureGates": {name: on}}))
    }

    #[test]
    fn the_condition_ready_to_start_is_reported_only_with_its_gate() {
        for on in [true, false] {
            let pods = with_gate("PodReadyToStartContainersCondition", on).pods;
            assert_eq!(pods.ready_to_start_condition, on);
        }
        assert!(with_kubelet(json!({})).pods.ready_to_start_condition);
    }

    #[test]
    fn containers_are_checkpointed_only_with_their_gate() {
        for on in [true, false] {
            assert_eq!(with_gate("ContainerCheckpoint", on).api.handlers.checkpoint, on);
        }
    }

    #[test]
    fn features_are_declared_only_with_their_gate_and_that_of_all() {
        let declared =
            |gates: Value| with_kubelet(json!({"featureGates": gates})).node_status.declared_features;
        let both = ["ExtendWebSocketsToKubelet", "RestartAllContainersOnContainerExits"];
        assert_eq!(declared(json!({})), both);
        assert_eq!(declared(json!({"ExtendWebSocketsToKubelet": false})), both[1..]);
        assert_eq!(declared(json!({"RestartAllContainersOnContainerExits": false})), both[..1]);
        let off = json!({
            "NodeDeclaredFeatures": false, "ExtendWebSocketsToKubelet": false,
            "RestartAllContainersOnContainerExits": false, "InPlacePodLevelResourcesVerticalScaling": false,
        });
        assert!(declared(off).is_empty());
    }

    #[test]
    fn the_reduced_restart_back_off_is_1_s_to_60_s_or_the_set_maximum() {
        let period = |text: &str| json!({"maxContainerRestartPeriod": text});
        for (on, back_off, expected) in [
            (false, json!({}), (10_000, 300_000)),
            (true, json!({}), (1_000, 60_000)),
            (true, period("20s"), (1_000, 20_000)),
            (true, period("300s"), (1_000, 300_000)),
            (false, period("20s"), (10_000, 20_000)),
        ] {
            let gates = json!({"ReduceDefaultCrashLoopBackOffDecay": on});
            let pods = with_kubelet(json!({"featureGates": gates, "crashLoopBackOff": back_off})).pods;
            let found = (pods.initial_restart_backoff_ms, pods.max_restart_backoff_ms);
            assert_eq!(found, expected, "{on} {back_off}");
        }
    }

    #[test]
    fn serving_certificates_are_requested_by_name_only_with_the_gate() {
        let flags = Flags { others: [("kubeconfig", "/k".to_owned())].into(), ..Flags::default() };
        for on in [true, false] {
            let file = kubelet(json!({"featureGates": {"AllowDNSOnlyNodeCSR": on}}));
            let config = run(&flags, Some(&file), None, &host()).unwrap().config;
            let ControlPlane::Kubernetes(api) = config.control_plane else { panic!("no API server") };
            assert_eq!(api.certificates.serving_by_name, on);
        }
    }

    #[test]
    fn credentials_for_present_images_are_verified_only_with_the_gate() {
        let policy =
            |on| with_gate("KubeletEnsureSecretPulledImages", on).image_pulls.credentials_verification;
        assert_eq!(policy(true), "NeverVerifyPreloadedImages");
        assert_eq!(policy(false), "NeverVerify");
    }
}
