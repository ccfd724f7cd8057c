//! The resources of containers and pods in the status: as they are, not as they are asked for (§14.2, runtime-and-resources.md §13.3).

use keelson_kube_model::resources::{milli_cpu, milli_cpu_to_quota, milli_cpu_to_shares};
use keelson_kube_model::{Container, Pod, PodStatus, Quantity, ResourceList, ResourceRequirements};

use super::StatusInputs;
use crate::observation::{ContainerObservation, ResourcesObservation};
use crate::resize::ResizeRecord;

/// The resources of a container: those that it was allocated, corrected by what was written last and by what the runtime reports of a
/// running one. `None` if it has none.
pub(super) fn actual(
    container: &Container,
    record: Option<&ContainerObservation>,
    resize: Option<&ResizeRecord>,
) -> Option<ResourceRequirements> {
    let allocated = &container.resources;
    let written = resize.and_then(|resize| resize.actuated.as_ref());
    let mut actual =
        written.map_or_else(|| allocated.clone(), |written| written.of_container(&container.name));
    let running = record.filter(|record| record.is_running());
    if let Some(reported) = running.and_then(|record| record.resources.as_deref()) {
        correct(&mut actual, allocated, reported);
    }
    let any = !actual.requests.is_empty() || !actual.limits.is_empty();
    any.then_some(actual)
}

/// Replaces the values that the runtime reports otherwise. A value that leads to the reported one is kept, since the kernel's numbers
/// are coarser. What the container does not have, or the runtime does not report, stays as it is.
fn correct(
    actual: &mut ResourceRequirements,
    allocated: &ResourceRequirements,
    reported: &ResourcesObservation,
) {
    let period = u64::try_from(reported.cpu_period_us).unwrap_or(0);
    let quota_of = |list: &ResourceList| milli_cpu_to_quota(milli_cpu(list), period);
    let quota = reported.cpu_quota_us;
    if quota > 0 && period > 0 && actual.limits.contains_key("cpu") && quota_of(&actual.limits) != quota {
        let milli = i128::from(quota) * 1000 / i128::from(period);
        let cpu = Quantity::from_milli(i64::try_from(milli).unwrap_or(i64::MAX));
        let known = allocated.limits.get("cpu").filter(|_| quota_of(&allocated.limits) == quota);
        actual.limits.insert("cpu".to_owned(), known.copied().unwrap_or(cpu));
    }
    let shares = reported.cpu_shares;
    let shares_of = |list: &ResourceList| milli_cpu_to_shares(milli_cpu(list));
    if shares > 0 && actual.requests.contains_key("cpu") && shares_of(&actual.requests) != shares {
        let milli = u128::from(shares) * 1000;
        let cpu = Quantity::from_milli(i64::try_from(milli.div_ceil(1024)).unwrap_or(i64::MAX));
        let known = allocated.requests.get("cpu").filter(|_| shares_of(&allocated.requests) == shares);
        actual.requests.insert("cpu".to_owned(), known.copied().unwrap_or(cpu));
    }
    let memory = reported.memory_limit_bytes;
    let page = |bytes: i64| bytes / 4096;
    if let Some(limit) = actual.limits.get("memory").copied()
        && memory > 0
        && page(limit.value()) != page(memory)
    {
        let known = allocated.limits.get("memory").filter(|known| page(known.value()) == page(memory));
        let bytes = Quantity::from_bytes(memory.unsigned_abs());
        actual.limits.insert("memory".to_owned(), known.copied().unwrap_or(bytes));
    }
}

/// `status.allocatedResources` and `status.resources` of a pod with resources of its own.
pub(super) fn fill_pod_level(status: &mut PodStatus, pod: &Pod, inputs: &StatusInputs<'_>) {
    let Some(allocated) = &pod.spec.resources else { return };
    status.allocated_resources.clone_from(&allocated.requests);
    let written = inputs.resize.and_then(|resize| resize.actuated.as_ref());
    let actual = written.map_or(Some(allocated), |written| written.of_pod());
    status.resources = actual.cloned();
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::allocation::Allocation;
    use crate::observation::ContainerRecordState;

    fn container(resources: Value) -> Container {
        serde_json::from_value(json!({"name": "a", "resources": resources})).unwrap()
    }

    fn running(reported: ResourcesObservation) -> ContainerObservation {
        ContainerObservation {
            state: ContainerRecordState::Running,
            resources: Some(Box::new(reported)),
            ..ContainerObservation::default()
        }
    }

    fn shown(container: &Container, record: &ContainerObservation, resize: Option<&ResizeRecord>) -> Value {
        serde_json::to_value(actual(container, Some(record), resize)).unwrap()
    }

    const REPORTED: ResourcesObservation = ResourcesObservation {
        cpu_shares: 512,
        cpu_quota_us: 50_000,
        cpu_period_us: 100_000,
        memory_limit_bytes: 64 << 20,
    };

    #[test]
    fn resources_are_those_that_the_runtime_reports() {
        let asked =
            json!({"requests": {"cpu": "2", "memory": "32Mi"}, "limits": {"cpu": "2", "memory": "1Gi"}});
        let got = shown(&container(asked.clone()), &running(REPORTED), None);
        assert_eq!(
            got,
            json!({"requests": {"cpu": "500m", "memory": "32Mi"}, "limits": {"cpu": "500m", "memory": "64Mi"}})
        );
        let mut ended = running(REPORTED);
        ended.state = ContainerRecordState::Exited;
        assert_eq!(shown(&container(asked.clone()), &ended, None), asked);
    }

    #[test]
    fn values_below_the_kernels_least_are_shown_as_they_were_asked_for() {
        let asked = json!({"requests": {"cpu": "1m"}, "limits": {"cpu": "5m", "memory": "64Mi"}});
        let reported = ResourcesObservation { cpu_shares: 2, cpu_quota_us: 1000, ..REPORTED };
        assert_eq!(shown(&container(asked.clone()), &running(reported), None), asked);
    }

    #[test]
    fn without_reported_resources_those_written_last_are_shown() {
        let (old, new) = (json!({"limits": {"cpu": "1"}}), json!({"limits": {"cpu": "3"}}));
        let pod: Pod =
            serde_json::from_value(json!({"spec": {"containers": [{"name": "a", "resources": old}]}}))
                .unwrap();
        let record = ResizeRecord { actuated: Some(Allocation::of(&pod)), ..ResizeRecord::default() };
        let nothing = running(ResourcesObservation::default());
        assert_eq!(shown(&container(new.clone()), &nothing, Some(&record)), old);
        assert_eq!(shown(&container(new.clone()), &nothing, None), new);
        assert_eq!(shown(&container(json!({})), &running(REPORTED), None), Value::Null);
    }

    #[test]
    fn pod_level_resources_are_shown_as_allocated_and_as_written() {
        let pod = |cpu: &str| -> Pod {
            let resources = json!({"requests": {"cpu": cpu}});
            serde_json::from_value(json!({"spec": {"containers": [], "resources": resources}})).unwrap()
        };
        let record = ResizeRecord { actuated: Some(Allocation::of(&pod("1"))), ..ResizeRecord::default() };
        let inputs = StatusInputs { resize: Some(&record), ..StatusInputs::default() };
        let mut status = PodStatus::default();
        fill_pod_level(&mut status, &pod("2"), &inputs);
        let shown = |list: &ResourceList| list["cpu"].to_string();
        assert_eq!(shown(&status.allocated_resources), "2");
        assert_eq!(shown(&status.resources.unwrap().requests), "1");
    }
}
