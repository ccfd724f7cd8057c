//! `keelson completion`: the shell's side of it, and the answers to what the shell asks.
//!
//! The script that a shell reads once calls this command with [`VARIABLE`] set for each line that is to be
//! completed. Names of pods and services come from the agent that the line means; where it does not answer at once
//! there are none.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::CommandFactory as _;
use clap_complete::engine::CompletionCandidate;
use clap_complete::env::Shells;
use clap_complete::{CompleteEnv, Shell};
use keelson_config::ServiceName;

use crate::agent::Agent;
use crate::args::{Cli, DEFAULT_RUN_DIR};
use crate::error::Failure;
use crate::output;
use crate::pods::{self, Scope};

/// The environment variable that says that a shell asks, and which.
const VARIABLE: &str = "KEELSON_COMPLETE";
/// A person waits for the list: one that comes later than this is of no use.
const PATIENCE: Duration = Duration::from_millis(500);

/// Prints the script of a shell.
pub(crate) fn run(shell: Shell) -> Result<(), Failure> {
    let name = shell.to_string();
    let shells = Shells::builtins();
    let completer = shells
        .completer(&name)
        .ok_or_else(|| Failure::Encode { reason: format!("nothing is known of the shell {name}") })?;
    let mut script = Vec::new();
    completer
        .write_registration(VARIABLE, "keelson", "keelson", "keelson", &mut script)
        .map_err(|e| Failure::Encode { reason: e.to_string() })?;
    output::print_bytes(&script)
}

/// Answers a shell that asks for completions; `None` when this is an ordinary run of the command.
pub(crate) fn answer(args: &[OsString]) -> Option<ExitCode> {
    let folder = std::env::current_dir().ok();
    let asked = CompleteEnv::with_factory(Cli::command).var(VARIABLE);
    match asked.try_complete(args.iter().cloned(), folder.as_deref()) {
        Ok(false) => None,
        Ok(true) => Some(ExitCode::SUCCESS),
        Err(error) => {
            // The shell shows nothing of it; a person who tries it by hand sees it.
            let _ = error.print();
            Some(ExitCode::FAILURE)
        }
    }
}

/// All services.
pub(crate) fn services() -> Vec<CompletionCandidate> {
    ServiceName::ALL.into_iter().map(|service| CompletionCandidate::new(service.as_str())).collect()
}

/// The services that init restarts.
pub(crate) fn supervised() -> Vec<CompletionCandidate> {
    ServiceName::supervised().map(|service| CompletionCandidate::new(service.as_str())).collect()
}

/// The pods of the agent and the namespace that the line means.
pub(crate) fn pods() -> Vec<CompletionCandidate> {
    let line: Vec<String> =
        std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned()).collect();
    let meant = Meant::by(&line, std::env::var_os("KEELSON_RUN_DIR"));
    let agent = Agent::new(meant.run_dir, PATIENCE);
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
        return Vec::new();
    };
    let list = async { tokio::time::timeout(PATIENCE, pods::list(&agent)).await };
    let Ok(Ok(all)) = runtime.block_on(list) else { return Vec::new() };
    all.iter()
        .filter(|pod| meant.scope.holds(&pod.document.namespace))
        .map(|pod| {
            let namespace = format!("in {}", pod.document.namespace);
            CompletionCandidate::new(&pod.document.name).help(Some(namespace.into()))
        })
        .collect()
}

/// The agent and the namespace of a line that is not whole yet, and that the parser would refuse.
struct Meant {
    run_dir: PathBuf,
    scope: Scope,
}

impl Meant {
    fn by(line: &[String], environment: Option<OsString>) -> Self {
        let value = |short: Option<&str>, long: &str| {
            line.iter().enumerate().rev().find_map(|(index, word)| {
                if word == long || Some(word.as_str()) == short {
                    return line.get(index + 1).cloned();
                }
                let joined = word.strip_prefix(long).and_then(|rest| rest.strip_prefix('='));
                joined
                    .or_else(|| short.and_then(|short| word.strip_prefix(short)))
                    .filter(|value| !value.is_empty())
                    .map(ToOwned::to_owned)
            })
        };
        let run_dir = value(None, "--run-dir").map(PathBuf::from);
        let run_dir = run_dir.or_else(|| environment.map(PathBuf::from));
        let all = line.iter().any(|word| word == "-A" || word == "--all-namespaces");
        let namespace = value(Some("-n"), "--namespace").unwrap_or_else(|| "default".into());
        Self {
            run_dir: run_dir.unwrap_or_else(|| DEFAULT_RUN_DIR.into()),
            scope: Scope { namespace: (!all).then_some(namespace) },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_is_not_whole_says_which_agent_and_namespace_it_means() {
        let meant = |line: &str, environment: Option<&str>| {
            let line: Vec<String> = line.split(' ').map(ToOwned::to_owned).collect();
            let meant = Meant::by(&line, environment.map(OsString::from));
            (meant.run_dir.display().to_string(), meant.scope.namespace)
        };
        let expected =
            |dir: &str, namespace: Option<&str>| (dir.to_owned(), namespace.map(ToOwned::to_owned));
        assert_eq!(meant("keelson get pods ", None), expected(DEFAULT_RUN_DIR, Some("default")));
        assert_eq!(meant("keelson logs", Some("/run/b")), expected("/run/b", Some("default")));
        assert_eq!(
            meant("keelson --run-dir /run/a logs -n web ", Some("/run/b")),
            expected("/run/a", Some("web"))
        );
        assert_eq!(
            meant("keelson --run-dir=/run/a --namespace=web logs", None),
            expected("/run/a", Some("web"))
        );
        assert_eq!(meant("keelson get pods -nweb -A", None), expected(DEFAULT_RUN_DIR, None));
        assert_eq!(meant("keelson get pods -n", None), expected(DEFAULT_RUN_DIR, Some("default")));
    }
}
