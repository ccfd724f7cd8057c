//! The files of one log in the order in which they were written.
//!
//! While a log is read it may be rotated, compressed and removed. A reader holds open what it has to read, and knows
//! where it is by the name that its file has now: the kernel tells it for every descriptor, also of a file that was
//! removed since (proc(5), `/proc/self/fd`).

use std::fs::{File, Metadata};
use std::io::{self, BufRead as _, BufReader, Read, Seek as _, SeekFrom};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;
use std::time::{Duration, SystemTime};

use flate2::read::MultiGzDecoder;
use keelson_runtime_shim_core::log;
use keelson_runtime_shim_core::rotation::{Form, history, name_of, rotated};

use crate::files::Files;
use crate::log_dir::LogDir;

/// Bytes that are looked at at once in search of the last lines.
pub(crate) const BLOCK: usize = 64 << 10;
/// For so long after its rotation a file may still grow: the runtime opens the next one before it has written all
/// that was on its way to this one.
const SETTLE: Duration = Duration::from_millis(200);

/// One file of a log, open.
#[derive(Debug)]
pub(crate) enum Part {
    /// Lines as the runtime wrote them.
    Plain(File),
    /// The same, compressed. It does not change any more.
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

    /// Whether its last line is older than a moment, as far as its own time tells.
    pub(crate) fn ends_before(&self, moment: SystemTime) -> bool {
        self.metadata().and_then(|m| m.modified()).is_ok_and(|last| last < moment)
    }

    /// Whether it may still grow although `next` has been opened.
    pub(crate) fn may_grow(&self, next: &Self) -> bool {
        let recent = |moment: io::Result<SystemTime>| {
            // A moment in the future is one of a clock that was set back.
            moment.is_ok_and(|at| SystemTime::now().duration_since(at).is_ok_and(|age| age < SETTLE))
        };
        let opened = |part: &Self| part.metadata().and_then(|m| m.created());
        matches!(self, Self::Plain(_))
            && (recent(self.metadata().and_then(|m| m.modified())) || recent(opened(next)))
    }

    /// Moves to the beginning of the last `left` lines. Whether it holds so many; if not, it is read as a whole and
    /// `left` says how many are missing.
    pub(crate) fn seek_tail(&mut self, left: &mut usize) -> io::Result<bool> {
        match self {
            Self::Plain(file) => seek_to_tail(file, left),
            Self::Compressed(_) => self.skip_to_tail(left),
        }
    }

    /// Counts the lines, and begins anew behind those that are too many.
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

/// Moves to the beginning of the last `left` lines, looking for newlines from the end, a block at a time.
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
            // Cut meanwhile: what is left is the tail.
            if error.kind() == io::ErrorKind::UnexpectedEof {
                break;
            }
            return Err(error);
        }
        let looked_at = if end == size { block.strip_suffix(b"\n").unwrap_or(block) } else { block };
        if let Some(offset) = log::line_start_from_end(looked_at, left) {
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

/// The files of the log at `path`, oldest first; with `after` only those that were rotated after that moment. The last
/// one is the one that the runtime writes to, unless a rotation is on its way.
///
/// # Errors
/// There is none, or the folder cannot be read.
pub(crate) fn parts(files: &Files, path: &Path, after: Option<&str>) -> io::Result<Vec<Part>> {
    let folder = LogDir::open(files, path)?;
    // Before the list is read: what is rotated in between is then in the list, too, and is known by its inode.
    let current = match folder.read(&folder.current) {
        Ok(file) => Some(file),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    let list = folder.list()?;
    let mut parts = Vec::new();
    for (stamp, form) in history(&folder.current, list.iter().map(|file| file.name.as_str())) {
        if after.is_some_and(|after| stamp <= after) {
            continue;
        }
        match open(&folder, stamp, form)? {
            Some(Part::Plain(file)) if current.as_ref().is_some_and(|c| is_same(c, &file)) => break,
            Some(part) => parts.push(part),
            // Removed meanwhile, because there was no room for it.
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

/// What follows `part`, the newest part of the log at `path` when it was opened; empty while it is still the newest.
///
/// # Errors
/// The folder cannot be read.
pub(crate) fn followers(files: &Files, path: &Path, part: &Part) -> io::Result<Vec<Part>> {
    let Part::Plain(file) = part else { return Ok(Vec::new()) };
    let now = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    let now = now.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let (name, removed) = now.strip_suffix(" (deleted)").map_or((now, false), |name| (name, true));
    let current = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    if let Some((stamp, _)) = rotated(current, name) {
        let mut parts = parts(files, path, Some(stamp))?;
        // A rotation that failed is taken back: the file has its old name again.
        parts.retain(|part| !matches!(part, Part::Plain(next) if is_same(next, file)));
        return Ok(parts);
    }
    if !removed {
        return Ok(Vec::new());
    }
    // Somebody else has put another file into its place.
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
