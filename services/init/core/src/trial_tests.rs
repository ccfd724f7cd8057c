use ServiceState::{BackingOff, Degraded, Failed, Running, Starting, Stopped, Stuck};

use super::*;

const PERIOD: Duration = Duration::from_secs(60);

fn judge(before: Option<ServiceState>, now: ServiceState, restarts: u32, seconds: u64) -> TrialVerdict {
    let before = before.map(|state| ("pod-sync".to_owned(), state)).into_iter().collect();
    let tried = ServiceInTrial { state: now, message: "why".into(), restarts };
    let now = [("pod-sync".to_owned(), tried)].into();
    judge_trial(&before, &now, Duration::from_secs(seconds), PERIOD)
}

#[test]
fn a_trial_passes_after_its_period() {
    assert_eq!(judge(Some(Running), Running, 0, 59), TrialVerdict::Pending);
    assert_eq!(judge(Some(Running), Running, 0, 60), TrialVerdict::Passed);
    assert_eq!(
        judge(Some(Running), Running, 3, 60),
        TrialVerdict::Passed,
        "three ends may have another cause"
    );
}

#[test]
fn a_service_that_fails_or_keeps_ending_fails_the_trial_at_once() {
    let failed = TrialVerdict::Failed("pod-sync failed with this configuration: why".into());
    assert_eq!(judge(Some(Running), Failed, 0, 0), failed);
    assert_eq!(judge(None, Failed, 0, 0), failed);
    let ended = TrialVerdict::Failed("pod-sync ended 4 times with this configuration: why".into());
    assert_eq!(judge(Some(Running), BackingOff, 4, 1), ended);
    assert_eq!(judge(Some(Failed), Failed, 0, 60), TrialVerdict::Passed, "it had failed before");
}

#[test]
fn a_trial_fails_if_services_stay_less_healthy_for_another_period() {
    for (before, now, good) in [
        (Some(Running), Running, true),
        (Some(Running), Degraded, false),
        (Some(Running), Starting, false),
        (Some(Running), Stuck, false),
        (Some(Running), BackingOff, false),
        (Some(Running), Stopped, false),
        (Some(Degraded), Running, true),
        (Some(Degraded), Degraded, true),
        (Some(Degraded), Stuck, false),
        (Some(Starting), Degraded, true),
        (Some(Starting), Starting, false),
        (Some(Stuck), Stuck, false),
        (Some(BackingOff), BackingOff, false),
        (Some(Failed), BackingOff, true),
        (None, Degraded, true),
        (None, Starting, false),
    ] {
        let [first, last, over] = [60, 119, 120].map(|seconds| judge(before, now, 0, seconds));
        if good {
            assert_eq!(
                [first, last, over],
                [TrialVerdict::Passed, TrialVerdict::Passed, TrialVerdict::Passed]
            );
        } else {
            assert_eq!([first, last], [TrialVerdict::Pending, TrialVerdict::Pending], "{before:?} {now}");
            let why = format!(
                "the services are less healthy with this configuration than before: pod-sync is {now}: why"
            );
            assert_eq!(over, TrialVerdict::Failed(why), "{before:?} {now}");
        }
    }
}
