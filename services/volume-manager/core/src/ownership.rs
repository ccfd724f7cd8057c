//! Events about fsGroup ownership changes that take long (volumes.md §3.18, §5).

use std::time::Duration;

/// The first event is due when the walk has taken this long.
const FIRST_EVENT_AFTER: Duration = Duration::from_secs(30);
/// The time between later events.
const EVENT_INTERVAL: Duration = Duration::from_secs(60);

/// How many events are due for a walk through a volume that has taken `elapsed` so far.
pub fn events_due(elapsed: Duration) -> u64 {
    elapsed.checked_sub(FIRST_EVENT_AFTER).map_or(0, |since| 1 + since.as_secs() / EVENT_INTERVAL.as_secs())
}

/// The message of event `number`, counted from 1, about a walk through `volume` that has changed `files` files and
/// folders so far. The path in the message starts at the pod's UID, so that it does not reveal the agent's root folder.
///
/// Parity: the kubelet's message without its advice to set `fsGroupChangePolicy: OnRootMismatch`, because none of the
/// supported volume kinds honours that policy.
pub fn event_message(volume: &str, uid: &str, number: u64, files: u64) -> String {
    let start = volume.find(uid).filter(|_| !uid.is_empty()).unwrap_or(0);
    let shown = &volume[start..];
    if number <= 1 {
        format!("Setting volume ownership for {shown} is taking longer than expected")
    } else {
        format!("Setting volume ownership for {shown}, processed {files} files.")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fsgroup_walk_events_are_due_after_thirty_seconds_and_then_each_minute() {
        for (seconds, events) in [(0, 0), (29, 0), (30, 1), (89, 1), (90, 2), (149, 2), (150, 3), (3_630, 61)]
        {
            assert_eq!(events_due(Duration::from_secs(seconds)), events, "{seconds} s");
        }
        assert_eq!(events_due(Duration::from_millis(29_999)), 0);
        assert_eq!(events_due(Duration::from_millis(89_999)), 1);
    }

    #[test]
    fn fsgroup_event_path_starts_at_the_pod_uid_and_later_events_count_files() {
        let path = "/var/lib/kubelet/pods/u-1/volumes/kubernetes.io~empty-dir/data";
        let shown = "u-1/volumes/kubernetes.io~empty-dir/data";
        let slow = format!("Setting volume ownership for {shown} is taking longer than expected");
        assert_eq!(event_message(path, "u-1", 1, 7), slow);
        for number in [2, 3] {
            let counted = format!("Setting volume ownership for {shown}, processed 7 files.");
            assert_eq!(event_message(path, "u-1", number, 7), counted);
        }
        for uid in ["", "u-2"] {
            assert!(event_message(path, uid, 1, 0).contains(path), "{uid:?}");
        }
    }
}
