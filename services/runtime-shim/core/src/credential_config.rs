//! The credential provider plugins of a node: `CredentialProviderConfig` (runtime-and-resources.md §6.4).
//!
//! Values of `env` may be credentials: no message and no `Debug` form shows them.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use keelson_kube_model::parse_go_duration;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::keyring::{matches, sha256_hex, without_scheme};

/// The kind of the configuration.
const KIND: &str = "CredentialProviderConfig";
/// The API versions of the configuration; all have the same fields.
const API_VERSIONS: [&str; 3] =
    ["kubelet.config.k8s.io/v1", "kubelet.config.k8s.io/v1beta1", "kubelet.config.k8s.io/v1alpha1"];
/// Allowed values of `cacheType`.
const CACHE_TYPES: [&str; 2] = ["ServiceAccount", "Token"];

/// One configuration file as init hands it over. Its syntax is valid; nothing else has been checked.
#[derive(Clone, Deserialize)]
pub struct ConfigFile {
    /// Its path, for messages.
    pub path: String,
    /// Its content.
    pub text: String,
    /// Its content as JSON.
    pub config: Value,
    /// Line of each field by its path, such as `providers[0].name`.
    #[serde(default)]
    pub lines: BTreeMap<String, u32>,
}

impl fmt::Debug for ConfigFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ConfigFile({:?}, …)", self.path)
    }
}

/// One error in the configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{location}: {field}: {message}")]
pub struct ConfigError {
    /// The file and, if known, the line.
    pub location: String,
    /// The field, such as `providers[0].name`.
    pub field: String,
    /// What is wrong and what to write instead.
    pub message: String,
}

/// The API version of requests to a plugin and of its responses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ApiVersion {
    /// `credentialprovider.kubelet.k8s.io/v1`.
    V1,
    /// `credentialprovider.kubelet.k8s.io/v1beta1`.
    V1Beta1,
    /// `credentialprovider.kubelet.k8s.io/v1alpha1`.
    V1Alpha1,
}

impl ApiVersion {
    const ALL: [Self; 3] = [Self::V1, Self::V1Beta1, Self::V1Alpha1];

    /// The version as written in configurations, requests and responses.
    pub const fn text(self) -> &'static str {
        match self {
            Self::V1 => "credentialprovider.kubelet.k8s.io/v1",
            Self::V1Beta1 => "credentialprovider.kubelet.k8s.io/v1beta1",
            Self::V1Alpha1 => "credentialprovider.kubelet.k8s.io/v1alpha1",
        }
    }
}

/// One plugin.
#[derive(Clone, PartialEq, Eq)]
pub struct Provider {
    /// The name of the plugin and of its binary.
    pub name: String,
    /// Patterns of the images that the plugin has credentials for, without scheme.
    pub match_images: Vec<String>,
    /// How long a response is cached that has no duration of its own.
    pub default_cache: Duration,
    /// The API version of its requests and responses.
    pub api_version: ApiVersion,
    /// Its arguments.
    pub args: Vec<String>,
    /// Names and values that override its environment.
    pub env: Vec<(String, String)>,
}

impl fmt::Debug for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Provider({:?}, {:?}, …)", self.name, self.match_images)
    }
}

impl Provider {
    /// Whether the plugin is for a repository (`host/path`, without tag and digest).
    pub fn matches_image(&self, repository: &str) -> bool {
        self.match_images.iter().any(|pattern| matches(pattern, repository))
    }
}

/// A valid configuration.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CredentialProviderConfig {
    /// The plugins, in the order of the files.
    pub providers: Vec<Provider>,
    /// Names of the plugins that are not used: they require a service account (`tokenAttributes.requireServiceAccount`),
    /// which no pod has without an API server.
    pub skipped: Vec<String>,
    /// `sha256:` and 64 digits over the files' lengths (8 bytes, the highest first) and texts.
    pub hash: String,
}

/// Validates the files as one configuration, in this order.
///
/// # Errors
/// All errors: unknown, missing and invalid fields, and duplicate names.
pub fn validate(files: &[ConfigFile]) -> Result<CredentialProviderConfig, Vec<ConfigError>> {
    let mut errors = Vec::new();
    let mut config = CredentialProviderConfig { hash: hash(files), ..CredentialProviderConfig::default() };
    let mut names: BTreeMap<String, String> = BTreeMap::new();
    for file in files {
        let mut validator = Validator { file, errors: &mut errors };
        for (at, map) in validator.providers() {
            let field = format!("{at}.name");
            let location = file.location(&field);
            let Some((provider, requires_service_account)) = validator.provider(map, &at) else { continue };
            if let Some(first) = names.insert(provider.name.clone(), location) {
                validator.error(&field, format!("{:?} is already used ({first})", provider.name));
            }
            if requires_service_account {
                config.skipped.push(provider.name);
            } else {
                config.providers.push(provider);
            }
        }
    }
    if names.is_empty() && errors.is_empty() {
        let location = files.first().map(|file| file.path.clone()).unwrap_or_default();
        let message = "there must be at least one provider".to_owned();
        errors.push(ConfigError { location, field: "providers".into(), message });
    }
    if errors.is_empty() { Ok(config) } else { Err(errors) }
}

fn hash(files: &[ConfigFile]) -> String {
    let parts = files.iter().flat_map(|file| {
        let length = (file.text.len() as u64).to_be_bytes();
        length.into_iter().chain(file.text.bytes())
    });
    format!("sha256:{}", sha256_hex(&parts.collect::<Vec<u8>>()))
}

impl ConfigFile {
    /// The file and line of a field. For a missing field, the first line of the enclosing map.
    fn location(&self, field: &str) -> String {
        let parent = field.rfind('.').map_or("", |dot| &field[..=dot]);
        let within = || {
            let below = self.lines.iter().filter(|(path, _)| !parent.is_empty() && path.starts_with(parent));
            below.map(|(_, line)| line).min()
        };
        match self.lines.get(field).or_else(within) {
            Some(line) => format!("{}:{line}", self.path),
            None => self.path.clone(),
        }
    }
}

/// Reads the fields of a file and collects the errors.
struct Validator<'a> {
    file: &'a ConfigFile,
    errors: &'a mut Vec<ConfigError>,
}

/// The value of a field; `null` counts as missing, as in Kubernetes.
fn get<'a>(map: &'a Map<String, Value>, name: &str) -> Option<&'a Value> {
    map.get(name).filter(|value| !value.is_null())
}

impl<'a> Validator<'a> {
    fn error(&mut self, field: &str, message: impl Into<String>) {
        let (location, field) = (self.file.location(field), field.to_owned());
        self.errors.push(ConfigError { location, field, message: message.into() });
    }

    /// The entries of `providers` with their paths.
    fn providers(&mut self) -> Vec<(String, &'a Map<String, Value>)> {
        let Some(root) = self.file.config.as_object() else {
            self.error("kind", format!("this is not a {KIND}"));
            return Vec::new();
        };
        let text = |name| get(root, name).and_then(Value::as_str).unwrap_or_default();
        if text("kind") != KIND {
            self.error("kind", format!("this must be {KIND}"));
            return Vec::new();
        }
        if !API_VERSIONS.contains(&text("apiVersion")) {
            self.error("apiVersion", format!("this must be one of: {}", API_VERSIONS.join(", ")));
        }
        self.reject_unknown_fields(root, "", &["apiVersion", "kind", "providers"]);
        self.objects(root, "", "providers")
    }

    /// One provider, and whether it requires a service account; `None` if a required field is not valid.
    fn provider(&mut self, map: &Map<String, Value>, at: &str) -> Option<(Provider, bool)> {
        let known =
            ["name", "matchImages", "defaultCacheDuration", "apiVersion", "args", "env", "tokenAttributes"];
        self.reject_unknown_fields(map, at, &known);
        let name = self.name(map, at);
        let api_version = self.api_version(map, at);
        let match_images = self.match_images(map, at);
        let default_cache = self.default_cache(map, at);
        let args = self.string_list(map, at, "args");
        let env = self.env(map, at);
        let requires_service_account = self.requires_service_account(map, at, api_version);
        let (name, api_version, default_cache) = (name?, api_version?, default_cache?);
        let provider = Provider { name, match_images, default_cache, api_version, args, env };
        Some((provider, requires_service_account))
    }

    fn name(&mut self, map: &Map<String, Value>, at: &str) -> Option<String> {
        let name = self.required(map, at, "name")?;
        if name.contains(['/', ' ', '\0']) || name == "." || name == ".." {
            let message = "this must be the name of a file in the plugin folder, without '/' and spaces";
            self.error(&format!("{at}.name"), format!("{name:?}: {message}"));
        }
        Some(name)
    }

    fn api_version(&mut self, map: &Map<String, Value>, at: &str) -> Option<ApiVersion> {
        let text = self.required(map, at, "apiVersion")?;
        let found = ApiVersion::ALL.into_iter().find(|version| version.text() == text);
        if found.is_none() {
            let all = ApiVersion::ALL.map(ApiVersion::text).join(", ");
            self.error(&format!("{at}.apiVersion"), format!("{text:?}: this must be one of: {all}"));
        }
        found
    }

    fn match_images(&mut self, map: &Map<String, Value>, at: &str) -> Vec<String> {
        let list = self.string_list(map, at, "matchImages");
        let field = format!("{at}.matchImages");
        if get(map, "matchImages").is_none_or(|value| value.as_array().is_some_and(Vec::is_empty)) {
            self.error(&field, "there must be at least one pattern such as *.registry.example");
        }
        for pattern in list.iter().filter(|pattern| !is_pattern(without_scheme(pattern))) {
            let message = "this must be a host, such as *.registry.example, with or without port and path";
            self.error(&field, format!("{pattern:?}: {message}"));
        }
        list.iter().map(|pattern| without_scheme(pattern).to_owned()).collect()
    }

    fn default_cache(&mut self, map: &Map<String, Value>, at: &str) -> Option<Duration> {
        let text = self.required(map, at, "defaultCacheDuration")?;
        let duration = parse_go_duration(&text);
        if duration.is_none() {
            let message = "this must be a duration of at least 0s, such as 12h";
            self.error(&format!("{at}.defaultCacheDuration"), format!("{text:?}: {message}"));
        }
        duration
    }

    fn env(&mut self, map: &Map<String, Value>, at: &str) -> Vec<(String, String)> {
        let mut list = Vec::new();
        for (at, entry) in self.objects(map, at, "env") {
            self.reject_unknown_fields(entry, &at, &["name", "value"]);
            let Some(name) = self.required(entry, &at, "name") else { continue };
            if name.contains(['=', '\0']) {
                self.error(&format!("{at}.name"), "the name of a variable must not contain '='");
            }
            list.push((name, self.text(entry, &at, "value").unwrap_or_default()));
        }
        list
    }

    /// Whether the plugin is used only for pods with a service account.
    fn requires_service_account(
        &mut self,
        map: &Map<String, Value>,
        at: &str,
        version: Option<ApiVersion>,
    ) -> bool {
        let Some(value) = get(map, "tokenAttributes") else { return false };
        let at = format!("{at}.tokenAttributes");
        let Some(map) = value.as_object() else {
            self.error(&at, "this must be a map");
            return false;
        };
        let (required, optional) =
            ("requiredServiceAccountAnnotationKeys", "optionalServiceAccountAnnotationKeys");
        let (audience, account) = ("serviceAccountTokenAudience", "requireServiceAccount");
        self.reject_unknown_fields(map, &at, &[audience, "cacheType", account, required, optional]);
        if version.is_some_and(|version| version != ApiVersion::V1) {
            self.error(&at, format!("this is for apiVersion {} only", ApiVersion::V1.text()));
        }
        self.required(map, &at, audience);
        if let Some(cache) = self.required(map, &at, "cacheType")
            && !CACHE_TYPES.contains(&cache.as_str())
        {
            let field = format!("{at}.cacheType");
            self.error(&field, format!("{cache:?}: this must be one of: {}", CACHE_TYPES.join(", ")));
        }
        let (must, may) = (self.string_list(map, &at, required), self.string_list(map, &at, optional));
        for key in must.iter().filter(|key| may.contains(key)) {
            self.error(&format!("{at}.{optional}"), format!("{key:?} is also in {required}"));
        }
        let field = format!("{at}.{account}");
        let needed = get(map, account).and_then(Value::as_bool);
        match needed {
            None => self.error(&field, "this must be true or false"),
            Some(false) if !must.is_empty() => {
                self.error(&field, format!("this must be true with {required}"));
            }
            Some(_) => {}
        }
        needed.unwrap_or(false)
    }

    /// Reports every field that is not one of `known` as an error.
    fn reject_unknown_fields(&mut self, map: &Map<String, Value>, at: &str, known: &[&str]) {
        for name in map.keys().filter(|name| !known.contains(&name.as_str())) {
            let message = format!("unknown field; known fields are {}", known.join(", "));
            self.error(&path(at, name), message);
        }
    }

    fn text(&mut self, map: &Map<String, Value>, at: &str, name: &str) -> Option<String> {
        let value = get(map, name)?;
        let text = value.as_str().filter(|text| !text.contains('\0'));
        if text.is_none() {
            self.error(&path(at, name), "this must be a string; put it in quotes");
        }
        text.map(ToOwned::to_owned)
    }

    /// A string that must be neither missing nor empty.
    fn required(&mut self, map: &Map<String, Value>, at: &str, name: &str) -> Option<String> {
        if get(map, name).is_none_or(|value| value.as_str() == Some("")) {
            self.error(&path(at, name), "this is required");
            return None;
        }
        self.text(map, at, name)
    }

    /// A list of strings; empty if it is missing or not valid.
    fn string_list(&mut self, map: &Map<String, Value>, at: &str, name: &str) -> Vec<String> {
        let Some(value) = get(map, name) else { return Vec::new() };
        let text = |value: &Value| value.as_str().filter(|text| !text.contains('\0')).map(ToOwned::to_owned);
        let list = value.as_array().and_then(|list| list.iter().map(text).collect::<Option<Vec<_>>>());
        if list.is_none() {
            self.error(&path(at, name), "this must be a list of strings");
        }
        list.unwrap_or_default()
    }

    /// A list of maps, each with its path.
    fn objects<'m>(
        &mut self,
        map: &'m Map<String, Value>,
        at: &str,
        name: &str,
    ) -> Vec<(String, &'m Map<String, Value>)> {
        let field = path(at, name);
        let Some(value) = get(map, name) else { return Vec::new() };
        let objects = value.as_array().and_then(|list| {
            let entry = |(i, value): (usize, &'m Value)| Some((format!("{field}[{i}]"), value.as_object()?));
            list.iter().enumerate().map(entry).collect::<Option<Vec<_>>>()
        });
        if objects.is_none() {
            self.error(&field, "this must be a list of maps");
        }
        objects.unwrap_or_default()
    }
}

fn path(at: &str, name: &str) -> String {
    if at.is_empty() { name.to_owned() } else { format!("{at}.{name}") }
}

/// Whether this is a valid host, with or without port and path.
fn is_pattern(text: &str) -> bool {
    let host = text.split('/').next().unwrap_or_default();
    let port = host.rsplit_once(':').map_or("", |(_, port)| port);
    !host.is_empty()
        && !text.contains(|c: char| c.is_whitespace() || c.is_control())
        && (port.contains(']') || port.bytes().all(|b| b.is_ascii_digit()))
}

#[cfg(test)]
mod tests;
