//! Service account tokens in volumes: their names and when they are renewed (volumes.md §9.6).

use std::fmt;
use std::sync::Arc;

/// A token is renewed after this many seconds at the latest.
const MAX_USE_SECONDS: i64 = 24 * 3600;
/// The fraction of its lifetime after which a token is renewed.
const USED_FRACTION: (i64, i64) = (4, 5);
/// A token is renewed up to this many seconds earlier, so that not all are renewed at once.
pub const JITTER_SECONDS: i64 = 10;

/// The name of a token of a pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct TokenName {
    /// The service account, in the pod's namespace.
    pub service_account: String,
    /// The audience; empty for the API server.
    pub audience: String,
    /// The requested lifetime in seconds.
    pub expiration_seconds: i64,
}

impl fmt::Display for TokenName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "token of the service account {:?}", self.service_account)?;
        if !self.audience.is_empty() {
            write!(f, " for {:?}", self.audience)?;
        }
        Ok(())
    }
}

/// The time span in which a token is valid, in seconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Validity {
    /// When the token was issued.
    pub issued: i64,
    /// When the token expires.
    pub expires: i64,
}

impl Validity {
    /// The validity of a token that expires at `expires` and was issued for `lifetime` seconds.
    pub const fn from_expiry(expires: i64, lifetime: i64) -> Self {
        Self { issued: expires.saturating_sub(lifetime), expires }
    }

    /// Whether the token has not expired yet.
    pub const fn is_valid(self, now: i64) -> bool {
        now < self.expires
    }

    /// When to renew the token: after 80 % of its lifetime or after 24 h, less `jitter` seconds.
    pub fn renew_at(self, jitter: i64) -> i64 {
        let lifetime = self.expires.saturating_sub(self.issued).max(0);
        let used = lifetime / USED_FRACTION.1 * USED_FRACTION.0;
        self.issued.saturating_add(used.min(MAX_USE_SECONDS)).saturating_sub(jitter)
    }
}

/// What is known about a token.
#[derive(Clone, PartialEq, Eq)]
pub enum TokenLookup {
    /// There is no token yet; what it waits for.
    Pending(String),
    /// The API server refuses to create the token, for this reason.
    Refused(String),
    /// The token.
    Present(Arc<[u8]>),
}

// Never shows the token.
impl fmt::Debug for TokenLookup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pending(what) => write!(f, "Pending({what})"),
            Self::Refused(why) => write!(f, "Refused({why})"),
            Self::Present(_) => f.write_str("Present"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_renewed_after_80_percent_of_its_lifetime_or_a_day() {
        const DAY: i64 = 24 * 3600;
        for (lifetime, jitter, after) in [
            (600, 0, 480),
            (3600, 0, 2880),
            (3600, 10, 2870),
            (30 * 3600, 0, DAY),
            (365 * DAY, 7, DAY - 7),
            (-5, 0, 0),
        ] {
            let validity = Validity { issued: 1000, expires: 1000 + lifetime };
            assert_eq!(validity.renew_at(jitter), 1000 + after, "{lifetime} {jitter}");
        }
    }

    #[test]
    fn a_token_is_valid_until_it_expires() {
        let validity = Validity::from_expiry(1000, 600);
        assert_eq!(validity.issued, 400);
        assert!(validity.is_valid(999) && !validity.is_valid(1000));
    }

    #[test]
    fn token_names_and_debug_output_do_not_contain_the_token() {
        let mut name = TokenName {
            service_account: "default".to_owned(),
            audience: String::new(),
            expiration_seconds: 3607,
        };
        assert_eq!(name.to_string(), "token of the service account \"default\"");
        name.audience = "vault".to_owned();
        assert_eq!(name.to_string(), "token of the service account \"default\" for \"vault\"");
        let found = TokenLookup::Present(Arc::from(b"hunter2".as_slice()));
        assert!(!format!("{found:?}").contains("hunter2"));
    }
}
