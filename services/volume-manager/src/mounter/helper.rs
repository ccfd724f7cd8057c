//! The helper process: this program, started with the argument [`ARGUMENT`], does one piece of work on a filesystem that may
//! hang, and can be abandoned.
//!
//! The request is one line of JSON on stdin. The answer is lines of JSON on stdout, the last of which is `done` or
//! `failed`. The helper ends when its stdin is closed, so it does not outlive the service, even one that is killed. Only
//! a call that hangs in the kernel keeps it. Programs that change a filesystem as a whole, such as mkfs, are no work of
//! the helper; they run on if the service ends (see `device`).

use std::fs;
use std::io::{self, BufRead as _, Read as _, Write};
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use keelson_service_kit::status::chain;
use keelson_volume_manager_core::desire::FsGroupPolicy;
use keelson_volume_manager_core::hostpath::FileKind;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};

use crate::fsgroup::{self, Access, Progress};
use crate::measure::{Usage, by_file_system};
use crate::subpath::{self, SubPath};

/// The first argument of the helper.
pub const ARGUMENT: &str = "volume-helper";
/// The exit code if the service has ended.
const ORPHANED: i32 = 70;
/// The time between two lines about the progress of a walk.
const PROGRESS_PERIOD: Duration = Duration::from_millis(500);
/// The number of files that a walk names because it could not change them.
const MAX_WARNINGS: u64 = 20;

/// What to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum Request {
    /// Create a folder and those above it.
    CreateFolders { path: PathBuf, mode: u32 },
    /// Create an empty file. An existing one stays as it is.
    CreateFile { path: PathBuf, mode: u32 },
    /// What statfs(2) reports in `f_flags`.
    Flags { path: PathBuf },
    /// What is at a path, after links.
    Inspect { path: PathBuf },
    /// Whether something holds a block device, such as a mount.
    IsBusy { path: PathBuf },
    /// Apply the fsGroup to the files of a volume.
    ApplyFsGroup { path: PathBuf, group: u32, read_only: bool, on_root_mismatch: bool },
    /// Prepare a subPath of the volume at `path` for a container.
    PrepareSubpath { path: PathBuf, pod_folder: PathBuf, container: String, subpath: SubPath },
    /// Unmount and remove the subPaths of one volume of a pod, or of all; `path` is their folder.
    RemoveSubpaths { path: PathBuf, pod_folder: PathBuf, volume: Option<String> },
    /// The usage of the filesystem that is mounted at a path.
    Measure { path: PathBuf },
}

impl Request {
    /// The path that it works on.
    pub(super) fn path(&self) -> &Path {
        match self {
            Self::CreateFolders { path, .. }
            | Self::CreateFile { path, .. }
            | Self::Flags { path }
            | Self::Inspect { path }
            | Self::IsBusy { path }
            | Self::ApplyFsGroup { path, .. }
            | Self::PrepareSubpath { path, .. }
            | Self::RemoveSubpaths { path, .. }
            | Self::Measure { path } => path,
        }
    }

    /// What it does, in words.
    pub(super) fn describe(&self) -> String {
        let act = match self {
            Self::CreateFolders { .. } => "create the folder",
            Self::CreateFile { .. } => "create the file",
            Self::Flags { .. } => "read the mount flags of",
            Self::Inspect { .. } => "look at",
            Self::IsBusy { .. } => "open the device",
            Self::ApplyFsGroup { .. } => "apply the pod's fsGroup to",
            Self::PrepareSubpath { .. } => "prepare a subPath of the volume at",
            Self::RemoveSubpaths { .. } => "unmount the subPaths in",
            Self::Measure { .. } => "measure the file system at",
        };
        format!("{act} {}", self.path().display())
    }
}

/// A line of the answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum Line {
    /// The number of files and folders that a walk has visited so far.
    Files(u64),
    /// A file that a walk could not change.
    Warning(String),
    /// It is done.
    Done(Answer),
    /// It has failed.
    Failed(Failure),
}

/// What the helper found out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum Answer {
    /// Nothing: the work is done.
    Nothing,
    /// The flags of the mount.
    Flags(u64),
    /// The file; `None` if it does not exist.
    File(Option<FileFacts>),
    /// Whether the device is busy.
    Busy(bool),
    /// The usage of a filesystem.
    Usage(Usage),
    /// What a container mounts.
    Path(PathBuf),
}

/// An error of a system call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Failure {
    pub(super) message: String,
    pub(super) errno: Option<i32>,
}

/// A file, after links.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct FileFacts {
    /// Its path without links.
    pub(crate) path: PathBuf,
    /// Its type and permissions, as in stat(2).
    pub(crate) mode: u32,
    /// Its group.
    pub(crate) group: u32,
    /// The device that it is, if it is one.
    pub(crate) device: u64,
}

impl FileFacts {
    /// Its type.
    pub(crate) fn kind(&self) -> FileKind {
        use rustix::fs::FileType;
        match FileType::from_raw_mode(self.mode) {
            FileType::Directory => FileKind::Directory,
            FileType::RegularFile => FileKind::File,
            FileType::Socket => FileKind::Socket,
            FileType::CharacterDevice => FileKind::CharDevice,
            FileType::BlockDevice => FileKind::BlockDevice,
            FileType::Symlink | FileType::Fifo | FileType::Unknown => FileKind::Other,
        }
    }
}

/// Runs the helper on stdin and stdout.
pub fn main() -> ExitCode {
    match serve(Box::new(io::stdout())) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "{ARGUMENT}: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Reads a request from stdin and answers it on `output`.
pub(super) fn serve(output: Box<dyn Write + Send>) -> io::Result<()> {
    let mut text = String::new();
    io::stdin().lock().read_line(&mut text)?;
    let request = serde_json::from_str(&text)?;
    std::thread::spawn(|| {
        let mut rest = [0];
        while matches!(io::stdin().lock().read(&mut rest), Ok(read) if read > 0) {}
        std::process::exit(ORPHANED);
    });
    let lines = Lines(Mutex::new(output));
    let last = match carry_out(&request, &lines) {
        Ok(answer) => Line::Done(answer),
        Err(error) => Line::Failed(Failure { message: error.to_string(), errno: error.raw_os_error() }),
    };
    lines.write(&last)
}

struct Lines(Mutex<Box<dyn Write + Send>>);

impl Lines {
    fn write(&self, line: &Line) -> io::Result<()> {
        let mut text = serde_json::to_vec(line)?;
        text.push(b'\n');
        let mut output = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        output.write_all(&text)?;
        output.flush()
    }
}

fn carry_out(request: &Request, lines: &Lines) -> io::Result<Answer> {
    match request {
        Request::CreateFolders { path, mode } => {
            fs::DirBuilder::new().recursive(true).mode(*mode).create(path)?;
            Ok(Answer::Nothing)
        }
        Request::CreateFile { path, mode } => {
            match fs::OpenOptions::new().write(true).create_new(true).mode(*mode).open(path) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
                _ => Ok(Answer::Nothing),
            }
        }
        Request::Flags { path } => Ok(Answer::Flags(rustix::fs::statvfs(path)?.f_flag.bits())),
        Request::Inspect { path } => inspect(path).map(Answer::File),
        Request::IsBusy { path } => is_busy(path).map(Answer::Busy),
        Request::ApplyFsGroup { path, group, read_only, on_root_mismatch } => {
            let access = if *read_only { Access::ReadOnly } else { Access::ReadWrite };
            let policy =
                if *on_root_mismatch { FsGroupPolicy::OnRootMismatch } else { FsGroupPolicy::Always };
            apply_fs_group(path, *group, access, policy, lines).map(|()| Answer::Nothing)
        }
        Request::PrepareSubpath { path, pod_folder, container, subpath } => {
            subpath::prepare(pod_folder, container, path, subpath).map(Answer::Path).map_err(|error| {
                // The text of the error is for the pod's status, which shows no path of the node.
                if let Some(path) = error.path() {
                    let _ = lines.write(&Line::Warning(path.display().to_string()));
                }
                with_causes(error)
            })
        }
        Request::RemoveSubpaths { pod_folder, volume, .. } => {
            subpath::remove(pod_folder, volume.as_deref()).map_err(with_causes)?;
            Ok(Answer::Nothing)
        }
        Request::Measure { path } => by_file_system(path).map(Answer::Usage).map_err(with_causes),
    }
}

/// The error with its causes in its text.
fn with_causes(error: impl std::error::Error + 'static) -> io::Error {
    io::Error::other(chain(&error))
}

fn inspect(path: &Path) -> io::Result<Option<FileFacts>> {
    let real = match path.canonicalize() {
        Ok(real) => real,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let meta = fs::metadata(&real)?;
    let is_device = meta.file_type().is_block_device() || meta.file_type().is_char_device();
    let device = if is_device { meta.rdev() } else { 0 };
    Ok(Some(FileFacts { path: real, mode: meta.mode(), group: meta.gid(), device }))
}

/// An exclusive opening fails if the device is mounted, formatted, or a part of another device (open(2), `O_EXCL`).
fn is_busy(path: &Path) -> io::Result<bool> {
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::NONBLOCK | OFlags::CLOEXEC;
    match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(_) => Ok(false),
        Err(Errno::BUSY) => Ok(true),
        // It was removed from the node, or never had a medium.
        Err(Errno::NOENT | Errno::NXIO | Errno::NODEV) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

/// Reports a walk on stdout.
struct Reporter<'a> {
    lines: &'a Lines,
    files: AtomicU64,
    warnings: AtomicU64,
}

impl Progress for Reporter<'_> {
    fn visited(&self) {
        self.files.fetch_add(1, Ordering::Relaxed);
    }

    fn failed(&self, name: &Path, error: io::Error) {
        if self.warnings.fetch_add(1, Ordering::Relaxed) < MAX_WARNINGS {
            let _ = self.lines.write(&Line::Warning(format!("{}: {error}", name.display())));
        }
    }
}

fn apply_fs_group(
    path: &Path,
    group: u32,
    access: Access,
    policy: FsGroupPolicy,
    lines: &Lines,
) -> io::Result<()> {
    raise_file_limit();
    let reporter = Reporter { lines, files: AtomicU64::new(0), warnings: AtomicU64::new(0) };
    let report = || {
        let files = reporter.files.load(Ordering::Relaxed);
        lines.write(&Line::Files(files)).map(|()| files)
    };
    let (end, ended) = channel::<()>();
    let result = std::thread::scope(|scope| {
        let (reporter, report) = (&reporter, &report);
        scope.spawn(move || {
            let mut last = 0;
            while ended.recv_timeout(PROGRESS_PERIOD) == Err(RecvTimeoutError::Timeout) {
                // A line without progress would hide that the filesystem hangs.
                if reporter.files.load(Ordering::Relaxed) != last {
                    last = report().unwrap_or(last);
                }
            }
        });
        let result = fsgroup::apply_to_tree(path, group, access, policy, reporter);
        drop(end);
        result
    });
    report()?;
    let warnings = reporter.warnings.load(Ordering::Relaxed);
    if warnings > MAX_WARNINGS {
        lines.write(&Line::Warning(format!("and {} more", warnings - MAX_WARNINGS)))?;
    }
    result
}

/// A walk keeps a descriptor open per level of folders.
fn raise_file_limit() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}
