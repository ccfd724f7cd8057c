//! What can go wrong with etcd.

use std::path::PathBuf;

/// Why etcd did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum EtcdError {
    /// No member did it in time; it may be asked again.
    #[error("etcd at {endpoints} does not answer: {message}")]
    Unreachable {
        /// The members.
        endpoints: String,
        /// What the last of them said.
        message: String,
    },
    /// etcd answered, and would answer the same again.
    #[error("etcd refuses {what}: {message}")]
    Refused {
        /// What was asked for.
        what: String,
        /// etcd's words.
        message: String,
    },
    /// What is to be written is more than etcd takes in one request (`--max-request-bytes`, 1.5 MiB unless it says otherwise).
    #[error("etcd refuses {what}: {message}")]
    TooLarge {
        /// What was asked for.
        what: String,
        /// etcd's words.
        message: String,
    },
    /// A file that a connection needs.
    #[error("cannot use {} that {field} names: {message}", path.display())]
    Credential {
        /// The setting of an [`keelson_config::Etcd`], as a KeelsonConfiguration writes it.
        field: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },
    /// A setting that a connection needs is not there.
    #[error("{field} is not given: {message}")]
    Missing {
        /// The setting of an [`keelson_config::Etcd`], as a KeelsonConfiguration writes it.
        field: &'static str,
        /// Why it is needed.
        message: String,
    },
    /// An endpoint that is none.
    #[error("{endpoint:?} is no endpoint of etcd: it {}", keelson_config::EtcdEndpoint::RULE)]
    Endpoint {
        /// The endpoint.
        endpoint: String,
    },
}

impl EtcdError {
    /// Whether asking again later may help.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Unreachable { .. })
    }
}
