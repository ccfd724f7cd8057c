//! Configuration files: YAML (JSON is YAML) with the line of each field. Booleans follow YAML 1.1 (`yes`), and a
//! leading zero does not make a number octal.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};
use serde_saphyr::Spanned;
use serde_saphyr::options::DuplicateKeyPolicy;

/// The fields of a configuration file. A field is named by its path: `logging.format`, `list[2].name`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Fields {
    /// All fields. The last occurrence of a duplicate one wins.
    pub root: Map<String, Value>,
    /// The line of each field, 1-based.
    pub lines: BTreeMap<String, u32>,
    /// Fields that occur again in the same map, each with its line.
    pub duplicates: Vec<(String, u32)>,
}

/// Reads the fields of a configuration file.
///
/// # Errors
/// The text is not YAML or JSON, has more than one document, or is not a map; with line and column.
pub fn fields(text: &str) -> Result<Fields, String> {
    let mut keys = KeyLocations::default();
    let seed = Seed { path: String::new(), keys: &mut keys };
    let options = serde_saphyr::options! { duplicate_keys: DuplicateKeyPolicy::LastWins };
    let value = serde_saphyr::with_deserializer_from_str_with_options(text, options, |deserializer| {
        seed.deserialize(deserializer)
    })
    .map_err(|error| error.without_snippet().to_string())?;
    let Value::Object(root) = value else {
        return Err("it is not a map of fields".to_owned());
    };
    let KeyLocations { lines, duplicates } = keys;
    Ok(Fields { root, lines, duplicates })
}

/// The lines of keys.
#[derive(Default)]
struct KeyLocations {
    /// The line of each key.
    lines: BTreeMap<String, u32>,
    /// Keys that occur again in the same map, each with its line.
    duplicates: Vec<(String, u32)>,
}

impl KeyLocations {
    /// Records the key at `path`; a duplicate replaces everything below the earlier one.
    fn key(&mut self, path: &str, line: u32, duplicate: bool) {
        if duplicate {
            let is_below =
                |other: &str| other.strip_prefix(path).is_some_and(|rest| rest.starts_with(['.', '[']));
            self.lines.retain(|other, _| !is_below(other));
            self.duplicates.push((path.to_owned(), line));
        }
        if line > 0 {
            self.lines.insert(path.to_owned(), line);
        }
    }
}

/// Deserializes any value and records the line of every key below `path`.
struct Seed<'a> {
    path: String,
    keys: &'a mut KeyLocations,
}

impl<'de> DeserializeSeed<'de> for Seed<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Seed<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.to_owned()))
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_none<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        self.deserialize(deserializer)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(value) = seq.next_element_seed(Seed {
            path: format!("{}[{}]", self.path, list.len()),
            keys: &mut *self.keys,
        })? {
            list.push(value);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some(key) = map.next_key::<Spanned<String>>()? {
            let path =
                if self.path.is_empty() { key.value.clone() } else { format!("{}.{}", self.path, key.value) };
            let line = u32::try_from(key.referenced.line()).unwrap_or(0);
            self.keys.key(&path, line, object.contains_key(&key.value));
            let value = map.next_value_seed(Seed { path, keys: &mut *self.keys })?;
            object.insert(key.value, value);
        }
        Ok(Value::Object(object))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const TEXT: &str =
        "# ours\napiVersion: v1\nport: 10250\nlogging:\n  format: json\nempty: ~\nlist: [a, \"1\"]\nx: 1.5\n";

    #[test]
    fn yaml_values_are_parsed_with_their_lines() {
        let fields = fields(TEXT).unwrap();
        let expected = json!({
            "apiVersion": "v1", "port": 10250, "logging": {"format": "json"}, "empty": null,
            "list": ["a", "1"], "x": 1.5,
        });
        assert_eq!(Value::Object(fields.root.clone()), expected);
        assert_eq!([fields.lines["port"], fields.lines["logging.format"]], [3, 5]);
        assert!(!fields.lines.contains_key("absent"));
    }

    #[test]
    fn booleans_follow_yaml_1_1_and_a_leading_zero_is_not_octal() {
        let found = fields("a: yes\nb: Off\nc: 0o17\nd: 0x1F\ne: 0644\nf: 'yes'\n").unwrap();
        let expected = json!({"a": true, "b": false, "c": 15, "d": 31, "e": 644.0, "f": "yes"});
        assert_eq!(Value::Object(found.root), expected);
    }

    #[test]
    fn json_is_parsed_as_yaml() {
        assert_eq!(fields(r#"{"kind": "X", "maxPods": 5}"#).unwrap().root["maxPods"], 5);
    }

    #[test]
    fn the_last_duplicate_field_wins_and_is_recorded_with_its_line() {
        let found = fields("a: {x: 1}\nb:\n  c: 1\n  d: 2\n  c: 3\na:\n  y: 2\n").unwrap();
        assert_eq!(Value::Object(found.root), json!({"a": {"y": 2}, "b": {"c": 3, "d": 2}}));
        assert_eq!(found.duplicates, [("b.c".to_owned(), 5), ("a".to_owned(), 6)]);
        assert_eq!([found.lines["b.c"], found.lines["a.y"]], [5, 7]);
        assert!(!found.lines.contains_key("a.x"));
        let json = fields(r#"{"kind": "X", "kind": "Y"}"#).unwrap();
        assert_eq!((&json.root["kind"], json.duplicates.len()), (&Value::from("Y"), 1));
        assert_eq!(fields(TEXT).unwrap().duplicates, []);
    }

    #[test]
    fn yaml_errors_have_their_position() {
        for (text, place) in
            [("a: [1\nb: 2\n", "line"), ("- 1\n", "not a map"), ("a: 1\n---\nb: 2\n", "document")]
        {
            let error = fields(text).unwrap_err();
            assert!(error.contains(place), "{text:?}: {error}");
        }
    }
}
