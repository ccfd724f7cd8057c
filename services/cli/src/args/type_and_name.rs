//! `TYPE/NAME` for `TYPE NAME`.

use std::ffi::OsString;

/// Turns `get pod/web` into `get pod web`, for every command that takes a type and names.
pub(crate) fn split_type_and_name(args: Vec<OsString>) -> Vec<OsString> {
    const VERBS: [&str; 7] = ["get", "describe", "explain", "delete", "evict", "retry", "trace"];
    let mut split = Vec::with_capacity(args.len() + 1);
    let mut after_verb = false;
    let mut escaped = false;
    for arg in args {
        escaped |= arg == "--";
        if escaped {
            split.push(arg);
            continue;
        }
        match arg.to_str().and_then(|text| text.split_once('/')) {
            Some((kind, name)) if after_verb && !kind.is_empty() && !kind.starts_with('-') => {
                split.extend([kind.into(), name.into()]);
            }
            _ => split.push(arg.clone()),
        }
        after_verb = arg.to_str().is_some_and(|text| VERBS.contains(&text));
    }
    split
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(args: &[&str]) -> Vec<String> {
        split_type_and_name(args.iter().map(OsString::from).collect())
            .into_iter()
            .map(|a| a.into_string().unwrap())
            .collect()
    }

    #[test]
    fn type_slash_name_is_split_after_a_verb() {
        assert_eq!(
            split(&["keelson", "get", "pod/web", "-o", "json"]),
            ["keelson", "get", "pod", "web", "-o", "json"]
        );
        assert_eq!(split(&["keelson", "delete", "-f", "a/b.yaml"]), ["keelson", "delete", "-f", "a/b.yaml"]);
        assert_eq!(split(&["keelson", "get", "--run-dir=/x/y"]), ["keelson", "get", "--run-dir=/x/y"]);
        let exec = ["keelson", "exec", "web", "--", "git", "get", "a/b"];
        assert_eq!(split(&exec), exec);
    }
}
