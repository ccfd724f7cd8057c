//! Replaces fields of a JSON object and leaves the bytes of all others as they are, so that nothing below them is decoded.

use std::collections::HashMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

/// The fields of a JSON object in their order: name and JSON of each. If a name occurs twice, its last value counts.
#[derive(Debug)]
pub struct JsonFields<'a>(Vec<(String, &'a [u8])>);

impl<'a> JsonFields<'a> {
    /// Reads the fields of one object, not what is in them.
    ///
    /// # Errors
    /// `json` is no JSON object.
    pub fn parse(json: &'a [u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(json)
    }

    /// The JSON of a field.
    pub fn get(&self, name: &str) -> Option<&'a [u8]> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, json)| *json)
    }

    /// Replaces a field in its place, or adds it at the end.
    pub fn set(&mut self, name: &str, json: &'a [u8]) {
        match self.0.iter_mut().find(|(known, _)| known == name) {
            Some((_, value)) => *value = json,
            None => self.0.push((name.to_owned(), json)),
        }
    }

    /// The object.
    ///
    /// # Errors
    /// A name could not be serialised. This does not happen, because names are strings.
    pub fn to_json(&self) -> Result<Vec<u8>, serde_json::Error> {
        let length: usize = self.0.iter().map(|(name, json)| name.len() + json.len() + 4).sum();
        let mut object = Vec::with_capacity(length + 2);
        object.push(b'{');
        for (i, (name, json)) in self.0.iter().enumerate() {
            if i > 0 {
                object.push(b',');
            }
            serde_json::to_writer(&mut object, name)?;
            object.push(b':');
            object.extend_from_slice(json);
        }
        object.push(b'}');
        Ok(object)
    }
}

impl<'de> Deserialize<'de> for JsonFields<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(FieldsVisitor)
    }
}

struct FieldsVisitor;

impl<'de> Visitor<'de> for FieldsVisitor {
    type Value = JsonFields<'de>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<JsonFields<'de>, A::Error> {
        let mut fields: Vec<(String, &'de [u8])> = Vec::new();
        let mut places: HashMap<String, usize> = HashMap::new();
        while let Some((name, json)) = map.next_entry::<String, &'de RawValue>()? {
            let json = json.get().as_bytes();
            match places.get(&name).and_then(|place| fields.get_mut(*place)) {
                Some((_, value)) => *value = json,
                None => {
                    places.insert(name.clone(), fields.len());
                    fields.push((name, json));
                }
            }
        }
        Ok(JsonFields(fields))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_json_field_is_replaced_in_its_place_or_added_and_others_are_kept_verbatim() {
        let json = br#"{"a": {"x" : [1, 2.50]}, "na\"me": "\u0041", "b": 1, "b": null}"#;
        let mut fields = JsonFields::parse(json).unwrap();
        assert_eq!(fields.get("b"), Some(&b"null"[..]));
        fields.set("b", b"2");
        fields.set("c", b"[]");
        let text = String::from_utf8(fields.to_json().unwrap()).unwrap();
        assert_eq!(text, r#"{"a":{"x" : [1, 2.50]},"na\"me":"\u0041","b":2,"c":[]}"#);
        assert_eq!(JsonFields::parse(b" {} ").unwrap().to_json().unwrap(), b"{}");
        for wrong in ["[]", "{\"a\":}", "{\"a\":1} x", ""] {
            assert!(JsonFields::parse(wrong.as_bytes()).is_err(), "{wrong}");
        }
    }
}
