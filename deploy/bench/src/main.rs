//! `keelson-bench`: measures how fast the agent starts and stops pods, and what it costs while it is idle.
//!
//! - **Floor.** A recording proxy between agent and containerd captures the requests for each pod once. Eight workers then send
//!   these requests directly to containerd. No agent on this host can be faster than that.
//! - **Alternating rounds.** Floor and agent take turns, and the figures are medians over the rounds. The agent is stopped while
//!   the floor runs, because it would end pods that it does not know.
//! - **Observed from outside.** A pod is up when its process is in /proc, and gone when it is not. The agent's own status is used
//!   only to measure recovery. Memory is PSS, CPU time is utime + stime.
//! - **`--flood`:** meanwhile, a container writes its log as fast as it can. For the floor it is started directly at containerd,
//!   for the agent it is one more pod, whose log the agent rotates.
//! - **`--own-disk`:** all files are on a fresh filesystem, so that the history of the host's filesystem does not matter.
//! - **`--deletions`** measures instead how long a real API server takes to lose N pods that are deleted at once.
//! - **`--volumes`** measures instead what projected volumes and volumes of a CSI driver cost beyond the driver's own calls.
//! - **`--edits`** measures instead the time from an edit of a ConfigMap at a real API server to the file in a pod's volume.
//! - **Nothing is left behind.** Between runs, processes, sandboxes and pod cgroups are removed; at the end, also after an error,
//!   the private containerd, its network and every folder.
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

/// Compares the agent with the same requests sent directly to containerd.
#[derive(Debug, Parser)]
#[command(name = "keelson-bench", version)]
struct Arguments {
    /// Number of pods
    #[arg(short, long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=1000))]
    n: u32,
    /// Print one line of JSON instead of the table
    #[arg(long)]
    json: bool,
    /// Length of each idle window in which CPU time is counted
    #[arg(long, value_name = "SECONDS", default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..))]
    idle_seconds: u64,
    /// Measure only the time from COUNT edits of ConfigMaps at an API server to the files of N pods
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..), conflicts_with_all = ["flood", "idle_seconds", "no_idle", "rounds"])]
    edits: Option<u32>,
    /// Measure only the time until N pods that are deleted at once at an API server are gone
    #[arg(long, conflicts_with_all = ["edits", "flood", "idle_seconds", "no_idle"])]
    deletions: bool,
    /// Measure only volumes: N pods with projected volumes, and pods with claims of a CSI driver
    #[arg(long, conflicts_with_all = ["deletions", "edits", "flood", "idle_seconds", "no_idle"])]
    volumes: bool,
    /// Skip the idle windows
    #[arg(long)]
    no_idle: bool,
    /// Measure only starts and ends of pods, while a container writes its log as fast as it can
    #[arg(long)]
    flood: bool,
    /// Keep all files on a fresh ext4 with a journal instead of the host's filesystem
    #[arg(long)]
    own_disk: bool,
    /// Number of alternating runs of the floor and the agent
    #[arg(long, value_name = "COUNT", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=99))]
    rounds: u32,
}

fn main() -> ExitCode {
    match run_benchmark(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Measures and prints the result; ends early on a signal.
fn run_benchmark(arguments: &Arguments) -> anyhow::Result<()> {
    let plan = Plan {
        pods: usize::try_from(arguments.n)?,
        rounds: usize::try_from(arguments.rounds)?,
        idle: (!arguments.no_idle).then(|| Duration::from_secs(arguments.idle_seconds)),
        flood: arguments.flood,
    };
    let progress = Progress::start();
    // Dropped after the runtime: a cancelled start may still create files in the folder until the runtime has ended.
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
            // Dropping the measurement ends and removes everything that it has started.
            result = measure(&folder, &plan, arguments, &progress) => result,
            result = wait_for_signal() => match result {
                Ok(name) => bail!("ended by {name}; everything was removed"),
                Err(error) => Err(error),
            },
        }
    });
    drop(runtime);
    let output = result?;
    match arguments.json {
        true => println!("{}", output.json),
        false => print!("{}", output.table),
    }
    Ok(())
}

/// The figures, in both formats.
struct Output {
    json: String,
    table: String,
}

/// Runs the benchmark that the arguments select.
async fn measure(
    folder: &Path,
    plan: &Plan,
    arguments: &Arguments,
    progress: &Progress,
) -> anyhow::Result<Output> {
    if arguments.deletions {
        let deletions = deletions::measure(folder, plan.pods, plan.rounds, progress).await?;
        return Ok(Output { json: deletions.json(), table: deletions.table() });
    }
    if arguments.volumes {
        let volumes = volumes::measure(folder, plan.pods, plan.rounds, progress).await?;
        return Ok(Output { json: volumes.json(), table: volumes.table() });
    }
    if let Some(edits) = arguments.edits {
        let edits = edits::measure(folder, plan.pods, usize::try_from(edits)?, progress).await?;
        return Ok(Output { json: edits.json(), table: edits.table() });
    }
    let report = run::run(folder, plan, progress).await?;
    Ok(Output { json: report.json(), table: report.table() })
}

/// Waits for a signal that asks this process to end; returns its name.
async fn wait_for_signal() -> anyhow::Result<&'static str> {
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
