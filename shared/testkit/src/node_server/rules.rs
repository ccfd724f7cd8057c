//! What a node may do: the Node authorizer with `AuthorizeNodeWithSelectors`, the role of nodes, and the admission plugin
//! NodeRestriction, as Kubernetes 1.34 to 1.36 have them by default (docs/node-requests.md).
//!
//! Three of the texts are the API server's own, since clients tell refusals apart by nothing else; the others are ours.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::certificates;
use super::objects::{Objects, Selection};
use super::request::{Request, Target};

/// The namespace of the leases of nodes.
const LEASES: &str = "kube-node-lease";
/// The annotation of a mirror pod.
pub(super) const MIRROR: &str = "kubernetes.io/config.mirror";

/// Checks whether a node is authorized for the request; otherwise returns the reason.
pub(super) fn authorize(node: &str, request: &Request, objects: &Objects) -> Result<(), String> {
    let target = &request.target;
    let resource = target.whole_resource();
    let is_read = ["get", "list", "watch"].contains(&request.verb);
    let is_own_name = request.name() == node;
    match (target.group.as_str(), resource.as_str(), request.verb) {
        ("", "nodes", "get" | "list" | "watch") if is_own_name => Ok(()),
        ("", "nodes", "get" | "list" | "watch") => {
            Err(format!("node '{node}' reads its own Node alone, selected by metadata.name"))
        }
        ("", "nodes", "create" | "update" | "patch") | ("", "nodes/status", "update" | "patch") => Ok(()),
        ("", "pods", "get") => related(node, request, objects),
        ("", "pods", "list" | "watch") => {
            let is_scoped = request.fields.get("spec.nodeName").is_some_and(|name| name == node);
            let is_scoped = is_scoped || (!request.name().is_empty() && is_related(node, request, objects));
            is_scoped.then_some(()).ok_or_else(|| {
                format!("node '{node}' lists and watches pods only with spec.nodeName or a pod's name")
            })
        }
        ("", "pods", "create" | "delete")
        | ("", "pods/status", "update" | "patch")
        | ("", "pods/eviction", "create") => Ok(()),
        ("", "configmaps" | "secrets", "get" | "list" | "watch")
        | ("", "persistentvolumeclaims" | "persistentvolumes", "get")
        | ("", "persistentvolumeclaims/status", "update" | "patch")
        | ("", "serviceaccounts", "get")
        | ("", "serviceaccounts/token", "create")
        | ("storage.k8s.io", "volumeattachments", "get") => related(node, request, objects),
        ("coordination.k8s.io", "leases", "create") if target.namespace == LEASES => Ok(()),
        ("coordination.k8s.io", "leases", "get" | "update" | "patch" | "delete")
            if target.namespace == LEASES && is_own_name =>
        {
            Ok(())
        }
        ("storage.k8s.io", "csinodes", "create") => Ok(()),
        ("storage.k8s.io", "csinodes", "get" | "update" | "patch" | "delete") if is_own_name => Ok(()),
        ("", "services", _)
        | ("node.k8s.io", "runtimeclasses", _)
        | ("storage.k8s.io", "csidrivers", _)
        | ("certificates.k8s.io", "certificatesigningrequests" | "clustertrustbundles", _)
            if is_read =>
        {
            Ok(())
        }
        ("certificates.k8s.io", "podcertificaterequests", "list" | "watch") => {
            let is_scoped = request.fields.get("spec.nodeName").is_some_and(|name| name == node);
            is_scoped.then_some(()).ok_or_else(|| {
                format!("node '{node}' lists and watches certificate requests only with spec.nodeName")
            })
        }
        ("certificates.k8s.io", "podcertificaterequests", "create")
        | ("", "events", "create" | "update" | "patch")
        | ("certificates.k8s.io", "certificatesigningrequests", "create")
        | ("authentication.k8s.io", "tokenreviews", "create")
        | ("authorization.k8s.io", "subjectaccessreviews" | "localsubjectaccessreviews", "create") => Ok(()),
        _ => Err(format!("the role of nodes has no {} of {resource}", request.verb)),
    }
}

fn related(node: &str, request: &Request, objects: &Objects) -> Result<(), String> {
    if is_related(node, request, objects) {
        return Ok(());
    }
    // The server's own text.
    Err(format!("no relationship found between node '{node}' and this object"))
}

/// Whether the authorizer's graph has a path from the object to the node: from a pod or VolumeAttachment of the node, from what
/// a pod of the node names, from a PersistentVolume whose `claimRef` is a claim of such a pod, and from the Secrets of that
/// PersistentVolume. A mirror leads to nothing else.
fn is_related(node: &str, request: &Request, objects: &Objects) -> bool {
    let (target, name) = (&request.target, request.name());
    if name.is_empty() {
        return false;
    }
    let namespace = target.namespace.as_str();
    match target.resource.as_str() {
        "pods" => objects.core("pods", namespace, name).is_some_and(|pod| pod["spec"]["nodeName"] == node),
        "volumeattachments" => {
            let whole = Target { name: name.to_owned(), subresource: String::new(), ..target.clone() };
            objects.get(&whole).is_some_and(|attachment| attachment["spec"]["nodeName"] == node)
        }
        "persistentvolumes" => objects
            .core("persistentvolumes", "", name)
            .is_some_and(|volume| is_claimed_on(node, volume, objects)),
        "secrets" => {
            is_named(node, &target.resource, namespace, name, objects)
                || volumes(objects).into_iter().any(|volume| {
                    secrets_of(volume).contains(&(namespace, name)) && is_claimed_on(node, volume, objects)
                })
        }
        resource => is_named(node, resource, namespace, name, objects),
    }
}

/// Whether a pod of the node names the object.
fn is_named(node: &str, resource: &str, namespace: &str, name: &str, objects: &Objects) -> bool {
    pods_of(node, objects).into_iter().any(|pod| {
        pod["metadata"]["namespace"] == namespace
            && pod["metadata"]["annotations"][MIRROR].is_null()
            && (named(resource, pod).contains(name)
                || (resource == "persistentvolumeclaims" && ephemeral_claims(pod).contains(name)))
    })
}

/// The names of the claims that the control plane makes for the ephemeral volumes of a pod.
fn ephemeral_claims(pod: &Value) -> BTreeSet<String> {
    let pod_name = pod["metadata"]["name"].as_str().unwrap_or_default();
    let volumes = pod["spec"]["volumes"].as_array().into_iter().flatten();
    let names = volumes.filter(|volume| volume["ephemeral"].is_object()).filter_map(|v| v["name"].as_str());
    names.map(|name| format!("{pod_name}-{name}")).collect()
}

/// Whether a pod of the node uses the claim that the PersistentVolume is bound to.
fn is_claimed_on(node: &str, volume: &Value, objects: &Objects) -> bool {
    let claim = &volume["spec"]["claimRef"];
    let (Some(namespace), Some(name)) = (claim["namespace"].as_str(), claim["name"].as_str()) else {
        return false;
    };
    is_named(node, "persistentvolumeclaims", namespace, name, objects)
}

fn volumes(objects: &Objects) -> Vec<&Value> {
    let collection = Target { resource: "persistentvolumes".to_owned(), ..Target::default() };
    objects.selected(&Selection { collection, fields: BTreeMap::new() })
}

/// Namespace and name of each Secret of a PersistentVolume that a node needs: those for the calls of a CSI driver on the node,
/// and those of other kinds, which are in the claim's namespace unless they name another.
fn secrets_of(volume: &Value) -> BTreeSet<(&str, &str)> {
    let spec = &volume["spec"];
    let of_csi = ["nodeStageSecretRef", "nodePublishSecretRef", "nodeExpandSecretRef"];
    let of_csi = of_csi.iter().map(|field| (&spec["csi"][field], &Value::Null));
    let of_others = ["iscsi", "flexVolume", "cephfs", "rbd", "scaleIO"].iter();
    let of_others = of_others.map(|kind| (&spec[kind]["secretRef"], &spec["claimRef"]["namespace"]));
    let names = of_csi.chain(of_others).filter_map(|(secret, default)| {
        let namespace = secret["namespace"].as_str().or(default.as_str())?;
        Some((namespace, secret["name"].as_str()?))
    });
    names.collect()
}

fn pods_of<'a>(node: &str, objects: &'a Objects) -> Vec<&'a Value> {
    let collection = Target { resource: "pods".to_owned(), ..Target::default() };
    let fields = [("spec.nodeName".to_owned(), node.to_owned())].into();
    objects.selected(&Selection { collection, fields })
}

/// The names of the objects of a kind that a pod names.
fn named(resource: &str, pod: &Value) -> BTreeSet<String> {
    let spec = &pod["spec"];
    if resource == "serviceaccounts" {
        return spec["serviceAccountName"].as_str().into_iter().map(ToOwned::to_owned).collect();
    }
    let mut names = BTreeSet::new();
    let fields: &[(&str, &str)] = match resource {
        "configmaps" => &[("configMap", "name"), ("configMapRef", "name"), ("configMapKeyRef", "name")],
        "secrets" => &[
            ("secret", "secretName"),
            ("secret", "name"),
            ("secretRef", "name"),
            ("nodePublishSecretRef", "name"),
            ("secretKeyRef", "name"),
            ("imagePullSecrets", "name"),
        ],
        "persistentvolumeclaims" => &[("persistentVolumeClaim", "claimName")],
        _ => &[],
    };
    collect(spec, "", fields, &mut names);
    names
}

/// Every value of one of the `fields` (of an object below a field of that name), however deep.
fn collect(value: &Value, below: &str, fields: &[(&str, &str)], names: &mut BTreeSet<String>) {
    match value {
        Value::Object(object) => {
            for (field, inner) in object {
                if let Some(name) = inner.as_str().filter(|_| fields.contains(&(below, field))) {
                    names.insert(name.to_owned());
                }
                collect(inner, field, fields, names);
            }
        }
        Value::Array(items) => items.iter().for_each(|item| collect(item, below, fields, names)),
        _ => {}
    }
}

/// What NodeRestriction says of a change from `old` to `new`; of a removal `new` is null, and of what is made `old` is none.
pub(super) fn admit(
    node: &str,
    request: &Request,
    old: Option<&Value>,
    new: &Value,
    objects: &Objects,
) -> Result<(), String> {
    let target = &request.target;
    match (target.group.as_str(), target.whole_resource().as_str(), request.verb) {
        ("", "pods", "create") => admit_mirror(node, new, objects),
        ("", "pods" | "pods/status", _) => {
            let Some(old) = old else { return Ok(()) };
            if old["spec"]["nodeName"] != node {
                // The server's own text.
                let what =
                    if request.verb == "delete" { "delete pods" } else { "update pod status for pods" };
                return Err(format!("node {node:?} can only {what} with spec.nodeName set to itself"));
            }
            let labels = |pod: &Value| pod["metadata"]["labels"].clone();
            if request.verb != "delete" && labels(old) != labels(new) {
                return Err(format!("node {node:?} changes no labels of pods"));
            }
            Ok(())
        }
        ("", "nodes" | "nodes/status", _) => admit_node(node, old, new),
        ("coordination.k8s.io", "leases", "create") | ("storage.k8s.io", "csinodes", "create") => {
            let is_own = new["metadata"]["name"] == node;
            is_own.then_some(()).ok_or_else(|| format!("node {node:?} makes only what has its own name"))
        }
        ("", "serviceaccounts/token", _) => admit_token(node, request, objects),
        ("certificates.k8s.io", "podcertificaterequests", _) => certificates::admit(node, request, objects),
        ("", "persistentvolumeclaims/status", _) => admit_claim_status(node, old, new),
        _ => Ok(()),
    }
}

/// The parts of a claim's status that a node may change: those of an expansion.
const OWN_CLAIM_STATUS: [&str; 4] =
    ["capacity", "conditions", "allocatedResources", "allocatedResourceStatuses"];

fn admit_claim_status(node: &str, old: Option<&Value>, new: &Value) -> Result<(), String> {
    let Some(old) = old else { return Ok(()) };
    let without_own = |claim: &Value| {
        let mut claim = claim.clone();
        if let Some(metadata) = claim["metadata"].as_object_mut() {
            metadata.retain(|field, _| field != "resourceVersion" && field != "managedFields");
        }
        if let Some(status) = claim["status"].as_object_mut() {
            status.retain(|field, _| !OWN_CLAIM_STATUS.contains(&field.as_str()));
        }
        if claim["status"].as_object().is_none_or(serde_json::Map::is_empty) {
            claim["status"] = Value::Null;
        }
        claim
    };
    if without_own(old) == without_own(new) {
        return Ok(());
    }
    Err(format!(
        "node {node:?} changes only these parts of a claim's status: {}",
        OWN_CLAIM_STATUS.join(", ")
    ))
}

fn admit_mirror(node: &str, pod: &Value, objects: &Objects) -> Result<(), String> {
    let (metadata, spec) = (&pod["metadata"], &pod["spec"]);
    if !metadata["annotations"][MIRROR].is_string() {
        return Err(format!("node {node:?} makes only mirrors of its own pods"));
    }
    if spec["nodeName"] != node {
        return Err(format!("node {node:?} can only create pods with spec.nodeName set to itself"));
    }
    let owners = metadata["ownerReferences"].as_array().map(Vec::as_slice).unwrap_or_default();
    let own = objects.core("nodes", "", node);
    let is_owned = match (owners, own) {
        ([owner], Some(own)) => {
            owner["apiVersion"] == "v1"
                && owner["kind"] == "Node"
                && owner["name"] == node
                && owner["uid"] == own["metadata"]["uid"]
                && owner["controller"] == true
                && owner["blockOwnerDeletion"] != true
        }
        _ => false,
    };
    if !is_owned {
        return Err(format!("a mirror's one owner is the Node {node:?}, its controller, with the right UID"));
    }
    if spec["serviceAccountName"].as_str().is_some_and(|name| !name.is_empty()) {
        return Err(format!("node {node:?} makes no pods with a service account"));
    }
    for resource in ["secrets", "configmaps", "persistentvolumeclaims"] {
        if let Some(name) = named(resource, pod).first() {
            return Err(format!("node {node:?} makes no pods that name {resource}: {name}"));
        }
    }
    let projects_token = spec["volumes"].as_array().into_iter().flatten().any(|volume| {
        let sources = volume["projected"]["sources"].as_array().into_iter().flatten();
        sources.into_iter().any(|source| source["serviceAccountToken"].is_object())
    });
    if projects_token || spec["resourceClaims"].as_array().is_some_and(|claims| !claims.is_empty()) {
        return Err(format!("node {node:?} makes no pods with tokens or claims"));
    }
    Ok(())
}

/// The labels below Kubernetes' own domains that a node may set on itself.
const OWN_LABELS: [&str; 11] = [
    "kubernetes.io/hostname",
    "kubernetes.io/arch",
    "kubernetes.io/os",
    "beta.kubernetes.io/instance-type",
    "node.kubernetes.io/instance-type",
    "failure-domain.beta.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "topology.kubernetes.io/region",
    "topology.kubernetes.io/zone",
    "beta.kubernetes.io/arch",
    "beta.kubernetes.io/os",
];

fn may_label(key: &str) -> bool {
    let Some((domain, _)) = key.split_once('/') else { return true };
    let is_below = |of: &str| domain == of || domain.ends_with(&format!(".{of}"));
    if is_below("node-restriction.kubernetes.io") {
        return false;
    }
    let is_kubernetes = is_below("kubernetes.io") || is_below("k8s.io");
    !is_kubernetes
        || OWN_LABELS.contains(&key)
        || is_below("kubelet.kubernetes.io")
        || is_below("node.kubernetes.io")
}

fn admit_node(node: &str, old: Option<&Value>, new: &Value) -> Result<(), String> {
    if new["metadata"]["name"] != node {
        return Err(format!("node {node:?} changes no other Node: {}", new["metadata"]["name"]));
    }
    let labels = |object: Option<&Value>| {
        object.and_then(|o| o["metadata"]["labels"].as_object()).cloned().unwrap_or_default()
    };
    let (before, after) = (labels(old), labels(Some(new)));
    let changed = before.keys().chain(after.keys()).filter(|&key| before.get(key) != after.get(key));
    let refused: BTreeSet<&String> = changed.filter(|key| !may_label(key)).collect();
    if !refused.is_empty() {
        return Err(format!("node {node:?} may not change these labels of itself: {refused:?}"));
    }
    let Some(old) = old else { return Ok(()) };
    for (what, at) in [("taints", "/spec/taints"), ("owners", "/metadata/ownerReferences")] {
        if old.pointer(at) != new.pointer(at) {
            return Err(format!("node {node:?} changes no {what} of itself"));
        }
    }
    Ok(())
}

fn admit_token(node: &str, request: &Request, objects: &Objects) -> Result<(), String> {
    let (target, wanted) = (&request.target, &request.body["spec"]);
    let bound = &wanted["boundObjectRef"];
    let (Some(pod), Some(uid)) = (bound["name"].as_str(), bound["uid"].as_str()) else {
        return Err(format!("node {node:?} asks only for tokens that are bound to a pod, by name and UID"));
    };
    if bound["kind"] != "Pod" || bound["apiVersion"] != "v1" {
        return Err(format!("node {node:?} asks only for tokens that are bound to a pod"));
    }
    let Some(pod) = objects.core("pods", &target.namespace, pod) else {
        return Err(format!("pods {pod:?} not found"));
    };
    if pod["metadata"]["uid"] != uid {
        return Err(format!("the UID in the bound object reference ({uid}) is that of another pod"));
    }
    if pod["spec"]["nodeName"] != node {
        // The server's own text.
        return Err(format!("node {node:?} requested a token bound to a pod scheduled on a different node"));
    }
    // A volume that names no audience is for the server itself.
    let volumes = pod["spec"]["volumes"].as_array().into_iter().flatten();
    let sources = volumes.flat_map(|volume| volume["projected"]["sources"].as_array().into_iter().flatten());
    let known: BTreeSet<&str> = sources
        .filter(|source| source["serviceAccountToken"].is_object())
        .map(|source| source["serviceAccountToken"]["audience"].as_str().unwrap_or_default())
        .collect();
    let asked = wanted["audiences"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let audiences: Vec<&str> = asked.collect();
    let audiences = if audiences.is_empty() { vec![""] } else { audiences };
    match audiences.into_iter().find(|audience| !known.contains(audience)) {
        Some(audience) => Err(format!("the audience {audience:?} is in no volume of the pod")),
        None => Ok(()),
    }
}
