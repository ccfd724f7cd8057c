//! A pod must not be able to impersonate the agent: it may not use the ids of the agent's services and operators, nor mount
//! the directory of their sockets (ADR 0004). A kubelet has no such check.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use keelson_config::{ServiceName, Users};
use keelson_kube_model::Pod;

use super::{Denial, NodeFacts};

/// The ids that the agent uses, each with a description. 0 is not among them: root in a pod is recognised by its cgroup.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AgentIds(BTreeMap<u32, String>);

impl AgentIds {
    /// The ids in the configuration. If it has no users for the services, all of them run as `own_uid`.
    pub fn new(users: &Users, own_uid: u32) -> Self {
        let mut ids = BTreeMap::new();
        if users.uids.is_empty() {
            ids.insert(own_uid, "the user of the node's agent".to_owned());
        }
        // Consecutive users form a range, which is reserved also for the services that run as root today.
        let numbered = (0u32..).zip(ServiceName::ALL.map(ServiceName::as_str));
        let of_base = |(index, service): (u32, &str)| users.uids.get(service)?.checked_sub(index);
        let bases: BTreeSet<u32> = numbered.clone().filter_map(of_base).collect();
        if let [base] = Vec::from_iter(bases)[..] {
            let reserved = "a user that is reserved for the agent's services";
            ids.extend(
                numbered.filter_map(|(index, _)| Some((base.checked_add(index)?, reserved.to_owned()))),
            );
        }
        ids.insert(users.operator_gid, "the group of the agent's operators".to_owned());
        ids.extend(
            users
                .uids
                .iter()
                .map(|(service, uid)| (*uid, format!("the user of {service}, a service of the agent"))),
        );
        ids.remove(&0);
        Self(ids)
    }

    /// The description of an id.
    pub fn owner(&self, id: i64) -> Option<&str> {
        self.0.get(&u32::try_from(id).ok()?).map(String::as_str)
    }

    /// Why a container may not run with these ids; `None` if the agent uses none of them. For ids that come from an image.
    pub fn check(&self, ids: impl IntoIterator<Item = i64>) -> Option<String> {
        ids.into_iter().find_map(|id| {
            let owner = self.owner(id)?;
            Some(format!("the container would run with the id {id}, which is {owner}: a pod with it could act as the agent"))
        })
    }
}

/// The first field with an id of the agent. In a user namespace of its own a pod has other ids on the node.
fn field_with_agent_id(pod: &Pod, ids: &AgentIds) -> Option<Denial> {
    if pod.spec.host_users == Some(false) {
        return None;
    }
    let mut fields: Vec<(String, Option<i64>)> = Vec::new();
    if let Some(context) = &pod.spec.security_context {
        let at = |field: &str| format!("spec.securityContext.{field}");
        fields.extend([
            (at("runAsUser"), context.run_as_user),
            (at("runAsGroup"), context.run_as_group),
            (at("fsGroup"), context.fs_group),
        ]);
        let groups = context.supplemental_groups.iter().enumerate();
        fields.extend(groups.map(|(index, id)| (at(&format!("supplementalGroups[{index}]")), Some(*id))));
    }
    for (_, container) in pod.containers() {
        let Some(context) = &container.security_context else { continue };
        let at = |field: &str| format!("container {}: securityContext.{field}", container.name);
        fields.extend([(at("runAsUser"), context.run_as_user), (at("runAsGroup"), context.run_as_group)]);
    }
    fields.into_iter().find_map(|(field, id)| {
        let id = id?;
        let owner = ids.owner(id)?;
        let text = format!(
            "{field} is {id}, which is {owner}: a pod with it could act as the agent; choose another id"
        );
        Some(Denial::new("AgentIdentityForbidden", text))
    })
}

/// Denies a `hostPath` volume of the directory of the agent's sockets, or of a path in it.
fn run_dir_volume(pod: &Pod, facts: &NodeFacts<'_>) -> Option<Denial> {
    let source = pod.source().unwrap_or_default();
    if facts.source_limits.get(source).is_some_and(|limit| limit.agent_run_folder) {
        return None;
    }
    let run_dir = normalize(facts.run_dir);
    let within = |path: &str| normalize(Path::new(path)).starts_with(&run_dir);
    pod.spec.volumes.iter().find_map(|volume| {
        let path = &volume.host_path.as_ref()?.path;
        within(path).then(|| {
            let text = format!(
                "volume {}: hostPath {path} is in the folder of the agent's sockets, {}: set sourceLimits.{source}.agentRunFolder \
                 of the node's KeelsonConfiguration to true for pods that may see it",
                volume.name,
                run_dir.display(),
            );
            Denial::new("SourceForbidden", text)
        })
    })
}

/// The path without `.`, `..` and doubled slashes, and with `/run` for the link `/var/run`. volume-manager resolves links.
fn normalize(path: &Path) -> PathBuf {
    let mut path_buf = PathBuf::from("/");
    for component in path.components() {
        match component {
            Component::Normal(name) => path_buf.push(name),
            Component::ParentDir => drop(path_buf.pop()),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    match path_buf.strip_prefix("/var/run") {
        Ok(below) => Path::new("/run").join(below),
        Err(_) => path_buf,
    }
}

pub(super) fn check(pod: &Pod, facts: &NodeFacts<'_>) -> Option<Denial> {
    field_with_agent_id(pod, facts.agent_ids).or_else(|| run_dir_volume(pod, facts))
}
