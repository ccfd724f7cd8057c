//! From the bytes of a manifest to the objects in it.
//!
//! Parity: the kubelet takes one Pod per file; here a file may also hold a `PodList`, a `List`, several documents
//! separated by `---`, and Secrets and ConfigMaps beside the pods.

use std::borrow::Cow;
use std::sync::Arc;

use keelson_kube_model::PodFullName;
use serde_json::Value;

use crate::bounds::{Budget, Size};
use crate::error::{ManifestError, Why};
use crate::yaml::{self, ConvertedKey, YamlDocument, YamlError};

/// A manifest of this many bytes, or more, is refused.
pub const MAX_BYTES: usize = 10 * 1024 * 1024;

/// One object of more bytes is refused: an API server would not store it, and no stream carries it.
pub(crate) const MAX_OBJECT_BYTES: usize = 3 * 1024 * 1024;

/// What a document describes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// A pod to run.
    Pod,
    /// A Secret that pods of this node may use.
    Secret,
    /// A ConfigMap that pods of this node may use.
    ConfigMap,
}

impl Kind {
    /// The word in `kind`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pod => "Pod",
            Self::Secret => "Secret",
            Self::ConfigMap => "ConfigMap",
        }
    }

    /// Reads the word in `kind`.
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Pod, Self::Secret, Self::ConfigMap].into_iter().find(|kind| kind.as_str() == text)
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
    /// What it is.
    pub kind: Kind,
    /// The object.
    pub value: Value,
    /// Keys of the document that are no text; in a list with its first object.
    pub(crate) converted: Vec<ConvertedKey>,
}

impl Document {
    /// An error in this object; `field` counts from the object.
    pub(crate) fn error(&self, why: Why, field: &str, message: impl Into<String>) -> ManifestError {
        let joined = match (self.path.as_str(), field) {
            ("", field) => field.to_owned(),
            (path, "") => path.to_owned(),
            (path, field) => format!("{path}.{field}"),
        };
        let text = |name| self.value.pointer(name).and_then(Value::as_str).unwrap_or_default();
        let name = text("/metadata/name");
        let pod = (self.kind == Kind::Pod && !name.is_empty()).then(|| {
            let namespace = text("/metadata/namespace");
            PodFullName::new(name, if namespace.is_empty() { "default" } else { namespace })
        });
        ManifestError {
            why,
            line: self.line,
            column: self.column,
            document: self.number,
            field: joined,
            message: message.into(),
            pod,
        }
    }
}

/// The JSON of an object that is short enough.
pub(crate) fn encoded(document: &Document, value: &Value) -> Result<Arc<[u8]>, Vec<ManifestError>> {
    let json = value.to_string().into_bytes();
    if json.len() > MAX_OBJECT_BYTES {
        let message = format!("the object is longer than {} MiB", MAX_OBJECT_BYTES >> 20);
        return Err(vec![document.error(Why::Invalid, "", message)]);
    }
    Ok(json.into())
}

/// All objects of a manifest, in their order. The first thing that is wrong refuses the whole manifest.
pub fn read_manifest(bytes: &[u8]) -> Result<Vec<Document>, ManifestError> {
    let (found, _) = read(bytes)?;
    if found.is_empty() { Err(nothing()) } else { Ok(found) }
}

/// The same of what stands at a URL, where a list without items says that there is nothing.
pub(crate) fn read_answer(bytes: &[u8]) -> Result<Vec<Document>, ManifestError> {
    let (found, is_list) = read(bytes)?;
    if found.is_empty() && !is_list { Err(nothing()) } else { Ok(found) }
}

fn nothing() -> ManifestError {
    ManifestError::file(Why::Syntax, "there is no object in the manifest")
}

/// The objects, and whether any of them may have stood in a list.
fn read(bytes: &[u8]) -> Result<(Vec<Document>, bool), ManifestError> {
    if bytes.len() >= MAX_BYTES {
        return Err(ManifestError::file(
            Why::Syntax,
            format!("the manifest reaches the limit of {} MiB; a manifest holds a few pods", MAX_BYTES >> 20),
        ));
    }
    let text = text_of(bytes)?;
    let (mut found, mut is_list) = (Vec::new(), false);
    for (index, document) in parse(&text)?.into_iter().enumerate() {
        let YamlDocument { value, line, column, converted } = document;
        if value.is_null() {
            continue;
        }
        let number = u32::try_from(index + 1).unwrap_or(u32::MAX);
        let place = Place { number, line, column };
        let first = found.len();
        is_list |=
            objects_of(value, place, &mut found).map_err(|error| located(&text, vec![error]).remove(0))?;
        if let Some(first) = found.get_mut(first) {
            first.converted = converted;
        }
    }
    Ok((found, is_list))
}

/// The errors with the places of their fields in the text, as far as the fields are there.
pub(crate) fn located(text: &str, mut errors: Vec<ManifestError>) -> Vec<ManifestError> {
    let index = |error: &ManifestError| (error.document as usize).checked_sub(1).unwrap_or(usize::MAX);
    let fields: Vec<_> = errors.iter().map(|error| (index(error), error.field.as_str())).collect();
    let places = yaml::locate(text, &fields);
    for (error, place) in errors.iter_mut().zip(places) {
        if let Some((line, column)) = place {
            (error.line, error.column) = (line, column);
        }
    }
    errors
}

/// The text of a manifest, without a byte order mark: UTF-8, or UTF-16 with a mark, as PowerShell writes it.
pub(crate) fn text_of(bytes: &[u8]) -> Result<Cow<'_, str>, ManifestError> {
    match bytes {
        [0xff, 0xfe, 0, 0, ..] | [0, 0, 0xfe, 0xff, ..] => {
            let message = "this is UTF-32 text; save it as UTF-8";
            return Err(ManifestError::file(Why::Syntax, message));
        }
        [0xff, 0xfe, rest @ ..] => return utf16(rest, u16::from_le_bytes).map(Cow::Owned),
        [0xfe, 0xff, rest @ ..] => return utf16(rest, u16::from_be_bytes).map(Cow::Owned),
        _ => {}
    }
    match std::str::from_utf8(bytes) {
        Ok(text) => Ok(Cow::Borrowed(text.strip_prefix('\u{feff}').unwrap_or(text))),
        Err(error) => {
            let good = &bytes[..error.valid_up_to()];
            let line = good.iter().filter(|b| **b == b'\n').count() + 1;
            let column = good.len() - good.iter().rposition(|b| *b == b'\n').map_or(0, |i| i + 1) + 1;
            let mut error = ManifestError::file(Why::Syntax, "this is not UTF-8 text");
            (error.line, error.column) = (narrow(line), narrow(column));
            Err(error)
        }
    }
}

/// Text of two bytes for each unit.
fn utf16(bytes: &[u8], unit: fn([u8; 2]) -> u16) -> Result<String, ManifestError> {
    let (pairs, rest) = bytes.as_chunks::<2>();
    let units = pairs.iter().map(|pair| unit(*pair));
    let mut text = String::with_capacity(pairs.len());
    for unit in char::decode_utf16(units) {
        match unit {
            Ok(c) => text.push(c),
            Err(_) => return Err(not_utf16(&text)),
        }
    }
    if rest.is_empty() { Ok(text) } else { Err(not_utf16(&text)) }
}

/// An error behind the text that is good.
fn not_utf16(good: &str) -> ManifestError {
    let line = good.matches('\n').count() + 1;
    let column = good.chars().rev().take_while(|c| *c != '\n').count() + 1;
    let mut error = ManifestError::file(Why::Syntax, "this is not UTF-16 text");
    (error.line, error.column) = (narrow(line), narrow(column));
    error
}

fn narrow(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// JSON when it begins like JSON and reads as such, else YAML.
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
        ..ManifestError::file(Why::Syntax, format!("not valid YAML: {}", error.message))
    }
}

/// One JSON object after another; `None` when the text does not begin like JSON.
fn json_documents(text: &str) -> Option<Result<Vec<YamlDocument>, ManifestError>> {
    let inside = text.trim_start().strip_prefix('{')?;
    if !inside.trim_start().starts_with(['"', '}']) {
        return None;
    }
    let mut documents = Vec::new();
    let mut budget = Budget::default();
    let mut stream = serde_json::Deserializer::from_str(text).into_iter::<Value>();
    // The line that is reached, and where it begins: a text of a million documents is walked through once.
    let (mut seen, mut line, mut begin) = (0, 1, 0);
    loop {
        let from = text.len() - text[stream.byte_offset()..].trim_start().len();
        let (line, column, message) = match stream.next() {
            None => return Some(Ok(documents)),
            Some(Ok(value)) => {
                let between = &text[seen..from];
                line += between.matches('\n').count();
                begin = between.rfind('\n').map_or(begin, |at| seen + at + 1);
                seen = from;
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
                let message = format!("not valid JSON: {}", without_place(&error));
                (error.line(), error.column(), message)
            }
        };
        let document = narrow(documents.len() + 1);
        let error = ManifestError::file(Why::Syntax, message);
        return Some(Err(ManifestError { line: narrow(line), column: narrow(column), document, ..error }));
    }
}

/// The message of the JSON reader without its own line and column.
fn without_place(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.split(" at line ").next().unwrap_or(&text).to_owned()
}

#[derive(Clone, Copy)]
struct Place {
    number: u32,
    line: u32,
    column: u32,
}

/// Adds what stands in a document to `found`; whether the document is a list.
fn objects_of(value: Value, place: Place, found: &mut Vec<Document>) -> Result<bool, ManifestError> {
    let (group, kind) = (word(&value, "apiVersion"), word(&value, "kind"));
    match (group.as_str(), kind.as_str()) {
        ("v1", "PodList" | "List") => {
            let implied = (kind == "PodList").then_some(Kind::Pod);
            let items = match value {
                Value::Object(mut map) => map.shift_remove("items"),
                _ => None,
            };
            let items = match items {
                Some(Value::Array(items)) => items,
                // So is an empty list written in Go.
                Some(Value::Null) => Vec::new(),
                _ => return Err(refuse(place, "items", format!("the {kind} has no list of items"))),
            };
            for (index, item) in items.into_iter().enumerate() {
                let path = format!("items[{index}]");
                let kind = kind_of(&item, place, &path, implied)?;
                found.push(document(item, place, path, kind));
            }
            Ok(true)
        }
        _ => {
            let kind = kind_of(&value, place, "", None)?;
            found.push(document(value, place, String::new(), kind));
            Ok(false)
        }
    }
}

fn document(value: Value, place: Place, path: String, kind: Kind) -> Document {
    let Place { number, line, column } = place;
    Document { number, path, line, column, kind, value, converted: Vec::new() }
}

fn word(value: &Value, field: &str) -> String {
    value.get(field).and_then(Value::as_str).unwrap_or_default().to_owned()
}

fn kind_of(value: &Value, place: Place, path: &str, implied: Option<Kind>) -> Result<Kind, ManifestError> {
    if !value.is_object() {
        return Err(refuse(
            place,
            path,
            "this is no object; a manifest is a Pod with apiVersion, kind, metadata and spec",
        ));
    }
    let (group, kind) = (word(value, "apiVersion"), word(value, "kind"));
    if let (Some(implied), "", "") = (implied, group.as_str(), kind.as_str()) {
        return Ok(implied);
    }
    for (field, text) in [("apiVersion", &group), ("kind", &kind)] {
        if text.is_empty() {
            let field = if path.is_empty() { field.to_owned() } else { format!("{path}.{field}") };
            return Err(refuse(place, &field, "Required value"));
        }
    }
    match (group.as_str(), Kind::parse(&kind)) {
        ("v1", Some(kind)) => Ok(kind),
        _ => Err(refuse(
            place,
            path,
            format!(
                "cannot run kind {kind} of {group}; a manifest holds Pods, PodLists, Lists, Secrets and ConfigMaps of v1"
            ),
        )),
    }
}

fn refuse(place: Place, field: &str, message: impl Into<String>) -> ManifestError {
    ManifestError {
        line: place.line,
        column: place.column,
        document: place.number,
        field: field.to_owned(),
        ..ManifestError::file(Why::WrongKind, message)
    }
}
