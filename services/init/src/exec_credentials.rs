//! The exec plugins of kubeconfig users, and the credentials that they have returned, as stored in the run dir.

use std::collections::BTreeMap;
use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io;
use std::path::PathBuf;

use keelson_config::{Paths, ServiceName};
use keelson_files::Replacement;
use keelson_init_core::{ExecCredential, ExecLogin, FlatKubeconfig, refresh_at};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// After a rejection, the same plugin does not run again for this long, in seconds: its new credential may be rejected too.
const MIN_RENEWAL_INTERVAL: i64 = 10;

/// The credentials could not be stored.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {}", path.display())]
pub(crate) struct StoreCredentialError {
    path: PathBuf,
    source: io::Error,
}

/// A stored credential.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct StoredCredential {
    /// Nanoseconds since 1970; identifies the credential.
    issued: i64,
    token: Option<String>,
    certificates: Option<String>,
    key: Option<String>,
    /// Seconds since 1970.
    expires: Option<i64>,
}

impl StoredCredential {
    pub(crate) fn new(credential: ExecCredential, issued: i64) -> Self {
        let (certificates, key) = credential.pair.unzip();
        Self { issued, token: credential.token, certificates, key, expires: credential.expires }
    }

    fn credential(&self) -> ExecCredential {
        let pair = self.certificates.clone().zip(self.key.clone());
        ExecCredential { token: self.token.clone(), pair, expires: self.expires }
    }

    fn generation(&self) -> String {
        self.issued.to_string()
    }

    fn issued_seconds(&self) -> i64 {
        self.issued / 1_000_000_000
    }
}

/// A plugin to run, and its request.
pub(crate) struct Login {
    pub(crate) exec: ExecLogin,
    /// The value of [`keelson_init_core::EXEC_INFO`].
    pub(crate) info: String,
    /// A hash that identifies the plugin with its arguments and cluster.
    key: String,
}

impl Login {
    /// The login of a kubeconfig; `None` if its user has no plugin.
    pub(crate) fn of(flat: &FlatKubeconfig, root: &Map<String, Value>) -> Option<Self> {
        let exec = flat.exec.clone()?;
        let info = exec.info(&flat.document, root);
        let mut hasher = DefaultHasher::new();
        (&exec.command, &exec.args, &exec.env, &info).hash(&mut hasher);
        Some(Self { key: format!("{:016x}", hasher.finish()), info, exec })
    }
}

/// The credentials from plugins.
pub(crate) struct CredentialStore {
    path: PathBuf,
    stored: BTreeMap<String, StoredCredential>,
}

impl CredentialStore {
    /// Reads the credentials in the run dir. Unreadable ones are requested again.
    pub(crate) fn read(paths: &Paths) -> Self {
        let path = paths.socket_dir(ServiceName::Init).join("exec-credentials.json");
        let read = fs::read(&path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
        Self { stored: read.unwrap_or_default(), path }
    }

    /// The credential for a login, and its generation.
    pub(crate) fn get(&self, login: &Login) -> Option<(ExecCredential, String)> {
        let stored = self.stored.get(&login.key)?;
        Some((stored.credential(), stored.generation()))
    }

    /// Stores a credential and removes those of unused logins.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn put(
        &mut self,
        login: &Login,
        stored: StoredCredential,
        in_use: &[Login],
    ) -> Result<(), StoreCredentialError> {
        self.stored.insert(login.key.clone(), stored);
        self.stored.retain(|key, _| in_use.iter().any(|login| login.key == *key));
        self.write().map_err(|source| StoreCredentialError { path: self.path.clone(), source })
    }

    /// Replaces the file by rename, mode 0600.
    fn write(&self) -> io::Result<()> {
        Replacement::new().mode(0o600).write(&self.path, &serde_json::to_vec(&self.stored)?)
    }

    /// Whether the plugin has to run at `now`, in seconds since 1970; `refused` are the generations that services report as
    /// rejected.
    pub(crate) fn is_due(&self, login: &Login, refused: &[String], now: i64) -> bool {
        let Some(stored) = self.stored.get(&login.key) else { return true };
        let ends = refresh_at(stored.issued_seconds(), stored.expires).is_some_and(|at| at <= now);
        let is_refused = refused.contains(&stored.generation());
        // A clock that was set back must not delay a renewal.
        let age = now - stored.issued_seconds();
        ends || (is_refused && !(0..MIN_RENEWAL_INTERVAL).contains(&age))
    }
}
