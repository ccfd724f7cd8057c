//! Configuration files as [`Document`]s: YAML (JSON is YAML) with the line of each field.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use keelson_init_core::Document;
use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};
use serde_saphyr::Spanned;

/// Why a configuration file could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The file cannot be opened or read.
    #[error("cannot read the configuration file {} that {flag} names", path.display())]
    Read {
        /// The flag that names it.
        flag: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file is empty.
    #[error("the configuration file {} that {flag} names is empty; it must begin with apiVersion and kind", path.display())]
    Empty {
        /// The flag that names it.
        flag: &'static str,
        /// The file.
        path: PathBuf,
    },
    /// The file is no YAML or JSON, or no map.
    #[error("the configuration file {} that {flag} names is not usable: {text}", path.display())]
    Syntax {
        /// The flag that names it.
        flag: &'static str,
        /// The file.
        path: PathBuf,
        /// What the parser says, with line and column.
        text: String,
    },
}

/// Reads the file that `flag` names.
pub fn read(flag: &'static str, path: &Path) -> Result<Document, ReadError> {
    read_with_text(flag, path).map(|(document, _)| document)
}

/// As [`read`], with the text of the file.
pub fn read_with_text(flag: &'static str, path: &Path) -> Result<(Document, String), ReadError> {
    let text =
        fs::read_to_string(path).map_err(|source| ReadError::Read { flag, path: path.to_owned(), source })?;
    if text.trim().is_empty() {
        return Err(ReadError::Empty { flag, path: path.to_owned() });
    }
    let full = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let folder = full.parent().unwrap_or(Path::new("/")).to_string_lossy().into_owned();
    match parse(&text, &path.to_string_lossy(), &folder) {
        Ok(document) => Ok((document, text)),
        Err(text) => Err(ReadError::Syntax { flag, path: path.to_owned(), text }),
    }
}

/// Reads `text`, which messages name `file`; its relative paths start from `folder`.
///
/// # Errors
/// It is no YAML or JSON, or no map; with line and column.
pub fn parse(text: &str, file: &str, folder: &str) -> Result<Document, String> {
    let mut lines = BTreeMap::new();
    let seed = Seed { path: String::new(), lines: &mut lines };
    let value = serde_saphyr::with_deserializer_from_str(text, |deserializer| seed.deserialize(deserializer))
        .map_err(|error| error.without_snippet().to_string())?;
    let Value::Object(root) = value else {
        return Err("it is not a map of fields".to_owned());
    };
    Ok(Document { file: file.to_owned(), folder: folder.to_owned(), root, lines, ..Document::default() })
}

/// Reads any value and notes the line of every key below `path`.
struct Seed<'a> {
    path: String,
    lines: &'a mut BTreeMap<String, u32>,
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
            lines: &mut *self.lines,
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
            if let Some(line) = u32::try_from(key.referenced.line()).ok().filter(|line| *line > 0) {
                self.lines.insert(path.clone(), line);
            }
            let value = map.next_value_seed(Seed { path, lines: &mut *self.lines })?;
            object.insert(key.value, value);
        }
        Ok(Value::Object(object))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str =
        "# ours\napiVersion: v1\nport: 10250\nlogging:\n  format: json\nempty: ~\nlist: [a, \"1\"]\nx: 1.5\n";

    #[test]
    fn values_and_the_lines_of_their_fields_are_read() {
        let document = parse(TEXT, "k.yaml", "/etc").unwrap();
        let expected = serde_json::json!({
            "apiVersion": "v1", "port": 10250, "logging": {"format": "json"}, "empty": null,
            "list": ["a", "1"], "x": 1.5,
        });
        assert_eq!(Value::Object(document.root.clone()), expected);
        assert_eq!(document.origin("port"), "k.yaml:3");
        assert_eq!(document.origin("logging.format"), "k.yaml:5");
        assert_eq!(document.origin("absent"), "k.yaml");
    }

    #[test]
    fn json_is_read_as_well() {
        let document = parse(r#"{"kind": "X", "maxPods": 5}"#, "k.json", "/etc").unwrap();
        assert_eq!(document.root["maxPods"], 5);
    }

    #[test]
    fn what_is_no_yaml_is_told_with_its_place() {
        for (text, place) in [
            ("a: [1\nb: 2\n", "line"),
            ("a: 1\na: 2\n", "line 2"),
            ("- 1\n", "not a map"),
            ("a: 1\n---\nb: 2\n", "document"),
        ] {
            let error = parse(text, "k.yaml", "/etc").unwrap_err();
            assert!(error.contains(place), "{text:?}: {error}");
        }
    }

    #[test]
    fn a_missing_and_an_empty_file_are_named_with_their_flag() {
        let error = read("--config", Path::new("/nonexistent/k.yaml")).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/k.yaml") && error.to_string().contains("--config"));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("k.yaml");
        fs::write(&path, "\n").unwrap();
        assert!(read("--config", &path).unwrap_err().to_string().contains("is empty"));
    }
}
