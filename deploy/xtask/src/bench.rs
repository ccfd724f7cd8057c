//! `cargo xtask bench`.

use std::convert::Infallible;
use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use anyhow::Context as _;
use clap::Args;

use crate::{cargo, packages, quickstart, require_root, run_command};

/// The program that measures; it speaks gRPC, so it cannot be a part of this one.
const PROGRAM: &str = "keelson-bench";

/// The CSI driver whose volumes are measured.
const CSI_DRIVER: &str = "csi-test-driver";

/// What is measured; passed on to the program.
#[derive(Debug, Args)]
pub struct BenchArguments {
    /// Pods [default: 50]
    #[arg(short, long, value_name = "N")]
    n: Option<u32>,
    /// Print one line of JSON instead of the table
    #[arg(long)]
    json: bool,
    /// Length of an idle window, in which CPU time is counted [default: 120]
    #[arg(long, value_name = "SECONDS")]
    idle_seconds: Option<u64>,
    /// Measure only how long so many edits of ConfigMaps take through an API server to the files of N pods
    #[arg(long, value_name = "COUNT")]
    edits: Option<u32>,
    /// Measure only how long N pods take to go that are deleted through an API server at once
    #[arg(long)]
    deletions: bool,
    /// Measure only volumes: N pods with projected ones, and pods with claims of a CSI driver
    #[arg(long)]
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
    /// Runs of the agent and of the floor, in turns [default: 3]
    #[arg(long, value_name = "COUNT")]
    rounds: Option<u32>,
}

impl BenchArguments {
    fn pass_on(&self) -> Vec<OsString> {
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

/// Builds the agent and the program, and becomes the program, which so gets Ctrl-C itself.
pub fn run(arguments: &BenchArguments) -> anyhow::Result<Infallible> {
    require_root("bench")?;
    packages::install_to_run()?;
    let folder = quickstart::build("release")?;
    // Built apart: in one build its features would be switched on in the agent, too.
    run_command(cargo().args(["build", "--release", "--locked", "--package", PROGRAM]))?;
    if arguments.volumes {
        let bin = ["--package", "keelson-tests", "--bin", CSI_DRIVER];
        run_command(cargo().args(["build", "--release", "--locked"]).args(bin))?;
    }
    let program = folder.join(PROGRAM);
    let mut command = Command::new(&program);
    command.args(arguments.pass_on()).env("KEELSON_BIN_DIR", &folder);
    Err(command.exec()).with_context(|| format!("cannot run {}", program.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_said_is_passed_on() {
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
        assert_eq!(none.pass_on(), Vec::<OsString>::new());
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
        assert_eq!(all.pass_on(), expected.split(' ').collect::<Vec<_>>());
    }
}
