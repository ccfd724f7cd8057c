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
    /// `http://` or `https://` and where manifests are asked for (`staticPodURL`), without a user and a password.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub static_pod_url: Option<String>,
    /// Milliseconds between two requests for them (`httpCheckFrequency`).
    #[serde(default = "http_check_ms")]
    pub http_check_ms: u64,
    /// What the requests say beside the URL (`staticPodURLHeader`). Known to init alone: it hands pod-config a copy.
    #[serde(skip)]
    pub static_pod_url_headers: UrlHeaders,
}

impl Sources {
    /// No source, and the kubelet's periods.
    pub(crate) fn none() -> Self {
        Self { file_check_ms: 20_000, http_check_ms: http_check_ms(), ..Self::default() }
    }
}

fn http_check_ms() -> u64 {
    20_000
}

/// Headers of the requests for manifests, name and value each, in their order. Values are often credentials.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct UrlHeaders(pub Vec<(String, String)>);

impl fmt::Debug for UrlHeaders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|(name, _)| (name, "<masked>"))).finish()
    }
}

impl UrlHeaders {
    /// The name of the copy that pod-config gets, in its folder of credentials.
    pub const COPY: &str = "manifest-url-headers.json";

    /// The bytes of the copy.
    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// What init has put into `folder`; none where it has put nothing there.
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
    fn headers_are_in_no_file_but_their_own_and_in_no_text() {
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
