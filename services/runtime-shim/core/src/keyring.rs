//! Credentials for registries and which of them are for an image (runtime-and-resources.md §6.3).
//!
//! Nothing here is ever printed: [`Credential`] shows neither password nor token in its `Debug` form.

use std::collections::BTreeMap;
use std::fmt;

use keelson_kube_model::base64;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

/// The key under which docker keeps the credentials of its own registry.
const DEFAULT_KEY: &str = "index.docker.io";
/// The registry of images that name none.
const DEFAULT_HOST: &str = "docker.io";

/// What a registry is shown.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Credential {
    /// User name.
    pub username: String,
    /// Password.
    pub password: String,
    /// A token that is exchanged for another one.
    pub identity_token: String,
    /// A token that is shown as it is.
    pub registry_token: String,
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Credential(…)")
    }
}

impl Credential {
    /// What stands for it in an image's pull record: SHA-256 over its JSON form, as hexadecimal digits.
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
        hex(Value::Object(json).to_string().as_bytes())
    }
}

/// SHA-256 of `bytes` as hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    use fmt::Write as _;
    Sha256::digest(bytes).iter().fold(String::with_capacity(64), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Where a credential comes from, for the pull record.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    /// A Secret that the pod names.
    Secret {
        /// Its UID; empty for one without.
        uid: String,
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
    },
    /// The node's own configuration.
    Node,
}

/// A text that is no docker configuration. What stands in it is not repeated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadConfig {
    /// No JSON object.
    #[error("it is no JSON object")]
    NotJson,
    /// `auth` of an entry.
    #[error("an auth is not the base64 form of user:password")]
    Auth,
    /// An entry is no object of texts.
    #[error("an entry is not an object with username, password and auth")]
    Entry,
}

/// The two forms of a docker configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// `{"auths": {host: entry}}`: `config.json` and `.dockerconfigjson`.
    Json,
    /// `{host: entry}`: `.dockercfg`.
    Legacy,
}

/// Credentials by the pattern of their registry.
#[derive(Debug, Clone, Default)]
pub struct Keyring {
    entries: BTreeMap<String, Vec<(Credential, Origin)>>,
}

impl Keyring {
    /// Takes in a docker configuration.
    ///
    /// # Errors
    /// It is none; nothing of it is taken then.
    pub fn add(&mut self, text: &[u8], form: Form, origin: &Origin) -> Result<(), BadConfig> {
        let json: Value = serde_json::from_slice(text).map_err(|_| BadConfig::NotJson)?;
        let auths = match form {
            Form::Json => match json.get("auths") {
                Some(auths) => auths,
                None if json.is_object() => return Ok(()),
                None => return Err(BadConfig::NotJson),
            },
            Form::Legacy => &json,
        };
        let auths = auths.as_object().ok_or(BadConfig::NotJson)?;
        let read = auths.iter().map(|(key, entry)| Ok((pattern_of(key), credential_of(entry)?)));
        for (pattern, credential) in read.collect::<Result<Vec<_>, _>>()? {
            self.entries.entry(pattern).or_default().push((credential, origin.clone()));
        }
        Ok(())
    }

    /// Takes in one credential under the key of its registry.
    pub fn insert(&mut self, key: &str, credential: Credential, origin: Origin) {
        self.entries.entry(pattern_of(key)).or_default().push((credential, origin));
    }

    /// The credentials for a repository (`host/path`, without tag and digest), the most specific pattern first: in
    /// reverse lexical order, and of one pattern in the order in which they were added.
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

/// The key of a configuration as it is matched: without scheme and API version.
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

fn credential_of(entry: &Value) -> Result<Credential, BadConfig> {
    let entry = entry.as_object().ok_or(BadConfig::Entry)?;
    let text = |name: &str| match entry.get(name) {
        None | Some(Value::Null) => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(_) => Err(BadConfig::Entry),
    };
    let mut credential = Credential {
        username: text("username")?,
        password: text("password")?,
        identity_token: text("identitytoken")?,
        registry_token: text("registrytoken")?,
    };
    let auth = text("auth")?;
    if !auth.is_empty() {
        let bytes = base64::decode_unpadded(&auth).ok_or(BadConfig::Auth)?;
        let pair = String::from_utf8(bytes).map_err(|_| BadConfig::Auth)?;
        let (user, password) = pair.split_once(':').ok_or(BadConfig::Auth)?;
        credential.username = user.to_owned();
        // Some tools end the pair with zeros.
        credential.password = password.trim_end_matches('\0').to_owned();
    }
    Ok(credential)
}

/// The host of a pattern or repository, with its port, and the path from its `/` on.
pub(crate) fn split_host(text: &str) -> (&str, &str) {
    text.find('/').map_or((text, ""), |at| text.split_at(at))
}

/// Whether a pattern is for a repository: the host label by label with `*` in a label, the port equal, the path a
/// prefix.
pub(crate) fn matches(pattern: &str, repository: &str) -> bool {
    let ((pattern_host, pattern_path), (host, path)) = (split_host(pattern), split_host(repository));
    let ((pattern_name, pattern_port), (name, port)) = (split_port(pattern_host), split_port(host));
    let labels: Vec<&str> = name.split('.').collect();
    let wanted: Vec<&str> = pattern_name.split('.').collect();
    pattern_port == port
        && wanted.len() == labels.len()
        && wanted.iter().zip(&labels).all(|(glob, label)| glob_matches(glob, label))
        && path.starts_with(pattern_path)
}

fn split_port(host: &str) -> (&str, &str) {
    match host.rsplit_once(':') {
        // A colon within brackets is one of an IPv6 address.
        Some((name, port)) if !port.contains(']') => (name, port),
        _ => (host, ""),
    }
}

/// `*` stands for any number of characters.
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
