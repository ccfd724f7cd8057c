//! The environment of a container (§3.4).
//!
//! Parity: names and values are the kubelet's; the order is ours and always the same: devices, `envFrom`, `env`,
//! services (upstream emits them in the order of a hash table).

use std::collections::BTreeMap;

use keelson_kube_model::{Container, EnvVar, EnvVarSource, KeySelector, OptionalObjectReference, Pod};

use super::fields::{FieldInputs, field_value, resource_value};
use super::inputs::{ContainerInputs, EnvSources};
use super::{ConfigError, expand};

/// Looks up ConfigMaps and Secrets in the pod's namespace. `Ok(None)` is an object that does not exist.
pub trait ObjectLookup: Sync {
    /// `data` of a ConfigMap.
    fn config_map(&self, name: &str) -> Result<Option<BTreeMap<String, String>>, String>;
    /// `data` of a Secret, decoded, with invalid UTF-8 replaced.
    fn secret(&self, name: &str) -> Result<Option<BTreeMap<String, String>>, String>;
}

/// Looks up a key in a file of a volume (`fileKeyRef`). `Ok(None)` is a file or key that does not exist.
pub trait FileLookup: Sync {
    /// The value of the key.
    fn key(&self, volume: &str, path: &str, key: &str) -> Result<Option<String>, String>;
}

/// Finds nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoObjects;

impl ObjectLookup for NoObjects {
    fn config_map(&self, _name: &str) -> Result<Option<BTreeMap<String, String>>, String> {
        Ok(None)
    }

    fn secret(&self, _name: &str) -> Result<Option<BTreeMap<String, String>>, String> {
        Ok(None)
    }
}

impl FileLookup for NoObjects {
    fn key(&self, _volume: &str, _path: &str, _key: &str) -> Result<Option<String>, String> {
        Ok(None)
    }
}

/// What the environment depends on in addition to pod and container.
#[derive(Clone, Copy)]
pub(super) struct EnvInputs<'a> {
    pub(super) sources: EnvSources<'a>,
    pub(super) fields: FieldInputs<'a>,
    /// Variables of devices, lowest in precedence.
    pub(super) devices: &'a [(String, String)],
}

/// Names of the ConfigMaps and Secrets that the container's environment refers to, without duplicates: to be fetched before
/// calling [`environment`].
pub fn referenced_objects(container: &Container) -> (Vec<String>, Vec<String>) {
    let (mut maps, mut secrets) = (Vec::new(), Vec::new());
    let add = |list: &mut Vec<String>, name: &str| {
        if !list.iter().any(|known| known == name) {
            list.push(name.to_owned());
        }
    };
    for source in &container.env_from {
        source.config_map_ref.iter().for_each(|map| add(&mut maps, &map.name));
        source.secret_ref.iter().for_each(|secret| add(&mut secrets, &secret.name));
    }
    for source in container.env.iter().filter_map(|env| env.value_from.as_ref()) {
        source.config_map_key_ref.iter().for_each(|map| add(&mut maps, &map.name));
        source.secret_key_ref.iter().for_each(|secret| add(&mut secrets, &secret.name));
    }
    (maps, secrets)
}

/// An environment under construction: order of first appearance, last value.
#[derive(Default)]
struct Ordered {
    list: Vec<(String, String)>,
}

impl Ordered {
    fn get(&self, name: &str) -> Option<&str> {
        self.list.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    fn set(&mut self, name: &str, value: String) {
        match self.list.iter_mut().find(|(known, _)| known == name) {
            Some(entry) => entry.1 = value,
            None => self.list.push((name.to_owned(), value)),
        }
    }
}

/// Builds the environment in order.
pub(super) fn build(
    pod: &Pod,
    container: &Container,
    inputs: &EnvInputs<'_>,
) -> Result<Vec<(String, String)>, ConfigError> {
    // The variables that `$(NAME)` can refer to: not those of devices.
    let mut own = Ordered::default();
    for source in &container.env_from {
        if let Some(reference) = &source.config_map_ref {
            let found = inputs.sources.objects.config_map(&reference.name);
            take_all(&mut own, &source.prefix, &whole("configmap", reference, found)?);
        }
        if let Some(reference) = &source.secret_ref {
            let found = inputs.sources.objects.secret(&reference.name);
            take_all(&mut own, &source.prefix, &whole("secret", reference, found)?);
        }
    }
    for env in &container.env {
        if let Some(value) = value_of(pod, container, env, &own, inputs)? {
            own.set(&env.name, value);
        }
    }
    let mut all = Ordered { list: inputs.devices.to_vec() };
    for (name, value) in own.list {
        all.set(&name, value);
    }
    for (name, value) in inputs.sources.services {
        if all.get(name).is_none() {
            all.set(name, value.clone());
        }
    }
    Ok(all.list)
}

type Found = Result<Option<BTreeMap<String, String>>, String>;

/// All keys of an object. A missing optional object is empty; an unreadable one is an error even if optional.
fn whole(
    kind: &'static str,
    reference: &OptionalObjectReference,
    found: Found,
) -> Result<BTreeMap<String, String>, ConfigError> {
    let name = reference.name.clone();
    match found {
        Ok(Some(data)) => Ok(data),
        Ok(None) if reference.optional == Some(true) => Ok(BTreeMap::new()),
        Ok(None) => Err(ConfigError::ObjectMissing { kind, name }),
        Err(message) => Err(ConfigError::ObjectUnreadable { kind, name, message }),
    }
}

fn take_all(own: &mut Ordered, prefix: &str, data: &BTreeMap<String, String>) {
    for (key, value) in data {
        own.set(&format!("{prefix}{key}"), value.clone());
    }
}

/// The value of one entry of `env`; `None` if an optional source has none.
fn value_of(
    pod: &Pod,
    container: &Container,
    env: &EnvVar,
    own: &Ordered,
    inputs: &EnvInputs<'_>,
) -> Result<Option<String>, ConfigError> {
    let Some(source) = &env.value_from else {
        let lookup = |name: &str| {
            own.get(name).or_else(|| inputs.sources.services.get(name).map(String::as_str)).map(str::to_owned)
        };
        return Ok(Some(expand(&env.value, lookup)));
    };
    from_source(pod, container, env, source, inputs)
}

fn from_source(
    pod: &Pod,
    container: &Container,
    env: &EnvVar,
    source: &EnvVarSource,
    inputs: &EnvInputs<'_>,
) -> Result<Option<String>, ConfigError> {
    if let Some(field) = &source.field_ref {
        let unsupported =
            || ConfigError::FieldPath { variable: env.name.clone(), path: field.field_path.clone() };
        return field_value(pod, &field.field_path, &inputs.fields).map(Some).ok_or_else(unsupported);
    }
    if let Some(resource) = &source.resource_field_ref {
        return resource_value(pod, container, &env.name, resource, &inputs.fields).map(Some);
    }
    if let Some(key) = &source.config_map_key_ref {
        let found = inputs.sources.objects.config_map(&key.name);
        return one_key(("configmap", "ConfigMap"), &pod.metadata.namespace, key, found);
    }
    if let Some(key) = &source.secret_key_ref {
        let found = inputs.sources.objects.secret(&key.name);
        return one_key(("secret", "Secret"), &pod.metadata.namespace, key, found);
    }
    let Some(file) = &source.file_key_ref else { return Ok(Some(String::new())) };
    let (volume, path, key) = (file.volume_name.clone(), file.path.clone(), file.key.clone());
    match inputs.sources.files.key(&volume, &path, &key) {
        Ok(Some(value)) => Ok(Some(value)),
        Ok(None) if file.optional == Some(true) => Ok(None),
        Ok(None) => Err(ConfigError::FileKeyMissing { volume, path, key }),
        Err(message) => Err(ConfigError::FileUnreadable { volume, path, message }),
    }
}

fn one_key(
    (kind, title): (&'static str, &'static str),
    namespace: &str,
    key: &KeySelector,
    found: Found,
) -> Result<Option<String>, ConfigError> {
    let reference = OptionalObjectReference { name: key.name.clone(), optional: key.optional };
    let data = whole(kind, &reference, found)?;
    match data.get(&key.key) {
        Some(value) => Ok(Some(value.clone())),
        None if key.optional == Some(true) => Ok(None),
        None => Err(ConfigError::KeyMissing {
            kind: title,
            namespace: namespace.to_owned(),
            name: key.name.clone(),
            key: key.key.clone(),
        }),
    }
}

/// Volume, path and key of each file value that the container's environment refers to, without duplicates: to be read before
/// calling [`environment`].
pub fn referenced_files(container: &Container) -> Vec<(String, String, String)> {
    let mut found: Vec<(String, String, String)> = Vec::new();
    let sources = container.env.iter().filter_map(|env| env.value_from.as_ref());
    for file in sources.filter_map(|source| source.file_key_ref.as_ref()) {
        let wanted = (file.volume_name.clone(), file.path.clone(), file.key.clone());
        if !found.contains(&wanted) {
            found.push(wanted);
        }
    }
    found
}

/// The environment of a container, as in [`super::container_plan`].
pub fn environment(
    pod: &Pod,
    container: &Container,
    inputs: &ContainerInputs<'_>,
) -> Result<Vec<(String, String)>, ConfigError> {
    let inputs = EnvInputs {
        sources: inputs.env,
        fields: FieldInputs { pod_ips: inputs.pod.ips, node: inputs.node },
        devices: &inputs.assigned.envs,
    };
    build(pod, container, &inputs)
}

#[cfg(test)]
mod tests;
