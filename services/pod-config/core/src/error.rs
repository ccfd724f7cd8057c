//! Errors in a manifest, with their positions.

use std::fmt;

use keelson_kube_model::PodFullName;

/// The kind of a [`ManifestError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ManifestErrorKind {
    /// The file cannot be read.
    Unreadable,
    /// The text is neither YAML nor JSON, or too long.
    Syntax,
    /// The document is an object of a kind that is not supported here.
    WrongKind,
    /// An object breaks a rule of the API or of static pods.
    Invalid,
    /// The object is valid, but another one has its name or UID already.
    Duplicate,
}

/// Why a manifest, or one of its documents, is rejected.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub struct ManifestError {
    /// The kind of error.
    pub kind: ManifestErrorKind,
    /// Line in the file, 1-based; 0 when unknown.
    pub line: u32,
    /// Column in the line, 1-based; 0 when unknown.
    pub column: u32,
    /// Document in the file, 1-based; 0 when the error is about the whole file.
    pub document: u32,
    /// Path of the field (`spec.containers[0].image`); empty when it is about the whole document.
    pub field: String,
    /// What is wrong, and what to do.
    pub message: String,
    /// The pod that the document describes, if its name could be read.
    pub pod: Option<PodFullName>,
}

impl ManifestError {
    /// An error in the whole file.
    pub fn file(kind: ManifestErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            line: 0,
            column: 0,
            document: 0,
            field: String::new(),
            message: message.into(),
            pod: None,
        }
    }

    /// `<origin>:<line>:<column>: <text>`, without unknown positions.
    pub fn at(&self, origin: &str) -> String {
        match (self.line, self.column) {
            (0, _) => format!("{origin}: {self}"),
            (line, 0) => format!("{origin}:{line}: {self}"),
            (line, column) => format!("{origin}:{line}:{column}: {self}"),
        }
    }
}

impl fmt::Display for ManifestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.document > 1 {
            write!(f, "document {}: ", self.document)?;
        }
        if !self.field.is_empty() {
            write!(f, "{}: ", self.field)?;
        }
        f.write_str(&self.message)
    }
}
