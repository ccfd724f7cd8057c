//! Errors of volumes that plugins provide.

use std::fmt;

use keelson_volume_manager_core::expansion::ErrorClass;
use keelson_volume_manager_core::wait_owner::WaitOwner;
use keelson_volume_manager_core::world::{FailureClass, MountStep};

/// Why a call of a plugin failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PluginError {
    /// Whether something may be left of it.
    pub(crate) class: FailureClass,
    /// The step of the mount that failed, if it is not the one of the call.
    pub(crate) step: Option<MountStep>,
    /// Who has to act.
    pub(crate) owner: WaitOwner,
    /// What is wrong, and the way out.
    pub(crate) message: String,
    /// What the error of an expansion says about the size, if [`Self::class`] does not say it.
    pub(crate) expansion: Option<ErrorClass>,
    /// The device has another filesystem than the requested one.
    pub(crate) is_filesystem_mismatch: bool,
}

impl PluginError {
    /// An error of an attempt that has changed nothing, and that this service retries. What an earlier attempt has left is still
    /// to be undone: only a driver or a command can say that nothing is left (`FailureClass::Final`).
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self {
            class: FailureClass::Transient,
            step: None,
            owner: WaitOwner::VolumeManager,
            message: message.into(),
            expansion: None,
            is_filesystem_mismatch: false,
        }
    }

    /// The same error of an expansion, with what it says about the size.
    pub(crate) fn of_expansion(self, class: ErrorClass) -> Self {
        Self { expansion: Some(class), ..self }
    }

    /// The same error, because the device has another filesystem than the requested one.
    pub(crate) fn of_filesystem_mismatch(self) -> Self {
        Self { is_filesystem_mismatch: true, ..self }
    }

    /// What the error of an expansion says about the size.
    pub(crate) fn expansion_class(&self) -> ErrorClass {
        self.expansion.unwrap_or(match self.class {
            FailureClass::Final => ErrorClass::Final,
            FailureClass::Uncertain | FailureClass::Transient => ErrorClass::Unfinished,
        })
    }

    /// Whether a failed expansion has left nothing in progress; `None`: the error is not one of an expansion.
    pub(crate) fn is_final_expansion(&self) -> Option<bool> {
        self.expansion.map(|class| class != ErrorClass::Unfinished)
    }

    /// The same error, for a person to mend.
    pub(crate) fn for_you(self) -> Self {
        Self { owner: WaitOwner::You, ..self }
    }

    /// The same error of another class.
    pub(crate) fn of_class(self, class: FailureClass) -> Self {
        Self { class, ..self }
    }

    /// The same error of another step.
    pub(crate) fn at(self, step: MountStep) -> Self {
        Self { step: Some(step), ..self }
    }
}

impl fmt::Display for PluginError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}
