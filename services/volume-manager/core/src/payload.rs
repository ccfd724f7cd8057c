//! Which files a configMap, secret, downwardAPI or projected volume has (volumes.md §9).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

pub use fault::{Fault, PayloadError};

use crate::token::{TokenLookup, TokenName};

mod fault;

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

    /// Whether the files lie on a tmpfs of their own; those of a ConfigMap lie on disk (volumes.md §9.1).
    pub const fn in_memory(self) -> bool {
        !matches!(self, Self::ConfigMap)
    }
}

/// What a volume's files are made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Files {
    /// The kind of the volume.
    pub kind: FilesKind,
    /// In their order: of two files at one path the later one counts (volumes.md §9.6).
    pub sources: Vec<FileSource>,
    /// `defaultMode`.
    pub default_mode: Option<u32>,
    /// Folders at which containers mount other volumes, relative to this one.
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
    /// What needs an API server, by its field in the spec.
    Unsupported(String),
}

/// Keys of an object that become files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectFiles {
    /// Which kind of object.
    pub kind: ObjectKind,
    /// Its name, in the pod's namespace.
    pub name: String,
    /// The keys; without any, each key is a file of its name.
    pub items: Vec<KeyFile>,
    /// The object and its keys may be missing.
    pub optional: bool,
}

/// One key that becomes a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyFile {
    /// The key.
    pub key: String,
    /// The file, relative to the volume.
    pub path: String,
    /// Its permission bits; else the volume's.
    pub mode: Option<u32>,
}

/// A token that becomes a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenFile {
    /// Which one.
    pub name: TokenName,
    /// The file, relative to the volume.
    pub path: String,
    /// Its permission bits; else the volume's.
    pub mode: Option<u32>,
    /// Whose it is; else root's.
    pub owner: Option<u32>,
}

/// A field of the pod that becomes a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DownwardFile {
    /// The file, relative to the volume.
    pub path: String,
    /// Its permission bits; else the volume's.
    pub mode: Option<u32>,
    /// The field's value.
    pub value: DownwardValue,
}

/// The value of a field of the pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DownwardValue {
    /// The value.
    Content(Vec<u8>),
    /// The spec names none; why.
    Wrong(String),
    /// pod-sync still waits for this.
    WaitsFor(String),
}

/// A kind of object that files are made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ObjectKind {
    /// ConfigMap.
    ConfigMap,
    /// Secret.
    Secret,
}

impl ObjectKind {
    /// The word in `kind`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::ConfigMap => "ConfigMap",
            Self::Secret => "Secret",
        }
    }

    /// Reads the word in `kind`.
    pub fn parse(text: &str) -> Option<Self> {
        [Self::ConfigMap, Self::Secret].into_iter().find(|kind| kind.as_str() == text)
    }
}

/// Names an object.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ObjectName {
    /// Its kind.
    pub kind: ObjectKind,
    /// Its namespace.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}/{}", self.kind.as_str(), self.namespace, self.name)
    }
}

/// The data of an object: the bytes of each key.
pub type Data = BTreeMap<String, Arc<[u8]>>;

/// What is known of an object.
#[derive(Clone, Default, PartialEq, Eq)]
pub enum Lookup {
    /// pod-config has not said anything of it yet.
    #[default]
    Unknown,
    /// There is none.
    Missing,
    /// There is one that cannot be read; why.
    Unreadable(String),
    /// Its data.
    Present(Arc<Data>),
}

// Never the data: it may be a Secret's.
impl fmt::Debug for Lookup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => f.write_str("Unknown"),
            Self::Missing => f.write_str("Missing"),
            Self::Unreadable(why) => write!(f, "Unreadable({why})"),
            Self::Present(data) => f.debug_set().entries(data.keys()).finish(),
        }
    }
}

/// What is known of what a volume is made of.
pub trait Known {
    /// Of an object.
    fn object(&self, name: &ObjectName) -> Lookup;
    /// Of a token of the volume's pod.
    fn token(&self, name: &TokenName) -> TokenLookup;
}

/// A file to be written.
#[derive(Clone, PartialEq, Eq)]
pub struct File {
    /// Its bytes.
    pub bytes: Arc<[u8]>,
    /// Its permission bits.
    pub mode: u32,
    /// Whose it is; else root's.
    pub owner: Option<u32>,
}

// Never the bytes: they may be a Secret's.
impl fmt::Debug for File {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes, {:o}", self.bytes.len(), self.mode)
    }
}

/// What a volume holds: files and folders by their clean path, relative to the volume.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Payload {
    /// The files.
    pub files: BTreeMap<String, File>,
    /// Folders for the mounts of other volumes.
    pub folders: BTreeSet<String>,
}

impl Payload {
    /// The first component of each file's path: what a user sees in the volume.
    pub fn top_names(&self) -> BTreeSet<&str> {
        self.files.keys().filter_map(|path| path.split('/').next()).collect()
    }
}

/// The objects that a volume of a pod in `namespace` is made of.
pub fn references<'a>(files: &'a Files, namespace: &'a str) -> impl Iterator<Item = ObjectName> + 'a {
    files.sources.iter().filter_map(move |source| match source {
        FileSource::Object(object) => Some(name_of(object, namespace)),
        FileSource::Downward(_) | FileSource::Token(_) | FileSource::Unsupported(_) => None,
    })
}

fn name_of(object: &ObjectFiles, namespace: &str) -> ObjectName {
    ObjectName { kind: object.kind, namespace: namespace.to_owned(), name: object.name.clone() }
}

/// Decides which file gets which bytes and mode (volumes.md §9.1, §9.4 to §9.6).
///
/// `known` says what is known of an object or token. Every fault is found, not only the first one.
///
/// # Errors
/// [`PayloadError::Waits`] while somebody has not said what an object or field is; else [`PayloadError::Wrong`]
/// with each fault once.
pub fn collect(files: &Files, namespace: &str, known: &impl Known) -> Result<Payload, PayloadError> {
    let mut collector = Collector::new(files);
    for source in &files.sources {
        match source {
            FileSource::Object(object) => {
                let name = name_of(object, namespace);
                let found = known.object(&name);
                collector.take_object(object, &name, found);
            }
            FileSource::Downward(fields) => fields.iter().for_each(|field| collector.take_field(field)),
            FileSource::Token(token) => collector.take_token(token, known.token(&token.name)),
            FileSource::Unsupported(field) => {
                collector.fault(Fault::NoApiServer { field: field.clone() });
            }
        }
    }
    collector.end()
}

struct Collector<'a> {
    files: &'a Files,
    payload: Payload,
    faults: Vec<Fault>,
    waits: Vec<String>,
}

impl<'a> Collector<'a> {
    fn new(files: &'a Files) -> Self {
        Self { files, payload: Payload::default(), faults: Vec::new(), waits: Vec::new() }
    }

    fn fault(&mut self, fault: Fault) {
        if !self.faults.contains(&fault) {
            self.faults.push(fault);
        }
    }

    fn take_object(&mut self, object: &ObjectFiles, name: &ObjectName, found: Lookup) {
        let kind = object.kind;
        let data = match found {
            Lookup::Present(data) => data,
            Lookup::Unknown => return self.waits.push(format!("pod-config to tell the {name}")),
            Lookup::Missing if object.optional => return,
            Lookup::Missing => return self.fault(Fault::NoObject { kind, name: object.name.clone() }),
            Lookup::Unreadable(why) => {
                return self.fault(Fault::Unreadable { kind, name: object.name.clone(), why });
            }
        };
        if object.items.is_empty() {
            for (key, bytes) in data.iter() {
                self.file(key, bytes, None);
            }
        }
        for item in &object.items {
            match data.get(&item.key) {
                Some(bytes) => self.file(&item.path, bytes, item.mode),
                None if object.optional => {}
                None => self.fault(Fault::NoKey { kind, key: item.key.clone() }),
            }
        }
    }

    fn take_field(&mut self, field: &DownwardFile) {
        match &field.value {
            DownwardValue::Content(bytes) => self.file(&field.path, &bytes.as_slice().into(), field.mode),
            DownwardValue::Wrong(why) => {
                self.fault(Fault::Field { path: field.path.clone(), why: why.clone() });
            }
            DownwardValue::WaitsFor(what) => self.waits.push(what.clone()),
        }
    }

    fn take_token(&mut self, token: &TokenFile, found: TokenLookup) {
        match found {
            TokenLookup::Present(bytes) => {
                self.owned_file(&token.path, &bytes, token.mode, token.owner);
            }
            TokenLookup::Waits(what) => self.waits.push(what),
            TokenLookup::Refused(why) => self.fault(Fault::Token { name: token.name.to_string(), why }),
        }
    }

    fn file(&mut self, path: &str, bytes: &Arc<[u8]>, mode: Option<u32>) {
        self.owned_file(path, bytes, mode, None);
    }

    fn owned_file(&mut self, path: &str, bytes: &Arc<[u8]>, mode: Option<u32>, owner: Option<u32>) {
        let clean = match clean(path) {
            Ok(clean) => clean,
            Err(why) => return self.fault(Fault::Path { path: path.to_owned(), why }),
        };
        let Some(mode) = mode.or(self.files.default_mode) else {
            return self.fault(Fault::NoMode { path: clean });
        };
        self.payload.files.insert(clean, File { bytes: Arc::clone(bytes), mode: mode & 0o777, owner });
    }

    fn end(mut self) -> Result<Payload, PayloadError> {
        for path in &self.files.nested {
            match clean(path) {
                Ok(clean) => drop(self.payload.folders.insert(clean)),
                Err(why) => self.fault(Fault::Path { path: path.clone(), why }),
            }
        }
        let files = std::mem::take(&mut self.payload.files);
        for path in files.keys() {
            let above = path.match_indices('/').map(|(end, _)| &path[..end]).find(|a| files.contains_key(*a));
            if let Some(above) = above {
                self.fault(Fault::Below { path: path.clone(), above: above.to_owned() });
            }
        }
        self.payload.files = files;
        if !self.waits.is_empty() {
            return Err(PayloadError::Waits(self.waits));
        }
        if self.faults.is_empty() { Ok(self.payload) } else { Err(PayloadError::Wrong(self.faults)) }
    }
}

/// The path of a file without empty and `.` components (volumes.md §9.2).
///
/// # Errors
/// Which rule it breaks.
pub fn clean(path: &str) -> Result<String, &'static str> {
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
