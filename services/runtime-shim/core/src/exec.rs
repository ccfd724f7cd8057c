//! Which container an exec request refers to.

/// A container of the pod, as the runtime lists it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Instance<'a> {
    /// The name in the pod's spec.
    pub name: &'a str,
    /// Runtime id.
    pub id: &'a str,
    /// Creation time, nanoseconds since 1970.
    pub created: i64,
    /// Its state.
    pub state: State,
}

/// The state of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Created and not started.
    Created,
    /// Its process runs.
    Running,
    /// Its process has exited.
    Exited,
    /// The runtime does not know.
    Unknown,
}

/// Why no container was found to run a command in (node-and-api.md §8.4).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TargetError {
    /// The runtime has no sandbox or container of this pod.
    #[error("pod does not exist")]
    PodNotFound,
    /// No container of this name is running.
    #[error("container not found ({name:?}){}", state_note(.newest.as_ref()))]
    ContainerNotFound {
        /// The requested name.
        name: String,
        /// State of its newest instance, if there is one.
        newest: Option<State>,
    },
}

fn state_note(newest: Option<&State>) -> &'static str {
    match newest {
        None => "",
        Some(State::Created) => ": its newest instance has not been started yet",
        Some(State::Running) => ": its newest instance runs",
        Some(State::Exited) => ": its newest instance has ended",
        Some(State::Unknown) => ": the runtime does not know what its newest instance does",
    }
}

/// The id of the newest running container of this name.
///
/// `pod_is_known`: the runtime has a sandbox or a container of the pod.
///
/// # Errors
/// See [`TargetError`]. As with the kubelet, only running containers are found; for others the message adds the state
/// of the newest instance.
pub fn choose_container<'a>(
    pod_is_known: bool,
    instances: &[Instance<'a>],
    name: &str,
) -> Result<&'a str, TargetError> {
    if !pod_is_known && instances.is_empty() {
        return Err(TargetError::PodNotFound);
    }
    let named = || instances.iter().filter(|instance| instance.name == name);
    if let Some(running) = named().filter(|i| i.state == State::Running).max_by_key(|i| i.created) {
        return Ok(running.id);
    }
    let newest = named().max_by_key(|i| i.created).map(|i| i.state);
    Err(TargetError::ContainerNotFound { name: name.to_owned(), newest })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn instance(name: &'static str, id: &'static str, created: i64, state: State) -> Instance<'static> {
        Instance { name, id, created, state }
    }

    #[test]
    fn exec_chooses_the_newest_running_container_of_the_name() {
        use State::{Exited, Running};
        let instances = [
            instance("side", "s", 9, Running),
            instance("main", "first", 1, Exited),
            instance("main", "second", 2, Running),
            instance("main", "third", 3, Running),
            instance("main", "fourth", 4, Exited),
        ];
        assert_eq!(choose_container(true, &instances, "main"), Ok("third"));
        assert_eq!(choose_container(true, &instances, "side"), Ok("s"));
    }

    #[test]
    fn exec_into_a_stopped_container_fails_with_the_kubelets_message_and_its_state() {
        let text = |known, instances: &[Instance<'_>]| {
            choose_container(known, instances, "c").unwrap_err().to_string()
        };
        assert_eq!(text(false, &[]), "pod does not exist");
        assert_eq!(text(true, &[]), r#"container not found ("c")"#);
        assert_eq!(text(true, &[instance("d", "x", 1, State::Running)]), r#"container not found ("c")"#);
        for (state, state_note) in [
            (State::Created, "its newest instance has not been started yet"),
            (State::Exited, "its newest instance has ended"),
            (State::Unknown, "the runtime does not know what its newest instance does"),
        ] {
            let older = instance("c", "y", 1, State::Exited);
            let all = [instance("c", "x", 2, state), older];
            assert_eq!(text(true, &all), format!(r#"container not found ("c"): {state_note}"#));
        }
    }
}
