//! Which container an exec means, and what the runtime says of its end.

use serde::Deserialize;

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

/// How a command has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// With this exit code.
    Exited(i32),
    /// The runtime could not run it, and says why.
    Failed(String),
    /// The runtime says something that is not understood.
    Unclear(String),
}

/// A Status of the Kubernetes API, as far as it is needed here.
#[derive(Debug, Deserialize)]
struct Status {
    #[serde(default)]
    status: String,
    #[serde(default)]
    message: String,
    #[serde(default)]
    reason: String,
    #[serde(default)]
    details: Option<Details>,
}

#[derive(Debug, Default, Deserialize)]
struct Details {
    #[serde(default)]
    causes: Option<Vec<Cause>>,
}

#[derive(Debug, Deserialize)]
struct Cause {
    #[serde(default)]
    reason: String,
    #[serde(default)]
    message: String,
}

/// Reads what came on the error stream of `v4.channel.k8s.io`: one JSON Status (node-and-api.md §8.4).
pub fn end_of(told: &[u8]) -> End {
    let unclear = || End::Unclear(String::from_utf8_lossy(told).trim().to_owned());
    let Ok(status) = serde_json::from_slice::<Status>(told) else { return unclear() };
    match (status.status.as_str(), status.reason.as_str()) {
        ("Success", _) => End::Exited(0),
        ("Failure", "NonZeroExitCode") => {
            let causes = status.details.unwrap_or_default().causes.unwrap_or_default();
            let code = causes.iter().find(|cause| cause.reason == "ExitCode");
            code.and_then(|cause| cause.message.parse().ok()).map_or_else(unclear, End::Exited)
        }
        ("Failure", _) if !status.message.is_empty() => End::Failed(status.message),
        _ => unclear(),
    }
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

    #[test]
    fn the_end_is_read_from_the_status() {
        let exited = |code: &str| {
            format!(
                r#"{{"metadata":{{}},"status":"Failure","message":"command terminated with non-zero exit code: x",
                "reason":"NonZeroExitCode","details":{{"causes":[{{"reason":"Other","message":"1"}},
                {{"reason":"ExitCode","message":"{code}"}}]}}}}"#
            )
        };
        let failed = r#"{"metadata":{},"status":"Failure","message":"no such file","reason":"InternalError",
            "details":{"causes":[{"message":"no such file"}]},"code":500}"#;
        for (told, end) in [
            (r#"{"metadata":{},"status":"Success"}"#.to_owned(), End::Exited(0)),
            (format!("{}\n", r#"{"status":"Success","details":null}"#), End::Exited(0)),
            (exited("3"), End::Exited(3)),
            (exited("137"), End::Exited(137)),
            (failed.to_owned(), End::Failed("no such file".to_owned())),
        ] {
            assert_eq!(end_of(told.as_bytes()), end, "{told}");
        }
    }

    #[test]
    fn what_is_not_understood_is_never_taken_for_a_good_end() {
        let no_code = r#"{"status":"Failure","reason":"NonZeroExitCode","message":"m"}"#;
        let odd_code = r#"{"status":"Failure","reason":"NonZeroExitCode",
            "details":{"causes":[{"reason":"ExitCode","message":"many"}]}}"#;
        let cut = r#"{"status":"Success""#;
        for told in [no_code, odd_code, cut, "{}", "", "null", "command failed", r#"{"status":"Failure"}"#] {
            assert_eq!(end_of(told.as_bytes()), End::Unclear(told.to_owned()), "{told}");
        }
        assert_eq!(end_of(b"\xff"), End::Unclear("\u{fffd}".to_owned()));
    }
}
