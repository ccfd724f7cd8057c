//! The folder of the node's certificates, in a kubelet's layout (node-and-api.md §6.6), and which pair replaces which.

use keelson_config::CertificateKind;
use keelson_kube_model::time::format_seconds;

/// How many files of a kind are kept, including the current one.
const KEEP_FILES: usize = 3;

/// The validity of a certificate chain, in seconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Validity {
    /// When the leaf certificate becomes valid.
    pub not_before: i64,
    /// When the first certificate of the chain expires.
    pub not_after: i64,
}

impl Validity {
    /// Whether no certificate has expired. `not_before` is ignored, as by a kubelet, since clocks differ.
    pub fn is_valid_at(self, now: i64) -> bool {
        self.not_after >= now
    }
}

/// Whether an offered pair replaces the current one: that one has expired or is older.
pub fn replaces(offered: Validity, in_force: Option<Validity>, now: i64) -> bool {
    let key = |validity: Validity| (validity.not_before, validity.not_after);
    offered.is_valid_at(now) && in_force.is_none_or(|old| !old.is_valid_at(now) || key(offered) > key(old))
}

/// The file name of a pair stored at this time, such as `kubelet-client-2026-01-02-15-04-05.pem`; UTC.
pub fn stored_name(kind: CertificateKind, unix_seconds: i64) -> String {
    let moment = format_seconds(unix_seconds).unwrap_or_default().replace(['T', ':'], "-");
    format!("{}-{}.pem", kind.prefix(), moment.trim_end_matches('Z'))
}

/// The stored pairs to remove: all but the newest and the current one. Other files are left alone.
pub fn files_to_remove<'a>(kind: CertificateKind, names: &'a [String], in_force: &str) -> Vec<&'a str> {
    let mut stored: Vec<&str> =
        names.iter().map(String::as_str).filter(|name| is_stored(kind, name) && *name != in_force).collect();
    stored.sort_unstable();
    stored.truncate(stored.len().saturating_sub(KEEP_FILES - 1));
    stored
}

fn is_stored(kind: CertificateKind, name: &str) -> bool {
    let moment = name
        .strip_prefix(kind.prefix())
        .and_then(|rest| rest.strip_prefix('-'))
        .and_then(|rest| rest.strip_suffix(".pem"));
    let digits = |part: &str, length| part.len() == length && part.bytes().all(|b| b.is_ascii_digit());
    moment.is_some_and(|moment| {
        let parts: Vec<&str> = moment.split('-').collect();
        parts.len() == 6 && parts.iter().zip([4, 2, 2, 2, 2, 2]).all(|(part, length)| digits(part, length))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn validity(not_before: i64, not_after: i64) -> Validity {
        Validity { not_before, not_after }
    }

    #[test]
    fn a_newer_pair_replaces_an_older_one_and_a_valid_pair_an_expired_one() {
        let now = 100;
        for (offered, in_force, expected) in [
            (validity(50, 200), None, true),
            (validity(50, 99), None, false),
            (validity(50, 100), None, true),
            (validity(120, 200), None, true),
            (validity(50, 200), Some(validity(40, 300)), true),
            (validity(50, 200), Some(validity(50, 200)), false),
            (validity(50, 201), Some(validity(50, 200)), true),
            (validity(50, 200), Some(validity(60, 150)), false),
            (validity(50, 200), Some(validity(60, 99)), true),
        ] {
            assert_eq!(replaces(offered, in_force, now), expected, "{offered:?} {in_force:?}");
        }
    }

    #[test]
    fn stored_pairs_are_named_by_kind_and_time_like_a_kubelets() {
        let name = stored_name(CertificateKind::Client, 1_136_214_245);
        assert_eq!(name, "kubelet-client-2006-01-02-15-04-05.pem");
        assert!(stored_name(CertificateKind::Serving, 0).starts_with("kubelet-server-1970-"));
    }

    #[test]
    fn the_newest_pairs_the_current_pair_and_foreign_files_are_kept() {
        let name = |second: u32| format!("kubelet-client-2026-01-02-15-04-{second:02}.pem");
        let mut names: Vec<String> = (0..5).map(name).rev().collect();
        names.extend(
            [
                "kubelet-client-current.pem",
                "kubelet-server-2020-01-02-15-04-05.pem",
                "kubelet-client-old.pem",
                "ca.crt",
            ]
            .map(ToOwned::to_owned),
        );
        assert_eq!(files_to_remove(CertificateKind::Client, &names, &name(4)), [name(0), name(1)]);
        assert_eq!(files_to_remove(CertificateKind::Client, &names, &name(0)), [name(1), name(2)]);
        assert!(files_to_remove(CertificateKind::Client, &names[..3], &name(4)).is_empty());
    }
}
