//! Image references, pull policies and pull back-off (pod-lifecycle.md §1, runtime-and-resources.md §6.1).

use std::collections::BTreeMap;
use std::time::Duration;

/// Seconds before the first retry of a failed pull.
pub const BACKOFF_INITIAL_S: i64 = 10;
/// Maximum seconds between two pulls.
const BACKOFF_MAX_S: i64 = 300;
const NANOS: i64 = 1_000_000_000;

/// An image reference that is not valid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("Failed to apply default image tag {reference:?}: {reason}")]
pub struct InvalidReferenceError {
    /// The reference as written in the spec.
    pub reference: String,
    /// Why it is not valid.
    pub reason: &'static str,
}

/// The reference with `:latest` appended when it has neither tag nor digest.
///
/// # Errors
/// The reference is not of the form `[host[:port]/]path[:tag][@digest]` with a lower-case path.
pub fn with_default_tag(reference: &str) -> Result<String, InvalidReferenceError> {
    let fail = |reason| InvalidReferenceError { reference: reference.to_owned(), reason };
    if reference.is_empty() {
        return Err(fail("couldn't parse image name: the reference is empty"));
    }
    let (name, digest) = match reference.split_once('@') {
        Some((name, digest)) => (name, Some(digest)),
        None => (reference, None),
    };
    if digest.is_some_and(|d| !d.contains(':') || d.ends_with(':')) {
        return Err(fail("couldn't parse image name: the digest is not algorithm:hex"));
    }
    let last_slash = name.rfind('/').unwrap_or(0);
    let (path, tag) = match name[last_slash..].rfind(':') {
        Some(i) => (&name[..last_slash + i], Some(&name[last_slash + i + 1..])),
        None => (name, None),
    };
    check_path(path).map_err(fail)?;
    match tag {
        Some(tag) if !valid_tag(tag) => Err(fail("couldn't parse image name: the tag is not valid")),
        None if digest.is_none() => Ok(format!("{reference}:latest")),
        _ => Ok(reference.to_owned()),
    }
}

fn check_path(path: &str) -> Result<(), &'static str> {
    // A first part with capital letters cannot be a repository, so it is a registry, as in the kubelet's parser.
    let is_host = |first: &str| {
        first.contains(['.', ':']) || first == "localhost" || first.chars().any(|c| c.is_ascii_uppercase())
    };
    let (host, rest) = match path.split_once('/') {
        Some((first, rest)) if is_host(first) => (Some(first), rest),
        _ => (None, path),
    };
    if host.is_some_and(|h| !h.chars().all(|c| c.is_ascii_alphanumeric() || ".-:[]".contains(c))) {
        return Err("couldn't parse image name: the registry's host name is not valid");
    }
    if rest.chars().any(|c| c.is_ascii_uppercase()) {
        return Err("couldn't parse image name: repository name must be lowercase");
    }
    let well_formed = rest.split('/').all(|part| {
        part.starts_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit())
            && part.ends_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit())
            && part.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "._-".contains(c))
    });
    if well_formed { Ok(()) } else { Err("couldn't parse image name: invalid reference format") }
}

fn valid_tag(tag: &str) -> bool {
    tag.len() <= 128
        && tag.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
        && tag.chars().all(|c| c.is_ascii_alphanumeric() || "_.-".contains(c))
}

/// `spec.containers[].imagePullPolicy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PullPolicy {
    /// Pull at each container start.
    Always,
    /// Pull if the image is not present.
    IfNotPresent,
    /// Never pull.
    Never,
}

impl PullPolicy {
    /// The policy by its API name; an empty text gives the API's default for the reference.
    pub fn parse(text: &str, reference: &str) -> Self {
        match text {
            "Always" => Self::Always,
            "Never" => Self::Never,
            "" if reference.ends_with(":latest") => Self::Always,
            _ => Self::IfNotPresent,
        }
    }
}

/// What to do with an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageDecision {
    /// The image is present: use it.
    Use,
    /// Pull it from the registry.
    Pull,
    /// The image is not present and must not be pulled: `ErrImageNeverPull`.
    NeverPull,
}

/// The table of runtime-and-resources.md §6.1 step 3.
pub const fn decide(policy: PullPolicy, present: bool) -> ImageDecision {
    match (policy, present) {
        (PullPolicy::Always, _) | (PullPolicy::IfNotPresent, false) => ImageDecision::Pull,
        (PullPolicy::IfNotPresent | PullPolicy::Never, true) => ImageDecision::Use,
        (PullPolicy::Never, false) => ImageDecision::NeverPull,
    }
}

/// Back-off of failed pulls per (pod UID, image): 10 s, doubling up to 300 s, reset after 600 s without a failure.
///
/// Times are nanoseconds of one clock of the caller's. It should be a clock that is never set: a step back would
/// lengthen each wait by the same amount.
#[derive(Debug, Default)]
pub struct PullBackoff {
    entries: BTreeMap<(String, String), FailedPull>,
}

#[derive(Debug, Clone)]
struct FailedPull {
    delay_s: i64,
    failed_at: i64,
    error: String,
}

impl PullBackoff {
    /// Until when a pull of `image` for `uid` has to wait, and the error of the last pull; `None`: it may begin now.
    pub fn retry_at(&self, uid: &str, image: &str, now: i64) -> Option<(i64, &str)> {
        let entry = self.entries.get(&(uid.to_owned(), image.to_owned()))?;
        let until = entry.failed_at + entry.delay_s * NANOS;
        (now < until).then_some((until, entry.error.as_str()))
    }

    /// Records a failed pull and returns when the next one may begin.
    pub fn record_failure(&mut self, uid: &str, image: &str, error: &str, now: i64) -> i64 {
        self.remove_expired(now);
        let entry = self
            .entries
            .entry((uid.to_owned(), image.to_owned()))
            .and_modify(|e| {
                e.delay_s = (e.delay_s * 2).min(BACKOFF_MAX_S);
                e.failed_at = now;
                e.error = error.to_owned();
            })
            .or_insert_with(|| FailedPull {
                delay_s: BACKOFF_INITIAL_S,
                failed_at: now,
                error: error.to_owned(),
            });
        entry.failed_at + entry.delay_s * NANOS
    }

    /// Forgets the failures of one image after a success, or of all images of the pod if `image` is `None`.
    pub fn clear(&mut self, uid: &str, image: Option<&str>) {
        self.entries.retain(|(u, i), _| u != uid || image.is_some_and(|image| i != image));
    }

    fn remove_expired(&mut self, now: i64) {
        self.entries.retain(|_, e| now - e.failed_at < 2 * BACKOFF_MAX_S * NANOS);
    }
}

/// A duration in Go's format, truncated to milliseconds: `823ms`, `1.2s`, `1m2.5s`.
pub fn go_duration(duration: Duration) -> String {
    let ms = duration.as_millis();
    if ms == 0 {
        return "0s".to_owned();
    }
    if ms < 1000 {
        return format!("{ms}ms");
    }
    let (hours, minutes, s, rest) = (ms / 3_600_000, ms / 60_000 % 60, ms / 1000 % 60, ms % 1000);
    let fraction = format!("{rest:03}");
    let fraction = fraction.trim_end_matches('0');
    let point = if fraction.is_empty() { "" } else { "." };
    let prefix = match (hours, minutes) {
        (0, 0) => String::new(),
        (0, minutes) => format!("{minutes}m"),
        (hours, minutes) => format!("{hours}h{minutes}m"),
    };
    format!("{prefix}{s}{point}{fraction}s")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reference_without_tag_and_digest_gets_latest() {
        for (reference, expected) in [
            ("busybox", "busybox:latest"),
            ("busybox:1", "busybox:1"),
            ("localhost:5000/a/b", "localhost:5000/a/b:latest"),
            ("localhost:5000/a/b:v1", "localhost:5000/a/b:v1"),
            ("a@sha256:00ff", "a@sha256:00ff"),
            ("keelson.local/busybox:1", "keelson.local/busybox:1"),
        ] {
            assert_eq!(with_default_tag(reference).as_deref(), Ok(expected));
        }
    }

    #[test]
    fn invalid_reference_is_refused_with_the_kubelets_message() {
        for reference in ["", "BusyBox", "a b", "busybox:", "a/../b", "a@sha256", "-a"] {
            let error = with_default_tag(reference).unwrap_err();
            assert!(error.to_string().starts_with("Failed to apply default image tag \""), "{reference}");
        }
    }

    #[test]
    fn pull_policy_decides_by_presence_of_the_image() {
        use ImageDecision::{NeverPull, Pull, Use};
        assert_eq!(decide(PullPolicy::Always, true), Pull);
        assert_eq!(decide(PullPolicy::Always, false), Pull);
        assert_eq!(decide(PullPolicy::IfNotPresent, true), Use);
        assert_eq!(decide(PullPolicy::IfNotPresent, false), Pull);
        assert_eq!(decide(PullPolicy::Never, true), Use);
        assert_eq!(decide(PullPolicy::Never, false), NeverPull);
    }

    #[test]
    fn pulls_back_off_from_ten_seconds_to_five_minutes() {
        let mut backoff = PullBackoff::default();
        let mut now = 0;
        for delay in [10, 20, 40, 80, 160, 300, 300] {
            let until = backoff.record_failure("u", "a:1", "no such host", now);
            assert_eq!(until, now + delay * NANOS);
            assert_eq!(backoff.retry_at("u", "a:1", now), Some((until, "no such host")));
            now = until;
            assert_eq!(backoff.retry_at("u", "a:1", now), None);
        }
        backoff.clear("u", Some("a:1"));
        assert_eq!(backoff.record_failure("u", "a:1", "no such host", now), now + 10 * NANOS);
    }

    #[test]
    fn durations_are_formatted_as_in_go() {
        for (ms, text) in [
            (0, "0s"),
            (823, "823ms"),
            (1_000, "1s"),
            (1_200, "1.2s"),
            (1_034, "1.034s"),
            (62_500, "1m2.5s"),
            (3_600_000, "1h0m0s"),
        ] {
            assert_eq!(go_duration(Duration::from_millis(ms)), text);
        }
    }

    #[test]
    fn each_part_of_an_image_reference_has_its_allowed_characters() {
        for good in [
            "Registry.Example/a:1",
            "Registry/a:1",
            "localhost/a:1",
            "[::1]:5000/a:1",
            "0a/b-c_d.e9:V1._-x",
            "a:_1",
        ] {
            assert_eq!(with_default_tag(good).as_deref(), Ok(good));
        }
        // The first of several parts is a host if it has a dot, a colon or capital letters, or is `localhost`; else a path.
        for (bad, reason) in [
            ("Registry:1", "must be lowercase"),
            ("registry/A:1", "must be lowercase"),
            ("regi$try.example/a:1", "host name is not valid"),
            ("a/b$/c:1", "invalid reference format"),
            ("a/-b:1", "invalid reference format"),
            ("a/b-:1", "invalid reference format"),
            ("a/b:-1", "the tag is not valid"),
            ("a/b:1$", "the tag is not valid"),
        ] {
            let error = with_default_tag(bad).unwrap_err();
            assert!(error.reason.contains(reason), "{bad}: {error}");
        }
    }

    #[test]
    fn default_pull_policy_depends_on_the_tag() {
        for (text, reference, policy) in [
            ("Always", "a:1", PullPolicy::Always),
            ("Never", "a:latest", PullPolicy::Never),
            ("IfNotPresent", "a:latest", PullPolicy::IfNotPresent),
            ("", "a:latest", PullPolicy::Always),
            ("", "a:1", PullPolicy::IfNotPresent),
        ] {
            assert_eq!(PullPolicy::parse(text, reference), policy, "{text:?} {reference}");
        }
    }

    #[test]
    fn pull_back_off_is_cleared_per_image_per_pod_and_after_ten_minutes() {
        let backs_off = |backoff: &PullBackoff, uid, image| backoff.retry_at(uid, image, 1).is_some();
        let mut backoff = PullBackoff::default();
        for (uid, image) in [("u", "a:1"), ("u", "b:1"), ("v", "a:1")] {
            backoff.record_failure(uid, image, "no such host", 0);
        }
        backoff.clear("u", Some("a:1"));
        assert!(
            !backs_off(&backoff, "u", "a:1")
                && backs_off(&backoff, "u", "b:1")
                && backs_off(&backoff, "v", "a:1")
        );
        backoff.clear("u", None);
        assert!(!backs_off(&backoff, "u", "b:1") && backs_off(&backoff, "v", "a:1"));

        let mut backoff = PullBackoff::default();
        for _ in 0..6 {
            backoff.record_failure("u", "a:1", "no such host", 0);
        }
        let last = 600 * NANOS - 1;
        assert_eq!(backoff.record_failure("u", "a:1", "no such host", last), last + 300 * NANOS);
        let later = last + 600 * NANOS;
        assert_eq!(backoff.record_failure("u", "a:1", "no such host", later), later + 10 * NANOS);
    }
}
