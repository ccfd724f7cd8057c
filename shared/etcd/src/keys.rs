//! The keys of a node.
//!
//! ```text
//! /keelson/v1/nodes/<node>/config                              a KubeletConfiguration over the node's own, as JSON or YAML
//! /keelson/v1/nodes/<node>/objects/<kind>/<namespace>/<name>   Secrets and ConfigMaps, as JSON or YAML
//! /keelson/v1/nodes/<node>/pods/<namespace>/<name>             desired pods
//! /keelson/v1/nodes/<node>/status/config                       what became of `config`
//! /keelson/v1/nodes/<node>/status/events/<time>-<service>-<n>  events, for an hour
//! /keelson/v1/nodes/<node>/status/lease                        there while the node lives; on its lease
//! /keelson/v1/nodes/<node>/status/node                         the Node
//! /keelson/v1/nodes/<node>/status/pods/<namespace>/<name>      pods as they are, with status
//! ```
//!
//! A node needs a role on its own prefix alone: it reads `config`, `objects` and `pods`, and writes below `status`.

/// Below it lies everything of every node.
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

    /// Whether `key` is one of them.
    pub fn holds(&self, key: &str) -> bool {
        self.start.as_str() <= key && key < self.end.as_str()
    }
}

/// The keys of one node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeKeys {
    prefix: String,
}

/// What a key of a node names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Named<'a> {
    /// A desired pod.
    Pod {
        /// Its namespace.
        namespace: &'a str,
        /// Its name.
        name: &'a str,
    },
    /// A Secret or ConfigMap.
    Object {
        /// Its kind.
        kind: &'a str,
        /// Its namespace.
        namespace: &'a str,
        /// Its name.
        name: &'a str,
    },
    /// A pod as it is.
    PodStatus {
        /// Its namespace.
        namespace: &'a str,
        /// Its name.
        name: &'a str,
    },
    /// The configuration over the node's own.
    Config,
    /// What became of it.
    ConfigStatus,
    /// The Node.
    Node,
    /// The sign of life.
    Lease,
    /// An event.
    Event,
}

impl NodeKeys {
    /// Those of the node of this name.
    pub fn new(node: &str) -> Self {
        Self { prefix: format!("{NODES}{node}/") }
    }

    /// What every key begins with.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// What should run: objects and pods.
    pub fn desired(&self) -> Range {
        Range { start: format!("{}objects/", self.prefix), end: format!("{}pods0", self.prefix) }
    }

    /// What runs as it should be and as it is, without objects: pods and all below `status`.
    pub fn wanted_and_told(&self) -> Range {
        Range { start: format!("{}pods/", self.prefix), end: format!("{}status0", self.prefix) }
    }

    /// The sign of life and the Node, and nothing between them.
    pub fn lease_and_node(&self) -> Range {
        Range { start: self.lease(), end: format!("{}\0", self.node()) }
    }

    /// A desired pod.
    pub fn pod(&self, namespace: &str, name: &str) -> String {
        format!("{}pods/{namespace}/{name}", self.prefix)
    }

    /// A Secret or ConfigMap.
    pub fn object(&self, kind: &str, namespace: &str, name: &str) -> String {
        format!("{}objects/{kind}/{namespace}/{name}", self.prefix)
    }

    /// The configuration over the node's own.
    pub fn config(&self) -> String {
        format!("{}config", self.prefix)
    }

    /// What became of it.
    pub fn config_status(&self) -> String {
        format!("{}status/config", self.prefix)
    }

    /// The Node.
    pub fn node(&self) -> String {
        format!("{}status/node", self.prefix)
    }

    /// The sign of life.
    pub fn lease(&self) -> String {
        format!("{}status/lease", self.prefix)
    }

    /// A pod as it is.
    pub fn pod_status(&self, namespace: &str, name: &str) -> String {
        format!("{}status/pods/{namespace}/{name}", self.prefix)
    }

    /// All pods as they are.
    pub fn pod_statuses(&self) -> Range {
        Range::prefix(&format!("{}status/pods/", self.prefix))
    }

    /// An event; `unix_nanos` comes first, so that they lie in the order of their time.
    pub fn event(&self, unix_nanos: i64, service: &str, sequence: u64) -> String {
        format!("{}status/events/{unix_nanos:019}-{service}-{sequence}", self.prefix)
    }

    /// All events.
    pub fn events(&self) -> Range {
        Range::prefix(&format!("{}status/events/", self.prefix))
    }

    /// What `key` names; `None` for one that is no node's or none of the above.
    pub fn named<'a>(&self, key: &'a str) -> Option<Named<'a>> {
        named(key.strip_prefix(self.prefix.as_str())?)
    }
}

/// The node of a key, and what of it the key names.
pub fn of_any_node(key: &str) -> Option<(&str, Named<'_>)> {
    let (node, rest) = key.strip_prefix(NODES)?.split_once('/')?;
    Some((node, named(rest)?))
}

fn named(rest: &str) -> Option<Named<'_>> {
    let parts: Vec<&str> = rest.split('/').collect();
    if parts.iter().any(|part| part.is_empty()) {
        return None;
    }
    match *parts.as_slice() {
        ["pods", namespace, name] => Some(Named::Pod { namespace, name }),
        ["objects", kind, namespace, name] => Some(Named::Object { kind, namespace, name }),
        ["status", "pods", namespace, name] => Some(Named::PodStatus { namespace, name }),
        ["config"] => Some(Named::Config),
        ["status", "config"] => Some(Named::ConfigStatus),
        ["status", "node"] => Some(Named::Node),
        ["status", "lease"] => Some(Named::Lease),
        ["status", "events", _] => Some(Named::Event),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_names_what_it_was_made_for() {
        let keys = NodeKeys::new("edge-1");
        for (key, expected) in [
            (keys.pod("default", "web"), Named::Pod { namespace: "default", name: "web" }),
            (
                keys.object("Secret", "default", "db"),
                Named::Object { kind: "Secret", namespace: "default", name: "db" },
            ),
            (keys.pod_status("default", "web"), Named::PodStatus { namespace: "default", name: "web" }),
            (keys.config(), Named::Config),
            (keys.config_status(), Named::ConfigStatus),
            (keys.node(), Named::Node),
            (keys.lease(), Named::Lease),
            (keys.event(7, "pod-sync", 3), Named::Event),
        ] {
            assert!(key.starts_with("/keelson/v1/nodes/edge-1/"), "{key}");
            assert_eq!(keys.named(&key), Some(expected.clone()), "{key}");
            assert_eq!(of_any_node(&key), Some(("edge-1", expected)), "{key}");
            assert_eq!(NodeKeys::new("edge").named(&key), None, "{key} is another node's");
        }
        for other in ["pods/default", "pods/default/", "pods//web", "pods/a/b/c", "status/events", "x"] {
            assert_eq!(keys.named(&format!("{}{other}", keys.prefix())), None, "{other}");
        }
        assert_eq!(of_any_node("/keelson/v1/other"), None);
    }

    #[test]
    fn what_should_run_is_one_range_without_any_status() {
        let keys = NodeKeys::new("n");
        let desired = keys.desired();
        assert!(desired.holds(&keys.pod("a", "b")) && desired.holds(&keys.object("Secret", "a", "b")));
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
    fn what_is_looked_at_by_a_watch_holds_no_secret() {
        let keys = NodeKeys::new("n");
        let pods = keys.wanted_and_told();
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
    fn a_prefix_holds_what_begins_with_it() {
        let range = Range::prefix("/a/b/");
        assert!(range.holds("/a/b/") && range.holds("/a/b/c") && range.holds("/a/b/\u{fffd}"));
        let one = Range::key("/a/b".into());
        assert!(one.holds("/a/b") && !one.holds("/a/b/") && !one.holds("/a/b0") && !one.holds("/a/a"));
        assert!(!range.holds("/a/b") && !range.holds("/a/b0") && !range.holds("/a/c/"));
    }

    #[test]
    fn events_lie_in_the_order_of_their_time() {
        let keys = NodeKeys::new("n");
        assert!(keys.event(999, "b", 1) < keys.event(1000, "a", 1));
    }
}
