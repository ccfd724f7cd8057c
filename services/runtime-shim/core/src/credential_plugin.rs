//! What a credential provider plugin is asked, what it answers, and for how long that is kept
//! (runtime-and-resources.md §6.4).
//!
//! Nothing of an answer is in an error or a `Debug` form but the registries that it is for.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use keelson_kube_model::parse_go_duration;
use serde_json::{Value, json};

use crate::credential_config::ApiVersion;
use crate::keyring::{Credential, split_host};

/// Nanoseconds after which the cache is looked through for what is out of date.
const PURGE_EACH: i64 = 15 * 60 * 1_000_000_000;

/// Credentials by the pattern of their registry.
pub type Auth = Arc<[(String, Credential)]>;

/// The images that an answer is good for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheKeyType {
    /// The image that was asked for.
    Image,
    /// All of its registry.
    Registry,
    /// All that the plugin is asked about.
    Global,
}

/// A plugin's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Response {
    /// The images that it is good for.
    pub key_type: CacheKeyType,
    /// How long it is kept; `None`: as the configuration says.
    pub cache: Option<Duration>,
    /// The credentials.
    pub auth: Auth,
}

/// An answer that is none. What stands in it is not repeated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadResponse {
    /// No JSON object.
    #[error("its answer is no JSON object")]
    NotJson,
    /// Another kind.
    #[error("its answer is no CredentialProviderResponse")]
    Kind,
    /// It was asked in another version.
    #[error("its answer has not the apiVersion {} that it was asked in", .0.text())]
    ApiVersion(ApiVersion),
    /// `cacheKeyType`.
    #[error("the cacheKeyType of its answer is none of Image, Registry and Global")]
    KeyType,
    /// `cacheDuration`.
    #[error("the cacheDuration of its answer is no duration")]
    Duration,
    /// `auth`.
    #[error("the auth of its answer is no map of objects with username and password")]
    Auth,
}

/// The request about a repository (`host/path`, without tag and digest), as JSON.
pub fn request(version: ApiVersion, repository: &str) -> Vec<u8> {
    let kind = "CredentialProviderRequest";
    json!({"kind": kind, "apiVersion": version.text(), "image": repository}).to_string().into_bytes()
}

/// Reads the answer to a request of this version.
///
/// # Errors
/// It is none.
pub fn parse_response(version: ApiVersion, text: &[u8]) -> Result<Response, BadResponse> {
    let json: Value = serde_json::from_slice(text).map_err(|_| BadResponse::NotJson)?;
    if !json.is_object() {
        return Err(BadResponse::NotJson);
    }
    if json["kind"] != "CredentialProviderResponse" {
        return Err(BadResponse::Kind);
    }
    if json["apiVersion"] != version.text() {
        return Err(BadResponse::ApiVersion(version));
    }
    let key_type = match json["cacheKeyType"].as_str() {
        Some("Image") => CacheKeyType::Image,
        Some("Registry") => CacheKeyType::Registry,
        Some("Global") => CacheKeyType::Global,
        _ => return Err(BadResponse::KeyType),
    };
    let cache = match &json["cacheDuration"] {
        Value::Null => None,
        Value::String(text) => Some(duration(text).ok_or(BadResponse::Duration)?),
        _ => return Err(BadResponse::Duration),
    };
    let auth = match &json["auth"] {
        Value::Null => Arc::default(),
        Value::Object(auth) => {
            let entry = |(key, entry): (&String, &Value)| Some((key.clone(), credential(entry)?));
            auth.iter().map(entry).collect::<Option<Auth>>().ok_or(BadResponse::Auth)?
        }
        _ => return Err(BadResponse::Auth),
    };
    Ok(Response { key_type, cache, auth })
}

/// What lies in the past is as if it were over now.
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

/// The answers of one plugin. Moments are nanoseconds of any clock that does not step back.
///
/// It has no timer: what is out of date is dropped when it is asked for, and all of it at the first use after each
/// quarter of an hour.
#[derive(Debug, Default)]
pub struct Cache {
    entries: HashMap<Key, (i64, Auth)>,
    purged: i64,
}

impl Cache {
    /// What is known for a repository: of it, else of its registry, else of all.
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

    /// Keeps an answer about a repository for as long as it says, else for `default`. Zero: it is not kept.
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
        if now.saturating_sub(self.purged) >= PURGE_EACH {
            self.entries.retain(|_, (until, _)| now < *until);
            self.purged = now;
        }
    }
}

#[cfg(test)]
mod tests;
