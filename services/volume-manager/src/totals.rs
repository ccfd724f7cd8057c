//! Metrics: the numbers of desired and actual volumes, and of volumes found at startup (volumes.md §13).

use std::collections::BTreeMap;

use keelson_service_kit::Metrics;
use keelson_volume_manager_core::desire::{PodDesire, Source, Volume, Want};
use keelson_volume_manager_core::names::unescape;
use keelson_volume_manager_core::plan::ActualState;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    plugin_name: String,
    state: &'static str,
}

/// The metrics of all pods. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct VolumeTotals {
    volumes: Family<Labels, Gauge>,
    found: Counter,
    /// Volumes found at startup of a plugin that this version does not have, or that their plugin does not understand.
    foreign: Counter,
    forced: Counter,
    forced_errors: Counter,
}

impl VolumeTotals {
    /// Registers the metrics.
    pub(crate) fn register(metrics: &Metrics) -> Self {
        let totals = Self {
            volumes: Family::default(),
            found: Counter::default(),
            foreign: Counter::default(),
            forced: Counter::default(),
            forced_errors: Counter::default(),
        };
        let help = "Desired and actual volumes, by plugin";
        metrics.register("volume_manager_total_volumes", help, totals.volumes.clone());
        let help = "Volumes that were found on disk at startup";
        metrics.register("reconstruct_volume_operations", help, totals.found.clone());
        let help = "Volumes that were found on disk at startup and of which no plugin knows what they are";
        metrics.register("reconstruct_volume_operations_errors", help, totals.foreign.clone());
        let help =
            "Volumes found at startup that no plugin knows, that are not desired and that were to be removed";
        metrics.register("force_cleaned_failed_volume_operations", help, totals.forced.clone());
        let help = "Volumes found at startup that no plugin knows and that could not be removed";
        metrics.register("force_cleaned_failed_volume_operation_errors", help, totals.forced_errors.clone());
        totals
    }

    /// Starts counting a pod. `actual` is what was found on disk at startup, if anything.
    pub(crate) fn count_pod(&self, actual: &ActualState) -> PodCounts {
        let counted = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
        self.found.inc_by(counted(actual.on_disk.len()));
        self.foreign.inc_by(counted(actual.on_disk.iter().filter(|key| key.is_foreign()).count()));
        let mut pod_counts = PodCounts { totals: self.clone(), published: Vec::new() };
        pod_counts.publish(&[], actual);
        pod_counts
    }

    /// Counts the volumes of plugins that were found on disk at startup. `unknown`: their plugins could not tell what they are.
    pub(crate) fn found_volumes(&self, known: usize, unknown: usize) {
        let counted = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
        self.found.inc_by(counted(known + unknown));
        self.foreign.inc_by(counted(unknown));
    }

    /// Starts counting the volumes that plugins provide.
    pub(crate) fn count_plugins(&self) -> PluginTotals {
        PluginTotals(PodCounts { totals: self.clone(), published: Vec::new() })
    }

    /// Counts the first attempt to remove a volume that no plugin knows, successful or not.
    pub(crate) fn foreign_removal(&self, is_gone: bool) {
        self.forced.inc();
        if !is_gone {
            self.forced_errors.inc();
        }
    }

    fn add(&self, count: &PluginCount, sign: i64) {
        for (state, of_state) in
            [("desired_state_of_world", count.desired), ("actual_state_of_world", count.existing)]
        {
            let labels = Labels { plugin_name: count.plugin.clone(), state };
            self.volumes.get_or_create(&labels).inc_by(sign * of_state);
        }
    }
}

/// The contribution of the volumes that plugins provide, of all pods.
#[derive(Debug)]
pub(crate) struct PluginTotals(PodCounts);

impl PluginTotals {
    /// Updates the numbers: desired and mounted volumes, by plugin as Kubernetes names it.
    pub(crate) fn update(&mut self, counts: BTreeMap<String, (i64, i64)>) {
        let count = |(plugin, (desired, existing))| PluginCount { plugin, desired, existing };
        self.0.replace(counts.into_iter().map(count).collect());
    }
}

/// The contribution of one pod to the totals, by plugin. It is subtracted when this is dropped.
#[derive(Debug)]
pub(crate) struct PodCounts {
    totals: VolumeTotals,
    published: Vec<PluginCount>,
}

/// The numbers of volumes of one plugin.
#[derive(Debug, PartialEq, Eq)]
struct PluginCount {
    plugin: String,
    desired: i64,
    existing: i64,
}

impl PodCounts {
    /// Updates the pod's numbers of desired and actual volumes.
    pub(crate) fn update(&mut self, desire: &PodDesire, actual: &ActualState) {
        let volumes: &[Volume] = match desire.header.want {
            Want::Run | Want::Stop => &desire.volumes,
            Want::Unmount | Want::Forget => &[],
        };
        self.publish(volumes, actual);
    }

    fn publish(&mut self, volumes: &[Volume], actual: &ActualState) {
        let mut counts: Vec<PluginCount> = Vec::new();
        let mut count = |plugin: String, desired: i64, existing: i64| {
            if let Some(known) = counts.iter_mut().find(|known| known.plugin == plugin) {
                known.desired += desired;
                known.existing += existing;
            } else {
                counts.push(PluginCount { plugin, desired, existing });
            }
        };
        for volume in volumes {
            // A volume without a folder of its own is actual once it is ready.
            let exists = volume.key().is_none() && actual.ready.contains(&volume.name);
            if let Some(plugin) = plugin_of(volume) {
                count(plugin, 1, i64::from(exists));
            }
        }
        for key in &actual.on_disk {
            count(unescape(&key.plugin), 0, 1);
        }
        self.replace(counts);
    }

    fn replace(&mut self, counts: Vec<PluginCount>) {
        if counts != self.published {
            self.published.iter().for_each(|count| self.totals.add(count, -1));
            counts.iter().for_each(|count| self.totals.add(count, 1));
            self.published = counts;
        }
    }
}

impl Drop for PodCounts {
    fn drop(&mut self) {
        self.published.iter().for_each(|count| self.totals.add(count, -1));
    }
}

/// The plugin of a volume as Kubernetes names it, such as `kubernetes.io/empty-dir`; `None` for an unsupported volume.
pub(crate) fn plugin_of(volume: &Volume) -> Option<String> {
    match volume.source {
        Source::HostPath { .. } => Some("kubernetes.io/host-path".to_owned()),
        _ => Some(unescape(&volume.key()?.plugin)),
    }
}

#[cfg(test)]
mod tests {
    use keelson_volume_manager_core::desire::{DesireHeader, Medium, PodRef, VolumeUse};
    use keelson_volume_manager_core::names::VolumeKey;

    use super::*;

    fn line(metrics: &Metrics, plugin: &str, state: &str) -> Option<String> {
        let begin = format!(
            "volume_manager_total_volumes{{plugin_name=\"{plugin}\",state=\"{state}_state_of_world\"}} "
        );
        metrics.text().lines().find_map(|line| line.strip_prefix(&begin)).map(str::to_owned)
    }

    fn empty_dir(name: &str) -> Volume {
        Volume {
            name: name.into(),
            source: Source::EmptyDir { medium: Medium::Disk, size_limit: None },
            used: VolumeUse::default(),
        }
    }

    #[test]
    fn volumes_of_plugins_are_counted_by_plugin_until_they_are_gone() {
        let metrics = Metrics::new();
        let totals = VolumeTotals::register(&metrics);
        let mut plugins = totals.count_plugins();
        let value = |state| line(&metrics, "kubernetes.io/nfs", state);
        plugins.update([("kubernetes.io/nfs".to_owned(), (2, 1))].into());
        assert_eq!((value("desired").as_deref(), value("actual").as_deref()), (Some("2"), Some("1")));
        plugins.update(BTreeMap::new());
        assert_eq!((value("desired").as_deref(), value("actual").as_deref()), (Some("0"), Some("0")));
    }

    #[test]
    fn volume_totals_count_desired_and_actual_until_the_pod_is_gone() {
        let metrics = Metrics::new();
        let totals = VolumeTotals::register(&metrics);
        let value = |state| line(&metrics, "kubernetes.io/empty-dir", state);
        let host_paths = |state| line(&metrics, "kubernetes.io/host-path", state);
        let host_path = Source::HostPath { path: "/a".into(), kind: String::new() };
        let volumes = vec![
            empty_dir("a"),
            empty_dir("b"),
            Volume { name: "c".into(), source: host_path, used: VolumeUse::default() },
        ];
        let header = DesireHeader { pod: PodRef::default(), revision: 0, want: Want::Run };
        let mut desire = PodDesire { volumes, ..header.into() };
        let mut actual = ActualState::default();

        let mut pod_counts = totals.count_pod(&actual);
        let _other = totals.count_pod(&ActualState {
            on_disk: [VolumeKey::empty_dir("left")].into(),
            ..ActualState::default()
        });
        pod_counts.update(&desire, &actual);
        assert_eq!((value("desired").as_deref(), value("actual").as_deref()), (Some("2"), Some("1")));
        assert_eq!(
            (host_paths("desired").as_deref(), host_paths("actual").as_deref()),
            (Some("1"), Some("0"))
        );

        actual.on_disk.insert(VolumeKey::empty_dir("a"));
        actual.ready.extend(["a".into(), "c".into()]);
        pod_counts.update(&desire, &actual);
        assert_eq!((value("desired").as_deref(), value("actual").as_deref()), (Some("2"), Some("2")));
        assert_eq!(host_paths("actual").as_deref(), Some("1"));

        desire.header.want = Want::Unmount;
        pod_counts.update(&desire, &actual);
        assert_eq!((value("desired").as_deref(), value("actual").as_deref()), (Some("0"), Some("2")));
        drop(pod_counts);
        assert_eq!((value("desired").as_deref(), value("actual").as_deref()), (Some("0"), Some("1")));
        assert!(metrics.text().contains("reconstruct_volume_operations_total 1\n"), "{}", metrics.text());
    }
}
