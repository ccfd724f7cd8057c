//! Images: pulls, garbage collection and the verification of pull credentials (node-and-api.md §2.5), and the credential
//! provider plugins (§1.4).

mod credential_providers;
mod gc;
mod pulls;

pub use credential_providers::{
    CREDENTIAL_BIN_FLAG, CREDENTIAL_CONFIG_FLAG, CredentialProviderPaths, credential_config_files,
    credential_provider_paths,
};

use crate::outcome::Outcome;
use crate::reader::Reader;
use crate::settings::{Files, Settings};
use gc::ImageGc;
use pulls::ImagePulls;

/// The fields of all parts.
#[derive(Debug)]
pub(crate) struct Images {
    pulls: ImagePulls,
    gc: ImageGc,
}

impl Settings for Images {
    fn read(files: &mut Files<'_>) -> Self {
        Self { pulls: ImagePulls::read(files), gc: ImageGc::read(&mut files.kubelet) }
    }

    fn check(kubelet: &mut Reader<'_>) {
        pulls::check_allowlist(kubelet);
    }

    fn resolve(self, out: &mut Outcome<'_>) {
        self.pulls.resolve(out);
        self.gc.resolve(out);
    }
}

#[cfg(test)]
mod tests;
