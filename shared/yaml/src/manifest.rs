//! Manifests: YAML to JSON as the kubelet reads it. Scalars follow YAML 1.1 (`yes`, `0644`), the last of equal keys wins, and
//! `<<` merges.

use std::collections::HashMap;

use keelson_kube_model::base64;
use serde_json::{Map, Value};
use serde_saphyr::granit_parser::{Event, Parser, ScalarStyle, ScanError, Span, StrInput, Tag};

use crate::bounds::{Budget, Size, check_depth};
use crate::locate::Locator;
use crate::scalar::{plain_key, resolve_plain};

/// A document of a YAML stream.
#[derive(Debug)]
pub struct YamlDocument {
    /// Its content.
    pub value: Value,
    /// Line where the content begins, 1-based.
    pub line: u32,
    /// Column where the content begins, 1-based.
    pub column: u32,
    /// The first keys that are not text.
    pub converted: Vec<ConvertedKey>,
}

/// A mapping key that was not written as text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConvertedKey {
    /// Its line, 1-based.
    pub line: u32,
    /// As written: `1.10`.
    pub written: String,
    /// As read: `1.1`.
    pub text: String,
}

/// Maximum number of converted keys reported for a file.
const MAX_CONVERTED: usize = 20;

/// A text that is not valid YAML or exceeds a limit.
#[derive(Debug, PartialEq, Eq)]
pub struct YamlError {
    /// What is wrong.
    pub message: String,
    /// Line, 1-based.
    pub line: u32,
    /// Column, 1-based.
    pub column: u32,
    /// Document in the file, 1-based.
    pub document: u32,
}

/// All documents of `text`, empty ones included (as null).
///
/// # Errors
/// The text is not valid YAML or exceeds a limit of [`bounds`](crate::bounds).
pub fn documents(text: &str) -> Result<Vec<YamlDocument>, YamlError> {
    Composer::new(text, Vec::new()).run().map(|(documents, _)| documents)
}

/// The positions of fields in `text`, each given with the 0-based index of its document; for a missing field, that of its nearest
/// parent.
pub fn locate(text: &str, fields: &[(usize, &str)]) -> Vec<Option<(u32, u32)>> {
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

#[cfg(test)]
mod tests;
