//! Certificates of pods in projected volumes: when they are requested, used, refreshed and given up (volumes.md §9.6).
//!
//! A certificate is requested with a PodCertificateRequest, which a signer of the control plane issues, denies or fails. All times are in
//! seconds since 1970.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use zeroize::Zeroizing;

pub use observed::{Issued, Observed, Refusal};

use crate::wait_owner::WaitOwner;

mod observed;

/// A refresh starts up to this many seconds late, so that not all start at once. The same goes for giving up a request.
pub const JITTER_SECONDS: i64 = 5 * 60;
/// A request that the server does not show for this many seconds counts as deleted.
const ABANDON_SECONDS: i64 = 10 * 60;
/// A refresh that is late by this many seconds is reported.
const OVERDUE_SECONDS: i64 = 10 * 60;

/// The name of a certificate within its pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct CertificateName {
    /// The volume.
    pub volume: String,
    /// The index of the source in the volume.
    pub source: usize,
}

/// The kind of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyType {
    /// RSA of 3072 bits.
    Rsa3072,
    /// RSA of 4096 bits.
    Rsa4096,
    /// ECDSA on the curve P-256.
    EcdsaP256,
    /// ECDSA on the curve P-384.
    EcdsaP384,
    /// ECDSA on the curve P-521.
    EcdsaP521,
    /// Ed25519.
    Ed25519,
}

impl KeyType {
    /// Parses the value of `keyType`.
    pub fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "RSA3072" => Self::Rsa3072,
            "RSA4096" => Self::Rsa4096,
            "ECDSAP256" => Self::EcdsaP256,
            "ECDSAP384" => Self::EcdsaP384,
            "ECDSAP521" => Self::EcdsaP521,
            "ED25519" => Self::Ed25519,
            _ => return None,
        })
    }
}

/// What a pod asks a signer for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateRequest {
    /// The signer.
    pub signer: String,
    /// The kind of the key.
    pub key_type: KeyType,
    /// The longest lifetime of the certificate in seconds; the API server has a default.
    pub max_expiration_seconds: Option<i32>,
    /// What the pod tells the signer, which the API server does not verify.
    pub user_annotations: BTreeMap<String, String>,
}

/// A certificate and its key that are written as files. An empty path is no file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateFiles {
    /// The certificate.
    pub name: CertificateName,
    /// How it is requested.
    pub request: CertificateRequest,
    /// The file with the key and the chain, relative to the volume.
    pub bundle_path: String,
    /// The file with the key.
    pub key_path: String,
    /// The file with the chain.
    pub chain_path: String,
    /// The files' permission bits; `defaultMode` if unset.
    pub mode: Option<u32>,
    /// The files' owner; root if unset.
    pub owner: Option<u32>,
}

/// An issued certificate with its key.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// The key in PKCS #8, as PEM.
    pub key: Zeroizing<String>,
    /// The certificate and those up to the root, as PEM.
    pub chain: String,
}

// Never shows the key.
impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").field("chain", &self.chain).finish_non_exhaustive()
    }
}

/// What is known about a certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CertificateLookup {
    /// There is none yet.
    Pending {
        /// What it waits for.
        what: String,
        /// Who has to act.
        owner: WaitOwner,
    },
    /// The signer refuses for good. The message is for the pod.
    Refused(String),
    /// The certificate in use.
    Present(Arc<Credentials>),
}

/// The state of one certificate of a pod. A restarted service begins anew, since keys are only in memory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum State {
    /// Nothing has been requested.
    #[default]
    Initial,
    /// The first request is waiting for the signer.
    Waiting(Request),
    /// A certificate is in use.
    Fresh(Lifetime),
    /// A certificate is in use, and the request for the next one is waiting for the signer.
    Refreshing(Lifetime, Request),
    /// The signer has denied a request. This is final.
    Denied(Refusal),
    /// The signer has failed to issue a certificate. This is final.
    Failed(Refusal),
}

/// A request that the server has accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// `metadata.name`, in the pod's namespace.
    pub name: String,
    /// When it counts as deleted if the server does not show it.
    abandon_at: i64,
    /// The server has shown it.
    is_seen: bool,
}

/// The lifetime of the certificate in use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lifetime {
    /// When the next one is requested.
    refresh_at: i64,
    /// When it expires.
    not_after: i64,
    is_overdue_reported: bool,
    is_expiry_reported: bool,
}

/// What comes next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Make a key and create a request with it, then call [`State::requested`].
    Request,
    /// Use this chain with the key of the request from now on, then ask again.
    Use {
        /// As PEM.
        chain: String,
    },
    /// Wait until the request changes, at most until this time.
    Wait {
        /// `None`: no time changes anything.
        until: Option<i64>,
    },
}

/// Something to report once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Notice {
    /// The next certificate is overdue.
    Overdue,
    /// The certificate in use has expired.
    Expired,
    /// The signer has denied the request with this name.
    Denied(String, Refusal),
    /// The request with this name has failed.
    Failed(String, Refusal),
    /// The request with this name was deleted before it was issued.
    Deleted(String),
}

/// What comes next, and what to report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// What comes next.
    pub action: Action,
    /// What to report.
    pub notices: Vec<Notice>,
}

impl Lifetime {
    fn overdue_at(&self) -> i64 {
        self.refresh_at.saturating_add(OVERDUE_SECONDS)
    }

    /// Takes what has to be reported by now.
    fn take_notices(&mut self, now: i64) -> Vec<Notice> {
        let mut notices = Vec::new();
        if now >= self.overdue_at() && !std::mem::replace(&mut self.is_overdue_reported, true) {
            notices.push(Notice::Overdue);
        }
        if now >= self.not_after && !std::mem::replace(&mut self.is_expiry_reported, true) {
            notices.push(Notice::Expired);
        }
        notices
    }

    /// When the next notice is due.
    fn next_notice(&self) -> Option<i64> {
        let overdue = (!self.is_overdue_reported).then(|| self.overdue_at());
        let expiry = (!self.is_expiry_reported).then_some(self.not_after);
        overdue.into_iter().chain(expiry).min()
    }
}

impl Request {
    /// Notes what the server shows, and returns whether the request counts as deleted.
    fn is_gone(&mut self, now: i64, observed: &Observed) -> bool {
        match observed {
            Observed::Missing => self.is_seen || now >= self.abandon_at,
            // Nothing is known while pod-config or the server does not answer.
            Observed::Unknown => false,
            Observed::Pending
            | Observed::Invalid(_)
            | Observed::Issued(_)
            | Observed::Denied(_)
            | Observed::Failed(_) => {
                self.is_seen = true;
                false
            }
        }
    }

    /// When it counts as deleted, unless the server has shown it.
    fn next_look(&self) -> Option<i64> {
        (!self.is_seen).then_some(self.abandon_at)
    }
}

impl State {
    /// A request was created at `now`. `jitter`: 0 to [`JITTER_SECONDS`].
    pub fn requested(&mut self, name: String, now: i64, jitter: i64) {
        let abandon_at = now.saturating_add(ABANDON_SECONDS).saturating_add(jitter);
        let request = Request { name, abandon_at, is_seen: false };
        *self = match std::mem::take(self) {
            Self::Initial | Self::Waiting(_) => Self::Waiting(request),
            Self::Fresh(lifetime) | Self::Refreshing(lifetime, _) => Self::Refreshing(lifetime, request),
            last @ (Self::Denied(_) | Self::Failed(_)) => last,
        };
    }

    /// Decides what comes next. `observed`: what is known of [`State::request`]; `jitter`: 0 to [`JITTER_SECONDS`].
    pub fn step(&mut self, now: i64, observed: &Observed, jitter: i64) -> Step {
        match std::mem::take(self) {
            Self::Initial => Step { action: Action::Request, notices: Vec::new() },
            Self::Fresh(mut lifetime) => {
                let notices = lifetime.take_notices(now);
                let action = if now >= lifetime.refresh_at {
                    Action::Request
                } else {
                    let until =
                        lifetime.next_notice().map_or(lifetime.refresh_at, |at| at.min(lifetime.refresh_at));
                    Action::Wait { until: Some(until) }
                };
                *self = Self::Fresh(lifetime);
                Step { action, notices }
            }
            Self::Waiting(request) => self.step_request(None, request, (now, observed, jitter)),
            Self::Refreshing(lifetime, request) => {
                self.step_request(Some(lifetime), request, (now, observed, jitter))
            }
            last @ (Self::Denied(_) | Self::Failed(_)) => {
                *self = last;
                Step { action: Action::Wait { until: None }, notices: Vec::new() }
            }
        }
    }

    /// A request is waiting; `lifetime`: of the certificate that is in use meanwhile.
    fn step_request(
        &mut self,
        mut lifetime: Option<Lifetime>,
        mut request: Request,
        (now, observed, jitter): (i64, &Observed, i64),
    ) -> Step {
        let mut notices = lifetime.as_mut().map(|lifetime| lifetime.take_notices(now)).unwrap_or_default();
        let never = Action::Wait { until: None };
        if request.is_gone(now, observed) {
            notices.push(Notice::Deleted(request.name));
            *self = lifetime.map_or(Self::Initial, Self::Fresh);
            return Step { action: Action::Request, notices };
        }
        let action = match observed {
            Observed::Issued(Issued { chain, begin_refresh, not_after }) => {
                *self = Self::Fresh(Lifetime {
                    refresh_at: begin_refresh.saturating_add(jitter),
                    not_after: *not_after,
                    is_overdue_reported: false,
                    is_expiry_reported: false,
                });
                Action::Use { chain: chain.clone() }
            }
            Observed::Denied(refusal) => {
                notices.push(Notice::Denied(request.name, refusal.clone()));
                *self = Self::Denied(refusal.clone());
                never
            }
            Observed::Failed(refusal) => {
                notices.push(Notice::Failed(request.name, refusal.clone()));
                *self = Self::Failed(refusal.clone());
                never
            }
            Observed::Unknown | Observed::Missing | Observed::Pending | Observed::Invalid(_) => {
                let times = [request.next_look(), lifetime.as_ref().and_then(Lifetime::next_notice)];
                *self = match lifetime {
                    Some(lifetime) => Self::Refreshing(lifetime, request),
                    None => Self::Waiting(request),
                };
                // A time that is past changes nothing without an event, as that of a request while the server does not answer.
                Action::Wait { until: times.into_iter().flatten().filter(|at| *at > now).min() }
            }
        };
        Step { action, notices }
    }

    /// The name of the request that is waiting for the signer.
    pub fn request(&self) -> Option<&str> {
        match self {
            Self::Waiting(request) | Self::Refreshing(_, request) => Some(&request.name),
            Self::Initial | Self::Fresh(_) | Self::Denied(_) | Self::Failed(_) => None,
        }
    }

    /// The message for the pod if the signer refuses for good. It begins with the kubelet's.
    pub fn refusal(&self, signer: &str) -> Option<String> {
        let (verb, Refusal { reason, message }) = match self {
            Self::Denied(refusal) => ("denied", refusal),
            Self::Failed(refusal) => ("failed", refusal),
            Self::Initial | Self::Waiting(_) | Self::Fresh(_) | Self::Refreshing(..) => return None,
        };
        Some(format!(
            "PodCertificateRequest was permanently {verb}: reason={reason:?} message={message:?}; \
             that is what the signer {signer} decided for this pod, and only a new pod asks it again"
        ))
    }

    /// The state as the metric `kubelet_podcertificate_states` names it.
    pub fn metric(&self, now: i64) -> &'static str {
        match self {
            Self::Initial | Self::Waiting(_) => "not_yet_issued",
            Self::Fresh(lifetime) | Self::Refreshing(lifetime, _) if now >= lifetime.not_after => "expired",
            Self::Fresh(lifetime) | Self::Refreshing(lifetime, _) if now >= lifetime.overdue_at() => {
                "overdue_for_refresh"
            }
            Self::Fresh(_) | Self::Refreshing(..) => "fresh",
            Self::Denied(_) => "denied",
            Self::Failed(_) => "failed",
        }
    }
}

#[cfg(test)]
mod tests;
