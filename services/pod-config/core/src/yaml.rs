//! YAML to JSON, as the kubelet reads it: scalars by the rules of YAML 1.1 (`yes`, `0644`), the last of equal keys wins, `<<`
//! merges.

use std::collections::HashMap;

use serde_json::{Map, Number, Value};
use serde_saphyr::granit_parser::{Event, Parser, ScalarStyle, ScanError, Span, StrInput, Tag};

use keelson_kube_model::base64;

use crate::bounds::{Budget, Size, check_depth};
use crate::locate::Locator;

/// A document of a YAML stream.
#[derive(Debug)]
pub(crate) struct YamlDocument {
    pub(crate) value: Value,
    pub(crate) line: u32,
    pub(crate) column: u32,
    /// The first keys that are not text.
    pub(crate) converted: Vec<ConvertedKey>,
}

/// A mapping key that was not written as text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ConvertedKey {
    pub(crate) line: u32,
    /// As written: `1.10`.
    pub(crate) written: String,
    /// As read: `1.1`.
    pub(crate) text: String,
}

/// Maximum number of converted keys reported for a file.
const MAX_CONVERTED: usize = 20;

/// A text that is not valid YAML or exceeds a limit.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct YamlError {
    pub(crate) message: String,
    pub(crate) line: u32,
    pub(crate) column: u32,
    /// Document in the file, 1-based.
    pub(crate) document: u32,
}

/// All documents of `text`, empty ones included (as null).
pub(crate) fn documents(text: &str) -> Result<Vec<YamlDocument>, YamlError> {
    Composer::new(text, Vec::new()).run().map(|(documents, _)| documents)
}

/// The positions of fields in `text`, each given with the 0-based index of its document; for a missing field, that of its nearest
/// parent.
pub(crate) fn locate(text: &str, fields: &[(usize, &str)]) -> Vec<Option<(u32, u32)>> {
    let locators = fields.iter().map(|(document, field)| Locator::new(*document, field)).collect();
    match Composer::new(text, locators).run() {
        Ok((_, locators)) => locators.iter().map(Locator::position).collect(),
        Err(_) => vec![None; fields.len()],
    }
}

struct Composer<'a> {
    parser: Parser<'a, StrInput<'a>>,
    anchors: HashMap<usize, (Value, Size)>,
    budget: Budget,
    document: usize,
    locators: Vec<Locator>,
    path: Vec<String>,
    converted: Vec<ConvertedKey>,
}

type Node<'a> = (Event<'a>, Span);

impl<'a> Composer<'a> {
    fn new(text: &'a str, locators: Vec<Locator>) -> Self {
        Self {
            parser: Parser::new_from_str(text),
            anchors: HashMap::new(),
            budget: Budget::default(),
            document: 0,
            locators,
            path: Vec::new(),
            converted: Vec::new(),
        }
    }

    fn run(mut self) -> Result<(Vec<YamlDocument>, Vec<Locator>), YamlError> {
        let mut documents = Vec::new();
        loop {
            let (event, _) = self.next()?;
            match event {
                Event::StreamEnd => return Ok((documents, self.locators)),
                Event::DocumentStart(..) => {
                    let node = self.next()?;
                    let (line, column) = position(&node.1);
                    let value = self.node(node, 0)?;
                    let converted = std::mem::take(&mut self.converted);
                    documents.push(YamlDocument { value, line, column, converted });
                }
                Event::DocumentEnd => {
                    self.document += 1;
                    self.anchors.clear();
                }
                _ => {}
            }
        }
    }

    /// The next event that is not a comment.
    fn next(&mut self) -> Result<Node<'a>, YamlError> {
        loop {
            match self.parser.next() {
                Some(Ok((Event::Comment(..), _))) => {}
                Some(Ok(node)) => return Ok(node),
                Some(Err(error)) => return Err(self.syntax(&error)),
                None => return Ok((Event::StreamEnd, Span::default())),
            }
        }
    }

    /// Reads a value that is nested in `depth` lists and mappings.
    fn node(&mut self, (event, span): Node<'a>, depth: usize) -> Result<Value, YamlError> {
        if self.path.is_empty() {
            self.visit(&span);
        }
        let (value, anchor) = match event {
            Event::Scalar(text, style, anchor, tag) => {
                self.count(Size::scalar(text.len()), depth, &span)?;
                (self.scalar(&text, style, tag.as_deref(), &span)?, anchor)
            }
            Event::SequenceStart(_, anchor, _) => {
                self.enter_container(depth, &span)?;
                (self.sequence(depth)?, anchor)
            }
            Event::MappingStart(_, anchor, _) => {
                self.enter_container(depth, &span)?;
                (self.mapping(depth)?, anchor)
            }
            Event::Alias(anchor) => {
                let Some(size) = self.anchors.get(&anchor).map(|(_, size)| *size) else {
                    return Err(self.error(&span, "the alias refers to a value that it is part of"));
                };
                self.count(size, depth, &span)?;
                (self.anchors[&anchor].0.clone(), 0)
            }
            _ => return Err(self.error(&span, "a value is missing here")),
        };
        if anchor > 0 {
            // The copy kept for aliases counts too, whether or not an alias follows.
            let size = Size::of(&value);
            self.count(size, depth, &span)?;
            self.anchors.insert(anchor, (value.clone(), size));
        }
        Ok(value)
    }

    fn enter_container(&mut self, depth: usize, span: &Span) -> Result<(), YamlError> {
        check_depth(depth + 1).map_err(|message| self.error(span, message))?;
        self.count(Size::scalar(0), depth, span)
    }

    fn sequence(&mut self, depth: usize) -> Result<Value, YamlError> {
        let mut items = Vec::new();
        loop {
            let node = self.next()?;
            if matches!(node.0, Event::SequenceEnd) {
                return Ok(Value::Array(items));
            }
            self.enter(|| items.len().to_string(), &node.1);
            items.push(self.node(node, depth + 1)?);
            self.leave();
        }
    }

    fn mapping(&mut self, depth: usize) -> Result<Value, YamlError> {
        let mut map = Map::new();
        let mut merged = Vec::new();
        loop {
            let (event, span) = self.next()?;
            let (key, plain) = match event {
                Event::MappingEnd => break,
                Event::Scalar(text, ScalarStyle::Plain, _, None) => {
                    let key = plain_key(&text).map_err(|message| self.error(&span, message))?;
                    if key != text && self.converted.len() < MAX_CONVERTED {
                        let (line, written) = (position(&span).0, text.into_owned());
                        self.converted.push(ConvertedKey { line, written, text: key.clone() });
                    }
                    (key, true)
                }
                Event::Scalar(text, ..) => (text.into_owned(), false),
                Event::Alias(anchor) => match self.anchors.get(&anchor) {
                    Some((Value::String(text), _)) => (text.clone(), false),
                    _ => return Err(self.error(&span, "a key must be text")),
                },
                _ => return Err(self.error(&span, "a key must be text")),
            };
            self.count(Size::key(key.len()), 0, &span)?;
            self.enter(|| key.clone(), &span);
            let node = self.next()?;
            let value_span = node.1;
            let value = self.node(node, depth + 1)?;
            self.leave();
            if plain && key == "<<" {
                merged.push((value, value_span));
            } else {
                map.insert(key, value);
            }
        }
        for (value, span) in merged {
            self.merge(&mut map, value, &span)?;
        }
        Ok(Value::Object(map))
    }

    /// Merges `<<`: keys that the mapping lacks come from the merged mappings; the first one wins.
    fn merge(&self, map: &mut Map<String, Value>, from: Value, span: &Span) -> Result<(), YamlError> {
        let sources = match from {
            Value::Array(items) => items,
            one => vec![one],
        };
        for source in sources {
            let Value::Object(source) = source else {
                return Err(self.error(span, "<< takes a mapping or a list of mappings"));
            };
            for (key, value) in source {
                map.entry(key).or_insert(value);
            }
        }
        Ok(())
    }

    fn scalar(
        &self,
        text: &str,
        style: ScalarStyle,
        tag: Option<&Tag>,
        span: &Span,
    ) -> Result<Value, YamlError> {
        if tag.and_then(|tag| tag.suffix_in_namespace("tag:yaml.org,2002:")).as_deref() == Some("binary") {
            let bytes = base64::decode(text);
            let bytes = bytes.ok_or_else(|| self.error(span, "!!binary must be base64"))?;
            let text = String::from_utf8(bytes).map_err(|_| {
                self.error(span, "!!binary must hold UTF-8 text; other bytes belong into binaryData")
            })?;
            return Ok(Value::String(text));
        }
        let typed = tag.and_then(Tag::core_suffix).is_some_and(|suffix| suffix != "str");
        let is_text = style != ScalarStyle::Plain || tag.is_some();
        if is_text && !typed {
            return Ok(Value::String(text.to_owned()));
        }
        resolve_plain(text).map_err(|message| self.error(span, message))
    }

    fn count(&mut self, size: Size, depth: usize, span: &Span) -> Result<(), YamlError> {
        self.budget.take(size, depth).map_err(|message| self.error(span, message))
    }

    fn enter(&mut self, segment: impl FnOnce() -> String, span: &Span) {
        if !self.locators.is_empty() {
            self.path.push(segment());
            self.visit(span);
        }
    }

    fn leave(&mut self) {
        self.path.pop();
    }

    fn visit(&mut self, span: &Span) {
        let (line, column) = position(span);
        for locator in &mut self.locators {
            locator.visit(self.document, &self.path, line, column);
        }
    }

    fn error(&self, span: &Span, message: impl Into<String>) -> YamlError {
        let (line, column) = position(span);
        YamlError { message: message.into(), line, column, document: self.number() }
    }

    fn syntax(&self, error: &ScanError) -> YamlError {
        let marker = error.marker();
        YamlError {
            message: error.info(),
            line: narrow(marker.line()),
            column: narrow(marker.col() + 1),
            document: self.number(),
        }
    }

    fn number(&self) -> u32 {
        narrow(self.document + 1)
    }
}

fn position(span: &Span) -> (u32, u32) {
    (narrow(span.start.line()), narrow(span.start.col() + 1))
}

fn narrow(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// Resolves a plain scalar by the rules of the kubelet's YAML library.
fn resolve_plain(text: &str) -> Result<Value, String> {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return Ok(Value::Null),
        "true" | "True" | "TRUE" | "y" | "Y" | "yes" | "Yes" | "YES" | "on" | "On" | "ON" => {
            return Ok(Value::Bool(true));
        }
        "false" | "False" | "FALSE" | "n" | "N" | "no" | "No" | "NO" | "off" | "Off" | "OFF" => {
            return Ok(Value::Bool(false));
        }
        ".inf" | ".Inf" | ".INF" | "+.inf" | "+.Inf" | "+.INF" | "-.inf" | "-.Inf" | "-.INF" | ".nan"
        | ".NaN" | ".NAN" => {
            return Err(format!("JSON has no number {text}; quote it if it is text"));
        }
        _ => {}
    }
    if !text.starts_with(|c: char| c.is_ascii_digit() || matches!(c, '+' | '-' | '.')) {
        return Ok(Value::String(text.to_owned()));
    }
    Ok(integer(text).or_else(|| float(text)).map_or_else(|| Value::String(text.to_owned()), Value::Number))
}

/// Converts a plain key to text as the kubelet's YAML library does: `on` is `true`, `0644` is `420`, `1.10` is `1.1`.
fn plain_key(text: &str) -> Result<String, String> {
    if text == "<<" {
        return Ok(text.to_owned());
    }
    match resolve_plain(text)? {
        Value::String(text) => Ok(text),
        Value::Bool(value) => Ok(value.to_string()),
        Value::Number(number) => match number.as_f64().filter(|_| number.is_f64()) {
            // As Go formats a 32-bit float without an exponent.
            Some(float) if float == 0.0 || (1e-4..1e6).contains(&float.abs()) => {
                Ok((float as f32).to_string())
            }
            Some(_) => Err(format!("the key {text} is a number without a plain text form; quote it")),
            None => Ok(number.to_string()),
        },
        _ => Err("a key must be text; quote it".to_owned()),
    }
}

/// Decimal, `0x`, `0o`, `0b` and, with a leading zero, octal integers; underscores between digits are ignored.
fn integer(text: &str) -> Option<Number> {
    let (negative, digits) = match text.as_bytes().first()? {
        b'-' => (true, &text[1..]),
        b'+' => (false, &text[1..]),
        _ => (false, text),
    };
    let digits = digits.replace('_', "");
    let lower = digits.to_ascii_lowercase();
    let (radix, digits) = if let Some(rest) = lower.strip_prefix("0x") {
        (16, rest)
    } else if let Some(rest) = lower.strip_prefix("0o") {
        (8, rest)
    } else if let Some(rest) = lower.strip_prefix("0b") {
        (2, rest)
    } else if lower.len() > 1 && lower.starts_with('0') {
        (8, &lower[1..])
    } else {
        (10, lower.as_str())
    };
    // The parser below would accept a second sign.
    if !digits.starts_with(|c: char| c.is_ascii_hexdigit()) {
        return None;
    }
    let magnitude = u64::from_str_radix(digits, radix).ok()?;
    if negative {
        0i64.checked_sub_unsigned(magnitude).map(Number::from)
    } else {
        Some(Number::from(magnitude))
    }
}

fn float(text: &str) -> Option<Number> {
    let digits = text.replace('_', "");
    let body = digits.strip_prefix(['-', '+']).unwrap_or(&digits);
    let is_decimal = body.bytes().any(|b| b.is_ascii_digit())
        && body.starts_with(|c: char| c.is_ascii_digit() || c == '.')
        && body.bytes().all(|b| b.is_ascii_digit() || matches!(b, b'.' | b'e' | b'E' | b'+' | b'-'));
    if !is_decimal {
        return None;
    }
    let number: f64 = digits.parse().ok()?;
    // Go writes a whole float without a decimal point in JSON, so that it reads as an integer again.
    if number.fract() == 0.0 && number.abs() < 9_007_199_254_740_992.0 {
        return Some(Number::from(number as i64));
    }
    Number::from_f64(number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn one(text: &str) -> Value {
        let mut all = documents(text).unwrap();
        assert_eq!(all.len(), 1);
        all.remove(0).value
    }

    #[test]
    fn yaml_keys_that_are_not_text_are_converted_as_in_the_kubelet() {
        let one =
            |text: &str| documents(text).map(|mut all| all.remove(0).value).map_err(|error| error.message);
        for (text, key) in [
            ("on: 1", "true"),
            ("no: 1", "false"),
            ("y: 1", "true"),
            ("0644: 1", "420"),
            ("1.10: 1", "1.1"),
            ("8080: 1", "8080"),
            ("0.0: 1", "0"),
            ("'on': 1", "on"),
            ("\"0644\": 1", "0644"),
            ("!!str on: 1", "on"),
            ("plain: 1", "plain"),
        ] {
            assert_eq!(one(text), Ok(json!({ key: 1 })), "{text}");
        }
        for text in ["~: 1", "null: 1", "1e300: 1", "1234567.5: 1", "1e-5: 1"] {
            assert!(one(text).unwrap_err().contains("quote it"), "{text}");
        }
    }

    #[test]
    fn plain_scalars_follow_yaml_1_1_and_quoted_ones_are_text() {
        let cases = [
            ("yes", json!(true)),
            ("Off", json!(false)),
            ("y", json!(true)),
            ("N", json!(false)),
            ("\"y\"", json!("y")),
            ("!!str y", json!("y")),
            ("!!binary aGVsbG8=", json!("hello")),
            ("~", Value::Null),
            ("0644", json!(420)),
            ("0o644", json!(420)),
            ("08", json!(8)),
            ("0x1F", json!(31)),
            ("-12", json!(-12)),
            ("+-1", json!("+-1")),
            ("1_000", json!(1000)),
            ("1e3", json!(1000)),
            ("1.5", json!(1.5)),
            ("1.2.3", json!("1.2.3")),
            ("10.0.0.1", json!("10.0.0.1")),
            ("100m", json!("100m")),
            ("18446744073709551615", json!(18_446_744_073_709_551_615u64)),
            ("2001-12-14", json!("2001-12-14")),
            ("\"yes\"", json!("yes")),
            ("'0644'", json!("0644")),
            ("!!str 12", json!("12")),
            ("!!int \"12\"", json!(12)),
            ("!own 12", json!("12")),
            ("|-\n 12", json!("12")),
        ];
        for (text, value) in cases {
            assert_eq!(one(text), value, "{text}");
        }
        assert!(documents("a: .inf").unwrap_err().message.contains(".inf"));
    }

    #[test]
    fn yaml_anchors_and_merge_keys_are_expanded() {
        let text = "base: &b {a: 1, b: 2}\nmine:\n  <<: *b\n  b: 3\nlist: [*b]\n";
        let value = one(text);
        assert_eq!(value["mine"], json!({"b": 3, "a": 1}));
        assert_eq!(value["list"], json!([{"a": 1, "b": 2}]));
        assert!(documents("a: {<<: 1}").unwrap_err().message.contains("<<"));
        assert!(documents("a: &x [*x]").unwrap_err().message.contains("part of"));
    }

    #[test]
    fn the_last_of_equal_yaml_keys_wins_and_is_the_one_located() {
        assert_eq!(one("a: 1\na: 2"), json!({"a": 2}));
        assert_eq!(locate("a: 1\na: 2", &[(0, "a")]), [Some((2, 1))]);
    }

    #[test]
    fn yaml_errors_in_later_documents_have_the_line_of_the_file() {
        let error = documents("a: 1\n---\nb: 2\n---\nc: [1\nd: }\n").unwrap_err();
        assert_eq!(error.document, 3);
        assert!(error.line >= 5, "{error:?}");
    }

    #[test]
    fn nested_yaml_aliases_are_limited() {
        let mut text = String::from("a0: &a0 [x,x,x,x,x,x,x,x,x]\n");
        for i in 1..9 {
            let refs = vec![format!("*a{}", i - 1); 9].join(",");
            text.push_str(&format!("a{i}: &a{i} [{refs}]\n"));
        }
        assert!(documents(&text).unwrap_err().message.contains("more than"));
        let deep = format!("{}{}", "[".repeat(200), "]".repeat(200));
        assert!(documents(&deep).unwrap_err().message.contains("deep"));
    }

    #[test]
    fn yaml_aliases_of_one_long_text_are_limited() {
        let text = format!("a: &a {}\nb: [{}]\n", "x".repeat(1 << 20), "*a,".repeat(1000));
        assert!(documents(&text).unwrap_err().message.contains("MiB of text"));
        let keys = format!("a: &a {{{}: 1}}\nb: [{}]\n", "x".repeat(1 << 10), "*a,".repeat(100_000));
        assert!(documents(&keys).unwrap_err().message.contains("MiB of text"));
    }

    #[test]
    fn yaml_aliases_within_aliases_are_limited_in_depth() {
        let mut text = String::from("- &a0 []\n");
        for i in 1..50 {
            text.push_str(&format!("- &a{i} {}*a{}{}\n", "[".repeat(90), i - 1, "]".repeat(90)));
        }
        assert!(documents(&text).unwrap_err().message.contains("deep"));
    }

    #[test]
    fn nested_yaml_anchors_are_limited() {
        let anchors: String = (0..90).map(|i| format!("&a{i} [")).collect();
        let text = format!("{anchors}{}{}", "x,".repeat(100_000), "]".repeat(90));
        assert!(documents(&text).unwrap_err().message.contains("values"));
    }

    #[test]
    fn fields_are_located_by_key_and_missing_fields_by_their_nearest_parent() {
        let text = "x: 1\n---\nspec:\n  containers:\n  - name: a\n    image: i\n  - name: b\n";
        let cases = [
            (1, "spec.containers[1].name", Some((7, 5))),
            (1, "spec.containers[1].image", Some((7, 5))),
            (1, "spec.containers[0].image", Some((6, 5))),
            (1, "metadata.name", Some((3, 1))),
            (4, "metadata.name", None),
        ];
        let positions = locate(text, &cases.map(|(document, field, _)| (document, field)));
        assert_eq!(positions, cases.map(|(.., position)| position));
        assert_eq!(locate("a: [", &[(0, "a")]), [None]);
    }
}
