//! When a node requests a certificate, with which subject, and how often it retries (node-and-api.md §6.3 to §6.5).

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use keelson_config::CertificateKind;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// How long a request waits for its answer.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(15 * 60);
/// The earliest and the latest part of a certificate's lifetime at which it is rotated.
const ROTATION_WINDOW: (f64, f64) = (0.7, 0.9);
/// The delay after the first failure; it doubles with each further one.
const FIRST_BACKOFF: Duration = Duration::from_secs(2);
/// How many delays grow.
const GROWING_STEPS: u32 = 4;
/// The delay after each later failure.
const MAX_BACKOFF: Duration = Duration::from_secs(32);
/// The most by which a growing delay is lengthened, as a part of it.
const JITTER: f64 = 0.1;
/// The group of all nodes.
const NODES_GROUP: &str = "system:nodes";

/// The subject of a certificate: the user and groups, and the hosts, that it is for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Subject {
    /// `CN`: the user.
    pub common_name: String,
    /// `O`: the groups.
    pub organizations: BTreeSet<String>,
    /// Host names.
    #[serde(default)]
    pub dns_names: BTreeSet<String>,
    /// Host addresses.
    #[serde(default)]
    pub addresses: BTreeSet<IpAddr>,
}

impl Subject {
    /// Whether a certificate for `self` satisfies `wanted`; it may name more.
    pub fn covers(&self, wanted: &Self) -> bool {
        self.common_name == wanted.common_name
            && self.organizations.is_superset(&wanted.organizations)
            && self.dns_names.is_superset(&wanted.dns_names)
            && self.addresses.is_superset(&wanted.addresses)
    }
}

/// A certificate that exists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldCertificate {
    /// Its subject.
    pub subject: Subject,
    /// Seconds since 1970.
    pub not_before: i64,
    /// Seconds since 1970.
    pub not_after: i64,
    /// It was issued on a request of this agent or of a kubelet, and was not written into a kubeconfig by a person.
    pub is_managed: bool,
}

/// The subject of a node's client certificate.
pub fn client_subject(node: &str) -> Subject {
    let organizations = BTreeSet::from([NODES_GROUP.to_owned()]);
    Subject { common_name: format!("system:node:{node}"), organizations, ..Subject::default() }
}

/// The subject of a node's serving certificate, for these `status.addresses`. `None`: the node has no IP address yet, so no
/// certificate is requested; with `by_name` (gate `AllowDNSOnlyNodeCSR`) it has no name either.
pub fn serving_subject(node: &str, addresses: &Value, by_name: bool) -> Option<Subject> {
    let mut subject = client_subject(node);
    for address in addresses.as_array().into_iter().flatten() {
        let (kind, text) = (address["type"].as_str(), address["address"].as_str().unwrap_or_default());
        match (kind, text.parse::<IpAddr>()) {
            (Some("InternalIP" | "ExternalIP" | "Hostname"), Ok(ip)) => {
                subject.addresses.insert(ip);
            }
            (Some("Hostname" | "InternalDNS" | "ExternalDNS"), Err(_)) if !text.is_empty() => {
                subject.dns_names.insert(text.to_owned());
            }
            _ => {}
        }
    }
    let has_name = by_name && !subject.dns_names.is_empty();
    (has_name || !subject.addresses.is_empty()).then_some(subject)
}

/// Why a certificate is requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestReason {
    /// There is no certificate.
    Missing,
    /// It has expired.
    Expired,
    /// Its subject lacks a wanted name.
    WrongSubject,
    /// A person put it into the kubeconfig.
    FromKubeconfig,
    /// It expires soon.
    Rotation,
}

impl RequestReason {
    /// The reason as text, for the log.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Missing => "there is no certificate",
            Self::Expired => "the current one has expired",
            Self::WrongSubject => "the current one lacks a wanted name",
            Self::FromKubeconfig => "the current one was part of the kubeconfig",
            Self::Rotation => "the current one expires soon",
        }
    }
}

/// When the next certificate is requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// Now.
    Now(RequestReason),
    /// At this time, seconds since 1970.
    At(i64),
}

/// When the next certificate is requested; `part` from 0 to 1 chooses the rotation time, once for each certificate.
pub fn due(held: Option<&HeldCertificate>, wanted: &Subject, part: f64, now: i64) -> Due {
    let Some(held) = held else { return Due::Now(RequestReason::Missing) };
    if held.not_after < now {
        return Due::Now(RequestReason::Expired);
    }
    if !held.subject.covers(wanted) {
        return Due::Now(RequestReason::WrongSubject);
    }
    if !held.is_managed {
        return Due::Now(RequestReason::FromKubeconfig);
    }
    let at = rotation(held, part);
    if at <= now { Due::Now(RequestReason::Rotation) } else { Due::At(at) }
}

/// When a certificate is rotated, seconds since 1970.
pub fn rotation(held: &HeldCertificate, part: f64) -> i64 {
    let length = held.not_after.saturating_sub(held.not_before).max(0) as f64;
    let (first, last) = ROTATION_WINDOW;
    held.not_before.saturating_add((length * (first + (last - first) * part.clamp(0.0, 1.0))) as i64)
}

/// The delay after this many failures in a row, from 1; `jitter` is from 0 to 1.
pub fn backoff(failures: u32, jitter: f64) -> Duration {
    if failures > GROWING_STEPS {
        return MAX_BACKOFF;
    }
    let doubled = FIRST_BACKOFF * 2_u32.pow(failures.saturating_sub(1));
    doubled.mul_f64(1.0 + JITTER * jitter.clamp(0.0, 1.0))
}

/// The CertificateSigningRequest with this name; `pem_base64` is the PEM request in base64.
pub fn signing_request(kind: CertificateKind, name: &str, pem_base64: &str) -> Value {
    let (signer, usage) = match kind {
        CertificateKind::Client => ("kubernetes.io/kube-apiserver-client-kubelet", "client auth"),
        CertificateKind::Serving => ("kubernetes.io/kubelet-serving", "server auth"),
    };
    json!({
        "apiVersion": "certificates.k8s.io/v1",
        "kind": "CertificateSigningRequest",
        "metadata": {"name": name},
        "spec": {"request": pem_base64, "signerName": signer, "usages": ["digital signature", usage]},
    })
}

/// The state of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestState {
    /// It is neither signed nor refused yet.
    Pending {
        /// It is approved.
        approved: bool,
    },
    /// The certificates, as `status.certificate` has them: PEM in base64.
    Issued(String),
    /// No certificate will be issued: `Denied` or `Failed`, with reason and message.
    Refused(String),
}

/// Reads the state of a CertificateSigningRequest.
pub fn request_state(request: &Value) -> RequestState {
    let conditions = request["status"]["conditions"].as_array().into_iter().flatten();
    let mut approved = false;
    for condition in conditions {
        let text = |field: &str| condition[field].as_str().unwrap_or_default();
        match text("type") {
            kind @ ("Denied" | "Failed") if text("status") != "False" => {
                let details = [text("reason"), text("message")]
                    .map(str::trim)
                    .into_iter()
                    .filter(|word| !word.is_empty());
                let parts: Vec<&str> = std::iter::once(kind).chain(details).collect();
                return RequestState::Refused(parts.join(": "));
            }
            "Approved" => approved = true,
            _ => {}
        }
    }
    match request["status"]["certificate"].as_str().filter(|text| !text.is_empty()) {
        Some(certificate) if approved => RequestState::Issued(certificate.to_owned()),
        _ => RequestState::Pending { approved },
    }
}

#[cfg(test)]
#[path = "certificates_tests.rs"]
mod tests;
