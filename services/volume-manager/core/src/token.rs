//! Tokens of service accounts in volumes: which are wanted, and when they are made anew (volumes.md §9.6).

use std::fmt;
use std::sync::Arc;

/// A token is not used for longer than this, in seconds.
const LONGEST: i64 = 24 * 3600;
/// Of its lifetime a token is used for so much.
const USED: (i64, i64) = (4, 5);
/// By up to so many seconds it is made anew earlier, so that not all are at once.
pub const JITTER_SECONDS: i64 = 10;

/// Names a token of a pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct TokenName {
    /// The account, in the pod's namespace.
    pub service_account: String,
    /// Who is to accept it; empty: the API server.
    pub audience: String,
    /// How long it is to be good.
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

/// When a token began and when it ends, seconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Validity {
    /// It was made.
    pub issued: i64,
    /// It is good for nothing from here on.
    pub expires: i64,
}

impl Validity {
    /// Of a token that was made for `lifetime` seconds: it began so long before its end.
    pub const fn ending(expires: i64, lifetime: i64) -> Self {
        Self { issued: expires.saturating_sub(lifetime), expires }
    }

    /// Whether it is still good.
    pub const fn is_valid(self, now: i64) -> bool {
        now < self.expires
    }

    /// When it is to be made anew: after 80 % of its lifetime or after 24 h, by `jitter` seconds earlier.
    pub fn renew_at(self, jitter: i64) -> i64 {
        let lifetime = self.expires.saturating_sub(self.issued).max(0);
        let used = lifetime / USED.1 * USED.0;
        self.issued.saturating_add(used.min(LONGEST)).saturating_sub(jitter)
    }
}

/// What is known of a token.
#[derive(Clone, PartialEq, Eq)]
pub enum TokenLookup {
    /// There is none yet; who has to do what.
    Waits(String),
    /// The API server refuses it; why.
    Refused(String),
    /// Its text.
    Present(Arc<[u8]>),
}

// Never its text.
impl fmt::Debug for TokenLookup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Waits(what) => write!(f, "Waits({what})"),
            Self::Refused(why) => write!(f, "Refused({why})"),
            Self::Present(_) => f.write_str("Present"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_made_anew_after_four_fifths_of_its_life_or_a_day() {
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
    fn a_token_is_good_until_its_end() {
        let validity = Validity::ending(1000, 600);
        assert_eq!(validity.issued, 400);
        assert!(validity.is_valid(999) && !validity.is_valid(1000));
    }

    #[test]
    fn a_token_is_named_without_its_text() {
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
