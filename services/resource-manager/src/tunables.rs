//! Kernel tunables that pods need (runtime-and-resources.md §9), looked at once at the start.

use std::fs;
use std::path::Path;

use keelson_resource_manager_core::kernel::{Tunable, plan_tunables};
use keelson_service_kit::Context;

const SYSCTLS: &str = "/proc/sys";

/// Why the service does not start.
#[derive(Debug, thiserror::Error)]
#[error("{}; set them with sysctl(8), or set protectKernelDefaults to false", wrong.join(", "))]
pub(crate) struct Protected {
    wrong: Vec<String>,
}

/// Sets what differs, or with `protectKernelDefaults` refuses to start. Tunables belong to the agent that manages the
/// host. What may not be set here, as in a container, is warned about once.
pub(crate) async fn apply(ctx: &Context) -> Result<(), Protected> {
    if !ctx.config.manage_host {
        return Ok(());
    }
    let protect = ctx.config.resources.node_allocatable.protect_kernel_defaults;
    let work = tokio::task::spawn_blocking(move || set(Path::new(SYSCTLS), protect));
    let failed = work.await.unwrap_or_else(|_| Ok(Vec::new()))?;
    if !failed.is_empty() {
        tracing::warn!(
            "kernel tunables stay as they are, for they may not be set here: {}; set them on the host",
            failed.join(", ")
        );
    }
    Ok(())
}

/// The names of those that could not be set, with what they should be.
fn set(sysctls: &Path, protect: bool) -> Result<Vec<String>, Protected> {
    let found = |tunable: &Tunable| {
        fs::read_to_string(sysctls.join(tunable.file())).ok()?.split_whitespace().next()?.parse().ok()
    };
    let plan = plan_tunables(found, protect);
    if !plan.wrong.is_empty() {
        return Err(Protected { wrong: plan.wrong });
    }
    let mut failed = Vec::new();
    for tunable in plan.set {
        let text = format!("{}={}", tunable.name, tunable.expected);
        match fs::write(sysctls.join(tunable.file()), tunable.expected.to_string()) {
            Ok(()) => tracing::info!("set the kernel tunable {text}"),
            Err(error) => failed.push(format!("{text} ({error})")),
        }
    }
    Ok(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sysctls() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for folder in ["vm", "kernel/keys"] {
            fs::create_dir_all(dir.path().join(folder)).unwrap();
        }
        for (file, value) in
            [("vm/overcommit_memory", "0\n"), ("kernel/panic", "10\n"), ("vm/panic_on_oom", "0\n")]
        {
            fs::write(dir.path().join(file), value).unwrap();
        }
        dir
    }

    #[test]
    fn what_differs_is_set_and_what_is_not_there_left_alone() {
        let dir = sysctls();
        assert_eq!(set(dir.path(), false).unwrap(), Vec::<String>::new());
        assert_eq!(fs::read_to_string(dir.path().join("vm/overcommit_memory")).unwrap(), "1");
        assert_eq!(fs::read_to_string(dir.path().join("kernel/panic")).unwrap(), "10\n");
        assert!(!dir.path().join("kernel/panic_on_oops").exists());
    }

    #[test]
    fn protected_tunables_are_named_with_both_values_and_left_alone() {
        let dir = sysctls();
        let error = set(dir.path(), true).unwrap_err().to_string();
        assert!(
            error.starts_with(
                "invalid kernel flag: vm/overcommit_memory, expected value: 1, actual value: 0;"
            ),
            "{error}"
        );
        assert_eq!(fs::read_to_string(dir.path().join("vm/overcommit_memory")).unwrap(), "0\n");
    }
}
