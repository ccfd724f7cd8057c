//! Objects whose data are written as files, and what is known about them.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// A kind of object whose data is written as files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ObjectKind {
    /// ConfigMap.
    ConfigMap,
    /// Secret.
    Secret,
    /// ClusterTrustBundle.
    ClusterTrustBundle,
    /// All ClusterTrustBundles of a signer, whose name is that of the object.
    ClusterTrustBundleList,
    /// PodCertificateRequest.
    PodCertificateRequest,
}

impl ObjectKind {
    /// All kinds.
    const ALL: [Self; 5] = [
        Self::ConfigMap,
        Self::Secret,
        Self::ClusterTrustBundle,
        Self::ClusterTrustBundleList,
        Self::PodCertificateRequest,
    ];

    /// The value of the object's `kind` field.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::ConfigMap => "ConfigMap",
            Self::Secret => "Secret",
            Self::ClusterTrustBundle => "ClusterTrustBundle",
            Self::ClusterTrustBundleList => "ClusterTrustBundleList",
            Self::PodCertificateRequest => "PodCertificateRequest",
        }
    }

    /// Parses the value of an object's `kind` field.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == text)
    }

    /// Whether an object of the kind has keys that can be files.
    pub const fn has_keys(self) -> bool {
        matches!(self, Self::ConfigMap | Self::Secret)
    }
}

/// The name of an object.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ObjectName {
    /// Its kind.
    pub kind: ObjectKind,
    /// Its namespace; empty for an object of the cluster.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = self.kind.as_str();
        if self.namespace.is_empty() {
            return write!(f, "{kind} {}", self.name);
        }
        write!(f, "{kind} {}/{}", self.namespace, self.name)
    }
}

/// The data of an object: the bytes of each key. Of ClusterTrustBundles: the JSON of each bundle by name; of a PodCertificateRequest: its
/// JSON by its name.
pub type ObjectData = BTreeMap<String, Arc<[u8]>>;

/// What is known about an object.
#[derive(Clone, Default, PartialEq, Eq)]
pub enum ObjectLookup {
    /// pod-config has not reported the object yet.
    #[default]
    Unknown,
    /// The object does not exist.
    Missing,
    /// The object exists but cannot be read, for this reason.
    Unreadable(String),
    /// The object exists and has this data.
    Present(Arc<ObjectData>),
}

// Shows the keys only: the values may be a Secret's.
impl fmt::Debug for ObjectLookup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => f.write_str("Unknown"),
            Self::Missing => f.write_str("Missing"),
            Self::Unreadable(why) => write!(f, "Unreadable({why})"),
            Self::Present(data) => f.debug_set().entries(data.keys()).finish(),
        }
    }
}
