//! Sources of volumes that plugins provide, which are kept as JSON: only volume-manager reads them.
//!
//! Of the sources that Kubernetes has removed, only the fields that an API server requires are checked: they are accepted, and
//! volume-manager refuses them (volumes.md §12).

use serde_json::Value;

use super::json_fields::JsonFields;
use super::{Findings, names};

/// Checks the source with the wire name `kind` at the field `at`. An unknown source has no rules: it is refused as a reference
/// of a static pod, and by volume-manager.
pub(super) fn check_source(found: &mut Findings, at: &str, kind: &str, source: &Value) {
    let Some(fields) = JsonFields::read(found, at, source) else { return };
    match kind {
        "awsElasticBlockStore" => {
            fields.required_text(found, "volumeID");
            fields.byte(found, "partition");
        }
        "azureDisk" => azure_disk(found, &fields),
        "azureFile" => fields.required_texts(found, &["secretName", "shareName"]),
        "cephfs" => fields.required_list(found, "monitors"),
        "cinder" => {
            fields.required_text(found, "volumeID");
            fields.secret(found, "secretRef");
        }
        "csi" => csi(found, &fields),
        "fc" => fibre_channel(found, &fields),
        "flexVolume" => flex(found, &fields),
        "flocker" => flocker(found, &fields),
        "gcePersistentDisk" => {
            fields.required_text(found, "pdName");
            fields.byte(found, "partition");
        }
        "gitRepo" => git_repo(found, &fields),
        "glusterfs" => fields.required_texts(found, &["endpoints", "path"]),
        "iscsi" => iscsi(found, &fields),
        "nfs" => nfs(found, &fields),
        "photonPersistentDisk" => fields.required_texts(found, &["pdID"]),
        "portworxVolume" => fields.required_texts(found, &["volumeID"]),
        "quobyte" => fields.required_texts(found, &["registry", "volume"]),
        "rbd" => {
            fields.required_list(found, "monitors");
            fields.required_text(found, "image");
        }
        "scaleIO" => fields.required_texts(found, &["gateway", "system", "volumeName"]),
        "storageos" => {
            fields.required_text(found, "volumeName");
            fields.secret(found, "secretRef");
        }
        "vsphereVolume" => fields.required_texts(found, &["volumePath"]),
        _ => {}
    }
}

fn nfs(found: &mut Findings, fields: &JsonFields<'_>) {
    fields.required_text(found, "server");
    if let Some(path) = fields.required_text(found, "path")
        && !path.starts_with('/')
    {
        found.invalid(fields.path("path"), path, "must be an absolute path");
    }
    fields.flag(found, "readOnly");
}

fn csi(found: &mut Findings, fields: &JsonFields<'_>) {
    if let Some(driver) = fields.required_text(found, "driver") {
        found.name(fields.path("driver"), driver, names::driver_name);
    }
    fields.text(found, "fsType");
    fields.flag(found, "readOnly");
    fields.secret(found, "nodePublishSecretRef");
    texts_by_key(found, fields, "volumeAttributes");
}

/// The keys of a map of texts.
fn texts_by_key(found: &mut Findings, fields: &JsonFields<'_>, field: &str) -> Vec<String> {
    let Some(value) = fields.value(field) else { return Vec::new() };
    let at = fields.path(field);
    let Some(texts) = JsonFields::read(found, &at, value) else { return Vec::new() };
    let keys: Vec<String> = texts.names().map(str::to_owned).collect();
    for key in &keys {
        texts.text(found, key);
    }
    keys
}

fn iscsi(found: &mut Findings, fields: &JsonFields<'_>) {
    fields.required_text(found, "targetPortal");
    if let Some(iqn) = fields.required_text(found, "iqn") {
        found.name(fields.path("iqn"), iqn, iscsi_name);
    }
    fields.byte(found, "lun");
    fields.flag(found, "readOnly");
    let discovery = fields.flag(found, "chapAuthDiscovery");
    let session = fields.flag(found, "chapAuthSession");
    if !fields.secret(found, "secretRef") && (discovery || session) {
        found.required(fields.path("secretRef"), "");
    }
    if let Some(name) = fields.text(found, "initiatorName") {
        found.name(fields.path("initiatorName"), name, iscsi_name);
    }
}

/// The name of an iSCSI node (RFC 7143 §4.2.7): a qualified name with its date, or 16 or 32 digits after `eui.` or `naa.`.
fn iscsi_name(text: &str) -> Option<&'static str> {
    let alnum = |part: &str, length: usize| {
        part.len() == length && part.bytes().all(|byte| byte.is_ascii_alphanumeric())
    };
    let is_valid = match text.get(..4) {
        Some("iqn.") => is_qualified_iscsi_name(&text[4..]),
        Some("eui.") => alnum(&text[4..], 16),
        Some("naa.") => alnum(&text[4..], 32),
        _ => return Some("must be valid format starting with iqn, eui, or naa"),
    };
    (!is_valid).then_some("must be valid format")
}

/// `<yyyy>-<mm>.<reversed domain>:<anything>`.
fn is_qualified_iscsi_name(text: &str) -> bool {
    let Some((authority, unique)) = text.split_once(':') else { return false };
    let Some((date, domain)) = authority.split_once('.') else { return false };
    let digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    let has_date = date
        .split_once('-')
        .is_some_and(|(year, month)| year.len() == 4 && month.len() == 2 && digits(year) && digits(month));
    let has_domain = !domain.is_empty()
        && domain.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.');
    let has_unique =
        !unique.is_empty() && !unique.contains(|c: char| ",;*&$|".contains(c) || c.is_whitespace());
    has_date && has_domain && has_unique
}

fn fibre_channel(found: &mut Findings, fields: &JsonFields<'_>) {
    let targets = !fields.list(found, "targetWWNs").is_empty();
    let disks = !fields.list(found, "wwids").is_empty();
    let at = fields.path("targetWWNs");
    match (targets, disks) {
        (false, false) => found.required(at, "must specify either targetWWNs or wwids, but not both"),
        (true, true) => found
            .push(at, "Invalid value: targetWWNs and wwids can not be specified simultaneously".to_owned()),
        (true, false) if fields.value("lun").is_none() => {
            found.required(fields.path("lun"), "lun is required if targetWWNs is specified");
        }
        (true, false) => fields.byte(found, "lun"),
        (false, true) => {}
    }
    fields.flag(found, "readOnly");
}

fn flex(found: &mut Findings, fields: &JsonFields<'_>) {
    fields.required_text(found, "driver");
    for key in texts_by_key(found, fields, "options") {
        let namespace = key.split_once('/').map_or(key.as_str(), |(namespace, _)| namespace);
        let namespace = format!(".{}", namespace.to_ascii_lowercase());
        if [".kubernetes.io", ".k8s.io"].iter().any(|reserved| namespace.ends_with(reserved)) {
            let at = format!("{}[{key}]", fields.path("options"));
            found.invalid(at, key, "kubernetes.io and k8s.io namespaces are reserved");
        }
    }
}

/// A managed disk has the path of its resource, any other the address of a blob. The API's default for `kind` is `Shared`.
fn azure_disk(found: &mut Findings, fields: &JsonFields<'_>) {
    fields.required_text(found, "diskName");
    fields.one_of(found, "cachingMode", &["None", "ReadOnly", "ReadWrite"]);
    const KINDS: [&str; 3] = ["Dedicated", "Managed", "Shared"];
    fields.one_of(found, "kind", &KINDS);
    let kind = fields.value("kind").and_then(Value::as_str).unwrap_or("Shared");
    let Some(uri) = fields.required_text(found, "diskURI").filter(|_| KINDS.contains(&kind)) else { return };
    let (prefix, form) = if kind == "Managed" {
        const MANAGED: &str =
            "/subscriptions/{sub-id}/resourcegroups/{group-name}/providers/microsoft.compute/disks/{disk-id}";
        ("/subscriptions/", MANAGED)
    } else {
        ("https://", "https://{account-name}.blob.core.windows.net/{container-name}/{disk-name}.vhd")
    };
    if !uri.starts_with(prefix) {
        found.unsupported(fields.path("diskURI"), uri, &[form]);
    }
}

fn flocker(found: &mut Findings, fields: &JsonFields<'_>) {
    let text = |found: &mut Findings, field| fields.text(found, field).filter(|text| !text.is_empty());
    match (text(found, "datasetName"), text(found, "datasetUUID")) {
        (None, None) => {
            found.required(fields.path("datasetName"), "one of datasetName and datasetUUID is required");
        }
        (Some(name), Some(_)) => {
            let detail = "datasetName and datasetUUID can not be specified simultaneously";
            found.invalid(fields.path("datasetName"), name, detail);
        }
        (Some(name), None) if name.contains('/') => {
            found.invalid(fields.path("datasetName"), name, "must not contain '/'");
        }
        _ => {}
    }
}

fn git_repo(found: &mut Findings, fields: &JsonFields<'_>) {
    fields.required_text(found, "repository");
    if let Some(directory) = fields.text(found, "directory") {
        found.name(fields.path("directory"), directory, names::projected_path);
    }
}
