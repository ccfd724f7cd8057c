//! The grammars of names. Each check returns what is wrong, or `None`.

/// Longest DNS label.
const LABEL: usize = 63;
/// Longest DNS name.
const SUBDOMAIN: usize = 253;

fn is_lower_alnum(byte: u8) -> bool {
    byte.is_ascii_lowercase() || byte.is_ascii_digit()
}

fn is_label_text(text: &str) -> bool {
    let bytes = text.as_bytes();
    let ends =
        bytes.first().is_some_and(|b| is_lower_alnum(*b)) && bytes.last().is_some_and(|b| is_lower_alnum(*b));
    ends && bytes.iter().all(|b| is_lower_alnum(*b) || *b == b'-')
}

/// RFC 1123 label: a container, volume or namespace name.
pub(super) fn dns_label(text: &str) -> Option<&'static str> {
    if text.len() > LABEL {
        return Some("must be no more than 63 characters");
    }
    (!is_label_text(text)).then_some(
        "must be a lowercase RFC 1123 label: letters, digits and '-', with a letter or digit at both ends",
    )
}

/// RFC 1123 subdomain: a pod or node name.
pub(super) fn dns_subdomain(text: &str) -> Option<&'static str> {
    if text.len() > SUBDOMAIN {
        return Some("must be no more than 253 characters");
    }
    (!text.split('.').all(is_label_text))
        .then_some("must be a lowercase RFC 1123 subdomain: labels of letters, digits and '-', joined by '.'")
}

/// Name of a CSI driver: a DNS name of at most 63 characters, in which capitals count as small letters.
pub(super) fn driver_name(text: &str) -> Option<&'static str> {
    if text.len() > LABEL {
        return Some("must be no more than 63 characters");
    }
    dns_subdomain(&text.to_ascii_lowercase())
}

/// The part of a key after the slash, or a label value that is not empty.
fn is_name_part(text: &str) -> bool {
    let bytes = text.as_bytes();
    let alnum = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    bytes.len() <= LABEL
        && alnum(bytes.first())
        && alnum(bytes.last())
        && bytes.iter().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(b))
}

/// Key of a label or annotation: an optional DNS prefix with slash, then a name of at most 63 characters.
pub(super) fn qualified_name(text: &str) -> Option<&'static str> {
    let (prefix, name) = text.split_once('/').map_or((None, text), |(prefix, name)| (Some(prefix), name));
    if prefix.is_some_and(|prefix| dns_subdomain(prefix).is_some()) {
        return Some("prefix part must be a lowercase RFC 1123 subdomain");
    }
    (!is_name_part(name)).then_some(
        "name part must be 1 to 63 letters, digits, '-', '_' or '.', with a letter or digit at both ends",
    )
}

/// Value of a label.
pub(super) fn label_value(text: &str) -> Option<&'static str> {
    (!text.is_empty() && !is_name_part(text)).then_some(
        "must be empty or 1 to 63 letters, digits, '-', '_' or '.', with a letter or digit at both ends",
    )
}

/// Name of a container port: an IANA service name.
pub(super) fn port_name(text: &str) -> Option<&'static str> {
    if text.len() > 15 {
        return Some("must be no more than 15 characters");
    }
    if !is_label_text(text) {
        return Some(
            "must contain only lower case letters, digits and '-', with a letter or digit at both ends",
        );
    }
    if text.contains("--") {
        return Some("must not contain consecutive hyphens");
    }
    (!text.bytes().any(|b| b.is_ascii_lowercase())).then_some("must contain at least one letter")
}

/// Name of an environment variable: printable ASCII without `=`.
pub(super) fn env_name(text: &str) -> Option<&'static str> {
    (!text.bytes().all(|b| (b' '..=b'~').contains(&b) && b != b'='))
        .then_some("must consist only of printable ASCII characters other than '='")
}

/// IPv4 or IPv6 address.
pub(super) fn ip_address(text: &str) -> Option<&'static str> {
    text.parse::<std::net::IpAddr>()
        .is_err()
        .then_some("must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)")
}

/// A path below a mount: relative, and without a step back.
pub(super) fn relative_path(text: &str) -> Option<&'static str> {
    if text.starts_with('/') {
        return Some("must be a relative path");
    }
    no_backsteps(text)
}

/// A path without `..` as a component.
pub(super) fn no_backsteps(text: &str) -> Option<&'static str> {
    text.split('/').any(|part| part == "..").then_some("must not contain '..'")
}

/// Search path of `resolv.conf`: a DNS name, with a dot at its end or not, or the root. Labels may begin with an underscore.
pub(super) fn search_path(text: &str) -> Option<&'static str> {
    if text == "." {
        return None;
    }
    let name = text.strip_suffix('.').unwrap_or(text).replace('_', "a");
    dns_subdomain(&name)
}

/// A word of a line: no blanks, no line breaks, nothing that cannot be printed.
pub(super) fn one_word(text: &str) -> Option<&'static str> {
    text.chars()
        .any(|c| c.is_whitespace() || c.is_control())
        .then_some("must not contain blanks or line breaks")
}

/// Name of an HTTP header.
pub(super) fn header_name(text: &str) -> Option<&'static str> {
    let good = !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    (!good).then_some(
        "a valid HTTP header must consist of alphanumeric characters or '-' (e.g. 'X-Header-Name')",
    )
}

/// Path of a projected file: relative, without a step back, and not hidden behind `..`.
pub(super) fn projected_path(text: &str) -> Option<&'static str> {
    relative_path(text).or(text.starts_with("..").then_some("must not start with '..'"))
}
