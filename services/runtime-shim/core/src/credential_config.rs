//! Which credential provider plugins a node has: `CredentialProviderConfig` (runtime-and-resources.md §6.4).
//!
//! Values of `env` may be credentials: no message and no `Debug` form shows one.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use keelson_kube_model::parse_go_duration;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::keyring::{hex, matches, without_scheme};

/// The kind of the configuration.
const KIND: &str = "CredentialProviderConfig";
/// Its versions, which hold the same fields.
const API_VERSIONS: [&str; 3] =
    ["kubelet.config.k8s.io/v1", "kubelet.config.k8s.io/v1beta1", "kubelet.config.k8s.io/v1alpha1"];
/// Values of `cacheType`.
const CACHE_TYPES: [&str; 2] = ["ServiceAccount", "Token"];

/// One configuration file as init hands it over: its syntax is good, and nothing else of it is known.
#[derive(Clone, Deserialize)]
pub struct ConfigFile {
    /// Its path, for messages.
    pub path: String,
    /// What stands in it.
    pub text: String,
    /// The same as JSON.
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

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {field}: {wrong}")]
pub struct Problem {
    /// File and, where it is known, line.
    pub place: String,
    /// The field, such as `providers[0].name`.
    pub field: String,
    /// What is wrong with it and what to write instead.
    pub wrong: String,
}

/// The version in which a plugin is asked and answers.
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

    /// As it stands in configurations, requests and responses.
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
    /// Its name and that of its binary.
    pub name: String,
    /// Patterns of the images that it is asked about, without scheme.
    pub match_images: Vec<String>,
    /// How long an answer is kept that does not say so itself.
    pub default_cache: Duration,
    /// How it is spoken to.
    pub api_version: ApiVersion,
    /// Its arguments.
    pub args: Vec<String>,
    /// Names and values that go over its environment.
    pub env: Vec<(String, String)>,
}

impl fmt::Debug for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Provider({:?}, {:?}, …)", self.name, self.match_images)
    }
}

impl Provider {
    /// Whether it is asked about a repository (`host/path`, without tag and digest).
    pub fn is_for(&self, repository: &str) -> bool {
        self.match_images.iter().any(|pattern| matches(pattern, repository))
    }
}

/// A good configuration.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Configured {
    /// The plugins, in the order of the files.
    pub providers: Vec<Provider>,
    /// Names of those that are not used: they are asked only for pods with a service account
    /// (`tokenAttributes.requireServiceAccount`), which no pod has without an API server.
    pub left_out: Vec<String>,
    /// `sha256:` and 64 digits over the files' lengths (8 bytes, the highest first) and texts.
    pub hash: String,
}

/// Reads the files as one configuration, in this order.
///
/// # Errors
/// Everything that is wrong: a field that is not known, is missing or does not do, a name that is there twice.
pub fn read(files: &[ConfigFile]) -> Result<Configured, Vec<Problem>> {
    let mut problems = Vec::new();
    let mut configured = Configured { hash: hash(files), ..Configured::default() };
    let mut names: BTreeMap<String, String> = BTreeMap::new();
    for file in files {
        let mut reader = Reader { file, problems: &mut problems };
        for (at, map) in reader.providers() {
            let field = format!("{at}.name");
            let place = file.place(&field);
            let Some((provider, needs_account)) = reader.provider(map, &at) else { continue };
            if let Some(first) = names.insert(provider.name.clone(), place) {
                reader.wrong(&field, format!("{:?} is there already ({first})", provider.name));
            }
            if needs_account {
                configured.left_out.push(provider.name);
            } else {
                configured.providers.push(provider);
            }
        }
    }
    if names.is_empty() && problems.is_empty() {
        let place = files.first().map(|file| file.path.clone()).unwrap_or_default();
        let wrong = "there must be at least one provider".to_owned();
        problems.push(Problem { place, field: "providers".into(), wrong });
    }
    if problems.is_empty() { Ok(configured) } else { Err(problems) }
}

fn hash(files: &[ConfigFile]) -> String {
    let parts = files.iter().flat_map(|file| {
        let length = (file.text.len() as u64).to_be_bytes();
        length.into_iter().chain(file.text.bytes())
    });
    format!("sha256:{}", hex(&parts.collect::<Vec<u8>>()))
}

impl ConfigFile {
    /// The file and the line of a field; of one that is missing, the first line of what it should be in.
    fn place(&self, field: &str) -> String {
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

/// Takes fields out of a file and collects what is wrong with them.
struct Reader<'a> {
    file: &'a ConfigFile,
    problems: &'a mut Vec<Problem>,
}

/// The value of a field; `null` counts as absent, as in Kubernetes.
fn get<'a>(map: &'a Map<String, Value>, name: &str) -> Option<&'a Value> {
    map.get(name).filter(|value| !value.is_null())
}

impl<'a> Reader<'a> {
    fn wrong(&mut self, field: &str, wrong: impl Into<String>) {
        let (place, field) = (self.file.place(field), field.to_owned());
        self.problems.push(Problem { place, field, wrong: wrong.into() });
    }

    /// The entries of `providers` with their paths.
    fn providers(&mut self) -> Vec<(String, &'a Map<String, Value>)> {
        let Some(root) = self.file.config.as_object() else {
            self.wrong("kind", format!("this is no {KIND}"));
            return Vec::new();
        };
        let text = |name| get(root, name).and_then(Value::as_str).unwrap_or_default();
        if text("kind") != KIND {
            self.wrong("kind", format!("this must be {KIND}"));
            return Vec::new();
        }
        if !API_VERSIONS.contains(&text("apiVersion")) {
            self.wrong("apiVersion", format!("this must be one of: {}", API_VERSIONS.join(", ")));
        }
        self.only(root, "", &["apiVersion", "kind", "providers"]);
        self.objects(root, "", "providers")
    }

    /// One provider, and whether it is of use only for pods with a service account; `None` when a part of it cannot be read.
    fn provider(&mut self, map: &Map<String, Value>, at: &str) -> Option<(Provider, bool)> {
        let known =
            ["name", "matchImages", "defaultCacheDuration", "apiVersion", "args", "env", "tokenAttributes"];
        self.only(map, at, &known);
        let name = self.name(map, at);
        let api_version = self.api_version(map, at);
        let match_images = self.match_images(map, at);
        let default_cache = self.default_cache(map, at);
        let args = self.texts(map, at, "args");
        let env = self.env(map, at);
        let needs_account = self.needs_account(map, at, api_version);
        let (name, api_version, default_cache) = (name?, api_version?, default_cache?);
        let provider = Provider { name, match_images, default_cache, api_version, args, env };
        Some((provider, needs_account))
    }

    fn name(&mut self, map: &Map<String, Value>, at: &str) -> Option<String> {
        let name = self.required(map, at, "name")?;
        if name.contains(['/', ' ', '\0']) || name == "." || name == ".." {
            let wrong = "this must be the name of a file in the folder of plugins, without '/' and spaces";
            self.wrong(&format!("{at}.name"), format!("{name:?}: {wrong}"));
        }
        Some(name)
    }

    fn api_version(&mut self, map: &Map<String, Value>, at: &str) -> Option<ApiVersion> {
        let text = self.required(map, at, "apiVersion")?;
        let found = ApiVersion::ALL.into_iter().find(|version| version.text() == text);
        if found.is_none() {
            let all = ApiVersion::ALL.map(ApiVersion::text).join(", ");
            self.wrong(&format!("{at}.apiVersion"), format!("{text:?}: this must be one of: {all}"));
        }
        found
    }

    fn match_images(&mut self, map: &Map<String, Value>, at: &str) -> Vec<String> {
        let list = self.texts(map, at, "matchImages");
        let field = format!("{at}.matchImages");
        if get(map, "matchImages").is_none_or(|value| value.as_array().is_some_and(Vec::is_empty)) {
            self.wrong(&field, "there must be at least one pattern such as *.registry.example");
        }
        for pattern in list.iter().filter(|pattern| !is_pattern(without_scheme(pattern))) {
            let wrong = "this must be a host, such as *.registry.example, with or without port and path";
            self.wrong(&field, format!("{pattern:?}: {wrong}"));
        }
        list.iter().map(|pattern| without_scheme(pattern).to_owned()).collect()
    }

    fn default_cache(&mut self, map: &Map<String, Value>, at: &str) -> Option<Duration> {
        let text = self.required(map, at, "defaultCacheDuration")?;
        let duration = parse_go_duration(&text);
        if duration.is_none() {
            let wrong = "this must be a duration from 0s on, such as 12h";
            self.wrong(&format!("{at}.defaultCacheDuration"), format!("{text:?}: {wrong}"));
        }
        duration
    }

    fn env(&mut self, map: &Map<String, Value>, at: &str) -> Vec<(String, String)> {
        let mut list = Vec::new();
        for (at, entry) in self.objects(map, at, "env") {
            self.only(entry, &at, &["name", "value"]);
            let Some(name) = self.required(entry, &at, "name") else { continue };
            if name.contains(['=', '\0']) {
                self.wrong(&format!("{at}.name"), "a variable's name has no '='");
            }
            list.push((name, self.text(entry, &at, "value").unwrap_or_default()));
        }
        list
    }

    /// Whether the plugin is asked only for pods with a service account.
    fn needs_account(&mut self, map: &Map<String, Value>, at: &str, version: Option<ApiVersion>) -> bool {
        let Some(value) = get(map, "tokenAttributes") else { return false };
        let at = format!("{at}.tokenAttributes");
        let Some(map) = value.as_object() else {
            self.wrong(&at, "this must be a map");
            return false;
        };
        let (required, optional) =
            ("requiredServiceAccountAnnotationKeys", "optionalServiceAccountAnnotationKeys");
        let (audience, account) = ("serviceAccountTokenAudience", "requireServiceAccount");
        self.only(map, &at, &[audience, "cacheType", account, required, optional]);
        if version.is_some_and(|version| version != ApiVersion::V1) {
            self.wrong(&at, format!("this is for apiVersion {} only", ApiVersion::V1.text()));
        }
        self.required(map, &at, audience);
        if let Some(cache) = self.required(map, &at, "cacheType")
            && !CACHE_TYPES.contains(&cache.as_str())
        {
            let field = format!("{at}.cacheType");
            self.wrong(&field, format!("{cache:?}: this must be one of: {}", CACHE_TYPES.join(", ")));
        }
        let (must, may) = (self.texts(map, &at, required), self.texts(map, &at, optional));
        for key in must.iter().filter(|key| may.contains(key)) {
            self.wrong(&format!("{at}.{optional}"), format!("{key:?} stands in {required} as well"));
        }
        let field = format!("{at}.{account}");
        let needed = get(map, account).and_then(Value::as_bool);
        match needed {
            None => self.wrong(&field, "this must be true or false"),
            Some(false) if !must.is_empty() => {
                self.wrong(&field, format!("this must be true with {required}"));
            }
            Some(_) => {}
        }
        needed.unwrap_or(false)
    }

    /// Refuses every field that is not one of `known`.
    fn only(&mut self, map: &Map<String, Value>, at: &str, known: &[&str]) {
        for name in map.keys().filter(|name| !known.contains(&name.as_str())) {
            let wrong = format!("there is no such field; there are {}", known.join(", "));
            self.wrong(&path(at, name), wrong);
        }
    }

    fn text(&mut self, map: &Map<String, Value>, at: &str, name: &str) -> Option<String> {
        let value = get(map, name)?;
        let text = value.as_str().filter(|text| !text.contains('\0'));
        if text.is_none() {
            self.wrong(&path(at, name), "this must be text; put it in quotes");
        }
        text.map(ToOwned::to_owned)
    }

    /// A text that may be neither missing nor empty.
    fn required(&mut self, map: &Map<String, Value>, at: &str, name: &str) -> Option<String> {
        if get(map, name).is_none_or(|value| value.as_str() == Some("")) {
            self.wrong(&path(at, name), "this is required");
            return None;
        }
        self.text(map, at, name)
    }

    /// A list of texts; empty where it is missing or something is wrong with it.
    fn texts(&mut self, map: &Map<String, Value>, at: &str, name: &str) -> Vec<String> {
        let Some(value) = get(map, name) else { return Vec::new() };
        let text = |value: &Value| value.as_str().filter(|text| !text.contains('\0')).map(ToOwned::to_owned);
        let list = value.as_array().and_then(|list| list.iter().map(text).collect::<Option<Vec<_>>>());
        if list.is_none() {
            self.wrong(&path(at, name), "this must be a list of texts");
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
            self.wrong(&field, "this must be a list of maps");
        }
        objects.unwrap_or_default()
    }
}

fn path(at: &str, name: &str) -> String {
    if at.is_empty() { name.to_owned() } else { format!("{at}.{name}") }
}

/// Whether this can be a host with or without port and path.
fn is_pattern(text: &str) -> bool {
    let host = text.split('/').next().unwrap_or_default();
    let port = host.rsplit_once(':').map_or("", |(_, port)| port);
    !host.is_empty()
        && !text.contains(|c: char| c.is_whitespace() || c.is_control())
        && (port.contains(']') || port.bytes().all(|b| b.is_ascii_digit()))
}

#[cfg(test)]
mod tests;
