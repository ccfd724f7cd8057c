//! The files to write, and which paths they may have.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use zeroize::Zeroizing;

/// The longest path of a file in a volume, in bytes (volumes.md §9.2).
const MAX_PATH: usize = 4096;
/// The longest name of a file or folder, in bytes.
const MAX_NAME: usize = 255;

/// The content of a file. Cheap to clone.
#[derive(Clone)]
pub enum Content {
    /// It is shared with the cache that it comes from.
    Shared(Arc<[u8]>),
    /// A private key: its memory is overwritten when the last clone is dropped.
    Key(Arc<Zeroizing<String>>),
}

impl Deref for Content {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Shared(bytes) => bytes,
            Self::Key(text) => text.as_bytes(),
        }
    }
}

impl From<&[u8]> for Content {
    fn from(bytes: &[u8]) -> Self {
        Self::Shared(bytes.into())
    }
}

impl PartialEq for Content {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for Content {}

/// A file to write.
#[derive(Clone, PartialEq, Eq)]
pub struct File {
    /// Its content.
    pub bytes: Content,
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
