//! The pods of the node, and the resolution of a name to one of them.

use keelson_kube_model::{Pod, pod_ext::annotations};
use keelson_proto::keelson::pod_config::v1::WaitingPod;
use keelson_proto::keelson::pod_sync::v1::PodDocument;
use serde_json::Value;

use crate::agent::Agent;
use crate::error::CliError;
use crate::human;
use crate::sources;
use crate::suggest::similar_names;

/// A pod of this node.
#[derive(Debug)]
pub(crate) struct PodEntry {
    pub(crate) document: PodDocument,
    /// `None` when the document cannot be read as a Pod.
    pub(crate) pod: Option<Pod>,
}

impl PodEntry {
    /// Reads a document.
    pub(crate) fn new(document: PodDocument) -> Self {
        let pod = serde_json::from_slice(&document.pod_json).ok();
        Self { document, pod }
    }

    /// The Pod as JSON, with all fields that pod-sync sent.
    pub(crate) fn json(&self) -> Result<Value, CliError> {
        serde_json::from_slice(&self.document.pod_json).map_err(|e| CliError::Failed {
            message: format!(
                "pod-sync sent a document for {}/{} that is not JSON: {e}",
                self.document.namespace, self.document.name
            ),
            hint: None,
        })
    }

    /// The Pod as a typed object.
    pub(crate) fn typed(&self) -> Result<&Pod, CliError> {
        self.pod.as_ref().ok_or_else(|| CliError::Failed {
            message: format!(
                "pod-sync sent a document for {}/{} that is not a Pod",
                self.document.namespace, self.document.name
            ),
            hint: Some("-o json shows the document unchanged".into()),
        })
    }

    /// The pod's creation time in nanoseconds since 1970; 0 when it is unknown.
    pub(crate) fn created(&self) -> i64 {
        let Some(pod) = &self.pod else { return 0 };
        [
            pod.metadata.creation_timestamp.as_deref(),
            pod.annotation(annotations::CONFIG_SEEN),
            pod.status.start_time.as_deref(),
        ]
        .into_iter()
        .map(human::nanos_of)
        .find(|t| *t != 0)
        .unwrap_or(0)
    }

    fn matches(&self, name: &str) -> Option<NameMatch> {
        if self.document.name == name || self.document.uid == name {
            return Some(NameMatch::Full);
        }
        (self.short_name()? == name).then_some(NameMatch::Short)
    }

    /// The name without the suffix of the node, where it has that.
    pub(crate) fn short_name(&self) -> Option<&str> {
        let node = self.pod.as_ref()?.spec.node_name.to_lowercase();
        let short = self.document.name.strip_suffix(node.as_str())?.strip_suffix('-')?;
        (!node.is_empty()).then_some(short)
    }

    fn is_terminating(&self) -> bool {
        self.document.finished || self.pod.as_ref().is_some_and(Pod::is_deleting)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NameMatch {
    Full,
    Short,
}

/// The namespace that a command is about.
#[derive(Debug, Clone)]
pub(crate) struct Scope {
    /// `None`: all namespaces.
    pub(crate) namespace: Option<String>,
}

impl Scope {
    /// Whether `namespace` is in the scope.
    pub(crate) fn contains(&self, namespace: &str) -> bool {
        self.namespace.as_deref().is_none_or(|own| own == namespace)
    }

    fn describe(&self) -> String {
        self.namespace.as_ref().map_or_else(|| "any namespace".into(), |n| format!("namespace {n}"))
    }
}

/// The name without its type: `web` for `pod/web`.
pub(crate) fn bare_name(name: &str) -> &str {
    ["pod/", "pods/", "po/"].iter().find_map(|prefix| name.strip_prefix(prefix)).unwrap_or(name)
}

/// All pods of the node, sorted by namespace and name.
pub(crate) async fn list(agent: &Agent) -> Result<Vec<PodEntry>, CliError> {
    let mut pods: Vec<_> = agent.pods().await?.into_iter().map(PodEntry::new).collect();
    pods.sort_by(|a, b| {
        (&a.document.namespace, &a.document.name).cmp(&(&b.document.namespace, &b.document.name))
    });
    Ok(pods)
}

/// Finds the pod called `name`: by full name or UID, else by the name without the node's suffix. Of several pods
/// with one name it is the one that is not terminating.
///
/// # Errors
/// No pod matches, or several do.
pub(crate) fn find<'a>(pods: &'a [PodEntry], scope: &Scope, name: &str) -> Result<&'a PodEntry, CliError> {
    let name = bare_name(name);
    let matching = |wanted: NameMatch| -> Vec<&PodEntry> {
        pods.iter()
            .filter(|p| scope.contains(&p.document.namespace) && p.matches(name) == Some(wanted))
            .collect()
    };
    let mut found = matching(NameMatch::Full);
    if found.is_empty() {
        found = matching(NameMatch::Short);
    }
    if found.len() > 1 {
        let remaining: Vec<_> = found.iter().copied().filter(|p| !p.is_terminating()).collect();
        if remaining.len() == 1 {
            found = remaining;
        }
    }
    match found.as_slice() {
        [] => Err(CliError::NotFound {
            what: format!("there is no pod {name:?} in {}", scope.describe()),
            hint: suggestion(pods, scope, name),
        }),
        [one] => Ok(one),
        several => Err(CliError::Ambiguous {
            name: name.to_owned(),
            candidates: several
                .iter()
                .map(|p| format!("{}/{} ({})", p.document.namespace, p.document.name, p.document.uid))
                .collect(),
        }),
    }
}

/// The hint for an unknown name: another namespace that has such a pod, or similar names.
fn suggestion(pods: &[PodEntry], scope: &Scope, name: &str) -> String {
    let all = "`keelson get pods -A` lists all pods";
    if let Some(elsewhere) = pods.iter().find(|p| p.matches(name).is_some()) {
        let (namespace, name) = (&elsewhere.document.namespace, &elsewhere.document.name);
        return format!("there is {name} in namespace {namespace}: -n {namespace}; {all}");
    }
    let here = pods.iter().filter(|p| scope.contains(&p.document.namespace));
    let names = here.flat_map(|p| [Some(p.document.name.as_str()), p.short_name()]).flatten();
    let similar = similar_names(name, names);
    if similar.is_empty() { all.into() } else { format!("did you mean {}? {all}", similar.join(" or ")) }
}

/// Like [`find`], with a hint for a pod that does not exist because it waits or because its manifest may be refused.
pub(crate) async fn resolve<'a>(
    agent: &Agent,
    pods: &'a [PodEntry],
    scope: &Scope,
    name: &str,
) -> Result<&'a PodEntry, CliError> {
    match find(pods, scope, name) {
        Err(CliError::NotFound { what, hint }) => {
            let sources = agent.sources().await.unwrap_or_default();
            let mut waiting = sources.iter().flat_map(|source| &source.waiting);
            let waits = |pod: &WaitingPod| pod.name == bare_name(name) && scope.contains(&pod.namespace);
            let problems: Vec<_> = sources.iter().flat_map(|source| &source.problems).collect();
            let hint = match problems.first() {
                _ if waiting.any(waits) => {
                    format!("it waits for the control plane: `keelson explain pod {}`", bare_name(name))
                }
                Some(first) => format!(
                    "`keelson get sources`: {} manifest errors, the first at {}: {}",
                    problems.len(),
                    sources::location(first),
                    crate::table::printable(&first.message)
                ),
                None => hint,
            };
            Err(CliError::NotFound { what, hint })
        }
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn entry(namespace: &str, name: &str, uid: &str, node: &str) -> PodEntry {
        PodEntry::new(PodDocument {
            uid: uid.into(),
            namespace: namespace.into(),
            name: name.into(),
            pod_json: json!({"metadata": {"name": name}, "spec": {"nodeName": node}}).to_string().into(),
            ..PodDocument::default()
        })
    }

    fn scope(namespace: &str) -> Scope {
        Scope { namespace: Some(namespace.into()) }
    }

    fn uid(pods: &[PodEntry], scope: &Scope, name: &str) -> Result<String, String> {
        find(pods, scope, name).map(|p| p.document.uid.clone()).map_err(|e| e.to_string())
    }

    #[test]
    fn pod_is_found_by_name_with_and_without_the_node_suffix() {
        let pods = [
            entry("default", "web-edge-1", "u1", "edge-1"),
            entry("default", "web-2-edge-1", "u2", "edge-1"),
        ];
        for name in ["web", "web-edge-1", "pod/web", "u1"] {
            assert_eq!(uid(&pods, &scope("default"), name).unwrap(), "u1", "{name}");
        }
        assert!(uid(&pods, &scope("default"), "web-edge").is_err());
        assert!(uid(&pods, &scope("other"), "web").unwrap_err().contains("namespace other"));
    }

    #[test]
    fn unknown_pod_name_suggests_other_namespaces_and_similar_names() {
        let pods = [entry("default", "web-edge", "u1", "edge"), entry("system", "dns-edge", "u2", "edge")];
        let hint = |name: &str| find(&pods, &scope("default"), name).unwrap_err().hint().unwrap();
        assert!(
            hint("dns").starts_with("there is dns-edge in namespace system: -n system;"),
            "{}",
            hint("dns")
        );
        assert!(hint("wbe").starts_with("did you mean web? "), "{}", hint("wbe"));
        assert!(hint("web-egde").starts_with("did you mean web-edge? "), "{}", hint("web-egde"));
        assert_eq!(hint("nope"), "`keelson get pods -A` lists all pods");
    }

    #[test]
    fn full_pod_name_takes_precedence_over_short_name() {
        let pods = [entry("default", "web", "u1", "edge"), entry("default", "web-edge", "u2", "edge")];
        assert_eq!(uid(&pods, &scope("default"), "web").unwrap(), "u1");
        assert_eq!(uid(&pods, &scope("default"), "web-edge").unwrap(), "u2");
    }

    #[test]
    fn ambiguous_pod_name_lists_all_matches() {
        let pods = [entry("a", "web-edge", "u1", "edge"), entry("b", "web-edge", "u2", "edge")];
        let text = uid(&pods, &Scope { namespace: None }, "web").unwrap_err();
        assert_eq!(text, "the name \"web\" fits several pods: a/web-edge (u1), b/web-edge (u2)");
    }

    #[test]
    fn of_two_pods_with_one_name_the_finished_one_is_skipped() {
        let mut old = entry("default", "web-edge", "u1", "edge");
        old.document.finished = true;
        let pods = [old, entry("default", "web-edge", "u2", "edge")];
        assert_eq!(uid(&pods, &scope("default"), "web").unwrap(), "u2");
        assert_eq!(uid(&pods, &scope("default"), "u1").unwrap(), "u1");
    }

    #[test]
    fn static_pod_age_comes_from_the_config_seen_annotation() {
        let mut pod = entry("default", "web", "u1", "edge");
        pod.document.pod_json =
            json!({"metadata": {"annotations": {"kubernetes.io/config.seen": "1970-01-01T00:00:05Z"}}})
                .to_string()
                .into();
        assert_eq!(PodEntry::new(pod.document).created(), 5 * human::SECOND);
    }
}
