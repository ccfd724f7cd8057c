use std::collections::BTreeMap;

use keelson_testkit::Reached;
use proptest::prelude::*;

use super::*;

const LIMITS: Limits = Limits { max_bytes: 10, max_files: 4 };
/// 2026-01-02 03:04:05 UTC.
const NOW: i64 = 1_767_323_045;

fn files(list: &[(&str, u64)]) -> Vec<LogFile> {
    list.iter().map(|(name, bytes)| LogFile { name: (*name).into(), bytes: *bytes }).collect()
}

fn words(steps: &[Step]) -> Vec<String> {
    let word = |step: &Step| match step {
        Step::Remove(name) => format!("remove {name}"),
        Step::Rename { from, to } => format!("{from} -> {to}"),
        Step::Compress { from, to } => format!("gzip {from} > {to}"),
        Step::Reopen => "reopen".to_owned(),
    };
    steps.iter().map(word).collect()
}

#[test]
fn log_below_the_size_limit_and_empty_log_are_not_rotated() {
    assert!(plan_rotation("0.log", &files(&[("0.log", 9)]), LIMITS, NOW).is_empty());
    let always = Limits { max_bytes: 0, ..LIMITS };
    assert!(plan_rotation("0.log", &files(&[("0.log", 0)]), always, NOW).is_empty());
    assert!(!plan_rotation("0.log", &files(&[("0.log", 1)]), always, NOW).is_empty());
}

#[test]
fn log_at_the_size_limit_is_renamed_with_a_timestamp_and_reopened() {
    let steps = plan_rotation("0.log", &files(&[("0.log", 10), ("1.log", 99)]), LIMITS, NOW);
    assert_eq!(words(&steps), ["0.log -> 0.log.20260102-030405", "reopen"]);
}

#[test]
fn oldest_rotated_files_are_removed_in_any_form() {
    let list = files(&[
        ("0.log", 10),
        ("0.log.20260101-000004", 10),
        ("0.log.20260101-000001.gz", 1),
        ("0.log.20260101-000002", 10),
        ("0.log.20260101-000002.gz", 1),
        ("0.log.20260101-000003.gz", 1),
        ("0.log.note", 1),
    ]);
    let steps = plan_rotation("0.log", &list, LIMITS, NOW);
    let expected = [
        "remove 0.log.20260101-000001.gz",
        "remove 0.log.20260101-000002",
        "remove 0.log.20260101-000002.gz",
        "0.log -> 0.log.20260102-030405",
        "reopen",
    ];
    assert_eq!(words(&steps), expected);
    let two = Limits { max_files: 2, ..LIMITS };
    assert_eq!(plan_rotation("0.log", &list, two, NOW).len(), 5 + 2);
}

#[test]
fn missing_log_is_only_reopened() {
    let list = files(&[("0.log.20260101-000001", 10), ("0.log.20260101-000000", 10)]);
    assert_eq!(words(&plan_rotation("0.log", &list, LIMITS, NOW)), ["reopen"]);
}

#[test]
fn rotated_names_keep_their_order_when_the_clock_is_set_back() {
    let list = files(&[("0.log", 10), ("0.log.20271231-235959", 10)]);
    let steps = plan_rotation("0.log", &list, LIMITS, NOW);
    assert_eq!(words(&steps)[0], "0.log -> 0.log.20280101-000000");
}

#[test]
fn all_but_the_newest_rotated_file_are_compressed() {
    let list =
        files(&[("0.log", 1), ("0.log.20260101-000001", 9), ("0.log.20260101-000002", 9), ("0.log.x", 1)]);
    let expected = [
        "gzip 0.log.20260101-000001 > 0.log.20260101-000001.tmp",
        "0.log.20260101-000001.tmp -> 0.log.20260101-000001.gz",
        "remove 0.log.20260101-000001",
    ];
    assert_eq!(words(&plan_cleanup("0.log", &list)), expected);
}

#[test]
fn leftovers_of_an_interrupted_compression_are_cleaned_up() {
    let list = files(&[
        ("0.log", 1),
        ("0.log.20260101-000001.gz", 2),
        ("0.log.20260101-000001", 9),
        ("0.log.20260101-000002", 9),
        ("0.log.20260101-000002.tmp", 1),
    ]);
    let expected = ["remove 0.log.20260101-000002.tmp", "remove 0.log.20260101-000001"];
    assert_eq!(words(&plan_cleanup("0.log", &list)), expected);
}

#[test]
fn only_names_made_by_rotation_are_parsed_as_rotated_files() {
    for (name, expected) in [
        ("0.log.20260102-030405", Some(("20260102-030405", Form::Plain))),
        ("0.log.20260102-030405.gz", Some(("20260102-030405", Form::Compressed))),
        ("0.log.20260102-030405.tmp", Some(("20260102-030405", Form::Incomplete))),
        ("0.log.20240229-235959", Some(("20240229-235959", Form::Plain))),
        // The leap day of a year divisible by 400.
        ("0.log.20000229-120000", Some(("20000229-120000", Form::Plain))),
        ("0.log", None),
        ("0.log.", None),
        ("10.log.20260102-030405", None),
        ("0.log.20260102-030405.gz.gz", None),
        ("0.log.20260102-030460", None),
        ("0.log.20260102-0304-5", None),
        ("0.log.20260102+030405", None),
        ("0.log.20260229-000000", None),
        ("0.log.20261301-000000", None),
        ("0.log.99991231-235959", None),
        ("0.log.2026010-2030405", None),
        ("0.log.202601023-30405", None),
        ("0.log.+0260102-030405", None),
        ("0.log.2026-0102030405", None),
        ("0.log.202é010-2030405", None),
    ] {
        assert_eq!(parse_rotated_name("0.log", name), expected, "{name}");
    }
}

#[test]
fn rotated_files_lists_each_timestamp_once_preferring_the_plain_file() {
    let names = ["0.log.20260101-000002.gz", "0.log.20260101-000002", "0.log", "0.log.20260101-000001.gz"];
    for order in [[0, 1, 2, 3], [1, 0, 3, 2]] {
        let history = rotated_files("0.log", order.map(|i| names[i]));
        let found: Vec<_> = history.into_iter().collect();
        assert_eq!(found, [("20260101-000001", Form::Compressed), ("20260101-000002", Form::Plain)]);
    }
}

/// A log folder whose files hold numbered lines, and the container that writes to it.
#[derive(Debug, Default)]
struct Folder {
    files: BTreeMap<String, Vec<u32>>,
    /// The file that the runtime writes to.
    open: String,
    written: u32,
    /// Lines removed because of the limit.
    dropped: u32,
}

impl Folder {
    fn list(&self) -> Vec<LogFile> {
        let file =
            |(name, lines): (&String, &Vec<u32>)| LogFile { name: name.clone(), bytes: lines.len() as u64 };
        self.files.iter().map(file).collect()
    }

    fn write(&mut self, lines: u32) {
        for _ in 0..lines {
            self.files
                .get_mut(&self.open)
                .expect("the file being written is never removed")
                .push(self.written);
            self.written += 1;
        }
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Remove(name) => {
                let lines = self.files.remove(name).expect("only existing files are removed");
                let kept = self.lines();
                if let Some(last) = lines.last().filter(|last| !kept.contains(last)) {
                    // The source of an incomplete compression still exists.
                    self.dropped = self.dropped.max(last + 1);
                }
            }
            Step::Rename { from, to } => {
                let lines = self.files.remove(from).expect("only existing files are renamed");
                assert!(self.files.insert(to.clone(), lines).is_none(), "{to} was overwritten");
                if self.open == *from {
                    self.open.clone_from(to);
                }
            }
            Step::Compress { from, to } => {
                assert_ne!(self.open, *from, "the file being written is not compressed");
                let lines = self.files[from].clone();
                assert!(self.files.insert(to.clone(), lines).is_none());
            }
            Step::Reopen => {
                self.open = "0.log".into();
                self.files.entry("0.log".into()).or_default();
            }
        }
    }

    /// The lines that a reader of the whole log gets.
    fn lines(&self) -> Vec<u32> {
        let history = rotated_files("0.log", self.files.keys().map(String::as_str));
        let names = history.iter().map(|(stamp, form)| name_of("0.log", stamp, *form));
        names
            .chain(["0.log".to_owned()])
            .filter_map(|name| self.files.get(&name))
            .flatten()
            .copied()
            .collect()
    }
}

#[test]
fn interrupted_rotation_loses_duplicates_or_reorders_no_line() {
    let reached = &Reached::default();
    let turns = proptest::collection::vec((0u32..15, 0usize..5, 0usize..8, -100i64..100), 1..30);
    proptest!(ProptestConfig::with_cases(512), |(turns in turns, max_files in 2usize..5)| {
        let limits = Limits { max_bytes: 10, max_files };
        let mut folder = Folder { open: "0.log".into(), ..Folder::default() };
        folder.files.insert("0.log".into(), Vec::new());
        let (mut rotated, mut not_rotated, mut tidied, mut not_tidied) = (false, false, false, false);
        for (lines, rotating, tidying, clock) in turns {
            folder.write(lines);
            let steps = plan_rotation("0.log", &folder.list(), limits, NOW + clock);
            for step in steps.iter().take(rotating) {
                folder.step(step);
                folder.write(1);
            }
            rotated |= !steps.is_empty() && steps.len() <= rotating;
            not_rotated |= steps.len() > rotating;
            let steps = plan_cleanup("0.log", &folder.list());
            for step in steps.iter().take(tidying) {
                folder.step(step);
            }
            tidied |= !steps.is_empty() && steps.len() <= tidying;
            not_tidied |= steps.len() > tidying;
            let expected: Vec<u32> = (folder.dropped..folder.written).collect();
            prop_assert_eq!(folder.lines(), expected);
        }
        for step in plan_rotation("0.log", &folder.list(), limits, NOW) {
            folder.step(&step);
        }
        for step in plan_cleanup("0.log", &folder.list()) {
            folder.step(&step);
        }
        prop_assert!(plan_cleanup("0.log", &folder.list()).is_empty());
        prop_assert!(folder.files.len() <= max_files, "{:?}", folder.files.keys());
        prop_assert!(folder.files.contains_key("0.log"));
        reached.case([
            ("rotated", rotated),
            ("a rotation is cut off", not_rotated),
            ("compressed", tidied),
            ("a compression is cut off", not_tidied),
            ("the oldest lines make room", folder.dropped > 0),
            ("no line makes room", folder.dropped == 0),
            ("as many files as there may be", folder.files.len() == max_files),
        ]);
    });
    // The rarest: "no line makes room", in one case of 5.
    reached.assert_each();
}

#[test]
fn rotation_timestamps_sort_by_time_and_round_trip() {
    let reached = &Reached::default();
    let apart = prop_oneof![-2i64..3, -100_000_000_000i64..100_000_000_000];
    proptest!(ProptestConfig::with_cases(512), |(a in 0i64..200_000_000_000, apart in apart)| {
        let b = (a + apart).clamp(0, 200_000_000_000);
        prop_assert_eq!(parse_stamp(&stamp(a)), Some(a));
        prop_assert_eq!(parse_stamp(&stamp(b)), Some(b));
        prop_assert_eq!(a.cmp(&b), stamp(a).cmp(&stamp(b)));
        prop_assert_eq!(next_stamp(a, Some(&stamp(b))), stamp(a.max(b + 1)));
        reached.case([
            ("the same moment", a == b),
            ("the next second", b + 1 == a),
            ("later", a > b + 1),
            ("the clock was set back", a < b),
        ]);
    });
    // The rarest: "the same moment", in one case of 10.
    reached.assert_each();
}

#[test]
fn rotation_timestamps_round_trip_for_each_day_of_five_centuries() {
    for day in 0..200_000 {
        let at = day * DAY + 45_296;
        let text = stamp(at);
        assert_eq!(parse_stamp(&text), Some(at), "{text}");
        assert!(text.ends_with("-123456"), "{text}");
    }
    // 2100 is not a leap year.
    assert!(stamp(4_107_542_399).starts_with("21000228-") && stamp(4_107_542_400).starts_with("21000301-"));
}
