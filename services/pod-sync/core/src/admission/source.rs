//! What pods of a source may use of the host (`sourceLimits`, not in the kubelet, which had `--host-network-sources` and
//! others until 1.16).

use keelson_config::SourceLimits;
use keelson_kube_model::Pod;

use super::Denial;

/// Denies a pod that requests what pods of its source may not have.
pub(super) fn check(pod: &Pod, limits: &SourceLimits) -> Option<Denial> {
    let source = pod.source()?;
    let limit = limits.get(source)?;
    let privileged = || {
        pod.containers().any(|(_, container)| {
            container.security_context.as_ref().is_some_and(|context| context.privileged == Some(true))
        })
    };
    let what = if !limit.host_network && pod.is_host_network() {
        "hostNetwork"
    } else if !limit.host_pid && pod.spec.host_pid == Some(true) {
        "hostPID"
    } else if !limit.host_ipc && pod.spec.host_ipc == Some(true) {
        "hostIPC"
    } else if !limit.privileged && privileged() {
        "privileged"
    } else {
        return None;
    };
    let setting =
        if what == "privileged" { "a privileged container".to_owned() } else { format!("{what}: true") };
    let text = format!(
        "Pods of the source {source} may not have {setting}: sourceLimits.{source}.{what} of the node's KeelsonConfiguration \
         is false"
    );
    Some(Denial::new("SourceForbidden", text))
}
