//! Measures how long a pod waits for each of its volumes (volumes.md §3.3, §13).

use std::collections::BTreeMap;
use std::time::Duration;

use crate::desire::{PodDesire, Volume, Want};
use crate::plan::ActualState;

/// When each volume was requested that is not set up or not up to date yet. Times count from the start of the
/// pod's worker.
#[derive(Debug, Default)]
pub struct MountWaits(BTreeMap<String, Duration>);

impl MountWaits {
    /// Updates the set of requested volumes. A volume that was requested before keeps its time, even if an attempt
    /// failed; a volume that is not requested any more is dropped.
    pub fn update(&mut self, desire: &PodDesire, actual: &ActualState, now: Duration) {
        let is_waiting = |volume: &&Volume| {
            let name = &volume.name;
            desire.header.want == Want::Run && (!actual.ready.contains(name) || actual.stale.contains(name))
        };
        let before = std::mem::take(&mut self.0);
        let since = |name: &String| before.get(name).copied().unwrap_or(now);
        self.0 = desire.volumes.iter().filter(is_waiting).map(|v| (v.name.clone(), since(&v.name))).collect();
    }

    /// Removes the volume `name`, ready at `now`. Returns how long the pod waited for it.
    pub fn finish(&mut self, name: &str, now: Duration) -> Option<Duration> {
        self.0.remove(name).map(|since| now.saturating_sub(since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::desire::{DesireHeader, Medium, PodRef, Source};

    const fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn wants(names: &[&str]) -> PodDesire {
        let source = || Source::EmptyDir { medium: Medium::Disk, size_limit: None };
        let volumes = names
            .iter()
            .map(|name| Volume {
                name: (*name).into(),
                source: source(),
                used: crate::desire::VolumeUse::default(),
            })
            .collect();
        let header = DesireHeader { pod: PodRef::default(), revision: 0, want: Want::Run };
        PodDesire { volumes, ..header.into() }
    }

    #[test]
    fn mount_latency_counts_from_the_first_request_across_retries() {
        let (mut waits, mut actual) = (MountWaits::default(), ActualState::default());
        waits.update(&wants(&["a", "b"]), &actual, at(1));
        assert_eq!(waits.finish("a", at(3)), Some(at(2)));
        actual.ready.insert("a".into());
        // The other volume has failed and is retried.
        waits.update(&wants(&["a", "b"]), &actual, at(9));
        assert_eq!(waits.finish("a", at(10)), None);
        assert_eq!(waits.finish("b", at(10)), Some(at(9)));
        assert_eq!(waits.finish("b", at(11)), None);
    }

    #[test]
    fn update_latency_counts_from_when_the_change_was_noticed() {
        let (mut waits, mut actual) = (MountWaits::default(), ActualState::default());
        actual.ready.insert("a".into());
        waits.update(&wants(&["a"]), &actual, at(1));
        assert_eq!(waits.finish("a", at(2)), None);
        actual.stale.insert("a".into());
        waits.update(&wants(&["a"]), &actual, at(5));
        assert_eq!(waits.finish("a", at(6)), Some(at(1)));
    }

    #[test]
    fn mount_latency_restarts_when_an_unwanted_volume_is_wanted_again() {
        let (mut waits, actual) = (MountWaits::default(), ActualState::default());
        let gone = |want| {
            let mut desire = wants(&["a"]);
            desire.header.want = want;
            desire
        };
        for left in [wants(&[]), gone(Want::Stop), gone(Want::Unmount), gone(Want::Forget)] {
            waits.update(&wants(&["a"]), &actual, at(1));
            waits.update(&left, &actual, at(2));
            waits.update(&wants(&["a"]), &actual, at(5));
            assert_eq!(waits.finish("a", at(6)), Some(at(1)), "{left:?}");
        }
    }
}
