//! What node-status keeps of its certificates: a request that is not answered yet, and a pair that init has not taken yet. Each
//! is replaced by rename, so whoever is killed leaves a whole one; and what others have handed to it.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use keelson_config::{CertificateKind, Certificates, Config, CredentialRefusal, Kubernetes, ServiceName};
use keelson_node_status_core::certificates::{Held, Subject};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::x509;

/// A request that is not answered yet, with the key that it is for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Asked {
    /// Of the CertificateSigningRequest.
    pub(super) name: String,
    /// PEM.
    pub(super) key: String,
    /// For whom.
    pub(super) subject: Subject,
    /// Seconds since 1970.
    pub(super) made: i64,
}

/// Why something is not kept.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {}; the folder must be writable by the user of node-status", path.display())]
pub(super) struct KeepError {
    path: PathBuf,
    source: io::Error,
}

/// Where everything of a kind is.
#[derive(Debug)]
pub(super) struct Files {
    kind: CertificateKind,
    asked: PathBuf,
    issued: PathBuf,
    kubeconfig: PathBuf,
    pub(super) bootstrap: PathBuf,
    serving: PathBuf,
}

impl Files {
    pub(super) fn of(config: &Config, api: &Kubernetes, kind: CertificateKind) -> Self {
        let credentials = config.paths.credentials(ServiceName::NodeStatus);
        let requests = config.paths.state(ServiceName::NodeStatus).join("certificate-requests");
        Self {
            kind,
            asked: requests.join(format!("{}.json", kind.word())),
            issued: config.paths.issued_certificates().join(kind.issued()),
            kubeconfig: api.handed_over(&credentials),
            bootstrap: Certificates::bootstrap_copy(&credentials),
            serving: credentials.join(Certificates::SERVING_COPY),
        }
    }

    /// The certificate that this service was handed; `None`: there is none, or it cannot be read.
    pub(super) fn handed(&self) -> Option<Held> {
        match self.kind {
            CertificateKind::Serving => x509::held(&fs::read(&self.serving).ok()?, true),
            CertificateKind::Client => {
                let flat: Value = serde_json::from_slice(&fs::read(&self.kubeconfig).ok()?).ok()?;
                // What a program has given is renewed by it, and no certificate is asked for.
                if flat.get(CredentialRefusal::FIELD).is_some() {
                    return None;
                }
                let encoded = flat["users"][0]["user"]["client-certificate-data"].as_str()?;
                x509::held(&STANDARD.decode(encoded).ok()?, flat["keelsonStored"] == true)
            }
        }
    }

    /// Whether there is anything by which this node names itself to the API server.
    pub(super) fn is_handed(&self) -> bool {
        self.kubeconfig.exists()
    }

    /// The pair that init has not taken yet, and for how long it has lain there.
    pub(super) fn issued(&self) -> Option<(Held, Duration)> {
        let held = x509::held(&fs::read(&self.issued).ok()?, true)?;
        let since = fs::metadata(&self.issued).and_then(|meta| meta.modified()).ok()?;
        Some((held, SystemTime::now().duration_since(since).unwrap_or_default()))
    }

    /// The request that an earlier run may have left.
    pub(super) fn asked(&self) -> Option<Asked> {
        serde_json::from_slice(&fs::read(&self.asked).ok()?).ok()
    }

    pub(super) fn keep_asked(&self, asked: &Asked) -> Result<(), KeepError> {
        let content = serde_json::to_vec(asked).unwrap_or_default();
        write(&self.asked, &content)
    }

    pub(super) fn forget_asked(&self) {
        // What cannot be removed is found not to do by its age.
        let _ = fs::remove_file(&self.asked);
    }

    /// Leaves a pair for init to take.
    pub(super) fn leave(&self, certificates: &str, key: &str) -> Result<(), KeepError> {
        let end = if certificates.ends_with('\n') { "" } else { "\n" };
        write(&self.issued, format!("{certificates}{end}{key}").as_bytes())
    }
}

/// Replaces a file that nobody else may read.
fn write(path: &Path, content: &[u8]) -> Result<(), KeepError> {
    let write = || -> io::Result<()> {
        if let Some(folder) = path.parent() {
            fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        }
        let temporary = path.with_extension("new");
        match fs::remove_file(&temporary) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
        file.write_all(content)?;
        file.sync_all()?;
        fs::rename(&temporary, path)
    };
    write().map_err(|source| KeepError { path: path.to_owned(), source })
}
