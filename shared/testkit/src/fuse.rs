//! A FUSE server that hangs on demand, as a file server does that goes away and comes back.
//!
//! Its files are in memory, and the kernel caches nothing of them, so each access reaches the server. A request that it has
//! read and does not answer keeps its process in the kernel, where not even SIGKILL ends it.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{PipeReader, PipeWriter, Write as _};
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context as _;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// The kernel's request has at most this size.
const BUFFER: usize = (1 << 17) + 4096;
/// The header of a request and of an answer.
const HEADER: usize = 40;
const ROOT: u64 = 1;
const FOLDER: u32 = 0o040_000;
const TYPE: u32 = 0o170_000;
/// The kernel bypasses its cache for the content of an opened file.
const DIRECT_IO: u32 = 1;
/// Bytes per block, and blocks of the whole filesystem.
const BLOCK: u32 = 4096;
const BLOCKS: u64 = 1024;

/// Requests of the kernel (`enum fuse_opcode`).
mod opcode {
    pub(super) const LOOKUP: u32 = 1;
    pub(super) const FORGET: u32 = 2;
    pub(super) const GETATTR: u32 = 3;
    pub(super) const SETATTR: u32 = 4;
    pub(super) const MKNOD: u32 = 8;
    pub(super) const MKDIR: u32 = 9;
    pub(super) const UNLINK: u32 = 10;
    pub(super) const RMDIR: u32 = 11;
    pub(super) const OPEN: u32 = 14;
    pub(super) const READ: u32 = 15;
    pub(super) const WRITE: u32 = 16;
    pub(super) const STATFS: u32 = 17;
    pub(super) const RELEASE: u32 = 18;
    pub(super) const FSYNC: u32 = 20;
    pub(super) const FLUSH: u32 = 25;
    pub(super) const INIT: u32 = 26;
    pub(super) const OPENDIR: u32 = 27;
    pub(super) const READDIR: u32 = 28;
    pub(super) const RELEASEDIR: u32 = 29;
    pub(super) const FSYNCDIR: u32 = 30;
    pub(super) const INTERRUPT: u32 = 36;
    pub(super) const DESTROY: u32 = 38;
    pub(super) const BATCH_FORGET: u32 = 42;
}

/// Which requests are not answered.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Hang {
    Nothing,
    Everything,
    /// Changes of the owner or the mode of the file with this name.
    Changes(String),
}

/// A mounted filesystem whose server hangs on demand. Dropping it ends the requests that hang, and unmounts it.
#[derive(Debug)]
pub struct FuseServer {
    path: PathBuf,
    shared: Arc<Shared>,
    /// Ends the thread when it is closed.
    stop: Option<PipeWriter>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    device: Mutex<Option<File>>,
    state: Mutex<State>,
    held: Condvar,
}

#[derive(Debug)]
struct State {
    hang: Hang,
    /// Requests that are not answered.
    held: Vec<Vec<u8>>,
    nodes: BTreeMap<u64, Node>,
    next: u64,
}

#[derive(Debug, Clone)]
struct Node {
    parent: u64,
    name: String,
    mode: u32,
    uid: u32,
    gid: u32,
    data: Vec<u8>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FuseServer {
    /// Mounts an empty filesystem over an existing folder, and answers.
    ///
    /// # Errors
    /// No `/dev/fuse` (the kernel module `fuse` is missing: `modprobe fuse`), or not root.
    pub fn over(path: &Path) -> anyhow::Result<Self> {
        let device = OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/fuse")
            .context("cannot open /dev/fuse; `modprobe fuse` loads the module that makes it")?;
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0,allow_other\0", device.as_raw_fd());
        let options = std::ffi::CStr::from_bytes_with_nul(options.as_bytes())?;
        mount("keelson-test", path, "fuse", MountFlags::NOSUID | MountFlags::NODEV, options)
            .with_context(|| format!("cannot mount FUSE at {}", path.display()))?;
        rustix::io::ioctl_fionbio(&device, true)?;
        let root =
            Node { parent: ROOT, name: String::new(), mode: FOLDER | 0o755, uid: 0, gid: 0, data: vec![] };
        let state = State {
            hang: Hang::Nothing,
            held: Vec::new(),
            nodes: BTreeMap::from([(ROOT, root)]),
            next: ROOT + 1,
        };
        let shared = Arc::new(Shared {
            device: Mutex::new(Some(device.try_clone()?)),
            state: Mutex::new(state),
            held: Condvar::new(),
        });
        let (stopped, stop) = std::io::pipe()?;
        let thread = std::thread::spawn({
            let shared = Arc::clone(&shared);
            move || serve(&shared, &device, &stopped)
        });
        Ok(Self { path: path.to_owned(), shared, stop: Some(stop), thread: Some(thread) })
    }

    /// From now on answers nothing.
    pub fn hang(&self) {
        lock(&self.shared.state).hang = Hang::Everything;
    }

    /// From now on answers no change of the owner or the mode of files with this name.
    pub fn hang_on_changes_of(&self, name: &str) {
        lock(&self.shared.state).hang = Hang::Changes(name.to_owned());
    }

    /// Answers again, also what it has not answered before.
    pub fn answer(&self) {
        let mut state = lock(&self.shared.state);
        state.hang = Hang::Nothing;
        for request in std::mem::take(&mut state.held) {
            let answer = state.answer(&request);
            self.shared.send(answer.as_deref());
        }
    }

    /// Waits until at least one process hangs in a request.
    ///
    /// # Errors
    /// None does within `limit`.
    pub fn until_something_hangs(&self, limit: Duration) -> anyhow::Result<()> {
        let state = lock(&self.shared.state);
        let waited = self.shared.held.wait_timeout_while(state, limit, |state| state.held.is_empty());
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        anyhow::ensure!(!state.held.is_empty(), "nothing accesses {} within {limit:?}", self.path.display());
        Ok(())
    }

    /// The process ids of the requests that hang now.
    pub fn hanging(&self) -> Vec<u32> {
        lock(&self.shared.state).held.iter().map(|request| u32_at(request, 32)).collect()
    }

    /// The group of each file, by its path, without asking the kernel.
    pub fn groups(&self) -> BTreeMap<String, u32> {
        let state = lock(&self.shared.state);
        let path = |mut id: u64| {
            let mut parts = Vec::new();
            while id != ROOT {
                let Some(node) = state.nodes.get(&id) else { break };
                parts.push(node.name.clone());
                id = node.parent;
            }
            parts.reverse();
            parts.join("/")
        };
        state.nodes.iter().map(|(id, node)| (path(*id), node.gid)).collect()
    }
}

impl Drop for FuseServer {
    fn drop(&mut self) {
        // The connection ends with the last descriptor, and with it what hangs.
        lock(&self.shared.device).take();
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        if let Err(error) = unmount(&self.path, UnmountFlags::DETACH) {
            eprintln!("{} stays mounted: {error}", self.path.display());
        }
    }
}

fn serve(shared: &Shared, device: &File, stopped: &PipeReader) {
    let mut buffer = vec![0; BUFFER];
    loop {
        let mut files = [PollFd::new(device, PollFlags::IN), PollFd::new(stopped, PollFlags::IN)];
        if poll(&mut files, None).is_err() {
            continue;
        }
        if !files[1].revents().is_empty() {
            return;
        }
        let read = match rustix::io::read(device, &mut buffer) {
            Ok(read) if read >= HEADER => read,
            Ok(_) | Err(Errno::AGAIN | Errno::INTR | Errno::NOENT) => continue,
            // It was unmounted.
            Err(_) => return,
        };
        let request = buffer[..read].to_vec();
        let mut state = lock(&shared.state);
        if state.hangs(&request) {
            state.held.push(request);
            shared.held.notify_all();
        } else {
            let answer = state.answer(&request);
            shared.send(answer.as_deref());
        }
    }
}

impl Shared {
    fn send(&self, answer: Option<&[u8]>) {
        if let (Some(device), Some(answer)) = (&mut *lock(&self.device), answer) {
            // The process may have been interrupted.
            let _ = device.write_all(answer);
        }
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|part| part.try_into().ok()).map_or(0, u32::from_ne_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|part| part.try_into().ok()).map_or(0, u64::from_ne_bytes)
}

/// The name at `at`, which a zero byte ends.
fn name_at(bytes: &[u8], at: usize) -> String {
    let rest = bytes.get(at..).unwrap_or_default();
    String::from_utf8_lossy(rest.split(|byte| *byte == 0).next().unwrap_or_default()).into_owned()
}

impl State {
    fn hangs(&self, request: &[u8]) -> bool {
        let opcode = u32_at(request, 4);
        let is_notice = matches!(
            opcode,
            opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT | opcode::INIT | opcode::DESTROY
        );
        match &self.hang {
            Hang::Nothing => false,
            Hang::Everything => !is_notice,
            Hang::Changes(name) => {
                let node = self.nodes.get(&u64_at(request, 16));
                opcode == opcode::SETATTR && node.is_some_and(|node| node.name == *name)
            }
        }
    }

    /// The whole answer; `None` for a request that has none.
    fn answer(&mut self, request: &[u8]) -> Option<Vec<u8>> {
        let body = match self.body(request) {
            Ok(None) => return None,
            Ok(Some(body)) => Ok(body),
            Err(errno) => Err(errno),
        };
        let (error, body) = match body {
            Ok(body) => (0, body),
            Err(errno) => (-errno.raw_os_error(), Vec::new()),
        };
        let length = u32::try_from(16 + body.len()).unwrap_or(u32::MAX);
        let mut answer = length.to_ne_bytes().to_vec();
        answer.extend(error.to_ne_bytes());
        answer.extend(u64_at(request, 8).to_ne_bytes());
        answer.extend(body);
        Some(answer)
    }

    fn body(&mut self, request: &[u8]) -> Result<Option<Vec<u8>>, Errno> {
        let (id, input) = (u64_at(request, 16), request.get(HEADER..).unwrap_or_default());
        let body = match u32_at(request, 4) {
            opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT => return Ok(None),
            opcode::INIT => init(),
            opcode::LOOKUP => self.entry(self.child(id, &name_at(input, 0)).ok_or(Errno::NOENT)?)?,
            opcode::GETATTR => self.attributes(id)?,
            opcode::SETATTR => self.set_attributes(id, input)?,
            opcode::MKDIR => self.create(id, &name_at(input, 8), FOLDER | u32_at(input, 0))?,
            opcode::MKNOD => self.create(id, &name_at(input, 16), u32_at(input, 0))?,
            opcode::UNLINK | opcode::RMDIR => {
                let child = self.child(id, &name_at(input, 0)).ok_or(Errno::NOENT)?;
                if self.nodes.iter().any(|(other, node)| node.parent == child && *other != child) {
                    return Err(Errno::NOTEMPTY);
                }
                self.nodes.remove(&child);
                Vec::new()
            }
            opcode::OPEN | opcode::OPENDIR => {
                let mut body = 0_u64.to_ne_bytes().to_vec();
                body.extend(DIRECT_IO.to_ne_bytes());
                body.extend(0_u32.to_ne_bytes());
                body
            }
            opcode::READ => self.read(id, input)?,
            opcode::WRITE => self.write(id, input)?,
            opcode::READDIR => self.read_folder(id, input),
            opcode::STATFS => statistics(),
            opcode::RELEASE
            | opcode::RELEASEDIR
            | opcode::FLUSH
            | opcode::FSYNC
            | opcode::FSYNCDIR
            | opcode::DESTROY => Vec::new(),
            _ => return Err(Errno::NOSYS),
        };
        Ok(Some(body))
    }

    fn node(&self, id: u64) -> Result<&Node, Errno> {
        self.nodes.get(&id).ok_or(Errno::NOENT)
    }

    fn child(&self, parent: u64, name: &str) -> Option<u64> {
        let found =
            self.nodes.iter().find(|(id, node)| **id != ROOT && node.parent == parent && node.name == name);
        found.map(|(id, _)| *id)
    }

    /// `struct fuse_attr`.
    fn attribute(&self, id: u64) -> Result<Vec<u8>, Errno> {
        let node = self.node(id)?;
        let size = node.data.len() as u64;
        let mut bytes = Vec::new();
        for value in [id, size, size.div_ceil(512), 0, 0, 0] {
            bytes.extend(value.to_ne_bytes());
        }
        for value in [0, 0, 0, node.mode, 1, node.uid, node.gid, 0, BLOCK, 0] {
            bytes.extend(value.to_ne_bytes());
        }
        Ok(bytes)
    }

    /// `struct fuse_attr_out`, which the kernel does not cache.
    fn attributes(&self, id: u64) -> Result<Vec<u8>, Errno> {
        let mut body = vec![0; 16];
        body.extend(self.attribute(id)?);
        Ok(body)
    }

    /// `struct fuse_entry_out`, which the kernel does not cache.
    fn entry(&self, id: u64) -> Result<Vec<u8>, Errno> {
        let mut body = id.to_ne_bytes().to_vec();
        body.extend([0; 32]);
        body.extend(self.attribute(id)?);
        Ok(body)
    }

    fn set_attributes(&mut self, id: u64, input: &[u8]) -> Result<Vec<u8>, Errno> {
        let node = self.nodes.get_mut(&id).ok_or(Errno::NOENT)?;
        let has = |bit: u32| u32_at(input, 0) & bit != 0;
        if has(1) {
            node.mode = node.mode & TYPE | u32_at(input, 68) & !TYPE;
        }
        if has(2) {
            node.uid = u32_at(input, 76);
        }
        if has(4) {
            node.gid = u32_at(input, 80);
        }
        if has(8) {
            node.data.resize(usize::try_from(u64_at(input, 16)).unwrap_or(0), 0);
        }
        self.attributes(id)
    }

    fn create(&mut self, parent: u64, name: &str, mode: u32) -> Result<Vec<u8>, Errno> {
        self.node(parent)?;
        if self.child(parent, name).is_some() {
            return Err(Errno::EXIST);
        }
        let id = self.next;
        self.next += 1;
        let node = Node { parent, name: name.to_owned(), mode, uid: 0, gid: 0, data: Vec::new() };
        self.nodes.insert(id, node);
        self.entry(id)
    }

    fn read(&self, id: u64, input: &[u8]) -> Result<Vec<u8>, Errno> {
        let data = &self.node(id)?.data;
        let from = usize::try_from(u64_at(input, 8)).unwrap_or(usize::MAX).min(data.len());
        let size = usize::try_from(u32_at(input, 16)).unwrap_or(0);
        Ok(data[from..data.len().min(from + size)].to_vec())
    }

    fn write(&mut self, id: u64, input: &[u8]) -> Result<Vec<u8>, Errno> {
        let node = self.nodes.get_mut(&id).ok_or(Errno::NOENT)?;
        let from = usize::try_from(u64_at(input, 8)).map_err(|_| Errno::FBIG)?;
        let bytes = input.get(40..).unwrap_or_default();
        let end = from + bytes.len();
        if node.data.len() < end {
            node.data.resize(end, 0);
        }
        node.data[from..end].copy_from_slice(bytes);
        let mut body = u32_at(input, 16).to_ne_bytes().to_vec();
        body.extend([0; 4]);
        Ok(body)
    }

    fn read_folder(&self, id: u64, input: &[u8]) -> Vec<u8> {
        let (offset, size) = (u64_at(input, 8), usize::try_from(u32_at(input, 16)).unwrap_or(0));
        let mut body = Vec::new();
        let children = self.nodes.iter().filter(|(child, node)| **child != ROOT && node.parent == id);
        for (child, node) in children.filter(|(child, _)| **child > offset) {
            let mut entry = child.to_ne_bytes().to_vec();
            // The id is the offset of the next one, too.
            entry.extend(child.to_ne_bytes());
            entry.extend(u32::try_from(node.name.len()).unwrap_or(0).to_ne_bytes());
            entry.extend((node.mode >> 12 & 0o17).to_ne_bytes());
            entry.extend(node.name.as_bytes());
            entry.resize(entry.len().next_multiple_of(8), 0);
            if body.len() + entry.len() > size {
                break;
            }
            body.extend(entry);
        }
        body
    }
}

/// `struct fuse_init_out` of version 7.31.
fn init() -> Vec<u8> {
    let mut body = Vec::new();
    for value in [7_u32, 31, 0, 0] {
        body.extend(value.to_ne_bytes());
    }
    for value in [16_u16, 12] {
        body.extend(value.to_ne_bytes());
    }
    for value in [1_u32 << 17, 1] {
        body.extend(value.to_ne_bytes());
    }
    body.resize(64, 0);
    body
}

/// `struct fuse_statfs_out`: half of it is used.
fn statistics() -> Vec<u8> {
    let mut body = Vec::new();
    for value in [BLOCKS, BLOCKS / 2, BLOCKS / 2, 100, 50] {
        body.extend(value.to_ne_bytes());
    }
    for value in [BLOCK, 255, BLOCK, 0] {
        body.extend(value.to_ne_bytes());
    }
    body.resize(80, 0);
    body
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

    use super::*;

    #[test]
    fn a_fuse_server_has_files_and_hangs_until_it_answers() {
        let dir = tempfile_dir();
        let server = FuseServer::over(&dir).unwrap();
        fs::create_dir(dir.join("a")).unwrap();
        fs::write(dir.join("a/file"), "content").unwrap();
        assert_eq!(fs::read_to_string(dir.join("a/file")).unwrap(), "content");
        std::os::unix::fs::chown(dir.join("a/file"), None, Some(7)).unwrap();
        fs::set_permissions(dir.join("a"), fs::Permissions::from_mode(0o700)).unwrap();
        assert_eq!(fs::metadata(dir.join("a/file")).unwrap().gid(), 7);
        assert_eq!(fs::metadata(dir.join("a")).unwrap().mode() & 0o7777, 0o700);
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 1);
        assert_eq!(server.groups()["a/file"], 7);
        assert_eq!(rustix::fs::statvfs(&dir).unwrap().f_blocks, BLOCKS);
        server.hang();
        let path = dir.join("a/file");
        let thread = std::thread::spawn(move || fs::read_to_string(path).unwrap());
        server.until_something_hangs(Duration::from_secs(20)).unwrap();
        assert_eq!(server.hanging().len(), 1);
        server.answer();
        assert_eq!(thread.join().unwrap(), "content");
        fs::remove_file(dir.join("a/file")).unwrap();
        server.hang();
        let path = dir.join("a");
        let thread = std::thread::spawn(move || fs::metadata(path).map(drop));
        server.until_something_hangs(Duration::from_secs(20)).unwrap();
        drop(server);
        thread.join().unwrap().unwrap_err();
        fs::remove_dir(dir).unwrap();
    }

    fn tempfile_dir() -> PathBuf {
        let name = format!("keelson-fuse-{}-{}", std::process::id(), fastrand::u64(..));
        let dir = std::env::temp_dir().join(name);
        fs::create_dir(&dir).unwrap();
        dir
    }
}
