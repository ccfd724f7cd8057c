//! Parses configuration files into [`Document`]s: YAML (JSON is YAML) with the line of each field.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use keelson_init_core::{Document, Sourced};
use keelson_yaml::fields::{Fields, fields};

/// Why a configuration file could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The file cannot be opened or read.
    #[error("cannot read the configuration file {} that {flag} names", path.display())]
    Read {
        /// The flag that names the file.
        flag: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file is empty.
    #[error("kubelet config file {:?} was empty; what {flag} names must begin with apiVersion and kind", path.display().to_string())]
    Empty {
        /// The flag that names the file.
        flag: &'static str,
        /// The file.
        path: PathBuf,
    },
    /// The file is not YAML or JSON, or not a map.
    #[error("the configuration file {} that {flag} names is not usable: {text}", path.display())]
    Syntax {
        /// The flag that names the file.
        flag: &'static str,
        /// The file.
        path: PathBuf,
        /// The parser's message, with line and column.
        text: String,
    },
}

/// Reads the file in `flag`.
pub fn read(flag: &'static str, path: &Path) -> Result<Document, ReadError> {
    read_with_text(flag, path).map(|(document, _)| document)
}

/// Like [`read`], and also returns the text of the file.
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

/// Parses `text`; `file` is its name in messages, and its relative paths start from `folder`.
///
/// # Errors
/// The text is not YAML or JSON, or not a map; with line and column.
pub fn parse(text: &str, file: &str, folder: &str) -> Result<Document, String> {
    let Fields { root, lines, duplicates } = fields(text)?;
    let duplicate =
        |(field, line): (String, u32)| Sourced { value: (), origin: format!("{file}:{line}"), field };
    let duplicates = duplicates.into_iter().map(duplicate).collect();
    let (file, folder) = (file.to_owned(), folder.to_owned());
    Ok(Document { file, folder, root, lines, duplicates, ..Document::default() })
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    const TEXT: &str =
        "# ours\napiVersion: v1\nport: 10250\nlogging:\n  format: json\nempty: ~\nlist: [a, \"1\"]\nx: 1.5\n";

    #[test]
    fn yaml_values_are_parsed_with_their_lines() {
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
    fn the_last_duplicate_field_wins_and_is_recorded_with_its_line() {
        let text = "a: {x: 1}\nb:\n  c: 1\n  d: 2\n  c: 3\na:\n  y: 2\n";
        let document = parse(text, "k.yaml", "/etc").unwrap();
        let expected = serde_json::json!({"a": {"y": 2}, "b": {"c": 3, "d": 2}});
        assert_eq!(Value::Object(document.root.clone()), expected);
        let duplicate = |field: &str, line: u32| Sourced {
            value: (),
            origin: format!("k.yaml:{line}"),
            field: field.to_owned(),
        };
        assert_eq!(document.duplicates, [duplicate("b.c", 5), duplicate("a", 6)]);
        assert_eq!(
            (document.origin("b.c"), document.origin("a.y")),
            ("k.yaml:5".to_owned(), "k.yaml:7".to_owned())
        );
        assert!(!document.lines.contains_key("a.x"));
        let json = parse(r#"{"kind": "X", "kind": "Y"}"#, "k.json", "/etc").unwrap();
        assert_eq!((&json.root["kind"], json.duplicates.len()), (&Value::from("Y"), 1));
        assert_eq!(parse(TEXT, "k.yaml", "/etc").unwrap().duplicates, []);
    }

    #[test]
    fn missing_and_empty_configuration_files_are_reported_with_their_flag() {
        let error = read("--config", Path::new("/nonexistent/k.yaml")).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/k.yaml") && error.to_string().contains("--config"));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("k.yaml");
        fs::write(&path, "\n").unwrap();
        let text = read("--config", &path).unwrap_err().to_string();
        assert!(text.starts_with(&format!("kubelet config file \"{}\" was empty", path.display())), "{text}");
    }
}
