//! Which values may change while the agent runs, and which services must be restarted for the others.

use serde_json::Value;

use crate::{Config, ServiceName};
use ServiceName::{NodeApi, NodeStatus, PodConfig, PodSync, ResourceManager, RuntimeShim, VolumeManager};

/// How a change of a value takes effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Takes {
    /// Services apply it while they run ([`Config::take_live`]).
    Live,
    /// Every service that reads it is restarted.
    Services,
    /// The agent is restarted: init itself, its locks or the folders of all services depend on it.
    Agent,
}

/// A part of the configuration whose values change together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// Its dotted path in `config.json`, with everything below it.
    pub path: &'static str,
    /// How a change of it takes effect.
    pub takes: Takes,
    /// The services that read it; empty for parts that need a restart of the agent.
    pub readers: &'static [ServiceName],
    /// The fields of a KubeletConfiguration that set it, by dotted path with everything below. Parts that need a restart of
    /// services list none: all other fields belong to them.
    pub fields: &'static [&'static str],
}

const fn live(path: &'static str, readers: &'static [ServiceName], fields: &'static [&'static str]) -> Part {
    Part { path, takes: Takes::Live, readers, fields }
}

const fn services(path: &'static str, readers: &'static [ServiceName]) -> Part {
    Part { path, takes: Takes::Services, readers, fields: &[] }
}

const fn agent(path: &'static str, fields: &'static [&'static str]) -> Part {
    Part { path, takes: Takes::Agent, readers: &[], fields }
}

const EVERYBODY: &[ServiceName] =
    &[PodConfig, RuntimeShim, VolumeManager, ResourceManager, PodSync, NodeStatus, NodeApi];

/// Every part. The readers of a part list rather one service too many: a restarted service adopts what runs.
pub const PARTS: &[Part] = &[
    live("logging.level", EVERYBODY, &["logging.verbosity"]),
    live(
        "containerLogs",
        &[RuntimeShim],
        &[
            "containerLogMaxFiles",
            "containerLogMaxSize",
            "containerLogMaxWorkers",
            "containerLogMonitorInterval",
        ],
    ),
    live(
        "imageCollection",
        &[RuntimeShim],
        &[
            "imageGCHighThresholdPercent",
            "imageGCLowThresholdPercent",
            "imageMaximumGCAge",
            "imageMinimumGCAge",
        ],
    ),
    live("nodeStatus.maxImages", &[NodeStatus], &["nodeStatusMaxImages"]),
    services("api.address", &[NodeStatus, NodeApi]),
    services("api.handlers", &[NodeApi]),
    services("api.healthzAddress", &[NodeApi]),
    services("api.healthzPort", &[NodeApi]),
    services("api.port", &[NodeStatus, NodeApi]),
    services("api.readOnlyPort", &[NodeApi]),
    services("api.strictVerbs", &[NodeApi]),
    services("containerCollection", &[RuntimeShim]),
    services("imagePulls", &[RuntimeShim]),
    services("iptablesUtilChains", &[ResourceManager]),
    services("nodeStatus.controllerAttachDetach", &[NodeStatus]),
    services("nodeStatus.eventBurst", &[NodeStatus]),
    services("nodeStatus.eventQps", &[NodeStatus]),
    services("nodeStatus.externalCloud", &[NodeStatus]),
    services("nodeStatus.nodeIps", &[NodeStatus]),
    services("nodeStatus.statusReportMs", &[NodeStatus]),
    services("nodeStatus.statusUpdateMs", &[NodeStatus]),
    services("offline", &[PodConfig]),
    services("pods", &[PodSync]),
    services("resources", &[PodConfig, VolumeManager, ResourceManager, PodSync, NodeStatus]),
    services("runtime.clusterDns", &[PodSync]),
    services("runtime.clusterDomain", &[PodSync]),
    services("runtime.maxParallelPulls", &[RuntimeShim]),
    services("runtime.relistPeriodMs", &[RuntimeShim]),
    services("runtime.requestTimeoutMs", &[RuntimeShim, PodSync]),
    services("runtime.resolvConf", &[PodSync]),
    services("runtime.sandboxImage", &[RuntimeShim]),
    services("runtime.startParallelism", &[PodSync]),
    services("sources", &[PodConfig]),
    services("tracing", EVERYBODY),
    services("volumes", &[VolumeManager]),
    // Certificates and keys are handed to services when the agent starts.
    agent(
        "api.tls",
        &[
            "authentication",
            "authorization",
            "tlsCertFile",
            "tlsCipherSuites",
            "tlsCurvePreferences",
            "tlsMinVersion",
            "tlsPrivateKeyFile",
        ],
    ),
    agent(
        "controlPlane",
        &[
            "configMapAndSecretChangeDetectionStrategy",
            "kubeAPIBurst",
            "kubeAPIQPS",
            "nodeLeaseDurationSeconds",
            "providerID",
            "registerNode",
            "registerWithTaints",
            "rotateCertificates",
            "serverTLSBootstrap",
        ],
    ),
    // All log lines of the agent, including init's, have one format.
    agent("logging.format", &["logging.format"]),
    agent("manageHost", &[]),
    agent("nodeConfiguration", &[]),
    agent("nodeName", &[]),
    // Limits of processes are inherited from init.
    agent("ownProcesses", &["maxOpenFiles", "oomScoreAdj"]),
    agent("paths", &["podLogsDir"]),
    agent("runtime.cgroupDriver", &["cgroupDriver"]),
    agent("runtime.cgroupRoot", &["cgroupRoot"]),
    agent("runtime.endpoint", &["containerRuntimeEndpoint"]),
    agent("runtime.imageEndpoint", &["imageServiceEndpoint"]),
    agent("users", &[]),
];

impl Part {
    /// Its value in a configuration as JSON; `None` where it is absent.
    pub fn of<'a>(&self, config: &'a Value) -> Option<&'a Value> {
        self.path.split('.').try_fold(config, |value, name| value.get(name))
    }

    /// Whether this part lists the field of a KubeletConfiguration.
    pub fn is_set_by(&self, field: &str) -> bool {
        let below =
            |own: &str| field.strip_prefix(own).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
        self.fields.iter().any(|own| below(own))
    }
}

/// How a change of a field of a KubeletConfiguration takes effect.
pub fn takes_of_field(field: &str) -> Takes {
    PARTS.iter().find(|part| part.is_set_by(field)).map_or(Takes::Services, |part| part.takes)
}

impl Config {
    /// Applies the values of `other` that may change while services run.
    pub fn take_live(&mut self, other: &Self) {
        self.logging.level.clone_from(&other.logging.level);
        self.container_logs.clone_from(&other.container_logs);
        self.image_collection.clone_from(&other.image_collection);
        self.node_status.max_images = other.node_status.max_images;
    }

    /// Whether a service that runs with `self` needs no restart for `other`: only live values, the provenance and the time
    /// of resolution differ.
    pub fn differs_live_alone(&self, other: &Self) -> bool {
        let mut taken = self.clone();
        taken.take_live(other);
        taken.provenance.clone_from(&other.provenance);
        taken.resolved_unix_nanos = other.resolved_unix_nanos;
        taken == *other
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::{ApiTls, KUBELET_FIELDS, Tracing};

    /// A configuration with every optional value set.
    fn whole() -> Config {
        let mut config = Config::default();
        config.api.tls = Some(ApiTls::with_client_ca("/ca".into()));
        config.runtime.image_endpoint = Some("unix:///i".into());
        config.runtime.sandbox_image = Some("pause".into());
        config.sources.static_pod_path = Some("/m".into());
        config.node_status.node_ips = vec!["192.0.2.1".parse().unwrap()];
        config.pods.source_limits.insert("http".into(), crate::SourceLimit::default());
        config.tracing = Some(Tracing { endpoint: "http://h".into(), sampling_rate_per_million: 1 });
        config
    }

    fn leaves_of(path: String, value: &Value, into: &mut Vec<String>) {
        match value {
            Value::Object(fields) if !fields.is_empty() => {
                for (name, value) in fields {
                    let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                    leaves_of(path, value, into);
                }
            }
            _ => into.push(path),
        }
    }

    #[test]
    fn every_value_is_in_one_part() {
        let mut leaves = Vec::new();
        leaves_of(String::new(), &serde_json::to_value(whole()).unwrap(), &mut leaves);
        leaves.retain(|leaf| !["provenance", "resolvedUnixNanos", "schemaVersion"].contains(&leaf.as_str()));
        assert!(leaves.len() > 40, "{leaves:?}");
        for leaf in &leaves {
            let holds = |part: &&Part| {
                leaf.strip_prefix(part.path).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
            };
            assert_eq!(PARTS.iter().filter(holds).count(), 1, "{leaf}");
        }
        let config = serde_json::to_value(whole()).unwrap();
        for part in PARTS {
            assert!(part.of(&config).is_some(), "there is no {}", part.path);
            assert_eq!(part.readers.is_empty(), part.takes == Takes::Agent, "{}", part.path);
        }
    }

    #[test]
    fn part_fields_are_kubelet_fields_and_unique() {
        let fields: Vec<&str> = PARTS.iter().flat_map(|part| part.fields).copied().collect();
        assert_eq!(fields.iter().collect::<BTreeSet<_>>().len(), fields.len());
        for field in fields {
            assert!(KUBELET_FIELDS.contains(&field.split('.').next().unwrap()), "{field}");
        }
        for (field, takes) in [
            ("logging.verbosity", Takes::Live),
            ("logging.format", Takes::Agent),
            ("logging.flushFrequency", Takes::Services),
            ("imageMinimumGCAge", Takes::Live),
            ("maxPods", Takes::Services),
            ("authentication.x509.clientCAFile", Takes::Agent),
            ("podLogsDir", Takes::Agent),
        ] {
            assert_eq!(takes_of_field(field), takes, "{field}");
        }
    }

    #[test]
    fn take_live_matches_the_table_of_parts() {
        let mut other = whole();
        other.logging.level = "debug".into();
        other.container_logs.max_files = 77;
        other.image_collection.minimum_age_ms = 77;
        other.node_status.max_images = 77;
        other.resources.max_pods = 77;
        other.node_name = "other".into();
        let mut taken = whole();
        taken.take_live(&other);
        let json = |config: &Config| serde_json::to_value(config).unwrap();
        let (before, after, other_json) = (json(&whole()), json(&taken), json(&other));
        for part in PARTS {
            let expected = if part.takes == Takes::Live { &other_json } else { &before };
            assert_eq!(part.of(&after), part.of(expected), "{}", part.path);
            if part.takes == Takes::Live {
                assert_ne!(part.of(&after), part.of(&before), "{} is not in this test", part.path);
            }
        }
        assert!(!whole().differs_live_alone(&other));
        taken.provenance.insert("logging.level".into(), "k.yaml:3".into());
        taken.resolved_unix_nanos += 1;
        assert!(whole().differs_live_alone(&taken) && whole().differs_live_alone(&whole()));
    }
}
