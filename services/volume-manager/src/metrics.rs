//! Metrics: gauges of orphaned pods (volumes.md §3.17), and durations of operations and measurements (§13).

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use keelson_service_kit::Metrics;
use keelson_volume_manager_core::csi::paths::PLUGIN as CSI;
use keelson_volume_manager_core::measurement::Method;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

/// Upper bounds of the histogram buckets of operations, in seconds.
const OPERATION_SECONDS: [f64; 13] =
    [0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 25.0, 50.0, 120.0, 300.0, 600.0];

/// Upper bounds of the histogram buckets of measurements, in seconds: the Prometheus defaults.
const MEASUREMENT_SECONDS: [f64; 11] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OperationLabels {
    volume_plugin: String,
    operation_name: &'static str,
    status: &'static str,
    migrated: &'static str,
}

/// An operation on a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    /// It is set up or its files are updated.
    Mount,
    /// It is torn down.
    Unmount,
    /// The device that pods share is unmounted.
    UnmountDevice,
    /// A block volume is prepared and mapped for a pod.
    Map,
    /// A block volume is taken away from a pod.
    Unmap,
    /// The device of a block volume is taken away.
    UnmapDevice,
    /// It is checked that the volume is attached.
    VerifyAttached,
    /// It is attached to this node.
    Attach,
    /// It is detached from this node.
    Detach,
    /// It is grown on the node.
    Resize,
    /// Its ownership is changed to the pod's fsGroup. This is part of a mount and also counted by itself.
    ApplyAccessControl,
}

/// The plugin of an operation, as [`OperationMetrics`] labels it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PluginLabel {
    name: String,
    /// The volume has a legacy source that its CSI driver serves (volumes.md §12).
    is_migrated: bool,
}

impl PluginLabel {
    /// The plugin `vendor/name`, for CSI with the driver if that is known: `kubernetes.io/csi:csi.example.com`.
    pub(crate) fn new(plugin: &str, driver: Option<&str>, is_migrated: bool) -> Self {
        let name = match driver.filter(|_| plugin == CSI) {
            Some(driver) => format!("{plugin}:{driver}"),
            None => plugin.to_owned(),
        };
        Self { name, is_migrated }
    }
}

impl From<String> for PluginLabel {
    fn from(name: String) -> Self {
        Self { name, is_migrated: false }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct MountWaitLabels {
    plugin_name: String,
    operation_name: &'static str,
}

/// Durations of operations, by plugin and outcome. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct OperationMetrics {
    operations: Family<OperationLabels, Histogram, fn() -> Histogram>,
    mount_waits: Family<MountWaitLabels, Histogram, fn() -> Histogram>,
}

impl OperationMetrics {
    /// Registers the histograms.
    pub(crate) fn register(metrics: &Metrics) -> Self {
        let new_histogram: fn() -> Histogram = || Histogram::new(OPERATION_SECONDS);
        let (operations, mount_waits) =
            (Family::new_with_constructor(new_histogram), Family::new_with_constructor(new_histogram));
        let help = "Seconds that operations on volumes took, by plugin, operation and outcome";
        metrics.register("storage_operation_duration_seconds", help, operations.clone());
        let help = "Seconds from when a volume was requested until it was mounted, by plugin";
        metrics.register("volume_operation_total_seconds", help, mount_waits.clone());
        Self { operations, mount_waits }
    }

    /// Records how long a pod waited for a volume until it was ready or up to date, including failed attempts.
    pub(crate) fn mounted(&self, plugin_name: String, waited: Duration) {
        let labels = MountWaitLabels { plugin_name, operation_name: "overall_volume_mount" };
        self.mount_waits.get_or_create(&labels).observe(waited.as_secs_f64());
    }

    /// Records the end of an operation.
    pub(crate) fn ended(
        &self,
        plugin: PluginLabel,
        operation: Operation,
        succeeded: bool,
        duration: Duration,
    ) {
        let labels = OperationLabels {
            volume_plugin: plugin.name,
            operation_name: match operation {
                Operation::Mount => "volume_mount",
                Operation::Unmount => "volume_unmount",
                Operation::UnmountDevice => "unmount_device",
                Operation::Map => "map_volume",
                Operation::Unmap => "unmap_volume",
                Operation::UnmapDevice => "unmap_device",
                Operation::VerifyAttached => "verify_controller_attached_volume",
                Operation::Attach => "volume_attach",
                Operation::Detach => "volume_detach",
                Operation::Resize => "volume_fs_resize",
                Operation::ApplyAccessControl => "volume_apply_access_control",
            },
            status: if succeeded { "success" } else { "fail-unknown" },
            migrated: if plugin.is_migrated { "true" } else { "false" },
        };
        self.operations.get_or_create(&labels).observe(duration.as_secs_f64());
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct MeasurementLabels {
    metric_source: String,
}

/// Durations of measurements, by method. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct MeasurementMetrics(Family<MeasurementLabels, Histogram, fn() -> Histogram>);

impl MeasurementMetrics {
    /// Registers the histogram.
    pub(crate) fn register(metrics: &Metrics) -> Self {
        let new_histogram: fn() -> Histogram = || Histogram::new(MEASUREMENT_SECONDS);
        let seconds = Family::new_with_constructor(new_histogram);
        let help = "Seconds that measurements of volumes took, by method or CSI driver";
        metrics.register("kubelet_volume_metric_collection_duration_seconds", help, seconds.clone());
        Self(seconds)
    }

    /// Records the end of a measurement, successful or not.
    pub(crate) fn ended(&self, method: Method, duration: Duration) {
        match method {
            Method::None => {}
            Method::FileSystem => self.measured_by("statfs".to_owned(), duration),
            Method::Walk => self.measured_by("du".to_owned(), duration),
        }
    }

    /// Records the answer of a CSI driver.
    pub(crate) fn driver_ended(&self, driver: String, duration: Duration) {
        self.measured_by(driver, duration);
    }

    fn measured_by(&self, metric_source: String, duration: Duration) {
        self.0.get_or_create(&MeasurementLabels { metric_source }).observe(duration.as_secs_f64());
    }
}

/// Counts orphaned pods whose folders are removed. A new round starts with each complete set of pods. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct OrphanMetrics(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    cleaned: Gauge,
    errors: Gauge,
    /// UIDs of pods whose folders could not be removed so far.
    failing: Mutex<BTreeSet<String>>,
}

impl OrphanMetrics {
    /// Registers the gauges.
    pub(crate) fn register(metrics: &Metrics) -> Self {
        let orphans = Self::default();
        metrics.register(
            "kubelet_orphan_pod_cleaned_volumes",
            "Pods whose folders were removed since the latest complete set of desired pods",
            orphans.0.cleaned.clone(),
        );
        metrics.register(
            "kubelet_orphan_pod_cleaned_volumes_errors",
            "Pods whose folders could not be removed",
            orphans.0.errors.clone(),
        );
        orphans
    }

    fn failing(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.0.failing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_errors(&self, failing: usize) {
        self.0.errors.set(i64::try_from(failing).unwrap_or(i64::MAX));
    }

    /// Starts a round.
    pub(crate) fn start_round(&self) {
        self.0.cleaned.set(0);
    }

    /// Records that a pod was removed completely.
    pub(crate) fn removed(&self, uid: &str) {
        self.0.cleaned.inc();
        let mut failing = self.failing();
        failing.remove(uid);
        self.set_errors(failing.len());
    }

    /// Records that something of a pod could not be removed; it will be retried.
    pub(crate) fn failed(&self, uid: &str) {
        let mut failing = self.failing();
        failing.insert(uid.to_owned());
        self.set_errors(failing.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operation_durations_are_labelled_by_plugin_and_outcome() {
        let metrics = Metrics::new();
        let operations = OperationMetrics::register(&metrics);
        let ended = |operation, succeeded| {
            operations.ended(
                PluginLabel::new("kubernetes.io/empty-dir", None, false),
                operation,
                succeeded,
                Duration::from_millis(300),
            );
        };
        ended(Operation::Mount, true);
        ended(Operation::Mount, true);
        ended(Operation::Mount, false);
        ended(Operation::Unmount, true);
        ended(Operation::ApplyAccessControl, true);
        let text = metrics.text();
        for (operation, status, count) in [
            ("volume_mount", "success", 2),
            ("volume_mount", "fail-unknown", 1),
            ("volume_unmount", "success", 1),
            ("volume_apply_access_control", "success", 1),
        ] {
            let line = format!(
                "storage_operation_duration_seconds_count{{volume_plugin=\"kubernetes.io/empty-dir\",\
                 operation_name=\"{operation}\",status=\"{status}\",migrated=\"false\"}} {count}"
            );
            assert!(text.lines().any(|l| l == line), "{line}\n{text}");
        }
    }

    #[test]
    fn operations_of_csi_volumes_are_labelled_by_driver_and_migrated_ones_too() {
        for (plugin, driver, is_migrated, labels) in [
            ("kubernetes.io/nfs", None, false, ("kubernetes.io/nfs", "false")),
            ("example.com/flex", Some("example.com/flex"), false, ("example.com/flex", "false")),
            ("kubernetes.io/csi", None, false, ("kubernetes.io/csi", "false")),
            ("kubernetes.io/csi", Some("a.example.com"), false, ("kubernetes.io/csi:a.example.com", "false")),
            (
                "kubernetes.io/csi",
                Some("ebs.csi.aws.com"),
                true,
                ("kubernetes.io/csi:ebs.csi.aws.com", "true"),
            ),
        ] {
            let metrics = Metrics::new();
            let label = PluginLabel::new(plugin, driver, is_migrated);
            OperationMetrics::register(&metrics).ended(label, Operation::Mount, true, Duration::ZERO);
            let (plugin, migrated) = labels;
            let line = format!(
                "storage_operation_duration_seconds_count{{volume_plugin=\"{plugin}\",\
                 operation_name=\"volume_mount\",status=\"success\",migrated=\"{migrated}\"}} 1"
            );
            assert!(metrics.text().contains(&line), "{line}\n{}", metrics.text());
        }
    }

    #[test]
    fn orphan_gauges_count_removed_pods_and_failed_removals() {
        let metrics = Metrics::new();
        let orphans = OrphanMetrics::register(&metrics);
        let shows = |cleaned: &str, errors: &str| {
            let text = metrics.text();
            let line = |name: &str, value: &str| text.lines().any(|line| line == format!("{name} {value}"));
            line("kubelet_orphan_pod_cleaned_volumes", cleaned)
                && line("kubelet_orphan_pod_cleaned_volumes_errors", errors)
        };
        orphans.failed("a");
        orphans.failed("a");
        orphans.removed("b");
        assert!(shows("1", "1"), "{}", metrics.text());
        orphans.start_round();
        assert!(shows("0", "1"), "{}", metrics.text());
        orphans.removed("a");
        assert!(shows("1", "0"), "{}", metrics.text());
    }
}
