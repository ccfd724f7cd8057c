//! `cargo xtask fuzz`: runs the fuzz targets and maintains their corpora.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use clap::Args;
use keelson_testkit::find_file;

use crate::{cargo, run_command, workspace};

/// The fuzz targets: the programs in `fuzz/fuzz_targets`.
const TARGETS: [&str; 5] = ["manifest", "pod", "quantity", "cri_log", "mountinfo"];

/// libFuzzer's limits for one input: seconds and MiB.
const INPUT_LIMITS: [&str; 2] = ["-timeout=10", "-rss_limit_mb=1024"];

/// libFuzzer's limit for the length of an input, in bytes. Longer inputs find nothing new and would make the corpus large.
const MAX_LENGTH: &str = "-max_len=2048";

/// The prefix of the names of handwritten inputs, which are never removed from a corpus.
const SEED_PREFIX: &str = "seed-";

/// The arguments of `cargo xtask fuzz`.
#[derive(Debug, Args)]
pub struct FuzzArguments {
    /// Targets to run [default: all]
    #[arg(value_parser = TARGETS)]
    targets: Vec<String>,
    /// How long to run each target, in seconds
    #[arg(long, default_value_t = 600)]
    seconds: u64,
    /// Afterwards replace the corpus in the repository by the smallest one with the same coverage
    #[arg(long)]
    keep: bool,
}

/// The folders with the inputs of one target.
struct Corpus {
    /// The corpus in the repository.
    committed: PathBuf,
    /// The inputs that runs on this machine have found.
    local: PathBuf,
}

/// Runs the targets one after the other, at the lowest priority.
pub fn run(arguments: &FuzzArguments) -> anyhow::Result<()> {
    check_tools()?;
    // Fuzz the dependency versions that are shipped. Cargo adds the fuzzer's own dependencies to the copy.
    let (lock, copy) = (workspace().join("Cargo.lock"), workspace().join("fuzz/Cargo.lock"));
    fs::copy(&lock, &copy)
        .with_context(|| format!("cannot copy {} to {}", lock.display(), copy.display()))?;
    let requested = arguments.targets.iter().map(String::as_str);
    let targets: Vec<&str> =
        if arguments.targets.is_empty() { TARGETS.to_vec() } else { requested.collect() };
    run_command(cargo_fuzz("build").args(&targets[..usize::from(targets.len() == 1)]))?;
    for target in targets {
        let corpus = Corpus::of(target)?;
        let seconds = format!("-max_total_time={}", arguments.seconds);
        let mut command = fuzzer(target, &[&corpus.local, &corpus.committed]);
        command.args([&seconds, MAX_LENGTH, "-print_final_stats=1"]).args(INPUT_LIMITS);
        let dictionary = workspace().join(format!("fuzz/dictionaries/{target}.dict"));
        if dictionary.is_file() {
            command.arg(format!("-dict={}", dictionary.display()));
        }
        run_command(&mut command).with_context(|| {
            format!(
                "{target} has failed with the input in fuzz/artifacts/{target}; fix the bug and add that input to \
                 fuzz/corpus/{target}"
            )
        })?;
        if arguments.keep {
            corpus.minimize(target)?;
        }
    }
    Ok(())
}

fn check_tools() -> anyhow::Result<()> {
    let installed = cargo().args(["fuzz", "--version"]).output().is_ok_and(|output| output.status.success());
    ensure!(installed, "cargo-fuzz is missing; install it with: cargo install --locked cargo-fuzz");
    let compiler = find_file("c++")
        .context("libFuzzer needs a C++ compiler to be built; install one with: apt-get install -y g++");
    compiler.map(drop)
}

/// A command that runs `cargo fuzz <task>` without a sanitizer, so that a stable toolchain suffices: coverage is an LLVM pass,
/// but sanitizers need nightly and find nothing in code without `unsafe`.
fn cargo_fuzz(task: &str) -> Command {
    let mut command = cargo();
    command.args(["fuzz", task, "--fuzz-dir", "fuzz", "--sanitizer", "none"]);
    command.arg("--target-dir").arg(workspace().join("target/fuzz"));
    command
}

/// A command that runs a target's program on folders of inputs. New inputs are written into the first folder.
fn fuzzer(target: &str, folders: &[&Path]) -> Command {
    let mut fuzz = cargo_fuzz("run");
    fuzz.arg(target).args(folders).arg("--");
    let mut command = Command::new("nice");
    command.current_dir(workspace()).args(["-n", "19"]).arg(fuzz.get_program()).args(fuzz.get_args());
    command
}

impl Corpus {
    fn of(target: &str) -> anyhow::Result<Self> {
        let committed = workspace().join("fuzz/corpus").join(target);
        let local = workspace().join("target/fuzz/found").join(target);
        fs::create_dir_all(&local).with_context(|| format!("cannot make {}", local.display()))?;
        Ok(Self { committed, local })
    }

    /// Reduces the committed corpus to the seeds and the smallest set of other inputs, local ones included, that covers the
    /// same code.
    fn minimize(&self, target: &str) -> anyhow::Result<()> {
        let merged = self.local.with_extension("merged");
        let _ = fs::remove_dir_all(&merged);
        fs::create_dir_all(&merged).with_context(|| format!("cannot make {}", merged.display()))?;
        // Counting how often code is reached would keep many inputs; for a replay, the reached code is enough.
        let mut merge = fuzzer(target, &[&merged, &self.committed, &self.local]);
        run_command(merge.args(["-set_cover_merge=1", "-use_counters=0", MAX_LENGTH]).args(INPUT_LIMITS))?;
        let seeds = read_files(&self.committed, |name| name.starts_with(SEED_PREFIX))?;
        for (name, _) in read_files(&self.committed, |name| !name.starts_with(SEED_PREFIX))? {
            fs::remove_file(self.committed.join(&name)).with_context(|| format!("cannot remove {name}"))?;
        }
        let seeds: BTreeSet<Vec<u8>> = seeds.into_iter().map(|(_, bytes)| bytes).collect();
        for (name, bytes) in read_files(&merged, |_| true)? {
            if !seeds.contains(&bytes) {
                fs::write(self.committed.join(&name), bytes)
                    .with_context(|| format!("cannot write {name}"))?;
            }
        }
        fs::remove_dir_all(&merged).with_context(|| format!("cannot remove {}", merged.display()))
    }
}

/// The names and contents of the files in a folder whose name `wanted` accepts.
fn read_files(folder: &Path, wanted: impl Fn(&str) -> bool) -> anyhow::Result<Vec<(String, Vec<u8>)>> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut files = Vec::new();
    for entry in entries {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
        if wanted(&name) {
            files.push((name, fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?));
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_target_has_a_corpus_and_each_dictionary_a_target() {
        let names = |folder: &str| -> BTreeSet<String> {
            let entries = fs::read_dir(workspace().join("fuzz").join(folder)).unwrap();
            entries.map(|e| e.unwrap().path().file_stem().unwrap().to_string_lossy().into_owned()).collect()
        };
        let targets: BTreeSet<String> = TARGETS.map(str::to_owned).into();
        assert_eq!(names("corpus"), targets);
        assert_eq!(names("fuzz_targets"), targets);
        assert!(names("dictionaries").is_subset(&targets));
    }
}
