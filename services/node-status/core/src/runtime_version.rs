//! The version of the container runtime as a kubelet writes it (node-and-api.md §9.4).

/// The version as a kubelet parses it; `None` if it is not a version.
///
/// A semantic version keeps its pre-release and build parts. Of any other version with at least two numbers, such as a
/// distribution's `1.6.20~ds1`, only the numbers are kept. A leading `v` is removed in both cases.
pub(crate) fn parsed(version: &str) -> Option<String> {
    let version = version.trim();
    let version = version.strip_prefix('v').unwrap_or(version);
    let end = end_of_numbers(version);
    let (numbers, extra) = version.split_at(end);
    let parts: Vec<&str> = numbers.split('.').collect();
    let is_semantic =
        parts.len() == 3 && parts.iter().all(|part| has_no_leading_zero(part)) && is_extra(extra);
    if is_semantic {
        return Some(version.to_owned());
    }
    if parts.len() < 2 {
        return None;
    }
    let numbers: Option<Vec<String>> =
        parts.iter().map(|part| Some(part.parse::<u64>().ok()?.to_string())).collect();
    numbers.map(|numbers| numbers.join("."))
}

/// The length of the leading `1.2.3` of a text.
fn end_of_numbers(text: &str) -> usize {
    let bytes = text.as_bytes();
    let digits = |from: usize| bytes[from..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    let mut end = digits(0);
    while end > 0 && bytes.get(end) == Some(&b'.') {
        match digits(end + 1) {
            0 => break,
            more => end += 1 + more,
        }
    }
    end
}

fn has_no_leading_zero(number: &str) -> bool {
    number == "0" || !number.starts_with('0')
}

/// Whether a text is empty or a pre-release, a build part, or both, of a semantic version.
fn is_extra(text: &str) -> bool {
    let (pre_release, build) = match text.split_once('+') {
        Some((before, build)) => (before, Some(build)),
        None => (text, None),
    };
    let identifiers = |text: &str| {
        text.split('.').all(|part| {
            !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
        })
    };
    let pre_release_is_valid =
        pre_release.is_empty() || pre_release.strip_prefix('-').is_some_and(identifiers);
    pre_release_is_valid && build.is_none_or(identifiers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_runtime_version_is_parsed_as_by_the_kubelet() {
        for (version, expected) in [
            ("1.6.20~ds1", Some("1.6.20")),
            ("v1.7.2", Some("1.7.2")),
            ("2.0.0-rc.1", Some("2.0.0-rc.1")),
            ("1.7.2+k3s1", Some("1.7.2+k3s1")),
            ("2.0.0-rc.1+build.5", Some("2.0.0-rc.1+build.5")),
            ("1.7.24-0ubuntu1~24.04.1", Some("1.7.24")),
            ("1.6", Some("1.6")),
            ("1.06.2", Some("1.6.2")),
            ("1.2.3.4-x", Some("1.2.3.4")),
            ("1.6.", Some("1.6")),
            ("1", None),
            ("devel", None),
            ("", None),
        ] {
            assert_eq!(parsed(version).as_deref(), expected, "{version}");
        }
    }
}
