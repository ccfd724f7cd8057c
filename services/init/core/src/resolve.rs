//! The resolved configuration, made of flags, files and facts about the host.
//!
//! This module lists the groups of settings, in the order in which they resolve. What a setting does is in its group.

use keelson_config::{Config, ConfigExtras, FeatureGate, KUBELET_API_VERSION, KUBELET_KIND};
use serde_json::{Map, Value};

use crate::defaults::requests_nothing;
use crate::document::{ConfigError, Document, Sourced};
use crate::effective::effective;
use crate::field_checks::{check_gates, check_types};
use crate::flags::flag_for_field;
use crate::gates;
use crate::groups::{
    api::Api, certificates::Certificates, cgroups::Cgroups, container_logs::ContainerLogs,
    control_plane::ControlPlane, dns::Dns, eviction::Eviction, host::Machine, images::Images,
    managers::Managers, node_status::NodeStatus, other_flags::OtherFlags, paths::Folders, pods::Pods,
    processes::Processes, reserved::Reserved, runtime::Runtime, shutdown::Shutdown, sources::Sources,
    system_bus::SystemBus, telemetry::Telemetry, users::Users, volumes::Volumes,
};
use crate::inputs::Inputs;
use crate::keelson_file::{self, KEELSON_API_VERSION, KEELSON_KIND};
use crate::origins::origins;
use crate::outcome::{Level, Note, Outcome};
use crate::reader::Reader;
use crate::settings::{Files, Group, ReadSettings};
use crate::strict;

/// All groups. A group may depend on the configuration that those before it have resolved.
const GROUPS: [Group; 23] = [
    Group::of::<OtherFlags>(),
    Group::of::<NodeStatus>(),
    Group::of::<Folders>(),
    Group::of::<Users>(),
    Group::of::<Sources>(),
    Group::of::<ControlPlane>(),
    Group::of::<Certificates>(),
    Group::of::<Processes>(),
    Group::of::<Cgroups>(),
    Group::of::<Runtime>(),
    Group::of::<Images>(),
    Group::of::<ContainerLogs>(),
    Group::of::<Volumes>(),
    Group::of::<Pods>(),
    Group::of::<Dns>(),
    Group::of::<Api>(),
    Group::of::<Reserved>(),
    Group::of::<Eviction>(),
    Group::of::<Managers>(),
    Group::of::<Shutdown>(),
    Group::of::<SystemBus>(),
    Group::of::<Telemetry>(),
    Group::of::<Machine>(),
];

/// A resolved configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct Resolved {
    /// The part that the services read.
    pub config: Config,
    /// The messages to log.
    pub notes: Vec<Note>,
    /// The whole KubeletConfiguration in force, without secrets.
    pub kubelet_configuration: Map<String, Value>,
    /// Every feature gate.
    pub feature_gates: Vec<FeatureGate>,
}

impl Resolved {
    /// What is stored in `config.json` in addition to the configuration of the services.
    pub fn config_extras(&self) -> ConfigExtras<'_> {
        ConfigExtras {
            kubelet_configuration: Some(&self.kubelet_configuration),
            feature_gates: &self.feature_gates,
            waiting: None,
        }
    }
}

/// Merges flags, the KubeletConfiguration, the keelson file and the defaults, in this order of precedence.
///
/// # Errors
/// All errors, each with field, value, origin and remedy.
pub fn resolve(inputs: Inputs<'_>) -> Result<Resolved, Vec<ConfigError>> {
    resolve_with(inputs, None)
}

/// Resolves with a KubeletConfiguration of the control plane, `assigned`, over the files and below the flags.
pub(crate) fn resolve_with(
    inputs: Inputs<'_>,
    assigned: Option<&Document>,
) -> Result<Resolved, Vec<ConfigError>> {
    let Inputs { flags, keelson, host, .. } = inputs;
    let with_file = inputs.kubelet.or(assigned).is_some();
    let mut errors = Vec::new();
    let mut is_kubelet_config =
        |document: &Document| document.is_kind(KUBELET_API_VERSION, KUBELET_KIND, &mut errors);
    // A file of another kind is ignored, so that the errors of the other files are reported too.
    let kubelet = inputs.kubelet.filter(|document| is_kubelet_config(document));
    let drop_ins: Vec<Document> =
        inputs.drop_ins.iter().filter(|document| is_kubelet_config(document)).cloned().collect();
    let merged = Inputs { kubelet, drop_ins: &drop_ins, ..inputs }.merged_kubelet_config(assigned);
    let kubelet = merged.as_ref();

    let mut out = Outcome::new(flags, host, with_file);
    out.errors = errors;
    let read = ReadFiles::read(kubelet, keelson, &mut out);
    let (gates, wrong, notes) = gates::evaluate(&read.gates);
    out.errors.extend(wrong);
    out.notes.extend(notes);
    if let Some(document) = kubelet {
        check_rules(document, &gates, &mut out.errors);
    }
    for group in read.groups {
        group.resolve(&mut out);
    }
    gates::apply(&gates, &mut out.config);
    report_notes(&mut out, kubelet);
    add_flags_to_origins(&mut out.errors, keelson);
    if !out.errors.is_empty() {
        return Err(out.errors);
    }
    let kubelet_configuration = effective(kubelet, with_file, &out.config);
    let origins = origins(kubelet, &kubelet_configuration, &out.config);
    out.config.provenance.extend(origins);
    Ok(Resolved { config: out.config, notes: out.notes, kubelet_configuration, feature_gates: gates.all() })
}

/// What the groups have read from the files.
struct ReadFiles {
    groups: Vec<ReadSettings>,
    gates: gates::Given,
}

impl ReadFiles {
    /// Reads both files, and records their errors and the fields without effect.
    fn read(kubelet: Option<&Document>, keelson: Option<&Document>, out: &mut Outcome<'_>) -> Self {
        let (mut kubelet_errors, mut keelson_errors) = (Vec::new(), Vec::new());
        let keelson = keelson
            .filter(|document| document.is_kind(KEELSON_API_VERSION, KEELSON_KIND, &mut keelson_errors));
        let none = Document::default();
        let mut files = Files {
            kubelet: Reader::new(kubelet.unwrap_or(&none), &mut kubelet_errors),
            has_kubelet: kubelet.is_some(),
            keelson: Reader::new(keelson.unwrap_or(&none), &mut keelson_errors),
        };
        for reader in [&mut files.kubelet, &mut files.keelson] {
            let _ = (reader.string("apiVersion"), reader.string("kind"));
        }
        let gates = files.kubelet.booleans(gates::FIELD);
        let groups = GROUPS.iter().map(|group| (group.read)(&mut files)).collect();
        if let Some(document) = kubelet {
            out.without_effect = fields_without_effect(document, &files.kubelet);
        }
        let unread = keelson.map(|document| keelson_file::check_unread(document, &files.keelson));
        out.errors.extend(kubelet_errors);
        out.errors.extend(keelson_errors);
        out.errors.extend(unread.into_iter().flatten());
        Self { groups, gates }
    }
}

/// The fields that are set, that the kubelet knows, and that no group has read.
fn fields_without_effect(document: &Document, reader: &Reader<'_>) -> Vec<String> {
    let unknown = strict::unknown(document);
    let is_unknown = |field: &str| unknown.iter().any(|unknown| unknown.field == field);
    let is_requested =
        |field: &String| reader.peek(field).is_some_and(|value| !requests_nothing(field, value));
    reader.unread_fields().into_iter().filter(|field| is_requested(field) && !is_unknown(field)).collect()
}

/// Checks the rules of the table of fields and those of the groups; `gates` are those in force.
fn check_rules(document: &Document, gates: &gates::FeatureGates, errors: &mut Vec<ConfigError>) {
    let mut reader = Reader::new(document, errors);
    check_types(&mut reader);
    for group in &GROUPS {
        (group.check)(&mut reader);
    }
    check_gates(&mut reader, gates);
}

/// Adds the notes about fields without effect, fields that only strict decoding refuses, and a missing file.
fn report_notes(out: &mut Outcome<'_>, kubelet: Option<&Document>) {
    if !out.without_effect.is_empty() {
        let list = out.without_effect.join(", ");
        out.note_without_effect(format!(
            "these fields of the KubeletConfiguration have no effect yet: {list}"
        ));
    }
    if let Some(document) = kubelet {
        for text in strict::unknown(document).iter().map(Sourced::warning) {
            out.note(Level::Warn, text);
        }
        for text in document.duplicates.iter().map(strict::duplicate_warning) {
            out.note(Level::Warn, text);
        }
    }
    if !out.with_file {
        out.note(Level::Info, "without --config no resources are reserved and no eviction threshold is set");
    }
}

/// Adds to each error of a KubeletConfiguration field the flag for that field (node-and-api.md §2.7).
fn add_flags_to_origins(errors: &mut [ConfigError], keelson: Option<&Document>) {
    for error in errors {
        let is_ours = keelson.is_some_and(|keelson| error.origin.starts_with(&keelson.file));
        if let Some(twin) =
            flag_for_field(&error.field).filter(|_| !is_ours && !error.origin.starts_with("--"))
        {
            error.origin = format!("{}; --{twin}", error.origin);
        }
    }
}

#[cfg(test)]
mod tests;
