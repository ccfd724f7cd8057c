//! `keelson completion`: the completion scripts, and the answers to their requests.
//!
//! The script that a shell reads once calls this command with [`VARIABLE`] set for each line to
//! complete. Names of pods and UIDs of orphaned pods come from the agent that the line selects; if it
//! does not answer at once, none are offered.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Arg, Command, CommandFactory as _};
use clap_complete::engine::CompletionCandidate;
use clap_complete::env::Shells;
use clap_complete::{ArgValueCandidates, CompleteEnv, Shell};
use keelson_config::ServiceName;

use super::manifests::ObjectKind;
use super::volume_objects;
use crate::agent::Agent;
use crate::args::{Candidates, Cli, DEFAULT_RUN_DIR};
use crate::error::CliError;
use crate::output;
use crate::pods::{self, Scope};

/// The environment variable that a completion script sets to the name of its shell.
const VARIABLE: &str = "KEELSON_COMPLETE";
/// The timeout of the agent's answer: a person is waiting for the list.
const TIMEOUT: Duration = Duration::from_millis(500);

/// Prints the completion script for a shell.
pub(crate) fn run(shell: Shell) -> Result<(), CliError> {
    let name = shell.to_string();
    let shells = Shells::builtins();
    let completer = shells
        .completer(&name)
        .ok_or_else(|| CliError::Encode { reason: format!("the shell {name} is not supported") })?;
    let mut script = Vec::new();
    completer
        .write_registration(VARIABLE, "keelson", "keelson", "keelson", &mut script)
        .map_err(|e| CliError::Encode { reason: e.to_string() })?;
    output::print_bytes(&script)
}

/// Prints completions if a completion script called; `None` for an ordinary run of the command.
pub(crate) fn answer(args: &[OsString]) -> Option<ExitCode> {
    let folder = std::env::current_dir().ok();
    let completer = CompleteEnv::with_factory(|| with_candidates(Cli::command())).var(VARIABLE);
    match completer.try_complete(args.iter().cloned(), folder.as_deref()) {
        Ok(false) => None,
        Ok(true) => Some(ExitCode::SUCCESS),
        Err(error) => {
            // A shell hides this error; it is for a person who runs the command by hand.
            let _ = error.print();
            Some(ExitCode::FAILURE)
        }
    }
}

/// `command` with the names that complete its arguments and those of its subcommands.
fn with_candidates(command: Command) -> Command {
    let look_up = |arg: Arg| match arg.get::<Candidates>() {
        Some(Candidates::Pods) => arg.add(ArgValueCandidates::new(pods)),
        Some(Candidates::Services) => arg.add(ArgValueCandidates::new(services)),
        Some(Candidates::SupervisedServices) => arg.add(ArgValueCandidates::new(supervised)),
        Some(Candidates::PersistentVolumes) => arg.add(ArgValueCandidates::new(persistent_volumes)),
        Some(Candidates::PersistentVolumeClaims) => arg.add(ArgValueCandidates::new(claims)),
        Some(Candidates::Orphans) => arg.add(ArgValueCandidates::new(orphans)),
        None => arg,
    };
    command.mut_args(look_up).mut_subcommands(with_candidates)
}

/// All services.
fn services() -> Vec<CompletionCandidate> {
    ServiceName::ALL.into_iter().map(|service| CompletionCandidate::new(service.as_str())).collect()
}

/// The services that init can restart.
fn supervised() -> Vec<CompletionCandidate> {
    ServiceName::supervised().map(|service| CompletionCandidate::new(service.as_str())).collect()
}

/// The pods in the namespace and agent that the line selects.
fn pods() -> Vec<CompletionCandidate> {
    let Some((all, scope)) = ask(async |agent| pods::list(agent).await) else { return Vec::new() };
    all.iter()
        .filter(|pod| scope.contains(&pod.document.namespace))
        .map(|pod| {
            let namespace = format!("in {}", pod.document.namespace);
            CompletionCandidate::new(&pod.document.name).help(Some(namespace.into()))
        })
        .collect()
}

/// The PersistentVolumes of the agent that the line selects.
fn persistent_volumes() -> Vec<CompletionCandidate> {
    let kind = ObjectKind::PersistentVolume.as_str();
    let Some((all, _)) = ask(async |agent| agent.volume_objects(kind).await) else { return Vec::new() };
    all.iter().map(|volume| CompletionCandidate::new(volume_objects::name(volume))).collect()
}

/// The claims in the namespace and agent that the line selects.
fn claims() -> Vec<CompletionCandidate> {
    let kind = ObjectKind::PersistentVolumeClaim.as_str();
    let Some((all, scope)) = ask(async |agent| agent.volume_objects(kind).await) else { return Vec::new() };
    let here = all.iter().filter(|claim| scope.contains(volume_objects::namespace(claim)));
    here.map(|claim| CompletionCandidate::new(volume_objects::name(claim))).collect()
}

/// The UIDs of the orphaned pods of the agent that the line selects.
fn orphans() -> Vec<CompletionCandidate> {
    let Some((orphans, _)) = ask(async |agent| agent.orphans().await) else { return Vec::new() };
    orphans.into_iter().map(|orphan| CompletionCandidate::new(orphan.uid)).collect()
}

/// The answer of the agent that the line selects, and the namespaces that the line selects; `None` if there is no answer in time.
fn ask<T>(question: impl AsyncFnOnce(&Agent) -> Result<T, CliError>) -> Option<(T, Scope)> {
    let line: Vec<String> =
        std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned()).collect();
    let target = LineTarget::of(&line, std::env::var_os("KEELSON_RUN_DIR"));
    let agent = Agent::new(target.run_dir, TIMEOUT);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
    let answer = runtime.block_on(async { tokio::time::timeout(TIMEOUT, question(&agent)).await });
    Some((answer.ok()?.ok()?, target.scope))
}

/// The agent and namespace that an incomplete line selects, which the parser would refuse.
struct LineTarget {
    run_dir: PathBuf,
    scope: Scope,
}

impl LineTarget {
    fn of(line: &[String], environment: Option<OsString>) -> Self {
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
    fn incomplete_line_selects_agent_and_namespace() {
        let target = |line: &str, environment: Option<&str>| {
            let line: Vec<String> = line.split(' ').map(ToOwned::to_owned).collect();
            let target = LineTarget::of(&line, environment.map(OsString::from));
            (target.run_dir.display().to_string(), target.scope.namespace)
        };
        let expected =
            |dir: &str, namespace: Option<&str>| (dir.to_owned(), namespace.map(ToOwned::to_owned));
        assert_eq!(target("keelson get pods ", None), expected(DEFAULT_RUN_DIR, Some("default")));
        assert_eq!(target("keelson logs", Some("/run/b")), expected("/run/b", Some("default")));
        assert_eq!(
            target("keelson --run-dir /run/a logs -n web ", Some("/run/b")),
            expected("/run/a", Some("web"))
        );
        assert_eq!(
            target("keelson --run-dir=/run/a --namespace=web logs", None),
            expected("/run/a", Some("web"))
        );
        assert_eq!(target("keelson get pods -nweb -A", None), expected(DEFAULT_RUN_DIR, None));
        assert_eq!(target("keelson get pods -n", None), expected(DEFAULT_RUN_DIR, Some("default")));
    }
}
