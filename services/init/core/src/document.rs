//! A configuration file as init reads it: fields by dotted path, each with the line it stands in.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::RangeInclusive;
use std::time::Duration;

use keelson_kube_model::parse_go_duration;
use serde_json::{Map, Value};

/// A long time: what most duration fields may be at most.
pub(crate) const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);
/// What the ages and periods of what containers leave behind may be at most.
pub(crate) const CENTURY: Duration = YEAR.saturating_mul(100);

/// A configuration file after its syntax was read.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Document {
    /// How messages name it.
    pub file: String,
    /// The folder that its relative paths start from.
    pub folder: String,
    /// Its fields.
    pub root: Map<String, Value>,
    /// Line of each field, by dotted path.
    pub lines: BTreeMap<String, u32>,
    /// Where the fields come from that are not of this file, by dotted path: `file:line` or `--flag`, and nothing for a default.
    /// It holds for all that is below one of them as well.
    pub elsewhere: BTreeMap<String, String>,
    /// The fields that stand in the file more than once; the last one counts.
    pub duplicates: Vec<Sourced<()>>,
}

/// A value with where it came from, as the provenance shows it.
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
    /// Whether the command line says it, and no file.
    pub(crate) fn is_of_flag(&self) -> bool {
        self.origin.starts_with("--")
    }

    /// The same origin with another value.
    pub fn map<U>(self, f: impl FnOnce(T) -> U) -> Sourced<U> {
        Sourced { value: f(self.value), origin: self.origin, field: self.field }
    }
}

impl<T: fmt::Debug> Sourced<T> {
    /// A problem with this value; `way_out` says what is wrong and what to write instead.
    pub fn problem(&self, way_out: impl Into<String>) -> ConfigProblem {
        ConfigProblem {
            field: self.field.clone(),
            value: format!("{:?}", self.value),
            origin: self.origin.clone(),
            way_out: way_out.into(),
            undecodable: false,
        }
    }
}

/// One thing that is wrong with the configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid configuration: {field} = {value} ({origin}): {way_out}")]
pub struct ConfigProblem {
    /// The field or flag.
    pub field: String,
    /// What it is set to.
    pub value: String,
    /// The file and line, or the command line.
    pub origin: String,
    /// What is wrong and what to do about it.
    pub way_out: String,
    /// Whether no kubelet could read the file with it, whatever it means.
    pub undecodable: bool,
}

impl Document {
    /// `file:line` or `--flag` of a field.
    pub fn origin(&self, path: &str) -> String {
        let ends = path.match_indices(['.', '[']).map(|(at, _)| at).chain([path.len()]);
        let from_elsewhere = ends.rev().find_map(|end| self.elsewhere.get(&path[..end]));
        match (from_elsewhere, self.lines.get(path)) {
            (Some(origin), _) => origin.clone(),
            (None, Some(line)) => format!("{}:{line}", self.file),
            (None, None) => self.file.clone(),
        }
    }

    /// Lays the fields of `over` on those of this one: maps are merged, all else is replaced, `null` removes (RFC 7386,
    /// as node-and-api.md §2.4 has it).
    pub(crate) fn lay(&mut self, over: &Self) {
        merge(&mut self.root, &over.root);
        for path in over.lines.keys() {
            self.elsewhere.insert(path.clone(), over.origin(path));
        }
        self.duplicates.extend(over.duplicates.iter().cloned());
    }

    /// Sets the field at a dotted path, whatever was there; of a map that `merges`, the keys of `value`.
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
                    self.elsewhere.insert(format!("{path}.{key}"), origin.to_owned());
                }
                return;
            }
            _ => drop(map.insert(name.to_owned(), value.clone())),
        }
        let is_below =
            |other: &str| other.strip_prefix(path).is_some_and(|rest| rest.starts_with(['.', '[']));
        self.elsewhere.retain(|other, _| !is_below(other));
        self.elsewhere.insert(path.to_owned(), origin.to_owned());
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

/// Takes typed fields out of a document and collects what is wrong with them.
#[derive(Debug)]
pub(crate) struct Reader<'a> {
    document: &'a Document,
    problems: &'a mut Vec<ConfigProblem>,
    taken: BTreeSet<String>,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(document: &'a Document, problems: &'a mut Vec<ConfigProblem>) -> Self {
        Self { document, problems, taken: BTreeSet::new() }
    }

    /// The value at a dotted path; `null` counts as absent, as in Kubernetes.
    pub(crate) fn get(&mut self, path: &str) -> Option<&'a Value> {
        self.taken.insert(path.to_owned());
        self.look(path)
    }

    /// Whether there is a value at a dotted path; it does not count as taken.
    pub(crate) fn is_set(&self, path: &str) -> bool {
        self.look(path).is_some()
    }

    /// The value at a dotted path; it does not count as taken.
    pub(crate) fn look(&self, path: &str) -> Option<&'a Value> {
        let (parent, name) = path.rsplit_once('.').unwrap_or(("", path));
        let mut map = &self.document.root;
        for segment in parent.split('.').filter(|s| !s.is_empty()) {
            map = map.get(segment)?.as_object()?;
        }
        map.get(name).filter(|value| !value.is_null())
    }

    fn sourced<T>(&self, path: &str, value: T) -> Sourced<T> {
        Sourced { value, origin: self.document.origin(path), field: path.to_owned() }
    }

    /// Where a field stands.
    pub(crate) fn origin(&self, path: &str) -> String {
        self.document.origin(path)
    }

    /// Where a field of a value in a list stands: its own line where the file has one, else that of the list.
    pub(crate) fn origin_in(&self, list: &str, path: &str) -> String {
        let is_known = self.document.lines.contains_key(path) || self.document.elsewhere.contains_key(path);
        self.document.origin(if is_known { path } else { list })
    }

    /// Reports one value of a list.
    pub(crate) fn wrong_at(&mut self, one: &Sourced<&Value>, way_out: String) {
        self.problems.push(ConfigProblem {
            field: one.field.clone(),
            value: one.value.to_string(),
            origin: one.origin.clone(),
            way_out,
            undecodable: false,
        });
    }

    /// Reports one value of a list that is of another type than it should be.
    pub(crate) fn mistyped_at(&mut self, one: &Sourced<&Value>, way_out: String) {
        self.wrong_at(one, way_out);
        if let Some(problem) = self.problems.last_mut() {
            problem.undecodable = true;
        }
    }

    /// Reports the value of a field.
    pub(crate) fn wrong(&mut self, path: &str, value: &Value, way_out: String) {
        self.problems.push(ConfigProblem {
            field: path.to_owned(),
            value: value.to_string(),
            origin: self.document.origin(path),
            way_out,
            undecodable: false,
        });
    }

    /// Reports a value of another type than the field's.
    pub(crate) fn mistyped(&mut self, path: &str, value: &Value, way_out: &str) {
        self.wrong(path, value, way_out.to_owned());
        if let Some(problem) = self.problems.last_mut() {
            problem.undecodable = true;
        }
    }

    /// Reports a value that was read but does not do.
    pub(crate) fn refuse<T: fmt::Debug>(&mut self, value: &Sourced<T>, way_out: impl Into<String>) {
        self.problems.push(value.problem(way_out));
    }

    pub(crate) fn string(&mut self, path: &str) -> Option<Sourced<String>> {
        let value = self.get(path)?;
        if let Some(text) = value.as_str() {
            return Some(self.sourced(path, text.to_owned()));
        }
        self.mistyped(path, value, "this must be text; put it in quotes");
        None
    }

    /// Text that must be one of `choices`.
    pub(crate) fn choice(&mut self, path: &str, choices: &[&str]) -> Option<Sourced<String>> {
        let text = self.string(path)?;
        if choices.contains(&text.value.as_str()) {
            return Some(text);
        }
        self.refuse(&text, format!("this must be one of: {}", choices.join(", ")));
        None
    }

    /// The same, and empty text is the default.
    pub(crate) fn choice_or_default(&mut self, path: &str, choices: &[&str]) -> Option<Sourced<String>> {
        if self.get(path)?.as_str() == Some("") {
            return None;
        }
        self.choice(path, choices)
    }

    pub(crate) fn boolean(&mut self, path: &str) -> Option<Sourced<bool>> {
        let value = self.get(path)?;
        if let Some(truth) = value.as_bool() {
            return Some(self.sourced(path, truth));
        }
        self.mistyped(path, value, "this must be true or false");
        None
    }

    pub(crate) fn integer(&mut self, path: &str, range: RangeInclusive<i64>) -> Option<Sourced<i64>> {
        let value = self.get(path)?;
        if let Some(number) = value.as_i64().filter(|n| range.contains(n)) {
            return Some(self.sourced(path, number));
        }
        let way_out = format!("this must be a whole number from {} to {}", range.start(), range.end());
        if value.as_i64().is_some() {
            self.wrong(path, value, way_out);
        } else {
            self.mistyped(path, value, &way_out);
        }
        None
    }

    /// A whole number that fits 32 bits.
    pub(crate) fn u32(&mut self, path: &str, range: RangeInclusive<u32>) -> Option<Sourced<u32>> {
        let number = self.integer(path, i64::from(*range.start())..=i64::from(*range.end()))?;
        Some(number.map(|n| u32::try_from(n).unwrap_or(u32::MAX)))
    }

    /// A port; 0 turns its listener off.
    pub(crate) fn port(&mut self, path: &str) -> Option<Sourced<u16>> {
        let number = self.integer(path, 0..=65_535)?;
        Some(number.map(|n| u16::try_from(n).unwrap_or(u16::MAX)))
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
            // It is one all the same, and no fault of how the file is written.
            None if value.as_str().and_then(|text| parse_go_duration(text.strip_prefix('-')?)).is_some() => {}
            None => {
                let what = "this is no duration; write numbers with units, such as 20s or 1m30s";
                self.mistyped(path, value, what);
                return None;
            }
        }
        let way_out = format!("this must be from {:?} to {:?}", range.start(), range.end());
        self.wrong(path, value, way_out);
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
        self.mistyped(path, value, "this must be a list of texts");
        None
    }

    /// The values of a list, whatever they are.
    pub(crate) fn list(&mut self, path: &str) -> Option<&'a [Value]> {
        let value = self.get(path)?;
        if let Some(list) = value.as_array() {
            return Some(list);
        }
        self.mistyped(path, value, "this must be a list");
        None
    }

    /// A map of texts.
    pub(crate) fn map(&mut self, path: &str) -> Option<Sourced<BTreeMap<String, String>>> {
        let value = self.get(path)?;
        let Some(object) = value.as_object() else {
            self.mistyped(path, value, "this must be a map");
            return None;
        };
        let mut map = BTreeMap::new();
        for (key, value) in object {
            match value.as_str() {
                Some(text) => {
                    map.insert(key.clone(), text.to_owned());
                }
                None => self.mistyped(&format!("{path}.{key}"), value, "put it in quotes"),
            }
        }
        Some(self.sourced(path, map))
    }

    /// The truths of a map, each with a field of its own below that of the map.
    pub(crate) fn booleans(&mut self, path: &str) -> Vec<Sourced<bool>> {
        let Some(value) = self.get(path) else { return Vec::new() };
        let Some(object) = value.as_object() else {
            self.mistyped(path, value, "this must be a map");
            return Vec::new();
        };
        let mut truths = Vec::new();
        for (key, value) in object.iter().filter(|(_, value)| !value.is_null()) {
            let field = format!("{path}.{key}");
            match value.as_bool() {
                Some(truth) => truths.push(self.sourced(&field, truth)),
                None => self.mistyped(&field, value, "this must be true or false"),
            }
        }
        truths
    }

    /// Checks that the parent of nested fields is a map.
    pub(crate) fn object(&mut self, path: &str) -> bool {
        match self.get(path) {
            None => false,
            Some(value) if value.is_object() => true,
            Some(value) => {
                self.mistyped(path, value, "this must be a map");
                false
            }
        }
    }

    /// The dotted paths of the fields that nobody has asked for, in the order of the file; of maps that were
    /// asked for, the fields inside.
    pub(crate) fn rest(&self) -> Vec<String> {
        let mut rest = Vec::new();
        for (name, value) in self.document.root.iter().filter(|(_, value)| !value.is_null()) {
            let prefix = format!("{name}.");
            let nested = self.taken.iter().any(|taken| taken.starts_with(&prefix));
            match value.as_object() {
                Some(object) if nested => {
                    let paths =
                        object.iter().filter(|(_, v)| !v.is_null()).map(|(key, _)| format!("{prefix}{key}"));
                    rest.extend(paths.filter(|path| !self.taken.contains(path)));
                }
                _ if self.taken.contains(name) => {}
                _ => rest.push(name.clone()),
            }
        }
        rest
    }
}
