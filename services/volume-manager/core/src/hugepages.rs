//! Huge page volumes (volumes.md §10.1).

use std::collections::BTreeSet;

/// Why the spec of a pod allows no huge page volume.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HugePagesError {
    /// The pod requests no huge pages.
    #[error(
        "the medium {medium} needs a request for huge pages in the pod, such as limits: {{hugepages-2Mi: 4Mi}}"
    )]
    NotRequested {
        /// The medium as written.
        medium: String,
    },
    /// The medium names no size and the pod requests several.
    #[error(
        "the pod requests huge pages of several sizes ({sizes}); name one in the medium, such as HugePages-2Mi"
    )]
    AmbiguousSize {
        /// The sizes, in bytes.
        sizes: String,
    },
    /// The medium names a size that the pod does not request.
    #[error(
        "the medium {medium} needs a request for huge pages of that size in the pod; it requests {sizes}"
    )]
    SizeNotRequested {
        /// The medium as written.
        medium: String,
        /// The requested sizes, in bytes.
        sizes: String,
    },
    /// The text after `HugePages-` is not a size.
    #[error("the medium {medium} names no size of huge pages; write one such as HugePages-2Mi")]
    InvalidSize {
        /// The medium as written.
        medium: String,
    },
}

/// The page size in bytes of a volume whose medium is `HugePages` followed by `suffix`, in a pod that requests
/// huge pages of the sizes `requested`, in bytes.
pub fn page_size(suffix: &str, requested: &BTreeSet<u64>) -> Result<u64, HugePagesError> {
    let medium = || format!("HugePages{suffix}");
    let sizes = || requested.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
    let mut all = requested.iter().copied();
    let (Some(first), rest) = (all.next(), all.next()) else {
        return Err(HugePagesError::NotRequested { medium: medium() });
    };
    let Some(size) = suffix.strip_prefix('-') else {
        let ambiguous = HugePagesError::AmbiguousSize { sizes: sizes() };
        return if rest.is_none() { Ok(first) } else { Err(ambiguous) };
    };
    let bytes = bytes(size).ok_or_else(|| HugePagesError::InvalidSize { medium: medium() })?;
    if requested.contains(&bytes) {
        Ok(bytes)
    } else {
        Err(HugePagesError::SizeNotRequested { medium: medium(), sizes: sizes() })
    }
}

/// Parses the size of a medium: a whole number with a binary unit or none.
fn bytes(text: &str) -> Option<u64> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let factor: u64 = match unit {
        "" => 1,
        "Ki" => 1 << 10,
        "Mi" => 1 << 20,
        "Gi" => 1 << 30,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(factor).filter(|bytes| *bytes > 0)
}

/// The data argument of mount(2).
pub fn mount_options(page_size: u64) -> String {
    format!("pagesize={page_size}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: u64 = 2 << 20;
    const LARGE: u64 = 1 << 30;

    #[test]
    fn huge_page_size_is_the_one_in_the_medium_or_the_only_one_requested() {
        for (suffix, requested, size) in [
            ("", vec![SMALL], SMALL),
            ("-2Mi", vec![SMALL], SMALL),
            ("-2048Ki", vec![SMALL, LARGE], SMALL),
            ("-1Gi", vec![SMALL, LARGE], LARGE),
            ("-2097152", vec![SMALL], SMALL),
        ] {
            assert_eq!(page_size(suffix, &requested.into_iter().collect()), Ok(size), "{suffix:?}");
        }
        assert_eq!(mount_options(SMALL), "pagesize=2097152");
    }

    #[test]
    fn a_huge_page_volume_without_a_matching_request_is_refused_with_a_hint() {
        for (suffix, requested, text) in [
            ("", vec![], "HugePages needs a request"),
            ("-2Mi", vec![], "HugePages-2Mi needs a request"),
            ("", vec![SMALL, LARGE], "several sizes (2097152, 1073741824)"),
            ("-1Gi", vec![SMALL], "HugePages-1Gi needs a request for huge pages of that size"),
            ("-", vec![SMALL], "names no size"),
            ("-2M", vec![SMALL], "names no size"),
            ("-0Mi", vec![SMALL], "names no size"),
            ("-99999999999999999999Gi", vec![SMALL], "names no size"),
        ] {
            let error = page_size(suffix, &requested.into_iter().collect()).unwrap_err().to_string();
            assert!(error.contains(text), "{suffix:?}: {error}");
        }
    }
}
