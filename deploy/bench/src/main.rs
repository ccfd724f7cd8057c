//! `keelson-bench`: how fast the agent brings pods up and down, and what it costs while it has nothing to
//! do.
//!
//! - **Floor.** Once, a recording proxy is between agent and containerd. The requests of the agent for each
//!   pod is then sent straight to containerd by 8 workers: no agent on this machine can be faster than that.
//! - **Alternating rounds.** Floor and agent take turns, and the figures are medians over the rounds. The
//!   agent is stopped while the floor runs, because it would end pods that it does not know.
//! - **Seen from outside.** A pod is up when its process is in /proc and gone when it is not; the agent's
//!   own status counts only where it is the question (recovery). Memory is PSS, CPU is utime + stime.
//! - **Beside a flood**, when asked for: a container writes its log as fast as it can, in the floor's runs straight at
//!   containerd, in the agent's as one more pod, whose log the agent rotates.
//! - **Deletions**, when asked for, instead: N pods are deleted at a real API server at once, until it has none of them any more.
//! - **Volumes**, when asked for, instead: what projected volumes, and volumes of a CSI driver, cost beyond the driver's own calls.
//! - **On a disk of its own**, when asked for: what the machine's filesystem went through before does not count then.
//! - **Edits**, when asked for, instead of all that: a ConfigMap is edited at a real API server, and the file in a pod's volume
//!   is looked at on the host.
//! - **Nothing left.** Between runs, processes, sandboxes and pod cgroups are gone; in the end also the
//!   private containerd, its network and every folder, whatever has gone wrong.
//!
//! `cargo xtask bench` builds and runs it.

#![allow(clippy::disallowed_methods, reason = "a panic of a task shows on the terminal")]

mod agent;
mod api;
mod api_figures;
mod capture;
mod cgroups;
mod cluster;
mod deletions;
mod disk;
mod edits;
mod figures;
mod floor;
mod host_files;
mod pod_list;
mod pods;
mod progress;
mod proxy;
mod run;
mod runtime;
mod usage;
mod volume_figures;
mod volumes;
mod watch;

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::Parser;
use keelson_testkit::Scratch;
use tokio::signal::unix::{SignalKind, signal};

use crate::progress::Progress;
use crate::run::Plan;

/// Measures the agent against the same requests straight at containerd.
#[derive(Debug, Parser)]
#[command(name = "keelson-bench", version)]
struct Arguments {
    /// Pods
    #[arg(short, long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=1000))]
    n: u32,
    /// Print one line of JSON instead of the table
    #[arg(long)]
    json: bool,
    /// Length of an idle window, in which CPU time is counted
    #[arg(long, value_name = "SECONDS", default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..))]
    idle_seconds: u64,
    /// Measure only how long so many edits of ConfigMaps take through an API server to the files of N pods
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..), conflicts_with_all = ["flood", "idle_seconds", "no_idle", "rounds"])]
    edits: Option<u32>,
    /// Measure only how long N pods take to go that are deleted through an API server at once
    #[arg(long, conflicts_with_all = ["edits", "flood", "idle_seconds", "no_idle"])]
    deletions: bool,
    /// Measure only volumes: N pods with projected ones, and pods with claims of a CSI driver
    #[arg(long, conflicts_with_all = ["deletions", "edits", "flood", "idle_seconds", "no_idle"])]
    volumes: bool,
    /// Leave the idle windows out
    #[arg(long)]
    no_idle: bool,
    /// Measure beside a container that writes its log as fast as the machine lets it; only how pods come up and go
    #[arg(long)]
    flood: bool,
    /// Keep all files on a fresh ext4 with a journal instead of the machine's own filesystem
    #[arg(long)]
    own_disk: bool,
    /// Runs of the agent and of the floor, in turns
    #[arg(long, value_name = "COUNT", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=99))]
    rounds: u32,
}

fn main() -> ExitCode {
    match measure(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn measure(arguments: &Arguments) -> anyhow::Result<()> {
    let plan = Plan {
        pods: usize::try_from(arguments.n)?,
        rounds: usize::try_from(arguments.rounds)?,
        idle: (!arguments.no_idle).then(|| Duration::from_secs(arguments.idle_seconds)),
        flood: arguments.flood,
    };
    let progress = Progress::start();
    // Outlives the runtime: what a cancelled start still makes in the folder ends before the folder does.
    let scratch = Scratch::new()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("cannot start threads")?;
    let folder = match arguments.own_disk {
        true => disk::mount_fresh(scratch.path())?,
        false => scratch.path().to_owned(),
    };
    let result = runtime.block_on(async {
        tokio::select! {
            // Dropping the run ends and removes everything that it has started.
            result = measured(&folder, &plan, arguments, &progress) => result,
            result = interrupted() => match result {
                Ok(name) => bail!("ended by {name}; everything was removed"),
                Err(error) => Err(error),
            },
        }
    });
    drop(runtime);
    let printed = result?;
    match arguments.json {
        true => println!("{}", printed.json),
        false => print!("{}", printed.table),
    }
    Ok(())
}

/// What was measured, in both forms.
struct Printed {
    json: String,
    table: String,
}

async fn measured(
    folder: &Path,
    plan: &Plan,
    arguments: &Arguments,
    progress: &Progress,
) -> anyhow::Result<Printed> {
    if arguments.deletions {
        let deletions = deletions::measure(folder, plan.pods, plan.rounds, progress).await?;
        return Ok(Printed { json: deletions.json(), table: deletions.table() });
    }
    if arguments.volumes {
        let volumes = volumes::measure(folder, plan.pods, plan.rounds, progress).await?;
        return Ok(Printed { json: volumes.json(), table: volumes.table() });
    }
    if let Some(edits) = arguments.edits {
        let edits = edits::measure(folder, plan.pods, usize::try_from(edits)?, progress).await?;
        return Ok(Printed { json: edits.json(), table: edits.table() });
    }
    let report = run::run(folder, plan, progress).await?;
    Ok(Printed { json: report.json(), table: report.table() })
}

/// Waits for a signal that asks us to end; returns its name.
async fn interrupted() -> anyhow::Result<&'static str> {
    let listen = |kind| signal(kind).context("cannot listen to signals");
    let mut interrupt = listen(SignalKind::interrupt())?;
    let mut terminate = listen(SignalKind::terminate())?;
    let mut hang_up = listen(SignalKind::hangup())?;
    // Each arm only waits, so dropping the others loses nothing.
    Ok(tokio::select! {
        _ = interrupt.recv() => "SIGINT",
        _ = terminate.recv() => "SIGTERM",
        _ = hang_up.recv() => "SIGHUP",
    })
}
