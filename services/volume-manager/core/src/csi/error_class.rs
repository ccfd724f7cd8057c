//! Whether a failed operation of a CSI volume may have left something behind (volumes.md §3.12, §11.3).

use crate::world::FailureClass;

/// A gRPC status code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(i32)]
#[allow(missing_docs, reason = "the codes are gRPC's")]
pub enum Code {
    Ok = 0,
    Canceled = 1,
    Unknown = 2,
    InvalidArgument = 3,
    DeadlineExceeded = 4,
    NotFound = 5,
    AlreadyExists = 6,
    PermissionDenied = 7,
    ResourceExhausted = 8,
    FailedPrecondition = 9,
    Aborted = 10,
    OutOfRange = 11,
    Unimplemented = 12,
    Internal = 13,
    Unavailable = 14,
    DataLoss = 15,
    Unauthenticated = 16,
}

impl Code {
    /// Every code, by number.
    pub const ALL: [Self; 17] = [
        Self::Ok,
        Self::Canceled,
        Self::Unknown,
        Self::InvalidArgument,
        Self::DeadlineExceeded,
        Self::NotFound,
        Self::AlreadyExists,
        Self::PermissionDenied,
        Self::ResourceExhausted,
        Self::FailedPrecondition,
        Self::Aborted,
        Self::OutOfRange,
        Self::Unimplemented,
        Self::Internal,
        Self::Unavailable,
        Self::DataLoss,
        Self::Unauthenticated,
    ];

    /// The code with a number. A number that gRPC does not define counts as [`Code::Unknown`], as in gRPC itself.
    pub fn from_number(number: i32) -> Self {
        Self::ALL.into_iter().find(|code| code.number() == number).unwrap_or(Self::Unknown)
    }

    /// Its number.
    pub const fn number(self) -> i32 {
        self as i32
    }

    /// Its name, as the label `grpc_status_code` of `csi_operations_seconds` has it (volumes.md §13).
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "OK",
            Self::Canceled => "Canceled",
            Self::Unknown => "Unknown",
            Self::InvalidArgument => "InvalidArgument",
            Self::DeadlineExceeded => "DeadlineExceeded",
            Self::NotFound => "NotFound",
            Self::AlreadyExists => "AlreadyExists",
            Self::PermissionDenied => "PermissionDenied",
            Self::ResourceExhausted => "ResourceExhausted",
            Self::FailedPrecondition => "FailedPrecondition",
            Self::Aborted => "Aborted",
            Self::OutOfRange => "OutOfRange",
            Self::Unimplemented => "Unimplemented",
            Self::Internal => "Internal",
            Self::Unavailable => "Unavailable",
            Self::DataLoss => "DataLoss",
            Self::Unauthenticated => "Unauthenticated",
        }
    }
}

/// What has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailedStep {
    /// The driver has answered a call with this status. [`Code::Ok`] never occurs in an error.
    Status(Code),
    /// A call ended without a gRPC status, for instance because the connection broke.
    NoStatus,
    /// The driver is not registered.
    DriverLookup,
    /// A secret of the volume cannot be read.
    Secret,
    /// The CSIDriver or VolumeAttachment cannot be read, or does not allow the operation yet.
    ApiObject,
    /// The volume is published, and its files could not all get their group.
    FsGroupWalk,
    /// Anything else on the node, before the driver was called.
    Preparation,
}

/// The class of an error.
pub const fn error_class(step: FailedStep) -> FailureClass {
    match step {
        FailedStep::Status(code) => status_class(code),
        FailedStep::NoStatus | FailedStep::FsGroupWalk => FailureClass::Uncertain,
        FailedStep::DriverLookup | FailedStep::Secret | FailedStep::ApiObject => FailureClass::Transient,
        FailedStep::Preparation => FailureClass::Final,
    }
}

const fn status_class(code: Code) -> FailureClass {
    match code {
        Code::Canceled
        | Code::DeadlineExceeded
        | Code::Unavailable
        | Code::ResourceExhausted
        | Code::Aborted => FailureClass::Uncertain,
        Code::Ok
        | Code::Unknown
        | Code::InvalidArgument
        | Code::NotFound
        | Code::AlreadyExists
        | Code::PermissionDenied
        | Code::FailedPrecondition
        | Code::OutOfRange
        | Code::Unimplemented
        | Code::Internal
        | Code::DataLoss
        | Code::Unauthenticated => FailureClass::Final,
    }
}

/// Whether the error code of a VolumeAttachment says that the node has no room for another volume (volumes.md §3.14).
pub fn is_attach_limit(attach_error_code: Option<i32>) -> bool {
    attach_error_code == Some(Code::ResourceExhausted.number())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn five_status_codes_are_uncertain_and_every_other_one_is_final() {
        let uncertain = [1, 4, 8, 10, 14];
        for number in (-2..40).chain([i32::MIN, i32::MAX]) {
            let class = error_class(FailedStep::Status(Code::from_number(number)));
            let expected =
                if uncertain.contains(&number) { FailureClass::Uncertain } else { FailureClass::Final };
            assert_eq!(class, expected, "{number}");
        }
    }

    #[test]
    fn steps_without_a_status_have_their_own_class() {
        for (step, class) in [
            (FailedStep::NoStatus, FailureClass::Uncertain),
            (FailedStep::FsGroupWalk, FailureClass::Uncertain),
            (FailedStep::DriverLookup, FailureClass::Transient),
            (FailedStep::Secret, FailureClass::Transient),
            (FailedStep::ApiObject, FailureClass::Transient),
            (FailedStep::Preparation, FailureClass::Final),
        ] {
            assert_eq!(error_class(step), class, "{step:?}");
        }
    }

    #[test]
    fn codes_have_the_numbers_and_names_of_grpc() {
        for (number, code) in (0..).zip(Code::ALL) {
            assert_eq!(code.number(), number, "{code:?}");
            assert_eq!(Code::from_number(number), code);
        }
        assert_eq!(Code::from_number(17), Code::Unknown);
        assert_eq!(Code::from_number(-1), Code::Unknown);
        assert_eq!(Code::Ok.as_str(), "OK");
        for code in &Code::ALL[1..] {
            assert_eq!(code.as_str(), format!("{code:?}"));
        }
    }

    #[test]
    fn only_resource_exhausted_is_an_attach_limit() {
        for code in [None, Some(0), Some(7), Some(9), Some(14)] {
            assert!(!is_attach_limit(code), "{code:?}");
        }
        assert!(is_attach_limit(Some(8)));
    }
}
