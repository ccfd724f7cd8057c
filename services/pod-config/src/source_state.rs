//! What is known of one source besides its pods: its objects, and what `ListSources` reports.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use keelson_kube_model::PodFullName;
use keelson_kube_model::pod_ext::API;
use keelson_pod_config_core::ManifestWarning;
use keelson_pod_config_core::files::SourceError;
use keelson_pod_config_core::object::{ObjectKey, StoredObject};
use keelson_pod_config_core::offline::WaitingPod;
use keelson_proto::keelson::pod_config::v1 as pb;

/// The state of one source.
#[derive(Debug, Default)]
pub struct SourceState {
    /// Where it reads.
    location: String,
    /// Whether it has been read.
    pub ready: bool,
    /// Its objects except pods.
    pub objects: BTreeMap<ObjectKey, Arc<StoredObject>>,
    /// Errors, each with the time since when it is known.
    errors: BTreeMap<SourceError, i64>,
    /// Waiting pods, each with the time since when it waits.
    waiting: BTreeMap<WaitingPod, i64>,
    /// Warnings with their files, each with the time since when it is known.
    warnings: BTreeMap<SourceWarning, i64>,
    /// Warnings about the bindings of its claims, in the same form.
    claim_warnings: BTreeMap<SourceWarning, i64>,
}

/// A warning with its file.
pub type SourceWarning = (String, ManifestWarning);

impl SourceState {
    /// A source at `location` that has not been read.
    pub fn new(location: String) -> Self {
        Self { location, ..Self::default() }
    }

    /// How many errors it has.
    pub fn error_count(&self) -> usize {
        self.errors.len()
    }

    /// The source `name` with this number of pods, as `ListSources` returns it.
    pub fn to_wire(&self, name: &str, pods: usize) -> pb::Source {
        pb::Source {
            name: name.to_owned(),
            location: self.location.clone(),
            ready: self.ready,
            pods: u32::try_from(pods).unwrap_or(u32::MAX),
            problems: self.errors.iter().map(|(error, since)| source_problem(error, *since)).collect(),
            waiting: self.waiting.iter().map(|(pod, since)| waiting_pod(name, pod, *since)).collect(),
            warnings: self
                .warnings
                .iter()
                .chain(&self.claim_warnings)
                .map(|(warning, since)| source_warning(warning, *since))
                .collect(),
        }
    }

    /// Replaces the errors and returns the new ones. Each error is reported once, and once more when it is fixed.
    pub fn replace_errors(&mut self, source: &str, errors: Vec<SourceError>, now: i64) -> Vec<SourceError> {
        let old = std::mem::take(&mut self.errors);
        let mut new_errors = Vec::new();
        for source_error in errors {
            let since = old.get(&source_error).copied();
            if since.is_none() {
                new_errors.push(source_error.clone());
            }
            self.errors.insert(source_error, since.unwrap_or(now));
        }
        let failing: BTreeSet<&str> = self.errors.keys().map(|p| p.origin.as_str()).collect();
        let fixed: BTreeSet<&str> =
            old.keys().map(|p| p.origin.as_str()).filter(|origin| !failing.contains(origin)).collect();
        for origin in fixed {
            tracing::info!(event = "manifest_fixed", source, origin, "all errors of the manifest are fixed");
        }
        new_errors
    }

    /// Replaces the waiting pods.
    pub fn replace_waiting(&mut self, waiting: Vec<WaitingPod>, now: i64) {
        let old = std::mem::take(&mut self.waiting);
        self.waiting = waiting
            .into_iter()
            .map(|pod| {
                let since = old.get(&pod).copied().unwrap_or(now);
                (pod, since)
            })
            .collect();
    }

    /// Replaces the warnings and returns the new ones.
    pub fn replace_warnings(&mut self, warnings: Vec<SourceWarning>, now: i64) -> Vec<SourceWarning> {
        replace(&mut self.warnings, warnings, now)
    }

    /// Replaces the warnings about the bindings of claims and returns the new ones.
    pub fn replace_claim_warnings(&mut self, warnings: Vec<SourceWarning>, now: i64) -> Vec<SourceWarning> {
        replace(&mut self.claim_warnings, warnings, now)
    }
}

fn replace(
    known: &mut BTreeMap<SourceWarning, i64>,
    warnings: Vec<SourceWarning>,
    now: i64,
) -> Vec<SourceWarning> {
    let old = std::mem::take(known);
    let mut new_warnings = Vec::new();
    for warning in warnings {
        let since = old.get(&warning).copied();
        if since.is_none() {
            new_warnings.push(warning.clone());
        }
        known.insert(warning, since.unwrap_or(now));
    }
    new_warnings
}

fn waiting_pod(source: &str, pod: &WaitingPod, since: i64) -> pb::WaitingPod {
    let who = if source == API { "the API server" } else { source };
    pb::WaitingPod {
        namespace: pod.namespace.clone(),
        name: pod.name.clone(),
        origin: pod.origin.clone(),
        message: format!("since the reboot the pod waits for {who}, which does not answer: {}", pod.reason),
        since_unix_nanos: since,
    }
}

fn source_warning((origin, warning): &SourceWarning, since: i64) -> pb::SourceWarning {
    let full = |name: &PodFullName| format!("{}/{}", name.namespace, name.name);
    pb::SourceWarning {
        origin: origin.clone(),
        line: warning.line,
        pod: warning.pod.as_ref().map(full).unwrap_or_default(),
        message: warning.message.clone(),
        since_unix_nanos: since,
    }
}

fn source_problem(source_error: &SourceError, since: i64) -> pb::SourceProblem {
    pb::SourceProblem {
        origin: source_error.origin.clone(),
        line: source_error.error.line,
        column: source_error.error.column,
        message: source_error.error.to_string(),
        since_unix_nanos: since,
        kept_pods: source_error
            .kept_pods
            .iter()
            .map(|name| format!("{}/{}", name.namespace, name.name))
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use keelson_pod_config_core::offline::WaitReason;

    use super::*;

    #[test]
    fn a_waiting_pod_names_the_control_plane_it_waits_for() {
        let pod = WaitingPod {
            namespace: "default".into(),
            name: "db".into(),
            origin: "api".into(),
            reason: WaitReason::Policy,
        };
        for (source, who) in [("etcd", "etcd"), (API, "the API server")] {
            let message = waiting_pod(source, &pod, 7).message;
            assert!(message.contains(&format!("waits for {who}, which does not answer: offline")));
        }
    }
}
