//! The keys of a node.
//!
//! ```text
//! /keelson/v1/nodes/<node>/config                              a KubeletConfiguration overriding the node's own, as JSON or YAML
//! /keelson/v1/nodes/<node>/objects/<kind>/<namespace>/<name>   Secrets, ConfigMaps and PersistentVolumeClaims, as JSON or YAML
//! /keelson/v1/nodes/<node>/objects/<kind>/<name>               PersistentVolumes, which have no namespace
//! /keelson/v1/nodes/<node>/pods/<namespace>/<name>             desired pods
//! /keelson/v1/nodes/<node>/status/config                       the status of `config`
//! /keelson/v1/nodes/<node>/status/events/<time>-<service>-<n>  events, for an hour
//! /keelson/v1/nodes/<node>/status/lease                        the node's Lease; expires with its etcd lease
//! /keelson/v1/nodes/<node>/status/node                         the Node
//! /keelson/v1/nodes/<node>/status/pods/<namespace>/<name>      pod statuses
//! ```
//!
//! A node only needs a role on its own prefix: it reads `config`, `objects` and `pods`, and writes below `status`.

/// The prefix of the keys of all nodes.
pub const NODES: &str = "/keelson/v1/nodes/";

/// Keys from `start` on, up to `end`, which is not among them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Range {
    /// The first key.
    pub start: String,
    /// Behind the last key.
    pub end: String,
}

impl Range {
    /// All keys that begin with `prefix`, which ends with a slash.
    pub fn prefix(prefix: &str) -> Self {
        // '0' is the next byte after '/'.
        let end = format!("{}0", prefix.strip_suffix('/').unwrap_or(prefix));
        Self { start: prefix.to_owned(), end }
    }

    /// One key alone.
    pub fn key(key: String) -> Self {
        let end = format!("{key}\0");
        Self { start: key, end }
    }

    /// Whether the range contains `key`.
    pub fn holds(&self, key: &str) -> bool {
        self.start.as_str() <= key && key < self.end.as_str()
    }
}

/// The keys of one node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeKeys {
    prefix: String,
}

/// The kind of object behind a key of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeyKind<'a> {
    /// A desired pod.
    Pod {
        /// Its namespace.
        namespace: &'a str,
        /// Its name.
        name: &'a str,
    },
    /// A Secret, ConfigMap or PersistentVolumeClaim.
    Object {
        /// Its kind.
        kind: &'a str,
        /// Its namespace.
        namespace: &'a str,
        /// Its name.
        name: &'a str,
    },
    /// An object of a kind that has no namespace: a PersistentVolume.
    ClusterObject {
        /// Its kind.
        kind: &'a str,
        /// Its name.
        name: &'a str,
    },
    /// The status of a pod.
    PodStatus {
        /// Its namespace.
        namespace: &'a str,
        /// Its name.
        name: &'a str,
    },
    /// The configuration that overrides the node's own.
    Config,
    /// The status of that configuration.
    ConfigStatus,
    /// The Node.
    Node,
    /// The node's Lease.
    Lease,
    /// An event.
    Event,
}

impl NodeKeys {
    /// The keys of the node `node`.
    pub fn new(node: &str) -> Self {
        Self { prefix: format!("{NODES}{node}/") }
    }

    /// The common prefix of all keys.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// The desired state: objects and pods.
    pub fn desired(&self) -> Range {
        Range { start: format!("{}objects/", self.prefix), end: format!("{}pods0", self.prefix) }
    }

    /// Desired pods and everything below `status`, without objects.
    pub fn desired_and_status(&self) -> Range {
        Range { start: format!("{}pods/", self.prefix), end: format!("{}status0", self.prefix) }
    }

    /// The Lease and the Node.
    pub fn lease_and_node(&self) -> Range {
        Range { start: self.lease(), end: format!("{}\0", self.node()) }
    }

    /// A desired pod.
    pub fn pod(&self, namespace: &str, name: &str) -> String {
        format!("{}pods/{namespace}/{name}", self.prefix)
    }

    /// A Secret, ConfigMap or PersistentVolumeClaim.
    pub fn object(&self, kind: &str, namespace: &str, name: &str) -> String {
        format!("{}objects/{kind}/{namespace}/{name}", self.prefix)
    }

    /// An object of a kind that has no namespace: a PersistentVolume.
    pub fn cluster_object(&self, kind: &str, name: &str) -> String {
        format!("{}objects/{kind}/{name}", self.prefix)
    }

    /// All objects of a kind.
    pub fn objects(&self, kind: &str) -> Range {
        Range::prefix(&format!("{}objects/{kind}/", self.prefix))
    }

    /// The configuration that overrides the node's own.
    pub fn config(&self) -> String {
        format!("{}config", self.prefix)
    }

    /// The status of that configuration.
    pub fn config_status(&self) -> String {
        format!("{}status/config", self.prefix)
    }

    /// The Node.
    pub fn node(&self) -> String {
        format!("{}status/node", self.prefix)
    }

    /// The node's Lease.
    pub fn lease(&self) -> String {
        format!("{}status/lease", self.prefix)
    }

    /// The status of a pod.
    pub fn pod_status(&self, namespace: &str, name: &str) -> String {
        format!("{}status/pods/{namespace}/{name}", self.prefix)
    }

    /// The status of all pods.
    pub fn pod_statuses(&self) -> Range {
        Range::prefix(&format!("{}status/pods/", self.prefix))
    }

    /// An event; `unix_nanos` comes first, so that events sort by time.
    pub fn event(&self, unix_nanos: i64, service: &str, sequence: u64) -> String {
        format!("{}status/events/{unix_nanos:019}-{service}-{sequence}", self.prefix)
    }

    /// All events.
    pub fn events(&self) -> Range {
        Range::prefix(&format!("{}status/events/", self.prefix))
    }

    /// The kind of `key`; `None` for a key of another node or of no known kind.
    pub fn named<'a>(&self, key: &'a str) -> Option<KeyKind<'a>> {
        named(key.strip_prefix(self.prefix.as_str())?)
    }
}

/// The node of a key and the kind of the key.
pub fn parse_key(key: &str) -> Option<(&str, KeyKind<'_>)> {
    let (node, rest) = key.strip_prefix(NODES)?.split_once('/')?;
    Some((node, named(rest)?))
}

fn named(rest: &str) -> Option<KeyKind<'_>> {
    let parts: Vec<&str> = rest.split('/').collect();
    if parts.iter().any(|part| part.is_empty()) {
        return None;
    }
    match *parts.as_slice() {
        ["pods", namespace, name] => Some(KeyKind::Pod { namespace, name }),
        ["objects", kind, namespace, name] => Some(KeyKind::Object { kind, namespace, name }),
        ["objects", kind, name] => Some(KeyKind::ClusterObject { kind, name }),
        ["status", "pods", namespace, name] => Some(KeyKind::PodStatus { namespace, name }),
        ["config"] => Some(KeyKind::Config),
        ["status", "config"] => Some(KeyKind::ConfigStatus),
        ["status", "node"] => Some(KeyKind::Node),
        ["status", "lease"] => Some(KeyKind::Lease),
        ["status", "events", _] => Some(KeyKind::Event),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_parses_back_to_its_kind() {
        let keys = NodeKeys::new("edge-1");
        for (key, expected) in [
            (keys.pod("default", "web"), KeyKind::Pod { namespace: "default", name: "web" }),
            (
                keys.object("Secret", "default", "db"),
                KeyKind::Object { kind: "Secret", namespace: "default", name: "db" },
            ),
            (
                keys.cluster_object("PersistentVolume", "disk"),
                KeyKind::ClusterObject { kind: "PersistentVolume", name: "disk" },
            ),
            (keys.pod_status("default", "web"), KeyKind::PodStatus { namespace: "default", name: "web" }),
            (keys.config(), KeyKind::Config),
            (keys.config_status(), KeyKind::ConfigStatus),
            (keys.node(), KeyKind::Node),
            (keys.lease(), KeyKind::Lease),
            (keys.event(7, "pod-sync", 3), KeyKind::Event),
        ] {
            assert!(key.starts_with("/keelson/v1/nodes/edge-1/"), "{key}");
            assert_eq!(keys.named(&key), Some(expected.clone()), "{key}");
            assert_eq!(parse_key(&key), Some(("edge-1", expected)), "{key}");
            assert_eq!(NodeKeys::new("edge").named(&key), None, "{key} is another node's");
        }
        for other in [
            "pods/default",
            "pods/default/",
            "pods//web",
            "pods/a/b/c",
            "objects/Secret",
            "objects/PersistentVolume/",
            "objects/Secret/a/b/c",
            "status/events",
            "x",
        ] {
            assert_eq!(keys.named(&format!("{}{other}", keys.prefix())), None, "{other}");
        }
        assert_eq!(parse_key("/keelson/v1/other"), None);
    }

    #[test]
    fn desired_range_holds_pods_and_objects_and_no_status() {
        let keys = NodeKeys::new("n");
        let desired = keys.desired();
        assert!(desired.holds(&keys.pod("a", "b")) && desired.holds(&keys.object("Secret", "a", "b")));
        let (volume, volumes) =
            (keys.cluster_object("PersistentVolume", "a"), keys.objects("PersistentVolume"));
        assert!(desired.holds(&volume) && volumes.holds(&volume));
        assert!(!volumes.holds(&keys.object("PersistentVolumeClaim", "a", "b")));
        for other in [
            keys.config(),
            keys.config_status(),
            keys.lease(),
            keys.node(),
            keys.pod_status("a", "b"),
            NodeKeys::new("m").pod("a", "b"),
        ] {
            assert!(!desired.holds(&other), "{other}");
        }
    }

    #[test]
    fn watched_ranges_hold_no_secret() {
        let keys = NodeKeys::new("n");
        let pods = keys.desired_and_status();
        for key in [keys.pod("a", "b"), keys.pod_status("a", "b"), keys.lease(), keys.node()] {
            assert!(pods.holds(&key), "{key}");
        }
        let node = keys.lease_and_node();
        assert!(node.holds(&keys.lease()) && node.holds(&keys.node()));
        for other in [keys.object("Secret", "a", "b"), NodeKeys::new("m").pod("a", "b")] {
            assert!(!pods.holds(&other) && !node.holds(&other), "{other}");
        }
        for other in [keys.pod("a", "b"), keys.pod_status("a", "b"), keys.event(7, "pod-sync", 3)] {
            assert!(!node.holds(&other), "{other}");
        }
    }

    #[test]
    fn prefix_range_holds_every_key_with_that_prefix() {
        let range = Range::prefix("/a/b/");
        assert!(range.holds("/a/b/") && range.holds("/a/b/c") && range.holds("/a/b/\u{fffd}"));
        let one = Range::key("/a/b".into());
        assert!(one.holds("/a/b") && !one.holds("/a/b/") && !one.holds("/a/b0") && !one.holds("/a/a"));
        assert!(!range.holds("/a/b") && !range.holds("/a/b0") && !range.holds("/a/c/"));
    }

    #[test]
    fn event_keys_sort_by_time() {
        let keys = NodeKeys::new("n");
        assert!(keys.event(999, "b", 1) < keys.event(1000, "a", 1));
    }
}
