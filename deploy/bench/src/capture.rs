//! What the agent asks of the runtime for each pod, written down once while the requests pass by.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, bail, ensure};
use k8s_cri::v1::{
    CreateContainerRequest, CreateContainerResponse, RunPodSandboxRequest, RunPodSandboxResponse,
    StartContainerRequest,
};
use prost::Message;

/// A gRPC message is preceded by a flag (compressed or not) and four bytes with its length.
const PREFIX: usize = 5;

/// A call that is written down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// `RunPodSandbox`.
    Sandbox,
    /// `CreateContainer`.
    Create,
    /// `StartContainer`.
    Start,
}

impl Call {
    /// The call with this path; `None` for all others, which are only passed on.
    pub fn of(path: &str) -> Option<Self> {
        match path.strip_prefix("/runtime.v1.RuntimeService/")? {
            "RunPodSandbox" => Some(Self::Sandbox),
            "CreateContainer" => Some(Self::Create),
            "StartContainer" => Some(Self::Start),
            _ => None,
        }
    }
}

/// What was asked for one pod.
#[derive(Debug, Clone, PartialEq)]
pub struct CapturedPod {
    /// Makes the sandbox.
    pub sandbox: RunPodSandboxRequest,
    /// Makes the container; the sandbox's id is that of the captured run.
    pub create: CreateContainerRequest,
}

/// Where the requests are collected. Clones write to the same place.
#[derive(Debug, Clone, Default)]
pub struct Recorder {
    inner: Arc<Mutex<Recording>>,
}

#[derive(Debug, Default)]
struct Recording {
    /// By the sandbox's id.
    sandboxes: BTreeMap<String, RunPodSandboxRequest>,
    /// By the container's id.
    containers: BTreeMap<String, CreateContainerRequest>,
    started: Vec<String>,
    problems: Vec<String>,
}

impl Recorder {
    /// Writes down a call that has succeeded: the bodies of request and response.
    pub fn note(&self, call: Call, asked: &[u8], answered: &[u8]) {
        let mut recording = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = recording.note(call, asked, answered) {
            recording.problems.push(format!("{error:#}"));
        }
    }

    /// Hands out what was captured, which must be `count` whole pods.
    pub fn take(&self, count: usize) -> anyhow::Result<Vec<CapturedPod>> {
        let recording = std::mem::take(&mut *self.inner.lock().unwrap_or_else(PoisonError::into_inner));
        recording.pods(count)
    }
}

impl Recording {
    fn note(&mut self, call: Call, asked: &[u8], answered: &[u8]) -> anyhow::Result<()> {
        match call {
            Call::Sandbox => {
                let answer: RunPodSandboxResponse = decode(answered)?;
                self.sandboxes.insert(answer.pod_sandbox_id, decode(asked)?);
            }
            Call::Create => {
                let answer: CreateContainerResponse = decode(answered)?;
                self.containers.insert(answer.container_id, decode(asked)?);
            }
            Call::Start => self.started.push(decode::<StartContainerRequest>(asked)?.container_id),
        }
        Ok(())
    }

    fn pods(mut self, count: usize) -> anyhow::Result<Vec<CapturedPod>> {
        if let Some(problem) = self.problems.first() {
            bail!("a captured request cannot be read: {problem}");
        }
        let mut pods = Vec::new();
        // In the order in which the agent has started them.
        for id in &self.started {
            let create = self.containers.remove(id).context("a container was started but not created")?;
            let sandbox = self.sandboxes.remove(&create.pod_sandbox_id);
            let sandbox = sandbox.context("a container was created in a sandbox that was not made")?;
            pods.push(CapturedPod { sandbox, create });
        }
        ensure!(
            pods.len() == count && self.sandboxes.is_empty() && self.containers.is_empty(),
            "the agent has started {} containers for {count} pods, and {} sandboxes and {} containers were \
             made in vain; a floor that repeats that would measure something else",
            pods.len(),
            self.sandboxes.len(),
            self.containers.len()
        );
        Ok(pods)
    }
}

/// The message in a body; fields that this program does not know are an error, as they would not be
/// replayed.
fn decode<M: Message + Default>(body: &[u8]) -> anyhow::Result<M> {
    let (prefix, message) = body.split_at_checked(PREFIX).context("the body is shorter than its prefix")?;
    ensure!(prefix[0] == 0, "the message is compressed");
    let decoded = M::decode(message).context("no such message")?;
    ensure!(decoded.encoded_len() == message.len(), "the message has fields that are not known here");
    Ok(decoded)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(message: &impl Message) -> Vec<u8> {
        let bytes = message.encode_to_vec();
        let mut body = vec![0];
        body.extend(u32::try_from(bytes.len()).unwrap().to_be_bytes());
        body.extend(bytes);
        body
    }

    fn note_pod(recorder: &Recorder, name: &str) {
        let sandbox = RunPodSandboxRequest { runtime_handler: name.into(), ..Default::default() };
        let made = RunPodSandboxResponse { pod_sandbox_id: format!("s-{name}") };
        recorder.note(Call::Sandbox, &body(&sandbox), &body(&made));
        let create = CreateContainerRequest { pod_sandbox_id: format!("s-{name}"), ..Default::default() };
        let made = CreateContainerResponse { container_id: format!("c-{name}") };
        recorder.note(Call::Create, &body(&create), &body(&made));
    }

    fn note_start(recorder: &Recorder, name: &str) {
        let start = StartContainerRequest { container_id: format!("c-{name}") };
        recorder.note(Call::Start, &body(&start), &[]);
    }

    #[test]
    fn only_three_calls_are_written_down() {
        assert_eq!(Call::of("/runtime.v1.RuntimeService/RunPodSandbox"), Some(Call::Sandbox));
        assert_eq!(Call::of("/runtime.v1.RuntimeService/CreateContainer"), Some(Call::Create));
        assert_eq!(Call::of("/runtime.v1.RuntimeService/StartContainer"), Some(Call::Start));
        assert_eq!(Call::of("/runtime.v1.RuntimeService/ListContainers"), None);
        assert_eq!(Call::of("/containerd.services.events.v1.Events/Subscribe"), None);
    }

    #[test]
    fn pods_come_out_whole_and_in_the_order_of_their_start() {
        let recorder = Recorder::default();
        note_pod(&recorder, "one");
        note_pod(&recorder, "two");
        note_start(&recorder, "two");
        note_start(&recorder, "one");
        let pods = recorder.take(2).unwrap();
        let names: Vec<&str> = pods.iter().map(|pod| pod.sandbox.runtime_handler.as_str()).collect();
        assert_eq!(names, ["two", "one"]);
        assert_eq!(pods[0].create.pod_sandbox_id, "s-two");
    }

    #[test]
    fn a_container_that_was_never_started_is_an_error() {
        let recorder = Recorder::default();
        note_pod(&recorder, "one");
        let error = recorder.take(1).unwrap_err().to_string();
        assert!(error.contains("started 0 containers for 1 pods"), "{error}");
    }

    #[test]
    fn a_field_that_is_not_known_here_is_an_error() {
        let recorder = Recorder::default();
        // Field 15, a number, which StartContainerRequest does not have.
        recorder.note(Call::Start, &[0, 0, 0, 0, 2, 15 << 3, 1], &[]);
        let error = format!("{:#}", recorder.take(0).unwrap_err());
        assert!(error.contains("not known here"), "{error}");
    }

    #[test]
    fn a_body_that_is_cut_off_is_an_error() {
        assert!(decode::<StartContainerRequest>(&[0, 0]).is_err());
        assert!(decode::<StartContainerRequest>(&[1, 0, 0, 0, 0]).is_err());
    }
}
