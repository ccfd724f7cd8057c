//! What to do next for one pod.

use std::collections::BTreeSet;

use crate::desire::{PodDesire, Want};
use crate::names::VolumeKey;

/// What is there of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Actual {
    /// Its folder exists. After a start it may lack sub-folders.
    pub folder: bool,
    /// Its folders were made or completed by this process.
    pub folder_complete: bool,
    /// What lies below `volumes/`, set up or not.
    pub held: BTreeSet<VolumeKey>,
    /// Names of the volumes that this process has set up or found ready.
    pub ready: BTreeSet<String>,
    /// Names of ready volumes whose files may have changed.
    pub stale: BTreeSet<String>,
    /// Parts of volumes may be mounted for containers, below `volume-subpaths/`.
    pub subpaths: bool,
}

/// One thing to do. Steps of one plan are done in order; one volume's failure does not stop another's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Make the pod's folder and its sub-folders.
    MakeFolders,
    /// Set up the volume of this index in the desire.
    SetUp(usize),
    /// Bring the files of the ready volume of this index up to date.
    Refresh(usize),
    /// Unmount the parts of volumes that containers mount; comes before any volume goes, which does not go when
    /// this fails.
    RemoveSubpaths,
    /// Unmount and remove a volume.
    TearDown(VolumeKey),
    /// Remove what is left of the pod's folder; comes only when no volume is held.
    RemoveFolder,
}

/// What to do next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Plan {
    /// Nothing, until the desire changes.
    Settled(Settled),
    /// Make sure by a fresh read of the runtime that nothing of the pod runs, then plan again.
    AskRuntime,
    /// These, then plan again.
    Do(Vec<Step>),
}

/// How a pod is when nothing is to be done for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settled {
    /// Every wanted volume is ready.
    Mounted,
    /// The pod stops; what is there stays.
    Stopping,
    /// No volume is left.
    Unmounted,
    /// Nothing is left.
    Gone,
}

/// Decides the next steps for a pod.
///
/// Level-triggered: depends only on the arguments, so a restarted service reaches the same decision.
/// `quiet` says that a read of the runtime, made for this call, shows no running container and no ready sandbox;
/// nothing is torn down without it.
///
/// A held volume that a running pod's desire does not name is left alone: the volumes of a pod do not change, so
/// it is one that a container may still use.
pub fn plan(desire: &PodDesire, actual: &Actual, quiet: bool) -> Plan {
    match desire.want {
        Want::Run => {
            let mut steps = Vec::new();
            if !actual.folder_complete {
                steps.push(Step::MakeFolders);
            }
            let missing = |(_, v): &(usize, &crate::desire::Volume)| !actual.ready.contains(&v.name);
            steps.extend(desire.volumes.iter().enumerate().filter(missing).map(|(i, _)| Step::SetUp(i)));
            let stale = |(_, v): &(usize, &crate::desire::Volume)| {
                actual.ready.contains(&v.name) && actual.stale.contains(&v.name)
            };
            steps.extend(desire.volumes.iter().enumerate().filter(stale).map(|(i, _)| Step::Refresh(i)));
            if steps.is_empty() { Plan::Settled(Settled::Mounted) } else { Plan::Do(steps) }
        }
        Want::Stop => Plan::Settled(Settled::Stopping),
        Want::Unmount | Want::Forget if !actual.held.is_empty() || actual.subpaths => {
            if quiet {
                let parts = actual.subpaths.then_some(Step::RemoveSubpaths);
                let volumes = actual.held.iter().cloned().map(Step::TearDown);
                Plan::Do(parts.into_iter().chain(volumes).collect())
            } else {
                Plan::AskRuntime
            }
        }
        Want::Unmount => Plan::Settled(Settled::Unmounted),
        Want::Forget if !actual.folder => Plan::Settled(Settled::Gone),
        Want::Forget if quiet => Plan::Do(vec![Step::RemoveFolder]),
        Want::Forget => Plan::AskRuntime,
    }
}

impl Actual {
    /// The files of every ready volume of `desire` may have changed.
    pub fn files_may_have_changed(&mut self, desire: &PodDesire) {
        let files = desire.volumes.iter().filter(|v| v.files().is_some() && self.ready.contains(&v.name));
        self.stale = files.map(|v| v.name.clone()).collect();
    }

    /// Takes note of a step that was done.
    pub fn done(&mut self, step: &Step, desire: &PodDesire, made: Option<VolumeKey>) {
        match step {
            Step::MakeFolders => {
                self.folder = true;
                self.folder_complete = true;
            }
            Step::SetUp(i) => {
                if let Some(volume) = desire.volumes.get(*i) {
                    self.ready.insert(volume.name.clone());
                    self.stale.remove(&volume.name);
                }
                self.held.extend(made);
            }
            Step::Refresh(i) => {
                if let Some(volume) = desire.volumes.get(*i) {
                    self.stale.remove(&volume.name);
                }
            }
            Step::RemoveSubpaths => self.subpaths = false,
            Step::TearDown(key) => {
                self.held.remove(key);
                self.ready.remove(&key.name);
            }
            Step::RemoveFolder => *self = Self::default(),
        }
    }

    /// Takes note of a step that failed: what it touched may be there or not.
    pub fn failed(&mut self, step: &Step, made: Option<VolumeKey>) {
        match step {
            Step::MakeFolders => self.folder = true,
            Step::SetUp(_) => self.held.extend(made),
            // It stays as it was, ready and stale.
            Step::Refresh(_) | Step::RemoveSubpaths => {}
            Step::TearDown(key) => {
                self.ready.remove(&key.name);
            }
            Step::RemoveFolder => {
                self.folder_complete = false;
                self.ready.clear();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use keelson_testkit::Reached;
    use proptest::prelude::*;

    use super::*;
    use crate::desire::{Desire as _, Medium, PodRef, Source, Volume};
    use crate::payload::{Files, FilesKind};

    fn desire(want: Want, volumes: &[&str]) -> PodDesire {
        let volume = |name: &&str| Volume {
            name: (*name).to_owned(),
            source: Source::EmptyDir { medium: Medium::Disk, size_limit: None },
        };
        PodDesire {
            volumes: volumes.iter().map(volume).collect(),
            want,
            ..PodDesire::forget(PodRef { uid: "u".into(), ..PodRef::default() })
        }
    }

    fn holding(names: &[&str]) -> Actual {
        Actual {
            folder: true,
            folder_complete: true,
            held: names.iter().map(|n| VolumeKey::empty_dir(n)).collect(),
            ready: names.iter().map(|n| (*n).to_owned()).collect(),
            stale: BTreeSet::new(),
            subpaths: false,
        }
    }

    #[test]
    fn a_new_pod_gets_folders_first_and_then_each_volume() {
        assert_eq!(
            plan(&desire(Want::Run, &["a", "b"]), &Actual::default(), false),
            Plan::Do(vec![Step::MakeFolders, Step::SetUp(0), Step::SetUp(1)])
        );
    }

    #[test]
    fn only_the_missing_volume_of_a_running_pod_is_set_up() {
        let plan = plan(&desire(Want::Run, &["a", "b"]), &holding(&["a"]), false);
        assert_eq!(plan, Plan::Do(vec![Step::SetUp(1)]));
    }

    #[test]
    fn a_ready_volume_with_changed_files_is_refreshed_and_stays_ready_when_that_fails() {
        let mut desire = desire(Want::Run, &["a", "b"]);
        desire.volumes[1].source = Source::Files(Files {
            kind: FilesKind::Secret,
            sources: Vec::new(),
            default_mode: None,
            nested: Vec::new(),
        });
        let mut actual = holding(&["a", "b"]);
        actual.files_may_have_changed(&desire);
        assert_eq!(plan(&desire, &actual, false), Plan::Do(vec![Step::Refresh(1)]));
        actual.failed(&Step::Refresh(1), desire.volumes[1].key());
        assert_eq!(plan(&desire, &actual, false), Plan::Do(vec![Step::Refresh(1)]));
        assert!(actual.ready.contains("b"));
        actual.done(&Step::Refresh(1), &desire, desire.volumes[1].key());
        assert_eq!(plan(&desire, &actual, false), Plan::Settled(Settled::Mounted));
        // One that was never ready is set up, not refreshed.
        let mut actual = holding(&["a"]);
        actual.files_may_have_changed(&desire);
        assert_eq!(plan(&desire, &actual, false), Plan::Do(vec![Step::SetUp(1)]));
        // A pod that stops is left as it is.
        let mut actual = holding(&["a", "b"]);
        actual.files_may_have_changed(&desire);
        let stopping = PodDesire { want: Want::Stop, ..desire };
        assert_eq!(plan(&stopping, &actual, false), Plan::Settled(Settled::Stopping));
    }

    #[test]
    fn volumes_found_at_the_start_are_set_up_again() {
        let found = Actual { ready: BTreeSet::new(), folder_complete: false, ..holding(&["a"]) };
        let plan = plan(&desire(Want::Run, &["a"]), &found, false);
        assert_eq!(plan, Plan::Do(vec![Step::MakeFolders, Step::SetUp(0)]));
    }

    #[test]
    fn a_stopping_pod_keeps_what_it_has_and_gets_nothing_new() {
        for actual in [Actual::default(), holding(&["a"])] {
            assert_eq!(
                plan(&desire(Want::Stop, &["a", "b"]), &actual, true),
                Plan::Settled(Settled::Stopping)
            );
        }
    }

    #[test]
    fn nothing_is_torn_down_before_the_runtime_was_asked() {
        for want in [Want::Unmount, Want::Forget] {
            assert_eq!(plan(&desire(want, &["a"]), &holding(&["a"]), false), Plan::AskRuntime);
            assert_eq!(
                plan(&desire(want, &["a"]), &holding(&["a"]), true),
                Plan::Do(vec![Step::TearDown(VolumeKey::empty_dir("a"))])
            );
        }
    }

    #[test]
    fn parts_of_volumes_go_before_the_volumes_and_hold_the_pod_until_they_are_gone() {
        for want in [Want::Unmount, Want::Forget] {
            let parts = Actual { subpaths: true, ..holding(&["a"]) };
            assert_eq!(plan(&desire(want, &["a"]), &parts, false), Plan::AskRuntime);
            let steps = vec![Step::RemoveSubpaths, Step::TearDown(VolumeKey::empty_dir("a"))];
            assert_eq!(plan(&desire(want, &["a"]), &parts, true), Plan::Do(steps));
            // Those of a hostPath, which holds nothing itself.
            let mut parts = Actual { subpaths: true, ..holding(&[]) };
            assert_eq!(plan(&desire(want, &[]), &parts, true), Plan::Do(vec![Step::RemoveSubpaths]));
            parts.failed(&Step::RemoveSubpaths, None);
            assert_eq!(plan(&desire(want, &[]), &parts, true), Plan::Do(vec![Step::RemoveSubpaths]));
            parts.done(&Step::RemoveSubpaths, &desire(want, &[]), None);
            assert_ne!(plan(&desire(want, &[]), &parts, true), Plan::Do(vec![Step::RemoveSubpaths]));
        }
    }

    #[test]
    fn a_pod_without_volumes_is_unmounted_at_once_and_its_folder_goes_only_when_it_is_forgotten() {
        assert_eq!(
            plan(&desire(Want::Unmount, &[]), &holding(&[]), false),
            Plan::Settled(Settled::Unmounted)
        );
        assert_eq!(plan(&desire(Want::Forget, &[]), &holding(&[]), false), Plan::AskRuntime);
        assert_eq!(plan(&desire(Want::Forget, &[]), &holding(&[]), true), Plan::Do(vec![Step::RemoveFolder]));
    }

    #[test]
    fn a_pod_that_was_never_here_is_gone() {
        assert_eq!(plan(&desire(Want::Forget, &[]), &Actual::default(), false), Plan::Settled(Settled::Gone));
    }

    #[test]
    fn a_step_that_failed_may_have_touched_what_it_was_for() {
        let key = VolumeKey { plugin: "kubernetes.io~empty-dir".into(), name: "a".into() };
        let mut actual = Actual::default();
        actual.failed(&Step::MakeFolders, None);
        assert!(actual.folder && !actual.folder_complete);
        actual.failed(&Step::SetUp(0), Some(key.clone()));
        assert!(actual.held.contains(&key) && actual.ready.is_empty());
        actual.ready.insert("a".into());
        actual.failed(&Step::TearDown(key.clone()), None);
        assert!(actual.held.contains(&key) && actual.ready.is_empty());
        actual.folder_complete = true;
        actual.ready.insert("a".into());
        actual.failed(&Step::RemoveFolder, None);
        assert!(!actual.folder_complete && actual.ready.is_empty());
    }

    /// Carrying out plans, with some steps failing at first, always settles; and every step that destroys
    /// comes from a plan that knew the pod to be quiet.
    #[test]
    fn every_desire_settles_whatever_fails_on_the_way() {
        let reached = &Reached::default();
        let wants = prop::sample::select(vec![Want::Run, Want::Stop, Want::Unmount, Want::Forget]);
        let names = prop::collection::btree_set("[a-d]", 0..4);
        let found = prop::collection::btree_set("[a-f]", 0..4);
        let fails = prop::collection::vec(any::<bool>(), 0..12);
        let there = any::<(bool, bool)>();
        proptest!(ProptestConfig::with_cases(1024), |(
            want in wants, names in names, found in found, there in there, fails in fails,
        )| {
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            let desire = desire(want, &names);
            let held: BTreeSet<_> = found.iter().map(|n| VolumeKey::empty_dir(n)).collect();
            let (folder, subpaths) = there;
            let folder = folder || subpaths || !held.is_empty();
            let mut actual = Actual { folder, held, subpaths, ..Actual::default() };
            let (asked, steps, failed) = carry_out(&desire, &mut actual, fails)?;
            let right = match want {
                Want::Run => names.iter().all(|n| actual.ready.contains(*n)),
                Want::Stop => true,
                Want::Unmount => actual.held.is_empty() && !actual.subpaths,
                Want::Forget => actual == Actual::default(),
            };
            prop_assert!(right, "{:?} ended with {:?}", want, actual);
            let done = |what: fn(&Step) -> bool| steps.iter().any(what);
            reached.case([
                ("runs", want == Want::Run),
                ("stops", want == Want::Stop),
                ("is unmounted", want == Want::Unmount),
                ("is forgotten", want == Want::Forget),
                ("the runtime is asked", asked > 0),
                ("the runtime is asked again", asked > 1),
                ("a step fails", failed > 0),
                ("folders are made", done(|s| *s == Step::MakeFolders)),
                ("a volume is set up", done(|s| matches!(s, Step::SetUp(_)))),
                ("parts of volumes go", done(|s| *s == Step::RemoveSubpaths)),
                ("a volume goes", done(|s| matches!(s, Step::TearDown(_)))),
                ("the folder goes", done(|s| *s == Step::RemoveFolder)),
            ]);
        });
        // The rarest: "a volume is set up", in one case of 5.
        reached.assert_each();
    }

    /// Carries out plans until nothing is to be done; how often the runtime was asked, what was done, and how many
    /// steps failed.
    fn carry_out(
        desire: &PodDesire,
        actual: &mut Actual,
        fails: Vec<bool>,
    ) -> Result<(usize, Vec<Step>, usize), TestCaseError> {
        let mut fails = fails.into_iter();
        let (mut quiet, mut asked, mut done, mut failed) = (false, 0, Vec::new(), 0);
        for _ in 0..64 {
            let steps = match plan(desire, actual, quiet) {
                Plan::Settled(end) => {
                    let wanted = match desire.want {
                        Want::Run => Settled::Mounted,
                        Want::Stop => Settled::Stopping,
                        Want::Unmount => Settled::Unmounted,
                        Want::Forget => Settled::Gone,
                    };
                    prop_assert_eq!(end, wanted);
                    return Ok((asked, done, failed));
                }
                Plan::AskRuntime => {
                    (quiet, asked) = (true, asked + 1);
                    continue;
                }
                Plan::Do(steps) => steps,
            };
            for step in steps {
                let destroys = matches!(step, Step::RemoveSubpaths | Step::TearDown(_) | Step::RemoveFolder);
                prop_assert!(!destroys || quiet);
                let made = match &step {
                    Step::SetUp(i) => Some(VolumeKey::empty_dir(&desire.volumes[*i].name)),
                    _ => None,
                };
                if fails.next().unwrap_or(false) {
                    failed += 1;
                    actual.failed(&step, made);
                    if step == Step::RemoveSubpaths {
                        break;
                    }
                } else {
                    actual.done(&step, desire, made);
                    done.push(step);
                }
            }
            quiet = false;
        }
        Err(TestCaseError::fail(format!("{:?} never settles", desire.want)))
    }
}
