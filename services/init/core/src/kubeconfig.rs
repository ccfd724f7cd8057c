//! A kubeconfig as one file that names no other, for services that may read none of root's (architecture §7).
//!
//! Only what the current context uses is taken; what stands beside it, such as the credentials of other clusters, is not
//! handed to anybody.

use std::path::{Path, PathBuf};

use keelson_kube_model::base64;
use serde_json::{Map, Value, json};

use keelson_config::CredentialRefusal;

use crate::exec_login::{ExecCredential, ExecLogin};

/// What is wrong with a kubeconfig: the field and the words.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {message}")]
pub struct KubeconfigProblem {
    /// Where, such as `users[1].user.client-key`.
    pub field: String,
    /// What.
    pub message: String,
}

/// Fields with the path of a file, and the field that has its content in base64.
const FILES_OF_CLUSTER: [(&str, &str, Pem); 1] =
    [("certificate-authority", "certificate-authority-data", Pem::Certificates)];
const FILES_OF_USER: [(&str, &str, Pem); 2] = [
    ("client-certificate", "client-certificate-data", Pem::Certificates),
    ("client-key", "client-key-data", Pem::Key),
];
/// What is taken as it is.
const OF_CLUSTER: [&str; 4] = ["server", "tls-server-name", "insecure-skip-tls-verify", "proxy-url"];
const OF_USER: [&str; 3] = ["token", "username", "password"];

/// What of a PEM file is meant. A kubelet keeps certificate and key in one file and names it twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pem {
    Certificates,
    Key,
}

impl Pem {
    /// The blocks that are meant, or everything where that is none: whoever reads it says what is wrong.
    fn of(self, content: &[u8]) -> Vec<u8> {
        let text = String::from_utf8_lossy(content);
        let mut kept = String::new();
        let mut block: Option<String> = None;
        for line in text.lines().map(str::trim_end) {
            if let Some(label) = line.strip_prefix("-----BEGIN ").and_then(|rest| rest.strip_suffix("-----"))
            {
                let is_key = label.ends_with("PRIVATE KEY");
                let wanted = match self {
                    Self::Certificates => label == "CERTIFICATE",
                    Self::Key => is_key,
                };
                block = wanted.then(String::new);
            }
            let Some(open) = &mut block else { continue };
            open.push_str(line);
            open.push('\n');
            if line.starts_with("-----END ") {
                kept.extend(block.take());
            }
        }
        if kept.is_empty() { content.to_vec() } else { kept.into_bytes() }
    }
}

/// The current context of a kubeconfig.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flat {
    /// A kubeconfig that names no file. Its user is empty where `exec` is there.
    pub document: Value,
    /// The program by which the user logs in. What it answers belongs into `document` ([`set_exec_credential`]) before anybody
    /// uses that: an empty user is anonymous.
    pub exec: Option<ExecLogin>,
}

/// The current context of a kubeconfig in `folder`, with the content of every file that it names.
///
/// # Errors
/// There is none, it names something that is not there, or a way to log in that is not supported.
pub fn flatten(
    root: &Map<String, Value>,
    folder: &Path,
    read: &mut dyn FnMut(&Path) -> Result<Vec<u8>, String>,
) -> Result<Flat, KubeconfigProblem> {
    let (place_of_cluster, cluster) = current_cluster(root)?;
    let (_, context) = current_context(root)?;
    let mut flat_cluster = taken(cluster, &OF_CLUSTER);
    let mut files = Files { folder, read };
    files.take(cluster, &place_of_cluster, &FILES_OF_CLUSTER, &mut flat_cluster)?;
    let (mut flat_user, mut exec) = (Map::new(), None);
    // A context without a user is anonymous.
    if let Some(user_name) = text(context, "user") {
        let (place, user) = entry(root, "users", "user", user_name)?;
        exec = ExecLogin::of_user(user, &place, folder)?;
        if user.get("auth-provider").is_some_and(|provider| !provider.is_null()) {
            return Err(problem(
                &format!("{place}.auth-provider"),
                "is not supported; use exec, a client certificate or a token",
            ));
        }
        flat_user = taken(user, &OF_USER);
        files.take(user, &place, &FILES_OF_USER, &mut flat_user)?;
        if let Some(path) = text(user, "tokenFile") {
            let field = format!("{place}.tokenFile");
            let token = files.content(&field, path)?;
            let token = String::from_utf8(token).map_err(|_| problem(&field, "the token is no text"))?;
            flat_user.insert("token".to_owned(), token.trim().into());
        }
    }
    let document = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "keelson",
        "contexts": [{"name": "keelson", "context": {"cluster": "keelson", "user": "keelson"}}],
        "clusters": [{"name": "keelson", "cluster": flat_cluster}],
        "users": [{"name": "keelson", "user": flat_user}],
    });
    Ok(Flat { document, exec })
}

/// The content of an extension of the current cluster.
pub(crate) fn cluster_extension<'a>(root: &'a Map<String, Value>, name: &str) -> Option<&'a Value> {
    let (_, cluster) = current_cluster(root).ok()?;
    let mut extensions = cluster.get("extensions")?.as_array()?.iter();
    extensions.find(|extension| extension["name"] == name).map(|found| &found["extension"])
}

fn current_context(root: &Map<String, Value>) -> Result<(String, &Map<String, Value>), KubeconfigProblem> {
    let name = text(root, "current-context")
        .ok_or_else(|| problem("current-context", "is missing; it names one of the contexts"))?;
    entry(root, "contexts", "context", name)
}

/// The cluster of the current context, and where it stands.
fn current_cluster(root: &Map<String, Value>) -> Result<(String, &Map<String, Value>), KubeconfigProblem> {
    let (place, context) = current_context(root)?;
    let name = text(context, "cluster")
        .ok_or_else(|| problem(&format!("{place}.cluster"), "is missing; it names one of the clusters"))?;
    let (place, cluster) = entry(root, "clusters", "cluster", name)?;
    if text(cluster, "server").is_none() {
        return Err(problem(
            &format!("{place}.server"),
            "is missing; it is the URL of the API server, such as https://10.0.0.1:6443",
        ));
    }
    Ok((place, cluster))
}

/// The kubeconfig that takes the place of one without a usable certificate: the server of the current context of `root`, a
/// bootstrap kubeconfig in `folder`, and the pair in `pem`, which need not be there yet (node-and-api.md §6.3). YAML.
///
/// # Errors
/// There is no current context, or it names no server.
pub fn for_certificate(
    root: &Map<String, Value>,
    folder: &Path,
    pem: &Path,
) -> Result<String, KubeconfigProblem> {
    let (_, cluster) = current_cluster(root)?;
    let mut lines =
        String::from("apiVersion: v1\nkind: Config\nclusters:\n- name: default-cluster\n  cluster:\n");
    let mut field = |indent: &str, name: &str, value: &Value| {
        lines.push_str(&format!("{indent}{name}: {value}\n"));
    };
    let is_meant = |value: &Value| !value.is_null() && value != "" && value != false;
    for name in OF_CLUSTER.into_iter().chain(["certificate-authority-data"]) {
        if let Some(value) = cluster.get(name).filter(|value| is_meant(value)) {
            field("    ", name, value);
        }
    }
    if let Some(path) = text(cluster, "certificate-authority") {
        field("    ", "certificate-authority", &folder.join(path).to_string_lossy().into());
    }
    let pem: Value = pem.to_string_lossy().into();
    lines.push_str(
        "contexts:\n- name: default-context\n  context:\n    cluster: default-cluster\n    namespace: default\n    \
         user: default-auth\ncurrent-context: default-context\nusers:\n- name: default-auth\n  user:\n",
    );
    lines.push_str(&format!("    client-certificate: {pem}\n    client-key: {pem}\n"));
    Ok(lines)
}

/// The certificates by which the user of a flat kubeconfig ([`flatten`]) names itself, PEM; `None`: by something else.
pub fn client_certificates(flat: &Value) -> Option<Vec<u8>> {
    let encoded = flat["users"][0]["user"]["client-certificate-data"].as_str()?;
    base64::decode(encoded)
}

/// Has the user of a flat kubeconfig name itself by these certificates and nothing else; both PEM.
pub fn set_client_pair(flat: &mut Value, certificates: &[u8], key: &[u8]) {
    flat["users"][0]["user"] = json!({
        "client-certificate-data": base64::encode(certificates),
        "client-key-data": base64::encode(key),
    });
}

/// Has the user of a flat kubeconfig log in by what a program answered; `generation` tells it from other answers.
pub fn set_exec_credential(flat: &mut Value, credential: &ExecCredential, generation: &str) {
    let mut user = Map::new();
    if let Some(token) = &credential.token {
        user.insert("token".to_owned(), token.as_str().into());
    }
    if let Some((certificates, key)) = &credential.pair {
        user.insert("client-certificate-data".to_owned(), base64::encode(certificates.as_ref()).into());
        user.insert("client-key-data".to_owned(), base64::encode(key.as_ref()).into());
    }
    flat["users"][0]["user"] = user.into();
    flat[CredentialRefusal::FIELD] = generation.into();
}

struct Files<'a> {
    folder: &'a Path,
    read: &'a mut dyn FnMut(&Path) -> Result<Vec<u8>, String>,
}

impl Files<'_> {
    /// Takes what stands inline, and else what a file has (inline counts where both are there, as in kubectl).
    fn take(
        &mut self,
        from: &Map<String, Value>,
        place: &str,
        fields: &[(&str, &str, Pem)],
        into: &mut Map<String, Value>,
    ) -> Result<(), KubeconfigProblem> {
        for (file, inline, pem) in fields {
            let content = match (text(from, inline), text(from, file)) {
                (Some(encoded), _) => base64::decode(encoded)
                    .ok_or_else(|| problem(&format!("{place}.{inline}"), "is no base64"))?,
                (None, Some(path)) => self.content(&format!("{place}.{file}"), path)?,
                (None, None) => continue,
            };
            into.insert((*inline).to_owned(), base64::encode(&pem.of(&content)).into());
        }
        Ok(())
    }

    fn content(&mut self, field: &str, path: &str) -> Result<Vec<u8>, KubeconfigProblem> {
        let path: PathBuf = self.folder.join(path);
        (self.read)(&path)
            .map_err(|error| problem(field, &format!("cannot read {}: {error}", path.display())))
    }
}

pub(crate) fn problem(field: &str, message: &str) -> KubeconfigProblem {
    KubeconfigProblem { field: field.to_owned(), message: message.to_owned() }
}

pub(crate) fn text<'a>(map: &'a Map<String, Value>, field: &str) -> Option<&'a str> {
    map.get(field).and_then(Value::as_str).filter(|text| !text.is_empty())
}

pub(crate) fn taken(from: &Map<String, Value>, fields: &[&str]) -> Map<String, Value> {
    let found = fields.iter().filter_map(|field| Some(((*field).to_owned(), from.get(*field)?.clone())));
    found.filter(|(_, value)| !value.is_null()).collect()
}

/// The map in an entry of a list by its name, and where it stands.
fn entry<'a>(
    root: &'a Map<String, Value>,
    list: &str,
    inner: &str,
    name: &str,
) -> Result<(String, &'a Map<String, Value>), KubeconfigProblem> {
    let entries = root.get(list).and_then(Value::as_array).into_iter().flatten();
    for (index, entry) in entries.enumerate() {
        if entry["name"] == name {
            let place = format!("{list}[{index}].{inner}");
            return match entry[inner].as_object() {
                Some(found) => Ok((place, found)),
                None => Err(problem(&place, "is missing")),
            };
        }
    }
    Err(problem(list, &format!("there is none with the name {name:?}")))
}

#[cfg(test)]
#[path = "kubeconfig_tests.rs"]
mod tests;
