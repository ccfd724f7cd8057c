//! The configuration while it is resolved: the values so far with their origins, the errors and the notes.

use std::fmt;

use keelson_config::{Config, kubelet_field};

use crate::document::{ConfigError, Sourced};
use crate::inputs::{Flags, Host};

/// The severity of a note.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// Informational.
    Info,
    /// Probably a mistake.
    Warn,
    /// Needs an operator.
    Error,
}

/// The event of a note that lists flags or fields without effect.
pub(crate) const WITHOUT_EFFECT: &str = "settings_without_effect";

/// A message about a valid configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    /// The severity.
    pub level: Level,
    /// The field `event` of its log line, if tests or tools look for it.
    pub event: Option<&'static str>,
    /// The message.
    pub text: String,
}

impl Note {
    /// A message without an event.
    pub fn new(level: Level, text: impl Into<String>) -> Self {
        Self { level, event: None, text: text.into() }
    }
}

/// The configuration while the groups of settings resolve one after the other.
#[derive(Debug)]
pub(crate) struct Outcome<'a> {
    /// The values so far; a value that no group has set yet has its default.
    pub(crate) config: Config,
    /// All errors so far.
    pub(crate) errors: Vec<ConfigError>,
    /// The messages to log.
    pub(crate) notes: Vec<Note>,
    /// The fields of the KubeletConfiguration that are set and have no effect.
    pub(crate) without_effect: Vec<String>,
    /// The command line.
    pub(crate) flags: &'a Flags,
    /// The machine.
    pub(crate) host: &'a Host,
    /// Whether there is a file of `--config`, or an assigned one. The defaults of a kubelet without a file are less strict.
    pub(crate) with_file: bool,
}

impl<'a> Outcome<'a> {
    /// The defaults, for this command line and machine.
    pub(crate) fn new(flags: &'a Flags, host: &'a Host, with_file: bool) -> Self {
        Self {
            config: Config::default(),
            errors: Vec::new(),
            notes: Vec::new(),
            without_effect: Vec::new(),
            flags,
            host,
            with_file,
        }
    }

    /// Applies a value to the configuration, and records its origin in the provenance.
    pub(crate) fn set<T>(
        &mut self,
        path: &str,
        value: Option<Sourced<T>>,
        apply: impl FnOnce(&mut Config, T),
    ) {
        if let Some(value) = value {
            if !value.origin.is_empty() {
                self.config.provenance.insert(path.to_owned(), value.origin);
            }
            apply(&mut self.config, value.value);
        }
    }

    /// Applies the value of a field of a KubeletConfiguration; the table of fields has the path in the provenance.
    pub(crate) fn set_field<T>(&mut self, value: Option<Sourced<T>>, apply: impl FnOnce(&mut Config, T)) {
        let Some(value) = value else { return };
        let path = kubelet_field(&value.field).and_then(|field| field.sets.first());
        let path = path.map_or_else(|| value.field.clone(), |path| (*path).to_owned());
        self.set(&path, Some(value), apply);
    }

    /// Reports a value that is not allowed; `remedy` says what is wrong and what to write instead.
    pub(crate) fn refuse<T: fmt::Debug>(&mut self, value: &Sourced<T>, remedy: impl Into<String>) {
        self.errors.push(value.error(remedy));
    }

    /// Adds a message to log.
    pub(crate) fn note(&mut self, level: Level, text: impl Into<String>) {
        self.notes.push(Note::new(level, text));
    }

    /// Adds a message to log about flags or fields without effect.
    pub(crate) fn note_without_effect(&mut self, text: impl Into<String>) {
        self.notes.push(Note { event: Some(WITHOUT_EFFECT), ..Note::new(Level::Info, text) });
    }
}
