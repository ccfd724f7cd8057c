//! The query of `/logs/` (node-and-api.md §8.8): its parameters, and which combinations are valid.

use jiff::Timestamp;
use keelson_proto::keelson::runtime::v1 as pb;

/// Maximum number of services.
const MAX_SERVICES: usize = 4;
/// Maximum length of the name of a service in bytes.
const MAX_NAME_BYTES: usize = 256;
/// Maximum number of lines.
const MAX_TAIL_LINES: i64 = 100_000;

/// A query with values of the right types.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct NodeLogQuery {
    services: Vec<String>,
    files: Vec<String>,
    since: Option<Timestamp>,
    until: Option<Timestamp>,
    tail_lines: Option<i64>,
    boot: Option<i64>,
    pattern: String,
}

/// What a valid query selects.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Selected {
    /// A file or folder, relative to `/var/log`.
    File(String),
    Services(pb::NodeLogQuery),
}

impl NodeLogQuery {
    /// Parses the parameters; `None` if there are none of a query.
    ///
    /// # Errors
    /// All values of a wrong type, as the kubelet's text.
    pub(super) fn parse(pairs: &[(String, String)]) -> Result<Option<Self>, String> {
        let mut errors = Vec::new();
        let mut query = Self::default();
        let named: Vec<&str> =
            pairs.iter().filter(|(key, _)| key == "query").map(|(_, value)| value.as_str()).collect();
        for value in &named {
            if value.contains(['/', '\\']) {
                query.files.push((*value).to_owned());
            } else if !value.trim().is_empty() {
                query.services.push((*value).to_owned());
            }
        }
        if !named.is_empty() && query.files.is_empty() && query.services.is_empty() {
            errors.push(invalid("query", &list(&named), "query cannot be empty"));
        }
        let first = |key: &str| pairs.iter().find(|(k, _)| k == key).map_or("", |(_, value)| value.as_str());
        query.since = time("sinceTime", first("sinceTime"), &mut errors);
        query.until = time("untilTime", first("untilTime"), &mut errors);
        query.tail_lines = number("tailLines", first("tailLines"), &mut errors);
        query.boot = number("boot", first("boot"), &mut errors);
        first("pattern").clone_into(&mut query.pattern);
        if errors.is_empty() { Ok((query != Self::default()).then_some(query)) } else { Err(joined(&errors)) }
    }

    /// Checks the ranges and the combination of the values.
    ///
    /// # Errors
    /// All errors, as the kubelet's text.
    pub(super) fn validated(self) -> Result<Selected, String> {
        let mut errors: Vec<String> = self.services.iter().filter_map(|name| name_error(name)).collect();
        if self.services.len() > MAX_SERVICES {
            let count = self.services.len();
            errors.push(format!("query: Too many: {count}: must have at most {MAX_SERVICES} items"));
        }
        errors.extend(self.selection_error());
        if let (Some(since), Some(until)) = (self.since, self.until)
            && since > until
        {
            errors.push(invalid(
                "untilTime",
                &format!("{:?}", until.to_string()),
                "must be after `sinceTime`",
            ));
        }
        if let Some(boot) = self.boot.filter(|boot| *boot > 0) {
            errors.push(invalid("boot", &boot.to_string(), "must be less than 1"));
        }
        if let Some(lines) = self.tail_lines.filter(|lines| !(0..=MAX_TAIL_LINES).contains(lines)) {
            let text = format!("must be between 0 and {MAX_TAIL_LINES}, inclusive");
            errors.push(invalid("tailLines", &lines.to_string(), &text));
        }
        if self.pattern.contains('\0') {
            errors.push(invalid("pattern", &format!("{:?}", self.pattern), "must not contain a NUL byte"));
        }
        if errors.is_empty() { Ok(self.selected()) } else { Err(joined(&errors)) }
    }

    /// The error in the combination of services, files and options.
    fn selection_error(&self) -> Option<String> {
        let files: Vec<&str> = self.files.iter().map(String::as_str).collect();
        match (files.len(), self.services.len()) {
            (0, 0) => Some("query: Required value: cannot be empty with options".to_owned()),
            (0, _) => None,
            (_, 1..) => {
                let both = format!("\"[{}], [{}]\"", files.join(" "), self.services.join(" "));
                Some(invalid("query", &both, "cannot specify a file and service"))
            }
            (2.., 0) => Some(invalid("query", &list(&files), "cannot specify more than one file")),
            (1, 0) if self.has_options() => {
                Some(invalid("query", &list(&files), "cannot specify file with options"))
            }
            (1, 0) => None,
        }
    }

    fn has_options(&self) -> bool {
        let plain = Self { services: self.services.clone(), files: self.files.clone(), ..Self::default() };
        *self != plain
    }

    fn selected(self) -> Selected {
        if let Some(file) = self.files.into_iter().next() {
            return Selected::File(file);
        }
        Selected::Services(pb::NodeLogQuery {
            services: self.services,
            since_unix_seconds: self.since.map(Timestamp::as_second),
            until_unix_seconds: self.until.map(Timestamp::as_second),
            tail_lines: self.tail_lines.and_then(|lines| u32::try_from(lines).ok()),
            boot: self.boot,
            pattern: self.pattern,
        })
    }
}

/// An error of a query that names a file which is not served.
pub(super) fn file_error(file: &str, why: &str) -> String {
    invalid("query", &list(&[file]), why)
}

fn name_error(name: &str) -> Option<String> {
    let is_safe = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:@".contains(&byte);
    if name.len() > MAX_NAME_BYTES {
        let text = format!("length must be at most {MAX_NAME_BYTES}");
        Some(invalid("query", &format!("{name:?}"), &text))
    } else if !name.bytes().all(is_safe) {
        Some(invalid("query", &format!("{name:?}"), "input contains unsupported characters"))
    } else {
        None
    }
}

fn time(field: &str, text: &str, errors: &mut Vec<String>) -> Option<Timestamp> {
    if text.is_empty() {
        return None;
    }
    let parsed = text.parse().ok();
    if parsed.is_none() {
        errors.push(invalid(field, &format!("{text:?}"), "invalid time format"));
    }
    parsed
}

fn number(field: &str, text: &str, errors: &mut Vec<String>) -> Option<i64> {
    if text.is_empty() {
        return None;
    }
    let parsed = text.parse().ok();
    if parsed.is_none() {
        errors.push(invalid(field, &format!("{text:?}"), "must be a whole number"));
    }
    parsed
}

fn invalid(field: &str, value: &str, why: &str) -> String {
    format!("{field}: Invalid value: {value}: {why}")
}

fn list(values: &[&str]) -> String {
    format!("[{}]", values.iter().map(|value| format!("{value:?}")).collect::<Vec<_>>().join(","))
}

/// Several errors are a list in brackets.
fn joined(errors: &[String]) -> String {
    match errors {
        [one] => one.clone(),
        all => format!("[{}]", all.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(pairs: &[(&str, &str)]) -> Result<Option<NodeLogQuery>, String> {
        let owned: Vec<_> = pairs.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect();
        NodeLogQuery::parse(&owned)
    }

    fn select(pairs: &[(&str, &str)]) -> Result<Selected, String> {
        parse(pairs).unwrap().unwrap().validated()
    }

    #[test]
    fn query_selects_services_with_options_or_one_file() {
        assert_eq!(parse(&[("other", "x"), ("sinceTime", "")]), Ok(None));
        let services = pb::NodeLogQuery {
            services: vec!["kubelet".into(), "ssh.service".into()],
            since_unix_seconds: Some(1_767_225_600),
            until_unix_seconds: Some(1_767_229_200),
            tail_lines: Some(0),
            boot: Some(-1),
            pattern: "a|b; $(x)".into(),
        };
        let pairs = [
            ("query", "kubelet"),
            ("query", "ssh.service"),
            ("query", " "),
            ("sinceTime", "2026-01-01T00:00:00Z"),
            ("untilTime", "2026-01-01T02:00:00.5+01:00"),
            ("tailLines", "0"),
            ("boot", "-1"),
            ("pattern", "a|b; $(x)"),
            ("pattern", "ignored"),
        ];
        assert_eq!(select(&pairs), Ok(Selected::Services(services)));
        for file in ["/syslog", "pods/", "a\\b"] {
            assert_eq!(select(&[("query", file)]), Ok(Selected::File(file.into())));
        }
    }

    #[test]
    fn undecodable_query_values_are_all_named() {
        for (pairs, text) in [
            (&[("query", "")][..], r#"query: Invalid value: [""]: query cannot be empty"#),
            (&[("query", "  ")], r#"query: Invalid value: ["  "]: query cannot be empty"#),
            (&[("tailLines", "x")], r#"tailLines: Invalid value: "x": must be a whole number"#),
            (
                &[("query", "a"), ("sinceTime", "yesterday"), ("boot", "1.5")],
                "[sinceTime: Invalid value: \"yesterday\": invalid time format, \
                 boot: Invalid value: \"1.5\": must be a whole number]",
            ),
            (&[("untilTime", "12:00")], r#"untilTime: Invalid value: "12:00": invalid time format"#),
        ] {
            assert_eq!(parse(pairs), Err(text.to_owned()), "{pairs:?}");
        }
    }

    #[test]
    fn invalid_combinations_and_ranges_of_a_query_are_refused() {
        let long = "x".repeat(257);
        for (pairs, text) in [
            (&[("tailLines", "5")][..], "cannot be empty with options"),
            (&[("query", "a"), ("query", "/b")], "cannot specify a file and service"),
            (&[("query", "/a"), ("query", "/b")], "cannot specify more than one file"),
            (&[("query", "/a"), ("tailLines", "1")], "cannot specify file with options"),
            (&[("query", "/a"), ("pattern", "x")], "cannot specify file with options"),
            (&[("query", "a;reboot")], "input contains unsupported characters"),
            (&[("query", "$(id)")], "input contains unsupported characters"),
            (&[("query", "a b")], "input contains unsupported characters"),
            (&[("query", &long)], "length must be at most 256"),
            (
                &[("query", "a"), ("query", "b"), ("query", "c"), ("query", "d"), ("query", "e")],
                "Too many: 5: must have at most 4 items",
            ),
            (&[("query", "a"), ("boot", "1")], "boot: Invalid value: 1: must be less than 1"),
            (&[("query", "a"), ("tailLines", "-1")], "must be between 0 and 100000, inclusive"),
            (&[("query", "a"), ("tailLines", "100001")], "must be between 0 and 100000, inclusive"),
            (&[("query", "a"), ("pattern", "x\0y")], "must not contain a NUL byte"),
            (
                &[
                    ("query", "a"),
                    ("sinceTime", "2026-01-02T00:00:00Z"),
                    ("untilTime", "2026-01-01T00:00:00Z"),
                ],
                "must be after `sinceTime`",
            ),
        ] {
            let error = select(pairs).unwrap_err();
            assert!(error.contains(text), "{pairs:?}: {error}");
        }
        let both = select(&[("query", "a"), ("boot", "1"), ("tailLines", "-1")]).unwrap_err();
        assert!(both.starts_with("[boot: ") && both.contains(", tailLines: "), "{both}");
    }
}
