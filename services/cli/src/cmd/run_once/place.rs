//! The folder of one `keelson run --once`, and the manifests in it.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use crate::cmd::manifests::{self, ManifestFile, ObjectKind};
use crate::error::Failure;

/// Within this time a manifest has to come.
pub(super) const WITHIN: Duration = Duration::from_secs(1);
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Reads the manifests once.
///
/// # Errors
/// No pod comes within [`WITHIN`]: a path is not there, a folder is empty, a pipe says nothing.
pub(super) fn read(files: &[PathBuf]) -> Result<Vec<ManifestFile>, Failure> {
    let (sender, receiver) = mpsc::sync_channel(1);
    let arguments = files.to_vec();
    // A thread of its own, which nobody waits for: a pipe may hold it for ever.
    thread::spawn(move || {
        let _ = sender.send(until_there(&arguments, Instant::now() + WITHIN));
    });
    let given = files.iter().map(|f| f.display().to_string()).collect::<Vec<_>>().join(", ");
    let none = |why: &str| Failure::NotFound {
        what: format!("no pod manifest came from {given} within {} s{why}", WITHIN.as_secs()),
        hint: "name a file or a folder with Pod manifests by -f".into(),
    };
    match receiver.recv_timeout(WITHIN + LOOK_AGAIN * 4) {
        Ok(Ok(files)) => Ok(files),
        Ok(Err(None)) | Err(_) => Err(none("")),
        Ok(Err(Some(failure))) => Err(none(&format!(": {failure}"))),
    }
}

fn until_there(files: &[PathBuf], deadline: Instant) -> Result<Vec<ManifestFile>, Option<Failure>> {
    // What was read from standard input cannot be read again.
    let again = !files.iter().any(|file| file.as_os_str() == "-");
    loop {
        let found = manifests::paths(files)
            .and_then(|paths| paths.iter().map(|path| manifests::read(path)).collect::<Result<Vec<_>, _>>());
        let why = match found {
            Ok(found) if found.iter().any(may_hold_a_pod) => return Ok(found),
            Ok(_) => None,
            Err(failure) => Some(failure),
        };
        if !again || Instant::now() + LOOK_AGAIN > deadline {
            return Err(why);
        }
        thread::sleep(LOOK_AGAIN);
    }
}

/// A file that cannot be read as YAML is for pod-config to refuse, which says where it is wrong.
fn may_hold_a_pod(file: &ManifestFile) -> bool {
    let blank = file.bytes.iter().all(u8::is_ascii_whitespace);
    !blank && manifests::objects(file).map_or(true, |found| found.iter().any(|o| o.kind == ObjectKind::Pod))
}

/// The folder: copies of the manifests, the agent's own state, its log. It goes when it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    dir: PathBuf,
    /// Copy and original, for messages.
    copies: Vec<(PathBuf, PathBuf)>,
    /// The run folder, if it was not there before.
    run_dir: Option<PathBuf>,
}

impl Place {
    /// Makes the folder beside the run folder.
    ///
    /// # Errors
    /// It cannot be made or written.
    pub(super) fn new(run_dir: &Path, files: &[ManifestFile]) -> Result<Self, Failure> {
        let mut name = run_dir.file_name().unwrap_or_default().to_owned();
        name.push(format!("-once-{}", std::process::id()));
        let dir = run_dir.with_file_name(name);
        let fail = |source: io::Error| Failure::Start {
            message: format!("cannot use the folder {}: {source}", dir.display()),
            hint: "--run-dir names a folder below another one".into(),
        };
        // The services pass through it as users of their own; what is in it is closed to them.
        DirBuilder::new().recursive(true).mode(0o755).create(dir.parent().unwrap_or(&dir)).map_err(fail)?;
        DirBuilder::new().mode(0o711).create(&dir).map_err(fail)?;
        let mut place = Self {
            copies: Vec::new(),
            run_dir: (!run_dir.exists()).then(|| run_dir.to_owned()),
            dir: dir.clone(),
        };
        DirBuilder::new().mode(0o700).create(place.manifests()).map_err(fail)?;
        for (index, file) in files.iter().enumerate() {
            let base = file.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let copy = place.manifests().join(format!("{index:04}-{base}.yaml"));
            let mut out =
                OpenOptions::new().write(true).create_new(true).mode(0o600).open(&copy).map_err(fail)?;
            out.write_all(&file.bytes).map_err(fail)?;
            place.copies.push((copy, file.path.clone()));
        }
        Ok(place)
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
    pub(super) fn open_log(&self) -> Result<File, Failure> {
        let open = File::options().write(true).create(true).truncate(true).mode(0o640).open(self.log());
        open.map_err(|source| Failure::Start {
            message: format!("cannot write the log {}: {source}", self.log().display()),
            hint: "make room there, or name another --run-dir".into(),
        })
    }

    /// Takes every manifest away: the pods are to go.
    pub(super) fn withdraw(&self) {
        for (copy, _) in &self.copies {
            // One that is gone already is what is wanted.
            let _ = fs::remove_file(copy);
        }
    }

    /// A text of the agent with the names that the person gave.
    pub(super) fn named(&self, text: &str) -> String {
        self.copies.iter().fold(text.to_owned(), |text, (copy, original)| {
            text.replace(&copy.display().to_string(), &original.display().to_string())
        })
    }
}

impl Drop for Place {
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
    fn a_manifest_that_comes_a_little_late_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let late = dir.path().join("late.yaml");
        let (reader, path) = (vec![late.clone()], late.clone());
        let writer = thread::spawn(move || {
            thread::sleep(LOOK_AGAIN * 3);
            fs::write(path.with_extension("new"), POD).unwrap();
            fs::rename(path.with_extension("new"), &path).unwrap();
        });
        assert_eq!(read(&reader).unwrap()[0].bytes, POD.as_bytes());
        writer.join().unwrap();
    }

    #[test]
    fn what_does_not_come_within_a_second_is_an_error_that_names_it() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("objects.yaml"), "kind: ConfigMap\nmetadata: {name: c}\n").unwrap();
        let begun = Instant::now();
        let failure = read(&[dir.path().to_owned()]).unwrap_err();
        assert!(begun.elapsed() >= WITHIN - LOOK_AGAIN * 2, "{:?}", begun.elapsed());
        let text = failure.to_string();
        assert!(text.starts_with("no pod manifest came from ") && text.ends_with(" within 1 s"), "{text}");
        let text = read(&[dir.path().join("missing.yaml")]).unwrap_err().to_string();
        assert!(text.contains("missing.yaml within 1 s: cannot read"), "{text}");
    }

    #[test]
    fn a_pipe_that_says_nothing_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe.yaml");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, mode).unwrap();
        // Somebody has it open and writes nothing.
        let _writer = OpenOptions::new().read(true).write(true).open(&pipe).unwrap();
        assert!(read(&[pipe]).unwrap_err().to_string().ends_with("within 1 s"));
    }

    #[test]
    fn the_folder_goes_with_everything_in_it_and_texts_name_the_originals() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("run");
        let file = |name: &str| ManifestFile { path: name.into(), bytes: POD.as_bytes().to_vec() };
        let place = Place::new(&run, &[file("/m/a.yaml"), file("/n/a.yaml")]).unwrap();
        fs::create_dir(&run).unwrap();
        assert_eq!(fs::read_dir(place.manifests()).unwrap().count(), 2);
        let text = format!("{}/0001-a.yaml.yaml:3: no", place.manifests().display());
        assert_eq!(place.named(&text), "/n/a.yaml:3: no");
        place.withdraw();
        assert_eq!(fs::read_dir(place.manifests()).unwrap().count(), 0);
        drop(place);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "the run folder was not there before");
    }
}
