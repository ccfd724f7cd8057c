//! Maintains the kubelet's iptables chains in both address families (node-and-api.md §13).
//!
//! It runs the machine's own programs, so that the chains are in the variant that the machine uses: legacy or nft. The programs
//! run independently of the other loops, and each is killed when it takes too long.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use keelson_resource_manager_core::iptables::{
    Arguments, CANARY, Chain, CommandErrorKind, Family, TABLES, classify_error, desired_chains, probe,
};
use keelson_service_kit::status::chain;
use keelson_service_kit::{Backoff, Context, LoopHandle};
use tokio::process::Command;
use tokio::time::Instant;

/// The name of the condition.
const CONDITION: &str = "iptables";
/// Between two checks of the canaries.
const INTERVAL: Duration = Duration::from_secs(60);
/// The timeout of a command, of which it may wait 5 s for the lock of the tables.
const LIMIT: Duration = Duration::from_secs(10);
/// Directories that are searched after `PATH`.
const SEARCH_DIRS: [&str; 4] = ["/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/bin"];
/// The exit code of a program that has not found the chain to list.
const NO_SUCH_CHAIN: i32 = 1;

/// Starts the task. The chains belong to the agent that manages the host, and only when `makeIPTablesUtilChains` is set.
pub(crate) fn start(ctx: &Context) {
    if !(ctx.config.manage_host && ctx.config.iptables_util_chains) {
        return;
    }
    let handle = ctx.progress.register("iptables");
    ctx.spawn("iptables", ChainKeeper::new(ctx.clone(), handle, Programs::of_this_machine()).run());
}

/// Why a command has failed.
#[derive(Debug, thiserror::Error)]
enum CommandError {
    #[error("cannot run {}", program.display())]
    Start { program: PathBuf, source: std::io::Error },
    #[error(
        "`{line}` has not ended within {limit:?} and was killed; does another program hold the lock of the tables?"
    )]
    TimedOut { line: String, limit: Duration },
    #[error("`{line}` failed with {status}: {stderr}")]
    Failed { line: String, status: ExitStatus, stderr: String },
}

impl CommandError {
    fn kind(&self) -> CommandErrorKind {
        match self {
            Self::Failed { status, stderr, .. } => classify_error(status.code(), stderr),
            Self::Start { .. } | Self::TimedOut { .. } => CommandErrorKind::Other,
        }
    }

    /// The error with its causes and a remedy.
    fn message(&self) -> String {
        let mut text = chain(self);
        if self.kind() == CommandErrorKind::PermissionDenied {
            text.push_str(
                "; resource-manager must keep CAP_NET_ADMIN, and CAP_NET_RAW for the legacy iptables",
            );
        }
        text
    }
}

/// The iptables programs of the machine.
#[derive(Debug, Clone)]
struct Programs {
    dirs: Vec<PathBuf>,
    /// The suffix of the program names; empty for the machine's default variant.
    suffix: &'static str,
    limit: Duration,
}

impl Programs {
    fn of_this_machine() -> Self {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let own = std::env::split_paths(&path).filter(|dir| dir.is_absolute());
        let dirs = own.chain(SEARCH_DIRS.map(PathBuf::from)).collect();
        Self { dirs, suffix: "", limit: LIMIT }
    }

    fn find(&self, family: Family) -> Option<PathBuf> {
        let name = format!("{}{}", family.program(), self.suffix);
        self.dirs.iter().map(|dir| dir.join(&name)).find(|path| path.is_file())
    }

    /// The rules of a chain; none when the chain does not exist.
    async fn show(&self, program: &Path, arguments: &Arguments) -> Result<Option<String>, CommandError> {
        match self.run(program, arguments).await {
            Ok(text) => Ok(Some(text)),
            Err(CommandError::Failed { status, .. }) if status.code() == Some(NO_SUCH_CHAIN) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Runs the program and returns its output.
    async fn run(&self, program: &Path, arguments: &Arguments) -> Result<String, CommandError> {
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null()).kill_on_drop(true);
        let line = || format!("{} {}", program.display(), arguments.join(" "));
        let output = match tokio::time::timeout(self.limit, command.output()).await {
            Ok(Ok(output)) => output,
            Ok(Err(source)) => return Err(CommandError::Start { program: program.to_owned(), source }),
            Err(_) => return Err(CommandError::TimedOut { line: line(), limit: self.limit }),
        };
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let stderr = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        Err(CommandError::Failed { line: line(), status: output.status, stderr })
    }
}

/// The state of the chains of an address family.
#[derive(Debug, Clone, PartialEq, Eq)]
enum FamilyState {
    /// Not checked yet.
    Unknown,
    /// Not available on this machine, and why.
    Unavailable(String),
    /// All chains exist.
    Complete,
    /// The chains exist except in tables that the kernel lacks; the errors of those tables.
    Partial(String),
    /// The chains could not be created or checked, and why.
    Failed(String),
}

/// Tables that the kernel lacks, each with its error.
type UnsupportedTables = BTreeMap<&'static str, String>;

/// The result of reconciling a family.
#[derive(Debug, Default)]
struct ReconcileResult {
    /// The number of commands that changed something.
    commands: usize,
    unsupported: UnsupportedTables,
}

/// The task that maintains the chains.
struct ChainKeeper {
    ctx: Context,
    handle: LoopHandle,
    programs: Programs,
    interval: Duration,
    states: [FamilyState; 2],
}

impl ChainKeeper {
    fn new(ctx: Context, handle: LoopHandle, programs: Programs) -> Self {
        Self {
            ctx,
            handle,
            programs,
            interval: INTERVAL,
            states: [FamilyState::Unknown, FamilyState::Unknown],
        }
    }

    /// Runs until the shutdown. The chains stay, as those of a kubelet do.
    async fn run(mut self) {
        let mut retry = Backoff::new(Duration::from_secs(1), self.interval);
        let shutdown = self.ctx.shutdown.clone();
        let mut at = Instant::now();
        loop {
            // Cancel-safe: both hold nothing.
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = self.handle.while_at(tokio::time::sleep_until(at)) => {}
            }
            // Cancel-safe: a command that is dropped is killed, and the next start continues from the existing chains.
            let succeeded = tokio::select! {
                () = shutdown.cancelled() => return,
                succeeded = self.reconcile() => succeeded,
            };
            if succeeded {
                retry.reset();
            }
            at = Instant::now() + if succeeded { self.interval } else { retry.next_delay() };
        }
    }

    /// Reconciles both families, and logs changes of their state. False when one has failed.
    async fn reconcile(&mut self) -> bool {
        for (index, family) in Family::ALL.into_iter().enumerate() {
            let state = self.reconcile_family(family, self.states[index].has_chains()).await;
            if self.states[index] != state {
                log_state(family, &state);
                self.states[index] = state;
            }
        }
        let errors: Vec<&str> = self.states.iter().filter_map(FamilyState::error).collect();
        let condition = if errors.is_empty() { Ok(()) } else { Err(errors.join("; ")) };
        let succeeded = condition.is_ok();
        self.ctx.progress.condition(CONDITION, condition);
        succeeded
    }

    async fn reconcile_family(&self, family: Family, had_chains: bool) -> FamilyState {
        let Some(program) = self.programs.find(family) else {
            return FamilyState::Unavailable(format!("this machine has no {}", family.program()));
        };
        match self.reconcile_chains(&program, family, had_chains).await {
            Ok(ReconcileResult { commands, unsupported }) => {
                if commands > 0 && had_chains {
                    tracing::warn!(
                        commands,
                        "the kubelet's chains in {} were missing and have been created again",
                        family.program()
                    );
                }
                FamilyState::from_unsupported(unsupported)
            }
            Err(error) => FamilyState::Failed(error.message()),
        }
    }

    /// The tables that the kernel lacks for this program.
    async fn unsupported(&self, program: &Path) -> Result<UnsupportedTables, CommandError> {
        let mut unsupported = UnsupportedTables::new();
        for table in TABLES {
            self.handle.tick();
            match self.programs.run(program, &probe(table)).await {
                Ok(_) => {}
                Err(error) if error.kind() == CommandErrorKind::Unsupported => {
                    unsupported.insert(table, chain(&error));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(unsupported)
    }

    /// Creates what is missing. When the chains existed at the last check, the canaries show whether anything is missing.
    async fn reconcile_chains(
        &self,
        program: &Path,
        family: Family,
        had_chains: bool,
    ) -> Result<ReconcileResult, CommandError> {
        let mut result = ReconcileResult { commands: 0, unsupported: self.unsupported(program).await? };
        if had_chains && self.has_canaries(program, family, &result.unsupported).await? {
            return Ok(result);
        }
        for chain in desired_chains(family) {
            if !result.unsupported.contains_key(chain.table) {
                self.reconcile_chain(program, chain, &mut result).await?;
            }
        }
        Ok(result)
    }

    async fn has_canaries(
        &self,
        program: &Path,
        family: Family,
        unsupported: &UnsupportedTables,
    ) -> Result<bool, CommandError> {
        let is_there = |chain: &Chain| chain.name == CANARY && !unsupported.contains_key(chain.table);
        for canary in desired_chains(family).filter(is_there) {
            self.handle.tick();
            if self.programs.show(program, &canary.show()).await?.is_none() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    async fn reconcile_chain(
        &self,
        program: &Path,
        chain: Chain,
        result: &mut ReconcileResult,
    ) -> Result<(), CommandError> {
        self.handle.tick();
        let listed = self.programs.show(program, &chain.show()).await?;
        let mut is_new = listed.is_none() && !chain.is_builtin;
        for arguments in chain.plan(listed.as_deref()) {
            self.handle.tick();
            match self.programs.run(program, &arguments).await {
                Ok(_) => result.commands += 1,
                // nft lists a table that the kernel lacks as empty, and fails when the first chain is created.
                Err(error) if is_new && error.kind() == CommandErrorKind::Unsupported => {
                    result.unsupported.insert(chain.table, error.message());
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
            is_new = false;
        }
        Ok(())
    }
}

impl FamilyState {
    /// The state of a family whose chains exist except in `unsupported` tables.
    fn from_unsupported(unsupported: UnsupportedTables) -> Self {
        let is_all = unsupported.len() == TABLES.len();
        let errors = unsupported.into_values().collect::<Vec<_>>().join("; ");
        match (errors.is_empty(), is_all) {
            (true, _) => Self::Complete,
            (false, true) => Self::Unavailable(errors),
            (false, false) => Self::Partial(errors),
        }
    }

    fn has_chains(&self) -> bool {
        matches!(self, Self::Complete | Self::Partial(_))
    }

    fn error(&self) -> Option<&str> {
        match self {
            Self::Failed(why) => Some(why),
            Self::Unknown | Self::Unavailable(_) | Self::Complete | Self::Partial(_) => None,
        }
    }
}

/// Logs a new state; errors are in the condition instead.
fn log_state(family: Family, state: &FamilyState) {
    let program = family.program();
    match state {
        FamilyState::Unavailable(why) => {
            tracing::info!(
                event = "iptables_unavailable",
                "the kubelet's chains are not created in {program}: {why}"
            );
        }
        FamilyState::Complete => {
            tracing::info!(event = "iptables_chains_ready", "the kubelet's chains exist in {program}");
        }
        FamilyState::Partial(why) => {
            tracing::info!(
                event = "iptables_chains_partial",
                "the kubelet's chains exist in {program}, except in tables that the kernel lacks: {why}"
            );
        }
        FamilyState::Unknown | FamilyState::Failed(_) => {}
    }
}

#[cfg(test)]
mod tests;
