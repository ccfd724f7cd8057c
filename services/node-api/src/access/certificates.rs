//! Why a client's certificate is worth nothing here: for the log, with the way out, and as a label of few values.

use keelson_service_kit::Metrics;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use rustls::{CertificateError, Error};

/// Why one was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Refusal {
    /// The label of the metric.
    pub(crate) reason: &'static str,
    /// For people.
    pub(crate) text: &'static str,
}

/// There are no authorities to compare with.
pub(crate) const NO_AUTHORITY: Refusal = Refusal {
    reason: "no_authority",
    text: "nobody is known by a certificate here: authentication.x509.clientCAFile names no authority",
};
/// Its subject names nobody.
pub(crate) const NO_NAME: Refusal =
    Refusal { reason: "no_name", text: "its subject has no common name, which is the name of the user" };

/// Nothing more is known.
pub(crate) const UNUSABLE: Refusal = Refusal { reason: "other", text: "it cannot be used" };

const VERSION: Refusal = Refusal {
    reason: "x509_version",
    text: "it is of X.509 version 1 and cannot be used; sign it with extensions (`openssl x509 -req -extfile …`), which makes \
           it version 3",
};

impl Refusal {
    /// Why the check of a certificate has failed; none where the failure is not about one.
    pub(crate) fn of(error: &Error) -> Option<Self> {
        let Error::InvalidCertificate(error) = error else { return None };
        let (reason, text) = match error {
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                ("expired", "it has expired; have a new one signed, or look at the clocks")
            }
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                ("not_valid_yet", "it is not valid yet; look at the clocks of both machines")
            }
            CertificateError::UnknownIssuer => (
                "unknown_issuer",
                "none of the authorities that authentication.x509.clientCAFile names has signed it",
            ),
            CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
                ("purpose", "it is not for clients; its extendedKeyUsage must have clientAuth")
            }
            CertificateError::BadSignature => (
                "signature",
                "its signature is wrong: an authority of the same name with another key has signed it, or it was changed",
            ),
            // What the library has no word of its own for.
            CertificateError::Other(other) if format!("{other:?}").contains("UnsupportedCertVersion") => {
                return Some(VERSION);
            }
            CertificateError::BadEncoding => ("encoding", "it cannot be read"),
            _ => return Some(UNUSABLE),
        };
        Some(Self { reason, text })
    }
}

/// Client certificates that were worth nothing, by why.
#[derive(Debug, Clone)]
pub(crate) struct RefusedCertificates(Family<[(&'static str, &'static str); 1], Counter>);

impl RefusedCertificates {
    /// Registered with `metrics`, once for each service.
    pub(crate) fn registered(metrics: &Metrics) -> Self {
        let own = Self(Family::default());
        let help = "Certificates that clients of the kubelet API have shown and that were refused, by why";
        metrics.register("keelson_api_refused_client_certificates", help, own.0.clone());
        own
    }

    /// One was refused.
    pub(crate) fn count(&self, refusal: Refusal) {
        self.0.get_or_create(&[("reason", refusal.reason)]).inc();
    }
}
