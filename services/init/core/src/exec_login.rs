//! Users of a kubeconfig with an exec plugin (`users[].user.exec`): the command to run, and how its answer is read.
//!
//! The protocol is `client.authentication.k8s.io`, v1 and v1beta1: the plugin gets an `ExecCredential` in the variable
//! `KUBERNETES_EXEC_INFO` and prints one whose `status` has a token, a client certificate with its key, or both.

use std::path::Path;

use keelson_kube_model::time;
use serde_json::{Map, Value, json};

use crate::kubeconfig_context::{KubeconfigError, cluster_extension, copied_fields, kubeconfig_error, text};

/// The environment variable with the request to the plugin.
pub const EXEC_INFO: &str = "KUBERNETES_EXEC_INFO";
/// The versions of the protocol, the preferred one first.
const VERSIONS: [&str; 2] = ["client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1"];
/// The cluster extension that is passed to the plugin.
const CLUSTER_EXTENSION: &str = "client.authentication.k8s.io/exec";
/// The cluster fields that are passed to the plugin, in addition to the CA.
const CLUSTER_FIELDS: [&str; 5] =
    ["server", "tls-server-name", "insecure-skip-tls-verify", "proxy-url", "disable-compression"];
/// Other credentials, which cannot be combined with a plugin.
const OTHER_CREDENTIALS: [&str; 9] = [
    "auth-provider",
    "token",
    "tokenFile",
    "username",
    "password",
    "client-certificate",
    "client-certificate-data",
    "client-key",
    "client-key-data",
];

/// The exec plugin of a kubeconfig user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExecLogin {
    /// The field, such as `users[0].user.exec`.
    pub field: String,
    /// The `apiVersion`, which the answer must have too.
    pub api_version: String,
    /// The command: a path, or a name that is looked up in `PATH`.
    pub command: String,
    /// Its arguments.
    pub args: Vec<String>,
    /// Environment variables in addition to those of this process.
    pub env: Vec<(String, String)>,
    /// The advice for a missing command; may be empty.
    pub install_hint: String,
    /// Whether the plugin gets information about the cluster.
    provide_cluster_info: bool,
}

/// The credential in the answer of a plugin.
#[derive(Clone, PartialEq, Eq)]
pub struct ExecCredential {
    /// A bearer token.
    pub token: Option<String>,
    /// A client certificate and its key, both PEM.
    pub pair: Option<(String, String)>,
    /// When it expires, in seconds since 1970; `None`: unknown, it is valid until the API server rejects it.
    pub expires: Option<i64>,
}

/// Leaves secrets out.
impl std::fmt::Debug for ExecCredential {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ExecCredential").field("expires", &self.expires).finish_non_exhaustive()
    }
}

/// Why an answer is invalid. No message quotes the answer, which may contain a secret.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExecAnswerError {
    /// It is not a JSON object.
    #[error("its output is not a JSON object of kind ExecCredential")]
    NotAnObject,
    /// It has another kind.
    #[error("its output has kind {found:?} instead of ExecCredential")]
    Kind {
        /// Its kind.
        found: String,
    },
    /// It has another version.
    #[error("exec plugin is configured to use API version {expected}, plugin returned version {found}")]
    Version {
        /// The version in the kubeconfig.
        expected: String,
        /// The version in the answer.
        found: String,
    },
    /// It has no status.
    #[error("exec plugin didn't return a status field")]
    NoStatus,
    /// It has neither a token nor a certificate.
    #[error("exec plugin didn't return a token or cert/key pair")]
    NoCredential,
    /// It has a certificate without a key, or a key without a certificate.
    #[error("exec plugin returned only certificate or key, not both")]
    IncompletePair,
    /// A field has the wrong type or is not a timestamp.
    #[error("status.{field} is not {expected}")]
    Field {
        /// The field.
        field: &'static str,
        /// What was expected.
        expected: &'static str,
    },
}

impl ExecLogin {
    /// The exec plugin of a user; `None` for a user with other credentials. `folder` is that of the kubeconfig, from which
    /// relative paths start.
    ///
    /// # Errors
    /// A field is missing or has an unknown value, the plugin needs a terminal, or other credentials are given too.
    pub(crate) fn from_user(
        user: &Map<String, Value>,
        location: &str,
        folder: &Path,
    ) -> Result<Option<Self>, KubeconfigError> {
        let Some(exec) = user.get("exec").filter(|exec| !exec.is_null()) else { return Ok(None) };
        let field = format!("{location}.exec");
        let exec = exec.as_object().ok_or_else(|| kubeconfig_error(&field, "is not a map"))?;
        let is_set = |name: &&str| user.get(*name).is_some_and(|value| !value.is_null() && value != "");
        if let Some(other) = OTHER_CREDENTIALS.iter().find(|name| is_set(name)) {
            return Err(kubeconfig_error(
                &format!("{location}.{other}"),
                "cannot be combined with exec; keep one of the two",
            ));
        }
        let api_version = api_version(exec, &field)?;
        check_interactive_mode(exec, &field, &api_version)?;
        let command = text(exec, "command").ok_or_else(|| {
            kubeconfig_error(
                &format!("{field}.command"),
                "is missing; set it to the program that returns the credential",
            )
        })?;
        // Only a name without a slash is looked up in PATH; a relative path starts from the folder of the kubeconfig.
        let command = match command.contains('/') {
            true => folder.join(command).to_string_lossy().into_owned(),
            false => command.to_owned(),
        };
        Ok(Some(Self {
            api_version,
            command,
            args: strings(exec, &field)?,
            env: variables(exec, &field)?,
            install_hint: text(exec, "installHint").unwrap_or_default().to_owned(),
            provide_cluster_info: flag(exec, "provideClusterInfo", &field)?,
            field,
        }))
    }

    /// The value of [`EXEC_INFO`]. `flat` is the self-contained kubeconfig, `root` the original.
    pub fn info(&self, flat: &Value, root: &Map<String, Value>) -> String {
        let mut spec = json!({"interactive": false});
        if self.provide_cluster_info {
            let cluster = flat["clusters"][0]["cluster"].as_object();
            let mut given =
                cluster.map(|cluster| copied_fields(cluster, &CLUSTER_FIELDS)).unwrap_or_default();
            if let Some(authority) = cluster.and_then(|cluster| cluster.get("certificate-authority-data")) {
                given.insert("certificate-authority-data".to_owned(), authority.clone());
            }
            if let Some(config) = cluster_extension(root, CLUSTER_EXTENSION) {
                given.insert("config".to_owned(), config.clone());
            }
            spec["cluster"] = given.into();
        }
        json!({"kind": "ExecCredential", "apiVersion": self.api_version, "spec": spec}).to_string()
    }

    /// Reads the output of the plugin.
    ///
    /// # Errors
    /// The output is not a credential of the requested version.
    pub fn read_answer(&self, output: &[u8]) -> Result<ExecCredential, ExecAnswerError> {
        let answer: Value = serde_json::from_slice(output).map_err(|_| ExecAnswerError::NotAnObject)?;
        if !answer.is_object() {
            return Err(ExecAnswerError::NotAnObject);
        }
        let found = |field: &str| answer[field].as_str().unwrap_or_default().to_owned();
        if found("kind") != "ExecCredential" {
            return Err(ExecAnswerError::Kind { found: found("kind") });
        }
        if found("apiVersion") != self.api_version {
            let expected = self.api_version.clone();
            return Err(ExecAnswerError::Version { expected, found: found("apiVersion") });
        }
        let status = answer["status"].as_object().ok_or(ExecAnswerError::NoStatus)?;
        let token = optional_text(status, "token")?;
        let certificate = optional_text(status, "clientCertificateData")?;
        let pair = match (certificate, optional_text(status, "clientKeyData")?) {
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (None, None) => None,
            _ => return Err(ExecAnswerError::IncompletePair),
        };
        if token.is_none() && pair.is_none() {
            return Err(ExecAnswerError::NoCredential);
        }
        let wrong =
            || ExecAnswerError::Field { field: "expirationTimestamp", expected: "an RFC 3339 timestamp" };
        let expires = optional_text(status, "expirationTimestamp")?
            .map(|text| time::parse_seconds(&text).map_err(|_| wrong()))
            .transpose()?;
        Ok(ExecCredential { token, pair, expires })
    }
}

fn api_version(exec: &Map<String, Value>, field: &str) -> Result<String, KubeconfigError> {
    let at = format!("{field}.apiVersion");
    let version = text(exec, "apiVersion").ok_or_else(|| {
        kubeconfig_error(&at, &format!("is missing; write {} or {}", VERSIONS[0], VERSIONS[1]))
    })?;
    if VERSIONS.contains(&version) {
        return Ok(version.to_owned());
    }
    let message = format!("{version:?} is not supported; this must be {} or {}", VERSIONS[0], VERSIONS[1]);
    Err(kubeconfig_error(&at, &message))
}

/// A node has no terminal. v1 has no default mode, so a missing one is an error.
fn check_interactive_mode(
    exec: &Map<String, Value>,
    field: &str,
    api_version: &str,
) -> Result<(), KubeconfigError> {
    let at = format!("{field}.interactiveMode");
    match text(exec, "interactiveMode") {
        Some("Never" | "IfAvailable") => Ok(()),
        Some("Always") => Err(kubeconfig_error(
            &at,
            "is Always, but a node has no terminal; write Never or IfAvailable if the program works without one",
        )),
        Some(other) => Err(kubeconfig_error(
            &at,
            &format!("{other:?} is not supported; this must be Never, IfAvailable or Always"),
        )),
        None if api_version == VERSIONS[0] => Err(kubeconfig_error(
            &at,
            &format!("is missing, and {api_version} requires it; write Never or IfAvailable"),
        )),
        None => Ok(()),
    }
}

fn strings(exec: &Map<String, Value>, field: &str) -> Result<Vec<String>, KubeconfigError> {
    list(exec, "args", field)?
        .iter()
        .enumerate()
        .map(|(index, value)| match value.as_str() {
            Some(text) => Ok(text.to_owned()),
            None => Err(kubeconfig_error(&format!("{field}.args[{index}]"), "is not a string")),
        })
        .collect()
}

fn variables(exec: &Map<String, Value>, field: &str) -> Result<Vec<(String, String)>, KubeconfigError> {
    let one = |(index, entry): (usize, &Value)| {
        let name = entry["name"].as_str().filter(|name| !name.is_empty() && !name.contains(['=', '\0']));
        let name = name.ok_or_else(|| {
            kubeconfig_error(&format!("{field}.env[{index}].name"), "is not the name of a variable")
        })?;
        let value = match &entry["value"] {
            Value::Null => "",
            Value::String(text) if !text.contains('\0') => text,
            _ => return Err(kubeconfig_error(&format!("{field}.env[{index}].value"), "is not a string")),
        };
        Ok((name.to_owned(), value.to_owned()))
    };
    list(exec, "env", field)?.iter().enumerate().map(one).collect()
}

fn list<'a>(exec: &'a Map<String, Value>, name: &str, field: &str) -> Result<&'a [Value], KubeconfigError> {
    match exec.get(name) {
        None | Some(Value::Null) => Ok(&[]),
        Some(Value::Array(values)) => Ok(values),
        Some(_) => Err(kubeconfig_error(&format!("{field}.{name}"), "is not a list")),
    }
}

fn flag(exec: &Map<String, Value>, name: &str, field: &str) -> Result<bool, KubeconfigError> {
    match exec.get(name) {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(value)) => Ok(*value),
        Some(_) => Err(kubeconfig_error(&format!("{field}.{name}"), "is neither true nor false")),
    }
}

fn optional_text(
    status: &Map<String, Value>,
    field: &'static str,
) -> Result<Option<String>, ExecAnswerError> {
    match status.get(field) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone()).filter(|text| !text.is_empty())),
        Some(_) => Err(ExecAnswerError::Field { field, expected: "a string" }),
    }
}

/// When the next credential is requested, in seconds since 1970: shortly before the expiry. `None`: it is valid until the API
/// server rejects it.
pub fn refresh_at(issued: i64, expires: Option<i64>) -> Option<i64> {
    let expires = expires?;
    // A twentieth of the lifetime, at most a minute: a request that is sent before the expiry still arrives in time.
    let margin = ((expires - issued) / 20).clamp(0, 60);
    Some(expires - margin)
}

#[cfg(test)]
#[path = "exec_login_tests.rs"]
mod tests;
