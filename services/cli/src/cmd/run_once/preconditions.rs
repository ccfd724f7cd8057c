//! What must be true before the agent is started.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::args::RunArgs;
use crate::cmd::up;
use crate::error::CliError;

/// Checks the preconditions. Returns the binary of init.
pub(super) async fn check(args: &RunArgs) -> Result<PathBuf, CliError> {
    let socket = up::runtime_socket(&args.runtime_endpoint)?;
    if !rustix::process::geteuid().is_root() {
        return Err(CliError::NotRoot {
            message: "the agent must be started by root: it mounts volumes and creates cgroups".into(),
            hint: "`sudo keelson run --once -f …`".into(),
        });
    }
    up::check_runtime(&socket)?;
    require_no_other_pods(&socket).await?;
    up::find_init()
}

/// Refuses a runtime that already runs pods: the agent would end them, because no manifest names them.
async fn require_no_other_pods(socket: &Path) -> Result<(), CliError> {
    use k8s_cri::v1 as cri;
    let channel = keelson_service_kit::connect_foreign("the container runtime", socket);
    let mut client = cri::runtime_service_client::RuntimeServiceClient::new(channel);
    let state = cri::PodSandboxStateValue { state: cri::PodSandboxState::SandboxReady as i32 };
    let filter = cri::PodSandboxFilter { state: Some(state), ..cri::PodSandboxFilter::default() };
    let mut request = tonic::Request::new(cri::ListPodSandboxRequest { filter: Some(filter) });
    request.set_timeout(Duration::from_secs(10));
    let answer = client.list_pod_sandbox(request).await.map_err(|status| CliError::RuntimeUnavailable {
        message: format!(
            "the container runtime at {} does not list its pods: {}",
            socket.display(),
            status.message()
        ),
        hint: "`systemctl status containerd`, or name another socket with --runtime-endpoint unix:///…"
            .into(),
    })?;
    let names: Vec<String> = answer
        .into_inner()
        .items
        .into_iter()
        .map(|sandbox| {
            sandbox.metadata.map(|meta| format!("{}/{}", meta.namespace, meta.name)).unwrap_or_default()
        })
        .collect();
    if names.is_empty() {
        return Ok(());
    }
    let shown = names.iter().take(3).cloned().collect::<Vec<_>>().join(", ");
    let more = if names.len() > 3 { ", …" } else { "" };
    Err(CliError::StartFailed {
        message: format!(
            "the container runtime at {} already runs {}, which this agent would end: {shown}{more}",
            socket.display(),
            if names.len() == 1 { "a pod".to_owned() } else { format!("{} pods", names.len()) }
        ),
        hint: "end them first, or name another runtime with --runtime-endpoint".into(),
    })
}
