//! Requests to credential provider plugins, their responses, and the cache of responses
//! (runtime-and-resources.md §6.4).
//!
//! Errors and `Debug` forms show nothing of a response except its registries.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use keelson_kube_model::parse_go_duration;
use serde_json::{Value, json};

use crate::credential_config::ApiVersion;
use crate::keyring::{Credential, split_host};

/// Nanoseconds between two removals of all expired entries from the cache.
const PURGE_INTERVAL: i64 = 15 * 60 * 1_000_000_000;

/// Credentials by registry pattern.
pub type Auth = Arc<[(String, Credential)]>;

/// The images that a response is valid for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheKeyType {
    /// The requested image.
    Image,
    /// All images of its registry.
    Registry,
    /// All images that the plugin is for.
    Global,
}

/// A plugin's response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Response {
    /// The images that the response is valid for.
    pub key_type: CacheKeyType,
    /// How long the response is cached; `None`: as long as the configuration says.
    pub cache: Option<Duration>,
    /// The credentials.
    pub auth: Auth,
}

/// Why a response is not valid. The messages do not repeat its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ResponseError {
    /// Not a JSON object.
    #[error("its response is not a JSON object")]
    NotJson,
    /// The kind is another one.
    #[error("its response is not a CredentialProviderResponse")]
    Kind,
    /// The version is not that of the request.
    #[error("the apiVersion of its response is not {}, that of the request", .0.text())]
    ApiVersion(ApiVersion),
    /// `cacheKeyType` is not valid.
    #[error("the cacheKeyType of its response is not Image, Registry or Global")]
    KeyType,
    /// `cacheDuration` is not valid.
    #[error("the cacheDuration of its response is not a duration")]
    Duration,
    /// `auth` is not valid.
    #[error("the auth of its response is not a map of objects with username and password")]
    Auth,
}

/// The request for a repository (`host/path`, without tag and digest), as JSON.
pub fn request(version: ApiVersion, repository: &str) -> Vec<u8> {
    let kind = "CredentialProviderRequest";
    json!({"kind": kind, "apiVersion": version.text(), "image": repository}).to_string().into_bytes()
}

/// Parses the response to a request of this version.
///
/// # Errors
/// See [`ResponseError`].
pub fn parse_response(version: ApiVersion, text: &[u8]) -> Result<Response, ResponseError> {
    let json: Value = serde_json::from_slice(text).map_err(|_| ResponseError::NotJson)?;
    if !json.is_object() {
        return Err(ResponseError::NotJson);
    }
    if json["kind"] != "CredentialProviderResponse" {
        return Err(ResponseError::Kind);
    }
    if json["apiVersion"] != version.text() {
        return Err(ResponseError::ApiVersion(version));
    }
    let key_type = match json["cacheKeyType"].as_str() {
        Some("Image") => CacheKeyType::Image,
        Some("Registry") => CacheKeyType::Registry,
        Some("Global") => CacheKeyType::Global,
        _ => return Err(ResponseError::KeyType),
    };
    let cache = match &json["cacheDuration"] {
        Value::Null => None,
        Value::String(text) => Some(duration(text).ok_or(ResponseError::Duration)?),
        _ => return Err(ResponseError::Duration),
    };
    let auth = match &json["auth"] {
        Value::Null => Arc::default(),
        Value::Object(auth) => {
            let entry = |(key, entry): (&String, &Value)| Some((key.clone(), credential(entry)?));
            auth.iter().map(entry).collect::<Option<Auth>>().ok_or(ResponseError::Auth)?
        }
        _ => return Err(ResponseError::Auth),
    };
    Ok(Response { key_type, cache, auth })
}

/// Parses a duration; a negative one counts as 0.
fn duration(text: &str) -> Option<Duration> {
    match text.strip_prefix('-') {
        Some(text) => parse_go_duration(text).map(|_| Duration::ZERO),
        None => parse_go_duration(text),
    }
}

fn credential(entry: &Value) -> Option<Credential> {
    let entry = entry.as_object()?;
    let text = |name: &str| match entry.get(name) {
        None | Some(Value::Null) => Some(String::new()),
        Some(value) => value.as_str().map(ToOwned::to_owned),
    };
    Some(Credential { username: text("username")?, password: text("password")?, ..Credential::default() })
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Key {
    Image(String),
    Registry(String),
    Global,
}

/// The cached responses of one plugin. Times are nanoseconds of any clock that does not step back.
///
/// There is no timer: an expired entry is removed when it is requested, and all expired entries are removed at the
/// first use after each quarter of an hour.
#[derive(Debug, Default)]
pub struct Cache {
    entries: HashMap<Key, (i64, Auth)>,
    purged_at: i64,
}

impl Cache {
    /// The credentials for a repository: those of the image, else of its registry, else the global ones.
    pub fn get(&mut self, repository: &str, now: i64) -> Option<Auth> {
        self.purge(now);
        let keys = [
            Key::Image(repository.to_owned()),
            Key::Registry(split_host(repository).0.to_owned()),
            Key::Global,
        ];
        keys.iter().find_map(|key| {
            let (until, auth) = self.entries.get(key)?;
            if now < *until {
                return Some(Arc::clone(auth));
            }
            self.entries.remove(key);
            None
        })
    }

    /// Caches a response for a repository for its own duration, else for `default`. With a duration of 0 it is not cached.
    pub fn put(&mut self, repository: &str, response: &Response, default: Duration, now: i64) {
        self.purge(now);
        let duration = response.cache.unwrap_or(default);
        if duration.is_zero() {
            return;
        }
        let key = match response.key_type {
            CacheKeyType::Image => Key::Image(repository.to_owned()),
            CacheKeyType::Registry => Key::Registry(split_host(repository).0.to_owned()),
            CacheKeyType::Global => Key::Global,
        };
        let until = now.saturating_add(i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX));
        self.entries.insert(key, (until, Arc::clone(&response.auth)));
    }

    fn purge(&mut self, now: i64) {
        if now.saturating_sub(self.purged_at) >= PURGE_INTERVAL {
            self.entries.retain(|_, (until, _)| now < *until);
            self.purged_at = now;
        }
    }
}

#[cfg(test)]
mod tests;
