//! When a node asks for a certificate, for which, and how often it tries (node-and-api.md §6.3 to §6.5).

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use keelson_config::CertificateKind;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// How long an answer to a request is waited for.
pub const ANSWER_WITHIN: Duration = Duration::from_secs(15 * 60);
/// The earliest and the latest part of a certificate's life in which it is replaced.
const ROTATED_AT: (f64, f64) = (0.7, 0.9);
/// After the first failure; doubled with each of the next.
const PAUSE: Duration = Duration::from_secs(2);
/// So many pauses grow.
const GROWING: u32 = 4;
/// Every further one.
const LONGEST: Duration = Duration::from_secs(32);
/// So much longer a growing pause may be, at most.
const JITTER: f64 = 0.1;
/// The group of all nodes.
const NODES: &str = "system:nodes";

/// What a certificate says of whom it is for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Subject {
    /// `CN`: the user.
    pub common_name: String,
    /// `O`: the groups.
    pub organizations: BTreeSet<String>,
    /// Names of hosts.
    #[serde(default)]
    pub dns_names: BTreeSet<String>,
    /// Addresses of hosts.
    #[serde(default)]
    pub addresses: BTreeSet<IpAddr>,
}

impl Subject {
    /// Whether a certificate for `self` does for whoever wants `wanted`; it may say more.
    pub fn covers(&self, wanted: &Self) -> bool {
        self.common_name == wanted.common_name
            && self.organizations.is_superset(&wanted.organizations)
            && self.dns_names.is_superset(&wanted.dns_names)
            && self.addresses.is_superset(&wanted.addresses)
    }
}

/// A certificate that is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// For whom.
    pub subject: Subject,
    /// Seconds since 1970.
    pub not_before: i64,
    /// Seconds since 1970.
    pub not_after: i64,
    /// It was asked for here or by a kubelet, and not written into a kubeconfig by somebody.
    pub was_asked_for: bool,
}

/// What a client certificate of a node is for.
pub fn client_subject(node: &str) -> Subject {
    let organizations = BTreeSet::from([NODES.to_owned()]);
    Subject { common_name: format!("system:node:{node}"), organizations, ..Subject::default() }
}

/// What a serving certificate of a node with these `status.addresses` is for. `None`: it has no address yet under which it
/// could be reached, and none is asked for.
pub fn serving_subject(node: &str, addresses: &Value) -> Option<Subject> {
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
    (!subject.addresses.is_empty()).then_some(subject)
}

/// Why a certificate is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// There is none.
    None,
    /// It has ended.
    Ended,
    /// It is for another name, or lacks one.
    Other,
    /// It is one of somebody's, from the kubeconfig.
    Given,
    /// It ends before long.
    Rotation,
}

impl Why {
    /// In words.
    pub fn words(self) -> &'static str {
        match self {
            Self::None => "there is none",
            Self::Ended => "the one before has ended",
            Self::Other => "the one before is for other names",
            Self::Given => "the one before was given with the kubeconfig",
            Self::Rotation => "the one before ends before long",
        }
    }
}

/// When the next certificate is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// At once.
    Now(Why),
    /// At this moment, seconds since 1970.
    At(i64),
}

/// When the next certificate is asked for; `part` from 0 to 1 chooses the moment of a rotation, once for each certificate.
pub fn due(held: Option<&Held>, wanted: &Subject, part: f64, now: i64) -> Due {
    let Some(held) = held else { return Due::Now(Why::None) };
    if held.not_after < now {
        return Due::Now(Why::Ended);
    }
    if !held.subject.covers(wanted) {
        return Due::Now(Why::Other);
    }
    if !held.was_asked_for {
        return Due::Now(Why::Given);
    }
    let at = rotation(held, part);
    if at <= now { Due::Now(Why::Rotation) } else { Due::At(at) }
}

/// The moment at which a certificate is replaced, seconds since 1970.
pub fn rotation(held: &Held, part: f64) -> i64 {
    let length = held.not_after.saturating_sub(held.not_before).max(0) as f64;
    let (first, last) = ROTATED_AT;
    held.not_before.saturating_add((length * (first + (last - first) * part.clamp(0.0, 1.0))) as i64)
}

/// The pause after so many failures in a row, from 1; `jitter` is from 0 to 1.
pub fn pause(failures: u32, jitter: f64) -> Duration {
    if failures > GROWING {
        return LONGEST;
    }
    let doubled = PAUSE * 2_u32.pow(failures.saturating_sub(1));
    doubled.mul_f64(1.0 + JITTER * jitter.clamp(0.0, 1.0))
}

/// The CertificateSigningRequest of a name and a request in PEM, which is handed in as base64.
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

/// What has become of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// Nobody has said anything yet, or it is approved and not signed.
    Waits {
        /// It is approved.
        approved: bool,
    },
    /// The certificates, as `status.certificate` has them: base64 of PEM.
    Issued(String),
    /// There will be none: `Denied` or `Failed`, with reason and message.
    Refused(String),
}

/// Reads a CertificateSigningRequest.
pub fn answer(request: &Value) -> Answer {
    let conditions = request["status"]["conditions"].as_array().into_iter().flatten();
    let mut approved = false;
    for condition in conditions {
        let text = |field: &str| condition[field].as_str().unwrap_or_default();
        match text("type") {
            kind @ ("Denied" | "Failed") if text("status") != "False" => {
                let words = [text("reason"), text("message")]
                    .map(str::trim)
                    .into_iter()
                    .filter(|word| !word.is_empty());
                let told: Vec<&str> = std::iter::once(kind).chain(words).collect();
                return Answer::Refused(told.join(": "));
            }
            "Approved" => approved = true,
            _ => {}
        }
    }
    match request["status"]["certificate"].as_str().filter(|text| !text.is_empty()) {
        Some(certificate) if approved => Answer::Issued(certificate.to_owned()),
        _ => Answer::Waits { approved },
    }
}

#[cfg(test)]
#[path = "certificates_tests.rs"]
mod tests;
