//! How long the start of an API pod took, in total and as the kubelet's start SLI (§19).
//!
//! Parity: as the kubelet, but measured when the node publishes the pod as Running, not when the API server reports it back.

use keelson_kube_model::time::parse_nanos;
use keelson_kube_model::{Container, Pod};

use crate::observation::PodObservation;

/// How long an API pod took from its creation at the API server until it runs, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StartDuration {
    /// The whole duration.
    pub total: i64,
    /// Without the time of image pulls and init containers. `None` for a pod with volumes other than ConfigMap, Secret,
    /// downward API, projected and emptyDir: how long those take does not depend on this node.
    pub sli: Option<i64>,
}

/// How long the start of a pod took that runs at `now`; `pulls` are the start and end times of its image pulls. `None` for a
/// static pod, and for a pod without a creation timestamp.
pub fn start_time(
    pod: &Pod,
    observed: &PodObservation,
    pulls: &[(i64, i64)],
    now: i64,
) -> Option<StartDuration> {
    if pod.is_static() {
        return None;
    }
    let created = parse_nanos(pod.metadata.creation_timestamp.as_deref()?).ok()?;
    let created = i64::try_from(created).ok()?;
    let total = now.saturating_sub(created).max(0);
    let runs_to_its_end = |container: &&Container| container.restart_policy.as_deref() != Some("Always");
    let inits = pod.spec.init_containers.iter().filter(runs_to_its_end);
    let runs = inits
        .flat_map(|init| observed.records(&init.name))
        .map(|record| (record.started_unix_nanos, record.finished_unix_nanos))
        .filter(|(started, finished)| *started > 0 && *finished > 0);
    let others: Vec<(i64, i64)> = pulls.iter().copied().chain(runs).collect();
    let sli = has_only_api_volumes(pod).then(|| (total - covered(others, created, now)).max(0));
    Some(StartDuration { total, sli })
}

fn has_only_api_volumes(pod: &Pod) -> bool {
    pod.spec.volumes.iter().all(|volume| {
        volume.config_map.is_some()
            || volume.secret.is_some()
            || volume.downward_api.is_some()
            || volume.empty_dir.is_some()
            || volume.projected.is_some()
    })
}

/// The time between `from` and `to` that is covered by at least one of the intervals.
fn covered(mut intervals: Vec<(i64, i64)>, from: i64, to: i64) -> i64 {
    intervals.sort_unstable();
    let (mut reached, mut sum) = (from, 0);
    for (begin, end) in intervals {
        let (begin, end) = (begin.max(reached), end.min(to));
        sum += (end - begin).max(0);
        reached = reached.max(end);
    }
    sum
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::testing::{from_file, nanos, pod};

    const SECOND: i64 = 1_000_000_000;

    fn seen(name: &str, started: i64, finished: i64) -> PodObservation {
        let record = crate::observation::ContainerObservation {
            name: name.into(),
            started_unix_nanos: nanos(started),
            finished_unix_nanos: nanos(finished),
            ..Default::default()
        };
        PodObservation { containers: vec![record], ..PodObservation::default() }
    }

    #[test]
    fn start_sli_excludes_image_pulls_and_init_containers_once_if_overlapping() {
        let mut created = pod(json!({
            "initContainers": [{"name": "i"}, {"name": "s", "restartPolicy": "Always"}],
            "containers": [{"name": "main"}],
            "volumes": [{"name": "c", "configMap": {}}, {"name": "t", "projected": {}}],
        }));
        created.metadata.creation_timestamp = Some("2023-11-14T22:13:20Z".into());
        let pull = |from, to| (nanos(from), nanos(to));
        let none = PodObservation::default();
        for (observed, pulls, sli) in [
            (&none, vec![], 20),
            (&none, vec![pull(4, 6), pull(2, 5)], 16),
            (&none, vec![pull(-5, 1), pull(18, 30)], 17),
            (&none, vec![pull(2, 10), pull(3, 4), pull(9, 11)], 11),
            (&seen("i", 5, 9), vec![pull(2, 6)], 13),
            (&seen("s", 5, 9), vec![], 20),
            (&seen("main", 5, 9), vec![], 20),
        ] {
            let took = start_time(&created, observed, &pulls, nanos(20)).unwrap();
            assert_eq!((took.total, took.sli), (20 * SECOND, Some(sli * SECOND)), "{pulls:?}");
        }
    }

    #[test]
    fn start_sli_needs_api_volumes_and_static_pods_have_no_start_duration() {
        let mut claimed =
            pod(json!({"volumes": [{"name": "d", "persistentVolumeClaim": {"claimName": "c"}}]}));
        let nothing = PodObservation::default();
        assert_eq!(start_time(&claimed, &nothing, &[], nanos(20)), None, "the creation time is not known");
        claimed.metadata.creation_timestamp = Some("2023-11-14T22:13:20Z".into());
        let took = start_time(&claimed, &nothing, &[], nanos(20)).unwrap();
        assert_eq!(took, StartDuration { total: 20 * SECOND, sli: None });
        // The clock was set back.
        assert_eq!(start_time(&claimed, &nothing, &[], nanos(-20)).unwrap().total, 0);
        assert_eq!(start_time(&from_file(claimed), &nothing, &[], nanos(20)), None);
    }
}
