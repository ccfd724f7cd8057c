//! Why a credential cannot be copied.

use std::io;
use std::path::PathBuf;

use crate::certificates;
use crate::kubeconfig::KubeconfigFileError;

/// A file that cannot be copied.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CopyError {
    /// It cannot be read.
    #[error("cannot read {} that {field} names", path.display())]
    Read { path: PathBuf, field: &'static str, source: io::Error },
    /// The kubeconfig cannot be used or written.
    #[error(transparent)]
    Kubeconfig(#[from] KubeconfigFileError),
    /// A certificate from node-status is not accepted.
    #[error(transparent)]
    Collect(certificates::CollectError),
    /// The certificate of the kubelet API cannot be read.
    #[error(transparent)]
    Serving(certificates::StoreError),
    /// Only one file of a kubelet's own certificate and key exists.
    #[error(
        "certificate and key must be supplied as a pair: only one of {} and {} exists; add the other one, or remove it, and \
         the agent signs a certificate itself",
        certificate.display(), key.display()
    )]
    IncompletePair { certificate: PathBuf, key: PathBuf },
    /// A collected certificate cannot be removed from its original folder.
    #[error("cannot remove a collected certificate from the state folder of node-status")]
    RemoveCollected { source: io::Error },
    /// The copy cannot be written.
    #[error("cannot write {} below the run dir; set another one with --run-dir", path.display())]
    Write { path: PathBuf, source: io::Error },
}

impl CopyError {
    /// Whether the agent must not start with this error. It starts without a requested certificate and without a valid
    /// kubeconfig: static pods need neither, and both may be fixed while they run.
    pub(crate) fn prevents_start(&self) -> bool {
        !self.is_kubeconfig_error()
            && !matches!(self, Self::Collect(_) | Self::Serving(_) | Self::RemoveCollected { .. })
    }

    /// Whether the kubeconfig is invalid or incomplete, which can be fixed at any time.
    pub(crate) fn is_kubeconfig_error(&self) -> bool {
        matches!(self, Self::Kubeconfig(_))
    }
}
