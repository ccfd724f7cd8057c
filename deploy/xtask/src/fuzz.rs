//! `cargo xtask fuzz`.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use clap::Args;
use keelson_testkit::find_file;

use crate::{cargo, run_command, workspace};

/// The programs in `fuzz/fuzz_targets`.
const TARGETS: [&str; 5] = ["manifest", "pod", "quantity", "cri_log", "mountinfo"];

/// A single input may take no longer, and no more memory.
const INPUT_LIMITS: [&str; 2] = ["-timeout=10", "-rss_limit_mb=1024"];

/// Longer inputs find nothing that shorter ones do not, and a kept corpus of them would be large.
const MAX_LENGTH: &str = "-max_len=2048";

/// What a person has written into a corpus begins so, and is never removed.
const SEED: &str = "seed-";

/// What is run, and for how long.
#[derive(Debug, Args)]
pub struct FuzzArguments {
    /// Targets; all of them when none is named
    #[arg(value_parser = TARGETS)]
    targets: Vec<String>,
    /// How long each target runs
    #[arg(long, default_value_t = 600)]
    seconds: u64,
    /// Afterwards make the kept corpus the smallest one that reaches all that was reached
    #[arg(long)]
    keep: bool,
}

/// Where the inputs of one target are.
struct Corpus {
    /// In the repository.
    kept: PathBuf,
    /// What this machine has found.
    found: PathBuf,
}

/// Runs the targets one after the other, at the lowest priority.
pub fn run(arguments: &FuzzArguments) -> anyhow::Result<()> {
    check_tools()?;
    // The same releases of what we link are fuzzed as are shipped; cargo adds the fuzzer's own to the copy.
    let (lock, copy) = (workspace().join("Cargo.lock"), workspace().join("fuzz/Cargo.lock"));
    fs::copy(&lock, &copy)
        .with_context(|| format!("cannot copy {} to {}", lock.display(), copy.display()))?;
    let named = arguments.targets.iter().map(String::as_str);
    let targets: Vec<&str> = if arguments.targets.is_empty() { TARGETS.to_vec() } else { named.collect() };
    run_command(cargo_fuzz("build").args(&targets[..usize::from(targets.len() == 1)]))?;
    for target in targets {
        let corpus = Corpus::of(target)?;
        let seconds = format!("-max_total_time={}", arguments.seconds);
        let mut command = fuzzer(target, &[&corpus.found, &corpus.kept]);
        command.args([&seconds, MAX_LENGTH, "-print_final_stats=1"]).args(INPUT_LIMITS);
        let dictionary = workspace().join(format!("fuzz/dictionaries/{target}.dict"));
        if dictionary.is_file() {
            command.arg(format!("-dict={}", dictionary.display()));
        }
        run_command(&mut command).with_context(|| {
            format!("{target} has failed; the input is in fuzz/artifacts/{target}, and joins the corpus once mended")
        })?;
        if arguments.keep {
            corpus.keep(target)?;
        }
    }
    Ok(())
}

fn check_tools() -> anyhow::Result<()> {
    let installed = cargo().args(["fuzz", "--version"]).output().is_ok_and(|output| output.status.success());
    ensure!(installed, "cargo-fuzz is missing; install it with: cargo install --locked cargo-fuzz");
    let compiler = find_file("c++")
        .context("libFuzzer is built with a C++ compiler; install it with: apt-get install -y g++");
    compiler.map(drop)
}

/// `cargo fuzz <task>` as it works on a stable toolchain: the coverage is a pass of LLVM, a sanitizer would not be
/// stable and finds nothing in code without `unsafe`.
fn cargo_fuzz(task: &str) -> Command {
    let mut command = cargo();
    command.args(["fuzz", task, "--fuzz-dir", "fuzz", "--sanitizer", "none"]);
    command.arg("--target-dir").arg(workspace().join("target/fuzz"));
    command
}

/// The program of a target on folders of inputs, the first of which takes new ones.
fn fuzzer(target: &str, folders: &[&Path]) -> Command {
    let mut fuzz = cargo_fuzz("run");
    fuzz.arg(target).args(folders).arg("--");
    let mut command = Command::new("nice");
    command.current_dir(workspace()).args(["-n", "19"]).arg(fuzz.get_program()).args(fuzz.get_args());
    command
}

impl Corpus {
    fn of(target: &str) -> anyhow::Result<Self> {
        let kept = workspace().join("fuzz/corpus").join(target);
        let found = workspace().join("target/fuzz/found").join(target);
        fs::create_dir_all(&found).with_context(|| format!("cannot make {}", found.display()))?;
        Ok(Self { kept, found })
    }

    /// Leaves in the repository the seeds and the smallest set of other inputs that reaches all code that is reached.
    fn keep(&self, target: &str) -> anyhow::Result<()> {
        let merged = self.found.with_extension("merged");
        let _ = fs::remove_dir_all(&merged);
        fs::create_dir_all(&merged).with_context(|| format!("cannot make {}", merged.display()))?;
        // How often code is reached makes a large set; which code is reached is enough for a replay.
        let mut merge = fuzzer(target, &[&merged, &self.kept, &self.found]);
        run_command(merge.args(["-set_cover_merge=1", "-use_counters=0", MAX_LENGTH]).args(INPUT_LIMITS))?;
        let seeds = contents(&self.kept, |name| name.starts_with(SEED))?;
        for (name, _) in contents(&self.kept, |name| !name.starts_with(SEED))? {
            fs::remove_file(self.kept.join(&name)).with_context(|| format!("cannot remove {name}"))?;
        }
        let known: BTreeSet<Vec<u8>> = seeds.into_iter().map(|(_, bytes)| bytes).collect();
        for (name, bytes) in contents(&merged, |_| true)? {
            if !known.contains(&bytes) {
                fs::write(self.kept.join(&name), bytes).with_context(|| format!("cannot write {name}"))?;
            }
        }
        fs::remove_dir_all(&merged).with_context(|| format!("cannot remove {}", merged.display()))
    }
}

/// Names and bytes of the files of a folder.
fn contents(folder: &Path, wanted: impl Fn(&str) -> bool) -> anyhow::Result<Vec<(String, Vec<u8>)>> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut found = Vec::new();
    for entry in entries {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
        if wanted(&name) {
            found.push((name, fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_corpus_has_its_target_and_the_other_way_round() {
        let names = |folder: &str| -> BTreeSet<String> {
            let entries = fs::read_dir(workspace().join("fuzz").join(folder)).unwrap();
            entries.map(|e| e.unwrap().path().file_stem().unwrap().to_string_lossy().into_owned()).collect()
        };
        let wanted: BTreeSet<String> = TARGETS.map(str::to_owned).into();
        assert_eq!(names("corpus"), wanted);
        assert_eq!(names("fuzz_targets"), wanted);
        assert!(names("dictionaries").is_subset(&wanted));
    }
}
