//! Pods as the commands see them, and which pod a name means.

use keelson_kube_model::{Pod, pod_ext::annotations};
use keelson_proto::keelson::pod_config::v1::WaitingPod;
use keelson_proto::keelson::pod_sync::v1::PodDocument;
use serde_json::Value;

use crate::agent::Agent;
use crate::error::Failure;
use crate::human;
use crate::near::near;

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

    /// The Pod as JSON, with everything that pod-sync sent.
    pub(crate) fn json(&self) -> Result<Value, Failure> {
        serde_json::from_slice(&self.document.pod_json).map_err(|e| Failure::Answer {
            message: format!(
                "pod-sync sent a document for {}/{} that is no JSON: {e}",
                self.document.namespace, self.document.name
            ),
            hint: None,
        })
    }

    /// The Pod with its fields.
    pub(crate) fn typed(&self) -> Result<&Pod, Failure> {
        self.pod.as_ref().ok_or_else(|| Failure::Answer {
            message: format!(
                "pod-sync sent a document for {}/{} that is no Pod",
                self.document.namespace, self.document.name
            ),
            hint: Some("-o json shows it as it is".into()),
        })
    }

    /// When the pod came into being, as far as it tells; 0 when it does not.
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

    fn answers_to(&self, name: &str) -> Option<Fit> {
        if self.document.name == name || self.document.uid == name {
            return Some(Fit::Full);
        }
        (self.short_name()? == name).then_some(Fit::Short)
    }

    /// The name without the suffix of the node, where it has that.
    pub(crate) fn short_name(&self) -> Option<&str> {
        let node = self.pod.as_ref()?.spec.node_name.to_lowercase();
        let short = self.document.name.strip_suffix(node.as_str())?.strip_suffix('-')?;
        (!node.is_empty()).then_some(short)
    }

    fn is_leaving(&self) -> bool {
        self.document.finished || self.pod.as_ref().is_some_and(Pod::is_deleting)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fit {
    Full,
    Short,
}

/// The pods that a command is about.
#[derive(Debug, Clone)]
pub(crate) struct Scope {
    /// `None`: all namespaces.
    pub(crate) namespace: Option<String>,
}

impl Scope {
    /// Whether something in `namespace` belongs to it.
    pub(crate) fn holds(&self, namespace: &str) -> bool {
        self.namespace.as_deref().is_none_or(|own| own == namespace)
    }

    fn place(&self) -> String {
        self.namespace.as_ref().map_or_else(|| "any namespace".into(), |n| format!("namespace {n}"))
    }
}

/// `web` of `pod/web`.
pub(crate) fn bare_name(name: &str) -> &str {
    ["pod/", "pods/", "po/"].iter().find_map(|prefix| name.strip_prefix(prefix)).unwrap_or(name)
}

/// All pods of the node by namespace and name.
pub(crate) async fn list(agent: &Agent) -> Result<Vec<PodEntry>, Failure> {
    let mut pods: Vec<_> = agent.pods().await?.into_iter().map(PodEntry::new).collect();
    pods.sort_by(|a, b| {
        (&a.document.namespace, &a.document.name).cmp(&(&b.document.namespace, &b.document.name))
    });
    Ok(pods)
}

/// The pod that a person means by `name`: a full name or UID, else a name without the node's suffix. Of several
/// with one name the one that is not on its way out.
///
/// # Errors
/// None fits, or several do.
pub(crate) fn find<'a>(pods: &'a [PodEntry], scope: &Scope, name: &str) -> Result<&'a PodEntry, Failure> {
    let name = bare_name(name);
    let fitting = |fit: Fit| -> Vec<&PodEntry> {
        pods.iter()
            .filter(|p| scope.holds(&p.document.namespace) && p.answers_to(name) == Some(fit))
            .collect()
    };
    let mut found = fitting(Fit::Full);
    if found.is_empty() {
        found = fitting(Fit::Short);
    }
    if found.len() > 1 {
        let staying: Vec<_> = found.iter().copied().filter(|p| !p.is_leaving()).collect();
        if staying.len() == 1 {
            found = staying;
        }
    }
    match found.as_slice() {
        [] => Err(Failure::NotFound {
            what: format!("there is no pod {name:?} in {}", scope.place()),
            hint: meant(pods, scope, name),
        }),
        [one] => Ok(one),
        several => Err(Failure::Ambiguous {
            name: name.to_owned(),
            candidates: several
                .iter()
                .map(|p| format!("{}/{} ({})", p.document.namespace, p.document.name, p.document.uid))
                .collect(),
        }),
    }
}

/// Where a pod of the name is, or which are called nearly so.
fn meant(pods: &[PodEntry], scope: &Scope, name: &str) -> String {
    let all = "`keelson get pods -A` lists all pods";
    if let Some(elsewhere) = pods.iter().find(|p| p.answers_to(name).is_some()) {
        let (namespace, name) = (&elsewhere.document.namespace, &elsewhere.document.name);
        return format!("there is {name} in namespace {namespace}: -n {namespace}; {all}");
    }
    let here = pods.iter().filter(|p| scope.holds(&p.document.namespace));
    let names = here.flat_map(|p| [Some(p.document.name.as_str()), p.short_name()]).flatten();
    let near = near(name, names);
    if near.is_empty() { all.into() } else { format!("did you mean {}? {all}", near.join(" or ")) }
}

/// [`find`], and where there is no such pod, whether a refused manifest may be the reason.
pub(crate) async fn resolve<'a>(
    agent: &Agent,
    pods: &'a [PodEntry],
    scope: &Scope,
    name: &str,
) -> Result<&'a PodEntry, Failure> {
    match find(pods, scope, name) {
        Err(Failure::NotFound { what, hint }) => {
            let sources = agent.sources().await.unwrap_or_default();
            let mut waiting = sources.iter().flat_map(|source| &source.waiting);
            let waits = |pod: &WaitingPod| pod.name == bare_name(name) && scope.holds(&pod.namespace);
            let problems: Vec<_> = sources.iter().flat_map(|source| &source.problems).collect();
            let hint = match problems.first() {
                _ if waiting.any(waits) => {
                    format!("it waits for the control plane: `keelson explain pod {}`", bare_name(name))
                }
                Some(first) => format!(
                    "`keelson get sources`: {} of manifests refused, the first at {}: {}",
                    problems.len(),
                    crate::cmd::get_sources::place(first),
                    crate::table::printable(&first.message)
                ),
                None => hint,
            };
            Err(Failure::NotFound { what, hint })
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
    fn a_pod_is_found_with_and_without_the_suffix_of_the_node() {
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
    fn a_pod_that_is_not_found_is_looked_for_elsewhere_and_under_names_that_are_near() {
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
    fn the_full_name_of_one_pod_wins_over_the_short_name_of_another() {
        let pods = [entry("default", "web", "u1", "edge"), entry("default", "web-edge", "u2", "edge")];
        assert_eq!(uid(&pods, &scope("default"), "web").unwrap(), "u1");
        assert_eq!(uid(&pods, &scope("default"), "web-edge").unwrap(), "u2");
    }

    #[test]
    fn a_name_that_fits_several_pods_lists_them() {
        let pods = [entry("a", "web-edge", "u1", "edge"), entry("b", "web-edge", "u2", "edge")];
        let text = uid(&pods, &Scope { namespace: None }, "web").unwrap_err();
        assert_eq!(text, "the name \"web\" fits several pods: a/web-edge (u1), b/web-edge (u2)");
    }

    #[test]
    fn of_an_old_and_a_new_pod_of_one_name_the_new_one_is_meant() {
        let mut old = entry("default", "web-edge", "u1", "edge");
        old.document.finished = true;
        let pods = [old, entry("default", "web-edge", "u2", "edge")];
        assert_eq!(uid(&pods, &scope("default"), "web").unwrap(), "u2");
        assert_eq!(uid(&pods, &scope("default"), "u1").unwrap(), "u1");
    }

    #[test]
    fn the_age_of_a_pod_from_a_file_is_that_of_its_first_sight() {
        let mut pod = entry("default", "web", "u1", "edge");
        pod.document.pod_json =
            json!({"metadata": {"annotations": {"kubernetes.io/config.seen": "1970-01-01T00:00:05Z"}}})
                .to_string()
                .into();
        assert_eq!(PodEntry::new(pod.document).created(), 5 * human::SECOND);
    }
}
