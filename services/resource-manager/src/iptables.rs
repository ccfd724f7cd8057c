//! Keeps the chains of the kubelet in iptables, in both address families (node-and-api.md §13).
//!
//! The programs are the machine's own, so that what they write is where everybody else on it looks: legacy or nft. They
//! run beside the other loops, and each is ended when it takes too long.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use keelson_resource_manager_core::iptables::{
    Arguments, CANARY, Chain, Failure, Family, TABLES, failure, probe, wanted,
};
use keelson_service_kit::status::chain;
use keelson_service_kit::{Backoff, Context, LoopHandle};
use tokio::process::Command;
use tokio::time::Instant;

/// The name of the condition.
const CONDITION: &str = "iptables";
/// Between two looks whether the canaries are there.
const INTERVAL: Duration = Duration::from_secs(60);
/// No command takes longer; it waits 5 s for others that change the same.
const LIMIT: Duration = Duration::from_secs(10);
/// Searched after `PATH`.
const FOLDERS: [&str; 4] = ["/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/bin"];
/// What a program ends with that has not found the chain it was to show.
const NO_SUCH_CHAIN: i32 = 1;

/// Begins to keep the chains. They belong to the agent that manages the host, and only where
/// `makeIPTablesUtilChains` asks for them.
pub(crate) fn keep(ctx: &Context) {
    if !(ctx.config.manage_host && ctx.config.iptables_util_chains) {
        return;
    }
    let handle = ctx.progress.register("iptables");
    ctx.spawn("iptables", Keeper::new(ctx.clone(), handle, Programs::of_this_machine()).run());
}

/// Why a command has not done what it was to do.
#[derive(Debug, thiserror::Error)]
enum CommandError {
    #[error("cannot run {}", program.display())]
    Start { program: PathBuf, source: std::io::Error },
    #[error(
        "`{line}` has not ended within {limit:?} and was ended; does another program hold the lock of the tables?"
    )]
    Silent { line: String, limit: Duration },
    #[error("`{line}` has ended with {status}: {said}")]
    Failed { line: String, status: ExitStatus, said: String },
}

impl CommandError {
    fn failure(&self) -> Failure {
        match self {
            Self::Failed { status, said, .. } => failure(status.code(), said),
            Self::Start { .. } | Self::Silent { .. } => Failure::Other,
        }
    }

    /// In words, and what helps.
    fn told(&self) -> String {
        let mut text = chain(self);
        if self.failure() == Failure::Forbidden {
            text.push_str(
                "; resource-manager must keep CAP_NET_ADMIN, and CAP_NET_RAW for the legacy iptables",
            );
        }
        text
    }
}

/// Where the programs are.
#[derive(Debug, Clone)]
struct Programs {
    folders: Vec<PathBuf>,
    /// What follows the name; of the machine's own nothing.
    suffix: &'static str,
    limit: Duration,
}

impl Programs {
    fn of_this_machine() -> Self {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let own = std::env::split_paths(&path).filter(|folder| folder.is_absolute());
        let folders = own.chain(FOLDERS.map(PathBuf::from)).collect();
        Self { folders, suffix: "", limit: LIMIT }
    }

    fn find(&self, family: Family) -> Option<PathBuf> {
        let name = format!("{}{}", family.program(), self.suffix);
        self.folders.iter().map(|folder| folder.join(&name)).find(|path| path.is_file())
    }

    /// What a chain has in it; none when there is no such chain.
    async fn show(&self, program: &Path, arguments: &Arguments) -> Result<Option<String>, CommandError> {
        match self.run(program, arguments).await {
            Ok(text) => Ok(Some(text)),
            Err(CommandError::Failed { status, .. }) if status.code() == Some(NO_SUCH_CHAIN) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// What the program prints.
    async fn run(&self, program: &Path, arguments: &Arguments) -> Result<String, CommandError> {
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null()).kill_on_drop(true);
        let line = || format!("{} {}", program.display(), arguments.join(" "));
        let output = match tokio::time::timeout(self.limit, command.output()).await {
            Ok(Ok(output)) => output,
            Ok(Err(source)) => return Err(CommandError::Start { program: program.to_owned(), source }),
            Err(_) => return Err(CommandError::Silent { line: line(), limit: self.limit }),
        };
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        Err(CommandError::Failed { line: line(), status: output.status, said })
    }
}

/// How it is with a family.
#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    /// Nothing is known yet.
    Unknown,
    /// It cannot be had on this machine, and why.
    Absent(String),
    /// Its chains are there.
    Kept,
    /// Its chains are there, but for those in tables that the kernel lacks; what is said of these.
    Partly(String),
    /// Its chains could not be made or looked at, and why.
    Failed(String),
}

/// Tables that the kernel lacks, each with what was said of it.
type Lacking = BTreeMap<&'static str, String>;

/// What was found and made.
#[derive(Debug, Default)]
struct Made {
    /// So many commands were needed.
    commands: usize,
    lacking: Lacking,
}

/// The task.
struct Keeper {
    ctx: Context,
    handle: LoopHandle,
    programs: Programs,
    interval: Duration,
    states: [State; 2],
}

impl Keeper {
    fn new(ctx: Context, handle: LoopHandle, programs: Programs) -> Self {
        Self { ctx, handle, programs, interval: INTERVAL, states: [State::Unknown, State::Unknown] }
    }

    /// Turns until the shutdown. The chains stay behind, as those of a kubelet do.
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
            // Cancel-safe: a command that was cut is ended, and the next start goes on from what is there.
            let well = tokio::select! {
                () = shutdown.cancelled() => return,
                well = self.pass() => well,
            };
            if well {
                retry.reset();
            }
            at = Instant::now() + if well { self.interval } else { retry.next_delay() };
        }
    }

    /// Looks at both families and says what has changed. Whether none has failed.
    async fn pass(&mut self) -> bool {
        for (index, family) in Family::ALL.into_iter().enumerate() {
            let state = self.see_to(family, self.states[index].is_kept()).await;
            if self.states[index] != state {
                tell(family, &state);
                self.states[index] = state;
            }
        }
        let failures: Vec<&str> = self.states.iter().filter_map(State::failure).collect();
        let condition = if failures.is_empty() { Ok(()) } else { Err(failures.join("; ")) };
        let well = condition.is_ok();
        self.ctx.progress.condition(CONDITION, condition);
        well
    }

    async fn see_to(&self, family: Family, is_kept: bool) -> State {
        let Some(program) = self.programs.find(family) else {
            return State::Absent(format!("there is no {} on this machine", family.program()));
        };
        match self.make(&program, family, is_kept).await {
            Ok(Made { commands, lacking }) => {
                if commands > 0 && is_kept {
                    tracing::warn!(
                        commands,
                        "the chains of the kubelet in {} were gone and are there again",
                        family.program()
                    );
                }
                State::without(lacking)
            }
            Err(error) => State::Failed(error.told()),
        }
    }

    /// The tables that the kernel lacks for this program.
    async fn lacking(&self, program: &Path) -> Result<Lacking, CommandError> {
        let mut lacking = Lacking::new();
        for table in TABLES {
            self.handle.tick();
            match self.programs.run(program, &probe(table)).await {
                Ok(_) => {}
                Err(error) if error.failure() == Failure::Lacking => {
                    lacking.insert(table, chain(&error));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(lacking)
    }

    /// Makes what is missing; of chains that were kept the canaries tell whether anything is.
    async fn make(&self, program: &Path, family: Family, is_kept: bool) -> Result<Made, CommandError> {
        let mut made = Made { commands: 0, lacking: self.lacking(program).await? };
        if is_kept && self.has_canaries(program, family, &made.lacking).await? {
            return Ok(made);
        }
        for chain in wanted(family) {
            if !made.lacking.contains_key(chain.table) {
                self.make_chain(program, chain, &mut made).await?;
            }
        }
        Ok(made)
    }

    async fn has_canaries(
        &self,
        program: &Path,
        family: Family,
        lacking: &Lacking,
    ) -> Result<bool, CommandError> {
        let is_there = |chain: &Chain| chain.name == CANARY && !lacking.contains_key(chain.table);
        for canary in wanted(family).filter(is_there) {
            self.handle.tick();
            if self.programs.show(program, &canary.show()).await?.is_none() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    async fn make_chain(&self, program: &Path, chain: Chain, made: &mut Made) -> Result<(), CommandError> {
        self.handle.tick();
        let seen = self.programs.show(program, &chain.show()).await?;
        let mut is_new = seen.is_none() && !chain.is_builtin;
        for arguments in chain.plan(seen.as_deref()) {
            self.handle.tick();
            match self.programs.run(program, &arguments).await {
                Ok(_) => made.commands += 1,
                // nft shows a table as empty that the kernel lacks, and fails with the first chain in it.
                Err(error) if is_new && error.failure() == Failure::Lacking => {
                    made.lacking.insert(chain.table, error.told());
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
            is_new = false;
        }
        Ok(())
    }
}

impl State {
    /// Of a family whose chains were made but in tables that the kernel lacks.
    fn without(lacking: Lacking) -> Self {
        let is_all = lacking.len() == TABLES.len();
        let said = lacking.into_values().collect::<Vec<_>>().join("; ");
        match (said.is_empty(), is_all) {
            (true, _) => Self::Kept,
            (false, true) => Self::Absent(said),
            (false, false) => Self::Partly(said),
        }
    }

    fn is_kept(&self) -> bool {
        matches!(self, Self::Kept | Self::Partly(_))
    }

    fn failure(&self) -> Option<&str> {
        match self {
            Self::Failed(why) => Some(why),
            Self::Unknown | Self::Absent(_) | Self::Kept | Self::Partly(_) => None,
        }
    }
}

/// Failures are told by the condition.
fn tell(family: Family, state: &State) {
    let program = family.program();
    match state {
        State::Absent(why) => tracing::info!("no chains are kept in {program}: {why}"),
        State::Kept => tracing::info!("the chains of the kubelet are in {program}"),
        State::Partly(why) => {
            tracing::info!(
                "the chains of the kubelet are in {program}, but in tables that the kernel lacks: {why}"
            );
        }
        State::Unknown | State::Failed(_) => {}
    }
}

#[cfg(test)]
mod tests;
