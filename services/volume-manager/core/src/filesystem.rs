//! File systems of block devices: whether a device is formatted, checked or only mounted (volumes.md §7), and how its
//! file system grows (volumes.md §4).
//!
//! The order is: run [`probe`], read its answer with [`content`], decide with [`plan`], run the command of the
//! [`Preparation`], read its result with [`format_result`] or [`check_result`], mount. A device is formatted only if
//! blkid says that it is blank.

use crate::mount_options::MountOptions;

/// The file system of a volume that names none.
pub const DEFAULT_TYPE: &str = "ext4";
/// The longest name of a file system, in bytes.
const MAX_TYPE_LENGTH: usize = 32;

/// Exit code of blkid for a device without any known content.
const BLKID_BLANK: i32 = 2;
/// Exit code of blkid for a device with the signatures of several file systems.
const BLKID_AMBIGUOUS: i32 = 8;
/// Exit code of fsck if it corrected all errors.
const FSCK_CORRECTED: i32 = 1;
/// Exit code of fsck if errors are left.
const FSCK_UNCORRECTED: i32 = 4;

/// A program and its arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Command {
    /// The program, to be found in `PATH`.
    pub program: String,
    /// The arguments.
    pub arguments: Vec<String>,
}

impl Command {
    fn new(program: impl Into<String>, arguments: &[&str]) -> Self {
        Self {
            program: program.into(),
            arguments: arguments.iter().map(|argument| (*argument).to_owned()).collect(),
        }
    }
}

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended<'a> {
    /// It exited.
    Exited {
        /// Its exit code.
        code: i32,
        /// What it wrote: of blkid that exited with 0 the standard output, else standard output and error.
        output: &'a str,
    },
    /// It was killed by a signal.
    Killed {
        /// The number of the signal.
        signal: i32,
    },
    /// The program does not exist.
    Missing,
}

impl Ended<'_> {
    /// The end in words, with what the program wrote.
    fn describe(self) -> String {
        match self {
            Self::Exited { code, output } if output.trim().is_empty() => format!("it exited with {code}"),
            Self::Exited { code, output } => format!("it exited with {code}: {}", output.trim()),
            Self::Killed { signal } => format!("signal {signal} killed it"),
            Self::Missing => "the program is not installed on this node".to_owned(),
        }
    }
}

/// Why a device cannot be formatted, checked, mounted or grown.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FilesystemError {
    /// blkid did not say what the device contains.
    #[error(
        "cannot tell what the device {device} contains, so it is neither formatted nor mounted: blkid: {why}"
    )]
    Probe {
        /// The device.
        device: String,
        /// How blkid ended.
        why: String,
    },
    /// The volume asks for a file system whose name is not one.
    #[error(
        "the fsType {fs_type:?} of the volume is not the name of a file system; write one such as ext4 or xfs"
    )]
    InvalidType {
        /// The type as written.
        fs_type: String,
    },
    /// A blank device is to be mounted read-only.
    #[error(
        "cannot mount the unformatted device {device} read-only, because formatting writes to it; \
         mount it once without readOnly, or format it with {fs_type}"
    )]
    BlankReadOnly {
        /// The device.
        device: String,
        /// The file system that it would get.
        fs_type: String,
    },
    /// mkfs did not succeed.
    #[error("cannot format the device {device} with {fs_type}: {program}: {why}")]
    Format {
        /// The device.
        device: String,
        /// The file system.
        fs_type: String,
        /// The program.
        program: String,
        /// How it ended.
        why: String,
    },
    /// fsck found errors that it could not correct.
    #[error(
        "'fsck' found errors on device {device} but could not correct them; run fsck on it by hand: {output}"
    )]
    Damaged {
        /// The device.
        device: String,
        /// What fsck wrote.
        output: String,
    },
    /// The mount failed, probably because the device has other content than the volume asks for.
    #[error(
        "cannot mount the device {device} as {fs_type}, because it contains {found}; \
         set fsType to what it contains, or use another device: {cause}"
    )]
    Mismatch {
        /// The device.
        device: String,
        /// The file system that the volume asks for.
        fs_type: String,
        /// What the device contains.
        found: String,
        /// The error of the mount.
        cause: String,
    },
    /// The mount failed.
    #[error("cannot mount the device {device} as {fs_type}: {cause}")]
    Mount {
        /// The device.
        device: String,
        /// The file system.
        fs_type: String,
        /// The error of the mount.
        cause: String,
    },
    /// There is no way to grow what the device contains.
    #[error(
        "cannot grow the volume on the device {device}, because it contains {found}; \
         only ext3, ext4, xfs and btrfs grow"
    )]
    CannotGrow {
        /// The device.
        device: String,
        /// What the device contains.
        found: String,
    },
    /// The command that grows the file system did not succeed.
    #[error("cannot grow the file system of the device {device}: {program}: {why}")]
    Grow {
        /// The device.
        device: String,
        /// The program.
        program: String,
        /// How it ended.
        why: String,
    },
}

impl FilesystemError {
    /// Whether the event `FailedMountOnFilesystemMismatch` on the PersistentVolume reports the error, too
    /// (volumes.md §3.9).
    pub const fn is_mismatch(&self) -> bool {
        matches!(self, Self::Mismatch { .. })
    }
}

/// What a device contains.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// Nothing that blkid knows.
    Blank,
    /// A partition table, whatever else there is.
    Partitions,
    /// A file system, or what blkid takes for one, such as a member of a RAID.
    Filesystem(String),
}

impl Content {
    fn describe(&self) -> String {
        match self {
            Self::Blank => "nothing".to_owned(),
            Self::Partitions => "a partition table".to_owned(),
            Self::Filesystem(fs_type) => format!("the file system {fs_type}"),
        }
    }
}

/// The command that finds out what `device` contains.
pub fn probe(device: &str) -> Command {
    Command::new("blkid", &["-p", "-s", "TYPE", "-s", "PTTYPE", "-o", "export", device])
}

/// What `device` contains, by how [`probe`] ended. Only exit code 2 means blank; an answer that names neither a file
/// system nor a partition table is an error, because a device may only be formatted if nothing is lost.
pub fn content(device: &str, ended: Ended<'_>) -> Result<Content, FilesystemError> {
    let error = |why: String| FilesystemError::Probe { device: device.to_owned(), why };
    let output = match ended {
        Ended::Exited { code: 0, output } => output,
        Ended::Exited { code: BLKID_BLANK, .. } => return Ok(Content::Blank),
        Ended::Exited { code: BLKID_AMBIGUOUS, .. } => {
            let why = "it found the signatures of several file systems; erase those that are not in use with wipefs";
            return Err(error(why.to_owned()));
        }
        other => return Err(error(other.describe())),
    };
    let (mut fs_type, mut has_partitions) = (None, false);
    for line in output.lines().filter(|line| !line.is_empty()) {
        match line.split_once('=') {
            Some((_, "")) => {}
            Some(("TYPE", value)) if fs_type.is_none_or(|known| known == value) => fs_type = Some(value),
            Some(("TYPE", _)) => return Err(error(format!("it names two file systems: {output}"))),
            Some(("PTTYPE", _)) => has_partitions = true,
            Some(_) => {}
            None => return Err(error(format!("invalid output: {output}"))),
        }
    }
    match fs_type {
        _ if has_partitions => Ok(Content::Partitions),
        Some(fs_type) => Ok(Content::Filesystem(fs_type.to_owned())),
        None => Err(error(format!("it found something without a type: {output:?}"))),
    }
}

/// What a volume asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request<'a> {
    /// The path of the device.
    pub device: &'a str,
    /// The volume's `fsType`; empty: [`DEFAULT_TYPE`].
    pub fs_type: &'a str,
    /// The mount options. `ro` among them keeps the device from being formatted and checked.
    pub options: &'a MountOptions,
    /// Further arguments of mkfs, in front of the usual ones.
    pub format_options: &'a [&'a str],
}

/// What to run before the mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Preparation {
    /// Nothing.
    None,
    /// A check that repairs; see [`check_result`].
    Check(Command),
    /// mkfs; see [`format_result`].
    Format(Command),
}

/// How to mount a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// What to run first.
    pub preparation: Preparation,
    /// The file system for `mount -t`.
    pub fs_type: String,
    /// The mount options, with `defaults`.
    pub options: MountOptions,
    /// The content of the device, if it is other than what the volume asks for. The mount is tried all the same; see
    /// [`mount_error`].
    pub mismatch: Option<Content>,
}

/// Decides how to mount a device with this content.
pub fn plan(request: &Request<'_>, content: &Content) -> Result<Plan, FilesystemError> {
    let fs_type = if request.fs_type.is_empty() { DEFAULT_TYPE } else { request.fs_type };
    check_type(fs_type)?;
    let is_read_only = request.options.is_read_only();
    let preparation = match content {
        Content::Blank if is_read_only => {
            let (device, fs_type) = (request.device.to_owned(), fs_type.to_owned());
            return Err(FilesystemError::BlankReadOnly { device, fs_type });
        }
        Content::Blank => Preparation::Format(format_command(request, fs_type)),
        Content::Filesystem(_) if !is_read_only => {
            Preparation::Check(Command::new("fsck", &["-a", request.device]))
        }
        // There is no file system to check on a device with partitions.
        Content::Filesystem(_) | Content::Partitions => Preparation::None,
    };
    let mismatch = match content {
        Content::Blank => None,
        Content::Filesystem(found) if found == fs_type => None,
        Content::Filesystem(_) | Content::Partitions => Some(content.clone()),
    };
    let options = request.options.clone().with_defaults();
    Ok(Plan { preparation, fs_type: fs_type.to_owned(), options, mismatch })
}

/// The type becomes a part of the name of a program, so it must not lead to another one.
fn check_type(fs_type: &str) -> Result<(), FilesystemError> {
    let is_valid = fs_type.len() <= MAX_TYPE_LENGTH
        && fs_type.starts_with(|c: char| c.is_ascii_alphanumeric())
        && fs_type.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.'));
    is_valid.then_some(()).ok_or_else(|| FilesystemError::InvalidType { fs_type: fs_type.to_owned() })
}

fn format_command(request: &Request<'_>, fs_type: &str) -> Command {
    // Force; ext3 and ext4 also without blocks that only root may use.
    let usual: &[&str] = match fs_type {
        "ext3" | "ext4" => &["-F", "-m0"],
        "xfs" => &["-f"],
        _ => &[],
    };
    let arguments = [request.format_options, usual, &[request.device]].concat();
    Command::new(format!("mkfs.{fs_type}"), &arguments)
}

/// Whether the command of [`Preparation::Format`] succeeded.
pub fn format_result(device: &str, fs_type: &str, ended: Ended<'_>) -> Result<(), FilesystemError> {
    match ended {
        Ended::Exited { code: 0, .. } => Ok(()),
        other => Err(FilesystemError::Format {
            device: device.to_owned(),
            fs_type: fs_type.to_owned(),
            program: format!("mkfs.{fs_type}"),
            why: other.describe(),
        }),
    }
}

/// The result of a check after which the device may be mounted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Checked {
    /// There were no errors.
    Clean,
    /// There were errors, and fsck corrected them.
    Corrected,
    /// There is no fsck on this node; nothing is logged.
    NotInstalled,
    /// fsck did not complete. The text is to be logged; the mount will show whether the file system can be used.
    Incomplete(String),
}

/// Reads the result of the command of [`Preparation::Check`].
pub fn check_result(device: &str, ended: Ended<'_>) -> Result<Checked, FilesystemError> {
    match ended {
        Ended::Exited { code: 0, .. } => Ok(Checked::Clean),
        Ended::Exited { code: FSCK_CORRECTED, .. } => Ok(Checked::Corrected),
        Ended::Exited { code: FSCK_UNCORRECTED, output } => {
            Err(FilesystemError::Damaged { device: device.to_owned(), output: output.trim().to_owned() })
        }
        Ended::Missing => Ok(Checked::NotInstalled),
        Ended::Exited { .. } | Ended::Killed { .. } => {
            Ok(Checked::Incomplete(format!("fsck did not check the device {device}: {}", ended.describe())))
        }
    }
}

/// The error of a mount by `plan` that failed because of `cause`.
pub fn mount_error(device: &str, plan: &Plan, cause: String) -> FilesystemError {
    let (device, fs_type) = (device.to_owned(), plan.fs_type.clone());
    match &plan.mismatch {
        Some(found) => FilesystemError::Mismatch { device, fs_type, found: found.describe(), cause },
        None => FilesystemError::Mount { device, fs_type, cause },
    }
}

/// The command that grows the file system of `device`, which is mounted at `mount_point`, to the size of the device.
/// `None` for a blank device: mkfs will use all of it.
pub fn grow(device: &str, mount_point: &str, content: &Content) -> Result<Option<Command>, FilesystemError> {
    let fs_type = match content {
        Content::Blank => return Ok(None),
        Content::Partitions => "",
        Content::Filesystem(fs_type) => fs_type.as_str(),
    };
    match fs_type {
        "ext3" | "ext4" => Ok(Some(Command::new("resize2fs", &[device]))),
        "xfs" => Ok(Some(Command::new("xfs_growfs", &["-d", mount_point]))),
        "btrfs" => Ok(Some(Command::new("btrfs", &["filesystem", "resize", "max", mount_point]))),
        _ => Err(FilesystemError::CannotGrow { device: device.to_owned(), found: content.describe() }),
    }
}

/// Whether a command of [`grow`] succeeded.
pub fn grow_result(device: &str, command: &Command, ended: Ended<'_>) -> Result<(), FilesystemError> {
    match ended {
        Ended::Exited { code: 0, .. } => Ok(()),
        other => Err(FilesystemError::Grow {
            device: device.to_owned(),
            program: command.program.clone(),
            why: other.describe(),
        }),
    }
}

#[cfg(test)]
mod tests;
