//! Starts a service as a process with its user, capabilities and lifeline.

use std::ffi::{CString, OsString, c_char, c_int, c_uint, c_ulong};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use keelson_config::{Config, ServiceName};
use keelson_init_core::privileges;

/// The default PATH for volume helpers and plugins, if init has none.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// The environment variables that services inherit from init.
const INHERITED: &[&str] =
    &["PATH", "TZ", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"];
/// CAP_SETPCAP, which is required to lower the bounding set.
const CAP_SETPCAP: u64 = 1 << 8;
/// Version 3 of the capability interface (capget(2)): two halves of 32 bits.
const CAPABILITY_VERSION_3: u32 = 0x2008_0522;

/// Why a service could not be started.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The binary is missing or cannot be opened.
    #[error("cannot open {}; put all binaries of a release into one folder (binDir)", path.display())]
    Binary {
        /// The binary.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The process cannot be created, or its user, capabilities or program cannot be set.
    #[error("cannot start {} as uid {uid}; init needs CAP_SETUID and CAP_SETGID, and the binary must be executable by all", path.display())]
    Spawn {
        /// The binary.
        path: PathBuf,
        /// The user.
        uid: u32,
        /// The cause.
        source: io::Error,
    },
}

/// Starts the services.
#[derive(Debug)]
pub struct Launcher {
    bin_dir: PathBuf,
    config_file: PathBuf,
    /// The read end of the lifeline; [`Lifeline`] holds the write end.
    lifeline: OwnedFd,
    environment: Vec<(OsString, OsString)>,
    config: Config,
    is_root: bool,
    capabilities: u64,
}

/// The write end of the lifeline, a pipe that tells services whether init is alive. Nothing is written; when init ends, the
/// last write end is closed and each service reads end-of-file.
#[derive(Debug)]
pub struct Lifeline(#[expect(dead_code, reason = "held open until init ends")] OwnedFd);

impl Launcher {
    /// A launcher for the services of `config`; `capabilities` are the effective ones of init.
    pub fn new(config: &Config, is_root: bool, capabilities: u64) -> io::Result<(Self, Lifeline)> {
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let launcher = Self {
            bin_dir: config.paths.bin_dir.clone(),
            config_file: config.paths.config_file(),
            environment: environment(read.as_raw_fd()),
            lifeline: read,
            config: config.clone(),
            is_root,
            capabilities,
        };
        Ok((launcher, Lifeline(write)))
    }

    /// The user that a service runs as.
    pub fn uid(&self, service: ServiceName) -> u32 {
        let own = rustix::process::geteuid().as_raw();
        if self.is_root { self.config.uid_of(service).unwrap_or(0) } else { own }
    }

    /// Whether init can lower the bounding sets of services.
    pub fn can_lower(&self) -> bool {
        self.capabilities & CAP_SETPCAP != 0
    }

    /// Starts `service` and returns its process id. The caller reaps it.
    pub fn spawn(&self, service: ServiceName) -> Result<u32, LaunchError> {
        let path = self.bin_dir.join(service.binary());
        let uid = self.uid(service);
        // Opened by init, so that a folder that the service's user cannot traverse does not matter.
        let binary = File::options()
            .read(true)
            .custom_flags(libc::O_PATH)
            .open(&path)
            .map_err(|source| LaunchError::Binary { path: path.clone(), source })?;
        let fail = |source| LaunchError::Spawn { path: path.clone(), uid, source };
        let program = Program::new(&path, &self.config_file, &self.environment).map_err(fail)?;
        let setup = self.setup(service, uid);
        let binary_fd = binary.as_raw_fd();
        let mut command = Command::new(&path);
        command.stdin(Stdio::null());
        // SAFETY: the closure runs between fork and exec. It makes system calls only, on memory that was
        // prepared before the fork: no allocation, no lock.
        unsafe {
            command.pre_exec(move || {
                setup.apply()?;
                Err(program.exec(binary_fd))
            });
        }
        // `Child` neither waits nor kills when it is dropped; the supervisor does both.
        let child = command.spawn().map_err(fail)?;
        Ok(child.id())
    }

    fn setup(&self, service: ServiceName, uid: u32) -> Setup {
        let keep = privileges::capability_bits(service) & self.capabilities;
        Setup {
            lifeline: self.lifeline.as_raw_fd(),
            identity: self.is_root.then_some((uid, self.config.users.operator_gid)),
            lower: self.is_root && self.can_lower(),
            keep: if self.is_root { keep } else { 0 },
        }
    }
}

fn environment(lifeline: RawFd) -> Vec<(OsString, OsString)> {
    let mut list: Vec<(OsString, OsString)> =
        INHERITED.iter().filter_map(|name| Some(((*name).into(), std::env::var_os(name)?))).collect();
    if std::env::var_os("PATH").is_none() {
        list.push(("PATH".into(), PATH.into()));
    }
    list.push(("KEELSON_LIFELINE_FD".into(), lifeline.to_string().into()));
    // One malloc arena keeps small services small.
    list.push(("MALLOC_ARENA_MAX".into(), "1".into()));
    list.push(("RUST_BACKTRACE".into(), "0".into()));
    list
}

/// The arguments and environment for execve(2).
struct Program {
    path: CString,
    _strings: Vec<CString>,
    arguments: Vec<*const c_char>,
    environment: Vec<*const c_char>,
}

// SAFETY: the pointers point into `_strings`, whose heap memory never moves or changes while they live.
unsafe impl Send for Program {}
// SAFETY: see above; nothing is ever written through them.
unsafe impl Sync for Program {}

impl Program {
    fn new(path: &Path, config_file: &Path, environment: &[(OsString, OsString)]) -> io::Result<Self> {
        let c = |bytes: &[u8]| CString::new(bytes).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput));
        let path = c(path.as_os_str().as_bytes())?;
        let mut strings = vec![path.clone(), c(b"--config")?, c(config_file.as_os_str().as_bytes())?];
        let arguments = strings.len();
        for (name, value) in environment {
            strings.push(c(&[name.as_bytes(), b"=", value.as_bytes()].concat())?);
        }
        let pointers = |strings: &[CString]| {
            strings.iter().map(|s| s.as_ptr()).chain(std::iter::once(std::ptr::null())).collect::<Vec<_>>()
        };
        let (arguments, environment) = (pointers(&strings[..arguments]), pointers(&strings[arguments..]));
        Ok(Self { path, arguments, environment, _strings: strings })
    }

    /// Executes the program; returns only on an error.
    fn exec(&self, binary: RawFd) -> io::Error {
        // SAFETY: path and arrays are zero-terminated and live until exec.
        unsafe { libc::execve(self.path.as_ptr(), self.arguments.as_ptr(), self.environment.as_ptr()) };
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::EACCES) {
            return error;
        }
        // The user may not be allowed to traverse a parent folder, such as a home folder: use the descriptor.
        // SAFETY: as above; the descriptor is open in this process, and the empty path is static.
        unsafe {
            libc::syscall(
                libc::SYS_execveat,
                binary,
                c"".as_ptr(),
                self.arguments.as_ptr(),
                self.environment.as_ptr(),
                libc::AT_EMPTY_PATH,
            )
        };
        io::Error::last_os_error()
    }
}

/// The setup of the child between fork and exec.
#[derive(Debug, Clone, Copy)]
struct Setup {
    lifeline: RawFd,
    /// User and primary group; `None` if init is not root.
    identity: Option<(u32, u32)>,
    /// Whether the bounding set is lowered to `keep`.
    lower: bool,
    /// The capabilities to keep.
    keep: u64,
}

impl Setup {
    /// Only system calls: see [`Launcher::spawn`].
    fn apply(self) -> io::Result<()> {
        // SAFETY: a zeroed signal set is valid memory for sigemptyset; all calls take plain numbers or
        // pointers to locals.
        unsafe {
            let mut none: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut none);
            check(libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut()))?;
            // A new session: an interrupt at the terminal goes to init only, which ends all services in order.
            check(libc::setsid())?;
            libc::umask(0o022);
            // Services do not need the descriptors that init was started with; before Linux 5.11 they stay open.
            libc::syscall(libc::SYS_close_range, 3, c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC);
            check(libc::fcntl(self.lifeline, libc::F_SETFD, 0))?;
        }
        if self.lower {
            lower_bounding_set(self.keep)?;
        }
        if let Some((uid, gid)) = self.identity {
            become_user(uid, gid)?;
            set_capabilities(self.keep, if uid == 0 { 0 } else { self.keep })?;
            if uid != 0 {
                raise_ambient(self.keep)?;
            }
        }
        prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0)
    }
}

fn check(result: c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn prctl(option: c_int, first: c_ulong, second: c_ulong) -> io::Result<()> {
    // SAFETY: the options used here take plain numbers (prctl(2)); the last two must be 0.
    check(unsafe { libc::prctl(option, first, second, 0 as c_ulong, 0 as c_ulong) })
}

/// Drops every capability that is not in `keep` from the bounding set.
fn lower_bounding_set(keep: u64) -> io::Result<()> {
    for capability in (0..64u64).filter(|capability| keep & (1 << capability) == 0) {
        match prctl(libc::PR_CAPBSET_DROP, capability as c_ulong, 0) {
            // Beyond the last capability of this kernel.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            result => result?,
        }
    }
    Ok(())
}

/// Sets user and groups. A service that runs as root has root's group, so that files that it creates for pods and in a
/// kubelet's folders belong to root's group as with a kubelet, and is a member of the operator group `operators`; for the
/// others that is the primary group.
fn become_user(uid: u32, operators: u32) -> io::Result<()> {
    let gid = if uid == 0 { 0 } else { operators };
    // Keep the capabilities when the user changes, until exec.
    prctl(libc::PR_SET_KEEPCAPS, 1, 0)?;
    // SAFETY: setgroups reads one gid from a local; the others take plain numbers.
    unsafe {
        check(libc::setgroups(1, &raw const operators))?;
        check(libc::setresgid(gid, gid, gid))?;
        check(libc::setresuid(uid, uid, uid))
    }
}

/// The header of capset(2).
#[repr(C)]
struct CapabilityHeader {
    version: u32,
    pid: c_int,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct CapabilityHalf {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

fn set_capabilities(permitted: u64, inheritable: u64) -> io::Result<()> {
    let half = |shift: u32| CapabilityHalf {
        effective: (permitted >> shift) as u32,
        permitted: (permitted >> shift) as u32,
        inheritable: (inheritable >> shift) as u32,
    };
    let header = CapabilityHeader { version: CAPABILITY_VERSION_3, pid: 0 };
    let halves = [half(0), half(32)];
    // SAFETY: version 3 reads a header and two halves of the layout above (linux/capability.h).
    let result = unsafe { libc::syscall(libc::SYS_capset, &raw const header, halves.as_ptr()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Raises ambient capabilities, which survive the exec of a program without file capabilities.
fn raise_ambient(keep: u64) -> io::Result<()> {
    for capability in (0..64u64).filter(|capability| keep & (1 << capability) != 0) {
        prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_RAISE as c_ulong, capability as c_ulong)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_service_binary_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        config.paths.bin_dir = dir.path().to_owned();
        let (launcher, _lifeline) = Launcher::new(&config, false, 0).unwrap();
        let error = launcher.spawn(ServiceName::PodSync).unwrap_err();
        assert!(error.to_string().contains("keelson-pod-sync"), "{error}");
        assert!(error.to_string().contains("binDir"), "{error}");
    }

    #[test]
    fn service_environment_is_minimal() {
        let names: Vec<String> =
            environment(7).iter().map(|(name, _)| name.to_string_lossy().into_owned()).collect();
        assert!(names.iter().all(|name| INHERITED.contains(&name.as_str())
            || ["KEELSON_LIFELINE_FD", "MALLOC_ARENA_MAX", "RUST_BACKTRACE"].contains(&name.as_str())));
        assert!(names.contains(&"PATH".to_owned()));
    }
}
