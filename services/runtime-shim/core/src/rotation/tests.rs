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
fn a_log_below_its_limit_and_an_empty_one_stay() {
    assert!(plan_rotation("0.log", &files(&[("0.log", 9)]), LIMITS, NOW).is_empty());
    let always = Limits { max_bytes: 0, ..LIMITS };
    assert!(plan_rotation("0.log", &files(&[("0.log", 0)]), always, NOW).is_empty());
    assert!(!plan_rotation("0.log", &files(&[("0.log", 1)]), always, NOW).is_empty());
}

#[test]
fn a_log_at_its_limit_is_renamed_after_the_moment_and_opened_anew() {
    let steps = plan_rotation("0.log", &files(&[("0.log", 10), ("1.log", 99)]), LIMITS, NOW);
    assert_eq!(words(&steps), ["0.log -> 0.log.20260102-030405", "reopen"]);
}

#[test]
fn the_oldest_make_room_whatever_their_form() {
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
fn a_missing_log_is_only_opened_anew() {
    let list = files(&[("0.log.20260101-000001", 10), ("0.log.20260101-000000", 10)]);
    assert_eq!(words(&plan_rotation("0.log", &list, LIMITS, NOW)), ["reopen"]);
}

#[test]
fn a_clock_that_was_set_back_gives_no_name_that_sorts_before_another() {
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
    assert_eq!(words(&plan_tidying("0.log", &list)), expected);
}

#[test]
fn what_a_compression_left_half_done_is_cleaned_up() {
    let list = files(&[
        ("0.log", 1),
        ("0.log.20260101-000001.gz", 2),
        ("0.log.20260101-000001", 9),
        ("0.log.20260101-000002", 9),
        ("0.log.20260101-000002.tmp", 1),
    ]);
    let expected = ["remove 0.log.20260101-000002.tmp", "remove 0.log.20260101-000001"];
    assert_eq!(words(&plan_tidying("0.log", &list)), expected);
}

#[test]
fn only_names_that_rotation_makes_are_rotated_files() {
    for (name, expected) in [
        ("0.log.20260102-030405", Some(("20260102-030405", Form::Plain))),
        ("0.log.20260102-030405.gz", Some(("20260102-030405", Form::Compressed))),
        ("0.log.20260102-030405.tmp", Some(("20260102-030405", Form::Unfinished))),
        ("0.log.20240229-235959", Some(("20240229-235959", Form::Plain))),
        // The last day of the calendar's 400 years.
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
        assert_eq!(rotated("0.log", name), expected, "{name}");
    }
}

#[test]
fn the_history_names_each_moment_once_and_the_plain_file_first() {
    let names = ["0.log.20260101-000002.gz", "0.log.20260101-000002", "0.log", "0.log.20260101-000001.gz"];
    for order in [[0, 1, 2, 3], [1, 0, 3, 2]] {
        let history = history("0.log", order.map(|i| names[i]));
        let found: Vec<_> = history.into_iter().collect();
        assert_eq!(found, [("20260101-000001", Form::Compressed), ("20260101-000002", Form::Plain)]);
    }
}

/// A log folder, the container that writes to it, and what a reader finds: each file holds numbered lines.
#[derive(Debug, Default)]
struct Folder {
    files: BTreeMap<String, Vec<u32>>,
    /// The file that the runtime writes to.
    open: String,
    written: u32,
    /// Lines that were removed because there was no room.
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
            self.files.get_mut(&self.open).expect("nobody removes what is written to").push(self.written);
            self.written += 1;
        }
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Remove(name) => {
                let lines = self.files.remove(name).expect("only what is there is removed");
                let kept = self.lines();
                if let Some(last) = lines.last().filter(|last| !kept.contains(last)) {
                    // An unfinished compression is of a file that is still there.
                    self.dropped = self.dropped.max(last + 1);
                }
            }
            Step::Rename { from, to } => {
                let lines = self.files.remove(from).expect("only what is there is renamed");
                assert!(self.files.insert(to.clone(), lines).is_none(), "{to} was overwritten");
                if self.open == *from {
                    self.open.clone_from(to);
                }
            }
            Step::Compress { from, to } => {
                assert_ne!(self.open, *from, "what is written to is not compressed");
                let lines = self.files[from].clone();
                assert!(self.files.insert(to.clone(), lines).is_none());
            }
            Step::Reopen => {
                self.open = "0.log".into();
                self.files.entry("0.log".into()).or_default();
            }
        }
    }

    /// What a reader of the whole log finds.
    fn lines(&self) -> Vec<u32> {
        let history = history("0.log", self.files.keys().map(String::as_str));
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
fn whatever_is_cut_off_no_line_is_lost_doubled_or_out_of_order() {
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
            let steps = plan_tidying("0.log", &folder.list());
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
        for step in plan_tidying("0.log", &folder.list()) {
            folder.step(&step);
        }
        prop_assert!(plan_tidying("0.log", &folder.list()).is_empty());
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
fn stamps_sort_as_their_moments_and_are_read_back() {
    let reached = &Reached::default();
    let apart = prop_oneof![-2i64..3, -100_000_000_000i64..100_000_000_000];
    proptest!(ProptestConfig::with_cases(512), |(a in 0i64..200_000_000_000, apart in apart)| {
        let b = (a + apart).clamp(0, 200_000_000_000);
        prop_assert_eq!(seconds(&stamp(a)), Some(a));
        prop_assert_eq!(seconds(&stamp(b)), Some(b));
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
fn each_day_of_five_centuries_is_read_back() {
    for day in 0..200_000 {
        let at = day * DAY + 45_296;
        let text = stamp(at);
        assert_eq!(seconds(&text), Some(at), "{text}");
        assert!(text.ends_with("-123456"), "{text}");
    }
    // No leap year, but every 400 years.
    assert!(stamp(4_107_542_399).starts_with("21000228-") && stamp(4_107_542_400).starts_with("21000301-"));
}
