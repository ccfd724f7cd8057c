//! The termination message of a container: when the end of its log replaces an empty file (pod-lifecycle.md §11).

/// Maximum bytes read from a termination file.
pub const MAX_BYTES: u64 = 4096;
/// Maximum lines of a log that replace an empty termination file.
pub const MAX_LOG_LINES: usize = 80;
/// Maximum bytes of those lines.
pub const MAX_LOG_BYTES: usize = 2048;

/// Whether the end of the log replaces an empty termination file.
///
/// `policy` is the container's `terminationMessagePolicy`. The log of a container that the runtime could not start has
/// nothing of the container; the runtime then reports the reason `ContainerCannotRun`.
pub fn falls_back_to_log(policy: &str, exit_code: i32, reason: &str) -> bool {
    policy == "FallbackToLogsOnError" && exit_code != 0 && reason != "ContainerCannotRun"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_replaces_an_empty_message_only_after_an_error_and_with_the_policy() {
        for (policy, exit_code, reason, expected) in [
            ("FallbackToLogsOnError", 1, "Error", true),
            ("FallbackToLogsOnError", 137, "OOMKilled", true),
            ("FallbackToLogsOnError", 0, "Completed", false),
            ("FallbackToLogsOnError", 128, "ContainerCannotRun", false),
            ("File", 1, "Error", false),
            ("", 1, "Error", false),
        ] {
            assert_eq!(
                falls_back_to_log(policy, exit_code, reason),
                expected,
                "{policy} {exit_code} {reason}"
            );
        }
    }
}
