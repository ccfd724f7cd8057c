//! The metrics of pod-sync (pod-lifecycle.md §19), under the kubelet's names.

pub mod census;
mod image_volumes;
mod pods;
mod resizes;

use std::time::Duration;

use keelson_kube_model::{ContainerKind, Pod};
use keelson_pod_sync_core::accept::NewlyTerminated;
use keelson_pod_sync_core::admission::{counted_reason, counted_reasons};
use keelson_pod_sync_core::probe::ProbeKind;
use keelson_pod_sync_core::restart::metric_label;
use keelson_service_kit::Metrics as Registry;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;

pub use image_volumes::ImageVolumeMetrics;
pub use pods::PodMetrics;
pub use resizes::ResizeMetrics;

/// Upper bounds of the histogram buckets in seconds: the Prometheus defaults.
const SECONDS: [f64; 11] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// Kinds of containers as [`metric_label`] names them.
const KINDS: [ContainerKind; 3] = [ContainerKind::Init, ContainerKind::Regular, ContainerKind::Ephemeral];

/// Why a container whose image is present did not start: its waiting reason.
const CODES: [&str; 4] =
    ["CreateContainerConfigError", "CreateContainerError", "PostStartHookError", "RunContainerError"];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Reason {
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Started {
    container_type: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct NotStarted {
    container_type: &'static str,
    code: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Ended {
    container_type: &'static str,
    exit_code: i32,
    reason: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Probed {
    probe_type: &'static str,
    result: &'static str,
    container: String,
    pod: String,
    namespace: String,
    pod_uid: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ProbeTook {
    probe_type: &'static str,
    container: String,
    pod: String,
    namespace: String,
}

/// The counters. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Metrics {
    /// Of the lifecycle of pods and the turns of their workers.
    pub pods: PodMetrics,
    /// Image volumes.
    pub image_volumes: ImageVolumeMetrics,
    /// In-place resizes.
    pub resizes: ResizeMetrics,
    rejections: Family<Reason, Counter>,
    probes_cut: Family<ProbeTook, Counter>,
    http_fallbacks: Counter,
    sleeps_cut: Counter,
    started_pods: Counter,
    unstarted_pods: Counter,
    started_user_namespaces: Counter,
    unstarted_user_namespaces: Counter,
    started: Family<Started, Counter>,
    not_started: Family<NotStarted, Counter>,
    ended: Family<Ended, Counter>,
    probed: Family<Probed, Counter>,
    probe_seconds: Family<ProbeTook, Histogram, fn() -> Histogram>,
}

/// The outcome of a probe, as it is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProbeOutcome {
    /// It succeeded, with or without a warning.
    Successful,
    /// It failed.
    Failed,
    /// It could not run.
    Unknown,
}

impl ProbeOutcome {
    const ALL: [Self; 3] = [Self::Successful, Self::Failed, Self::Unknown];

    fn as_str(self) -> &'static str {
        match self {
            Self::Successful => "successful",
            Self::Failed => "failed",
            Self::Unknown => "unknown",
        }
    }
}

impl Metrics {
    /// Registers all of them.
    pub fn register(registry: &Registry) -> Self {
        let metrics = Self {
            pods: PodMetrics::register(registry),
            image_volumes: ImageVolumeMetrics::register(registry),
            resizes: ResizeMetrics::register(registry),
            rejections: Family::default(),
            probes_cut: Family::default(),
            http_fallbacks: Counter::default(),
            sleeps_cut: Counter::default(),
            started_pods: Counter::default(),
            unstarted_pods: Counter::default(),
            started_user_namespaces: Counter::default(),
            unstarted_user_namespaces: Counter::default(),
            started: Family::default(),
            not_started: Family::default(),
            ended: Family::default(),
            probed: Family::default(),
            probe_seconds: Family::new_with_constructor(|| Histogram::new(SECONDS)),
        };
        metrics.register_hooks_and_pods(registry);
        metrics.register_containers_and_probes(registry);
        metrics.begin_at_nothing();
        metrics
    }

    fn register_hooks_and_pods(&self, registry: &Registry) {
        let counters = [
            (
                "kubelet_lifecycle_handler_http_fallbacks",
                "HTTPS hooks whose server spoke HTTP, and that succeeded without TLS",
                self.http_fallbacks.clone(),
            ),
            (
                "kubelet_sleep_action_terminated_early",
                "Hooks that sleep and were given up before their time was over",
                self.sleeps_cut.clone(),
            ),
            ("kubelet_started_pods", "Sandboxes whose making was begun", self.started_pods.clone()),
            ("kubelet_started_pods_errors", "Sandboxes that could not be made", self.unstarted_pods.clone()),
            (
                "kubelet_started_user_namespaced_pods",
                "Sandboxes with a user namespace whose making was begun",
                self.started_user_namespaces.clone(),
            ),
            (
                "kubelet_started_user_namespaced_pods_errors",
                "Sandboxes with a user namespace that could not be made",
                self.unstarted_user_namespaces.clone(),
            ),
        ];
        for (name, help, counter) in counters {
            registry.register(name, help, counter);
        }
        let rejections = self.rejections.clone();
        registry.register(
            "kubelet_admission_rejections",
            "Pods that were turned away, by reason",
            rejections,
        );
    }

    fn register_containers_and_probes(&self, registry: &Registry) {
        let cut = self.probes_cut.clone();
        registry.register(
            "keelson_pod_sync_probes_cut",
            "Probes of a pod with many that were ended because other pods waited for theirs",
            cut,
        );
        let started = self.started.clone();
        registry.register("kubelet_started_containers", "Containers whose start was begun", started);
        let failed = self.not_started.clone();
        registry.register(
            "kubelet_started_containers_errors",
            "Containers that could not be started",
            failed,
        );
        let ended = self.ended.clone();
        registry.register("kubelet_terminated_containers", "Containers that were seen to have ended", ended);
        registry.register("prober_probe", "Probes of containers, by outcome", self.probed.clone());
        let seconds = self.probe_seconds.clone();
        registry.register("prober_probe_duration_seconds", "How long successful probes took", seconds);
    }

    /// Creates the series of counters at 0, so that `increase()` sees the first count.
    fn begin_at_nothing(&self) {
        for reason in counted_reasons() {
            self.rejections.get_or_create(&Reason { reason }).inc_by(0);
        }
        for container_type in KINDS.map(metric_label) {
            for code in CODES {
                self.not_started.get_or_create(&NotStarted { container_type, code }).inc_by(0);
            }
        }
    }

    /// A pod was rejected.
    pub fn rejected(&self, reason: &str) {
        self.rejections.get_or_create(&Reason { reason: counted_reason(reason) }).inc();
    }

    /// A hook over TLS failed, and the same request without TLS succeeded.
    pub fn http_fallback(&self) {
        self.http_fallbacks.inc();
    }

    /// A sleep hook ended before its time.
    pub fn sleep_cut(&self) {
        self.sleeps_cut.inc();
    }

    /// A sandbox is about to be made, perhaps with a user namespace.
    pub fn pod_starts(&self, has_user_namespace: bool) {
        self.started_pods.inc();
        if has_user_namespace {
            self.started_user_namespaces.inc();
        }
    }

    /// A sandbox could not be made.
    pub fn pod_failed(&self, has_user_namespace: bool) {
        self.unstarted_pods.inc();
        if has_user_namespace {
            self.unstarted_user_namespaces.inc();
        }
    }

    /// A container is about to be started.
    pub fn container_starts(&self, kind: ContainerKind) {
        self.started.get_or_create(&Started { container_type: metric_label(kind) }).inc();
    }

    /// A container could not be started; the code is its waiting reason.
    pub fn container_failed(&self, kind: ContainerKind, code: &'static str) {
        self.not_started.get_or_create(&NotStarted { container_type: metric_label(kind), code }).inc();
    }

    /// Containers have terminated.
    pub fn ended(&self, newly: &[NewlyTerminated]) {
        for ended in newly {
            let labels = Ended {
                container_type: metric_label(ended.kind),
                exit_code: ended.exit_code,
                reason: ended.reason.clone(),
            };
            self.ended.get_or_create(&labels).inc();
        }
    }

    /// The series of one probe.
    pub fn probe(&self, pod: &Pod, container: &str, kind: ProbeKind) -> ProbeSeries {
        let meta = &pod.metadata;
        let labels = Probed {
            probe_type: kind.as_str(),
            result: "",
            container: container.to_owned(),
            pod: meta.name.clone(),
            namespace: meta.namespace.clone(),
            pod_uid: meta.uid.clone(),
        };
        let (outcomes, seconds, cuts) =
            (self.probed.clone(), self.probe_seconds.clone(), self.probes_cut.clone());
        ProbeSeries { outcomes, seconds, cuts, labels }
    }
}

/// The metric series of one probe of one pod. They exist as long as its task.
#[derive(Debug)]
pub struct ProbeSeries {
    outcomes: Family<Probed, Counter>,
    seconds: Family<ProbeTook, Histogram, fn() -> Histogram>,
    cuts: Family<ProbeTook, Counter>,
    labels: Probed,
}

impl ProbeSeries {
    fn took(&self) -> ProbeTook {
        ProbeTook {
            probe_type: self.labels.probe_type,
            container: self.labels.container.clone(),
            pod: self.labels.pod.clone(),
            namespace: self.labels.namespace.clone(),
        }
    }

    /// A probe has run.
    pub fn made(&self, outcome: ProbeOutcome, within: Duration) {
        let labels = Probed { result: outcome.as_str(), ..self.labels.clone() };
        self.outcomes.get_or_create(&labels).inc();
        if outcome == ProbeOutcome::Successful {
            self.seconds.get_or_create(&self.took()).observe(within.as_secs_f64());
        }
    }

    /// The probe has lost its turn to another pod.
    pub fn cut(&self) {
        self.cuts.get_or_create(&self.took()).inc();
    }
}

impl Drop for ProbeSeries {
    fn drop(&mut self) {
        for outcome in ProbeOutcome::ALL {
            self.outcomes.remove(&Probed { result: outcome.as_str(), ..self.labels.clone() });
        }
        self.seconds.remove(&self.took());
        self.cuts.remove(&self.took());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod() -> Pod {
        serde_json::from_value(serde_json::json!({
            "metadata": {"name": "web", "namespace": "shop", "uid": "u"},
            "spec": {"containers": [{"name": "main"}]},
        }))
        .unwrap()
    }

    fn has(registry: &Registry, line: &str) -> bool {
        registry.text().lines().any(|l| l == line)
    }

    #[test]
    fn rejections_and_terminations_have_the_kubelets_metric_names() {
        let registry = Registry::new();
        let metrics = Metrics::register(&registry);
        metrics.rejected("OutOfcpu");
        metrics.rejected("NodePorts");
        metrics.ended(&[NewlyTerminated {
            kind: ContainerKind::Sidecar,
            container: "side".into(),
            exit_code: 137,
            reason: "OOMKilled".into(),
        }]);
        metrics.container_starts(ContainerKind::Regular);
        metrics.container_failed(ContainerKind::Init, "CreateContainerError");
        metrics.pod_starts(false);
        metrics.pod_starts(true);
        metrics.pod_failed(true);
        for line in [
            "kubelet_admission_rejections_total{reason=\"OutOfcpu\"} 1",
            "kubelet_admission_rejections_total{reason=\"Other\"} 1",
            "kubelet_terminated_containers_total{container_type=\"init_container\",exit_code=\"137\",reason=\"OOMKilled\"} 1",
            "kubelet_started_containers_total{container_type=\"container\"} 1",
            "kubelet_started_containers_errors_total{container_type=\"init_container\",code=\"CreateContainerError\"} 1",
            "kubelet_started_pods_total 2",
            "kubelet_started_pods_errors_total 1",
            "kubelet_started_user_namespaced_pods_total 1",
            "kubelet_started_user_namespaced_pods_errors_total 1",
        ] {
            assert!(has(&registry, line), "{line}\n{}", registry.text());
        }
    }

    #[test]
    fn counters_exist_with_zero_from_the_start() {
        let registry = Registry::new();
        let metrics = Metrics::register(&registry);
        let text = registry.text();
        let at_nothing = |family: &str| {
            text.lines()
                .filter(|line| line.starts_with(&format!("{family}{{")) && line.ends_with(" 0"))
                .count()
        };
        assert_eq!(at_nothing("kubelet_admission_rejections_total"), 25, "{text}");
        assert_eq!(at_nothing("kubelet_started_containers_errors_total"), 12, "{text}");
        metrics.rejected("NodeAffinity");
        metrics.container_failed(ContainerKind::Sidecar, "RunContainerError");
        assert_eq!(registry.text().lines().count(), text.lines().count(), "no other series has come");
    }

    #[test]
    fn the_metric_series_of_a_probe_are_removed_with_it() {
        let registry = Registry::new();
        let metrics = Metrics::register(&registry);
        let series = metrics.probe(&pod(), "main", ProbeKind::Readiness);
        series.made(ProbeOutcome::Failed, Duration::from_secs(1));
        series.made(ProbeOutcome::Successful, Duration::from_millis(20));
        let labels = |result: &str| {
            format!(
                "prober_probe_total{{probe_type=\"Readiness\",result=\"{result}\",container=\"main\",pod=\"web\",\
                 namespace=\"shop\",pod_uid=\"u\"}} 1"
            )
        };
        assert!(
            has(&registry, &labels("failed")) && has(&registry, &labels("successful")),
            "{}",
            registry.text()
        );
        let took = "prober_probe_duration_seconds_count{probe_type=\"Readiness\",container=\"main\",pod=\"web\",\
                    namespace=\"shop\"} 1";
        assert!(has(&registry, took), "only the successful one has a duration: {}", registry.text());
        drop(series);
        assert!(!registry.text().contains("main"), "{}", registry.text());
    }
}
