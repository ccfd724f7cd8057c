//! Why a client certificate was refused: a text for the log that says what to do, and a metric label with few values.

use keelson_service_kit::Metrics;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use rustls::{CertificateError, Error};

/// Why a client certificate was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CertificateRefusal {
    /// The label of the metric.
    pub(crate) reason: &'static str,
    /// The text for the log.
    pub(crate) text: &'static str,
}

/// No authority for client certificates is configured.
pub(crate) const NO_AUTHORITY: CertificateRefusal = CertificateRefusal {
    reason: "no_authority",
    text: "client certificates are not accepted: authentication.x509.clientCAFile is not set",
};
/// The subject names no user.
pub(crate) const NO_NAME: CertificateRefusal = CertificateRefusal {
    reason: "no_name",
    text: "its subject has no common name, which is the name of the user",
};

/// Any other reason.
pub(crate) const UNUSABLE: CertificateRefusal =
    CertificateRefusal { reason: "other", text: "it cannot be used" };

const VERSION: CertificateRefusal = CertificateRefusal {
    reason: "x509_version",
    text: "it has X.509 version 1, which is not supported; sign it with extensions (`openssl x509 -req -extfile …`) to get \
           version 3",
};

impl CertificateRefusal {
    /// The reason of a failed verification; `None` if the error is not about a certificate.
    pub(crate) fn from_tls_error(error: &Error) -> Option<Self> {
        let Error::InvalidCertificate(error) = error else { return None };
        let (reason, text) = match error {
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                ("expired", "it has expired; have a new one signed, or check the clocks of both machines")
            }
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                ("not_valid_yet", "it is not valid yet; check the clocks of both machines")
            }
            CertificateError::UnknownIssuer => {
                ("unknown_issuer", "it is not signed by an authority in authentication.x509.clientCAFile")
            }
            CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
                ("purpose", "it is not a client certificate; its extendedKeyUsage must include clientAuth")
            }
            CertificateError::BadSignature => (
                "signature",
                "its signature is invalid: it was signed by an authority of the same name with another key, or it was changed",
            ),
            // rustls has no variant for this error.
            CertificateError::Other(other) if format!("{other:?}").contains("UnsupportedCertVersion") => {
                return Some(VERSION);
            }
            CertificateError::BadEncoding => ("encoding", "it cannot be read"),
            _ => return Some(UNUSABLE),
        };
        Some(Self { reason, text })
    }
}

/// Counts refused client certificates by reason.
#[derive(Debug, Clone)]
pub(crate) struct RefusedCertificates(Family<[(&'static str, &'static str); 1], Counter>);

impl RefusedCertificates {
    /// Registers the counter; call it once.
    pub(crate) fn register(metrics: &Metrics) -> Self {
        let counter = Self(Family::default());
        let help = "Client certificates that the kubelet API refused, by reason";
        metrics.register("keelson_api_refused_client_certificates", help, counter.0.clone());
        counter
    }

    /// Counts one refusal.
    pub(crate) fn count(&self, refusal: CertificateRefusal) {
        self.0.get_or_create(&[("reason", refusal.reason)]).inc();
    }
}
