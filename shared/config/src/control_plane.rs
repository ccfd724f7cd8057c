//! How this node reaches its control plane.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::Certificates;

/// The control plane that this node belongs to.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ControlPlane {
    /// Standalone.
    #[default]
    None,
    /// etcd alone.
    Etcd(Etcd),
    /// The Kubernetes API.
    Kubernetes(Kubernetes),
}

impl ControlPlane {
    /// Whether the control plane may assign a configuration to the node.
    pub fn may_assign_a_configuration(&self) -> bool {
        matches!(self, Self::Etcd(_))
    }
}

/// An API server, and how this node authenticates to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Kubernetes {
    /// The kubeconfig with both (`--kubeconfig`). It may refer to other files, which must be readable by root only.
    pub kubeconfig: PathBuf,
    /// Whether the Node object is created when it does not exist (`registerNode`).
    #[serde(default = "yes")]
    pub register_node: bool,
    /// Seconds without a lease renewal after which the node counts as lost (`nodeLeaseDurationSeconds`).
    #[serde(default = "lease_seconds")]
    pub lease_seconds: u32,
    /// Taints of a Node that is registered here (`registerWithTaints`, and the one for a cloud provider).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub taints: Vec<Taint>,
    /// The cloud provider's id of this machine (`providerID`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub provider_id: Option<String>,
    /// Requests to the API server per second, at least 1 (`kubeAPIQPS`, where 0 means 5). Lease renewals are not counted.
    #[serde(default = "qps")]
    pub qps: u32,
    /// Burst of requests to it, at least 1 (`kubeAPIBurst`).
    #[serde(default = "burst")]
    pub burst: u32,
    /// How changes of ConfigMaps and Secrets are detected (`configMapAndSecretChangeDetectionStrategy`).
    #[serde(default)]
    pub objects_by: ObjectsBy,
    /// How the node gets its certificates.
    #[serde(default)]
    pub certificates: Certificates,
}

/// How changes of objects that pods refer to are detected.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ObjectsBy {
    /// By a watch of each object.
    #[default]
    Watch,
    /// Each cached object is read again after a minute, or after the Node's `node.alpha.kubernetes.io/ttl`.
    Cache,
    /// As `Cache`, and also on every use.
    Get,
}

/// A taint of a Node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Taint {
    /// Its key.
    pub key: String,
    /// Its value.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub value: String,
    /// `NoSchedule`, `PreferNoSchedule` or `NoExecute`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub effect: String,
}

impl Kubernetes {
    /// File name of the copy that a service gets, which refers to no other file.
    pub const COPY: &str = "kubeconfig.json";

    /// With this kubeconfig and otherwise the kubelet's defaults.
    pub fn of(kubeconfig: PathBuf) -> Self {
        Self {
            kubeconfig,
            register_node: true,
            lease_seconds: lease_seconds(),
            taints: Vec::new(),
            provider_id: None,
            qps: qps(),
            burst: burst(),
            objects_by: ObjectsBy::default(),
            certificates: Certificates::default(),
        }
    }

    /// Path of the copy that init puts into `folder`. It may not exist yet: init writes it once the kubeconfig or a
    /// certificate exists. Without such a folder there is no init, and this is the kubeconfig itself.
    pub fn handed_over(&self, folder: &Path) -> PathBuf {
        if folder.is_dir() || self.certificates.bootstrap_kubeconfig.is_some() {
            folder.join(Self::COPY)
        } else {
            self.kubeconfig.clone()
        }
    }
}

/// An etcd cluster, and how this node authenticates to it. Files are read at each new connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Etcd {
    /// `http://` or `https://`, host and port of each member; at least one.
    pub endpoints: Vec<String>,
    /// PEM file of the CAs that verify the members; required with `https`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca_file: Option<PathBuf>,
    /// PEM file of our certificate; with `key_file`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cert_file: Option<PathBuf>,
    /// PEM file of its key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_file: Option<PathBuf>,
    /// User of etcd; with `password_file`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// File with the user's password; surrounding white space is ignored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub password_file: Option<PathBuf>,
    /// Seconds without a renewal after which the node's lease expires (`nodeLeaseDurationSeconds`).
    #[serde(default = "lease_seconds")]
    pub lease_seconds: u32,
}

impl Etcd {
    /// Members without TLS and without users.
    pub fn plain(endpoints: Vec<String>) -> Self {
        Self {
            endpoints,
            ca_file: None,
            cert_file: None,
            key_file: None,
            user: None,
            password_file: None,
            lease_seconds: lease_seconds(),
        }
    }

    /// Replaces each file by the copy that init has put into `folder`, if there is one.
    #[must_use]
    pub fn handed_over(&self, folder: &Path) -> Self {
        let mut own = self.clone();
        for file in EtcdFile::ALL {
            let (copy, path) = (folder.join(file.copy()), file.in_mut(&mut own));
            if path.is_some() && copy.exists() {
                *path = Some(copy);
            }
        }
        own
    }
}

/// A file that a connection to etcd needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EtcdFile {
    /// The CAs of the members.
    Ca,
    /// Our certificate.
    Cert,
    /// Its key.
    Key,
    /// The user's password.
    Password,
}

impl EtcdFile {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Ca, Self::Cert, Self::Key, Self::Password];

    /// The setting that names it.
    pub fn field(self) -> &'static str {
        match self {
            Self::Ca => "etcd.caFile",
            Self::Cert => "etcd.certFile",
            Self::Key => "etcd.keyFile",
            Self::Password => "etcd.passwordFile",
        }
    }

    /// File name of the copy that a service gets.
    pub fn copy(self) -> &'static str {
        match self {
            Self::Ca => "etcd-ca.pem",
            Self::Cert => "etcd-cert.pem",
            Self::Key => "etcd-key.pem",
            Self::Password => "etcd-password",
        }
    }

    /// Its path.
    pub fn of(self, etcd: &Etcd) -> Option<&Path> {
        match self {
            Self::Ca => etcd.ca_file.as_deref(),
            Self::Cert => etcd.cert_file.as_deref(),
            Self::Key => etcd.key_file.as_deref(),
            Self::Password => etcd.password_file.as_deref(),
        }
    }

    fn in_mut(self, etcd: &mut Etcd) -> &mut Option<PathBuf> {
        match self {
            Self::Ca => &mut etcd.ca_file,
            Self::Cert => &mut etcd.cert_file,
            Self::Key => &mut etcd.key_file,
            Self::Password => &mut etcd.password_file,
        }
    }
}

/// A member of etcd.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// With TLS.
    pub secure: bool,
    /// Name or address, an IPv6 address without its brackets.
    pub host: String,
    /// Port.
    pub port: u16,
}

impl Endpoint {
    /// The rule for endpoints, for messages.
    pub const RULE: &str =
        "must be http:// or https:// with a host and a port, for example https://10.0.0.1:2379";

    /// Parses `https://host:2379`; `None` for text that [`Endpoint::RULE`] forbids.
    pub fn parse(text: &str) -> Option<Self> {
        let (secure, rest) = match text.strip_prefix("https://") {
            Some(rest) => (true, rest),
            None => (false, text.strip_prefix("http://")?),
        };
        let (host, port) = rest.strip_suffix('/').unwrap_or(rest).rsplit_once(':')?;
        let host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
            Some(address) => address.parse::<std::net::Ipv6Addr>().ok()?.to_string(),
            None => host.to_owned(),
        };
        let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b':' | b'_');
        let good = !host.is_empty() && host.bytes().all(plain);
        let digits = port.bytes().all(|b| b.is_ascii_digit());
        let port = port.parse().ok().filter(|port| *port != 0 && digits)?;
        good.then_some(Self { secure, host, port })
    }

    /// `host:port`, as in a URL.
    pub fn authority(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }
}

fn lease_seconds() -> u32 {
    40
}

fn qps() -> u32 {
    50
}

fn burst() -> u32 {
    100
}

pub(crate) fn yes() -> bool {
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handed_over_kubeconfig_path_is_used_before_the_copy_exists() {
        let api = Kubernetes::of("/etc/kubernetes/kubelet.conf".into());
        let dir = std::env::temp_dir().join(format!("keelson-config-kubeconfig-{}", std::process::id()));
        assert_eq!(api.handed_over(&dir), api.kubeconfig, "nobody hands anything over");
        std::fs::create_dir_all(&dir).unwrap();
        assert_eq!(api.handed_over(&dir), dir.join("kubeconfig.json"), "it is not there yet");
        std::fs::remove_dir_all(&dir).unwrap();
        let mut bootstraps = api.clone();
        bootstraps.certificates.bootstrap_kubeconfig = Some("/etc/kubernetes/bootstrap.conf".into());
        assert_eq!(bootstraps.handed_over(&dir), dir.join("kubeconfig.json"));
    }

    #[test]
    fn an_endpoint_has_a_scheme_a_host_and_a_port() {
        for (text, secure, host, port, authority) in [
            ("http://10.0.0.1:2379", false, "10.0.0.1", 2379, "10.0.0.1:2379"),
            ("https://etcd-1.example:1/", true, "etcd-1.example", 1, "etcd-1.example:1"),
            ("https://[fd00::1]:65535", true, "fd00::1", 65_535, "[fd00::1]:65535"),
        ] {
            let expected = Endpoint { secure, host: host.to_owned(), port };
            assert_eq!(Endpoint::parse(text), Some(expected.clone()), "{text}");
            assert_eq!(expected.authority(), authority);
        }
        for wrong in [
            "",
            "10.0.0.1:2379",
            "http://10.0.0.1",
            "http://:2379",
            "http://h:0",
            "http://h:65536",
            "http://h:+1",
            "unix:///run/etcd",
            "http://h:1/path",
            "http://user@h:1",
            "http://[h]:1",
            "http://h h:1",
        ] {
            assert_eq!(Endpoint::parse(wrong), None, "{wrong}");
        }
    }
}
