//! The validation of PersistentVolumes and PersistentVolumeClaims by the API server on creation: what it accepts is accepted here.
//! A source that this node cannot mount is refused by volume-manager, when a pod uses it (volumes.md §12).

use std::collections::BTreeMap;

use serde_json::Value;

use super::spec::{
    AccessMode, ClaimReference, ClaimSpec, CsiSource, LabelSelector, NodeSelector, Operator, ReclaimPolicy,
    Requirement, VolumeSpec,
};
use crate::quantity::Quantity;
use crate::validate::{FieldError, validate_plugin_source};
use crate::volume_source::persistent_volume_sources;

/// The values of `spec.hostPath.type`.
const HOST_PATH_TYPES: [&str; 8] =
    ["", "BlockDevice", "CharDevice", "Directory", "DirectoryOrCreate", "File", "FileOrCreate", "Socket"];

/// Receives a field and what is wrong with it.
pub type Fail<'a> = dyn FnMut(&str, String) + 'a;

/// Checks the spec of a PersistentVolume; `spec` is the same as JSON. The advice for a local volume without node affinity names
/// `node_name`, unless it is empty.
pub fn check_volume(volume: &VolumeSpec, spec: &Value, node_name: &str, fail: &mut Fail<'_>) {
    if volume.capacity.keys().any(|resource| resource != "storage") {
        fail("spec.capacity", "Unsupported value: supported values: \"storage\"".into());
    }
    check_storage(&volume.capacity, "spec.capacity", fail);
    check_access_modes(&volume.access_modes, fail);
    check_class(&volume.storage_class_name, fail);
    check_attributes_class(&volume.volume_attributes_class_name, fail);
    let required = volume.node_affinity.as_ref().map(|affinity| affinity.required.as_ref());
    match required {
        Some(Some(selector)) => check_node_selector(selector, fail),
        Some(None) => fail(
            "spec.nodeAffinity.required",
            "Required value: must specify required node constraints".into(),
        ),
        None if volume.local.is_some() => fail(
            "spec.nodeAffinity",
            format!("Required value: Local volume requires node affinity{}", affinity_advice(node_name)),
        ),
        None => {}
    }
    check_sources(volume, spec, fail);
}

/// The node affinity that a local volume of the node needs.
fn affinity_advice(node_name: &str) -> String {
    if node_name.is_empty() {
        return String::new();
    }
    format!(
        "; for this node: {{required: {{nodeSelectorTerms: [{{matchExpressions: [{{key: kubernetes.io/hostname, operator: In, \
         values: [{node_name}]}}]}}]}}}}"
    )
}

/// Checks the spec of a PersistentVolumeClaim.
pub fn check_claim(claim: &ClaimSpec, fail: &mut Fail<'_>) {
    check_access_modes(&claim.access_modes, fail);
    check_storage(&claim.resources.requests, "spec.resources.requests", fail);
    check_class(&claim.storage_class_name, fail);
    check_attributes_class(&claim.volume_attributes_class_name, fail);
    if let Some(selector) = &claim.selector {
        check_label_selector(selector, fail);
    }
}

const DNS_NAME: &str = "must be lower case letters, digits, '-' and '.', as in a DNS name";

fn check_storage(amounts: &BTreeMap<String, Quantity>, field: &str, fail: &mut Fail<'_>) {
    match amounts.get("storage") {
        None => fail(&format!("{field}.storage"), "Required value".into()),
        Some(amount) if *amount <= Quantity::ZERO => {
            let message = format!("Invalid value: \"{amount}\": must be greater than zero");
            fail(&format!("{field}.storage"), message);
        }
        Some(_) => {}
    }
}

fn check_access_modes(modes: &[AccessMode], fail: &mut Fail<'_>) {
    if modes.is_empty() {
        fail("spec.accessModes", "Required value: at least 1 access mode is required".into());
    }
    if modes.contains(&AccessMode::ReadWriteOncePod)
        && modes.iter().any(|mode| *mode != AccessMode::ReadWriteOncePod)
    {
        let message = "Forbidden: may not use ReadWriteOncePod with other access modes";
        fail("spec.accessModes", message.into());
    }
}

fn check_class(class: &str, fail: &mut Fail<'_>) {
    if !class.is_empty() && !is_dns_name(class) {
        fail("spec.storageClassName", format!("Invalid value: {class:?}: {DNS_NAME}"));
    }
}

fn check_attributes_class(class: &str, fail: &mut Fail<'_>) {
    if !class.is_empty() && !is_dns_name(class) {
        fail("spec.volumeAttributesClassName", format!("Invalid value: {class:?}: {DNS_NAME}"));
    }
}

fn check_sources(volume: &VolumeSpec, spec: &Value, fail: &mut Fail<'_>) {
    let mut given = persistent_volume_sources().filter_map(|source| Some((source, spec.get(source)?)));
    match given.next() {
        None => fail("spec", "Required value: must specify a volume type".into()),
        // These are the only ones with rules of their own here.
        Some(("local" | "hostPath" | "csi", _)) => {}
        Some((source, value)) => {
            for FieldError { field, message } in
                validate_plugin_source(&format!("spec.{source}"), source, value)
            {
                fail(&field, message);
            }
        }
    }
    for (source, _) in given {
        fail(&format!("spec.{source}"), "Forbidden: may not specify more than 1 volume type".into());
    }
    if let Some(local) = &volume.local {
        check_path("spec.local.path", &local.path, fail);
    }
    if let Some(host_path) = &volume.host_path {
        check_path("spec.hostPath.path", &host_path.path, fail);
        if !HOST_PATH_TYPES.contains(&host_path.kind.as_str()) {
            let message =
                format!("Unsupported value: {:?}: supported values: {HOST_PATH_TYPES:?}", host_path.kind);
            fail("spec.hostPath.type", message);
        }
        let is_root = host_path.path.trim_matches('/').is_empty() && !host_path.path.is_empty();
        if is_root && volume.persistent_volume_reclaim_policy == ReclaimPolicy::Recycle {
            let message = "Forbidden: may not be 'recycle' for a hostPath mount of '/'";
            fail("spec.persistentVolumeReclaimPolicy", message.into());
        }
    }
    if let Some(csi) = &volume.csi {
        check_csi(csi, fail);
    }
}

fn check_csi(csi: &CsiSource, fail: &mut Fail<'_>) {
    if csi.driver.is_empty() {
        fail("spec.csi.driver", "Required value".into());
    } else if csi.driver.len() > 63 || !is_dns_name(&csi.driver.to_lowercase()) {
        let message = format!(
            "Invalid value: {:?}: must be at most 63 letters, digits, '-' and '.', as in a DNS name",
            csi.driver
        );
        fail("spec.csi.driver", message);
    }
    if csi.volume_handle.is_empty() {
        fail("spec.csi.volumeHandle", "Required value".into());
    }
}

/// Checks a path of the node. A relative one is valid, and is never mounted; [`volume_warnings`] says so.
fn check_path(field: &str, path: &str, fail: &mut Fail<'_>) {
    if path.is_empty() {
        fail(field, "Required value".into());
    } else if path.split('/').any(|part| part == "..") {
        fail(field, format!("Invalid value: {path:?}: must not contain '..'"));
    }
}

/// What is valid in a PersistentVolume and has no effect.
pub fn volume_warnings(volume: &VolumeSpec) -> Vec<String> {
    let mut warnings = Vec::new();
    let paths = [
        ("local", volume.local.as_ref().map(|source| &source.path)),
        ("hostPath", volume.host_path.as_ref().map(|source| &source.path)),
    ];
    for (source, path) in paths {
        if let Some(path) = path.filter(|path| !path.starts_with('/')) {
            warnings
                .push(format!("spec.{source}.path {path:?} is not absolute, so the volume is never mounted"));
        }
    }
    let is_incomplete = |of: &ClaimReference| of.namespace.is_empty() || of.name.is_empty();
    if volume.claim_ref.as_ref().is_some_and(is_incomplete) {
        warnings.push(
            "spec.claimRef needs the namespace and the name of the claim; until then no claim gets the PersistentVolume"
                .to_owned(),
        );
    }
    warnings.extend(policy_warning(volume.persistent_volume_reclaim_policy));
    warnings
}

/// The warning about a reclaim policy that this node does not carry out.
fn policy_warning(policy: ReclaimPolicy) -> Option<String> {
    let what = match policy {
        ReclaimPolicy::Retain => return None,
        ReclaimPolicy::Delete => "Delete",
        ReclaimPolicy::Recycle => "Recycle",
    };
    Some(format!(
        "persistentVolumeReclaimPolicy {what} has the effect of Retain: without a control plane nobody deletes the data of a \
         released PersistentVolume"
    ))
}

fn check_label_selector(selector: &LabelSelector, fail: &mut Fail<'_>) {
    for (key, value) in &selector.match_labels {
        let field = format!("spec.selector.matchLabels[{key}]");
        check_label_key(&field, key, fail);
        check_label_value(&field, value, fail);
    }
    for (index, requirement) in selector.match_expressions.iter().enumerate() {
        let field = format!("spec.selector.matchExpressions[{index}]");
        check_label_key(&format!("{field}.key"), &requirement.key, fail);
        if matches!(requirement.operator, Operator::Gt | Operator::Lt) {
            let message = "Unsupported value: supported values: In, NotIn, Exists, DoesNotExist";
            fail(&format!("{field}.operator"), message.into());
            continue;
        }
        check_values(&field, requirement, fail);
    }
}

fn check_node_selector(selector: &NodeSelector, fail: &mut Fail<'_>) {
    let base = "spec.nodeAffinity.required.nodeSelectorTerms";
    if selector.node_selector_terms.is_empty() {
        fail(base, "Required value: must have at least one node selector term".into());
    }
    for (index, term) in selector.node_selector_terms.iter().enumerate() {
        for (at, requirement) in term.match_expressions.iter().enumerate() {
            let field = format!("{base}[{index}].matchExpressions[{at}]");
            check_label_key(&format!("{field}.key"), &requirement.key, fail);
            check_values(&field, requirement, fail);
        }
        for (at, requirement) in term.match_fields.iter().enumerate() {
            let field = format!("{base}[{index}].matchFields[{at}]");
            if requirement.key != "metadata.name" {
                let message = format!("Invalid value: {:?}: not a valid field selector key", requirement.key);
                fail(&format!("{field}.key"), message);
            }
            if !matches!(requirement.operator, Operator::In | Operator::NotIn)
                || requirement.values.len() != 1
            {
                let message = "Invalid value: must be In or NotIn with exactly one value";
                fail(&format!("{field}.operator"), message.into());
            }
        }
    }
}

/// Checks that the operator has the values that it needs.
fn check_values(field: &str, requirement: &Requirement, fail: &mut Fail<'_>) {
    let Requirement { operator, values, .. } = requirement;
    let message = match operator {
        Operator::In | Operator::NotIn if values.is_empty() => {
            "Required value: must be specified when `operator` is 'In' or 'NotIn'"
        }
        Operator::Exists | Operator::DoesNotExist if !values.is_empty() => {
            "Forbidden: may not be specified when `operator` is 'Exists' or 'DoesNotExist'"
        }
        Operator::Gt | Operator::Lt if values.len() != 1 => {
            "Required value: must be specified single value when `operator` is 'Lt' or 'Gt'"
        }
        _ => "",
    };
    if !message.is_empty() {
        fail(&format!("{field}.values"), message.into());
    }
    for (index, value) in values.iter().enumerate() {
        check_label_value(&format!("{field}.values[{index}]"), value, fail);
    }
}

/// Checks the labels of an object.
pub fn check_labels(labels: &BTreeMap<String, String>, fail: &mut Fail<'_>) {
    for (key, value) in labels {
        let field = format!("metadata.labels[{key}]");
        check_label_key(&field, key, fail);
        check_label_value(&field, value, fail);
    }
}

fn check_label_key(field: &str, key: &str, fail: &mut Fail<'_>) {
    let (prefix, name) = key.split_once('/').map_or((None, key), |(prefix, name)| (Some(prefix), name));
    if name.is_empty() || !is_label_text(name) || prefix.is_some_and(|prefix| !is_dns_name(prefix)) {
        fail(field, format!("Invalid value: {key:?}: cannot be the key of a label"));
    }
}

fn check_label_value(field: &str, value: &str, fail: &mut Fail<'_>) {
    if !is_label_text(value) {
        fail(field, format!("Invalid value: {value:?}: cannot be the value of a label"));
    }
}

fn is_label_text(text: &str) -> bool {
    let ends = |byte: Option<&u8>| byte.is_none_or(u8::is_ascii_alphanumeric);
    let bytes = text.as_bytes();
    bytes.len() <= 63
        && ends(bytes.first())
        && ends(bytes.last())
        && bytes.iter().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(b))
}

/// Whether it is lower case letters, digits, '-' and '.', as in a DNS name.
pub fn is_dns_name(text: &str) -> bool {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    text.len() <= 253
        && text.split('.').all(|label| {
            let bytes = label.as_bytes();
            !bytes.is_empty()
                && inner(bytes[0])
                && inner(bytes[bytes.len() - 1])
                && bytes.iter().all(|b| inner(*b) || *b == b'-')
        })
}
