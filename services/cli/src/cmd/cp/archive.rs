//! The archives (tar) in which files are copied. All functions block.
//!
//! A container may send anything. What would be written outside of the destination is refused, and links and special files are
//! left out: a link could lead the files after it elsewhere.

use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Component, Path, PathBuf};

use tar::{Archive, Builder, Entry, EntryType};
use tokio::sync::mpsc;

/// Writes the bytes of an archive into a channel. Fails with `BrokenPipe` when nobody reads it any more.
pub(super) struct ChannelWriter(pub(super) mpsc::Sender<Vec<u8>>);

impl Write for ChannelWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.blocking_send(bytes.to_vec()).map_err(|_| io::ErrorKind::BrokenPipe)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Reads the bytes of an archive from a channel, which ends when its sender is dropped.
pub(super) struct ChannelReader {
    chunks: mpsc::Receiver<Vec<u8>>,
    chunk: io::Cursor<Vec<u8>>,
}

impl ChannelReader {
    pub(super) fn new(chunks: mpsc::Receiver<Vec<u8>>) -> Self {
        Self { chunks, chunk: io::Cursor::default() }
    }
}

impl Read for ChannelReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let count = self.chunk.read(buffer)?;
            if count > 0 || buffer.is_empty() {
                return Ok(count);
            }
            match self.chunks.blocking_recv() {
                Some(chunk) => self.chunk = io::Cursor::new(chunk),
                None => return Ok(0),
            }
        }
    }
}

/// Writes a file, or a folder with all that is in it, under a name. Links are copied as links.
pub(super) fn pack(local: &Path, name: &str, writer: impl Write) -> io::Result<()> {
    // Chunks of a size that suits a message.
    let mut archive = Builder::new(io::BufWriter::with_capacity(32 << 10, writer));
    archive.follow_symlinks(false);
    // A link that is named itself is followed, as with cp(1).
    if fs::metadata(local)?.is_dir() {
        archive.append_dir_all(name, local)?;
    } else {
        archive.append_file(name, &mut fs::File::open(local)?)?;
    }
    archive.into_inner()?.flush()
}

/// Why an archive was not unpacked.
#[derive(Debug, thiserror::Error)]
pub(super) enum UnpackError {
    /// It is no archive, or it ends too early.
    #[error("the archive from the container cannot be read: {0}")]
    Archive(io::Error),
    /// The path of an entry is not below what was asked for.
    #[error("the archive from the container has {0:?}, which is not part of what was asked for")]
    Outside(PathBuf),
    /// A file cannot be written.
    #[error("cannot write {}: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
}

/// Unpacks the file or folder `name` of an archive as `target`. Returns the entries that were left out.
pub(super) fn unpack(reader: impl Read, name: &str, target: &Path) -> Result<Vec<PathBuf>, UnpackError> {
    let mut archive = Archive::new(reader);
    let mut left_out = Vec::new();
    for entry in archive.entries().map_err(UnpackError::Archive)? {
        let mut entry = entry.map_err(UnpackError::Archive)?;
        let path = entry.path().map_err(UnpackError::Archive)?.into_owned();
        let relative = below(&path, name).ok_or_else(|| UnpackError::Outside(path.clone()))?;
        // Without a slash at its end.
        let to = if relative.as_os_str().is_empty() { target.to_owned() } else { target.join(relative) };
        match entry.header().entry_type() {
            EntryType::Directory => {
                fs::create_dir_all(&to).map_err(|source| UnpackError::Write { path: to, source })?;
            }
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => write(&mut entry, &to)?,
            _ => left_out.push(path),
        }
    }
    // The end of the archive may be padded. Whoever sends it must not wait.
    io::copy(&mut archive.into_inner(), &mut io::sink()).map_err(UnpackError::Archive)?;
    Ok(left_out)
}

/// The part of an entry's path below `name`; `None` if it is not below.
fn below(path: &Path, name: &str) -> Option<PathBuf> {
    let mut parts = path.components().filter(|part| *part != Component::CurDir);
    if name != "." && parts.next() != Some(Component::Normal(name.as_ref())) {
        return None;
    }
    parts.map(|part| matches!(part, Component::Normal(_)).then_some(part)).collect()
}

fn write(entry: &mut Entry<'_, impl Read>, path: &Path) -> Result<(), UnpackError> {
    let failed = |source: io::Error| UnpackError::Write { path: path.to_owned(), source };
    if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        fs::create_dir_all(parent).map_err(failed)?;
    }
    let size = entry.size();
    // As far as the umask allows, and without setuid.
    let mode = entry.header().mode().map_err(UnpackError::Archive)? & 0o777;
    let file = OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(path);
    let mut file = file.map_err(failed)?;
    let written = io::copy(entry, &mut file).map_err(failed)?;
    if written != size {
        let text = format!("{} has {written} of {size} bytes", path.display());
        return Err(UnpackError::Archive(io::Error::new(io::ErrorKind::UnexpectedEof, text)));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use tar::Header;

    use super::*;

    /// An archive with these entries: type, path, content or target of the link.
    fn archive(entries: &[(EntryType, &str, &str)]) -> Vec<u8> {
        let mut builder = Builder::new(Vec::new());
        for (kind, path, content) in entries {
            let mut header = Header::new_ustar();
            // Set directly, since the builder refuses what a container may send.
            header.as_ustar_mut().unwrap().name[..path.len()].copy_from_slice(path.as_bytes());
            header.set_entry_type(*kind);
            header.set_mode(0o4750);
            let is_link = matches!(kind, EntryType::Symlink | EntryType::Link);
            if is_link {
                header.set_link_name(content).unwrap();
            }
            let content = if is_link { "" } else { content };
            header.set_size(content.len().try_into().unwrap());
            header.set_cksum();
            builder.append(&header, content.as_bytes()).unwrap();
        }
        builder.into_inner().unwrap()
    }

    #[test]
    fn cp_packs_and_unpacks_a_folder_with_links_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let from = dir.path().join("from");
        fs::create_dir_all(from.join("deep/empty")).unwrap();
        fs::write(from.join("deep/file"), "content").unwrap();
        std::os::unix::fs::symlink("/etc/passwd", from.join("link")).unwrap();
        let mut bytes = Vec::new();
        pack(&from, "data", &mut bytes).unwrap();
        let to = dir.path().join("to");
        assert_eq!(unpack(&bytes[..], "data", &to).unwrap(), [PathBuf::from("data/link")]);
        assert_eq!(fs::read(to.join("deep/file")).unwrap(), b"content");
        assert!(to.join("deep/empty").is_dir() && !to.join("link").exists());
    }

    #[test]
    fn cp_unpacks_a_single_file_without_setuid() {
        let dir = tempfile::tempdir().unwrap();
        let to = dir.path().join("copy");
        unpack(&archive(&[(EntryType::Regular, "./file", "text")])[..], "file", &to).unwrap();
        assert_eq!(fs::read(&to).unwrap(), b"text");
        assert_eq!(fs::metadata(&to).unwrap().permissions().mode() & 0o7000, 0);
    }

    #[test]
    fn cp_writes_nothing_outside_of_its_target() {
        let dir = tempfile::tempdir().unwrap();
        let to = dir.path().join("to");
        for path in ["../evil", "data/../../evil", "/evil", "other/evil", "data/x/../../../evil"] {
            let error = unpack(&archive(&[(EntryType::Regular, path, "x")])[..], "data", &to).unwrap_err();
            assert!(matches!(error, UnpackError::Outside(_)), "{path}: {error}");
        }
        // Files below what the container says is a link are in a folder of that name.
        let outside = dir.path().join("outside");
        fs::create_dir(&outside).unwrap();
        let entries = [
            (EntryType::Symlink, "data/link", outside.to_str().unwrap()),
            (EntryType::Regular, "data/link/evil", "x"),
        ];
        assert_eq!(unpack(&archive(&entries)[..], "data", &to).unwrap(), [PathBuf::from("data/link")]);
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
        assert_eq!(fs::read(to.join("link/evil")).unwrap(), b"x");
    }

    #[test]
    fn cp_reports_an_archive_that_ends_too_early() {
        let dir = tempfile::tempdir().unwrap();
        let bytes = archive(&[(EntryType::Regular, "data", &"x".repeat(2000))]);
        for end in [300, 512, 1500] {
            let error = unpack(&bytes[..end], "data", &dir.path().join("to")).unwrap_err();
            assert!(matches!(error, UnpackError::Archive(_) | UnpackError::Write { .. }), "{end}: {error}");
        }
        assert!(unpack(&b"no archive at all"[..], "data", &dir.path().join("to")).is_err());
    }
}
