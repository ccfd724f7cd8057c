//! Every input that a fuzzer has kept, once more on the toolchain at hand.

#![allow(clippy::unwrap_used)] // A test fails where it stands.

use std::collections::BTreeMap;
use std::fs;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};

use keelson_fuzz_properties::{Met, TARGETS};

/// More than this does not belong into a repository.
const MAX_CORPUS: u64 = 512 << 10;

fn fuzz() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

#[test]
fn every_input_of_the_corpora_keeps_its_promises() {
    let mut failed = Vec::new();
    for (name, check) in TARGETS {
        let mut met: BTreeMap<Met, usize> = BTreeMap::new();
        for file in files(&fuzz().join("corpus").join(name)) {
            let bytes = fs::read(&file).unwrap();
            match catch_unwind(|| check(&bytes)) {
                Ok(outcome) => *met.entry(outcome).or_default() += 1,
                Err(_) => failed.push(file),
            }
        }
        println!("{name}: {met:?}");
        for outcome in [Met::Good, Met::Refused] {
            assert!(met.contains_key(&outcome), "no input of {name} is {outcome:?}: {met:?}");
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

#[test]
fn the_corpora_are_small_and_each_belongs_to_a_target() {
    let corpus = fuzz().join("corpus");
    let folders = files(&corpus);
    let mut wanted: Vec<PathBuf> = TARGETS.iter().map(|(name, _)| corpus.join(name)).collect();
    wanted.sort();
    assert_eq!(folders, wanted);
    let size: u64 = folders.iter().flat_map(|f| files(f)).map(|f| fs::metadata(f).unwrap().len()).sum();
    println!("{size} bytes");
    assert!(size <= MAX_CORPUS, "{size} bytes; `cargo xtask fuzz --keep` leaves out what adds nothing");
}

#[test]
fn every_target_has_its_program() {
    let folder = fuzz().join("fuzz_targets");
    let manifest = fs::read_to_string(fuzz().join("Cargo.toml")).unwrap();
    for (name, _) in TARGETS {
        let program = fs::read_to_string(folder.join(format!("{name}.rs"))).unwrap();
        assert!(program.contains(&format!("{name}::check")), "{program}");
        assert!(manifest.contains(&format!("name = \"{name}\"")), "{name}");
    }
    assert_eq!(files(&folder).len(), TARGETS.len());
}
