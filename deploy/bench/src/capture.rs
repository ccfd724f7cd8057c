//! Captures the CRI requests that the agent sends for each pod.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, bail, ensure};
use k8s_cri::v1::{
    CreateContainerRequest, CreateContainerResponse, RunPodSandboxRequest, RunPodSandboxResponse,
    StartContainerRequest,
};
use prost::Message;

/// The length of the prefix of a gRPC message: a flag (compressed or not) and four bytes with the message's length.
const PREFIX: usize = 5;

/// A captured call.
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
    /// The call with this HTTP path; `None` for calls that are not captured.
    pub fn from_path(path: &str) -> Option<Self> {
        match path.strip_prefix("/runtime.v1.RuntimeService/")? {
            "RunPodSandbox" => Some(Self::Sandbox),
            "CreateContainer" => Some(Self::Create),
            "StartContainer" => Some(Self::Start),
            _ => None,
        }
    }
}

/// The requests for one pod.
#[derive(Debug, Clone, PartialEq)]
pub struct CapturedPod {
    /// The request that creates the sandbox.
    pub sandbox: RunPodSandboxRequest,
    /// The request that creates the container. Its sandbox id is that of the captured run.
    pub create: CreateContainerRequest,
}

/// Collects captured calls. Clones share one collection.
#[derive(Debug, Clone, Default)]
pub struct Recorder {
    inner: Arc<Mutex<Recording>>,
}

#[derive(Debug, Default)]
struct Recording {
    /// The requests by the id of the created sandbox.
    sandboxes: BTreeMap<String, RunPodSandboxRequest>,
    /// The requests by the id of the created container.
    containers: BTreeMap<String, CreateContainerRequest>,
    /// The ids of the started containers, in order.
    started: Vec<String>,
    /// Why messages could not be decoded.
    errors: Vec<String>,
}

impl Recorder {
    /// Records a successful call. `request` and `response` are the bodies.
    pub fn record(&self, call: Call, request: &[u8], response: &[u8]) {
        let mut recording = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = recording.record(call, request, response) {
            recording.errors.push(format!("{error:#}"));
        }
    }

    /// Removes and returns the captured pods, in the order of their starts.
    ///
    /// # Errors
    /// A message could not be decoded, or the calls are not those of exactly `count` pods with one container each.
    pub fn take(&self, count: usize) -> anyhow::Result<Vec<CapturedPod>> {
        let recording = std::mem::take(&mut *self.inner.lock().unwrap_or_else(PoisonError::into_inner));
        recording.pods(count)
    }
}

impl Recording {
    fn record(&mut self, call: Call, request: &[u8], response: &[u8]) -> anyhow::Result<()> {
        match call {
            Call::Sandbox => {
                let response: RunPodSandboxResponse = decode(response)?;
                self.sandboxes.insert(response.pod_sandbox_id, decode(request)?);
            }
            Call::Create => {
                let response: CreateContainerResponse = decode(response)?;
                self.containers.insert(response.container_id, decode(request)?);
            }
            Call::Start => self.started.push(decode::<StartContainerRequest>(request)?.container_id),
        }
        Ok(())
    }

    fn pods(mut self, count: usize) -> anyhow::Result<Vec<CapturedPod>> {
        if let Some(error) = self.errors.first() {
            bail!("a captured message cannot be decoded: {error}");
        }
        let mut pods = Vec::new();
        for id in &self.started {
            let create = self
                .containers
                .remove(id)
                .context("the capture has the start of a container, but not its creation")?;
            let sandbox = self.sandboxes.remove(&create.pod_sandbox_id);
            let sandbox =
                sandbox.context("the capture has a container, but not the creation of its sandbox")?;
            pods.push(CapturedPod { sandbox, create });
        }
        ensure!(
            pods.len() == count && self.sandboxes.is_empty() && self.containers.is_empty(),
            "the agent started {} containers for {count} pods and created {} sandboxes and {} containers that it did not use; \
             replaying these requests would measure something else",
            pods.len(),
            self.sandboxes.len(),
            self.containers.len()
        );
        Ok(pods)
    }
}

/// Decodes the message in a body.
///
/// # Errors
/// The message is compressed, invalid, or has fields that this program does not know and could not replay.
fn decode<M: Message + Default>(body: &[u8]) -> anyhow::Result<M> {
    let (prefix, message) = body.split_at_checked(PREFIX).context("the body is shorter than its prefix")?;
    ensure!(prefix[0] == 0, "the message is compressed");
    let decoded = M::decode(message).context("the message is invalid")?;
    ensure!(decoded.encoded_len() == message.len(), "the message has unknown fields");
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

    fn record_pod(recorder: &Recorder, name: &str) {
        let sandbox = RunPodSandboxRequest { runtime_handler: name.into(), ..Default::default() };
        let response = RunPodSandboxResponse { pod_sandbox_id: format!("s-{name}") };
        recorder.record(Call::Sandbox, &body(&sandbox), &body(&response));
        let create = CreateContainerRequest { pod_sandbox_id: format!("s-{name}"), ..Default::default() };
        let response = CreateContainerResponse { container_id: format!("c-{name}") };
        recorder.record(Call::Create, &body(&create), &body(&response));
    }

    fn record_start(recorder: &Recorder, name: &str) {
        let start = StartContainerRequest { container_id: format!("c-{name}") };
        recorder.record(Call::Start, &body(&start), &[]);
    }

    #[test]
    fn only_the_three_calls_that_start_a_pod_are_captured() {
        assert_eq!(Call::from_path("/runtime.v1.RuntimeService/RunPodSandbox"), Some(Call::Sandbox));
        assert_eq!(Call::from_path("/runtime.v1.RuntimeService/CreateContainer"), Some(Call::Create));
        assert_eq!(Call::from_path("/runtime.v1.RuntimeService/StartContainer"), Some(Call::Start));
        assert_eq!(Call::from_path("/runtime.v1.RuntimeService/ListContainers"), None);
        assert_eq!(Call::from_path("/containerd.services.events.v1.Events/Subscribe"), None);
    }

    #[test]
    fn captured_pods_are_in_the_order_of_their_starts() {
        let recorder = Recorder::default();
        record_pod(&recorder, "one");
        record_pod(&recorder, "two");
        record_start(&recorder, "two");
        record_start(&recorder, "one");
        let pods = recorder.take(2).unwrap();
        let names: Vec<&str> = pods.iter().map(|pod| pod.sandbox.runtime_handler.as_str()).collect();
        assert_eq!(names, ["two", "one"]);
        assert_eq!(pods[0].create.pod_sandbox_id, "s-two");
    }

    #[test]
    fn a_container_that_was_never_started_is_an_error() {
        let recorder = Recorder::default();
        record_pod(&recorder, "one");
        let error = recorder.take(1).unwrap_err().to_string();
        assert!(error.contains("started 0 containers for 1 pods"), "{error}");
    }

    #[test]
    fn an_unknown_field_is_an_error() {
        let recorder = Recorder::default();
        // Field 15 as a varint; StartContainerRequest has no such field.
        recorder.record(Call::Start, &[0, 0, 0, 0, 2, 15 << 3, 1], &[]);
        let error = format!("{:#}", recorder.take(0).unwrap_err());
        assert!(error.contains("unknown fields"), "{error}");
    }

    #[test]
    fn a_truncated_or_compressed_body_is_an_error() {
        assert!(decode::<StartContainerRequest>(&[0, 0]).is_err());
        assert!(decode::<StartContainerRequest>(&[1, 0, 0, 0, 0]).is_err());
    }
}
