//! The formats of Kubernetes' names.

/// An optional DNS name and '/', then a name (`IsQualifiedName`).
pub(crate) fn is_qualified_name(key: &str) -> bool {
    let (prefix, name) = key.split_once('/').unwrap_or(("", key));
    is_name(name) && (!key.contains('/') || is_subdomain(prefix))
}

/// An empty string or a name.
pub(crate) fn is_label_value(value: &str) -> bool {
    value.is_empty() || is_name(value)
}

/// The name part of a qualified name, also a non-empty label value.
fn is_name(text: &str) -> bool {
    let edge = |c: Option<u8>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    let bytes = text.as_bytes();
    bytes.len() <= 63
        && edge(bytes.first().copied())
        && edge(bytes.last().copied())
        && bytes.iter().all(|c| c.is_ascii_alphanumeric() || matches!(c, b'-' | b'_' | b'.'))
}

/// A DNS subdomain (RFC 1123), as Kubernetes names nodes and label prefixes.
pub(crate) fn is_subdomain(text: &str) -> bool {
    let label = |part: &str| {
        let bytes = part.as_bytes();
        let edge = |c: Option<&u8>| c.is_some_and(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
        edge(bytes.first())
            && edge(bytes.last())
            && bytes.iter().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || *c == b'-')
    };
    text.len() <= 253 && text.split('.').all(label)
}
