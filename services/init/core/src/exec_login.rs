//! Users of a kubeconfig who log in by a program (`users[].user.exec`): what is run, and what its answer means.
//!
//! The protocol is `client.authentication.k8s.io`, v1 and v1beta1: the program gets an `ExecCredential` in the variable
//! `KUBERNETES_EXEC_INFO` and prints one whose `status` holds a token, a client certificate with its key, or both.

use std::path::Path;

use keelson_kube_model::time;
use serde_json::{Map, Value, json};

use crate::kubeconfig::{KubeconfigProblem, problem, taken, text};

/// The variable in which a program finds what it is asked.
pub const EXEC_INFO: &str = "KUBERNETES_EXEC_INFO";
/// Versions of the protocol, the preferred one first.
const VERSIONS: [&str; 2] = ["client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1"];
/// The extension of a cluster that is passed on to the program.
const CLUSTER_EXTENSION: &str = "client.authentication.k8s.io/exec";
/// What a program learns of the cluster, beside the certificates of its authority.
const CLUSTER_FIELDS: [&str; 5] =
    ["server", "tls-server-name", "insecure-skip-tls-verify", "proxy-url", "disable-compression"];
/// Other ways to log in, of which none can stand beside a program.
const OTHER_WAYS: [&str; 9] = [
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

/// How the user of a kubeconfig logs in by a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExecLogin {
    /// The field, such as `users[0].user.exec`.
    pub field: String,
    /// The `apiVersion` that the answer must have, too.
    pub api_version: String,
    /// The program: a path, or a name that is looked up in `PATH`.
    pub command: String,
    /// Its arguments.
    pub args: Vec<String>,
    /// Variables beside those of this process.
    pub env: Vec<(String, String)>,
    /// What to do where the program is missing; may be empty.
    pub install_hint: String,
    /// The program is told which cluster it is for.
    provide_cluster_info: bool,
}

/// What a program has answered.
#[derive(Clone, PartialEq, Eq)]
pub struct ExecCredential {
    /// A bearer token.
    pub token: Option<String>,
    /// A client certificate and its key, both PEM.
    pub pair: Option<(String, String)>,
    /// When it ends, seconds since 1970; `None`: not known, so only a refusal ends it.
    pub expires: Option<i64>,
}

/// Shows no secret.
impl std::fmt::Debug for ExecCredential {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ExecCredential").field("expires", &self.expires).finish_non_exhaustive()
    }
}

/// Why an answer is no credential. No text quotes the answer, which may hold a secret.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExecAnswerError {
    /// It is no JSON object.
    #[error("its output is not a JSON object of kind ExecCredential")]
    NoObject,
    /// It is of another kind.
    #[error("its output has kind {found:?} instead of ExecCredential")]
    Kind {
        /// Its kind.
        found: String,
    },
    /// It speaks another version.
    #[error("exec plugin is configured to use API version {expected}, plugin returned version {found}")]
    Version {
        /// What the kubeconfig says.
        expected: String,
        /// What the answer says.
        found: String,
    },
    /// It has no status.
    #[error("exec plugin didn't return a status field")]
    NoStatus,
    /// There is nothing in it.
    #[error("exec plugin didn't return a token or cert/key pair")]
    Nothing,
    /// Of certificate and key one is missing.
    #[error("exec plugin returned only certificate or key, not both")]
    HalfAPair,
    /// A field is of another type, or the moment is none.
    #[error("status.{field} is not {expected}")]
    Field {
        /// Which.
        field: &'static str,
        /// What it should be.
        expected: &'static str,
    },
}

impl ExecLogin {
    /// The program of a user; `None` where the user logs in otherwise. `folder` is that of the kubeconfig, where relative paths
    /// begin.
    ///
    /// # Errors
    /// A field is missing or has a value that is not known, the program needs a person at a terminal, or another way to log in
    /// is given, too.
    pub(crate) fn of_user(
        user: &Map<String, Value>,
        place: &str,
        folder: &Path,
    ) -> Result<Option<Self>, KubeconfigProblem> {
        let Some(exec) = user.get("exec").filter(|exec| !exec.is_null()) else { return Ok(None) };
        let field = format!("{place}.exec");
        let exec = exec.as_object().ok_or_else(|| problem(&field, "is not a map"))?;
        let is_set = |name: &&str| user.get(*name).is_some_and(|value| !value.is_null() && value != "");
        if let Some(other) = OTHER_WAYS.iter().find(|name| is_set(name)) {
            return Err(problem(
                &format!("{place}.{other}"),
                "cannot be combined with exec; keep one of the two",
            ));
        }
        let api_version = api_version(exec, &field)?;
        check_interactive_mode(exec, &field, &api_version)?;
        let command = text(exec, "command").ok_or_else(|| {
            problem(&format!("{field}.command"), "is missing; it names the program that logs in")
        })?;
        // Only a name is looked up in PATH; a path begins at the kubeconfig.
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

    /// The value of [`EXEC_INFO`]. `flat` is the kubeconfig without other files, `root` the one that it was made of.
    pub fn info(&self, flat: &Value, root: &Map<String, Value>) -> String {
        let mut spec = json!({"interactive": false});
        if self.provide_cluster_info {
            let cluster = flat["clusters"][0]["cluster"].as_object();
            let mut given = cluster.map(|cluster| taken(cluster, &CLUSTER_FIELDS)).unwrap_or_default();
            if let Some(authority) = cluster.and_then(|cluster| cluster.get("certificate-authority-data")) {
                given.insert("certificate-authority-data".to_owned(), authority.clone());
            }
            if let Some(config) = crate::kubeconfig::cluster_extension(root, CLUSTER_EXTENSION) {
                given.insert("config".to_owned(), config.clone());
            }
            spec["cluster"] = given.into();
        }
        json!({"kind": "ExecCredential", "apiVersion": self.api_version, "spec": spec}).to_string()
    }

    /// What the program has printed.
    ///
    /// # Errors
    /// It is no credential of the version that was asked for.
    pub fn read_answer(&self, output: &[u8]) -> Result<ExecCredential, ExecAnswerError> {
        let answer: Value = serde_json::from_slice(output).map_err(|_| ExecAnswerError::NoObject)?;
        if !answer.is_object() {
            return Err(ExecAnswerError::NoObject);
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
            _ => return Err(ExecAnswerError::HalfAPair),
        };
        if token.is_none() && pair.is_none() {
            return Err(ExecAnswerError::Nothing);
        }
        let wrong =
            || ExecAnswerError::Field { field: "expirationTimestamp", expected: "a moment as in RFC 3339" };
        let expires = optional_text(status, "expirationTimestamp")?
            .map(|text| time::parse_seconds(&text).map_err(|_| wrong()))
            .transpose()?;
        Ok(ExecCredential { token, pair, expires })
    }
}

fn api_version(exec: &Map<String, Value>, field: &str) -> Result<String, KubeconfigProblem> {
    let at = format!("{field}.apiVersion");
    let version = text(exec, "apiVersion")
        .ok_or_else(|| problem(&at, &format!("is missing; write {} or {}", VERSIONS[0], VERSIONS[1])))?;
    if VERSIONS.contains(&version) {
        return Ok(version.to_owned());
    }
    let message = format!("{version:?} is not supported; this must be {} or {}", VERSIONS[0], VERSIONS[1]);
    Err(problem(&at, &message))
}

/// There is no terminal here; v1 has no default, so that nobody depends on one by mistake.
fn check_interactive_mode(
    exec: &Map<String, Value>,
    field: &str,
    api_version: &str,
) -> Result<(), KubeconfigProblem> {
    let at = format!("{field}.interactiveMode");
    match text(exec, "interactiveMode") {
        Some("Never" | "IfAvailable") => Ok(()),
        Some("Always") => Err(problem(
            &at,
            "is Always, but a node has no person at a terminal; write Never or IfAvailable if the program works without one",
        )),
        Some(other) => Err(problem(
            &at,
            &format!("{other:?} is not supported; this must be Never, IfAvailable or Always"),
        )),
        None if api_version == VERSIONS[0] => Err(problem(
            &at,
            &format!("is missing, and {api_version} requires it; write Never or IfAvailable"),
        )),
        None => Ok(()),
    }
}

fn strings(exec: &Map<String, Value>, field: &str) -> Result<Vec<String>, KubeconfigProblem> {
    list(exec, "args", field)?
        .iter()
        .enumerate()
        .map(|(index, value)| match value.as_str() {
            Some(text) => Ok(text.to_owned()),
            None => Err(problem(&format!("{field}.args[{index}]"), "is not a string")),
        })
        .collect()
}

fn variables(exec: &Map<String, Value>, field: &str) -> Result<Vec<(String, String)>, KubeconfigProblem> {
    let one = |(index, entry): (usize, &Value)| {
        let name = entry["name"].as_str().filter(|name| !name.is_empty() && !name.contains(['=', '\0']));
        let name = name
            .ok_or_else(|| problem(&format!("{field}.env[{index}].name"), "is not the name of a variable"))?;
        let value = match &entry["value"] {
            Value::Null => "",
            Value::String(text) if !text.contains('\0') => text,
            _ => return Err(problem(&format!("{field}.env[{index}].value"), "is not a string")),
        };
        Ok((name.to_owned(), value.to_owned()))
    };
    list(exec, "env", field)?.iter().enumerate().map(one).collect()
}

fn list<'a>(exec: &'a Map<String, Value>, name: &str, field: &str) -> Result<&'a [Value], KubeconfigProblem> {
    match exec.get(name) {
        None | Some(Value::Null) => Ok(&[]),
        Some(Value::Array(values)) => Ok(values),
        Some(_) => Err(problem(&format!("{field}.{name}"), "is not a list")),
    }
}

fn flag(exec: &Map<String, Value>, name: &str, field: &str) -> Result<bool, KubeconfigProblem> {
    match exec.get(name) {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(value)) => Ok(*value),
        Some(_) => Err(problem(&format!("{field}.{name}"), "is neither true nor false")),
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

/// When a credential is asked for next, seconds since 1970: shortly before its end, and at once where there is none. `None`:
/// nothing ends it but a refusal.
pub fn refresh_at(issued: i64, expires: Option<i64>) -> Option<i64> {
    let expires = expires?;
    // A twentieth of the lifetime, a minute at most: a request that is sent before the end still arrives in time.
    let margin = ((expires - issued) / 20).clamp(0, 60);
    Some(expires - margin)
}

#[cfg(test)]
#[path = "exec_login_tests.rs"]
mod tests;
