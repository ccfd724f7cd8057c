//! Why the files of a volume are not known, or cannot be.

use super::ObjectKind;

/// What is wrong with one file or source.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum Fault {
    /// The object is not there. As a kubelet says it.
    #[error("{} \"{name}\" not found", kind_word(*.kind))]
    NoObject {
        /// Its kind.
        kind: ObjectKind,
        /// Its name.
        name: String,
    },
    /// The object has no such key. As a kubelet says it.
    #[error("{}references non-existent {} key: {key}", key_words(*.kind).0, key_words(*.kind).1)]
    NoKey {
        /// The object's kind.
        kind: ObjectKind,
        /// The key.
        key: String,
    },
    /// The object is no object of its kind.
    #[error("{} \"{name}\" cannot be read: {why}", kind_word(*.kind))]
    Unreadable {
        /// Its kind.
        kind: ObjectKind,
        /// Its name.
        name: String,
        /// What is wrong.
        why: String,
    },
    /// A file has no mode.
    #[error("neither the file {path:?} nor the volume (defaultMode) has a mode")]
    NoMode {
        /// The file.
        path: String,
    },
    /// A path that would lead out of the volume, or that no file can have.
    #[error("the path {path:?} cannot be a file of a volume: {why}")]
    Path {
        /// The path as given.
        path: String,
        /// Which rule it breaks.
        why: &'static str,
    },
    /// A file is wanted where another one needs a folder.
    #[error("the path {path:?} lies below {above:?}, which is a file of the same volume")]
    Below {
        /// The file that has no place.
        path: String,
        /// The file that is in its way.
        above: String,
    },
    /// The spec names a field that has no value.
    #[error("the file {path:?} has no value: {why}")]
    Field {
        /// The file.
        path: String,
        /// Why not.
        why: String,
    },
    /// The API server makes no token.
    #[error("failed to fetch token: {name}: {why}")]
    Token {
        /// Which one.
        name: String,
        /// What it says.
        why: String,
    },
    /// A source that only an API server can give.
    #[error("{field} needs an API server and an agent that supports it; take the source out of the volume")]
    NoApiServer {
        /// The source, by its field in the spec.
        field: String,
    },
}

const fn kind_word(kind: ObjectKind) -> &'static str {
    match kind {
        ObjectKind::ConfigMap => "configmap",
        ObjectKind::Secret => "secret",
    }
}

const fn key_words(kind: ObjectKind) -> (&'static str, &'static str) {
    match kind {
        ObjectKind::ConfigMap => ("configmap ", "config"),
        ObjectKind::Secret => ("", "secret"),
    }
}

impl Fault {
    /// Whether the pod itself has to change; else another object may mend it.
    pub const fn is_of_the_spec(&self) -> bool {
        match self {
            Self::NoObject { .. } | Self::NoKey { .. } | Self::Unreadable { .. } => false,
            // The account may come.
            Self::Token { .. } => false,
            // Keys of an object become paths as well.
            Self::Path { .. } | Self::Below { .. } => false,
            Self::NoMode { .. } | Self::Field { .. } | Self::NoApiServer { .. } => true,
        }
    }
}

/// Why a volume's files are not known.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PayloadError {
    /// Somebody has not said yet what they are.
    #[error("it waits for {}", .0.join(", "))]
    Waits(Vec<String>),
    /// They cannot be what the spec wants.
    #[error("{}", joined(.0))]
    Wrong(Vec<Fault>),
}

/// One fault as it is, several in brackets, each once, as a kubelet joins them.
fn joined(faults: &[Fault]) -> String {
    let texts: Vec<String> = faults.iter().map(ToString::to_string).collect();
    match texts.as_slice() {
        [only] => only.clone(),
        _ => format!("[{}]", texts.join(", ")),
    }
}
