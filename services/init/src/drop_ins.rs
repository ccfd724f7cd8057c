//! The files of `--config-dir` (node-and-api.md §2.4).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use keelson_init_core::{Document, Level, Note};

use crate::yaml::{self, ReadError};

/// The extension of the drop-in files.
const EXTENSION: &str = "conf";

/// Why the folder cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("failed to walk through kubelet dropin directory {folder:?}")]
pub(crate) struct DropInError {
    folder: PathBuf,
    source: ReadCause,
}

#[derive(Debug, thiserror::Error)]
enum ReadCause {
    #[error("cannot read {}", .0.display())]
    Folder(PathBuf, #[source] io::Error),
    #[error("failed to load kubelet dropin file, path: {}", .0.display())]
    File(PathBuf, #[source] ReadError),
}

/// The documents in the folder and its subfolders in the order of their paths, and the files that are ignored for their
/// names.
///
/// # Errors
/// The folder or files cannot be read or are not a YAML or JSON map; one error each.
pub(crate) fn read(folder: &Path) -> Result<(Vec<Document>, Vec<PathBuf>), Vec<DropInError>> {
    let at_folder = |source| DropInError { folder: folder.to_owned(), source };
    let mut files = Vec::new();
    walk(folder, &mut files).map_err(|(path, error)| vec![at_folder(ReadCause::Folder(path, error))])?;
    files.sort_unstable();
    let (files, ignored): (Vec<PathBuf>, Vec<PathBuf>) =
        files.into_iter().partition(|path| path.extension().is_some_and(|extension| extension == EXTENSION));
    let (mut documents, mut errors) = (Vec::new(), Vec::new());
    for path in files {
        match yaml::read("--config-dir", &path) {
            Ok(document) => documents.push(document),
            Err(error) => errors.push(at_folder(ReadCause::File(path, error))),
        }
    }
    if errors.is_empty() { Ok((documents, ignored)) } else { Err(errors) }
}

/// The drop-in files that can be listed now.
pub(crate) fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    // Read errors are reported by `read`.
    let _ = walk(folder, &mut files);
    files.retain(|path| path.extension().is_some_and(|extension| extension == EXTENSION));
    files.sort_unstable();
    files
}

/// The note about ignored files.
pub(crate) fn ignored_note(ignored: &[PathBuf]) -> Option<Note> {
    let names: Vec<String> = ignored.iter().map(|path| path.display().to_string()).collect();
    let list = names.join(", ");
    let text = format!("files of --config-dir whose names do not end in .{EXTENSION} are ignored: {list}");
    (!names.is_empty()).then(|| Note::new(Level::Info, text))
}

fn walk(folder: &Path, files: &mut Vec<PathBuf>) -> Result<(), (PathBuf, io::Error)> {
    let at = |path: &Path| {
        let path = path.to_owned();
        move |error| (path, error)
    };
    for entry in fs::read_dir(folder).map_err(at(folder))? {
        let entry = entry.map_err(at(folder))?;
        let path = entry.path();
        // A link to a folder counts as an unreadable file, as for a kubelet; following it could loop forever.
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
    fn drop_ins_are_read_in_path_order_and_other_files_ignored() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("20-more")).unwrap();
        for (name, pods) in [("90-z.conf", 3), ("10-a.conf", 1), ("20-more/x.conf", 2)] {
            fs::write(dir.path().join(name), format!("maxPods: {pods}\n")).unwrap();
        }
        fs::write(dir.path().join("20-more/x.conf.bak"), ": no yaml").unwrap();
        let (documents, ignored) = read(dir.path()).unwrap();
        let pods: Vec<i64> = documents.iter().map(|d| d.root["maxPods"].as_i64().unwrap()).collect();
        assert_eq!(pods, [1, 2, 3]);
        assert!(ignored_note(&ignored).unwrap().text.ends_with("20-more/x.conf.bak"));
        assert_eq!(ignored_note(&[]), None);
    }

    #[test]
    fn unreadable_drop_ins_are_reported() {
        let errors_of =
            |folder: &Path| read(folder).unwrap_err().iter().map(|error| chain(error)).collect::<Vec<_>>();
        let text = errors_of(Path::new("/nonexistent.d")).remove(0);
        assert!(
            text.starts_with("failed to walk through kubelet dropin directory \"/nonexistent.d\": "),
            "{text}"
        );
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("a.conf"), "").unwrap();
        fs::write(dir.path().join("b.conf"), "maxPods: 1\n").unwrap();
        fs::write(dir.path().join("c.conf"), "maxPods: [").unwrap();
        let texts = errors_of(dir.path());
        assert_eq!(texts.len(), 2, "{texts:?}");
        for (text, name) in texts.iter().zip(["a.conf", "c.conf"]) {
            assert!(
                text.contains("failed to load kubelet dropin file, path: ") && text.contains(name),
                "{text}"
            );
        }
    }
}
