//! Since when each volume of a pod is waited for (volumes.md §3.3, §13).

use std::collections::BTreeMap;
use std::time::Duration;

use crate::desire::{PodDesire, Volume, Want};
use crate::plan::Actual;

/// When each volume was asked for that is not set up yet, or not up to date. A moment is the time since the worker
/// of the pod began.
#[derive(Debug, Default)]
pub struct Requests(BTreeMap<String, Duration>);

impl Requests {
    /// Takes note of what `desire` waits for. What was asked for before keeps its moment, whatever has failed since;
    /// what nobody waits for any more is forgotten.
    pub fn note(&mut self, desire: &PodDesire, actual: &Actual, now: Duration) {
        let waits = |volume: &&Volume| {
            let name = &volume.name;
            desire.want == Want::Run && (!actual.ready.contains(name) || actual.stale.contains(name))
        };
        let before = std::mem::take(&mut self.0);
        let since = |name: &String| before.get(name).copied().unwrap_or(now);
        self.0 = desire.volumes.iter().filter(waits).map(|v| (v.name.clone(), since(&v.name))).collect();
    }

    /// The volume `name` is there since `now`: how long it was waited for.
    pub fn done(&mut self, name: &str, now: Duration) -> Option<Duration> {
        self.0.remove(name).map(|since| now.saturating_sub(since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::desire::{Desire as _, Medium, PodRef, Source};

    const fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn wants(names: &[&str]) -> PodDesire {
        let source = || Source::EmptyDir { medium: Medium::Disk, size_limit: None };
        let volumes = names.iter().map(|name| Volume { name: (*name).into(), source: source() }).collect();
        PodDesire { want: Want::Run, volumes, ..PodDesire::forget(PodRef::default()) }
    }

    #[test]
    fn a_volume_is_waited_for_from_when_it_was_first_wanted_until_it_is_there() {
        let (mut requests, mut actual) = (Requests::default(), Actual::default());
        requests.note(&wants(&["a", "b"]), &actual, at(1));
        assert_eq!(requests.done("a", at(3)), Some(at(2)));
        actual.ready.insert("a".into());
        // The other has failed, and is tried again.
        requests.note(&wants(&["a", "b"]), &actual, at(9));
        assert_eq!(requests.done("a", at(10)), None);
        assert_eq!(requests.done("b", at(10)), Some(at(9)));
        assert_eq!(requests.done("b", at(11)), None);
    }

    #[test]
    fn an_update_is_waited_for_from_when_it_was_noticed() {
        let (mut requests, mut actual) = (Requests::default(), Actual::default());
        actual.ready.insert("a".into());
        requests.note(&wants(&["a"]), &actual, at(1));
        assert_eq!(requests.done("a", at(2)), None);
        actual.stale.insert("a".into());
        requests.note(&wants(&["a"]), &actual, at(5));
        assert_eq!(requests.done("a", at(6)), Some(at(1)));
    }

    #[test]
    fn what_is_not_wanted_any_more_begins_anew_when_it_is() {
        let (mut requests, actual) = (Requests::default(), Actual::default());
        let gone = |want| PodDesire { want, ..wants(&["a"]) };
        for left in [wants(&[]), gone(Want::Stop), gone(Want::Unmount), gone(Want::Forget)] {
            requests.note(&wants(&["a"]), &actual, at(1));
            requests.note(&left, &actual, at(2));
            requests.note(&wants(&["a"]), &actual, at(5));
            assert_eq!(requests.done("a", at(6)), Some(at(1)), "{left:?}");
        }
    }
}
