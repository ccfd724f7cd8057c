//! Texts about the manifests that a pod source refuses or warns about.

use keelson_proto::keelson::pod_config::v1::{SourceProblem, SourceWarning};

/// The location of a manifest error: `file:line:column`, as far as known.
pub(crate) fn location(problem: &SourceProblem) -> String {
    match (problem.line, problem.column) {
        (0, _) => problem.origin.clone(),
        (line, 0) => format!("{}:{line}", problem.origin),
        (line, column) => format!("{}:{line}:{column}", problem.origin),
    }
}

/// The location of a warning: `file:line: pod namespace/name: `, as far as known.
pub(crate) fn warning_location(warning: &SourceWarning) -> String {
    let pod = if warning.pod.is_empty() { String::new() } else { format!("pod {}: ", warning.pod) };
    match warning.line {
        0 => format!("{}: {pod}", warning.origin),
        line => format!("{}:{line}: {pod}", warning.origin),
    }
}

/// What still runs although the manifest is refused.
pub(crate) fn effect(problem: &SourceProblem) -> String {
    if problem.kept_pods.is_empty() {
        "none of its pods run".into()
    } else {
        format!("the last good version keeps running: {}", problem.kept_pods.join(", "))
    }
}
