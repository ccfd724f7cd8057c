//! The files of `--config-dir` (node-and-api.md §2.4).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use keelson_init_core::{Document, Level, Note};

use crate::yaml::{self, ReadError};

/// The ending of the files that count.
const ENDING: &str = "conf";

/// Why the folder cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("failed to walk through kubelet dropin directory {folder:?}")]
pub(crate) struct DropInError {
    folder: PathBuf,
    source: Cause,
}

#[derive(Debug, thiserror::Error)]
enum Cause {
    #[error("cannot read {}", .0.display())]
    Folder(PathBuf, #[source] io::Error),
    #[error("failed to load kubelet dropin file, path: {}", .0.display())]
    File(PathBuf, #[source] ReadError),
}

/// The documents in the folder and below it in the order of their paths, and the files that are passed over for their
/// names.
///
/// # Errors
/// The folder or files cannot be read, or are no map of YAML or JSON; each of them is told.
pub(crate) fn read(folder: &Path) -> Result<(Vec<Document>, Vec<PathBuf>), Vec<DropInError>> {
    let at_folder = |source| DropInError { folder: folder.to_owned(), source };
    let mut files = Vec::new();
    walk(folder, &mut files).map_err(|(path, error)| vec![at_folder(Cause::Folder(path, error))])?;
    files.sort_unstable();
    let (files, passed_over): (Vec<PathBuf>, Vec<PathBuf>) =
        files.into_iter().partition(|path| path.extension().is_some_and(|ending| ending == ENDING));
    let (mut documents, mut errors) = (Vec::new(), Vec::new());
    for path in files {
        match yaml::read("--config-dir", &path) {
            Ok(document) => documents.push(document),
            Err(error) => errors.push(at_folder(Cause::File(path, error))),
        }
    }
    if errors.is_empty() { Ok((documents, passed_over)) } else { Err(errors) }
}

/// The files that count, as far as the folder can be read now.
pub(crate) fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    // What cannot be read is told when it is.
    let _ = walk(folder, &mut files);
    files.retain(|path| path.extension().is_some_and(|ending| ending == ENDING));
    files.sort_unstable();
    files
}

/// What to say of the files that are passed over.
pub(crate) fn note(passed_over: &[PathBuf]) -> Option<Note> {
    let names: Vec<String> = passed_over.iter().map(|path| path.display().to_string()).collect();
    (!names.is_empty()).then(|| Note {
        level: Level::Info,
        text: format!(
            "files of --config-dir whose names do not end in .{ENDING} are passed over: {}",
            names.join(", ")
        ),
    })
}

fn walk(folder: &Path, files: &mut Vec<PathBuf>) -> Result<(), (PathBuf, io::Error)> {
    let at = |path: &Path| {
        let path = path.to_owned();
        move |error| (path, error)
    };
    for entry in fs::read_dir(folder).map_err(at(folder))? {
        let entry = entry.map_err(at(folder))?;
        let path = entry.path();
        // A link to a folder is a file that cannot be read, as for a kubelet; it is not followed round in circles.
        if entry.file_type().map_err(at(&path))?.is_dir() {
            walk(&path, files)?;
        } else {
            files.push(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use keelson_service_kit::status::chain;

    #[test]
    fn files_are_read_in_the_order_of_their_paths_and_others_are_passed_over() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("20-more")).unwrap();
        for (name, pods) in [("90-z.conf", 3), ("10-a.conf", 1), ("20-more/x.conf", 2)] {
            fs::write(dir.path().join(name), format!("maxPods: {pods}\n")).unwrap();
        }
        fs::write(dir.path().join("20-more/x.conf.bak"), ": no yaml").unwrap();
        let (documents, passed_over) = read(dir.path()).unwrap();
        let pods: Vec<i64> = documents.iter().map(|d| d.root["maxPods"].as_i64().unwrap()).collect();
        assert_eq!(pods, [1, 2, 3]);
        assert!(note(&passed_over).unwrap().text.ends_with("20-more/x.conf.bak"));
        assert_eq!(note(&[]), None);
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let told =
            |folder: &Path| read(folder).unwrap_err().iter().map(|error| chain(error)).collect::<Vec<_>>();
        let text = told(Path::new("/nonexistent.d")).remove(0);
        assert!(
            text.starts_with("failed to walk through kubelet dropin directory \"/nonexistent.d\": "),
            "{text}"
        );
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("a.conf"), "").unwrap();
        fs::write(dir.path().join("b.conf"), "maxPods: 1\n").unwrap();
        fs::write(dir.path().join("c.conf"), "maxPods: [").unwrap();
        let texts = told(dir.path());
        assert_eq!(texts.len(), 2, "{texts:?}");
        for (text, name) in texts.iter().zip(["a.conf", "c.conf"]) {
            assert!(
                text.contains("failed to load kubelet dropin file, path: ") && text.contains(name),
                "{text}"
            );
        }
    }
}
