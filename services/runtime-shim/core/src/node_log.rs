//! Queries of the node's logs (node-and-api.md §8.8): which services a query may name, the journal command that answers it, the
//! files of a service that is not in the journal, and the part of a file that an HTTP range selects.

/// Maximum number of services of a query.
pub const MAX_SERVICES: usize = 4;
/// Maximum length of the name of a service in bytes.
pub const MAX_NAME_BYTES: usize = 256;
/// Maximum number of lines that a query may ask for.
pub const MAX_TAIL_LINES: u32 = 100_000;
/// Arguments that list the units in the journal, one per line.
pub const LIST_UNITS: [&str; 2] = ["--field", "_SYSTEMD_UNIT"];

/// A query of the logs of services.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct JournalQuery {
    /// Names of services.
    pub services: Vec<String>,
    /// Only lines since this time, in seconds since 1970.
    pub since: Option<i64>,
    /// Only lines up to this time, in seconds since 1970.
    pub until: Option<i64>,
    /// Only this many lines, from the end.
    pub tail_lines: Option<u32>,
    /// 0 is the current boot, -1 the previous one, and so on.
    pub boot: Option<i64>,
    /// A regular expression that lines match; empty: all lines.
    pub pattern: String,
}

/// Why a query is refused. node-api refuses the same with a kubelet's texts; this is the check of the service that runs the
/// command.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NodeLogQueryError {
    /// There are none or too many services.
    #[error("a query names 1 to {MAX_SERVICES} services, not {0}")]
    Count(usize),
    /// The name of a service has other characters or is too long.
    #[error("{0:?} is no name of a service: it has 1 to {MAX_NAME_BYTES} letters, digits and -_.:@")]
    Name(String),
    /// Too many lines.
    #[error("at most {MAX_TAIL_LINES} lines can be queried, not {0}")]
    Lines(u32),
    /// The boot lies in the future.
    #[error("the boot is 0 or negative, not {0}")]
    Boot(i64),
    /// The pattern cannot be an argument of a command.
    #[error("the pattern contains a NUL byte")]
    Pattern,
}

/// Whether this may be the name of a service: nothing in it has a meaning to a command.
pub fn is_service_name(name: &str) -> bool {
    let is_safe = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:@".contains(&byte);
    (1..=MAX_NAME_BYTES).contains(&name.len()) && name.bytes().all(is_safe)
}

impl JournalQuery {
    /// Checks the query.
    ///
    /// # Errors
    /// See [`NodeLogQueryError`].
    pub fn check(&self) -> Result<(), NodeLogQueryError> {
        if !(1..=MAX_SERVICES).contains(&self.services.len()) {
            return Err(NodeLogQueryError::Count(self.services.len()));
        }
        if let Some(name) = self.services.iter().find(|name| !is_service_name(name)) {
            return Err(NodeLogQueryError::Name(name.clone()));
        }
        if let Some(lines) = self.tail_lines.filter(|lines| *lines > MAX_TAIL_LINES) {
            return Err(NodeLogQueryError::Lines(lines));
        }
        if let Some(boot) = self.boot.filter(|boot| *boot > 0) {
            return Err(NodeLogQueryError::Boot(boot));
        }
        if self.pattern.contains('\0') {
            return Err(NodeLogQueryError::Pattern);
        }
        Ok(())
    }

    /// Whether it has options, which only the journal supports.
    pub fn has_options(&self) -> bool {
        self.since.is_some()
            || self.until.is_some()
            || self.tail_lines.is_some()
            || self.boot.is_some()
            || !self.pattern.is_empty()
    }

    /// The arguments of journalctl(1) for the entries of `services`. Each value is a part of its option's argument, so none is
    /// taken for an option. Times are seconds since 1970, which do not depend on the time zone of the node.
    pub fn arguments(&self, services: &[&str]) -> Vec<String> {
        let fixed = ["--utc", "--no-pager", "--output=short-precise"];
        let mut arguments: Vec<String> = fixed.map(str::to_owned).into();
        arguments.extend(self.since.map(|time| format!("--since=@{time}")));
        arguments.extend(self.until.map(|time| format!("--until=@{time}")));
        if let Some(lines) = self.tail_lines {
            arguments.extend(["--pager-end".to_owned(), format!("--lines={lines}")]);
        }
        arguments.extend(services.iter().map(|service| format!("--unit={service}")));
        if !self.pattern.is_empty() {
            arguments.extend([format!("--grep={}", self.pattern), "--case-sensitive=false".to_owned()]);
        }
        arguments.extend(self.boot.map(|boot| format!("--boot={boot}")));
        arguments
    }

    /// The services with entries in the journal, and the others. `units` are the lines of the journal's list of units.
    pub fn split_by_journal(&self, units: &str) -> (Vec<&str>, Vec<&str>) {
        let is_unit = |service: &str| {
            units.lines().any(|unit| {
                unit == service || unit.strip_suffix(".service").is_some_and(|name| name == service)
            })
        };
        self.services.iter().map(String::as_str).partition(|service| is_unit(service))
    }
}

/// The files below `/var/log` that may be the log of a service, in the order in which they are tried.
pub fn files_of_service(service: &str) -> [String; 3] {
    [service.to_owned(), format!("{service}.log"), format!("{service}/{service}.log")]
}

/// The offset and the length of the part of a file of `size` bytes that an HTTP range selects (RFC 9110 §14.1.2): `first` to
/// `last` inclusive, `first` to the end, or the last `last` bytes. `None` if the range selects nothing. Of an empty file, every
/// range selects the whole, as for a Go file server.
pub fn part_of_file(size: u64, first: Option<u64>, last: Option<u64>) -> Option<(u64, u64)> {
    match (first, last) {
        _ if size == 0 => Some((0, 0)),
        (None, None) => Some((0, size)),
        (None, Some(0)) => None,
        (None, Some(count)) => {
            let length = count.min(size);
            Some((size - length, length))
        }
        (Some(first), last) => {
            let end = last.map_or(size, |last| last.saturating_add(1).min(size));
            (first < end).then(|| (first, end - first))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn query(services: &[&str]) -> JournalQuery {
        JournalQuery { services: services.iter().map(|s| (*s).to_owned()).collect(), ..Default::default() }
    }

    #[test]
    fn only_harmless_names_of_services_are_accepted() {
        for name in ["kubelet", "ssh.service", "getty@tty1", "a:b", "A-1_2", ".", "..", &"x".repeat(256)] {
            assert!(is_service_name(name), "{name}");
        }
        for name in
            ["", "a b", "a;reboot", "$(id)", "`id`", "a|b", "a/b", "a\\b", "é", "a\0", "a\n", "*", "a=b"]
        {
            assert!(!is_service_name(name), "{name:?}");
            assert_eq!(query(&["x", name]).check(), Err(NodeLogQueryError::Name(name.into())));
        }
        assert!(!is_service_name(&"x".repeat(257)));
    }

    #[test]
    fn query_has_one_to_four_services_and_options_within_their_ranges() {
        assert_eq!(query(&["a", "b", "c", "d"]).check(), Ok(()));
        for services in [&[][..], &["a", "b", "c", "d", "e"]] {
            assert_eq!(query(services).check(), Err(NodeLogQueryError::Count(services.len())));
        }
        let lines = |tail_lines| JournalQuery { tail_lines, ..query(&["a"]) }.check();
        assert_eq!((lines(Some(0)), lines(Some(100_000))), (Ok(()), Ok(())));
        assert_eq!(lines(Some(100_001)), Err(NodeLogQueryError::Lines(100_001)));
        let boot = |boot| JournalQuery { boot: Some(boot), ..query(&["a"]) }.check();
        assert_eq!((boot(0), boot(-3), boot(1)), (Ok(()), Ok(()), Err(NodeLogQueryError::Boot(1))));
        let pattern = JournalQuery { pattern: "a\0b".into(), ..query(&["a"]) };
        assert_eq!(pattern.check(), Err(NodeLogQueryError::Pattern));
    }

    #[test]
    fn journal_command_has_an_argument_per_option() {
        let plain = ["--utc", "--no-pager", "--output=short-precise", "--unit=kubelet", "--unit=ssh"];
        let bare = query(&["kubelet", "ssh", "other"]);
        assert_eq!(bare.arguments(&["kubelet", "ssh"]), plain);
        assert!(!bare.has_options());
        let all = JournalQuery {
            since: Some(1_700_000_000),
            until: Some(1_700_000_060),
            tail_lines: Some(5),
            boot: Some(-1),
            pattern: "--help; rm 'x'".into(),
            ..query(&["kubelet"])
        };
        let expected = [
            "--utc",
            "--no-pager",
            "--output=short-precise",
            "--since=@1700000000",
            "--until=@1700000060",
            "--pager-end",
            "--lines=5",
            "--unit=kubelet",
            "--grep=--help; rm 'x'",
            "--case-sensitive=false",
            "--boot=-1",
        ];
        assert_eq!(all.arguments(&["kubelet"]), expected);
        for options in [
            JournalQuery { since: Some(0), ..query(&["a"]) },
            JournalQuery { until: Some(0), ..query(&["a"]) },
            JournalQuery { tail_lines: Some(0), ..query(&["a"]) },
            JournalQuery { boot: Some(0), ..query(&["a"]) },
            JournalQuery { pattern: "x".into(), ..query(&["a"]) },
        ] {
            assert!(options.has_options(), "{options:?}");
        }
    }

    #[test]
    fn service_is_in_the_journal_by_its_whole_name_with_or_without_suffix() {
        let units = "kubelet.service\nsession-1.scope\nssh.service\n";
        let query = query(&["kubelet", "ssh.service", "kube", "session-1"]);
        assert_eq!(
            query.split_by_journal(units),
            (vec!["kubelet", "ssh.service"], vec!["kube", "session-1"])
        );
        assert_eq!(query.split_by_journal("").0, Vec::<&str>::new());
    }

    #[test]
    fn service_outside_the_journal_has_three_possible_files() {
        assert_eq!(files_of_service("a"), ["a", "a.log", "a/a.log"]);
    }

    #[test]
    fn http_range_selects_a_part_of_a_file_or_nothing() {
        for (size, first, last, expected) in [
            (10, None, None, Some((0, 10))),
            (0, None, None, Some((0, 0))),
            (10, Some(0), None, Some((0, 10))),
            (10, Some(9), None, Some((9, 1))),
            (10, Some(10), None, None),
            (10, Some(2), Some(4), Some((2, 3))),
            (10, Some(2), Some(99), Some((2, 8))),
            (10, Some(2), Some(u64::MAX), Some((2, 8))),
            (10, Some(4), Some(2), None),
            (10, None, Some(3), Some((7, 3))),
            (10, None, Some(99), Some((0, 10))),
            (10, None, Some(0), None),
            (0, Some(0), None, Some((0, 0))),
            (0, Some(3), Some(4), Some((0, 0))),
            (0, None, Some(5), Some((0, 0))),
            (0, None, Some(0), Some((0, 0))),
        ] {
            assert_eq!(part_of_file(size, first, last), expected, "{size} {first:?} {last:?}");
        }
    }
}
