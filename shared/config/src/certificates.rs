//! The certificates that a node asks its API server for (node-and-api.md §6.3 to §6.6).

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// A certificate that an API server signs for a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CertificateKind {
    /// By which the node names itself to the API server.
    Client,
    /// With which its kubelet API shows itself.
    Serving,
}

impl CertificateKind {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Client, Self::Serving];

    /// What the names of its files in the certificate folder begin with, as a kubelet's.
    pub fn prefix(self) -> &'static str {
        match self {
            Self::Client => "kubelet-client",
            Self::Serving => "kubelet-server",
        }
    }

    /// The name of the file in which node-status leaves a new pair for init: certificates, the node's own first, then the key.
    pub fn issued(self) -> &'static str {
        match self {
            Self::Client => "client.pem",
            Self::Serving => "serving.pem",
        }
    }

    /// In words.
    pub fn word(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Serving => "serving",
        }
    }
}

/// How a node comes by its certificates.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Certificates {
    /// The folder that they are kept in, in a kubelet's layout (`--cert-dir`); only root may be able to read it.
    pub dir: PathBuf,
    /// The kubeconfig with which a client certificate is asked for while there is none that holds
    /// (`--bootstrap-kubeconfig`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bootstrap_kubeconfig: Option<PathBuf>,
    /// Whether a client certificate that is there is replaced before it ends (`rotateCertificates`).
    pub rotate: bool,
    /// Whether the certificate of the kubelet API is asked for (`serverTLSBootstrap`).
    pub serving: bool,
}

impl Default for Certificates {
    fn default() -> Self {
        Self { dir: "/var/lib/kubelet/pki".into(), bootstrap_kubeconfig: None, rotate: false, serving: false }
    }
}

impl Certificates {
    /// The name of the copy of the bootstrap kubeconfig that node-status gets, while it is needed.
    pub const BOOTSTRAP_COPY: &str = "bootstrap-kubeconfig.json";
    /// The name of the file with the serving certificates in force, without their key, that node-status gets.
    pub const SERVING_COPY: &str = "serving.crt";

    /// The link to the pair in force.
    pub fn current(&self, kind: CertificateKind) -> PathBuf {
        self.dir.join(format!("{}-current.pem", kind.prefix()))
    }

    /// Whether node-status asks for any.
    pub fn any(&self) -> bool {
        self.rotate || self.serving || self.bootstrap_kubeconfig.is_some()
    }

    /// The copy of the bootstrap kubeconfig in the folder of a service's credentials.
    pub fn bootstrap_copy(folder: &Path) -> PathBuf {
        folder.join(Self::BOOTSTRAP_COPY)
    }
}
