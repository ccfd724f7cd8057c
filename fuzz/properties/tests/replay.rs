//! Checks every input of the corpora in the repository on the current toolchain.

#![allow(clippy::unwrap_used)] // A panic shows where the test fails.

use std::collections::BTreeMap;
use std::fs;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};

use keelson_fuzz_properties::{Outcome, TARGETS};

/// The largest allowed size of all corpora in the repository, in bytes.
const MAX_CORPUS: u64 = 512 << 10;

/// The folder `fuzz`.
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
fn all_properties_hold_for_every_input_of_the_corpora() {
    let mut failed = Vec::new();
    for (name, check) in TARGETS {
        let mut outcomes: BTreeMap<Outcome, usize> = BTreeMap::new();
        for file in files(&fuzz().join("corpus").join(name)) {
            let bytes = fs::read(&file).unwrap();
            match catch_unwind(|| check(&bytes)) {
                Ok(outcome) => *outcomes.entry(outcome).or_default() += 1,
                Err(_) => failed.push(file),
            }
        }
        println!("{name}: {outcomes:?}");
        for outcome in [Outcome::Accepted, Outcome::Rejected] {
            assert!(outcomes.contains_key(&outcome), "no input of {name} is {outcome:?}: {outcomes:?}");
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

#[test]
fn each_target_has_a_corpus_and_all_corpora_together_are_small() {
    let corpus = fuzz().join("corpus");
    let folders = files(&corpus);
    let mut expected: Vec<PathBuf> = TARGETS.iter().map(|(name, _)| corpus.join(name)).collect();
    expected.sort();
    assert_eq!(folders, expected);
    let size: u64 = folders.iter().flat_map(|f| files(f)).map(|f| fs::metadata(f).unwrap().len()).sum();
    println!("{size} bytes");
    assert!(
        size <= MAX_CORPUS,
        "the corpora have {size} bytes; `cargo xtask fuzz --keep` removes inputs that add no coverage"
    );
}

#[test]
fn each_target_has_a_program() {
    let folder = fuzz().join("fuzz_targets");
    let manifest = fs::read_to_string(fuzz().join("Cargo.toml")).unwrap();
    for (name, _) in TARGETS {
        let program = fs::read_to_string(folder.join(format!("{name}.rs"))).unwrap();
        assert!(program.contains(&format!("{name}::check")), "{program}");
        assert!(manifest.contains(&format!("name = \"{name}\"")), "{name}");
    }
    assert_eq!(files(&folder).len(), TARGETS.len());
}
