//! What the files of a volume are made of, as its pod describes it.

use super::object::{ObjectKind, ObjectName};
use super::trust::{Bundles, TrustBundleFile};
use crate::pod_certificate::CertificateFiles;
use crate::token::TokenName;

/// The kind of a volume whose files come from the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FilesKind {
    /// `configMap`.
    ConfigMap,
    /// `secret`.
    Secret,
    /// `downwardAPI`.
    DownwardApi,
    /// `projected`.
    Projected,
}

impl FilesKind {
    /// The plugin's name, escaped.
    pub const fn plugin(self) -> &'static str {
        match self {
            Self::ConfigMap => "kubernetes.io~configmap",
            Self::Secret => "kubernetes.io~secret",
            Self::DownwardApi => "kubernetes.io~downward-api",
            Self::Projected => "kubernetes.io~projected",
        }
    }

    /// Whether the files are stored on a tmpfs; those of a ConfigMap are stored on disk (volumes.md §9.1).
    pub const fn in_memory(self) -> bool {
        !matches!(self, Self::ConfigMap)
    }
}

/// The sources of a volume's files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Files {
    /// The kind of the volume.
    pub kind: FilesKind,
    /// The sources in order: of two files at one path, the later one wins (volumes.md §9.6).
    pub sources: Vec<FileSource>,
    /// `defaultMode`.
    pub default_mode: Option<u32>,
    /// Folders where containers mount other volumes, relative to this volume.
    pub nested: Vec<String>,
}

/// Where some of a volume's files come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileSource {
    /// Keys of a ConfigMap or Secret.
    Object(ObjectFiles),
    /// Fields of the pod.
    Downward(Vec<DownwardFile>),
    /// A token of a service account.
    Token(TokenFile),
    /// The trust anchors of ClusterTrustBundles.
    TrustBundle(TrustBundleFile),
    /// A certificate of the pod, with its key.
    Certificate(CertificateFiles),
    /// A source that needs an API server, by its field in the spec.
    Unsupported(String),
}

/// Keys of an object that are written as files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectFiles {
    /// The kind of the object.
    pub kind: ObjectKind,
    /// The name of the object, in the pod's namespace.
    pub name: String,
    /// The keys to write; if empty, every key becomes a file of the same name.
    pub items: Vec<KeyFile>,
    /// The object and its keys may be missing.
    pub optional: bool,
}

/// A key that is written as a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyFile {
    /// The key.
    pub key: String,
    /// The file, relative to the volume.
    pub path: String,
    /// The file's permission bits; `defaultMode` if unset.
    pub mode: Option<u32>,
}

/// A service account token that is written as a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenFile {
    /// The token.
    pub name: TokenName,
    /// The file, relative to the volume.
    pub path: String,
    /// The file's permission bits; `defaultMode` if unset.
    pub mode: Option<u32>,
    /// The file's owner; root if unset.
    pub owner: Option<u32>,
}

/// A field of the pod that is written as a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DownwardFile {
    /// The file, relative to the volume.
    pub path: String,
    /// The file's permission bits; `defaultMode` if unset.
    pub mode: Option<u32>,
    /// The field's value.
    pub value: DownwardValue,
}

/// The value of a field of the pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DownwardValue {
    /// The value.
    Content(Vec<u8>),
    /// The field has no value, for this reason.
    Invalid(String),
    /// pod-sync does not know the value yet; what it waits for.
    Pending(String),
}

/// The objects that a volume of a pod in `namespace` refers to.
pub fn referenced_objects<'a>(files: &'a Files, namespace: &'a str) -> impl Iterator<Item = ObjectName> + 'a {
    files.sources.iter().filter_map(move |source| match source {
        FileSource::Object(object) => Some(object_name(object, namespace)),
        FileSource::TrustBundle(file) => Some(bundle_name(file)),
        FileSource::Downward(_)
        | FileSource::Token(_)
        | FileSource::Certificate(_)
        | FileSource::Unsupported(_) => None,
    })
}

pub(super) fn object_name(object: &ObjectFiles, namespace: &str) -> ObjectName {
    ObjectName { kind: object.kind, namespace: namespace.to_owned(), name: object.name.clone() }
}

pub(super) fn bundle_name(file: &TrustBundleFile) -> ObjectName {
    let (kind, name) = match &file.bundles {
        Bundles::Name(name) => (ObjectKind::ClusterTrustBundle, name.clone()),
        Bundles::Signer { signer, .. } => (ObjectKind::ClusterTrustBundleList, signer.clone()),
    };
    ObjectName { kind, namespace: String::new(), name }
}
