//! Selects the container instance of a log request.
//!
//! Only the names and states of the Pod are decoded.

use std::borrow::Cow;

use serde::Deserialize;

/// Why there is no log to read, in the words of the kubelet.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum LogTargetError {
    #[error("container {container:?} not found in pod {pod:?}")]
    NotInSpec { container: String, pod: String },
    #[error("container {container:?} in pod {pod:?} is not available")]
    NoStatus { container: String, pod: String },
    #[error("previous terminated container {container:?} in pod {pod:?} not found")]
    NoPrevious { container: String, pod: String },
    #[error("container {container:?} in pod {pod:?} is terminated")]
    Terminated { container: String, pod: String },
    #[error("container {container:?} in pod {pod:?} is waiting to start: {reason}")]
    Waiting { container: String, pod: String, reason: String },
    #[error("container {container:?} in pod {pod:?} is waiting to start - no logs yet")]
    NoState { container: String, pod: String },
    #[error("pod-sync sent a document for pod {pod:?} that is not a Pod: {error}")]
    NotAPod { pod: String, error: String },
}

/// Whether the spec of a pod has a container of this name, of any kind.
pub(crate) fn has_container(pod_json: &[u8], name: &str) -> bool {
    serde_json::from_slice::<Document<'_>>(pod_json).is_ok_and(|document| document.spec.names(name))
}

/// An instance of a container: the newest in the runtime, or the one before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Instance {
    Newest,
    BeforeNewest,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Document<'a> {
    #[serde(borrow)]
    spec: Spec<'a>,
    #[serde(borrow)]
    status: Status<'a>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Spec<'a> {
    #[serde(borrow)]
    containers: Option<Vec<Named<'a>>>,
    #[serde(borrow)]
    init_containers: Option<Vec<Named<'a>>>,
    #[serde(borrow)]
    ephemeral_containers: Option<Vec<Named<'a>>>,
}

impl Spec<'_> {
    /// Whether a container of any kind has this name.
    fn names(&self, container: &str) -> bool {
        let all = [&self.containers, &self.init_containers, &self.ephemeral_containers];
        all.into_iter().flatten().flatten().any(|named| named.name == container)
    }
}

#[derive(Deserialize)]
struct Named<'a> {
    #[serde(borrow)]
    name: Cow<'a, str>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Status<'a> {
    #[serde(borrow)]
    container_statuses: Option<Vec<ContainerStatus<'a>>>,
    #[serde(borrow)]
    init_container_statuses: Option<Vec<ContainerStatus<'a>>>,
    #[serde(borrow)]
    ephemeral_container_statuses: Option<Vec<ContainerStatus<'a>>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ContainerStatus<'a> {
    #[serde(borrow)]
    name: Cow<'a, str>,
    #[serde(borrow, default)]
    state: State<'a>,
    #[serde(borrow, default)]
    last_state: State<'a>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct State<'a> {
    running: Option<Empty>,
    #[serde(borrow)]
    waiting: Option<Waiting<'a>>,
    #[serde(borrow)]
    terminated: Option<Terminated<'a>>,
}

#[derive(Deserialize)]
struct Empty {}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Waiting<'a> {
    #[serde(borrow)]
    reason: Cow<'a, str>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Terminated<'a> {
    #[serde(borrow, rename = "containerID")]
    container_id: Cow<'a, str>,
}

impl Terminated<'_> {
    /// Whether the instance existed; one that could not be created has no container ID.
    fn existed(&self) -> bool {
        !self.container_id.is_empty()
    }
}

/// The instance whose log is requested (node-and-api.md §8.7). With `previous` it is the last terminated one; otherwise the
/// current one, or the one before it while a restart has not created one yet.
pub(crate) fn choose_instance(
    pod_json: &[u8],
    pod: &str,
    container: &str,
    previous: bool,
) -> Result<Instance, LogTargetError> {
    let (pod, container) = (pod.to_owned(), container.to_owned());
    let document: Document<'_> = serde_json::from_slice(pod_json)
        .map_err(|error| LogTargetError::NotAPod { pod: pod.clone(), error: error.to_string() })?;
    if !document.spec.names(&container) {
        return Err(LogTargetError::NotInSpec { container, pod });
    }
    let status = &document.status;
    let lists =
        [&status.container_statuses, &status.init_container_statuses, &status.ephemeral_container_statuses];
    let Some(status) = lists.into_iter().flatten().flatten().find(|status| status.name == container) else {
        return Err(LogTargetError::NoStatus { container, pod });
    };
    let last = status.last_state.terminated.as_ref().filter(|last| last.existed());
    let state = &status.state;
    // Whether `state` describes the newest instance in the runtime; otherwise `lastState` does.
    let current_exists =
        state.running.is_some() || state.terminated.as_ref().is_some_and(Terminated::existed);
    match (previous, last) {
        (true, None) => Err(LogTargetError::NoPrevious { container, pod }),
        (true, Some(_)) if current_exists => Ok(Instance::BeforeNewest),
        (false, _) if current_exists => Ok(Instance::Newest),
        (_, Some(_)) => Ok(Instance::Newest),
        (false, None) if state.terminated.is_some() || status.last_state.terminated.is_some() => {
            Err(LogTargetError::Terminated { container, pod })
        }
        (false, None) => Err(match &state.waiting {
            Some(waiting) => {
                LogTargetError::Waiting { reason: waiting_reason(&waiting.reason), container, pod }
            }
            None => LogTargetError::NoState { container, pod },
        }),
    }
}

fn waiting_reason(reason: &str) -> String {
    match reason {
        "ErrImagePull" => "image can't be pulled".to_owned(),
        "ImagePullBackOff" => "trying and failing to pull image".to_owned(),
        other => other.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(status: &str) -> String {
        format!(
            r#"{{"spec":{{"containers":[{{"name":"c","image":"i"}}],"initContainers":null,
            "ephemeralContainers":[{{"name":"debug"}}]}},
            "status":{{"phase":"Running","containerStatuses":[{{"name":"c",{status}}}]}}}}"#
        )
    }

    fn chosen(status: &str, previous: bool) -> Result<Instance, String> {
        choose_instance(pod(status).as_bytes(), "p", "c", previous).map_err(|error| error.to_string())
    }

    const RUNNING: &str = r#""state":{"running":{"startedAt":"2026-01-01T00:00:00Z"}}"#;
    const ENDED: &str = r#""state":{"terminated":{"exitCode":0,"containerID":"containerd://b"}}"#;
    const NOT_CREATED: &str = r#""state":{"terminated":{"exitCode":128}}"#;
    const LAST: &str = r#""lastState":{"terminated":{"exitCode":1,"containerID":"containerd://a"}}"#;

    fn waiting(reason: &str) -> String {
        format!(r#""state":{{"waiting":{{"reason":"{reason}"}}}}"#)
    }

    #[test]
    fn log_instance_follows_state_last_state_and_previous() {
        use Instance::{BeforeNewest, Newest};
        let both = |a: &str| format!("{a},{LAST}");
        for (status, previous, instance) in [
            (RUNNING.to_owned(), false, Newest),
            (both(RUNNING), false, Newest),
            (both(RUNNING), true, BeforeNewest),
            (ENDED.to_owned(), false, Newest),
            (both(ENDED), true, BeforeNewest),
            (both(NOT_CREATED), false, Newest),
            (both(NOT_CREATED), true, Newest),
            (both(&waiting("CrashLoopBackOff")), false, Newest),
            (both(&waiting("CrashLoopBackOff")), true, Newest),
        ] {
            assert_eq!(chosen(&status, previous), Ok(instance), "{status} previous: {previous}");
        }
    }

    #[test]
    fn missing_logs_are_refused_with_the_kubelets_messages() {
        for (status, previous, text) in [
            (RUNNING.to_owned(), true, r#"previous terminated container "c" in pod "p" not found"#),
            (NOT_CREATED.to_owned(), false, r#"container "c" in pod "p" is terminated"#),
            (
                waiting("ContainerCreating"),
                false,
                r#"container "c" in pod "p" is waiting to start: ContainerCreating"#,
            ),
            (
                waiting("ErrImagePull"),
                false,
                r#"container "c" in pod "p" is waiting to start: image can't be pulled"#,
            ),
            (
                waiting("ImagePullBackOff"),
                false,
                r#"container "c" in pod "p" is waiting to start: trying and failing to pull image"#,
            ),
            (
                r#""state":{}"#.to_owned(),
                false,
                r#"container "c" in pod "p" is waiting to start - no logs yet"#,
            ),
        ] {
            assert_eq!(chosen(&status, previous), Err(text.to_owned()));
        }
    }

    #[test]
    fn log_container_must_be_in_spec_and_status() {
        let text = |container| {
            choose_instance(pod(RUNNING).as_bytes(), "p", container, false).unwrap_err().to_string()
        };
        assert_eq!(text("x"), r#"container "x" not found in pod "p""#);
        assert_eq!(text("debug"), r#"container "debug" in pod "p" is not available"#);
        assert!(matches!(choose_instance(b"[", "p", "c", false), Err(LogTargetError::NotAPod { .. })));
    }
}
