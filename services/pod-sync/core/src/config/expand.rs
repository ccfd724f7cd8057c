//! `$(NAME)` in commands, arguments, environment and subpaths (§3.3).

/// Replaces `$(NAME)` by its value from `lookup`; `$$` becomes `$`, and a reference without a value is kept as written.
pub fn expand(text: &str, lookup: impl Fn(&str) -> Option<String>) -> String {
    expand_with(text, lookup, |_| {})
}

/// Like [`expand`]; calls `unknown` with every name that was not found.
pub(super) fn expand_with(
    text: &str,
    lookup: impl Fn(&str) -> Option<String>,
    mut unknown: impl FnMut(&str),
) -> String {
    let mut result = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        result.push_str(&rest[..at]);
        let after = &rest[at + 1..];
        if let Some(tail) = after.strip_prefix('$') {
            result.push('$');
            rest = tail;
        } else if let Some((name, tail)) = after.strip_prefix('(').and_then(|inner| inner.split_once(')')) {
            match lookup(name) {
                Some(value) => result.push_str(&value),
                None => {
                    unknown(name);
                    result.push_str(&rest[at..rest.len() - tail.len()]);
                }
            }
            rest = tail;
        } else {
            result.push('$');
            rest = after;
        }
    }
    result + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variable_references_and_escapes_are_expanded() {
        let know = |name: &str| match name {
            "A" => Some("1".to_owned()),
            "NESTED" => Some("$(A)".to_owned()),
            "" => Some("empty".to_owned()),
            _ => None,
        };
        for (text, expanded) in [
            ("plain", "plain"),
            ("$(A)", "1"),
            ("x$(A)y$(A)", "x1y1"),
            ("$(B)", "$(B)"),
            ("$$(A)", "$(A)"),
            ("$$$(A)", "$1"),
            ("$$$$(A)", "$$(A)"),
            ("$(NESTED)", "$(A)"),
            ("$A", "$A"),
            ("$", "$"),
            ("$(A", "$(A"),
            ("$()", "empty"),
            ("é$(A)é", "é1é"),
            ("$(é)", "$(é)"),
        ] {
            assert_eq!(expand(text, know), expanded, "{text}");
        }
    }
}
