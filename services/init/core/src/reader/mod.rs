//! Reads typed fields from a document, and collects the errors of those that are invalid.

mod table;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::RangeInclusive;
use std::time::Duration;

use keelson_kube_model::parse_go_duration;
use serde_json::Value;

use crate::document::{ConfigError, Document, Sourced};
use crate::durations::NOT_A_DURATION;
use crate::paths::absolute;

/// Reads typed fields from a document and collects their errors.
#[derive(Debug)]
pub(crate) struct Reader<'a> {
    document: &'a Document,
    errors: &'a mut Vec<ConfigError>,
    read_paths: BTreeSet<String>,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(document: &'a Document, errors: &'a mut Vec<ConfigError>) -> Self {
        Self { document, errors, read_paths: BTreeSet::new() }
    }

    /// The value at a dotted path; `null` counts as absent, as in Kubernetes.
    pub(crate) fn get(&mut self, path: &str) -> Option<&'a Value> {
        self.read_paths.insert(path.to_owned());
        self.peek(path)
    }

    /// Whether there is a value at a dotted path; does not mark it as read.
    pub(crate) fn is_set(&self, path: &str) -> bool {
        self.peek(path).is_some()
    }

    /// The value at a dotted path; does not mark it as read.
    pub(crate) fn peek(&self, path: &str) -> Option<&'a Value> {
        let (parent, name) = path.rsplit_once('.').unwrap_or(("", path));
        let mut map = &self.document.root;
        for segment in parent.split('.').filter(|s| !s.is_empty()) {
            map = map.get(segment)?.as_object()?;
        }
        map.get(name).filter(|value| !value.is_null())
    }

    pub(crate) fn sourced<T>(&self, path: &str, value: T) -> Sourced<T> {
        Sourced { value, origin: self.document.origin(path), field: path.to_owned() }
    }

    /// The origin of a field.
    pub(crate) fn origin(&self, path: &str) -> String {
        self.document.origin(path)
    }

    /// The origin of a field of a list entry: its own line if it has one, else that of the list.
    pub(crate) fn origin_in(&self, list: &str, path: &str) -> String {
        let is_known =
            self.document.lines.contains_key(path) || self.document.other_origins.contains_key(path);
        self.document.origin(if is_known { path } else { list })
    }

    /// Reports an invalid list entry.
    pub(crate) fn report_entry(&mut self, one: &Sourced<&Value>, remedy: String) {
        self.errors.push(ConfigError {
            field: one.field.clone(),
            value: one.value.to_string(),
            origin: one.origin.clone(),
            remedy,
            undecodable: false,
        });
    }

    /// Reports a list entry of the wrong type.
    pub(crate) fn report_mistyped_entry(&mut self, one: &Sourced<&Value>, remedy: String) {
        self.report_entry(one, remedy);
        if let Some(error) = self.errors.last_mut() {
            error.undecodable = true;
        }
    }

    /// An entry of a list, with its field name for messages.
    pub(crate) fn list_entry<'v>(&self, list: &str, index: usize, value: &'v Value) -> Sourced<&'v Value> {
        Sourced { value, origin: self.origin(list), field: format!("{list}[{index}]") }
    }

    /// Checks each entry of a list, without marking it as read; reports a field that is not a list.
    pub(crate) fn check_entries(&mut self, path: &str, check: impl Fn(&Value) -> Result<(), String>) {
        let Some(value) = self.peek(path) else { return };
        let Some(list) = value.as_array() else {
            self.report(path, value, "this must be a list".to_owned());
            return;
        };
        for (index, value) in list.iter().enumerate() {
            if let Err(remedy) = check(value) {
                let one = self.list_entry(path, index, value);
                self.report_entry(&one, remedy);
            }
        }
    }

    /// Reports a field whose value is wrong, without marking it as read.
    pub(crate) fn refuse_if(&mut self, path: &str, is_wrong: impl Fn(&Value) -> bool, remedy: &str) {
        if let Some(value) = self.peek(path).filter(|value| is_wrong(value)) {
            self.report(path, value, remedy.to_owned());
        }
    }

    /// Reports an invalid value of a field.
    pub(crate) fn report(&mut self, path: &str, value: &Value, remedy: String) {
        self.errors.push(ConfigError {
            field: path.to_owned(),
            value: value.to_string(),
            origin: self.document.origin(path),
            remedy,
            undecodable: false,
        });
    }

    /// Reports a value of the wrong type.
    pub(crate) fn report_mistyped(&mut self, path: &str, value: &Value, remedy: &str) {
        self.report(path, value, remedy.to_owned());
        if let Some(error) = self.errors.last_mut() {
            error.undecodable = true;
        }
    }

    /// Reports a value that was read but is not allowed.
    pub(crate) fn refuse<T: fmt::Debug>(&mut self, value: &Sourced<T>, remedy: impl Into<String>) {
        self.errors.push(value.error(remedy));
    }

    pub(crate) fn string(&mut self, path: &str) -> Option<Sourced<String>> {
        let value = self.get(path)?;
        if let Some(text) = value.as_str() {
            return Some(self.sourced(path, text.to_owned()));
        }
        self.report_mistyped(path, value, "this must be a string; put it in quotes");
        None
    }

    /// A string that must be one of `choices`.
    pub(crate) fn choice(&mut self, path: &str, choices: &[&str]) -> Option<Sourced<String>> {
        let text = self.string(path)?;
        if choices.contains(&text.value.as_str()) {
            return Some(text);
        }
        self.refuse(&text, format!("this must be one of: {}", choices.join(", ")));
        None
    }

    pub(crate) fn boolean(&mut self, path: &str) -> Option<Sourced<bool>> {
        let value = self.get(path)?;
        if let Some(boolean) = value.as_bool() {
            return Some(self.sourced(path, boolean));
        }
        self.report_mistyped(path, value, "this must be true or false");
        None
    }

    pub(crate) fn integer(&mut self, path: &str, range: RangeInclusive<i64>) -> Option<Sourced<i64>> {
        let value = self.get(path)?;
        if let Some(number) = value.as_i64().filter(|n| range.contains(n)) {
            return Some(self.sourced(path, number));
        }
        let remedy = format!("this must be a whole number from {} to {}", range.start(), range.end());
        if value.as_i64().is_some() {
            self.report(path, value, remedy);
        } else {
            self.report_mistyped(path, value, &remedy);
        }
        None
    }

    /// A whole number that fits 32 bits.
    pub(crate) fn u32(&mut self, path: &str, range: RangeInclusive<u32>) -> Option<Sourced<u32>> {
        let number = self.integer(path, i64::from(*range.start())..=i64::from(*range.end()))?;
        Some(number.map(|n| u32::try_from(n).unwrap_or(u32::MAX)))
    }

    pub(crate) fn duration(
        &mut self,
        path: &str,
        range: RangeInclusive<Duration>,
    ) -> Option<Sourced<Duration>> {
        let value = self.get(path)?;
        match value.as_str().and_then(parse_go_duration) {
            Some(duration) if range.contains(&duration) => return Some(self.sourced(path, duration)),
            Some(_) => {}
            // A negative duration is decodable but out of range.
            None if value.as_str().and_then(|text| parse_go_duration(text.strip_prefix('-')?)).is_some() => {}
            None => {
                self.report_mistyped(path, value, NOT_A_DURATION);
                return None;
            }
        }
        let remedy = format!("this must be from {:?} to {:?}", range.start(), range.end());
        self.report(path, value, remedy);
        None
    }

    pub(crate) fn strings(&mut self, path: &str) -> Option<Sourced<Vec<String>>> {
        let value = self.get(path)?;
        let texts = value.as_array().and_then(|list| {
            list.iter().map(|v| v.as_str().map(ToOwned::to_owned)).collect::<Option<Vec<_>>>()
        });
        if let Some(texts) = texts {
            return Some(self.sourced(path, texts));
        }
        self.report_mistyped(path, value, "this must be a list of strings");
        None
    }

    /// The entries of a list, of any type.
    pub(crate) fn list(&mut self, path: &str) -> Option<&'a [Value]> {
        let value = self.get(path)?;
        if let Some(list) = value.as_array() {
            return Some(list);
        }
        self.report_mistyped(path, value, "this must be a list");
        None
    }

    /// A map of strings.
    pub(crate) fn map(&mut self, path: &str) -> Option<Sourced<BTreeMap<String, String>>> {
        let value = self.get(path)?;
        let Some(object) = value.as_object() else {
            self.report_mistyped(path, value, "this must be a map");
            return None;
        };
        let mut map = BTreeMap::new();
        for (key, value) in object {
            match value.as_str() {
                Some(text) => {
                    map.insert(key.clone(), text.to_owned());
                }
                None => self.report_mistyped(&format!("{path}.{key}"), value, "put it in quotes"),
            }
        }
        Some(self.sourced(path, map))
    }

    /// The booleans of a map, each as a field of its own.
    pub(crate) fn booleans(&mut self, path: &str) -> Vec<Sourced<bool>> {
        let Some(value) = self.get(path) else { return Vec::new() };
        let Some(object) = value.as_object() else {
            self.report_mistyped(path, value, "this must be a map");
            return Vec::new();
        };
        let mut booleans = Vec::new();
        for (key, value) in object.iter().filter(|(_, value)| !value.is_null()) {
            let field = format!("{path}.{key}");
            match value.as_bool() {
                Some(boolean) => booleans.push(self.sourced(&field, boolean)),
                None => self.report_mistyped(&field, value, "this must be true or false"),
            }
        }
        booleans
    }

    /// Checks that the parent of nested fields is a map.
    pub(crate) fn object(&mut self, path: &str) -> bool {
        match self.get(path) {
            None => false,
            Some(value) if value.is_object() => true,
            Some(value) => {
                self.report_mistyped(path, value, "this must be a map");
                false
            }
        }
    }

    /// A path, made absolute with the folder of the document.
    pub(crate) fn path(&mut self, path: &str) -> Option<Sourced<String>> {
        let folder = &self.document.folder;
        self.string(path).map(|value| value.map(|value| absolute(folder, &value)))
    }

    /// The dotted paths of the fields that were not read, in the order of the file; for a map with fields that were read, its
    /// other fields.
    pub(crate) fn unread_fields(&self) -> Vec<String> {
        let mut unread_fields = Vec::new();
        for (name, value) in self.document.root.iter().filter(|(_, value)| !value.is_null()) {
            let prefix = format!("{name}.");
            let nested = self.read_paths.iter().any(|path| path.starts_with(&prefix));
            match value.as_object() {
                Some(object) if nested => {
                    let paths =
                        object.iter().filter(|(_, v)| !v.is_null()).map(|(key, _)| format!("{prefix}{key}"));
                    unread_fields.extend(paths.filter(|path| !self.read_paths.contains(path)));
                }
                _ if self.read_paths.contains(name) => {}
                _ => unread_fields.push(name.clone()),
            }
        }
        unread_fields
    }
}
