//! Sets the kernel tunables that pods need, once at startup (runtime-and-resources.md §9).

use std::fs;
use std::path::Path;

use keelson_resource_manager_core::kernel::{Tunable, plan_tunables};
use keelson_service_kit::Context;

const SYSCTLS: &str = "/proc/sys";

/// Protected tunables have other values, so the service does not start.
#[derive(Debug, thiserror::Error)]
#[error("{}; set them with sysctl(8), or set protectKernelDefaults to false", violations.join(", "))]
pub(crate) struct ProtectedTunablesError {
    violations: Vec<String>,
}

/// Sets tunables that differ, or with `protectKernelDefaults` refuses to start. Tunables belong to the agent that manages the
/// host. Tunables that cannot be set, as in a container, are logged once.
pub(crate) async fn apply(ctx: &Context) -> Result<(), ProtectedTunablesError> {
    if !ctx.config.manage_host {
        return Ok(());
    }
    let protect = ctx.config.resources.node_allocatable.protect_kernel_defaults;
    let work = tokio::task::spawn_blocking(move || set(Path::new(SYSCTLS), protect));
    let failed = work.await.unwrap_or_else(|_| Ok(Vec::new()))?;
    if !failed.is_empty() {
        tracing::warn!("cannot set kernel tunables: {}; set them on the host", failed.join(", "));
    }
    Ok(())
}

/// Sets the tunables; returns those that could not be set, with their expected values.
fn set(sysctls: &Path, protect: bool) -> Result<Vec<String>, ProtectedTunablesError> {
    let found = |tunable: &Tunable| {
        fs::read_to_string(sysctls.join(tunable.file())).ok()?.split_whitespace().next()?.parse().ok()
    };
    let plan = plan_tunables(found, protect);
    if !plan.violations.is_empty() {
        return Err(ProtectedTunablesError { violations: plan.violations });
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
        for dir_name in ["vm", "kernel/keys"] {
            fs::create_dir_all(dir.path().join(dir_name)).unwrap();
        }
        for (file, value) in
            [("vm/overcommit_memory", "0\n"), ("kernel/panic", "10\n"), ("vm/panic_on_oom", "0\n")]
        {
            fs::write(dir.path().join(file), value).unwrap();
        }
        dir
    }

    #[test]
    fn tunables_that_differ_are_set_and_missing_ones_skipped() {
        let dir = sysctls();
        assert_eq!(set(dir.path(), false).unwrap(), Vec::<String>::new());
        assert_eq!(fs::read_to_string(dir.path().join("vm/overcommit_memory")).unwrap(), "1");
        assert_eq!(fs::read_to_string(dir.path().join("kernel/panic")).unwrap(), "10\n");
        assert!(!dir.path().join("kernel/panic_on_oops").exists());
    }

    #[test]
    fn protected_tunables_are_reported_with_both_values_and_not_set() {
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
