//! The temporary folder of one `keelson run --once`, with copies of the manifests.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use crate::cmd::manifests::{self, ManifestFile, ObjectKind};
use crate::error::CliError;

/// How long to wait for a manifest to appear.
pub(super) const READ_TIMEOUT: Duration = Duration::from_secs(1);
/// The interval between two attempts to read the manifests.
const READ_INTERVAL: Duration = Duration::from_millis(50);

/// Reads the manifests once they exist.
///
/// # Errors
/// No pod manifest is found within [`READ_TIMEOUT`]: a path does not exist, a folder is empty, or a pipe has no data.
pub(super) fn read(files: &[PathBuf]) -> Result<Vec<ManifestFile>, CliError> {
    let (sender, receiver) = mpsc::sync_channel(1);
    let arguments = files.to_vec();
    // On a thread that is never joined: reading a pipe may block for ever.
    thread::spawn(move || {
        let _ = sender.send(read_until_found(&arguments, Instant::now() + READ_TIMEOUT));
    });
    let given = files.iter().map(|f| f.display().to_string()).collect::<Vec<_>>().join(", ");
    let none = |why: &str| CliError::NotFound {
        what: format!("no pod manifest found in {given} within {} s{why}", READ_TIMEOUT.as_secs()),
        hint: "name a file or a folder with Pod manifests with -f".into(),
    };
    match receiver.recv_timeout(READ_TIMEOUT + READ_INTERVAL * 4) {
        Ok(Ok(files)) => Ok(files),
        Ok(Err(None)) | Err(_) => Err(none("")),
        Ok(Err(Some(error))) => Err(none(&format!(": {error}"))),
    }
}

fn read_until_found(files: &[PathBuf], deadline: Instant) -> Result<Vec<ManifestFile>, Option<CliError>> {
    // Standard input cannot be read again.
    let can_retry = !files.iter().any(|file| file.as_os_str() == "-");
    loop {
        let found = manifests::paths(files)
            .and_then(|paths| paths.iter().map(|path| manifests::read(path)).collect::<Result<Vec<_>, _>>());
        let why = match found {
            Ok(found) if found.iter().any(may_contain_a_pod) => return Ok(found),
            Ok(_) => None,
            Err(error) => Some(error),
        };
        if !can_retry || Instant::now() + READ_INTERVAL > deadline {
            return Err(why);
        }
        thread::sleep(READ_INTERVAL);
    }
}

/// Whether a file may contain a pod. Invalid YAML counts, because pod-config refuses it with the location of the error.
fn may_contain_a_pod(file: &ManifestFile) -> bool {
    let blank = file.bytes.iter().all(u8::is_ascii_whitespace);
    !blank && manifests::objects(file).map_or(true, |found| found.iter().any(|o| o.kind == ObjectKind::Pod))
}

/// The folder: copies of the manifests, the agent's own state, its log. Dropping it deletes the folder.
#[derive(Debug)]
pub(super) struct Workspace {
    dir: PathBuf,
    /// Path of each copy and of its original, for messages.
    copies: Vec<(PathBuf, PathBuf)>,
    /// The run folder, if it did not exist before.
    run_dir: Option<PathBuf>,
}

impl Workspace {
    /// Creates the folder next to the run folder.
    ///
    /// # Errors
    /// The folder cannot be created or written.
    pub(super) fn new(run_dir: &Path, files: &[ManifestFile]) -> Result<Self, CliError> {
        let mut name = run_dir.file_name().unwrap_or_default().to_owned();
        name.push(format!("-once-{}", std::process::id()));
        let dir = run_dir.with_file_name(name);
        let fail = |source: io::Error| CliError::StartFailed {
            message: format!("cannot use the folder {}: {source}", dir.display()),
            hint: "name a folder with a parent folder with --run-dir".into(),
        };
        // Services that run as other users may traverse the folder, but not read it.
        DirBuilder::new().recursive(true).mode(0o755).create(dir.parent().unwrap_or(&dir)).map_err(fail)?;
        DirBuilder::new().mode(0o711).create(&dir).map_err(fail)?;
        let mut workspace = Self {
            copies: Vec::new(),
            run_dir: (!run_dir.exists()).then(|| run_dir.to_owned()),
            dir: dir.clone(),
        };
        DirBuilder::new().mode(0o700).create(workspace.manifests()).map_err(fail)?;
        for (index, file) in files.iter().enumerate() {
            let base = file.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let copy = workspace.manifests().join(format!("{index:04}-{base}.yaml"));
            let mut out =
                OpenOptions::new().write(true).create_new(true).mode(0o600).open(&copy).map_err(fail)?;
            out.write_all(&file.bytes).map_err(fail)?;
            workspace.copies.push((copy, file.path.clone()));
        }
        Ok(workspace)
    }

    /// The folder that pod-config reads.
    pub(super) fn manifests(&self) -> PathBuf {
        self.dir.join("manifests")
    }

    /// The agent's own state.
    pub(super) fn state(&self) -> PathBuf {
        self.dir.join("state")
    }

    /// The agent's output.
    pub(super) fn log(&self) -> PathBuf {
        self.dir.join("agent.log")
    }

    /// Opens the log.
    ///
    /// # Errors
    /// It cannot be written.
    pub(super) fn open_log(&self) -> Result<File, CliError> {
        let open = File::options().write(true).create(true).truncate(true).mode(0o640).open(self.log());
        open.map_err(|source| CliError::StartFailed {
            message: format!("cannot write the log {}: {source}", self.log().display()),
            hint: "free space there, or use another --run-dir".into(),
        })
    }

    /// Deletes every manifest, so that the agent removes the pods.
    pub(super) fn delete_manifests(&self) {
        for (copy, _) in &self.copies {
            // Ignore an error: the file may be gone already.
            let _ = fs::remove_file(copy);
        }
    }

    /// Replaces the paths of the copies in a text by those of the originals.
    pub(super) fn with_original_names(&self, text: &str) -> String {
        self.copies.iter().fold(text.to_owned(), |text, (copy, original)| {
            text.replace(&copy.display().to_string(), &original.display().to_string())
        })
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
        if let Some(run_dir) = &self.run_dir {
            let _ = fs::remove_dir_all(run_dir);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POD: &str = "kind: Pod\nmetadata: {name: a}\n";

    #[test]
    fn manifest_that_appears_late_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let late = dir.path().join("late.yaml");
        let (reader, path) = (vec![late.clone()], late.clone());
        let writer = thread::spawn(move || {
            thread::sleep(READ_INTERVAL * 3);
            fs::write(path.with_extension("new"), POD).unwrap();
            fs::rename(path.with_extension("new"), &path).unwrap();
        });
        assert_eq!(read(&reader).unwrap()[0].bytes, POD.as_bytes());
        writer.join().unwrap();
    }

    #[test]
    fn missing_manifest_is_an_error_after_one_second() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("objects.yaml"), "kind: ConfigMap\nmetadata: {name: c}\n").unwrap();
        let started_at = Instant::now();
        let error = read(&[dir.path().to_owned()]).unwrap_err();
        assert!(started_at.elapsed() >= READ_TIMEOUT - READ_INTERVAL * 2, "{:?}", started_at.elapsed());
        let text = error.to_string();
        assert!(text.starts_with("no pod manifest found in ") && text.ends_with(" within 1 s"), "{text}");
        let text = read(&[dir.path().join("missing.yaml")]).unwrap_err().to_string();
        assert!(text.contains("missing.yaml within 1 s: cannot read"), "{text}");
    }

    #[test]
    fn silent_pipe_does_not_block_run_once() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe.yaml");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, mode).unwrap();
        // A writer that has the pipe open and writes nothing.
        let _writer = OpenOptions::new().read(true).write(true).open(&pipe).unwrap();
        assert!(read(&[pipe]).unwrap_err().to_string().ends_with("within 1 s"));
    }

    #[test]
    fn workspace_is_deleted_and_messages_name_the_originals() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("run");
        let file = |name: &str| ManifestFile { path: name.into(), bytes: POD.as_bytes().to_vec() };
        let workspace = Workspace::new(&run, &[file("/m/a.yaml"), file("/n/a.yaml")]).unwrap();
        fs::create_dir(&run).unwrap();
        assert_eq!(fs::read_dir(workspace.manifests()).unwrap().count(), 2);
        let text = format!("{}/0001-a.yaml.yaml:3: no", workspace.manifests().display());
        assert_eq!(workspace.with_original_names(&text), "/n/a.yaml:3: no");
        workspace.delete_manifests();
        assert_eq!(fs::read_dir(workspace.manifests()).unwrap().count(), 0);
        drop(workspace);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "the run folder did not exist before");
    }
}
