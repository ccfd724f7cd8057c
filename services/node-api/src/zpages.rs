//! The common part of `/statusz` and `/flagz` (node-and-api.md §8.11): a text for people and an object for programs.
//!
//! The `Accept` header of the request selects one of them.

use std::cmp::Reverse;
use std::fmt::Write as _;

use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use crate::api_error::ApiError;

/// The component that the agent presents itself as.
const COMPONENT: &str = "kubelet";
const GROUP: &str = "config.k8s.io";
/// Each text uses a random one, so that no program relies on one of them.
const SEPARATORS: [&str; 4] = [":", ": ", "=", " "];

/// The version of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Version {
    /// The current version.
    V1Beta1,
    /// Deprecated: the response has a warning.
    V1Alpha1,
}

impl Version {
    fn parse(name: &str) -> Option<Self> {
        match name {
            "v1beta1" => Some(Self::V1Beta1),
            "v1alpha1" => Some(Self::V1Alpha1),
            _ => None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::V1Beta1 => "v1beta1",
            Self::V1Alpha1 => "v1alpha1",
        }
    }
}

/// The format of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    Text,
    Json(Version),
    Yaml(Version),
}

/// The requested format; 406 if the client accepts none.
pub(crate) fn format(headers: &HeaderMap, kind: &str) -> Result<Format, ApiError> {
    let accepted: Vec<&str> =
        headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok()).collect();
    negotiate(&accepted.join(","), kind).ok_or_else(|| {
        let text = format!(
            "this path supports text/plain, and application/json or application/yaml with all of the parameters \
             v=v1beta1;g={GROUP};as={kind}\n"
        );
        ApiError::new(StatusCode::NOT_ACCEPTABLE, text)
    })
}

/// The format that `accept` prefers: text by name or by a wildcard, objects only with version, group and kind. An empty `accept`
/// means text.
fn negotiate(accept: &str, kind: &str) -> Option<Format> {
    if accept.trim().is_empty() {
        return Some(Format::Text);
    }
    let mut ranges: Vec<Range<'_>> =
        accept.split(',').map(Range::parse).filter(|r| r.thousandths > 0).collect();
    ranges.sort_by_key(|range| Reverse(range.thousandths));
    ranges.iter().find_map(|range| range.format(kind))
}

/// A media range of an `Accept` header.
#[derive(Default)]
struct Range<'a> {
    media: String,
    version: Option<&'a str>,
    group: Option<&'a str>,
    kind: Option<&'a str>,
    /// The weight `q`.
    thousandths: u32,
}

impl<'a> Range<'a> {
    fn parse(text: &'a str) -> Self {
        let mut parts = text.split(';').map(str::trim);
        let media = parts.next().unwrap_or_default().to_ascii_lowercase();
        let mut range = Self { media, thousandths: 1000, ..Self::default() };
        for (name, value) in parts.filter_map(|part| part.split_once('=')) {
            let value = value.trim().trim_matches('"');
            match name.trim() {
                "v" => range.version = Some(value),
                "g" => range.group = Some(value),
                "as" => range.kind = Some(value),
                "q" => range.thousandths = thousandths(value),
                _ => {}
            }
        }
        range
    }

    fn format(&self, kind: &str) -> Option<Format> {
        let media = self.media.as_str();
        let (Some(version), Some(group), Some(named)) = (self.version, self.group, self.kind) else {
            let has_no_parameters = self.version.or(self.group).or(self.kind).is_none();
            return (has_no_parameters && matches!(media, "text/plain" | "text/*" | "*/*"))
                .then_some(Format::Text);
        };
        let version = Version::parse(version).filter(|_| group == GROUP && named == kind)?;
        match media {
            "application/json" | "application/*" | "*/*" => Some(Format::Json(version)),
            "application/yaml" => Some(Format::Yaml(version)),
            _ => None,
        }
    }
}

/// A weight such as `0.8` in thousandths; 1000 if it is invalid.
pub(crate) fn thousandths(weight: &str) -> u32 {
    match weight.trim().parse::<f32>() {
        Ok(weight) if weight.is_finite() => (weight.clamp(0.0, 1.0) * 1000.0).round() as u32,
        _ => 1000,
    }
}

/// The response in `format`. `text` gets the separator between names and values; `fields` are those of the object besides its
/// kind and metadata.
pub(crate) fn response(
    format: Format,
    kind: &str,
    text: impl FnOnce(&str) -> String,
    fields: impl FnOnce() -> Map<String, Value>,
) -> Response {
    let (version, content_type) = match format {
        Format::Text => {
            let separator = SEPARATORS[fastrand::usize(..SEPARATORS.len())];
            let content_type = [(header::CONTENT_TYPE, "text/plain; charset=utf-8")];
            return (content_type, heading(kind) + &text(separator)).into_response();
        }
        Format::Json(version) => (version, "application/json"),
        Format::Yaml(version) => (version, "application/yaml"),
    };
    let object = object(version, kind, fields());
    let body = match format {
        Format::Yaml(_) => yaml(&object),
        _ => format!("{}\n", Value::from(object)),
    };
    let mut response = ([(header::CONTENT_TYPE, content_type)], body).into_response();
    if version == Version::V1Alpha1 {
        let warning = format!("299 - \"{GROUP}/v1alpha1 {kind} is deprecated; use v1beta1\"");
        let warning = warning.parse().expect("kinds contain only letters");
        response.headers_mut().insert(HeaderName::from_static("warning"), warning);
    }
    response
}

/// A blank line, the title, and a warning for programs.
fn heading(kind: &str) -> String {
    format!(
        "\n{COMPONENT} {}\nWarning: this text is for people and its format changes at random; programs request \
         application/json;v=v1beta1;g={GROUP};as={kind}\n",
        kind.to_lowercase()
    )
}

fn object(version: Version, kind: &str, fields: Map<String, Value>) -> Map<String, Value> {
    let mut object = Map::new();
    object.insert("kind".into(), kind.into());
    object.insert("apiVersion".into(), format!("{GROUP}/{}", version.name()).into());
    object.insert("metadata".into(), json!({"name": COMPONENT}));
    object.extend(fields);
    object
}

/// An object as YAML, with scalars as in JSON. The names must not need quotes.
fn yaml(object: &Map<String, Value>) -> String {
    let mut text = String::new();
    for (name, value) in object {
        let _ = match value {
            Value::Object(inner) if !inner.is_empty() => {
                let lines = inner
                    .iter()
                    .fold(String::new(), |lines, (name, value)| format!("{lines}  {name}: {value}\n"));
                write!(text, "{name}:\n{lines}")
            }
            Value::Array(items) if !items.is_empty() => {
                let lines = items.iter().fold(String::new(), |lines, item| format!("{lines}- {item}\n"));
                write!(text, "{name}:\n{lines}")
            }
            other => writeln!(text, "{name}: {other}"),
        };
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accept_header_selects_text_json_or_yaml() {
        let json = |version| Some(Format::Json(version));
        let yaml = |version| Some(Format::Yaml(version));
        for (accept, expected) in [
            ("", Some(Format::Text)),
            ("  ", Some(Format::Text)),
            ("text/plain", Some(Format::Text)),
            ("Text/Plain;charset=utf-8", Some(Format::Text)),
            ("text/*", Some(Format::Text)),
            ("*/*", Some(Format::Text)),
            ("text/html, application/xml;q=0.9, */*;q=0.8", Some(Format::Text)),
            ("application/json;v=v1beta1;g=config.k8s.io;as=Statusz", json(Version::V1Beta1)),
            ("application/json; as=\"Statusz\"; g=config.k8s.io; v=v1alpha1", json(Version::V1Alpha1)),
            ("application/*;v=v1beta1;g=config.k8s.io;as=Statusz", json(Version::V1Beta1)),
            ("application/yaml;v=v1beta1;g=config.k8s.io;as=Statusz", yaml(Version::V1Beta1)),
            (
                "application/json, application/yaml;v=v1alpha1;g=config.k8s.io;as=Statusz",
                yaml(Version::V1Alpha1),
            ),
            (
                "text/plain;q=0.5, application/json;v=v1beta1;g=config.k8s.io;as=Statusz",
                json(Version::V1Beta1),
            ),
            ("text/plain, application/json;v=v1beta1;g=config.k8s.io;as=Statusz;q=0.9", Some(Format::Text)),
            ("text/plain;q=0, application/json;v=v1beta1;g=config.k8s.io;as=Statusz", json(Version::V1Beta1)),
            ("text/plain;q=0", None),
            ("text/html", None),
            ("text/plain;as=Statusz", None),
            ("application/json", None),
            ("application/yaml", None),
            ("application/json;v=v1beta1;g=config.k8s.io", None),
            ("application/json;v=v1beta1;as=Statusz", None),
            ("application/json;g=config.k8s.io;as=Statusz", None),
            ("application/json;v=v1;g=config.k8s.io;as=Statusz", None),
            ("application/json;v=v1beta1;g=apps;as=Statusz", None),
            ("application/json;v=v1beta1;g=config.k8s.io;as=Flagz", None),
            ("application/vnd.kubernetes.protobuf;v=v1beta1;g=config.k8s.io;as=Statusz", None),
        ] {
            assert_eq!(negotiate(accept, "Statusz"), expected, "{accept}");
        }
    }

    #[test]
    fn yaml_has_a_line_for_each_field() {
        let Value::Object(object) = json!({
            "kind": "X", "n": 7, "metadata": {"name": "a"}, "paths": ["/b", "/c"], "flags": {}, "none": [],
            "text": "a \"b\"\n",
        }) else {
            unreachable!("it is an object");
        };
        let expected = "kind: \"X\"\nn: 7\nmetadata:\n  name: \"a\"\npaths:\n- \"/b\"\n- \"/c\"\nflags: {}\nnone: []\n\
            text: \"a \\\"b\\\"\\n\"\n";
        assert_eq!(yaml(&object), expected);
    }
}
