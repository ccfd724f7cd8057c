//! Errors of etcd as errors of the command.

use keelson_etcd::EtcdError;

use crate::error::CliError;

/// The error for a failed call of etcd.
pub(super) fn from_etcd_error(error: EtcdError) -> CliError {
    let message = error.to_string();
    match error {
        EtcdError::Unreachable { .. } => CliError::EtcdUnavailable {
            message,
            hint: "check that the members are running and that --etcd names their client ports".into(),
        },
        EtcdError::Refused { .. } => CliError::Failed {
            message,
            hint: Some("set --etcd-cert and --etcd-key, or --etcd-user; the user needs a role on the node's keys".into()),
        },
        EtcdError::TooLarge { .. } => CliError::Failed {
            message,
            hint: Some(
                "make the object smaller: etcd accepts 1.5 MiB in one request, unless --max-request-bytes of its members is larger"
                    .into(),
            ),
        },
        EtcdError::Credential { field, path, message } => {
            let (flag, path) = (flag(field), path.display());
            CliError::Usage {
                message: format!("cannot use {path} of {flag}: {message}"),
                hint: format!("name another file with {flag}"),
            }
        }
        EtcdError::Missing { field, message } => {
            let flag = flag(field);
            CliError::Usage {
                message: format!("{flag} is not given: {message}"),
                hint: format!("add {flag} FILE"),
            }
        }
        EtcdError::Endpoint { .. } => {
            CliError::Usage { message, hint: "`keelson help` lists the flags of --etcd".into() }
        }
    }
}

/// The flag for a field of `etcd` in the KeelsonConfiguration.
fn flag(field: &str) -> &str {
    match field {
        "caFile" => "--etcd-ca",
        "certFile" => "--etcd-cert",
        "keyFile" => "--etcd-key",
        "passwordFile" => "--etcd-password-file",
        other => other,
    }
}
