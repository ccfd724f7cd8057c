//! What the plugins of disks need of the node: commands, mounts, and the files in which the kernel shows its devices.

use std::fmt;
use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use keelson_volume_manager_core::desire::FsGroupPolicy;
use keelson_volume_manager_core::multipath::Mapping;
use keelson_volume_manager_core::world::FailureClass;

use super::{Answer, PluginError};
use crate::mounter::{CommandOutput, DEADLINE, MountRequest, Mounter};
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
        let text = format!("{program} {} ended with {ended}: {}", arguments.join(" "), output.stderr.trim());
        Err(PluginError::new(text))
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

/// Does work that blocks in a thread that is abandoned at the deadline. `what` completes the sentence "cannot …".
pub(super) async fn blocking<T: Send + 'static>(
    what: &str,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, PluginError> {
    match tokio::time::timeout(DEADLINE, tokio::task::spawn_blocking(work)).await {
        Ok(Ok(Ok(value))) => Ok(value),
        Ok(Ok(Err(error))) => Err(PluginError::new(format!("cannot {what}: {error}"))),
        Ok(Err(error)) => Err(PluginError::new(format!("cannot {what}: {error}"))),
        Err(_) => {
            let text = format!("cannot {what}: the node has not answered within {} s", DEADLINE.as_secs());
            Err(PluginError::new(text).of_class(FailureClass::Uncertain))
        }
    }
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

/// The names in a folder, sorted; none if it is missing.
pub(super) fn names_in(folder: &Path) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut names = Vec::new();
    for entry in entries {
        // A name that is not UTF-8 is none that the kernel or this agent has given.
        names.extend(entry?.file_name().into_string());
    }
    names.sort();
    Ok(names)
}

/// Removes a file or an empty folder; a missing one is removed already.
pub(super) fn remove(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
