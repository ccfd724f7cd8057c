//! Reads the objects in a manifest (pod-lifecycle.md §1).
//!
//! Parity: the kubelet takes one Pod per file; here a file may also contain a `PodList`, a `List`, several documents separated by
//! `---`, and Secrets, ConfigMaps, PersistentVolumes and PersistentVolumeClaims.

use std::borrow::Cow;

use keelson_config::MANIFEST_LIMIT;
use keelson_kube_model::PodFullName;
use keelson_yaml::bounds::{Budget, Size};
use keelson_yaml::manifest::{self as yaml, ConvertedKey, YamlDocument, YamlError};
use serde_json::Value;

use crate::error::{ManifestError, ManifestErrorKind};

/// A larger object is refused: an API server would not store it, and it does not fit into a gRPC message.
pub(crate) const MAX_OBJECT_BYTES: usize = 3 * 1024 * 1024;

/// The supported kinds of objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// A pod to run.
    Pod,
    /// A Secret that pods of this node may use.
    Secret,
    /// A ConfigMap that pods of this node may use.
    ConfigMap,
    /// A volume that a claim of this node may be bound to. It has no namespace.
    PersistentVolume,
    /// A claim to a volume, which pods of this node may use.
    PersistentVolumeClaim,
}

impl Kind {
    /// The value of the field `kind`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pod => "Pod",
            Self::Secret => "Secret",
            Self::ConfigMap => "ConfigMap",
            Self::PersistentVolume => "PersistentVolume",
            Self::PersistentVolumeClaim => "PersistentVolumeClaim",
        }
    }

    /// Parses the value of the field `kind`.
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Pod, Self::Secret, Self::ConfigMap, Self::PersistentVolume, Self::PersistentVolumeClaim]
            .into_iter()
            .find(|kind| kind.as_str() == text)
    }

    /// Whether objects of this kind have a namespace.
    pub fn is_namespaced(self) -> bool {
        match self {
            Self::Pod | Self::Secret | Self::ConfigMap | Self::PersistentVolumeClaim => true,
            Self::PersistentVolume => false,
        }
    }

    /// Whether it is a PersistentVolume or a claim.
    pub fn is_volume_object(self) -> bool {
        match self {
            Self::Pod | Self::Secret | Self::ConfigMap => false,
            Self::PersistentVolume | Self::PersistentVolumeClaim => true,
        }
    }
}

/// One object of a manifest, as it was written.
#[derive(Debug, Clone, PartialEq)]
pub struct Document {
    /// Document in the file, 1-based.
    pub number: u32,
    /// Path of the object in its document: empty, or `items[2]` in a list.
    pub path: String,
    /// Line where the document begins, 1-based.
    pub line: u32,
    /// Column where the document begins, 1-based.
    pub column: u32,
    /// Its kind.
    pub kind: Kind,
    /// The object.
    pub value: Value,
    /// Keys of the document that are not text; in a list they belong to the first object.
    pub(crate) converted: Vec<ConvertedKey>,
}

/// Where an object is, for the errors in it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct DocumentPlace {
    /// Document in the file, 1-based.
    pub(crate) number: u32,
    /// Line where the document begins, 1-based.
    pub(crate) line: u32,
    /// Column where the document begins, 1-based.
    column: u32,
    /// Path of the object in its document: empty, or `items[2]` in a list.
    path: String,
    /// The pod, if the object is one and has a name.
    pod: Option<PodFullName>,
}

impl Document {
    /// The place of this object.
    pub(crate) fn place(&self) -> DocumentPlace {
        let text = |name| self.value.pointer(name).and_then(Value::as_str).unwrap_or_default();
        let name = text("/metadata/name");
        let pod = (self.kind == Kind::Pod && !name.is_empty()).then(|| {
            let namespace = text("/metadata/namespace");
            PodFullName::new(name, if namespace.is_empty() { "default" } else { namespace })
        });
        let Self { number, line, column, path, .. } = self;
        DocumentPlace { number: *number, line: *line, column: *column, path: path.clone(), pod }
    }
}

impl DocumentPlace {
    /// An error in this object; `field` is relative to the object.
    pub(crate) fn error(
        &self,
        kind: ManifestErrorKind,
        field: &str,
        message: impl Into<String>,
    ) -> ManifestError {
        let joined = match (self.path.as_str(), field) {
            ("", field) => field.to_owned(),
            (path, "") => path.to_owned(),
            (path, field) => format!("{path}.{field}"),
        };
        ManifestError {
            kind,
            line: self.line,
            column: self.column,
            document: self.number,
            field: joined,
            message: message.into(),
            pod: self.pod.clone(),
        }
    }

    /// Checks the size of an object that was encoded as `json`.
    ///
    /// # Errors
    /// It is too large.
    pub(crate) fn check_size(&self, json: &[u8]) -> Result<(), Vec<ManifestError>> {
        if json.len() <= MAX_OBJECT_BYTES {
            return Ok(());
        }
        let message = format!("the object is longer than {} MiB", MAX_OBJECT_BYTES >> 20);
        Err(vec![self.error(ManifestErrorKind::Invalid, "", message)])
    }
}

/// Reads all objects of a manifest, in order. The first error rejects the whole manifest.
pub fn read_manifest(bytes: &[u8]) -> Result<Vec<Document>, ManifestError> {
    let (found, _) = read(bytes)?;
    if found.is_empty() { Err(empty_manifest()) } else { Ok(found) }
}

/// The same for the response of a URL, where an empty list means that there are no pods.
pub(crate) fn read_http_body(bytes: &[u8]) -> Result<Vec<Document>, ManifestError> {
    let (found, is_list) = read(bytes)?;
    if found.is_empty() && !is_list { Err(empty_manifest()) } else { Ok(found) }
}

fn empty_manifest() -> ManifestError {
    ManifestError::file(ManifestErrorKind::Syntax, "the manifest contains no object")
}

/// The objects, and whether any document was a list.
fn read(bytes: &[u8]) -> Result<(Vec<Document>, bool), ManifestError> {
    if bytes.len() >= MANIFEST_LIMIT {
        return Err(ManifestError::file(
            ManifestErrorKind::Syntax,
            format!(
                "the manifest reaches the limit of {} MiB; a manifest contains a few pods",
                MANIFEST_LIMIT >> 20
            ),
        ));
    }
    let text = decode_text(bytes)?;
    let (mut found, mut is_list) = (Vec::new(), false);
    for (index, document) in parse(&text)?.into_iter().enumerate() {
        let YamlDocument { value, line, column, converted } = document;
        if value.is_null() {
            continue;
        }
        let number = u32::try_from(index + 1).unwrap_or(u32::MAX);
        let position = Position { number, line, column };
        let first = found.len();
        is_list |= collect_objects(value, position, &mut found)
            .map_err(|error| with_positions(&text, vec![error]).remove(0))?;
        if let Some(first) = found.get_mut(first) {
            first.converted = converted;
        }
    }
    Ok((found, is_list))
}

/// Adds the positions of the fields in the text to the errors, as far as the fields exist.
pub(crate) fn with_positions(text: &str, mut errors: Vec<ManifestError>) -> Vec<ManifestError> {
    let index = |error: &ManifestError| (error.document as usize).checked_sub(1).unwrap_or(usize::MAX);
    let fields: Vec<_> = errors.iter().map(|error| (index(error), error.field.as_str())).collect();
    let positions = yaml::locate(text, &fields);
    for (error, position) in errors.iter_mut().zip(positions) {
        if let Some((line, column)) = position {
            (error.line, error.column) = (line, column);
        }
    }
    errors
}

/// The text of a manifest, without a byte order mark: UTF-8, or UTF-16 with a mark, as PowerShell writes it.
pub(crate) fn decode_text(bytes: &[u8]) -> Result<Cow<'_, str>, ManifestError> {
    match bytes {
        [0xff, 0xfe, 0, 0, ..] | [0, 0, 0xfe, 0xff, ..] => {
            let message = "this is UTF-32 text; save it as UTF-8";
            return Err(ManifestError::file(ManifestErrorKind::Syntax, message));
        }
        [0xff, 0xfe, rest @ ..] => return utf16(rest, u16::from_le_bytes).map(Cow::Owned),
        [0xfe, 0xff, rest @ ..] => return utf16(rest, u16::from_be_bytes).map(Cow::Owned),
        _ => {}
    }
    match std::str::from_utf8(bytes) {
        Ok(text) => Ok(Cow::Borrowed(text.strip_prefix('\u{feff}').unwrap_or(text))),
        Err(error) => {
            let valid = &bytes[..error.valid_up_to()];
            let line = valid.iter().filter(|b| **b == b'\n').count() + 1;
            let column = valid.len() - valid.iter().rposition(|b| *b == b'\n').map_or(0, |i| i + 1) + 1;
            let mut error = ManifestError::file(ManifestErrorKind::Syntax, "this is not UTF-8 text");
            (error.line, error.column) = (narrow(line), narrow(column));
            Err(error)
        }
    }
}

/// Decodes UTF-16 with the given byte order.
fn utf16(bytes: &[u8], unit: fn([u8; 2]) -> u16) -> Result<String, ManifestError> {
    let (pairs, rest) = bytes.as_chunks::<2>();
    let units = pairs.iter().map(|pair| unit(*pair));
    let mut text = String::with_capacity(pairs.len());
    for unit in char::decode_utf16(units) {
        match unit {
            Ok(c) => text.push(c),
            Err(_) => return Err(utf16_error(&text)),
        }
    }
    if rest.is_empty() { Ok(text) } else { Err(utf16_error(&text)) }
}

/// A decoding error after the text `valid`.
fn utf16_error(valid: &str) -> ManifestError {
    let line = valid.matches('\n').count() + 1;
    let column = valid.chars().rev().take_while(|c| *c != '\n').count() + 1;
    let mut error = ManifestError::file(ManifestErrorKind::Syntax, "this is not UTF-16 text");
    (error.line, error.column) = (narrow(line), narrow(column));
    error
}

fn narrow(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// Parses JSON if the text begins like JSON and is valid, else YAML.
fn parse(text: &str) -> Result<Vec<YamlDocument>, ManifestError> {
    let json_error = match json_documents(text) {
        None => None,
        Some(Ok(documents)) => return Ok(documents),
        Some(Err(error)) => Some(error),
    };
    yaml::documents(text).map_err(|error| json_error.unwrap_or_else(|| syntax(error)))
}

fn syntax(error: YamlError) -> ManifestError {
    ManifestError {
        line: error.line,
        column: error.column,
        document: error.document,
        ..ManifestError::file(ManifestErrorKind::Syntax, format!("not valid YAML: {}", error.message))
    }
}

/// Parses a stream of JSON objects; `None` if the text does not begin like JSON.
fn json_documents(text: &str) -> Option<Result<Vec<YamlDocument>, ManifestError>> {
    let inside = text.trim_start().strip_prefix('{')?;
    if !inside.trim_start().starts_with(['"', '}']) {
        return None;
    }
    let mut documents = Vec::new();
    let mut budget = Budget::default();
    let mut stream = serde_json::Deserializer::from_str(text).into_iter::<Value>();
    // The current line and its offset are tracked, so that a text of a million documents is scanned only once.
    let (mut scanned, mut line, mut begin) = (0, 1, 0);
    loop {
        let from = text.len() - text[stream.byte_offset()..].trim_start().len();
        let (line, column, message) = match stream.next() {
            None => return Some(Ok(documents)),
            Some(Ok(value)) => {
                let between = &text[scanned..from];
                line += between.matches('\n').count();
                begin = between.rfind('\n').map_or(begin, |at| scanned + at + 1);
                scanned = from;
                let column = from - begin + 1;
                match budget.take(Size::of(&value), 0) {
                    Ok(()) => {
                        let (line, column) = (narrow(line), narrow(column));
                        documents.push(YamlDocument { value, line, column, converted: Vec::new() });
                        continue;
                    }
                    Err(message) => (line, column, message),
                }
            }
            Some(Err(error)) => {
                let message = format!("not valid JSON: {}", message_without_position(&error));
                (error.line(), error.column(), message)
            }
        };
        let document = narrow(documents.len() + 1);
        let error = ManifestError::file(ManifestErrorKind::Syntax, message);
        return Some(Err(ManifestError { line: narrow(line), column: narrow(column), document, ..error }));
    }
}

/// The message of the JSON parser without its own line and column.
fn message_without_position(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.split(" at line ").next().unwrap_or(&text).to_owned()
}

#[derive(Clone, Copy)]
struct Position {
    number: u32,
    line: u32,
    column: u32,
}

/// Adds the objects of a document to `found`; returns whether the document is a list.
fn collect_objects(
    value: Value,
    position: Position,
    found: &mut Vec<Document>,
) -> Result<bool, ManifestError> {
    let (group, kind) = (string_field(&value, "apiVersion"), string_field(&value, "kind"));
    match (group.as_str(), kind.as_str()) {
        ("v1", "PodList" | "List") => {
            let implied = (kind == "PodList").then_some(Kind::Pod);
            let items = match value {
                Value::Object(mut map) => map.shift_remove("items"),
                _ => None,
            };
            let items = match items {
                Some(Value::Array(items)) => items,
                // Go writes an empty list as null.
                Some(Value::Null) => Vec::new(),
                _ => return Err(wrong_kind(position, "items", format!("the {kind} has no list of items"))),
            };
            for (index, item) in items.into_iter().enumerate() {
                let path = format!("items[{index}]");
                let kind = kind_of(&item, position, &path, implied)?;
                found.push(document(item, position, path, kind));
            }
            Ok(true)
        }
        _ => {
            let kind = kind_of(&value, position, "", None)?;
            found.push(document(value, position, String::new(), kind));
            Ok(false)
        }
    }
}

fn document(value: Value, position: Position, path: String, kind: Kind) -> Document {
    let Position { number, line, column } = position;
    Document { number, path, line, column, kind, value, converted: Vec::new() }
}

fn string_field(value: &Value, field: &str) -> String {
    value.get(field).and_then(Value::as_str).unwrap_or_default().to_owned()
}

fn kind_of(
    value: &Value,
    position: Position,
    path: &str,
    implied: Option<Kind>,
) -> Result<Kind, ManifestError> {
    if !value.is_object() {
        return Err(wrong_kind(
            position,
            path,
            "not an object; a manifest is a Pod with apiVersion, kind, metadata and spec",
        ));
    }
    let (group, kind) = (string_field(value, "apiVersion"), string_field(value, "kind"));
    if let (Some(implied), "", "") = (implied, group.as_str(), kind.as_str()) {
        return Ok(implied);
    }
    for (field, text) in [("apiVersion", &group), ("kind", &kind)] {
        if text.is_empty() {
            let field = if path.is_empty() { field.to_owned() } else { format!("{path}.{field}") };
            return Err(wrong_kind(position, &field, "Required value"));
        }
    }
    match (group.as_str(), Kind::parse(&kind)) {
        ("v1", Some(kind)) => Ok(kind),
        _ => Err(wrong_kind(
            position,
            path,
            format!(
                "cannot run kind {kind} of {group}; a manifest holds Pods, PodLists, Lists, Secrets, ConfigMaps, \
                 PersistentVolumes and PersistentVolumeClaims of v1"
            ),
        )),
    }
}

fn wrong_kind(position: Position, field: &str, message: impl Into<String>) -> ManifestError {
    ManifestError {
        line: position.line,
        column: position.column,
        document: position.number,
        field: field.to_owned(),
        ..ManifestError::file(ManifestErrorKind::WrongKind, message)
    }
}
