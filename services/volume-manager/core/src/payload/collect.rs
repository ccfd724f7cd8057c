//! Decides which files a volume has.

use std::sync::Arc;

use zeroize::Zeroizing;

use super::error::{FileError, PayloadError};
use super::file::{Content, File, Payload, clean_path};
use super::object::{ObjectLookup, ObjectName};
use super::source::{
    DownwardFile, DownwardValue, FileSource, Files, ObjectFiles, TokenFile, bundle_name, object_name,
};
use super::trust::TrustBundleFile;
use crate::pod_certificate::{CertificateFiles, CertificateLookup, CertificateName};
use crate::token::{TokenLookup, TokenName};

/// Looks up the objects, tokens and certificates that a volume's files come from.
pub trait SourceCache {
    /// Looks up an object.
    fn object(&self, name: &ObjectName) -> ObjectLookup;
    /// Looks up a token of the volume's pod.
    fn token(&self, name: &TokenName) -> TokenLookup;
    /// Looks up a certificate of the volume's pod.
    fn certificate(&self, name: &CertificateName) -> CertificateLookup;
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
                self.add_file(key, Content::Shared(Arc::clone(bytes)), None);
            }
        }
        for item in &object.items {
            match data.get(&item.key) {
                Some(bytes) => self.add_file(&item.path, Content::Shared(Arc::clone(bytes)), item.mode),
                None if object.optional => {}
                None => self.add_error(FileError::KeyNotFound { kind, key: item.key.clone() }),
            }
        }
    }

    fn add_field(&mut self, field: &DownwardFile) {
        match &field.value {
            DownwardValue::Content(bytes) => self.add_file(&field.path, bytes.as_slice().into(), field.mode),
            DownwardValue::Invalid(why) => {
                self.add_error(FileError::NoValue { path: field.path.clone(), why: why.clone() });
            }
            DownwardValue::Pending(what) => self.pending.push(what.clone()),
        }
    }

    fn add_token(&mut self, token: &TokenFile, found: TokenLookup) {
        match found {
            TokenLookup::Present(bytes) => {
                self.add_owned_file(&token.path, Content::Shared(bytes), token.mode, token.owner);
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
            Ok(bytes) => self.add_owned_file(&file.path, bytes.as_slice().into(), file.mode, file.owner),
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
        let secret = |parts: &[&str]| Content::Key(Arc::new(Zeroizing::new(parts.concat())));
        for (path, content) in [
            (&files.bundle_path, secret(&[key, chain])),
            (&files.key_path, secret(&[key])),
            (&files.chain_path, chain.as_bytes().into()),
        ] {
            if !path.is_empty() {
                self.add_owned_file(path, content, files.mode, files.owner);
            }
        }
    }

    fn add_file(&mut self, path: &str, bytes: Content, mode: Option<u32>) {
        self.add_owned_file(path, bytes, mode, None);
    }

    fn add_owned_file(&mut self, path: &str, bytes: Content, mode: Option<u32>, owner: Option<u32>) {
        let clean = match clean_path(path) {
            Ok(clean) => clean,
            Err(why) => return self.add_error(FileError::InvalidPath { path: path.to_owned(), why }),
        };
        let Some(mode) = mode.or(self.files.default_mode) else {
            return self.add_error(FileError::NoMode { path: clean });
        };
        self.payload.files.insert(clean, File { bytes, mode: mode & 0o777, owner });
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
