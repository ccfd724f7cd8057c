//! How often the portals of a disk are tried (volumes.md §10.4).

use crate::iscsi::disk::Disk;

/// Enough paths for a multipath device.
const ENOUGH_PATHS: usize = 2;
/// From this round on, enough paths end the search.
const ROUNDS_FOR_ALL_PATHS: u32 = 2;
/// After this round one path is enough.
const LAST_ROUND: u32 = 5;

/// What follows a round over all portals that have no path yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterRound {
    /// Another round.
    Again,
    /// The disk is used with the paths that it has.
    Enough,
    /// There is no path; the attempt fails.
    NoPath,
}

/// What follows round `round`, counted from 1, of a disk with `portals` portals, of which `paths` have a path now.
pub fn after_round(round: u32, portals: usize, paths: usize) -> AfterRound {
    let is_enough =
        paths >= portals || (paths >= ENOUGH_PATHS && round >= ROUNDS_FOR_ALL_PATHS) || round >= LAST_ROUND;
    match (paths, is_enough) {
        (0, _) => AfterRound::NoPath,
        (_, true) => AfterRound::Enough,
        (_, false) => AfterRound::Again,
    }
}

/// No portal of a disk gave a path.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "iscsi volume {volume}: none of the portals {portals} has a path to LUN {lun} of {iqn}; \
     check that the target serves this node; last error: {last_error}"
)]
pub struct NoPath {
    /// The volume's inner name.
    pub volume: String,
    /// The portals, separated by commas.
    pub portals: String,
    /// The LUN.
    pub lun: u8,
    /// The target.
    pub iqn: String,
    /// What the last portal failed with, without secrets.
    pub last_error: String,
}

impl NoPath {
    /// The error for `disk`.
    pub fn of(disk: &Disk, last_error: String) -> Self {
        Self {
            volume: disk.volume().to_owned(),
            portals: disk.portals().join(", "),
            lun: disk.lun(),
            iqn: disk.iqn().to_owned(),
            last_error,
        }
    }
}

#[cfg(test)]
mod tests {
    use keelson_testkit::Reached;
    use proptest::prelude::*;

    use super::*;
    use crate::sources::IscsiSource;

    #[test]
    fn rounds_end_with_all_paths_then_with_two_then_with_one() {
        for (round, portals, paths, expected) in [
            (1, 1, 0, AfterRound::NoPath),
            (1, 1, 1, AfterRound::Enough),
            (1, 3, 0, AfterRound::NoPath),
            (1, 3, 1, AfterRound::Again),
            (1, 3, 2, AfterRound::Again),
            (1, 3, 3, AfterRound::Enough),
            (2, 3, 1, AfterRound::Again),
            (2, 3, 2, AfterRound::Enough),
            (4, 2, 1, AfterRound::Again),
            (5, 2, 1, AfterRound::Enough),
            (5, 2, 0, AfterRound::NoPath),
        ] {
            assert_eq!(after_round(round, portals, paths), expected, "{round} {portals} {paths}");
        }
    }

    #[test]
    fn rounds_always_end_by_the_fifth_and_never_without_a_path() {
        let reached = &Reached::default();
        let found = prop::collection::vec(prop_oneof![3 => Just(0usize), 1 => Just(1), 1 => Just(2)], 8);
        proptest!(ProptestConfig::with_cases(1024), |(portals in 1usize..5, found in found)| {
            let mut paths = 0;
            let mut end = None;
            for (round, more) in (1..).zip(found) {
                paths = portals.min(paths + more);
                match after_round(round, portals, paths) {
                    AfterRound::Again => {}
                    after => {
                        end = Some((round, after));
                        break;
                    }
                }
            }
            let (round, after) = end.expect("an end");
            prop_assert!(round <= LAST_ROUND);
            prop_assert_eq!(after == AfterRound::NoPath, paths == 0);
            reached.case([
                ("no path", paths == 0),
                ("all paths", paths == portals),
                ("some paths", paths > 1 && paths < portals),
                ("one path of several", paths == 1 && portals > 1),
            ]);
        });
        // The rarest: "one path of several", in one case of 50.
        reached.assert_each();
    }

    #[test]
    fn the_error_without_a_path_names_the_disk_and_the_last_error() {
        let source = IscsiSource {
            target_portal: "10.0.0.1".into(),
            portals: vec!["10.0.0.2".into()],
            iqn: "iqn.x".into(),
            lun: 4,
            ..IscsiSource::default()
        };
        let text = NoPath::of(&Disk::new("pv", &source).unwrap(), "login timed out".into()).to_string();
        let start =
            "iscsi volume pv: none of the portals 10.0.0.1:3260, 10.0.0.2:3260 has a path to LUN 4 of iqn.x;";
        assert!(text.starts_with(start) && text.ends_with("last error: login timed out"), "{text}");
    }
}
