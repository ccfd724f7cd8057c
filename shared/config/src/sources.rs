//! Where desired pods come from.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Sources of desired pods.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Sources {
    /// Folder or file with manifests (`staticPodPath`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub static_pod_path: Option<PathBuf>,
    /// Milliseconds between two full reads of the file source (`fileCheckFrequency`).
    pub file_check_ms: u64,
    /// URL of manifests, `http://` or `https://` (`staticPodURL`), without user and password.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub static_pod_url: Option<String>,
    /// Milliseconds between two requests to the URL (`httpCheckFrequency`).
    #[serde(default = "http_check_ms")]
    pub http_check_ms: u64,
    /// Headers of these requests (`staticPodURLHeader`). Only init knows them, and hands pod-config a copy.
    #[serde(skip)]
    pub static_pod_url_headers: UrlHeaders,
}

impl Sources {
    /// No source; the kubelet's default periods.
    pub(crate) fn none() -> Self {
        Self { file_check_ms: 20_000, http_check_ms: http_check_ms(), ..Self::default() }
    }
}

fn http_check_ms() -> u64 {
    20_000
}

/// Headers of the requests for manifests as pairs of name and value, in order. Values are often credentials.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct UrlHeaders(pub Vec<(String, String)>);

impl fmt::Debug for UrlHeaders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|(name, _)| (name, "<masked>"))).finish()
    }
}

impl UrlHeaders {
    /// File name of the copy in pod-config's credentials folder.
    pub const COPY: &str = "manifest-url-headers.json";

    /// The bytes of the copy.
    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Reads the copy that init has put into `folder`; empty when there is none.
    ///
    /// # Errors
    /// The copy cannot be read, or is not what init writes.
    pub fn handed_over(folder: &Path) -> io::Result<Self> {
        match fs::read(folder.join(Self::COPY)) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(io::Error::other),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn url_headers_are_kept_out_of_config_and_debug_output() {
        let headers = UrlHeaders(vec![("Authorization".into(), "Bearer hidden-word".into())]);
        let sources = Sources { static_pod_url_headers: headers.clone(), ..Sources::none() };
        let text = format!("{sources:?}{}", serde_json::to_string(&sources).unwrap());
        assert!(!text.contains("hidden-word") && text.contains("Authorization"), "{text}");

        let dir = std::env::temp_dir().join(format!("keelson-config-headers-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        assert_eq!(UrlHeaders::handed_over(&dir).unwrap(), UrlHeaders::default());
        fs::write(dir.join(UrlHeaders::COPY), headers.encode()).unwrap();
        assert_eq!(UrlHeaders::handed_over(&dir).unwrap(), headers);
        fs::write(dir.join(UrlHeaders::COPY), "[").unwrap();
        assert!(UrlHeaders::handed_over(&dir).is_err());
        fs::remove_dir_all(&dir).unwrap();
    }
}
