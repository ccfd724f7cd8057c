//! `cargo xtask bench`: builds and runs the benchmark.

use std::convert::Infallible;
use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use anyhow::Context as _;
use clap::Args;

use crate::{cargo, packages, quickstart, require_root, run_command};

/// The benchmark. It is a separate program because it needs gRPC, which xtask must be built without.
const PROGRAM: &str = "keelson-bench";

/// The CSI driver of the volume benchmark.
const CSI_DRIVER: &str = "csi-test-driver";

/// The arguments of `cargo xtask bench`, which are passed on to the benchmark.
#[derive(Debug, Args)]
pub struct BenchArguments {
    /// Number of pods [default: 50]
    #[arg(short, long, value_name = "N")]
    n: Option<u32>,
    /// Print one line of JSON instead of the table
    #[arg(long)]
    json: bool,
    /// Length of each idle window in which CPU time is counted [default: 120]
    #[arg(long, value_name = "SECONDS")]
    idle_seconds: Option<u64>,
    /// Measure only the time from COUNT edits of ConfigMaps at an API server to the files of N pods
    #[arg(long, value_name = "COUNT")]
    edits: Option<u32>,
    /// Measure only the time until N pods that are deleted at once at an API server are gone
    #[arg(long)]
    deletions: bool,
    /// Measure only volumes: N pods with projected volumes, and pods with claims of a CSI driver
    #[arg(long)]
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
    /// Number of alternating runs of the floor and the agent [default: 3]
    #[arg(long, value_name = "COUNT")]
    rounds: Option<u32>,
}

impl BenchArguments {
    /// The arguments for the benchmark's command line.
    fn to_command_line(&self) -> Vec<OsString> {
        let mut arguments: Vec<OsString> = Vec::new();
        let mut add = |flag: &str, value: Option<String>| {
            arguments.push(flag.into());
            arguments.extend(value.map(OsString::from));
        };
        if let Some(n) = self.n {
            add("-n", Some(n.to_string()));
        }
        if self.json {
            add("--json", None);
        }
        if let Some(seconds) = self.idle_seconds {
            add("--idle-seconds", Some(seconds.to_string()));
        }
        if let Some(edits) = self.edits {
            add("--edits", Some(edits.to_string()));
        }
        if self.deletions {
            add("--deletions", None);
        }
        if self.volumes {
            add("--volumes", None);
        }
        if self.no_idle {
            add("--no-idle", None);
        }
        if self.flood {
            add("--flood", None);
        }
        if self.own_disk {
            add("--own-disk", None);
        }
        if let Some(rounds) = self.rounds {
            add("--rounds", Some(rounds.to_string()));
        }
        arguments
    }
}

/// Builds the agent and the benchmark, then replaces this process by the benchmark, so that it receives Ctrl-C itself.
///
/// # Errors
/// This process does not run as root, a build fails, or the benchmark cannot be run.
pub fn run(arguments: &BenchArguments) -> anyhow::Result<Infallible> {
    require_root("bench")?;
    packages::install_to_run()?;
    let folder = quickstart::build("release")?;
    // A separate build: a common one would enable the benchmark's features in the agent, too.
    run_command(cargo().args(["build", "--release", "--locked", "--package", PROGRAM]))?;
    if arguments.volumes {
        let bin = ["--package", "keelson-tests", "--bin", CSI_DRIVER];
        run_command(cargo().args(["build", "--release", "--locked"]).args(bin))?;
    }
    let program = folder.join(PROGRAM);
    let mut command = Command::new(&program);
    command.args(arguments.to_command_line()).env("KEELSON_BIN_DIR", &folder);
    Err(command.exec()).with_context(|| format!("cannot run {}", program.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_given_arguments_are_passed_to_the_benchmark() {
        let none = BenchArguments {
            n: None,
            json: false,
            idle_seconds: None,
            edits: None,
            deletions: false,
            volumes: false,
            no_idle: false,
            flood: false,
            own_disk: false,
            rounds: None,
        };
        assert_eq!(none.to_command_line(), Vec::<OsString>::new());
        let all = BenchArguments {
            n: Some(1),
            json: true,
            idle_seconds: Some(9),
            edits: Some(7),
            deletions: true,
            volumes: true,
            no_idle: true,
            flood: true,
            own_disk: true,
            rounds: Some(5),
        };
        let expected = "-n 1 --json --idle-seconds 9 --edits 7 --deletions --volumes --no-idle --flood --own-disk --rounds 5";
        assert_eq!(all.to_command_line(), expected.split(' ').collect::<Vec<_>>());
    }
}
