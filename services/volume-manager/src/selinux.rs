//! SELinux labels of the plugin folders (volumes.md §2), and of volumes as this node supports them (§6).

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use keelson_service_kit::Metrics;
use keelson_volume_manager_core::selinux::{
    self, ADMITTED_METRIC, FileContext, Finding, Labels, NodeSupport, SeLinuxError, SeLinuxOptions, VolumeUse,
};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use rustix::fs::XattrFlags;

/// Where the configuration and the policies are (selinux_config(5)).
const POLICIES: &str = "/etc/selinux";

/// The folders below the root folder through which plugins and the agent communicate.
const FOLDERS: [&str; 2] = ["plugins", "plugins_registry"];
/// The label of these folders; it allows containers to use their content.
const FOLDER_LABEL: &str = "system_u:object_r:container_file_t:s0";

/// Labels the plugin folders below `root` with `set` if SELinux is enabled. An error is only logged, because only
/// plugins that run in containers need the label.
pub(crate) fn label_folders(root: &Path, is_enabled: bool, set: impl Fn(&Path) -> io::Result<()>) {
    if !is_enabled {
        return;
    }
    for folder in FOLDERS.map(|name| root.join(name)) {
        if let Err(error) = set(&folder) {
            tracing::warn!(
                path = %folder.display(), %error,
                "cannot set the SELinux label {FOLDER_LABEL}; plugins in containers may not be able to access the folder"
            );
        }
    }
}

/// Sets the label of a folder.
pub(crate) fn set_label(folder: &Path) -> io::Result<()> {
    let flags = XattrFlags::empty();
    Ok(rustix::fs::lsetxattr(folder, c"security.selinux", FOLDER_LABEL.as_bytes(), flags)?)
}

/// The labels of a volume of a pod, as this node supports them; by default none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct VolumeLabels {
    /// What the node supports.
    pub(crate) node: NodeSupport,
    /// The labels.
    pub(crate) labels: Labels,
}

/// Decides the labels of volumes on this node. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct SeLinux {
    node: NodeSupport,
    /// The folder with `config` and the policies.
    policies: PathBuf,
    metrics: SeLinuxMetrics,
}

impl SeLinux {
    /// That of this machine. `labels_all_modes`: the feature gate SELinuxMount.
    pub(crate) fn of_machine(labels_all_modes: bool, metrics: SeLinuxMetrics) -> Self {
        let is_enabled = keelson_service_kit::selinux_is_enabled();
        Self::new(NodeSupport { is_enabled, labels_all_modes }, POLICIES.into(), metrics)
    }

    /// With the policies in a folder.
    pub(crate) const fn new(node: NodeSupport, policies: PathBuf, metrics: SeLinuxMetrics) -> Self {
        Self { node, policies, metrics }
    }

    /// Decides the labels of a volume from the options of the containers that mount it. `pod`: the UID and the pod's name
    /// for the volume, for which each finding counts once. A warning leaves the volume without a label.
    ///
    /// # Errors
    /// The pod cannot use the volume.
    pub(crate) async fn labels_of(
        &self,
        volume: &VolumeUse<'_>,
        options: &[SeLinuxOptions],
        pod: (&str, &str),
    ) -> Result<VolumeLabels, SeLinuxError> {
        let node = self.node;
        let has_level = options.iter().any(|options| !options.level.is_empty());
        if !selinux::can_label(node, volume) || !has_level {
            return Ok(VolumeLabels { node, ..VolumeLabels::default() });
        }
        let options: Vec<Option<&SeLinuxOptions>> = options.iter().map(Some).collect();
        let decided = match self.default_label().await {
            Ok(default) => selinux::decide(node, volume, &options, &default),
            Err(error) => Err(Finding::new(node, volume.access_modes, error)),
        };
        match decided {
            Ok(labels) => Ok(VolumeLabels { node, labels }),
            Err(finding) => {
                self.metrics.found(&finding, volume.access_modes, "", pod);
                match finding {
                    Finding::Warning(_) => Ok(VolumeLabels { node, ..VolumeLabels::default() }),
                    Finding::Refusal(error) => Err(error),
                }
            }
        }
    }

    /// The label of files in containers, by the policy that the machine has loaded.
    async fn default_label(&self) -> Result<FileContext, SeLinuxError> {
        let config = read(&self.policies.join("config")).await?.unwrap_or_default();
        let policy = self.policies.join(selinux::policy_type(&config)?);
        let contexts = read(&policy.join("contexts/lxc_contexts")).await?.ok_or(SeLinuxError::NoDefault)?;
        FileContext::from_lxc_contexts(&contexts)
    }
}

/// The content of a file of the policy; `None` if there is none.
async fn read(path: &Path) -> Result<Option<String>, SeLinuxError> {
    match tokio::fs::read_to_string(path).await {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => {
            Err(SeLinuxError::Unreadable { path: path.display().to_string(), why: error.to_string() })
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ModeLabels {
    access_mode: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct VolumeLabelsOfMetric {
    volume_plugin: String,
    access_mode: &'static str,
}

/// A finding that has counted: the pod's UID, its name for the volume, and the metric.
type Counted = (String, String, &'static str);

/// The gauges of labels (volumes.md §6). As a kubelet's, they only rise. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct SeLinuxMetrics {
    of_pods: Vec<(&'static str, Family<ModeLabels, Gauge>)>,
    of_volumes: Vec<(&'static str, Family<VolumeLabelsOfMetric, Gauge>)>,
    counted: Arc<Mutex<BTreeSet<Counted>>>,
}

/// The gauges without the plugin.
const OF_PODS: [(&str, &str); 4] = [
    (
        "volume_manager_selinux_container_errors_total",
        "Pods that cannot use a volume because the SELinux label of a container cannot be made",
    ),
    (
        "volume_manager_selinux_container_warnings_total",
        "Volumes mounted without a label because the SELinux label of a container cannot be made",
    ),
    (
        "volume_manager_selinux_pod_context_mismatch_errors_total",
        "Pods that cannot use a volume because their containers have different SELinux labels",
    ),
    (
        "volume_manager_selinux_pod_context_mismatch_warnings_total",
        "Volumes mounted without a label because the containers of a pod have different SELinux labels",
    ),
];
/// The gauges with the plugin.
const OF_VOLUMES: [(&str, &str); 3] = [
    (
        "volume_manager_selinux_volume_context_mismatch_errors_total",
        "Pods that cannot use a volume because another pod uses it with another SELinux label",
    ),
    (
        "volume_manager_selinux_volume_context_mismatch_warnings_total",
        "Pods that use a volume which another pod uses with another SELinux label",
    ),
    (ADMITTED_METRIC, "Volumes whose containers share one SELinux label"),
];

impl SeLinuxMetrics {
    /// Registers the gauges.
    pub(crate) fn register(metrics: &Metrics) -> Self {
        let mut new = Self::default();
        for (name, help) in OF_PODS {
            let family = Family::default();
            metrics.register(name, help, family.clone());
            new.of_pods.push((name, family));
        }
        for (name, help) in OF_VOLUMES {
            let family = Family::default();
            metrics.register(name, help, family.clone());
            new.of_volumes.push((name, family));
        }
        new
    }

    /// Counts a finding for a volume of a pod (UID and the pod's name for the volume), once.
    pub(crate) fn found(
        &self,
        finding: &Finding,
        access_modes: Option<&[String]>,
        plugin: &str,
        (uid, name): (&str, &str),
    ) {
        let metric = finding.metric();
        let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        if counted.insert((uid.to_owned(), name.to_owned(), metric)) {
            self.count(metric, access_modes, plugin);
        }
    }

    /// Counts a volume whose containers share a label.
    pub(crate) fn admitted(&self, access_modes: Option<&[String]>, plugin: &str) {
        self.count(ADMITTED_METRIC, access_modes, plugin);
    }

    /// Forgets what has counted for a pod.
    pub(crate) fn forget(&self, uid: &str) {
        self.counted.lock().unwrap_or_else(PoisonError::into_inner).retain(|(other, ..)| other != uid);
    }

    fn count(&self, metric: &str, access_modes: Option<&[String]>, plugin: &str) {
        let access_mode = selinux::access_mode_label(access_modes);
        if let Some((_, family)) = self.of_pods.iter().find(|(name, _)| *name == metric) {
            family.get_or_create(&ModeLabels { access_mode }).inc();
        }
        if let Some((_, family)) = self.of_volumes.iter().find(|(name, _)| *name == metric) {
            let labels = VolumeLabelsOfMetric { volume_plugin: plugin.to_owned(), access_mode };
            family.get_or_create(&labels).inc();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use keelson_volume_manager_core::selinux::ChangePolicy;

    use super::*;

    const ON: NodeSupport = NodeSupport { is_enabled: true, labels_all_modes: false };

    fn level(level: &str) -> SeLinuxOptions {
        SeLinuxOptions { level: level.into(), ..SeLinuxOptions::default() }
    }

    fn policies(policy: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config"), format!("SELINUXTYPE={policy}\n")).unwrap();
        let contexts = folder.path().join("mls/contexts");
        std::fs::create_dir_all(&contexts).unwrap();
        let text = "process = \"system_u:system_r:container_t:s0\"\nfile = \"system_u:object_r:container_file_t:s0\"\n";
        std::fs::write(contexts.join("lxc_contexts"), text).unwrap();
        folder
    }

    #[tokio::test]
    async fn missing_parts_of_a_label_come_from_the_loaded_policy() {
        let modes = ["ReadWriteOncePod".to_owned()];
        let volume = VolumeUse {
            name: "pv",
            access_modes: Some(&modes),
            supports_label: true,
            policy: ChangePolicy::MountOption,
        };
        let pod = ("u", "data");
        let folder = policies("mls");
        let registry = Metrics::new();
        let metrics = SeLinuxMetrics::register(&registry);
        let selinux = SeLinux::new(ON, folder.path().into(), metrics.clone());
        let labels = selinux.labels_of(&volume, &[level("s0:c1,c2")], pod).await.unwrap().labels;
        assert_eq!(labels.mounted.unwrap().as_str(), "system_u:object_r:container_file_t:s0:c1,c2");
        let other = policies("targeted");
        let without = SeLinux::new(ON, other.path().into(), metrics.clone());
        for _ in 0..2 {
            let error = without.labels_of(&volume, &[level("s0:c1")], pod).await.unwrap_err();
            assert_eq!(error, SeLinuxError::NoDefault);
        }
        let plain = without.labels_of(&volume, &[SeLinuxOptions::default()], pod).await.unwrap();
        assert_eq!(plain.labels, Labels::default());
        let off = SeLinux::new(NodeSupport::default(), other.path().into(), metrics);
        assert_eq!(off.labels_of(&volume, &[level("s0:c1")], pod).await, Ok(VolumeLabels::default()));
        let line = "volume_manager_selinux_container_errors_total{access_mode=\"RWOP\"} 1";
        assert!(registry.text().lines().any(|text| text == line), "{}", registry.text());
    }

    #[tokio::test]
    async fn containers_that_differ_count_as_a_warning_or_an_error_by_access_mode() {
        let folder = policies("mls");
        let registry = Metrics::new();
        let metrics = SeLinuxMetrics::register(&registry);
        let selinux = SeLinux::new(ON, folder.path().into(), metrics.clone());
        for (mode, label, is_refused, family) in
            [("ReadWriteOncePod", "RWOP", true, "errors"), ("ReadWriteMany", "RWX", false, "warnings")]
        {
            let modes = [mode.to_owned()];
            let policy = ChangePolicy::MountOption;
            let volume = VolumeUse { name: "pv", access_modes: Some(&modes), supports_label: true, policy };
            let options = [level("s0:c1"), level("s0:c2")];
            let result = selinux.labels_of(&volume, &options, ("u", mode)).await;
            assert_eq!(result.is_err(), is_refused, "{mode}");
            let name = format!("volume_manager_selinux_pod_context_mismatch_{family}_total");
            let line = format!("{name}{{access_mode=\"{label}\"}} 1");
            assert!(registry.text().lines().any(|text| text == line), "{}", registry.text());
        }
        metrics.admitted(None, "kubernetes.io/csi/d.io");
        let line =
            format!("{ADMITTED_METRIC}{{volume_plugin=\"kubernetes.io/csi/d.io\",access_mode=\"inline\"}} 1");
        assert!(registry.text().lines().any(|text| text == line), "{}", registry.text());
    }

    #[test]
    fn plugin_folders_get_selinux_labels_and_a_failure_is_only_logged() {
        for is_enabled in [true, false] {
            let labelled = RefCell::new(Vec::new());
            label_folders(Path::new("/r"), is_enabled, |folder| {
                labelled.borrow_mut().push(folder.to_owned());
                Err(io::ErrorKind::PermissionDenied.into())
            });
            let expected: &[&str] = if is_enabled { &["/r/plugins", "/r/plugins_registry"] } else { &[] };
            assert_eq!(labelled.into_inner(), expected.iter().map(Path::new).collect::<Vec<_>>());
        }
    }
}
