//! The last reports, and what is known of the server's objects.

use std::collections::BTreeMap;
use std::sync::Arc;

use keelson_kube_model::PodFullName;
use keelson_node_status_core::{CsiDrivers, PodReport};
use serde_json::Value;
use tokio::time::Instant;

/// The last reports, and what is known of the server's objects.
#[derive(Default)]
pub(super) struct ReportCache {
    /// The last reports of pods, by UID.
    pub(super) pods: BTreeMap<String, LastReport>,
    /// `pods` has been complete once: a pod that is not in it is not on this node.
    pub(super) pods_complete: bool,
    /// The last reported Node.
    pub(super) node: Option<Arc<Value>>,
    /// The CSI drivers that it shows.
    pub(super) csi_drivers: Arc<CsiDrivers>,
    /// The UID of the server's Node.
    pub(super) node_uid: Option<String>,
    /// `status.addresses` of the server's Node, some of which a cloud controller may have set.
    pub(super) addresses: Value,
    /// The server's Node differs from the last report.
    pub(super) node_drifts: bool,
    /// The names of the server's pods on this node by UID, mirror pods included, as pod-config has shown them.
    pub(super) on_server: BTreeMap<String, PodFullName>,
    /// When the server last accepted a report.
    pub(super) last_write: Option<Instant>,
}

impl ReportCache {
    /// `status.addresses` that pods show as their host's: the server's where a cloud controller manages them.
    pub(super) fn host_addresses(&self, external_cloud: bool) -> Option<&Value> {
        let node = self.node.as_deref()?;
        let has_one = |list: &Value| list.as_array().is_some_and(|list| !list.is_empty());
        let is_managed = external_cloud && has_one(&self.addresses);
        Some(if is_managed { &self.addresses } else { &node["status"]["addresses"] })
    }

    /// Has all pods reported again.
    pub(super) fn report_all_again(&mut self) {
        for last in self.pods.values_mut() {
            last.server = ServerState::Differs;
        }
    }

    /// Records that the server has this report, since `resource_version` of its pod. It is still written again if a difference
    /// was found during the write, which may be newer: another host address, or another client's change.
    pub(super) fn record_written(&mut self, report: &Arc<PodReport>, resource_version: &str) {
        let last = self.pods.get_mut(&report.uid);
        if let Some(last) = last.filter(|last| Arc::ptr_eq(&last.report, report))
            && last.server != ServerState::Differs
            && !resource_version.is_empty()
        {
            last.server = ServerState::Has(resource_version.into());
        }
    }

    /// Whether the server's pod at `resource_version` is known to have the last report of the pod with this UID.
    pub(super) fn has_report(&self, uid: &str, resource_version: &str) -> bool {
        let last = self.pods.get(uid);
        last.is_some_and(
            |last| matches!(&last.server, ServerState::Has(version) if **version == *resource_version),
        )
    }
}

/// The last report of a pod.
pub(super) struct LastReport {
    pub(super) report: Arc<PodReport>,
    pub(super) server: ServerState,
}

/// Whether the server's pod has the last report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ServerState {
    /// It is not known at which version, and no difference was found.
    Unknown,
    /// It has it, since this `metadata.resourceVersion`.
    Has(Box<str>),
    /// It differs, so the report is written again.
    Differs,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_written_report_is_known_at_its_version_until_it_or_the_host_changes() {
        let report = |name: &str| Arc::new(PodReport { uid: name.into(), ..PodReport::default() });
        let (first, second) = (report("a"), report("a"));
        let mut cache = ReportCache::default();
        let put = |cache: &mut ReportCache, report: &Arc<PodReport>| {
            let last = LastReport { report: Arc::clone(report), server: ServerState::Unknown };
            cache.pods.insert("a".to_owned(), last);
        };
        put(&mut cache, &first);
        cache.record_written(&first, "");
        assert!(!cache.has_report("a", ""), "a server without versions");
        cache.record_written(&first, "7");
        assert!(cache.has_report("a", "7") && !cache.has_report("a", "8") && !cache.has_report("b", "7"));
        put(&mut cache, &second);
        cache.record_written(&first, "8");
        assert!(!cache.has_report("a", "8"), "a later report was queued while the first was written");
        cache.record_written(&second, "9");
        cache.report_all_again();
        assert!(!cache.has_report("a", "9"));
    }

    #[test]
    fn a_difference_found_while_a_report_is_written_is_not_forgotten() {
        let report = Arc::new(PodReport { uid: "a".into(), ..PodReport::default() });
        let mut cache = ReportCache::default();
        let last = LastReport { report: Arc::clone(&report), server: ServerState::Unknown };
        cache.pods.insert("a".to_owned(), last);
        // The write has begun with the old addresses.
        cache.report_all_again();
        cache.record_written(&report, "7");
        assert!(!cache.has_report("a", "7"));
        assert_eq!(cache.pods["a"].server, ServerState::Differs, "it is queued again");
    }
}
