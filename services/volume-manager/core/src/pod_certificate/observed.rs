//! What the server shows of a PodCertificateRequest.

use keelson_kube_model::time::parse_seconds;
use serde::Deserialize;

use crate::objects::or_default;
use crate::pem::{blocks, certificate};

/// What is known of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Observed {
    /// Nothing: the server has not answered.
    Unknown,
    /// The server does not have it, or not yet.
    Missing,
    /// The signer has not decided.
    Pending,
    /// The signer has issued a certificate.
    Issued(Issued),
    /// The signer has denied it.
    Denied(Refusal),
    /// The signer has failed.
    Failed(Refusal),
    /// The object is not valid, for this reason.
    Invalid(String),
}

/// An issued certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Issued {
    /// The certificate and those up to the root, as PEM without headers and other text.
    pub chain: String,
    /// `status.beginRefreshAt`, in seconds since 1970.
    pub begin_refresh: i64,
    /// `status.notAfter`, in seconds since 1970.
    pub not_after: i64,
}

/// Why a signer has not issued a certificate, in its words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// `reason` of the condition.
    pub reason: String,
    /// Its `message`.
    pub message: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Object {
    #[serde(deserialize_with = "or_default")]
    status: Status,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Status {
    #[serde(deserialize_with = "or_default")]
    conditions: Vec<Condition>,
    #[serde(deserialize_with = "or_default")]
    certificate_chain: String,
    #[serde(deserialize_with = "or_default")]
    begin_refresh_at: String,
    #[serde(deserialize_with = "or_default")]
    not_after: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Condition {
    #[serde(rename = "type", deserialize_with = "or_default")]
    kind: String,
    #[serde(deserialize_with = "or_default")]
    reason: String,
    #[serde(deserialize_with = "or_default")]
    message: String,
}

impl Observed {
    /// Reads a PodCertificateRequest. The first condition that ends it counts.
    pub fn parse(json: &[u8]) -> Self {
        let status = match serde_json::from_slice::<Object>(json) {
            Ok(object) => object.status,
            Err(error) => return Self::Invalid(format!("it cannot be read: {error}")),
        };
        for Condition { kind, reason, message } in &status.conditions {
            let refusal = || Refusal { reason: reason.clone(), message: message.clone() };
            match kind.as_str() {
                "Issued" => return status.issued().map_or_else(Self::Invalid, Self::Issued),
                "Denied" => return Self::Denied(refusal()),
                "Failed" => return Self::Failed(refusal()),
                _ => {}
            }
        }
        Self::Pending
    }
}

impl Status {
    fn issued(&self) -> Result<Issued, String> {
        let chain: String = blocks(&self.certificate_chain).iter().map(|der| certificate(der)).collect();
        if chain.is_empty() {
            return Err("status.certificateChain has no certificate".to_owned());
        }
        let time = |field: &str, text: &str| {
            parse_seconds(text).map_err(|_| format!("status.{field} {text:?} is not a time"))
        };
        let begin_refresh = time("beginRefreshAt", &self.begin_refresh_at)?;
        Ok(Issued { chain, begin_refresh, not_after: time("notAfter", &self.not_after)? })
    }
}
