//! What a program writes, of which only the beginning is kept.

use std::io;
use std::time::Duration;

use rustix::fd::OwnedFd;
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};

/// More output than this is dropped, in bytes.
pub(super) const MAX_OUTPUT: usize = 64 << 10;
/// How often what is too much is dropped while a program runs.
pub(super) const TRIM_PERIOD: Duration = Duration::from_millis(50);
/// Ends a text of which the rest was dropped.
const TRUNCATED: &str = "… [truncated: the program has written more than 64 KiB]";

/// Whether the rest of an output was dropped.
pub(crate) fn is_truncated(output: &str) -> bool {
    output.ends_with(TRUNCATED)
}

/// A file in memory that a program writes to. Unlike a pipe, a daemon that inherits it holds up nothing, and a program that
/// outlives this service can still write.
#[derive(Debug)]
pub(super) struct Captured(OwnedFd);

impl Captured {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self(rustix::fs::memfd_create(c"output", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?))
    }

    /// The file for the program.
    pub(super) fn for_program(&self) -> io::Result<OwnedFd> {
        self.0.try_clone()
    }

    fn size(&self) -> usize {
        rustix::fs::fstat(&self.0).ok().and_then(|stat| usize::try_from(stat.st_size).ok()).unwrap_or(0)
    }

    /// Frees the memory of what is too much. The program continues behind it.
    pub(super) fn trim(&self) {
        let size = self.size();
        if size > MAX_OUTPUT {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let (start, length) = (MAX_OUTPUT as u64, (size - MAX_OUTPUT) as u64);
            // Without it the memory is freed with the file.
            let _ = rustix::fs::fallocate(&self.0, flags, start, length);
        }
    }

    /// Ends the growth of the file, after the program has ended: a daemon that it has left writes to nobody.
    pub(super) fn close(&self) {
        self.trim();
        // Sealed already, if it fails.
        let _ = rustix::fs::fcntl_add_seals(&self.0, SealFlags::GROW);
    }

    /// What was written. Bytes that are not UTF-8 are replaced.
    pub(super) fn text(&self) -> String {
        let size = self.size();
        let mut bytes = vec![0; size.min(MAX_OUTPUT)];
        let mut length = 0;
        while length < bytes.len() {
            match rustix::io::pread(&self.0, &mut bytes[length..], length as u64) {
                Ok(0) | Err(_) => break,
                Ok(read) => length += read,
            }
        }
        let mut text = String::from_utf8_lossy(&bytes[..length]).into_owned();
        if size > MAX_OUTPUT {
            text.push_str(TRUNCATED);
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write as _;
    use std::os::fd::AsRawFd as _;
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn only_the_beginning_of_an_output_is_kept_in_memory_and_it_says_so() {
        let captured = Captured::new().unwrap();
        let mut program = File::from(captured.for_program().unwrap());
        program.write_all(b"begin").unwrap();
        assert_eq!((captured.text().as_str(), is_truncated("begin")), ("begin", false));
        for _ in 0..32 {
            program.write_all(&vec![b'x'; 1 << 20]).unwrap();
            captured.trim();
        }
        let file = File::open(format!("/proc/self/fd/{}", captured.0.as_raw_fd())).unwrap();
        let kept = file.metadata().unwrap().blocks() * 512;
        assert!(kept <= 2 * MAX_OUTPUT as u64, "{kept}");
        let text = captured.text();
        assert!(text.starts_with("beginxxx") && is_truncated(&text), "{}", text.len());
        assert!(text.len() < MAX_OUTPUT + 100);
    }

    #[test]
    fn nothing_is_added_to_an_output_that_was_closed() {
        let captured = Captured::new().unwrap();
        let mut program = File::from(captured.for_program().unwrap());
        program.write_all(b"text").unwrap();
        captured.close();
        assert!(program.write_all(b"more").is_err());
        assert_eq!(captured.text(), "text");
    }
}
