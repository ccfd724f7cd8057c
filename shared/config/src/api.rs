//! The HTTP ports of node-api.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::{Certificates, CipherSuite, KeyExchange};

/// The HTTP ports of node-api.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Api {
    /// Address of the kubelet API; without `tls` it must be a loopback address.
    pub address: String,
    /// 10250 in a kubelet; 0: off.
    pub port: u16,
    /// The read-only port, which serves a part of the API without authentication at the same address; 0: off.
    #[serde(default)]
    pub read_only_port: u16,
    /// Address of the health port.
    pub healthz_address: String,
    /// 10248 in a kubelet; 0: off.
    pub healthz_port: u16,
    /// TLS and authentication on the kubelet API; absent: HTTP, without access to containers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<ApiTls>,
    /// Which debugging paths are served.
    #[serde(default)]
    pub handlers: ApiHandlers,
    /// Whether access to a container requires the verb `create` also for `GET` requests, as from a WebSocket (`strictVerbs`).
    #[serde(default)]
    pub strict_verbs: bool,
}

/// Which debugging paths the kubelet API serves (node-and-api.md §8.1, §8.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ApiHandlers {
    /// Container logs, exec, attach, port-forward and running pods; if off, the other handlers are off too
    /// (`enableDebuggingHandlers`).
    pub debugging: bool,
    /// `/logs/` (`enableSystemLogHandler`).
    pub system_log: bool,
    /// The query of `/logs/` (`enableSystemLogQuery`).
    pub system_log_query: bool,
    /// `/debug/pprof/` (`enableProfilingHandler`).
    pub profiling: bool,
    /// `/debug/flags/v` (`enableDebugFlagsHandler`).
    pub debug_flags: bool,
    /// `/checkpoint` (feature gate ContainerCheckpoint).
    pub checkpoint: bool,
}

impl Default for ApiHandlers {
    fn default() -> Self {
        Self {
            debugging: true,
            system_log: true,
            system_log_query: false,
            profiling: true,
            debug_flags: true,
            checkpoint: true,
        }
    }
}

/// TLS on the kubelet API (node-and-api.md §6, §7).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ApiTls {
    /// PEM file of the CAs that verify clients (`authentication.x509.clientCAFile`); absent: no client certificates.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_ca_file: Option<PathBuf>,
    /// PEM file of our certificate (`tlsCertFile`), with `key_file`; absent: the pair in `cert_dir`, or a self-signed one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cert_file: Option<PathBuf>,
    /// PEM file of its key (`tlsPrivateKeyFile`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key_file: Option<PathBuf>,
    /// The folder of a kubelet's self-signed pair (`--cert-dir`); it must be readable by root only.
    pub cert_dir: PathBuf,
    /// The certificate is requested from the API server (`serverTLSBootstrap`): init copies that one, with its key, and
    /// `cert_file` only until it is issued. No certificate is self-signed.
    pub asked_for: bool,
    /// Whether bearer tokens are authenticated by the API server (`authentication.webhook.enabled`).
    pub tokens: bool,
    /// Whether requests are authorized by the API server (`authorization.mode: Webhook`); otherwise every authenticated
    /// user may do everything.
    pub reviews: bool,
    /// How long the result of a token review is cached (`authentication.webhook.cacheTTL`); 0: not at all.
    pub token_cache_ms: u64,
    /// How long an "allowed" decision is cached (`authorization.webhook.cacheAuthorizedTTL`).
    pub allowed_cache_ms: u64,
    /// How long a "denied" decision is cached (`authorization.webhook.cacheUnauthorizedTTL`).
    pub denied_cache_ms: u64,
    /// Whether clients without certificate and token are accepted as `system:anonymous` (`authentication.anonymous.enabled`).
    pub anonymous: bool,
    /// No TLS older than 1.3 (`tlsMinVersion: VersionTLS13`).
    pub only_tls13: bool,
    /// The enabled TLS 1.2 suites (`tlsCipherSuites`); those of TLS 1.3 are always enabled; empty: all.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cipher_suites: Vec<CipherSuite>,
    /// The enabled key exchange groups (`tlsCurvePreferences`); empty: all.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub key_exchanges: Vec<KeyExchange>,
}

impl Default for ApiTls {
    /// TLS with a self-signed certificate and no way for clients to authenticate.
    fn default() -> Self {
        Self {
            client_ca_file: None,
            cert_file: None,
            key_file: None,
            cert_dir: Certificates::default().dir,
            asked_for: false,
            tokens: false,
            reviews: false,
            token_cache_ms: 120_000,
            allowed_cache_ms: 300_000,
            denied_cache_ms: 30_000,
            anonymous: false,
            only_tls13: false,
            cipher_suites: Vec::new(),
            key_exchanges: Vec::new(),
        }
    }
}

impl ApiTls {
    /// The names of certificate and key in `cert_dir`.
    pub const OF_A_KUBELET: [&str; 2] = ["kubelet.crt", "kubelet.key"];

    /// TLS with these client CAs and a self-signed certificate.
    pub fn with_client_ca(client_ca_file: PathBuf) -> Self {
        Self { client_ca_file: Some(client_ca_file), ..Self::default() }
    }

    /// Whether a kubelet's pair in `cert_dir` is used, if there is one: no other pair is configured or requested.
    pub fn takes_a_kubelets_pair(&self) -> bool {
        !self.asked_for && self.cert_file.is_none()
    }

    /// Replaces each file by the copy that init has put into `folder`, if there is one. A requested certificate and a
    /// kubelet's pair exist only as copies.
    #[must_use]
    pub fn handed_over(&self, folder: &Path) -> Self {
        let mut own = self.clone();
        if own.asked_for || own.takes_a_kubelets_pair() {
            // One file, so that certificate and key always belong together.
            let pair = folder.join(ApiFile::Cert.copy());
            own.cert_file = pair.exists().then_some(pair);
            own.key_file.clone_from(&own.cert_file);
        }
        for file in ApiFile::ALL {
            let copy = folder.join(file.copy());
            if copy.exists() {
                let known = match file {
                    ApiFile::ClientCa => &mut own.client_ca_file,
                    ApiFile::Cert => &mut own.cert_file,
                    ApiFile::Key => &mut own.key_file,
                };
                *known = known.take().map(|_| copy);
            }
        }
        own
    }
}

/// A file that TLS on the kubelet API needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ApiFile {
    /// The CAs of clients.
    ClientCa,
    /// Our certificate.
    Cert,
    /// Its key.
    Key,
}

impl ApiFile {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::ClientCa, Self::Cert, Self::Key];

    /// The setting that names it.
    pub fn field(self) -> &'static str {
        match self {
            Self::ClientCa => "authentication.x509.clientCAFile",
            Self::Cert => "tlsCertFile",
            Self::Key => "tlsPrivateKeyFile",
        }
    }

    /// The name of the copy that node-api gets.
    pub fn copy(self) -> &'static str {
        match self {
            Self::ClientCa => "client-ca.pem",
            Self::Cert => "tls-cert.pem",
            Self::Key => "tls-key.pem",
        }
    }

    /// Its path.
    pub fn of(self, tls: &ApiTls) -> Option<&Path> {
        match self {
            Self::ClientCa => tls.client_ca_file.as_deref(),
            Self::Cert => tls.cert_file.as_deref(),
            Self::Key => tls.key_file.as_deref(),
        }
    }
}

impl Api {
    /// The ports of the kubelet API: with authentication, and read-only.
    pub fn ports(&self) -> [u16; 2] {
        [self.port, self.read_only_port]
    }
}

impl Default for Api {
    fn default() -> Self {
        Self {
            address: "127.0.0.1".into(),
            port: 10250,
            read_only_port: 0,
            healthz_address: "127.0.0.1".into(),
            healthz_port: 10248,
            tls: None,
            handlers: ApiHandlers::default(),
            strict_verbs: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handed_over_copies_replace_the_configured_files() {
        let dir = std::env::temp_dir().join(format!("keelson-api-files-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let mut tls = ApiTls::with_client_ca("/etc/ca.pem".into());
        (tls.cert_file, tls.key_file) = (Some("/etc/cert.pem".into()), Some("/etc/key.pem".into()));
        assert_eq!(tls.handed_over(&dir), tls, "without init the files themselves");
        let pair = dir.join(ApiFile::Cert.copy());
        for file in [ApiFile::ClientCa, ApiFile::Cert] {
            std::fs::write(dir.join(file.copy()), "").unwrap();
        }
        let own = tls.handed_over(&dir);
        assert_eq!(own.client_ca_file, Some(dir.join("client-ca.pem")));
        assert_eq!((own.cert_file.as_ref(), own.key_file), (Some(&pair), Some("/etc/key.pem".into())));

        // Requested, or a kubelet's: one copy for certificate and key, and none until it exists.
        let of_a_kubelet = ApiTls::default();
        tls.asked_for = true;
        for tls in [tls, of_a_kubelet] {
            let own = tls.handed_over(&dir);
            assert_eq!((own.cert_file.as_ref(), own.key_file.as_ref()), (Some(&pair), Some(&pair)));
            assert_eq!(
                own.client_ca_file.is_some(),
                tls.client_ca_file.is_some(),
                "a copy that nobody wants"
            );
            std::fs::remove_file(&pair).unwrap();
            assert_eq!(tls.handed_over(&dir).key_file, None, "until there is one");
            std::fs::write(&pair, "").unwrap();
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
