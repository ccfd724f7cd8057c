//! Rotation of container logs: which files to move, compress and remove (runtime-and-resources.md §7.5).
//!
//! A log `0.log` that has grown too large becomes `0.log.20260102-030405` and, after the next rotation,
//! `0.log.20260102-030405.gz`. The timestamp in the name is the time of the rotation in UTC. It always increases, so
//! the names sort by age even if the clock is set back.
//!
//! A plan may be interrupted after any step: the next plan, made from the files that exist then, continues without
//! losing or duplicating a line.

use std::collections::BTreeMap;

const DAY: i64 = 86_400;
/// `YYYYMMDD-HHMMSS`.
const STAMP: usize = 15;
const COMPRESSED: &str = ".gz";
const INCOMPLETE: &str = ".tmp";

/// A file of a container's log folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogFile {
    /// Name in the folder.
    pub name: String,
    /// Its size.
    pub bytes: u64,
}

/// When a log is rotated and how many of its files are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Size in bytes at which a log is rotated (`containerLogMaxSize`); an empty log never is.
    pub max_bytes: u64,
    /// Number of files kept, including the current one (`containerLogMaxFiles`), at least 2.
    pub max_files: usize,
}

/// One step of a plan. Names are relative to the log's folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Removes a file.
    Remove(String),
    /// Renames a file to a name that does not exist.
    Rename {
        /// Its current name.
        from: String,
        /// Its new name.
        to: String,
    },
    /// Compresses a file into another one that does not exist. If the source is removed in the meantime, the
    /// steps that depend on it are skipped.
    Compress {
        /// The source.
        from: String,
        /// The target.
        to: String,
    },
    /// Asks the runtime to write to a new file under the current name.
    Reopen,
}

/// The form of a rotated file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Form {
    /// The lines as the runtime wrote them.
    Plain,
    /// Compressed and complete.
    Compressed,
    /// An incomplete compression.
    Incomplete,
}

/// Parses the name of a rotated file of `current` into its timestamp and form; `None`: not a rotated file.
pub fn parse_rotated_name<'a>(current: &str, name: &'a str) -> Option<(&'a str, Form)> {
    let rest = name.strip_prefix(current)?.strip_prefix('.')?;
    let (stamp, form) = match (rest.strip_suffix(COMPRESSED), rest.strip_suffix(INCOMPLETE)) {
        (Some(stamp), _) => (stamp, Form::Compressed),
        (_, Some(stamp)) => (stamp, Form::Incomplete),
        _ => (rest, Form::Plain),
    };
    parse_stamp(stamp).map(|_| (stamp, form))
}

/// The rotated files of `current` that hold lines, oldest first, by timestamp. Of a plain and a compressed file with
/// the same timestamp, which hold the same lines, only the plain one is listed.
pub fn rotated_files<'a>(current: &str, names: impl IntoIterator<Item = &'a str>) -> BTreeMap<&'a str, Form> {
    let mut history = BTreeMap::new();
    for (stamp, form) in names.into_iter().filter_map(|name| parse_rotated_name(current, name)) {
        if form != Form::Incomplete {
            let known = history.entry(stamp).or_insert(form);
            *known = form.min(*known);
        }
    }
    history
}

/// The name of a rotated file.
pub fn name_of(current: &str, stamp: &str, form: Form) -> String {
    let ending = match form {
        Form::Plain => "",
        Form::Compressed => COMPRESSED,
        Form::Incomplete => INCOMPLETE,
    };
    format!("{current}.{stamp}{ending}")
}

/// Decides whether to rotate the log `current` of a running container, given the files of its folder and the time in
/// seconds since 1970.
///
/// The oldest files are removed first, so that there are never more than `limits.max_files`. A missing current file
/// means an interrupted rotation: the runtime still writes to the newest rotated file and only has to reopen its log.
pub fn plan_rotation(current: &str, files: &[LogFile], limits: Limits, now_unix_s: i64) -> Vec<Step> {
    let Some(log) = files.iter().find(|file| file.name == current) else {
        return vec![Step::Reopen];
    };
    if log.bytes < limits.max_bytes.max(1) {
        return Vec::new();
    }
    let history = rotated_files(current, files.iter().map(|file| file.name.as_str()));
    let excess = history.len().saturating_sub(limits.max_files.saturating_sub(2));
    let surplus = history.keys().take(excess);
    let names = surplus
        .flat_map(|stamp| [Form::Plain, Form::Compressed].map(|form| name_of(current, stamp, form)))
        .filter(|name| files.iter().any(|file| file.name == *name));
    let mut steps: Vec<Step> = names.map(Step::Remove).collect();
    let stamp = next_stamp(now_unix_s, history.keys().next_back().copied());
    let to = name_of(current, &stamp, Form::Plain);
    steps.push(Step::Rename { from: current.to_owned(), to });
    steps.push(Step::Reopen);
    steps
}

/// Decides how to clean up the rotated files of `current`: incomplete files are removed, a file with a complete
/// compression is removed, and all files but the newest are compressed. The runtime may still write to the newest.
///
/// No other thread may compress files of this log at the same time.
pub fn plan_cleanup(current: &str, files: &[LogFile]) -> Vec<Step> {
    let names = || files.iter().map(|file| file.name.as_str());
    let exists = |name: &String| names().any(|n| n == name);
    let incomplete =
        names().filter(|name| matches!(parse_rotated_name(current, name), Some((_, Form::Incomplete))));
    let mut steps: Vec<Step> = incomplete.map(|name| Step::Remove(name.to_owned())).collect();
    let history = rotated_files(current, names());
    let newest = history.keys().next_back().copied();
    for (stamp, form) in &history {
        let [plain, compressed, incomplete] =
            [Form::Plain, Form::Compressed, Form::Incomplete].map(|form| name_of(current, stamp, form));
        if *form != Form::Plain {
            continue;
        }
        if exists(&compressed) {
            steps.push(Step::Remove(plain));
        } else if newest != Some(*stamp) {
            steps.push(Step::Compress { from: plain.clone(), to: incomplete.clone() });
            steps.push(Step::Rename { from: incomplete, to: compressed });
            steps.push(Step::Remove(plain));
        }
    }
    steps
}

/// The timestamp for the next rotated file. It is later than `newest` even if the clock was set back.
fn next_stamp(now_unix_s: i64, newest: Option<&str>) -> String {
    let after = newest.and_then(parse_stamp).map_or(i64::MIN, |newest| newest + 1);
    stamp(now_unix_s.max(after))
}

/// `YYYYMMDD-HHMMSS` in UTC.
fn stamp(unix_s: i64) -> String {
    let (days, rest) = (unix_s.div_euclid(DAY), unix_s.rem_euclid(DAY));
    let (year, month, day) = civil(days);
    format!("{year:04}{month:02}{day:02}-{:02}{:02}{:02}", rest / 3600, rest / 60 % 60, rest % 60)
}

/// The seconds since 1970 of a timestamp; `None` for a text that [`stamp`] never produces.
fn parse_stamp(text: &str) -> Option<i64> {
    let (date, time) = text.split_once('-').filter(|_| text.len() == STAMP)?;
    let number = |text: &str, from: usize, to: usize| text.get(from..to)?.parse::<i64>().ok();
    let days = days(number(date, 0, 4)?, number(date, 4, 6)?, number(date, 6, 8)?);
    let unix_s = days * DAY + number(time, 0, 2)? * 3600 + number(time, 2, 4)? * 60 + number(time, 4, 6)?;
    // The timestamp after the last valid one would be longer than the others and sort wrongly.
    (stamp(unix_s) == text && stamp(unix_s + 1).len() == STAMP).then_some(unix_s)
}

/// Year, month and day of a number of days since 1970-01-01, in the Gregorian calendar. Years are counted from
/// March, so that the leap day is the last day of its year.
fn civil(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let (era, day_of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (era * 400 + year_of_era + i64::from(month <= 2), month, day)
}

/// The inverse of [`civil`].
fn days(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let (era, year_of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

#[cfg(test)]
mod tests;
