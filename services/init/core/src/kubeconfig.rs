//! Turns a kubeconfig into a self-contained one, for services that cannot read root's files (architecture §7).
//!
//! Only what the current context uses is copied; the rest, such as credentials of other clusters, is not passed on.

use std::path::{Path, PathBuf};

use keelson_kube_model::base64;
use serde_json::{Map, Value, json};

use keelson_config::CredentialRefusal;

use crate::exec_login::{ExecCredential, ExecLogin};
use crate::kubeconfig_context::{
    KubeconfigError, copied_fields, current_cluster, current_context, entry, kubeconfig_error, text,
};

/// Fields with the path of a file, each with the field for its content in base64.
const CLUSTER_FILES: [(&str, &str, Pem); 1] =
    [("certificate-authority", "certificate-authority-data", Pem::Certificates)];
const USER_FILES: [(&str, &str, Pem); 2] = [
    ("client-certificate", "client-certificate-data", Pem::Certificates),
    ("client-key", "client-key-data", Pem::Key),
];
/// The fields that are copied unchanged.
const CLUSTER_FIELDS: [&str; 4] = ["server", "tls-server-name", "insecure-skip-tls-verify", "proxy-url"];
const USER_FIELDS: [&str; 3] = ["token", "username", "password"];

/// The part of a PEM file to use. A kubelet keeps certificate and key in one file and names it in both fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pem {
    Certificates,
    Key,
}

impl Pem {
    /// The matching PEM blocks, or the whole content if there is none, so that its reader reports the error.
    fn blocks_in(self, content: &[u8]) -> Vec<u8> {
        let text = String::from_utf8_lossy(content);
        let mut matching = String::new();
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
                matching.extend(block.take());
            }
        }
        if matching.is_empty() { content.to_vec() } else { matching.into_bytes() }
    }
}

/// The current context of a kubeconfig, self-contained.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlatKubeconfig {
    /// A kubeconfig that names no file. If `exec` is set, its user is empty.
    pub document: Value,
    /// The exec plugin of the user. Its answer must be inserted into `document` ([`set_exec_credential`]) before use: an
    /// empty user is anonymous.
    pub exec: Option<ExecLogin>,
}

/// The current context of a kubeconfig in `folder`, with the contents of the files that it names.
///
/// # Errors
/// There is no current context, it refers to something missing, or its credentials are not supported.
pub fn flatten(
    root: &Map<String, Value>,
    folder: &Path,
    read: &mut dyn FnMut(&Path) -> Result<Vec<u8>, String>,
) -> Result<FlatKubeconfig, KubeconfigError> {
    let (cluster_location, cluster) = current_cluster(root)?;
    let (_, context) = current_context(root)?;
    let mut flat_cluster = copied_fields(cluster, &CLUSTER_FIELDS);
    let mut files = FileReader { folder, read };
    files.copy(cluster, &cluster_location, &CLUSTER_FILES, &mut flat_cluster)?;
    let (mut flat_user, mut exec) = (Map::new(), None);
    // A context without a user is anonymous.
    if let Some(user_name) = text(context, "user") {
        let (location, user) = entry(root, "users", "user", user_name)?;
        exec = ExecLogin::from_user(user, &location, folder)?;
        if user.get("auth-provider").is_some_and(|provider| !provider.is_null()) {
            return Err(kubeconfig_error(
                &format!("{location}.auth-provider"),
                "is not supported; use exec, a client certificate or a token",
            ));
        }
        flat_user = copied_fields(user, &USER_FIELDS);
        files.copy(user, &location, &USER_FILES, &mut flat_user)?;
        if let Some(path) = text(user, "tokenFile") {
            let field = format!("{location}.tokenFile");
            let token = files.content(&field, path)?;
            let token = String::from_utf8(token)
                .map_err(|_| kubeconfig_error(&field, "the token is not UTF-8 text"))?;
            flat_user.insert("token".to_owned(), token.trim().into());
        }
    }
    let document = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "keelson",
        "contexts": [{"name": "keelson", "context": {"cluster": "keelson", "user": "keelson"}}],
        "clusters": [{"name": "keelson", "cluster": flat_cluster}],
        "users": [{"name": "keelson", "user": flat_user}],
    });
    Ok(FlatKubeconfig { document, exec })
}

/// The kubeconfig that replaces one without a usable certificate: the server of the current context of `root`, a bootstrap
/// kubeconfig in `folder`, and the pair in the file `pem`, which may not exist yet (node-and-api.md §6.3). YAML.
///
/// # Errors
/// There is no current context, or it names no server.
pub fn for_certificate(
    root: &Map<String, Value>,
    folder: &Path,
    pem: &Path,
) -> Result<String, KubeconfigError> {
    let (_, cluster) = current_cluster(root)?;
    let mut lines =
        String::from("apiVersion: v1\nkind: Config\nclusters:\n- name: default-cluster\n  cluster:\n");
    let mut field = |indent: &str, name: &str, value: &Value| {
        lines.push_str(&format!("{indent}{name}: {value}\n"));
    };
    let is_set = |value: &Value| !value.is_null() && value != "" && value != false;
    for name in CLUSTER_FIELDS.into_iter().chain(["certificate-authority-data"]) {
        if let Some(value) = cluster.get(name).filter(|value| is_set(value)) {
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

/// The client certificates of a flat kubeconfig's user ([`flatten`]), PEM; `None` if it has other credentials.
pub fn client_certificates(flat: &Value) -> Option<Vec<u8>> {
    let encoded = flat["users"][0]["user"]["client-certificate-data"].as_str()?;
    base64::decode(encoded)
}

/// Makes these certificates and key the only credentials of a flat kubeconfig's user; both PEM.
pub fn set_client_pair(flat: &mut Value, certificates: &[u8], key: &[u8]) {
    flat["users"][0]["user"] = json!({
        "client-certificate-data": base64::encode(certificates),
        "client-key-data": base64::encode(key),
    });
}

/// Makes the answer of an exec plugin the credentials of a flat kubeconfig's user; `generation` identifies the answer.
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

struct FileReader<'a> {
    folder: &'a Path,
    read: &'a mut dyn FnMut(&Path) -> Result<Vec<u8>, String>,
}

impl FileReader<'_> {
    /// Copies inline data, or else the content of a file; inline data wins, as in kubectl.
    fn copy(
        &mut self,
        from: &Map<String, Value>,
        location: &str,
        fields: &[(&str, &str, Pem)],
        into: &mut Map<String, Value>,
    ) -> Result<(), KubeconfigError> {
        for (file, inline, pem) in fields {
            let content = match (text(from, inline), text(from, file)) {
                (Some(encoded), _) => base64::decode(encoded)
                    .ok_or_else(|| kubeconfig_error(&format!("{location}.{inline}"), "is not base64"))?,
                (None, Some(path)) => self.content(&format!("{location}.{file}"), path)?,
                (None, None) => continue,
            };
            into.insert((*inline).to_owned(), base64::encode(&pem.blocks_in(&content)).into());
        }
        Ok(())
    }

    fn content(&mut self, field: &str, path: &str) -> Result<Vec<u8>, KubeconfigError> {
        let path: PathBuf = self.folder.join(path);
        (self.read)(&path)
            .map_err(|error| kubeconfig_error(field, &format!("cannot read {}: {error}", path.display())))
    }
}

#[cfg(test)]
#[path = "kubeconfig_tests.rs"]
mod tests;
