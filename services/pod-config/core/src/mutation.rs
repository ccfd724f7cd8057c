//! Which service may change which objects at the API server (architecture §1, §4).
//!
//! node-status writes the status of the node and of its pods. The rules here are for services that have to wait for the outcome
//! of a change; they may change nothing else, even if the API server would allow it to the node.

/// How an object is changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    /// Creates the object.
    Create,
    /// Replaces the version that it names.
    Update,
    /// Changes the fields in the patch.
    Patch,
    /// Deletes the object with a given UID.
    Delete,
}

impl Verb {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Create, Self::Update, Self::Patch, Self::Delete];

    /// The verb in Kubernetes.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Update => "update",
            Self::Patch => "patch",
            Self::Delete => "delete",
        }
    }
}

/// What one service may do to objects of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rule {
    /// The service.
    pub caller: &'static str,
    /// `CSINode`…
    pub kind: &'static str,
    /// `status`; empty for the object itself.
    pub subresource: &'static str,
    /// The allowed verbs.
    pub verbs: &'static [Verb],
    /// Only the object with the node's name.
    pub own_node_only: bool,
    /// The kind is namespaced.
    pub namespaced: bool,
}

/// All rules. No service writes VolumeAttachments, which the controller owns; the Node is written only by node-status.
pub const RULES: [Rule; 2] = [
    // volumes.md §11.2
    Rule {
        caller: "volume-manager",
        kind: "CSINode",
        subresource: "",
        verbs: &Verb::ALL,
        own_node_only: true,
        namespaced: false,
    },
    // volumes.md §4
    Rule {
        caller: "volume-manager",
        kind: "PersistentVolumeClaim",
        subresource: "status",
        verbs: &[Verb::Patch],
        own_node_only: false,
        namespaced: true,
    },
];

/// A requested change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mutation<'a> {
    /// `CSINode`…
    pub kind: &'a str,
    /// `status`; empty for the object itself.
    pub subresource: &'a str,
    /// Empty for a cluster-wide object.
    pub namespace: &'a str,
    /// `metadata.name`.
    pub name: &'a str,
    /// The requested verb.
    pub verb: Verb,
}

/// Why a change is denied.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PermissionError {
    /// No rule allows it to the caller.
    #[error("{caller} may not {verb} {what} through pod-config; {allowed}")]
    NotListed {
        /// The caller.
        caller: String,
        /// The requested verb.
        verb: &'static str,
        /// `CSINode`, `PersistentVolumeClaim/status`…
        what: String,
        /// What the caller may do.
        allowed: String,
    },
    /// The object belongs to another node.
    #[error("{kind} {name} does not belong to this node, {node}")]
    OtherNode {
        /// The kind.
        kind: String,
        /// The requested name.
        name: String,
        /// This node.
        node: String,
    },
    /// The name or namespace is not valid.
    #[error("{field} {value:?} is not a valid name of a {kind}")]
    InvalidName {
        /// `name` or `namespace`.
        field: &'static str,
        /// The given value.
        value: String,
        /// The kind.
        kind: String,
    },
}

/// Checks whether one of `callers`, the services that the caller may be, may make this change on the node `node_name`. Returns
/// the rule that allows it.
///
/// # Errors
/// Why the change is denied.
pub fn authorize(
    callers: &[&str],
    node_name: &str,
    mutation: &Mutation<'_>,
) -> Result<&'static Rule, PermissionError> {
    let Mutation { kind, subresource, namespace, name, verb } = *mutation;
    let is_it = |rule: &&Rule| {
        callers.contains(&rule.caller)
            && rule.kind == kind
            && rule.subresource == subresource
            && rule.verbs.contains(&verb)
    };
    let Some(rule) = RULES.iter().find(is_it) else {
        return Err(PermissionError::NotListed {
            caller: if callers.is_empty() { "this caller".to_owned() } else { callers.join(" or ") },
            verb: verb.as_str(),
            what: kind_with_subresource(kind, subresource),
            allowed: allowed_mutations(callers),
        });
    };
    let invalid = |field, value: &str| PermissionError::InvalidName {
        field,
        value: value.to_owned(),
        kind: kind.to_owned(),
    };
    if !is_object_name(name) {
        return Err(invalid("name", name));
    }
    let no_namespace = if rule.namespaced { !is_object_name(namespace) } else { !namespace.is_empty() };
    if no_namespace {
        return Err(invalid("namespace", namespace));
    }
    if rule.own_node_only && name != node_name {
        return Err(PermissionError::OtherNode {
            kind: kind.to_owned(),
            name: name.to_owned(),
            node: node_name.to_owned(),
        });
    }
    Ok(rule)
}

fn kind_with_subresource(kind: &str, subresource: &str) -> String {
    if subresource.is_empty() { kind.to_owned() } else { format!("{kind}/{subresource}") }
}

fn allowed_mutations(callers: &[&str]) -> String {
    let rules = RULES.iter().filter(|rule| callers.contains(&rule.caller));
    let lines: Vec<String> = rules
        .map(|rule| {
            let verbs: Vec<&str> = rule.verbs.iter().map(|verb| verb.as_str()).collect();
            format!("{} {}", verbs.join(", "), kind_with_subresource(rule.kind, rule.subresource))
        })
        .collect();
    if lines.is_empty() {
        "it may change nothing there".to_owned()
    } else {
        format!("it may {}", lines.join("; "))
    }
}

/// Whether it is a valid object name that is safe in a URL path.
pub fn is_object_name(name: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '.');
    !name.is_empty() && name.len() <= 253 && !name.starts_with('.') && name.chars().all(is_plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CALLERS: [&str; 9] = [
        "init",
        "pod-config",
        "pod-sync",
        "runtime-shim",
        "volume-manager",
        "resource-manager",
        "node-status",
        "node-api",
        "cli",
    ];
    const KINDS: [&str; 12] = [
        "CSINode",
        "PersistentVolumeClaim",
        "PersistentVolume",
        "VolumeAttachment",
        "Node",
        "Pod",
        "Secret",
        "ConfigMap",
        "ServiceAccount",
        "Event",
        "csinode",
        "",
    ];

    /// Proof 11 for this RPC: everything that is not in the list is denied to every caller.
    #[test]
    fn only_listed_mutations_are_allowed_for_any_caller_kind_subresource_and_verb() {
        let mut allowed = Vec::new();
        for caller in CALLERS {
            for kind in KINDS {
                for subresource in ["", "status", "token", "scale"] {
                    for verb in Verb::ALL {
                        for namespace in ["", "default"] {
                            let mutation = Mutation { kind, subresource, namespace, name: "n1", verb };
                            if authorize(&[caller], "n1", &mutation).is_ok() {
                                allowed.push(format!(
                                    "{caller} {} {} {namespace}",
                                    verb.as_str(),
                                    kind_with_subresource(kind, subresource)
                                ));
                            }
                        }
                    }
                }
            }
        }
        assert_eq!(
            allowed,
            [
                "volume-manager create CSINode ",
                "volume-manager update CSINode ",
                "volume-manager patch CSINode ",
                "volume-manager delete CSINode ",
                "volume-manager patch PersistentVolumeClaim/status default",
            ]
        );
    }

    #[test]
    fn a_denied_mutation_lists_what_the_caller_may_change() {
        let secret =
            Mutation { kind: "Secret", subresource: "", namespace: "a", name: "b", verb: Verb::Update };
        let message = authorize(&["volume-manager"], "n1", &secret).unwrap_err().to_string();
        assert_eq!(
            message,
            "volume-manager may not update Secret through pod-config; it may create, update, patch, delete CSINode; patch \
             PersistentVolumeClaim/status"
        );
        let message = authorize(&["node-api"], "n1", &secret).unwrap_err().to_string();
        assert_eq!(message, "node-api may not update Secret through pod-config; it may change nothing there");
        assert!(authorize(&[], "n1", &secret).unwrap_err().to_string().starts_with("this caller may not"));
    }

    #[test]
    fn a_mutation_is_limited_to_this_nodes_object_and_to_valid_names() {
        let node =
            Mutation { kind: "CSINode", subresource: "", namespace: "", name: "n2", verb: Verb::Update };
        let callers = ["runtime-shim", "volume-manager"];
        assert!(matches!(authorize(&callers, "n1", &node), Err(PermissionError::OtherNode { .. })));
        assert!(authorize(&callers, "n2", &node).is_ok());
        let claim = Mutation {
            kind: "PersistentVolumeClaim",
            subresource: "status",
            namespace: "a",
            name: "b",
            verb: Verb::Patch,
        };
        assert!(authorize(&callers, "n1", &claim).is_ok());
        for name in ["", "..", "a/b", "a?b", "A", "a%2f", &"a".repeat(254)] {
            let named = authorize(&callers, "n1", &Mutation { name, ..claim });
            assert!(matches!(named, Err(PermissionError::InvalidName { field: "name", .. })), "{name}");
            let below = authorize(&callers, "n1", &Mutation { namespace: name, ..claim });
            assert!(matches!(below, Err(PermissionError::InvalidName { field: "namespace", .. })), "{name}");
        }
    }
}
