//! Which files a configMap, secret, downwardAPI or projected volume contains (volumes.md §9).

mod collect;
mod error;
mod file;
mod object;
mod source;
mod trust;

pub use collect::{SourceCache, collect};
pub use error::{FileError, PayloadError};
pub use file::{Content, File, Payload, clean_path};
pub use object::{ObjectData, ObjectKind, ObjectLookup, ObjectName};
pub use source::{
    DownwardFile, DownwardValue, FileSource, Files, FilesKind, KeyFile, ObjectFiles, TokenFile,
    referenced_objects,
};
pub use trust::{Bundles, LabelRequirement, LabelSelector, TrustBundleFile};

#[cfg(test)]
mod tests;
