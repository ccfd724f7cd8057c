//! May a pod run here (pod-lifecycle.md §15)? The core judges by spec and Node, resource-manager by what there is of
//! the machine. A pod that is found running is not judged: its room and its ports are in use anyway.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use keelson_config::Users;
use keelson_kube_model::Node;
use keelson_pod_sync_core::admission::{
    AgentIds, Denial, KernelVersion, NodeFacts, after_fit, before_fit, supports_strict_groups,
    waits_for_admission,
};
use keelson_pod_sync_core::explain::{Cause, StepName, YOU};
use keelson_pod_sync_core::status::rejected_status;
use keelson_pod_sync_core::worker::SyncOutcome;
use keelson_proto::keelson::resource_manager::v1 as resource;
use keelson_proto::keelson::resource_manager::v1::admit_pod_response::Verdict;

use crate::agent::{Agent, RuntimeView, Wanted, object_of};
use crate::clients::bounded;
use crate::worker::{Facts, Job, Trouble, Turn, name_of, note_wait, publish, publish_as_is};

/// How long one call asks whether something is done before it is made again.
const ASK: Duration = Duration::from_secs(60);
/// How long the Node is awaited before the turn is tried again; right after a start it may still be on its way.
const NODE_WITHIN: Duration = Duration::from_secs(10);

/// What of the machine does not change while this process lives.
#[derive(Debug, Clone)]
pub struct Host {
    /// The running kernel.
    pub kernel: KernelVersion,
    /// AppArmor is enabled.
    pub apparmor: bool,
    /// SELinux is on.
    pub selinux: bool,
    /// The ids that no pod may have.
    pub agent_ids: AgentIds,
    /// Paths beside the usual ones that containers do not see: `thermal_throttle` of each CPU that has one
    /// (runtime-and-resources.md §5).
    pub masked_paths: Vec<String>,
}

/// `thermal_throttle` of each CPU in this folder, in the order of their numbers.
fn throttles(cpus: &Path) -> Vec<String> {
    let entries = fs::read_dir(cpus).into_iter().flatten().flatten();
    let mut numbers: Vec<u32> =
        entries.filter_map(|entry| entry.file_name().to_str()?.strip_prefix("cpu")?.parse().ok()).collect();
    numbers.sort_unstable();
    let paths = numbers.into_iter().map(|number| cpus.join(format!("cpu{number}/thermal_throttle")));
    paths.filter(|path| path.exists()).map(|path| path.to_string_lossy().into_owned()).collect()
}

impl Host {
    /// Reads it from /proc and /sys; what cannot be read is old or absent.
    pub fn read(users: &Users) -> Self {
        let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
        Self {
            kernel: KernelVersion::parse(text("/proc/sys/kernel/osrelease").trim()),
            apparmor: text("/sys/module/apparmor/parameters/enabled").starts_with('Y'),
            selinux: keelson_service_kit::selinux_is_enabled(),
            agent_ids: AgentIds::new(users, rustix::process::geteuid().as_raw()),
            masked_paths: throttles(Path::new("/sys/devices/system/cpu")),
        }
    }
}

fn facts<'a>(agent: &'a Agent, node: &'a Node) -> NodeFacts<'a> {
    let runtime: RuntimeView = agent.runtime.borrow().clone();
    let told = node.status.features.as_ref().and_then(|features| features.supplemental_groups_policy);
    NodeFacts {
        node,
        node_name: &agent.context.config.node_name,
        unsafe_sysctls: &agent.context.config.pods.allowed_unsafe_sysctls,
        kernel: agent.host.kernel,
        strict_groups: told.unwrap_or_else(|| supports_strict_groups(&runtime.name, &runtime.version)),
        apparmor: agent.host.apparmor,
        source_limits: &agent.context.config.pods.source_limits,
        agent_ids: &agent.host.agent_ids,
        run_dir: &agent.context.config.paths.run_dir,
    }
}

async fn node_is_known(agent: &Agent, uid: &str) -> Result<Arc<Node>, Trouble> {
    let mut node = agent.node.subscribe();
    let known = tokio::time::timeout(NODE_WITHIN, node.wait_for(Option::is_some)).await;
    if let Ok(Ok(node)) = known
        && let Some(node) = &*node
    {
        return Ok(Arc::clone(node));
    }
    let text = "pod-config has not told the Node";
    note_wait(agent, uid, StepName::Admission, "", Cause::waiting("NoNode", text, "pod-config"));
    Err(Trouble { neighbour: true, ..Trouble::fault(text) })
}

/// How soon a pod that waits for admission is judged again although no other has ended.
const HELD_LOOK_NANOS: i64 = 5_000_000_000;

/// Asks whether the pod may run. A turn is returned when it must not go on.
pub async fn admit(agent: &Arc<Agent>, job: &Job, wanted: &Wanted) -> Result<Option<Turn>, Trouble> {
    let known = agent.with(&job.uid, |e| (e.admitted, e.observed.any_sandbox_ready()));
    let adopted = match known {
        Some((true, _)) => return Ok(None),
        Some((false, adopted)) => adopted,
        None => false,
    };
    let node = if adopted { None } else { Some(node_is_known(agent, &job.uid).await?) };
    if let Some(denial) = node.as_ref().and_then(|node| before_fit(&wanted.pod, &facts(agent, node))) {
        return Ok(Some(reject(agent, job, wanted, denial.reason, &denial.message)));
    }
    // One that would wait for a port takes no share of the machine meanwhile.
    if waits_for_admission(&wanted.pod)
        && let Some(node) = &node
        && let Some(denial) =
            agent.look_for_place(&job.uid, |others| after_fit(&wanted.pod, &facts(agent, node), others))
        && denial.passing
    {
        return Ok(Some(hold_for_another(agent, job, wanted, &denial).await));
    }
    match verdict(agent, job, wanted).await? {
        Verdict::Admitted(_) => {
            let denial = agent.take_place(&job.uid, &wanted.pod, |others| -> Option<Denial> {
                node.as_ref().and_then(|node| after_fit(&wanted.pod, &facts(agent, node), others))
            });
            if let Some(denial) = denial {
                if denial.passing && waits_for_admission(&wanted.pod) {
                    return Ok(Some(hold_for_another(agent, job, wanted, &denial).await));
                }
                return Ok(Some(reject(agent, job, wanted, denial.reason, &denial.message)));
            }
            crate::manager::tell_refused_resize(agent, wanted);
            note_wait(agent, &job.uid, StepName::Admission, "", Cause::done("resource-manager"));
            if agent.with(&job.uid, |entry| entry.held.take()).flatten().is_some() {
                publish(agent, &job.uid, &Facts::default());
            }
            Ok(None)
        }
        Verdict::Rejected(rejected) if rejected.passing && waits_for_admission(&wanted.pod) => {
            Ok(Some(hold(agent, job, wanted, &rejected.reason, &rejected.message)))
        }
        Verdict::Rejected(rejected) => {
            Ok(Some(reject(agent, job, wanted, &rejected.reason, &rejected.message)))
        }
        Verdict::NotYet(wait) => {
            let cause = Cause::waiting(wait.reason.clone(), &wait.message, "resource-manager");
            note_wait(agent, &job.uid, StepName::Admission, "", cause);
            Err(Trouble { neighbour: true, ..Trouble::fault(wait.message) })
        }
    }
}

async fn verdict(agent: &Agent, job: &Job, wanted: &Wanted) -> Result<Verdict, Trouble> {
    let request = resource::AdmitPodRequest { uid: job.uid.clone(), revision: wanted.revision };
    match agent.clients.resources().admit_pod(bounded(request, ASK)).await {
        Ok(response) => {
            let verdict = response.into_inner().verdict;
            verdict.ok_or_else(|| Trouble::fault("resource-manager answered neither yes nor no"))
        }
        Err(status) => {
            let trouble = Trouble::call("cannot ask for admission", &status);
            let cause = Cause::waiting("NoAnswer", &trouble.message, "resource-manager");
            note_wait(agent, &job.uid, StepName::Admission, "", cause);
            Err(trouble)
        }
    }
}

/// The same for what resource-manager does not see, which is told: it would keep the pod's room and its turn for it.
async fn hold_for_another(agent: &Arc<Agent>, job: &Job, wanted: &Wanted, denial: &Denial) -> Turn {
    let turn = hold(agent, job, wanted, denial.reason, &denial.message);
    let request = resource::DeferPodRequest { uid: job.uid.clone(), revision: wanted.revision };
    if let Err(status) = agent.clients.resources().defer_pod(bounded(request, ASK)).await {
        let error = status.message();
        tracing::debug!(uid = job.uid, error, "resource-manager is told at the next look that the pod waits");
    }
    turn
}

/// The pod stays Pending, and its status says why. It is judged again when another pod has ended, and from time to time: what is
/// free of the machine changes by itself, too.
fn hold(agent: &Arc<Agent>, job: &Job, wanted: &Wanted, reason: &str, message: &str) -> Turn {
    let pod = &wanted.pod;
    let owner = if reason == "NodePorts" { "pod-sync" } else { "resource-manager" };
    let cause = Cause::waiting(reason.to_owned(), message, owner);
    let now = (reason.to_owned(), message.to_owned());
    let news = agent.with(&job.uid, |entry| {
        let is_new = entry.held.as_ref().is_none_or(|(before, _)| *before != now.0);
        entry.held = Some(now);
        is_new
    });
    let next = keelson_service_kit::now_unix_nanos() + HELD_LOOK_NANOS;
    note_wait(agent, &job.uid, StepName::Admission, "", cause.retried_at(next));
    if news == Some(true) {
        tracing::warn!(pod = name_of(pod), reason, "waits for admission: {message}");
        agent.context.events.warning(object_of(pod), reason, message.to_owned());
    }
    publish(agent, &job.uid, &Facts::default());
    Turn { outcome: SyncOutcome::Done, next_unix_nanos: Some(next) }
}

fn reject(agent: &Arc<Agent>, job: &Job, wanted: &Wanted, reason: &str, message: &str) -> Turn {
    let pod = &wanted.pod;
    tracing::warn!(pod = name_of(pod), reason, "rejected: {message}");
    agent.metrics.rejected(reason);
    agent.context.events.warning(object_of(pod), reason, message.to_owned());
    note_wait(agent, &job.uid, StepName::Admission, "", Cause::failed(reason.to_owned(), message, YOU));
    publish_as_is(agent, &job.uid, rejected_status(pod, reason, message, &agent.moment()));
    Turn::of(SyncOutcome::Terminal)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // A test fails where it stands.

    use super::*;

    #[test]
    fn the_throttles_of_all_cpus_that_have_one_are_hidden_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for folder in ["cpu10/thermal_throttle", "cpu2/thermal_throttle", "cpu3", "cpufreq/thermal_throttle"]
        {
            fs::create_dir_all(at(folder)).unwrap();
        }
        let paths = [at("cpu2/thermal_throttle"), at("cpu10/thermal_throttle")];
        assert_eq!(throttles(dir.path()), paths.map(|path| path.to_string_lossy().into_owned()));
        assert_eq!(throttles(&at("nowhere")), Vec::<String>::new());
    }
}
