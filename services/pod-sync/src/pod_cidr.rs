//! Tells the runtime which addresses the node's pods have (runtime-and-resources.md §1.3): a runtime that makes its network
//! configuration of a template waits for it.

use std::sync::Arc;
use std::time::Duration;

use k8s_cri::v1 as cri;
use keelson_kube_model::Node;
use keelson_service_kit::Backoff;
use tonic::Code;

use crate::agent::Agent;
use crate::clients::bounded;

/// The condition that says whether the runtime knows them.
const CONDITION: &str = "pod CIDR";

/// Tells each new range that the Node has, until the shutdown.
pub async fn tell(agent: Arc<Agent>) {
    let shutdown = agent.context.shutdown.clone();
    let mut node = agent.node.subscribe();
    let mut again = Backoff::new(Duration::from_millis(250), Duration::from_secs(10));
    let mut told = String::new();
    loop {
        let range = node.borrow_and_update().as_deref().map(pod_cidr).unwrap_or_default();
        let retry = if range.is_empty() || range == told {
            None
        } else {
            // Cancel-safe: it is told again by the next start.
            let done = tokio::select! {
                () = shutdown.cancelled() => return,
                done = tell_runtime(&agent, &range) => done,
            };
            match done {
                Ok(()) => {
                    again.reset();
                    agent.context.progress.condition(CONDITION, Ok(()));
                    tracing::info!(range, "the runtime knows the addresses of the node's pods");
                    told = range;
                    None
                }
                Err(text) => {
                    agent.context.progress.condition(CONDITION, Err(text));
                    Some(again.next_delay())
                }
            }
        };
        // Cancel-safe: the channel keeps its news until it is borrowed.
        tokio::select! {
            () = shutdown.cancelled() => return,
            open = node.changed() => if open.is_err() { return },
            () = tokio::time::sleep(retry.unwrap_or(Duration::MAX)), if retry.is_some() => {}
        }
    }
}

async fn tell_runtime(agent: &Agent, range: &str) -> Result<(), String> {
    let network = cri::NetworkConfig { pod_cidr: range.to_owned() };
    let runtime_config = cri::RuntimeConfig { network_config: Some(network) };
    let request = cri::UpdateRuntimeConfigRequest { runtime_config: Some(runtime_config) };
    let (mut cri, timeout) = (agent.clients.cri(), agent.clients.cri_timeout);
    match cri.update_runtime_config(bounded(request, timeout)).await {
        Ok(_) => Ok(()),
        // It has no use for it.
        Err(status) if status.code() == Code::Unimplemented => Ok(()),
        Err(status) => Err(format!(
            "the runtime does not take the pod CIDR {range}: {}; it is told again",
            status.message()
        )),
    }
}

/// `spec.podCIDRs`, joined as the runtime expects it, or `spec.podCIDR` of an older API.
fn pod_cidr(node: &Node) -> String {
    if node.spec.pod_cidrs.is_empty() { node.spec.pod_cidr.clone() } else { node.spec.pod_cidrs.join(",") }
}
