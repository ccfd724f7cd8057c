//! What has to be done so that the containers of a pod have their allocated resources (§16.5, runtime-and-resources.md §13.2).

use std::collections::BTreeSet;

use keelson_kube_model::resources::effective_limit;
use keelson_kube_model::{Container, ContainerId, Pod, ResourceList, ResourceRequirements};

use super::{ResizeRecord, containers, restarts};
use crate::observation::PodObservation;

/// CPU requests below this many thousandths of a core have the same effect: the kernel's least weight.
const LEAST_CPU_REQUEST: i64 = 2;
/// CPU limits below this many thousandths of a core have the same effect: the kernel's least quota.
const LEAST_CPU_LIMIT: i64 = 10;

/// What has to be done. Depends only on the arguments, so that a restarted service continues where it was.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ResizePlan {
    /// Running containers that restart to get their resources, according to their `resizePolicy`.
    pub restart: BTreeSet<ContainerId>,
    /// Updates of running containers, in this order: memory before CPU, decreases before increases.
    pub updates: Vec<ContainerResize>,
}

impl ResizePlan {
    /// Every running container has its resources.
    pub fn is_empty(&self) -> bool {
        self.restart.is_empty() && self.updates.is_empty()
    }
}

/// One update of a running container.
#[derive(Clone, Debug, PartialEq)]
pub struct ContainerResize {
    /// The instance.
    pub id: ContainerId,
    /// Its name in the spec.
    pub name: String,
    /// The resource that this update changes: `memory` or `cpu`.
    pub resource: &'static str,
    /// The pod as it is after this update, as far as this container is concerned.
    pub pod: Box<Pod>,
    /// Its new memory limit in bytes, if that is lower than the present one: it must not be below what is in use.
    pub lowers_memory_to: Option<i64>,
}

impl ContainerResize {
    /// The resources of the container after this update.
    pub fn resources(&self) -> ResourceRequirements {
        let container = containers(&self.pod).find(|container| container.name == self.name);
        container.map(|container| container.resources.clone()).unwrap_or_default()
    }
}

/// Request and limit of one resource of a container, in its unit (CPU in thousandths); a limit of 0 is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Amounts {
    request: i64,
    limit: i64,
}

impl Amounts {
    fn of(pod: &Pod, container: &Container, resource: &str) -> Self {
        let is_cpu = resource == "cpu";
        let number = |quantity: keelson_kube_model::Quantity| {
            if is_cpu { quantity.milli_value() } else { quantity.value() }
        };
        let limit = effective_limit(pod, container, resource).map_or(0, number);
        let request = container.resources.requests.get(resource).copied().map(number);
        if !is_cpu {
            return Self { request: request.unwrap_or(0), limit };
        }
        let at_least = |amount: i64, least: i64| if amount > 0 { amount.max(least) } else { 0 };
        Self {
            request: request.unwrap_or(limit).max(LEAST_CPU_REQUEST),
            limit: at_least(limit, LEAST_CPU_LIMIT),
        }
    }

    /// Orders decreases before increases: by the limit, where none is the highest, then by the request.
    fn growth_to(self, after: Self) -> (i64, i64) {
        let limit = |amounts: Self| if amounts.limit > 0 { amounts.limit } else { i64::MAX };
        (limit(after).saturating_sub(limit(self)), after.request.saturating_sub(self.request))
    }

    fn lowers_limit_to(self, after: Self) -> Option<i64> {
        (after.limit > 0 && (self.limit == 0 || after.limit < self.limit)).then_some(after.limit)
    }
}

/// Compares what `pod` has been allocated with what was last written to the runtime for its running containers. An update whose result
/// is not known is repeated.
pub fn plan(pod: &Pod, record: &ResizeRecord, observed: &PodObservation) -> ResizePlan {
    let Some(actuated) = &record.actuated else { return ResizePlan::default() };
    let mut before = pod.clone();
    if !actuated.apply(&mut before) && record.updating.is_empty() {
        return ResizePlan::default();
    }
    let with_memory = with_memory_of(&before, pod);
    let mut plan = ResizePlan::default();
    for (resource, stage) in [("memory", &with_memory), ("cpu", pod)] {
        let mut updates = Vec::new();
        for container in containers(pod) {
            let running = observed.current(&container.name).filter(|current| current.is_running());
            let old = containers(&before).find(|old| old.name == container.name);
            let (Some(running), Some(old)) = (running, old) else { continue };
            let (from, to) = (Amounts::of(&before, old, resource), Amounts::of(pod, container, resource));
            if from == to && !record.updating.contains(&container.name) {
                continue;
            }
            if from != to && restarts(pod, container, resource) {
                plan.restart.insert(running.id.clone());
            }
            let update = ContainerResize {
                id: running.id.clone(),
                name: container.name.clone(),
                resource,
                pod: Box::new(stage.clone()),
                lowers_memory_to: from.lowers_limit_to(to).filter(|_| resource == "memory"),
            };
            updates.push((from.growth_to(to), update));
        }
        updates.sort_by_key(|(growth, _)| *growth);
        plan.updates.extend(updates.into_iter().map(|(_, update)| update));
    }
    let restart = std::mem::take(&mut plan.restart);
    plan.updates.retain(|update| !restart.contains(&update.id));
    ResizePlan { restart, ..plan }
}

/// `before` with the memory of `after`.
fn with_memory_of(before: &Pod, after: &Pod) -> Pod {
    let mut mixed = after.clone();
    let take_cpu = |into: &mut ResourceRequirements, from: &ResourceRequirements| {
        let set = |into: &mut ResourceList, from: &ResourceList| match from.get("cpu") {
            Some(cpu) => drop(into.insert("cpu".to_owned(), *cpu)),
            None => drop(into.remove("cpu")),
        };
        set(&mut into.requests, &from.requests);
        set(&mut into.limits, &from.limits);
    };
    let none = ResourceRequirements::default();
    for container in mixed.spec.init_containers.iter_mut().chain(&mut mixed.spec.containers) {
        let old = containers(before).find(|old| old.name == container.name);
        take_cpu(&mut container.resources, old.map_or(&none, |old| &old.resources));
    }
    if before.spec.resources.is_some() || mixed.spec.resources.is_some() {
        let of_pod = mixed.spec.resources.get_or_insert_default();
        take_cpu(of_pod, before.spec.resources.as_ref().unwrap_or(&none));
    }
    mixed
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::allocation::Allocation;
    use crate::testing::{in_sandbox, pod};

    /// What was written is that of this pod.
    fn wrote(pod: &Pod) -> ResizeRecord {
        ResizeRecord { actuated: Some(Allocation::of(pod)), ..ResizeRecord::default() }
    }

    fn limits(cpu: &str, memory: &str) -> Value {
        json!({"limits": {"cpu": cpu, "memory": memory}, "requests": {"cpu": cpu, "memory": memory}})
    }

    fn two(a: Value, b: Value) -> Pod {
        pod(json!({"initContainers": [{"name": "s", "restartPolicy": "Always"}], "containers": [
            {"name": "a", "resources": a}, {"name": "b", "resources": b}]}))
    }

    fn steps(plan: &ResizePlan) -> Vec<String> {
        plan.updates.iter().map(|update| format!("{} {}", update.resource, update.name)).collect()
    }

    #[test]
    fn memory_comes_before_cpu_and_decreases_before_increases() {
        let before = two(limits("1", "1Gi"), limits("2", "2Gi"));
        let after = two(limits("2", "2Gi"), limits("1", "1Gi"));
        let seen = in_sandbox().running("s").running("a").running("b");
        let plan = plan(&after, &wrote(&before), &seen.0);
        assert_eq!(steps(&plan), ["memory b", "memory a", "cpu b", "cpu a"]);
        assert!(plan.restart.is_empty());
        let lowered: Vec<_> = plan.updates.iter().map(|update| update.lowers_memory_to).collect();
        assert_eq!(lowered, [Some(1 << 30), None, None, None]);
        // Each update has the result of those before it.
        let resources: ResourceRequirements =
            serde_json::from_value(json!({"limits": {"cpu": "2", "memory": "1Gi"},
                "requests": {"cpu": "2", "memory": "1Gi"}}))
            .unwrap();
        assert_eq!(plan.updates[0].resources(), resources);
        assert_eq!(plan.updates[2].resources(), after.spec.containers[1].resources);
    }

    #[test]
    fn only_running_containers_are_updated_and_only_if_something_changes() {
        let before = two(limits("1", "1Gi"), limits("1", "1Gi"));
        let after = two(limits("2", "1Gi"), limits("2", "1Gi"));
        let seen = in_sandbox().running("s").running("a").exited("b", 0);
        assert_eq!(steps(&plan(&after, &wrote(&before), &seen.0)), ["cpu a"]);
        assert!(plan(&after, &wrote(&after), &seen.0).is_empty());
    }

    #[test]
    fn an_update_whose_result_is_not_known_is_repeated_even_if_it_was_reverted() {
        let pod = two(limits("1", "1Gi"), limits("1", "1Gi"));
        let seen = in_sandbox().running("s").running("a").running("b");
        let mut record = wrote(&pod);
        record.begin_update("a");
        assert_eq!(steps(&plan(&pod, &record, &seen.0)), ["memory a", "cpu a"]);
        record.container_has("a", &pod);
        assert!(plan(&pod, &record, &seen.0).is_empty());
    }

    #[test]
    fn a_sidecar_and_a_running_init_container_are_updated() {
        let with = |cpu: &str| {
            pod(json!({"initContainers": [
                {"name": "s", "restartPolicy": "Always", "resources": limits(cpu, "1Gi")},
                {"name": "i", "resources": limits(cpu, "1Gi")}], "containers": [{"name": "a"}]}))
        };
        let seen = in_sandbox().running("s").running("i");
        assert_eq!(steps(&plan(&with("2"), &wrote(&with("1")), &seen.0)), ["cpu s", "cpu i"]);
    }

    #[test]
    fn a_running_init_container_is_updated_in_place_whatever_its_policy_demands() {
        let with = |cpu: &str| {
            let policy = json!([{"resourceName": "cpu", "restartPolicy": "RestartContainer"}]);
            pod(json!({"initContainers": [
                {"name": "s", "restartPolicy": "Always", "resources": limits(cpu, "1Gi"), "resizePolicy": policy},
                {"name": "i", "resources": limits(cpu, "1Gi"), "resizePolicy": policy}],
                "containers": [{"name": "a"}]}))
        };
        let seen = in_sandbox().running("s").running("i");
        let plan = plan(&with("2"), &wrote(&with("1")), &seen.0);
        assert_eq!(plan.restart, [ContainerId("s-0".to_owned())].into(), "a sidecar always starts again");
        assert_eq!(steps(&plan), ["cpu i"]);
    }

    #[test]
    fn a_container_restarts_if_the_policy_of_a_changed_resource_demands_it() {
        let with = |cpu: &str, memory: &str| {
            pod(json!({"containers": [
                {"name": "a", "resources": limits(cpu, memory),
                 "resizePolicy": [{"resourceName": "memory", "restartPolicy": "RestartContainer"}]},
                {"name": "b", "resources": limits(cpu, memory)}]}))
        };
        let seen = in_sandbox().running("a").running("b");
        let before = wrote(&with("1", "1Gi"));
        let both = plan(&with("2", "2Gi"), &before, &seen.0);
        assert_eq!(both.restart, [ContainerId("a-0".to_owned())].into());
        assert_eq!(steps(&both), ["memory b", "cpu b"]);
        let cpu_only = plan(&with("2", "1Gi"), &before, &seen.0);
        assert!(cpu_only.restart.is_empty());
        assert_eq!(steps(&cpu_only), ["cpu a", "cpu b"]);
    }

    #[test]
    fn amounts_below_the_kernels_least_are_equal() {
        let with = |request: &str, limit: &str| {
            pod(json!({"containers": [{"name": "a", "resources":
                {"requests": {"cpu": request}, "limits": {"cpu": limit}}}]}))
        };
        let seen = in_sandbox().running("a");
        let before = wrote(&with("1m", "5m"));
        assert!(plan(&with("2m", "10m"), &before, &seen.0).is_empty());
        assert_eq!(steps(&plan(&with("3m", "10m"), &before, &seen.0)), ["cpu a"]);
    }

    #[test]
    fn a_container_without_limits_gets_the_changed_limit_of_the_pod() {
        let with = |memory: &str| {
            pod(json!({"containers": [{"name": "a"}, {"name": "b", "resources": limits("1", "1Gi")}],
                "resources": {"limits": {"memory": memory}}}))
        };
        let seen = in_sandbox().running("a").running("b");
        let lowered = plan(&with("2Gi"), &wrote(&with("4Gi")), &seen.0);
        assert_eq!(steps(&lowered), ["memory a"]);
        assert_eq!(lowered.updates[0].lowers_memory_to, Some(2 << 30));
    }
}
