//! What the plugins of disks need of the node: commands, mounts, and the files in which the kernel shows its devices.

use std::fmt;
use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use keelson_volume_manager_core::desire::FsGroupPolicy;
use keelson_volume_manager_core::multipath::Mapping;
use keelson_volume_manager_core::world::{FailureClass, MountLabel};

use super::{Answer, PluginError};
use crate::listing::names_in;
use crate::mounter::{self, CommandOutput, DEADLINE, MountRequest, Mounter, ThreadError};
use crate::walks::FsGroupWalks;

/// The mode of the folders of volumes (volumes.md §2).
pub(super) const FOLDER_MODE: u32 = 0o750;

/// Runs commands of the node.
pub(crate) trait Commands: fmt::Debug + Send + Sync {
    /// As [`Mounter::run`].
    fn run<'a>(
        &'a self,
        program: &'a str,
        arguments: &'a [&'a str],
        deadline: Duration,
    ) -> Answer<'a, CommandOutput>;

    /// As [`Mounter::grow`].
    fn grow<'a>(&'a self, device: &'a Path, mount_point: &'a Path) -> Answer<'a, ()>;

    /// As [`Mounter::is_busy`].
    fn is_busy<'a>(&'a self, device: &'a Path) -> Answer<'a, bool>;
}

/// An fsGroup to apply to the files of a volume that can be written.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ownership<'a> {
    pub(crate) group: u32,
    pub(crate) policy: FsGroupPolicy,
    pub(crate) walks: &'a FsGroupWalks,
}

/// Access to mounts. Each method is as that of [`Mounter`].
pub(crate) trait Mounts: fmt::Debug + Send + Sync {
    fn format_and_mount<'a>(&'a self, request: MountRequest<'a>) -> Answer<'a, ()>;
    fn bind<'a>(&'a self, source: &'a Path, target: &'a Path, options: &'a [String]) -> Answer<'a, ()>;
    fn is_mount_point(&self, path: &Path) -> Result<bool, PluginError>;
    fn is_bound(&self, path: &Path, _options: &[String]) -> Result<bool, PluginError> {
        self.is_mount_point(path)
    }
    /// The options of the mount that `path` is on, and those of its filesystem, separated by commas.
    fn filesystem_options(&self, path: &Path) -> Result<String, PluginError>;
    /// Whether something is at `path`, after links.
    fn exists<'a>(&'a self, path: &'a Path) -> Answer<'a, bool>;
    fn clean_mount_point<'a>(&'a self, path: &'a Path) -> Answer<'a, ()>;
    fn mount_references(&self, path: &Path) -> Result<Vec<PathBuf>, PluginError>;
    fn create_folders<'a>(&'a self, path: &'a Path) -> Answer<'a, ()>;
    fn apply_fs_group<'a>(&'a self, path: &'a Path, ownership: Ownership<'a>) -> Answer<'a, ()>;
}

impl Commands for Mounter {
    fn run<'a>(
        &'a self,
        program: &'a str,
        arguments: &'a [&'a str],
        deadline: Duration,
    ) -> Answer<'a, CommandOutput> {
        Box::pin(Mounter::run(self, program, arguments, deadline))
    }

    fn grow<'a>(&'a self, device: &'a Path, mount_point: &'a Path) -> Answer<'a, ()> {
        Box::pin(Mounter::grow(self, device, mount_point))
    }

    fn is_busy<'a>(&'a self, device: &'a Path) -> Answer<'a, bool> {
        Box::pin(Mounter::is_busy(self, device))
    }
}

impl Mounts for Mounter {
    fn format_and_mount<'a>(&'a self, request: MountRequest<'a>) -> Answer<'a, ()> {
        Box::pin(Mounter::format_and_mount(self, request, &[]))
    }

    fn bind<'a>(&'a self, source: &'a Path, target: &'a Path, options: &'a [String]) -> Answer<'a, ()> {
        Box::pin(Mounter::bind(self, source, target, options))
    }

    fn is_mount_point(&self, path: &Path) -> Result<bool, PluginError> {
        Mounter::is_mount_point(self, path)
    }

    fn is_bound(&self, path: &Path, options: &[String]) -> Result<bool, PluginError> {
        Mounter::is_bound(self, path, options)
    }

    fn filesystem_options(&self, path: &Path) -> Result<String, PluginError> {
        Mounter::filesystem_options(self, path)
    }

    fn exists<'a>(&'a self, path: &'a Path) -> Answer<'a, bool> {
        Box::pin(async move { Ok(self.inspect(path).await?.is_some()) })
    }

    fn clean_mount_point<'a>(&'a self, path: &'a Path) -> Answer<'a, ()> {
        Box::pin(Mounter::clean_mount_point(self, path, false))
    }

    fn mount_references(&self, path: &Path) -> Result<Vec<PathBuf>, PluginError> {
        Mounter::mount_references(self, path)
    }

    fn create_folders<'a>(&'a self, path: &'a Path) -> Answer<'a, ()> {
        Box::pin(Mounter::create_folders(self, path, FOLDER_MODE))
    }

    fn apply_fs_group<'a>(&'a self, path: &'a Path, ownership: Ownership<'a>) -> Answer<'a, ()> {
        let Ownership { group, policy, walks } = ownership;
        Box::pin(Mounter::apply_fs_group(self, path, group, false, policy, walks))
    }
}

/// The node. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Host {
    /// The agent's root folder.
    pub(crate) root: PathBuf,
    pub(crate) commands: Arc<dyn Commands>,
    pub(crate) mounts: Arc<dyn Mounts>,
    pub(super) machine: Machine,
}

impl Host {
    /// This node, with the agent's root folder.
    pub(crate) fn new(root: PathBuf, mounter: &Mounter) -> Self {
        Self {
            root,
            commands: Arc::new(mounter.clone()),
            mounts: Arc::new(mounter.clone()),
            machine: Machine { root: "/".into() },
        }
    }

    /// As [`is_mount_point`].
    pub(super) async fn is_mount_point(&self, path: &Path) -> Result<bool, PluginError> {
        is_mount_point(&self.mounts, path).await
    }

    /// As [`mount_references`].
    pub(super) async fn mount_references(&self, path: &Path) -> Result<Vec<PathBuf>, PluginError> {
        mount_references(&self.mounts, path).await
    }

    /// Runs a command that has to end with 0.
    pub(super) async fn run_checked(
        &self,
        program: &str,
        arguments: &[&str],
    ) -> Result<CommandOutput, PluginError> {
        let output = self.commands.run(program, arguments, DEADLINE).await?;
        if output.code == Some(0) {
            return Ok(output);
        }
        let ended = output.code.map_or_else(|| "a signal".to_owned(), |code| format!("exit code {code}"));
        let (arguments, why) = (arguments.join(" "), shortened(&output.stderr));
        Err(PluginError::new(format!("{program} {arguments} ended with {ended}: {why}")))
    }

    /// Does work on files of the node, whose calls may block, in a thread that is abandoned at the deadline. `what`
    /// completes the sentence "cannot …".
    pub(super) async fn on_machine<T: Send + 'static>(
        &self,
        what: &str,
        work: impl FnOnce(&Machine) -> io::Result<T> + Send + 'static,
    ) -> Result<T, PluginError> {
        let machine = self.machine.clone();
        blocking(what, move || work(&machine)).await
    }
}

/// The longest output of a command in an error, in bytes.
const MAX_SHOWN: usize = 2000;

/// The output of a command as an error shows it.
pub(super) fn shortened(output: &str) -> String {
    let output = output.trim();
    let end = (0..=MAX_SHOWN).rev().find(|end| output.is_char_boundary(*end)).unwrap_or(0);
    if output.len() <= MAX_SHOWN { output.to_owned() } else { format!("{}… [truncated]", &output[..end]) }
}

/// Whether something is mounted on `path` itself. mountinfo, which may be long, is read on a thread of its own.
pub(super) async fn is_mount_point(mounts: &Arc<dyn Mounts>, path: &Path) -> Result<bool, PluginError> {
    let (mounts, path) = (Arc::clone(mounts), path.to_owned());
    blocking("read the mounts of the node", move || Ok(mounts.is_mount_point(&path))).await?
}

/// Whether something is mounted on `path` itself that is restricted as `options` want it, read in the same way.
pub(super) async fn is_bound(
    mounts: &Arc<dyn Mounts>,
    path: &Path,
    options: &[String],
) -> Result<bool, PluginError> {
    let (mounts, path, options) = (Arc::clone(mounts), path.to_owned(), options.to_vec());
    blocking("read the mounts of the node", move || Ok(mounts.is_bound(&path, &options))).await?
}

/// The options of the mount that `path` is on, and those of its filesystem, read in the same way.
pub(super) async fn filesystem_options(mounts: &Arc<dyn Mounts>, path: &Path) -> Result<String, PluginError> {
    let (mounts, path) = (Arc::clone(mounts), path.to_owned());
    blocking("read the mounts of the node", move || Ok(mounts.filesystem_options(&path))).await?
}

/// The SELinux label with which something is mounted on `path`; `None` if nothing is, or the label is not one.
pub(super) async fn label_of_mount(
    mounts: &Arc<dyn Mounts>,
    path: &Path,
) -> Result<Option<MountLabel>, PluginError> {
    if !is_mount_point(mounts, path).await? {
        return Ok(None);
    }
    Ok(MountLabel::of_options(&filesystem_options(mounts, path).await?))
}

/// The other mounts of what is mounted on `path`, read in the same way.
pub(super) async fn mount_references(
    mounts: &Arc<dyn Mounts>,
    path: &Path,
) -> Result<Vec<PathBuf>, PluginError> {
    let (mounts, path) = (Arc::clone(mounts), path.to_owned());
    blocking("read the mounts of the node", move || Ok(mounts.mount_references(&path))).await?
}

/// Does work that blocks on a thread that is abandoned at the deadline; only so many threads may hang. What may hang is
/// better done by the helper process of [`Mounter`]. `what` completes the sentence "cannot …".
pub(super) async fn blocking<T: Send + 'static>(
    what: &str,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, PluginError> {
    mounter::blocking(work).await.map_err(|error| thread_error(what, &error))
}

/// As [`blocking`], for the files of one volume: while its earlier work hangs, it is refused, and other volumes have threads.
pub(super) async fn blocking_for<T: Send + 'static>(
    volume: &Path,
    what: &str,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, PluginError> {
    let done = mounter::blocking_for(&volume.to_string_lossy(), what, work).await;
    done.map_err(|error| thread_error(what, &error))
}

fn thread_error(what: &str, error: &ThreadError) -> PluginError {
    let class = match error {
        // It may still be at work.
        ThreadError::Deadline(_) => FailureClass::Uncertain,
        ThreadError::Failed(_)
        | ThreadError::NoThread
        | ThreadError::Refused(_)
        | ThreadError::Panicked(_) => FailureClass::Transient,
    };
    PluginError::new(format!("cannot {what}: {error}")).of_class(class)
}

/// Files of the kernel and of udev, below `/` or in tests below another folder. Every path is absolute and without that
/// folder. The calls block.
#[derive(Debug, Clone)]
pub(super) struct Machine {
    pub(super) root: PathBuf,
}

impl Machine {
    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// The names in a folder, sorted; none if it is missing.
    pub(super) fn names(&self, folder: &str) -> io::Result<Vec<String>> {
        names_in(&self.path(folder))
    }

    /// The content of a file, without white space around it; empty if it cannot be read.
    pub(super) fn text(&self, file: &str) -> String {
        fs::read_to_string(self.path(file)).unwrap_or_default().trim().to_owned()
    }

    /// Writes to a file of the kernel, which has to exist.
    pub(super) fn write(&self, file: &str, text: &str) -> io::Result<()> {
        let mut opened = fs::OpenOptions::new().write(true).open(self.path(file))?;
        opened.write_all(text.as_bytes())
    }

    /// The file that a path leads to when all links are followed; `None` if there is none.
    pub(super) fn follow(&self, path: &str) -> Option<String> {
        let target = self.path(path).canonicalize().ok()?;
        let inside = target.strip_prefix(&self.root).ok()?;
        inside.to_str().map(|inside| format!("/{inside}"))
    }

    /// The device node `/dev/<name>` of a device number, `major:minor`.
    pub(super) fn device_of_number(&self, number: &str) -> Option<String> {
        let target = fs::read_link(self.path(&format!("/sys/dev/block/{number}"))).ok()?;
        target.file_name()?.to_str().map(|name| format!("/dev/{name}"))
    }

    /// The device-mapper devices.
    pub(super) fn mappings(&self) -> io::Result<Vec<Mapping>> {
        let names = self.names("/sys/block")?.into_iter().filter(|name| name.starts_with("dm-"));
        names
            .map(|name| {
                let uuid = self.text(&format!("/sys/block/{name}/dm/uuid"));
                let slaves = self.names(&format!("/sys/block/{name}/slaves"))?;
                Ok(Mapping { name, uuid, slaves })
            })
            .collect()
    }
}

/// Removes a file or an empty folder; a missing one is removed already.
pub(super) fn remove(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use keelson_testkit::FuseServer;

    use super::*;
    use crate::mounter::testing::TestFolder;

    #[tokio::test]
    async fn a_look_at_a_path_that_hangs_is_abandoned() {
        let folder = TestFolder::new();
        let hanging = folder.folder("hanging");
        let server = FuseServer::over(&hanging).unwrap();
        let mounter = folder.mounter().with_patience(Duration::from_secs(1));
        let mounts: &dyn Mounts = &mounter;
        assert!(mounts.exists(&hanging).await.unwrap());
        assert!(!mounts.exists(&folder.path().join("missing")).await.unwrap());
        server.hang();
        let error = mounts.exists(&hanging.join("x")).await.unwrap_err();
        assert_eq!(error.class, FailureClass::Uncertain, "{error}");
        server.answer();
    }

    #[test]
    fn a_long_output_is_shortened_and_says_so() {
        assert_eq!(shortened(" short \n"), "short");
        for text in ["x".repeat(2000), "ä".repeat(1000)] {
            assert_eq!(shortened(&text), text);
        }
        for text in ["x".repeat(2001), "xä".repeat(1000)] {
            let short = shortened(&text);
            assert!(short.len() < 2020 && short.ends_with("… [truncated]"), "{}", short.len());
        }
    }
}
