//! Decides the next actions for one pod.

use std::collections::BTreeSet;

use crate::desire::{PodDesire, Want};
use crate::names::VolumeKey;

/// The actual state of a pod's folder and volumes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ActualState {
    /// The pod's folder exists. After a restart it may lack sub-folders.
    pub folder: bool,
    /// This process has created the folder or completed its sub-folders.
    pub folder_complete: bool,
    /// Every volume below `volumes/`, whether set up or not.
    pub on_disk: BTreeSet<VolumeKey>,
    /// Names of the volumes that this process has set up or found ready.
    pub ready: BTreeSet<String>,
    /// Names of ready volumes whose files may be out of date.
    pub stale: BTreeSet<String>,
    /// subPaths may be mounted for containers, below `volume-subpaths/`.
    pub subpaths: bool,
    /// What is known of the volumes that plugins provide.
    pub plugins: PluginVolumes,
}

/// How far the volumes of a pod are that plugins provide. They are set up and torn down beside its other volumes
/// ([`world`](crate::world)); their names are in [`ActualState::ready`], too.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PluginVolumes {
    /// One is, or may be, mounted for the pod, or is wanted by it.
    pub may_have_mounts: bool,
    /// Their teardown has been requested.
    pub released: bool,
}

/// One thing to do. The actions of a plan run in order; an error of one volume does not stop the others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Create the pod's folder and its sub-folders.
    CreateFolders,
    /// Set up the volume with this index in the desire.
    SetUp(usize),
    /// Update the files of the ready volume with this index in the desire.
    Refresh(usize),
    /// Unmount the subPaths of the pod's containers. Comes before every `TearDown`; when it fails, no volume is
    /// torn down.
    RemoveSubpaths,
    /// Unmount and remove a volume.
    TearDown(VolumeKey),
    /// Have the volumes of plugins torn down. It only requests that.
    ReleasePlugins,
    /// Remove the rest of the pod's folder. Comes only when no volume is on disk.
    RemoveFolder,
}

/// What to do next for a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Plan {
    /// Nothing, until the desire changes.
    Settled(Settled),
    /// Check with a fresh read of the runtime that nothing of the pod runs, then plan again.
    AskRuntime,
    /// Carry out these actions, then plan again.
    Do(Vec<Action>),
}

/// The state of a pod that needs no action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settled {
    /// Every desired volume is ready.
    Mounted,
    /// Only volumes of plugins are not ready.
    AwaitingPlugins,
    /// The pod is stopping; its volumes stay as they are.
    Stopping,
    /// Only volumes of plugins are left, and their teardown has been requested.
    AwaitingTeardown,
    /// No volume is left.
    Unmounted,
    /// No volume and no folder is left.
    Gone,
}

/// Decides the next actions for a pod.
///
/// Level-triggered: depends only on the arguments, so a restarted service reaches the same decision.
/// `nothing_runs` means that a read of the runtime, made for this call, shows no running container and no ready
/// sandbox. Without it nothing is torn down.
///
/// A volume on disk that a running pod's desire does not name is left alone: the volumes of a pod do not change,
/// so a container may still use it.
pub fn plan(desire: &PodDesire, actual: &ActualState, nothing_runs: bool) -> Plan {
    match desire.header.want {
        Want::Run => {
            let mut actions = Vec::new();
            if !actual.folder_complete {
                actions.push(Action::CreateFolders);
            }
            let missing =
                |(_, v): &(usize, &crate::desire::Volume)| !v.has_plugin() && !actual.ready.contains(&v.name);
            actions.extend(desire.volumes.iter().enumerate().filter(missing).map(|(i, _)| Action::SetUp(i)));
            let stale = |(_, v): &(usize, &crate::desire::Volume)| {
                actual.ready.contains(&v.name) && actual.stale.contains(&v.name)
            };
            actions.extend(desire.volumes.iter().enumerate().filter(stale).map(|(i, _)| Action::Refresh(i)));
            if !actions.is_empty() {
                Plan::Do(actions)
            } else if desire.volumes.iter().all(|volume| actual.ready.contains(&volume.name)) {
                Plan::Settled(Settled::Mounted)
            } else {
                Plan::Settled(Settled::AwaitingPlugins)
            }
        }
        Want::Stop => Plan::Settled(Settled::Stopping),
        Want::Unmount | Want::Forget if has_work(actual) => {
            if nothing_runs {
                let subpaths = actual.subpaths.then_some(Action::RemoveSubpaths);
                let PluginVolumes { may_have_mounts, released } = actual.plugins;
                let plugins = (may_have_mounts && !released).then_some(Action::ReleasePlugins);
                let volumes = actual.on_disk.iter().cloned().map(Action::TearDown);
                Plan::Do(subpaths.into_iter().chain(plugins).chain(volumes).collect())
            } else {
                Plan::AskRuntime
            }
        }
        Want::Unmount | Want::Forget if actual.plugins.may_have_mounts => {
            Plan::Settled(Settled::AwaitingTeardown)
        }
        Want::Unmount => Plan::Settled(Settled::Unmounted),
        Want::Forget if !actual.folder => Plan::Settled(Settled::Gone),
        Want::Forget if nothing_runs => Plan::Do(vec![Action::RemoveFolder]),
        Want::Forget => Plan::AskRuntime,
    }
}

/// Whether something of the pod is to be unmounted.
fn has_work(actual: &ActualState) -> bool {
    let PluginVolumes { may_have_mounts, released } = actual.plugins;
    !actual.on_disk.is_empty() || actual.subpaths || (may_have_mounts && !released)
}

impl ActualState {
    /// Marks the files of every ready volume of `desire` as possibly out of date.
    pub fn mark_files_stale(&mut self, desire: &PodDesire) {
        let files = desire.volumes.iter().filter(|v| v.files().is_some() && self.ready.contains(&v.name));
        self.stale = files.map(|v| v.name.clone()).collect();
    }

    /// Records an action that succeeded. `key` is the volume that it set up on disk, if any.
    pub fn record_success(&mut self, action: &Action, desire: &PodDesire, key: Option<VolumeKey>) {
        match action {
            Action::CreateFolders => {
                self.folder = true;
                self.folder_complete = true;
            }
            Action::SetUp(i) => {
                if let Some(volume) = desire.volumes.get(*i) {
                    self.ready.insert(volume.name.clone());
                    self.stale.remove(&volume.name);
                }
                self.on_disk.extend(key);
            }
            Action::Refresh(i) => {
                if let Some(volume) = desire.volumes.get(*i) {
                    self.stale.remove(&volume.name);
                }
            }
            Action::RemoveSubpaths => self.subpaths = false,
            Action::TearDown(key) => {
                self.on_disk.remove(key);
                self.ready.remove(&key.name);
            }
            Action::ReleasePlugins => self.plugins.released = true,
            Action::RemoveFolder => *self = Self::default(),
        }
    }

    /// Records an action that failed: the folder or volume that it worked on may exist or not.
    pub fn record_failure(&mut self, action: &Action, key: Option<VolumeKey>) {
        match action {
            Action::CreateFolders => self.folder = true,
            Action::SetUp(_) => self.on_disk.extend(key),
            // The volume stays ready and stale.
            Action::Refresh(_) | Action::RemoveSubpaths | Action::ReleasePlugins => {}
            Action::TearDown(key) => {
                self.ready.remove(&key.name);
            }
            Action::RemoveFolder => {
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
    use crate::desire::{DesireHeader, Medium, PodRef, Source, Volume, VolumeUse};
    use crate::payload::{Files, FilesKind};

    fn desire(want: Want, volumes: &[&str]) -> PodDesire {
        let volume = |name: &&str| Volume {
            name: (*name).to_owned(),
            source: Source::EmptyDir { medium: Medium::Disk, size_limit: None },
            used: VolumeUse::default(),
        };
        let pod = PodRef { uid: "u".into(), ..PodRef::default() };
        PodDesire {
            volumes: volumes.iter().map(volume).collect(),
            ..PodDesire::from(DesireHeader { pod, revision: 0, want })
        }
    }

    fn with_volumes(names: &[&str]) -> ActualState {
        ActualState {
            folder: true,
            folder_complete: true,
            on_disk: names.iter().map(|n| VolumeKey::empty_dir(n)).collect(),
            ready: names.iter().map(|n| (*n).to_owned()).collect(),
            stale: BTreeSet::new(),
            subpaths: false,
            plugins: PluginVolumes::default(),
        }
    }

    #[test]
    fn a_new_pod_gets_folders_first_and_then_each_volume() {
        assert_eq!(
            plan(&desire(Want::Run, &["a", "b"]), &ActualState::default(), false),
            Plan::Do(vec![Action::CreateFolders, Action::SetUp(0), Action::SetUp(1)])
        );
    }

    fn with_plugin(want: Want) -> PodDesire {
        let claim = Source::Claim { name: Some("claim".into()), read_only: false };
        let volume = Volume { name: "p".into(), source: claim, used: VolumeUse::default() };
        let mut desire = desire(want, &["a"]);
        desire.volumes.push(volume);
        desire
    }

    fn with_plugin_mounts(names: &[&str], released: bool) -> ActualState {
        ActualState { plugins: PluginVolumes { may_have_mounts: true, released }, ..with_volumes(names) }
    }

    #[test]
    fn a_volume_of_a_plugin_is_awaited_and_never_set_up_here() {
        let desire = with_plugin(Want::Run);
        let start = plan(&desire, &ActualState::default(), false);
        assert_eq!(start, Plan::Do(vec![Action::CreateFolders, Action::SetUp(0)]));
        assert_eq!(plan(&desire, &with_volumes(&["a"]), false), Plan::Settled(Settled::AwaitingPlugins));
        let mut ready = with_volumes(&["a"]);
        ready.ready.insert("p".into());
        assert_eq!(plan(&desire, &ready, false), Plan::Settled(Settled::Mounted));
    }

    #[test]
    fn volumes_of_plugins_are_released_only_when_nothing_of_the_pod_runs() {
        for want in [Want::Unmount, Want::Forget] {
            let desire = with_plugin(want);
            let actual = with_plugin_mounts(&[], false);
            assert_eq!(plan(&desire, &actual, false), Plan::AskRuntime);
            assert_eq!(plan(&desire, &actual, true), Plan::Do(vec![Action::ReleasePlugins]));
            let released = with_plugin_mounts(&[], true);
            assert_eq!(plan(&desire, &released, true), Plan::Settled(Settled::AwaitingTeardown));
        }
        let desire = with_plugin(Want::Stop);
        assert_eq!(plan(&desire, &with_plugin_mounts(&["a"], false), true), Plan::Settled(Settled::Stopping));
    }

    #[test]
    fn sub_paths_go_before_volumes_of_plugins_and_the_folder_goes_last() {
        let desire = with_plugin(Want::Forget);
        let actual = ActualState { subpaths: true, ..with_plugin_mounts(&["a"], false) };
        let key = VolumeKey::empty_dir("a");
        let actions = vec![Action::RemoveSubpaths, Action::ReleasePlugins, Action::TearDown(key)];
        assert_eq!(plan(&desire, &actual, true), Plan::Do(actions));
        let gone = ActualState { folder: true, ..ActualState::default() };
        assert_eq!(plan(&desire, &gone, true), Plan::Do(vec![Action::RemoveFolder]));
    }

    #[test]
    fn only_the_missing_volume_of_a_running_pod_is_set_up() {
        let plan = plan(&desire(Want::Run, &["a", "b"]), &with_volumes(&["a"]), false);
        assert_eq!(plan, Plan::Do(vec![Action::SetUp(1)]));
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
        let mut actual = with_volumes(&["a", "b"]);
        actual.mark_files_stale(&desire);
        assert_eq!(plan(&desire, &actual, false), Plan::Do(vec![Action::Refresh(1)]));
        actual.record_failure(&Action::Refresh(1), desire.volumes[1].key());
        assert_eq!(plan(&desire, &actual, false), Plan::Do(vec![Action::Refresh(1)]));
        assert!(actual.ready.contains("b"));
        actual.record_success(&Action::Refresh(1), &desire, desire.volumes[1].key());
        assert_eq!(plan(&desire, &actual, false), Plan::Settled(Settled::Mounted));
        // A volume that was never ready is set up, not refreshed.
        let mut actual = with_volumes(&["a"]);
        actual.mark_files_stale(&desire);
        assert_eq!(plan(&desire, &actual, false), Plan::Do(vec![Action::SetUp(1)]));
        // A stopping pod is left as it is.
        let mut actual = with_volumes(&["a", "b"]);
        actual.mark_files_stale(&desire);
        let mut stopping = desire;
        stopping.header.want = Want::Stop;
        assert_eq!(plan(&stopping, &actual, false), Plan::Settled(Settled::Stopping));
    }

    #[test]
    fn volumes_found_at_the_start_are_set_up_again() {
        let found = ActualState { ready: BTreeSet::new(), folder_complete: false, ..with_volumes(&["a"]) };
        let plan = plan(&desire(Want::Run, &["a"]), &found, false);
        assert_eq!(plan, Plan::Do(vec![Action::CreateFolders, Action::SetUp(0)]));
    }

    #[test]
    fn a_stopping_pod_keeps_what_it_has_and_gets_nothing_new() {
        for actual in [ActualState::default(), with_volumes(&["a"])] {
            assert_eq!(
                plan(&desire(Want::Stop, &["a", "b"]), &actual, true),
                Plan::Settled(Settled::Stopping)
            );
        }
    }

    #[test]
    fn no_volume_is_torn_down_before_the_runtime_was_asked() {
        for want in [Want::Unmount, Want::Forget] {
            assert_eq!(plan(&desire(want, &["a"]), &with_volumes(&["a"]), false), Plan::AskRuntime);
            assert_eq!(
                plan(&desire(want, &["a"]), &with_volumes(&["a"]), true),
                Plan::Do(vec![Action::TearDown(VolumeKey::empty_dir("a"))])
            );
        }
    }

    #[test]
    fn subpaths_are_removed_before_volumes_and_block_the_pod_until_then() {
        for want in [Want::Unmount, Want::Forget] {
            let with_subpaths = ActualState { subpaths: true, ..with_volumes(&["a"]) };
            assert_eq!(plan(&desire(want, &["a"]), &with_subpaths, false), Plan::AskRuntime);
            let actions = vec![Action::RemoveSubpaths, Action::TearDown(VolumeKey::empty_dir("a"))];
            assert_eq!(plan(&desire(want, &["a"]), &with_subpaths, true), Plan::Do(actions));
            // The subPaths of a hostPath, which has no folder of its own.
            let mut with_subpaths = ActualState { subpaths: true, ..with_volumes(&[]) };
            assert_eq!(
                plan(&desire(want, &[]), &with_subpaths, true),
                Plan::Do(vec![Action::RemoveSubpaths])
            );
            with_subpaths.record_failure(&Action::RemoveSubpaths, None);
            assert_eq!(
                plan(&desire(want, &[]), &with_subpaths, true),
                Plan::Do(vec![Action::RemoveSubpaths])
            );
            with_subpaths.record_success(&Action::RemoveSubpaths, &desire(want, &[]), None);
            assert_ne!(
                plan(&desire(want, &[]), &with_subpaths, true),
                Plan::Do(vec![Action::RemoveSubpaths])
            );
        }
    }

    #[test]
    fn a_pod_without_volumes_is_unmounted_at_once_and_keeps_its_folder_until_forgotten() {
        assert_eq!(
            plan(&desire(Want::Unmount, &[]), &with_volumes(&[]), false),
            Plan::Settled(Settled::Unmounted)
        );
        assert_eq!(plan(&desire(Want::Forget, &[]), &with_volumes(&[]), false), Plan::AskRuntime);
        assert_eq!(
            plan(&desire(Want::Forget, &[]), &with_volumes(&[]), true),
            Plan::Do(vec![Action::RemoveFolder])
        );
    }

    #[test]
    fn a_pod_that_never_had_a_folder_is_gone() {
        assert_eq!(
            plan(&desire(Want::Forget, &[]), &ActualState::default(), false),
            Plan::Settled(Settled::Gone)
        );
    }

    #[test]
    fn a_failed_action_leaves_its_volume_possibly_on_disk_and_not_ready() {
        let key = VolumeKey { plugin: "kubernetes.io~empty-dir".into(), name: "a".into() };
        let mut actual = ActualState::default();
        actual.record_failure(&Action::CreateFolders, None);
        assert!(actual.folder && !actual.folder_complete);
        actual.record_failure(&Action::SetUp(0), Some(key.clone()));
        assert!(actual.on_disk.contains(&key) && actual.ready.is_empty());
        actual.ready.insert("a".into());
        actual.record_failure(&Action::TearDown(key.clone()), None);
        assert!(actual.on_disk.contains(&key) && actual.ready.is_empty());
        actual.folder_complete = true;
        actual.ready.insert("a".into());
        actual.record_failure(&Action::RemoveFolder, None);
        assert!(!actual.folder_complete && actual.ready.is_empty());
    }

    /// Carrying out plans always settles, even if some actions fail at first; and every destructive action comes
    /// from a plan made with `nothing_runs`.
    #[test]
    fn every_desire_settles_even_if_actions_fail_first() {
        let reached = &Reached::default();
        let wants = prop::sample::select(vec![Want::Run, Want::Stop, Want::Unmount, Want::Forget]);
        let names = prop::collection::btree_set("[a-d]", 0..4);
        let found = prop::collection::btree_set("[a-f]", 0..4);
        let fails = prop::collection::vec(any::<bool>(), 0..12);
        let folder_and_subpaths = any::<(bool, bool)>();
        proptest!(ProptestConfig::with_cases(1024), |(
            want in wants, names in names, found in found, folder_and_subpaths in folder_and_subpaths, fails in fails,
        )| {
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            let desire = desire(want, &names);
            let on_disk: BTreeSet<_> = found.iter().map(|n| VolumeKey::empty_dir(n)).collect();
            let (folder, subpaths) = folder_and_subpaths;
            let folder = folder || subpaths || !on_disk.is_empty();
            let mut actual = ActualState { folder, on_disk, subpaths, ..ActualState::default() };
            let (asked, actions, failed) = carry_out(&desire, &mut actual, fails)?;
            let right = match want {
                Want::Run => names.iter().all(|n| actual.ready.contains(*n)),
                Want::Stop => true,
                Want::Unmount => actual.on_disk.is_empty() && !actual.subpaths,
                Want::Forget => actual == ActualState::default(),
            };
            prop_assert!(right, "{:?} ended with {:?}", want, actual);
            let done = |what: fn(&Action) -> bool| actions.iter().any(what);
            reached.case([
                ("runs", want == Want::Run),
                ("stops", want == Want::Stop),
                ("is unmounted", want == Want::Unmount),
                ("is forgotten", want == Want::Forget),
                ("the runtime is asked", asked > 0),
                ("the runtime is asked again", asked > 1),
                ("an action fails", failed > 0),
                ("folders are created", done(|s| *s == Action::CreateFolders)),
                ("a volume is set up", done(|s| matches!(s, Action::SetUp(_)))),
                ("subPaths are removed", done(|s| *s == Action::RemoveSubpaths)),
                ("a volume is torn down", done(|s| matches!(s, Action::TearDown(_)))),
                ("the folder is removed", done(|s| *s == Action::RemoveFolder)),
            ]);
        });
        // The rarest: "a volume is set up", in one case of 5.
        reached.assert_each();
    }

    /// Carries out plans until the pod settles. Returns how often the runtime was asked, the actions that succeeded,
    /// and how many failed.
    fn carry_out(
        desire: &PodDesire,
        actual: &mut ActualState,
        fails: Vec<bool>,
    ) -> Result<(usize, Vec<Action>, usize), TestCaseError> {
        let mut fails = fails.into_iter();
        let (mut nothing_runs, mut asked, mut done, mut failed) = (false, 0, Vec::new(), 0);
        for _ in 0..64 {
            let actions = match plan(desire, actual, nothing_runs) {
                Plan::Settled(settled) => {
                    let wanted = match desire.header.want {
                        Want::Run => Settled::Mounted,
                        Want::Stop => Settled::Stopping,
                        Want::Unmount => Settled::Unmounted,
                        Want::Forget => Settled::Gone,
                    };
                    prop_assert_eq!(settled, wanted);
                    return Ok((asked, done, failed));
                }
                Plan::AskRuntime => {
                    (nothing_runs, asked) = (true, asked + 1);
                    continue;
                }
                Plan::Do(actions) => actions,
            };
            for action in actions {
                let destroys =
                    matches!(action, Action::RemoveSubpaths | Action::TearDown(_) | Action::RemoveFolder);
                prop_assert!(!destroys || nothing_runs);
                let key = match &action {
                    Action::SetUp(i) => Some(VolumeKey::empty_dir(&desire.volumes[*i].name)),
                    _ => None,
                };
                if fails.next().unwrap_or(false) {
                    failed += 1;
                    actual.record_failure(&action, key);
                    if action == Action::RemoveSubpaths {
                        break;
                    }
                } else {
                    actual.record_success(&action, desire, key);
                    done.push(action);
                }
            }
            nothing_runs = false;
        }
        Err(TestCaseError::fail(format!("{:?} never settles", desire.header.want)))
    }
}
