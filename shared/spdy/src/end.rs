//! Parses how a command has ended from the runtime's status.

use serde::Deserialize;

/// The result of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// It exited with this code.
    Exited(i32),
    /// The runtime could not run it; the runtime's message.
    Failed(String),
    /// The status cannot be parsed; its text.
    Unclear(String),
}

/// The fields of a Kubernetes `Status` that are needed here.
#[derive(Debug, Deserialize)]
struct Status {
    #[serde(default)]
    status: String,
    #[serde(default)]
    message: String,
    #[serde(default)]
    reason: String,
    #[serde(default)]
    details: Option<Details>,
}

#[derive(Debug, Default, Deserialize)]
struct Details {
    #[serde(default)]
    causes: Option<Vec<Cause>>,
}

#[derive(Debug, Deserialize)]
struct Cause {
    #[serde(default)]
    reason: String,
    #[serde(default)]
    message: String,
}

/// Parses the content of the error stream of `v4.channel.k8s.io`: one JSON Status (node-and-api.md §8.4).
pub fn end_of(content: &[u8]) -> End {
    let unclear = || End::Unclear(String::from_utf8_lossy(content).trim().to_owned());
    let Ok(status) = serde_json::from_slice::<Status>(content) else { return unclear() };
    match (status.status.as_str(), status.reason.as_str()) {
        ("Success", _) => End::Exited(0),
        ("Failure", "NonZeroExitCode") => {
            let causes = status.details.unwrap_or_default().causes.unwrap_or_default();
            let code = causes.iter().find(|cause| cause.reason == "ExitCode");
            code.and_then(|cause| cause.message.parse().ok()).map_or_else(unclear, End::Exited)
        }
        ("Failure", _) if !status.message.is_empty() => End::Failed(status.message),
        _ => unclear(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_code_is_read_from_the_exec_status() {
        let exited = |code: &str| {
            format!(
                r#"{{"metadata":{{}},"status":"Failure","message":"command terminated with non-zero exit code: x",
                "reason":"NonZeroExitCode","details":{{"causes":[{{"reason":"Other","message":"1"}},
                {{"reason":"ExitCode","message":"{code}"}}]}}}}"#
            )
        };
        let failed = r#"{"metadata":{},"status":"Failure","message":"no such file","reason":"InternalError",
            "details":{"causes":[{"message":"no such file"}]},"code":500}"#;
        for (content, end) in [
            (r#"{"metadata":{},"status":"Success"}"#.to_owned(), End::Exited(0)),
            (format!("{}\n", r#"{"status":"Success","details":null}"#), End::Exited(0)),
            (exited("3"), End::Exited(3)),
            (exited("137"), End::Exited(137)),
            (failed.to_owned(), End::Failed("no such file".to_owned())),
        ] {
            assert_eq!(end_of(content.as_bytes()), end, "{content}");
        }
    }

    #[test]
    fn unparsable_exec_status_never_counts_as_success() {
        let no_code = r#"{"status":"Failure","reason":"NonZeroExitCode","message":"m"}"#;
        let odd_code = r#"{"status":"Failure","reason":"NonZeroExitCode",
            "details":{"causes":[{"reason":"ExitCode","message":"many"}]}}"#;
        let cut = r#"{"status":"Success""#;
        for content in [no_code, odd_code, cut, "{}", "", "null", "command failed", r#"{"status":"Failure"}"#]
        {
            assert_eq!(end_of(content.as_bytes()), End::Unclear(content.to_owned()), "{content}");
        }
        assert_eq!(end_of(b"\xff"), End::Unclear("\u{fffd}".to_owned()));
    }
}
