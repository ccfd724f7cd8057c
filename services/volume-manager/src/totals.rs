//! How many volumes are wanted and how many are there, and how many were found at the start (volumes.md §13).

use keelson_service_kit::Metrics;
use keelson_volume_manager_core::desire::{PodDesire, Source, Volume, Want};
use keelson_volume_manager_core::names::unescape;
use keelson_volume_manager_core::plan::Actual;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    plugin_name: String,
    state: &'static str,
}

/// The totals of all pods. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Totals {
    volumes: Family<Labels, Gauge>,
    found: Counter,
    /// Found, of a plugin that this version cannot set up.
    foreign: Counter,
    forced: Counter,
    forced_in_vain: Counter,
}

impl Totals {
    /// Registers them.
    pub(crate) fn register(metrics: &Metrics) -> Self {
        let own = Self {
            volumes: Family::default(),
            found: Counter::default(),
            foreign: Counter::default(),
            forced: Counter::default(),
            forced_in_vain: Counter::default(),
        };
        let help = "Volumes that pods want and volumes that are there, by plugin";
        metrics.register("volume_manager_total_volumes", help, own.volumes.clone());
        let help = "Volumes of earlier processes that were found at the start";
        metrics.register("reconstruct_volume_operations", help, own.found.clone());
        let help = "Volumes among them of plugins that this version does not know";
        metrics.register("reconstruct_volume_operations_errors", help, own.foreign.clone());
        let help =
            "Volumes among those that nobody wants any more and that were taken down by their folder alone";
        metrics.register("force_cleaned_failed_volume_operations", help, own.forced.clone());
        let help = "Volumes among those that could not be taken down so";
        metrics.register("force_cleaned_failed_volume_operation_errors", help, own.forced_in_vain.clone());
        own
    }

    /// The share of a pod of which `actual` was found at the start, if anything.
    pub(crate) fn share(&self, actual: &Actual) -> Share {
        let counted = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
        self.found.inc_by(counted(actual.held.len()));
        self.foreign.inc_by(counted(actual.held.iter().filter(|key| key.is_foreign()).count()));
        let mut share = Share { totals: self.clone(), shown: Vec::new() };
        share.show(&[], actual);
        share
    }

    /// A volume of a plugin that this version does not know was taken down for the first time, with or without
    /// success.
    pub(crate) fn forced(&self, is_gone: bool) {
        self.forced.inc();
        if !is_gone {
            self.forced_in_vain.inc();
        }
    }

    fn add(&self, count: &Count, sign: i64) {
        for (state, of_state) in
            [("desired_state_of_world", count.wanted), ("actual_state_of_world", count.there)]
        {
            let labels = Labels { plugin_name: count.plugin.clone(), state };
            self.volumes.get_or_create(&labels).inc_by(sign * of_state);
        }
    }
}

/// The volumes of one pod by plugin, as the totals count them. They are taken away when it is dropped.
#[derive(Debug)]
pub(crate) struct Share {
    totals: Totals,
    shown: Vec<Count>,
}

/// The volumes of one plugin.
#[derive(Debug, PartialEq, Eq)]
struct Count {
    plugin: String,
    wanted: i64,
    there: i64,
}

impl Share {
    /// What the pod is to have by `desire`, and what is there of it.
    pub(crate) fn of(&mut self, desire: &PodDesire, actual: &Actual) {
        let volumes: &[Volume] = match desire.want {
            Want::Run | Want::Stop => &desire.volumes,
            Want::Unmount | Want::Forget => &[],
        };
        self.show(volumes, actual);
    }

    fn show(&mut self, volumes: &[Volume], actual: &Actual) {
        let mut counts: Vec<Count> = Vec::new();
        let mut count = |plugin: String, wanted: i64, there: i64| {
            if let Some(known) = counts.iter_mut().find(|known| known.plugin == plugin) {
                known.wanted += wanted;
                known.there += there;
            } else {
                counts.push(Count { plugin, wanted, there });
            }
        };
        for volume in volumes {
            // A volume without a folder of its own is there once it was looked at.
            let is_there = volume.key().is_none() && actual.ready.contains(&volume.name);
            if let Some(plugin) = plugin_of(volume) {
                count(plugin, 1, i64::from(is_there));
            }
        }
        for key in &actual.held {
            count(unescape(&key.plugin), 0, 1);
        }
        if counts != self.shown {
            self.shown.iter().for_each(|count| self.totals.add(count, -1));
            counts.iter().for_each(|count| self.totals.add(count, 1));
            self.shown = counts;
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.shown.iter().for_each(|count| self.totals.add(count, -1));
    }
}

/// The plugin of a volume as Kubernetes names it, such as `kubernetes.io/empty-dir`; none for a volume that no
/// plugin of ours sets up.
pub(crate) fn plugin_of(volume: &Volume) -> Option<String> {
    match volume.source {
        Source::HostPath { .. } => Some("kubernetes.io/host-path".to_owned()),
        _ => Some(unescape(&volume.key()?.plugin)),
    }
}

#[cfg(test)]
mod tests {
    use keelson_volume_manager_core::desire::{Desire, Medium, PodRef};
    use keelson_volume_manager_core::names::VolumeKey;

    use super::*;

    fn line(metrics: &Metrics, plugin: &str, state: &str) -> Option<String> {
        let begin = format!(
            "volume_manager_total_volumes{{plugin_name=\"{plugin}\",state=\"{state}_state_of_world\"}} "
        );
        metrics.text().lines().find_map(|line| line.strip_prefix(&begin)).map(str::to_owned)
    }

    fn empty_dir(name: &str) -> Volume {
        Volume { name: name.into(), source: Source::EmptyDir { medium: Medium::Disk, size_limit: None } }
    }

    #[test]
    fn volumes_count_as_wanted_and_as_there_until_their_pod_goes() {
        let metrics = Metrics::new();
        let totals = Totals::register(&metrics);
        let value = |state| line(&metrics, "kubernetes.io/empty-dir", state);
        let host_paths = |state| line(&metrics, "kubernetes.io/host-path", state);
        let host_path = Source::HostPath { path: "/a".into(), kind: String::new() };
        let volumes = vec![empty_dir("a"), empty_dir("b"), Volume { name: "c".into(), source: host_path }];
        let forgotten = PodDesire::forget(PodRef::default());
        let mut desire = PodDesire { want: Want::Run, volumes, ..forgotten };
        let mut actual = Actual::default();

        let mut share = totals.share(&actual);
        let _other =
            totals.share(&Actual { held: [VolumeKey::empty_dir("left")].into(), ..Actual::default() });
        share.of(&desire, &actual);
        assert_eq!((value("desired").as_deref(), value("actual").as_deref()), (Some("2"), Some("1")));
        assert_eq!(
            (host_paths("desired").as_deref(), host_paths("actual").as_deref()),
            (Some("1"), Some("0"))
        );

        actual.held.insert(VolumeKey::empty_dir("a"));
        actual.ready.extend(["a".into(), "c".into()]);
        share.of(&desire, &actual);
        assert_eq!((value("desired").as_deref(), value("actual").as_deref()), (Some("2"), Some("2")));
        assert_eq!(host_paths("actual").as_deref(), Some("1"));

        desire.want = Want::Unmount;
        share.of(&desire, &actual);
        assert_eq!((value("desired").as_deref(), value("actual").as_deref()), (Some("0"), Some("2")));
        drop(share);
        assert_eq!((value("desired").as_deref(), value("actual").as_deref()), (Some("0"), Some("1")));
        assert!(metrics.text().contains("reconstruct_volume_operations_total 1\n"), "{}", metrics.text());
    }
}
