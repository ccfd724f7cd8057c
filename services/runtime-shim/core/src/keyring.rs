//! Credentials for registries, and which of them match an image (runtime-and-resources.md §6.3).
//!
//! No credential is ever printed: the `Debug` form of [`Credential`] shows neither password nor token.

use std::collections::BTreeMap;
use std::fmt;

use keelson_kube_model::base64;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

/// The key of Docker's own registry in docker configurations.
const DEFAULT_KEY: &str = "index.docker.io";
/// The registry of images without a registry in their reference.
const DEFAULT_HOST: &str = "docker.io";

/// A credential for a registry.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Credential {
    /// User name.
    pub username: String,
    /// Password.
    pub password: String,
    /// A token that is exchanged for a registry token.
    pub identity_token: String,
    /// A token that is sent to the registry.
    pub registry_token: String,
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Credential(…)")
    }
}

impl Credential {
    /// Its hash in an image's pull record: SHA-256 over its JSON form, as hexadecimal digits.
    pub fn hash(&self) -> String {
        let fields = [
            ("username", &self.username),
            ("password", &self.password),
            ("identitytoken", &self.identity_token),
            ("registrytoken", &self.registry_token),
        ];
        let set = fields.into_iter().filter(|(_, value)| !value.is_empty());
        let json: serde_json::Map<String, Value> =
            set.map(|(name, value)| (name.to_owned(), Value::from(value.as_str()))).collect();
        sha256_hex(Value::Object(json).to_string().as_bytes())
    }
}

/// SHA-256 of `bytes` as hexadecimal digits.
pub(crate) fn sha256_hex(bytes: &[u8]) -> String {
    use fmt::Write as _;
    Sha256::digest(bytes).iter().fold(String::with_capacity(64), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// The origin of a credential, for the pull record.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    /// A Secret from the pod's `imagePullSecrets`.
    Secret {
        /// Its UID; empty if it has none.
        uid: String,
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
    },
    /// The node's configuration.
    Node,
}

/// Why a text is not a docker configuration. The messages do not repeat its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DockerConfigError {
    /// Not a JSON object.
    #[error("it is not a JSON object")]
    NotJson,
    /// An `auth` field is not valid.
    #[error("an auth field is not user:password in base64")]
    Auth,
    /// An entry is not an object of strings.
    #[error("an entry is not an object with username, password and auth")]
    Entry,
}

/// The two formats of a docker configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConfigFormat {
    /// `{"auths": {host: entry}}`: `config.json` and `.dockerconfigjson`.
    Json,
    /// `{host: entry}`: `.dockercfg`.
    Legacy,
}

/// Credentials by registry pattern.
#[derive(Debug, Clone, Default)]
pub struct Keyring {
    entries: BTreeMap<String, Vec<(Credential, Origin)>>,
}

impl Keyring {
    /// Adds the credentials of a docker configuration.
    ///
    /// # Errors
    /// The text is not a docker configuration; nothing is added then.
    pub fn add(
        &mut self,
        text: &[u8],
        format: ConfigFormat,
        origin: &Origin,
    ) -> Result<(), DockerConfigError> {
        let json: Value = serde_json::from_slice(text).map_err(|_| DockerConfigError::NotJson)?;
        let auths = match format {
            ConfigFormat::Json => match json.get("auths") {
                Some(auths) => auths,
                None if json.is_object() => return Ok(()),
                None => return Err(DockerConfigError::NotJson),
            },
            ConfigFormat::Legacy => &json,
        };
        let auths = auths.as_object().ok_or(DockerConfigError::NotJson)?;
        let read = auths.iter().map(|(key, entry)| Ok((pattern_of(key), credential_of(entry)?)));
        for (pattern, credential) in read.collect::<Result<Vec<_>, _>>()? {
            self.entries.entry(pattern).or_default().push((credential, origin.clone()));
        }
        Ok(())
    }

    /// Adds one credential under the key of its registry.
    pub fn insert(&mut self, key: &str, credential: Credential, origin: Origin) {
        self.entries.entry(pattern_of(key)).or_default().push((credential, origin));
    }

    /// The credentials for a repository (`host/path`, without tag and digest). The most specific pattern comes first
    /// (reverse lexical order); credentials of one pattern are in the order in which they were added.
    pub fn lookup(&self, repository: &str) -> Vec<(Credential, Origin)> {
        let matching = self.entries.iter().rev().filter(|(pattern, _)| matches(pattern, repository));
        let found: Vec<_> = matching.flat_map(|(_, list)| list.iter().cloned()).collect();
        let (host, _) = split_host(repository);
        if found.is_empty() && (host == DEFAULT_HOST || host == DEFAULT_KEY) {
            return self.entries.get(DEFAULT_KEY).cloned().unwrap_or_default();
        }
        found
    }
}

/// `host/path` of an image reference, without tag and digest: `docker.io/library/busybox` for `busybox:1`.
pub fn repository_of(reference: &str) -> String {
    let name = reference.split_once('@').map_or(reference, |(name, _)| name);
    let last = name.rfind('/').unwrap_or(0);
    let name = name[last..].rfind(':').map_or(name, |at| &name[..last + at]);
    match name.split_once('/') {
        Some((host, _)) if host.contains(['.', ':']) || host == "localhost" => name.to_owned(),
        Some(_) => format!("{DEFAULT_HOST}/{name}"),
        None => format!("{DEFAULT_HOST}/library/{name}"),
    }
}

/// The pattern of a configuration key: without scheme and API version.
fn pattern_of(key: &str) -> String {
    let key = without_scheme(key);
    let (host, path) = key.find('/').map_or((key, ""), |at| key.split_at(at));
    let path =
        ["/v1/", "/v2/"].iter().find_map(|api| path.starts_with(api).then(|| &path[3..])).unwrap_or(path);
    if path == "/" { host.to_owned() } else { format!("{host}{path}") }
}

/// A key without `https://` or `http://`.
pub(crate) fn without_scheme(key: &str) -> &str {
    key.strip_prefix("https://").or_else(|| key.strip_prefix("http://")).unwrap_or(key)
}

fn credential_of(entry: &Value) -> Result<Credential, DockerConfigError> {
    let entry = entry.as_object().ok_or(DockerConfigError::Entry)?;
    let text = |name: &str| match entry.get(name) {
        None | Some(Value::Null) => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(_) => Err(DockerConfigError::Entry),
    };
    let mut credential = Credential {
        username: text("username")?,
        password: text("password")?,
        identity_token: text("identitytoken")?,
        registry_token: text("registrytoken")?,
    };
    let auth = text("auth")?;
    if !auth.is_empty() {
        let bytes = base64::decode_unpadded(&auth).ok_or(DockerConfigError::Auth)?;
        let pair = String::from_utf8(bytes).map_err(|_| DockerConfigError::Auth)?;
        let (user, password) = pair.split_once(':').ok_or(DockerConfigError::Auth)?;
        credential.username = user.to_owned();
        // Some tools pad the pair with zero bytes.
        credential.password = password.trim_end_matches('\0').to_owned();
    }
    Ok(credential)
}

/// Splits a pattern or repository into the host with its port, and the path from its `/` on.
pub(crate) fn split_host(text: &str) -> (&str, &str) {
    text.find('/').map_or((text, ""), |at| text.split_at(at))
}

/// Whether a pattern matches a repository: the host label by label, where `*` is a wildcard within a label; the same
/// port; and the path as a prefix.
pub(crate) fn matches(pattern: &str, repository: &str) -> bool {
    let ((pattern_host, pattern_path), (host, path)) = (split_host(pattern), split_host(repository));
    let ((pattern_name, pattern_port), (name, port)) = (split_port(pattern_host), split_port(host));
    let labels: Vec<&str> = name.split('.').collect();
    let pattern_labels: Vec<&str> = pattern_name.split('.').collect();
    pattern_port == port
        && pattern_labels.len() == labels.len()
        && pattern_labels.iter().zip(&labels).all(|(glob, label)| glob_matches(glob, label))
        && path.starts_with(pattern_path)
}

fn split_port(host: &str) -> (&str, &str) {
    match host.rsplit_once(':') {
        // A colon within brackets belongs to an IPv6 address.
        Some((name, port)) if !port.contains(']') => (name, port),
        _ => (host, ""),
    }
}

/// Whether a label matches; `*` matches any number of characters.
fn glob_matches(glob: &str, label: &str) -> bool {
    let Some((first, rest)) = glob.split_once('*') else { return glob == label };
    let Some(mut left) = label.strip_prefix(first) else { return false };
    let mut parts: Vec<&str> = rest.split('*').collect();
    let last = parts.pop().unwrap_or_default();
    for part in parts {
        let Some(at) = left.find(part) else { return false };
        left = &left[at + part.len()..];
    }
    left.ends_with(last)
}

#[cfg(test)]
mod tests;
