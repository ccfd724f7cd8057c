use std::fs;
use std::path::PathBuf;

use crate::{Paths, ServiceName};

/// How a service reports to init that the API server refuses its credential (401). Only credentials from an exec plugin of
/// the kubeconfig (`users[].user.exec`) are reported: the service replaces a file in its state folder, which holds the
/// generation of the credential, the field [`Self::FIELD`] of the handed kubeconfig. init then runs the plugin again.
#[derive(Debug)]
pub struct CredentialRefusal;

impl CredentialRefusal {
    /// The field of the handed-over kubeconfig with the generation of its credential.
    pub const FIELD: &str = "keelsonCredential";
    /// A longer file was not written by Keelson.
    const MOST_BYTES: u64 = 64;

    /// The file of `service`.
    pub fn file(paths: &Paths, service: ServiceName) -> PathBuf {
        paths.state(service).join("refused-credential")
    }

    /// The last generation that `service` reported; `None` when there is none or the file was not written by Keelson.
    pub fn read(paths: &Paths, service: ServiceName) -> Option<String> {
        let file = Self::file(paths, service);
        let meta = fs::symlink_metadata(&file).ok()?;
        if !meta.is_file() || meta.len() > Self::MOST_BYTES {
            return None;
        }
        fs::read_to_string(file).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_reported_generation_is_read_and_links_and_long_files_are_not() {
        let dir = keelson_testkit::Scratch::new().unwrap();
        let paths = Paths { state_dir: dir.path().to_owned(), ..Paths::default() };
        let service = ServiceName::PodConfig;
        let file = CredentialRefusal::file(&paths, service);
        fs::create_dir_all(paths.state(service)).unwrap();
        assert_eq!(CredentialRefusal::read(&paths, service), None);
        for generation in ["1", "1", "2"] {
            fs::write(&file, generation).unwrap();
            assert_eq!(CredentialRefusal::read(&paths, service).as_deref(), Some(generation));
        }
        fs::write(&file, "x".repeat(65)).unwrap();
        assert_eq!(CredentialRefusal::read(&paths, service), None);
        fs::remove_file(&file).unwrap();
        std::os::unix::fs::symlink("/etc/hostname", &file).unwrap();
        assert_eq!(CredentialRefusal::read(&paths, service), None);
    }
}
