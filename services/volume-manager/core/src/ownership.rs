//! What is said of a pod whose files go to its group for long (volumes.md §3.18, §5).

use std::time::Duration;

/// A walk is told of when it has taken this long.
const FIRST: Duration = Duration::from_secs(30);
/// It is told of again as often as this.
const AGAIN: Duration = Duration::from_secs(60);

/// How often a walk through a volume that has taken `elapsed` is to have been told of by now.
pub fn tellings(elapsed: Duration) -> u64 {
    elapsed.checked_sub(FIRST).map_or(0, |since| 1 + since.as_secs() / AGAIN.as_secs())
}

/// The text of the event of a walk through `volume` with the number `telling`, from 1, when `files` of its files
/// and folders are done. The path begins at the pod's UID, so that it says nothing of where the agent keeps its pods.
///
/// Parity: the kubelet's words without its advice to set `fsGroupChangePolicy: OnRootMismatch`, which is for volumes
/// that heed the policy; of those kinds that are mounted here none does.
pub fn text(volume: &str, uid: &str, telling: u64, files: u64) -> String {
    let begin = volume.find(uid).filter(|_| !uid.is_empty()).unwrap_or(0);
    let shown = &volume[begin..];
    if telling <= 1 {
        format!("Setting volume ownership for {shown} is taking longer than expected")
    } else {
        format!("Setting volume ownership for {shown}, processed {files} files.")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_walk_is_told_of_after_thirty_seconds_and_then_each_minute() {
        for (seconds, times) in [(0, 0), (29, 0), (30, 1), (89, 1), (90, 2), (149, 2), (150, 3), (3_630, 61)]
        {
            assert_eq!(tellings(Duration::from_secs(seconds)), times, "{seconds} s");
        }
        assert_eq!(tellings(Duration::from_millis(29_999)), 0);
        assert_eq!(tellings(Duration::from_millis(89_999)), 1);
    }

    #[test]
    fn the_path_begins_at_the_pod_and_the_files_are_told_from_the_second_time_on() {
        let path = "/var/lib/kubelet/pods/u-1/volumes/kubernetes.io~empty-dir/data";
        let shown = "u-1/volumes/kubernetes.io~empty-dir/data";
        let slow = format!("Setting volume ownership for {shown} is taking longer than expected");
        assert_eq!(text(path, "u-1", 1, 7), slow);
        for telling in [2, 3] {
            let counted = format!("Setting volume ownership for {shown}, processed 7 files.");
            assert_eq!(text(path, "u-1", telling, 7), counted);
        }
        for uid in ["", "u-2"] {
            assert!(text(path, uid, 1, 0).contains(path), "{uid:?}");
        }
    }
}
