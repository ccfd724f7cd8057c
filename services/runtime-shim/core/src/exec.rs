//! Which container an exec means.

/// A container of the pod, as the runtime lists it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Instance<'a> {
    /// The name in the pod's spec.
    pub name: &'a str,
    /// Runtime id.
    pub id: &'a str,
    /// When it was made, nanoseconds since 1970.
    pub created: i64,
    /// What it does.
    pub state: State,
}

/// What a container does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Made and not started.
    Created,
    /// Its process runs.
    Running,
    /// Its process has ended.
    Exited,
    /// The runtime does not know.
    Unknown,
}

/// Why nothing can be run in a container (node-and-api.md §8.4).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotThere {
    /// The runtime has nothing of such a pod.
    #[error("pod does not exist")]
    Pod,
    /// No container of this name runs.
    #[error("container not found ({name:?}){}", remark(.newest.as_ref()))]
    Container {
        /// As it was asked for.
        name: String,
        /// What has become of its newest instance, if there is one.
        newest: Option<State>,
    },
}

fn remark(newest: Option<&State>) -> &'static str {
    match newest {
        None => "",
        Some(State::Created) => ": its newest instance has not been started yet",
        Some(State::Running) => ": its newest instance runs",
        Some(State::Exited) => ": its newest instance has ended",
        Some(State::Unknown) => ": the runtime does not know what its newest instance does",
    }
}

/// The id of the running container of this name; of several the newest.
///
/// `pod_is_known`: the runtime has a sandbox or a container of the pod.
///
/// # Errors
/// See [`NotThere`]. The kubelet looks at running containers only, so that one that has ended is not found; that it
/// has ended is added to its words.
pub fn choose<'a>(pod_is_known: bool, instances: &[Instance<'a>], name: &str) -> Result<&'a str, NotThere> {
    if !pod_is_known && instances.is_empty() {
        return Err(NotThere::Pod);
    }
    let named = || instances.iter().filter(|instance| instance.name == name);
    if let Some(running) = named().filter(|i| i.state == State::Running).max_by_key(|i| i.created) {
        return Ok(running.id);
    }
    let newest = named().max_by_key(|i| i.created).map(|i| i.state);
    Err(NotThere::Container { name: name.to_owned(), newest })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn instance(name: &'static str, id: &'static str, created: i64, state: State) -> Instance<'static> {
        Instance { name, id, created, state }
    }

    #[test]
    fn the_newest_running_container_of_the_name_is_meant() {
        use State::{Exited, Running};
        let instances = [
            instance("side", "s", 9, Running),
            instance("main", "first", 1, Exited),
            instance("main", "second", 2, Running),
            instance("main", "third", 3, Running),
            instance("main", "fourth", 4, Exited),
        ];
        assert_eq!(choose(true, &instances, "main"), Ok("third"));
        assert_eq!(choose(true, &instances, "side"), Ok("s"));
    }

    #[test]
    fn what_does_not_run_is_not_found_in_the_kubelets_words_and_with_the_reason() {
        let text = |known, instances: &[Instance<'_>]| choose(known, instances, "c").unwrap_err().to_string();
        assert_eq!(text(false, &[]), "pod does not exist");
        assert_eq!(text(true, &[]), r#"container not found ("c")"#);
        assert_eq!(text(true, &[instance("d", "x", 1, State::Running)]), r#"container not found ("c")"#);
        for (state, remark) in [
            (State::Created, "its newest instance has not been started yet"),
            (State::Exited, "its newest instance has ended"),
            (State::Unknown, "the runtime does not know what its newest instance does"),
        ] {
            let older = instance("c", "y", 1, State::Exited);
            let all = [instance("c", "x", 2, state), older];
            assert_eq!(text(true, &all), format!(r#"container not found ("c"): {remark}"#));
        }
    }
}
