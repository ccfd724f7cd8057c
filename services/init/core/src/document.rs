//! A parsed configuration file: fields by dotted path, each with its line.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::{Map, Value};

/// A configuration file after parsing.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Document {
    /// Its name in messages.
    pub file: String,
    /// The folder from which relative paths start.
    pub folder: String,
    /// Its fields.
    pub root: Map<String, Value>,
    /// The line of each field, by dotted path.
    pub lines: BTreeMap<String, u32>,
    /// The origins of fields from elsewhere, by dotted path: `file:line` or `--flag`, and empty for a default. An origin also
    /// applies to all fields below.
    pub other_origins: BTreeMap<String, String>,
    /// The fields that occur more than once in the file; the last one wins.
    pub duplicates: Vec<Sourced<()>>,
}

/// A value with its origin, as the provenance shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sourced<T> {
    /// The value.
    pub value: T,
    /// `--flag` or `file:line`.
    pub origin: String,
    /// The name of the flag or field.
    pub field: String,
}

impl<T> Sourced<T> {
    /// Another value with the same origin.
    pub fn map<U>(self, f: impl FnOnce(T) -> U) -> Sourced<U> {
        Sourced { value: f(self.value), origin: self.origin, field: self.field }
    }
}

impl<T> Sourced<BTreeMap<String, T>> {
    /// The value of a key of a map, as a field of its own.
    pub(crate) fn entry<'a>(&self, key: &str, value: &'a str) -> Sourced<&'a str> {
        Sourced { value, origin: self.origin.clone(), field: format!("{}.{key}", self.field) }
    }
}

impl<T: fmt::Debug> Sourced<T> {
    /// An error about this value; `remedy` says what is wrong and what to write instead.
    pub fn error(&self, remedy: impl Into<String>) -> ConfigError {
        ConfigError {
            field: self.field.clone(),
            value: format!("{:?}", self.value),
            origin: self.origin.clone(),
            remedy: remedy.into(),
            undecodable: false,
        }
    }
}

/// An error in the configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid configuration: {field} = {value} ({origin}): {remedy}")]
pub struct ConfigError {
    /// The field or flag.
    pub field: String,
    /// The value.
    pub value: String,
    /// The file and line, or the command line.
    pub origin: String,
    /// What is wrong, and what to do about it.
    pub remedy: String,
    /// Whether a kubelet could not decode the file because of this value.
    pub undecodable: bool,
}

impl Document {
    /// The `file:line` or `--flag` of a field.
    pub fn origin(&self, path: &str) -> String {
        let ends = path.match_indices(['.', '[']).map(|(at, _)| at).chain([path.len()]);
        let from_elsewhere = ends.rev().find_map(|end| self.other_origins.get(&path[..end]));
        match (from_elsewhere, self.lines.get(path)) {
            (Some(origin), _) => origin.clone(),
            (None, Some(line)) => format!("{}:{line}", self.file),
            (None, None) => self.file.clone(),
        }
    }

    /// Whether the document is of the expected kind; if not, reports it, and nothing else is read.
    pub(crate) fn is_kind(&self, version: &str, kind: &str, errors: &mut Vec<ConfigError>) -> bool {
        let mut good = true;
        for (field, expected) in [("apiVersion", version), ("kind", kind)] {
            let found = self.root.get(field);
            if found.and_then(|v| v.as_str()) != Some(expected) {
                good = false;
                errors.push(ConfigError {
                    field: field.to_owned(),
                    value: found.map_or_else(|| "nothing".to_owned(), ToString::to_string),
                    origin: self.origin(field),
                    remedy: format!("this must be {expected}; is this the right file?"),
                    undecodable: true,
                });
            }
        }
        good
    }

    /// Merges the fields of `over` into this document: maps are merged, other values replaced, and `null` removes a field
    /// (RFC 7386, as node-and-api.md §2.4 has it).
    pub(crate) fn merge_from(&mut self, over: &Self) {
        merge(&mut self.root, &over.root);
        for path in over.lines.keys() {
            self.other_origins.insert(path.clone(), over.origin(path));
        }
        self.duplicates.extend(over.duplicates.iter().cloned());
    }

    /// Sets the field at a dotted path. With `merges`, the keys of a map are added to an existing map; otherwise `value`
    /// replaces it.
    pub(crate) fn set(&mut self, path: &str, value: &Value, origin: &str, merges: bool) {
        let (parents, name) = path.rsplit_once('.').unwrap_or(("", path));
        let mut map = &mut self.root;
        for parent in parents.split('.').filter(|parent| !parent.is_empty()) {
            let below = map.entry(parent).or_insert(Value::Null);
            if !below.is_object() {
                *below = Map::new().into();
            }
            let Value::Object(below) = below else { return };
            map = below;
        }
        match (map.get_mut(name), value) {
            (Some(Value::Object(there)), Value::Object(keys)) if merges => {
                for (key, value) in keys {
                    there.insert(key.clone(), value.clone());
                    self.other_origins.insert(format!("{path}.{key}"), origin.to_owned());
                }
                return;
            }
            _ => drop(map.insert(name.to_owned(), value.clone())),
        }
        let is_below =
            |other: &str| other.strip_prefix(path).is_some_and(|rest| rest.starts_with(['.', '[']));
        self.other_origins.retain(|other, _| !is_below(other));
        self.other_origins.insert(path.to_owned(), origin.to_owned());
    }
}

pub(crate) fn merge(whole: &mut Map<String, Value>, over: &Map<String, Value>) {
    for (name, value) in over {
        match value {
            Value::Null => drop(whole.remove(name)),
            Value::Object(fields) => {
                let below = whole.entry(name.clone()).or_insert(Value::Null);
                if !below.is_object() {
                    *below = Map::new().into();
                }
                if let Value::Object(below) = below {
                    merge(below, fields);
                }
            }
            other => drop(whole.insert(name.clone(), other.clone())),
        }
    }
}
