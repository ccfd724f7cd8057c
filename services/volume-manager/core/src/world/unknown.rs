//! Folders found at startup of which no plugin knows what they are (volumes.md §3.16 step 5). Each is unmounted by its
//! name once nothing of its pod runs, and tried again until that succeeds.

use std::collections::{BTreeMap, BTreeSet};

use crate::operations::{PodUid, VolumeName, next_back_off};

/// A directory of a volume, found at startup, of which the plugin could not tell what it is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct UnknownFolder {
    /// The plugin's name, `vendor/name`.
    pub plugin: String,
    /// The name of the volume's directory.
    pub inner_name: String,
    /// The pod.
    pub pod: PodUid,
    /// Below `volumeDevices` of the pod's directory, not below `volumes`.
    pub is_block: bool,
}

/// The folders that are not unmounted yet. Moments are milliseconds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UnknownFolders(BTreeMap<UnknownFolder, Attempts>);

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Attempts {
    /// How long the last error made it back off; 0 without one.
    back_off: u64,
    /// When it may be tried again.
    due: u64,
    is_running: bool,
    /// The last error; empty without one.
    error: String,
}

impl UnknownFolders {
    /// Adds a folder.
    pub fn add(&mut self, folder: UnknownFolder) {
        self.0.insert(folder, Attempts::default());
    }

    /// The folders to unmount at `now`: those of released pods, as far as no volume was set up there since, which
    /// `is_set_up` says. They count as running until [`Self::finish`].
    pub fn start(
        &mut self,
        released: &BTreeSet<PodUid>,
        is_set_up: impl Fn(&UnknownFolder) -> bool,
        now: u64,
    ) -> Vec<UnknownFolder> {
        let mut started = Vec::new();
        for (folder, attempts) in &mut self.0 {
            let is_due = !attempts.is_running && attempts.due <= now;
            if is_due && released.contains(&folder.pod) && !is_set_up(folder) {
                attempts.is_running = true;
                started.push(folder.clone());
            }
        }
        started
    }

    /// Records how an unmount ended at `now`. Whether it was the first attempt.
    pub fn finish(&mut self, folder: &UnknownFolder, result: Result<(), String>, now: u64) -> bool {
        let Some(attempts) = self.0.get_mut(folder) else { return false };
        let is_first = attempts.back_off == 0;
        match result {
            Ok(()) => {
                self.0.remove(folder);
            }
            Err(error) => {
                attempts.back_off = next_back_off(attempts.back_off);
                attempts.due = now.saturating_add(attempts.back_off);
                attempts.is_running = false;
                attempts.error = error;
            }
        }
        is_first
    }

    /// Forgets a folder whose volume was torn down: it was set up again since, so it is known.
    pub fn forget(&mut self, folder: &UnknownFolder) {
        self.0.remove(folder);
    }

    /// Whether a device may belong to one of the folders of its plugin. The pod of that folder was not released, so the
    /// device may be in use.
    pub fn may_use(&self, device: &VolumeName, released: &BTreeSet<PodUid>) -> bool {
        let is_of = |folder: &UnknownFolder| {
            let rest = device.as_str().strip_prefix(&folder.plugin);
            rest.is_some_and(|rest| rest.starts_with('/'))
        };
        self.0.keys().any(|folder| is_of(folder) && !released.contains(&folder.pod))
    }

    /// Whether a pod has such a folder.
    pub fn has_pod(&self, pod: &PodUid) -> bool {
        self.0.keys().any(|folder| folder.pod == *pod)
    }

    /// The pods with such folders, each with the last error.
    pub fn pods(&self) -> impl Iterator<Item = (&PodUid, &str)> {
        self.0.iter().map(|(folder, attempts)| (&folder.pod, attempts.error.as_str()))
    }

    /// When the next one is due after `now`.
    pub fn wake_at(&self, released: &BTreeSet<PodUid>, now: u64) -> Option<u64> {
        let is_waiting = |folder: &UnknownFolder, attempts: &Attempts| {
            released.contains(&folder.pod) && !attempts.is_running && attempts.due > now
        };
        self.0.iter().filter(|(folder, attempts)| is_waiting(folder, attempts)).map(|(_, a)| a.due).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(pod: &str) -> UnknownFolder {
        UnknownFolder {
            plugin: "example.org/fake".into(),
            inner_name: "odd".into(),
            pod: pod.into(),
            is_block: false,
        }
    }

    fn released(pods: &[&str]) -> BTreeSet<PodUid> {
        pods.iter().map(|pod| PodUid::from(*pod)).collect()
    }

    #[test]
    fn a_folder_is_unmounted_once_its_pod_is_released_and_nothing_is_set_up_there() {
        let mut folders = UnknownFolders::default();
        for pod in ["a", "b"] {
            folders.add(folder(pod));
        }
        assert_eq!(folders.start(&released(&[]), |_| false, 0), []);
        let is_set_up = |folder: &UnknownFolder| folder.pod == "a".into();
        assert_eq!(folders.start(&released(&["a", "b"]), is_set_up, 0), [folder("b")]);
        assert_eq!(folders.start(&released(&["a", "b"]), is_set_up, 0), [], "it is running");
        assert!(folders.finish(&folder("b"), Ok(()), 0));
        assert!(!folders.has_pod(&"b".into()) && folders.has_pod(&"a".into()));
        folders.forget(&folder("a"));
        assert_eq!(folders, UnknownFolders::default());
    }

    #[test]
    fn a_failed_unmount_of_a_folder_backs_off_and_only_the_first_attempt_is_counted() {
        let (mut folders, pods) = (UnknownFolders::default(), released(&["a"]));
        folders.add(folder("a"));
        let mut now = 0;
        for (attempt, back_off) in [500, 1000, 2000].into_iter().enumerate() {
            assert_eq!(folders.start(&pods, |_| false, now), [folder("a")]);
            assert_eq!(folders.finish(&folder("a"), Err("busy".into()), now), attempt == 0);
            assert_eq!(folders.pods().collect::<Vec<_>>(), [(&"a".into(), "busy")]);
            assert_eq!(folders.wake_at(&pods, now), Some(now + back_off));
            assert_eq!(folders.wake_at(&released(&[]), now), None);
            assert_eq!(folders.start(&pods, |_| false, now + back_off - 1), []);
            now += back_off;
        }
        assert_eq!(folders.wake_at(&pods, now), None, "it is due");
        assert!(!folders.finish(&folder("gone"), Ok(()), now));
    }

    #[test]
    fn a_device_may_belong_to_the_folder_of_a_pod_that_was_not_released() {
        let mut folders = UnknownFolders::default();
        folders.add(folder("a"));
        for (device, is_held) in
            [("example.org/fake/disk", true), ("example.org/faker/disk", false), ("example.org/fake", false)]
        {
            assert_eq!(folders.may_use(&device.into(), &released(&[])), is_held, "{device}");
            assert!(!folders.may_use(&device.into(), &released(&["a"])), "{device}");
        }
    }
}
