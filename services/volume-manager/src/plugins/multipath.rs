//! Multipath devices of the node, and the removal of disks (volumes.md §10.4, §10.5).

use std::io;

use keelson_volume_manager_core::multipath::{Act, Step};

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
