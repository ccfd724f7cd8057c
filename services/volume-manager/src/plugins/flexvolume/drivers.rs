//! The drivers of the node, and their calls.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use keelson_volume_manager_core::flexvolume::answer::{
    self, Answer, AnswerError, Capabilities, DefaultAction, Outcome, Support, Way, default_action,
};
use keelson_volume_manager_core::flexvolume::call::{Call, Command};
use keelson_volume_manager_core::flexvolume::driver::Driver;
use keelson_volume_manager_core::wait_owner::WaitOwner;
use keelson_volume_manager_core::world::FailureClass;

use crate::listing::names_in;
use crate::mounter::is_truncated;
use crate::plugins::PluginError;
use crate::plugins::disk::Locks;
use crate::plugins::host::{Commands, blocking};

/// What tells one version of an executable from another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Version {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

/// What a call came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Done {
    /// The driver has done it.
    ByDriver(Answer),
    /// The driver does not support the command: this is to be done instead.
    ByDefault(DefaultAction),
}

/// A driver whose `init` has succeeded.
#[derive(Debug)]
pub(super) struct DriverState {
    name: String,
    program: String,
    version: Version,
    pub(super) capabilities: Capabilities,
    support: Mutex<Support>,
    commands: Arc<dyn Commands>,
    deadline: Duration,
}

/// The drivers in the plugin folder.
#[derive(Debug)]
pub(super) struct Drivers {
    pub(super) folder: PathBuf,
    commands: Arc<dyn Commands>,
    deadline: Duration,
    known: Mutex<BTreeMap<Driver, Arc<DriverState>>>,
    /// By the name of the driver: `init` runs once at a time.
    init: Locks,
}

impl Drivers {
    pub(super) fn new(folder: PathBuf, commands: Arc<dyn Commands>, deadline: Duration) -> Self {
        Self { folder, commands, deadline, known: Mutex::default(), init: Locks::default() }
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<Driver, Arc<DriverState>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the plugin folder has a folder for a driver.
    pub(super) fn has_folder(&self, driver: &Driver) -> bool {
        self.folder.join(driver.folder()).is_dir()
    }

    /// As [`Self::has_folder`], on a thread of its own.
    pub(super) async fn is_installed(&self, driver: &Driver) -> Result<bool, PluginError> {
        let folder = self.folder.join(driver.folder());
        blocking("look up a flexVolume driver", move || Ok(folder.is_dir())).await
    }

    /// The names of the drivers with a folder.
    pub(super) async fn list(&self) -> Result<Vec<Driver>, PluginError> {
        let folder = self.folder.clone();
        let list = move || {
            let drivers = names_in(&folder)?.into_iter().filter_map(|name| Driver::in_folder(&name));
            Ok(drivers.filter(|driver| folder.join(driver.folder()).is_dir()).collect())
        };
        blocking("list the flexVolume drivers", list).await
    }

    /// Whether `init` of a driver has succeeded.
    #[cfg(test)]
    pub(super) fn is_known(&self, driver: &Driver) -> bool {
        self.known().contains_key(driver)
    }

    /// Forgets a driver that is gone.
    pub(super) fn forget(&self, driver: &Driver) {
        if self.known().remove(driver).is_some() {
            tracing::info!(event = "flexvolume_driver_removed", driver = driver.name(), "a driver is gone");
        }
    }

    /// Forgets every driver that is not among `present`.
    pub(super) fn retain(&self, present: &[Driver]) {
        self.known().retain(|driver, _| present.contains(driver));
    }

    /// A driver, after `init` if its executable is new or has changed.
    pub(super) async fn get(&self, driver: &Driver) -> Result<Arc<DriverState>, PluginError> {
        let _guard = self.init.lock(driver.name()).await;
        let program = self.folder.join(driver.executable());
        let version = match version_of(&program).await {
            Ok(version) => version,
            Err(error) => {
                self.known().remove(driver);
                return Err(error);
            }
        };
        if let Some(state) = self.known().get(driver).filter(|state| state.version == version) {
            return Ok(Arc::clone(state));
        }
        let mut state = DriverState {
            name: driver.name().to_owned(),
            program: program.to_string_lossy().into_owned(),
            version,
            capabilities: Capabilities::default(),
            support: Mutex::default(),
            commands: Arc::clone(&self.commands),
            deadline: self.deadline,
        };
        let done = state.call(&Call::Init).await.map_err(|error| error.of_class(FailureClass::Transient))?;
        if let Done::ByDriver(answer) = done {
            state.capabilities = answer.capabilities;
        }
        let state = Arc::new(state);
        self.known().insert(driver.clone(), Arc::clone(&state));
        let capabilities = state.capabilities;
        tracing::info!(
            event = "flexvolume_driver_found",
            driver = driver.name(),
            ?capabilities,
            "a driver is ready"
        );
        Ok(state)
    }
}

/// The version of the executable of a driver.
async fn version_of(program: &Path) -> Result<Version, PluginError> {
    let path = program.to_owned();
    let read = blocking("look up a flexVolume driver", move || match fs::metadata(&path) {
        Ok(meta) => Ok(Some(meta)),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(None)
        }
        Err(error) => Err(error),
    });
    let missing = |what: &str| PluginError {
        owner: WaitOwner::You,
        ..PluginError::new(format!(
            "no volume plugin matched: the flexVolume driver {} {what}",
            program.display()
        ))
        .of_class(FailureClass::Transient)
    };
    let meta = read.await?.ok_or_else(|| missing("does not exist; install it"))?;
    if !meta.is_file() || meta.mode() & 0o111 == 0 {
        return Err(missing("is not an executable file; install it with the mode 0755"));
    }
    Ok(Version {
        device: meta.dev(),
        inode: meta.ino(),
        size: meta.size(),
        modified: (meta.mtime(), meta.mtime_nsec()),
        changed: (meta.ctime(), meta.ctime_nsec()),
    })
}

impl DriverState {
    fn support(&self) -> MutexGuard<'_, Support> {
        self.support.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls the driver. Secrets in the arguments are not shown in errors. A call that did not end, and one whose answer
    /// cannot be read, may have had an effect.
    pub(super) async fn call(&self, call: &Call<'_>) -> Result<Done, PluginError> {
        let command = call.command();
        if let Way::Default(action) = self.support().way(command) {
            return Ok(Done::ByDefault(action));
        }
        let arguments = call.arguments();
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let deadline = call.limit_seconds().map_or(self.deadline, Duration::from_secs);
        let ended = self.commands.run(&self.program, &arguments, deadline).await;
        let ended = ended.map_err(|error| {
            let text = format!(
                "the flexVolume driver {} did not end its command {} within {} s, or could not be run",
                self.name,
                command.name(),
                deadline.as_secs()
            );
            // The text of the error may show the arguments.
            PluginError { message: text, ..error }.of_class(FailureClass::Uncertain)
        })?;
        if is_truncated(&ended.stdout) {
            let (name, command) = (&self.name, command.name());
            let text = format!(
                "the answer of the flexVolume driver {name} to its command {command} is truncated, because it has more than \
                 64 KiB; this is an error of the driver"
            );
            return Err(PluginError::new(text).of_class(FailureClass::Uncertain));
        }
        let outcome = answer::read(command, ended.stdout.as_bytes(), ended.code)
            .map_err(|error| self.failed(&error))?;
        self.support().record(command, &outcome);
        match (outcome, default_action(command)) {
            (Outcome::Success(answer), _) => Ok(Done::ByDriver(answer)),
            (Outcome::NotSupported, Some(action)) => Ok(Done::ByDefault(action)),
            (Outcome::NotSupported, None) => Err(self.failed(&AnswerError::InitNotSupported)),
        }
    }

    fn failed(&self, error: &AnswerError) -> PluginError {
        let class = match error {
            AnswerError::Failed { .. } | AnswerError::InitNotSupported => FailureClass::Final,
            AnswerError::Unparsable { .. } | AnswerError::Contradiction { .. } => FailureClass::Uncertain,
        };
        PluginError::new(format!("flexVolume driver {}: {error}", self.name)).of_class(class)
    }

    /// The error of a default action that does not replace `command`.
    pub(super) fn no_default(&self, command: Command) -> PluginError {
        PluginError::new(format!(
            "nothing replaces the command {} of the flexVolume driver {}",
            command.name(),
            self.name
        ))
    }
}
