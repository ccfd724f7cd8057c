//! Which service may change what at the API server (architecture §1, §4).
//!
//! node-status writes what tells of the node and of its pods. What is in this list is written for services that have to wait for
//! the outcome; it is all that they may write, whatever the API server would let the node do.

/// How an object is changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    /// It is made.
    Create,
    /// It takes the place of the version that it names.
    Update,
    /// What the patch names of it is changed.
    Patch,
    /// It is deleted, the one with a UID and no other of its name.
    Delete,
}

impl Verb {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Create, Self::Update, Self::Patch, Self::Delete];

    /// As Kubernetes calls it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Update => "update",
            Self::Patch => "patch",
            Self::Delete => "delete",
        }
    }
}

/// What one service may do to one kind of objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rule {
    /// The service.
    pub caller: &'static str,
    /// `CSINode`…
    pub kind: &'static str,
    /// `status`; empty: the object itself.
    pub subresource: &'static str,
    /// How.
    pub verbs: &'static [Verb],
    /// Only the object that has the node's name.
    pub own: bool,
    /// Its objects are in namespaces.
    pub namespaced: bool,
}

/// The list. Nobody writes VolumeAttachments: they are the controller's; and the Node is node-status's alone.
pub const RULES: [Rule; 2] = [
    // volumes.md §11.2
    Rule {
        caller: "volume-manager",
        kind: "CSINode",
        subresource: "",
        verbs: &Verb::ALL,
        own: true,
        namespaced: false,
    },
    // volumes.md §4
    Rule {
        caller: "volume-manager",
        kind: "PersistentVolumeClaim",
        subresource: "status",
        verbs: &[Verb::Patch],
        own: false,
        namespaced: true,
    },
];

/// A change that is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mutation<'a> {
    /// `CSINode`…
    pub kind: &'a str,
    /// `status`; empty: the object itself.
    pub subresource: &'a str,
    /// Empty for a cluster-wide object.
    pub namespace: &'a str,
    /// `metadata.name`.
    pub name: &'a str,
    /// How.
    pub verb: Verb,
}

/// Why a change is not made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotAllowed {
    /// Nothing in the list lets the caller do it.
    #[error("{caller} may not {verb} {what} through pod-config; {list}")]
    Unlisted {
        /// Who asks.
        caller: String,
        /// How.
        verb: &'static str,
        /// `CSINode`, `PersistentVolumeClaim/status`…
        what: String,
        /// What the caller may do.
        list: String,
    },
    /// The object is another node's.
    #[error("{kind} {name} is not this node's, which is {node}")]
    AnotherNodes {
        /// The kind.
        kind: String,
        /// The name that was given.
        name: String,
        /// This node.
        node: String,
    },
    /// The object cannot be named so.
    #[error("{field} {value:?} is no name of a {kind}")]
    Name {
        /// `name` or `namespace`.
        field: &'static str,
        /// What was given.
        value: String,
        /// The kind.
        kind: String,
    },
}

/// Whether one of `callers`, the services that the caller may be, may make this change on the node `node_name`.
///
/// # Errors
/// Why it may not.
pub fn judge(
    callers: &[&str],
    node_name: &str,
    mutation: &Mutation<'_>,
) -> Result<&'static Rule, NotAllowed> {
    let Mutation { kind, subresource, namespace, name, verb } = *mutation;
    let is_it = |rule: &&Rule| {
        callers.contains(&rule.caller)
            && rule.kind == kind
            && rule.subresource == subresource
            && rule.verbs.contains(&verb)
    };
    let Some(rule) = RULES.iter().find(is_it) else {
        return Err(NotAllowed::Unlisted {
            caller: if callers.is_empty() { "this caller".to_owned() } else { callers.join(" or ") },
            verb: verb.as_str(),
            what: of(kind, subresource),
            list: list(callers),
        });
    };
    let wrong =
        |field, value: &str| NotAllowed::Name { field, value: value.to_owned(), kind: kind.to_owned() };
    if !is_plain(name) {
        return Err(wrong("name", name));
    }
    let no_namespace = if rule.namespaced { !is_plain(namespace) } else { !namespace.is_empty() };
    if no_namespace {
        return Err(wrong("namespace", namespace));
    }
    if rule.own && name != node_name {
        return Err(NotAllowed::AnotherNodes {
            kind: kind.to_owned(),
            name: name.to_owned(),
            node: node_name.to_owned(),
        });
    }
    Ok(rule)
}

fn of(kind: &str, subresource: &str) -> String {
    if subresource.is_empty() { kind.to_owned() } else { format!("{kind}/{subresource}") }
}

fn list(callers: &[&str]) -> String {
    let rules = RULES.iter().filter(|rule| callers.contains(&rule.caller));
    let lines: Vec<String> = rules
        .map(|rule| {
            let verbs: Vec<&str> = rule.verbs.iter().map(|verb| verb.as_str()).collect();
            format!("{} {}", verbs.join(", "), of(rule.kind, rule.subresource))
        })
        .collect();
    if lines.is_empty() {
        "it may change nothing there".to_owned()
    } else {
        format!("it may {}", lines.join("; "))
    }
}

/// A name as objects have them, and as a path may have them.
fn is_plain(name: &str) -> bool {
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

    /// Proof 11, for what one RPC does: everything that is not in the list is refused, whoever asks.
    #[test]
    fn only_what_is_listed_is_allowed_of_all_callers_kinds_parts_and_verbs() {
        let mut allowed = Vec::new();
        for caller in CALLERS {
            for kind in KINDS {
                for subresource in ["", "status", "token", "scale"] {
                    for verb in Verb::ALL {
                        for namespace in ["", "default"] {
                            let mutation = Mutation { kind, subresource, namespace, name: "n1", verb };
                            if judge(&[caller], "n1", &mutation).is_ok() {
                                allowed.push(format!(
                                    "{caller} {} {} {namespace}",
                                    verb.as_str(),
                                    of(kind, subresource)
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
    fn a_refusal_says_who_may_do_what_instead() {
        let secret =
            Mutation { kind: "Secret", subresource: "", namespace: "a", name: "b", verb: Verb::Update };
        let told = judge(&["volume-manager"], "n1", &secret).unwrap_err().to_string();
        assert_eq!(
            told,
            "volume-manager may not update Secret through pod-config; it may create, update, patch, delete CSINode; patch \
             PersistentVolumeClaim/status"
        );
        let told = judge(&["node-api"], "n1", &secret).unwrap_err().to_string();
        assert_eq!(told, "node-api may not update Secret through pod-config; it may change nothing there");
        assert!(judge(&[], "n1", &secret).unwrap_err().to_string().starts_with("this caller may not"));
    }

    #[test]
    fn the_object_is_this_nodes_and_its_name_leads_nowhere_else() {
        let node =
            Mutation { kind: "CSINode", subresource: "", namespace: "", name: "n2", verb: Verb::Update };
        let callers = ["runtime-shim", "volume-manager"];
        assert!(matches!(judge(&callers, "n1", &node), Err(NotAllowed::AnotherNodes { .. })));
        assert!(judge(&callers, "n2", &node).is_ok());
        let claim = Mutation {
            kind: "PersistentVolumeClaim",
            subresource: "status",
            namespace: "a",
            name: "b",
            verb: Verb::Patch,
        };
        assert!(judge(&callers, "n1", &claim).is_ok());
        for name in ["", "..", "a/b", "a?b", "A", "a%2f", &"a".repeat(254)] {
            let named = judge(&callers, "n1", &Mutation { name, ..claim });
            assert!(matches!(named, Err(NotAllowed::Name { field: "name", .. })), "{name}");
            let below = judge(&callers, "n1", &Mutation { namespace: name, ..claim });
            assert!(matches!(below, Err(NotAllowed::Name { field: "namespace", .. })), "{name}");
        }
    }
}
