//! Reads fields of a JSON object for a check, and reports those of another type than the API has.

use serde_json::{Map, Value};

use super::Findings;

/// A JSON object at a field of the pod.
#[derive(Clone, Copy)]
pub(super) struct JsonFields<'a> {
    at: &'a str,
    fields: &'a Map<String, Value>,
}

impl<'a> JsonFields<'a> {
    /// The object `value` at the field `at`; `None`, with an error, if it is no object.
    pub(super) fn read(found: &mut Findings, at: &'a str, value: &'a Value) -> Option<Self> {
        if let Some(fields) = value.as_object() {
            return Some(Self { at, fields });
        }
        found.push(at, "Invalid value: must be an object".to_owned());
        None
    }

    /// The path of one of its fields.
    pub(super) fn path(&self, field: &str) -> String {
        format!("{}.{field}", self.at)
    }

    /// The names of its fields.
    pub(super) fn names(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        self.fields.iter().filter(|(_, value)| !value.is_null()).map(|(name, _)| name.as_str())
    }

    /// The value of a field; `None` if it is missing or null.
    pub(super) fn value(&self, field: &str) -> Option<&'a Value> {
        self.fields.get(field).filter(|value| !value.is_null())
    }

    /// The value of a field by `read`, which gives `None` for another type than the one described by `kind`.
    fn typed<T>(
        &self,
        found: &mut Findings,
        field: &str,
        kind: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Option<T> {
        let value = self.value(field)?;
        let read = read(value);
        if read.is_none() {
            found.push(self.path(field), format!("Invalid value: {value}: must be {kind}"));
        }
        read
    }

    pub(super) fn text(&self, found: &mut Findings, field: &str) -> Option<&'a str> {
        self.typed(found, field, "a string", Value::as_str)
    }

    pub(super) fn number(&self, found: &mut Findings, field: &str) -> Option<i64> {
        self.typed(found, field, "an integer", Value::as_i64)
    }

    pub(super) fn flag(&self, found: &mut Findings, field: &str) -> bool {
        self.typed(found, field, "true or false", Value::as_bool).unwrap_or(false)
    }

    /// A list; empty if it is missing.
    pub(super) fn list(&self, found: &mut Findings, field: &str) -> &'a [Value] {
        self.typed(found, field, "a list", Value::as_array).map_or(&[], Vec::as_slice)
    }

    /// A text that must not be empty; `None` if it is.
    pub(super) fn required_text(&self, found: &mut Findings, field: &str) -> Option<&'a str> {
        if self.value(field).is_none() {
            found.required(self.path(field), "");
            return None;
        }
        let text = self.text(found, field)?;
        if text.is_empty() {
            found.required(self.path(field), "");
            return None;
        }
        Some(text)
    }

    /// Each of these is a text that must not be empty.
    pub(super) fn required_texts(&self, found: &mut Findings, fields: &[&str]) {
        for field in fields {
            self.required_text(found, field);
        }
    }

    /// A list that must not be empty.
    pub(super) fn required_list(&self, found: &mut Findings, field: &str) {
        if self.value(field).is_none() || self.value(field).is_some_and(|list| *list == Value::Array(vec![]))
        {
            found.required(self.path(field), "");
        } else {
            self.list(found, field);
        }
    }

    /// A number from 0 to 255.
    pub(super) fn byte(&self, found: &mut Findings, field: &str) {
        if let Some(number) = self.number(found, field)
            && !(0..=255).contains(&number)
        {
            found.invalid(self.path(field), number, "must be between 0 and 255, inclusive");
        }
    }

    /// One of these values, if it is set.
    pub(super) fn one_of(&self, found: &mut Findings, field: &str, supported: &[&str]) {
        if let Some(text) = self.text(found, field)
            && !supported.contains(&text)
        {
            found.unsupported(self.path(field), text, supported);
        }
    }

    /// A reference to a Secret, which has a name; returns whether it is set.
    pub(super) fn secret(&self, found: &mut Findings, field: &str) -> bool {
        let Some(value) = self.value(field) else { return false };
        let at = self.path(field);
        if let Some(secret) = JsonFields::read(found, &at, value) {
            secret.required_text(found, "name");
        }
        true
    }
}
