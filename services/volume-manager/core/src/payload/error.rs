//! Errors of the files of a volume.

use super::object::ObjectKind;

/// An error of one file or source of a volume.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum FileError {
    /// The object does not exist. The message is the kubelet's.
    #[error("{} \"{name}\" not found", kind_word(*.kind))]
    ObjectNotFound {
        /// Its kind.
        kind: ObjectKind,
        /// Its name.
        name: String,
    },
    /// The object has no such key. The message is the kubelet's.
    #[error("{}references non-existent {} key: {key}", key_words(*.kind).0, key_words(*.kind).1)]
    KeyNotFound {
        /// The object's kind.
        kind: ObjectKind,
        /// The key.
        key: String,
    },
    /// The object is not valid for its kind.
    #[error("{} \"{name}\" cannot be read: {why}", kind_word(*.kind))]
    UnreadableObject {
        /// Its kind.
        kind: ObjectKind,
        /// Its name.
        name: String,
        /// Why the object cannot be read.
        why: String,
    },
    /// Neither the file nor the volume has a mode.
    #[error("neither the file {path:?} nor the volume (defaultMode) has a mode")]
    NoMode {
        /// The file.
        path: String,
    },
    /// The path leads out of the volume, or no file can have it.
    #[error("the path {path:?} cannot be a file of a volume: {why}")]
    InvalidPath {
        /// The path, as written in the spec or key.
        path: String,
        /// The rule that the path breaks.
        why: &'static str,
    },
    /// A file is at the path of a folder that another file needs.
    #[error("the path {path:?} lies below {parent_file:?}, which is a file of the same volume")]
    PathConflict {
        /// The file that needs the folder.
        path: String,
        /// The file at the folder's path.
        parent_file: String,
    },
    /// The spec refers to a field that has no value.
    #[error("the file {path:?} has no value: {why}")]
    NoValue {
        /// The file.
        path: String,
        /// Why the field has no value.
        why: String,
    },
    /// The API server refuses to create the token.
    #[error("failed to fetch token: {name}: {why}")]
    TokenRefused {
        /// The token.
        name: String,
        /// The API server's error.
        why: String,
    },
    /// There are no trust anchors. The message is the kubelet's.
    #[error("{why}")]
    TrustBundle {
        /// The message.
        why: String,
    },
    /// The signer refuses a certificate. The message begins with the kubelet's.
    #[error("{why}")]
    CertificateRefused {
        /// The message.
        why: String,
    },
    /// The source needs an API server. The message begins with the kubelet's, if it has one.
    #[error("{}{field} needs an API server and {}; remove the source from the volume", needs(.field).0, needs(.field).1)]
    NoApiServer {
        /// The source, by its field in the spec.
        field: String,
    },
}

const fn kind_word(kind: ObjectKind) -> &'static str {
    match kind {
        ObjectKind::ConfigMap => "configmap",
        ObjectKind::Secret => "secret",
        ObjectKind::ClusterTrustBundle => "clustertrustbundle",
        ObjectKind::ClusterTrustBundleList => "clustertrustbundles of the signer",
        ObjectKind::PodCertificateRequest => "podcertificaterequest",
    }
}

const fn key_words(kind: ObjectKind) -> (&'static str, &'static str) {
    match kind {
        ObjectKind::ConfigMap => ("configmap ", "config"),
        ObjectKind::Secret => ("", "secret"),
        ObjectKind::ClusterTrustBundle | ObjectKind::ClusterTrustBundleList => ("", "clustertrustbundle"),
        ObjectKind::PodCertificateRequest => ("", "podcertificaterequest"),
    }
}

/// What begins the message about a source that cannot be used, and what the source needs beside an API server.
fn needs(field: &str) -> (&'static str, &'static str) {
    match field {
        "clusterTrustBundle" => (
            "ClusterTrustBundle projection is not supported in static kubelet mode: ",
            "the feature gate ClusterTrustBundleProjection",
        ),
        "podCertificate" => ("", "the feature gate PodCertificateRequest"),
        _ => ("", "an agent that supports it"),
    }
}

impl FileError {
    /// Whether only a change of the pod's spec can fix the error. If not, a change of another object may.
    pub const fn is_caused_by_spec(&self) -> bool {
        match self {
            Self::ObjectNotFound { .. } | Self::KeyNotFound { .. } | Self::UnreadableObject { .. } => false,
            // The service account may be created later.
            Self::TokenRefused { .. } => false,
            // A bundle may be created later.
            Self::TrustBundle { .. } => false,
            // The signer may decide otherwise for the next pod.
            Self::CertificateRefused { .. } => false,
            // Keys of an object become paths, too.
            Self::InvalidPath { .. } | Self::PathConflict { .. } => false,
            Self::NoMode { .. } | Self::NoValue { .. } | Self::NoApiServer { .. } => true,
        }
    }
}

/// Why the files of a volume cannot be determined.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PayloadError {
    /// Some sources are not known yet; what the volume waits for.
    #[error("waiting for {}", .0.join(", "))]
    Pending(Vec<String>),
    /// The sources are known and have these errors.
    #[error("{}", joined(.0))]
    Invalid(Vec<FileError>),
}

/// A single error as it is, several in brackets, as a kubelet joins them.
fn joined(errors: &[FileError]) -> String {
    let texts: Vec<String> = errors.iter().map(ToString::to_string).collect();
    match texts.as_slice() {
        [only] => only.clone(),
        _ => format!("[{}]", texts.join(", ")),
    }
}
