//! Whether the container runtime and its network are ready (node-and-api.md §9.5).

/// A condition that the runtime reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Condition<'a> {
    /// `RuntimeReady` or `NetworkReady`; others are ignored.
    pub kind: &'a str,
    /// Whether it is met.
    pub status: bool,
    /// The runtime's reason.
    pub reason: &'a str,
    /// The runtime's message.
    pub message: &'a str,
}

/// The readiness of the runtime and its network.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Readiness {
    /// The runtime is ready.
    pub runtime: bool,
    /// Its network is ready.
    pub network: bool,
    /// What is not ready, as in the node's condition; empty if both are ready.
    pub message: String,
}

/// Reads the readiness from the runtime's conditions. A condition that is not reported counts as not met.
pub fn readiness(conditions: &[Condition<'_>]) -> Readiness {
    let error = |prefix: &str, kind: &str| match conditions.iter().find(|c| c.kind == kind) {
        Some(c) if c.status => None,
        Some(c) => Some(format!("{prefix}: {kind}=false reason:{} message:{}", c.reason, c.message)),
        None => Some(format!("{prefix}: the runtime does not report {kind}")),
    };
    let runtime = error("container runtime not ready", "RuntimeReady");
    let network = error("container runtime network not ready", "NetworkReady");
    Readiness {
        runtime: runtime.is_none(),
        network: network.is_none(),
        message: join_errors(runtime, network),
    }
}

/// One error as is, two errors in brackets.
fn join_errors(runtime: Option<String>, network: Option<String>) -> String {
    match (runtime, network) {
        (Some(runtime), Some(network)) => format!("[{runtime}, {network}]"),
        (one, other) => one.or(other).unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUNTIME: Condition<'_> = Condition { kind: "RuntimeReady", status: true, reason: "", message: "" };
    const NETWORK: Condition<'_> = Condition { kind: "NetworkReady", status: true, reason: "", message: "" };

    #[test]
    fn missing_and_unmet_runtime_conditions_are_not_ready() {
        let unmet = Condition { status: false, reason: "R", message: "M", ..NETWORK };
        let unmet_text = "container runtime network not ready: NetworkReady=false reason:R message:M";
        let silent_text = "container runtime network not ready: the runtime does not report NetworkReady";
        for (conditions, runtime, network, message) in [
            (&[RUNTIME, NETWORK][..], true, true, ""),
            (&[RUNTIME, unmet], true, false, unmet_text),
            (&[RUNTIME], true, false, silent_text),
            (
                &[],
                false,
                false,
                "[container runtime not ready: the runtime does not report RuntimeReady, \
                 container runtime network not ready: the runtime does not report NetworkReady]",
            ),
        ] {
            let expected = Readiness { runtime, network, message: message.to_owned() };
            assert_eq!(readiness(conditions), expected);
        }
    }

    #[test]
    fn a_single_runtime_error_has_no_brackets() {
        assert_eq!(join_errors(None, Some("x".into())), "x");
        assert_eq!(join_errors(Some("x".into()), Some("y".into())), "[x, y]");
        assert_eq!(join_errors(None, None), "");
    }
}
