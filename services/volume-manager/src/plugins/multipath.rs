//! Multipath devices of the node, and the removal of disks (volumes.md §10.4, §10.5).

use std::io;

use keelson_volume_manager_core::multipath::{self, Act, Mapping, Step};

use super::PluginError;
use super::host::Host;

/// Carries out one step of the removal of a disk.
pub(super) async fn carry_out(host: &Host, step: &Step) -> Result<(), PluginError> {
    match step.act() {
        Act::Run(program, arguments) => {
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            host.run_checked(program, &arguments).await.map(drop)
        }
        Act::Write(file, text) => {
            let write = move |machine: &super::host::Machine| match machine.write(&file, text) {
                // The disk is gone already.
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                other => other,
            };
            host.on_machine(&step.to_string(), write).await
        }
    }
}

/// Carries out steps of which each may fail.
pub(super) async fn try_all(host: &Host, steps: &[Step], volume: &str) {
    for step in steps {
        if let Err(error) = carry_out(host, step).await {
            tracing::warn!(event = "disk_removal_failed", volume, %error, "cannot {step}");
        }
    }
}

/// Device nodes of one disk, each replaced by the multipath device over it; each once.
pub(super) fn topmost(nodes: impl IntoIterator<Item = String>, mappings: &[Mapping]) -> Vec<String> {
    let mut topmost = Vec::new();
    for node in nodes {
        let over = multipath::kernel_name(&node).and_then(|name| multipath::over(name, mappings));
        let node = over.map_or(node, Mapping::device);
        if !topmost.contains(&node) {
            topmost.push(node);
        }
    }
    topmost
}
