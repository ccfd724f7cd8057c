//! The certificates that a node requests from its API server (node-and-api.md §6.3 to §6.6).

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// A certificate that an API server signs for a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CertificateKind {
    /// The client certificate with which the node authenticates to the API server.
    Client,
    /// The serving certificate of the kubelet API.
    Serving,
}

impl CertificateKind {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Client, Self::Serving];

    /// Prefix of its file names in the certificate folder, the same as a kubelet's.
    pub fn prefix(self) -> &'static str {
        match self {
            Self::Client => "kubelet-client",
            Self::Serving => "kubelet-server",
        }
    }

    /// Name of the file in which node-status hands a new pair to init: the certificates, the node's own first, then the key.
    pub fn issued(self) -> &'static str {
        match self {
            Self::Client => "client.pem",
            Self::Serving => "serving.pem",
        }
    }

    /// The name for messages.
    pub fn word(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Serving => "serving",
        }
    }
}

/// How a node gets its certificates.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Certificates {
    /// The certificate folder, in a kubelet's layout (`--cert-dir`); it must be readable by root only.
    pub dir: PathBuf,
    /// The kubeconfig for requesting a client certificate while there is no valid one
    /// (`--bootstrap-kubeconfig`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bootstrap_kubeconfig: Option<PathBuf>,
    /// Whether an existing client certificate is replaced before it expires (`rotateCertificates`).
    pub rotate: bool,
    /// Whether the serving certificate of the kubelet API is requested (`serverTLSBootstrap`).
    pub serving: bool,
    /// Whether a serving certificate is also requested for a node that has names and no address (gate
    /// `AllowDNSOnlyNodeCSR`).
    pub serving_by_name: bool,
}

impl Default for Certificates {
    fn default() -> Self {
        Self {
            dir: "/var/lib/kubelet/pki".into(),
            bootstrap_kubeconfig: None,
            rotate: false,
            serving: false,
            serving_by_name: false,
        }
    }
}

impl Certificates {
    /// File name of the copy of the bootstrap kubeconfig that node-status gets while it needs it.
    pub const BOOTSTRAP_COPY: &str = "bootstrap-kubeconfig.json";
    /// File name of the current serving certificates, without the key, that node-status gets.
    pub const SERVING_COPY: &str = "serving.crt";

    /// The symbolic link to the current pair.
    pub fn current(&self, kind: CertificateKind) -> PathBuf {
        self.dir.join(format!("{}-current.pem", kind.prefix()))
    }

    /// Whether node-status requests any certificate.
    pub fn any(&self) -> bool {
        self.rotate || self.serving || self.bootstrap_kubeconfig.is_some()
    }

    /// The copy of the bootstrap kubeconfig in the folder of a service's credentials.
    pub fn bootstrap_copy(folder: &Path) -> PathBuf {
        folder.join(Self::BOOTSTRAP_COPY)
    }
}
