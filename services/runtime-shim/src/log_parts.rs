//! The files of one log, in the order in which they were written.
//!
//! A log may be rotated, compressed and removed while it is read. A reader keeps open the files that it has to read. It
//! knows its position by the current name of its file, which the kernel shows for every descriptor, also for a removed
//! file (proc(5), `/proc/self/fd`).

use std::fs::{File, Metadata};
use std::io::{self, BufRead as _, BufReader, Read, Seek as _, SeekFrom};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;
use std::time::{Duration, SystemTime};

use flate2::read::MultiGzDecoder;
use keelson_runtime_shim_core::log;
use keelson_runtime_shim_core::rotation::{Form, name_of, parse_rotated_name, rotated_files};

use crate::files::Files;
use crate::log_dir::LogDir;

/// Bytes read at once when searching for the last lines.
pub(crate) const BLOCK: usize = 64 << 10;
/// How long a file may still grow after its rotation: the runtime opens the next file before it has written all
/// pending output to this one.
const SETTLE: Duration = Duration::from_millis(200);

/// One open file of a log.
#[derive(Debug)]
pub(crate) enum Part {
    /// The lines as the runtime wrote them.
    Plain(File),
    /// Compressed. It does not change any more.
    Compressed(Box<BufReader<MultiGzDecoder<File>>>),
}

impl Read for Part {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(file) => file.read(buffer),
            Self::Compressed(decoder) => decoder.read(buffer),
        }
    }
}

impl Part {
    fn compressed(file: File) -> Self {
        Self::Compressed(Box::new(BufReader::with_capacity(BLOCK, MultiGzDecoder::new(file))))
    }

    fn metadata(&self) -> io::Result<Metadata> {
        match self {
            Self::Plain(file) => file.metadata(),
            Self::Compressed(decoder) => decoder.get_ref().get_ref().metadata(),
        }
    }

    /// Whether its last line is older than `moment`, judging by the file's modification time.
    pub(crate) fn ends_before(&self, moment: SystemTime) -> bool {
        self.metadata().and_then(|m| m.modified()).is_ok_and(|last| last < moment)
    }

    /// Whether it may still grow although the runtime has opened `next`.
    pub(crate) fn may_grow(&self, next: &Self) -> bool {
        let recent = |moment: io::Result<SystemTime>| {
            // A time in the future comes from a clock that was set back; it does not count as recent.
            moment.is_ok_and(|at| SystemTime::now().duration_since(at).is_ok_and(|age| age < SETTLE))
        };
        let opened = |part: &Self| part.metadata().and_then(|m| m.created());
        matches!(self, Self::Plain(_))
            && (recent(self.metadata().and_then(|m| m.modified())) || recent(opened(next)))
    }

    /// Seeks to the beginning of the last `left` lines. Returns whether it holds that many; if not, it is read from the
    /// start and `left` is the number of missing lines.
    pub(crate) fn seek_tail(&mut self, left: &mut usize) -> io::Result<bool> {
        match self {
            Self::Plain(file) => seek_to_tail(file, left),
            Self::Compressed(_) => self.skip_to_tail(left),
        }
    }

    /// Counts the lines, then starts over and skips the lines before the last `left`.
    fn skip_to_tail(&mut self, left: &mut usize) -> io::Result<bool> {
        let Self::Compressed(decoder) = self else { return Ok(false) };
        let mut lines = 0;
        while decoder.skip_until(b'\n')? > 0 {
            lines += 1;
        }
        let mut file = decoder.get_ref().get_ref().try_clone()?;
        file.seek(SeekFrom::Start(0))?;
        *self = Self::compressed(file);
        let Self::Compressed(decoder) = self else { return Ok(false) };
        for _ in 0..usize::saturating_sub(lines, *left) {
            decoder.skip_until(b'\n')?;
        }
        *left = left.saturating_sub(lines);
        Ok(*left == 0)
    }
}

/// Seeks to the beginning of the last `left` lines, searching for newlines from the end, block by block.
fn seek_to_tail(file: &mut File, left: &mut usize) -> io::Result<bool> {
    let size = file.metadata()?.len();
    if *left == 0 {
        file.seek(SeekFrom::Start(size))?;
        return Ok(true);
    }
    let mut end = size;
    let mut block = vec![0u8; BLOCK];
    while end > 0 {
        let length = usize::try_from(end).unwrap_or(BLOCK).min(BLOCK);
        let start = end - length as u64;
        let block = &mut block[..length];
        if let Err(error) = file.read_exact_at(block, start) {
            // The file was truncated in the meantime: its rest is the tail.
            if error.kind() == io::ErrorKind::UnexpectedEof {
                break;
            }
            return Err(error);
        }
        let searched = if end == size { block.strip_suffix(b"\n").unwrap_or(block) } else { block };
        if let Some(offset) = log::line_start_from_end(searched, left) {
            file.seek(SeekFrom::Start(start + offset as u64))?;
            return Ok(true);
        }
        end = start;
    }
    file.seek(SeekFrom::Start(0))?;
    if size > 0 {
        // The first line has no newline before it.
        *left -= 1;
    }
    Ok(*left == 0)
}

/// The files of the log at `path`, oldest first; with `after`, only those rotated after that timestamp. The last file is
/// the one that the runtime writes to, unless a rotation is in progress.
///
/// # Errors
/// There is no file, or the folder cannot be read.
pub(crate) fn parts(files: &Files, path: &Path, after: Option<&str>) -> io::Result<Vec<Part>> {
    let folder = LogDir::open(files, path)?;
    // Before the list is read: a file rotated in between is then in the list as well and is recognised by its inode.
    let current = match folder.read(&folder.current) {
        Ok(file) => Some(file),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    let list = folder.list()?;
    let mut parts = Vec::new();
    for (stamp, form) in rotated_files(&folder.current, list.iter().map(|file| file.name.as_str())) {
        if after.is_some_and(|after| stamp <= after) {
            continue;
        }
        match open(&folder, stamp, form)? {
            Some(Part::Plain(file)) if current.as_ref().is_some_and(|c| is_same(c, &file)) => break,
            Some(part) => parts.push(part),
            // The rotation has removed it in the meantime.
            None => {}
        }
    }
    parts.extend(current.map(Part::Plain));
    if parts.is_empty() && after.is_none() {
        return Err(io::ErrorKind::NotFound.into());
    }
    Ok(parts)
}

fn open(folder: &LogDir, stamp: &str, form: Form) -> io::Result<Option<Part>> {
    if form == Form::Plain {
        match folder.read(&name_of(&folder.current, stamp, Form::Plain)) {
            Ok(file) => return Ok(Some(Part::Plain(file))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    match folder.read(&name_of(&folder.current, stamp, Form::Compressed)) {
        Ok(file) => Ok(Some(Part::compressed(file))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The files after `part`, which was the newest file of the log at `path` when it was opened; empty while it still is.
///
/// # Errors
/// The folder cannot be read.
pub(crate) fn newer_parts(files: &Files, path: &Path, part: &Part) -> io::Result<Vec<Part>> {
    let Part::Plain(file) = part else { return Ok(Vec::new()) };
    let current_name = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    let current_name = current_name.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let (name, removed) =
        current_name.strip_suffix(" (deleted)").map_or((current_name, false), |name| (name, true));
    let current = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    if let Some((stamp, _)) = parse_rotated_name(current, name) {
        let mut parts = parts(files, path, Some(stamp))?;
        // A failed rotation was undone: the file has its old name again.
        parts.retain(|part| !matches!(part, Part::Plain(next) if is_same(next, file)));
        return Ok(parts);
    }
    if !removed {
        return Ok(Vec::new());
    }
    // Something else has replaced the file.
    match files.open_log(path) {
        Ok(next) => Ok(vec![Part::Plain(next)]),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

fn is_same(a: &File, b: &File) -> bool {
    match (a.metadata(), b.metadata()) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => false,
    }
}
