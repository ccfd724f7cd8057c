//! Why calls of CSI drivers fail (volumes.md §11.3).

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use keelson_volume_manager_core::csi::error_class::{Code, FailedStep, error_class};
use keelson_volume_manager_core::csi::paths::DriverName;
use keelson_volume_manager_core::world::FailureClass;

/// Why a call failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CallError {
    /// The driver.
    pub(crate) driver: DriverName,
    /// `NodeStageVolume`…
    pub(crate) method: &'static str,
    /// The driver's socket.
    pub(crate) endpoint: Arc<Path>,
    /// What happened.
    pub(crate) failure: Failure,
}

/// What happened to a failed call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The driver has answered with an error.
    Status {
        /// Its code.
        code: Code,
        /// Its text, without secrets.
        message: String,
    },
    /// The driver cannot be reached, or was lost during the call.
    NotReachable(String),
    /// The driver has not answered in time.
    NoAnswer,
    /// What the driver has sent is no valid answer.
    Invalid(String),
    /// The call was not sent: too many others of the driver have not ended.
    Busy,
}

impl CallError {
    /// Whether the driver may have done something (volumes.md §11.3).
    pub(crate) const fn class(&self) -> FailureClass {
        match &self.failure {
            Failure::Status { code, .. } => error_class(FailedStep::Status(*code)),
            Failure::NotReachable(_) | Failure::NoAnswer | Failure::Invalid(_) => {
                error_class(FailedStep::NoStatus)
            }
            Failure::Busy => FailureClass::Transient,
        }
    }

    /// The code of the driver's answer; `None` if it has not answered.
    pub(crate) const fn code(&self) -> Option<Code> {
        match &self.failure {
            Failure::Status { code, .. } => Some(*code),
            Failure::NotReachable(_) | Failure::NoAnswer | Failure::Invalid(_) | Failure::Busy => None,
        }
    }

    /// The label `grpc_status_code` of the metric.
    pub(super) const fn label(&self) -> &'static str {
        match &self.failure {
            Failure::Status { code, .. } => code.as_str(),
            Failure::NotReachable(_) => Code::Unavailable.as_str(),
            Failure::NoAnswer | Failure::Busy => Code::DeadlineExceeded.as_str(),
            Failure::Invalid(_) => "unknown-non-grpc",
        }
    }
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { driver, method, failure, .. } = self;
        let socket = self.endpoint.display();
        match failure {
            Failure::Status { code, message } => {
                write!(f, "{method} of the CSI driver {driver} has failed: {}: {message}", code.as_str())
            }
            Failure::NotReachable(why) => write!(
                f,
                "{method}: the CSI driver {driver} cannot be reached at {socket}: {why}; check that the driver's pod runs"
            ),
            Failure::NoAnswer => write!(
                f,
                "{method}: the CSI driver {driver} at {socket} has not answered in time; check the driver's log"
            ),
            Failure::Invalid(why) => write!(
                f,
                "{method}: what serves {socket} is no CSI driver {driver}, or a broken one: {why}; check the driver's \
                 version"
            ),
            Failure::Busy => write!(
                f,
                "{method}: too many calls of the CSI driver {driver} at {socket} have not ended; check the driver's log"
            ),
        }
    }
}

impl std::error::Error for CallError {}
