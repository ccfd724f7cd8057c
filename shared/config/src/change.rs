//! Which values may change while the agent runs, and which services must be restarted for the others.

use std::sync::LazyLock;

use serde_json::Value;

use crate::kubelet_fields::{enclosing_fields, kubelet_fields};
use crate::takes::{EVERYBODY, Takes};
use crate::{Config, ServiceName};
use ServiceName::{NodeApi, NodeStatus, PodConfig, PodSync, ResourceManager, RuntimeShim, VolumeManager};

/// A part of the configuration whose values change together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// Its dotted path in `config.json`, with everything below it.
    pub path: &'static str,
    /// How a change of it takes effect.
    pub takes: Takes,
    /// The services that read it; empty for parts that need a restart of the agent.
    pub readers: &'static [ServiceName],
}

const fn live(path: &'static str, readers: &'static [ServiceName]) -> Part {
    Part { path, takes: Takes::Live, readers }
}

const fn services(path: &'static str, readers: &'static [ServiceName]) -> Part {
    Part { path, takes: Takes::Services, readers }
}

const fn agent(path: &'static str) -> Part {
    Part { path, takes: Takes::Agent, readers: &[] }
}

/// The parts that no field of a KubeletConfiguration sets, or several.
const SHARED_PARTS: &[Part] = &[
    live("containerLogs", &[RuntimeShim]),
    live("imageCollection", &[RuntimeShim]),
    services("api.handlers", &[NodeApi]),
    services("api.strictVerbs", &[NodeApi]),
    services("containerCollection", &[RuntimeShim]),
    services("imagePulls", &[RuntimeShim]),
    services("nodeStatus.declaredFeatures", &[NodeStatus]),
    services("nodeStatus.externalCloud", &[NodeStatus]),
    services("nodeStatus.nodeIps", &[NodeStatus]),
    services("offline", &[PodConfig]),
    services("pods", &[PodSync, VolumeManager]),
    services("resources", &[PodConfig, VolumeManager, ResourceManager, PodSync, NodeStatus]),
    services("runtime.maxParallelPulls", &[RuntimeShim]),
    services("runtime.relistPeriodMs", &[RuntimeShim]),
    services("runtime.sandboxImage", &[RuntimeShim]),
    services("runtime.startParallelism", &[PodSync]),
    services("sources", &[PodConfig]),
    services("tracing", EVERYBODY),
    services("volumes", &[VolumeManager]),
    // Certificates and keys are handed to services when the agent starts.
    agent("api.tls"),
    agent("controlPlane"),
    agent("logging.output"),
    agent("manageHost"),
    agent("nodeConfiguration"),
    agent("nodeName"),
    // Limits of processes are inherited from init.
    agent("ownProcesses"),
    agent("paths"),
    agent("users"),
];

/// Every part: those of single fields are in the table of fields. The readers of a part list rather one service too many: a
/// restarted service adopts what runs.
pub static PARTS: LazyLock<Vec<Part>> = LazyLock::new(|| {
    let own = kubelet_fields().iter().filter_map(|field| {
        let ((takes, readers), path) = (field.change?, *field.sets.first()?);
        Some(Part { path, takes, readers })
    });
    SHARED_PARTS.iter().copied().chain(own).collect()
});

impl Part {
    /// Its value in a configuration as JSON; `None` where it is absent.
    pub fn of<'a>(&self, config: &'a Value) -> Option<&'a Value> {
        self.path.split('.').try_fold(config, |value, name| value.get(name))
    }

    /// Whether it contains the value at a path of the resolved configuration.
    fn contains(&self, path: &str) -> bool {
        path.strip_prefix(self.path).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    }
}

/// The part that contains the value at a path of the resolved configuration.
pub fn part_containing(path: &str) -> Option<&'static Part> {
    PARTS.iter().find(|part| part.contains(path))
}

/// How a change of a field of a KubeletConfiguration takes effect: as that of the value that it, or the nearest object around it,
/// sets.
pub fn takes_of_field(field: &str) -> Takes {
    let mut values = enclosing_fields(field).filter_map(|field| field.sets.first());
    values.next().and_then(|path| part_containing(path)).map_or(Takes::Services, |part| part.takes)
}

impl Config {
    /// Applies the values of `other` that may change while services run.
    pub fn take_live(&mut self, other: &Self) {
        self.logging.level.clone_from(&other.logging.level);
        self.logging.vmodule.clone_from(&other.logging.vmodule);
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
        for part in PARTS.iter() {
            assert!(part.of(&config).is_some(), "there is no {}", part.path);
            assert_eq!(part.readers.is_empty(), part.takes == Takes::Agent, "{}", part.path);
        }
    }

    #[test]
    fn part_fields_are_kubelet_fields_and_unique() {
        let fields: Vec<&str> = kubelet_fields().iter().map(|field| field.path).collect();
        assert_eq!(fields.iter().collect::<BTreeSet<_>>().len(), fields.len());
        for field in fields {
            assert!(KUBELET_FIELDS.contains(&field.split('.').next().unwrap()), "{field}");
        }
        for field in kubelet_fields() {
            assert!(field.sets.iter().all(|path| part_containing(path).is_some()), "{}", field.path);
        }
        for (field, takes) in [
            ("logging.verbosity", Takes::Live),
            ("logging.format", Takes::Agent),
            ("logging.vmodule[0].verbosity", Takes::Live),
            ("logging.flushFrequency", Takes::Agent),
            ("logging.options.text.splitStream", Takes::Agent),
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
        other.logging.vmodule = vec![crate::VModule { file_pattern: "worker".into(), verbosity: 4 }];
        other.container_logs.max_files = 77;
        other.image_collection.minimum_age_ms = 77;
        other.node_status.max_images = 77;
        other.resources.max_pods = 77;
        other.node_name = "other".into();
        let mut taken = whole();
        taken.take_live(&other);
        let json = |config: &Config| serde_json::to_value(config).unwrap();
        let (before, after, other_json) = (json(&whole()), json(&taken), json(&other));
        for part in PARTS.iter() {
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
