//! Sends the node's pod CIDR to the runtime (runtime-and-resources.md §1.3). A runtime that makes its network configuration from a
//! template waits for it.

use std::sync::Arc;
use std::time::Duration;

use k8s_cri::v1 as cri;
use keelson_kube_model::Node;
use keelson_service_kit::Backoff;
use tonic::Code;

use crate::effects::Effects;
use crate::effects::clients::bounded;

/// The condition that says whether the runtime has the pod CIDR.
const CONDITION: &str = "pod CIDR";

/// Sends each new pod CIDR of the Node to the runtime, until the shutdown.
pub async fn follow(effects: Arc<Effects>) {
    let shutdown = effects.context.shutdown.clone();
    let mut node = effects.registry.node.object.subscribe();
    let mut backoff = Backoff::new(Duration::from_millis(250), Duration::from_secs(10));
    let mut sent = String::new();
    loop {
        let range = node.borrow_and_update().as_deref().map(pod_cidr).unwrap_or_default();
        let retry = if range.is_empty() || range == sent {
            None
        } else {
            // Cancel-safe: the next process sends it again.
            let done = tokio::select! {
                () = shutdown.cancelled() => return,
                done = send(&effects, &range) => done,
            };
            match done {
                Ok(()) => {
                    backoff.reset();
                    effects.context.progress.condition(CONDITION, Ok(()));
                    tracing::info!(range, "sent the pod CIDR to the runtime");
                    sent = range;
                    None
                }
                Err(text) => {
                    effects.context.progress.condition(CONDITION, Err(text));
                    Some(backoff.next_delay())
                }
            }
        };
        // Cancel-safe: the channel keeps a change until it is borrowed.
        tokio::select! {
            () = shutdown.cancelled() => return,
            open = node.changed() => if open.is_err() { return },
            () = tokio::time::sleep(retry.unwrap_or(Duration::MAX)), if retry.is_some() => {}
        }
    }
}

async fn send(effects: &Effects, range: &str) -> Result<(), String> {
    let network = cri::NetworkConfig { pod_cidr: range.to_owned() };
    let runtime_config = cri::RuntimeConfig { network_config: Some(network) };
    let request = cri::UpdateRuntimeConfigRequest { runtime_config: Some(runtime_config) };
    let (mut cri, timeout) = (effects.clients.cri(), effects.clients.cri_timeout);
    match cri.update_runtime_config(bounded(request, timeout)).await {
        Ok(_) => Ok(()),
        // It does not use one.
        Err(status) if status.code() == Code::Unimplemented => Ok(()),
        Err(status) => {
            Err(format!("cannot send the pod CIDR {range} to the runtime, will retry: {}", status.message()))
        }
    }
}

/// `spec.podCIDRs`, joined as the runtime expects it, or `spec.podCIDR` of an older API.
fn pod_cidr(node: &Node) -> String {
    if node.spec.pod_cidrs.is_empty() { node.spec.pod_cidr.clone() } else { node.spec.pod_cidrs.join(",") }
}
