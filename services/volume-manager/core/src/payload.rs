//! Which files a configMap, secret, downwardAPI or projected volume contains (volumes.md §9).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use zeroize::Zeroizing;

pub use error::{FileError, PayloadError};
pub use trust::{Bundles, LabelRequirement, LabelSelector, TrustBundleFile};

use crate::pod_certificate::{CertificateFiles, CertificateLookup, CertificateName};
use crate::token::{TokenLookup, TokenName};

mod error;
mod trust;

/// The longest path of a file in a volume, in bytes (volumes.md §9.2).
const MAX_PATH: usize = 4096;
/// The longest name of a file or folder, in bytes.
const MAX_NAME: usize = 255;

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

/// A kind of object whose data is written as files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ObjectKind {
    /// ConfigMap.
    ConfigMap,
    /// Secret.
    Secret,
    /// ClusterTrustBundle.
    ClusterTrustBundle,
    /// All ClusterTrustBundles of a signer, whose name is that of the object.
    ClusterTrustBundleList,
    /// PodCertificateRequest.
    PodCertificateRequest,
}

impl ObjectKind {
    /// All kinds.
    const ALL: [Self; 5] = [
        Self::ConfigMap,
        Self::Secret,
        Self::ClusterTrustBundle,
        Self::ClusterTrustBundleList,
        Self::PodCertificateRequest,
    ];

    /// The value of the object's `kind` field.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::ConfigMap => "ConfigMap",
            Self::Secret => "Secret",
            Self::ClusterTrustBundle => "ClusterTrustBundle",
            Self::ClusterTrustBundleList => "ClusterTrustBundleList",
            Self::PodCertificateRequest => "PodCertificateRequest",
        }
    }

    /// Parses the value of an object's `kind` field.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == text)
    }

    /// Whether an object of the kind has keys that can be files.
    pub const fn has_keys(self) -> bool {
        matches!(self, Self::ConfigMap | Self::Secret)
    }
}

/// The name of an object.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ObjectName {
    /// Its kind.
    pub kind: ObjectKind,
    /// Its namespace; empty for an object of the cluster.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = self.kind.as_str();
        if self.namespace.is_empty() {
            return write!(f, "{kind} {}", self.name);
        }
        write!(f, "{kind} {}/{}", self.namespace, self.name)
    }
}

/// The data of an object: the bytes of each key. Of ClusterTrustBundles: the JSON of each bundle by name; of a PodCertificateRequest: its
/// JSON by its name.
pub type ObjectData = BTreeMap<String, Arc<[u8]>>;

/// What is known about an object.
#[derive(Clone, Default, PartialEq, Eq)]
pub enum ObjectLookup {
    /// pod-config has not reported the object yet.
    #[default]
    Unknown,
    /// The object does not exist.
    Missing,
    /// The object exists but cannot be read, for this reason.
    Unreadable(String),
    /// The object exists and has this data.
    Present(Arc<ObjectData>),
}

// Shows the keys only: the values may be a Secret's.
impl fmt::Debug for ObjectLookup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => f.write_str("Unknown"),
            Self::Missing => f.write_str("Missing"),
            Self::Unreadable(why) => write!(f, "Unreadable({why})"),
            Self::Present(data) => f.debug_set().entries(data.keys()).finish(),
        }
    }
}

/// Looks up the objects, tokens and certificates that a volume's files come from.
pub trait SourceCache {
    /// Looks up an object.
    fn object(&self, name: &ObjectName) -> ObjectLookup;
    /// Looks up a token of the volume's pod.
    fn token(&self, name: &TokenName) -> TokenLookup;
    /// Looks up a certificate of the volume's pod.
    fn certificate(&self, name: &CertificateName) -> CertificateLookup;
}

/// A file to write.
#[derive(Clone, PartialEq, Eq)]
pub struct File {
    /// The content.
    pub bytes: Arc<[u8]>,
    /// The permission bits.
    pub mode: u32,
    /// The file's owner; root if unset.
    pub owner: Option<u32>,
}

// Shows the size only: the content may be a Secret's.
impl fmt::Debug for File {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes, {:o}", self.bytes.len(), self.mode)
    }
}

/// The content of a volume: files and folders by their clean path, relative to the volume.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Payload {
    /// The files.
    pub files: BTreeMap<String, File>,
    /// Folders where other volumes are mounted.
    pub folders: BTreeSet<String>,
}

impl Payload {
    /// The first component of each file's path: the names that users see in the volume.
    pub fn top_names(&self) -> BTreeSet<&str> {
        self.files.keys().filter_map(|path| path.split('/').next()).collect()
    }
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

fn object_name(object: &ObjectFiles, namespace: &str) -> ObjectName {
    ObjectName { kind: object.kind, namespace: namespace.to_owned(), name: object.name.clone() }
}

fn bundle_name(file: &TrustBundleFile) -> ObjectName {
    let (kind, name) = match &file.bundles {
        Bundles::Name(name) => (ObjectKind::ClusterTrustBundle, name.clone()),
        Bundles::Signer { signer, .. } => (ObjectKind::ClusterTrustBundleList, signer.clone()),
    };
    ObjectName { kind, namespace: String::new(), name }
}

/// Decides which file gets which content and mode (volumes.md §9.1, §9.4 to §9.6).
///
/// Reports every error, not only the first one.
///
/// # Errors
/// [`PayloadError::Pending`] while an object, field or token is not known yet; else [`PayloadError::Invalid`] with
/// each error once.
pub fn collect(files: &Files, namespace: &str, sources: &impl SourceCache) -> Result<Payload, PayloadError> {
    let mut collector = Collector::new(files);
    for source in &files.sources {
        match source {
            FileSource::Object(object) => {
                let name = object_name(object, namespace);
                let found = sources.object(&name);
                collector.add_object(object, &name, found);
            }
            FileSource::Downward(fields) => fields.iter().for_each(|field| collector.add_field(field)),
            FileSource::Token(token) => collector.add_token(token, sources.token(&token.name)),
            FileSource::TrustBundle(file) => {
                let name = bundle_name(file);
                let found = sources.object(&name);
                collector.add_trust_bundle(file, &name, found);
            }
            FileSource::Certificate(certificate) => {
                collector.add_certificate(certificate, sources.certificate(&certificate.name));
            }
            FileSource::Unsupported(field) => {
                collector.add_error(FileError::NoApiServer { field: field.clone() });
            }
        }
    }
    collector.finish()
}

struct Collector<'a> {
    files: &'a Files,
    payload: Payload,
    errors: Vec<FileError>,
    pending: Vec<String>,
}

impl<'a> Collector<'a> {
    fn new(files: &'a Files) -> Self {
        Self { files, payload: Payload::default(), errors: Vec::new(), pending: Vec::new() }
    }

    fn add_error(&mut self, error: FileError) {
        if !self.errors.contains(&error) {
            self.errors.push(error);
        }
    }

    fn add_object(&mut self, object: &ObjectFiles, name: &ObjectName, found: ObjectLookup) {
        let kind = object.kind;
        let data = match found {
            ObjectLookup::Present(data) => data,
            ObjectLookup::Unknown => return self.pending.push(format!("pod-config to send the {name}")),
            ObjectLookup::Missing if object.optional => return,
            ObjectLookup::Missing => {
                return self.add_error(FileError::ObjectNotFound { kind, name: object.name.clone() });
            }
            ObjectLookup::Unreadable(why) => {
                return self.add_error(FileError::UnreadableObject { kind, name: object.name.clone(), why });
            }
        };
        if object.items.is_empty() {
            for (key, bytes) in data.iter() {
                self.add_file(key, bytes, None);
            }
        }
        for item in &object.items {
            match data.get(&item.key) {
                Some(bytes) => self.add_file(&item.path, bytes, item.mode),
                None if object.optional => {}
                None => self.add_error(FileError::KeyNotFound { kind, key: item.key.clone() }),
            }
        }
    }

    fn add_field(&mut self, field: &DownwardFile) {
        match &field.value {
            DownwardValue::Content(bytes) => self.add_file(&field.path, &bytes.as_slice().into(), field.mode),
            DownwardValue::Invalid(why) => {
                self.add_error(FileError::NoValue { path: field.path.clone(), why: why.clone() });
            }
            DownwardValue::Pending(what) => self.pending.push(what.clone()),
        }
    }

    fn add_token(&mut self, token: &TokenFile, found: TokenLookup) {
        match found {
            TokenLookup::Present(bytes) => {
                self.add_owned_file(&token.path, &bytes, token.mode, token.owner);
            }
            TokenLookup::Pending(what) => self.pending.push(what),
            TokenLookup::Refused(why) => {
                self.add_error(FileError::TokenRefused { name: token.name.to_string(), why })
            }
        }
    }

    fn add_trust_bundle(&mut self, file: &TrustBundleFile, name: &ObjectName, found: ObjectLookup) {
        let data = match found {
            ObjectLookup::Present(data) => data,
            ObjectLookup::Missing => Arc::default(),
            ObjectLookup::Unknown => return self.pending.push(format!("pod-config to send the {name}")),
            ObjectLookup::Unreadable(why) => {
                let (kind, name) = (name.kind, name.name.clone());
                return self.add_error(FileError::UnreadableObject { kind, name, why });
            }
        };
        match file.content(&data) {
            Ok(bytes) => self.add_owned_file(&file.path, &bytes.into(), file.mode, file.owner),
            Err(why) => self.add_error(FileError::TrustBundle { why }),
        }
    }

    fn add_certificate(&mut self, files: &CertificateFiles, found: CertificateLookup) {
        let credentials = match found {
            CertificateLookup::Present(credentials) => credentials,
            CertificateLookup::Pending { what, .. } => return self.pending.push(what),
            CertificateLookup::Refused(why) => return self.add_error(FileError::CertificateRefused { why }),
        };
        let (key, chain) = (credentials.key.as_str(), credentials.chain.as_str());
        for (path, parts) in [
            (&files.bundle_path, &[key, chain] as &[&str]),
            (&files.key_path, &[key]),
            (&files.chain_path, &[chain]),
        ] {
            if !path.is_empty() {
                let bytes = Zeroizing::new(parts.concat());
                self.add_owned_file(path, &bytes.as_bytes().into(), files.mode, files.owner);
            }
        }
    }

    fn add_file(&mut self, path: &str, bytes: &Arc<[u8]>, mode: Option<u32>) {
        self.add_owned_file(path, bytes, mode, None);
    }

    fn add_owned_file(&mut self, path: &str, bytes: &Arc<[u8]>, mode: Option<u32>, owner: Option<u32>) {
        let clean = match clean_path(path) {
            Ok(clean) => clean,
            Err(why) => return self.add_error(FileError::InvalidPath { path: path.to_owned(), why }),
        };
        let Some(mode) = mode.or(self.files.default_mode) else {
            return self.add_error(FileError::NoMode { path: clean });
        };
        self.payload.files.insert(clean, File { bytes: Arc::clone(bytes), mode: mode & 0o777, owner });
    }

    fn finish(mut self) -> Result<Payload, PayloadError> {
        for path in &self.files.nested {
            match clean_path(path) {
                Ok(clean) => drop(self.payload.folders.insert(clean)),
                Err(why) => self.add_error(FileError::InvalidPath { path: path.clone(), why }),
            }
        }
        let files = std::mem::take(&mut self.payload.files);
        for path in files.keys() {
            let parent_file =
                path.match_indices('/').map(|(end, _)| &path[..end]).find(|a| files.contains_key(*a));
            if let Some(parent_file) = parent_file {
                self.add_error(FileError::PathConflict {
                    path: path.clone(),
                    parent_file: parent_file.to_owned(),
                });
            }
        }
        self.payload.files = files;
        if !self.pending.is_empty() {
            return Err(PayloadError::Pending(self.pending));
        }
        if self.errors.is_empty() { Ok(self.payload) } else { Err(PayloadError::Invalid(self.errors)) }
    }
}

/// Removes empty and `.` components from the path of a file (volumes.md §9.2).
///
/// # Errors
/// The rule that the path breaks.
pub fn clean_path(path: &str) -> Result<String, &'static str> {
    if path.starts_with('/') {
        return Err("it is not relative");
    }
    if path.len() > MAX_PATH {
        return Err("it is longer than 4096 bytes");
    }
    if path.contains('\0') {
        return Err("it contains a zero byte");
    }
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
    if parts.contains(&"..") {
        return Err("it contains ..");
    }
    if parts.iter().any(|part| part.len() > MAX_NAME) {
        return Err("one of its names is longer than 255 bytes");
    }
    match parts.first() {
        None => Err("it is empty"),
        Some(first) if first.starts_with("..") => Err("it begins with .., as only the agent's own names do"),
        Some(_) => Ok(parts.join("/")),
    }
}

#[cfg(test)]
mod tests;
